//! The chart in `deploy/helm` makes the same objects as kustomize does of the rest of `deploy/`, and each of its values
//! does what it says. By Helm 3 and 4.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser as _;
use dnsflow_agent::options::{self, Cli};
use dnsflow_tests::{
    go, schemas,
    support::{not_run, this_test},
};
use k8s_openapi::api::{
    batch::v1::Job,
    core::v1::{Pod, Taint, Toleration},
};
use regex::Regex;
use serde_json::{Value, json};

use crate::{
    manifests::{MONITORED, OPTIONS, Objects, RESTRICTED, built, directory, documents, typed},
    option_schema, snapshots,
};

/// The DaemonSet's annotation by which Helm rolls out changed options; kustomize changes the ConfigMap's name.
const ROLL: &str = "dnsflow.io/options";
/// The image of the directories in `deploy/`.
const IMAGE: &str = "image.tag=latest";
/// The labels that only a chart's objects have; those of pods are without the first.
const OF_HELM: [&str; 3] = [
    "helm.sh/chart",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
];

/// Each directory in `deploy/`, with the chart's values that mean the same.
const SAME: [(&str, &[&str]); 4] = [
    ("base", &[]),
    ("overlays/openshift", &["openshift=true"]),
    (RESTRICTED, &["restricted=true"]),
    (
        MONITORED,
        &["podMonitor.enabled=true", "prometheusRule.enabled=true"],
    ),
];

/// Helm 3 and 4; none after saying why there is none.
fn helms() -> Vec<PathBuf> {
    let helms = [go::HELM, go::HELM_4].into_iter().filter_map(|helm| {
        let built = helm.ensure(&|text| eprintln!("{text}"));
        built
            .inspect_err(|error| not_run(&this_test(), format!("{error:#}")))
            .ok()
    });
    helms.collect()
}

/// Runs Helm on the chart, with these values: `NAME=JSON`.
fn on_chart(helm: &Path, words: &[&str], values: &[&str]) -> Result<Output> {
    let chart = directory("helm/dnsflow");
    let mut command = Command::new(helm);
    command.args(words).arg(go::KUBE_VERSION).arg(chart);
    for value in values {
        // Words are texts without quotes.
        let (name, json) = value.split_once('=').context("NAME=JSON")?;
        let json = match serde_json::from_str::<Value>(json) {
            Ok(_) => json.to_owned(),
            Err(_) => Value::from(json).to_string(),
        };
        command.args(["--set-json", &format!("{name}={json}")]);
    }
    // Nothing of the machine's own.
    let home = env::temp_dir();
    command.env_clear().env("HOME", home);
    Ok(command.output()?)
}

/// The objects of the chart with these values, but for hooks.
fn rendered(helm: &Path, values: &[&str]) -> Result<Vec<Value>> {
    rendered_by(helm, &["--no-hooks"], values)
}

fn rendered_by(helm: &Path, options: &[&str], values: &[&str]) -> Result<Vec<Value>> {
    let words = [&["template", "dnsflow", "--namespace", "dnsflow"], options].concat();
    let output = on_chart(helm, &words, values)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{values:?}: {errors}");
    ensure!(errors.is_empty(), "{values:?}: {errors}");
    let text = String::from_utf8(output.stdout)?;
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text)?;
    Ok(objects.into_iter().filter(|one| !one.is_null()).collect())
}

/// By kind, namespace and name.
fn by_identity(objects: Vec<Value>) -> BTreeMap<[String; 3], Value> {
    let objects = objects.into_iter().map(|object| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let metadata = &object["metadata"];
        let identity = [&object["kind"], &metadata["namespace"], &metadata["name"]].map(text);
        (identity, in_order(object))
    });
    objects.collect()
}

/// Lists of things with names mean the same in any order.
fn in_order(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter();
            Value::Object(
                fields
                    .map(|(name, value)| (name, in_order(value)))
                    .collect(),
            )
        }
        Value::Array(values) => {
            let mut values: Vec<Value> = values.into_iter().map(in_order).collect();
            if values.iter().all(|value| value["name"].is_string()) {
                values.sort_by_key(|value| value["name"].to_string());
            }
            Value::Array(values)
        }
        value => value,
    }
}

/// Takes away what only Helm's objects have, all of which has to be there.
fn without_helms(object: &mut Value) -> Result<()> {
    let mut take = |pointer: &str, names: &[&str]| -> Result<()> {
        let labels = object.pointer_mut(pointer).and_then(Value::as_object_mut);
        let labels = labels.with_context(|| pointer.to_owned())?;
        for name in names {
            let found = labels.remove(*name);
            found.with_context(|| format!("{pointer} without {name}"))?;
        }
        Ok(())
    };
    take("/metadata/labels", &OF_HELM)?;
    let kind = object["kind"].as_str().unwrap_or_default().to_owned();
    let mut take = |pointer: &str, names: &[&str]| -> Result<()> {
        let fields = object.pointer_mut(pointer).and_then(Value::as_object_mut);
        let fields = fields.with_context(|| pointer.to_owned())?;
        for name in names {
            fields.remove(*name).context((*name).to_owned())?;
        }
        Ok(())
    };
    match &*kind {
        "DaemonSet" => {
            take("/spec/selector/matchLabels", &OF_HELM[1..2])?;
            take("/spec/template/metadata/labels", &OF_HELM[1..])?;
            take("/spec/template/metadata/annotations", &[ROLL])
        }
        "PodMonitor" => take("/spec/selector/matchLabels", &OF_HELM[1..2]),
        _ => Ok(()),
    }
}

