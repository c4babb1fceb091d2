//! Addresses that a load balancer has in front, by marks.
//!
//! The flows of a group match by the mark alone. So a mark for an address in front of a load balancer would decide over
//! the packet that the load balancer has sent elsewhere.

use std::collections::VecDeque;

use super::{
    backends::{MASK, ips, marked, node, node_with, own},
    edits::config,
    restart::{read_but_southbound, southbound, started},
    *,
};
use crate::{
    io::input::MarkChange,
    ovn::rows::{LoadBalancer, TemplateVariables, UnreadFronts},
    policy::refused::Refusals,
};

/// What may have an address in front.
#[derive(Clone, Copy, Debug)]
enum Front {
    /// A load balancer that is no Service's. It leads to the same address.
    Other,
    /// A Service's, where an option allows its address.
    Service,
    /// One with a template.
    Template,
    /// Any: some cannot be read.
    Unread,
}

const FRONTS: [Front; 4] = [Front::Other, Front::Service, Front::Template, Front::Unread];

/// From now on, it has this address in front, or none.
fn change(node: &mut Node, of: Front, address: Option<[u8; 4]>) {
    let addresses: BTreeSet<IpAddr> = address.into_iter().map(IpAddr::from).collect();
    let balancer = |service: Option<&str>| {
        let row = LoadBalancer {
            service: service.map(str::to_owned),
            addresses: addresses.clone(),
            backends: match service {
                None => addresses.iter().copied().collect(),
                Some(_) => [].into(),
            },
            ..LoadBalancer::default()
        };
        vec![(RowId::new(0xf0), Some(row))]
    };
    let mut update = NbUpdate::default();
    match of {
        Front::Other => update.load_balancers = balancer(None),
        Front::Service => update.load_balancers = balancer(Some("ns2/web")),
        Front::Template => {
            let row = TemplateVariables { addresses };
            update.template_variables = vec![(RowId::new(0xf0), Some(row))];
        }
        Front::Unread => {
            update.unread_fronts = vec![(RowId::new(0xf0), address.map(|_| UnreadFronts))];
        }
    }
    node.give(Input::Nb(update));
}

/// A load balancer that is no Service's has these addresses in front.
pub(super) fn front(node: &mut Node, addresses: &[[u8; 4]]) {
    let row = LoadBalancer {
        addresses: addresses.iter().copied().map(IpAddr::from).collect(),
        ..LoadBalancer::default()
    };
    node.give(Input::Nb(NbUpdate {
        load_balancers: vec![(RowId::new(0xf0), Some(row))],
        ..NbUpdate::default()
    }));
}

fn rules() -> [Rule; 2] {
    [allow("example.com"), deny_all()]
}

fn allowing(rules: &[Rule]) -> Node {
    let allowed = ["203.0.113.0/24".parse().expect("a network")];
    node_with(rules, Refusals::new(&[], &[], &allowed, &[]).expect("few"))
}

#[test]
fn an_address_in_front_of_a_load_balancer_is_never_marked() {
    for of in FRONTS {
        let mut node = allowing(&rules());
        // Known before the answer.
        change(&mut node, of, Some(OTHER));
        node.answer("p1", "www.example.com", &[OTHER], 600);
        assert_eq!(
            (own(&node), marked(&node)),
            (ips([OTHER]), ips([])),
            "{of:?}"
        );
        // What has been one keeps its flows as long as the pod knows it. Where load balancers could not be read, it was
        // perhaps none.
        change(&mut node, of, None);
        node.answer("p1", "www.example.com", &[OTHER], 600);
        node.pass(2 * COMPARE_INTERVAL);
        let expected = match of {
            Front::Unread => (ips([]), ips([OTHER])),
            Front::Other | Front::Service | Front::Template => (ips([OTHER]), ips([])),
        };
        assert_eq!((own(&node), marked(&node)), expected, "{of:?}");
        node.pass(Duration::from_secs(3600));
        assert_eq!(own(&node), ips([]), "{of:?}");
        node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
        assert_eq!(
            (own(&node), marked(&node)),
            (ips([]), ips([ADDRESS, OTHER]))
        );
    }
}

