use std::net::Ipv4Addr;

use super::*;
use crate::values::flow::Addresses;

const PASS: Duration = Duration::from_millis(40);
const HOLD_MAX: Duration = Duration::from_millis(100);

fn at(ms: u64) -> Timestamp {
    Timestamp::from_nanos(1_000_000_000) + Duration::from_millis(ms)
}

/// From one of the pods to an address.
fn path(pod: u8, to: u8) -> Path {
    Path {
        interface: format!("veth{pod}").into(),
        addresses: Addresses::V4 {
            src: Ipv4Addr::new(10, 244, 0, pod),
            dst: Ipv4Addr::new(203, 0, 113, to),
        },
    }
}

fn waiting() -> Revalidation {
    let mut revalidation = Revalidation::new(HOLD_MAX);
    revalidation.set_estimate(PASS);
    revalidation
}

fn begin(revalidation: &mut Revalidation, batch: u64, paths: &[Path], ms: u64) {
    let paths = paths.iter().cloned().collect();
    revalidation.begin(BatchId(batch), paths, Timestamp::default(), at(ms));
    assert!(revalidation.awaits(BatchId(batch)));
}

/// Megaflows drop on these of the paths.
fn drops(paths: &[Path]) -> Looked {
    Looked {
        dropping: paths.to_vec(),
        unknown: Vec::new(),
    }
}

#[test]
fn a_batch_is_over_once_nothing_drops_on_its_paths() {
    let mut revalidation = waiting();
    begin(&mut revalidation, 1, &[path(5, 1), path(5, 2)], 0);
    assert_eq!(revalidation.look(at(0)), Some(vec![path(5, 1), path(5, 2)]));
    assert_eq!(revalidation.look(at(0)), None, "one look at a time");
    assert_eq!(revalidation.looked(&drops(&[path(5, 2)]), at(3)), []);
    // As long as the look took, the switch is left alone.
    assert_eq!(revalidation.deadline(), Some(at(6)));
    assert_eq!(revalidation.look(at(5)), None);
    assert!(revalidation.look(at(6)).is_some());
    assert_eq!(revalidation.looked(&drops(&[]), at(7)), [BatchId(1)]);
    assert_eq!(revalidation.deadline(), None);
    assert_eq!(revalidation.events()[RevalidationEvent::Clear], 1);
}

#[test]
fn a_batch_of_many_paths_does_not_keep_a_smaller_one_from_the_look() {
    let mut revalidation = waiting();
    let many: Vec<Path> = (1..PATHS_PER_LOOK_MAX as u8)
        .map(|to| path(5, to))
        .collect();
    begin(&mut revalidation, 1, &many, 0);
    begin(&mut revalidation, 2, &many[1..], 0);
    let others: Vec<Path> = (1..PATHS_PER_LOOK_MAX as u8)
        .map(|to| path(6, to))
        .collect();
    begin(&mut revalidation, 3, &others, 0);
    begin(&mut revalidation, 4, &[path(7, 1)], 0);
    let looked_at = revalidation.look(at(0)).expect("a look");
    assert_eq!(looked_at.len(), PATHS_PER_LOOK_MAX);
    assert!(looked_at.contains(&path(7, 1)));
}

/// Of a pod that goes on to send what is denied.
#[test]
fn a_batch_of_many_paths_that_drop_for_good_does_not_fill_each_look() {
    let mut revalidation = waiting();
    let many: Vec<Path> = (0..PATHS_PER_LOOK_MAX as u8)
        .map(|to| path(5, to))
        .collect();
    begin(&mut revalidation, 1, &many, 0);
    assert_eq!(revalidation.look(at(0)), Some(many.clone()));
    begin(&mut revalidation, 2, &[path(6, 1)], 0);
    assert_eq!(revalidation.looked(&drops(&many), at(1)), []);
    assert_eq!(revalidation.look(at(2)), Some(vec![path(6, 1)]));
    assert_eq!(revalidation.looked(&drops(&[]), at(3)), [BatchId(2)]);
    assert_eq!(revalidation.look(at(4)), Some(many));
}

#[test]
fn the_longer_a_batch_waits_the_rarer_are_the_looks() {
    let mut revalidation = waiting();
    begin(&mut revalidation, 1, &[path(5, 1)], 0);
    revalidation.look(at(0)).expect("a look");
    revalidation.looked(&drops(&[path(5, 1)]), at(1));
    assert_eq!(revalidation.deadline(), Some(at(2)));
    revalidation.look(at(63)).expect("a look");
    revalidation.looked(&drops(&[path(5, 1)]), at(64));
    assert_eq!(revalidation.deadline(), Some(at(72)), "an eighth of 64 ms");
    // A newer batch does not wait for the older one's pause.
    revalidation.look(at(72)).expect("a look");
    begin(&mut revalidation, 2, &[path(6, 1)], 72);
    revalidation.looked(&drops(&[path(5, 1)]), at(73));
    assert_eq!(revalidation.deadline(), Some(at(74)));
}

#[test]
fn what_drops_for_good_ends_the_wait_before_frames_have_to_go() {
    let mut revalidation = waiting();
    begin(&mut revalidation, 1, &[path(5, 1)], 0);
    revalidation.look(at(0)).expect("a look");
    assert_eq!(revalidation.looked(&drops(&[path(5, 1)]), at(1)), []);
    assert_eq!(
        revalidation.expired(|_| true, at(89)),
        [],
        "whatever the estimate"
    );
    assert_eq!(revalidation.expired(|_| true, at(90)), [BatchId(1)]);
    assert_eq!(revalidation.events()[RevalidationEvent::Dropping], 1);
}