/// But for the namespace, which is there before a release.
#[test]
fn the_chart_makes_the_objects_of_kustomize() -> Result<()> {
    for helm in helms() {
        for (name, values) in SAME {
            let Some(mut expected) = built(&directory(name))? else {
                not_run(&this_test(), "neither kubectl nor kustomize is here");
                return Ok(());
            };
            expected.retain(|object| object["kind"] != "Namespace");
            let values = [&[IMAGE], values].concat();
            let mut objects = rendered(&helm, &values)?;
            for object in &mut objects {
                without_helms(object)?;
            }
            let (objects, expected) = (by_identity(objects), by_identity(expected));
            let names = |of: &BTreeMap<[String; 3], Value>| of.keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(&objects), names(&expected), "{name}");
            for (identity, object) in &objects {
                assert_eq!(object, &expected[identity], "{name}: {identity:?}");
            }
        }
    }
    Ok(())
}

/// What a value does: the kind of an object, a place in it, and what is there with the value alone.
type Effect = (&'static str, &'static str, &'static str, &'static str);

const POD: &str = "/spec/template/spec";
const LABELS: &str = "/metadata/labels";

/// Each value, as `NAME=JSON`, with its effect. The values of a round are set together, beside those that it begins with.
/// An empty place: no object of the kind is there any more. `@` is a pod's spec in a template, `%` its container.
const ROUNDS: [(&[&str], &[Effect]); 4] = [
    (
        &[],
        &[
            (
                "namespaceOverride=other",
                "DaemonSet",
                "/metadata/namespace",
                "other",
            ),
            (
                "namespaceOverride=other",
                "Job",
                "@/containers/0/args/1",
                "--namespace=other",
            ),
            (
                r#"commonLabels={"team":"net"}"#,
                "Role",
                "/metadata/labels/team",
                "net",
            ),
            (
                r#"commonLabels={"team":"net"}"#,
                "DaemonSet",
                "/spec/template/metadata/labels/team",
                "net",
            ),
            ("image.tag=edge", "DaemonSet", "%/image", "dnsflow:edge"),
            (
                "image.pullPolicy=Always",
                "Job",
                "%/imagePullPolicy",
                "Always",
            ),
            (
                r#"imagePullSecrets=[{"name":"s"}]"#,
                "DaemonSet",
                "@/imagePullSecrets",
                r#"[{"name":"s"}]"#,
            ),
            (
                r#"imagePullSecrets=[{"name":"s"}]"#,
                "Job",
                "@/imagePullSecrets",
                r#"[{"name":"s"}]"#,
            ),
            (
                "options.DNSFLOW_MIN_TTL=30s",
                "ConfigMap",
                "/data/DNSFLOW_MIN_TTL",
                "30s",
            ),
            (
                "options.DNSFLOW_HOLD=false",
                "ConfigMap",
                "/data/DNSFLOW_HOLD",
                r#""false""#,
            ),
            (
                "options.DNSFLOW_MAX_FLOW_CHANGES=12000000",
                "ConfigMap",
                "/data/DNSFLOW_MAX_FLOW_CHANGES",
                r#""12000000""#,
            ),
            (
                r#"options.DNSFLOW_RESOLVER=["a","b"]"#,
                "ConfigMap",
                "/data/DNSFLOW_RESOLVER",
                "a,b",
            ),
            (
                "listen.address=::",
                "ConfigMap",
                "/data/DNSFLOW_LISTEN",
                "[::]:9473",
            ),
            (
                "listen.address=::",
                "DaemonSet",
                "%/livenessProbe/httpGet/host",
                "::1",
            ),
            (
                "restricted=true",
                "DaemonSet",
                "%/securityContext/allowPrivilegeEscalation",
                "false",
            ),
            (
                r#"extraArgs=["--hold=false"]"#,
                "DaemonSet",
                "%/args",
                r#"["agent","--hold=false"]"#,
            ),
            (
                r#"extraEnv=[{"name":"A","value":"b"}]"#,
                "DaemonSet",
                "%/env",
                r#"[{"name":"A","value":"b"}]"#,
            ),
            (
                r#"extraVolumes=[{"name":"ovn","hostPath":{"path":"/var/run/ovn"}}]"#,
                "DaemonSet",
                "@/volumes/4/name",
                "ovn",
            ),
            (
                r#"extraVolumeMounts=[{"name":"ovn","mountPath":"/var/run/ovn"}]"#,
                "DaemonSet",
                "%/volumeMounts/4/mountPath",
                "/var/run/ovn",
            ),
            (
                "serviceAccount.name=sa",
                "DaemonSet",
                "@/serviceAccountName",
                "sa",
            ),
            (
                "serviceAccount.name=sa",
                "ClusterRoleBinding",
                "/subjects/0/name",
                "sa",
            ),
            (
                r#"serviceAccount.annotations={"a":"b"}"#,
                "ServiceAccount",
                "/metadata/annotations/a",
                "b",
            ),
            (
                r#"resources={"limits":{"memory":"1Gi"}}"#,
                "DaemonSet",
                "%/resources/limits/memory",
                "1Gi",
            ),
            (
                r#"nodeSelector={"zone":"a"}"#,
                "DaemonSet",
                "@/nodeSelector/zone",
                "a",
            ),
            (
                r#"nodeSelector={"zone":"a"}"#,
                "Job",
                "@/nodeSelector/zone",
                "a",
            ),
            (
                r#"affinity={"nodeAffinity":{"x":1}}"#,
                "DaemonSet",
                "@/affinity",
                r#"{"nodeAffinity":{"x":1}}"#,
            ),
            (
                r#"tolerations=[{"key":"k"}]"#,
                "DaemonSet",
                "@/tolerations",
                r#"[{"key":"k"}]"#,
            ),
            (
                "priorityClassName=high",
                "DaemonSet",
                "@/priorityClassName",
                "high",
            ),
            (
                "priorityClassName=high",
                "Job",
                "@/priorityClassName",
                "high",
            ),
            (
                "updateStrategy.type=OnDelete",
                "DaemonSet",
                "/spec/updateStrategy/type",
                "OnDelete",
            ),
            (
                "updateStrategy.rollingUpdate.maxUnavailable=3",
                "DaemonSet",
                "/spec/updateStrategy/rollingUpdate/maxUnavailable",
                "3",
            ),
            (
                "terminationGracePeriodSeconds=12",
                "DaemonSet",
                "@/terminationGracePeriodSeconds",
                "12",
            ),
            (
                r#"podAnnotations={"a":"b"}"#,
                "DaemonSet",
                "/spec/template/metadata/annotations/a",
                "b",
            ),
            (
                r#"podLabels={"a":"b"}"#,
                "DaemonSet",
                "/spec/template/metadata/labels/a",
                "b",
            ),
            (
                "podMonitor.enabled=true",
                "PodMonitor",
                "/metadata/name",
                "dnsflow",
            ),
            (
                "prometheusRule.enabled=true",
                "PrometheusRule",
                "/spec/groups/0/name",
                "dnsflow",
            ),
            (
                "dashboard.enabled=true",
                "ConfigMap",
                "/metadata/labels/grafana_dashboard",
                r#""1""#,
            ),
            (
                "cleanup.timeout=90s",
                "Job",
                "@/containers/0/args/3",
                "--timeout=90s",
            ),
            (
                r#"cleanup.tolerations=[{"key":"k"}]"#,
                "Job",
                "@/tolerations/0/key",
                "k",
            ),
        ],
    ),
    (
        &[
            "podMonitor.enabled=true",
            "prometheusRule.enabled=true",
            "dashboard.enabled=true",
        ],
        &[
            (
                "nameOverride=fw",
                "DaemonSet",
                "/spec/selector/matchLabels/app.kubernetes.io~1name",
                "fw",
            ),
            (
                "image.registry=r.test:5000",
                "Job",
                "%/image",
                "r.test:5000/dnsflow:VERSION",
            ),
            (
                "openshift=true",
                "ConfigMap",
                "/data/DNSFLOW_DNS_SERVICE",
                "openshift-dns/dns-default",
            ),
            (
                "podMonitor.interval=7s",
                "PodMonitor",
                "/spec/podMetricsEndpoints/0/interval",
                "7s",
            ),
            (
                "podMonitor.scrapeTimeout=6s",
                "PodMonitor",
                "/spec/podMetricsEndpoints/0/scrapeTimeout",
                "6s",
            ),
            (
                r#"podMonitor.labels={"release":"p"}"#,
                "PodMonitor",
                "/metadata/labels/release",
                "p",
            ),
            (
                r#"podMonitor.annotations={"a":"b"}"#,
                "PodMonitor",
                "/metadata/annotations/a",
                "b",
            ),
            (
                r#"podMonitor.relabelings=[{"targetLabel":"c"}]"#,
                "PodMonitor",
                "/spec/podMetricsEndpoints/0/relabelings/1/targetLabel",
                "c",
            ),
            (
                r#"podMonitor.metricRelabelings=[{"targetLabel":"c"}]"#,
                "PodMonitor",
                "/spec/podMetricsEndpoints/0/metricRelabelings/0/targetLabel",
                "c",
            ),
            (
                r#"prometheusRule.labels={"release":"p"}"#,
                "PrometheusRule",
                "/metadata/labels/release",
                "p",
            ),
            (
                r#"prometheusRule.annotations={"a":"b"}"#,
                "PrometheusRule",
                "/metadata/annotations/a",
                "b",
            ),
            (
                r#"prometheusRule.disabled=["DnsflowAgentAway"]"#,
                "PrometheusRule",
                "/spec/groups/0/rules/1/alert",
                "DnsflowNotReady",
            ),
            (
                "prometheusRule.runbookUrl=https://docs.test/d/",
                "PrometheusRule",
                "/spec/groups/0/rules/0/annotations/runbook_url",
                "https://docs.test/d/docs/troubleshooting.md#dnsflownoagent",
            ),
            (
                r#"dashboard.labels={"a":"b"}"#,
                "ConfigMap",
                "/metadata/labels/a",
                "b",
            ),
            (
                r#"dashboard.annotations={"a":"b"}"#,
                "ConfigMap",
                "/metadata/annotations/a",
                "b",
            ),
        ],
    ),
    (
        &[],
        &[
            ("fullnameOverride=fw", "DaemonSet", "/metadata/name", "fw"),
            (
                "fullnameOverride=fw",
                "Job",
                "@/containers/0/args/2",
                "--daemon-set=fw",
            ),
            (
                "image.digest=sha256:DIGEST",
                "DaemonSet",
                "%/image",
                "dnsflow@sha256:DIGEST",
            ),
            (
                "listen.port=8080",
                "ConfigMap",
                "/data/DNSFLOW_LISTEN",
                "127.0.0.1:8080",
            ),
            (
                "listen.port=8080",
                "DaemonSet",
                "%/startupProbe/httpGet/port",
                "8080",
            ),
            (
                "listen.port=8080",
                "DaemonSet",
                "%/readinessProbe/httpGet/port",
                "8080",
            ),
            ("serviceAccount.create=false", "ServiceAccount", "", ""),
            (
                "serviceAccount.create=false",
                "DaemonSet",
                "@/serviceAccountName",
                "default",
            ),
            (
                "serviceAccount.create=false",
                "Job",
                "@/serviceAccountName",
                "default",
            ),
            ("rbac.create=false", "ClusterRole", "", ""),
            ("rbac.create=false", "ClusterRoleBinding", "", ""),
            ("rbac.create=false", "Role", "", ""),
            ("rbac.create=false", "RoleBinding", "", ""),
        ],
    ),
    (
        &[],
        &[
            (
                "image.repository=a/b",
                "DaemonSet",
                "%/image",
                "a/b:VERSION",
            ),
            ("cleanup.enabled=false", "Job", "", ""),
        ],
    ),
];