/// Between both, the address is closed, and nothing behind the load balancer is open.
#[test]
fn an_address_that_comes_in_front_of_a_load_balancer_loses_its_mark_before_it_gets_flows() {
    for of in FRONTS {
        let mut node = allowing(&rules());
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        node.pass(Duration::from_secs(30));
        assert_eq!((own(&node), marked(&node)), (ips([]), ips([ADDRESS])));
        node.log.clear();
        change(&mut node, of, Some(ADDRESS));
        assert_eq!(
            (own(&node), marked(&node)),
            (ips([ADDRESS]), ips([])),
            "{of:?}"
        );
        let position = |wanted: fn(&Command) -> bool| node.log.iter().position(wanted);
        let left = position(|command| matches!(command, Command::LeaveNetworks(_)));
        let unmarked = position(|command| {
            let Command::Mark(changes) = command else {
                return false;
            };
            let mut changes = changes.iter();
            changes.any(|change| matches!(change, MarkChange::Remove { .. }))
        });
        let opened = position(|command| matches!(command, Command::Apply { .. }));
        assert!(
            left.is_some() && left < unmarked && unmarked < opened,
            "{:?}",
            node.log
        );
    }
}

/// The others may be marked by a later plan: the first one has the switch make the group.
#[test]
fn once_load_balancers_can_be_read_again_only_those_in_front_need_flows_of_their_own() {
    let mut node = node(&rules());
    let ask = |node: &mut Node, names: &[&str]| {
        for name in names {
            let name = format!("{name}.example.com");
            node.answer("p1", &name, &[ADDRESS, OTHER], 600);
            node.pass(COMPARE_INTERVAL);
        }
        (own(node), marked(node))
    };
    let both = ips([ADDRESS, OTHER]);
    change(&mut node, Front::Unread, Some(ADDRESS));
    assert_eq!(ask(&mut node, &["a", "b", "c"]), (both.clone(), ips([])));
    change(&mut node, Front::Template, Some(OTHER));
    node.log.clear();
    change(&mut node, Front::Unread, None);
    // All at once would be many changes.
    let mut changes = node.log.iter();
    assert!(!changes.any(|command| matches!(command, Command::Apply { .. })));
    let one_each = (ips([OTHER]), ips([ADDRESS]));
    assert_eq!(ask(&mut node, &["d", "e"]), one_each);
    // It keeps them behind the load balancer, too.
    change(&mut node, Front::Template, None);
    assert_eq!(ask(&mut node, &["f", "g"]), one_each);
}

/// A switch that is slow, or refuses the flows, leaves the address closed, not what is behind.
#[test]
fn an_address_in_front_of_a_load_balancer_is_closed_until_the_switch_has_its_flows() {
    let mut node = node(&rules());
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.pass(Duration::from_secs(30));
    node.waiting = Some(VecDeque::new());
    front(&mut node, &[ADDRESS]);
    while !matches!(
        node.waiting.as_ref().and_then(VecDeque::front),
        None | Some(Command::Apply { .. })
    ) {
        node.carry_out_next();
    }
    assert_eq!((own(&node), marked(&node)), (ips([]), ips([])));
    while node.carry_out_next() {}
    assert_eq!((own(&node), marked(&node)), (ips([ADDRESS]), ips([])));
}

#[test]
fn a_load_balancer_of_a_user_defined_network_concerns_its_ports_alone() {
    let mut node = node(&rules());
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    let row = LoadBalancer {
        network: Some("udn1".to_owned()),
        addresses: ips([ADDRESS, OTHER]),
        ..LoadBalancer::default()
    };
    node.give(Input::Nb(NbUpdate {
        load_balancers: vec![(RowId::new(0xf0), Some(row))],
        ..NbUpdate::default()
    }));
    node.answer("p1", "www.example.com", &[OTHER], 600);
    assert_eq!(
        (own(&node), marked(&node)),
        (ips([]), ips([ADDRESS, OTHER]))
    );
}

