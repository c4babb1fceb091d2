//! The chart in `deploy/helm` makes the same objects as kustomize does of the rest of `deploy/`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    process::{Command, Output},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser as _;
use dnsflow_agent::options::{self, Cli};
use dnsflow_tests::{
    go,
    support::{not_run, this_test},
};
use k8s_openapi::api::{batch::v1::Job, core::v1::Pod};
use serde_json::Value;

use crate::manifests::{
    MONITORED, OPTIONS, Objects, RESTRICTED, built, directory, documents, typed,
};

/// The DaemonSet's annotation by which Helm rolls out changed options; kustomize changes the ConfigMap's name.
const ROLL: &str = "dnsflow.io/options";
/// The image of the directories in `deploy/`.
const IMAGE: &str = "image.tag=latest";

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

/// Helm; `None` after saying why there is none.
fn helm() -> Option<PathBuf> {
    match go::HELM.ensure(&|text| eprintln!("{text}")) {
        Ok(helm) => Some(helm),
        Err(error) => {
            not_run(&this_test(), format!("{error:#}"));
            None
        }
    }
}

/// Runs Helm on the chart, with these values.
fn on_chart(helm: &PathBuf, words: &[&str], values: &[&str]) -> Result<Output> {
    let chart = directory("helm/dnsflow");
    let mut command = Command::new(helm);
    command.args(words).arg(chart);
    for value in values {
        command.args(["--set", value]);
    }
    // Nothing of the machine's own.
    let home = std::env::temp_dir();
    command.env_clear().env("HOME", home);
    Ok(command.output()?)
}

/// The objects of the chart with these values, but for hooks.
fn rendered(helm: &PathBuf, values: &[&str]) -> Result<Vec<Value>> {
    rendered_by(helm, &["--no-hooks"], values)
}

fn rendered_by(helm: &PathBuf, options: &[&str], values: &[&str]) -> Result<Vec<Value>> {
    let words = [&["template", "dnsflow", "--namespace", "default"], options].concat();
    let output = on_chart(helm, &words, values)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{values:?}: {errors}");
    let text = String::from_utf8(output.stdout)?;
    Ok(serde_saphyr::from_multiple(&text)?)
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

#[test]
fn the_chart_makes_the_objects_of_kustomize() -> Result<()> {
    let Some(helm) = helm() else {
        return Ok(());
    };
    for (name, values) in SAME {
        let Some(expected) = built(&directory(name))? else {
            not_run(&this_test(), "neither kubectl nor kustomize is here");
            return Ok(());
        };
        let values = [&[IMAGE], values].concat();
        let mut objects = rendered(&helm, &values)?;
        for object in &mut objects {
            let annotations = object.pointer_mut("/spec/template/metadata/annotations");
            if let Some(annotations) = annotations.and_then(Value::as_object_mut) {
                annotations.remove(ROLL).context("it rolls")?;
            }
        }
        let (objects, expected) = (by_identity(objects), by_identity(expected));
        let names = |of: &BTreeMap<[String; 3], Value>| of.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&objects), names(&expected), "{name}");
        for (identity, object) in &objects {
            assert_eq!(object, &expected[identity], "{name}: {identity:?}");
        }
    }
    Ok(())
}

#[test]
fn a_changed_option_rolls_the_daemon_set_of_the_chart() -> Result<()> {
    let Some(helm) = helm() else {
        return Ok(());
    };
    let mut rolls = BTreeSet::new();
    for (value, expected) in [
        ("options.DNSFLOW_MIN_TTL=30s", ("DNSFLOW_MIN_TTL", "30s")),
        ("options.DNSFLOW_MIN_TTL=90s", ("DNSFLOW_MIN_TTL", "90s")),
        ("options.DNSFLOW_DRY_RUN=true", ("DNSFLOW_DRY_RUN", "true")),
        (
            "options.DNSFLOW_MAX_FLOW_CHANGES=12000000",
            ("DNSFLOW_MAX_FLOW_CHANGES", "12000000"),
        ),
    ] {
        let objects = rendered(&helm, &[value])?;
        let of = |kind: &str| objects.iter().find(|object| object["kind"] == kind);
        let daemon_set = of("DaemonSet").context("a DaemonSet")?;
        let annotations = &daemon_set["spec"]["template"]["metadata"]["annotations"];
        assert!(rolls.insert(annotations[ROLL].to_string()), "{value}");
        let options = of("ConfigMap").context("a ConfigMap")?;
        assert_eq!(options["metadata"]["name"], OPTIONS);
        assert_eq!(options["data"][expected.0], expected.1);
        assert_eq!(options["data"]["DNSFLOW_LOG_FORMAT"], "json");
    }
    Ok(())
}

