use dnsflow_core::ask::view::{
    FirewallView, HeardName, NodeView, Origin, ProblemView, Reason, RuleStep, SourceView,
};

use super::*;
use crate::ObjectProblem;

fn port() -> PortView {
    PortView {
        port: "ns1_pod1".into(),
        namespace: "ns1".into(),
        pod: "pod1".into(),
        interface: "veth1".into(),
        network: None,
        addresses: vec!["10.244.0.5".parse().expect("an address")],
        attachment: Attachment::Attached,
        not_trusted: None,
        firewall: Some("ns1".into()),
        told: 1,
        limits: vec![],
    }
}

fn entry() -> EntryView {
    EntryView {
        port: "ns1_pod1".into(),
        namespace: "ns1".into(),
        pod: "pod1".into(),
        network: None,
        address: "203.0.113.1".parse().expect("an address"),
        names: vec![NameView {
            name: "www.example.com".into(),
            origin: Origin::InUse,
            ttl_left_s: 3725,
            told_s: 61,
            resolver: Some("10.96.0.10:53".into()),
            rules: vec![0, 3],
        }],
        refused: None,
        flows: vec![FlowView {
            flow: "cookie=0x1, table=50, priority=10,ip actions=drop".into(),
            packets: 7,
            idle_s: 2,
            is_missing: false,
            is_of_group: false,
        }],
        packets: Some(7),
        used_s: Some(2),
    }
}

