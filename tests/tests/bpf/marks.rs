//! The verdict in a packet's mark.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU32,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use aya::{
    TestRun as _, TestRunOptions,
    maps::{HashMap, Map, MapData, MapInfo},
    programs::SchedClassifier,
};
use dnsflow_agent::capture::{Capture, INGRESS, Options, Reading};
use dnsflow_common::{
    key::{ENTRY_USED_EVERY_NS, Entry, EntryKey},
    walk::{TCP_ACK, TCP_SYN},
};
use dnsflow_core::{Timestamp, io::input::MarkFound};
use dnsflow_tests::frames::{Extension, Fragment, Frame, Transport};

use crate::{CONTINUE, Loaded, load};

pub(crate) const MASK: u32 = 0xffe0_0000;
pub(crate) const MARK: u32 = 0x8a20_0000;
const OTHER_MARK: u32 = 0x8a40_0000;
/// This namespace's loopback interface.
const IFINDEX: u32 = 1;

type Key = [u8; size_of::<EntryKey>()];
type Value = [u8; size_of::<Entry>()];

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

#[track_caller]
fn mark_by(ingress: &SchedClassifier, frame: &[u8], before: u32) -> u32 {
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
    let result = ingress.test_run(options).expect("runs");
    assert_eq!(result.return_value, CONTINUE);
    let mark: [u8; 4] = after[8..12].try_into().expect("four bytes");
    u32::from_ne_bytes(mark)
}

impl Loaded {
    /// The mark of a packet behind the program on ingress; `before` is the mark in front of it.
    #[track_caller]
    pub(crate) fn mark_of(&mut self, frame: &[u8], before: u32) -> u32 {
        mark_by(self.program(INGRESS), frame, before)
    }

    pub(crate) fn set(&mut self, address: IpAddr, mark: u32, until: Timestamp) {
        let entries = &mut self.capture.entries;
        entries
            .set(IFINDEX, address, mark, until)
            .expect("it can be set");
    }

    /// Makes the entry of an address the one of another key, as a program finds an element that it has looked up, and
    /// that the kernel has given to the other key since.
    pub(crate) fn reuse(&mut self, address: IpAddr, other: &EntryKey, mark: u32) {
        let maps = self.program(INGRESS).info().and_then(|info| info.map_ids());
        let maps = maps.expect("the kernel describes it").unwrap_or_default();
        let is_it = |id: &u32| MapInfo::from_id(*id).is_ok_and(|map| map.name() == b"ENTRIES");
        let map = maps.into_iter().find(is_it).expect("the program has it");
        let map = Map::HashMap(MapData::from_id(map).expect("the kernel has it"));
        let mut map: HashMap<_, Key, Value> = map.try_into().expect("its types");
        let key: Key = zerocopy::transmute!(EntryKey::new(IFINDEX, address));
        let entry: Value = zerocopy::transmute!(Entry::new(other, mark, soon().as_nanos()));
        map.insert(key, entry, 0).expect("written");
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

/// A packet to this address.
pub(crate) fn syn_to(address: IpAddr) -> Vec<u8> {
    let mut frame = match address {
        IpAddr::V4(_) => syn(),
        IpAddr::V6(_) => syn().over_v6(),
    };
    frame.dst.set_ip(address);
    frame.build()
}

/// The forms of addresses: IPv4, in IPv6 with a prefix of IPv4-mapped addresses and of NAT64 (RFC 6052), and IPv6.
const FORMS: [[&str; 2]; 4] = [
    ["203.0.113.1", "203.0.113.2"],
    ["::ffff:203.0.113.1", "::ffff:203.0.113.2"],
    ["64:ff9b::203.0.113.1", "64:ff9b::203.0.113.2"],
    ["2001:db8:a:b::1", "2001:db8:a:c::1"],
];

#[test]
fn an_element_of_another_key_marks_nothing_and_is_not_used() {
    let Some(mut program) = load(&marking()) else {
        return;
    };
    let forms = FORMS.map(|form| form.map(|address| address.parse::<IpAddr>().expect("one")));
    for [to, other] in forms {
        let others = forms
            .as_flattened()
            .iter()
            .filter(|address| **address != to);
        let keys = others.map(|address| EntryKey::new(IFINDEX, *address));
        for key in keys.chain([EntryKey::new(IFINDEX + 1, to)]) {
            program.reuse(to, &key, MARK);
            assert_eq!(program.mark_of(&syn_to(to), MARK | 7), 7, "{to}, {key:?}");
            assert_eq!(program.used_at(to), None, "{to}, {key:?}");
        }
        program.reuse(to, &EntryKey::new(IFINDEX, to), MARK);
        program.set(other, OTHER_MARK, soon());
        assert_eq!(program.mark_of(&syn_to(to), 7), MARK | 7, "{to}");
        assert!(program.used_at(to).is_some(), "{to}");
        assert_eq!(program.mark_of(&syn_to(other), 7), OTHER_MARK | 7);
    }
}

/// Without the check, one of some million packets has the other mark.
#[test]
#[ignore = "takes long to find a fault"]
fn a_packet_never_has_the_mark_of_an_address_that_comes_beside_it() {
    const RUNS_FOR: Duration = Duration::from_secs(100);
    let Some(mut program) = load(&marking()) else {
        return;
    };
    let [to, other] = FORMS[0].map(|address| address.parse().expect("one"));
    let frame = syn_to(to);
    let Capture {
        attacher, entries, ..
    } = &mut program.capture;
    let ebpf = attacher.attachments.program_mut().ebpf_mut();
    let ingress = ebpf.program(INGRESS).expect("the program");
    let ingress: &SchedClassifier = ingress.try_into().expect("a classifier");
    let is_over = AtomicBool::new(false);
    let marks = thread::scope(|scope| {
        let packets = scope.spawn(|| {
            let mut marks = BTreeMap::new();
            while !is_over.load(Ordering::Relaxed) {
                *marks.entry(mark_by(ingress, &frame, 0)).or_insert(0) += 1;
            }
            marks
        });
        let begun = Instant::now();
        while begun.elapsed() < RUNS_FOR {
            // The kernel gives the element of one to the other. To panic here would leave the other thread running.
            for (address, mark) in [(to, MARK), (other, OTHER_MARK)] {
                let _ = entries.set(IFINDEX, address, mark, soon());
                let _ = entries.remove(IFINDEX, address);
            }
        }
        is_over.store(true, Ordering::Relaxed);
        packets.join().expect("no panic")
    });
    println!("packets by their marks: {marks:x?}");
    assert!(marks.contains_key(&MARK));
    assert_eq!(marks.get(&OTHER_MARK), None);
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
    thread::sleep(Duration::from_nanos(ENTRY_USED_EVERY_NS + 1));
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
