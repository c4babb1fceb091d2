//! The agent's metrics, in the text format of OpenMetrics.
//!
//! Counters and gauges are the numbers that the agent keeps anyway: a scrape asks for them. None has the
//! name of a pod, of a name or of an address as a label: their number is bounded. `docs/metrics.md` lists
//! them; a test compares the list.

mod process;

use std::{
    fmt,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use dnsflow_common::reason::Reason;
use dnsflow_core::{
    Timestamp,
    ask::view::Totals,
    engine::Engine,
    io::{counters::Counters, input::HeldFrame},
    tools::counter_vec::{CounterVec, Label},
};
use dnsflow_ovsdb::OvsdbCounters;
use hyper::body::Bytes;
use prometheus_client::{
    collector::Collector,
    encoding::{
        DescriptorEncoder, EncodeMetric as _, MetricEncoder,
        text::{encode, encode_registry},
    },
    metrics::{
        counter::ConstCounter, family::Family as ByLabel, gauge::ConstGauge, histogram::Histogram,
        info::Info,
    },
    registry::{Registry, Unit},
};
use tokio::sync::Mutex;

use process::OfProcess;

use crate::{
    asking::VERSION,
    denied_connections::{Counts, DenialCounts},
    inquiries::Inquiries,
    journal::Journal,
    k8s::events::EventCounters,
    logging::LostLines,
    ovn_db::{nb, sb},
    vswitch_db,
};

/// The `Content-Type` of a scrape.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A scrape is answered with numbers that are no older than this: whoever may connect cannot take the hot
/// thread's time by asking often.
const FRESH: Duration = Duration::from_secs(1);

/// The upper bounds of the histograms, in seconds: answers that wait for nothing take a fraction of a millisecond, others
/// up to `--hold-max`.
const SECONDS: [f64; 13] = [
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
];

/// The counters of the connections to the databases.
#[derive(Clone, Debug, Default)]
pub struct DatabaseCounters {
    /// OVN's northbound database.
    pub northbound: Arc<OvsdbCounters>,
    /// OVN's southbound database.
    pub southbound: Arc<OvsdbCounters>,
    /// Open vSwitch's database.
    pub vswitch: Arc<OvsdbCounters>,
}

/// What is observed as it happens.
#[derive(Clone, Debug)]
pub struct Observed {
    /// From the capture of an answer to the flows in force.
    activation: Histogram,
    /// From the capture of an answer to its way back, by whether its wait was over.
    held: ByLabel<[(&'static str, &'static str); 1], Histogram>,
    /// The same of an answer that went back when its addresses were open, or at once if they were.
    in_time: Histogram,
    /// The same of an answer that was held for as long as `--hold-max`.
    overrun: Histogram,
}

impl Default for Observed {
    fn default() -> Self {
        let held = ByLabel::new_with_constructor(histogram as fn() -> Histogram);
        // The hot thread looks none of them up.
        let of_result = |result| held.get_or_create_owned(&[("result", result)]);
        Self {
            activation: histogram(),
            in_time: of_result("in_time"),
            overrun: of_result("overrun"),
            held,
        }
    }
}

fn histogram() -> Histogram {
    Histogram::new(SECONDS)
}

impl Observed {
    /// The flows for an answer are in force.
    pub fn opened(&self, activation: Duration) {
        self.activation.observe(activation.as_secs_f64());
    }

    /// A held answer goes back.
    pub fn released(&self, frame: &HeldFrame, now: Timestamp) {
        let result = match frame.is_overrun {
            true => &self.overrun,
            false => &self.in_time,
        };
        result.observe(now.since(frame.captured_at).as_secs_f64());
    }
}

/// The packets that the TC programs have looked at, by what became of them, and those that the agent could not put back.
#[derive(Clone, Debug, Default)]
pub struct Packets {
    /// Those to the pods.
    pub to_pods: Vec<(Reason, u64)>,
    /// Those from the pods.
    pub from_pods: Vec<(Reason, u64)>,
    /// Answers that were held and are not back on their veths.
    pub lost: Vec<(&'static str, u64)>,
}

/// Reads the counters of the TC programs.
pub type ReadPackets = Box<dyn Fn() -> Packets + Send + Sync>;

/// What a scrape is made from.
pub struct Metrics {
    inquiries: Inquiries,
    packets: ReadPackets,
    journal: Arc<Journal>,
    lost_lines: LostLines,
    observed: Observed,
    denials: DenialCounts,
    events: Arc<EventCounters>,
    databases: DatabaseCounters,
    /// The last answer, and when it was made.
    last: Mutex<Option<(Instant, Bytes)>>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Metrics of these sources.
    pub fn new(
        inquiries: Inquiries,
        packets: ReadPackets,
        journal: Arc<Journal>,
        lost_lines: LostLines,
        observed: Observed,
        denials: DenialCounts,
        events: Arc<EventCounters>,
    ) -> Self {
        Self {
            inquiries,
            packets,
            journal,
            lost_lines,
            observed,
            denials,
            events,
            databases: DatabaseCounters::default(),
            last: Mutex::default(),
        }
    }

    /// The same with the counters of the databases.
    pub fn of_databases(self, databases: DatabaseCounters) -> Self {
        Self { databases, ..self }
    }

    /// All metrics; `None` where the hot thread does not answer.
    pub async fn scrape(&self) -> Option<Bytes> {
        let mut last = self.last.lock().await;
        if let Some((at, text)) = &*last
            && at.elapsed() < FRESH
        {
            return Some(text.clone());
        }
        let mut families = self.inquiries.ask(|engine, _| of_engine(engine)).await?;
        families.extend(of_packets((self.packets)()));
        families.extend(of_denials(self.denials.read()));
        families.extend([
            of_events(&self.events),
            of_databases(&self.databases),
            Family::counter(
                "log_lines_lost",
                "Log lines lost: the reader was too slow.",
                self.lost_lines.count() as u64,
            ),
            Family::counter(
                "journal_events_lost",
                "Events missing in `dnsflow observe`: they came during a reading.",
                self.journal.lost(),
            ),
        ]);
        let text = Bytes::from(self.write(families)?);
        *last = Some((Instant::now(), text.clone()));
        Some(text)
    }

    fn write(&self, families: Vec<Family>) -> Option<String> {
        let mut registry = Registry::with_prefix("dnsflow");
        let version = Info::new([("version", VERSION)]);
        registry.register("build", "The version of the agent", version);
        registry.register_with_unit(
            "activation",
            "From the capture of an answer in the kernel to its flows in force",
            Unit::Seconds,
            self.observed.activation.clone(),
        );
        registry.register_with_unit(
            "held_answer",
            "From the capture of a held answer in the kernel to its way back onto the veth",
            Unit::Seconds,
            self.observed.held.clone(),
        );
        registry.register_collector(Box::new(Families(families)));
        let mut text = String::new();
        encode_registry(&mut text, &registry).ok()?;
        // Every exporter calls these the same: without the prefix.
        let mut of_process = Registry::default();
        of_process.register_collector(Box::new(OfProcess(process::read())));
        encode(&mut text, &of_process).ok()?;
        Some(text)
    }
}

/// A metric with its values.
#[derive(Debug)]
struct Family {
    /// Without prefix and suffix.
    name: &'static str,
    help: &'static str,
    kind: Kind,
    values: Values,
}

#[derive(Debug)]
enum Values {
    /// One, without a label.
    One(u64),
    /// One for each value of this label.
    Labelled(&'static str, Vec<(&'static str, u64)>),
    /// One for each rule of an EgressFirewall and each reason: namespace, index of the rule, reason, value.
    ByRule(Vec<(String, String, &'static str, u64)>),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Counter,
    Gauge,
}

impl Family {
    fn counter(name: &'static str, help: &'static str, value: u64) -> Self {
        Self {
            name,
            help,
            kind: Kind::Counter,
            values: Values::One(value),
        }
    }

    fn gauge(name: &'static str, help: &'static str, value: usize) -> Self {
        Self {
            kind: Kind::Gauge,
            ..Self::counter(name, help, value as u64)
        }
    }

    fn counters(
        name: &'static str,
        help: &'static str,
        label: &'static str,
        values: impl Into<Vec<(&'static str, u64)>>,
    ) -> Self {
        Self {
            name,
            help,
            kind: Kind::Counter,
            values: Values::Labelled(label, values.into()),
        }
    }

    fn gauges<const N: usize>(
        name: &'static str,
        help: &'static str,
        label: &'static str,
        values: [(&'static str, usize); N],
    ) -> Self {
        let values = values.map(|(value, count)| (value, count as u64));
        Self {
            kind: Kind::Gauge,
            ..Self::counters(name, help, label, values)
        }
    }

    fn by_reason<L: Label>(
        name: &'static str,
        help: &'static str,
        label: &'static str,
        counts: &CounterVec<L>,
    ) -> Self {
        let values = counts
            .iter()
            .map(|(reason, count)| (reason.as_str(), count));
        Self::counters(name, help, label, values.collect::<Vec<_>>())
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Counter => ConstCounter::new(0u64).metric_type(),
            Kind::Gauge => ConstGauge::new(0i64).metric_type(),
        };
        let mut metric = encoder.encode_descriptor(self.name, self.help, None, kind)?;
        match &self.values {
            Values::One(value) => self.encode_value(*value, metric),
            Values::Labelled(label, values) => values.iter().try_for_each(|(of, value)| {
                let labels = [(*label, *of)];
                self.encode_value(*value, metric.encode_family(&labels)?)
            }),
            Values::ByRule(values) => {
                values
                    .iter()
                    .try_for_each(|(namespace, rule, reason, value)| {
                        // `namespace` is what Prometheus calls the agent's own.
                        let labels = [
                            ("egressfirewall_namespace", &**namespace),
                            ("rule", rule),
                            ("reason", reason),
                        ];
                        self.encode_value(*value, metric.encode_family(&labels)?)
                    })
            }
        }
    }

    fn encode_value(&self, value: u64, encoder: MetricEncoder<'_>) -> fmt::Result {
        match self.kind {
            Kind::Counter => ConstCounter::new(value).encode(encoder),
            Kind::Gauge => {
                ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(encoder)
            }
        }
    }
}

/// All metrics of one scrape.
#[derive(Debug)]
struct Families(Vec<Family>);

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Self(families) = self;
        families
            .iter()
            .try_for_each(|family| family.encode(&mut encoder))
    }
}

/// What became of what is to be told as Kubernetes Events.
fn of_events(counters: &EventCounters) -> Family {
    let EventCounters {
        created,
        known,
        failures,
        dropped,
    } = counters;
    let results = [
        ("created", created),
        ("known", known),
        ("failed", failures),
        ("dropped", dropped),
    ];
    Family::counters(
        "event_notices",
        "Notices for Kubernetes Events by result; a failed one is tried again.",
        "result",
        results.map(|(result, count)| (result, count.load(Relaxed))),
    )
}

fn of_databases(counters: &DatabaseCounters) -> Family {
    let DatabaseCounters {
        northbound,
        southbound,
        vswitch,
    } = counters;
    let databases = [
        (nb::DATABASE.name, northbound),
        (sb::DATABASE.name, southbound),
        (vswitch_db::DATABASE.name, vswitch),
    ];
    Family::counters(
        "database_rows_skipped",
        "Skipped database rows: too long, or with an unknown value.",
        "database",
        databases.map(|(database, counters)| (database, counters.rows_skipped.load(Relaxed))),
    )
}

/// What the engine counts. Its fields are listed in full, so that none can be forgotten.
fn of_engine(engine: &Engine) -> Vec<Family> {
    let Counters {
        frames,
        frames_not_dns,
        frames_unknown_interface,
        frames_untrusted_server,
        answers_malformed,
        answers_unusable,
        answers_unmatched,
        answers_unmentioned,
        answers_not_deferred,
        answers_known,
        addresses_opened_by_kernel,
        answers_dry_run,
        answers_opening,
        addresses_ended,
        addresses_evicted,
        addresses_refused,
        names_dropped,
        addresses_over_budget,
        addresses_cut,
        reports_left_out,
        flows_added,
        flows_removed,
        marks_restored,
        marks_removed,
        marks_refused,
        records_lost,
        flows_restored,
        flows_refused,
        connections_unblocked,
        connections_left_blocked,
    } = *engine.counters();
    let Totals {
        is_ready,
        switch_is_connected,
        resolvers,
        attached,
        pending,
        failed,
        not_trusted,
        tables_left_out,
        tables_unread,
        firewalls,
        waiting,
        not_in_force,
        caveats,
        addresses,
        names,
        flows,
    } = engine.view().totals();
    vec![
        Family::gauge(
            "ready",
            "1 if all sources were read and the switch was compared, else 0.",
            is_ready.into(),
        ),
        Family::gauge(
            "switch_connected",
            "1 while the OpenFlow connection is up, else 0.",
            switch_is_connected.into(),
        ),
        Family::gauge("resolvers", "Trusted DNS servers.", resolvers),
        Family::gauges(
            "ports",
            "Logical ports of the node by attachment of the TC programs.",
            "state",
            [
                ("attached", attached),
                ("pending", pending),
                ("failed", failed),
            ],
        ),
        Family::gauge(
            "ports_not_trusted",
            "Logical ports whose DNS answers are ignored.",
            not_trusted,
        ),
        Family::gauges(
            "database_tables_too_large",
            "Tables of databases larger than their limits, by whether the agent works without them.",
            "state",
            [("left_out", tables_left_out), ("needed", tables_unread)],
        ),
        Family::gauge("firewalls", "EgressFirewalls of the cluster.", firewalls),
        Family::gauges(
            "rule_problems",
            "Rules of EgressFirewalls with a problem, by its effect.",
            "severity",
            [
                ("waiting", waiting),
                ("not_in_force", not_in_force),
                ("caveat", caveats),
            ],
        ),
        Family::gauge("cache_addresses", "Addresses in the cache.", addresses),
        Family::gauge("cache_names", "Names that lead to these addresses.", names),
        Family::gauge("flows", "Flows that should be in the switch.", flows),
        Family::counter("frames", "Frames from the TC program.", frames),
        Family::counters(
            "frames_ignored",
            "Frames that are no DNS answer of a trusted server to a known pod.",
            "reason",
            [
                ("not_dns", frames_not_dns),
                ("unknown_interface", frames_unknown_interface),
                ("untrusted_server", frames_untrusted_server),
            ],
        ),
        Family::counters(
            "answers",
            "DNS answers by result.",
            "result",
            [
                ("malformed", answers_malformed),
                ("unusable", answers_unusable),
                ("unmatched", answers_unmatched),
                ("known", answers_known),
                ("dry_run", answers_dry_run),
                ("opening", answers_opening),
            ],
        ),
        Family::counter(
            "addresses_opened_by_kernel",
            "Addresses opened by the kernel without the agent.",
            addresses_opened_by_kernel,
        ),
        Family::counter(
            "addresses_ended",
            "Addresses whose time is over, and whose established connections go on.",
            addresses_ended,
        ),
        Family::counter(
            "answers_unmentioned",
            "Answers for names without a rule in the namespace.",
            answers_unmentioned,
        ),
        Family::counter(
            "answers_not_deferred",
            "Answers from before the rules of their pod were known, lost for later rules.",
            answers_not_deferred,
        ),
        Family::counters(
            "addresses_not_kept",
            "Addresses without room, by limit.",
            "reason",
            [
                ("evicted", addresses_evicted),
                ("no_room", addresses_refused),
                ("over_budget", addresses_over_budget),
                ("too_many_flows", addresses_cut),
            ],
        ),
        Family::counter(
            "names_not_kept",
            "Names without room at their address.",
            names_dropped,
        ),
        Family::by_reason(
            "addresses_refused",
            "Addresses that are never opened, by reason.",
            "reason",
            engine.refused(),
        ),
        Family::counter(
            "reports_left_out",
            "Reports left out: too many for one pod, or too many of refused flows.",
            reports_left_out,
        ),
        Family::counters(
            "flow_changes",
            "Changes of flows in the switch.",
            "change",
            [
                ("added", flows_added),
                ("removed", flows_removed),
                ("restored", flows_restored),
                ("refused", flows_refused),
            ],
        ),
        Family::counters(
            "mark_changes",
            "Corrected marks in the kernel, and refused ones.",
            "change",
            [
                ("restored", marks_restored),
                ("removed", marks_removed),
                ("refused", marks_refused),
            ],
        ),
        Family::counter(
            "journal_records_lost",
            "Records that are missing in the journal.",
            records_lost,
        ),
        Family::counters(
            "blocked_connections",
            "Connections blocked by OVN in a gap of the flows, by result.",
            "result",
            [
                ("unblocked", connections_unblocked),
                ("left_blocked", connections_left_blocked),
            ],
        ),
        Family::by_reason(
            "held_answers",
            "Held answers by event.",
            "event",
            engine.hold_events(),
        ),
        Family::by_reason(
            "revalidation_waits",
            "Whether new flows had to wait for revalidation, by batch.",
            "reason",
            engine.revalidation_waits(),
        ),
        Family::by_reason(
            "revalidation_ends",
            "Ends of the waits for revalidation, by reason.",
            "event",
            engine.revalidation_events(),
        ),
        Family::by_reason(
            "tcp_events",
            "TCP segments of DNS by event.",
            "event",
            engine.tcp_events(),
        ),
        Family::by_reason(
            "fragment_events",
            "IP fragments of DNS by event.",
            "event",
            engine.fragment_events(),
        ),
    ]
}

/// What is counted of denied connections.
fn of_denials(counts: Counts) -> [Family; 3] {
    let Counts {
        by_rule,
        others,
        reports_left_out,
        not_judged,
        places_forgotten,
    } = counts;
    let by_rule = by_rule.into_iter();
    let by_rule = by_rule.map(|((namespace, rule, reason), count)| {
        (namespace, rule.to_string(), reason.as_str(), count)
    });
    // No namespace has an empty name.
    let others = others.iter();
    let others =
        others.map(|(reason, count)| (String::new(), String::new(), reason.as_str(), count));
    [
        Family {
            name: "denied_connections",
            help: "Denied connections of pods, to one destination once in ten seconds.",
            kind: Kind::Counter,
            values: Values::ByRule(others.chain(by_rule).collect()),
        },
        Family::counters(
            "denials_left_out",
            "Connection attempts without a judgement, and denials without a report.",
            "reason",
            [
                ("not_judged", not_judged),
                ("over_budget", reports_left_out),
            ],
        ),
        Family::counter(
            "history_places_forgotten",
            "Destinations forgotten within an hour: no room.",
            places_forgotten,
        ),
    ]
}

/// What the TC programs count, and the agent where it puts packets back.
fn of_packets(packets: Packets) -> [Family; 3] {
    let Packets {
        to_pods,
        from_pods,
        lost,
    } = packets;
    let values = |counts: Vec<(Reason, u64)>| {
        let counts = counts.into_iter();
        let counts = counts.map(|(reason, count)| (reason.as_str(), count));
        counts.collect::<Vec<_>>()
    };
    [
        Family::counters(
            "packets_to_pods",
            "Packets to the pods at the TC program, by reason.",
            "reason",
            values(to_pods),
        ),
        Family::counters(
            "packets_from_pods",
            "Packets from the pods at the TC program, by reason.",
            "reason",
            values(from_pods),
        ),
        Family::counters(
            "held_answers_lost",
            "Held answers that did not go back onto the pod's veth, by reason.",
            "reason",
            lost,
        ),
    ]
}

#[cfg(test)]
mod tests;
