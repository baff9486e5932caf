{{/* The model: a directory of the image, or a volume that is mounted at /models. */}}

{{- define "pd.modelPath" -}}
{{- if eq .Values.model.source "demo" -}}
/opt/pd/demo-model
{{- else -}}
{{ printf "/models/%s" .Values.model.subPath | trimSuffix "/" }}
{{- end -}}
{{- end -}}

{{- define "pd.modelVolume" -}}
{{- with .Values.model -}}
{{- if eq .source "pvc" -}}
- {name: model, persistentVolumeClaim: {claimName: {{ .pvc.claimName }}, readOnly: true}}
{{- else if eq .source "image" -}}
- {name: model, image: {reference: {{ .image.reference | quote }}, pullPolicy: {{ .image.pullPolicy }}}}
{{- else -}}
- {name: model, emptyDir: {sizeLimit: {{ .init.sizeLimit }}}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pd.modelInit" -}}
{{- $engine := index .root.Values .role -}}
{{- with .root.Values.model.init -}}
initContainers:
  - name: model
    image: {{ .image | quote }}
    {{- with .command }}
    command: {{ toJson . }}
    {{- end }}
    {{- with .args }}
    args: {{ toJson . }}
    {{- end }}
    {{- with .env }}
    env: {{ toJson . }}
    {{- end }}
    resources: {{ toJson $engine.resources }}
    securityContext:
      {{- include "pd.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - {name: model, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
{{- end -}}
{{- end -}}
