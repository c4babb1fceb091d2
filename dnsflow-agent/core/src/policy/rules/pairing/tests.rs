use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::{
    ovn::rows::{Acl, LogicalFlow, Pipeline},
    policy::rules::ChangedName,
    testing::{allow, deny, deny_all, firewall},
    values::flow::{Protocol, Transport},
};

/// Two spellings of a name, and a wildcard.
const NAMES: [&str; 4] = ["a.test", "A.test", "*.a.test", "b.test"];
const GROUPS: [&str; 2] = ["a1", "a2"];
const ROWS: u128 = 5;
const PRIORITIES: Range<u16> = 10_998..11_001;

/// An ACL and its logical flows.
type Rows = Option<(Acl, bool, Vec<LogicalFlow>)>;

#[derive(Clone, Debug)]
enum Step {
    Row(u128, Rows),
    Rules(Firewall),
    Settle,
}

fn rule() -> impl Strategy<Value = Rule> {
    let ports = proptest::collection::vec(
        Just(Transport {
            protocol: Protocol::Tcp,
            port: Some(443),
        }),
        0..2,
    );
    let invalid = Rule {
        destination: Destination::Invalid("bad".into()),
        ..deny_all()
    };
    let named = (0..NAMES.len(), any::<bool>(), ports).prop_map(|(name, allows, ports)| {
        let rule = match allows {
            true => allow(NAMES[name]),
            false => deny(NAMES[name]),
        };
        Rule { ports, ..rule }
    });
    prop_oneof![6 => named, 1 => Just(deny_all()), 1 => Just(invalid)]
}

fn resource() -> impl Strategy<Value = Firewall> {
    let subdomains = prop_oneof![Just(None), Just(Some(false))];
    (proptest::collection::vec(rule(), 0..5), subdomains).prop_map(|(rules, subdomains)| Firewall {
        subdomains,
        ..firewall(&rules)
    })
}

/// The match of an ACL for a name in one of its spellings, for a network, or one that nobody understands.
fn acl_text() -> impl Strategy<Value = String> {
    let named = (
        0..NAMES.len(),
        0..2usize,
        any::<bool>(),
        any::<bool>(),
        0..2usize,
    )
        .prop_map(|(name, form, both, with_port, group)| {
            let name: DnsName = NAMES[name].parse().expect("a name");
            let [v4, v6] = [Family::V4, Family::V6].map(|one| address_set_hashes(&name, one)[form]);
            let v6 = if both {
                format!(" || ip6.dst == $a{v6}")
            } else {
                String::new()
            };
            let ports = if with_port {
                " && ((tcp && ( tcp.dst == 443 )))"
            } else {
                ""
            };
            format!(
                "(ip4.dst == $a{v4}{v6}) && inport == @{}{ports}",
                GROUPS[group]
            )
        });
    let other = Just("(ip4.dst == 0.0.0.0/0) && inport == @a1".to_owned());
    prop_oneof![8 => named, 1 => other, 1 => Just("frobnicate".to_owned())]
}

fn logical_flow() -> impl Strategy<Value = LogicalFlow> {
    let test = prop_oneof![6 => Just("reg0[8] == 1"), 1 => Just("frobnicate")];
    let actions = prop_oneof![
        4 => Just("next;"),
        1 => Just("log(); next;"),
        1 => Just("frobnicate(); next;")
    ];
    let flow = (acl_text(), test, actions, 4..6u8, PRIORITIES);
    flow.prop_map(|(text, test, actions, table_id, priority)| LogicalFlow {
        pipeline: Pipeline::Egress,
        table_id,
        priority,
        matches: format!("{test} && ({text})"),
        actions: actions.into(),
        stage_hint: None,
    })
}

fn rows() -> impl Strategy<Value = Rows> {
    let flows = proptest::collection::vec(logical_flow(), 0..3);
    let acl = (0..5u32, acl_text(), any::<bool>(), any::<bool>(), flows).prop_map(
        |(rule_index, matches, allows, is_present, flows)| {
            let acl = Acl {
                namespace: "ns1".into(),
                rule_index,
                priority: 10_000,
                matches,
                action: if allows { "allow" } else { "drop" }.into(),
            };
            (acl, is_present, flows)
        },
    );
    proptest::option::weighted(0.8, acl)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..ROWS, rows()).prop_map(|(id, row)| Step::Row(id, row)),
        2 => resource().prop_map(Step::Rules),
        3 => Just(Step::Settle),
    ]
}

