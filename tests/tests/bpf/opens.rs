//! Which addresses the program on egress opens without the agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use aya::{TestRun as _, TestRunOptions, programs::SchedClassifier};
use dnsflow_agent::{
    capture::{Capture, Entries, EntryTimes, INGRESS, Networks, Options, Reading},
    clock::now,
};
use dnsflow_common::{
    Reason,
    key::{CLASSES_MAX, ClassKey, ENTRIES_MAX, EntryKey, NAME_SETS_MAX},
    opening::Message,
    question::{Depth, NameHash},
    walk::Version,
};
use dnsflow_core::{Timestamp, values::name::DomainName};
use dnsflow_tests::frames::{Fragment, Frame, Transport};
use ipnet::IpNet;
use proptest::{prelude::*, strategy::ValueTree as _, test_runner::TestRunner};

use crate::{
    Captured, Loaded, load,
    marks::{MARK, marking, syn_to},
    test_run::query_of,
};

/// The interface that programs under test run on, and one where nothing passes.
const IFINDEX: u32 = 1;
const OTHER: u32 = 2;

pub(crate) const A: u16 = 1;
const CNAME: u16 = 5;
pub(crate) const AAAA: u16 = 28;
const HTTPS: u16 = 65;

const NAME: &str = "www.example.com";

/// A pointer to the question's name (RFC 1035, section 4.1.4).
const POINTER: [u8; 2] = [0xc0, 12];

/// A name in wire format.
pub(crate) fn wire(name: &str) -> Vec<u8> {
    let labels = name.split('.').filter(|label| !label.is_empty());
    let mut wire: Vec<u8> = labels
        .flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat())
        .collect();
    wire.push(0);
    wire
}

/// A record of an answer.
#[derive(Clone)]
pub(crate) struct Record {
    pub(crate) owner: Vec<u8>,
    pub(crate) kind: u16,
    pub(crate) class: u16,
    pub(crate) ttl: u32,
    pub(crate) data: Vec<u8>,
}

/// An address of the name that was asked for.
pub(crate) fn at(address: impl Into<IpAddr>) -> Record {
    let (kind, data) = match address.into() {
        IpAddr::V4(address) => (A, address.octets().to_vec()),
        IpAddr::V6(address) => (AAAA, address.octets().to_vec()),
    };
    Record {
        owner: POINTER.to_vec(),
        kind,
        class: 1,
        ttl: 300,
        data,
    }
}

pub(crate) fn alias(owner: &str, target: &str) -> Record {
    Record {
        owner: wire(owner),
        kind: CNAME,
        class: 1,
        ttl: 60,
        data: wire(target),
    }
}

fn v4(last: u8) -> Ipv4Addr {
    [203, 0, 113, last].into()
}

fn v6(last: u16) -> Ipv6Addr {
    [0x2001, 0xdb8, 0, 0, 0, 0, 0, last].into()
}

/// The datagram that answers with these records.
pub(crate) fn answer(name: &[u8], asked: u16, records: &[Record]) -> Frame {
    let mut message = Vec::new();
    for word in [0x1234, 0x8180, 1, records.len() as u16, 0, 0] {
        message.extend(word.to_be_bytes());
    }
    message.extend(name);
    message.extend(asked.to_be_bytes());
    message.extend([0, 1]);
    for record in records {
        message.extend(&record.owner);
        message.extend(record.kind.to_be_bytes());
        message.extend(record.class.to_be_bytes());
        message.extend(record.ttl.to_be_bytes());
        message.extend((record.data.len() as u16).to_be_bytes());
        message.extend(&record.data);
    }
    Frame::to_pod(message)
}

/// The answer with the addresses of one name.
fn addresses(name: &str, addresses: impl IntoIterator<Item = u8>) -> Frame {
    let records: Vec<_> = addresses.into_iter().map(|last| at(v4(last))).collect();
    answer(&wire(name), A, &records)
}

impl Loaded {
    /// Lets the program open addresses of names that lie so below a base.
    pub(crate) fn open_class(&mut self, base: &str, depth: Depth, version: Version) {
        self.share_room();
        self.set_class(base, depth, version);
    }

    fn set_class(&mut self, base: &str, depth: Depth, version: Version) {
        let base: DomainName = base.parse().expect("a name");
        let key = ClassKey::new(self.at, NameHash::of(base.wire()), depth, version);
        let set = self
            .capture
            .classes
            .set(self.element, key, base.wire(), MARK);
        set.expect("the kernel has the maps");
        self.element += 1;
    }

    /// Lets the program open addresses as far as there is room for them.
    pub(crate) fn share_room(&mut self) {
        let shared = self.capture.entries.share(self.at, true);
        shared.expect("the kernel has the maps");
        self.read();
    }

