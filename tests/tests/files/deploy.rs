//! The manifests in `deploy/` say what Kubernetes understands, and fit together and to the agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::Duration,
};

use crate::manifests::{
    Grant, MONITORED, OPTIONS, OVERLAYS, Objects, RESTRICTED, command_line, directory, documents,
    kind_story, kustomization, kustomized, option_files, resources, typed,
};
use anyhow::{Context, Result, bail};
use clap::Parser as _;
use dnsflow_agent::{
    asking::rollout,
    k8s::{egress_firewall::EgressFirewall, permissions},
    options::{AgentOptions, Cli, Command},
    rights::{TO_START, WHILE_RUNNING, names},
};
use dnsflow_tests::support::{not_run, this_test};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Container, ContainerPort, Namespace, Pod, Probe, Service, Volume, VolumeMount},
    discovery::v1::EndpointSlice,
    rbac::v1::ClusterRole,
};
use rustix::thread::CapabilitySet;
use serde_json::Value;

/// The ClusterRole of people who may ask the agents.
const ASKING: &str = "dnsflow-asking";

/// The base, and each overlay where kustomize is there to build it.
fn variants() -> Result<Vec<(&'static str, Objects)>> {
    let mut variants = vec![("base", Objects::base()?)];
    variants.extend(built(OVERLAYS.iter().copied())?);
    Ok(variants)
}

/// Overlays as kustomize builds them, where it is.
fn built(overlays: impl Iterator<Item = &'static str>) -> Result<Vec<(&'static str, Objects)>> {
    let mut found = Vec::new();
    for overlay in overlays {
        match Objects::built(overlay)? {
            Some(objects) => found.push((overlay, objects)),
            None => {
                let why = format!("neither kubectl nor kustomize is here to build {overlay}");
                not_run(&this_test(), why);
            }
        }
    }
    Ok(found)
}

/// The agent's options, by its own parser.
fn options(objects: &Objects) -> Result<AgentOptions> {
    match Cli::try_parse_from(command_line(objects.container()?, objects.options()?)?)?.command {
        Command::Agent(options) => Ok(*options),
        other => bail!("not the agent: {other:?}"),
    }
}

#[test]
fn the_kustomization_names_every_manifest() -> Result<()> {
    let base = directory("base");
    let mut files = BTreeSet::new();
    for entry in base.read_dir()? {
        files.insert(entry?.file_name().to_string_lossy().into_owned());
    }
    files.remove("kustomization.yaml");
    let mut named = resources(&base)?;
    named.append(&mut option_files(&base)?);
    assert_eq!(named, files);
    Ok(())
}

#[test]
fn every_object_is_of_a_known_kind_without_unknown_fields() -> Result<()> {
    for (name, objects) in variants()? {
        assert_eq!(objects.namespaces.len(), 1, "{name}");
        assert_eq!(objects.accounts.len(), 1, "{name}");
        assert_eq!(objects.daemon_sets.len(), 1, "{name}");
    }
    Ok(())
}

#[test]
fn kustomize_builds_the_base_as_it_is_written() -> Result<()> {
    let Some(built) = Objects::built("base")? else {
        not_run(&this_test(), "neither kubectl nor kustomize is here");
        return Ok(());
    };
    let written = Objects::base()?;
    assert_eq!(built.daemon_sets, written.daemon_sets);
    assert_eq!(built.grants()?, written.grants()?);
    assert_eq!(built.options()?, written.options()?);
    Ok(())
}

