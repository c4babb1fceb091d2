use super::*;

const REVALIDATION: Duration = Duration::from_millis(3);

fn at(ms: u64) -> Timestamp {
    Timestamp::from_nanos(ms * 1_000_000)
}

/// Searches, `batch` of which was confirmed at 0 s, and nothing else.
fn after_a_gap() -> BlockedSearches {
    let mut searches = BlockedSearches::default();
    searches.restoring(BatchId(7));
    searches.answered(BatchId(7), REVALIDATION, at(0));
    searches
}

/// When the searches come, each of which finds as many connections as `found` says of its number.
fn times(searches: &mut BlockedSearches, found: impl Fn(usize) -> usize) -> Vec<Timestamp> {
    let mut times = Vec::new();
    while let Some(at) = searches.deadline() {
        assert!(searches.begin(at));
        searches.found(found(times.len()), false, at);
        times.push(at);
        assert!(times.len() < 100, "searches without end");
    }
    times
}

#[test]
fn a_gap_is_looked_at_twice() {
    let first = at(0) + REVALIDATION + FIRST_SEARCH_DELAY;
    let times = times(&mut after_a_gap(), |_| 0);
    assert_eq!(times, [first, first + SEARCH_INTERVAL]);
}

#[test]
fn looks_go_on_while_they_find_something_but_not_for_ever() {
    let finds_three = times(&mut after_a_gap(), |search| usize::from(search < 3));
    assert_eq!(finds_three.len(), 4);
    assert_eq!(
        times(&mut after_a_gap(), |_| 1).len(),
        usize::from(SEARCHES_MAX)
    );
}

#[test]
fn only_batches_that_restore_flows_count() {
    let mut searches = BlockedSearches::default();
    searches.restoring(BatchId(2));
    searches.answered(BatchId(1), REVALIDATION, at(0));
    assert_eq!(searches.deadline(), None);
    searches.answered(BatchId(2), REVALIDATION, at(0));
    assert_eq!(times(&mut searches, |_| 0).len(), usize::from(SEARCHES_MIN));
}

#[test]
fn many_batches_share_their_looks() {
    let mut searches = BlockedSearches::default();
    let mut begun = Vec::new();
    for ms in 0..3000_u64 {
        searches.restoring(BatchId(ms));
        searches.answered(BatchId(ms), REVALIDATION, at(ms));
        if searches.begin(at(ms)) {
            begun.push(at(ms));
            searches.found(0, false, at(ms));
        }
    }
    assert_eq!(begun.len(), 3, "{begun:?}");
    assert_eq!(
        times(&mut searches, |_| 0).len(),
        usize::from(SEARCHES_MIN),
        "the last one too"
    );
}

#[test]
fn a_gap_that_ends_during_a_look_is_looked_at() {
    let mut searches = after_a_gap();
    let first = searches.deadline().expect("a search");
    assert!(searches.begin(first));
    searches.gap_ended(first);
    assert_eq!(searches.deadline(), None, "one at a time");
    searches.found(0, true, first);
    assert_eq!(searches.deadline(), None, "not at its end");
    searches.found(0, false, first);
    assert_eq!(times(&mut searches, |_| 0).len(), usize::from(SEARCHES_MIN));
}

#[test]
fn a_lost_connection_is_waited_for() {
    let mut searches = BlockedSearches::default();
    searches.restoring(BatchId(7));
    searches.disconnected();
    searches.answered(BatchId(7), REVALIDATION, at(0));
    assert_eq!(searches.deadline(), None);
}
