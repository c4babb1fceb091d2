{{/* The value of the label app.kubernetes.io/name. */}}
{{- define "dnsflow.name" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* The DaemonSet's name; that of each other object begins with it. */}}
{{- define "dnsflow.fullname" -}}
{{- $name := include "dnsflow.name" . -}}
{{- $named := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{ .Values.fullnameOverride | default $named | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "dnsflow.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end }}

{{- define "dnsflow.serviceAccountName" -}}
{{- $made := ternary (include "dnsflow.fullname" .) "default" .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default $made -}}
{{- end }}

{{/* By these, the DaemonSet knows its Pods. They never change. */}}
{{- define "dnsflow.selectorLabels" -}}
app.kubernetes.io/name: {{ include "dnsflow.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dnsflow.chart" -}}
{{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The labels of an object: `own`, those of every object, `users`, `commonLabels`. The first of a name counts. */}}
{{- define "dnsflow.labelsWith" -}}
{{- $every := dict
  "app.kubernetes.io/part-of" "dnsflow"
  "app.kubernetes.io/version" (toString .context.Chart.AppVersion)
  "app.kubernetes.io/managed-by" .context.Release.Service -}}
{{- $selected := include "dnsflow.selectorLabels" .context | fromYaml -}}
{{- $common := .context.Values.commonLabels | default dict -}}
{{- toYaml (merge (dict) .own $every $selected (.users | default dict) $common) -}}
{{- end }}

{{/* The labels of every object but for hooks and Pods, with those that the values have for it. */}}
{{- define "dnsflow.labelsAnd" -}}
{{- $own := dict "helm.sh/chart" (include "dnsflow.chart" .context) -}}
{{- include "dnsflow.labelsWith" (dict "context" .context "own" $own "users" .users) -}}
{{- end }}

{{- define "dnsflow.labels" -}}
{{- include "dnsflow.labelsAnd" (dict "context" . "users" dict) -}}
{{- end }}

{{/* The same for hooks, whose Pods no DaemonSet may take for its own. */}}
{{- define "dnsflow.hookLabels" -}}
{{- $name := printf "%s-hook" (include "dnsflow.name" .) -}}
{{- $own := dict "helm.sh/chart" (include "dnsflow.chart" .) "app.kubernetes.io/name" $name -}}
{{- include "dnsflow.labelsWith" (dict "context" . "own" $own) -}}
{{- end }}

{{- define "dnsflow.image" -}}
{{- with .Values.image -}}
{{- $repository := printf "%s%s" (.registry | empty | ternary "" (printf "%s/" .registry)) .repository -}}
{{- if .digest -}}
{{ $repository }}@{{ .digest }}
{{- else -}}
{{ $repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end }}
{{- end }}
{{- end }}

{{/* The address at which the agent listens. */}}
{{- define "dnsflow.address" -}}
{{- $address := .Values.listen.address | default (ternary "0.0.0.0" "127.0.0.1" .Values.podMonitor.enabled) -}}
{{- if and .Values.podMonitor.enabled (has $address (list "127.0.0.1" "::1")) -}}
{{- $remedy := "With podMonitor.enabled, leave it empty, or take 0.0.0.0 or ::" -}}
{{- fail (printf "listen.address: Prometheus does not reach the agents at %s. %s" $address $remedy) -}}
{{- end -}}
{{ $address }}
{{- end }}

{{/* What a probe asks: from the node's network namespace. */}}
{{- define "dnsflow.probe" -}}
host: {{ contains ":" (include "dnsflow.address" .) | ternary "::1" "127.0.0.1" | quote }}
port: {{ .Values.listen.port }}
{{- end }}

{{/* The options of the agent, those of the values before those of the chart. */}}
{{- define "dnsflow.options" -}}
{{- $address := include "dnsflow.address" . -}}
{{- $host := contains ":" $address | ternary (printf "[%s]" $address) $address -}}
{{- $options := dict
  "DNSFLOW_LOG_FORMAT" "json"
  "DNSFLOW_LISTEN" (printf "%s:%d" $host (int .Values.listen.port))
  "DNSFLOW_DNS_SERVICE" "kube-system/k8s-app=kube-dns"
  "DNSFLOW_STATE_DIR" "/run/dnsflow-state"
  "DNSFLOW_PIN_DIR" "/bpf" -}}
{{- if .Values.openshift -}}
{{- $_ := set $options "DNSFLOW_DNS_SERVICE" "openshift-dns/dns-default" -}}
{{- $_ := set $options "DNSFLOW_CLUSTER_NETWORKS" "172.30.0.0/16" -}}
{{- end -}}
{{- range $name, $value := .Values.options -}}
{{- if kindIs "invalid" $value -}}
{{- /* Without the Services, the agent would ask for those of every kind of cluster, also in namespaces that are none. */ -}}
{{- $options = ternary $options (omit $options $name) (eq $name "DNSFLOW_DNS_SERVICE") -}}
{{- else if kindIs "slice" $value -}}
{{- $_ := set $options $name (join "," $value) -}}
{{- else -}}
{{- /* Helm reads numbers as floating point. */ -}}
{{- $_ := set $options $name (kindIs "float64" $value | ternary (printf "%.0f" $value) (toString $value)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $options -}}
{{- end }}

{{/* The node's directories, for whatever runs there. */}}
{{- define "dnsflow.pod" -}}
serviceAccountName: {{ include "dnsflow.serviceAccountName" . }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
# The host sides of the Pods' veths are in the node's network namespace.
hostNetwork: true
# The node's own resolver: the agent must not need the cluster's DNS to start.
dnsPolicy: Default
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
volumes:
  # Open vSwitch's database and the bridge's socket, and OVN's databases. Created where it is missing, as it is after a
  # reboot.
  - name: openvswitch
    hostPath:
      path: /var/run/openvswitch
      type: DirectoryOrCreate
  # The journal of what pods were told, for the next agent on this node. On the node's tmpfs, it lives as long as flows and
  # marks, and no disk delays an answer.
  - name: state
    hostPath:
      path: /run/dnsflow-state
      type: DirectoryOrCreate
  # The programs and their ring buffer between two agents, without the pins of other agents. systemd mounts a BPF file
  # system at /sys/fs/bpf. A reboot empties it, and the kubelet makes the directory again. On a node without that file
  # system, the Pod stays in ContainerCreating.
  - name: bpf
    hostPath:
      path: /sys/fs/bpf/dnsflow
      type: DirectoryOrCreate
  # Goes with the Pod, as the agent that answers there does.
  - name: run
    emptyDir:
      medium: Memory
      sizeLimit: 1Mi
  {{- if .Values.openshift }}
  - name: ovn-ic
    hostPath:
      path: /var/run/ovn-ic
      type: DirectoryOrCreate
  {{- end }}
  {{- with .Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* What every container on a node has. */}}
{{- define "dnsflow.container" -}}
image: {{ include "dnsflow.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [dnsflow]
envFrom:
  - configMapRef:
      name: {{ include "dnsflow.fullname" . }}-options
{{- with .Values.extraEnv }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- if .Values.restricted }}
  # Capabilities are root's: there is no way to give them to another user's container.
  runAsUser: 0
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
    add: [BPF, NET_RAW, PERFMON, NET_ADMIN, DAC_OVERRIDE]
  # The runtime's profile has to allow bpf(2) to CAP_BPF: containerd 1.7 does.
  seccompProfile:
    type: RuntimeDefault
  {{- else }}
  # Capabilities alone do not do on nodes where SELinux guards the sockets of Open vSwitch.
  privileged: true
  {{- end }}
  readOnlyRootFilesystem: true
{{- with .Values.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  # Writable, since connecting to a UNIX socket takes the right to write.
  - name: openvswitch
    mountPath: /var/run/openvswitch
  - name: state
    mountPath: /run/dnsflow-state
  # Not below /sys: in the container, that is a file system where nobody can make a directory.
  - name: bpf
    mountPath: /bpf
  # The control socket: `kubectl exec … -- dnsflow status` asks there.
  - name: run
    mountPath: /run/dnsflow
  {{- if .Values.openshift }}
  - name: ovn-ic
    mountPath: /var/run/ovn-ic
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
