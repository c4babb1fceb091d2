use std::{cell::RefCell, collections::BTreeSet, rc::Rc};

use super::*;

/// Interfaces by name, and which of them the program sits on.
#[derive(Debug, Default)]
struct KernelState {
    interfaces: BTreeMap<String, u32>,
    attached: Vec<u32>,
    complete: Vec<u32>,
    /// How many addresses are trusted at each.
    trusted: BTreeMap<u32, usize>,
    /// Where it is known which addresses are trusted.
    known: BTreeSet<u32>,
    tries: usize,
    /// Where an earlier agent's programs are.
    left: Vec<u32>,
    /// Where programs of others are in front.
    behind: BTreeSet<u32>,
}

#[derive(Clone, Debug, Default)]
struct Kernel(Rc<RefCell<KernelState>>);

#[derive(Debug)]
struct Link(Kernel, u32);

impl Drop for Link {
    fn drop(&mut self) {
        let attached = &mut (self.0.0.borrow_mut()).attached;
        // As with clsact, whose filters are found by the index. They may be gone with the interface.
        attached.retain(|ifindex| *ifindex != self.1);
    }
}

impl Attach for Kernel {
    type Link = Link;

    fn ifindex(&self, name: &str) -> Option<u32> {
        self.0.borrow().interfaces.get(name).copied()
    }

    fn trust_sources(&mut self, ifindex: u32, sources: &SourceAddresses) {
        let mut state = self.0.borrow_mut();
        state.known.insert(ifindex);
        match sources.ips.len() {
            0 => state.trusted.remove(&ifindex),
            count => state.trusted.insert(ifindex, count),
        };
    }

    fn forget(&mut self, ifindex: u32) {
        let mut state = self.0.borrow_mut();
        assert!(!state.attached.contains(&ifindex), "the programs go first");
        state.trusted.remove(&ifindex);
        state.known.remove(&ifindex);
    }

    fn attach(&mut self, name: &str, ifindex: u32) -> Result<Link, AttachError> {
        let mut state = self.0.borrow_mut();
        state.tries += 1;
        assert!(state.known.contains(&ifindex), "the addresses come first");
        if state.interfaces.get(name) != Some(&ifindex) {
            return Err(AttachError::NoInterface {
                name: name.to_owned(),
            });
        }
        assert!(!state.attached.contains(&ifindex), "EEXIST");
        state.attached.push(ifindex);
        state.behind.remove(&ifindex);
        drop(state);
        Ok(Link(self.clone(), ifindex))
    }

    fn let_go_on(&mut self, ifindex: u32) -> bool {
        self.0.borrow().left.contains(&ifindex)
    }

    fn complete(&mut self, name: &str, ifindex: u32, link: &mut Link) -> Result<(), AttachError> {
        assert_eq!(link.1, ifindex);
        let mut state = self.0.borrow_mut();
        if state.interfaces.get(name) != Some(&ifindex) {
            return Err(AttachError::NoInterface {
                name: name.to_owned(),
            });
        }
        state.complete.push(ifindex);
        Ok(())
    }

    fn look(&mut self, name: &str, ifindex: u32, link: &Link) -> Result<(), AttachError> {
        assert_eq!(link.1, ifindex);
        match self.0.borrow().behind.contains(&ifindex) {
            false => Ok(()),
            true => Err(AttachError::Behind {
                name: name.to_owned(),
                others: "program 9".to_owned(),
            }),
        }
    }

    fn detach(&mut self, link: Link) {
        drop(link);
    }

    fn sweep(&mut self) {}
}

impl Kernel {
    fn plug(&self, name: &str, ifindex: u32) {
        self.0.borrow_mut().interfaces.insert(name.into(), ifindex);
    }

    /// Another interface gets the index of this one.
    fn replace(&self, name: &str, new: &str) {
        let mut state = self.0.borrow_mut();
        let ifindex = state.interfaces.remove(name).expect("it is plugged in");
        state.interfaces.insert(new.into(), ifindex);
        // The kernel takes the programs away with the interface.
        state.attached.retain(|attached| *attached != ifindex);
        state.complete.retain(|complete| *complete != ifindex);
    }

