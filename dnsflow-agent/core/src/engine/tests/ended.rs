//! Addresses whose time is over, and that were used: their connections go on, and new ones do not begin.

use super::{
    edits::{First, WAYS, config, edit, node, use_all},
    follow::{Verdict, established_of_p1, packet_of_p1},
    restart::after_restart_with,
    *,
};
use crate::values::{
    flow::{Protocol, Transport},
    limits::{ENDED_STAYS, GROUP_STAYS},
};

const PASSES: Verdict = Verdict::Passes(11_000);
const BOTH_PASS: [Verdict; 2] = [PASSES; 2];
const ESTABLISHED_PASS: [Verdict; 2] = [Verdict::Left, PASSES];
const NONE_PASSES: [Verdict; 2] = [Verdict::Left; 2];
/// Behind the TTL and the last use.
const IDLE: Duration =
    Duration::from_secs(2 * IDLE_GRACE.as_secs() + 2 * COMPARE_INTERVAL.as_secs());

/// The address was used, and its time is over.
fn ended(way: Option<u32>) -> Node {
    let mut node = node(way, &[allow("example.com"), deny_all()]);
    node.answer("p1", "www.example.com", &[ADDRESS], 1);
    node.pass(COMPARE_INTERVAL);
    use_all(&mut node);
    node.pass(IDLE);
    assert_eq!(packets(&node, ADDRESS), ESTABLISHED_PASS, "{way:?}");
    assert!(node.marks.is_empty(), "{:?}", node.marks);
    node
}

/// A packet of a new connection, and one of an established one.
fn packets(node: &Node, address: [u8; 4]) -> [Verdict; 2] {
    [packet_of_p1, established_of_p1].map(|packet| packet(node, address, 443))
}

#[test]
fn established_connections_go_on_for_as_long_as_they_are_used() {
    for way in WAYS {
        let mut node = ended(way);
        for _ in 0..3 {
            node.pass(ENDED_STAYS / 2);
            use_all(&mut node);
            assert_eq!(packets(&node, ADDRESS), ESTABLISHED_PASS);
        }
        node.pass(ENDED_STAYS + 2 * COMPARE_INTERVAL);
        assert_eq!(packets(&node, ADDRESS), NONE_PASSES);
        node.pass(GROUP_STAYS + 2 * COMPARE_INTERVAL);
        assert_eq!(node.own(), 0);
        assert!(node.engine.told.cache.is_idle());
    }
}

#[test]
fn an_address_that_was_never_used_ends_at_once() {
    for way in WAYS {
        let mut node = node(way, &[allow("example.com"), deny_all()]);
        node.answer("p1", "www.example.com", &[ADDRESS], 1);
        node.pass(MIN_TTL + IDLE);
        assert_eq!(packets(&node, ADDRESS), NONE_PASSES);
    }
}

/// The answer waits for the flow, as it does for a new address.
#[test]
fn an_answer_opens_the_address_again() {
    for way in WAYS {
        let mut node = ended(way);
        let opened = node.engine.counters().answers_opening;
        node.answer("p1", "www.example.com", &[ADDRESS], 1);
        assert_eq!(packets(&node, ADDRESS), BOTH_PASS);
        assert_eq!(node.engine.counters().answers_opening, opened + 1);
        node.pass(2 * COMPARE_INTERVAL);
        assert_eq!(packets(&node, ADDRESS), BOTH_PASS);
        assert_eq!(node.own(), usize::from(way.is_none()), "no second flow");
        // The TTL counts from the answer on. The connections are as idle as before.
        node.pass(MIN_TTL / 2);
        assert_eq!(packets(&node, ADDRESS), BOTH_PASS, "within the TTL");
        node.pass(MIN_TTL + IDLE_GRACE);
        assert_eq!(packets(&node, ADDRESS), ESTABLISHED_PASS);
    }
}

/// As long as that name counts, the address is open for what its own rules allow.
#[test]
fn a_name_that_has_ended_says_nothing_beside_another_one() {
    for way in WAYS {
        let mut node = ended(way);
        let of_http = Rule {
            ports: vec![Transport {
                protocol: Protocol::Tcp,
                port: Some(80),
            }],
            ..allow("example.org")
        };
        edit(
            &mut node,
            First::Rows,
            &[allow("example.com"), of_http, deny_all()],
        );
        assert_eq!(packets(&node, ADDRESS), ESTABLISHED_PASS);
        node.answer("p1", "example.org", &[ADDRESS], 600);
        assert_eq!(packets(&node, ADDRESS), NONE_PASSES, "to another port");
        assert_eq!(packet_of_p1(&node, ADDRESS, 80), Verdict::Passes(10_999));
    }
}

