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
{{- $model := mergeOverwrite (deepCopy .root.Values.modelDefaults) .model -}}
{{- with .model.resources }}{{ $_ := set $model "resources" . }}{{ end -}}
{{- $hasSeveralPods := or (gt (int $model.replicas) 1) (gt (int $model.nodes) 1) $model.autoscaling.enabled -}}
{{- if not $model.storage.accessModes -}}
{{- $_ := set $model.storage "accessModes" (list (ternary "ReadWriteMany" "ReadWriteOnce" $hasSeveralPods)) -}}
{{- end -}}
{{- if not $model.rollout -}}
{{- $isOneNodes := and (not $model.storage.existingClaim) (not (has "ReadWriteMany" $model.storage.accessModes)) -}}
{{- $_ := set $model "rollout" (ternary (dict "maxSurge" 0 "maxUnavailable" 1) (dict "maxSurge" 1 "maxUnavailable" 0) $isOneNodes) -}}
{{- end -}}
{{- $model | toJson -}}
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

{{/* Annotations of a model's pods, that Secrets made here start them anew when they change: (dict "root" $ "model" $model) */}}
{{- define "octavo.podAnnotations" -}}
{{- $annotations := deepCopy .model.podAnnotations -}}
{{- $values := list .root.Values.apiKey.value .root.Values.hfToken.value .root.Values.nodesToken.value -}}
{{- if compact $values }}{{ $_ := set $annotations "checksum/secret" ($values | toJson | sha256sum) }}{{ end -}}
{{- with $annotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* Names of the Services that routes offer, as JSON: the gateway's, or each model's */}}
{{- define "octavo.offered" -}}
{{- $names := list -}}
{{- if .Values.router.enabled }}{{ $names = list "router" }}{{ else }}{{ range .Values.models }}{{ $names = append $names .name }}{{ end }}{{ end -}}
{{- toJson $names -}}
{{- end -}}

{{/* What a route offers of a model, as JSON: (dict "root" $ "name" NAME) */}}
{{- define "octavo.paths" -}}
{{- $isPrefixed := and (gt (len .root.Values.models) 1) (not .root.Values.router.enabled) -}}
{{- $prefix := ternary (printf "/%s" .name) "" $isPrefixed -}}
{{- $paths := list -}}
{{- range .root.Values.paths }}{{ $paths = append $paths (printf "%s%s" $prefix . | trimSuffix "/" | default "/") }}{{ end -}}
{{- toJson $paths -}}
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

