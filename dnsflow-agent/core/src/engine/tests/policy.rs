//! Rules that come, go and change, and what OVN makes of them.

use std::sync::{Arc, Weak};

use super::{
    reports::{Told, set_firewall_of_ns2},
    *,
};
use crate::{
    io::input::AttachCommand,
    ovn::{
        acl::take_parsed,
        rows::{Pipeline, PortGroup, Stage},
    },
    values::flow::Action,
    values::{ids::RecordingId, limits::FORMER_RULES_MAX},
};

#[test]
fn a_rule_that_goes_takes_its_flows_with_it() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    node.set_firewall(&[deny_all()]);
    assert_eq!(node.destinations().len(), 1, "as long as OVN enforces it");
    node.set_nb(&[deny_all()]);
    assert_eq!(node.destinations(), BTreeSet::new());
}

#[test]
fn a_firewall_edited_after_the_lookup_applies_to_it() {
    let mut node = Node::with(&[deny_all()]);
    node.answer("p1", "www.example.com", &[ADDRESS], 300);
    assert_eq!(node.destinations(), BTreeSet::new());
    let rules = [allow("example.com"), deny_all()];
    node.set_firewall(&rules);
    assert_eq!(node.destinations(), BTreeSet::new(), "OVN has no ACL yet");
    let waits_for = |node: &Node, what: &str| {
        let (problem, severity) = &problems_told(node)[&0];
        let text = format!("waiting for {what} dnsName `example.com`");
        assert!(problem.starts_with(&text), "{problem}");
        assert_eq!(*severity, Severity::Waiting);
    };
    waits_for(&node, "OVN's ACL for");
    node.set_nb(&rules);
    assert_eq!(node.destinations(), BTreeSet::new(), "northd is away");
    waits_for(&node, "the logical flows of");
    node.pass(Duration::from_secs(20));
    node.set_sb(&rules);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    assert_eq!(problems_told(&node), BTreeMap::new());
}

#[test]
fn a_rule_that_comes_later_sees_every_answer_to_a_pod_that_has_come_again() {
    let (old, new) = (RowId::new(0x105), RowId::new(0x205));
    let (group, with_port) = Node::with(&[]).group();
    let without_port = with_port.clone().map(|group| PortGroup {
        ports: BTreeSet::new(),
        ..group
    });
    let bound = |row, binding, members| {
        Input::Sb(SbUpdate {
            port_bindings: vec![(row, binding)],
            port_groups: vec![(group, members)],
            ..SbUpdate::default()
        })
    };
    let interface_of = |row, interface| {
        Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: vec![(row, interface)],
        })
    };
    let goes = interface_of(old, None);
    let comes = interface_of(new, Some(interface("ns1_p1", 5, "uid-new")));
    let unbound = bound(old, None, without_port);
    let bound = bound(new, Some(port_binding("ns1_p1", 5)), with_port);
    let inputs = [
        ("goes", goes),
        ("comes", comes),
        ("unbound", unbound),
        ("bound", bound),
    ];
    for order in restart::orders(&inputs) {
        let named: Vec<_> = order.iter().map(|(name, _)| *name).collect();
        let place = |wanted| named.iter().position(|name| *name == wanted);
        // OVN deletes the old row of a logical port before it makes the new one.
        if place("unbound") > place("bound") {
            continue;
        }
        let there = place("comes").expect("it is one of them");
        for moment in there..order.len() {
            let mut node = Node::with(&[allow("other.test"), deny_all()]);
            for (place, (_, input)) in order.iter().enumerate() {
                node.give(input.clone());
                node.pass(Duration::from_millis(50));
                if place == moment {
                    let bytes = answer_frame("www.example.com", &[ADDRESS], 300);
                    node.frame(ifindex_of(new), &bytes);
                }
            }
            let rules = [allow("example.com"), deny_all()];
            node.set_firewall(&rules);
            node.set_ovn(&rules);
            assert_eq!(
                node.destinations(),
                ["203.0.113.1".to_owned()].into(),
                "told after {:?} of {named:?}",
                named[moment]
            );
        }
    }
}

