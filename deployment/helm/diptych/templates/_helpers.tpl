{{/* Prefix of all names: the release's, and the chart's unless the release's contains it. */}}
{{- define "diptych.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels by which a part is selected. Argument: dict root, part, and optionally entry, a worker entry's name. */}}
{{- define "diptych.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- with .entry }}
diptych/workers: {{ . }}
{{- end }}
{{- end -}}

{{/* All labels of a part's objects. */}}
{{- define "diptych.labels" -}}
{{ include "diptych.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* Labels of a part's pods: those by which it is selected, and podLabels. No versions: every upgrade would restart all.
Argument: dict root, part, podLabels, and optionally entry. */}}
{{- define "diptych.podLabels" -}}
{{ merge (include "diptych.selector" . | fromYaml) .podLabels | toYaml }}
{{- end -}}

{{/* What follows the metadata of a budget. Argument: dict root, selector. */}}
{{- define "diptych.budget" -}}
maxUnavailable: 1
{{- if semverCompare ">=1.27.0-0" .root.Capabilities.KubeVersion.Version }}
unhealthyPodEvictionPolicy: AlwaysAllow # else pods that still load would keep their node from being drained
{{- end }}
selector:
  matchLabels: {{- .selector | nindent 4 }}
{{- end -}}

{{/* An image of this project. Argument: dict root, image, a key of image.names. */}}
{{- define "diptych.image" -}}
{{- $image := .root.Values.image -}}
{{- with $image.registry }}{{ . }}/{{ end }}{{ index $image.names .image }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- end -}}

{{/* A map as JSON: `defaults`, with the values of `given` in their place, also those that are 0, false or empty, which
Sprig's merge would leave out. Maps are merged. */}}
{{- define "diptych.merged" -}}
{{- $given := .given -}}
{{- $merged := deepCopy .given -}}
{{- range $name, $value := .defaults -}}
{{- if not (hasKey $given $name) -}}
{{- $_ := set $merged $name $value -}}
{{- else if and (kindIs "map" $value) (kindIs "map" (get $given $name)) -}}
{{- $_ := set $merged $name (include "diptych.merged" (dict "defaults" $value "given" (get $given $name)) | fromJson) -}}
{{- end -}}
{{- end -}}
{{- toJson $merged -}}
{{- end -}}

{{/* The worker entries with their defaults, as JSON of a list. Fails for entries that cannot be scaled as they say. */}}
{{- define "diptych.workers" -}}
{{- $entries := list -}}
{{- $names := list -}}
{{- range .Values.workers -}}
{{- $entry := include "diptych.merged" (dict "defaults" $.Values.workerDefaults "given" .) | fromJson -}}
{{- if has $entry.name $names }}{{ fail (printf "workers: there are two entries %s" $entry.name) }}{{ end -}}
{{- $names = append $names $entry.name -}}
{{- $entries = append $entries $entry -}}
{{- end -}}
{{- range $entry := $entries -}}
{{- if and (eq (int $entry.maxSurge) 0) (eq (int $entry.maxUnavailable) 0) -}}
{{- fail (printf "workers.%s: maxSurge and maxUnavailable must not both be 0" $entry.name) -}}
{{- end -}}
{{- if $entry.autoscaling.enabled -}}
{{- $scaling := $entry.autoscaling -}}
{{- $where := printf "workers.%s.autoscaling" $entry.name -}}
{{- if not $scaling.models }}{{ fail (printf "%s.models: must list every name that the entry serves" $where) }}{{ end -}}
{{- if ge (float64 $scaling.loadingSeconds) (float64 $scaling.targetSeconds) -}}
{{- fail (printf "%s.loadingSeconds: must be below targetSeconds: a worker that loads for longer is always late" $where) -}}
{{- end -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) }}{{ fail (printf "%s.minReplicas: exceeds maxReplicas" $where) }}{{ end -}}
{{- if not $.Values.metrics.keySecret.name }}{{ fail (printf "%s: needs metrics.keySecret.name, a key that KEDA reads /metrics with" $where) }}{{ end -}}
{{- range $other := $entries -}}
{{- $served := $other.autoscaling.models -}}
{{- range default (list "emoji-xl") $other.models }}{{ $served = append $served (base .) }}{{ end -}}
{{- $settings := include "diptych.merged" (dict "defaults" $.Values.settings "given" $other.settings) | fromJson -}}
{{- $texts := append (splitList "," (default "" $settings.DIPTYCH_TEXT_MODELS)) (default "" $settings.DIPTYCH_TEXT_MODEL) | compact -}}
{{- if not (has "off" $texts) }}{{ range default (list "emoji-lm") $texts }}{{ $served = append $served (base (trim .)) }}{{ end }}{{ end -}}
{{- range $model := $scaling.models -}}
{{- if and (ne $other.name $entry.name) (has $model $served) -}}
{{- fail (printf "%s.models: %s is served by the entry %s too, which does some of its work" $where $model $other.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $entries -}}
{{- end -}}

{{/* Pod-level fields that all pods share. Argument: dict root, uid. */}}
{{- define "diptych.pod" -}}
serviceAccountName: {{ include "diptych.fullname" .root }}
automountServiceAccountToken: false
enableServiceLinks: false # variables such as DIPTYCH_PORT, which a Service would bring, are settings
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .uid }}
  runAsGroup: {{ .uid }}
  fsGroup: {{ .uid }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "diptych.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Name of the Secret with Redis's password or URL. */}}
{{- define "diptych.redisSecret" -}}
{{- default (printf "%s-redis" (include "diptych.fullname" .)) .Values.redis.existingSecret -}}
{{- end -}}

{{/* Environment of APIs and workers. Argument: dict root, settings: the part's own, as a map, extraEnv. */}}
{{- define "diptych.environment" -}}
{{- $root := .root }}
{{- if $root.Values.redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "diptych.redisSecret" $root }}, key: password}}
- name: DIPTYCH_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "diptych.fullname" $root }}-redis:6379/0
{{- else }}
- name: DIPTYCH_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ required "redis.existingSecret: must name a Secret with the key url if redis.enabled is false" $root.Values.redis.existingSecret }}, key: url}}
{{- end }}
- name: DIPTYCH_ARTIFACTS_URL
  value: {{ default "file:///var/lib/diptych/artifacts" $root.Values.artifacts.url | quote }}
{{- with $root.Values.artifacts.region }}
- name: AWS_REGION
  value: {{ . | quote }}
{{- end }}
{{- with $root.Values.artifacts.endpoint }}
- name: AWS_ENDPOINT_URL
  value: {{ . | quote }}
{{- end }}
{{- range $name, $value := include "diptych.merged" (dict "defaults" $root.Values.settings "given" .settings) | fromJson }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Argument: dict root, envFrom. */}}
{{- define "diptych.environmentFrom" -}}
{{- $secret := .root.Values.artifacts.existingSecret -}}
{{- if or $secret .envFrom }}
envFrom:
  {{- with $secret }}
  - secretRef: {name: {{ . }}}
  {{- end }}
  {{- with .envFrom }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Volume and mount of artifacts, where they are files. */}}
{{- define "diptych.artifactsVolume" -}}
{{- if not .Values.artifacts.url }}
- name: artifacts
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-artifacts" (include "diptych.fullname" .)) .Values.artifacts.storage.existingClaim }}
{{- end }}
{{- end -}}

{{/* Gives the volume of artifacts to the pods' user, if asked to. Argument: dict root, image. */}}
{{- define "diptych.artifactsOwner" -}}
{{- if and .root.Values.artifacts.storage.chown (not .root.Values.artifacts.url) }}
initContainers:
  - name: artifacts-owner
    image: {{ include "diptych.image" . }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: ["chown", "10001:10001", "/var/lib/diptych/artifacts"]
    securityContext:
      runAsNonRoot: false
      runAsUser: 0
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL], add: [CHOWN]}
    volumeMounts:
      {{- include "diptych.artifactsMount" .root | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "diptych.artifactsMount" -}}
{{- if not .Values.artifacts.url }}
- {name: artifacts, mountPath: /var/lib/diptych/artifacts}
{{- end }}
{{- end -}}
