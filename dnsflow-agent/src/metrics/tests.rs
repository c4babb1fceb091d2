use std::collections::BTreeSet;

use dnsflow_core::engine::Config;

use super::*;

/// What a scrape of an agent without a kernel has.
fn families() -> Vec<Family> {
    let mut families = of_engine(&Engine::new(Config::default()));
    families.extend([
        of_databases(&DatabaseCounters::default()),
        Family::counter("log_lines_lost", "help", 0),
        Family::counter("journal_events_lost", "help", 0),
    ]);
    families.extend(of_packets(Packets::default()));
    families.extend(of_denials(Counts::default()));
    families.push(of_events(&EventCounters::default()));
    families
}

#[test]
fn the_documentation_lists_every_metric() {
    let documented: BTreeSet<String> = include_str!("../../../docs/metrics.md")
        .lines()
        .filter_map(|line| line.strip_prefix("| `dnsflow_"))
        .filter_map(|line| line.split(['`', '{']).next())
        .map(str::to_owned)
        .collect();
    let suffix = |family: &Family| match family.kind {
        Kind::Counter => "_total",
        Kind::Gauge => "",
    };
    let families = families();
    let exported = families
        .iter()
        .map(|family| format!("{}{}", family.name, suffix(family)));
    let others = ["build_info", "activation_seconds", "held_answer_seconds"].map(str::to_owned);
    let exported: BTreeSet<String> = exported.chain(others).collect();
    assert_eq!(documented, exported);
}

#[test]
fn no_metric_has_a_label_without_a_bound() {
    let families = families();
    let labels = families.iter().filter_map(|family| match &family.values {
        // The number of rules that are counted has a limit.
        Values::One(_) | Values::ByRule(_) => None,
        Values::Labelled(label, _) => Some(*label),
    });
    let labels: BTreeSet<_> = labels.collect();
    let bounded = [
        "change", "database", "event", "reason", "result", "severity", "state",
    ];
    assert_eq!(labels, bounded.into());
}

#[test]
fn a_family_is_written_once_with_all_its_values() {
    let mut registry = Registry::with_prefix("dnsflow");
    let families = vec![
        Family::counters(
            "answers",
            "Answers.",
            "result",
            [("known", 2), ("opening", 1)],
        ),
        Family::gauge("flows", "Flows.", 7),
    ];
    registry.register_collector(Box::new(Families(families)));
    let mut text = String::new();
    encode(&mut text, &registry).expect("a text");
    assert_eq!(
        text,
        "\
# HELP dnsflow_answers Answers.
# TYPE dnsflow_answers counter
dnsflow_answers_total{result=\"known\"} 2
dnsflow_answers_total{result=\"opening\"} 1
# HELP dnsflow_flows Flows.
# TYPE dnsflow_flows gauge
dnsflow_flows 7
# EOF
"
    );
}

/// The names of the metrics in a text: words that begin with `dnsflow_` or `process_`.
fn named_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let names = words.filter(|word| word.starts_with("dnsflow_") || word.starts_with("process_"));
    names
        .map(|name| {
            name.replace("_seconds_bucket", "_seconds")
                .replace("_seconds_count", "_seconds")
        })
        .collect()
}

/// The labels in the selectors of a text, with the values that they must have.
fn selected_in(text: &str) -> BTreeSet<(String, String)> {
    let text = text.replace('\\', "");
    let selected = text.split(['{', ',', '}']).filter_map(|selector| {
        let (label, value) = selector.split_once("=\"")?;
        Some((label.to_owned(), value.strip_suffix('"')?.to_owned()))
    });
    selected.collect()
}

/// The labels that the agent exports, with their values.
fn exported_labels() -> BTreeSet<(String, String)> {
    let mut labels = BTreeSet::new();
    let mut add = |label: &str, value: &str| labels.insert((label.to_owned(), value.to_owned()));
    for family in families() {
        match family.values {
            Values::One(_) => {}
            Values::Labelled(label, values) => values.iter().for_each(|(value, _)| {
                add(label, value);
            }),
            Values::ByRule(values) => values.iter().for_each(|(_, _, reason, _)| {
                add("reason", reason);
            }),
        }
    }
    add("result", "overrun");
    labels
}

#[test]
fn alerts_and_dashboard_name_metrics_that_are_exported() {
    let exported = exported_labels();
    let documented = named_in(include_str!("../../../docs/metrics.md"));
    for (file, text) in [
        (
            "rules.yaml",
            include_str!("../../../deploy/helm/dnsflow/monitoring/rules.yaml"),
        ),
        (
            "dashboard.json",
            include_str!("../../../deploy/helm/dnsflow/monitoring/dashboard.json"),
        ),
    ] {
        let named = named_in(text);
        assert!(named.len() > 5, "{file}");
        let selected = selected_in(text);
        assert!(selected.len() > 1, "{file}");
        // That of kube-state-metrics.
        let kube = ("daemonset".to_owned(), "dnsflow".to_owned());
        let mut unknown = selected
            .difference(&exported)
            .filter(|label| **label != kube);
        assert_eq!(unknown.next(), None, "{file}");
        let unknown: Vec<_> = named.difference(&documented).collect();
        assert!(unknown.is_empty(), "{file}: {unknown:?}");
    }
}