/// In these rows, the actions of a Deny are those of an Allow: the priority tells whose they are.
#[test]
fn an_edit_closes_at_once() {
    let denies = [deny("www.example.com"), allow("example.com"), deny_all()];
    for way in WAYS {
        for (rules, decides) in [
            (&denies[2..], Verdict::Left),
            (&denies, Verdict::Passes(11_000)),
        ] {
            let mut node = ended(way);
            edit(&mut node, First::Rows, rules);
            assert_eq!(packets(&node, ADDRESS), [decides; 2], "{way:?} {rules:?}");
            node.pass(Duration::from_secs(3600) + 2 * COMPARE_INTERVAL);
            assert_eq!(
                packets(&node, ADDRESS),
                NONE_PASSES,
                "a denial ends as others do"
            );
        }
    }
}

#[test]
fn a_restart_changes_nothing() {
    for way in WAYS {
        let mut before = ended(way);
        let rules = [allow("example.com"), deny_all()];
        let saved = before.folded(&[]);
        let actions = before.actions.clone();
        let mut node = after_restart_with(&mut before, &saved, &rules, config(way));
        node.actions.extend(actions);
        assert_eq!(packets(&node, ADDRESS), ESTABLISHED_PASS);
        let opened = node.switch.clone();
        node.pass(3 * COMPARE_INTERVAL);
        assert_eq!(packets(&node, ADDRESS), ESTABLISHED_PASS);
        assert_eq!(
            node.switch.keys().collect::<Vec<_>>(),
            opened.keys().collect::<Vec<_>>()
        );
        node.answer("p1", "www.example.com", &[ADDRESS], 1);
        assert_eq!(packets(&node, ADDRESS), BOTH_PASS);
        node.pass(MIN_TTL + IDLE);
        assert_eq!(
            packets(&node, ADDRESS),
            ESTABLISHED_PASS,
            "as idle as before"
        );
    }
}

/// By marks, the first address of a group is opened by flows, and a mark follows. Its connections may be idle since.
#[test]
fn what_was_used_by_flows_was_used_by_a_mark() {
    for way in WAYS {
        let mut node = node(way, &[allow("example.com"), deny_all()]);
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        use_all(&mut node);
        node.pass(Duration::from_secs(600) + IDLE);
        assert_eq!(packets(&node, ADDRESS), ESTABLISHED_PASS, "{way:?}");
    }
}

/// A name without a rule neither cuts the connections nor keeps the address from going on for them.
#[test]
fn a_name_that_no_rule_matches_changes_nothing() {
    let wildcard = allow("*.example.com");
    for way in WAYS {
        let mut node = node(way, &[wildcard.clone(), deny_all()]);
        node.answer("p1", "www.example.com", &[ADDRESS], 1);
        node.answer("p1", "a.b.example.com", &[ADDRESS], 600);
        node.pass(COMPARE_INTERVAL);
        use_all(&mut node);
        node.pass(IDLE);
        assert_eq!(packets(&node, ADDRESS), ESTABLISHED_PASS);
        node.answer("p1", "c.d.example.com", &[ADDRESS], 600);
        assert_eq!(packets(&node, ADDRESS), ESTABLISHED_PASS);
        node.answer("p1", "other.example.com", &[ADDRESS], 600);
        assert_eq!(packets(&node, ADDRESS), BOTH_PASS);
    }
}

