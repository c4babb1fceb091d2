//! What a restarted agent takes over.

mod new_file;
mod twin;

use std::collections::VecDeque;

use proptest::{collection::vec, prelude::*};

use super::{
    edits::{self, WAYS},
    starts::{self, carry_out_until_dump},
    *,
};
use crate::{
    cache::journal::Folding,
    values::limits::{HOLD_LONGEST, UNKNOWN_DEFERRED_MAX},
};

/// A node as [`Node::with`] makes it, but with what an earlier run has left: its journal, and its
/// flows in the switch. The switch is there first, OVN's southbound database last.
pub(super) fn after_restart(before: &mut Node, saved: &Saved, rules: &[Rule]) -> Node {
    after_restart_with(before, saved, rules, Config::default())
}

/// The same, with other options.
pub(super) fn after_restart_with(
    before: &mut Node,
    saved: &Saved,
    rules: &[Rule],
    config: Config,
) -> Node {
    let node = started(before, saved, config);
    read_all(node, before, rules)
}

/// An agent that has read nothing but the journal, if there is something in it.
pub(super) fn started(before: &mut Node, saved: &Saved, config: Config) -> Node {
    let saved = (*saved != Saved::default()).then(|| saved.clone());
    started_with(before, saved, config)
}

/// The same, if there is a journal.
pub(super) fn started_with(before: &mut Node, saved: Option<Saved>, config: Config) -> Node {
    let mut node = Node::bare();
    node.engine = Engine::new(config);
    node.now = before.now;
    match saved {
        Some(saved) => {
            node.engine.load(saved, node.now);
            node.journal.clone_from(&before.journal);
        }
        None => node.engine.begin_journal(node.now),
    }
    node.trust_server();
    node.switch = std::mem::take(&mut before.switch);
    node.sentinels = std::mem::take(&mut before.sentinels);
    node.keep_flows_s = before.keep_flows_s;
    node.marks = std::mem::take(&mut before.marks);
    node
}

/// What these records say.
fn fold(records: impl IntoIterator<Item = Record>, now: Timestamp) -> Saved {
    let mut folding = Folding::default();
    records.into_iter().for_each(|record| folding.take(record));
    folding.end(now)
}

/// Everything that the earlier run has known is read, with these rules.
fn read_all(node: Node, before: &Node, rules: &[Rule]) -> Node {
    let mut node = read_but_southbound(node, before, rules);
    let sb = southbound(&node, rules);
    node.give(Input::Sb(sb));
    node
}

pub(super) fn read_but_southbound(mut node: Node, before: &Node, rules: &[Rule]) -> Node {
    read_rules(&mut node, rules);
    node.pods = before.pods.clone();
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(RowId::new(0x105), Some(interface("ns1_p1", 5, "uid-p1")))],
    }));
    assert_eq!(node.batches(), [], "untouched until everything is known");
    node
}

/// The switch is there, and the resource and its ACLs are read.
pub(super) fn read_rules(node: &mut Node, rules: &[Rule]) {
    node.give(Input::SwitchUp);
    node.give(firewalls(true, Some(firewall(rules))));
    node.give(Input::Nb(NbUpdate {
        reset: true,
        acls: acls(rules),
        ..NbUpdate::default()
    }));
}

/// What OVN's southbound database says of the pod.
pub(super) fn southbound(node: &Node, rules: &[Rule]) -> SbUpdate {
    SbUpdate {
        reset: true,
        datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
        port_bindings: vec![(
            RowId::new(0x105),
            Some(PortBinding {
                namespace: None,
                ..port_binding("ns1_p1", 5)
            }),
        )],
        port_groups: vec![node.group()],
        logical_flows: logical_flows(rules),
        ..SbUpdate::default()
    }
}

#[test]
fn a_restart_writes_nothing_and_goes_on_where_it_was() {
    let rules = [allow("example.com"), deny_all()];
    let mut before = Node::with(&rules);
    before.answer("p1", "www.example.com", &[ADDRESS], 600);
    let snapshot = before.folded(&[]);
    let mut after = after_restart(&mut before, &snapshot, &rules);
    assert_eq!(after.batches(), []);
    // Of the address, of its group, and the end of tags.
    assert_eq!(after.engine.flow_count(), 3);
    assert!(after.reports.contains(&Report::Ready {
        attached: 1,
        firewalls: 1,
        flows: 3
    }));
    // Names are remembered: the rule moves, and its flows with it.
    let moved = [allow("new.test"), allow("example.com"), deny_all()];
    after.set_firewall(&moved);
    after.set_ovn(&moved);
    assert_eq!(after.open()[0].2, 10_999);
    // And until when.
    after.pass(Duration::from_secs(500));
    assert_eq!(after.open().len(), 1);
    after.pass(Duration::from_secs(200));
    assert_eq!(after.open().len(), 0);
}

