use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::*;
use crate::egress_firewall::{
    EgressDestination, EgressFirewall, EgressFirewallSpec, EgressPort, EgressRule,
};

/// Reads an EgressFirewall written in YAML and shows what became of it: a line per rule, then
/// the reasons.
fn show(yaml: &str) -> String {
    let object: Value = serde_saphyr::from_str(yaml).expect("YAML");
    let converted = firewall(&object);
    let mut lines = Vec::new();
    match &converted.reading {
        Reading::Firewall(id, firewall) => {
            lines.push(match firewall.subdomains {
                Some(subdomains) => format!("{id} subdomains={subdomains}"),
                None => id.to_string(),
            });
            for (index, rule) in firewall.rules.iter().enumerate() {
                let to = match &rule.destination {
                    Destination::Name(name) => format!("name {}", name.written()),
                    Destination::Cidr(network) => format!("cidr {network}"),
                    Destination::Nodes => "nodes".into(),
                    Destination::Invalid(_) => "invalid".into(),
                };
                let ports: String = rule
                    .ports
                    .iter()
                    .map(|port| match port.port {
                        Some(number) => format!(" {:?}/{number}", port.protocol),
                        None => format!(" {:?}", port.protocol),
                    })
                    .collect();
                lines.push(format!("{index} {:?} {to}{ports}", rule.action));
            }
        }
        Reading::Unreadable(id) => lines.push(format!("{id} unreadable")),
        Reading::Ignored => lines.push(format!("{} ignored", converted.object)),
    }
    lines.extend(converted.reasons.iter().map(|reason| format!("! {reason}")));
    lines.join("\n")
}

fn check(yaml: &str, expected: &str) {
    assert_eq!(show(yaml), expected, "of\n{yaml}");
}

/// One rule in an otherwise sound firewall; the other rules must survive whatever it says.
fn check_rule(rule: &str, expected: &str, reason: &str) {
    let rule = rule.replace('\n', "\n      ");
    let mut text =
        format!("ns1/default\n0 Allow name before.example\n1 {expected}\n2 Deny cidr 0.0.0.0/0");
    if !reason.is_empty() {
        text += &format!("\n! rule 1: {reason}");
    }
    check(
        &format!(
            "metadata: {{namespace: ns1, name: default}}
spec:
  egress:
    - {{type: Allow, to: {{dnsName: before.example}}}}
    - {rule}
    - {{type: Deny, to: {{cidrSelector: 0.0.0.0/0}}}}
"
        ),
        &text,
    );
}

#[test]
fn rules_are_read_in_their_order() {
    check(
        r#"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {name: default, namespace: ns1, labels: {any: thing}}
spec:
  egress:
  - {type: Allow, to: {dnsName: Example.com.}}
  - {type: Allow, to: {dnsName: "*.example.com"}, ports: [{protocol: TCP, port: 443}, {protocol: UDP}]}
  - {type: Deny, to: {cidrSelector: 2001:db8::/32}}
  - {type: Allow, to: {nodeSelector: {matchLabels: {a: b}}}}
  - {type: Deny, to: {cidrSelector: 0.0.0.0/0}, ports: []}
status: {status: fine, messages: 7}
"#,
        "ns1/default
0 Allow name Example.com.
1 Allow name *.example.com Tcp/443 Udp
2 Deny cidr 2001:db8::/32
3 Allow nodes
4 Deny cidr 0.0.0.0/0",
    );
}

