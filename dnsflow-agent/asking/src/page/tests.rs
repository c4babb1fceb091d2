use super::*;

#[test]
fn a_bound_holds_for_its_share_of_the_answers() {
    let buckets = [(Some(0.0005), 98), (Some(0.5), 1), (None, 1)];
    let buckets = buckets.map(|(le_s, count)| Bucket { le_s, count });
    assert_eq!(within(&buckets, 50), "within 0.5 ms");
    assert_eq!(within(&buckets, 99), "within 500 ms");
    assert_eq!(within(&buckets, 100), "later than the last bound");
}

#[test]
fn what_has_no_room_is_counted() {
    assert_eq!(some(["a", "b"].into_iter(), 2), "a, b");
    assert_eq!(some(["a", "b"].into_iter(), 5), "a, b and 3 more");
    assert_eq!(some(std::iter::empty::<&str>(), 0), "–");
}

#[test]
fn a_time_is_one_for_people() {
    assert_eq!(
        moment("2026-11-22T17:34:26.599Z"),
        "2026-11-22 17:34:26 UTC"
    );
}
