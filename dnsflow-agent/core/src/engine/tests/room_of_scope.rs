//! The room that the groups of a namespace have, and addresses whose groups have none.

use super::{
    edits::{self, WAYS},
    limits::many,
    numbers::{is_of, tag},
    starts::is_open,
    *,
};
use crate::values::{
    flow::Tag,
    limits::{GROUP_FLOWS_PER_SCOPE_MAX, PATTERNS_MAX},
};

/// A node whose pods may change as many flows as they like.
fn node(way: Option<u32>, rules: &[Rule]) -> Node {
    let mut node = Node::bare();
    node.engine = Engine::new(Config {
        flow_changes_per_second: 10_000_000,
        ..edits::config(way)
    });
    node.start(rules)
}

/// Each of the addresses that have `large.test` and another name.
const UNIONS: [[u8; 4]; 3] = [[203, 0, 113, 11], [203, 0, 113, 12], [203, 0, 113, 13]];
/// The place of the first rule for another name.
const OTHERS: usize = 10;

/// Rules for `large.test` with so many ports each, and for three other names with all ports, of which the last is this
/// one.
fn large(ports: usize, last: Rule) -> Vec<Rule> {
    let mut rules = vec![many(allow("large.test"), ports); OTHERS];
    rules.extend([allow("n0.test"), allow("n1.test"), last, deny_all()]);
    rules
}

/// Three addresses have `large.test` and another name, those of the first two for a while (`ttl`).
fn tell(node: &mut Node, ttl: u32) {
    node.answer("p1", "large.test", &[ADDRESS], 3600);
    for (at, address) in UNIONS.iter().enumerate() {
        let ttl = if at == 2 { 3600 } else { ttl };
        node.answer("p1", &format!("n{at}.test"), &[*address], ttl);
        node.answer("p1", "large.test", &[*address], 3600);
    }
}

/// The place of a rule.
fn place(index: usize) -> u16 {
    u16::try_from(index).expect("few")
}

fn is_cut(node: &Node, address: [u8; 4]) -> bool {
    let port = node.engine.ports.named("ns1_p1").expect("it is there");
    let entry = node.engine.told.cache.entry(port, address.into());
    entry.is_some_and(|entry| entry.fit == crate::installed::Fit::Cut)
}

/// By the first of their rules. What one of them denies is closed.
#[test]
fn addresses_without_room_are_open_by_one_rule_or_closed() {
    for way in WAYS {
        for is_denied in [false, true] {
            let last = match is_denied {
                true => deny("n2.test"),
                false => allow("n2.test"),
            };
            let mut node = node(way, &large(1024, last));
            node.reports.clear();
            tell(&mut node, 3600);
            let case = format!("{way:x?}, denied: {is_denied}");
            assert!(is_cut(&node, UNIONS[2]), "{case}");
            assert!(node.engine.counters().addresses_cut > 0, "{case}");
            let limit = format!("ns1: FlowsOfNamespace of ns1_p1, {GROUP_FLOWS_PER_SCOPE_MAX}");
            assert!(node.limits_reported().contains(&limit), "{case}");
            assert!(is_open(&node, ADDRESS, 0) && is_open(&node, UNIONS[0], place(OTHERS)));
            let tag = tag(&node, UNIONS[2]);
            let of_group = |key: &&FlowKey| is_of(key, tag);
            let flows: Vec<&FlowKey> = node.of_rules().filter(of_group).collect();
            if is_denied {
                let [closed] = flows[..] else {
                    panic!("{case}: {flows:?}");
                };
                let (cookie, _) = node.switch[closed];
                assert!(node.actions[&cookie].is_empty(), "{case}");
                assert_eq!(closed.matches.transport, None, "{case}");
            } else {
                assert_eq!(flows.len(), OTHERS * 1024, "{case}");
                assert!(!is_open(&node, UNIONS[2], place(OTHERS + 2)), "{case}");
            }
        }
    }
}

#[test]
fn an_address_with_more_patterns_than_a_group_may_have_is_open_by_its_first_rule() {
    let names = PATTERNS_MAX;
    let name = |at: usize| format!("n{at}.example.com");
    let mut rules: Vec<Rule> = (0..names).map(|at| allow(&name(at))).collect();
    rules.push(allow("example.com"));
    for way in WAYS {
        let mut node = node(way, &[]);
        node.set_firewall(&rules);
        follow(&mut node, &rules);
        for at in 0..names {
            node.answer("p1", &name(at), &[ADDRESS], 3600);
            assert_eq!(is_cut(&node, ADDRESS), at + 1 == names, "{way:x?}, {at}");
        }
        let open = node.open().into_iter().map(|(.., priority)| priority);
        assert_eq!(open.collect::<Vec<_>>(), [11_000]);
    }
}

/// The group that closes has a number that no other one gets.
#[test]
fn the_group_that_closes_has_one_of_the_last_numbers() {
    let mut node = node(None, &large(1024, deny("n2.test")));
    tell(&mut node, 3600);
    let number = tag(&node, UNIONS[2]).map(Tag::number);
    assert!(number >= Some(Tag::NUMBER_MAX - 1), "{number:?}");
}