#[test]
fn an_answer_that_left_the_kernel_for_a_rule_that_is_gone_counts_for_one_that_comes() {
    let rules = [allow("example.com"), deny_all()];
    let mut node = Node::with(&rules);
    let captured_at = node.now;
    let bytes = answer_frame("www.example.com", &[ADDRESS], 300);
    node.set_firewall(&[deny_all()]);
    node.set_ovn(&[deny_all()]);
    node.pass(Duration::from_millis(200));
    // The agent comes to the frame late: it was busy with the edit.
    node.passed(ifindex_of(RowId::new(0x105)), captured_at, &bytes);
    assert_eq!(node.kernel.deferred.len(), 1);
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    assert_eq!(node.kernel.deferred.len(), 0);
}

#[test]
fn an_answer_that_no_rule_has_mentioned_for_long_is_not_deferred_by_the_agent() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.pass(Duration::from_secs(1));
    node.kernel.no_room = true;
    node.answer("p1", "notexample.com", &[ADDRESS], 300);
    assert_eq!(node.engine.counters().answers_unmentioned, 1);
    assert_eq!(node.kernel.deferred.len(), 0);
}

#[test]
fn a_recording_shows_names_that_no_rule_mentions_and_changes_nothing_else() {
    let id = RecordingId(1);
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "before.test", &[ADDRESS], 300);
    let time = Duration::from_secs(60);
    node.give(Input::Record {
        id,
        namespace: "ns1".into(),
        time,
    });
    node.answer("p1", "other.test", &[ADDRESS], 300);
    node.answer("p1", "other.test", &[[203, 0, 113, 2]], 300);
    node.answer("p1", "inside.test", &[[127, 0, 0, 1]], 300);
    node.answer("p1", "example.com", &[[203, 0, 113, 3]], 300);
    let recorded = |node: &Node| {
        let (names, _) = node.engine.view().recorded(id, 0, 10)?;
        let names = names
            .iter()
            .map(|one| format!("{} {:?}", one.name, one.addresses));
        Some(names.collect::<Vec<_>>())
    };
    let names = ["other.test [203.0.113.1]", "example.com [203.0.113.3]"].map(str::to_owned);
    assert_eq!(recorded(&node), Some(names.to_vec()));
    assert_eq!(node.destinations(), ["203.0.113.3".to_owned()].into());

    // As without it: an answer before its rule counts for it, and the filter comes back.
    node.pass(time + Duration::from_secs(10));
    assert_eq!(recorded(&node), None);
    let deferred = node.kernel.deferred.len();
    node.pass(Duration::from_secs(1));
    let unmentioned = node.engine.counters().answers_unmentioned;
    node.answer("p1", "later.test", &[[203, 0, 113, 4]], 300);
    assert_eq!(node.engine.counters().answers_unmentioned, unmentioned);
    assert_eq!(node.kernel.deferred.len(), deferred + 1);
    let rules = [allow("other.test"), deny_all()];
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    let both = ["203.0.113.1", "203.0.113.2"].map(str::to_owned);
    assert_eq!(node.destinations(), both.into());
}

#[test]
fn a_recording_ends_when_nobody_wants_it() {
    let id = RecordingId(1);
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.log.clear();
    node.give(Input::Record {
        id,
        namespace: "ns1".into(),
        time: Duration::from_secs(60),
    });
    let p1 = ifindex_of(node.pods["ns1_p1"]);
    assert_eq!(node.kernel.recorded, [p1].into());
    node.give(Input::EndRecording { id });
    assert_eq!(node.kernel.recorded, [].into());
    let is_filter = |command: &Command| matches!(command, Command::FilterInterface { .. });
    assert!(!node.log.iter().any(is_filter), "the filter stays");
}

