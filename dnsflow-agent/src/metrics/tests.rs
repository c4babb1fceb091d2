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

/// The names of the metrics in a text: words that begin with `dnsflow_`.
fn named_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let names = words.filter_map(|word| word.strip_prefix("dnsflow_"));
    names
        .map(|name| {
            name.replace("_seconds_bucket", "_seconds")
                .replace("_seconds_count", "_seconds")
        })
        .collect()
}

#[test]
fn alerts_and_dashboard_name_metrics_that_are_exported() {
    let documented = named_in(include_str!("../../../docs/metrics.md"));
    for (file, text) in [
        (
            "rules.yaml",
            include_str!("../../../deploy/monitoring/rules.yaml"),
        ),
        (
            "dashboard.json",
            include_str!("../../../deploy/monitoring/dashboard.json"),
        ),
    ] {
        let named = named_in(text);
        assert!(named.len() > 5, "{file}");
        let unknown: Vec<_> = named.difference(&documented).collect();
        assert!(unknown.is_empty(), "{file}: {unknown:?}");
    }
}