/// How many answers are on their way to the pod.
fn releases(node: &Node) -> usize {
    let waiting = node.waiting.iter().flatten();
    let released = waiting.filter(|command| matches!(command, Command::Release(_)));
    released.count()
}

#[test]
fn an_answer_before_the_comparison_goes_back_behind_it() {
    let rules = [allow("example.com"), deny_all()];
    for is_wiped in [false, true] {
        let mut before = Node::with(&rules);
        before.answer("p1", "www.example.com", &[ADDRESS], 600);
        let snapshot = before.folded(&[]);
        if is_wiped {
            before.switch.clear();
        }
        let node = started(&mut before, &snapshot, Config::default());
        let mut node = read_but_southbound(node, &before, &rules);
        node.waiting = Some(VecDeque::new());
        let sb = southbound(&node, &rules);
        node.give(Input::Sb(sb));
        carry_out_until_dump(&mut node);
        let bytes = node.held_answer("www.example.com", &[ADDRESS]);
        assert_eq!(releases(&node), 0, "its flow may be missing");
        node.carry_out_next();
        assert_eq!(releases(&node), usize::from(!is_wiped));
        while node.carry_out_next() {}
        node.waiting = None;
        // The datapath follows.
        node.pass(HOLD_LONGEST / 10);
        assert_eq!(node.released(), [bytes], "wiped: {is_wiped}");
        assert_eq!(node.own(), 1);
    }
}

#[test]
fn a_rule_that_went_while_nobody_looked_takes_its_flows_with_it() {
    let mut before = Node::with(&[allow("example.com"), deny_all()]);
    before.answer("p1", "www.example.com", &[ADDRESS], 600);
    let snapshot = before.folded(&[]);
    let after = after_restart(&mut before, &snapshot, &[deny_all()]);
    assert_eq!(after.open().len(), 0);
}

#[test]
fn another_pod_under_the_same_name_inherits_no_snapshot() {
    let rules = [allow("example.com"), deny_all()];
    let mut before = Node::with(&rules);
    before.answer("p1", "www.example.com", &[ADDRESS], 600);
    let mut saved = before.folded(&[]);
    let pod = saved.ports.get_mut("ns1_p1").expect("it was told a name");
    *pod = Some("another".into());
    let mut node = Node::bare();
    node.engine.load(saved, node.now);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(RowId::new(0x105), Some(interface("ns1_p1", 5, "uid-p1")))],
    }));
    assert_eq!(node.engine.told.cache.entries_mut().count(), 0);
    assert_eq!(node.engine.saved(node.now).entries, []);
}

/// Open vSwitch's database is away at the start.
#[test]
fn a_name_of_the_snapshot_counts_from_the_start_on() {
    let rules = [allow("example.com"), deny_all()];
    for (away, open) in [(60, 1), (3600, 0)] {
        let mut before = Node::with(&rules);
        before.answer("p1", "www.example.com", &[ADDRESS], 600);
        let saved = before.folded(&[]);
        before.switch.clear();
        before.sentinels.clear();
        let mut node = started(&mut before, &saved, Config::default());
        node.pass(Duration::from_secs(away));
        let mut node = read_all(node, &before, &rules);
        assert_eq!(node.destinations().len(), open, "{away}");
        node.pass(Duration::from_secs(530));
        assert_eq!(node.destinations().len(), open, "{away}");
        node.pass(Duration::from_secs(120));
        assert_eq!(node.destinations().len(), 0, "{away}");
    }
}

/// Seconds.
fn rests(saved: &Saved) -> BTreeSet<(String, IpAddr, String, u64, u64)> {
    let entries = saved.entries.iter().flat_map(|entry| {
        let names = entry.names.iter();
        names.map(move |name| (entry.port.to_string(), entry.address, name))
    });
    let named = entries.map(|(port, address, saved)| {
        let rests = (saved.rest.as_secs(), saved.deny_rest.as_secs());
        (port, address, saved.name.to_string(), rests.0, rests.1)
    });
    named.collect()
}

