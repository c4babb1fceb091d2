//! Alerts fit to the documents, and to Prometheus.
//!
//! That their metrics are exported is a unit test of the agent, which knows the metrics.

use std::{env, fs};

use anyhow::{Context as _, Result};
use dnsflow_tests::{
    process::run,
    root::Root,
    support::{PROMETHEUS, not_run, root_directory, this_test, workspace},
};
use serde_json::Value;

use crate::{
    manifests::{directory, documents},
    snapshots,
};

const RULES: &str = "monitoring/rules.yaml";
const PROMETHEUS_RULE: &str = "components/prometheusrule/prometheusrule.yaml";

/// The alerts of the rule file, by name.
fn alerts() -> Result<Vec<(String, Value)>> {
    let mut files = documents(&directory(RULES))?;
    let groups = files.pop().context("a document")?["groups"].take();
    let groups = groups.as_array().context("groups")?.iter();
    let mut alerts = Vec::new();
    for rule in groups
        .filter_map(|group| group["rules"].as_array())
        .flatten()
    {
        let name = rule["alert"].as_str().context("an alert")?;
        alerts.push((name.to_owned(), rule.clone()));
    }
    Ok(alerts)
}

/// The rule file as an object of the Prometheus Operator.
fn prometheus_rule(rules: &str) -> Result<String> {
    let (_, groups) = rules.split_once("\ngroups:\n").context("groups")?;
    let mut text = format!(
        "\
# Made from deploy/monitoring/rules.yaml; a test compares them, and writes this file with {}=1.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: dnsflow
  namespace: dnsflow
  labels:
    app.kubernetes.io/name: dnsflow
    app.kubernetes.io/part-of: dnsflow
    app.kubernetes.io/version: \"{}\"
spec:
  groups:
",
        snapshots::BLESS,
        env!("CARGO_PKG_VERSION")
    );
    for line in groups.lines() {
        text += &format!("  {line}\n");
    }
    Ok(text)
}

#[test]
fn the_prometheus_rule_is_the_rule_file() -> Result<()> {
    let text = prometheus_rule(&fs::read_to_string(directory(RULES))?)?;
    let file = directory(PROMETHEUS_RULE);
    if env::var_os(snapshots::BLESS).is_some() {
        fs::write(&file, &text)?;
    }
    let is_same = fs::read_to_string(&file)? == text;
    assert!(is_same, "run this test with {}=1", snapshots::BLESS);
    let object = documents(&file)?.pop().context("an object")?;
    let rules = documents(&directory(RULES))?.pop().context("a document")?;
    assert_eq!(object["spec"], rules);
    Ok(())
}

#[test]
fn every_alert_has_a_section_that_its_runbook_names() -> Result<()> {
    let document = fs::read_to_string(workspace()?.join("docs/troubleshooting.md"))?;
    let sections = document
        .lines()
        .filter_map(|line| line.strip_prefix("### "));
    let sections: Vec<&str> = sections
        .filter(|name| name.starts_with("Dnsflow"))
        .collect();
    let alerts = alerts()?;
    let names: Vec<&str> = alerts.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(sections, names);
    for (name, alert) in &alerts {
        let anchor = name.to_lowercase();
        let runbook = format!("docs/troubleshooting.md#{anchor}");
        assert_eq!(alert["annotations"]["runbook"], runbook, "{name}");
        let severity = alert["labels"]["severity"].as_str();
        assert!(matches!(severity, Some("critical" | "warning")), "{name}");
        for text in ["summary", "description"] {
            assert!(alert["annotations"][text].is_string(), "{name}: {text}");
        }
        // An alert for all nodes names some of them.
        let expression = alert["expr"].as_str().context("an expression")?;
        let is_for_all = expression.starts_with("count") || expression.starts_with("sum(");
        let names_nodes = alert["annotations"]["nodes"].is_string();
        assert_eq!(is_for_all, names_nodes, "{name}");
    }
    Ok(())
}

#[test]
fn promtool_accepts_the_rules_and_their_tests() -> Result<()> {
    let (name, _) = PROMETHEUS;
    let Ok(root) = Root::existing(&root_directory(name)?) else {
        not_run(&this_test(), "no promtool; `cargo xtask test` fetches one");
        return Ok(());
    };
    let promtool = |what: &str, file| -> Result<String> {
        run(root.command("promtool")?.args([what, "rules"]).arg(file))
    };
    promtool("check", directory(RULES))?;
    let tests = workspace()?.join("tests/tests/files/alerts.yaml");
    promtool("test", tests)?;
    Ok(())
}
