//! Addresses that are opened by a mark.

use std::{collections::VecDeque, num::NonZeroU32};

use super::{
    edits::{self, ONE_NUMBER, WAYS},
    limits::many,
    restart::{after_restart_with, read_but_southbound, southbound, started},
    starts::{self, is_open, is_open_at_all},
    *,
};
use crate::{
    io::input::MarkChange,
    values::{
        flow::{Action, Ends, Masked},
        limits::{
            COMPARE_AGAIN, FLOWS_PER_ADDRESS_MAX, GROUP_RESTS, GROUP_STAYS, GROUPS_PER_PORT_MAX,
            MARK_SLACK, MARKS_REFUSED,
        },
    },
};

const MASK: u32 = 0xffe0_0000;

fn config() -> Config {
    Config {
        mark_mask: NonZeroU32::new(MASK),
        ..Config::default()
    }
}

fn rules() -> [Rule; 2] {
    [allow("example.com"), deny_all()]
}

fn node() -> Node {
    let mut node = Node::bare();
    node.engine = Engine::new(config());
    node.start(&rules())
}

/// The changes of marks since the log was last cleared.
fn marks(node: &Node) -> Vec<MarkChange> {
    let commands = node.log.iter();
    let marks = commands.filter_map(|command| match command {
        Command::Mark(changes) => Some(changes.clone()),
        _ => None,
    });
    marks.flatten().collect()
}

fn ifindex(node: &Node) -> u32 {
    ifindex_of(node.pods["ns1_p1"])
}

#[test]
fn the_first_address_of_a_rule_changes_flows_and_the_next_ones_do_not() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    assert_eq!((node.of_rules().count(), node.marks_ends().count()), (1, 1));
    let has_destination = |key: &FlowKey| key.matches.ends.dst().is_some();
    assert!(!node.switch.keys().any(has_destination));
    node.log.clear();
    node.held_answer("api.example.com", &[OTHER]);
    assert_eq!(node.batches_open(), [], "the switch is not touched");
    let position = |wanted: fn(&Command) -> bool| node.log.iter().position(wanted);
    let marked = position(|command| matches!(command, Command::Mark(_)));
    let released = position(|command| matches!(command, Command::Release(_)));
    assert!(marked.is_some() && marked < released, "{:?}", node.log);
    assert_eq!(node.destinations().len(), 2);
    assert_eq!(node.engine.flow_count(), 2);
    let opened = node
        .reports
        .iter()
        .filter(|report| matches!(report, Report::Opened { .. }));
    assert_eq!(opened.count(), 2);
}

#[test]
fn the_flow_clears_the_mark_and_then_does_what_the_rule_says() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    let added = node.batches().into_iter().flat_map(|(_, changes)| changes);
    let flows: Vec<_> = added
        .filter_map(|change| match change {
            FlowChange::Add(key, body) => Some((key, body)),
            _ => None,
        })
        .collect();
    let [(rule, of_rule), (end, of_end)] = &flows[..] else {
        panic!("{flows:?}");
    };
    let clear = Action::SetMark(Masked::new(0, MASK));
    assert_eq!(of_rule.actions.first(), Some(&clear));
    assert!(of_rule.actions.len() > 1);
    // Where other flows decide, the mark ends behind them, whatever the protocol.
    let table = node.marks_end;
    assert_eq!((end.table, end.priority), (table, u16::MAX));
    assert_eq!(*of_end.actions, [clear, Action::Resubmit { table }]);
    // A load balancer leads elsewhere than where the mark is for.
    let [of_rule, of_end] = [rule, end].map(|key| match key.matches.ends {
        Ends::Group {
            src,
            mark,
            is_untranslated,
        } => ((src, mark), is_untranslated),
        Ends::Addresses(addresses) => panic!("{addresses:?}"),
    });
    assert_eq!(of_rule.0, of_end.0);
    assert_eq!((of_rule.1, of_end.1), (true, false));
}

#[test]
fn where_ovn_has_no_stage_for_it_marks_end_nowhere_and_that_is_told_once() {
    let mut node = Node::bare();
    node.engine = Engine::new(config());
    node.has_marks_end = false;
    let mut node = node.start(&rules());
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    assert_eq!(node.marks_ends().count(), 0);
    // OVN may be another one behind a new connection.
    node.has_marks_end = true;
    for _ in 0..2 {
        node.give(Input::SwitchDown);
        node.give(Input::SwitchUp);
        node.pass(COMPARE_INTERVAL);
        assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    }
    assert_eq!(node.marks_ends().count(), 1);
    let told = node.reports.iter();
    let told = told.filter(|report| matches!(report, Report::MarksEndNowhere));
    assert_eq!(told.count(), 1);
}

/// A load balancer sends a packet elsewhere behind the program that marks: only a flow to the address meets it.
#[test]
fn an_address_that_a_rule_denies_has_flows_of_its_own() {
    let mut node = Node::bare();
    node.engine = Engine::new(config());
    let rules = [deny("bad.example.com"), allow("example.com"), deny_all()];
    let mut node = node.start(&rules);
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.answer("p1", "bad.example.com", &[OTHER], 600);
    let own = |node: &Node| {
        let destinations = node.switch.keys().filter_map(|key| key.matches.ends.dst());
        destinations.collect::<BTreeSet<_>>()
    };
    assert_eq!(own(&node), [OTHER.into()].into());
    let marked = |node: &Node, address: [u8; 4]| {
        let place = (ifindex(node), address.into());
        node.marks.contains_key(&place)
    };
    assert!(marked(&node, ADDRESS) && !marked(&node, OTHER));
    // Also if the address was allowed before.
    node.answer("p1", "bad.example.com", &[ADDRESS], 600);
    assert_eq!(own(&node), [ADDRESS, OTHER].map(IpAddr::from).into());
    assert!(!marked(&node, ADDRESS));
    let rules = [allow("example.com"), deny_all()];
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    node.pass(2 * COMPARE_INTERVAL);
    assert_eq!(own(&node), BTreeSet::new());
    assert!(marked(&node, ADDRESS) && marked(&node, OTHER));
}

#[test]
fn a_mark_comes_when_its_flows_are_in_force() {
    let mut node = node();
    node.switch_answers = false;
    node.held_answer("www.example.com", &[ADDRESS]);
    assert_eq!(marks(&node), []);
    assert_eq!(node.released().len(), 0);
    let batch = node.batches_open()[0];
    node.log.clear();
    node.reply(batch, Ok(()));
    let [MarkChange::Set { address, until, .. }] = marks(&node)[..] else {
        panic!("{:?}", node.log);
    };
    assert_eq!(address, IpAddr::from(ADDRESS));
    let ends = node.now + Duration::from_secs(300);
    assert!(until >= ends && until <= ends + MARK_SLACK, "{until:?}");
}

