{{/* Probes by gRPC health: liveness says whether to start the process anew, "" whether it takes requests. */}}

{{- define "pd.probes" -}}
{{- /* An exec probe is a process of its own: a third of a second of processor time, and many seconds where that is short. */}}
{{- $exec := eq (include "pd.probeType" .root) "exec" -}}
{{- $startupPeriod := ternary 10 2 $exec -}}
{{- $timeout := ternary 20 5 $exec -}}
startupProbe:
  {{- include "pd.probe" (dict "root" .root "service" "liveness") | nindent 2 }}
  periodSeconds: {{ $startupPeriod }}
  timeoutSeconds: {{ $timeout }}
  failureThreshold: {{ div .root.Values.engine.startupSeconds $startupPeriod | max 1 }}
livenessProbe:
  {{- include "pd.probe" (dict "root" .root "service" "liveness") | nindent 2 }}
  periodSeconds: {{ ternary 30 10 $exec }}
  timeoutSeconds: {{ $timeout }}
  failureThreshold: 3
readinessProbe:
  {{- include "pd.probe" (dict "root" .root "service" "") | nindent 2 }}
  periodSeconds: {{ ternary 10 5 $exec }}
  timeoutSeconds: {{ $timeout }}
  failureThreshold: 3
{{- end -}}

{{- define "pd.probe" -}}
{{- if eq (include "pd.probeType" .root) "grpc" -}}
grpc: {port: 8090, service: {{ .service | quote }}}
{{- else -}}
exec: {command: [pdctl, health, --plaintext, --service, {{ .service | quote }}, "localhost:8090"]}
{{- end -}}
{{- end -}}

{{- define "pd.probeType" -}}
{{- if ne .Values.probes.type "auto" -}}
{{ .Values.probes.type }}
{{- else -}}
{{ ternary "grpc" "exec" (semverCompare ">=1.24.0-0" .Capabilities.KubeVersion.Version) }}
{{- end -}}
{{- end -}}
