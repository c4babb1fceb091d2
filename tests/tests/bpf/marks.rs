//! The verdict in a packet's mark.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU32,
    time::Duration,
};

use aya::{TestRun as _, TestRunOptions};
use dnsflow_agent::capture::{INGRESS, Options, Reading};
use dnsflow_common::{
    key::ENTRY_USED_EVERY_NS,
    walk::{TCP_ACK, TCP_SYN},
};
use dnsflow_core::{Timestamp, io::input::MarkFound};
use dnsflow_tests::frames::{Extension, Fragment, Frame, Transport};

use crate::{CONTINUE, Loaded, load};

pub(crate) const MASK: u32 = 0xffe0_0000;
pub(crate) const MARK: u32 = 0x8a20_0000;
/// This namespace's loopback interface.
const IFINDEX: u32 = 1;

pub(crate) fn marking() -> Options {
    Options {
        mark_mask: NonZeroU32::new(MASK),
        ..Options::default()
    }
}

fn now() -> Timestamp {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Timestamp::from_nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

fn soon() -> Timestamp {
    now() + Duration::from_secs(60)
}

/// A SYN from the pod.
fn syn() -> Frame {
    let mut frame = Frame::to_pod(Vec::new()).turned();
    frame.dst.set_port(443);
    frame.transport = Transport::Tcp {
        seq: 1,
        ack: 0,
        flags: TCP_SYN,
        options: 5,
    };
    frame
}

impl Loaded {
    /// The mark of a packet behind the program on ingress; `before` is the mark in front of it.
    #[track_caller]
    fn mark_of(&mut self, frame: &[u8], before: u32) -> u32 {
        // `struct __sk_buff` up to and with `mark`, its third word (Linux include/uapi/linux/bpf.h).
        let mut context = [0u8; 12];
        context[8..].copy_from_slice(&before.to_ne_bytes());
        let mut after = [0u8; 192];
        let options = TestRunOptions {
            data_in: Some(frame),
            ctx_in: Some(&context),
            ctx_out: Some(&mut after),
            ..TestRunOptions::default()
        };
        let result = self.program(INGRESS).test_run(options).expect("runs");
        assert_eq!(result.return_value, CONTINUE);
        let mark: [u8; 4] = after[8..12].try_into().expect("four bytes");
        u32::from_ne_bytes(mark)
    }

    pub(crate) fn set(&mut self, address: IpAddr, mark: u32, until: Timestamp) {
        let entries = &mut self.capture.entries;
        entries
            .set(IFINDEX, address, mark, until)
            .expect("it can be set");
    }

    fn used_at(&mut self, address: IpAddr) -> Option<Timestamp> {
        let mut entries = self.read().into_iter();
        let entry = entries.find(|entry| entry.address == address);
        entry.expect("there is one").used_at
    }

    /// All entries. The program is told of the room that they leave.
    pub(crate) fn read(&mut self) -> Vec<MarkFound> {
        let mut reading = Reading::default();
        let mut read = Vec::new();
        let entries = &mut self.capture.entries;
        while !reading.is_over() {
            read.extend(entries.read(&mut reading).expect("they can be read"));
        }
        entries.tell_room().expect("the kernel has the map");
        read
    }
}

#[test]
fn a_packet_to_an_entry_has_its_verdict() {
    let Some(mut program) = load(&marking()) else {
        return;
    };
    for frame in [syn(), syn().over_v6()] {
        let (to, bytes) = (frame.dst.ip(), frame.build());
        for before in [0, MASK, 0x1234, MASK | 0x1234, MARK] {
            assert_eq!(
                program.mark_of(&bytes, before),
                before & !MASK,
                "without an entry, {to}"
            );
        }
        program.set(to, MARK, soon());
        for before in [0, MASK, 0x1234, MASK | 0x1234, MARK] {
            assert_eq!(
                program.mark_of(&bytes, before),
                before & !MASK | MARK,
                "with an entry, {to}"
            );
        }
        program.set(to, MARK, now());
        assert_eq!(program.mark_of(&bytes, MARK | 7), 7, "past its time, {to}");
        program.set(to, MARK, soon());
        program.set(to, MARK | 1, soon());
        assert_eq!(program.mark_of(&bytes, 0), MARK, "no bit outside the mask");
        let entries = &mut program.capture.entries;
        entries.remove(IFINDEX, to).expect("it can be removed");
        entries.remove(IFINDEX, to).expect("or is gone");
        assert_eq!(program.mark_of(&bytes, MARK), 0, "removed, {to}");
    }
}

#[test]
fn entries_are_of_one_interface_and_one_family() {
    let Some(mut program) = load(&marking()) else {
        return;
    };
    let frame = syn();
    let entries = &mut program.capture.entries;
    entries
        .set(IFINDEX + 1, frame.dst.ip(), MARK, soon())
        .expect("it can be set");
    assert_eq!(program.mark_of(&frame.build(), MARK), 0);
    // The IPv6 address whose first octets are those of the IPv4 address.
    let IpAddr::V4(v4) = frame.dst.ip() else {
        panic!("frames are of IPv4 first");
    };
    let mut octets = [0; 16];
    octets[..4].copy_from_slice(&v4.octets());
    program.set(IpAddr::from(octets), MARK, soon());
    assert_eq!(program.mark_of(&frame.build(), MARK), 0);
}

#[test]
fn every_entry_is_read_once_and_as_it_was_set() {
    let Some(mut program) = load(&marking()) else {
        return;
    };
    let first = u32::from(Ipv4Addr::new(198, 18, 0, 0));
    for count in [0, 1, 3000] {
        let until = soon();
        let mut set: BTreeMap<IpAddr, u32> = BTreeMap::new();
        for number in 0..count {
            let address = Ipv4Addr::from(first + number);
            let address: IpAddr = match number % 2 {
                0 => address.into(),
                _ => address.to_ipv6_mapped().into(),
            };
            let mark = (number % 2047 + 1) << 21;
            program.set(address, mark, until);
            set.insert(address, mark);
        }
        let read = program.read();
        assert_eq!(read.len(), set.len(), "each of them once");
        for entry in &read {
            assert_eq!(set.get(&entry.address), Some(&entry.mark), "{entry:?}");
            assert_eq!(
                (entry.ifindex, entry.until, entry.used_at),
                (IFINDEX, until, None)
            );
        }
    }
}

#[test]
fn the_destination_is_all_that_counts() {
    let Some(mut program) = load(&marking()) else {
        return;
    };
    let with = |change: &dyn Fn(&mut Frame)| {
        let mut frame = syn();
        change(&mut frame);
        frame
    };
    let v6_with = |change: &dyn Fn(&mut Frame)| {
        let mut frame = syn().over_v6();
        change(&mut frame);
        frame
    };
    for address in [syn().dst.ip(), syn().over_v6().dst.ip()] {
        program.set(address, MARK, soon());
    }
    let icmp = {
        let mut bytes = syn().build();
        // The protocol (RFC 791, section 3.1).
        bytes[14 + 9] = 1;
        bytes
    };
    let fragment = Fragment {
        id: 7,
        offset: 8,
        more: true,
    };
    for (what, bytes) in [
        (
            "one tag",
            with(&|frame| frame.tags = vec![(0x8100, 5)]).build(),
        ),
        (
            "two tags",
            with(&|frame| frame.tags = vec![(0x88a8, 5), (0x8100, 6)]).build(),
        ),
        ("options", with(&|frame| frame.options = vec![1; 8]).build()),
        ("not TCP", icmp),
        (
            "a later fragment",
            with(&|frame| frame.fragment = Some(fragment)).build(),
        ),
        (
            "an extension header",
            v6_with(&|frame| {
                frame.extensions = vec![Extension::Options {
                    protocol: 0,
                    len: 0,
                }]
            })
            .build(),
        ),
        (
            "a later fragment of IPv6",
            v6_with(&|frame| {
                frame.extensions = vec![Extension::Fragment];
                frame.fragment = Some(fragment);
            })
            .build(),
        ),
    ] {
        assert_eq!(program.mark_of(&bytes, 3), MARK | 3, "{what}");
    }
    for (what, bytes) in [
        (
            "not IP",
            with(&|frame| frame.ethertype = Some(0x0806)).build(),
        ),
        (
            "three tags",
            with(&|frame| frame.tags = vec![(0x88a8, 5), (0x8100, 6), (0x8100, 7)]).build(),
        ),
    ] {
        assert_eq!(program.mark_of(&bytes, MARK | 3), 3, "{what}");
    }
}

#[test]
fn the_use_of_an_entry_is_noted() {
    let Some(mut program) = load(&marking()) else {
        return;
    };
    let frame = syn();
    let (to, bytes) = (frame.dst.ip(), frame.build());
    program.set(to, MARK, soon());
    assert_eq!(program.used_at(to), None);
    let before = now();
    program.mark_of(&bytes, 0);
    let first = program.used_at(to).expect("it was used");
    assert!((before..=now()).contains(&first));
    program.mark_of(&bytes, 0);
    assert_eq!(program.used_at(to), Some(first), "a moment later");
    std::thread::sleep(Duration::from_nanos(ENTRY_USED_EVERY_NS + 1));
    program.set(to, MARK, soon());
    assert_eq!(program.used_at(to), Some(first), "another end");
    program.mark_of(&bytes, 0);
    assert!(program.used_at(to) > Some(first), "a second later");
}

#[test]
fn nothing_is_marked_long_after_the_agent() {
    let Some(mut program) = load(&marking()) else {
        return;
    };
    let frame = syn();
    program.set(frame.dst.ip(), MARK, soon());
    let heartbeat = &mut program.capture.heartbeat;
    heartbeat.capture_until(now()).expect("it can be set");
    assert_eq!(program.mark_of(&frame.build(), MARK), 0);
}

#[test]
fn without_a_mask_the_mark_stays() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let frame = syn();
    program.set(frame.dst.ip(), MARK, soon());
    assert_eq!(program.mark_of(&frame.build(), MARK | 3), MARK | 3);
}

/// How often a frame is timed.
const RUNS: u32 = 500_000;

#[test]
#[ignore = "a measurement"]
fn what_a_mark_costs() {
    let mut data = syn();
    data.payload = vec![0; 1400];
    data.transport = Transport::Tcp {
        seq: 1,
        ack: 1,
        flags: TCP_ACK,
        options: 3,
    };
    for frame in [data.clone(), data.over_v6()] {
        let (to, bytes) = (frame.dst.ip(), frame.build());
        for (what, options, has_entry) in [
            ("nothing is marked", Options::default(), false),
            ("no entry", marking(), false),
            ("an entry", marking(), true),
        ] {
            let Some(mut program) = load(&options) else {
                return;
            };
            program.attend_for_long();
            if has_entry {
                program.set(to, MARK, soon());
            }
            // The least of some: whatever else runs here only adds.
            let runs = (0..7).map(|_| program.run(INGRESS, &bytes, RUNS).expect("runs").1);
            println!(
                "{to:<16} {what:<20} {:>5} ns",
                runs.min().unwrap_or_default()
            );
        }
    }
}