#[test]
fn a_refused_batch_leads_to_no_mark() {
    let mut node = node();
    node.switch_answers = false;
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    let batch = node.batches_open()[0];
    let refused = BatchError::Refused(vec![(0, "full".into())]);
    node.reply(batch, Err(refused));
    assert_eq!(marks(&node), []);
    node.switch_answers = true;
    node.pass(2 * COMPARE_INTERVAL);
    assert_eq!(node.destinations().len(), 1, "the comparison puts it right");
}

#[test]
fn flows_that_are_lost_come_back_and_the_marks_stay() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
    node.log.clear();
    for (key, (cookie, _)) in std::mem::take(&mut node.switch) {
        node.give(Input::FlowLost { key, cookie });
    }
    node.pass(Duration::from_millis(50));
    assert_eq!(node.of_rules().count(), 1, "one flow for both addresses");
    assert_eq!(node.destinations().len(), 2);
    assert_eq!(marks(&node), []);
}

#[test]
fn the_use_of_an_address_is_not_that_of_its_neighbours() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
    node.pass(COMPARE_INTERVAL);
    let place = (ifindex(&node), IpAddr::from(ADDRESS));
    node.marks.get_mut(&place).expect("it is open").2 = Some(node.now);
    node.pass(2 * COMPARE_INTERVAL);
    let used_s = |address: [u8; 4]| {
        let entries = node.engine.view();
        let entries = entries.entries("ns1_p1", &[address.into()], node.now);
        let [entry] = &entries[..] else {
            panic!("{entries:?}");
        };
        assert_eq!((entry.flows.len(), entry.packets), (2, None));
        entry.used_s
    };
    assert_eq!(used_s(ADDRESS), Some(2 * COMPARE_INTERVAL.as_secs()));
    assert_eq!(used_s(OTHER), None);
}

#[test]
fn an_address_that_nobody_has_had_the_time_to_use_is_not_evicted() {
    let mut node = node();
    let limits = node.engine.told.cache.limits_mut();
    limits.addresses_per_port_max = 2;
    node.answer("p1", "a.example.com", &[ADDRESS], 600);
    node.pass(COMPARE_INTERVAL - Duration::from_millis(1));
    // A moment before the marks are read; and of the two, this one ends first.
    node.answer("p1", "b.example.com", &[OTHER], 60);
    node.pass(Duration::from_millis(2));
    let third = [203, 0, 113, 3];
    node.answer("p1", "c.example.com", &[third], 600);
    let destinations = |hosts: [u8; 2]| hosts.map(|host| format!("203.0.113.{host}"));
    assert_eq!(node.destinations(), destinations([2, 3]).into());
    node.pass(COMPARE_INTERVAL);
    node.answer("p1", "d.example.com", &[ADDRESS], 600);
    assert_eq!(node.destinations(), destinations([1, 3]).into());
}

#[test]
fn an_address_in_use_stays_and_an_idle_one_goes() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 60);
    for _ in 0..60 {
        let place = (ifindex(&node), IpAddr::from(ADDRESS));
        let now = node.now;
        node.marks.get_mut(&place).expect("it is open").2 = Some(now);
        node.pass(Duration::from_secs(5));
    }
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    node.pass(Duration::from_secs(180));
    assert!(node.destinations().is_empty());
    assert!(node.marks.is_empty(), "{:?}", node.marks);
    node.pass(GROUP_STAYS + 2 * COMPARE_INTERVAL);
    assert!(node.switch.is_empty(), "{:?}", node.switch);
    assert_eq!(node.engine.flow_count(), 0);
}

#[test]
fn without_the_agent_a_mark_ends_by_itself() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.now = node.now + Duration::from_secs(600) + MARK_SLACK;
    assert!(node.destinations().is_empty());
}

#[test]
fn a_restart_goes_on_with_marks_and_flows() {
    let mut before = node();
    before.answer("p1", "www.example.com", &[ADDRESS], 600);
    let snapshot = before.folded(&[]);
    let stray = (ifindex(&before), IpAddr::from([198, 51, 100, 1]));
    let known = (ifindex(&before), IpAddr::from(ADDRESS));
    let (mark, ..) = before.marks[&known];
    let later = before.now + Duration::from_secs(3600);
    // A mark without a flow.
    before.marks.insert(stray, (mark ^ MASK, later, None));
    let mut after = after_restart_with(&mut before, &snapshot, &rules(), config());
    assert_eq!(after.batches(), [], "the flows are as they should be");
    assert_eq!(after.marks.keys().collect::<Vec<_>>(), [&known]);
    assert_eq!(after.marks[&known].0, mark, "the same number");
}

/// An update of the agent, or another `--group`.
#[test]
fn flows_of_an_agent_without_groups_stay_until_the_marks_are_set() {
    let mut before = Node::bare().start(&rules());
    before.answer("p1", "www.example.com", &[ADDRESS], 600);
    let snapshot = before.folded(&[]);
    let switch = before.switch.clone();
    let mut after = after_restart_with(&mut before, &snapshot, &rules(), config());
    after.pass(2 * COMPARE_INTERVAL);
    let is_mark = |command: &Command| matches!(command, Command::Mark(_));
    // By its sentinel flow, or by itself.
    let closes = |command: &Command| {
        let Command::Apply { changes, .. } = command else {
            return false;
        };
        let mut changes = changes.iter();
        changes.any(|change| matches!(change, FlowChange::Delete(..)))
    };
    let marked = after.log.iter().position(is_mark);
    let closed = after.log.iter().position(closes);
    assert!(marked.is_some() && marked < closed, "{:#?}", after.log);
    assert_eq!((after.marks.len(), after.of_rules().count()), (1, 1));
    let is_gone = |node: &Node| {
        let mut keys = node.switch.keys();
        keys.all(|key| key.matches.ends.dst().is_none())
    };
    assert!(is_gone(&after));
    // A flow that does something else does not stay: a rule may deny now what it has allowed.
    before.switch = switch;
    for (cookie, _) in before.switch.values_mut() {
        *cookie = crate::values::flow::Cookie::new(0x1234);
    }
    let after = after_restart_with(&mut before, &snapshot, &rules(), config());
    assert!(is_gone(&after), "{:#?}", after.switch);
}

#[test]
/// While no agent ran, the rule has lost one of two ports, and another rule has come for one of two addresses. This
/// address has its former mark until its next group is in force. The other address has the group with this number.
fn a_port_that_was_closed_without_an_agent_ends_although_its_number_is_still_in_use() {
    let former = [many(allow("example.com"), 2), deny_all()];
    let new = [
        many(allow("example.com"), 1),
        allow("www.example.com"),
        deny_all(),
    ];
    let mut before = Node::bare();
    before.engine = Engine::new(config());
    let mut before = before.start(&former);
    before.answer("p1", "www.example.com", &[ADDRESS], 600);
    before.answer("p1", "api.example.com", &[OTHER], 600);
    let ports = |node: &Node| {
        let transports = node.of_rules().filter_map(|key| key.matches.transport);
        let ports = transports.filter_map(|transport| transport.port);
        ports.collect::<BTreeSet<_>>()
    };
    assert_eq!(ports(&before).len(), 2);
    let snapshot = before.folded(&[]);
    let after = after_restart_with(&mut before, &snapshot, &new, config());
    assert_eq!(ports(&after).len(), 1, "{:#?}", after.switch);
    assert!(is_open_at_all(&after, ADDRESS) && is_open_at_all(&after, OTHER));
}