fn set(pairing: &mut Pairing, id: u128, row: &Rows) {
    let row = row.as_ref().map(|(acl, is_present, flows)| AclRow {
        acl,
        is_present: *is_present,
        flows: flows.iter().map(|flow| (RowId::new(0), flow)).collect(),
    });
    pairing.set_row(RowId::new(id), row.as_ref());
}

/// The rules of these rows and this EgressFirewall, from nothing.
fn fresh(rows: &BTreeMap<u128, Rows>, firewall: &Firewall) -> Pairing {
    let mut pairing = Pairing::new("ns1", true);
    pairing.set_firewall(firewall);
    for (id, row) in rows {
        set(&mut pairing, *id, row);
    }
    pairing.settle(&CachedActions::new());
    pairing
}

/// The names whose rules are not the same, by port group, and whether a name can tell: by the rules that match it, or by
/// their actions.
fn difference(one: &NamespaceRules, other: &NamespaceRules) -> BTreeMap<String, ChangedNames> {
    let none = RuleSet::default();
    let groups = one.sets.keys().chain(other.sets.keys());
    let changed = groups.map(|group| {
        let [one, other] = [one, other].map(|rules| rules.sets.get(group).unwrap_or(&none));
        // Of several rules of one name, the first counts where their flows have the same key: the order matters.
        let names = one.rules().iter().chain(other.rules());
        let names = names.map(|rule| rule.name.name());
        let names = names.filter(|name| !one.named(name).eq(other.named(name)));
        let names = names.map(|name| {
            let in_other = |rule: &ActiveRule, set: &RuleSet| {
                let mut others = set.named(name);
                others.any(|other| (other.pattern, other.action) == (rule.pattern, rule.action))
            };
            let is_in_place = one.named(name).all(|rule| in_other(rule, other))
                && other.named(name).all(|rule| in_other(rule, one));
            let change = match is_in_place {
                true => ChangedName::InPlace,
                false => ChangedName::Otherwise,
            };
            (name.clone(), change)
        });
        (group.clone(), names.collect::<ChangedNames>())
    });
    changed.filter(|(_, names)| !names.is_empty()).collect()
}

/// The indices of each set are those of its rules.
fn check_indices(rules: &NamespaceRules) {
    for set in rules.sets.values() {
        let places = |is_it: &dyn Fn(&ActiveRule) -> bool| {
            let rules = set.rules().iter().enumerate();
            let places = rules
                .filter(|(_, rule)| is_it(rule))
                .map(|(place, _)| place);
            places.collect::<Vec<usize>>()
        };
        for priority in PRIORITIES {
            let has_it = |rule: &ActiveRule| {
                let mut templates = rule.templates.iter();
                templates.any(|template| template.priority == priority)
            };
            let mut known = set.at_priority(priority).to_vec();
            known.sort_unstable();
            assert_eq!(known, places(&has_it));
        }
    }
}

