//! Addresses that a load balancer leads to, by marks.

use std::collections::VecDeque;

use proptest::{collection::vec, prelude::*};

use super::{
    edits::config,
    fronts::front,
    restart::{read_but_southbound, southbound, started},
    *,
};
use crate::{
    io::input::MarkChange,
    ovn::rows::LoadBalancer,
    pods::budget::Changes,
    policy::refused::Refusals,
    values::limits::{CHANGES_UNDER_WAY_MAX, FLOW_BURST_TIME, FLOW_CHANGES_PER_SECOND},
};

pub(super) const MASK: u32 = 0xffe0_0000;

pub(super) fn node(rules: &[Rule]) -> Node {
    node_with(rules, Refusals::default())
}

pub(super) fn node_with(rules: &[Rule], refusals: Refusals) -> Node {
    let mut node = Node::bare();
    node.engine = Engine::new(Config {
        refusals,
        ..config(Some(MASK))
    });
    node.start(rules)
}

fn rules() -> [Rule; 2] {
    [allow("example.com"), deny_all()]
}

/// A Service without a selector, whose EndpointSlice has these addresses.
pub(super) fn lead_to(node: &mut Node, row: u128, backends: &[[u8; 4]]) {
    let backends: BTreeSet<IpAddr> = backends.iter().copied().map(IpAddr::from).collect();
    let balancer = LoadBalancer {
        service: Some("tenant/outside".into()),
        network: None,
        addresses: [[10, 96, 0, 9].into()].into(),
        backends: backends.into_iter().collect(),
    };
    node.give(Input::Nb(NbUpdate {
        load_balancers: vec![(RowId::new(row), Some(balancer))],
        ..NbUpdate::default()
    }));
}

/// The addresses that have flows of their own.
pub(super) fn own(node: &Node) -> BTreeSet<IpAddr> {
    let destinations = node.switch.keys().filter_map(|key| key.matches.ends.dst());
    destinations.collect()
}

/// The addresses that the kernel marks packets to.
pub(super) fn marked(node: &Node) -> BTreeSet<IpAddr> {
    node.marks.keys().map(|(_, address)| *address).collect()
}

pub(super) fn ips<const COUNT: usize>(addresses: [[u8; 4]; COUNT]) -> BTreeSet<IpAddr> {
    addresses.map(IpAddr::from).into()
}

/// How many flows to addresses were changed since the last call.
fn changes(node: &mut Node) -> usize {
    let changes = node.batches().into_iter().flat_map(|(_, changes)| changes);
    let of_addresses = changes.filter(|change| match change {
        FlowChange::Add(key, _) | FlowChange::Delete(key, _) => key.matches.ends.dst().is_some(),
        FlowChange::Renew(_) => false,
    });
    of_addresses.count()
}

/// A load balancer sends a packet elsewhere behind the program that marks: only a flow to the address meets it.
#[test]
fn an_address_that_a_load_balancer_leads_to_has_flows_of_its_own() {
    let mut node = node(&rules());
    // Known before the answer.
    lead_to(&mut node, 1, &[OTHER]);
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
    assert_eq!((own(&node), marked(&node)), (ips([OTHER]), ips([ADDRESS])));
    // Known afterwards, from two rows. The flows stay, whatever becomes of the load balancers.
    lead_to(&mut node, 1, &[ADDRESS]);
    lead_to(&mut node, 2, &[ADDRESS]);
    for _ in 0..2 {
        node.pass(2 * COMPARE_INTERVAL);
        assert_eq!(
            (own(&node), marked(&node)),
            (ips([ADDRESS, OTHER]), ips([]))
        );
        lead_to(&mut node, 1, &[]);
        lead_to(&mut node, 2, &[]);
    }
    // They go with the address.
    node.pass(Duration::from_secs(3600));
    assert_eq!(own(&node), ips([]));
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
    assert_eq!(
        (own(&node), marked(&node)),
        (ips([]), ips([ADDRESS, OTHER]))
    );
}

#[test]
fn what_a_load_balancer_comes_to_lead_to_stays_open_all_the_time() {
    let mut node = node(&rules());
    let told = addresses(0, 200);
    node.answer("p1", "example.com", &told, 3600);
    node.pass(Duration::from_secs(1));
    node.waiting = Some(VecDeque::new());
    for time in 0..40 {
        lead_to(&mut node, 1, if time % 2 == 0 { &told } else { &[] });
        node.pass(COMPARE_INTERVAL / 4);
        while node.carry_out_next() {
            assert_eq!(node.destinations().len(), told.len());
        }
    }
    assert_eq!((own(&node).len(), marked(&node).len()), (told.len(), 0));
}