/// The DaemonSet is another one with other options, so that it is rolled out.
#[test]
fn a_changed_option_is_an_edit_of_a_file_and_rolls_the_daemon_set() -> Result<()> {
    let home = std::env::temp_dir().join(format!("dnsflow-options-{}", std::process::id()));
    fs::create_dir(&home)?;
    // kustomize takes directories by relative paths only.
    let up = "../".repeat(fs::canonicalize(&home)?.components().count() - 1);
    let deploy = fs::canonicalize(directory(""))?;
    let base = format!("{up}{}/base", deploy.strip_prefix("/")?.display());
    let written = serde_json::json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [base],
        "configMapGenerator": [{
            "name": OPTIONS, "namespace": "dnsflow", "behavior": "merge", "envs": ["options.env"],
        }],
    });
    fs::write(home.join("kustomization.yaml"), written.to_string())?;
    let mut daemon_sets = BTreeSet::new();
    for option in ["DNSFLOW_MIN_TTL=30s", "DNSFLOW_MIN_TTL=90s"] {
        fs::write(home.join("options.env"), option)?;
        let Some(text) = kustomized(&home)? else {
            not_run(&this_test(), "neither kubectl nor kustomize is here");
            break;
        };
        let (name, value) = option.split_once('=').context("a value")?;
        assert!(text.contains(&format!("\n  {name}: {value}\n")), "{text}");
        assert!(text.contains("\n  DNSFLOW_LOG_FORMAT: json\n"), "{text}");
        let (_, daemon_set) = text.split_once("kind: DaemonSet").context("a DaemonSet")?;
        assert!(daemon_sets.insert(daemon_set.to_owned()), "{daemon_set}");
    }
    fs::remove_dir_all(&home)?;
    Ok(())
}

#[test]
fn the_agent_takes_its_arguments() -> Result<()> {
    for (name, objects) in variants()? {
        let options = options(&objects).context(name)?;
        assert_eq!(options.manifests, None, "{name}");
        let services: Vec<String> = options
            .dns_service
            .iter()
            .map(ToString::to_string)
            .collect();
        let expected = match name {
            "overlays/openshift" => "openshift-dns/dns-default",
            _ => "kube-system/k8s-app=kube-dns",
        };
        assert_eq!(services, [expected], "{name}");
        // `kubectl exec` hands on the environment, not the arguments.
        let words = objects.container()?.args.iter().flatten();
        assert_eq!(words.collect::<Vec<_>>(), ["agent"], "{name}");
    }
    Ok(())
}

#[test]
fn what_is_kept_for_the_next_agent_is_on_the_node() -> Result<()> {
    for (name, objects) in variants()? {
        let options = options(&objects)?;
        for directory in [options.state_dir, options.pin_dir] {
            let directory = directory.context("--state-dir and --pin-dir")?;
            let mut mounts = objects.container()?.volume_mounts.iter().flatten();
            let mount = mounts.find(|mount| directory.starts_with(&mount.mount_path));
            let mount = mount.context("a mount")?;
            let mut volumes = objects.pod()?.volumes.iter().flatten();
            let volume = volumes.find(|found| found.name == mount.name);
            let path = volume.and_then(|volume| volume.host_path.as_ref());
            let expected = match &*mount.mount_path {
                "/bpf" => "/sys/fs/bpf/dnsflow",
                mounted => mounted,
            };
            assert_eq!(path.context("a hostPath")?.path, expected, "{name}");
        }
    }
    Ok(())
}

#[test]
fn no_pod_waits_for_a_directory() -> Result<()> {
    for (name, objects) in variants()? {
        let mut on_node = 0;
        for volume in objects.pod()?.volumes.iter().flatten() {
            let Some(path) = &volume.host_path else {
                assert!(volume.empty_dir.is_some(), "{name}: {}", volume.name);
                continue;
            };
            on_node += 1;
            let kind = path.type_.as_deref();
            assert_eq!(kind, Some("DirectoryOrCreate"), "{name}: {}", path.path);
        }
        assert!(on_node > 0, "{name}");
    }
    Ok(())
}

#[test]
fn every_object_says_what_it_is_part_of() -> Result<()> {
    let files = [
        "base/namespace.yaml",
        "base/rbac.yaml",
        "base/asking.yaml",
        "base/dns.yaml",
        "base/daemonset.yaml",
        "overlays/openshift/dns.yaml",
        "overlays/openshift/scc.yaml",
        "components/podmonitor/podmonitor.yaml",
        "components/prometheusrule/prometheusrule.yaml",
    ];
    let expected = serde_json::json!({
        "app.kubernetes.io/name": "dnsflow",
        "app.kubernetes.io/part-of": "dnsflow",
        "app.kubernetes.io/version": env!("CARGO_PKG_VERSION"),
    });
    for file in files {
        for mut object in documents(&directory(file))? {
            let labels = object["metadata"]["labels"].as_object_mut();
            let labels = labels.with_context(|| file.to_owned())?;
            labels.retain(|name, _| name.starts_with("app.kubernetes.io/"));
            assert_eq!(object["metadata"]["labels"], expected, "{file}");
        }
    }
    let kustomization = kustomization(&directory("base"))?;
    let generator = &kustomization["configMapGenerator"][0];
    assert_eq!(generator["options"]["labels"], expected);
    Ok(())
}

