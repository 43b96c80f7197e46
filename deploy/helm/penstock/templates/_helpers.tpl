{{- define "penstock.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "penstock.fullname" -}}
{{- $name := include "penstock.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ include "penstock.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "penstock.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{/* The claim of the models; empty for a volume that is emptied with the pod. */}}
{{- define "penstock.claim" -}}
{{- if .Values.persistence.enabled -}}
{{- default (include "penstock.fullname" .) .Values.persistence.existingClaim -}}
{{- end -}}
{{- end -}}

{{/* The security context of all containers. */}}
{{- define "penstock.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The security context of all pods, with the user of the image. */}}
{{- define "penstock.user" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# A large volume is not walked at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* The endpoint of a monitor of the Prometheus operator. */}}
{{- define "penstock.endpoint" -}}
port: http
path: /metrics
interval: {{ .interval }}
{{- with .bearerToken }}
{{- if .existingSecret }}
authorization:
  type: Bearer
  credentials:
    name: {{ .existingSecret }}
    key: {{ required "bearerToken.key is the key of bearerToken.existingSecret" .key }}
{{- end }}
{{- end }}
{{- end -}}
