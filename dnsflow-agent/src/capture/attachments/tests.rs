use std::{cell::RefCell, rc::Rc};

use super::*;

/// Interfaces by name, and which of them the program sits on.
#[derive(Debug, Default)]
struct World {
    interfaces: BTreeMap<String, u32>,
    attached: Vec<u32>,
    tries: usize,
}

#[derive(Clone, Debug, Default)]
struct Kernel(Rc<RefCell<World>>);

#[derive(Debug)]
struct Link(Kernel, u32);

impl Drop for Link {
    fn drop(&mut self) {
        let attached = &mut (self.0.0.borrow_mut()).attached;
        let at = attached.iter().position(|ifindex| *ifindex == self.1);
        attached.remove(at.expect("was attached"));
    }
}

impl Attach for Kernel {
    type Link = Link;

    fn ifindex(&self, name: &str) -> Option<u32> {
        self.0.borrow().interfaces.get(name).copied()
    }

    fn attach(&mut self, name: &str) -> Result<(u32, Link), AttachError> {
        let mut world = self.0.borrow_mut();
        world.tries += 1;
        let ifindex = *world
            .interfaces
            .get(name)
            .ok_or_else(|| AttachError::NoInterface {
                name: name.to_owned(),
            })?;
        assert!(!world.attached.contains(&ifindex), "EEXIST");
        world.attached.push(ifindex);
        Ok((ifindex, Link(self.clone(), ifindex)))
    }
}

impl Kernel {
    fn plug(&self, name: &str, ifindex: u32) {
        self.0.borrow_mut().interfaces.insert(name.into(), ifindex);
    }

    fn unplug(&self, name: &str) {
        self.0.borrow_mut().interfaces.remove(name);
    }

    fn attached(&self) -> Vec<u32> {
        self.0.borrow().attached.clone()
    }

    fn tries(&self) -> usize {
        self.0.borrow().tries
    }
}

const ROW: RowId = RowId::new(1);
const OTHER: RowId = RowId::new(2);

fn ms(millis: u64) -> Timestamp {
    Timestamp::from_nanos(millis * 1_000_000)
}

fn start() -> (Kernel, Attachments<Kernel>) {
    let kernel = Kernel::default();
    (kernel.clone(), Attachments::new(kernel))
}

#[track_caller]
fn assert_attached(input: &Input<'_>, row: RowId, index: u32) {
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
    assert_attached(&attachments.attach(ROW, "veth0".into(), ms(0)), ROW, 7);
    assert_eq!(attachments.next_deadline(), None);
    assert_eq!(kernel.attached(), [7]);
    attachments.detach(ROW);
    assert_eq!(kernel.attached(), Vec::<u32>::new());
    attachments.detach(ROW);
}

#[test]
fn waits_longer_from_try_to_try() {
    let (kernel, mut attachments) = start();
    let Input::AttachFailed { reason, .. } = attachments.attach(ROW, "veth0".into(), ms(0)) else {
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
    assert_eq!(news.len(), 1);
    assert_attached(&news[0], ROW, 7);
    assert_eq!(attachments.next_deadline(), None);
}

#[test]
fn a_timeout_that_comes_early_does_nothing() {
    let (kernel, mut attachments) = start();
    attachments.attach(ROW, "veth0".into(), ms(0));
    assert!(attachments.handle_timeout(ms(9)).is_empty());
    assert_eq!(kernel.tries(), 1);
}

#[test]
fn a_veth_that_appears_is_attached_at_once() {
    let (kernel, mut attachments) = start();
    attachments.attach(ROW, "veth0".into(), ms(0));
    kernel.plug("veth1", 6);
    assert!(
        attachments
            .link_event(&present("veth1", 6), ms(1))
            .is_empty()
    );
    assert_eq!(kernel.tries(), 1, "another interface concerns nobody");
    kernel.plug("veth0", 7);
    let news = attachments.link_event(&present("veth0", 7), ms(2));
    assert_attached(&news[0], ROW, 7);
}

#[test]
fn a_replaced_veth_is_attached_anew() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attachments.attach(ROW, "veth0".into(), ms(0));
    kernel.plug("veth0", 8);
    assert_attached(&attachments.attach(ROW, "veth0".into(), ms(1)), ROW, 8);
    assert_eq!(kernel.attached(), [8]);
    kernel.plug("veth0", 9);
    let news = attachments.link_event(&present("veth0", 9), ms(2));
    assert_attached(&news[0], ROW, 9);
    assert_eq!(kernel.attached(), [9]);
}

#[test]
fn a_veth_that_goes_is_waited_for() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attachments.attach(ROW, "veth0".into(), ms(0));
    kernel.unplug("veth0");
    assert!(
        attachments
            .link_event(&LinkEvent::Gone { ifindex: 6 }, ms(1))
            .is_empty()
    );
    let news = attachments.link_event(&LinkEvent::Gone { ifindex: 7 }, ms(1));
    assert!(matches!(news[..], [Input::AttachFailed { .. }]), "{news:?}");
    assert_eq!(
        kernel.attached(),
        Vec::<u32>::new(),
        "the dangling link is dropped"
    );
    assert_eq!(attachments.next_deadline(), Some(ms(11)));
}

#[test]
fn a_change_of_an_attached_veth_is_no_news() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attachments.attach(ROW, "veth0".into(), ms(0));
    assert!(
        attachments
            .link_event(&present("veth0", 7), ms(1))
            .is_empty()
    );
    assert!(
        attachments
            .link_event(&LinkEvent::Overrun, ms(1))
            .is_empty()
    );
    assert_eq!(kernel.tries(), 1);
}

#[test]
fn lost_events_make_it_look_at_everything() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attachments.attach(ROW, "veth0".into(), ms(0));
    attachments.attach(OTHER, "veth1".into(), ms(0));
    kernel.plug("veth0", 8);
    kernel.plug("veth1", 9);
    let news = attachments.link_event(&LinkEvent::Overrun, ms(1));
    assert_eq!(news.len(), 2);
    assert_attached(&news[0], ROW, 8);
    assert_attached(&news[1], OTHER, 9);
}

#[test]
fn a_new_row_takes_the_place_of_the_old_one() {
    let (kernel, mut attachments) = start();
    kernel.plug("veth0", 7);
    attachments.attach(ROW, "veth0".into(), ms(0));
    assert_attached(&attachments.attach(OTHER, "veth0".into(), ms(1)), OTHER, 7);
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
    attachments.attach(ROW, "veth0".into(), ms(0));
    assert_attached(&attachments.attach(ROW, "veth1".into(), ms(1)), ROW, 8);
    assert_eq!(kernel.attached(), [8]);
}
