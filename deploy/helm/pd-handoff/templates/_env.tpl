{{/* Variables of a process. Every option of a process is one: --page-size is PD_PAGE_SIZE. */}}

{{- define "pd.env" -}}
{{- $values := .root.Values -}}
{{- $engine := ne .role "router" -}}
{{- $options := mergeOverwrite (dict) (ternary $values.engine.options (dict) $engine) (index $values .role).options }}
- {name: PD_HOST, value: {{ $values.listenHost | quote }}}
- {name: PD_HEALTH_PORT, value: "8090"}
- {name: PD_DRAIN_TIMEOUT, value: {{ $values.drainTimeoutSeconds | quote }}}
- {name: PD_LOG_LEVEL, value: {{ $values.logs.level }}}
- {name: PD_LOG_FORMAT, value: {{ $values.logs.format }}}
{{- if $values.metrics.enabled }}
- {name: PD_METRICS_PORT, value: "9090"}
{{- end }}
{{- if $engine }}
{{- include "pd.engineEnv" (merge (dict "options" $options) .) }}
{{- else }}
{{- include "pd.routerEnv" .root }}
{{- end }}
{{- range $name, $value := $options }}
- {name: {{ printf "PD_%s" ($name | upper | replace "-" "_") }}, value: {{ include "pd.plain" $value | quote }}}
{{- end }}
{{- include "pd.securityEnv" . }}
{{- with $values.tracing }}{{ if .endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .endpoint | quote }}}
{{- with .sampler }}
- {name: OTEL_TRACES_SAMPLER, value: {{ . | quote }}}
{{- end }}
{{- with .samplerArg }}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ . | quote }}}
{{- end }}
{{- end }}{{ end }}
{{- with (index $values .role).env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A number as people write it: helm reads 65536 as a float, which prints as 65536 only below a million. */}}
{{- define "pd.plain" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{- define "pd.engineEnv" -}}
{{- $values := .root.Values }}
- {name: PD_PORT, value: {{ include "pd.grpcPort" . | quote }}}
- {name: PD_MODEL, value: {{ include "pd.modelPath" .root }}}
{{- if not (hasKey .options "advertise-interface") }}
- {name: PD_ADVERTISE_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- end }}
{{- if not (or $values.gpu.enabled (hasKey .options "threads")) }}
- {name: PD_THREADS, valueFrom: {resourceFieldRef: {containerName: {{ .role }}, resource: limits.cpu}}}
{{- end }}
{{- if not (or $values.rdma.enabled $values.gpu.enabled (hasKey .options "ucx-library")) }}
- {name: PD_UCX_LIBRARY, value: wheel}  # the newer of the image's two, without verbs
{{- end }}
{{- if and (eq .role "prefill") (gt (int $values.prefill.ranks) 1) }}
- {name: PD_DP_SIZE, value: {{ $values.prefill.ranks | quote }}}
- {name: PD_DP_RANK, valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}}
- {name: PD_BOOTSTRAP, value: {{ printf "%s-0.%s:8998" .workload (include "pd.name" .) | quote }}}
{{- end }}
{{- if not (or $values.rdma.enabled (hasKey $values.ucx "UCX_TCP_PORT_RANGE")) }}
- {name: UCX_TCP_PORT_RANGE, value: {{ printf "%d-%d" (int $values.networkPolicy.dataPorts.first) (int $values.networkPolicy.dataPorts.last) | quote }}}
{{- end }}
{{- range $name, $value := $values.ucx }}
- {name: {{ $name }}, value: {{ include "pd.plain" $value | quote }}}
{{- end }}
{{- end -}}

{{- define "pd.routerEnv" -}}
{{- if include "pd.hasPrefill" . }}
- {name: PD_PREFILL, value: {{ printf "dns+%s:8998" (include "pd.name" (dict "root" . "role" "prefill")) | quote }}}
{{- end }}
- {name: PD_DECODE, value: {{ printf "dns+%s:8999" (include "pd.name" (dict "root" . "role" "decode")) | quote }}}
- {name: PD_HTTP_PORT, value: "8000"}
- {name: PD_GRPC_PORT, value: "8001"}
{{- end -}}

{{- define "pd.certificateEnv" -}}
- {name: PD_TLS_CERT, value: /etc/pd/tls/tls.crt}
- {name: PD_TLS_KEY, value: /etc/pd/tls/tls.key}
- {name: PD_TLS_CA, value: /etc/pd/tls/ca.crt}
{{- end -}}

{{- define "pd.securityEnv" -}}
{{- $values := .root.Values -}}
{{- if $values.tls.enabled }}
{{ include "pd.certificateEnv" . }}
{{- if and (eq .role "router") (not $values.tls.clientsNeedCertificates) }}
- {name: PD_TLS_VERIFY_CLIENTS, value: "false"}
{{- end }}
{{- end }}
{{- if $values.tickets.enabled }}
- {name: PD_TICKET_KEY_FILE, value: /etc/pd/tickets/keys}
{{- end }}
{{- end -}}
