{{/* Probes by gRPC health: liveness says whether to start the process anew, "" whether it takes requests. */}}

{{- define "pd.probes" -}}
startupProbe:
  {{- include "pd.probe" (dict "root" .root "service" "liveness") | nindent 2 }}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ div .root.Values.engine.startupSeconds 2 }}
livenessProbe:
  {{- include "pd.probe" (dict "root" .root "service" "liveness") | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  {{- include "pd.probe" (dict "root" .root "service" "") | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 1
{{- end -}}

{{- define "pd.probe" -}}
{{- if eq (include "pd.probeType" .root) "grpc" -}}
grpc: {port: 8090, service: {{ .service | quote }}}
{{- else -}}
exec: {command: [pdctl, health, --service, {{ .service | quote }}, "localhost:8090"]}
{{- end -}}
{{- end -}}

{{- define "pd.probeType" -}}
{{- if ne .Values.probes.type "auto" -}}
{{ .Values.probes.type }}
{{- else -}}
{{ ternary "grpc" "exec" (semverCompare ">=1.24.0-0" .Capabilities.KubeVersion.Version) }}
{{- end -}}
{{- end -}}