{{/*
A model's pod: (dict "root" $ "model" $model "name" NAME "role" ROLE). Of a group it is its "leader" or a "worker", whose flags are the
leader's but for the rank, the address and --headless.
*/}}
{{- define "octavo.pod" -}}
{{- $root := .root -}}
{{- $m := .model -}}
{{- $name := .name -}}
{{- $role := .role -}}
{{- $image := mergeOverwrite (deepCopy $root.Values.image) $m.image -}}
{{- $selector := include "octavo.selector" (dict "root" $root "model" $m) -}}
serviceAccountName: {{ include "octavo.fullname" $root }}
automountServiceAccountToken: false
enableServiceLinks: false # the variables of a Service called octavo would begin with OCTAVO_
{{- with $m.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $m.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
terminationGracePeriodSeconds: {{ add $root.Values.drain.preStopSeconds $root.Values.drain.shutdownTimeout 10 }}
securityContext:
  {{- include "octavo.podSecurity" $root | nindent 2 }}
{{- if not $role }}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- $selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- with $m.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $m.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $m.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: {{ eq $role "worker" | ternary "worker" "server" }}
    image: "{{ $image.repository }}:{{ $image.tag }}"
    imagePullPolicy: {{ $image.pullPolicy }}
    args:
      - {{ printf "--model=%s" ($m.model | default "") | quote }}
      {{- with $m.servedModelName | default (ternary $m.name "" $root.Values.router.enabled) }}
      - {{ printf "--served-model-name=%s" . | quote }}
      {{- end }}
      - --port=8000
      {{- if $m.gpus }}
      - --device=cuda # an image for CPUs would serve without
      {{- end }}
      - --engine-ready-timeout={{ int $root.Values.startupTimeout }}
      - --max-model-len={{ int $m.maxModelLen }}
      - --max-queue-len={{ int $m.maxQueueLen }}
      - --shutdown-timeout={{ int $root.Values.drain.shutdownTimeout }}
      - --log-format=json
      {{- if and (gt (len $root.Values.models) 1) (not $root.Values.router.enabled) }}
      - --root-path=/{{ $m.name }}
      {{- end }}
      {{- if $role }}
      - --pipeline-parallel-size={{ int $m.nodes }}
      - --nnodes=$(LWS_GROUP_SIZE)
      {{- end }}
      {{- if eq $role "leader" }}
      - --node-rank=0
      - --master-addr=$(POD_IP) # its name may not be known yet
      {{- else if $role }}
      - --node-rank=$(LWS_WORKER_INDEX)
      - --master-addr=$(LWS_LEADER_ADDRESS)
      - --headless
      {{- end }}
      {{- range $m.extraArgs }}
      - {{ . | quote }}
      {{- end }}
    env:
      - { name: PYTHONUNBUFFERED, value: "1" }
      {{- if eq $role "leader" }}
      - name: POD_IP
        valueFrom: { fieldRef: { fieldPath: status.podIP } }
      {{- end }}
      {{- if $role }}
      {{- include "octavo.secretEnv" (dict "root" $root "env" "OCTAVO_NODES_TOKEN" "secret" $root.Values.nodesToken) | nindent 6 }}
      {{- end }}
      {{- if ne $role "worker" }}
      {{- include "octavo.secretEnv" (dict "root" $root "env" "OCTAVO_API_KEY" "secret" $root.Values.apiKey) | nindent 6 }}
      {{- end }}
      {{- include "octavo.secretEnv" (dict "root" $root "env" "HF_TOKEN" "secret" $root.Values.hfToken) | nindent 6 }}
      {{- with $m.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- if eq $role "worker" }} # no probes: the leader notices in two seconds when a worker is gone
    lifecycle:
      preStop: # a group that is deleted drains: workers go on until the leader has ended
        exec: { command: [sleep, {{ add $root.Values.drain.preStopSeconds $root.Values.drain.shutdownTimeout 3 | quote }}] }
    {{- else }}
    ports:
      - { name: http, containerPort: 8000 }
      {{- if $role }}
      - { name: nodes, containerPort: 29501 }
      {{- end }}
    startupProbe:
      httpGet: { path: /health, port: http }
      periodSeconds: 2
      timeoutSeconds: 5
      failureThreshold: {{ div (int $root.Values.startupTimeout) 2 }}
    readinessProbe:
      httpGet: { path: /health, port: http }
      periodSeconds: 2
      timeoutSeconds: 5 # a busy server is no ill one
      failureThreshold: 3
    livenessProbe: # a server whose engine starts again is alive
      httpGet: { path: /version, port: http }
      periodSeconds: 10
      timeoutSeconds: 5
    lifecycle:
      preStop:
        exec: { command: [sleep, {{ $root.Values.drain.preStopSeconds | quote }}] }
    {{- end }}
    securityContext:
      {{- include "octavo.containerSecurity" $root | nindent 6 }}
    resources:
      {{- $resources := deepCopy $m.resources }}
      {{- if $m.gpus }}
      {{- $limits := merge (dict "nvidia.com/gpu" (int $m.gpus)) ($resources.limits | default dict) }}
      {{- $_ := set $resources "limits" $limits }}
      {{- end }}
      {{- toYaml $resources | nindent 6 }}
    volumeMounts:
      - { name: models, mountPath: /data }
      - { name: tmp, mountPath: /tmp }
      {{- if $m.gpus }}
      - { name: shm, mountPath: /dev/shm }
      {{- end }}
volumes:
  - name: models
    persistentVolumeClaim: { claimName: {{ $m.storage.existingClaim | default $name }} }
  - name: tmp
    emptyDir: {}
  {{- if $m.gpus }}
  - name: shm
    emptyDir: { medium: Memory, sizeLimit: {{ $m.shmSize }} }
  {{- end }}
{{- end -}}