fn text_of(write: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> String {
    let mut output = Vec::new();
    write(&mut output).expect("memory has room");
    String::from_utf8(output).expect("text")
}

fn object(object: &str, is_in_force: bool, reason: &str) -> ObjectProblem {
    ObjectProblem {
        object: object.into(),
        is_in_force,
        reasons: vec![reason.into()],
    }
}

#[test]
fn the_status_counts_firewalls_by_state() {
    let firewall = |namespace: &str, severity: Option<&str>| FirewallView {
        is_dry_run: namespace == "dry",
        namespace: namespace.into(),
        rules: 1,
        rules_by_name: 1,
        open_beside: IpVersions::default(),
        problems: Vec::from_iter(severity.map(|severity| ProblemView {
            rule: 0,
            severity: severity.into(),
            text: String::new(),
        })),
    };
    let text = |firewalls: Vec<FirewallView>, object_problems| {
        firewalls_text(&Status {
            version: String::new(),
            up_s: 0,
            object_problems,
            object_problems_left_out: 0,
            node: NodeView {
                firewalls,
                ..NodeView::default()
            },
        })
    };
    assert_eq!(text(vec![], vec![]), "no EgressFirewall");
    let broken = || vec![object("ns9/default", false, "x")];
    assert_eq!(text(vec![], broken()), "1 EgressFirewall: 1 not usable");
    let two = vec![firewall("a", None), firewall("b", Some("caveat"))];
    assert_eq!(
        text(two, broken()),
        "3 EgressFirewalls: 2 in force, 1 not usable"
    );
    let waiting = vec![firewall("a", Some("waiting")), firewall("dry", None)];
    assert_eq!(
        text(waiting, vec![]),
        "2 EgressFirewalls: 1 waiting for OVN, 1 dry run"
    );
}

#[test]
fn an_ip_version_that_no_rule_closes_is_named_where_pods_have_it() {
    let problems_of = |addresses: &[&str], v6: bool| {
        let addresses = addresses.iter().map(|one| one.parse().expect("an address"));
        let status = Status {
            version: String::new(),
            up_s: 0,
            object_problems: vec![],
            object_problems_left_out: 0,
            node: NodeView {
                ports: vec![PortView {
                    addresses: addresses.collect(),
                    ..port()
                }],
                firewalls: vec![FirewallView {
                    namespace: "ns1".into(),
                    is_dry_run: false,
                    rules: 2,
                    rules_by_name: 1,
                    open_beside: IpVersions { v4: false, v6 },
                    problems: vec![],
                }],
                ..NodeView::default()
            },
        };
        problems(&status).collect::<Vec<_>>()
    };
    let both = ["10.244.0.5", "fd00::5"];
    assert_eq!(
        problems_of(&both, true),
        [
            "namespace ns1: the rules deny over IPv4 what they do not mention, and over IPv6 it passes; add a Deny of \
          cidrSelector ::/0 as the last rule"
        ]
    );
    assert!(problems_of(&both, false).is_empty());
    assert!(problems_of(&both[..1], true).is_empty());
}

#[test]
fn the_status_names_what_is_not_as_it_should_be() {
    let failed = PortView {
        attachment: Attachment::Failed("no such device".into()),
        limits: vec!["too many addresses".into()],
        ..port()
    };
    let status = Status {
        version: "1.2.3".into(),
        up_s: 90_061,
        object_problems: vec![
            object(
                "ns2/default",
                false,
                "spec.egress is not a list; write a list of rules",
            ),
            object(
                "ns1/default",
                true,
                "rule 1: type is missing; write Allow or Deny",
            ),
            object(
                "ns3/default",
                true,
                "the annotation dnsflow.io/dry-run is \"yes\"",
            ),
        ],
        object_problems_left_out: 2,
        node: NodeView {
            is_ready: false,
            large_tables: vec!["table T of D is left out".into()],
            sources: vec![SourceView {
                source: "EgressFirewalls".into(),
                is_read: false,
            }],
            switch_is_connected: true,
            switch_is_compared: false,
            resolvers: vec!["10.96.0.10:53".into()],
            ports: vec![port(), failed],
            firewalls: vec![FirewallView {
                is_dry_run: false,
                namespace: "ns1".into(),
                rules: 2,
                rules_by_name: 1,
                open_beside: IpVersions::default(),
                problems: vec![
                    ProblemView {
                        rule: 0,
                        severity: "waiting".into(),
                        text: "waiting for OVN".into(),
                    },
                    ProblemView {
                        rule: 1,
                        severity: "not_in_force".into(),
                        text: "ns1/default: rule 1: type is missing; write Allow or Deny".into(),
                    },
                ],
            }],
            addresses: 1,
            flows: 2,
        },
    };
    assert_eq!(
        text_of(|output| super::status(&status, output)),
        "\
agent      1.2.3, up 1d1h
ready      not yet
switch     connected, not compared yet
sources    not read yet: EgressFirewalls; table T of D is left out
resolvers  10.96.0.10:53
ports      1 of 2 attached
firewalls  2 EgressFirewalls: 1 with rules not in force, 1 not usable
cache      1 addresses, 2 flows

POD        INTERFACE   STATE
ns1/pod1   veth1       not attached: no such device
ns1/pod1   veth1       too many addresses

ns2/default is not usable: spec.egress is not a list; write a list of rules

ns3/default: the annotation dnsflow.io/dry-run is \"yes\"

2 further objects are not usable as written: see the log

namespace ns1, rule 0 (waiting): waiting for OVN

namespace ns1, rule 1 (not_in_force): ns1/default: rule 1: type is missing; write Allow or Deny
"
    );
}

#[test]
fn the_cache_has_a_line_for_each_name() {
    // By a mark.
    let marked = EntryView {
        packets: None,
        used_s: None,
        ..entry()
    };
    let written = text_of(|output| {
        let entries = [entry(), marked];
        table(CACHE, entries.iter().flat_map(cache_rows), output)
    });
    assert_eq!(
        written,
        "\
POD        NAME              ADDRESS       TTL    SOURCE   RULES   PACKETS   USED
ns1/pod1   www.example.com   203.0.113.1   1h2m   in_use   0,3     7         2s ago
ns1/pod1   www.example.com   203.0.113.1   1h2m   in_use   0,3     -         never
"
    );
}

/// An address with this flow, and with one of a group.
fn with_group(flow: &str) -> EntryView {
    let own = FlowView {
        flow: flow.into(),
        ..entry().flows.remove(0)
    };
    let of_group = FlowView {
        flow: "tun_id=0x801001 actions=drop".into(),
        packets: 9,
        is_of_group: true,
        ..own.clone()
    };
    EntryView {
        flows: vec![own, of_group],
        ..entry()
    }
}

#[test]
fn a_flow_of_a_group_is_printed_once() {
    let mut printed = Printed::default();
    let entries = [with_group("nw_dst=1"), with_group("nw_dst=2")];
    let rows = entries.iter();
    let rows = rows.flat_map(|entry| FlowRow::of(entry, &mut printed));
    let rows: Vec<_> = rows.map(|row| row.cells()).collect();
    let cells = rows.iter().map(|cells| [&*cells[3], &*cells[5]]);
    let group = ["9 (group)", "tun_id=0x801001 actions=drop"];
    assert_eq!(
        cells.collect::<Vec<_>>(),
        [["7", "nw_dst=1"], group, ["7", "nw_dst=2"]]
    );
    let explained = |entry: EntryView| ExplainedAddress {
        address: Some(entry.address),
        verdict: Verdict::Allowed,
        reason: Reason::AllowedByName,
        rule: Some(0),
        text: "it is allowed".into(),
        remedy: None,
        steps: vec![],
        entry: Some(entry),
        heard: vec![],
    };
    let explanation = Explanation {
        port: port(),
        verdict: Verdict::Allowed,
        addresses: entries.map(explained).into(),
        hints: vec![],
    };
    let text = text_of(|output| explanations(&[explanation], "www.example.com", output));
    let flows: Vec<&str> = text.lines().filter(|line| line.contains("flow")).collect();
    assert_eq!(
        flows,
        [
            "  flow nw_dst=1, 7 packets, used: 2s ago",
            "  flow tun_id=0x801001 actions=drop, 9 packets to all addresses of its group, used: 2s ago",
            "  flow nw_dst=2, 7 packets, used: 2s ago",
        ]
    );
}

#[test]
fn an_explanation_begins_with_the_verdict() {
    let explanation = Explanation {
        port: port(),
        verdict: Verdict::Blocked,
        addresses: vec![ExplainedAddress {
            address: Some("203.0.113.1".parse().expect("an address")),
            verdict: Verdict::Blocked,
            reason: Reason::WrongPort,
            rule: Some(1),
            text: "rule 0 allows it for tcp/80 only".into(),
            remedy: None,
            steps: vec![RuleStep {
                rule: 1,
                action: "Deny".into(),
                destination: "cidrSelector: 0.0.0.0/0".into(),
                ports: vec![],
                outcome: StepOutcome::Decides,
                why: "203.0.113.1 is in 0.0.0.0/0".into(),
            }],
            entry: Some(entry()),
            heard: vec![HeardName {
                name: "cdn.example.org".into(),
                told_s: 4,
                resolver: "10.96.0.10:53".into(),
            }],
        }],
        hints: vec!["look at the weather".into()],
    };
    assert_eq!(
        text_of(|output| explanations(&[explanation], "203.0.113.1:443", output)),
        "\
pod ns1/pod1 to 203.0.113.1:443

203.0.113.1 BLOCKED (wrong_port): rule 0 allows it for tcp/80 only
  told 1m1s ago by 10.96.0.10:53: www.example.com, for 1h2m more (in_use), rules 0,3
  told 4s ago by 10.96.0.10:53: cdn.example.org, which no rule mentions
  rule 1 Deny cidrSelector: 0.0.0.0/0  decides: 203.0.113.1 is in 0.0.0.0/0
  flow cookie=0x1, table=50, priority=10,ip actions=drop, 7 packets, used: 2s ago
  hint: look at the weather
"
    );
}

#[test]
fn a_level_that_was_changed_is_shown_with_the_one_before() {
    let mut levels = Levels {
        level: "info".into(),
        started_with: "info".into(),
    };
    let printed = |levels: &Levels| text_of(|mut output| super::levels(levels, &mut output));
    assert_eq!(printed(&levels), "info\n");
    levels.level = "debug".into();
    assert_eq!(printed(&levels), "debug\nthe agent has started with info\n");
}

#[test]
fn an_event_is_one_line() {
    let event = Event {
        time: "2026-01-01T00:00:00.000Z".into(),
        event: "opened".into(),
        namespace: Some("ns1".into()),
        pod: Some("pod1".into()),
        name: Some("www.example.com".into()),
        addresses: vec!["203.0.113.1".parse().expect("an address")],
        rules: vec![0],
        activation_us: Some(250),
        ..Event::default()
    };
    assert_eq!(
        text_of(|mut output| super::event(&event, &mut output)),
        "2026-01-01T00:00:00.000Z  ns1/pod1  opened  www.example.com  -> 203.0.113.1  (rules 0)  in \
         250 µs\n"
    );
}

#[test]
fn a_denied_connection_is_one_line() {
    let event = Event {
        time: "2026-01-01T00:00:00.000Z".into(),
        event: "denied".into(),
        namespace: Some("ns1".into()),
        pod: Some("pod1".into()),
        name: Some("cdn.example.net".into()),
        addresses: vec!["203.0.113.7".parse().expect("an address")],
        target: Some("203.0.113.7:443".into()),
        rules: vec![3],
        text: "cdn.example.net, told 4s ago; rule 3 denies it".into(),
        ..Event::default()
    };
    assert_eq!(
        text_of(|mut output| super::event(&event, &mut output)),
        "2026-01-01T00:00:00.000Z  ns1/pod1  denied  203.0.113.7:443 = cdn.example.net, told 4s ago; rule \
         3 denies it\n"
    );
}