#[test]
fn one_odd_rule_keeps_its_place_and_spoils_no_other() {
    let long = "x".repeat(64);
    let cases: &[(&str, &str, &str)] = &[
        // What the resource's patterns let through.
        (
            "{type: AllowX, to: {dnsName: a.b}}",
            "Deny invalid",
            r#"type is "AllowX"; write Allow or Deny"#,
        ),
        (
            "{type: Allow, to: {dnsName: a.b}, ports: [{protocol: TCPX, port: 1}]}",
            "Allow invalid",
            r#"ports[0].protocol is "TCPX"; write TCP, UDP or SCTP"#,
        ),
        (
            "{type: Allow, to: {dnsName: intranet}}",
            "Allow name intranet",
            "",
        ),
        (
            &format!("{{type: Allow, to: {{dnsName: {long}.com}}}}"),
            "Allow invalid",
            &format!(
                "dnsName \"{long}.com\": a label is longer than 63 characters, so that no DNS \
                 server can hold the name; shorten it"
            ),
        ),
        // What they do not.
        (
            "7",
            "Deny invalid",
            "it is not a mapping; write `type` and `to`",
        ),
        (
            "{to: {dnsName: a.b}}",
            "Deny invalid",
            "type is missing; write Allow or Deny",
        ),
        (
            "{type: [Allow], to: {dnsName: a.b}}",
            "Deny invalid",
            "type is a list; write Allow or Deny",
        ),
        (
            "{type: Allow, to: {dnsName: a..b.}}",
            "Allow invalid",
            r#"dnsName "a..b.": the name has an empty label; write a.b"#,
        ),
        (
            r#"{type: Allow, to: {dnsName: "a\nb"}}"#,
            "Allow invalid",
            r#"dnsName "a\nb": the character '\n' cannot stand in a dnsName; write letters, digits, hyphens and dots"#,
        ),
        (
            r#"{type: Allow, to: {dnsName: ""}}"#,
            "Allow invalid",
            r#"dnsName "": the name is empty; write a name such as example.com or *.example.com"#,
        ),
        (
            r#"{type: Allow, to: {dnsName: "a.*.b"}}"#,
            "Allow invalid",
            r#"dnsName "a.*.b": `*` can only stand alone as the first label, as in `*.example.com`"#,
        ),
        (
            "{type: Allow, to: {dnsName: 5}}",
            "Allow invalid",
            "dnsName is 5; write a text",
        ),
        (
            "{type: Allow, to: {dnsName: 192.0.2.1}}",
            "Allow invalid",
            r#"dnsName "192.0.2.1" is an address; write cidrSelector: 192.0.2.1/32"#,
        ),
        (
            "{type: Deny, to: {cidrSelector: 192.0.2.1}}",
            "Deny invalid",
            r#"cidrSelector "192.0.2.1" is no network; write 192.0.2.1/32"#,
        ),
        (
            "{type: Deny, to: {cidrSelector: 192.0.2.0/33}}",
            "Deny invalid",
            r#"cidrSelector "192.0.2.0/33" is no network; write a network such as 192.0.2.0/24"#,
        ),
        (
            "{type: Deny, to: {}}",
            "Deny invalid",
            "to names no destination; write exactly one of cidrSelector, dnsName and nodeSelector",
        ),
        (
            "{type: Deny}",
            "Deny invalid",
            "to is missing; write exactly one of cidrSelector, dnsName and nodeSelector",
        ),
        (
            "{type: Allow, to: {dnsName: a.b, nodeSelector: {}}}",
            "Allow invalid",
            "to names more than one destination; write exactly one of cidrSelector, dnsName and \
             nodeSelector",
        ),
        (
            "{type: Allow, to: {dnsName: a.b, cidrSelector: null}}",
            "Allow name a.b",
            "",
        ),
        (
            "{type: Allow, to: {dnsName: a.b, later: field}, new: 1}",
            "Allow name a.b",
            "",
        ),
        ("{type: Allow, to: {nodeSelector: {}}}", "Allow nodes", ""),
        (
            "{type: Allow, to: {nodeSelector: {matchLabels: 4}}}",
            "Allow invalid",
            "nodeSelector.matchLabels is 4; write a mapping of texts",
        ),
        (
            "{type: Allow, to: {nodeSelector: [a]}}",
            "Allow invalid",
            "nodeSelector is a list; write matchLabels or matchExpressions",
        ),
        (
            "{type: Allow, to: {nodeSelector: {matchLabels: {a: [b]}}}}",
            "Allow invalid",
            "nodeSelector.matchLabels.a is a list; write a text",
        ),
        (
            "{type: Allow, to: {nodeSelector: {matchExpressions: [{key: a, operator: In, values: [b, 5]}]}}}",
            "Allow invalid",
            "nodeSelector.matchExpressions[0].values[1] is 5; write a text",
        ),
        (
            "{type: Allow, to: {nodeSelector: {matchExpressions: [{key: a, operator: In, values: [b]}, {key: 7}]}}}",
            "Allow invalid",
            "nodeSelector.matchExpressions[1].key is 7; write a text",
        ),
        (
            "{type: Allow, to: {dnsName: a.b}, ports: {protocol: TCP}}",
            "Allow invalid",
            "ports is a mapping; write a list",
        ),
        (
            "{type: Allow, to: {dnsName: a.b}, ports: [{protocol: TCP, port: 1}, {port: 2}]}",
            "Allow invalid",
            "ports[1].protocol is missing; write TCP, UDP or SCTP",
        ),
        (
            "{type: Allow, to: {dnsName: a.b}, ports: [{protocol: SCTP, port: 65536}]}",
            "Allow invalid",
            "ports[0].port is 65536; write a number from 1 to 65535",
        ),
        (
            "{type: Allow, to: {dnsName: a.b}, ports: [{protocol: SCTP, port: '80'}]}",
            "Allow invalid",
            r#"ports[0].port is "80"; write a number from 1 to 65535"#,
        ),
    ];
    for (rule, expected, reason) in cases {
        check_rule(rule, expected, reason);
    }
}