    /// What becomes of an answer that was asked for.
    #[track_caller]
    fn answered(&mut self, answer: &Frame) -> (Reason, Option<Captured>) {
        self.ask(&query_of(answer).build());
        self.run_once(&answer.build())
    }

    /// The addresses that are open, and until when.
    pub(crate) fn open(&mut self) -> BTreeMap<IpAddr, Timestamp> {
        let at = self.at;
        let entries = self.read().into_iter().filter(|found| found.ifindex == at);
        let entries = entries.map(|found| {
            assert_eq!(found.mark, MARK);
            (found.address, found.until)
        });
        entries.collect()
    }

    /// Has the program open an answer, and checks that these are open by it.
    #[track_caller]
    fn opens(&mut self, answer: &Frame, expected: &[IpAddr]) {
        let before = self.open();
        let (reason, captured) = self.answered(answer);
        assert_eq!(reason, Reason::Opened);
        let captured = captured.expect("a record");
        assert_eq!(captured.bytes, answer.build());
        assert!(captured.opened && !captured.held);
        let mut open = self.open();
        open.retain(|address, _| !before.contains_key(address));
        assert_eq!(open.keys().copied().collect::<Vec<_>>(), expected);
    }

    /// Has the program leave an answer to the agent, and checks that it opens nothing.
    #[track_caller]
    fn leaves(&mut self, what: &str, answer: &Frame) {
        let before = self.open();
        let (reason, captured) = self.answered(answer);
        assert_eq!(reason, Reason::Held, "{what}");
        let captured = captured.expect("a record");
        assert!(captured.held && !captured.opened, "{what}");
        assert_eq!(self.open(), before, "{what}");
    }
}

const TIMES: EntryTimes = EntryTimes {
    least: 30,
    most: 100,
    more: 7,
};

/// With an agent that is well, rules that mention `example.com`, and the class of names one label below it.
fn opening() -> Option<Loaded> {
    let options = Options {
        entry_times: TIMES,
        ..marking()
    };
    let mut program = load(&options)?;
    program.filter(IFINDEX, &["example.com"]);
    program.beat_for_long();
    program.open_class("example.com", Depth::Child, Version::V4);
    program.open_class("example.com", Depth::Child, Version::V6);
    Some(program)
}

#[test]
fn addresses_of_a_class_are_open_when_the_answer_passes() {
    let Some(mut program) = opening() else {
        return;
    };
    let one = |last: u8| IpAddr::from(v4(last));
    program.opens(&addresses(NAME, [1]), &[one(1)]);
    program.opens(&addresses(NAME, [1, 2, 3]), &[one(2), one(3)]);
    program.opens(&addresses("API.Example.COM", [4]).over_v6(), &[one(4)]);
    let sixteen: Vec<_> = (16..32).map(one).collect();
    program.opens(&addresses(NAME, 16..32), &sixteen);
    let six: Vec<_> = (1..=16).map(|last| at(v6(last))).collect();
    let open: Vec<_> = (1..=16).map(|last| v6(last).into()).collect();
    program.opens(&answer(&wire(NAME), AAAA, &six), &open);
    // As CoreDNS writes it: no name is compressed.
    let mut chain = vec![alias(NAME, "cdn.test"), alias("cdn.test", "edge.cdn.test")];
    chain.extend([40, 41].map(|last| Record {
        owner: wire("edge.cdn.test"),
        ..at(v4(last))
    }));
    program.opens(&answer(&wire(NAME), A, &chain), &[one(40), one(41)]);
}

#[test]
fn an_entry_ends_as_that_of_the_agent() {
    let Some(mut program) = opening() else {
        return;
    };
    for (last, (ttl, seconds)) in [(0, 37), (29, 37), (50, 57), (101, 107), (1 << 31, 37)]
        .into_iter()
        .enumerate()
    {
        let last = last as u8;
        let with = |ttl, last| Record {
            ttl,
            ..at(v4(last))
        };
        // The shortest counts for all.
        let frame = answer(&wire(NAME), A, &[with(5000, last), with(ttl, 100 + last)]);
        let before = now();
        assert_eq!(program.answered(&frame).0, Reason::Opened);
        let after = now();
        for last in [last, 100 + last] {
            let until = program.open()[&v4(last).into()];
            let more = Duration::from_secs(seconds);
            assert!(before + more <= until && until <= after + more, "{ttl}");
        }
    }
}

/// What the program has made has the check of its own key.
#[test]
fn packets_to_what_the_kernel_opens_are_marked() {
    let Some(mut program) = opening() else {
        return;
    };
    let addresses: [IpAddr; 3] = [v4(1).into(), v4(2).into(), v4(3).to_ipv6_mapped().into()];
    let [one, two, mapped] = addresses;
    program.opens(&answer(&wire(NAME), A, &[at(one), at(two)]), &[one, two]);
    program.opens(&answer(&wire(NAME), AAAA, &[at(mapped)]), &[mapped]);
    for address in addresses {
        assert_eq!(program.mark_of(&syn_to(address), 7), MARK | 7, "{address}");
    }
}

