use std::{collections::BTreeSet, fmt::Debug};

use super::*;
use crate::{
    dns::{fragments::FragmentEvent, tcp::TcpEvent},
    policy::refused::Refused,
    switch::hold::HoldEvent,
};

fn are_sound<L: Label + Debug + Eq>() {
    for (place, reason) in L::ALL.iter().enumerate() {
        assert_eq!(reason.index(), place, "{reason:?}");
    }
    let labels: BTreeSet<_> = L::ALL.iter().map(|reason| reason.as_str()).collect();
    assert_eq!(labels.len(), L::ALL.len());
    for label in labels {
        assert!(
            label
                .bytes()
                .all(|byte| byte == b'_' || byte.is_ascii_lowercase() || byte.is_ascii_digit()),
            "{label}"
        );
    }
}

#[test]
fn labels_are_distinct_metric_labels_in_the_order_of_their_counters() {
    are_sound::<TcpEvent>();
    are_sound::<FragmentEvent>();
    are_sound::<HoldEvent>();
    are_sound::<Refused>();
}

#[test]
fn each_reason_is_counted_on_its_own() {
    let mut counters = CounterVec::default();
    counters.count(Refused::Loopback);
    counters.count(Refused::Loopback);
    counters.count(Refused::Private);
    assert_eq!(counters[Refused::Loopback], 2);
    assert_eq!(counters[Refused::Private], 1);
    assert_eq!(counters.iter().map(|(_, count)| count).sum::<u64>(), 3);
    assert_eq!(counters.iter().count(), Refused::ALL.len());
}