/// Some sources are away, and the agent is ended before they come.
#[test]
fn a_start_that_ends_at_any_moment_leaves_what_it_has_found() {
    const TAKES: Duration = Duration::from_secs(30);
    let rules = [deny("bad.test"), allow("example.com"), deny_all()];
    let mut before = Node::with(&rules);
    before.answer("p1", "bad.test", &[ADDRESS], 60);
    before.answer("p1", "www.example.com", &[OTHER], 600);
    let saved = before.folded(&[]);
    let expected = rests(&edits::aged(saved.clone(), TAKES));
    assert_eq!(expected.len(), 2);
    before.switch.clear();
    before.sentinels.clear();
    let inputs = [
        Input::SwitchUp,
        Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces: vec![(RowId::new(0x105), Some(interface("ns1_p1", 5, "uid-p1")))],
        }),
        firewalls(true, Some(firewall(&rules))),
        Input::Nb(NbUpdate {
            reset: true,
            acls: acls(&rules),
            ..NbUpdate::default()
        }),
        Input::Sb(southbound(&before, &rules)),
    ];
    for order in orders(&[0, 1, 2, 3, 4]) {
        for read in 0..=order.len() {
            let mut node = started(&mut before, &saved, Config::default());
            node.pods = before.pods.clone();
            for input in &order[..read] {
                node.give(inputs[*input].clone());
            }
            node.pass(TAKES);
            let left = rests(&node.folded(&[]));
            assert_eq!(left, expected, "{:?}", &order[..read]);
        }
    }
}

/// Nobody knows the names of the earlier run. A flow that denies has no time of its own, and an edit takes it away.
#[test]
fn without_a_journal_only_denials_stay_for_an_hour() {
    for way in WAYS {
        for edited in [false, true] {
            let rules = [deny("bad.test"), allow("example.com"), deny_all()];
            let mut before = edits::node(way, &rules);
            before.answer("p1", "bad.test", &[ADDRESS], 600);
            before.answer("p1", "www.example.com", &[OTHER], 600);
            before.pass(Duration::from_secs(30));
            let mut node =
                after_restart_with(&mut before, &Saved::default(), &rules, edits::config(way));
            node.pass(Duration::from_secs(5));
            let denied = BTreeSet::from(["203.0.113.1".to_owned()]);
            assert_eq!(node.destinations(), denied, "{way:?}");
            if edited {
                starts::edit(&mut node, &[deny("other.test"), deny_all()]);
                node.pass(COMPARE_INTERVAL);
                assert_eq!(node.destinations(), BTreeSet::new(), "{way:?}");
                continue;
            }
            node.pass(Duration::from_secs(1800));
            // Nor does a further run know the names.
            let saved = node.folded(&[]);
            let further = started_with(&mut node, Some(saved), edits::config(way));
            let mut node = read_all(further, &before, &rules);
            node.pass(Duration::from_secs(1700));
            assert_eq!(node.destinations(), denied, "{way:?}");
            node.pass(Duration::from_secs(120));
            assert_eq!(node.destinations(), BTreeSet::new(), "{way:?}");
        }
    }
}

/// The switch is away, and the agent is ended.
#[test]
fn what_a_pod_is_told_before_it_can_be_enforced_outlives_the_agent() {
    for rules in [[deny("bad.test")], [allow("bad.test")]] {
        let mut before = Node::with(&rules);
        let mut node = started(&mut before, &Saved::default(), Config::default());
        node.pods = before.pods.clone();
        node.give(firewalls(true, Some(firewall(&rules))));
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces: vec![(RowId::new(0x105), Some(interface("ns1_p1", 5, "uid-p1")))],
        }));
        node.answer("p1", "bad.test", &[ADDRESS], 600);
        let saved = node.folded(&[]);
        let after = after_restart(&mut before, &saved, &rules);
        let expected = ("10.244.0.5".into(), "203.0.113.1".into(), 11_000);
        assert_eq!(after.open(), [expected]);
    }
}

