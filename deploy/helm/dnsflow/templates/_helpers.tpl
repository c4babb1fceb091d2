{{/* The labels of every object but for hooks. */}}
{{- define "dnsflow.labels" -}}
app.kubernetes.io/name: dnsflow
app.kubernetes.io/part-of: dnsflow
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{/* The same for hooks, whose Pods no DaemonSet may take for its own. */}}
{{- define "dnsflow.hookLabels" -}}
app.kubernetes.io/name: dnsflow-hook
app.kubernetes.io/part-of: dnsflow
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "dnsflow.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end }}
{{- end }}
{{- end }}

{{/* The options of the agent, those of the values before those of the chart. */}}
{{- define "dnsflow.options" -}}
{{- $options := dict
  "DNSFLOW_LOG_FORMAT" "json"
  "DNSFLOW_LISTEN" "127.0.0.1:9473"
  "DNSFLOW_DNS_SERVICE" "kube-system/k8s-app=kube-dns"
  "DNSFLOW_STATE_DIR" "/var/lib/dnsflow"
  "DNSFLOW_PIN_DIR" "/bpf" -}}
{{- if .Values.openshift -}}
{{- $_ := set $options "DNSFLOW_DNS_SERVICE" "openshift-dns/dns-default" -}}
{{- $_ := set $options "DNSFLOW_CLUSTER_NETWORKS" "172.30.0.0/16" -}}
{{- end -}}
{{- if .Values.podMonitor.enabled -}}
{{- $_ := set $options "DNSFLOW_LISTEN" "0.0.0.0:9473" -}}
{{- end -}}
{{- range $name, $value := .Values.options -}}
{{- /* Helm reads numbers as floating point. */ -}}
{{- $_ := set $options $name (kindIs "float64" $value | ternary (printf "%.0f" $value) (toString $value)) -}}
{{- end -}}
{{- range $name, $value := $options }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* The port of DNSFLOW_LISTEN. */}}
{{- define "dnsflow.port" -}}
{{- $options := include "dnsflow.options" . | fromYaml -}}
{{ regexFind "[0-9]+$" $options.DNSFLOW_LISTEN }}
{{- end }}

{{/* The node's directories, for whatever runs there. */}}
{{- define "dnsflow.pod" -}}
serviceAccountName: dnsflow
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
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
terminationGracePeriodSeconds: 10
volumes:
  # Open vSwitch's database and the bridge's socket, and OVN's databases. Created where it is missing, as it is after a
  # reboot.
  - name: openvswitch
    hostPath:
      path: /var/run/openvswitch
      type: DirectoryOrCreate
  # The names behind the open addresses, for the next agent on this node.
  - name: state
    hostPath:
      path: /var/lib/dnsflow
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
{{- end }}

{{/* What every container on a node has. */}}
{{- define "dnsflow.container" -}}
image: {{ include "dnsflow.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [dnsflow]
envFrom:
  - configMapRef:
      name: dnsflow-options
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
    mountPath: /var/lib/dnsflow
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
{{- end }}
