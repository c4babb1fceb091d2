//! Addresses whose packets get their tag by a mark.

use std::num::NonZeroU32;

use super::{backends, limits::many, restart::after_restart_with, starts, *};
use crate::{
    io::input::MarkChange,
    values::limits::{ENDED_STAYS, GROUP_STAYS, MARK_SLACK, MARKS_REFUSED},
};

pub(super) const MASK: u32 = 0xffe0_0000;

pub(super) fn config() -> Config {
    Config {
        mark_mask: NonZeroU32::new(MASK),
        ..Config::default()
    }
}

pub(super) fn rules() -> [Rule; 2] {
    [allow("example.com"), deny_all()]
}

pub(super) fn node() -> Node {
    let mut node = Node::bare();
    node.engine = Engine::new(config());
    node.start(&rules())
}

/// The changes of marks since the log was last cleared.
pub(super) fn marks(node: &Node) -> Vec<MarkChange> {
    let commands = node.log.iter();
    let marks = commands.filter_map(|command| match command {
        Command::Mark(changes) => Some(changes.clone()),
        _ => None,
    });
    marks.flatten().collect()
}

pub(super) fn ifindex(node: &Node) -> u32 {
    ifindex_of(node.pods["ns1_p1"])
}

#[test]
fn the_first_address_of_a_rule_changes_flows_and_the_next_ones_do_not() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    assert_eq!((node.of_rules().count(), node.own()), (1, 0));
    let flows = node.switch.len();
    node.log.clear();
    node.held_answer("api.example.com", &[OTHER]);
    assert_eq!(node.batches_open(), [], "the switch is not touched");
    let position = |wanted: fn(&Command) -> bool| node.log.iter().position(wanted);
    let marked = position(|command| matches!(command, Command::Mark(_)));
    let released = position(|command| matches!(command, Command::Release(_)));
    assert!(marked.is_some() && marked < released, "{:?}", node.log);
    assert_eq!(node.destinations().len(), 2);
    assert_eq!(node.engine.flow_count(), flows);
    let opened = node
        .reports
        .iter()
        .filter(|report| matches!(report, Report::Opened { .. }));
    assert_eq!(opened.count(), 2);
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
    assert_eq!(backends::own(&node), [OTHER.into()].into());
    let marked = |node: &Node, address: [u8; 4]| {
        let place = (ifindex(node), address.into());
        node.marks.contains_key(&place)
    };
    assert!(marked(&node, ADDRESS) && !marked(&node, OTHER));
    // Also if the address was allowed before.
    node.answer("p1", "bad.example.com", &[ADDRESS], 600);
    assert_eq!(
        backends::own(&node),
        [ADDRESS, OTHER].map(IpAddr::from).into()
    );
    assert!(!marked(&node, ADDRESS));
    let rules = [allow("example.com"), deny_all()];
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    node.pass(2 * COMPARE_INTERVAL);
    // Marks take their place when nothing denies the addresses any more.
    assert_eq!(backends::own(&node), BTreeSet::new());
    assert!(marked(&node, ADDRESS) && marked(&node, OTHER));
    assert_eq!(node.destinations().len(), 2);
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

/// A group has more flows than fit in one part of a batch. The switch refuses one of them.
#[test]
fn a_refused_part_of_a_batch_leads_to_no_mark() {
    let rules = [many(allow("example.com"), 400), deny_all()];
    let told = |refused: BTreeSet<FlowKey>| {
        let mut node = Node::bare();
        node.engine = Engine::new(config());
        let mut node = node.start(&rules);
        node.refused = refused;
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        node
    };
    let twin = told(BTreeSet::new());
    let place = (ifindex(&twin), IpAddr::from(ADDRESS));
    assert!(twin.marks.contains_key(&place));
    let flows: Vec<&FlowKey> = twin.of_rules().collect();
    for refused in [flows.first(), flows.last()] {
        let refused = (*refused.expect("flows")).clone();
        let node = told([refused].into());
        assert!(!node.marks.contains_key(&place));
    }
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
        assert_eq!((entry.flows.len(), entry.packets), (1, None));
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
    let fixed = node.switch.len();
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
    assert_eq!(node.own(), 1, "for established connections");
    node.pass(ENDED_STAYS + GROUP_STAYS + 2 * COMPARE_INTERVAL);
    assert_eq!(node.of_rules().count(), 0);
    assert_eq!(node.switch.len(), fixed);
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
    node.pass(MARKS_REFUSED);
    assert!(node.engine.counters().marks_refused > 1);
    assert_eq!((open(&node), node.own()), ((1, 3), 2));
    node.refuses_marks = false;
    node.pass(MARKS_REFUSED + 2 * COMPARE_INTERVAL);
    node.answer("p1", "www.example.com", &[[203, 0, 113, 4]], 600);
    assert_eq!((open(&node), node.own()), ((4, 4), 0));
    node.set_firewall(&[deny_all()]);
    node.set_ovn(&[deny_all()]);
    assert_eq!(open(&node), (0, 0));
}

#[test]
fn a_mark_in_place_of_flows_has_the_term_of_the_address() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 3600);
    node.refuses_marks = true;
    node.answer("p1", "www.example.com", &[OTHER], 300);
    node.refuses_marks = false;
    let place = (ifindex(&node), OTHER.into());
    while !node.marks.contains_key(&place) {
        node.pass(Duration::from_secs(1));
    }
    assert_eq!(node.own(), 1, "the flow is there until a reading");
    node.answer("p1", "www.example.com", &[OTHER], 3600);
    node.pass(2 * COMPARE_INTERVAL);
    assert_eq!(node.own(), 0);
    for _ in 0..100 {
        node.pass(Duration::from_secs(10));
        let (_, until, _) = node.marks[&place];
        assert!(until > node.now);
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
    let place = (ifindex(&node), ADDRESS.into());
    let (mark, ..) = node.marks[&place];
    let further = [allow("www.example.com"), allow("example.com"), deny_all()];
    starts::edit(&mut node, &further);
    assert_ne!(node.marks[&place].0, mark);
    let removed = marks(&node);
    let is_removal = |change: &MarkChange| matches!(change, MarkChange::Remove { .. });
    assert!(!removed.iter().any(is_removal), "{removed:?}");
}

#[test]
fn a_pod_that_goes_leaves_no_mark() {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
    assert_eq!(node.marks.len(), 2);
    node.remove_interface("p1");
    assert!(node.marks.is_empty());
}

#[test]
fn a_pod_that_goes_late_leaves_no_mark_to_the_successor_at_its_interface() {
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
    let is_open = |node: &Node, address: [u8; 4]| {
        let address = Ipv4Addr::from(address).to_string();
        let mut open = node.open().into_iter();
        open.any(|(src, dst, _)| src == "10.244.0.6" && dst == address)
    };
    // By a flow: the mark that is there is one of p1's.
    tell(&mut node, ADDRESS);
    assert!(is_open(&node, ADDRESS) && node.own() == 1);
    node.remove_interface("p1");
    let mut was_removed = false;
    for _ in 0..2 {
        node.pass(COMPARE_INTERVAL);
        assert!(is_open(&node, ADDRESS));
        let is_removed = MarkChange::Remove {
            ifindex,
            address: ADDRESS.into(),
        };
        was_removed |= marks(&node).contains(&is_removed);
    }
    assert!(was_removed);
    tell(&mut node, OTHER);
    assert!(node.marks.contains_key(&(ifindex, OTHER.into())));
    node.pass(2 * COMPARE_INTERVAL);
    assert!(node.marks.contains_key(&place) && node.marks.len() == 2);
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