/// The Service of a tenant leads to what pods of others use, and to nothing, by turns.
#[test]
fn a_service_changes_the_flows_of_other_pods_once_and_few_at_a_time() {
    for ports in [1, 20] {
        let of_ports = Rule {
            ports: tcp(ports),
            ..allow("example.com")
        };
        let mut node = node(&[of_ports, deny_all()]);
        node.add_pod("p2", 6);
        let told = addresses(0, 250);
        for pod in ["p1", "p2"] {
            node.answer(pod, "example.com", &told, 3600);
        }
        changes(&mut node);
        let mut all = 0;
        for time in 0..100 {
            lead_to(&mut node, 1, if time % 2 == 0 { &told } else { &[] });
            node.pass(COMPARE_INTERVAL);
            let changed = changes(&mut node);
            all += changed;
            assert!(changed <= CHANGES_UNDER_WAY_MAX, "{changed}");
        }
        // A flow for each, however many ports the rule lists.
        assert_eq!(all, own(&node).len() * 2);
        let open = node.open().len();
        assert_eq!(open, 2 * told.len() * ports, "all is open");
    }
}

/// An answer does not wait for the comparison. What it changes is charged to the pod that has asked.
#[test]
fn an_address_that_a_load_balancer_leads_to_gets_flows_with_the_next_answer() {
    for (spent, flows) in [(0, 2), (1, 1), (2, 0)] {
        let mut node = node(&rules());
        node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
        lead_to(&mut node, 1, &[ADDRESS, OTHER]);
        node.pass(Duration::from_secs(1));
        let port = node.engine.ports.named("ns1_p1").expect("it is there");
        let at_once = FLOW_CHANGES_PER_SECOND as usize * FLOW_BURST_TIME.as_secs() as usize;
        let changes = Changes {
            // Until the next answer, a part of a change comes to what is left.
            flows: spent * at_once,
            marks: 0,
        };
        node.engine.told.budget.spend(port, changes, node.now);
        node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
        assert_eq!(own(&node).len(), flows, "{spent}");
        assert_eq!(marked(&node), ips([ADDRESS, OTHER]), "{spent}");
        node.pass(2 * COMPARE_INTERVAL);
        assert_eq!((own(&node).len(), marked(&node).len()), (2, 0), "{spent}");
    }
}

#[test]
fn what_comes_to_be_denied_loses_its_mark_at_once() {
    let rules = [deny("bad.test"), allow("example.com"), deny_all()];
    let mut node = node(&rules);
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    lead_to(&mut node, 1, &[ADDRESS]);
    node.pass(COMPARE_INTERVAL);
    assert_eq!(
        (own(&node), marked(&node)),
        (ips([ADDRESS]), ips([ADDRESS]))
    );
    node.log.clear();
    node.answer("p1", "bad.test", &[ADDRESS], 600);
    let position = |wanted: fn(&Command) -> bool| node.log.iter().position(wanted);
    let unmarked = position(|command| {
        let Command::Mark(changes) = command else {
            return false;
        };
        let mut changes = changes.iter();
        changes.any(|change| matches!(change, MarkChange::Remove { .. }))
    });
    let denied = position(|command| matches!(command, Command::Apply { .. }));
    assert!(unmarked.is_some() && unmarked < denied, "{:?}", node.log);
    let open = node.open().into_iter();
    let priorities: BTreeSet<u16> = open.map(|(.., priority)| priority).collect();
    assert_eq!(priorities, [10_999, 11_000].into());
    assert_eq!(marked(&node), ips([]));
}

#[test]
fn an_edit_of_the_rules_counts_while_flows_replace_a_mark() {
    let mut node = node(&rules());
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    lead_to(&mut node, 1, &[ADDRESS]);
    node.pass(COMPARE_INTERVAL);
    assert_eq!(
        (own(&node), marked(&node)),
        (ips([ADDRESS]), ips([ADDRESS]))
    );
    let moved = [allow("new.test"), allow("example.com"), deny_all()];
    node.set_firewall(&moved);
    node.set_ovn(&moved);
    let open = node.open().into_iter();
    let priorities: BTreeSet<u16> = open.map(|(.., priority)| priority).collect();
    assert_eq!(priorities, [10_999].into());
    let closed = [allow("new.test"), deny_all()];
    node.set_firewall(&closed);
    node.set_ovn(&closed);
    assert_eq!(node.destinations(), BTreeSet::new());
    assert_eq!((own(&node), marked(&node)), (ips([]), ips([])));
}