/// A place of [`ROUNDS`], in full.
fn place_in_full(place: &str) -> String {
    place.replace('%', "@/containers/0").replace('@', POD)
}

/// A value or an expectation of [`ROUNDS`], in full.
fn in_full(text: &str) -> String {
    let text = text.replace("DIGEST", &"0a".repeat(32));
    text.replace("VERSION", env!("CARGO_PKG_VERSION"))
}

/// Whether an object of this kind has this at this place.
fn has(objects: &[Value], kind: &str, place: &str, expected: &Value) -> bool {
    let mut of_kind = objects.iter().filter(|object| object["kind"] == kind);
    match place {
        "" => of_kind.next().is_none(),
        _ => of_kind.any(|object| object.pointer(place) == Some(expected)),
    }
}

/// The names of the values, each with those that it consists of.
fn leaves(value: &Value, name: &str, found: &mut BTreeSet<String>) {
    match value.as_object().filter(|fields| !fields.is_empty()) {
        None => drop(found.insert(name.to_owned())),
        Some(fields) => {
            for (field, value) in fields {
                let dot = if name.is_empty() { "" } else { "." };
                leaves(value, &format!("{name}{dot}{field}"), found);
            }
        }
    }
}

#[test]
fn every_value_does_what_it_says() -> Result<()> {
    let values = &documents(&directory("helm/dnsflow/values.yaml"))?[0];
    let mut names = BTreeSet::new();
    leaves(values, "", &mut names);
    let effects = || ROUNDS.iter().flat_map(|(_, effects)| *effects);
    names.retain(|name| {
        let mut known = effects().filter_map(|effect| effect.0.split_once('='));
        !known.any(|(value, _)| *name == value || name.starts_with(&format!("{value}.")))
    });
    // `options` is empty, and has an effect by each of its names.
    names.remove("options");
    assert_eq!(names, BTreeSet::new(), "values without an effect");
    for helm in helms() {
        for (before, effects) in ROUNDS {
            let values: BTreeSet<String> = effects.iter().map(|one| in_full(one.0)).collect();
            let values = values.iter().map(String::as_str);
            let values: Vec<&str> = before.iter().copied().chain(values).collect();
            let without = rendered_by(&helm, &[], before)?;
            let with = rendered_by(&helm, &[], &values)?;
            for (value, kind, place, expected) in effects {
                let (place, expected) = (place_in_full(place), in_full(expected));
                let expected = serde_json::from_str(&expected).unwrap_or_else(|_| json!(expected));
                for (objects, is_there) in [(&without, false), (&with, true)] {
                    let found = has(objects, kind, &place, &expected);
                    assert_eq!(found, is_there, "{value} {kind} {place}: {expected}");
                }
            }
        }
    }
    Ok(())
}