/// The agent decides: what the program has looked up may have become another address's.
#[test]
fn an_element_of_another_key_is_left_to_the_agent() {
    let Some(mut program) = opening() else {
        return;
    };
    let key = |last: u8| EntryKey::new(IFINDEX, v4(last).into());
    program.reuse(v4(1).into(), &key(2), MARK);
    program.leaves("another key", &addresses(NAME, [1, 3]));
    program.reuse(v4(1).into(), &key(1), MARK);
    program.opens(&addresses(NAME, [1, 3]), &[v4(3).into()]);
}

/// An entry that has ended is as good as none. Without an agent, nobody else moves the end of another one on.
#[test]
fn an_entry_gets_a_new_end_where_the_agent_does_not_move_it_on() {
    let Some(mut program) = opening() else {
        return;
    };
    let addresses_of = |last| addresses(NAME, [last]);
    let long = Duration::from_secs(20);
    for (last, rest, is_agent_well) in [
        (1, Duration::ZERO, true),
        (2, Duration::ZERO, false),
        (3, long, false),
        (4, long, true),
    ] {
        program.heart_beats(is_agent_well);
        let until = now() + rest;
        program.set(v4(last).into(), MARK, until);
        let (reason, _) = program.answered(&addresses_of(last));
        assert_eq!(reason, Reason::Opened);
        let is_moved = program.open()[&v4(last).into()] > until;
        assert_eq!(is_moved, last != 4, "{last}");
    }
}

/// The class of a name is told by its bytes.
#[test]
fn what_is_no_name_of_a_class_is_left_to_the_agent() {
    let Some(mut program) = opening() else {
        return;
    };
    program.leaves("the base", &addresses("example.com", [1]));
    program.leaves("deeper", &addresses("a.b.example.com", [1]));
    program.filter(IFINDEX, &["example.com", "test", "api.example.com"]);
    program.leaves("another base", &addresses("www.test", [1]));
    program.leaves("a longer base", &addresses("www.api.example.com", [1]));
    program.leaves("the longer base", &addresses("api.example.com", [1]));
    program.opens(&addresses("notapi.example.com", [2]), &[v4(2).into()]);
    // Below `evil.test`, with length and hash of a name of the rules (found by reducing a lattice).
    let rule = "cdn10.shop.example.com";
    let label = b"\x0c:2\n&\n\n\x03\x07\x19\x07,\x16";
    let forged = [&label[..], &wire("evil.test")].concat();
    let hash = |name: &[u8]| NameHash::of(&name[..name.len() - 1]);
    assert_eq!(hash(&forged), hash(&wire(rule)));
    assert_eq!(forged.len(), wire(rule).len());
    program.filter(IFINDEX, &[rule]);
    program.open_class(rule, Depth::Child, Version::V4);
    let below = |base: &[u8]| answer(&[&wire("www")[..4], base].concat(), A, &[at(v4(3))]);
    program.leaves("a name with its hash", &below(&forged));
    program.opens(&below(&wire(rule)), &[v4(3).into()]);
    program.filter(IFINDEX, &["example.com"]);
    let key = |name: &str| {
        let hash = NameHash::of(&wire(name)[..wire(name).len() - 1]);
        ClassKey::new(IFINDEX, hash, Depth::Child, Version::V4)
    };
    let removed = program.capture.classes.remove(key("example.com"));
    removed.expect("the kernel has the map");
    program.leaves("a class that is gone", &addresses(NAME, [4]));
    let six = answer(&wire(NAME), AAAA, &[at(v6(4))]);
    program.opens(&six, &[v6(4).into()]);
}

