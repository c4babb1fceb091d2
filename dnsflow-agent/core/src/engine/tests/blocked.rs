//! Connections that OVN has blocked while a flow of ours was missing.

use super::{explain::cidr, *};
use crate::switch::blocked::{SEARCH_INTERVAL, SEARCHES_MAX, SEARCHES_MIN};

/// The address that the pods are told.
const TOLD: [u8; 4] = [203, 0, 113, 7];
/// Longer than all looks take.
const LOOKED: Duration = Duration::from_secs(10);
const _: () = assert!(LOOKED.as_secs() > SEARCHES_MAX as u64 * SEARCH_INTERVAL.as_secs());

fn connection(pod: &str, host: u8, to: [u8; 4], port: u16) -> BlockedConnection {
    BlockedConnection {
        port: format!("ns1_{pod}"),
        zone: 9,
        protocol: Protocol::Tcp,
        src: IpAddr::V4(Ipv4Addr::new(10, 244, 0, host)),
        src_port: 40_000,
        dst: IpAddr::V4(to.into()),
        dst_port: port,
    }
}

impl Node {
    /// A node whose pod p1 was told an address.
    fn told(rules: &[Rule]) -> Self {
        let mut node = Self::with(rules);
        node.pass(LOOKED);
        node.answer("p1", "example.com", &[TOLD], 3600);
        node.log.clear();
        node
    }

    /// Someone removes all flows of ours.
    fn wipe(&mut self) {
        for (key, (cookie, _)) in std::mem::take(&mut self.switch) {
            self.give(Input::FlowLost { key, cookie });
        }
    }

    /// How many looks there were since the last call.
    fn looks(&mut self) -> usize {
        let log = std::mem::take(&mut self.log).into_iter();
        log.filter(|command| matches!(command, Command::FindBlocked))
            .count()
    }

    /// Whether a gap in our flows costs this connection its life: it is blocked when they are back.
    fn survives_a_gap(mut self, connection: BlockedConnection) -> bool {
        self.wipe();
        self.blocked.push(connection);
        self.pass(LOOKED);
        self.blocked.is_empty()
    }
}

#[test]
fn what_was_blocked_in_a_gap_goes_on() {
    let mut node = Node::told(&[allow("example.com"), deny_all()]);
    node.wipe();
    node.blocked = vec![
        connection("p1", 5, TOLD, 443),
        connection("p1", 5, TOLD, 80),
    ];
    node.pass(LOOKED);
    assert_eq!(node.blocked, []);
    assert_eq!(node.looks(), usize::from(SEARCHES_MIN));
    assert_eq!(node.engine.counters().connections_unblocked, 2);
    let told = Report::Unblocked {
        connections: 2,
        failed: 0,
    };
    assert!(node.reports.contains(&told), "{:?}", node.reports);
}

#[test]
fn what_is_blocked_rightly_stays_so() {
    let rules = [allow("example.com"), deny_all()];
    for (connection, why) in [
        (connection("p1", 5, [203, 0, 113, 8], 443), "never told"),
        (connection("p2", 6, TOLD, 443), "told to another pod"),
        (connection("p1", 6, TOLD, 443), "an address of another pod"),
        (connection("p9", 5, TOLD, 443), "no such port"),
    ] {
        let mut node = Node::told(&rules);
        node.add_pod("p2", 6);
        assert!(!node.survives_a_gap(connection), "{why}");
    }
}

#[test]
fn only_the_ports_of_the_rule_go_on() {
    let transport = |port| Transport {
        protocol: Protocol::Tcp,
        port,
    };
    for (ports, goes_on) in [
        (vec![transport(Some(443))], true),
        (vec![transport(Some(80)), transport(Some(443))], true),
        (vec![transport(None)], true),
        (vec![transport(Some(80))], false),
        (
            vec![Transport {
                protocol: Protocol::Udp,
                port: Some(443),
            }],
            false,
        ),
    ] {
        let rule = Rule {
            ports: ports.clone(),
            ..allow("example.com")
        };
        let node = Node::told(&[rule, deny_all()]);
        let connection = connection("p1", 5, TOLD, 443);
        assert_eq!(node.survives_a_gap(connection), goes_on, "{ports:?}");
    }
}