/// Values with which the chart makes every object, and every field.
const VARIED: [&[&str]; 3] = [
    &["openshift=true", "restricted=true", "listen.address=::"],
    &[
        "podMonitor.enabled=true",
        "prometheusRule.enabled=true",
        "dashboard.enabled=true",
    ],
    &[
        r#"extraVolumes=[{"name":"ovn","hostPath":{"path":"/var/run/ovn"}}]"#,
        r#"extraVolumeMounts=[{"name":"ovn","mountPath":"/var/run/ovn"}]"#,
        r#"extraEnv=[{"name":"A","value":"b"}]"#,
        r#"podLabels={"a":"b"}"#,
    ],
];

/// Those of the Prometheus Operator have other schemas, which are in no package.
const OF_THE_OPERATOR: &str = "PodMonitor,PrometheusRule";

/// Whether kubeconform accepts these objects, and what it says.
fn conform(kubeconform: &Path, schemas: &Path, objects: &[Value]) -> Result<(bool, String)> {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    let schemas = schemas.join("{{.ResourceKind}}{{.KindSuffix}}.json");
    let mut command = Command::new(kubeconform);
    command.args([
        "-strict",
        "-summary",
        "-skip",
        OF_THE_OPERATOR,
        "-schema-location",
    ]);
    let mut child = command
        .arg(schemas)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut input = child.stdin.take().context("standard input")?;
    input.write_all(list.to_string().as_bytes())?;
    drop(input);
    let output = child.wait_with_output()?;
    Ok((output.status.success(), String::from_utf8(output.stdout)?))
}

#[test]
fn kubeconform_accepts_what_the_chart_makes() -> Result<()> {
    let say = |text: &str| eprintln!("{text}");
    let (kubeconform, schemas) = match (go::KUBECONFORM.ensure(&say), schemas::ensure(&say)) {
        (Ok(kubeconform), Ok(schemas)) => (kubeconform, schemas),
        (Err(error), _) | (_, Err(error)) => {
            not_run(&this_test(), format!("{error:#}"));
            return Ok(());
        }
    };
    let mut objects = Vec::new();
    for helm in helms() {
        for values in VARIED {
            objects.extend(rendered_by(&helm, &[], values)?);
        }
    }
    let (is_accepted, said) = conform(&kubeconform, &schemas, &objects)?;
    assert!(is_accepted, "{said}");
    let jobs = objects.iter_mut().filter(|object| object["kind"] == "Job");
    jobs.for_each(|job| job["spec"]["backoffLimit"] = "two".into());
    let (is_accepted, said) = conform(&kubeconform, &schemas, &objects)?;
    assert!(!is_accepted, "{said}");
    Ok(())
}

