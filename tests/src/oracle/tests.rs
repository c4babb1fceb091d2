//! Cases by hand, from the documentation that the oracle was written from.

use super::*;

fn to(address: &str, protocol: &'static str, port: u16) -> Destination<'static> {
    Destination {
        address: address.parse().expect("an address"),
        protocol,
        port,
        told: BTreeSet::new(),
        central: BTreeSet::new(),
    }
}

fn told(address: &str, names: &[&'static str]) -> Destination<'static> {
    Destination {
        told: names.iter().copied().collect(),
        ..to(address, "tcp", 443)
    }
}

fn allow(cidr: &str) -> RuleSpec {
    RuleSpec::allow(cidr).expect("a CIDR")
}

fn deny(cidr: &str) -> RuleSpec {
    RuleSpec::deny(cidr).expect("a CIDR")
}

#[test]
fn without_a_match_it_passes() {
    assert_eq!(verdict(&[], &to("203.0.113.1", "tcp", 80)), None);
    let rules = [deny("198.51.100.0/24")];
    assert_eq!(verdict(&rules, &to("203.0.113.1", "tcp", 80)), None);
    assert_eq!(
        verdict(&rules, &to("198.51.100.9", "tcp", 80)),
        Some(Action::Deny)
    );
}

/// The guide's example: one CIDR, one name, and everything else denied.
#[test]
fn the_first_match_decides() {
    let rules = [
        allow("1.2.3.0/24"),
        RuleSpec::allow_name("www.example.com"),
        deny("0.0.0.0/0"),
    ];
    let found = |to: &Destination<'_>| deciding_rule(&rules, to);
    assert_eq!(found(&to("1.2.3.4", "udp", 53)), Some(0));
    assert_eq!(found(&told("203.0.113.1", &["www.example.com"])), Some(1));
    assert_eq!(found(&told("203.0.113.1", &["example.com"])), Some(2));
    assert_eq!(found(&to("203.0.113.1", "tcp", 443)), Some(2));
    // A denial of all of IPv4 says nothing of IPv6.
    assert_eq!(found(&to("2001:db8::1", "tcp", 443)), None);

    let swapped = [deny("0.0.0.0/0"), allow("1.2.3.0/24")];
    assert_eq!(deciding_rule(&swapped, &to("1.2.3.4", "tcp", 1)), Some(0));
}

#[test]
fn prefixes_end_where_they_end() {
    let rules = [allow("203.0.113.4/30"), deny("2001:db8::4/126")];
    for (address, expected) in [
        ("203.0.113.3", None),
        ("203.0.113.4", Some(0)),
        ("203.0.113.7", Some(0)),
        ("203.0.113.8", None),
        ("2001:db8::3", None),
        ("2001:db8::4", Some(1)),
        ("2001:db8::7", Some(1)),
        ("2001:db8::8", None),
    ] {
        let found = deciding_rule(&rules, &to(address, "tcp", 80));
        assert_eq!(found, expected, "{address}");
    }
}

#[test]
fn ports_narrow_a_rule_and_protocols_are_not_mixed() {
    let rules = [
        allow("0.0.0.0/0").ports(&[("tcp", 80), ("udp", 53), ("sctp", 9)]),
        deny("0.0.0.0/0"),
    ];
    for (protocol, port, expected) in [
        ("tcp", 80, 0),
        ("udp", 53, 0),
        ("sctp", 9, 0),
        ("udp", 80, 1),
        ("tcp", 53, 1),
        ("tcp", 8080, 1),
    ] {
        let found = deciding_rule(&rules, &to("203.0.113.1", protocol, port));
        assert_eq!(found, Some(expected), "{protocol} {port}");
    }
}

#[test]
fn names_cover_themselves_and_what_is_below() {
    for (rule, name, expected) in [
        ("example.com", "example.com", true),
        ("example.com", "www.example.com", true),
        ("example.com", "a.b.www.example.com", true),
        ("example.com", "notexample.com", false),
        ("example.com", "com", false),
        ("example.com", "example.com.evil.test", false),
        ("www.example.com", "example.com", false),
        ("Example.COM", "www.eXample.com", true),
        ("example.com.", "www.example.com", true),
        ("example.com", "WWW.example.com.", true),
    ] {
        assert_eq!(covers(rule, name), expected, "{rule} {name}");
    }
}

#[test]
fn a_wildcard_is_exactly_one_label() {
    for (name, expected) in [
        ("www.example.com", true),
        ("WWW.Example.com.", true),
        ("example.com", false),
        ("a.b.example.com", false),
        ("wwwexample.com", false),
    ] {
        assert_eq!(covers("*.example.com", name), expected, "{name}");
    }
}

#[test]
fn what_the_controller_found_counts_for_that_rule_alone() {
    let rules = [
        RuleSpec::deny_name("example.com"),
        RuleSpec::allow_name("Example.com"),
    ];
    let by_controller = Destination {
        central: ["Example.com"].into(),
        ..to("203.0.113.1", "tcp", 443)
    };
    assert_eq!(deciding_rule(&rules, &by_controller), Some(1));
    // To a pod both spellings are one name.
    assert_eq!(
        deciding_rule(&rules, &told("203.0.113.1", &["example.com"])),
        Some(0)
    );
}

#[test]
fn one_address_may_have_many_names() {
    let rules = [
        RuleSpec::deny_name("tracker.test"),
        RuleSpec::allow_name("cdn.test"),
        deny("0.0.0.0/0"),
    ];
    let both = told("203.0.113.1", &["a.cdn.test", "tracker.test"]);
    assert_eq!(deciding_rule(&rules, &both), Some(0));
    assert_eq!(
        deciding_rule(&rules, &told("203.0.113.1", &["a.cdn.test"])),
        Some(1)
    );
}