/// The pods are gone while no agent runs, and a pod of another namespace has the address and the tunnel key of one.
#[test]
fn a_pod_that_is_gone_leaves_nothing_to_another_one_at_its_address() {
    let rules = [allow("example.com"), deny_all()];
    let other = [allow("other.test"), deny_all()];
    for way in edits::WAYS {
        // Another pod under the name of the one that is gone, at an address of its own.
        for is_made_anew in [false, true] {
            let mut before = Node::bare();
            before.engine = Engine::new(edits::config(way));
            let mut before = before.start(&rules);
            before.answer("p1", "www.example.com", &[ADDRESS], 600);
            let saved = before.folded(&[]);
            // The snapshot does not have it.
            before.answer("p1", "example.com", &[OTHER], 600);
            let mut node = started(&mut before, &saved, edits::config(way));
            read_rules(&mut node, &other);
            let row = RowId::new(0x107);
            let mut interfaces = vec![(row, Some(interface("ns1_q1", 5, "uid-q1")))];
            let mut port_bindings = vec![(row, Some(port_binding("ns1_q1", 5)))];
            node.pods = [("ns1_q1".to_owned(), row)].into();
            if is_made_anew {
                let row = RowId::new(0x106);
                interfaces.push((row, Some(interface("ns1_p1", 6, "uid-new"))));
                port_bindings.push((row, Some(port_binding("ns1_p1", 6))));
            }
            node.give(Input::Interfaces(InterfaceUpdate {
                reset: true,
                interfaces,
            }));
            let sb = southbound(&node, &other);
            node.give(Input::Sb(SbUpdate {
                port_bindings,
                ..sb
            }));
            let case = format!("{way:?} {is_made_anew}");
            assert_eq!(node.destinations(), BTreeSet::new(), "{case}");
        }
    }
}

#[test]
fn what_comes_to_be_denied_while_the_agent_is_away_stays_denied() {
    let mut before = Node::with(&[allow("example.com"), deny_all()]);
    let told_at = before.now;
    before.answer("p1", "example.com", &[ADDRESS], 1);
    // Behind the end of its TTL.
    before.now = before.now + Duration::from_secs(80);
    let saved = before.folded(&[]);
    let mut after = after_restart(&mut before, &saved, &[deny("example.com"), deny_all()]);
    expiry::assert_denied_for_an_hour(&mut after, told_at);
}

/// The snapshot has the name although its TTL is over, since a rule denies the name. As long as the rules are not
/// known, nothing is forgotten.
#[test]
fn a_denial_outlives_a_start_in_which_the_southbound_database_is_away() {
    let rules = [deny("example.com"), deny_all()];
    let mut before = Node::with(&rules);
    let told_at = before.now;
    before.answer("p1", "example.com", &[ADDRESS], 1);
    before.pass(Duration::from_secs(200));
    let mut node = Node::bare();
    node.now = before.now;
    node.engine.load(before.folded(&[]), node.now);
    node.pods = before.pods.clone();
    node.give(Input::SwitchUp);
    node.give(firewalls(true, Some(firewall(&rules))));
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(RowId::new(0x105), Some(interface("ns1_p1", 5, "uid-p1")))],
    }));
    node.give(Input::Nb(NbUpdate {
        reset: true,
        acls: acls(&rules),
        ..NbUpdate::default()
    }));
    node.pass(Duration::from_secs(300));
    let sb = southbound(&node, &rules);
    node.give(Input::Sb(sb));
    expiry::assert_denied_for_an_hour(&mut node, told_at);
}

/// The agent restarts between the edit and OVN.
#[test]
fn all_addresses_of_a_name_that_is_to_be_denied_outlive_the_agent() {
    let before = [allow("bad.test")];
    let edited = [deny("bad.test")];
    let mut node = Node::with(&before);
    node.set_firewall(&edited);
    node.answer("p1", "bad.test", &addresses(0, 400), 600);
    let saved = node.folded(&[]);
    let mut node = after_restart(&mut node, &saved, &before);
    node.set_firewall(&edited);
    node.set_ovn(&edited);
    node.pass(Duration::from_secs(1));
    assert_eq!(node.destinations().len(), 400);
}

/// The switch was restarted as well, so that there is nothing to adopt.
#[test]
fn all_addresses_of_a_denied_name_outlive_the_agent() {
    let rules = [deny("bad.test")];
    let mut before = Node::with(&rules);
    before.answer("p1", "bad.test", &addresses(0, 400), 60);
    let saved = before.folded(&[]);
    before.switch.clear();
    before.sentinels.clear();
    let after = after_restart(&mut before, &saved, &rules);
    assert_eq!(after.destinations().len(), 400);
}