/// Objects of every value, with unknown fields of none.
#[test]
fn what_the_chart_makes_has_no_unknown_fields() -> Result<()> {
    for helm in helms() {
        for values in VARIED {
            Objects::of(&rendered(&helm, values)?)?;
            for hook in hooks(&helm, values)? {
                match hook["kind"].as_str() {
                    Some("Pod") => drop(typed::<Pod>(&hook)?),
                    Some("Job") => drop(typed::<Job>(&hook)?),
                    _ => drop(Objects::of(&[hook])?),
                }
            }
        }
    }
    Ok(())
}

/// Values of users often take a default away.
#[test]
fn null_takes_a_value_away() -> Result<()> {
    for helm in helms() {
        let values = [
            "nodeSelector=null",
            "tolerations=null",
            "resources=null",
            "priorityClassName=null",
            "options=null",
            "commonLabels=null",
            "podLabels=null",
            "podAnnotations=null",
            "affinity=null",
            "extraArgs=null",
            "extraEnv=null",
            "extraVolumes=null",
            "extraVolumeMounts=null",
            "imagePullSecrets=null",
            "cleanup.tolerations=null",
            "image.tag=null",
            "image.digest=null",
            "image.registry=null",
        ];
        let objects = Objects::of(&rendered(&helm, &values)?)?;
        let pod = objects.pod()?;
        assert_eq!(pod.node_selector, None);
        assert_eq!(pod.tolerations, None);
        assert_eq!(pod.priority_class_name, None);
        assert_eq!(objects.container()?.resources, None);
        let values = [
            "options.DNSFLOW_LOG_FORMAT=null",
            "options.DNSFLOW_MIN_TTL=null",
        ];
        let objects = Objects::of(&rendered(&helm, &values)?)?;
        let options = objects.options()?;
        assert!(!options.contains_key("DNSFLOW_LOG_FORMAT"), "{options:?}");
        assert!(!options.contains_key("DNSFLOW_MIN_TTL"), "{options:?}");
    }
    Ok(())
}

/// One value for the agent, its probes and its scraper.
#[test]
fn where_the_agent_listens_it_is_asked() -> Result<()> {
    for helm in helms() {
        for (address, is_monitored, listens, probed) in [
            ("", false, Some("127.0.0.1:80"), "127.0.0.1"),
            ("", true, Some("0.0.0.0:80"), "127.0.0.1"),
            ("127.0.0.1", false, Some("127.0.0.1:80"), "127.0.0.1"),
            ("127.0.0.1", true, None, ""),
            ("::1", false, Some("[::1]:80"), "::1"),
            ("::1", true, None, ""),
            ("0.0.0.0", false, Some("0.0.0.0:80"), "127.0.0.1"),
            ("0.0.0.0", true, Some("0.0.0.0:80"), "127.0.0.1"),
            ("::", false, Some("[::]:80"), "::1"),
            ("::", true, Some("[::]:80"), "::1"),
        ] {
            let values = [
                format!("listen.address={address:?}"),
                format!("podMonitor.enabled={is_monitored}"),
            ];
            let values = [&*values[0], &*values[1], "listen.port=80"];
            let Some(listens) = listens else {
                let refused = on_chart(&helm, &["template", "dnsflow"], &values)?;
                let errors = String::from_utf8_lossy(&refused.stderr);
                assert!(
                    errors.contains("Prometheus does not reach the agents"),
                    "{errors}"
                );
                continue;
            };
            let objects = Objects::of(&rendered(&helm, &values)?)?;
            assert_eq!(objects.options()?["DNSFLOW_LISTEN"], listens, "{values:?}");
            let container = objects.container()?;
            for probe in [
                &container.startup_probe,
                &container.liveness_probe,
                &container.readiness_probe,
            ] {
                let get = probe.as_ref().and_then(|probe| probe.http_get.as_ref());
                let get = get.context("an HTTP probe")?;
                assert_eq!(get.host.as_deref(), Some(probed), "{values:?}");
                assert_eq!(serde_json::to_value(&get.port)?, 80, "{values:?}");
            }
            let ports = container.ports.iter().flatten();
            let ports: Vec<i32> = ports.map(|port| port.container_port).collect();
            assert_eq!(
                ports,
                if is_monitored { vec![80] } else { vec![] },
                "{values:?}"
            );
        }
        let refused = on_chart(
            &helm,
            &["template", "dnsflow"],
            &["options.DNSFLOW_LISTEN=[::]:1"],
        )?;
        assert!(!refused.status.success());
    }
    Ok(())
}

#[test]
fn a_changed_option_rolls_the_daemon_set_of_the_chart() -> Result<()> {
    for helm in helms() {
        let mut rolls = BTreeSet::new();
        for value in [
            "options.DNSFLOW_MIN_TTL=30s",
            "options.DNSFLOW_MIN_TTL=90s",
            "options.DNSFLOW_DRY_RUN=true",
        ] {
            let objects = rendered(&helm, &[value])?;
            let of = |kind: &str| objects.iter().find(|object| object["kind"] == kind);
            let daemon_set = of("DaemonSet").context("a DaemonSet")?;
            let annotations = &daemon_set["spec"]["template"]["metadata"]["annotations"];
            assert!(rolls.insert(annotations[ROLL].to_string()), "{value}");
            let options = of("ConfigMap").context("a ConfigMap")?;
            assert_eq!(options["metadata"]["name"], OPTIONS);
            assert_eq!(options["data"]["DNSFLOW_LOG_FORMAT"], "json");
        }
    }
    Ok(())
}