    fn unplug(&self, name: &str) {
        self.0.borrow_mut().interfaces.remove(name);
    }

    fn attached(&self) -> Vec<u32> {
        self.0.borrow().attached.clone()
    }

    fn trusted(&self) -> Vec<(u32, usize)> {
        let state = self.0.borrow();
        state
            .trusted
            .iter()
            .map(|(ifindex, count)| (*ifindex, *count))
            .collect()
    }

    fn tries(&self) -> usize {
        self.0.borrow().tries
    }
}

const ROW: RowId = RowId::new(1);
const OTHER: RowId = RowId::new(2);

/// So many addresses.
fn sources(count: u8) -> SourceAddresses {
    SourceAddresses {
        mac: None,
        ips: (0..count).map(|last| [10, 244, 0, last].into()).collect(),
    }
}

fn ms(millis: u64) -> Timestamp {
    Timestamp::from_nanos(millis * 1_000_000)
}

fn start() -> (Kernel, Attachments<Kernel>) {
    let kernel = Kernel::default();
    (kernel.clone(), Attachments::new(kernel))
}

/// Does all the work that there is; gives what was told.
fn work(attachments: &mut Attachments<Kernel>, now: Timestamp) -> Vec<Input> {
    let mut told = Vec::new();
    while attachments.has_work() {
        told.extend(attachments.work(now));
    }
    told
}

/// Attaches as far as possible; gives what was told last.
fn attach(attachments: &mut Attachments<Kernel>, row: RowId, name: &str, now: Timestamp) -> Input {
    let found = attachments.attach(row, name.into(), sources(1), now);
    work(attachments, now).pop().unwrap_or(found)
}

fn on_event(
    attachments: &mut Attachments<Kernel>,
    event: &LinkEvent,
    now: Timestamp,
) -> Vec<Input> {
    let found = attachments.link_event(event, now);
    let told = work(attachments, now);
    if told.is_empty() { found } else { told }
}

#[track_caller]
fn assert_attached(input: &Input, row: RowId, index: u32) {
    let Input::Attached { interface, ifindex } = input else {
        panic!("{input:?}");
    };
    assert_eq!((*interface, *ifindex), (row, index));
}

fn present(name: &str, ifindex: u32) -> LinkEvent {
    LinkEvent::Present {
        name: name.into(),
        ifindex,
    }
}

#[test]
fn attaches_at_once_and_detaches() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    assert_attached(&attach(&mut attachments, ROW, "veth0", ms(0)), ROW, 7);
    assert_eq!(attachments.next_deadline(), None);
    assert_eq!(kernel.attached(), [7]);
    attachments.detach(ROW);
    assert_eq!(kernel.attached(), Vec::<u32>::new());
    attachments.detach(ROW);
}

#[test]
fn the_programs_of_an_earlier_agent_go_on_until_they_are_taken_over() {
    let (kernel, mut attachments) = start();
    for (name, ifindex) in [("left", 7), ("new", 8), ("gone", 9)] {
        kernel.plug(name, ifindex);
    }
    kernel.0.borrow_mut().left = vec![7, 9];
    assert_attached(&attach(&mut attachments, ROW, "left", ms(0)), ROW, 7);
    assert_attached(&attach(&mut attachments, OTHER, "new", ms(0)), OTHER, 8);
    let third = RowId::new(3);
    assert_attached(&attach(&mut attachments, third, "gone", ms(0)), third, 9);
    assert_eq!(kernel.attached(), [8], "the others have programs");
    assert_attached(&attach(&mut attachments, ROW, "left", ms(1)), ROW, 7);
    attachments.detach(third);

    attachments.take_over();
    let told = work(&mut attachments, ms(2));
    assert_eq!(told.len(), 1);
    assert_attached(&told[0], ROW, 7);
    assert_eq!(kernel.attached(), [8, 7]);
    attachments.detach(ROW);
    assert_attached(&attach(&mut attachments, ROW, "left", ms(3)), ROW, 7);
    assert_eq!(kernel.attached(), [8, 7], "nobody is waited for any more");
}