/// The DaemonSet of `objects`, as JSON.
fn daemon_set(objects: &Objects) -> Result<Value> {
    let [daemon_set] = &objects.daemon_sets[..] else {
        bail!("not one DaemonSet");
    };
    Ok(serde_json::to_value(daemon_set)?)
}

#[test]
fn a_preflight_waits_beside_the_agents_with_their_options() -> Result<()> {
    for (name, objects) in variants()? {
        let waiting = rollout::preflight(&daemon_set(&objects)?).context(name)?;
        let waiting: DaemonSet = typed(&waiting)?;
        let agents = &objects.daemon_sets[0];
        assert_ne!(waiting.metadata.name, agents.metadata.name, "{name}");
        assert_ne!(waiting.spec.selector, agents.spec.selector, "{name}");
        let pod = waiting.spec.template.spec.context("a Pod's spec")?;
        let [container] = &pod.containers[..] else {
            bail!("{name}: not one container");
        };
        let line = command_line(container, objects.options()?)?;
        assert!(matches!(Cli::try_parse_from(&line)?.command, Command::Wait));
        // But for its work, it is the agent's.
        let agent = objects.container()?;
        assert_eq!(
            Container {
                args: agent.args.clone(),
                ports: agent.ports.clone(),
                startup_probe: agent.startup_probe.clone(),
                liveness_probe: agent.liveness_probe.clone(),
                readiness_probe: agent.readiness_probe.clone(),
                ..container.clone()
            },
            *agent,
            "{name}"
        );
        let probes = [
            &container.startup_probe,
            &container.liveness_probe,
            &container.readiness_probe,
        ];
        assert_eq!((probes, &container.ports), ([&None; 3], &None), "{name}");
    }
    Ok(())
}

/// The agent's own probes wait for the cleanup.
#[test]
fn a_cleanup_has_the_options_of_the_agent_and_changes_what_the_manifests_set() -> Result<()> {
    for (name, objects) in variants()? {
        let agent = options(&objects)?;
        let patch = rollout::cleanup_patch();
        let container = &patch["spec"]["template"]["spec"]["containers"][0];
        let cleanup = Container {
            args: serde_json::from_value(container["args"].clone())?,
            ..objects.container()?.clone()
        };
        assert_eq!(container["name"], cleanup.name, "{name}");
        let line = command_line(&cleanup, objects.options()?)?;
        let Command::Cleanup(cleanup) = Cli::try_parse_from(&line)?.command else {
            bail!("{name}: {line:?}");
        };
        assert!(cleanup.stay && !cleanup.dry_run, "{name}");
        assert_eq!(cleanup.state_dir, agent.state_dir, "{name}");
        assert_eq!(cleanup.pin_dir, agent.pin_dir, "{name}");
        assert_eq!(cleanup.listen, agent.listen, "{name}");
        assert_eq!(cleanup.openflow_socket, agent.openflow_socket, "{name}");
        // Applied again, the manifests undo every change.
        assert_sets(&daemon_set(&objects)?, &patch);
    }
    Ok(())
}

/// Whether an object sets every field of a patch. Containers are those of the same place.
fn assert_sets(object: &Value, patch: &Value) {
    match patch {
        Value::Object(fields) => {
            for (name, value) in fields {
                assert!(!object[name].is_null(), "{name}");
                assert_sets(&object[name], value);
            }
        }
        Value::Array(values) if values.iter().all(Value::is_object) => {
            for (object, value) in object.as_array().into_iter().flatten().zip(values) {
                assert_sets(object, value);
            }
        }
        _ => {}
    }
}