#[test]
fn an_invalid_rule_names_the_object() {
    let converted = firewall(&serde_json::json!({
        "metadata": {"namespace": "ns1", "name": "default"},
        "spec": {"egress": [{"type": "Allow", "to": {"dnsName": "a..b"}}]},
    }));
    let Reading::Firewall(_, firewall) = converted.reading else {
        panic!("{converted:?}");
    };
    assert_eq!(
        firewall.rules[0].destination,
        Destination::Invalid(
            "ns1/default: rule 0: dnsName \"a..b\": the name has an empty label; write a.b".into()
        )
    );
}

#[test]
fn objects_that_are_no_firewall_are_named() {
    let egress = "spec: {egress: []}";
    check(
        &format!("metadata: {{namespace: ns1, name: other}}\n{egress}"),
        "ns1/other ignored
! metadata.name is not `default`, the only name that ovn-kubernetes uses; rename it",
    );
    check(
        &format!("metadata: {{name: default}}\n{egress}"),
        "?/default ignored\n! metadata.namespace is missing; write the namespace's name",
    );
    for spec in [
        "",
        "spec: 5",
        "spec: {}",
        "spec: {egress: all}",
        "spec: [egress]",
    ] {
        check(
            &format!("metadata: {{namespace: ns1, name: default}}\n{spec}"),
            "ns1/default unreadable\n! spec.egress is not a list; write a list of rules",
        );
    }
    for garbage in ["7", "[]", "metadata: []", "metadata: {namespace: 5}"] {
        assert!(show(garbage).contains("ignored"), "{garbage}");
    }
}