#[test]
fn waits_longer_from_try_to_try() {
    let (kernel, mut attachments) = start();
    let Input::AttachFailed { reason, .. } = attach(&mut attachments, ROW, "veth0", ms(0)) else {
        panic!("there is no veth0");
    };
    assert_eq!(reason, "there is no interface veth0 (yet)");
    let mut pauses = Vec::new();
    let mut now = ms(0);
    for _ in 0..12 {
        let next = attachments.next_deadline().expect("waits");
        pauses.push(next.since(now).as_millis());
        now = next;
        assert!(
            attachments.handle_timeout(now).is_empty(),
            "the same reason is said once"
        );
    }
    assert_eq!(
        pauses,
        [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5000, 5000, 5000]
    );
    kernel.plug("veth0", 7);
    let next = attachments.next_deadline().expect("waits");
    let news = attachments.handle_timeout(next);
    assert!(matches!(news[..], [Input::Found { .. }]), "{news:?}");
    let news = work(&mut attachments, next);
    assert_eq!(news.len(), 1);
    assert_attached(&news[0], ROW, 7);
    assert_eq!(attachments.next_deadline(), None);
}

#[test]
fn a_timeout_that_comes_early_does_nothing() {
    let (_kernel, mut attachments) = start();
    attach(&mut attachments, ROW, "veth0", ms(0));
    assert!(attachments.handle_timeout(ms(9)).is_empty());
    assert_eq!(attachments.next_deadline(), Some(ms(10)), "no try counted");
}

#[test]
fn a_veth_that_appears_is_attached_at_once() {
    let (kernel, mut attachments) = start();
    attach(&mut attachments, ROW, "veth0", ms(0));
    kernel.plug("veth1", 6);
    assert!(on_event(&mut attachments, &present("veth1", 6), ms(1)).is_empty());
    assert_eq!(kernel.tries(), 0, "another interface concerns nobody");
    kernel.plug("veth0", 7);
    let news = on_event(&mut attachments, &present("veth0", 7), ms(2));
    assert_attached(&news[0], ROW, 7);
}

#[test]
fn a_replaced_veth_is_attached_anew() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attach(&mut attachments, ROW, "veth0", ms(0));
    kernel.plug("veth0", 8);
    assert_attached(&attach(&mut attachments, ROW, "veth0", ms(1)), ROW, 8);
    assert_eq!(kernel.attached(), [8]);
    kernel.plug("veth0", 9);
    let news = on_event(&mut attachments, &present("veth0", 9), ms(2));
    assert_attached(&news[0], ROW, 9);
    assert_eq!(kernel.attached(), [9]);
}

#[test]
fn a_veth_that_goes_is_waited_for() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attach(&mut attachments, ROW, "veth0", ms(0));
    kernel.unplug("veth0");
    assert!(on_event(&mut attachments, &LinkEvent::Gone { ifindex: 6 }, ms(1)).is_empty());
    let news = on_event(&mut attachments, &LinkEvent::Gone { ifindex: 7 }, ms(1));
    assert!(matches!(news[..], [Input::AttachFailed { .. }]), "{news:?}");
    assert_eq!(
        kernel.attached(),
        Vec::<u32>::new(),
        "the dangling link is dropped"
    );
    assert_eq!(attachments.next_deadline(), Some(ms(11)));
}

#[test]
fn a_row_that_goes_late_takes_nothing_of_its_successor() {
    for is_gone in [false, true] {
        let (kernel, mut attachments) = start();
        kernel.plug("veth0", 7);
        assert_attached(&attach(&mut attachments, ROW, "veth0", ms(0)), ROW, 7);
        kernel.replace("veth0", "veth1");
        assert_attached(&attach(&mut attachments, OTHER, "veth1", ms(1)), OTHER, 7);
        match is_gone {
            true => attachments.detach(ROW),
            // The event of the veth that is gone comes behind its successor.
            false => drop(on_event(
                &mut attachments,
                &LinkEvent::Gone { ifindex: 7 },
                ms(2),
            )),
        }
        assert_eq!(kernel.trusted(), [(7, 1)], "{is_gone}");
        assert_eq!(kernel.attached(), [7], "{is_gone}");
        assert_eq!(kernel.0.borrow().complete, [7], "{is_gone}");
    }
}

