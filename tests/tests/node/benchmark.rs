//! The short form of the benchmark: every row can be filled. The values are not looked at.

use dnsflow_tests::lab;
use serde_json::Value;

use crate::bench;

/// The fields that say what was to be measured; latencies are objects.
const NUMBERS: &[&str] = &[
    "activation_vs_ofctl",
    "activation_vs_dnstap",
    "unrelated_added_pct",
    "syn_lost.hold",
    "syn_lost.observe",
    "syn_lost.ofctl",
    "syn_lost_neighbour.hold",
    "answers_per_s",
    "cpu_us_per_match",
    "tcp_throughput_pct",
    "tcp_throughput_routed_pct",
    "restart_lost",
    "rss_mib_100k",
];
const LATENCIES: &[&str] = &[
    "activation_us",
    "hold_added_us",
    "connect_added_us",
    "match_ns_10k",
    "explain_ms_8k.name",
    "explain_ms_8k.address",
    "resync_ms_100k",
];

#[test]
fn every_row_of_the_benchmark_can_be_filled() {
    let lab = lab!("bench-short", agent);
    let plot = lab.base().join("bench.svg");
    let json = lab.base().join("bench.json");
    let options = bench::Options {
        short: true,
        json: Some(json.clone()),
        svg: Some(plot.clone()),
        ..bench::Options::default()
    };
    let report = bench::run(&lab, &options, &|text| println!("{text}")).expect("it measures");
    println!("{}", report.table());
    let written = std::fs::read_to_string(json).expect("the values are written");
    let values: Value = serde_json::from_str(&written).expect("they are JSON");
    let value = |field: &str| {
        let pointer = format!("/{}", field.replace('.', "/"));
        values.pointer(&pointer).cloned().unwrap_or_default()
    };
    for field in NUMBERS {
        let value = value(field);
        assert!(value.is_number(), "{field}: {value}");
    }
    for field in LATENCIES {
        let value = value(field);
        for part in ["p50", "p90", "p99", "max", "n"] {
            assert!(value[part].is_number(), "{field}: {value}");
        }
    }
    let plot = std::fs::read_to_string(plot).expect("the plot is written");
    assert!(
        plot.starts_with("<svg") && plot.ends_with("</svg>\n"),
        "{plot}"
    );
}
