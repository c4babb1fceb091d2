//! The core alone, in this process: no lab, no switch.
//!
//! Measured here and not by a benchmark harness of its own, so that one run fills one file. The
//! program has to be optimized for the figures to mean anything; `machine.optimized` says so.

use std::{
    collections::BTreeMap,
    hint::black_box,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use dnsflow_core::{
    Command, Input, Timestamp,
    ask::view::{Beside, Judged, Target, Verdict},
    engine::{Config, Engine},
    io::input::{FlowQuestion, FlowReply},
    ovn::rows::{NbUpdate, PortBinding, RowId, SbUpdate},
    policy::rules::{ActiveRule, NamePattern, RuleSet},
    testing,
    values::{
        connection::Attempt,
        firewall::{Rule, RuleAction},
        flow::{FlowChange, Protocol},
        limits::{CacheLimits, NAMES_PER_ADDRESS_MAX},
        name::DomainName,
    },
};

use crate::bench::{
    distribution::{Distribution, Latency},
    report::Measured,
    stage::{Stage, matching as matching_name},
    wire,
};

const RULES: u32 = 10_000;
/// Names that are timed together: one alone is shorter than the clock is exact.
const TOGETHER: usize = 100;

/// The row `match_ns_10k`: names of five labels, every other one of a rule.
pub(crate) fn matching(stage: &Stage<'_>) -> Result<Measured> {
    let mut rules = RuleSet::default();
    for index in 0..RULES {
        rules.push(ActiveRule {
            namespace: "ns1".into(),
            index,
            name: format!("r{index}.example.org").parse()?,
            pattern: NamePattern::Subdomains,
            v4: true,
            v6: true,
            transports: Vec::new(),
            action: RuleAction::Allow,
            templates: Vec::new(),
        });
    }
    let names: Vec<DomainName> = (0..RULES)
        .map(|index| {
            let rule = index.wrapping_mul(7919) % (2 * RULES);
            DomainName::from_presentation(&format!("a.b.r{rule}.example.org"))
        })
        .collect::<Result<_, _>>()?;
    let mut found = 0;
    let mut nanos = Vec::new();
    for _ in 0..stage.scale(50, 2) {
        for names in names.chunks(TOGETHER) {
            let start = Instant::now();
            for name in names {
                found += black_box(rules.matching(black_box(name)).count());
            }
            nanos.push(start.elapsed().as_nanos() as f64 / names.len() as f64);
        }
    }
    ensure!(found > 0, "no rule was found");
    let latency = Distribution::of(nanos).context("names")?.latency();
    Ok(Measured::default().field("match_ns_10k", latency)?.line(
        "one name against 10,000 rules",
        format!("p50 {:.0} ns, p99 {:.0} ns", latency.p50, latency.p99),
        "≤ 1 µs",
        latency.p99 <= 1000.0,
    ))
}

/// Rules of the namespace that people ask about: as many as ovn-kubernetes has priorities for
/// (`MinimumReservedEgressFirewallPriority` in its go-controller/pkg/types/const.go).
const RULES_OF_NAMESPACE: u32 = 8000;

/// The rows `explain_ms_8k` and `attempt_us_8k`: the hot thread's time for a question about a pod whose EgressFirewall
/// has 8,000 rules, by a name and by an address that the pod was not told. Each question is two inquiries, as the control socket makes them:
/// before OVN was asked about the address, and after. No answer is opened during an inquiry.
pub(crate) fn explain(stage: &Stage<'_>) -> Result<Measured> {
    let count = stage.scale(RULES_OF_NAMESPACE, 200);
    let node = node_with(count, |index| format!("r{index}.example.org"));
    let beside = [None, Some(BTreeMap::new())].map(|sets| Beside {
        sets,
        ..Beside::default()
    });
    let (mut longest, mut of_both) = (0.0_f64, Vec::new());
    for target in ["www.r99.example.org:443", "203.0.113.7:443"] {
        let target: Target = target.parse()?;
        let mut millis = Vec::new();
        for _ in 0..stage.scale(100, 3) {
            let mut question = 0.0;
            for beside in &beside {
                let start = Instant::now();
                let view = node.engine.view();
                let explained = view.explain("ns1_p1", black_box(&target), beside, node.now);
                let inquiry = start.elapsed().as_secs_f64() * 1e3;
                ensure!(
                    explained.is_some_and(|one| one.verdict != Verdict::Allowed),
                    "the pod was told nothing"
                );
                question += inquiry;
                longest = longest.max(inquiry);
            }
            millis.push(question);
        }
        of_both.push(Distribution::of(millis).context("questions")?.latency());
    }
    let [name, address] = of_both[..] else {
        bail!("two kinds of questions");
    };
    let one_name = |_| "example.org".to_owned();
    let usual = attempt(stage, node, &[])?;
    let of_one_name = attempt(stage, node_with(count, one_name), &[])?;
    let in_front = "a.".repeat(110);
    let long = (0..NAMES_PER_ADDRESS_MAX - 2).map(|name| format!("{name}.{in_front}example.org"));
    let long: Vec<String> = long.collect();
    let named = node_with(count, |index| format!("r{index}.example.org"));
    let of_long_names = attempt(stage, named, &long)?;
    Ok(Measured::default()
        .field("explain_ms_8k.name", name)?
        .field("explain_ms_8k.address", address)?
        .field("attempt_us_8k.names", usual)?
        .field("attempt_us_8k.one_name", of_one_name)?
        .field("attempt_us_8k.long_names", of_long_names)?
        .line(
            "an attempt to connect among 8,000 rules, on the hot thread",
            format!(
                "{:.0} µs, {:.0} µs if all rules have its name, {:.0} µs at an address with many long names, at p50",
                usual.p50, of_one_name.p50, of_long_names.p50
            ),
            "≤ 1 ms",
            of_one_name.p50.max(of_long_names.p50) <= 1000.0,
        )
        .line(
            "`explain` among 8,000 rules, on the hot thread",
            format!(
                "by name {:.1} ms, by address {:.1} ms at p50; one inquiry {longest:.1} ms at most",
                name.p50, address.p50
            ),
            "one inquiry ≤ 10 ms",
            longest <= 10.0,
        ))
}

/// A node whose pod has so many rules, each of which allows a name, but for the last one, which denies all.
fn node_with(count: u32, name: impl Fn(u32) -> String) -> testing::Node {
    let names = (1..count).map(|index| testing::allow(&name(index)));
    let rules: Vec<Rule> = names.chain([testing::deny_all()]).collect();
    let mut node = testing::Node::with(&rules);
    let rows = 0..count;
    let acls = rows
        .clone()
        .map(|i| (testing::acl_row(i), testing::acl(i, &rules)));
    node.give(Input::Nb(NbUpdate {
        acls: acls.collect(),
        ..NbUpdate::default()
    }));
    let flows = rows.map(|i| {
        (
            testing::logical_flow_row(i),
            testing::logical_flow(i, &rules),
        )
    });
    node.give(Input::Sb(SbUpdate {
        logical_flows: flows.collect(),
        ..SbUpdate::default()
    }));
    node
}

/// The hot thread's time for an attempt of the pod to connect to an address of the name of the 99th rule, and of these
/// names, in µs.
fn attempt(stage: &Stage<'_>, mut node: testing::Node, names: &[String]) -> Result<Latency> {
    let told = ["example.org", "r99.example.org"];
    for name in told.into_iter().chain(names.iter().map(String::as_str)) {
        node.answer("p1", name, &[[203, 0, 113, 9]], 3600);
    }
    let attempt = Attempt {
        ifindex: testing::ifindex_of(node.pods["ns1_p1"]),
        protocol: Protocol::Tcp,
        address: "203.0.113.9".parse()?,
        port: 443,
        at: node.now,
    };
    let mut micros = Vec::new();
    for _ in 0..stage.scale(100, 3) {
        let start = Instant::now();
        let judged = node
            .engine
            .view()
            .judge_attempt(black_box(&attempt), &[], node.now);
        micros.push(start.elapsed().as_secs_f64() * 1e6);
        ensure!(matches!(judged, Judged::Allowed(_)), "a rule allows it");
    }
    Ok(Distribution::of(micros).context("attempts")?.latency())
}

/// The row of the node's pod p1.
const POD: RowId = RowId::new(0x105);

/// The row `resync_ms_100k`: 100,000 cache entries of one port, whose flows are all planned anew, because the
/// port has moved while the switch was away, and then compared with an empty switch. Timed from the
/// moved port to the last of the batches that put 100,000 flows back.
pub(crate) fn resync(stage: &Stage<'_>) -> Result<Measured> {
    let entries = stage.scale(100_000, 2000);
    let mut node = Node::new(usize::try_from(entries)?);
    node.answer(0)?;
    let of_first = node.engine.flow_count();
    for number in 1..entries {
        node.answer(number)?;
    }
    // Those of the group are there once for all addresses.
    let flows = node.engine.flow_count();
    ensure!(
        flows == of_first + usize::try_from(entries)? - 1,
        "{flows} flows for {entries} answers, {of_first} for the first"
    );
    let mut millis = Vec::new();
    for round in 0..stage.scale(20, 3) {
        // A dump says nothing of a flow that was written when it began.
        node.now = node.now + Duration::from_millis(1);
        node.give(Input::SwitchDown);
        node.obey();
        let start = Instant::now();
        node.give(port_binding(100 + round));
        node.give(Input::SwitchUp);
        let asked = node.engine.take_commands().into_iter();
        let number = asked.filter_map(|command| match command {
            Command::Ask(FlowQuestion::Dump { number, .. }) => Some(number),
            _ => None,
        });
        let number = number.last().context("no dump is asked for")?;
        node.give(Input::Reply(FlowReply::Flows {
            number,
            flows: Vec::new(),
            more: false,
        }));
        let changes = node.obey();
        millis.push(start.elapsed().as_secs_f64() * 1e3);
        ensure!(changes == flows, "{changes} changes for {flows} flows");
    }
    let latency = Distribution::of(millis).context("rounds")?.latency();
    Ok(Measured::default().field("resync_ms_100k", latency)?.line(
        "plan and diff of 100,000 flows",
        format!(
            "{:.0} ms at p50, {:.0} ms at most",
            latency.p50, latency.max
        ),
        "≤ 100 ms",
        latency.p50 <= 100.0,
    ))
}

fn is_of_entry(change: &FlowChange) -> bool {
    match change {
        FlowChange::Add(_, body) => !body.cookie.is_of_sentinel(),
        FlowChange::Delete(_, cookie) => cookie.is_none_or(|cookie| !cookie.is_of_sentinel()),
        FlowChange::Renew(_) => false,
    }
}

/// An engine with one pod and one rule. Its switch obeys and remembers nothing: only the engine is timed.
struct Node {
    engine: Engine,
    now: Timestamp,
}

impl Node {
    fn new(entries: usize) -> Self {
        let config = Config {
            cache_limits: CacheLimits {
                addresses_per_port_max: entries,
                ..CacheLimits::default()
            },
            // All addresses are opened at once.
            flow_changes_per_second: u32::MAX,
            ..Config::default()
        };
        let mut node = testing::Node::bare();
        node.engine = Engine::new(config);
        let node = node.start(&[testing::allow("example.com")]);
        Self {
            engine: node.engine,
            now: node.now,
        }
    }

    fn give(&mut self, input: Input) {
        self.engine.handle(input, self.now);
    }

    /// Everything that is asked for works; returns how many changes there were of cache entries' flows.
    fn obey(&mut self) -> usize {
        let mut changed = 0;
        loop {
            self.engine.end_turn(self.now);
            let commands = self.engine.take_commands();
            if commands.is_empty() {
                break;
            }
            for command in commands {
                if let Command::Apply { batch, changes, .. } = command {
                    changed += changes.iter().filter(|change| is_of_entry(change)).count();
                    self.give(Input::Applied {
                        batch,
                        result: Ok(()),
                    });
                }
            }
        }
        self.engine.take_reports();
        changed
    }

    fn answer(&mut self, number: u32) -> Result<()> {
        let query = wire::query(7, &matching_name(number));
        let message = wire::answer(&query).context("an answer")?;
        let bytes = testing::udp_frame(&message);
        self.now = self.now + Duration::from_micros(10);
        let frame = testing::frame(testing::ifindex_of(POD), self.now, &bytes);
        self.engine.handle_frame(frame, self.now);
        self.obey();
        Ok(())
    }
}

/// The pod's port has this tunnel key now.
fn port_binding(tunnel_key: u32) -> Input {
    let row = PortBinding {
        tunnel_key,
        ..testing::port_binding("ns1_p1", 5)
    };
    Input::Sb(SbUpdate {
        port_bindings: vec![(POD, Some(row))],
        ..SbUpdate::default()
    })
}