#[test]
fn marks_that_are_missing_are_set_again() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.pass(COMPARE_INTERVAL);
    node.marks.clear();
    node.pass(2 * COMPARE_INTERVAL);
    assert_eq!(node.destinations().len(), 1);
    assert_eq!(node.engine.counters().marks_restored, 1);
}

#[test]
fn an_address_whose_mark_is_refused_gets_flows() {
    let mut node = node();
    let open = |node: &Node| (node.marks.len(), node.destinations().len());
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.refuses_marks = true;
    node.held_answer("api.example.com", &[OTHER]);
    assert_eq!(open(&node), (1, 2));
    assert_eq!(node.released().len(), 1);
    assert_eq!(node.engine.counters().marks_refused, 1);
    // The next address is not tried.
    node.answer("p1", "www.example.com", &[[203, 0, 113, 3]], 600);
    assert_eq!(node.engine.counters().marks_refused, 1);
    assert_eq!(open(&node), (1, 3));
    node.pass(2 * COMPARE_INTERVAL);
    assert_eq!(
        open(&node),
        (1, 3),
        "that is what the comparison wants, too"
    );
    // After a while, the kernel may have room.
    node.refuses_marks = false;
    node.pass(MARKS_REFUSED);
    node.answer("p1", "www.example.com", &[[203, 0, 113, 4]], 600);
    assert_eq!(open(&node), (2, 4));
    node.set_firewall(&[deny_all()]);
    node.set_ovn(&[deny_all()]);
    assert_eq!(open(&node), (0, 0));
}

/// The kernel's map is full when a pod is told many addresses of a rule with many ports.
#[test]
fn addresses_whose_marks_are_refused_have_no_more_flows_than_others() {
    for refuses_marks in [false, true] {
        let mut node = Node::bare();
        node.engine = Engine::new(config());
        let rules = [many(allow("example.com"), 100), deny_all()];
        let mut node = node.start(&rules);
        let limits = node.engine.told.cache.limits_mut();
        limits.addresses_per_port_max = 64;
        let most = limits.flows_per_port_max() + FLOWS_PER_ADDRESS_MAX;
        node.refuses_marks = refuses_marks;
        node.answer("p1", "www.example.com", &addresses(0, 64), 600);
        let own = node
            .switch
            .keys()
            .filter(|key| key.matches.ends.dst().is_some());
        let own = own.count();
        assert!(own <= most, "{own} of {most}");
        assert_eq!(own > 0, refuses_marks);
        assert_eq!(node.engine.counters().addresses_cut > 0, refuses_marks);
        node.engine.told.cache.check();
    }
}

#[test]
fn a_pod_that_goes_leaves_no_mark() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
    assert_eq!(node.marks.len(), 2);
    node.remove_interface("p1");
    assert!(node.marks.is_empty());
}

/// The flows of a group follow its rules: in one step, and no address changes.
#[test]
fn an_edit_that_changes_no_pattern_changes_the_flows_of_a_group_alone() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
    let edits = [
        [allow("new.test"), allow("example.com"), deny_all()],
        [allow("new.test"), many(allow("example.com"), 2), deny_all()],
        [allow("new.test"), many(allow("example.com"), 1), deny_all()],
    ];
    for (edit, flows) in edits.iter().zip([1, 2, 1]) {
        let known: BTreeSet<_> = node.of_rules().cloned().collect();
        node.log.clear();
        node.set_firewall(edit);
        node.set_ovn(edit);
        assert_eq!(marks(&node), [], "{edit:?}");
        let [(true, changes)] = &node.batches()[..] else {
            panic!("{:?}", node.batches());
        };
        let added = changes
            .iter()
            .filter(|change| matches!(change, FlowChange::Add(..)));
        let now: BTreeSet<_> = node.of_rules().cloned().collect();
        assert_eq!(now.len(), flows);
        assert_eq!(added.count(), now.difference(&known).count());
        assert_eq!(node.destinations().len(), 2);
    }
}

/// Until the switch has the flows, what is told meanwhile waits for them, and the kernel opens nothing by itself.
#[test]
fn behind_an_edit_an_address_waits_for_the_flows_of_its_group() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.answer("p1", "api.example.com", &[ADDRESS], 600);
    let moved = [allow("new.test"), allow("example.com"), deny_all()];
    node.set_firewall(&moved);
    node.switch_answers = false;
    node.set_ovn(&moved);
    let bytes = node.held_answer("cdn.example.com", &[OTHER]);
    assert!(node.released().is_empty() && node.kernel.classes.is_empty());
    let batches = node.batches_open();
    for batch in batches {
        node.reply(batch, Ok(()));
    }
    node.pass(Duration::from_millis(10));
    assert_eq!(node.released(), [bytes]);
}

/// Each address tells whether its rules have all of their flows.
#[test]
fn an_edit_beyond_the_room_of_an_address_is_noted_at_each_address() {
    let rules = |ports| {
        let further = (ports > 0).then(|| many(allow("example.com"), ports));
        let first = [many(allow("example.com"), 1)];
        let rules = first.into_iter().chain(further);
        rules.chain([deny_all()]).collect::<Vec<_>>()
    };
    let mut node = Node::bare();
    node.engine = Engine::new(config());
    let mut node = node.start(&rules(0));
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
    for (ports, cut) in [(FLOWS_PER_ADDRESS_MAX + 1, 2), (2, 2), (1, 2)] {
        node.set_firewall(&rules(ports));
        node.set_ovn(&rules(ports));
        assert_eq!(node.engine.counters().addresses_cut, cut, "{ports}");
        let port = node.engine.ports.named("ns1_p1").expect("it is there");
        let is_cut = |address: [u8; 4]| {
            let entry = node.engine.told.cache.entry(port, address.into());
            entry.is_some_and(|entry| entry.cut.is_some())
        };
        assert_eq!(
            [ADDRESS, OTHER].map(is_cut),
            [ports > FLOWS_PER_ADDRESS_MAX; 2]
        );
    }
}