#[test]
fn the_agent_may_do_what_it_does_and_nothing_else() -> Result<()> {
    for (name, objects) in variants()? {
        let required = permissions::required(&options(&objects)?.dns_service);
        let required: BTreeSet<Grant> = required
            .into_iter()
            .map(|permission| Grant {
                verb: permission.verb.to_owned(),
                group: permission.group.to_owned(),
                resource: permission.resource.to_owned(),
                namespace: permission.namespace,
                name: permission.name,
            })
            .collect();
        assert_eq!(objects.grants()?, required, "{name}");
        let pod = &objects.daemon_sets[0].spec.template.spec;
        let account = pod.as_ref().context("a Pod's spec")?;
        assert_eq!(
            account.service_account_name, objects.accounts[0].metadata.name,
            "{name}"
        );
        let namespace = &objects.namespaces[0].metadata.name;
        assert_eq!(&objects.accounts[0].metadata.namespace, namespace, "{name}");
        assert_eq!(
            &objects.daemon_sets[0].metadata.namespace, namespace,
            "{name}"
        );
    }
    Ok(())
}

/// Whoever has these rights in the agents' namespace is root on the nodes.
#[test]
fn who_may_ask_has_what_the_plugin_asks_for_and_nobody_has_it_at_first() -> Result<()> {
    for (name, objects) in variants()? {
        let is_asking = |role: &&ClusterRole| role.metadata.name.as_deref() == Some(ASKING);
        let role = objects.cluster_roles.iter().find(is_asking).context(name)?;
        let rules = serde_json::json!([
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
            {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]},
        ]);
        assert_eq!(serde_json::to_value(&role.rules)?, rules, "{name}");
        let of_cluster = objects.cluster_bindings.iter().map(|one| &one.role_ref);
        let mut bound = of_cluster.chain(objects.bindings.iter().map(|one| &one.role_ref));
        assert!(bound.all(|role| role.name != ASKING), "{name}");
    }
    Ok(())
}

#[test]
fn what_the_kind_environment_is_given_has_no_unknown_fields() -> Result<()> {
    for object in kind_story()? {
        match object["kind"].as_str() {
            Some("Namespace") => drop(typed::<Namespace>(&object)?),
            Some("Service") => drop(typed::<Service>(&object)?),
            Some("EndpointSlice") => drop(typed::<EndpointSlice>(&object)?),
            Some("Pod") => drop(typed::<Pod>(&object)?),
            Some("EgressFirewall") => drop(typed::<EgressFirewall>(&object)?),
            other => bail!("an object of the kind {other:?}"),
        }
    }
    Ok(())
}

#[test]
fn openshift_lets_the_pods_be_privileged() -> Result<()> {
    for (name, objects) in variants()? {
        let bound = objects.bindings.iter().any(|binding| {
            binding.role_ref.name == "system:openshift:scc:privileged"
                && binding.metadata.namespace == objects.accounts[0].metadata.namespace
        });
        assert_eq!(bound, name == "overlays/openshift", "{name}");
    }
    Ok(())
}

/// Workload partitioning takes the annotation of a Pod only in a namespace that allows it.
#[test]
fn openshift_may_run_the_pods_on_reserved_processors() -> Result<()> {
    for (name, objects) in variants()? {
        let template = objects.daemon_sets[0].spec.template.metadata.as_ref();
        let of_pods = template.and_then(|metadata| metadata.annotations.as_ref());
        let of_namespace = objects.namespaces[0].metadata.annotations.as_ref();
        let effect = of_pods.and_then(|all| all.get("target.workload.openshift.io/management"));
        let allowed = of_namespace.and_then(|all| all.get("workload.openshift.io/allowed"));
        if name == "overlays/openshift" {
            let effect: Value = serde_json::from_str(effect.context("an annotation")?)?;
            assert_eq!(effect["effect"], "PreferredDuringScheduling");
            assert_eq!(allowed.context("an annotation")?, "management");
        } else {
            assert_eq!((effect, allowed), (None, None), "{name}");
        }
    }
    Ok(())
}