#[test]
fn what_is_not_certain_is_left_to_the_agent() {
    let Some(mut program) = opening() else {
        return;
    };
    let records = |records: &[Record]| answer(&wire(NAME), A, records);
    let changed = |change: fn(&mut Frame)| {
        let mut frame = addresses(NAME, [1]);
        change(&mut frame);
        frame
    };
    let of = |owner: &str| Record {
        owner: wire(owner),
        ..at(v4(1))
    };
    for (what, frame) in [
        ("17 records", addresses(NAME, 1..18)),
        ("HTTPS", answer(&wire(NAME), HTTPS, &[at(v4(1))])),
        ("another type", records(&[at(v4(1)), at(v6(1))])),
        (
            "another class",
            records(&[Record {
                class: 3,
                ..at(v4(1))
            }]),
        ),
        ("an unrelated owner", records(&[of("other.example.com")])),
        ("an owner above", records(&[of("example.com")])),
        ("a chain that ends", records(&[alias(NAME, "a.test")])),
        (
            "a broken chain",
            records(&[alias(NAME, "a.test"), of("b.test")]),
        ),
        (
            "a chain behind addresses",
            records(&[at(v4(1)), alias(NAME, "a.test")]),
        ),
        (
            "a circle",
            records(&[alias(NAME, "a.test"), alias("a.test", NAME), at(v4(1))]),
        ),
        (
            "a long address",
            records(&[Record {
                data: vec![1; 5],
                ..at(v4(1))
            }]),
        ),
        ("TC", changed(|frame| frame.payload[2] |= 2)),
        (
            "a record that ends early",
            changed(|frame| frame.payload.truncate(frame.payload.len() - 1)),
        ),
        ("a tag", changed(|frame| frame.tags = vec![(0x8100, 5)])),
    ] {
        let before = program.open();
        let (reason, captured) = program.answered(&frame);
        assert!(
            matches!(reason, Reason::Held | Reason::Captured),
            "{what}: {reason}"
        );
        assert!(!captured.expect("a record").opened, "{what}");
        assert_eq!(program.open(), before, "{what}");
    }
    // Fragments, and TCP.
    for frame in [
        Frame {
            transport: Transport::Udp { len: Some(2408) },
            fragment: Some(Fragment {
                id: 77,
                offset: 0,
                more: true,
            }),
            ..addresses(NAME, [1])
        },
        Frame {
            transport: Transport::Tcp {
                seq: 7,
                ack: 0,
                flags: 0x10,
                options: 0,
            },
            ..addresses(NAME, [1])
        },
    ] {
        program.ask(&query_of(&frame).build());
        program.run(crate::EGRESS, &frame.build(), 1).expect("runs");
        program.drain();
        assert_eq!(program.open(), BTreeMap::new());
    }
    // What was not asked.
    let (reason, _) = program.run_once(&addresses("unasked.example.com", [1]).build());
    assert_ne!(reason, Reason::Opened);
    assert_eq!(program.open(), BTreeMap::new());
    program.opens(&addresses(NAME, [1]), &[v4(1).into()]);
}

#[test]
fn an_address_that_needs_the_agent_keeps_all_closed() {
    let Some(mut program) = opening() else {
        return;
    };
    let networks =
        ["203.0.113.128/25", "2001:db8::8/125"].map(|net| net.parse().expect("a network"));
    let all = networks.map(|network| (network, true)).into();
    let set = program.capture.networks.change(&all);
    set.expect("the kernel has the map");
    program.leaves("a network", &addresses(NAME, [1, 2, 128]));
    let six = |last| answer(&wire(NAME), AAAA, &[at(v6(1)), at(v6(last))]);
    program.leaves("a network", &six(15));
    program.opens(&six(16), &[v6(1).into(), v6(16).into()]);
    let gone = [(networks[0], false)].into();
    let set = program.capture.networks.change(&gone);
    set.expect("the kernel has the map");
    program.opens(&addresses(NAME, [128]), &[v4(128).into()]);
    let other = MARK ^ 0x0020_0000;
    let entries = &mut program.capture.entries;
    let until = now() + Duration::from_secs(60);
    entries
        .set(IFINDEX, v4(9).into(), other, until)
        .expect("it can be set");
    let (reason, _) = program.answered(&addresses(NAME, [8, 9]));
    assert_eq!(reason, Reason::Held);
    program
        .capture
        .entries
        .remove(IFINDEX, v4(9).into())
        .expect("it can be removed");
    program.opens(&addresses(NAME, [8, 9]), &[v4(8).into(), v4(9).into()]);
}

/// One Service has room for as many addresses (`externalIPs`), and a tenant has several Services.
#[test]
fn services_with_many_addresses_leave_the_kernel_most_of_the_others_to_open() {
    const LEFT: u32 = 4 * 65_536;
    let Some(mut program) = opening() else {
        return;
    };
    let left = |number: u32| IpAddr::from(Ipv4Addr::from(0x0b00_0000 + number));
    let leave = |program: &mut Loaded, is_left| {
        let all = (0..LEFT).map(|number| (left(number).into(), is_left));
        let changed = program.capture.networks.change(&all.collect());
        changed.expect("the kernel has the maps");
        assert!(program.capture.networks.has_all());
    };
    leave(&mut program, true);
    let of = |address| answer(&wire(NAME), A, &[at(address)]);
    for number in (0..LEFT).step_by(8191) {
        program.leaves("an address of a Service", &of(left(number)));
    }
    let opened = (0..=255).filter(|last| {
        let reason = program.answered(&of(v4(*last).into())).0;
        reason == Reason::Opened
    });
    // Of the bits, a 32nd is taken.
    assert!(opened.count() > 256 * 29 / 32);
    leave(&mut program, false);
    for number in (0..LEFT).step_by(8191) {
        let reason = program.answered(&of(left(number))).0;
        assert_eq!(reason, Reason::Opened, "{number}");
    }
}