/// The rule leaves a port to another pattern, or another pattern comes.
#[test]
fn an_edit_of_patterns_moves_addresses_without_a_gap() {
    let former = [many(allow("example.com"), 2)];
    let edits = [
        [
            many(allow("example.com"), 1),
            many(allow("*.example.com"), 2),
        ]
        .to_vec(),
        [&former[..], &[allow("com")]].concat(),
    ];
    for edit in edits {
        let mut node = Node::bare();
        node.engine = Engine::new(config());
        let mut node = node.start(&former);
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        let before: BTreeSet<_> = node.switch.keys().cloned().collect();
        node.log.clear();
        node.set_firewall(&edit);
        node.set_ovn(&edit);
        assert_eq!(node.destinations().len(), 1);
        // The flows of the former group stay for a while: no packet has its mark any more.
        let after: BTreeSet<_> = node.switch.keys().cloned().collect();
        assert!(after.len() > before.len() && after.is_superset(&before));
        let deletions = node.batches().into_iter().flat_map(|(_, changes)| changes);
        assert_eq!(
            deletions
                .filter(|change| matches!(change, FlowChange::Delete(..)))
                .count(),
            0
        );
    }
}

/// The flows of the group that an address gets by an edit wait behind what the pod itself has changed.
#[test]
fn an_edit_does_not_wait_behind_what_the_pod_was_told() {
    let many = |name: &str| Rule {
        ports: tcp(FLOWS_PER_ADDRESS_MAX),
        ..allow(name)
    };
    let rules = |first: &str| {
        let others = [allow("b.test"), many("c.test"), many("d.test"), deny_all()];
        [vec![allow(first)], others.into()].concat()
    };
    let mut node = Node::bare();
    node.engine = Engine::new(config());
    let mut node = node.start(&rules("a.test"));
    let opened_by_first = |node: &Node| {
        let open = node.open().into_iter();
        open.filter(|(.., priority)| *priority == 11_000).count()
    };
    node.answer("p1", "a.test", &[ADDRESS], 600);
    node.answer("p1", "b.test", &[ADDRESS], 600);
    assert_eq!(opened_by_first(&node), 1);
    node.waiting = Some(VecDeque::new());
    node.answer("p1", "c.test", &[[198, 51, 100, 1]], 600);
    node.answer("p1", "d.test", &[[198, 51, 100, 2]], 600);
    node.answer("p1", "b.test", &[OTHER], 600);
    node.set_firewall(&rules("other.test"));
    node.set_ovn(&rules("other.test"));
    let is_batch = |command: &Command| matches!(command, Command::Apply { .. });
    let mut sent = node
        .waiting
        .iter()
        .flatten()
        .filter(|one| is_batch(one))
        .count();
    while opened_by_first(&node) == 1 {
        if node.waiting.iter().flatten().next().is_some_and(is_batch) {
            assert!(sent > 0, "a batch that the edit has not sent");
            sent -= 1;
        }
        assert!(node.carry_out_next(), "it stays open");
    }
}

/// OVN may have blocked connections while a rule denied them. The edits have the address move between two groups, both of
/// which are there.
#[test]
fn an_edit_that_changes_marks_alone_looks_for_blocked_connections() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    let more = [allow("example.com"), deny_all(), allow("www.example.com")];
    let edits = [&more[..], &rules()];
    for edit in edits {
        node.set_firewall(edit);
        node.set_ovn(edit);
        node.pass(Duration::from_secs(10));
        node.log.clear();
    }
    for edit in edits {
        node.set_firewall(edit);
        node.set_ovn(edit);
        assert_eq!(node.batches(), [], "the flows of both are there");
        node.pass(Duration::from_secs(1));
        assert!(node.log.contains(&Command::FindBlocked), "{edit:?}");
        node.pass(Duration::from_secs(10));
        node.log.clear();
    }
}

#[test]
fn a_dry_run_marks_nothing() {
    let mut node = Node::bare();
    node.engine = Engine::new(Config {
        dry_run: true,
        ..config()
    });
    let mut node = node.start(&rules());
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    assert!(node.marks.is_empty() && node.switch.is_empty());
}

/// The switch loses all flows, and says so.
fn wipe(node: &mut Node) {
    for (key, (cookie, _)) in std::mem::take(&mut node.switch) {
        node.give(Input::FlowLost { key, cookie });
    }
}

fn is_opened(node: &Node) -> bool {
    let mut reports = node.reports.iter();
    reports.any(|report| matches!(report, Report::Opened { .. }))
}

#[test]
fn an_answer_waits_for_flows_of_its_group_that_are_lost() {
    for told in [ADDRESS, OTHER] {
        let mut node = node();
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        wipe(&mut node);
        node.log.clear();
        node.reports.clear();
        node.switch_answers = false;
        let bytes = node.held_answer("www.example.com", &[told]);
        assert_eq!(node.released(), [], "{told:?}");
        let [batch] = node.batches_open()[..] else {
            panic!("{told:?}: they are written at once");
        };
        assert!(!is_opened(&node), "{told:?}");
        node.reply(batch, Ok(()));
        node.pass(Duration::from_millis(10));
        assert_eq!(node.released(), [bytes], "{told:?}");
        assert!(node.marks.contains_key(&(ifindex(&node), told.into())));
    }
}

#[test]
fn an_answer_waits_for_the_batch_that_brings_the_flows_of_its_group() {
    let mut node = node();
    node.switch_answers = false;
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    let batch = node.batches_open()[0];
    node.held_answer("api.example.com", &[OTHER]);
    assert!(!is_opened(&node), "neither is open yet");
    node.pass(Duration::from_millis(20));
    node.reply(batch, Ok(()));
    let activations: Vec<_> = node
        .reports
        .iter()
        .filter_map(|report| match report {
            Report::Opened { activation, .. } => *activation,
            _ => None,
        })
        .collect();
    let are_late = activations
        .iter()
        .all(|time| *time >= Duration::from_millis(20));
    assert!(activations.len() == 2 && are_late, "{activations:?}");
}

#[test]
fn where_the_switch_is_gone_only_what_is_new_waits() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.give(Input::SwitchDown);
    node.switch.clear();
    let known = node.held_answer("www.example.com", &[ADDRESS]);
    assert_eq!(node.released(), [known]);
    let fresh = node.held_answer("www.example.com", &[OTHER]);
    assert_eq!(node.released(), []);
    node.pass(Duration::from_secs(1));
    assert_eq!(node.released(), [fresh]);
    assert_eq!(node.marks.len(), 1, "its flows may not be there");
    node.give(Input::SwitchUp);
    assert_eq!((node.marks.len(), node.of_rules().count()), (2, 1));
}

#[test]
fn before_the_comparison_a_new_address_brings_the_flows_of_its_group() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.give(Input::SwitchDown);
    node.switch.clear();
    // The dump takes its time, and shows nothing.
    node.switch_answers = false;
    node.give(Input::SwitchUp);
    node.log.clear();
    let bytes = node.held_answer("www.example.com", &[OTHER]);
    let [batch] = node.batches_open()[..] else {
        panic!("{:?}", node.log);
    };
    assert_eq!(node.released(), []);
    node.reply(batch, Ok(()));
    node.pass(Duration::from_millis(10));
    assert_eq!(node.released(), [bytes]);
    assert_eq!(node.marks.len(), 2);
}