#[test]
fn a_mark_stays_while_the_switch_refuses_the_flows_that_replace_it() {
    let told = |node: &mut Node| {
        node.answer("p1", "www.example.com", &[ADDRESS], 3600);
        lead_to(node, 1, &[ADDRESS]);
    };
    let mut twin = node(&rules());
    told(&mut twin);
    twin.pass(2 * COMPARE_INTERVAL);
    let flows = twin.switch.into_keys();
    let flows = flows.filter(|key| key.matches.ends.dst().is_some());
    let mut node = node(&rules());
    node.refused = flows.collect();
    assert_eq!(node.refused.len(), 1);
    told(&mut node);
    for _ in 0..10 {
        node.pass(COMPARE_INTERVAL);
        assert_eq!((own(&node), marked(&node)), (ips([]), ips([ADDRESS])));
    }
    node.refused.clear();
    node.pass(3 * COMPARE_INTERVAL);
    assert_eq!((own(&node), marked(&node)), (ips([ADDRESS]), ips([])));
}

#[test]
fn an_address_in_use_is_not_evicted_when_flows_have_replaced_its_mark() {
    let mut node = node(&rules());
    node.engine.told.cache.limits_mut().addresses_per_port_max = 2;
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
    lead_to(&mut node, 1, &[ADDRESS]);
    let is_replaced = |node: &Node| marked(node) == ips([OTHER]);
    for _ in 0..COMPARE_INTERVAL.as_secs() * 3 {
        // The packets to it get their tag by the mark, or by the flow that is there.
        let now = node.now;
        for (.., used_at) in node.marks.values_mut() {
            *used_at = Some(now);
        }
        for (_, packets) in node.switch.values_mut() {
            *packets += 1;
        }
        if !is_replaced(&node) {
            node.pass(Duration::from_secs(1));
        }
    }
    assert!(is_replaced(&node) && own(&node) == ips([ADDRESS]));
    node.answer("p1", "ftp.example.com", &[[203, 0, 113, 3]], 600);
    let both = ["203.0.113.1", "203.0.113.2"].map(str::to_owned);
    assert_eq!(node.destinations(), both.into());
    assert_eq!(node.engine.counters().addresses_refused, 1);
}

/// `--allow-answers` opens a network of pods.
#[test]
fn an_address_of_a_pod_that_may_be_opened_gets_flows_when_a_load_balancer_leads_to_it() {
    for is_of_pods in [false, true] {
        let allowed = ["203.0.113.0/24".parse().expect("a network")];
        let refusals = Refusals::new(&[], &[], &allowed, &[]).expect("few");
        let mut node = node_with(&rules(), refusals);
        if is_of_pods {
            let switch = LogicalSwitch {
                networks: allowed.to_vec(),
                ..LogicalSwitch::default()
            };
            node.give(Input::Nb(NbUpdate {
                switches: vec![(RowId::new(9), Some(switch))],
                ..NbUpdate::default()
            }));
        }
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        lead_to(&mut node, 1, &[ADDRESS]);
        node.pass(3 * COMPARE_INTERVAL);
        assert_eq!(own(&node), ips([ADDRESS]), "of pods: {is_of_pods}");
    }
}

/// What can happen beside load balancers.
#[derive(Clone, Copy, Debug)]
enum Step {
    Answer { name: usize, host: u8 },
    LeadTo { hosts: u8 },
    Front { hosts: u8 },
    Edit(usize),
    Pass { seconds: u64 },
    Lost,
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..NAMES.len(), 0..4u8).prop_map(|(name, host)| Step::Answer { name, host }),
        4 => (0..16u8).prop_map(|hosts| Step::LeadTo { hosts }),
        2 => (0..16u8).prop_map(|hosts| Step::Front { hosts }),
        2 => (0..EDITS).prop_map(Step::Edit),
        4 => (1..12u64).prop_map(|seconds| Step::Pass { seconds }),
        1 => Just(Step::Lost),
    ]
}

const NAMES: [&str; 3] = ["a.test", "b.test", "n.a.test"];
const EDITS: usize = 5;