/// The agent reads the Services that its option names, and no others.
#[test]
fn the_roles_of_the_chart_follow_the_dns_services() -> Result<()> {
    for helm in helms() {
        for value in [
            "options.DNSFLOW_DNS_SERVICE=a/x,a/y,b/k=v,b/z",
            r#"options.DNSFLOW_DNS_SERVICE=["a/x","a/y","b/k=v","b/z"]"#,
        ] {
            let objects = Objects::of(&rendered(&helm, &[value])?)?;
            let grants = objects.grants()?.into_iter();
            let of_services =
                grants.filter(|grant| grant.resource == "services" && grant.verb == "watch");
            let named = of_services.map(|grant| (grant.namespace.unwrap_or_default(), grant.name));
            let name = |text: &str| Some(text.to_owned());
            assert_eq!(
                named.collect::<Vec<_>>(),
                [
                    ("a".to_owned(), name("x")),
                    ("a".to_owned(), name("y")),
                    ("b".to_owned(), None),
                ]
            );
        }
        // A Role in a namespace that is not there keeps the release from being installed.
        for other in ["openshift=false", "openshift=true"] {
            let of_services = |values: &[&str]| -> Result<_> {
                let objects = Objects::of(&rendered(&helm, values)?)?;
                let grants = objects.grants()?.into_iter();
                let of_services: Vec<_> = grants
                    .filter(|grant| grant.resource == "services")
                    .map(|grant| (grant.namespace, grant.name))
                    .collect();
                let option = objects.options()?.get("DNSFLOW_DNS_SERVICE").cloned();
                Ok((of_services, option))
            };
            let without = of_services(&["options.DNSFLOW_DNS_SERVICE=null", other])?;
            assert_eq!(without, of_services(&[other])?, "{other}");
        }
    }
    Ok(())
}

/// Two releases share no object, and no release has one that `helm uninstall` would take from another namespace.
#[test]
fn all_objects_are_in_the_namespace_of_the_release_and_have_its_name() -> Result<()> {
    for helm in helms() {
        let words = ["template", "edge", "--namespace", "net"];
        let monitored = [
            "podMonitor.enabled=true",
            "prometheusRule.enabled=true",
            "dashboard.enabled=true",
        ];
        let output = on_chart(&helm, &words, &monitored)?;
        let text = String::from_utf8(output.stdout)?;
        let objects: Vec<Value> = serde_saphyr::from_multiple(&text)?;
        assert!(objects.len() > 10, "{text}");
        for object in objects.iter().filter(|object| !object.is_null()) {
            let metadata = &object["metadata"];
            let name = metadata["name"].as_str().context("a name")?;
            assert!(name.starts_with("edge-dnsflow"), "{object}");
            let of_cluster =
                ["ClusterRole", "ClusterRoleBinding"].map(|kind| object["kind"] == kind);
            let of_cluster = of_cluster.contains(&true);
            // Of the cluster's DNS.
            let is_of_dns = name.ends_with("-dns");
            let expected = match (of_cluster, is_of_dns) {
                (true, _) => Value::Null,
                (false, true) => json!("kube-system"),
                (false, false) => json!("net"),
            };
            assert_eq!(metadata["namespace"], expected, "{object}");
            assert_ne!(object["kind"], "Namespace");
            let labels = &metadata["labels"];
            assert_eq!(labels["app.kubernetes.io/instance"], "edge", "{object}");
            assert_eq!(labels["app.kubernetes.io/managed-by"], "Helm", "{object}");
            let chart = concat!("dnsflow-", env!("CARGO_PKG_VERSION"));
            assert_eq!(labels["helm.sh/chart"], chart, "{object}");
        }
    }
    Ok(())
}

/// The DaemonSet would lose its Pods, and alerts their nodes.
#[test]
fn no_label_of_a_user_replaces_one_of_the_chart() -> Result<()> {
    for helm in helms() {
        let labels =
            r#"{"app.kubernetes.io/name":"x","app.kubernetes.io/part-of":"x","helm.sh/chart":"x"}"#;
        let values = [
            "commonLabels",
            "podLabels",
            "podMonitor.labels",
            "dashboard.labels",
        ];
        let mut values: Vec<String> = values
            .iter()
            .map(|name| format!("{name}={labels}"))
            .collect();
        values.extend(["podMonitor.enabled=true", "dashboard.enabled=true"].map(str::to_owned));
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        for object in rendered(&helm, &values)? {
            for place in [LABELS, "/spec/template/metadata/labels"] {
                let Some(labels) = object.pointer(place) else {
                    continue;
                };
                assert_eq!(labels["app.kubernetes.io/name"], "dnsflow", "{object}");
                assert_eq!(labels["app.kubernetes.io/part-of"], "dnsflow", "{object}");
            }
            assert_ne!(
                object["metadata"]["labels"]["helm.sh/chart"], "x",
                "{object}"
            );
        }
    }
    Ok(())
}

