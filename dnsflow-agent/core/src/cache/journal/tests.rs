use super::*;

fn at(seconds: u64) -> Timestamp {
    Timestamp::default() + Duration::from_secs(seconds)
}

fn port(number: u32, name: &str, pod: &str) -> Record {
    Record::Port {
        number: PortId(number),
        name: name.into(),
        pod: Some(pod.into()),
    }
}

fn name(port: u32, host: u8, until: u64) -> Record {
    Record::Name {
        port: PortId(port),
        address: [203, 0, 113, host].into(),
        name: "www.example.com".parse().expect("a name"),
        term: RecordedTerm {
            until: at(until),
            deny_until: at(until + 1),
            is_denied: false,
            is_ended: false,
        },
    }
}

fn gone(port: u32, host: u8) -> Record {
    Record::NameGone {
        port: PortId(port),
        address: [203, 0, 113, host].into(),
        name: "www.example.com".parse().expect("a name"),
    }
}

/// Port, last octet of the address, and rest in seconds.
fn folded<const N: usize>(records: [Record; N]) -> Vec<(String, String, u64)> {
    let mut folding = Folding::default();
    records.into_iter().for_each(|record| folding.take(record));
    let entries = folding.end(at(100)).entries.into_iter();
    let entries = entries.map(|entry| {
        let [name] = &entry.names[..] else {
            panic!("one name: {entry:?}")
        };
        assert!(name.deny_rest >= name.rest);
        let address = entry.address.to_string();
        (entry.port.to_string(), address, name.rest.as_secs())
    });
    entries.collect()
}

#[test]
fn the_last_record_of_a_name_counts() {
    let one = |rest| ("a".to_owned(), "203.0.113.1".to_owned(), rest);
    assert_eq!(folded([port(1, "a", "1"), name(1, 1, 160)]), [one(60)]);
    assert_eq!(
        folded([port(1, "a", "1"), name(1, 1, 160), name(1, 1, 170)]),
        [one(70)]
    );
    assert_eq!(folded([port(1, "a", "1"), name(1, 1, 90)]), [one(0)]);
    assert_eq!(folded([port(1, "a", "1"), name(1, 1, 160), gone(1, 1)]), []);
    assert_eq!(
        folded([
            port(1, "a", "1"),
            name(1, 1, 160),
            Record::PortGone("a".into())
        ]),
        []
    );
    assert_eq!(folded([name(1, 1, 160)]), [], "no port has the number");
}

/// A further run gives the numbers anew.
#[test]
fn a_number_is_of_the_port_that_got_it_last() {
    let records = [
        port(1, "a", "1"),
        port(2, "b", "2"),
        name(1, 1, 160),
        name(2, 2, 160),
        port(1, "b", "2"),
        port(2, "a", "1"),
        gone(1, 2),
        name(2, 3, 160),
    ];
    let of_a = |host| ("a".to_owned(), format!("203.0.113.{host}"), 60);
    assert_eq!(folded(records), [of_a(1), of_a(3)]);
}

#[test]
fn another_pod_under_the_same_name_inherits_nothing() {
    let same = [port(1, "a", "1"), name(1, 1, 160), port(2, "a", "1")];
    assert_eq!(folded(same).len(), 1);
    let other = [
        port(1, "a", "1"),
        name(1, 1, 160),
        port(2, "a", "2"),
        port(3, "a", "1"),
    ];
    assert_eq!(folded(other), []);
}

#[test]
fn rules_count_until_an_edit_begins() {
    let rules = |hash| Record::Rules {
        namespace: "ns1".into(),
        hash,
    };
    let folded = |records: &[Record]| {
        let mut folding = Folding::default();
        records
            .iter()
            .for_each(|record| folding.take(record.clone()));
        folding.end(at(0)).rules.get("ns1").copied()
    };
    assert_eq!(folded(&[rules(Some(7))]), Some(7));
    assert_eq!(folded(&[rules(Some(7)), rules(None)]), None);
    assert_eq!(
        folded(&[rules(Some(7)), rules(None), rules(Some(8))]),
        Some(8)
    );
}

#[test]
fn a_term_is_alike_within_its_slot() {
    let term = |until, deny_until, is_denied| RecordedTerm {
        until: at(until),
        deny_until: at(deny_until),
        is_denied,
        is_ended: false,
    };
    let first = term(32, 320, false);
    assert!(first.is_alike(term(47, 335, false)));
    assert!(!first.is_alike(term(48, 335, false)));
    assert!(!first.is_alike(term(47, 336, false)));
    assert!(!first.is_alike(term(32, 320, true)));
    assert!(!first.is_alike(RecordedTerm {
        is_ended: true,
        ..first
    }));
}

/// The kernel follows an edit behind the comparison after the next: the next one may have begun before the edit.
#[test]
fn a_hash_is_recorded_once_the_kernel_follows_the_rules() {
    let rules = |hash| Record::Rules {
        namespace: "ns1".into(),
        hash,
    };
    let mut journal = Journal::of(&BTreeMap::from([("ns1".into(), 7)]));
    journal.rules_are_in_force("ns1", (1, 1), || 7);
    assert_eq!(journal.take(), [], "it is known");
    journal.rules_change("ns1", 3);
    journal.rules_change("ns1", 4);
    assert_eq!(journal.take(), [rules(None)]);
    journal.rules_are_in_force("ns1", (2, 5), || 8);
    assert_eq!(journal.take(), []);
    journal.rules_are_in_force("ns1", (2, 6), || 8);
    assert_eq!(journal.take(), [rules(Some(8))]);
    journal.rules_are_in_force("ns1", (2, 7), || panic!("nothing has changed"));
    // Without a notice, as when its pods come late.
    journal.rules_are_in_force("ns1", (3, 8), || 9);
    assert_eq!(journal.take(), [rules(Some(9))]);
    journal.keep_rules(&BTreeSet::from(["ns1"]));
    assert_eq!(journal.take(), []);
    journal.keep_rules(&BTreeSet::new());
    assert_eq!(journal.take(), [rules(None)]);
}

/// The address in whose names a part ends goes, and the one that was to come next has the last place then.
#[test]
fn the_names_of_an_address_begin_anew_behind_one_that_has_gone() {
    let names = ["a.test", "b.test", "c.test", "d.test"];
    let names = names.map(|name| name.parse::<DomainName>().expect("a name"));
    let term = RecordedTerm {
        until: at(160),
        deny_until: at(160),
        is_denied: false,
        is_ended: false,
    };
    let given = |place: &mut Place, hosts: &[u8]| {
        let at = |index: usize| {
            let names = names.iter().map(|name| (name, term));
            Some(([203, 0, 113, *hosts.get(index)?].into(), names))
        };
        let mut records = Vec::new();
        let has_more = place.go_on(PortId(1), hosts.len(), at, &mut records);
        let records = records.iter().map(|record| match record {
            Record::Name { address, name, .. } => format!("{address} {name}"),
            other => panic!("{other:?}"),
        });
        (records.collect::<Vec<_>>(), has_more)
    };
    let of = |host: u8, names: &[&str]| -> Vec<String> {
        let names = names.iter();
        names
            .map(|name| format!("203.0.113.{host} {name}.test"))
            .collect()
    };
    let mut place = Place::before(PlaceOf::Port(PortId(1)));
    assert_eq!(given(&mut place, &[1, 2]), (of(2, &["a", "b", "c"]), true));
    assert_eq!(given(&mut place, &[1]), (of(1, &["a", "b", "c"]), true));
    assert_eq!(given(&mut place, &[1]), (of(1, &["d"]), false));
}