#[test]
fn an_annotation_switches_holding_off() {
    let read = |value: &str| {
        let object = json!({
            "metadata": {"namespace": "ns1", "name": "default", "annotations": {"dnsflow.io/hold": value}},
            "spec": {"egress": []},
        });
        let Converted {
            reading, reasons, ..
        } = firewall(&object);
        match reading {
            Reading::Firewall(_, firewall) => (firewall.hold_off, reasons),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(read("false"), (true, vec![]));
    assert_eq!(read("true"), (false, vec![]));
    let (off, reasons) = read("no");
    assert!(!off);
    let reason =
        "the annotation dnsflow.io/hold is \"no\" and has no effect; write \"true\" or \"false\"";
    assert_eq!(reasons, [reason]);
}

#[test]
fn the_annotation_makes_a_dry_run() {
    let read = |value: &str| {
        let object = serde_saphyr::from_str(&format!(
            "metadata: {{namespace: ns1, name: default, annotations: {{dnsflow.io/dry-run: {value}}}}}
spec: {{egress: []}}"
        ));
        let object: Value = object.expect("YAML");
        let Converted {
            reading, reasons, ..
        } = firewall(&object);
        match reading {
            Reading::Firewall(_, firewall) => (firewall.dry_run, reasons.len()),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(read("'true'"), (true, 0));
    assert_eq!(read("'false'"), (false, 0));
    assert_eq!(read("null"), (false, 0));
    // Not a text: said, and without effect.
    assert_eq!(read("true"), (false, 1));
}

#[test]
fn a_misspelt_annotation_of_dnsflow_is_named_with_the_nearest() {
    let read = |annotations: &str| {
        show(&format!(
            "metadata: {{namespace: ns1, name: default, annotations: {{{annotations}}}}}
spec: {{egress: []}}"
        ))
    };
    assert_eq!(
        read("dnsflow.io/dryrun: 'true', dnsflow.io/subdomain: 'false', other.io/hold: 'x'"),
        "ns1/default
! the annotation \"dnsflow.io/dryrun\" is unknown and has no effect; the nearest one is dnsflow.io/dry-run
! the annotation \"dnsflow.io/subdomain\" is unknown and has no effect; the nearest one is dnsflow.io/subdomains"
    );
    // Many of them take no more room than few.
    let many: Vec<String> = (0..99)
        .map(|number| format!("dnsflow.io/{number}: ''"))
        .collect();
    let shown = read(&many.join(", "));
    assert_eq!(shown.lines().count(), 1 + MAX_REASONS + 1, "{shown}");
}

#[test]
fn the_annotation_decides_about_subdomains() {
    let with = |value: &str| {
        show(&format!(
            "metadata: {{namespace: ns1, name: default, annotations: {{dnsflow.io/subdomains: {value}}}}}
spec: {{egress: []}}"
        ))
    };
    assert_eq!(with("'true'"), "ns1/default subdomains=true");
    assert_eq!(with("'false'"), "ns1/default subdomains=false");
    assert_eq!(with("null"), "ns1/default");
    assert_eq!(
        with("'yes'"),
        "ns1/default
! the annotation dnsflow.io/subdomains is \"yes\" and has no effect; write \"true\" or \"false\""
    );
    // Not a text, which an API server refuses but a manifest can hold.
    assert!(with("true").contains("is true and has no effect"));
}

#[test]
fn rules_ports_and_reasons_are_limited() {
    let rules = |count: usize, rule: &str| {
        let rule: Value = serde_saphyr::from_str(rule).expect("YAML");
        firewall(&serde_json::json!({
            "metadata": {"namespace": "n", "name": "default"},
            "spec": {"egress": vec![rule; count]},
        }))
    };
    let converted = rules(MAX_RULES + 3, "{type: Allow, to: {dnsName: a.b}}");
    let Reading::Firewall(_, firewall) = &converted.reading else {
        panic!("{converted:?}");
    };
    assert_eq!(firewall.rules.len(), MAX_RULES);
    assert_eq!(
        converted.reasons,
        ["the 3 rules from rule 8001 on are ignored, as ovn-kubernetes does; remove some"]
    );
    let converted = rules(MAX_REASONS + 5, "7");
    assert_eq!(converted.reasons.len(), MAX_REASONS + 1);
    assert_eq!(converted.reasons[MAX_REASONS], "and 5 more reasons");
    let converted = rules(1, &format!("{{type: {}}}", "y".repeat(10_000)));
    assert!(converted.reasons[0].len() < 200, "{:?}", converted.reasons);
}

#[test]
fn a_rule_with_too_many_ports_allows_nothing_and_still_denies() {
    let read = |kind: &str, count: usize| {
        let ports = vec![json!({"protocol": "TCP", "port": 7}); count];
        let rule = json!({"type": kind, "to": {"dnsName": "a.b"}, "ports": ports});
        let converted = firewall(&json!({
            "metadata": {"namespace": "n", "name": "default"},
            "spec": {"egress": [rule]},
        }));
        let Reading::Firewall(_, firewall) = converted.reading else {
            panic!("{kind} {count}");
        };
        (firewall.rules[0].clone(), converted.reasons)
    };
    let reason = |count: usize, effect: &str| {
        format!("rule 0: it has {count} ports, more than 1024: {effect}; split the rule")
    };
    for kind in ["Allow", "Deny"] {
        let (rule, reasons) = read(kind, PORTS_PER_RULE_MAX);
        assert_eq!(rule.ports.len(), PORTS_PER_RULE_MAX);
        assert!(!rule.has_more_ports() && reasons.is_empty(), "{reasons:?}");
    }
    for count in [PORTS_PER_RULE_MAX + 1, 45_000] {
        let (rule, reasons) = read("Allow", count);
        assert_eq!(reasons, [reason(count, "it allows nothing")]);
        let full = format!("n/default: {}", reasons[0]);
        assert_eq!(rule.destination, Destination::Invalid(full));
        // Without its name, an Allow behind it would open what it denies.
        let (rule, reasons) = read("Deny", count);
        assert_eq!(reasons, [reason(count, "it denies every port of a name")]);
        let name = "a.b".parse().expect("a name");
        assert_eq!(rule.destination, Destination::Name(name));
        assert!(rule.has_more_ports());
        assert_eq!(rule.ports.len(), PORTS_PER_RULE_MAX + 1);
    }
}

#[test]
fn what_the_typed_resource_writes_is_read_without_a_complaint() {
    let mut typed = EgressFirewall::new(
        "default",
        EgressFirewallSpec {
            egress: vec![
                EgressRule {
                    action: "Allow".into(),
                    ports: vec![EgressPort {
                        protocol: "TCP".into(),
                        port: 443,
                    }],
                    to: EgressDestination {
                        dns_name: Some("example.com".into()),
                        ..EgressDestination::default()
                    },
                },
                EgressRule {
                    action: "Deny".into(),
                    to: EgressDestination {
                        node_selector: Some(LabelSelector::default()),
                        ..EgressDestination::default()
                    },
                    ..EgressRule::default()
                },
            ],
        },
    );
    typed.metadata.namespace = Some("ns1".into());
    let json = serde_json::to_value(&typed).expect("JSON");
    assert_eq!(json["apiVersion"], "k8s.ovn.org/v1");
    check(
        &serde_json::to_string(&json).expect("JSON"),
        "ns1/default\n0 Allow name example.com Tcp/443\n1 Deny nodes",
    );
    assert_eq!(
        serde_json::from_value::<EgressFirewall>(json).expect("a typed resource"),
        typed
    );
}

#[test]
fn what_ovn_kubernetes_could_not_apply_is_read_from_the_status() {
    let refusal = |messages: Value| {
        let object = serde_json::json!({
            "metadata": {"namespace": "ns1", "name": "default"},
            "spec": {"egress": []},
            "status": {"status": "any", "messages": messages},
        });
        let Reading::Firewall(_, found) = firewall(&object).reading else {
            panic!("a firewall");
        };
        found.refusal
    };
    let refused = "n2: EgressFirewall Rules not correctly applied: failed to get\nACLs";
    assert_eq!(
        refusal(serde_json::json!([
            "n1: EgressFirewall Rules applied",
            refused
        ]))
        .as_deref(),
        Some("failed to get\\nACLs")
    );
    assert_eq!(
        refusal(serde_json::json!(["n1: EgressFirewall Rules applied"])),
        None
    );
    for strange in [
        serde_json::json!(null),
        serde_json::json!("text"),
        serde_json::json!([7, null]),
    ] {
        assert_eq!(refusal(strange), None);
    }
}

#[test]
fn what_is_written_reads_the_same() {
    let object: Value = serde_saphyr::from_str(
        "apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {name: default, namespace: ns1, annotations: {dnsflow.io/subdomains: \"false\"}}
spec:
  egress:
  - {type: Allow, to: {dnsName: \"*.Example.com.\"}, ports: [{protocol: TCP, port: 443}, {protocol: UDP}]}
  - {type: Deny, to: {cidrSelector: 2001:db8::/32}}
  - {type: Allow, to: {nodeSelector: {matchLabels: {a: b}}}}
",
    )
    .expect("YAML");
    let Reading::Firewall(id, read) = firewall(&object).reading else {
        panic!("{object}");
    };
    let written = resource("ns1", &read);
    let again = firewall(&written);
    assert_eq!(again.reading, Reading::Firewall(id, read.clone()));
    assert_eq!(again.reasons, Vec::<String>::new());
    let unusable = Firewall {
        rules: [Rule {
            action: RuleAction::Allow,
            destination: Destination::Invalid("misspelt".into()),
            ports: Vec::new(),
        }]
        .into(),
        dry_run: true,
        hold_off: true,
        ..read
    };
    let Reading::Firewall(_, again) = firewall(&resource("ns1", &unusable)).reading else {
        panic!("{written}");
    };
    assert!(matches!(
        again.rules[0].destination,
        Destination::Invalid(_)
    ));
    assert!(again.dry_run && again.hold_off);
}

#[test]
fn a_text_is_cut_to_so_many_bytes_between_two_characters() {
    assert_eq!(shorten_to_bytes("é", 2), "é");
    assert_eq!(shorten_to_bytes("éééé", 7), "éé…");
    assert_eq!(shorten_to_bytes("éééé", 6), "é…");
}
