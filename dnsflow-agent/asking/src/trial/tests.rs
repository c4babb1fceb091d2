use serde_json::Value;

use super::*;
use crate::{
    egress_firewall::DEFINITION,
    fixtures::{connection, known, read},
};

fn tried(now: &str, then: &str, connections: Vec<ConnectionView>) -> Trialled {
    let (.., resource) = read(now);
    let (id, firewall, _) = read(then);
    let present = PresentFirewall {
        resource: Some(resource),
        subdomains: true,
        came_s: 7200,
        enforces_former: false,
    };
    let known = known(3600, connections);
    Trialled::new(&id, &firewall, &present, &known, Vec::new())
}

const DENY_ALL: &str = "{type: Deny, to: {cidrSelector: 0.0.0.0/0}}";

fn changes(trialled: &Trialled) -> Vec<(Change, &str, &str, &str)> {
    let changed = trialled.changed.iter();
    changed
        .map(|one| (one.change, &*one.target, &*one.now.text, &*one.then.text))
        .collect()
}

#[test]
fn what_changes_is_listed_and_what_stays_is_counted() {
    let now = format!("{{type: Allow, to: {{dnsName: a.test}}}}, {DENY_ALL}");
    let then = format!("{{type: Allow, to: {{dnsName: b.test}}}}, {DENY_ALL}");
    let connections = vec![
        connection(1, 5, &["www.b.test"]),
        connection(2, 5, &["a.test"]),
        connection(3, 5, &["a.test", "b.test"]),
        connection(4, 5, &["c.test"]),
        connection(5, 5, &[]),
    ];
    let trialled = tried(&now, &then, connections);
    assert_eq!(
        changes(&trialled),
        [
            (
                Change::WouldDeny,
                "203.0.113.2:443",
                "allowed by rule 0",
                "denied by rule 1"
            ),
            (
                Change::WouldAllow,
                "203.0.113.1:443",
                "denied by rule 1",
                "allowed by rule 0"
            ),
        ]
    );
    assert_eq!((trialled.stay_allowed, trialled.stay_denied), (1, 2));
    assert!(trialled.notes.is_empty(), "{:?}", trialled.notes);
}

#[test]
fn what_cannot_be_known_is_said() {
    let by_name = format!("{{type: Allow, to: {{dnsName: a.test}}}}, {DENY_ALL}");
    // ovn-kubernetes may have let the nameless one pass until now.
    let trialled = tried(&by_name, DENY_ALL, vec![connection(1, 5, &[])]);
    assert_eq!(
        changes(&trialled),
        [(
            Change::NotKnown,
            "203.0.113.1:443",
            "denied by rule 1, unless ovn-kubernetes has resolved it for rule 0",
            "denied by rule 0"
        )]
    );
    let by_node = format!("{{type: Allow, to: {{nodeSelector: {{}}}}}}, {DENY_ALL}");
    let node = ConnectionView {
        is_node: true,
        ..connection(1, 5, &[])
    };
    let trialled = tried(DENY_ALL, &by_node, vec![node, connection(2, 5, &[])]);
    assert_eq!(trialled.count(Change::NotKnown), 1);
    assert_eq!(trialled.stay_denied, 1);
    let node = ConnectionView {
        is_node: true,
        ..connection(1, 5, &[])
    };
    let trialled = tried(&DENY_ALL.replace("Deny", "Allow"), &by_node, vec![node]);
    assert_eq!(trialled.count(Change::NotKnown), 1);
    let wildcard = format!("{{type: Allow, to: {{dnsName: \"*.test\"}}}}, {DENY_ALL}");
    let trialled = tried(DENY_ALL, &wildcard, Vec::new());
    assert!(
        trialled.notes[0].contains("--enable-dns-name-resolver"),
        "{:?}",
        trialled.notes
    );
}