#[test]
fn a_change_of_an_attached_veth_is_no_news() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attach(&mut attachments, ROW, "veth0", ms(0));
    assert!(on_event(&mut attachments, &present("veth0", 7), ms(1)).is_empty());
    assert!(on_event(&mut attachments, &LinkEvent::Overrun, ms(1)).is_empty());
    assert_eq!(kernel.tries(), 1);
}

#[test]
fn lost_events_make_it_look_at_everything() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attach(&mut attachments, ROW, "veth0", ms(0));
    attach(&mut attachments, OTHER, "veth1", ms(0));
    kernel.plug("veth0", 8);
    kernel.plug("veth1", 9);
    let news = on_event(&mut attachments, &LinkEvent::Overrun, ms(1));
    assert_eq!(news.len(), 2);
    // It has waited for longer.
    assert_attached(&news[0], OTHER, 9);
    assert_attached(&news[1], ROW, 8);
}

#[test]
fn a_new_row_takes_the_place_of_the_old_one() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attach(&mut attachments, ROW, "veth0", ms(0));
    assert_attached(&attach(&mut attachments, OTHER, "veth0", ms(1)), OTHER, 7);
    assert_eq!(kernel.tries(), 1, "the link is taken over");
    attachments.detach(ROW);
    assert_eq!(kernel.attached(), [7]);
    attachments.detach(OTHER);
    assert_eq!(kernel.attached(), Vec::<u32>::new());
}

#[test]
fn a_renamed_row_moves() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    kernel.plug("veth1", 8);
    attach(&mut attachments, ROW, "veth0", ms(0));
    assert_attached(&attach(&mut attachments, ROW, "veth1", ms(1)), ROW, 8);
    assert_eq!(kernel.attached(), [8]);
}

#[test]
fn all_veths_are_seen_before_the_first_is_done_with() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    kernel.plug("veth1", 8);
    let complete = || kernel.0.borrow().complete.clone();
    for (row, name, index) in [(ROW, "veth0", 7), (OTHER, "veth1", 8)] {
        let told = attachments.attach(row, name.into(), sources(1), ms(0));
        assert!(
            matches!(told, Input::Found { ifindex, .. } if ifindex == index),
            "{told:?}"
        );
    }
    assert_eq!(kernel.tries(), 0, "the index is told before");
    assert!(attachments.work(ms(0)).is_none());
    assert!(attachments.work(ms(0)).is_none());
    assert_eq!((kernel.attached(), complete()), (vec![7, 8], vec![]));
    let told: Vec<_> = work(&mut attachments, ms(0));
    assert_attached(&told[0], ROW, 7);
    assert_attached(&told[1], OTHER, 8);
    assert_eq!(complete(), [7, 8]);
}

#[test]
fn a_veth_that_goes_between_the_two_programs_is_waited_for() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attachments.attach(ROW, "veth0".into(), sources(1), ms(0));
    assert!(attachments.work(ms(0)).is_none());
    kernel.unplug("veth0");
    let told = attachments.work(ms(1));
    assert!(matches!(told, Some(Input::AttachFailed { .. })), "{told:?}");
    assert_eq!(kernel.attached(), Vec::<u32>::new());
    assert_eq!(attachments.next_deadline(), Some(ms(11)));
}

#[test]
fn the_addresses_follow_the_interface() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth", 7);
    attach(&mut attachments, ROW, "veth", ms(0));
    assert_eq!(kernel.trusted(), [(7, 1)]);
    attachments.trust_sources(ROW, sources(2));
    assert_eq!(kernel.trusted(), [(7, 2)]);
    attachments.trust_sources(ROW, sources(0));
    assert_eq!(kernel.trusted(), []);
    attachments.trust_sources(ROW, sources(3));
    // The veth is replaced.
    kernel.unplug("veth");
    on_event(&mut attachments, &LinkEvent::Gone { ifindex: 7 }, ms(1));
    assert_eq!(kernel.trusted(), []);
    kernel.plug("veth", 8);
    let present = LinkEvent::Present {
        name: "veth".into(),
        ifindex: 8,
    };
    on_event(&mut attachments, &present, ms(2));
    assert_eq!(kernel.trusted(), [(8, 3)]);
    // The row is replaced by another pod's.
    attach(&mut attachments, OTHER, "veth", ms(3));
    assert_eq!(kernel.trusted(), [(8, 1)]);
    attachments.detach(OTHER);
    assert_eq!(kernel.trusted(), []);
    attachments.trust_sources(OTHER, sources(1));
    assert_eq!(kernel.trusted(), [], "nobody waits for it");
}