/// The agent reads the Services that its option names, and no others.
#[test]
fn the_roles_of_the_chart_follow_the_dns_services() -> Result<()> {
    let Some(helm) = helm() else {
        return Ok(());
    };
    let value = r"options.DNSFLOW_DNS_SERVICE=a/x\,a/y\,b/k=v\,b/z";
    let objects = Objects::of(&rendered(&helm, &[value])?)?;
    let grants = objects.grants()?.into_iter();
    let of_services = grants.filter(|grant| grant.resource == "services" && grant.verb == "watch");
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
    Ok(())
}

#[test]
fn a_release_in_the_namespace_of_the_agents_does_not_make_it() -> Result<()> {
    let Some(helm) = helm() else {
        return Ok(());
    };
    let objects = Objects::of(&rendered(&helm, &["namespace=default"])?)?;
    assert!(objects.namespaces.is_empty());
    let namespace = &objects.daemon_sets[0].metadata.namespace;
    assert_eq!(namespace.as_deref(), Some("default"));
    Ok(())
}

#[test]
fn values_that_are_not_understood_are_refused() -> Result<()> {
    let Some(helm) = helm() else {
        return Ok(());
    };
    for value in [
        "optoins.DNSFLOW_MIN_TTL=30s",
        "options.MIN_TTL=30s",
        "image.pullPolicy=Sometimes",
        "maxUnavailable=0",
        "openshift=perhaps",
    ] {
        let output = on_chart(&helm, &["template", "dnsflow"], &[value])?;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{value}");
        assert!(errors.contains("values don't meet"), "{value}: {errors}");
    }
    let lint = on_chart(&helm, &["lint", "--strict"], &[])?;
    let said = String::from_utf8_lossy(&lint.stdout);
    assert!(lint.status.success(), "{said}");
    Ok(())
}

#[test]
fn the_hooks_do_what_they_are_for_and_are_no_agents() -> Result<()> {
    let Some(helm) = helm() else {
        return Ok(());
    };
    let objects = rendered_by(&helm, &[], &["restricted=true"])?;
    let hooks: Vec<&Value> = objects
        .iter()
        .filter(|object| !object["metadata"]["annotations"]["helm.sh/hook"].is_null())
        .collect();
    let kinds: Vec<&str> = hooks
        .iter()
        .filter_map(|hook| hook["kind"].as_str())
        .collect();
    let own = ["Job", "Pod", "Role", "RoleBinding", "ServiceAccount"];
    assert_eq!(BTreeSet::from_iter(kinds), BTreeSet::from(own));
    let without: Vec<Value> = rendered(&helm, &["restricted=true"])?;
    let agents = Objects::of(&without)?;
    let selected = agents.daemon_sets[0].spec.selector.match_labels.as_ref();
    let selected = selected.context("a selector")?;
    for hook in hooks {
        match hook["kind"].as_str() {
            Some("Pod") => {
                let check: Pod = typed(hook)?;
                let labels = check.metadata.labels.context("labels")?;
                assert!(
                    selected
                        .iter()
                        .all(|(name, value)| labels.get(name) != Some(value))
                );
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
                let labels = labels.context("labels")?;
                assert!(
                    selected
                        .iter()
                        .all(|(name, value)| labels.get(name) != Some(value))
                );
                let container = &template.spec.context("a spec")?.containers[0];
                let words = container.command.iter().chain(&container.args).flatten();
                let command = Cli::try_parse_from(words)?.command;
                let options::Command::CleanupNodes(nodes) = command else {
                    bail!("{command:?}");
                };
                assert_eq!(nodes.namespace, "dnsflow");
            }
            _ => {}
        }
    }
    Ok(())
}

#[test]
fn the_chart_has_the_version_of_the_agent_and_a_comment_for_each_value() -> Result<()> {
    let chart = &documents(&directory("helm/dnsflow/Chart.yaml"))?[0];
    for field in ["version", "appVersion"] {
        assert_eq!(chart[field], env!("CARGO_PKG_VERSION"), "{field}");
    }
    let text = std::fs::read_to_string(directory("helm/dnsflow/values.yaml"))?;
    let values = &documents(&directory("helm/dnsflow/values.yaml"))?[0];
    for name in values.as_object().context("values")?.keys() {
        let lines: Vec<&str> = text.lines().collect();
        let line = format!("{name}:");
        let place = lines.iter().position(|other| other.starts_with(&line));
        let place = place.context("at the beginning of a line")?;
        // Of a group, its members have comments.
        let is_said = |place: usize| lines[place].trim_start().starts_with('#');
        assert!(is_said(place - 1) || is_said(place + 1), "{name}");
    }
    Ok(())
}
