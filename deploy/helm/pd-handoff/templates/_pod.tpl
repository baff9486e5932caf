{{/* The pod of every role. Takes a dict of root, role, workload (the name of what owns the pod), and of ranks their group. */}}

{{- define "pd.pod" -}}
{{- $values := .root.Values -}}
{{- $settings := index $values .role -}}
{{- $engine := ne .role "router" -}}
metadata:
  labels:
    {{- include "pd.selector" . | nindent 4 }}
    {{- if hasKey . "group" }}
    pd-handoff/group: {{ .group | quote }}
    {{- end }}
    app.kubernetes.io/part-of: pd-handoff
    {{- with merge (dict) $settings.podLabels $values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $settings.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "pd.name" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $values.preStopSeconds $values.drainTimeoutSeconds 15 }}
  securityContext:
    {{- include "pd.podSecurity" . | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  {{- with $settings.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if and $engine $values.gpu.enabled $values.gpu.runtimeClassName }}
  runtimeClassName: {{ $values.gpu.runtimeClassName }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
  {{- with index $settings $key }}
  {{ $key }}: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- if and $engine (eq $values.model.source "init") }}
  {{- include "pd.modelInit" . | nindent 2 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "pd.image" .root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [pd-{{ .role }}]
      {{- with $settings.extraArgs }}
      args: {{ toJson . }}
      {{- end }}
      env:
        {{- include "pd.env" . | trim | nindent 8 }}
      ports:
        {{- if not $engine }}
        - {name: http, containerPort: 8000, protocol: TCP}
        {{- end }}
        - {name: grpc, containerPort: {{ include "pd.grpcPort" . }}, protocol: TCP}
        - {name: health, containerPort: 8090, protocol: TCP}
        {{- if $values.metrics.enabled }}
        - {name: metrics, containerPort: 9090, protocol: TCP}
        {{- end }}
      {{- include "pd.probes" . | nindent 6 }}
      lifecycle:
        preStop: {exec: {command: [sleep, {{ $values.preStopSeconds | quote }}]}}
      resources:
        {{- include "pd.resources" . | nindent 8 }}
      securityContext:
        {{- include "pd.containerSecurity" . | nindent 8 }}
        {{- if and $engine $values.rdma.enabled }}
          add: [IPC_LOCK]
        {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if $values.tls.enabled }}
        - {name: tls, mountPath: /etc/pd/tls, readOnly: true}
        {{- end }}
        {{- if $values.tickets.enabled }}
        - {name: tickets, mountPath: /etc/pd/tickets, readOnly: true}
        {{- end }}
        {{- if and $engine (ne $values.model.source "demo") }}
        - {name: model, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if and $engine $values.rdma.enabled }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- if $values.tls.enabled }}
    - {name: tls, secret: {secretName: {{ include "pd.tlsSecret" . }}, defaultMode: 0440}}
    {{- end }}
    {{- if $values.tickets.enabled }}
    - {name: tickets, secret: {secretName: {{ include "pd.ticketSecret" .root }}, defaultMode: 0440}}
    {{- end }}
    {{- if and $engine (ne $values.model.source "demo") }}
    {{- include "pd.modelVolume" .root | nindent 4 }}
    {{- end }}
    {{- if and $engine $values.rdma.enabled }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $values.rdma.shmSize }}}}
    {{- end }}
{{- end -}}

{{- define "pd.podSecurity" -}}
{{- if and (ne .role "router") .root.Values.rdma.enabled .root.Values.rdma.asRoot -}}
runAsNonRoot: false
runAsUser: 0
{{- else -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "pd.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "pd.resources" -}}
{{- $values := .root.Values -}}
{{- $devices := dict -}}
{{- if and (ne .role "router") $values.gpu.enabled -}}{{- $_ := set $devices $values.gpu.resource $values.gpu.count -}}{{- end -}}
{{- if and (ne .role "router") $values.rdma.enabled -}}{{- $_ := set $devices $values.rdma.resource $values.rdma.count -}}{{- end -}}
{{- $own := (index $values .role).resources -}}
{{- toYaml (merge (dict) $own (dict "limits" $devices "requests" $devices)) -}}
{{- end -}}