/// A pod on many networks comes before its neighbour. Nothing counts at the veths of its secondary networks.
#[test]
fn a_pod_on_many_networks_does_not_keep_a_neighbour_waiting() {
    let (kernel, mut attachments) = start();
    for network in 0..40 {
        let name = format!("net{network}");
        kernel.plug(&name, 100 + network);
        let row = RowId::new(u128::from(network) + 1);
        attachments.attach(row, name, sources(0), ms(0));
    }
    for (row, name, ifindex, at) in [
        (99, "first", 9, 2),
        (77, "second", 7, 3),
        (98, "third", 8, 4),
    ] {
        kernel.plug(name, ifindex);
        attachments.attach(RowId::new(row), name.into(), sources(1), ms(at));
    }
    assert!(attachments.work(ms(5)).is_none(), "one sees answers");
    assert_eq!(kernel.attached(), [9], "the first that came");
    let told = work(&mut attachments, ms(6));
    assert_eq!(kernel.attached()[..3], [9, 7, 8]);
    for (told, (row, ifindex)) in told.iter().zip([(99, 9), (77, 7), (98, 8)]) {
        assert_attached(told, RowId::new(row), ifindex);
    }
    assert_eq!(told.len(), 43);
}

#[test]
fn programs_that_are_behind_others_are_attached_again() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    kernel.plug("veth1", 8);
    attach(&mut attachments, ROW, "veth0", ms(0));
    attach(&mut attachments, OTHER, "veth1", ms(0));
    assert!(attachments.look_at_places(ms(1)).is_empty());
    assert!(!attachments.has_work());

    kernel.0.borrow_mut().behind.insert(7);
    assert!(attachments.look_at_places(ms(2)).is_empty());
    assert_eq!(kernel.attached(), [8]);
    let told = work(&mut attachments, ms(2));
    assert_eq!(told.len(), 1);
    assert_attached(&told[0], ROW, 7);
    assert_eq!(kernel.attached(), [8, 7]);
}

#[test]
fn others_that_take_the_first_place_again_are_named() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attach(&mut attachments, ROW, "veth0", ms(0));
    let others_come = || kernel.0.borrow_mut().behind.insert(7);
    others_come();
    attachments.look_at_places(ms(0));
    work(&mut attachments, ms(0));

    others_come();
    let fails = |told: &[Input]| match told {
        [Input::AttachFailed { reason, .. }] => reason.contains("program 9"),
        _ => false,
    };
    assert!(fails(&attachments.look_at_places(ms(10_000))));
    assert!(attachments.look_at_places(ms(20_000)).is_empty(), "once");
    let told = attachments.attach(ROW, "veth0".into(), sources(1), ms(20_000));
    assert!(fails(&[told]), "a change of the row is no reason to forget");
    assert!(
        attachments
            .link_event(&LinkEvent::Overrun, ms(20_000))
            .is_empty()
    );
    assert_eq!(kernel.attached(), [7], "they stay, behind the others");

    kernel.0.borrow_mut().behind.clear();
    let told = attachments.look_at_places(ms(30_000));
    assert_eq!(told.len(), 1);
    assert_attached(&told[0], ROW, 7);

    others_come();
    let pause = u64::try_from(MOVE_PAUSE.as_millis()).expect("short");
    assert!(fails(&attachments.look_at_places(ms(pause - 1))));
    assert!(attachments.look_at_places(ms(pause)).is_empty());
    let told = work(&mut attachments, ms(pause));
    assert_attached(&told[0], ROW, 7);
}

/// Its event comes later.
#[test]
fn nobody_looks_for_programs_on_an_interface_that_is_gone() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attach(&mut attachments, ROW, "veth0", ms(0));
    kernel.unplug("veth0");
    kernel.0.borrow_mut().behind.insert(7);
    assert!(attachments.look_at_places(ms(1)).is_empty());
    assert!(!attachments.has_work());
}
