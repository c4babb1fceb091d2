use super::*;

const REVALIDATION: Duration = Duration::from_millis(3);

fn at(ms: u64) -> Timestamp {
    Timestamp::from_nanos(ms * 1_000_000)
}

/// Looks, `batch` of which was confirmed at 0 s, and nothing else.
fn after_a_gap() -> Looks {
    let mut looks = Looks::default();
    looks.restoring(BatchId(7));
    looks.applied(BatchId(7), REVALIDATION, at(0));
    looks
}

/// When the looks come, each of which finds as many connections as `found` says of its number.
fn times(looks: &mut Looks, found: impl Fn(usize) -> usize) -> Vec<Timestamp> {
    let mut times = Vec::new();
    while let Some(at) = looks.deadline() {
        assert!(looks.begin(at));
        looks.found(found(times.len()), false, at);
        times.push(at);
        assert!(times.len() < 100, "looks without end");
    }
    times
}

#[test]
fn a_gap_is_looked_at_twice() {
    let first = at(0) + REVALIDATION + FIRST_LOOK_DELAY;
    let times = times(&mut after_a_gap(), |_| 0);
    assert_eq!(times, [first, first + LOOK_INTERVAL]);
}

#[test]
fn looks_go_on_while_they_find_something_but_not_for_ever() {
    let finds_three = times(&mut after_a_gap(), |look| usize::from(look < 3));
    assert_eq!(finds_three.len(), 4);
    assert_eq!(
        times(&mut after_a_gap(), |_| 1).len(),
        usize::from(LOOKS_MAX)
    );
}

#[test]
fn only_batches_that_restore_flows_count() {
    let mut looks = Looks::default();
    looks.restoring(BatchId(2));
    looks.applied(BatchId(1), REVALIDATION, at(0));
    assert_eq!(looks.deadline(), None);
    looks.applied(BatchId(2), REVALIDATION, at(0));
    assert_eq!(times(&mut looks, |_| 0).len(), usize::from(LOOKS));
}

#[test]
fn many_batches_share_their_looks() {
    let mut looks = Looks::default();
    let mut begun = Vec::new();
    for ms in 0..3000_u64 {
        looks.restoring(BatchId(ms));
        looks.applied(BatchId(ms), REVALIDATION, at(ms));
        if looks.begin(at(ms)) {
            begun.push(at(ms));
            looks.found(0, false, at(ms));
        }
    }
    assert_eq!(begun.len(), 3, "{begun:?}");
    assert_eq!(
        times(&mut looks, |_| 0).len(),
        usize::from(LOOKS),
        "the last one too"
    );
}

#[test]
fn a_gap_that_ends_during_a_look_is_looked_at() {
    let mut looks = after_a_gap();
    let first = looks.deadline().expect("a look");
    assert!(looks.begin(first));
    looks.gap_ended(first);
    assert_eq!(looks.deadline(), None, "one at a time");
    looks.found(0, true, first);
    assert_eq!(looks.deadline(), None, "not at its end");
    looks.found(0, false, first);
    assert_eq!(times(&mut looks, |_| 0).len(), usize::from(LOOKS));
}

#[test]
fn a_lost_connection_is_waited_for() {
    let mut looks = Looks::default();
    looks.restoring(BatchId(7));
    looks.disconnected();
    looks.applied(BatchId(7), REVALIDATION, at(0));
    assert_eq!(looks.deadline(), None);
}
