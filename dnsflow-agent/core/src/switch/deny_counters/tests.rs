#![allow(clippy::unwrap_used)]

use super::*;

const fn at(seconds: u64) -> Timestamp {
    Timestamp::from_nanos(seconds * 1_000_000_000)
}

/// What is known after these counts of two cookies: time, cookie, flows, packets.
fn noted(counts: &[(u64, u32, u32, u64)]) -> DenyCounters {
    let mut counters = DenyCounters::default();
    for &(seconds, cookie, flows, packets) in counts {
        let count = CookieCount {
            cookie,
            flows,
            packets,
        };
        counters.note(count, at(seconds));
    }
    counters
}

fn quiet_since(counters: &DenyCounters, cookies: &[u32]) -> Option<Timestamp> {
    counters.quiet_since(&cookies.iter().copied().collect())
}

#[test]
fn it_is_quiet_since_the_first_count_that_says_the_same() {
    let counters = noted(&[(1, 7, 1, 5), (2, 7, 1, 5), (9, 7, 1, 5)]);
    assert_eq!(quiet_since(&counters, &[7]), Some(at(1)));
}

#[test]
fn every_change_of_the_counter_begins_anew() {
    for (what, flows, packets) in [
        ("denied", 2, 6),
        ("back", 2, 4),
        ("written anew", 2, 0),
        ("a flow less", 1, 5),
    ] {
        let counters = noted(&[
            (1, 7, 2, 5),
            (9, 7, flows, packets),
            (10, 7, flows, packets),
        ]);
        assert_eq!(quiet_since(&counters, &[7]), Some(at(9)), "{what}");
    }
}

#[test]
fn a_further_flow_changes_nothing_until_it_denies() {
    let counters = noted(&[(1, 7, 2, 5), (9, 7, 3, 5)]);
    assert_eq!(quiet_since(&counters, &[7]), Some(at(1)));
    let counters = noted(&[(1, 7, 2, 5), (9, 7, 3, 5), (10, 7, 2, 5)]);
    assert_eq!(quiet_since(&counters, &[7]), Some(at(10)));
}

#[test]
fn of_several_the_last_that_changed_counts() {
    let mut counters = noted(&[(1, 7, 1, 0), (1, 8, 1, 0), (3, 8, 1, 1)]);
    assert_eq!(quiet_since(&counters, &[7]), Some(at(1)));
    assert_eq!(quiet_since(&counters, &[7, 8]), Some(at(3)));
    assert_eq!(quiet_since(&counters, &[7, 8, 9]), None, "9 is not known");
    assert_eq!(quiet_since(&counters, &[]), Some(Timestamp::default()));
    counters.forget(8);
    assert_eq!(quiet_since(&counters, &[7, 8]), None);
    assert_eq!(quiet_since(&counters, &[7]), Some(at(1)));
    counters.retain(&[8].into());
    assert_eq!(quiet_since(&counters, &[7]), None);
}

#[test]
fn after_a_gap_nothing_is_known() {
    let mut counters = noted(&[(1, 7, 1, 0)]);
    counters.clear();
    assert_eq!(quiet_since(&counters, &[7]), None);
    counters.note(
        CookieCount {
            cookie: 7,
            flows: 1,
            packets: 0,
        },
        at(5),
    );
    assert_eq!(quiet_since(&counters, &[7]), Some(at(5)));
}
