//! The lab's rows against what ovn-kubernetes was recorded to write.

use super::*;

const ROWS: &str = include_str!("../../fixtures/lab/acls-v4.jsonl");
const TRANSACTIONS: &str = include_str!("../../fixtures/lab/transactions-v4.jsonl");

fn target(namespace: &str) -> Target<'_> {
    Target {
        namespace,
        network: Network::default_of(namespace),
        cluster: Cluster::default(),
        has_tiers: true,
    }
}

fn deny(cidr: &str) -> RuleSpec {
    RuleSpec::deny(cidr).expect("a CIDR")
}

fn allow_cidr(cidr: &str) -> RuleSpec {
    RuleSpec {
        action: Action::Allow,
        ..deny(cidr)
    }
}

fn four_rules() -> Vec<RuleSpec> {
    vec![
        RuleSpec::allow_name("example.com"),
        // ovn-kubernetes was given the ports in this order, and sorted them.
        RuleSpec::allow_name("ports.test").ports(&[("tcp", 443), ("udp", 53)]),
        deny("0.0.0.0/0"),
        deny("::/0"),
    ]
}

fn lines(text: &str) -> impl Iterator<Item = Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
}

#[test]
fn names_are_the_recorded_hashes() {
    let off = Cluster::default();
    let on = Cluster {
        name_resolver: true,
        ..off
    };
    for (name, family, cluster, set) in [
        ("example.com", "v4", off, "a18346816605274050565"),
        ("Example.ORG", "v4", off, "a169752413928786512"),
        ("example.net.", "v4", off, "a11430818852830508159"),
        ("Example.com", "v4", on, "a4932485612109564913"),
        ("example.com.", "v6", on, "a4932483413086308491"),
    ] {
        assert_eq!(address_set(name, family, cluster), set, "{name}");
    }
    assert_eq!(namespace_port_group("ns1"), "a9633447981174624809");
}

#[test]
fn rows_are_the_recorded_ones() {
    let firewalls = [
        ("ns1", four_rules()),
        (
            "ns2",
            vec![
                RuleSpec {
                    action: Action::Deny,
                    ..RuleSpec::allow_name("bad.test")
                },
                allow_cidr("10.20.0.0/16").ports(&[("tcp", 80)]),
                deny("0.0.0.0/0"),
                RuleSpec::allow_nodes(["172.18.0.2".parse().expect("an address")]),
            ],
        ),
    ];
    let mut recorded = BTreeMap::new();
    for mut row in lines(ROWS) {
        let fields = row.as_object_mut().expect("a row");
        // Defaults of the schema, which the lab leaves to it, and what differs by nature.
        for (column, default) in [("label", json!(0)), ("log", json!(false))] {
            assert_eq!(fields.remove(column), Some(default));
        }
        fields.remove("_uuid");
        let ids = fields["external_ids"].as_object().expect("a map").clone();
        fields["external_ids"] = map(ids
            .iter()
            .map(|(key, value)| (key, value.as_str().expect("a string"))));
        recorded.insert(fields["name"].as_str().expect("a name").to_owned(), row);
    }
    for (namespace, rules) in firewalls {
        for (index, rule) in rules.iter().enumerate() {
            let name = format!("EF:{namespace}:{index}");
            let row = acl_row(&target(namespace), index, rule);
            assert_eq!(Some(row), recorded.remove(&name), "{name}");
        }
    }
    assert!(recorded.is_empty(), "{recorded:?}");
}

#[test]
fn a_dual_stack_match_is_the_recorded_one() {
    let network = Network::default_of("ns1");
    let cluster = Cluster {
        dual_stack: true,
        name_resolver: false,
    };
    let recorded = include_str!("../../fixtures/ovn-kubernetes/26.03-dual-observ-acl-flows.txt");
    for rule in &four_rules()[..2] {
        let text = acl_match(&network, rule, cluster);
        assert!(recorded.contains(&format!("allow {text}\n")), "{text}");
    }
}