#[test]
fn a_moved_rule_moves_its_flows_in_one_bundle() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    let rules = [allow("new.test"), allow("example.com"), deny_all()];
    node.log.clear();
    node.set_firewall(&rules);
    assert_eq!(node.batches(), [], "OVN still has it where it was");
    node.set_nb(&rules);
    node.log.clear();
    node.set_sb(&rules);
    let batches = node.batches();
    let [(true, changes)] = &batches[..] else {
        panic!("one atomic batch: {batches:?}");
    };
    assert_eq!(changes.len(), 2);
    assert_eq!(
        node.open(),
        [("10.244.0.5".into(), "203.0.113.1".into(), 10_999)]
    );
}

#[test]
fn a_pod_that_goes_takes_its_flows_with_it() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    node.remove_interface("p1");
    assert_eq!(node.own(), 0);
    assert!(
        node.log
            .contains(&Command::Attachment(AttachCommand::Detach {
                interface: RowId::new(0x105)
            }))
    );
}

#[test]
fn a_recreated_pod_inherits_nothing() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    // The new pod's row comes before the old one goes, with the same port name and address.
    node.add_pod_as("p1", 5, "uid-new", RowId::new(0x205));
    assert_eq!(node.own(), 0);
    node.answer("p1", "example.com", &[OTHER], 300);
    assert_eq!(node.destinations(), ["203.0.113.2".to_owned()].into());
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: false,
        interfaces: vec![(RowId::new(0x105), None)],
    }));
    assert_eq!(node.destinations(), ["203.0.113.2".to_owned()].into());
}

#[test]
fn a_denied_name_gets_flows_that_do_what_ovn_does() {
    let mut node = Node::with(&[deny("bad.test")]);
    node.answer("p1", "www.bad.test", &[ADDRESS], 1);
    assert_eq!(node.open()[0].2, 11_000);
    // Expiry would open: the cache entry is held for longer than one that allows.
    node.pass(Duration::from_secs(3000));
    assert_eq!(node.open().len(), 1);
    node.pass(Duration::from_secs(1000));
    assert_eq!(node.open().len(), 0);
}

#[test]
fn actions_that_only_ovn_can_make_are_copied() {
    let rules = [deny("bad.test"), deny_all()];
    let mut node = Node::with(&rules);
    let text = "ct_commit { ct_mark.blocked = 1; }; /* drop */";
    let with_text = |index: u32| {
        let mut flow = logical_flow(index, &rules).expect("a rule");
        flow.actions = text.into();
        (logical_flow_row(index), Some(flow))
    };
    // The other rule's logical flow has the same text, and OVN has made a flow of it.
    node.ovn_actions.insert(0xf01, vec![7; 8]);
    node.ovn_actions.insert(0xf00, vec![7; 8]);
    node.give(Input::Sb(SbUpdate {
        logical_flows: vec![with_text(0), with_text(1)],
        ..SbUpdate::default()
    }));
    node.pass(Duration::from_secs(1));
    node.log.clear();
    node.answer("p1", "bad.test", &[ADDRESS], 60);
    let batches = node.batches();
    let [(_, changes)] = &batches[..] else {
        panic!("one batch: {batches:?}");
    };
    let [FlowChange::Add(_, body), FlowChange::Add(..)] = &changes[..] else {
        panic!("one flow of the group, and one of the address: {changes:?}");
    };
    assert_eq!(
        *body.actions,
        [Action::SetTunnel(0), Action::Copied(vec![7; 8])]
    );
}