/// No address has had the group while its rules were edited. The switch has come back without flows, and is not compared
/// yet.
#[test]
fn before_the_comparison_a_group_that_was_not_in_use_brings_all_of_its_flows() {
    let rules = |ports| [many(allow("example.com"), ports), deny_all()];
    let mut node = Node::bare();
    node.engine = Engine::new(config());
    let mut node = node.start(&rules(2));
    node.answer("p1", "www.example.com", &[ADDRESS], 1);
    while !node.marks.is_empty() {
        node.pass(COMPARE_INTERVAL);
    }
    assert_eq!(node.of_rules().count(), 2, "they stay for a while");
    let dry_run = Firewall {
        dry_run: true,
        ..firewall(&rules(3))
    };
    node.give(firewalls(false, Some(dry_run)));
    node.set_ovn(&rules(3));
    node.set_firewall(&rules(3));
    node.give(Input::SwitchDown);
    node.switch.clear();
    node.switch_answers = false;
    node.give(Input::SwitchUp);
    node.log.clear();
    node.answer("p1", "www.example.com", &[OTHER], 600);
    let changes = node.batches().into_iter().flat_map(|(_, changes)| changes);
    let ports = changes.filter_map(|change| match change {
        FlowChange::Add(key, _) => key.matches.transport,
        FlowChange::Delete(..) | FlowChange::Renew(_) => None,
    });
    assert_eq!(ports.count(), 3);
}

#[test]
fn a_group_goes_on_with_a_port_that_has_come_again() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.remove_interface("p1");
    node.add_pod_as("p1", 5, "uid-p1", RowId::new(0x205));
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    wipe(&mut node);
    node.answer("p1", "api.example.com", &[OTHER], 600);
    node.pass(Duration::from_millis(50));
    assert_eq!(node.destinations().len(), 2);
}

#[test]
fn flows_of_its_own_stay_until_an_address_can_be_marked() {
    let mut node = node();
    node.refuses_marks = true;
    node.answer("p1", "www.example.com", &[ADDRESS], 60);
    assert_eq!((node.marks.len(), node.destinations().len()), (0, 1));
    node.refuses_marks = false;
    node.log.clear();
    let closes = |node: &Node| {
        let mut log = node.log.iter();
        let deleted = |command: &Command| {
            let Command::Apply { changes, .. } = command else {
                return false;
            };
            let mut changes = changes.iter();
            changes.any(|change| {
                matches!(change, FlowChange::Delete(key, _) if key.matches.ends.dst().is_some())
            })
        };
        log.position(deleted)
    };
    // Past the end of the name, and past the time in which marks are not tried.
    for _ in 0..40 {
        for (_, packets) in node.switch.values_mut() {
            *packets += 1;
        }
        for (.., used_at) in node.marks.values_mut() {
            *used_at = Some(node.now);
        }
        node.pass(COMPARE_INTERVAL);
        assert_eq!(node.destinations().len(), 1, "it is in use");
        let marked = node
            .log
            .iter()
            .position(|command| matches!(command, Command::Mark(_)));
        assert!(
            closes(&node).is_none_or(|at| marked.is_some_and(|marked| marked < at)),
            "{:#?}",
            node.log
        );
    }
}

#[test]
fn a_mark_that_is_there_can_be_another_although_marks_are_refused() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.refuses_marks = true;
    node.answer("p1", "api.example.com", &[OTHER], 600);
    node.refuses_marks = false;
    node.log.clear();
    let moved = [allow("new.test"), allow("example.com"), deny_all()];
    node.set_firewall(&moved);
    node.set_ovn(&moved);
    let place = (ifindex(&node), ADDRESS.into());
    assert!(node.marks.contains_key(&place));
    let removed = marks(&node);
    let is_removal = |change: &MarkChange| matches!(change, MarkChange::Remove { .. });
    assert!(!removed.iter().any(is_removal), "{removed:?}");
}

#[test]
fn one_pod_cannot_take_all_groups() {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i"].map(|label| format!("{label}.test"));
    let mut rules: Vec<_> = names.iter().map(|name| allow(name)).collect();
    rules.push(deny_all());
    let mut node = Node::bare();
    node.engine = Engine::new(config());
    let mut node = node.start(&rules);
    node.add_pod("p2", 6);
    // An address for each set of names: each has another plan.
    for (set, address) in (1_u32..400).zip(0x0b00_0001_u32..) {
        let address = std::net::Ipv4Addr::from(address).octets();
        for (_, name) in (0..).zip(&names).filter(|(bit, _)| set & (1 << bit) != 0) {
            node.answer("p1", name, &[address], 600);
        }
        node.pass(Duration::from_secs(1));
    }
    let of_p1 = node.destinations().len();
    assert_eq!(of_p1, 399, "the rest has flows");
    assert!(node.marks.len() >= GROUPS_PER_PORT_MAX);
    let flows_of_its_own = node
        .switch
        .keys()
        .filter(|key| key.matches.ends.dst().is_some());
    assert!(flows_of_its_own.count() > 0);
    let marked = node.marks.len();
    node.answer("p2", "a.test", &[ADDRESS], 600);
    assert_eq!(node.marks.len(), marked + 1);
}

/// There are 31 numbers, and each name has a group.
#[test]
fn pods_with_many_groups_leave_numbers_to_others() {
    let names: Vec<_> = (0..19).map(|number| format!("n{number}.test")).collect();
    let mut rules: Vec<_> = names.iter().map(|name| allow(name)).collect();
    rules.push(deny_all());
    let mut node = Node::bare();
    node.engine = Engine::new(Config {
        mark_mask: NonZeroU32::new(0xf800_0000),
        ..Config::default()
    });
    let mut node = node.start(&rules);
    // Returns how many addresses are open by marks. The others are open by flows.
    let ask = |node: &mut Node, pod: &str, host: u8, count: u8| {
        for (name, last) in names.iter().zip(1..=count) {
            node.answer(pod, name, &[[203, 0, 113, last]], 3600);
        }
        let ifindex = ifindex_of(node.pods[&format!("ns1_{pod}")]);
        let marked = node.marks.keys().filter(|(at, _)| *at == ifindex).count();
        let ends = node.switch.keys().map(|key| key.matches.ends);
        let of_pod = ends.filter(|ends| ends.src() == IpAddr::from([10, 244, 0, host]));
        let open: BTreeSet<_> = of_pod.filter_map(Ends::dst).collect();
        assert_eq!(marked + open.len(), usize::from(count), "{pod}");
        marked
    };
    assert_eq!(ask(&mut node, "p1", 5, 19), 19);
    // Three quarters of the numbers, and four of the last one for each pod that has fewer.
    for (pod, host, count, marked) in [("p2", 6, 19, 5), ("p3", 7, 19, 4), ("p4", 8, 2, 2)] {
        node.add_pod(pod, host);
        assert_eq!(ask(&mut node, pod, host, count), marked);
    }
    // The numbers of the first come to be free.
    node.remove_interface("p1");
    node.pass(GROUP_STAYS + GROUP_RESTS + 4 * COMPARE_INTERVAL);
    node.add_pod("p5", 9);
    assert_eq!(ask(&mut node, "p5", 9, 19), 13);
}