/// As long as the agent is well, an answer whose record finds no room opens nothing.
#[test]
fn without_an_agent_addresses_are_opened_untold() {
    let options = Options {
        ring_bytes: 4096,
        ..marking()
    };
    let Some(mut program) = load(&options) else {
        return;
    };
    program.filter(IFINDEX, &["example.com"]);
    program.open_class("example.com", Depth::Child, Version::V4);
    let mut reason = Reason::Opened;
    let mut last = 0;
    while reason == Reason::Opened && last < 250 {
        last += 1;
        let frame = addresses(NAME, [last]);
        program.ask(&query_of(&frame).build());
        reason = program.reason(crate::EGRESS, &frame.build());
    }
    assert_eq!(reason, Reason::OpenedUntold);
    assert_eq!(program.open().len(), usize::from(last));
    program.beat_for_long();
    let frame = addresses(NAME, [251]);
    program.ask(&query_of(&frame).build());
    assert_eq!(
        program.reason(crate::EGRESS, &frame.build()),
        Reason::RingFull
    );
    assert_eq!(program.open().len(), usize::from(last));
}

/// The kernel has room for the counts of so many interfaces.
#[test]
fn an_interface_whose_count_was_refused_is_tried_again() {
    let Some(mut program) = load(&marking()) else {
        return;
    };
    program.filter(IFINDEX, &["example.com"]);
    program.beat_for_long();
    let entries = &mut program.capture.entries;
    let other = |number| IFINDEX + 1 + number;
    for number in 0..NAME_SETS_MAX {
        entries.share(other(number), true).expect("there is room");
    }
    entries.share(IFINDEX, true).expect_err("there is none");
    program.set_class("example.com", Depth::Child, Version::V4);
    let gone = program.capture.entries.share(other(0), false);
    gone.expect("the kernel has the maps");
    program.read();
    program.opens(&addresses(NAME, [1]), &[v4(1).into()]);
}

#[test]
fn an_interface_whose_count_is_refused_leaves_no_other_one_untold() {
    let Some(mut program) = opening() else {
        return;
    };
    let entries = &mut program.capture.entries;
    for number in 0..NAME_SETS_MAX - 1 {
        let shared = entries.share(OTHER + number, true);
        shared.expect("there is room");
    }
    let one_more = OTHER + NAME_SETS_MAX;
    entries.share(one_more, true).expect_err("there is none");
    entries.leave_no_room().expect_err("one is refused");
    assert_eq!(program.answered(&addresses(NAME, [1])).0, Reason::Held);
}

/// Runs the programs on an answer with the first address, again and again, beside changes of their maps. No agent is
/// well: an answer opens whether it finds room in the ring buffer or not.
fn answered_beside(
    left_out: &[(IpNet, bool)],
    change: impl FnOnce(&mut Entries, &mut Networks),
) -> Option<Loaded> {
    let options = Options {
        entry_times: TIMES,
        shares: false,
        ..marking()
    };
    let mut program = load(&options)?;
    program.filter(IFINDEX, &["example.com"]);
    program.open_class("example.com", Depth::Child, Version::V4);
    let left = program
        .capture
        .networks
        .change(&left_out.iter().copied().collect());
    left.expect("the kernel has the map");
    let frame = addresses(NAME, [1]);
    let frames = [query_of(&frame).build(), frame.build()];
    let Capture {
        attacher,
        entries,
        networks,
        ..
    } = &mut program.capture;
    let ebpf = attacher.attachments.program_mut().ebpf_mut();
    let programs = [INGRESS, crate::EGRESS].map(|name| -> &SchedClassifier {
        let program = ebpf.program(name).expect("the program");
        program.try_into().expect("a classifier")
    });
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                for (program, frame) in programs.iter().zip(&frames) {
                    let options = TestRunOptions {
                        data_in: Some(frame),
                        ..TestRunOptions::default()
                    };
                    program.test_run(options).expect("the kernel runs it");
                }
            }
        });
        change(entries, networks);
        is_over.store(true, Ordering::Relaxed);
    });
    Some(program)
}

/// The program has read the entry, and moves its end, when the agent sets another mark.
#[test]
fn a_mark_that_the_agent_sets_beside_the_program_stays() {
    const ROUNDS: usize = 20_000;
    let other = MARK ^ 0x0020_0000;
    let mut changed = 0;
    answered_beside(&[], |entries, _| {
        for _ in 0..ROUNDS {
            for mark in [MARK, other] {
                let until = now() + Duration::from_secs(10);
                // To panic here would leave the other thread running.
                let _ = entries.set(IFINDEX, v4(1).into(), mark, until);
            }
            let found = entries.read(&mut Reading::default());
            changed += usize::from(found.is_ok_and(|found| found[0].mark != other));
        }
    });
    assert_eq!(changed, 0);
}