#[test]
fn a_datapath_that_cannot_be_asked_is_not_asked_again_for_the_same_batch() {
    let mut revalidation = waiting();
    begin(&mut revalidation, 1, &[path(5, 1)], 0);
    revalidation.look(at(0)).expect("a look");
    assert_eq!(
        revalidation.looked(&Looked::unknown(vec![path(5, 1)]), at(1)),
        []
    );
    assert_eq!(revalidation.look(at(20)), None);
    assert_eq!(revalidation.expired(|_| true, at(40)), [BatchId(1)]);
    assert_eq!(revalidation.events()[RevalidationEvent::Estimated], 1);
}

/// The megaflows of one pod are too many to look at.
#[test]
fn a_path_of_which_nothing_is_known_makes_no_other_one_wait() {
    let mut revalidation = waiting();
    begin(&mut revalidation, 1, &[path(5, 1), path(6, 1)], 0);
    begin(&mut revalidation, 2, &[path(6, 2)], 0);
    begin(&mut revalidation, 3, &[path(5, 3)], 0);
    revalidation.look(at(0)).expect("a look");
    let looked = Looked {
        dropping: vec![path(6, 1)],
        unknown: vec![path(5, 1), path(5, 3)],
    };
    assert_eq!(revalidation.looked(&looked, at(1)), [BatchId(2)]);
    assert_eq!(revalidation.look(at(2)), Some(vec![path(6, 1)]));
    assert_eq!(revalidation.looked(&drops(&[]), at(3)), [BatchId(1)]);
    assert_eq!(revalidation.expired(|_| true, at(39)), []);
    assert_eq!(revalidation.expired(|_| true, at(40)), [BatchId(3)]);
    assert_eq!(revalidation.events()[RevalidationEvent::Estimated], 1);
}

#[test]
fn a_pass_for_the_batch_before_is_waited_for_too() {
    let mut revalidation = waiting();
    let paths = [path(5, 1)].into();
    revalidation.begin(BatchId(1), paths, at(98), at(100));
    assert_eq!(revalidation.expired(|_| true, at(142)), []);
    assert_eq!(revalidation.expired(|_| true, at(143)), [BatchId(1)]);
}

#[test]
fn no_estimate_is_as_long_as_frames_are_held() {
    let mut revalidation = Revalidation::new(HOLD_MAX);
    revalidation.set_estimate(Duration::from_secs(3));
    assert_eq!(revalidation.estimate(), Duration::from_millis(90));
}

#[test]
fn nobody_looks_for_a_batch_that_no_frame_waits_for() {
    let mut revalidation = waiting();
    let paths = [path(5, 1)].into();
    revalidation.begin(BatchId(1), paths, Timestamp::default(), at(0));
    assert_eq!(revalidation.look(at(0)), None);
    assert!(revalidation.awaits(BatchId(1)), "a later answer does");
    assert!(revalidation.look(at(1)).is_some());
    assert!(!revalidation.awaits(BatchId(2)));
}

#[test]
fn batches_that_came_during_a_look_take_part_in_the_next_one() {
    let mut revalidation = waiting();
    begin(&mut revalidation, 1, &[path(5, 1)], 0);
    revalidation.look(at(0)).expect("a look");
    begin(&mut revalidation, 2, &[path(6, 2)], 1);
    assert_eq!(revalidation.looked(&drops(&[]), at(2)), [BatchId(1)]);
    assert_eq!(revalidation.look(at(4)), Some(vec![path(6, 2)]));
    assert_eq!(revalidation.looked(&drops(&[]), at(5)), [BatchId(2)]);
}

#[test]
fn a_batch_is_over_whatever_drops_on_the_paths_of_another() {
    let mut revalidation = waiting();
    begin(&mut revalidation, 1, &[path(5, 1)], 0);
    begin(&mut revalidation, 2, &[path(5, 2)], 0);
    revalidation.look(at(0)).expect("a look");
    let over = revalidation.looked(&drops(&[path(5, 1)]), at(1));
    assert_eq!(over, [BatchId(2)]);
    revalidation.look(at(2)).expect("a look");
    assert_eq!(revalidation.looked(&drops(&[]), at(3)), [BatchId(1)]);
}

#[test]
fn a_look_is_for_so_many_paths_only() {
    let mut revalidation = waiting();
    let many: Vec<_> = (0..=u8::MAX).map(|to| path(5, to)).collect();
    let (half, _) = many.split_at(PATHS_PER_LOOK_MAX / 2 + 1);
    begin(&mut revalidation, 1, &many, 0);
    begin(&mut revalidation, 2, half, 0);
    begin(&mut revalidation, 3, &[path(6, 1)], 0);
    let paths = revalidation.look(at(0)).expect("a look");
    assert_eq!(paths.len(), half.len() + 1, "those of 2 and 3");
    assert_eq!(
        revalidation.looked(&drops(&[]), at(1)),
        [BatchId(2), BatchId(3)]
    );
    assert_eq!(revalidation.expired(|_| true, at(40)), [BatchId(1)]);
}

#[test]
fn without_a_switch_nothing_is_waited_for() {
    let mut revalidation = waiting();
    begin(&mut revalidation, 1, &[path(5, 1)], 0);
    revalidation.look(at(0)).expect("a look");
    assert_eq!(revalidation.disconnected(), [BatchId(1)]);
    assert_eq!(revalidation.looked(&drops(&[]), at(1)), [], "too late");
    assert_eq!(revalidation.deadline(), None);
}