/// So a pod that asks for other names again and again takes no more numbers than one that has many groups.
#[test]
fn numbers_that_rest_are_still_those_of_their_pod() {
    let name = |bit: u32| format!("n{bit}.test");
    let rules = (0..11).map(|bit| allow(&name(bit))).chain([deny_all()]);
    let rules: Vec<_> = rules.collect();
    let mut node = Node::bare();
    node.engine = Engine::new(config());
    let mut node = node.start(&rules);
    let numbers = |node: &Node| {
        let marks = node.switch.keys().filter_map(|key| match key.matches.ends {
            Ends::Group { mark, .. } => Some(mark.value()),
            Ends::Addresses(_) => None,
        });
        marks.collect::<BTreeSet<_>>().len()
    };
    // An address for each set of names: each has another plan.
    for set in 1..=GROUPS_PER_PORT_MAX as u32 {
        let [_, _, high, low] = set.to_be_bytes();
        for bit in (0..9).filter(|bit| set & 1 << bit != 0) {
            node.answer("p1", &name(bit), &[[203, 0, high, low]], 3600);
        }
        node.pass(Duration::from_secs(1));
    }
    let all = GROUPS_PER_PORT_MAX;
    assert_eq!((node.marks.len(), numbers(&node)), (all, all));
    // All of them end.
    node.set_firewall(&rules[9..]);
    node.set_ovn(&rules[9..]);
    while numbers(&node) > 0 {
        node.pass(COMPARE_INTERVAL);
    }
    node.answer("p1", &name(9), &[ADDRESS], 60);
    assert_eq!((node.marks.len(), numbers(&node)), (0, 0));
    node.pass(GROUP_RESTS + COMPARE_INTERVAL);
    node.answer("p1", &name(10), &[OTHER], 60);
    assert_eq!((node.marks.len(), numbers(&node)), (1, 1));
}

/// Rules for three names, and the same with a further one, for the name that was asked: its address gets another group.
fn edit() -> [Vec<Rule>; 2] {
    let former = || ["example.com", "a.test", "b.test"].map(allow);
    [
        [&former()[..], &[deny_all()]].concat(),
        [&former()[..], &[allow("www.example.com"), deny_all()]].concat(),
    ]
}

/// There are three numbers.
fn config_of_three() -> Config {
    Config {
        mark_mask: NonZeroU32::new(0xc000_0000),
        ..Config::default()
    }
}

fn node_of_three(rules: &[Rule]) -> Node {
    let mut node = Node::bare();
    node.engine = Engine::new(config_of_three());
    let mut node = node.start(rules);
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node
}

/// Where the other group of the address has a flow after the edit, somebody else has one: that group does not come into
/// force.
fn foreign_flow() -> Input {
    let [former, moved] = edit();
    let mut node = node_of_three(&former);
    let before = node.switch.clone();
    node.set_firewall(&moved);
    node.set_ovn(&moved);
    let mut keys = node.switch.into_keys();
    let key = keys.find(|key| !before.contains_key(key));
    Input::ForeignFlow {
        key: key.expect("a flow of the other group"),
        cookie: 0x1234,
    }
}

fn take_two_numbers(node: &mut Node) {
    let third = [203, 0, 113, 3];
    node.answer("p1", "a.test", &[OTHER], 600);
    node.answer("p1", "b.test", &[third], 600);
}

/// Groups are made of all numbers that are free. None of them opens the address of a former number.
fn take_all_numbers(node: &mut Node) {
    take_two_numbers(node);
    let destinations = [2, 3].map(|host| format!("203.0.113.{host}"));
    assert_eq!(node.destinations(), destinations.into());
}

#[test]
fn a_number_is_not_free_while_the_kernel_marks_with_it() {
    let [former, moved] = edit();
    let mut node = node_of_three(&former);
    node.give(foreign_flow());
    node.set_firewall(&moved);
    node.set_ovn(&moved);
    node.pass(GROUP_STAYS + GROUP_RESTS + 3 * COMPARE_INTERVAL);
    take_all_numbers(&mut node);
    assert!(!node.marks.contains_key(&(ifindex(&node), ADDRESS.into())));
}

#[test]
fn no_number_is_freed_while_the_marks_cannot_be_read() {
    let [former, moved] = edit();
    let mut node = node_of_three(&former);
    let flows = node.switch.clone();
    let has_flows = |node: &Node| flows.keys().all(|key| node.switch.contains_key(key));
    node.give(foreign_flow());
    node.set_firewall(&moved);
    node.set_ovn(&moved);
    node.hides_marks = true;
    node.pass(GROUP_STAYS + GROUP_RESTS + 3 * COMPARE_INTERVAL);
    assert!(has_flows(&node));
    node.hides_marks = false;
    node.pass(COMPARE_INTERVAL);
    assert!(!has_flows(&node) && node.marks.is_empty());
}

/// Starts an agent with what this run has left, whose rules have moved down behind these. It has not read the southbound
/// database, which is returned as well.
fn moved_meanwhile(before: &mut Node, new: impl IntoIterator<Item = Rule>) -> (Node, Input) {
    let [former, _] = edit();
    let moved: Vec<Rule> = new.into_iter().chain(former).collect();
    let saved = before.folded(&[]);
    let node = started(before, &saved, config_of_three());
    let node = read_but_southbound(node, before, &moved);
    let sb = southbound(&node, &moved);
    (node, Input::Sb(sb))
}

/// The group of the address does not come into force.
#[test]
fn a_number_of_the_former_run_is_not_free_while_the_kernel_marks_with_it() {
    let [former, _] = edit();
    let mut numbers = 0;
    let further = [
        &["www.example.com"][..],
        &["com"],
        &["com", "www.example.com"],
    ];
    for further in further {
        let further = || further.iter().map(|name| allow(name));
        let mut before = node_of_three(&former);
        let flows = before.switch.clone();
        let place = (ifindex(&before), IpAddr::from(ADDRESS));
        let former_mark = before.marks[&place].0;
        let (mut twin, sb) = moved_meanwhile(&mut before, further());
        twin.give(sb);
        if twin.marks[&place].0 == former_mark {
            continue;
        }
        numbers += 1;
        let mut before = node_of_three(&former);
        let (mut node, sb) = moved_meanwhile(&mut before, further());
        let key = twin.switch.into_keys().find(|key| !flows.contains_key(key));
        node.give(Input::ForeignFlow {
            key: key.expect("the rule has moved"),
            cookie: 0x1234,
        });
        node.give(sb);
        assert_eq!(node.marks[&place].0, former_mark);
        // The address is open by the flow of its former group alone.
        take_two_numbers(&mut node);
        let open = node.open().into_iter();
        let open = open.filter(|(_, dst, _)| *dst == Ipv4Addr::from(ADDRESS).to_string());
        let open: Vec<u16> = open.map(|(.., priority)| priority).collect();
        assert_eq!(open, [11_000]);
        // That ends, although the next group does not come into force.
        node.pass(COMPARE_INTERVAL + COMPARE_AGAIN);
        assert!(!node.marks.contains_key(&place));
        take_all_numbers(&mut node);
    }
    assert!(numbers > 0, "another number");
}

