//! The core alone, in this process: no lab, no switch.
//!
//! Measured here and not by a benchmark harness of its own, so that one run fills one file. The
//! program has to be optimized for the figures to mean anything; `machine.optimized` says so.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dnsflow_core::{
    Command, Input, Timestamp,
    engine::{Config, Engine},
    io::input::FlowReply,
    ovn::rows::{Interface, InterfaceUpdate, RowId},
    policy::rules::{ActiveRule, NamePattern, RuleSet},
    testing,
    values::{firewall::RuleAction, flow::FlowChange, limits::CacheLimits, name::DomainName},
};

use crate::bench::{
    distribution::Distribution,
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
            verdict: RuleAction::Allow,
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

const INTERFACE: RowId = RowId::new(7);
const IFINDEX: u32 = 7;

/// The row `resync_ms_100k`: 100,000 cache entries of one port, whose flows are all planned anew, because the
/// port has moved while the switch was away, and then compared with an empty switch. Timed from the
/// moved port to the last of the batches that put 100,000 flows back.
pub(crate) fn resync(stage: &Stage<'_>) -> Result<Measured> {
    let entries = stage.scale(100_000, 2000);
    let mut node = Node::new(usize::try_from(entries)?)?;
    for number in 0..entries {
        node.answer(number)?;
    }
    let flows = node.engine.flow_count();
    ensure!(
        flows == usize::try_from(entries)?,
        "{flows} flows for {entries} answers"
    );
    let mut millis = Vec::new();
    for round in 0..stage.scale(20, 3) {
        node.give(Input::SwitchDown);
        node.obey();
        let start = Instant::now();
        node.give(interface(100 + round));
        node.give(Input::SwitchUp);
        node.engine.take_commands();
        node.give(EMPTY);
        let changes = node.obey();
        millis.push(start.elapsed().as_secs_f64() * 1e3);
        ensure!(
            changes == usize::try_from(entries)?,
            "{changes} changes for {entries} flows"
        );
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

/// What a dump of an empty switch brings.
const EMPTY: Input = Input::Reply(FlowReply::Flows {
    flows: Vec::new(),
    more: false,
});

/// An engine on a bridge without OVN, with one pod and one rule. Its switch obeys and remembers nothing:
/// only the engine is timed.
struct Node {
    engine: Engine,
    now: Timestamp,
}

impl Node {
    fn new(entries: usize) -> Result<Self> {
        let profile = "table=44,priority=10000,reg0=0x100/0x100,actions=resubmit(,45)";
        let resolver = "10.96.0.10";
        let config = Config {
            profile: Some(profile.parse()?),
            resolvers: [resolver.parse()?].into(),
            cache_limits: CacheLimits {
                addresses_per_port_max: entries,
                ..CacheLimits::default()
            },
            // All addresses are opened at once.
            flow_changes_per_second: u32::MAX,
            ..Config::default()
        };
        let mut node = Self {
            engine: Engine::new(config),
            now: Timestamp::from_nanos(1_000_000_000_000),
        };
        node.give(Input::SwitchUp);
        let firewall = testing::firewall(&[testing::allow("example.com")]);
        node.give(testing::firewalls(true, Some(firewall)));
        node.give(interface(1));
        node.give(Input::Attached {
            interface: INTERFACE,
            ifindex: IFINDEX,
        });
        node.obey();
        node.give(EMPTY);
        node.obey();
        Ok(node)
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
        let frame = testing::frame(IFINDEX, self.now, &bytes);
        self.engine.handle_frame(frame, self.now);
        self.obey();
        Ok(())
    }
}

fn interface(ofport: u32) -> Input {
    let row = Interface {
        ofport: Some(ofport),
        ..testing::interface("ns1_pod1", 5, "uid")
    };
    Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(INTERFACE, Some(row))],
    })
}
