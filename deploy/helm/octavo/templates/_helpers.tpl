{{/* Name of the objects of a release: its name */}}
{{- define "octavo.fullnameOf" -}}
{{- if contains "octavo" . }}{{ . }}{{ else }}{{ . }}-octavo{{ end -}}
{{- end -}}

{{/* Name of this release's objects. */}}
{{- define "octavo.fullname" -}}
{{- include "octavo.fullnameOf" .Release.Name -}}
{{- end -}}

{{- define "octavo.labels" -}}
app.kubernetes.io/name: octavo
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* Of the pods of one model: (dict "root" $ "model" $model) */}}
{{- define "octavo.selector" -}}
app.kubernetes.io/name: octavo
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .model.name }}
{{- end -}}

{{/* A model with what it leaves out, as JSON: (dict "root" $ "model" $entry) */}}
{{- define "octavo.model" -}}
{{- mergeOverwrite (deepCopy .root.Values.modelDefaults) .model | toJson -}}
{{- end -}}

{{- define "octavo.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "octavo.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{/* A variable from a secret, if there is one: (dict "root" $ "env" NAME "secret" VALUES) */}}
{{- define "octavo.secretEnv" -}}
{{- if or .secret.value .secret.existingSecret }}
- name: {{ .env }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret.existingSecret | default (include "octavo.fullname" .root) }}
      key: {{ .secret.key }}
{{- end }}
{{- end -}}
