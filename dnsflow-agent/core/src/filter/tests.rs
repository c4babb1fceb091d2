use super::*;

fn names(texts: &[&str]) -> BTreeSet<DomainName> {
    let name = |text: &&str| text.parse().expect("a name");
    texts.iter().map(name).collect()
}

/// Brings the filter in line with interfaces and the names of each namespace.
fn update(
    filter: &mut Filter,
    interfaces: &[(u32, &'static str)],
    of: &[(&str, &[&str])],
) -> Vec<Command> {
    let mut out = Output::default();
    let names_in = |namespace: &str| {
        let found = of.iter().find(|(other, _)| *other == namespace);
        found.map_or_else(BTreeSet::new, |(_, texts)| names(texts))
    };
    let wanted = interfaces.iter().copied().collect();
    filter.outdate();
    filter.update(&wanted, names_in, Timestamp::default(), &mut out);
    assert!(!filter.is_outdated());
    out.commands
}

#[test]
fn names_come_before_the_interface_and_go_after_it() {
    let mut filter = Filter::default();
    let name_set = NameSetId(1);
    assert_eq!(
        update(&mut filter, &[(7, "ns1")], &[("ns1", &["a.test"])]),
        [
            Command::FilterNames {
                name_set,
                names: names(&["a.test"])
            },
            Command::FilterInterface {
                ifindex: 7,
                name_set: Some(name_set)
            },
            Command::ReplayAnswers,
        ]
    );
    assert_eq!(
        update(&mut filter, &[], &[]),
        [
            Command::FilterInterface {
                ifindex: 7,
                name_set: None
            },
            Command::ForgetNames { name_set },
        ]
    );
}

#[test]
fn only_a_new_name_replays_what_was_kept_and_once_more_later() {
    let mut filter = Filter::default();
    update(
        &mut filter,
        &[(7, "ns1")],
        &[("ns1", &["a.test", "b.test"])],
    );
    let mut out = Output::default();
    filter.timeout(Timestamp::default() + REPLAY_AGAIN, &mut out);
    assert_eq!(out.commands, [Command::ReplayAnswers]);
    assert_eq!(filter.deadline(), None);
    let fewer = update(&mut filter, &[(7, "ns1")], &[("ns1", &["b.test"])]);
    assert!(!fewer.contains(&Command::ReplayAnswers));
    let other = update(&mut filter, &[(7, "ns1")], &[("ns1", &["c.test"])]);
    assert!(other.contains(&Command::ReplayAnswers));
    let at = Timestamp::default() + REPLAY_AGAIN;
    assert_eq!(filter.deadline(), Some((at, Why::Replay)));
}

#[test]
fn nothing_is_said_twice() {
    let mut filter = Filter::default();
    let interfaces = [(7, "ns1"), (8, "ns1"), (9, "ns2")];
    let of: [(&str, &[&str]); 1] = [("ns1", &["a.test"])];
    assert_eq!(update(&mut filter, &interfaces, &of).len(), 6);
    assert_eq!(update(&mut filter, &interfaces, &of), []);
}