/// What one transaction did to the ACLs: rule index → operation, match and action afterwards.
type Edits = BTreeMap<usize, (&'static str, Option<(String, String)>)>;

#[test]
fn edits_are_the_recorded_ones() {
    let [name, ports, deny_v4, deny_v6] = four_rules().try_into().expect("four rules");
    let inserted = deny("198.51.100.0/24");
    let four = four_rules();
    let mut five = four.clone();
    five.insert(0, inserted);
    let mut six = four.clone();
    six.extend(["Example.ORG", "example.net."].map(RuleSpec::allow_name));
    let steps = [
        five,
        vec![name.clone(), ports.clone(), deny_v4, deny_v6],
        vec![name.clone(), ports.clone()],
        vec![ports, name],
        four.clone(),
        six,
        four.clone(),
    ];

    let mut switch = Acls::default();
    switch.apply(edits(&target("ns1"), &four, &switch.0));
    let mut recorded = recorded_edits().into_iter();
    for (at, rules) in steps.iter().enumerate() {
        let done = switch.apply(edits(&target("ns1"), rules, &switch.0));
        assert_eq!(Some(done), recorded.next(), "step {at}");
    }
    assert_eq!(recorded.next(), None);

    let all = switch.0.len();
    let done = switch.apply(edits(&target("ns1"), &[], &switch.0));
    assert_eq!(done.len(), all, "a deleted resource leaves nothing");
}

#[test]
fn a_manifest_is_what_the_resource_definition_asks_for() {
    let rules = [
        RuleSpec::allow_name("example.com").ports(&[("tcp", 443)]),
        deny("0.0.0.0/0"),
    ];
    let expected = "\
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata:
  name: default
  namespace: ns1
spec:
  egress:
  - type: Allow
    to:
      dnsName: \"example.com\"
    ports:
    - protocol: TCP
      port: 443
  - type: Deny
    to:
      cidrSelector: 0.0.0.0/0
";
    assert_eq!(manifest("ns1", &rules), expected);
}

/// ACL rows by rule index, as a database would hold them.
#[derive(Default)]
struct Acls(BTreeMap<usize, Row>);

impl Acls {
    fn apply(&mut self, operations: Vec<Value>) -> Edits {
        let mut done = Edits::new();
        for operation in operations {
            let row = &operation["row"];
            match operation["op"].as_str() {
                Some("insert") => {
                    let index = index_of(&row["external_ids"]);
                    let mut row = row.as_object().expect("a row").clone();
                    row.insert("_uuid".into(), json!(["uuid", format!("row {index}")]));
                    done.insert(index, ("insert", Some(content(&row))));
                    assert!(self.0.insert(index, row).is_none(), "a second row {index}");
                }
                Some("update") => {
                    let (index, old) = self
                        .0
                        .iter_mut()
                        .find(|(_, old)| old["_uuid"] == operation["where"][0][2])
                        .expect("the row to update");
                    old.extend(row.as_object().expect("a row").clone());
                    done.insert(*index, ("modify", Some(content(old))));
                }
                Some("mutate") if operation["mutations"][0][1] == "delete" => {
                    for uuid in crate::database::elements(&operation["mutations"][0][2]) {
                        let (&index, _) = self
                            .0
                            .iter()
                            .find(|(_, old)| old["_uuid"] == uuid)
                            .expect("the row to delete");
                        self.0.remove(&index);
                        done.insert(index, ("delete", None));
                    }
                }
                Some("mutate") => {}
                other => panic!("{other:?}"),
            }
        }
        done
    }
}

fn index_of(external_ids: &Value) -> usize {
    map_value(external_ids, "rule-index")
        .and_then(|index| index.parse().ok())
        .expect("a rule index")
}

fn content(row: &Row) -> (String, String) {
    let text = |column: &str| row[column].as_str().expect("a string").to_owned();
    (text("match"), text("action"))
}

fn recorded_edits() -> Vec<Edits> {
    // The recording names rows by the start of their UUID.
    let mut rows: BTreeMap<String, (usize, Row)> = lines(ROWS)
        .filter(|row| row["external_ids"]["k8s.ovn.org/name"] == "ns1")
        .map(|row| {
            let uuid = row["_uuid"].as_str().expect("a UUID")[..8].to_owned();
            let index = row["external_ids"]["rule-index"].as_str().expect("text");
            let index = index.parse().expect("an index");
            (uuid, (index, row.as_object().expect("a row").clone()))
        })
        .collect();
    let mut all = Vec::new();
    for transaction in lines(TRANSACTIONS) {
        let Some(changes) = transaction["tx"]["ACL"].as_array() else {
            continue;
        };
        let mut done = Edits::new();
        for change in changes {
            let uuid = change["uuid"].as_str().expect("a UUID").to_owned();
            let columns = &change["cols"];
            match change["op"].as_str() {
                Some("insert") => {
                    let index = index_of(&columns["external_ids"]);
                    let row = columns.as_object().expect("a row").clone();
                    done.insert(index, ("insert", Some(content(&row))));
                    rows.insert(uuid, (index, row));
                }
                Some("modify") => {
                    let (index, row) = rows.get_mut(&uuid).expect("a known row");
                    row.extend(columns["new"].as_object().expect("columns").clone());
                    done.insert(*index, ("modify", Some(content(row))));
                }
                Some("delete") => {
                    let (index, _) = rows.remove(&uuid).expect("a known row");
                    done.insert(index, ("delete", None));
                }
                other => panic!("{other:?}"),
            }
        }
        all.push(done);
    }
    all
}

#[test]
fn the_sets_of_a_match_are_found() {
    let rule = RuleSpec::allow_name("example.com").ports(&[("tcp", 443)]);
    let cluster = Cluster {
        dual_stack: true,
        ..Cluster::default()
    };
    let text = acl_match(&Network::default_of("ns1"), &rule, cluster);
    let expected = ["v4", "v6"].map(|family| address_set("example.com", family, cluster));
    assert_eq!(sets_in(&text).collect::<Vec<_>>(), expected);
    let text = acl_match(&Network::default_of("ns1"), &deny("0.0.0.0/0"), cluster);
    assert_eq!(sets_in(&text).count(), 0);
}
