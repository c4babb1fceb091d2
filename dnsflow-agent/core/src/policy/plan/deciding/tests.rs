use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::{
    ovn::{
        rows::Pipeline,
        template::{AclTemplate, ActionTemplate, ActionText, CachedActions, Step},
    },
    policy::{
        plan::Room,
        rules::{ActiveRule, NamePattern, RuleSet},
    },
    values::flow::{Protocol, Transport},
};

/// A rule: its name, its set, its index, how many ports it lists, and how it is enforced.
type Made = (usize, usize, u32, u16, Kind);

#[derive(Clone, Copy, Debug)]
enum Kind {
    Allow,
    Deny,
    /// The actions are to be copied, and nothing to copy from is known.
    DenyWithoutFlows,
    DenyOfOtherFamily,
}

const NAMES: usize = 14;

/// The last one is above all others.
fn name_of(rule: usize) -> String {
    match rule {
        NAMES => "test".to_owned(),
        _ => format!("n{rule}.test"),
    }
}

fn made() -> impl Strategy<Value = Made> {
    let ports = prop_oneof![4 => 0..4_u16, 1 => Just(100)];
    let kind = prop_oneof![
        2 => Just(Kind::Allow),
        4 => Just(Kind::Deny),
        1 => Just(Kind::DenyWithoutFlows),
        1 => Just(Kind::DenyOfOtherFamily),
    ];
    (0..=NAMES, 0..2_usize, 0..20_u32, ports, kind)
}

fn sets_of(rules: &[Made]) -> [RuleSet; 2] {
    let mut sets = [RuleSet::default(), RuleSet::default()];
    for (priority, (name, set, index, ports, kind)) in (1..).zip(rules) {
        let actions = match kind {
            Kind::DenyWithoutFlows => ActionTemplate::Copy {
                source: ActionText {
                    pipeline: Pipeline::Egress,
                    table_id: 4,
                    actions: "reject".to_owned(),
                },
                meanwhile: None,
            },
            _ => ActionTemplate::Build(vec![Step::Next]),
        };
        let port = |port| Transport {
            protocol: Protocol::Tcp,
            port: Some(port),
        };
        let is_v4 = !matches!(kind, Kind::DenyOfOtherFamily);
        sets[*set].push(ActiveRule {
            namespace: "ns1".to_owned(),
            index: *index,
            name: name_of(*name).parse().expect("a name"),
            pattern: NamePattern::Subdomains,
            v4: is_v4,
            v6: !is_v4,
            transports: (0..*ports).map(port).collect(),
            action: match kind {
                Kind::Allow => RuleAction::Allow,
                _ => RuleAction::Deny,
            },
            templates: vec![Arc::new(AclTemplate {
                pipeline: Pipeline::Egress,
                table_id: 4,
                priority,
                registers: BTreeMap::new(),
                actions,
            })],
        });
    }
    sets
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_plan_is_that_of_all_rules(
        rules in proptest::collection::vec(made(), 1..60),
        told in proptest::collection::vec((0..=NAMES, 0..20_u8), 1..30),
        is_little in any::<bool>(),
        denials_only in any::<bool>(),
    ) {
        let sets = sets_of(&rules);
        let sets = [&sets[0], &sets[1]];
        let nothing = CachedActions::new();
        let facts = PortFacts::of_test(&sets, &nothing);
        let to = IpAddr::from([203, 0, 113, 1]);
        let basis = Basis {
            version: 0,
            denials_only,
            is_denied: true,
        };
        let mut room = if is_little { Room::Little } else { Room::Usual };
        let mut planner = Planner::default();
        let mut names: Vec<DomainName> = Vec::new();
        let mut known = None;
        let mut last = None;
        for (rule, event) in told {
            let name: DomainName = format!("a{}.{}", names.len(), name_of(rule)).parse().expect("a name");
            let matched: MatchedRules = matched_by_any(&sets, [&name].into_iter());
            match event {
                // A name has come without a plan, or the room is another one.
                0 => names.push("of-none.other".parse().expect("a name")),
                1 => room = if room == Room::Little { Room::Usual } else { Room::Little },
                _ => {}
            }
            names.push(name);
            let many = ManyNames {
                names: names.iter(),
                basis,
                space: Space { room, ..Space::default() },
                known,
                further: Some(&matched),
                may_stay: event % 2 == 0,
            };
            let (planned, deciding) = planner.for_many(facts, to, many);
            let mut all = matched_by_any(&sets, names.iter());
            let denies = |place: &(usize, usize)| sets[place.0].rules()[place.1].action == RuleAction::Deny;
            all.retain(|place| !denials_only || denies(place));
            let wanted = planner.for_rules(facts, to, &all, &Space { room, ..Space::default() });
            let planned = planned.or(last).expect("a plan stays that was made");
            prop_assert_eq!(planned.cut_of_own(), wanted.cut_of_own());
            prop_assert_eq!((&planned.plan, planned.is_cut), (&wanted.plan, wanted.is_cut));
            prop_assert_eq!(planned.clone().into_own(), wanted.into_own());
            // Each number of flows from 1 to the room's, and two rules of each set that do not fit.
            let most = FLOWS_PER_ADDRESS_MAX;
            let most: usize = (1..=most).map(|size| most / size + 1).sum();
            prop_assert!(!deciding.is_crowded || deciding.rules.len() <= most + 4);
            known = Some(deciding);
            last = Some(planned);
        }
    }
}