/// Each of both networks has the address.
#[test]
fn an_address_of_a_network_in_place_of_another_one_is_opened_at_no_time() {
    const ROUNDS: usize = 20_000;
    let [one, other] = ["203.0.113.0/24", "203.0.112.0/23"].map(|net| net.parse().expect("one"));
    let mut refused = 0;
    let program = answered_beside(&[(one, true)], |_, networks| {
        for round in 0..ROUNDS {
            let (come, gone) = if round % 2 == 0 {
                (other, one)
            } else {
                (one, other)
            };
            let changed = networks.change(&[(come, true), (gone, false)].into());
            refused += usize::from(changed.is_err());
        }
    });
    if let Some(mut program) = program {
        assert_eq!((refused, program.open()), (0, BTreeMap::new()));
    }
}

/// The kernel may lack a longer name of the rules.
#[test]
fn without_a_name_set_nothing_is_opened() {
    let Some(mut program) = opening() else {
        return;
    };
    program.capture.names.set_name_set(IFINDEX, None);
    let (reason, captured) = program.answered(&addresses(NAME, [1]));
    assert_eq!(reason, Reason::Captured);
    assert!(!captured.expect("a record").opened);
    assert_eq!(program.open(), BTreeMap::new());
}

#[test]
fn without_marks_nothing_is_opened() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    program.filter(IFINDEX, &["example.com"]);
    program.beat_for_long();
    program.open_class("example.com", Depth::Child, Version::V4);
    assert_eq!(program.answered(&addresses(NAME, [1])).0, Reason::Held);
    assert_eq!(program.open(), BTreeMap::new());
}

/// Fills the map by another interface, but for so much. The agent has given out the room before.
fn fill(program: &mut Loaded, rest: u32) {
    let entries = &mut program.capture.entries;
    let until = now() + Duration::from_secs(60);
    let of = |number: u32| IpAddr::from(Ipv4Addr::from(0x0a00_0000 + number));
    let mut count = 0;
    while entries.set(OTHER, of(count), MARK, until).is_ok() {
        count += 1;
        assert!(count <= 2 * ENTRIES_MAX, "the map has a limit");
    }
    for number in count - rest..count {
        let removed = entries.remove(OTHER, of(number));
        removed.expect("it can be removed");
    }
}

/// Where the map has room for half of an answer, it gets none of it. Only an answer that the program has begun to open
/// meets this.
#[test]
fn entries_that_find_no_room_are_taken_back() {
    let Some(mut program) = opening() else {
        return;
    };
    fill(&mut program, 8);
    let (reason, captured) = program.answered(&addresses(NAME, 1..17));
    assert_eq!(reason, Reason::EntriesFull);
    assert!(captured.expect("a record").opened);
    assert_eq!(program.open(), BTreeMap::new());
    let eight = (1..9).map(|last| v4(last).into()).collect::<Vec<_>>();
    program.opens(&addresses(NAME, 1..9), &eight);
}

/// It is held, and the agent decides.
#[test]
fn an_answer_that_finds_no_room_is_left_to_the_agent() {
    let Some(mut program) = opening() else {
        return;
    };
    let shared = program.capture.entries.share(OTHER, true);
    shared.expect("the kernel has the maps");
    fill(&mut program, 24);
    program.read();
    // Half of it is the other interface's.
    program.leaves("more than the share", &addresses(NAME, 1..14));
    let twelve: Vec<_> = (1..13).map(|last| v4(last).into()).collect();
    program.opens(&addresses(NAME, 1..13), &twelve);
    // The kernel has refused a mark of the agent's. Known addresses need no room.
    let entries = &mut program.capture.entries;
    entries.leave_no_room().expect("the kernel has the map");
    assert_eq!(program.answered(&addresses(NAME, [17])).0, Reason::Held);
    assert_eq!(program.answered(&addresses(NAME, [1, 2])).0, Reason::Opened);
    program.drain();
    assert_eq!(program.open().len(), 12);
    // That reading has given out the rest.
    program.opens(&addresses(NAME, [1, 2, 17]), &[v4(17).into()]);
}