#[test]
fn values_that_are_not_understood_are_refused() -> Result<()> {
    for helm in helms() {
        for value in [
            "optoins.DNSFLOW_MIN_TTL=30s",
            "options.MIN_TTL=30s",
            "options.DNSFLOW_MIN_TTLS=30s",
            "options.DNSFLOW_MIN_TTL=30",
            "options.DNSFLOW_HOLD=perhaps",
            "options.DNSFLOW_OPEN_BY=magic",
            "options.DNSFLOW_MAX_FLOW_CHANGES=0",
            "image.pullPolicy=Sometimes",
            "updateStrategy.rollingUpdate.maxUnavailable=0",
            "updateStrategy.rollingUpdate.maxSurge=1",
            "terminationGracePeriodSeconds=15",
            "listen.address=192.0.2.1",
            "openshift=perhaps",
            "namespace=dnsflow",
        ] {
            let output = on_chart(&helm, &["template", "dnsflow"], &[value])?;
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success(), "{value}");
            assert!(errors.contains("values don't meet"), "{value}: {errors}");
        }
        let values = [
            "prometheusRule.enabled=true",
            r#"prometheusRule.disabled=["DnsflowSlew"]"#,
        ];
        let output = on_chart(&helm, &["template", "dnsflow"], &values)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains("there is no alert DnsflowSlew"), "{errors}");
        let lint = on_chart(&helm, &["lint", "--strict"], &[])?;
        let said = String::from_utf8_lossy(&lint.stdout).into_owned();
        let warned = String::from_utf8_lossy(&lint.stderr);
        assert!(lint.status.success(), "{said}{warned}");
        for word in ["[INFO]", "[WARNING]", "symbolic link"] {
            assert!(
                !said.contains(word) && !warned.contains(word),
                "{said}{warned}"
            );
        }
    }
    Ok(())
}

/// The objects of the chart with these values that are hooks.
fn hooks(helm: &Path, values: &[&str]) -> Result<Vec<Value>> {
    let mut objects = rendered_by(helm, &[], values)?;
    objects.retain(|object| !object["metadata"]["annotations"]["helm.sh/hook"].is_null());
    Ok(objects)
}

/// Tools that keep a cluster as Git has it render the chart away from the cluster, again and again.
#[test]
fn the_chart_needs_no_cluster_and_renders_the_same_bytes() -> Result<()> {
    // Sprig and Helm, "Template Function List": these ask the cluster, or give another value each time.
    let word = Regex::new(
        r"\b(lookup|now|ago|rand\w*|uuidv4|shuffle|gen\w+|htpasswd|bcrypt|encryptAES)\b",
    )?;
    let action = Regex::new(r"(?s)\{\{.*?\}\}")?;
    let text = Regex::new("\"[^\"]*\"|(?s)/\\*.*?\\*/")?;
    let mut actions = 0;
    let files = walk(&directory("helm/dnsflow/templates"))?;
    for file in files.into_iter().filter(|file| file.is_file()) {
        let template = fs::read_to_string(&file)?;
        for one in action.find_iter(&template) {
            let code = text.replace_all(one.as_str(), "");
            ensure!(
                !word.is_match(&code),
                "{}: {}",
                file.display(),
                one.as_str()
            );
            actions += 1;
        }
    }
    ensure!(actions > 100, "{actions}");
    Ok(())
}