/// The addresses in the order in which they end. Beyond the room, they close for all.
#[test]
fn a_pod_has_room_for_some() {
    for way in WAYS {
        let mut config = config(way);
        config.cache_limits.addresses_per_port_max = 8;
        let mut node = Node::bare();
        node.engine = Engine::new(config);
        let mut node = node.start(&[allow("example.com"), deny_all()]);
        let address = |host| [203, 0, 113, host];
        let all: Vec<_> = (1..=4).map(address).collect();
        node.answer("p1", "www.example.com", &all, 1);
        node.pass(COMPARE_INTERVAL);
        use_all(&mut node);
        node.pass(IDLE);
        let ended = all
            .iter()
            .filter(|address| packets(&node, **address) == ESTABLISHED_PASS);
        assert_eq!(ended.count(), 2, "{way:?}");
        assert_eq!(node.engine.counters().addresses_ended, 2);
        // They give way to others, and no limit is reported.
        let others: Vec<_> = (11..19).map(address).collect();
        node.answer("p1", "api.example.com", &others, 600);
        for address in others {
            assert_eq!(packets(&node, address), BOTH_PASS);
        }
        assert_eq!(node.engine.counters().addresses_evicted, 0);
    }
}

/// The names that an edit has closed, with the rule that denies them now.
fn closed(
    node: &mut Node,
    first: First,
    rules: &[Rule],
) -> Vec<(Option<String>, usize, Option<u32>)> {
    node.reports.clear();
    edit(node, first, rules);
    let reports = node.reports.iter();
    let closed = reports.filter_map(|report| match report {
        Report::Closed {
            name,
            addresses,
            left_out,
            rule,
            ..
        } => {
            let name = name.as_ref().map(ToString::to_string);
            Some((name, addresses.len() + left_out, *rule))
        }
        _ => None,
    });
    closed.collect()
}

#[test]
fn an_edit_tells_of_addresses_in_use_that_it_closes() {
    let allowed = [allow("example.com"), allow("example.org"), deny_all()];
    let denied = [
        deny("www.example.com"),
        allow("example.com"),
        allow("example.org"),
        deny_all(),
    ];
    let www = Some("www.example.com".to_owned());
    let firsts = [First::Rows, First::Manifest].into_iter();
    for (way, first) in firsts.flat_map(|first| WAYS.map(|way| (way, first))) {
        for (rules, rule) in [(&denied[2..], None), (&denied[..], Some(0))] {
            let mut node = node(way, &allowed);
            node.answer("p1", "www.example.com", &[ADDRESS], 600);
            node.answer("p1", "example.org", &[OTHER], 600);
            assert_eq!(closed(&mut node, first, &denied[1..]), [], "nothing closes");
            node.pass(COMPARE_INTERVAL);
            use_all(&mut node);
            node.pass(2 * COMPARE_INTERVAL);
            let told = closed(&mut node, first, rules);
            assert_eq!(told, [(www.clone(), 1, rule)], "{way:?}");
            assert_eq!(closed(&mut node, first, rules), [], "once");
        }
        // Rules by network let it pass.
        let network = Rule {
            destination: Destination::Cidr("203.0.113.0/24".parse().expect("a network")),
            ..allow("example.com")
        };
        for rules in [vec![network, deny_all()], vec![allow("example.org")]] {
            let mut node = node(way, &allowed);
            node.answer("p1", "www.example.com", &[ADDRESS], 600);
            node.pass(COMPARE_INTERVAL);
            use_all(&mut node);
            node.pass(2 * COMPARE_INTERVAL);
            // In the other order, the rules by network are not known yet.
            let told = closed(&mut node, First::Manifest, &rules);
            assert_eq!(told, [], "{rules:?}");
        }
        // Its last packet is long ago.
        let mut node = node(way, &allowed);
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        node.pass(COMPARE_INTERVAL);
        use_all(&mut node);
        node.pass(Duration::from_secs(120));
        assert_eq!(closed(&mut node, first, &denied[2..]), []);
    }
}

/// The rest is one number for each pod.
#[test]
fn a_large_edit_tells_of_some_addresses() {
    let mut node = node(None, &[allow("example.com"), deny_all()]);
    for number in 0..40_u8 {
        let name = format!("n{number}.example.com");
        node.answer("p1", &name, &[[203, 0, 113, number + 1]], 600);
    }
    node.pass(COMPARE_INTERVAL);
    use_all(&mut node);
    node.pass(2 * COMPARE_INTERVAL);
    let told = closed(&mut node, First::Manifest, &[deny_all()]);
    let all: usize = told.iter().map(|(_, addresses, _)| addresses).sum();
    assert_eq!((told.len(), all), (9, 40), "{told:?}");
    assert_eq!(told.last(), Some(&(None, 32, None)));
}