#[test]
fn an_interface_has_so_many_entries_whoever_makes_them() {
    let options = Options {
        entries_per_interface: 20,
        ..marking()
    };
    let Some(mut program) = load(&options) else {
        return;
    };
    program.filter(IFINDEX, &["example.com"]);
    program.beat_for_long();
    let opened = |program: &mut Loaded, numbers: Range<u8>| {
        let (reason, captured) = program.answered(&addresses(NAME, numbers));
        assert_eq!(captured.expect("a record").opened, reason == Reason::Opened);
        reason == Reason::Opened
    };
    program.open_class("example.com", Depth::Child, Version::V4);
    assert!(opened(&mut program, 0..16));
    assert!(!opened(&mut program, 16..21));
    assert!(opened(&mut program, 16..18));
    // What the agent adds and removes counts at once, and a reading finds the same.
    for is_read in [false, true] {
        program.set(v4(100).into(), MARK, now() + Duration::from_secs(60));
        program.capture.entries.tell_room().expect("it is told");
        if is_read {
            program.read();
        }
        assert!(!opened(&mut program, 200..202), "{is_read}");
        let entries = &mut program.capture.entries;
        for address in [v4(100), v4(0)] {
            let removed = entries.remove(IFINDEX, address.into());
            removed.expect("it can be removed");
        }
        entries.tell_room().expect("it is told");
        assert!(opened(&mut program, 0..1), "{is_read}");
        if is_read {
            program.read();
        }
        assert!(!opened(&mut program, 200..203), "{is_read}");
    }
    program.capture.entries.share(IFINDEX, false).expect("told");
    assert!(!opened(&mut program, 200..201), "nobody has counted");
}

/// Nobody reads the ring buffer, and the pod asks for new addresses as long as it likes.
#[test]
fn a_pod_leaves_no_more_entries_than_it_may_have() {
    let options = Options {
        ring_bytes: 4096,
        shares: false,
        ..marking()
    };
    let Some(mut program) = load(&options) else {
        return;
    };
    program.filter(IFINDEX, &["example.com"]);
    program.open_class("example.com", Depth::Child, Version::V4);
    let most = options.entries_per_interface as usize;
    let mut reasons = BTreeMap::new();
    for number in 0..most / 16 + 32 {
        let sixteen =
            (0..16).map(|last| at(Ipv4Addr::from(0x0a00_0000 + number as u32 * 16 + last)));
        let frame = answer(&wire(NAME), A, &sixteen.collect::<Vec<_>>());
        program.ask(&query_of(&frame).build());
        let reason = program.reason(crate::EGRESS, &frame.build());
        *reasons.entry(reason).or_insert(0_usize) += 1;
    }
    assert_eq!(program.open().len(), most, "{reasons:?}");
    assert!(reasons[&Reason::OpenedUntold] > reasons[&Reason::Opened]);
    assert_eq!(reasons[&Reason::RingFull], 32);
}

/// The kernel has room for all elements that the core gives out, and for no other.
#[test]
fn each_element_can_be_that_of_a_class() {
    let Some(mut program) = load(&marking()) else {
        return;
    };
    program.filter(IFINDEX, &["example.com"]);
    program.beat_for_long();
    program.share_room();
    let classes = &mut program.capture.classes;
    let base: DomainName = "example.com".parse().expect("a name");
    let key = |ifindex| {
        let hash = NameHash::of(base.wire());
        ClassKey::new(ifindex, hash, Depth::Child, Version::V4)
    };
    let mut set = |element, ifindex| classes.set(element, key(ifindex), base.wire(), MARK);
    for element in 0..CLASSES_MAX - 1 {
        set(element, IFINDEX + 1 + element).expect("there is room");
    }
    let last = CLASSES_MAX - 1;
    set(last, IFINDEX).expect("there is room");
    let further = IFINDEX + CLASSES_MAX;
    set(CLASSES_MAX, further).expect_err("there is no such element");
    set(0, further).expect_err("there is no room for another key");
    program.opens(&addresses(NAME, [1]), &[v4(1).into()]);
    let classes = &mut program.capture.classes;
    classes.remove(key(IFINDEX)).expect("it is there");
    let set = classes.set(last, key(further), base.wire(), MARK);
    set.expect("there is room again");
    program.leaves("a class that is gone", &addresses(NAME, [2]));
    let (gone, refused) = program.capture.classes.clear();
    assert_eq!(gone, (0..CLASSES_MAX).collect());
    assert!(refused.is_empty());
}