#[test]
fn the_first_rule_that_matches_decides() {
    let cidr = |action, network: &str| Rule {
        action,
        destination: Destination::Cidr(network.parse().expect("a network")),
        ports: vec![],
    };
    let (allow_it, deny_it) = (RuleAction::Allow, RuleAction::Deny);
    let name = || allow("example.com");
    for (rules, goes_on) in [
        (vec![cidr(deny_it, "203.0.113.0/24"), name()], false),
        (vec![cidr(deny_it, "198.18.0.0/15"), name()], true),
        (vec![name(), cidr(deny_it, "203.0.113.0/24")], true),
        (
            vec![
                cidr(allow_it, "203.0.113.7/32"),
                cidr(deny_it, "203.0.113.0/24"),
                name(),
            ],
            true,
        ),
        (vec![deny("example.com"), name()], false),
        (vec![name(), deny("example.com")], true),
    ] {
        let node = Node::told(&rules);
        let connection = connection("p1", 5, TOLD, 443);
        assert_eq!(node.survives_a_gap(connection), goes_on, "{rules:?}");
    }
}

#[test]
fn an_edit_that_closes_and_opens_again_ends_no_connection() {
    let open = [allow("example.com"), deny_all()];
    let mut node = Node::told(&open);
    for rules in [&[deny_all()][..], &open] {
        node.set_firewall(rules);
        node.set_ovn(rules);
        node.blocked = vec![connection("p1", 5, TOLD, 443)];
        node.pass(LOOKED);
        assert_eq!(node.blocked.is_empty(), rules == open, "{rules:?}");
    }
}

#[test]
fn a_switch_that_was_away_is_looked_at() {
    let mut node = Node::told(&[allow("example.com"), deny_all()]);
    node.give(Input::SwitchDown);
    node.switch.clear();
    node.blocked = vec![connection("p1", 5, TOLD, 443)];
    node.give(Input::SwitchUp);
    node.pass(LOOKED);
    assert_eq!(node.blocked, []);
}

#[test]
fn what_a_comparison_puts_back_is_looked_at() {
    let mut node = Node::told(&[allow("example.com"), deny_all()]);
    node.switch.clear();
    node.blocked = vec![connection("p1", 5, TOLD, 443)];
    node.pass(COMPARE_INTERVAL + LOOKED);
    assert_eq!(node.blocked, []);
}

#[test]
fn a_lost_flow_that_an_answer_writes_is_looked_at() {
    let mut node = Node::told(&[allow("example.com"), deny_all()]);
    node.wipe();
    node.answer("p1", "example.com", &[TOLD], 3600);
    node.blocked = vec![connection("p1", 5, TOLD, 443)];
    node.pass(LOOKED);
    assert_eq!(node.blocked, []);
}

#[test]
fn an_answer_that_opens_an_address_brings_no_look() {
    let mut node = Node::told(&[allow("example.com"), deny_all()]);
    for host in 8..20 {
        node.answer("p1", "example.com", &[[203, 0, 113, host]], 60);
        node.pass(Duration::from_secs(1));
    }
    assert_eq!(node.looks(), 0);
}

#[test]
fn a_flow_that_is_not_back_yet_unblocks_nothing() {
    let mut node = Node::told(&[allow("example.com"), deny_all()]);
    node.switch_answers = false;
    node.wipe();
    node.blocked = vec![connection("p1", 5, TOLD, 443)];
    node.pass(LOOKED);
    assert_eq!(node.looks(), 0);
    assert_eq!(node.blocked.len(), 1);
}

#[test]
fn a_look_that_finds_what_it_may_not_touch_ends() {
    let mut node = Node::told(&[allow("example.com"), deny_all()]);
    node.blocked = vec![connection("p1", 5, [203, 0, 113, 8], 443); 1000];
    node.wipe();
    node.pass(LOOKED);
    assert_eq!(node.looks(), usize::from(SEARCHES_MIN));
}

/// A search finds thousands.
#[test]
fn for_blocked_connections_each_rule_is_looked_at_once() {
    let others = (0..100).map(|index| allow(&format!("other{index}.test")));
    let denied = Rule {
        ports: vec![Transport {
            protocol: Protocol::Tcp,
            port: Some(22),
        }],
        ..cidr(RuleAction::Deny, "203.0.113.0/24")
    };
    let rules = others.chain([denied, allow("example.com"), deny_all()]);
    let rules: Vec<Rule> = rules.collect();
    let mut node = Node::with(&rules);
    follow(&mut node, &rules);
    node.pass(LOOKED);
    let addresses: Vec<[u8; 4]> = (1..=50).map(|last| [203, 0, 113, last]).collect();
    node.answer("p1", "example.com", &addresses, 3600);
    let connections = addresses
        .iter()
        .flat_map(|to| [443, 80, 22].map(|port| connection("p1", 5, *to, port)));
    let before = node.engine.policy.looked_at.get();
    node.give(Input::Blocked {
        connections: connections.collect(),
        more: false,
    });
    assert_eq!(node.engine.counters().connections_unblocked, 100);
    assert_eq!(node.engine.policy.looked_at.get() - before, rules.len());
}
