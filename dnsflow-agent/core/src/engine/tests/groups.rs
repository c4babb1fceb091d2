//! The flows of groups: what they do, how they follow an edit, and what waits for them.

use std::collections::VecDeque;

use super::{
    edits::{self, ONE_NUMBER, WAYS},
    follow::{self, Verdict},
    limits::many,
    marks::{MASK, config, ifindex, marks, node, rules},
    restart::after_restart_with,
    starts::{self, is_open, is_open_at_all},
    *,
};
use crate::values::flow::{Action, Ends, Masked, Tag};

#[test]
fn a_flow_takes_the_tag_away_and_then_does_what_the_rule_says() {
    for way in WAYS {
        let mut node = Node::bare();
        node.engine = Engine::new(edits::config(way));
        node.read_sources();
        edits::edit(&mut node, edits::First::Manifest, &rules());
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        let added = node.batches().into_iter().flat_map(|(_, changes)| changes);
        let added = added.filter_map(|change| match change {
            FlowChange::Add(key, body) => Some((key.matches.ends, (key, body.actions))),
            _ => None,
        });
        let added: BTreeMap<Ends, _> = added.collect();
        let clear = way.map(|mask| Action::SetMark(Masked::new(0, mask)));
        let again = |table: u8| Action::Resubmit { table };
        let with = |actions: &[Action], last: Action| {
            let clear = clear.iter().cloned();
            let actions = actions.iter().cloned().chain(clear);
            actions.chain([last]).collect::<Vec<_>>()
        };
        let (of_rule, actions) = added
            .iter()
            .find_map(|(ends, flow)| matches!(ends, Ends::Tagged { .. }).then_some(flow))
            .expect("the flow of the rule");
        assert_eq!(actions.first(), Some(&Action::SetTunnel(0)));
        assert!(actions.len() > 1);
        let rules = of_rule.table;
        let Ends::Tagged { tag, .. } = of_rule.matches.ends else {
            unreachable!("found above");
        };
        match added.get(&Ends::Untranslated) {
            // A load balancer leads elsewhere than where the mark is for.
            Some((key, actions)) => {
                let mask = way.expect("marks");
                let scope = Action::SetTunnel(Tag::new(tag.scope(), 0).bits());
                let make = [scope, Action::MoveMark { mask }];
                assert_eq!(**actions, *with(&make, again(rules)));
                assert!(key.table == rules && key.priority > of_rule.priority);
            }
            None => assert_eq!(way, None),
        }
        let to_address = added
            .iter()
            .find_map(|(ends, flow)| ends.dst().and(Some(flow)));
        assert_eq!(to_address.is_some(), way.is_none());
        if let Some((key, actions)) = to_address {
            assert_eq!(
                **actions,
                [Action::SetTunnel(tag.bits()), again(rules)],
                "the tag, and once more"
            );
            assert!(key.table == rules && key.priority > of_rule.priority);
        }
        // Where other flows decide, tag and mark end behind them, whatever the protocol.
        let table = node.tags_end;
        let (key, actions) = &added[&Ends::AnyTag];
        assert_eq!((key.table, key.priority), (table, u16::MAX));
        assert_eq!(**actions, [Action::SetTunnel(0), again(table)]);
        let of_marks = added.iter();
        let of_marks = of_marks.filter(|(ends, _)| matches!(ends, Ends::Marked { .. }));
        let of_marks: Vec<_> = of_marks.map(|(_, flow)| flow).collect();
        let bits = way.unwrap_or_default().count_ones() as usize;
        assert_eq!(of_marks.len(), bits);
        for (key, actions) in of_marks {
            assert_eq!((key.table, key.priority), (table, u16::MAX));
            assert_eq!(**actions, *with(&[], again(table)));
        }
    }
}

#[test]
fn where_ovn_has_no_stage_for_it_tags_end_nowhere_and_that_is_told_once() {
    let mut node = Node::bare();
    node.engine = Engine::new(config());
    node.has_tags_end = false;
    let mut node = node.start(&rules());
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    assert_eq!(node.tags_ends().count(), 0);
    // OVN may be another one behind a new connection.
    node.has_tags_end = true;
    for _ in 0..2 {
        node.give(Input::SwitchDown);
        node.give(Input::SwitchUp);
        node.pass(COMPARE_INTERVAL);
        assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    }
    let bits = MASK.count_ones() as usize;
    assert_eq!(node.tags_ends().count(), 1 + bits);
    let told = node.reports.iter();
    let told = told.filter(|report| matches!(report, Report::MarksEndNowhere));
    assert_eq!(told.count(), 1);
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

/// A rule for another pattern comes.
#[test]
fn an_edit_of_patterns_moves_addresses_without_a_gap() {
    let former = [many(allow("example.com"), 2)];
    let edited = [&former[..], &[allow("com")]].concat();
    for way in WAYS {
        let mut node = edits::node(way, &former);
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        let before: BTreeSet<_> = node.of_rules().cloned().collect();
        node.waiting = Some(VecDeque::new());
        starts::edit(&mut node, &edited);
        while node.carry_out_next() {
            let verdict = follow::packet_of_p1(&node, ADDRESS, 2);
            assert_eq!(verdict, Verdict::Passes(11_000), "{way:x?}");
        }
        assert!(is_open(&node, ADDRESS, 1), "{way:x?}");
        // The flows of the former group stay for a while: no packet has its tag any more.
        let after: BTreeSet<_> = node.of_rules().cloned().collect();
        assert!(after.len() > before.len() && after.is_superset(&before));
    }
}

/// The flows of the group that an address gets by an edit wait behind what the pod itself has changed.
#[test]
fn an_edit_does_not_wait_behind_what_the_pod_was_told() {
    let rules = |first: &str| {
        let [c, d] = ["c.test", "d.test"].map(|name| many(allow(name), 256));
        let others = [allow("b.test"), c, d, deny_all()];
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