#[test]
fn nothing_is_written_before_the_table_is_known() {
    let mut node = Node::bare();
    node.ovn_installed = false;
    let mut node = node.start(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    assert_eq!(node.batches(), []);
    node.ovn_installed = true;
    node.pass(Duration::from_secs(1));
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
}

#[test]
fn the_table_is_found_beside_many_rules_that_ovn_installs_nothing_for() {
    let mut node = Node::with(&[]);
    let names = (0..2 * LOGICAL_FLOW_SAMPLE_MAX).map(|n| allow(&format!("n{n}.test")));
    let rules: Vec<Rule> = names.chain([deny_all()]).collect();
    let flows = (0..rules.len() as u32)
        .filter_map(|i| Some((logical_flow_row(i), Some(logical_flow(i, &rules)?))));
    node.give(Input::Sb(SbUpdate {
        logical_flows: flows.collect(),
        ..SbUpdate::default()
    }));
    let mut out = Output::at(node.now);
    let stage = Stage::Table(Pipeline::Egress, 4);
    node.engine.policy.sampled(stage, vec![], &mut out);
    let [Command::Ask(FlowQuestion::Find(cookies))] = &out.commands[..] else {
        panic!("nothing to look for");
    };
    // No address set is empty in the last rule.
    let last = 0xf00 + rules.len() as u32 - 1;
    assert!(cookies.contains(&last), "{cookies:x?}");
}

/// What is wrong, as it was told last.
fn problems_told(node: &Node) -> Told {
    let last = super::reports::problems_told(node).pop();
    last.map(|(_, told)| told).unwrap_or_default()
}

#[test]
fn a_firewall_that_ovn_does_not_enforce_closes_and_opens_nothing() {
    let old = [allow("example.com"), deny_all()];
    let mut node = Node::with(&old);
    node.answer("p1", "example.com", &[ADDRESS], 600);
    // ovn-kubernetes refuses it.
    let refused = [allow("other.test"), allow("*.test"), deny_all()];
    node.set_firewall(&refused);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    // Answers are still taken from the kernel, and the old rules hold for them.
    node.answer("p1", "www.example.com", &[OTHER], 600);
    node.answer("p1", "other.test", &[[203, 0, 113, 3]], 600);
    let open: BTreeSet<String> = ["203.0.113.1", "203.0.113.2"].map(Into::into).into();
    assert_eq!(node.destinations(), open);
    node.pass(Duration::from_secs(29));
    let waits = problems_told(&node);
    let severities: Vec<_> = waits.values().map(|(_, severity)| *severity).collect();
    assert_eq!(severities, [Severity::Waiting; 2], "{waits:?}");
    node.pass(Duration::from_secs(2));
    let (problem, severity) = &problems_told(&node)[&1];
    assert_eq!(*severity, Severity::NotInForce);
    for part in [
        "the one before it",
        "`*.test`",
        "--enable-dns-name-resolver",
    ] {
        assert!(problem.contains(part), "{problem}");
    }
    assert_eq!(node.destinations(), open);
    // It is mended, and ovn-kubernetes follows.
    let mended = [allow("other.test"), deny_all()];
    node.set_firewall(&mended);
    assert_eq!(node.destinations(), open);
    node.set_ovn(&mended);
    assert_eq!(node.destinations(), ["203.0.113.3".to_owned()].into());
    assert_eq!(problems_told(&node), BTreeMap::new());
    node.pass(Duration::from_secs(60));
    assert_eq!(problems_told(&node), BTreeMap::new());
}

#[test]
fn a_new_firewall_that_ovn_does_not_enforce_is_told_with_what_its_status_says() {
    let mut node = Node::with(&[]);
    node.give(firewalls(false, None));
    node.set_firewall(&[allow("example.com"), deny_all()]);
    let refused = Firewall {
        refusal: Some("failed to frobnicate".into()),
        ..firewall(&[allow("example.com"), deny_all()])
    };
    node.give(firewalls(false, Some(refused)));
    node.pass(Duration::from_secs(31));
    let (problem, severity) = &problems_told(&node)[&0];
    assert_eq!(*severity, Severity::NotInForce);
    for part in ["no rule of it", "failed to frobnicate"] {
        assert!(problem.contains(part), "{problem}");
    }
}

#[test]
fn of_edits_in_quick_succession_the_one_that_ovn_enforces_counts() {
    let rules = |name: &str| [allow(name), deny_all()];
    let mut node = Node::with(&rules("a.test"));
    node.answer("p1", "a.test", &[ADDRESS], 600);
    for n in 0..20 {
        node.set_firewall(&rules(&format!("n{n}.test")));
    }
    let refused = [allow("*.test"), deny_all()];
    node.set_firewall(&refused);
    node.answer("p1", "n19.test", &[OTHER], 600);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    // The last but one is taken over.
    node.set_ovn(&rules("n19.test"));
    assert_eq!(node.destinations(), ["203.0.113.2".to_owned()].into());
    let former = |node: &Node| node.engine.policy.former_count("ns1");
    assert_eq!(former(&node), 1);
    // One with the same ACLs as before needs none.
    node.set_firewall(&rules("n19.test"));
    assert_eq!((former(&node), problems_told(&node)), (0, BTreeMap::new()));
    // Gone is gone.
    node.set_firewall(&refused);
    node.give(Input::Firewalls(FirewallUpdate {
        reset: true,
        firewalls: vec![],
    }));
    assert_eq!((former(&node), node.destinations()), (0, BTreeSet::new()));
}

/// Two namespaces have pods here. Their large EgressFirewalls are edited again and again, and OVN follows none of them.
#[test]
fn of_former_firewalls_nothing_is_kept_beyond_their_limit() {
    /// As many as ovn-kubernetes takes.
    const RULES: usize = 8001;
    const EDITS: usize = 8;
    let mut node = Node::with(&[deny_all()]);
    let binding = PortBinding {
        logical_port: "ns2_p1".into(),
        namespace: Some("ns2".into()),
        ..port_binding("ns2_p1", 22)
    };
    node.give(Input::Sb(SbUpdate {
        port_bindings: vec![(RowId::new(0x222), Some(binding))],
        ..SbUpdate::default()
    }));
    let mut former: Vec<Weak<[Rule]>> = Vec::new();
    for namespace in ["ns1", "ns2"] {
        for edit in 0..EDITS {
            let mut rules = vec![deny_all(); RULES];
            rules[0] = allow(&format!("n{edit}.test"));
            let firewall = firewall(&rules);
            former.push(Arc::downgrade(&firewall.rules));
            let id = FirewallId {
                namespace: namespace.into(),
                name: FIREWALL_NAME.into(),
            };
            node.give(Input::Firewalls(FirewallUpdate {
                reset: false,
                firewalls: vec![(id, Some(firewall))],
            }));
        }
        // The latest is no former one.
        former.pop();
    }
    let kept = former.iter().filter(|rules| rules.strong_count() > 0);
    let kept = kept.count();
    assert!(kept * RULES <= FORMER_RULES_MAX, "{kept} are kept");
    let policy = &node.engine.policy;
    let names: usize = ["ns1", "ns2"]
        .map(|namespace| policy.names_in(namespace, None).expect("names").1.len())
        .iter()
        .sum();
    assert_eq!(names, kept + 2, "each has a name");
    assert!(policy.former_count("ns1") + policy.former_count("ns2") > 2);
}

/// How many plans were made since the last call.
fn planned(node: &mut Node) -> usize {
    node.engine.told.plans.planner().take_planned()
}

#[test]
fn an_edit_plans_only_what_its_rule_matters_to() {
    let mut node = Node::with(&[allow("example.com"), allow("a.test"), deny_all()]);
    for host in 1..=20 {
        let name = format!("n{host}.example.com");
        node.answer("p1", &name, &[[203, 0, 113, host]], 300);
    }
    node.answer("p1", "www.a.test", &[[203, 0, 113, 100]], 300);
    // An address of both rules.
    node.answer("p1", "a.test", &[[203, 0, 113, 1]], 300);
    assert_eq!(node.destinations().len(), 21);
    planned(&mut node);
    let rules = [allow("example.com"), allow("b.test"), deny_all()];
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    assert_eq!(node.destinations().len(), 20);
    // At most once for each of the three changes: the resource, the ACL, its logical flow.
    let count = planned(&mut node);
    assert!((1..=6).contains(&count), "{count}");
    // Behind a new rule, each rule is at another place.
    let rules = [
        deny("c.test"),
        allow("example.com"),
        allow("b.test"),
        deny_all(),
    ];
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    // The groups alone: no address gets another tag.
    assert!(planned(&mut node) < 20);
    assert_eq!(node.destinations().len(), 20);
    assert!(node.open().iter().all(|(.., priority)| *priority == 10_999));
}

/// So many rules, the second of which has this name.
fn many_rules(count: usize, second: &str) -> Vec<Rule> {
    let names = (0..count).map(|index| allow(&format!("n{index}.test")));
    let mut rules: Vec<Rule> = names.collect();
    rules[1] = allow(second);
    rules
}

#[test]
fn an_edit_parses_only_the_rows_that_it_changes() {
    for count in [3, 20] {
        let mut node = Node::with(&many_rules(count, "a.test"));
        node.answer("p1", "b.test", &[ADDRESS], 300);
        take_parsed();
        let edited = many_rules(count, "b.test");
        node.set_firewall(&edited);
        assert_eq!(take_parsed(), 0);
        // The ACL and its logical flow, when either comes.
        node.set_nb(&edited);
        assert_eq!(take_parsed(), 2);
        node.set_sb(&edited);
        assert_eq!(take_parsed(), 2);
        assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    }
}

#[test]
fn no_row_of_a_namespace_without_a_pod_here_is_parsed_until_one_comes() {
    let mut node = Node::with(&[deny_all()]);
    let rules = many_rules(20, "a.test");
    let edit = |node: &mut Node, rules: &[Rule]| {
        set_firewall_of_ns2(node, rules);
        let rows = (0..20).map(|index| {
            let acl = acl(index, rules).expect("a rule");
            let acl = Acl {
                namespace: "ns2".into(),
                ..acl
            };
            (acl_row(100 + index), Some(acl))
        });
        node.give(Input::Nb(NbUpdate {
            acls: rows.collect(),
            ..NbUpdate::default()
        }));
        node.pass(Duration::from_secs(1));
    };
    take_parsed();
    edit(&mut node, &rules);
    let refused = many_rules(20, "*.test");
    edit(&mut node, &refused);
    assert_eq!(take_parsed(), 0);
    // What came before the last one is forgotten after a while.
    assert_eq!(node.engine.policy.former_count("ns2"), 2 - 1);
    node.pass(Duration::from_secs(60));
    assert_eq!(node.engine.policy.former_count("ns2"), 0);
    assert_eq!(take_parsed(), 0);
    node.give(Input::Sb(SbUpdate {
        port_bindings: vec![(
            RowId::new(0x222),
            Some(PortBinding {
                logical_port: "ns2_p1".into(),
                namespace: Some("ns2".into()),
                ..port_binding("ns2_p1", 22)
            }),
        )],
        ..SbUpdate::default()
    }));
    assert_eq!(take_parsed(), 20);
}

#[test]
fn all_rows_of_one_update_are_one_step() {
    let names = ["a.test", "b.test", "c.test"];
    let mut rules = names.map(allow).to_vec();
    rules.push(deny_all());
    let mut node = Node::with(&rules);
    for (name, last) in names.into_iter().zip(1..) {
        node.answer("p1", name, &[[203, 0, 113, last]], 600);
    }
    assert_eq!(node.destinations().len(), 3);
    node.batches();
    // OVN enforces them no more.
    node.give(Input::Sb(SbUpdate {
        logical_flows: (0..3).map(|rule| (logical_flow_row(rule), None)).collect(),
        ..SbUpdate::default()
    }));
    let batches = node.batches();
    let closed: Vec<_> = batches.iter().map(|(_, changes)| changes.len()).collect();
    assert_eq!(closed, [3], "{batches:?}");
}