#[test]
fn without_an_egress_firewall_nothing_is_known() {
    let (id, firewall, _) = read(DENY_ALL);
    let present = PresentFirewall {
        resource: None,
        subdomains: true,
        came_s: 0,
        enforces_former: false,
    };
    let known = Known::default();
    let trialled = Trialled::new(&id, &firewall, &present, &known, Vec::new());
    assert!(trialled.is_unwatched());
    assert!(
        trialled.notes[0].contains("nothing is known"),
        "{:?}",
        trialled.notes
    );
}

#[test]
fn what_limits_the_answer_is_noted() {
    let (id, firewall, resource) = read(DENY_ALL);
    let present = |came_s, enforces_former| PresentFirewall {
        resource: Some(resource.clone()),
        subdomains: true,
        came_s,
        enforces_former,
    };
    let notes = |present: &PresentFirewall, known: &Known| {
        Trialled::new(&id, &firewall, present, known, Vec::new()).notes
    };
    assert!(notes(&present(600, false), &known(600, Vec::new())).is_empty());
    let forgotten = Known {
        forgotten: 7,
        ..known(600, Vec::new())
    };
    let notes = notes(&present(90, true), &forgotten);
    let [came, former, room] = &notes[..] else {
        panic!("{notes:?}");
    };
    assert!(came.contains("came 1m 30s ago"), "{came}");
    assert!(former.contains("still enforces"), "{former}");
    assert!(room.starts_with("7 places"), "{room}");
}

#[test]
fn both_sides_know_what_is_known_of_a_connection() {
    let by_name = format!("{{type: Allow, to: {{dnsName: a.test}}}}, {DENY_ALL}");
    let refused = ConnectionView {
        is_refused: true,
        ..connection(1, 5, &["a.test"])
    };
    // A label may hold a dot.
    let escaped = connection(2, 5, &["x\\.y.a.test"]);
    let trialled = tried(DENY_ALL, &by_name, vec![refused, escaped]);
    let changes: Vec<_> = changes(&trialled).iter().map(|one| one.3).collect();
    assert_eq!(
        changes,
        [
            "denied by rule 1, unless ovn-kubernetes has resolved it for rule 0",
            "allowed by rule 0",
        ]
    );
    let changed = &trialled.changed[1];
    assert_eq!((changed.last_s, changed.count), (5, 2));
    let present = PresentFirewall {
        resource: None,
        subdomains: false,
        came_s: 7200,
        enforces_former: false,
    };
    let (id, firewall, _) = read(&by_name);
    let known = known(3600, vec![connection(1, 5, &["www.a.test"])]);
    let alone = Trialled::new(&id, &firewall, &present, &known, Vec::new());
    assert_eq!(alone.count(Change::WouldDeny), 1);
}

/// What this says of each name is what the definition's pattern says of it.
#[test]
fn a_name_that_the_api_server_refuses_is_a_problem() {
    let definition: Value = serde_saphyr::from_str(DEFINITION).expect("YAML");
    let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let to = &schema["properties"]["spec"]["properties"]["egress"]["items"]["properties"]["to"];
    let pattern = &to["properties"]["dnsName"]["pattern"];
    assert_eq!(pattern, r"^(\*\.)?([A-Za-z0-9-]+\.)*[A-Za-z0-9-]+\.?$");
    for (name, is_refused) in [
        ("a.test", false),
        ("*.A-1.test.", false),
        ("_sip.a.test", true),
        ("*.a_b.test", true),
    ] {
        let rules = format!("{DENY_ALL}, {{type: Allow, to: {{dnsName: '{name}'}}}}");
        let problems = tried(DENY_ALL, &rules, Vec::new()).problems;
        let expected =
            format!("rule 1: the API server refuses the EgressFirewall because of dnsName {name}");
        let is_told = problems
            .iter()
            .any(|problem| problem.starts_with(&expected));
        assert_eq!(
            (is_told, problems.len()),
            (is_refused, usize::from(is_refused)),
            "{problems:?}"
        );
    }
}
