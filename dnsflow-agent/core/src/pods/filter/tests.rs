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
    let names_in = |namespace: &str, _| {
        let found = of.iter().find(|(other, _)| *other == namespace);
        let found = found.map_or_else(BTreeSet::new, |(_, texts)| names(texts));
        Some((0, found))
    };
    let wanted = interfaces.iter().copied().collect();
    filter.outdate();
    filter.update(
        &wanted,
        names_in,
        |namespace| namespace != "unheld",
        &mut out,
    );
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
            Command::ConfirmFilter,
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
fn holding_is_switched_off_once_before_the_interface_comes() {
    let mut filter = Filter::default();
    let name_set = NameSetId(1);
    let of = [("unheld", &["a.test"][..])];
    let commands = update(&mut filter, &[(7, "unheld")], &of);
    let off = Command::HoldAnswers {
        name_set,
        held: false,
    };
    assert_eq!(commands[1], off, "{commands:?}");
    assert_eq!(update(&mut filter, &[(7, "unheld")], &of), []);
    filter.outdate();
    let mut out = Output::default();
    let known = |_: &str, _| None;
    filter.update(&[(7, "unheld")].into(), known, |_| true, &mut out);
    let on = Command::HoldAnswers {
        name_set,
        held: true,
    };
    assert_eq!(out.commands, [on]);
}

/// The kernel knows a change at this time.
fn confirmed(filter: &mut Filter, at: Timestamp) -> Vec<Command> {
    let mut out = Output::at(at);
    filter.confirmed(&mut out);
    out.commands
}

#[test]
fn only_a_new_name_replays_what_was_kept_and_once_more_later() {
    let at = |millis| Timestamp::default() + Duration::from_millis(millis);
    let mut filter = Filter::default();
    let both = [("ns1", &["a.test", "b.test"] as &[_])];
    update(&mut filter, &[(7, "ns1")], &both);
    assert_eq!(filter.deadline(), None, "the kernel does not know it yet");
    assert_eq!(confirmed(&mut filter, at(3)), [Command::ReplayAnswers]);
    let again = at(3) + REPLAY_AGAIN;
    assert_eq!(filter.deadline(), Some((again, Why::Replay)));
    let mut out = Output::at(again);
    filter.timeout(&mut out);
    assert_eq!(out.commands, [Command::ReplayAnswers]);
    assert_eq!(filter.deadline(), None);
    update(&mut filter, &[(7, "ns1")], &[("ns1", &["b.test"])]);
    assert_eq!(confirmed(&mut filter, at(20)), []);
    update(&mut filter, &[(7, "ns1")], &[("ns1", &["c.test"])]);
    assert_eq!(confirmed(&mut filter, at(30)), [Command::ReplayAnswers]);
}

#[test]
fn nothing_is_replayed_before_the_kernel_knows_all_names() {
    let mut filter = Filter::default();
    update(&mut filter, &[(7, "ns1")], &[("ns1", &["a.test"])]);
    update(&mut filter, &[(7, "ns1")], &[("ns1", &["b.test"])]);
    let now = Timestamp::default();
    assert_eq!(confirmed(&mut filter, now), []);
    assert_eq!(confirmed(&mut filter, now), [Command::ReplayAnswers]);
}

#[test]
fn the_kernel_may_judge_by_the_old_names_until_it_knows_the_new_ones() {
    let at = |seconds| Timestamp::default() + Duration::from_secs(seconds);
    let mut filter = Filter::default();
    assert!(!filter.was_wider(at(0)));
    update(&mut filter, &[(7, "ns1")], &[("ns1", &["a.test"])]);
    assert!(filter.was_wider(at(5)), "however long that takes");
    confirmed(&mut filter, at(6));
    assert!(filter.was_wider(at(6) + REPLAY_AGAIN));
    assert!(!filter.was_wider(at(7)));
}

#[test]
fn nothing_is_said_twice() {
    let mut filter = Filter::default();
    let interfaces = [(7, "ns1"), (8, "ns1"), (9, "ns2")];
    let of: [(&str, &[&str]); 1] = [("ns1", &["a.test"])];
    assert_eq!(update(&mut filter, &interfaces, &of).len(), 6);
    assert_eq!(update(&mut filter, &interfaces, &of), []);
}