#[test]
fn the_hooks_do_what_they_are_for_and_are_no_agents() -> Result<()> {
    for helm in helms() {
        let values = ["restricted=true"];
        let hooks = hooks(&helm, &values)?;
        let kinds = hooks.iter().filter_map(|hook| hook["kind"].as_str());
        let own = ["Job", "Pod", "Role", "RoleBinding", "ServiceAccount"];
        assert_eq!(BTreeSet::from_iter(kinds), BTreeSet::from(own));
        let agents = Objects::of(&rendered(&helm, &values)?)?;
        let selected = agents.daemon_sets[0].spec.selector.match_labels.as_ref();
        let selected = selected.context("a selector")?;
        let is_selected = |labels: &BTreeMap<String, String>| {
            selected
                .iter()
                .all(|(name, value)| labels.get(name) == Some(value))
        };
        for hook in &hooks {
            match hook["kind"].as_str() {
                Some("Pod") => {
                    let check: Pod = typed(hook)?;
                    assert!(!is_selected(&check.metadata.labels.context("labels")?));
                    let pod = check.spec.context("a spec")?;
                    let agent = agents.pod()?;
                    assert_eq!(pod.volumes, agent.volumes);
                    let [container] = &pod.containers[..] else {
                        bail!("not one container");
                    };
                    let of_agent = agents.container()?;
                    assert_eq!(container.env_from, of_agent.env_from);
                    assert_eq!(container.volume_mounts, of_agent.volume_mounts);
                    assert_eq!(container.security_context, of_agent.security_context);
                    let line = crate::manifests::command_line(container, agents.options()?)?;
                    let command = Cli::try_parse_from(line)?.command;
                    assert!(matches!(command, options::Command::Check(_)));
                }
                Some("Job") => {
                    let job: Job = typed(hook)?;
                    let template = job.spec.context("a spec")?.template;
                    let labels = template.metadata.and_then(|metadata| metadata.labels);
                    assert!(!is_selected(&labels.context("labels")?));
                    let container = &template.spec.context("a spec")?.containers[0];
                    let words = container.command.iter().chain(&container.args).flatten();
                    let command = Cli::try_parse_from(words)?.command;
                    let options::Command::CleanupNodes(nodes) = command else {
                        bail!("{command:?}");
                    };
                    assert_eq!(nodes.namespace, "dnsflow");
                    assert_eq!(nodes.daemon_set, "dnsflow");
                    assert_eq!(nodes.timeout.as_secs(), 120);
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// As `ToleratesTaint` of Kubernetes' `k8s.io/api/core/v1/toleration.go`.
fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let matches = |wanted: &Option<String>, found: &str| match wanted.as_deref() {
        None | Some("") => true,
        Some(wanted) => wanted == found,
    };
    let exists = toleration.operator.as_deref() == Some("Exists");
    matches(&toleration.effect, &taint.effect)
        && matches(&toleration.key, &taint.key)
        && (exists || toleration.value == taint.value)
}

/// A dead node would keep it Pending, and name no node.
#[test]
fn the_cleanup_is_scheduled_where_a_node_is_ready() -> Result<()> {
    let taint = |key: &str, effect: &str| Taint {
        key: key.to_owned(),
        effect: effect.to_owned(),
        ..Taint::default()
    };
    // By which the node controller marks a node that does not answer (pkg/controller/nodelifecycle of Kubernetes).
    let dead = [
        taint("node.kubernetes.io/unreachable", "NoSchedule"),
        taint("node.kubernetes.io/not-ready", "NoSchedule"),
        taint("node.kubernetes.io/unschedulable", "NoSchedule"),
        taint("node.kubernetes.io/network-unavailable", "NoSchedule"),
        taint("node.kubernetes.io/unreachable", "NoExecute"),
        taint("node.kubernetes.io/not-ready", "NoExecute"),
    ];
    let control_plane = taint("node-role.kubernetes.io/control-plane", "NoSchedule");
    for helm in helms() {
        let hooks = hooks(&helm, &[])?;
        let job = hooks.iter().find(|hook| hook["kind"] == "Job");
        let job: Job = typed(job.context("a Job")?)?;
        let job = job.spec.context("a spec")?;
        let pod = job.template.spec.context("a Pod's spec")?;
        let tolerations = pod.tolerations.unwrap_or_default();
        for taint in &dead {
            assert!(
                !tolerations.iter().any(|one| tolerates(one, taint)),
                "{taint:?}"
            );
        }
        assert!(tolerations.iter().any(|one| tolerates(one, &control_plane)));
        assert_eq!(pod.node_name, None);
        // The nodes that are not clean are known, and printed.
        let policy = job.pod_failure_policy.context("a policy")?;
        let codes = policy.rules[0].on_exit_codes.as_ref().context("codes")?;
        assert_eq!(codes.values, [dnsflow_agent::exit::Exit::Incomplete as i32]);
        assert_eq!(policy.rules[0].action, "FailJob");
        let annotations = job_annotations(&hooks)?;
        assert_eq!(annotations["helm.sh/hook-output-log-policy"], "hook-failed");
        // It has to be there for that.
        let deleted = &annotations["helm.sh/hook-delete-policy"];
        assert_eq!(deleted, "before-hook-creation,hook-succeeded");
        // The agents are on all nodes.
        let objects = Objects::of(&rendered(&helm, &[])?)?;
        let tolerations = objects.pod()?.tolerations.clone().unwrap_or_default();
        for taint in dead.iter().chain([&control_plane]) {
            assert!(
                tolerations.iter().any(|one| tolerates(one, taint)),
                "{taint:?}"
            );
        }
    }
    Ok(())
}

fn job_annotations(hooks: &[Value]) -> Result<Value> {
    let job = hooks.iter().find(|hook| hook["kind"] == "Job");
    Ok(job.context("a Job")?["metadata"]["annotations"].clone())
}

/// Helm itself, and what lists charts, say it of each chart that lacks it.
#[test]
fn the_chart_has_the_version_of_the_agent_and_what_a_chart_has() -> Result<()> {
    let home = directory("helm/dnsflow");
    let chart = &documents(&home.join("Chart.yaml"))?[0];
    for field in ["version", "appVersion"] {
        assert_eq!(chart[field], env!("CARGO_PKG_VERSION"), "{field}");
    }
    for field in ["description", "home", "icon", "kubeVersion"] {
        assert!(chart[field].is_string(), "{field}");
    }
    for field in ["keywords", "sources", "maintainers"] {
        let list = chart[field].as_array().context(field)?;
        assert!(!list.is_empty(), "{field}");
    }
    let annotations = chart["annotations"].as_object().context("annotations")?;
    assert!(annotations.contains_key("artifacthub.io/license"));
    for entry in walk(&home)? {
        // Helm warns of each.
        assert!(!entry.is_symlink(), "{}", entry.display());
    }
    Ok(())
}

fn walk(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in directory.read_dir()? {
        let path = entry?.path();
        if path.is_dir() && !path.is_symlink() {
            found.append(&mut walk(&path)?);
        }
        found.push(path);
    }
    Ok(found)
}

/// By helm-docs, of the comments in values.yaml.
#[test]
fn the_readme_of_the_chart_has_a_sentence_for_each_value() -> Result<()> {
    let file = directory("helm/dnsflow/README.md");
    let program = match go::HELM_DOCS.ensure(&|text| eprintln!("{text}")) {
        Ok(program) => program,
        Err(error) => {
            not_run(&this_test(), format!("{error:#}"));
            return Ok(());
        }
    };
    let mut command = Command::new(program);
    command.args([
        "--dry-run",
        "--log-level=warning",
        "--sort-values-order=file",
    ]);
    command
        .arg("--chart-search-root")
        .arg(directory("helm/dnsflow"));
    let output = command.output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{errors}");
    let text = String::from_utf8(output.stdout)?;
    let text = format!("{}\n", text.trim_end());
    for row in text.lines().filter(|line| line.starts_with('|')) {
        assert!(!row.ends_with("|  |"), "{row}");
    }
    reviewed(&file, &text)
}

/// The part of the schema that is made of the agent's options.
#[test]
fn the_schema_has_the_options_of_the_agent() -> Result<()> {
    let file = directory("helm/dnsflow/values.schema.json");
    let written = fs::read_to_string(&file)?;
    let text = option_schema::within(&written)?;
    serde_json::from_str::<Value>(&text)?;
    reviewed(&file, &text)
}

/// Compares a file that is made with the one that was reviewed.
fn reviewed(file: &Path, text: &str) -> Result<()> {
    if env::var_os(snapshots::BLESS).is_some() {
        fs::write(file, text)?;
    }
    let is_same = fs::read_to_string(file).unwrap_or_default() == text;
    assert!(
        is_same,
        "{}: run this test with {}=1",
        file.display(),
        snapshots::BLESS
    );
    Ok(())
}
