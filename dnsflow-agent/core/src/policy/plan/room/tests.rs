use proptest::prelude::*;

use super::*;
use crate::{
    ovn::{
        rows::Pipeline,
        template::{AclTemplate, ActionTemplate, CachedActions, Step},
    },
    policy::{
        plan::matched_by_any,
        rules::{ActiveRule, NamePattern},
    },
    values::flow::{FlowTemplate, Masked, Protocol, Transport},
};

#[test]
fn parts_are_equal_and_what_one_does_not_need_the_others_have() {
    for (wanted, part) in [
        (vec![100, 100], 256),
        (vec![100, 200], 156),
        (vec![200, 100, 1], 155),
        (vec![300, 300, 300], 85),
        (vec![1, 300, 0, 300], 127),
        (vec![2; 300], 0),
    ] {
        assert_eq!(fair_part(wanted.clone(), 256), part, "{wanted:?}");
        let used: usize = wanted.iter().map(|wanted| part.min(*wanted)).sum();
        assert!(used <= 256, "{wanted:?}");
    }
}

const NAMES: usize = 6;
const PORTS: u16 = 12;

/// A rule: its name, its set, its ports (none is all), and whether it denies.
type Made = (usize, usize, Vec<u16>, bool);

/// An edit, if it comes with rules; the names that lead to the address; and its room.
type Look = (Option<Vec<Made>>, Vec<usize>, Room);

fn rules() -> impl Strategy<Value = Vec<Made>> {
    let ports = prop_oneof![
        1 => Just(Vec::new()),
        6 => proptest::collection::vec(0..PORTS, 1..6),
        // More than all of an address.
        1 => Just((100..400).collect()),
    ];
    let is_denied = prop_oneof![2 => Just(false), 1 => Just(true)];
    proptest::collection::vec((0..NAMES, 0..2_usize, ports, is_denied), 1..12)
}

fn looks() -> impl Strategy<Value = Vec<Look>> {
    let edit = proptest::option::of(rules());
    let names = proptest::collection::vec(0..NAMES, 1..NAMES);
    let room = prop_oneof![
        3 => Just(Room::Least),
        1 => Just(Room::Little),
        2 => Just(Room::Usual),
    ];
    proptest::collection::vec((edit, names, room), 1..12)
}

/// The port's rules. Those of a stateful switch have two logical flows each, for packets of two kinds.
fn sets_of(rules: &[Made], is_stateful: bool) -> [RuleSet; 2] {
    let mut sets = [RuleSet::default(), RuleSet::default()];
    for (index, (name, set, ports, is_denied)) in (0_u32..).zip(rules) {
        let template = |kind| AclTemplate {
            pipeline: Pipeline::Egress,
            table_id: 4,
            priority: 1000 - index as u16,
            registers: [(0, Masked::new(kind, 1))].into(),
            actions: ActionTemplate::Build(if *is_denied { vec![] } else { vec![Step::Next] }),
        };
        let kinds = if is_stateful { 0..2 } else { 0..1 };
        let mut ports = ports.clone();
        ports.sort_unstable();
        ports.dedup();
        let port = |port| Transport {
            protocol: Protocol::Tcp,
            port: Some(port),
        };
        sets[*set].push(ActiveRule {
            namespace: "ns1".to_owned(),
            index,
            name: format!("n{name}.test").parse().expect("a name"),
            pattern: NamePattern::Subdomains,
            v4: true,
            v6: false,
            transports: ports.into_iter().map(port).collect(),
            action: match is_denied {
                true => RuleAction::Deny,
                false => RuleAction::Allow,
            },
            templates: kinds.map(|kind| Arc::new(template(kind))).collect(),
        });
    }
    sets
}

/// The flow that decides over packets of this kind to a port.
fn deciding(plan: &Plan, kind: u32, port: u16) -> Option<&FlowTemplate> {
    let flows = plan.iter().map(|flow| &**flow);
    let matching = flows.filter(|flow| {
        let is_for = |transport: Transport| transport.port == Some(port);
        flow.registers[&0].value() == kind && flow.transport.is_none_or(is_for)
    });
    matching.max_by_key(|flow| flow.priority)
}

fn closes_all(flow: &FlowTemplate) -> bool {
    flow.denies && flow.transport.is_none()
}

/// How many flows have room of their own or are kept.
fn in_room(plan: &Plan) -> impl Iterator<Item = Traffic> {
    let flows = plan.iter().filter(|flow| !closes_all(flow));
    flows.map(|flow| flow.traffic())
}

/// More than all flows of an address.
const SPARE: usize = 2 * FLOWS_PER_ADDRESS_MAX;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn less_room_opens_nothing_closes_nothing_that_is_open_and_has_an_end(
        first in rules(),
        looks in looks(),
        is_stateful in any::<bool>(),
    ) {
        let mut planner = Planner::default();
        let mut sets = sets_of(&first, is_stateful);
        let to = IpAddr::from([203, 0, 113, 1]);
        let mut own = Plan::new();
        for (edit, names, room) in looks {
            if let Some(edit) = edit {
                sets = sets_of(&edit, is_stateful);
                planner.forget();
            }
            let sets = [&sets[0], &sets[1]];
            let nothing = CachedActions::new();
            let facts = PortFacts::of_test(&sets, &nothing);
            let names: Vec<DomainName> = names
                .iter()
                .map(|name| format!("n{name}.test").parse().expect("a name"))
                .collect();
            let matched = matched_by_any(&sets, names.iter());
            let has: Vec<Traffic> = in_room(&own).collect();
            let spare = if matched.len() % 2 == 0 { SPARE } else { 0 };
            let most = room.flows().max(has.len()).max(spare);
            let planned = planner.for_rules(facts, to, &matched, &Space { room, has, spare });
            let all = planned.plan.clone();
            let former = std::mem::replace(&mut own, planned.into_own());
            // One flow in which a set closes, for packets of each kind, is beyond.
            let closing = own.iter().filter(|flow| closes_all(flow)).count();
            prop_assert!(in_room(&own).count() <= most);
            prop_assert!(own.len() <= most + closing.min(4));
            for kind in 0..2 {
                for port in 0..=PORTS {
                    let by_all = deciding(&all, kind, port);
                    let now = deciding(&own, kind, port);
                    let opens = now.is_some_and(|flow| !flow.denies);
                    let may_open = by_all.is_some_and(|flow| !flow.denies);
                    prop_assert!(may_open || !opens, "opens {port}");
                    let must_close = by_all.is_some_and(|flow| flow.denies);
                    prop_assert!(!must_close || now.is_some_and(|flow| flow.denies), "denies not {port}");
                    let was_open = deciding(&former, kind, port).filter(|flow| !flow.denies);
                    let stays = was_open.zip(by_all).filter(|(was, all)| {
                        let is_spared = spare > 0 && was.transport.is_none();
                        !all.denies && (was.transport == all.transport || is_spared)
                    });
                    if let Some((_, all)) = stays {
                        let closes = |flow: &FlowTemplate| closes_all(flow) && flow.priority > all.priority;
                        prop_assert!(opens || now.is_some_and(closes), "closes {port}");
                    }
                }
            }
        }
    }
}