/// The rules are read last at the start. Before, the pod is told an allowed name, and may have been told the denied one
/// again.
#[test]
fn a_denied_name_of_the_snapshot_does_not_give_way_before_all_rules_are_known() {
    let rules = [deny("bad.test"), allow("example.com")];
    for is_told_again in [false, true] {
        let mut before = Node::with(&rules);
        before.answer("p1", "bad.test", &addresses(0, 2), 60);
        let saved = before.folded(&[]);
        before.switch.clear();
        before.sentinels.clear();
        let mut node = started_with(&mut before, Some(saved), Config::default());
        node.engine.told.cache.limits_mut().addresses_per_port_max = 2;
        node.pods = before.pods.clone();
        node.give(Input::SwitchUp);
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces: vec![(RowId::new(0x105), Some(interface("ns1_p1", 5, "uid-p1")))],
        }));
        if is_told_again {
            node.answer("p1", "bad.test", &addresses(0, 2), 60);
        }
        let sb = SbUpdate {
            port_bindings: vec![(RowId::new(0x105), Some(port_binding("ns1_p1", 5)))],
            ..southbound(&node, &rules)
        };
        node.give(Input::Sb(sb));
        node.pass(Duration::from_secs(1));
        node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
        node.give(firewalls(true, Some(firewall(&rules))));
        node.give(Input::Nb(NbUpdate {
            reset: true,
            acls: acls(&rules),
            ..NbUpdate::default()
        }));
        node.pass(Duration::from_secs(1));
        let closed = node.open().into_iter().filter(|(.., at)| *at == 11_000);
        assert_eq!(closed.count(), 2, "told again: {is_told_again}");
    }
}

/// The rule has gone while no agent ran.
#[test]
fn a_name_that_is_denied_no_more_counts_as_long_as_any_other() {
    let mut before = Node::with(&[deny("bad.test")]);
    before.answer("p1", "bad.test", &[ADDRESS], 60);
    let saved = before.folded(&[]);
    before.switch.clear();
    before.sentinels.clear();
    let mut after = after_restart(&mut before, &saved, &[allow("bad.test")]);
    assert_eq!(after.destinations().len(), 1);
    after.pass(Duration::from_secs(1800));
    assert_eq!(after.destinations().len(), 0);
}

/// All orders of `items`.
pub(super) fn orders<T: Clone>(items: &[T]) -> Vec<Vec<T>> {
    let [first, rest @ ..] = items else {
        return vec![Vec::new()];
    };
    let into_each_place = |order: Vec<T>| {
        (0..=order.len()).map(move |place| {
            let mut longer = order.clone();
            longer.insert(place, first.clone());
            longer
        })
    };
    orders(rest).into_iter().flat_map(into_each_place).collect()
}

#[test]
fn an_answer_counts_at_any_moment_of_the_start_once_the_interface_is_there() {
    let rules = [allow("example.com"), deny_all()];
    at_any_moment_of_the_start(&rules, |_| {});
}

#[test]
fn a_rule_that_comes_later_sees_the_answers_of_the_start() {
    at_any_moment_of_the_start(&[allow("other.test"), deny_all()], |node| {
        assert_eq!(node.destinations(), BTreeSet::new());
        let rules = [allow("example.com"), deny_all()];
        node.set_firewall(&rules);
        node.set_ovn(&rules);
    });
}

#[test]
fn a_pod_whose_rules_are_not_known_defers_so_many_answers_only() {
    let mut node = Node::bare();
    node.trust_server();
    let row = RowId::new(0x105);
    node.pods.insert("ns1_p1".into(), row);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(row, Some(interface("ns1_p1", 5, "uid-p1")))],
    }));
    for name in 0..UNKNOWN_DEFERRED_MAX + 3 {
        node.answer("p1", &format!("n{name}.example.com"), &[ADDRESS], 300);
    }
    assert_eq!(node.kernel.deferred.len(), UNKNOWN_DEFERRED_MAX);
    assert_eq!(node.engine.counters().answers_not_deferred, 3);
}

