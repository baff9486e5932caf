{{/* What values.schema.json cannot say: values that need each other, or a later Kubernetes. */}}

{{- define "pd.checks" -}}
{{- $kube := .Capabilities.KubeVersion.Version -}}
{{- with .Values -}}
{{- if .tls.enabled -}}
{{- range $role := include "pd.roles" $ | fromJsonArray -}}
{{- if not (or $.Values.tls.certManager.enabled (index $.Values.tls.existingSecrets $role)) -}}
{{- fail (printf "tls.enabled needs tls.certManager.enabled, or tls.existingSecrets.%s" $role) -}}
{{- end -}}
{{- end -}}
{{- if and .tls.certManager.enabled (not .tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.issuerRef.name is missing: which issuer is to sign?" -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int .prefill.ranks) 1) .prefill.autoscaling.enabled -}}
{{- fail "prefill.autoscaling.enabled cannot be with prefill.ranks above 1: a group of ranks is not scaled by pods" -}}
{{- end -}}
{{- if and (gt (int .prefill.ranks) 1) (semverCompare "<1.28.0-0" $kube) -}}
{{- fail (printf "prefill.ranks above 1 needs Kubernetes 1.28, which tells a pod its index; this is %s" $kube) -}}
{{- end -}}
{{- if and (eq .model.source "image") (semverCompare "<1.31.0-0" $kube) -}}
{{- fail (printf "model.source image needs Kubernetes 1.31 and its image volumes; this is %s" $kube) -}}
{{- end -}}
{{- if and (eq .model.source "pvc") (not .model.pvc.claimName) -}}
{{- fail "model.source pvc needs model.pvc.claimName" -}}
{{- end -}}
{{- if and (eq .model.source "image") (not .model.image.reference) -}}
{{- fail "model.source image needs model.image.reference" -}}
{{- end -}}
{{- if and (eq .model.source "init") (not .model.init.image) -}}
{{- fail "model.source init needs model.init.image" -}}
{{- end -}}
{{- if and .router.ingress.tlsSecret (not .router.ingress.host) -}}
{{- fail "router.ingress.tlsSecret needs router.ingress.host" -}}
{{- end -}}
{{- if gt (int .networkPolicy.dataPorts.first) (int .networkPolicy.dataPorts.last) -}}
{{- fail "networkPolicy.dataPorts.first is above networkPolicy.dataPorts.last" -}}
{{- end -}}
{{- if and .metrics.serviceMonitor.enabled (not .metrics.enabled) -}}
{{- fail "metrics.serviceMonitor.enabled needs metrics.enabled" -}}
{{- end -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- $settings := index $.Values $role -}}
{{- if gt (int $settings.autoscaling.minReplicas) (int $settings.autoscaling.maxReplicas) -}}
{{- fail (printf "%s.autoscaling.minReplicas is above %s.autoscaling.maxReplicas" $role $role) -}}
{{- end -}}
{{- range $settings.env -}}
{{- if hasPrefix "PD_" .name -}}
{{- fail (printf "%s.env: %s is an option of the process, or the chart's own; see %s.options" $role .name $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- if and (index $.Values $role).autoscaling.enabled (not $.Values.metrics.enabled) -}}
{{- fail (printf "%s.autoscaling.enabled needs metrics.enabled: it scales by them" $role) -}}
{{- end -}}
{{- if and (index $.Values $role).autoscaling.enabled (eq $.Values.autoscaling.provider "keda") (not $.Values.autoscaling.prometheusAddress) -}}
{{- fail (printf "%s.autoscaling.enabled with autoscaling.provider keda needs autoscaling.prometheusAddress" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
