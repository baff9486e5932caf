{{/* Names and labels. Those that are about a role take a dict of root, the chart's context, and role. */}}

{{- define "pd.fullname" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "pd.name" -}}
{{- printf "%s-%s" (include "pd.fullname" .root) .role -}}
{{- end -}}

{{- define "pd.selector" -}}
app.kubernetes.io/name: pd-handoff
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "pd.commonLabels" -}}
app.kubernetes.io/part-of: pd-handoff
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "pd.labels" -}}
{{ include "pd.selector" . }}
{{ include "pd.commonLabels" .root }}
{{- end -}}

{{- define "pd.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .Chart.AppVersion $image.tag }}{{ if .Values.gpu.enabled }}-cuda{{ end }}
{{- end -}}
{{- end -}}

{{- define "pd.ticketSecret" -}}
{{- default (printf "%s-tickets" (include "pd.fullname" .)) .Values.tickets.existingSecret -}}
{{- end -}}

{{- define "pd.tlsSecret" -}}
{{- default (printf "%s-tls" (include "pd.name" .)) (index .root.Values.tls.existingSecrets .role) -}}
{{- end -}}

{{/* Port on which a role serves gRPC. */}}
{{- define "pd.grpcPort" -}}
{{- index (dict "router" 8001 "prefill" 8998 "decode" 8999) .role -}}
{{- end -}}

{{/* Whether there are prefills at all; without any decode computes prompts too. */}}
{{- define "pd.hasPrefill" -}}
{{- if or (gt (int .Values.prefill.replicas) 0) .Values.prefill.autoscaling.enabled -}}true{{- end -}}
{{- end -}}

{{/* The roles that this release has, for `range ... | fromJsonArray`. */}}
{{- define "pd.roles" -}}
{{- $roles := list "router" "decode" -}}
{{- if include "pd.hasPrefill" . -}}{{- $roles = append $roles "prefill" -}}{{- end -}}
{{- sortAlpha $roles | toJson -}}
{{- end -}}