/// A pod is told of www.example.com at each moment of each start with these rules; `then` happens before the address
/// must be open.
fn at_any_moment_of_the_start(rules: &[Rule], then: impl Fn(&mut Node)) {
    let row = RowId::new(0x105);
    let interfaces = Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(row, Some(interface("ns1_p1", 5, "uid-p1")))],
    });
    let nb = Input::Nb(NbUpdate {
        reset: true,
        acls: acls(rules),
        ..NbUpdate::default()
    });
    for namespace in [Some("ns1".to_owned()), None] {
        let mut node = Node::bare();
        node.pods.insert("ns1_p1".into(), row);
        let binding = PortBinding {
            namespace: namespace.clone(),
            ..port_binding("ns1_p1", 5)
        };
        let sb = Input::Sb(SbUpdate {
            reset: true,
            datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
            port_bindings: vec![(row, Some(binding))],
            port_groups: vec![node.group()],
            logical_flows: logical_flows(rules),
            ..SbUpdate::default()
        });
        let inputs = [
            ("switch", Input::SwitchUp),
            ("interfaces", interfaces.clone()),
            ("firewalls", firewalls(true, Some(firewall(rules)))),
            ("nb", nb.clone()),
            ("sb", sb),
        ];
        for order in orders(&inputs) {
            let named: Vec<_> = order.iter().map(|(name, _)| *name).collect();
            let there = named.iter().position(|name| *name == "interfaces");
            for moment in there.expect("it is one of them")..order.len() {
                let mut node = Node::bare();
                node.trust_server();
                node.pods.insert("ns1_p1".into(), row);
                for (place, (_, input)) in order.iter().enumerate() {
                    node.give(input.clone());
                    if place == moment {
                        let bytes = answer_frame("www.example.com", &[ADDRESS], 300);
                        node.frame(ifindex_of(row), &bytes);
                    }
                }
                node.pass(Duration::from_secs(1));
                then(&mut node);
                assert_eq!(
                    node.destinations(),
                    ["203.0.113.1".into()].into(),
                    "told after {:?} of {named:?}, namespace {namespace:?}",
                    named[moment]
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// Inputs, answers and the edges' replies come in any order.
    #[test]
    fn an_answer_counts_at_any_moment_of_a_slow_start(
        order in Just([0, 1, 2, 3, 4]).prop_shuffle(),
        comes_later in any::<bool>(),
        steps in vec((0_u8..3, 0_u64..20_000), 0..60),
    ) {
        slow_start(order, comes_later, &steps)?;
    }
}

/// The steps of a start: 0 is the next input, 1 the next command that is carried out, 2 an answer; each after some
/// microseconds. The rule that mentions the names may come later than all of them.
fn slow_start(
    order: [usize; 5],
    comes_later: bool,
    steps: &[(u8, u64)],
) -> Result<(), TestCaseError> {
    let last_rules = [allow("example.com"), deny_all()];
    let rules = match comes_later {
        true => [allow("other.test"), deny_all()],
        false => last_rules.clone(),
    };
    let row = RowId::new(0x105);
    let mut before = Node::with(&rules);
    // A pod takes longer to ask than the switch takes to answer two questions.
    before.pass(Duration::from_secs(1));
    let mut wanted = BTreeSet::new();
    let mut host = 0_u8;
    let mut tell = |node: &mut Node| {
        node.answer(
            "p1",
            &format!("f{host}.example.com"),
            &[[198, 18, 0, host]],
            600,
        );
        wanted.insert(format!("198.18.0.{host}"));
        host += 1;
    };
    if !comes_later {
        tell(&mut before);
        tell(&mut before);
    }
    let mut node = Node::bare();
    node.engine.load(before.folded(&[]), node.now);
    node.trust_server();
    node.now = before.now + Duration::from_secs(3);
    node.switch = before.switch;
    node.sentinels = before.sentinels;
    node.keep_flows_s = before.keep_flows_s;
    node.pods.insert("ns1_p1".into(), row);
    node.waiting = Some(VecDeque::new());
    let inputs = [
        Input::SwitchUp,
        Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces: vec![(row, Some(interface("ns1_p1", 5, "uid-p1")))],
        }),
        firewalls(true, Some(firewall(&rules))),
        Input::Nb(NbUpdate {
            reset: true,
            acls: acls(&rules),
            ..NbUpdate::default()
        }),
        Input::Sb(SbUpdate {
            reset: true,
            datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
            port_bindings: vec![(row, Some(port_binding("ns1_p1", 5)))],
            port_groups: vec![node.group()],
            logical_flows: logical_flows(&rules),
            ..SbUpdate::default()
        }),
    ];
    let mut inputs = order.into_iter().map(|place| inputs[place].clone());
    let mut is_found = false;
    for (step, micros) in steps {
        node.pass(Duration::from_micros(*micros));
        match step {
            0 => {
                if let Some(input) = inputs.next() {
                    node.give(input);
                }
            }
            1 => {
                let next = node.waiting.as_ref().and_then(VecDeque::front);
                is_found |= matches!(next, Some(Command::Attachment(_)));
                node.carry_out_next();
            }
            _ if is_found => tell(&mut node),
            _ => {}
        }
    }
    for input in inputs {
        node.give(input);
    }
    while node.carry_out_next() {}
    node.waiting = None;
    node.pass(Duration::from_secs(1));
    if comes_later {
        prop_assert_eq!(node.destinations(), BTreeSet::new());
        node.set_firewall(&last_rules);
        node.set_ovn(&last_rules);
    }
    prop_assert_eq!(node.destinations(), wanted);
    Ok(())
}

#[test]
fn a_snapshot_is_given_out_port_by_port_and_a_port_that_changes_meanwhile_is_in_it_once() {
    let rules = [allow("example.com"), deny_all()];
    let mut before = Node::with(&rules);
    for (name, host) in [("p2", 6), ("p3", 7), ("p4", 8)] {
        before.add_pod(name, host);
        before.answer(name, "example.com", &[ADDRESS, OTHER], 600);
    }
    let saved = before.folded(&[]);
    let mut node = started(&mut before, &saved, Config::default());
    // All sources but the interfaces: ports of the earlier run may still come.
    node.give(Input::SwitchUp);
    node.give(Input::Firewalls(FirewallUpdate {
        reset: true,
        firewalls: vec![],
    }));
    node.give(Input::Nb(NbUpdate {
        reset: true,
        ..NbUpdate::default()
    }));
    node.give(Input::Sb(SbUpdate {
        reset: true,
        datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
        ..SbUpdate::default()
    }));
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    node.add_pod("p2", 6);
    node.pass(Duration::ZERO);
    let mut parts = Parts::default();
    let mut ports = Vec::new();
    while let Some(part) = node.engine.next_part(&mut parts) {
        let part = fold(part, node.now).entries;
        let of_part: BTreeSet<String> = part.iter().map(|entry| entry.port.to_string()).collect();
        assert!(of_part.len() <= 1, "{of_part:?}");
        assert!(part.is_empty() || part.len() == 2, "{part:?}");
        ports.extend(of_part);
        if ports == ["ns1_p2"] {
            node.add_pod("p3", 7);
        }
    }
    assert_eq!(ports, ["ns1_p2", "ns1_p3", "ns1_p4"]);
}

#[test]
fn a_port_that_comes_while_the_last_part_is_given_out_is_in_the_snapshot() {
    let rules = [allow("example.com"), deny_all()];
    let mut before = Node::with(&rules);
    for (name, host) in [("p2", 6), ("p3", 7)] {
        before.add_pod(name, host);
        before.answer(name, "example.com", &[ADDRESS], 600);
    }
    let saved = before.folded(&[]);
    let mut node = started(&mut before, &saved, Config::default());
    let mut parts = Parts::default();
    let mut next = |node: &Node| node.engine.next_part(&mut parts);
    let first = next(&node).expect("rules and groups come first");
    let mut first = first.iter();
    assert!(first.all(|record| matches!(record, Record::Rules { .. } | Record::Group { .. })));
    let first = next(&node).expect("p2 is awaited");
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: [("p2", 6), ("p3", 7)]
            .map(|(name, host)| {
                let row = interface(&format!("ns1_{name}"), host, &format!("uid-{name}"));
                (RowId::new(0x100 + u128::from(host)), Some(row))
            })
            .into(),
    }));
    let rest = std::iter::from_fn(|| next(&node)).flatten();
    let saved = fold(first.into_iter().chain(rest), node.now);
    let ports = saved.entries.iter().map(|entry| entry.port.to_string());
    let all: BTreeSet<String> = ports.collect();
    assert_eq!(all, ["ns1_p2".to_owned(), "ns1_p3".to_owned()].into());
}