#[test]
fn the_probes_ask_where_the_agent_listens() -> Result<()> {
    for (name, objects) in variants()? {
        let listen = options(&objects)?.listen.context("--listen")?;
        let container = objects.container()?;
        for (probe, path) in [
            (&container.startup_probe, "/livez"),
            (&container.liveness_probe, "/livez"),
            (&container.readiness_probe, "/readyz"),
        ] {
            let get = probe
                .as_ref()
                .and_then(|probe: &Probe| probe.http_get.as_ref());
            let get = get.context("an HTTP probe")?;
            let host = match listen.ip().is_unspecified() {
                true => "127.0.0.1".to_owned(),
                false => listen.ip().to_string(),
            };
            assert_eq!(get.host, Some(host), "{name}");
            let port = serde_json::to_value(&get.port)?;
            assert_eq!(port, listen.port(), "{name}");
            assert_eq!(get.path.as_deref(), Some(path), "{name}");
        }
    }
    Ok(())
}

#[test]
fn the_pod_monitor_finds_the_metrics() -> Result<()> {
    for (name, objects) in variants()? {
        let is_monitored = name == MONITORED;
        assert_eq!(
            objects.pod_monitors.len(),
            usize::from(is_monitored),
            "{name}"
        );
        assert_eq!(
            objects.prometheus_rules.len(),
            usize::from(is_monitored),
            "{name}"
        );
        let listen = options(&objects)?.listen.context("--listen")?;
        assert_eq!(listen.ip().is_loopback(), !is_monitored, "{name}");
        let Some(monitor) = objects.pod_monitors.first() else {
            continue;
        };
        let selector = &objects.daemon_sets[0].spec.selector;
        assert_eq!(monitor["spec"]["selector"], serde_json::to_value(selector)?);
        assert_eq!(monitor["metadata"]["namespace"], "dnsflow");
        let [endpoint] = &monitor["spec"]["podMetricsEndpoints"]
            .as_array()
            .context("endpoints")?[..]
        else {
            bail!("not one endpoint");
        };
        let mut ports = objects.container()?.ports.iter().flatten();
        let named = |port: &&ContainerPort| port.name.as_deref() == endpoint["port"].as_str();
        let port = ports.find(named).context("a port of this name")?;
        assert_eq!(port.container_port, i32::from(listen.port()));
        assert_eq!(endpoint["path"], "/metrics");
    }
    Ok(())
}

#[test]
fn the_daemon_set_fits_together() -> Result<()> {
    for (name, objects) in variants()? {
        let spec = &objects.daemon_sets[0].spec;
        let labels = spec
            .template
            .metadata
            .as_ref()
            .and_then(|meta| meta.labels.as_ref());
        let selected = spec.selector.match_labels.as_ref().context("a selector")?;
        let labels = labels.context("labels")?;
        for (label, value) in selected {
            assert_eq!(labels.get(label), Some(value), "{name}");
        }
        // Updates change the version; what selects Pods can never be changed.
        assert!(
            !selected.contains_key("app.kubernetes.io/version"),
            "{name}"
        );
        let pod = spec.template.spec.as_ref().context("a Pod's spec")?;
        assert_eq!(pod.host_network, Some(true), "{name}");
        // Two agents on a node would undo each other's work.
        let update = spec.update_strategy.as_ref().context("a strategy")?;
        let rolling = update.rolling_update.as_ref().context("RollingUpdate")?;
        assert_eq!(rolling.max_surge, None, "{name}");
        // The next one waits for longer than this one may take to end.
        let grace_s = pod.termination_grace_period_seconds.context("a time")?;
        let grace = Duration::from_secs(u64::try_from(grace_s)?);
        assert!(grace < dnsflow_agent::one_agent::PATIENCE, "{name}");
        let container = &pod.containers[0];
        let security = container
            .security_context
            .as_ref()
            .context("a security context")?;
        assert_eq!(security.se_linux_options, None, "{name}");
        assert_eq!(security.read_only_root_filesystem, Some(true), "{name}");
        // A privileged container has every capability, and no seccomp profile is applied to it.
        let is_privileged = security.privileged == Some(true);
        assert_eq!(is_privileged, name != RESTRICTED, "{name}");
        assert_ne!(is_privileged, security.capabilities.is_some(), "{name}");
        // The directories keep their paths, which the options' defaults name. That of the control
        // socket goes with the Pod.
        let control = Path::new(dnsflow_agent::options::CONTROL_SOCKET).parent();
        let control = control.and_then(Path::to_str).context("a directory")?;
        let path = |volume: &Volume| {
            let path = volume.host_path.as_ref().map(|path| path.path.as_str());
            (volume.name.clone(), path.unwrap_or(control).to_owned())
        };
        let mount = |mount: &VolumeMount| (mount.name.clone(), mount.mount_path.clone());
        let mut volumes: BTreeMap<String, String> =
            pod.volumes.iter().flatten().map(path).collect();
        // A sysfs has no directory for a part of the BPF file system.
        let of_bpf = volumes.insert("bpf".to_owned(), "/bpf".to_owned());
        assert_eq!(of_bpf.as_deref(), Some("/sys/fs/bpf/dnsflow"), "{name}");
        let mounts: BTreeMap<String, String> = container
            .volume_mounts
            .iter()
            .flatten()
            .map(mount)
            .collect();
        assert_eq!(volumes, mounts, "{name}");
        let paths: BTreeSet<&str> = mounts.values().map(String::as_str).collect();
        let mut expected = BTreeSet::from([
            "/bpf",
            "/run/dnsflow-state",
            "/var/run/openvswitch",
            control,
        ]);
        if name == "overlays/openshift" {
            expected.insert("/var/run/ovn-ic");
        }
        assert_eq!(paths, expected, "{name}");
    }
    Ok(())
}