/// What the kernel opens is what the same code reads here, whatever a message says.
#[test]
fn kernel_and_host_read_the_same() {
    let options = Options {
        entry_times: EntryTimes {
            least: 0,
            most: u32::MAX,
            more: 0,
        },
        shares: false,
        ..marking()
    };
    let Some(mut program) = load(&options) else {
        return;
    };
    program.filter(IFINDEX, &["test"]);
    program.beat_for_long();
    for version in [Version::V4, Version::V6] {
        program.open_class("test", Depth::Child, version);
    }
    let names = Just(["a.test", "b.a.test", "c.d", "www.example.com"]);
    let messages = (
        names,
        1..=4_usize,
        any::<bool>(),
        prop::collection::vec(1..3600_u32, 4..18),
        prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
    );
    let mut runner = TestRunner::deterministic();
    let (mut opened, mut left) = (0, 0);
    for _ in 0..2000 {
        let (names, length, is_v6, ttls, changed) =
            messages.new_tree(&mut runner).expect("a value").current();
        let kind = if is_v6 { AAAA } else { A };
        let aliases = names[..length]
            .windows(2)
            .map(|pair| alias(pair[0], pair[1]));
        let addresses = (length..=ttls.len()).map(|last| Record {
            owner: wire(names[length - 1]),
            ..if is_v6 {
                at(v6(last as u16))
            } else {
                at(v4(last as u8))
            }
        });
        let records = aliases.chain(addresses).zip(&ttls);
        let records: Vec<_> = records
            .map(|(record, ttl)| Record {
                ttl: *ttl,
                ..record
            })
            .collect();
        let mut frame = answer(&wire(names[0]), kind, &records);
        let question_end = 12 + wire(names[0]).len() + 4;
        for (index, byte) in &changed {
            let place = index.index(frame.payload.len() - question_end);
            frame.payload[question_end + place] = *byte;
        }
        let mut message = Message::default();
        message.bytes_mut()[..frame.payload.len()].copy_from_slice(&frame.payload);
        let read = message.read(frame.payload.len() as u32, wire(names[0]).len() as u32 - 1);
        let before = now();
        let (reason, _) = program.answered(&frame);
        assert_eq!(reason == Reason::Opened, read.is_some(), "{frame:?}");
        let expected: BTreeSet<IpAddr> = (0..read.map_or(0, |()| message.count()))
            .map(|number| EntryKey::told(1, message.version(), message.address(number)).address())
            .collect();
        let open = program.open();
        assert_eq!(open.keys().copied().collect::<BTreeSet<_>>(), expected);
        let ttl = Duration::from_secs(message.ttl().into());
        for (address, until) in open {
            assert!(before + ttl <= until && until <= now() + ttl, "{frame:?}");
            let removed = program.capture.entries.remove(IFINDEX, address);
            removed.expect("it can be removed");
        }
        *if read.is_some() {
            &mut opened
        } else {
            &mut left
        } += 1;
    }
    assert!(opened > 200 && left > 200, "{opened} opened, {left} left");
}

/// `docs/internals/packets.md` shows what this prints: the same answer held for the agent, and opened, by turns.
#[test]
#[ignore = "a measurement"]
fn what_opening_costs() {
    const ROUNDS: u32 = 5000;
    let options = Options {
        ring_bytes: 1 << 30,
        shares: false,
        ..marking()
    };
    let Some(mut program) = load(&options) else {
        return;
    };
    program.filter(IFINDEX, &["example.com"]);
    program.beat_for_long();
    program.attend_for_long();
    program.open_class("example.com", Depth::Child, Version::V4);
    let frame = |name: &str, aliases: bool, records: u32, first: u32| {
        let chain = [alias(name, "cdn.test"), alias("cdn.test", "edge.cdn.test")];
        let owner = if aliases {
            wire("edge.cdn.test")
        } else {
            wire(name)
        };
        let addresses = (first..first + records).map(|address| Record {
            owner: owner.clone(),
            ..at(Ipv4Addr::from(0x0a00_0000 + address))
        });
        let chain = chain.into_iter().filter(|_| aliases);
        let records: Vec<_> = chain.chain(addresses).collect();
        answer(&wire(name), A, &records)
    };
    for (aliases, records) in [(false, 1), (false, 4), (true, 4), (false, 16)] {
        let mut times = [(); 3].map(|()| Vec::new());
        for round in 0..ROUNDS {
            let new = 1000 + round * records;
            for (times, (name, first, reason)) in times.iter_mut().zip([
                ("a.b.example.com", 0, Reason::Held),
                ("www.example.com", 0, Reason::Opened),
                ("www.example.com", new, Reason::Opened),
            ]) {
                let frame = frame(name, aliases, records, first);
                program.ask(&query_of(&frame).build());
                let before = program.capture.counters.of(reason).expect("read");
                let (_, time) = program.run(crate::EGRESS, &frame.build(), 1).expect("runs");
                let after = program.capture.counters.of(reason).expect("read");
                assert_eq!(after, before + 1, "{reason}");
                times.push(time);
            }
            for address in new..new + records {
                let address = Ipv4Addr::from(0x0a00_0000 + address).into();
                let removed = program.capture.entries.remove(IFINDEX, address);
                removed.expect("it can be removed");
            }
            program.capture.entries.tell_room().expect("it is told");
        }
        let [held, known, new] = times.map(|mut times| {
            times.sort_unstable();
            times[times.len() / 2]
        });
        let what = if aliases { "two CNAMEs, " } else { "" };
        println!("{what}{records} addresses: held {held} ns; opened {known} ns, new {new} ns");
    }
}