/// The pod was made anew while no agent ran, under its name and at its address. A first start tells the new one an
/// address, and ends before the comparison.
#[test]
fn a_start_that_ends_early_gives_a_new_pod_nothing_of_the_former_one() {
    let rules = [allow("example.com"), deny_all()];
    for way in edits::WAYS {
        for early_ends in 0..3 {
            let mut before = Node::bare();
            before.engine = Engine::new(edits::config(way));
            let mut before = before.start(&rules);
            before.answer("p1", "www.example.com", &[ADDRESS], 600);
            let mut saved = before.folded(&[]);
            let begin = |before: &mut Node, saved: &Saved| {
                let mut node = started(before, saved, edits::config(way));
                node.give(Input::SwitchUp);
                node.give(firewalls(true, Some(firewall(&rules))));
                let row = RowId::new(0x106);
                node.pods = [("ns1_p1".to_owned(), row)].into();
                node.give(Input::Interfaces(InterfaceUpdate {
                    reset: true,
                    interfaces: vec![(row, Some(interface("ns1_p1", 5, "uid-new")))],
                }));
                node
            };
            for _ in 0..early_ends {
                // OVN's databases are away.
                before = begin(&mut before, &saved);
                before.answer("p1", "ftp.example.com", &[OTHER], 600);
                saved = before.folded(&[]);
            }
            let mut node = begin(&mut before, &saved);
            node.give(Input::Nb(NbUpdate {
                reset: true,
                acls: acls(&rules),
                ..NbUpdate::default()
            }));
            let sb = southbound(&node, &rules);
            node.give(Input::Sb(sb));
            node.pass(Duration::from_secs(1));
            let own = (0..early_ends.min(1)).map(|_| "203.0.113.2".to_owned());
            let case = format!("{way:?} {early_ends} early ends");
            assert_eq!(node.destinations(), own.collect(), "{case}");
            // Nothing of the former pod is kept.
            let left = node.folded(&[]);
            let mut pods = left.ports.values();
            assert!(pods.all(|pod| pod.as_deref() == Some("uid-new")), "{case}");
        }
    }
}