/// What a set counts, beside its rules.
fn counted(rules: &NamespaceRules) -> Vec<impl PartialEq + std::fmt::Debug> {
    let sets = rules.sets.iter().map(|(group, set)| {
        let places: Vec<_> = set.places().collect();
        let sources: Vec<_> = set.sources().cloned().collect();
        (group.clone(), set.any_denies(), places, sources)
    });
    sets.collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever has changed before, the rules are those that rows and resource have now.
    #[test]
    fn changes_come_to_what_a_fresh_look_finds(steps in proptest::collection::vec(step(), 1..25), candidate in resource()) {
        let mut pairing = Pairing::new("ns1", true);
        let mut rows: BTreeMap<u128, Rows> = BTreeMap::new();
        let mut now = Firewall::default();
        let mut seen = vec![candidate];
        for step in steps {
            match step {
                Step::Row(id, row) => {
                    set(&mut pairing, id, &row);
                    rows.insert(id, row);
                }
                Step::Rules(firewall) => {
                    pairing.set_firewall(&firewall);
                    seen.push(firewall.clone());
                    now = firewall;
                }
                Step::Settle => {
                    let before = pairing.rules().clone();
                    let changes = pairing.settle(&CachedActions::new());
                    let mut fresh = fresh(&rows, &now);
                    prop_assert_eq!(difference(pairing.rules(), fresh.rules()), BTreeMap::new());
                    prop_assert_eq!(&pairing.rules().problems, &fresh.rules().problems);
                    prop_assert_eq!(counted(pairing.rules()), counted(fresh.rules()));
                    check_indices(pairing.rules());
                    prop_assert_eq!(pairing.denying(), fresh.denying());
                    prop_assert_eq!(changes.names, difference(&before, pairing.rules()));
                    let (old, new) = (&before.problems, &pairing.rules().problems);
                    let indices: BTreeSet<&u32> = old.keys().chain(new.keys()).collect();
                    let changed = indices.into_iter().filter(|index| old.get(index) != new.get(index));
                    prop_assert_eq!(changes.problems, changed.copied().collect::<Vec<u32>>());
                    let mentioned = |pairing: &Pairing| pairing.mentioned().cloned().collect::<BTreeSet<_>>();
                    prop_assert_eq!(mentioned(&pairing), mentioned(&fresh));
                    for firewall in &seen {
                        prop_assert_eq!(pairing.is_enforced(firewall), fresh.is_enforced(firewall));
                    }
                }
            }
        }
    }
}

/// A namespace with so many rules in force, and what an edit of one of them costs: of the resource, of the ACL, of its
/// logical flow.
fn work_of_an_edit(count: u32) -> [usize; 3] {
    let rules = |edited: &str| {
        let names = (0..count).map(|index| allow(&format!("n{index}.test")));
        let mut rules: Vec<Rule> = names.collect();
        rules[3] = allow(edited);
        firewall(&rules)
    };
    let row = |index: u32, firewall: &Firewall, of_flow: &Firewall| {
        let text = |firewall: &Firewall| {
            let name = name_of(&firewall.rules[index as usize]).expect("a name");
            let [hash, _] = address_set_hashes(name, Family::V4);
            format!("(ip4.dst == $a{hash}) && inport == @a1")
        };
        let acl = Acl {
            namespace: "ns1".into(),
            rule_index: index,
            priority: 10_000,
            matches: text(firewall),
            action: "allow".into(),
        };
        let flow = LogicalFlow {
            pipeline: Pipeline::Egress,
            table_id: 4,
            priority: 11_000,
            matches: format!("reg0[8] == 1 && ({})", text(of_flow)),
            actions: "next;".into(),
            stage_hint: None,
        };
        Some((acl, true, vec![flow]))
    };
    let (before, after) = (rules("before.test"), rules("after.test"));
    let mut pairing = Pairing::new("ns1", true);
    for index in 0..count {
        set(&mut pairing, index.into(), &row(index, &before, &before));
    }
    assert!(pairing.is_enforced(&before));
    pairing.set_firewall(&before);
    pairing.settle(&CachedActions::new());
    assert!(std::mem::take(&mut pairing.work) > count as usize);
    // OVN has not followed.
    assert!(!pairing.is_enforced(&after));
    assert!(pairing.is_enforced(&before));
    pairing.set_firewall(&before);
    pairing.settle(&CachedActions::new());
    let of_resource = std::mem::take(&mut pairing.work);
    let mut step = |changed: Rows, is_served: bool| {
        set(&mut pairing, 3, &changed);
        assert!(pairing.is_enforced(&after));
        pairing.set_firewall(&after);
        pairing.settle(&CachedActions::new());
        assert_eq!(pairing.rules().problems.is_empty(), is_served);
        std::mem::take(&mut pairing.work)
    };
    let of_acl = step(row(3, &after, &before), false);
    let of_flow = step(row(3, &after, &after), true);
    [of_resource, of_acl, of_flow]
}

#[test]
fn an_edit_costs_by_what_it_changes_and_not_by_the_other_rules() {
    let few = work_of_an_edit(10);
    assert_eq!(few, work_of_an_edit(1_000));
}