fn edit(number: usize) -> Vec<Rule> {
    let two = |rule| Rule {
        ports: tcp(2),
        ..rule
    };
    match number {
        0 => vec![allow("a.test"), allow("b.test"), deny_all()],
        1 => vec![two(allow("b.test")), allow("a.test"), deny_all()],
        2 => vec![deny("b.test"), allow("a.test")],
        3 => vec![two(deny("n.a.test")), allow("a.test"), deny_all()],
        _ => vec![deny_all()],
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// What a load balancer has in front, and where it leads to, changes nothing in what a pod reaches without it. What it
    /// has in front is never marked.
    #[test]
    fn what_is_open_without_load_balancers_is_open_with_them(steps in vec(steps(), 1..30)) {
        let [mut node, mut twin] = [(); 2].map(|()| node(&edit(0)));
        let of_bits = |bits: u8| -> Vec<[u8; 4]> {
            let hosts = (0..4).filter(|host| bits & (1 << host) != 0);
            hosts.map(|host| [203, 0, 113, host]).collect()
        };
        let mut fronts = 0;
        for step in steps {
            for (node, is_twin) in [(&mut node, false), (&mut twin, true)] {
                match step {
                    Step::Answer { name, host } => {
                        node.answer("p1", NAMES[name], &[[203, 0, 113, host]], 3600);
                    }
                    Step::LeadTo { .. } | Step::Front { .. } if is_twin => {}
                    Step::LeadTo { hosts } => lead_to(node, 1, &of_bits(hosts)),
                    Step::Front { hosts } => {
                        fronts = hosts;
                        front(node, &of_bits(hosts));
                    }
                    Step::Edit(number) => {
                        node.set_firewall(&edit(number));
                        node.set_ovn(&edit(number));
                    }
                    Step::Pass { seconds } => node.pass(Duration::from_secs(seconds)),
                    Step::Lost => {
                        for (key, (cookie, _)) in std::mem::take(&mut node.switch) {
                            node.give(Input::FlowLost { key, cookie });
                        }
                        node.pass(Duration::from_millis(50));
                    }
                }
            }
            let open = |node: &Node| node.open().into_iter().collect::<BTreeSet<_>>();
            prop_assert_eq!(open(&node), open(&twin), "{:?}", step);
            let in_front: BTreeSet<IpAddr> = of_bits(fronts).into_iter().map(IpAddr::from).collect();
            prop_assert!(marked(&node).is_disjoint(&in_front), "{:?}", step);
            node.engine.told.cache.check();
        }
        // Whatever a load balancer leads to now has flows of its own.
        node.pass(3 * COMPARE_INTERVAL);
        let cache = &node.engine.told.cache;
        let port = node.engine.ports.named("ns1_p1").expect("it is there");
        let lacks_flows = |address: &IpAddr| cache.lacks_flows(port, *address);
        prop_assert!(!cache.addresses(port).iter().any(lacks_flows));
    }
}

/// A Service of another tenant comes to lead to what a pod uses, so many comparisons before the agent is restarted.
fn led_to_around_a_restart(comparisons: usize) {
    let rules = rules();
    let told = addresses(0, 1024);
    let mut before = node(&rules);
    for (name, told) in told.chunks(256).enumerate() {
        before.answer("p1", &format!("n{name}.example.com"), told, 600);
    }
    before.pass(Duration::from_secs(30));
    assert_eq!((marked(&before).len(), own(&before).len()), (1024, 0));
    for comparison in 0..comparisons {
        if comparison == 0 {
            lead_to(&mut before, 1, &told);
        }
        before.pass(COMPARE_INTERVAL);
    }
    let mut with_flows = own(&before).len();
    assert_eq!(with_flows, comparisons * CHANGES_UNDER_WAY_MAX);
    let snapshot = before.folded(&[]);
    let node = started(&mut before, &snapshot, config(Some(MASK)));
    let mut node = read_but_southbound(node, &before, &rules);
    lead_to(&mut node, 1, &told);
    node.waiting = Some(VecDeque::new());
    node.give(Input::Sb(southbound(&node, &rules)));
    node.batches();
    for step in 0..1500 {
        if !node.carry_out_next() {
            node.pass(Duration::from_millis(500));
        }
        assert_eq!(node.destinations().len(), 1024, "{step}");
        assert!(with_flows <= own(&node).len(), "{step}");
        with_flows = own(&node).len();
        let batches = node.batches().into_iter();
        let largest = batches.map(|(_, changes)| changes.len()).max();
        assert!(largest <= Some(CHANGES_UNDER_WAY_MAX), "{largest:?}");
    }
    assert_eq!((marked(&node).len(), own(&node).len()), (0, 1024));
    node.engine.told.cache.check();
}

#[test]
fn what_a_load_balancer_leads_to_stays_open_over_a_restart() {
    led_to_around_a_restart(0);
}

#[test]
fn a_restart_goes_on_where_flows_have_replaced_some_of_the_marks() {
    led_to_around_a_restart(1);
    led_to_around_a_restart(3);
}