/// Three plans have three numbers, and after the edit three others have them.
#[test]
fn no_mark_of_a_former_run_meets_the_flows_of_another_plan() {
    let [former, _] = edit();
    for places in 1..8 {
        let mut before = node_of_three(&former);
        take_two_numbers(&mut before);
        let open = |node: &Node| {
            let open = node.open().into_iter();
            let open = open.map(|(_, dst, priority)| (dst, priority));
            open.collect::<BTreeSet<_>>()
        };
        let opened_before = open(&before);
        let destinations = before.destinations();
        let moved = opened_before.iter();
        let moved = moved.map(|(dst, priority)| (dst.clone(), priority - places));
        let moved: BTreeSet<_> = moved.collect();
        let rightly: BTreeSet<_> = opened_before.union(&moved).cloned().collect();
        let new = (0..places).map(|place| allow(&format!("new{place}.test")));
        let (mut node, sb) = moved_meanwhile(&mut before, new);
        node.waiting = Some(VecDeque::new());
        node.give(sb);
        while node.carry_out_next() {
            let open = open(&node);
            assert!(open.is_subset(&rightly), "{places}: {open:?}");
            assert_eq!(node.destinations(), destinations, "{places}: it closes");
        }
        assert_eq!(open(&node), moved);
    }
}

#[test]
fn a_mark_of_an_earlier_run_goes_if_its_number_may_be_another_ones() {
    let [former, moved] = edit();
    let restarted = || {
        let mut before = node();
        before.set_firewall(&former);
        before.set_ovn(&former);
        before.answer("p1", "www.example.com", &[ADDRESS], 600);
        let mark = before.marks[&(ifindex(&before), ADDRESS.into())].0;
        let snapshot = before.folded(&[]);
        let node = started(&mut before, &snapshot, config());
        (read_but_southbound(node, &before, &moved), mark)
    };
    let read_southbound = |node: &mut Node| {
        let sb = southbound(node, &moved);
        node.give(Input::Sb(sb));
    };
    let (mut twin, former_mark) = restarted();
    read_southbound(&mut twin);
    let place = (ifindex(&twin), IpAddr::from(ADDRESS));
    assert_ne!(twin.marks[&place].0, former_mark, "another number");
    let (mut node, _) = restarted();
    // The group does not come into force.
    let key = twin.switch.into_keys().next().expect("its flow");
    let cookie = 0x1234;
    node.give(Input::ForeignFlow { key, cookie });
    read_southbound(&mut node);
    // At first, it may still do so.
    assert_eq!(node.marks[&place].0, former_mark);
    node.pass(COMPARE_INTERVAL);
    assert!(!node.marks.contains_key(&place));
}

#[test]
fn a_pod_that_goes_late_takes_no_mark_of_the_successor_at_its_interface() {
    let mut node = node();
    let place = (ifindex(&node), IpAddr::from(ADDRESS));
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.add_pod("p2", 6);
    let interface = node.pods["ns1_p2"];
    // The veth of p2 has the index that the one of p1 had.
    let (ifindex, _) = place;
    node.give(Input::Attached { interface, ifindex });
    let tell = |node: &mut Node, address| {
        let mut bytes = answer_frame("www.example.com", &[address], 600);
        bytes[14 + 19] = 6;
        node.frame(ifindex, &bytes);
    };
    tell(&mut node, ADDRESS);
    let mark = node.marks[&place];
    node.remove_interface("p1");
    assert_eq!(node.marks.get(&place), Some(&mark));
    tell(&mut node, OTHER);
    assert!(node.marks.contains_key(&(ifindex, OTHER.into())));
}

/// The rule of an address was taken away while no agent ran. An answer comes before the marks are read.
#[test]
fn a_number_of_the_former_run_is_not_free_before_the_marks_are_read() {
    let config = || edits::config(ONE_NUMBER);
    let mut before = Node::bare();
    before.engine = Engine::new(config());
    let mut before = before.start(&[many(allow("old.test"), 1), deny_all()]);
    before.answer("p1", "www.old.test", &[ADDRESS], 600);
    before.pass(Duration::from_secs(30));
    assert_eq!((before.marks.len(), before.open().len()), (1, 1));
    let snapshot = before.folded(&[]);
    let rules = [deny_all(), many(allow("new.test"), 2)];
    let node = started(&mut before, &snapshot, config());
    let mut node = read_but_southbound(node, &before, &rules);
    node.waiting = Some(VecDeque::new());
    node.give(Input::Sb(southbound(&node, &rules)));
    let is_reading = |command: &Command| matches!(command, Command::ReadMarks);
    while !node.waiting.iter().flatten().any(is_reading) {
        assert!(node.carry_out_next());
    }
    // The reading takes its time.
    let waiting = node.waiting.as_mut().expect("commands wait");
    waiting.retain(|command| !is_reading(command));
    while node.carry_out_next() {}
    node.answer("p1", "www.new.test", &[OTHER], 600);
    while node.carry_out_next() {}
    let by_new_rule = |node: &Node| {
        let open = node.open().into_iter();
        let of_rule = open.filter(|(.., priority)| *priority == 10_999);
        of_rule.map(|(_, dst, _)| dst).collect::<BTreeSet<_>>()
    };
    let other = BTreeSet::from(["203.0.113.2".to_owned()]);
    assert_eq!(by_new_rule(&node), other, "open, and nothing else is");
    // The reading ends.
    node.waiting = Some([Command::ReadMarks].into());
    while node.carry_out_next() {
        assert_eq!(by_new_rule(&node), other);
    }
    node.waiting = None;
    assert_eq!(node.marks.len(), 0);
    // From now on, the number is free.
    node.answer("p1", "n.new.test", &[[203, 0, 113, 3]], 600);
    assert_eq!(node.marks.len(), 1);
}

/// A pod on two networks asks for a name, whose rule has many flows: a group for each port, in two parts of one batch.
/// The switch refuses the flows of the first.
#[test]
fn a_refused_part_of_a_batch_leads_to_no_mark() {
    let mut of_p1 = BTreeSet::new();
    for is_refused in [false, true] {
        let mut node = Node::bare();
        node.engine = Engine::new(config());
        let mut node = node.start(&[many(allow("example.com"), 200), deny_all()]);
        node.add_pod_as("udn", 7, "uid-p1", RowId::new(0x107));
        if is_refused {
            node.refused = std::mem::take(&mut of_p1);
        }
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        let is_of_p1 = |key: &&FlowKey| key.matches.ends.src() == IpAddr::from([10, 244, 0, 5]);
        of_p1 = node.switch.keys().filter(is_of_p1).cloned().collect();
        let place = (ifindex(&node), IpAddr::from(ADDRESS));
        assert_eq!(node.marks.contains_key(&place), !is_refused);
    }
}

