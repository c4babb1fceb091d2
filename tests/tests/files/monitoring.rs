//! Alerts and dashboard fit together, to the documents, and to Prometheus.
//!
//! That their metrics are exported is a unit test of the agent, which knows the metrics.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs, process,
};

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

const RULES: &str = "helm/dnsflow/monitoring/rules.yaml";
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
# Made from deploy/helm/dnsflow/monitoring/rules.yaml; a test compares them, and writes this file with {}=1.
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
    let as_rules = env::temp_dir().join(format!("dnsflow-dashboard-{}.yaml", process::id()));
    fs::write(&as_rules, rules_of_the_dashboard()?)?;
    let checked = promtool("check", as_rules.clone());
    fs::remove_file(as_rules)?;
    checked?;
    Ok(())
}

/// The expressions of the dashboard as recording rules, for promtool to read.
fn rules_of_the_dashboard() -> Result<String> {
    let mut rules = Vec::new();
    for panel in panels()? {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().context("an expression")?;
            let expression = expression.replace("$__rate_interval", "5m");
            let record = format!("panel_{}_{}", panel["id"], rules.len());
            rules.push(serde_json::json!({"record": record, "expr": expression}));
        }
    }
    // JSON is YAML, too.
    let group = serde_json::json!({"groups": [{"name": "dashboard", "rules": rules}]});
    Ok(group.to_string())
}

/// The panels of the dashboard; rows are panels, too.
fn panels() -> Result<Vec<Value>> {
    let text = fs::read_to_string(directory("helm/dnsflow/monitoring/dashboard.json"))?;
    let mut dashboard: Value = serde_json::from_str(&text)?;
    let panels = dashboard["panels"].take();
    Ok(panels.as_array().context("panels")?.clone())
}

#[test]
fn every_panel_says_what_it_shows_in_which_unit() -> Result<()> {
    let mut rows = Vec::new();
    let mut ids = BTreeSet::new();
    for panel in panels()? {
        let title = panel["title"].as_str().context("a title")?;
        assert!(
            !title.is_empty() && ids.insert(panel["id"].as_u64()),
            "{title}"
        );
        if panel["type"] == "row" {
            rows.push(title.to_owned());
            continue;
        }
        let unit = panel["fieldConfig"]["defaults"]["unit"].as_str();
        let description = panel["description"].as_str();
        for text in [unit, description] {
            assert!(text.is_some_and(|text| !text.is_empty()), "{title}");
        }
        let targets = panel["targets"].as_array().context("targets")?;
        let mut references = BTreeSet::new();
        for target in targets {
            assert!(references.insert(target["refId"].as_str()), "{title}");
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}");
            let expression = target["expr"].as_str().context("an expression")?;
            // Grafana chooses the range; those of its own are shorter than two scrapes at some zoom.
            let ranges = expression.matches('[').count();
            let by_grafana = expression.matches("[$__rate_interval]").count();
            assert_eq!(ranges, by_grafana, "{title}: {expression}");
            // What is of all nodes counts agents that should be there.
            let is_of_all = expression.contains("kube_daemonset");
            let is_selected = expression.contains("instance=~\"$instance\"");
            assert_ne!(is_of_all, is_selected, "{title}: {expression}");
            let is_by_namespace = expression.contains("egressfirewall_namespace=~\"$namespace\"");
            let has_namespace = expression.contains("dnsflow_denied_connections_total");
            assert_eq!(has_namespace, is_by_namespace, "{title}: {expression}");
        }
    }
    let expected = [
        "Is it well",
        "Is anything blocked that should pass",
        "What does it cost",
    ];
    assert_eq!(rows, expected);
    Ok(())
}

#[test]
fn no_panel_covers_another() -> Result<()> {
    let mut places = BTreeMap::new();
    for panel in panels()? {
        let at = |what: &str| panel["gridPos"][what].as_u64().context("a place");
        let (x, y, w, h) = (at("x")?, at("y")?, at("w")?, at("h")?);
        assert!(w > 0 && h > 0 && x + w <= 24, "{panel}");
        for place in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            let before = places.insert(place, panel["title"].clone());
            assert_eq!(before, None, "{panel}");
        }
    }
    Ok(())
}