/// The pods are gone, and a start ends before the comparison. Nobody takes over their flows at the next one.
#[test]
fn a_start_that_ends_early_leaves_nothing_of_a_pod_that_is_gone_to_another_one_at_its_address() {
    let rules = [allow("example.com"), deny_all()];
    let mut before = Node::with(&rules);
    before.answer("p1", "www.example.com", &[ADDRESS], 600);
    let saved = before.folded(&[]);
    let row = RowId::new(0x105);
    let interfaces = Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(row, Some(interface("ns1_q1", 5, "uid-q1")))],
    });
    let mut first = started(&mut before, &saved, Config::default());
    first.give(interfaces.clone());
    let saved = first.folded(&[]);
    let mut node = started(&mut first, &saved, Config::default());
    read_rules(&mut node, &rules);
    node.pods = [("ns1_q1".to_owned(), row)].into();
    node.give(interfaces);
    let sb = southbound(&node, &rules);
    node.give(Input::Sb(SbUpdate {
        port_bindings: vec![(row, Some(port_binding("ns1_q1", 5)))],
        ..sb
    }));
    assert_eq!(node.destinations(), BTreeSet::new());
}

/// A pod goes while no agent runs, and another one comes at its address, with its tunnel key. The kernel gives the new
/// veth the index of the former one: a veth that is moved between network namespaces keeps its index where that is free
/// (`__dev_change_net_namespace` in Linux net/core/dev.c).
#[test]
fn a_pod_takes_over_no_mark_of_the_pod_that_had_its_interface_index() {
    let new = ("ns1_q1", "uid-q1");
    let row = RowId::new((1 << 64) | 0x105);
    assert_eq!(ifindex_of(row), ifindex_of(RowId::new(0x105)));
    let rules = [allow("example.com"), deny_all()];
    for way in WAYS {
        let mut before = edits::node(way, &rules);
        before.answer("p1", "www.example.com", &[ADDRESS], 600);
        before.pass(Duration::from_secs(30));
        let saved = before.folded(&[]);
        before.now = before.now + Duration::from_secs(30);
        let mut node = started_with(&mut before, Some(saved), edits::config(way));
        read_rules(&mut node, &rules);
        node.pods = [(new.0.to_owned(), row)].into();
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces: vec![(row, Some(interface(new.0, 5, new.1)))],
        }));
        let sb = SbUpdate {
            port_bindings: vec![(row, Some(port_binding(new.0, 5)))],
            ..southbound(&node, &rules)
        };
        node.give(Input::Sb(sb));
        node.pass(Duration::from_secs(30));
        assert!(!starts::is_open_at_all(&node, ADDRESS), "{way:?}");
    }
}
