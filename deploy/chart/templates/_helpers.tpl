{{- define "skyenv.name" -}}
{{- if contains "skyenv" .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- else -}}{{ printf "%s-skyenv" .Release.Name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- define "skyenv.selector" -}}
app.kubernetes.io/name: skyenv
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "skyenv.labels" -}}
{{ include "skyenv.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "skyenv.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end -}}

{{- define "skyenv.secret" -}}
{{ .Values.tokens.existingSecret | default (printf "%s-tokens" (include "skyenv.name" .)) }}
{{- end -}}

{{- define "skyenv.sandboxNamespace" -}}
{{ .Values.sandboxes.namespace | default .Release.Namespace }}
{{- end -}}

{{- define "skyenv.pod" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.dns }}
dnsPolicy: None
dnsConfig: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* 1.20, the oldest that is tested, has these under their beta names. */}}
{{- define "skyenv.pdbApi" -}}
{{ if .Capabilities.APIVersions.Has "policy/v1" }}policy/v1{{ else }}policy/v1beta1{{ end }}
{{- end -}}

{{- define "skyenv.hpaApi" -}}
{{ if .Capabilities.APIVersions.Has "autoscaling/v2" }}autoscaling/v2{{ else }}autoscaling/v2beta2{{ end }}
{{- end -}}