/// A program that has bound the agent's capabilities, and no more, must not find a way to more.
#[test]
fn without_privileges_there_is_no_way_to_others() -> Result<()> {
    for (name, objects) in built([RESTRICTED].into_iter())? {
        let container = objects.container()?;
        let security = container.security_context.as_ref().context("a context")?;
        assert_eq!(security.allow_privilege_escalation, Some(false), "{name}");
        assert_eq!(security.run_as_user, Some(0), "{name}");
        let profile = security
            .seccomp_profile
            .as_ref()
            .map(|profile| &*profile.type_);
        assert_eq!(profile, Some("RuntimeDefault"), "{name}");
        let capabilities = security.capabilities.as_ref().context("capabilities")?;
        assert_eq!(capabilities.drop.as_deref(), Some(&["ALL".to_owned()][..]));
        let added = capabilities.add.iter().flatten();
        let added: BTreeSet<String> = added.map(|name| format!("CAP_{name}")).collect();
        // On the kernels that the overlay is for, memory for maps is not limited by rlimits.
        let needed = (TO_START - CapabilitySet::SYS_RESOURCE) | WHILE_RUNNING;
        let needed = names(needed);
        assert_eq!(added, needed.split(',').map(str::to_owned).collect());
    }
    Ok(())
}

/// The words of the Containerfile's instructions, with continued lines joined.
fn containerfile() -> Result<Vec<Vec<String>>> {
    let text = fs::read_to_string(directory("Containerfile"))?;
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'));
    let joined = lines.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    Ok(joined
        .lines()
        .map(words)
        .filter(|words: &Vec<String>| !words.is_empty())
        .collect())
}

#[test]
fn the_image_holds_the_agent_and_nothing_else() -> Result<()> {
    let instructions = containerfile()?;
    let last = instructions.iter().rposition(|words| words[0] == "FROM");
    let last = &instructions[last.context("a stage")?..];
    assert_eq!(last[0], ["FROM", "scratch"]);
    let copied: Vec<&Vec<String>> = last.iter().filter(|words| words[0] == "COPY").collect();
    assert_eq!(copied.len(), 1, "{last:?}");
    let program = copied[0].last().context("a destination")?;
    // `command: [dnsflow]` is looked up in the image's PATH.
    let (path, name) = program.rsplit_once('/').context("a path")?;
    let base = Objects::base()?;
    let words = base.container()?.command.iter().flatten();
    assert_eq!(words.collect::<Vec<_>>(), [name]);
    let environment = ["ENV".to_owned(), format!("PATH={path}")];
    assert!(last.iter().any(|words| *words == environment), "{last:?}");
    Ok(())
}
