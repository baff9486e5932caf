{{/* Probes by gRPC health: liveness says whether to start the process anew, "" whether it takes requests. */}}

{{- define "pd.probes" -}}
{{- /* An exec probe is a process of its own, of a third of a second of processor time. */}}
{{- $often := eq (include "pd.probeType" .root) "grpc" -}}
{{- $startupPeriod := ternary 2 10 $often -}}
startupProbe:
  {{- include "pd.probe" (dict "root" .root "service" "liveness") | nindent 2 }}
  periodSeconds: {{ $startupPeriod }}
  timeoutSeconds: 5
  failureThreshold: {{ div .root.Values.engine.startupSeconds $startupPeriod | max 1 }}
livenessProbe:
  {{- include "pd.probe" (dict "root" .root "service" "liveness") | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  {{- include "pd.probe" (dict "root" .root "service" "") | nindent 2 }}
  periodSeconds: {{ ternary 5 10 $often }}
  timeoutSeconds: 5
  failureThreshold: 1
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