/// The rule of an address was taken away while no agent ran, and the marks cannot be read at the start. The snapshot has
/// another address, whose plan gets the number of the former one.
#[test]
fn no_flow_of_a_group_is_sent_while_the_marks_of_the_former_run_cannot_be_read() {
    let config = || edits::config(ONE_NUMBER);
    let mut before = Node::bare();
    before.engine = Engine::new(config());
    let mut before = before.start(&[
        many(allow("old.test"), 1),
        many(allow("new.test"), 2),
        deny_all(),
    ]);
    before.answer("p1", "www.old.test", &[ADDRESS], 600);
    before.answer("p1", "www.new.test", &[OTHER], 600);
    before.pass(Duration::from_secs(30));
    assert_eq!(before.marks.len(), 1);
    let snapshot = before.folded(&[]);
    let rules = [deny_all(), many(allow("new.test"), 2)];
    let node = started(&mut before, &snapshot, config());
    let mut node = read_but_southbound(node, &before, &rules);
    node.hides_marks = true;
    node.waiting = Some(VecDeque::new());
    node.give(Input::Sb(southbound(&node, &rules)));
    let by_new_rule = |node: &Node| {
        let open = node.open().into_iter();
        let of_rule = open.filter(|(.., priority)| *priority == 10_999);
        of_rule.map(|(_, dst, _)| dst).collect::<BTreeSet<_>>()
    };
    for step in 0..200 {
        node.hides_marks = step < 100;
        if !node.carry_out_next() {
            node.pass(Duration::from_secs(1));
        }
        let open = by_new_rule(&node);
        assert!(!open.contains("203.0.113.1"), "{open:?}");
    }
    // It goes on once they are read.
    assert_eq!(by_new_rule(&node), ["203.0.113.2".to_owned()].into());
}

/// An edit leaves one of two addresses of a group another plan, whose flow the switch refuses. The former mark stays
/// for as long as the other address has the group.
#[test]
fn a_former_mark_goes_though_another_address_has_its_group() {
    let rules = [allow("example.com"), allow("www.example.com"), deny_all()];
    let edited = [
        allow("x.www.example.com"),
        allow("www.example.com"),
        deny_all(),
    ];
    let told = |is_shared: bool| {
        let mut node = edits::node(WAYS[1], &rules);
        node.answer("p1", "www.example.com", &[ADDRESS], 3600);
        if is_shared {
            node.answer("p1", "x.www.example.com", &[OTHER], 3600);
        }
        node.pass(Duration::from_secs(30));
        node
    };
    for is_shared in [false, true] {
        let mut twin = told(false);
        let before = twin.switch.clone();
        starts::edit(&mut twin, &edited);
        let mut of_rules = twin.of_rules();
        let refused = of_rules.find(|key| !before.contains_key(key)).cloned();
        let refused = refused.expect("a flow of the next group");
        let mut node = told(is_shared);
        node.refused = [refused].into();
        starts::edit(&mut node, &edited);
        node.pass(GROUP_STAYS + GROUP_RESTS + 10 * COMPARE_INTERVAL);
        assert!(!is_open(&node, ADDRESS, 0), "shared: {is_shared}");
    }
}

/// Pods of one tenant come and go, one at a time, each with an eighth of the numbers, as one pod may have. A comparison
/// removes one group of many ports.
#[test]
fn pods_that_come_and_go_leave_numbers_to_a_neighbour() {
    const OF_POD: u32 = 32;
    for ports in [1, 128] {
        let further = ["a", "b", "c", "d", "e"].map(|label| format!("{label}.test"));
        let mut rules = vec![many(allow("many.test"), ports)];
        rules.extend(further.iter().map(|name| many(allow(name), 1)));
        rules.extend([allow("other.test"), deny_all()]);
        // There are 255 numbers.
        let mut node = edits::node(Some(0xff00_0000), &rules);
        let hosts = (0x10..0x1a).chain(0x20..0x2a);
        for host in hosts {
            let name = format!("pod{host}");
            node.add_pod(&name, host);
            for (set, address) in (0..OF_POD).zip(addresses(0, OF_POD)) {
                node.answer(&name, "many.test", &[address], 600);
                for (_, other) in (0..).zip(&further).filter(|(bit, _)| set & (1 << bit) != 0) {
                    node.answer(&name, other, &[address], 600);
                }
            }
            node.pass(Duration::from_secs(30));
            if host == 0x29 {
                // The last one is still there. A neighbour needs six numbers.
                for (at, name) in (1..).zip(further.iter().chain(["other.test".to_owned()].iter()))
                {
                    node.answer("p1", name, &[[203, 0, 113, at]], 600);
                }
            }
            node.remove_interface(&name);
            node.log.clear();
        }
        assert!((1..7).all(|at| is_open_at_all(&node, [203, 0, 113, at])));
        assert_eq!(node.marks.len(), 6, "{ports} ports");
    }
}

/// Addresses wait for the marks of a group until its flows are in force. The kernel has no room for any of them: each
/// gets as many flows as the group has.
#[test]
fn marks_that_are_refused_together_leave_a_pod_no_more_flows_than_is_said() {
    // The room of a pod, and the flows of one answer.
    let most = 32_768 + 256 * 256;
    for names in [1, 4] {
        let mut node = edits::node(WAYS[1], &[many(allow("example.com"), 256), deny_all()]);
        node.waiting = Some(VecDeque::new());
        node.refuses_marks = true;
        for name in 0..names {
            let told = addresses(name * 256, 256);
            node.answer("p1", &format!("n{name}.example.com"), &told, 600);
        }
        for _ in 0..20 {
            node.carry_out_next();
        }
        let flows = node.engine.flow_count();
        assert!(flows <= most, "{names} names: {flows}");
    }
}

/// An edit moves the rule of an address. By marks, with no number left for the next plan, the mark goes before the flows
/// come that replace it.
#[test]
fn an_edit_that_moves_a_rule_closes_nothing_though_no_number_is_left() {
    let rules = [allow("example.com"), deny_all()];
    let moved = [allow("new.test"), allow("example.com"), deny_all()];
    for way in [WAYS[0], WAYS[1], ONE_NUMBER] {
        let mut node = edits::node(way, &rules);
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        node.pass(Duration::from_secs(30));
        node.waiting = Some(VecDeque::new());
        starts::edit(&mut node, &moved);
        while node.carry_out_next() {
            assert!(is_open_at_all(&node, ADDRESS), "{way:?}");
        }
        assert!(is_open(&node, ADDRESS, 1), "{way:?}");
    }
}