/// A node whose kernel opens what is one label below `example.com`.
fn opening() -> Node {
    let mut node = node(&rules());
    for (name, address) in [("www", ADDRESS), ("api", OTHER)] {
        node.answer("p1", &format!("{name}.example.com"), &[address], 600);
    }
    assert_eq!(node.kernel.classes.len(), 1);
    node
}

const FRESH: [u8; 4] = [203, 0, 113, 77];

#[test]
fn the_kernel_opens_no_address_in_front_of_a_load_balancer() {
    for of in [Front::Other, Front::Template, Front::Unread] {
        let mut node = opening();
        change(&mut node, of, Some(FRESH));
        node.log.clear();
        node.answer("p1", "cdn.example.com", &[FRESH], 600);
        assert_eq!(node.engine.counters().addresses_opened_by_kernel, 0);
        let mut marks = node
            .log
            .iter()
            .filter(|command| matches!(command, Command::Mark(_)));
        assert_eq!(marks.next(), None, "{of:?}");
        assert!(own(&node).contains(&FRESH.into()), "{of:?}");
        // Of others, it opens as many as before, unless any may be one.
        node.answer("p1", "dns.example.com", &[[203, 0, 113, 78]], 600);
        let opened = node.engine.counters().addresses_opened_by_kernel;
        assert_eq!(opened, u64::from(!matches!(of, Front::Unread)), "{of:?}");
    }
}

/// The program has read its list just before, and the agent hears of it later. The pod may have flows to the address.
#[test]
fn what_the_kernel_opens_beside_a_new_load_balancer_is_closed() {
    for is_known in [false, true] {
        let mut node = opening();
        let networks = node.kernel.networks.clone();
        front(&mut node, &[FRESH]);
        if is_known {
            node.answer("p1", "cdn.example.com", &[FRESH], 600);
            assert!(own(&node).contains(&FRESH.into()));
        }
        node.kernel.networks = networks;
        node.answer("p1", "cdn.example.com", &[FRESH], 600);
        assert!(!marked(&node).contains(&FRESH.into()), "known: {is_known}");
        assert!(own(&node).contains(&FRESH.into()), "known: {is_known}");
    }
}

/// The load balancer came while no agent ran.
#[test]
fn a_start_takes_the_marks_from_addresses_in_front_of_load_balancers() {
    for of in [Front::Other, Front::Template, Front::Unread] {
        let mut before = node(&rules());
        before.answer("p1", "www.example.com", &[ADDRESS], 600);
        before.pass(Duration::from_secs(30));
        assert_eq!(marked(&before), ips([ADDRESS]));
        let snapshot = before.folded(&[]);
        let node = started(&mut before, &snapshot, config(Some(MASK)));
        let mut node = read_but_southbound(node, &before, &rules());
        change(&mut node, of, Some(ADDRESS));
        node.give(Input::Sb(southbound(&node, &rules())));
        for _ in 0..20 {
            let both = (own(&node), marked(&node));
            let is_former = both == (ips([]), ips([ADDRESS]));
            assert!(
                is_former || both == (ips([ADDRESS]), ips([])),
                "{of:?}: {both:?}"
            );
            node.pass(COMPARE_INTERVAL / 10);
        }
        assert_eq!(own(&node), ips([ADDRESS]));
    }
}

#[test]
fn that_load_balancers_cannot_be_read_is_said_once() {
    let mut node = node(&rules());
    for _ in 0..2 {
        change(&mut node, Front::Unread, Some(ADDRESS));
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
    }
    change(&mut node, Front::Unread, None);
    let told = node.reports.iter().filter_map(|report| match report {
        Report::LoadBalancersUnread(are_unread) => Some(*are_unread),
        _ => None,
    });
    assert_eq!(told.collect::<Vec<_>>(), [true, false]);
}
