//! The program on a real veth, in a network namespace of its own.

use std::{
    fs, io,
    net::Ipv4Addr,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use dnsflow_agent::{
    capture::{
        self, Attach as _, AttachError, AttachKind, Attacher, CaptureError, EGRESS, LinkEvent,
        Options, UNASKED_GRACE, survey,
    },
    clock::now,
};
use dnsflow_common::Reason;
use dnsflow_core::{Input, Timestamp, ovn::rows::RowId};
use dnsflow_tests::{
    frames::{Answer, Extension, Fragment, Frame, Transport},
    process::{PATIENT, wait_until},
    support::{LEFT_TO_VM, not_run, this_test},
};

use crate::{
    Loaded, load, load_kept,
    netns::{
        FilterPlace, Wire, add_foreign_filter, add_qdisc_at_ingress, add_veth, add_vlan, ifindex,
        in_new_netns, remove_link,
    },
    own_addresses,
    test_run::query_of,
    with_veth,
};
use rustix::{
    mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change, mount_remount},
    thread::{UnshareFlags, unshare_unsafe},
};

const ROW: RowId = RowId::new(1);
const START: Timestamp = Timestamp::from_nanos(0);

fn answer() -> Frame {
    Frame::to_pod(Answer::new("www.example.com", &[Ipv4Addr::new(192, 0, 2, 1)]).build())
}

/// The pod asks and is answered.
#[track_caller]
pub(crate) fn exchange(host: &Wire, pod: &Wire, answer: &Frame) {
    let query = query_of(answer).build();
    pod.send(&query);
    host.expect(&query);
    let answer = answer.build();
    host.send(&answer);
    pod.expect(&answer);
}

impl Loaded {
    pub(crate) fn attach(&mut self, name: &str) -> Input {
        self.attach_to_row(ROW, name)
    }

    /// Attaches the programs to the interface of a row, and leaves those of other rows.
    fn attach_to_row(&mut self, row: RowId, name: &str) -> Input {
        let attachments = &mut self.capture.attacher.attachments;
        let found = attachments.attach(row, name.into(), own_addresses(), START);
        self.work().pop().unwrap_or(found)
    }

    pub(crate) fn work(&mut self) -> Vec<Input> {
        let attachments = &mut self.capture.attacher.attachments;
        let mut told = Vec::new();
        while attachments.has_work() {
            told.extend(attachments.work(now()));
        }
        told
    }

    #[track_caller]
    pub(crate) fn attached(&mut self, name: &str) {
        self.attached_to_row(ROW, name);
    }

    #[track_caller]
    pub(crate) fn attached_to_row(&mut self, row: RowId, name: &str) {
        let input = self.attach_to_row(row, name);
        let Input::Attached { ifindex: found, .. } = input else {
            panic!("{input:?}");
        };
        assert_eq!(found, ifindex(name));
    }

    /// Attached for so long that only answers to questions that were seen count.
    #[track_caller]
    pub(crate) fn attached_for_a_while(&mut self, name: &str) {
        self.attached(name);
        std::thread::sleep(UNASKED_GRACE + Duration::from_millis(10));
    }

    pub(crate) fn captured(&self) -> u64 {
        self.capture.counters.of(Reason::Captured).expect("read")
    }
}

pub(crate) fn by(attach: Option<AttachKind>) -> Options {
    Options {
        attach,
        ..Options::default()
    }
}

/// What holds for both ways to attach.
fn across_the_wire(attach: Option<AttachKind>) {
    with_veth(&by(attach), |mut program| {
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        exchange(&host, &pod, &answer());
        assert_eq!(program.captured(), 0, "not attached yet");

        program.attached("host");
        println!(
            "attached by {:?}",
            program.capture.attacher.attachments.program().kind()
        );
        exchange(&host, &pod, &answer());
        let records = program.drain();
        assert_eq!(records.len(), 1);
        assert_eq!(records[0].bytes, answer().build());
        assert_eq!(records[0].ifindex, ifindex("host"));

        // In the other direction, an answer is none.
        let (frame, before) = (answer().turned().build(), program.counters());
        pod.send(&frame);
        host.expect(&frame);
        assert_eq!(program.captured(), 1);
        assert_ne!(
            program.counters()[1],
            before[1],
            "counted by the other program"
        );

        program.capture.attacher.attachments.detach(ROW);
        let before = program.counters();
        exchange(&host, &pod, &answer());
        assert_eq!(program.counters(), before, "detached");
    });
}

#[test]
fn a_packet_across_a_veth_is_captured() {
    across_the_wire(None);
}

#[test]
fn a_packet_across_a_veth_is_captured_with_clsact() {
    across_the_wire(Some(AttachKind::Clsact));
}

#[test]
fn a_long_frame_in_pieces_is_captured_whole() {
    in_new_netns(|| {
        let Some(mut program) = load(&Options::default()) else {
            return;
        };
        add_veth("host", "pod", 65_535);
        program.attached("host");
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        // A packet socket keeps what is beyond a page outside the skb's linear part
        // (`packet_alloc_skb` in Linux net/packet/af_packet.c). The last one is as long as IPv4 can.
        for payload_len in [9000, 16_384, 32_768, 60_000, 65_535 - 20 - 8] {
            let mut frame = answer();
            frame.payload.resize_with(payload_len, {
                let mut next = 0u8;
                move || {
                    next = next.wrapping_add(1);
                    next
                }
            });
            exchange(&host, &pod, &frame);
            let frame = frame.build();
            let records = program.drain();
            assert_eq!(records.len(), 1, "payload of {payload_len}");
            assert!(records[0].bytes == frame, "payload of {payload_len}");
        }
    });
}

#[test]
fn a_tagged_query_does_not_count() {
    with_veth(&Options::default(), |mut program| {
        program.attached_for_a_while("host");
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        // The kernel takes the tag out of the frame before the program on ingress sees it
        // (`skb_vlan_untag` in Linux net/core/dev.c).
        let mut query = query_of(&answer());
        query.tags = vec![(0x8100, 5)];
        let bytes = query.build();
        pod.send(&bytes);
        host.expect_any(&[bytes, query_of(&answer()).build()]);
        let [_, from_pod] = program.counters();
        let tagged = from_pod
            .iter()
            .find(|(reason, _)| *reason == Reason::Tagged);
        assert_eq!(tagged.map(|it| it.1), Some(1));
        let frame = answer().build();
        host.send(&frame);
        pod.expect(&frame);
        assert_eq!(program.drain().len(), 0);
    });
}

#[test]
fn a_tag_that_the_kernel_keeps_beside_the_frame_is_none_within() {
    with_veth(&Options::default(), |mut program| {
        if let Err(error) = add_vlan("tagged", "host", 5) {
            let why = format!("this kernel makes no VLAN interface: {error}");
            not_run(&this_test(), format!("{why}; {LEFT_TO_VM}"));
            return;
        }
        program.attached("host");
        let (tagged, pod) = (Wire::open("tagged"), Wire::open("pod"));
        // The kernel takes the tag out of the frame before the program on ingress sees it.
        let mut query = query_of(&answer());
        query.tags = vec![(0x8100, 5)];
        pod.send(&query.build());
        tagged.expect(&query_of(&answer()).build());
        // And puts it in behind the program on egress.
        let frame = answer().build();
        tagged.send(&frame);
        let mut in_line = answer();
        in_line.tags = vec![(0x8100, 5)];
        let records = program.drain();
        assert_eq!(records.len(), 1);
        assert!(records[0].bytes == frame || records[0].bytes == in_line.build());
    });
}

#[test]
fn every_length_names_the_header_it_ends_in() {
    with_veth(&Options::default(), |mut program| {
        program.attached("host");
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        let options = Extension::Options {
            protocol: 60,
            len: 0,
        };
        let v4 = Frame {
            tags: vec![(0x88a8, 5), (0x8100, 6)],
            options: vec![1; 12],
            ..answer()
        };
        let v6 = Frame {
            extensions: vec![options; 2],
            ..answer().over_v6()
        };
        let tcp = Frame {
            transport: Transport::Tcp {
                seq: 7,
                ack: 0,
                flags: 0x10,
                options: 3,
            },
            ..answer()
        };
        // Nothing sends a frame without a whole Ethernet header: there the host walk is tested
        // alone.
        let question = "www.example.com".len() + 2 + 4;
        for (frame, ends) in [
            (
                &v4,
                &[
                    (Reason::TruncatedVlan, 8),
                    (Reason::TruncatedIpv4, 32),
                    (Reason::TruncatedUdp, 8),
                    (Reason::TruncatedDns, 12),
                    (Reason::TruncatedQuestion, question),
                ][..],
            ),
            (
                &v6,
                &[
                    (Reason::TruncatedIpv6, 40),
                    (Reason::TruncatedExtension, 16),
                    (Reason::TruncatedUdp, 8),
                    (Reason::TruncatedDns, 12),
                    (Reason::TruncatedQuestion, question),
                ],
            ),
            (
                &tcp,
                &[(Reason::TruncatedIpv4, 20), (Reason::TruncatedTcp, 32)],
            ),
        ] {
            let query = query_of(frame).build();
            let whole = frame.build();
            let ends = ends
                .iter()
                .flat_map(|(reason, len)| std::iter::repeat_n(*reason, *len))
                .chain(std::iter::repeat(Reason::Captured));
            for (len, expected) in (14..=whole.len()).zip(ends) {
                let frame = &whole[..len];
                pod.send(&query);
                host.expect(&query);
                let before = program.capture.counters.of(expected).expect("read");
                // The program has run when the frame is sent.
                host.send(frame);
                let counted = program.capture.counters.of(expected).expect("read") - before;
                assert_eq!(counted, 1, "length {len}, {expected}");
                let captured: Vec<_> = program.drain().into_iter().map(|it| it.bytes).collect();
                let wanted: &[_] = match expected {
                    Reason::Captured => &[frame.to_vec()],
                    _ => &[],
                };
                assert_eq!(captured, wanted, "length {len}");
            }
        }
    });
}

#[test]
fn fragments_follow_their_first_one() {
    with_veth(&Options::default(), |mut program| {
        program.attached_for_a_while("host");
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        for answer in [answer(), answer().over_v6()] {
            let mut whole = answer.payload.clone();
            whole.resize(2408 - 8, 0xee);
            let fragment = |id, offset, more| Frame {
                fragment: Some(Fragment { id, offset, more }),
                extensions: vec![Extension::Fragment],
                ..answer.clone()
            };
            let first = Frame {
                transport: Transport::Udp { len: Some(2408) },
                payload: whole[..1200 - 8].to_vec(),
                ..fragment(9, 0, true)
            };
            let later = |id, offset: u16, more| Frame {
                transport: Transport::Nothing,
                payload: whole[usize::from(offset) * 8 - 8..][..8].to_vec(),
                ..fragment(id, offset, more)
            };
            let query = query_of(&answer).build();
            pod.send(&query);
            host.expect(&query);
            let mut send = |frame: &Frame| {
                let frame = frame.build();
                host.send(&frame);
                pod.expect(&frame);
                program.drain().into_iter().any(|it| it.bytes == frame)
            };
            assert!(!send(&later(9, 150, true)), "before its first");
            assert!(send(&first));
            assert!(send(&later(9, 150, true)));
            assert!(send(&later(9, 151, false)));
            assert!(!send(&later(10, 150, true)), "of another datagram");
            assert!(!send(&first), "the query is used up");
        }
        let unexpected = program.capture.counters.of(Reason::UnexpectedFragment);
        assert_eq!(unexpected.expect("read"), 4);
    });
}

#[test]
fn a_veth_that_comes_later_is_attached_by_its_event() {
    in_new_netns(|| {
        let Some(mut program) = load(&Options::default()) else {
            return;
        };
        let Input::AttachFailed { reason, .. } = program.attach("host") else {
            panic!("there is no such interface yet");
        };
        assert_eq!(reason, "there is no interface host (yet)");
        add_veth("host", "pod", 1500);
        let news = link_news(&mut program);
        assert!(matches!(news[..], [Input::Attached { .. }]), "{news:?}");

        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        exchange(&host, &pod, &answer());
        assert_eq!(program.captured(), 1);

        // The same name, another interface.
        remove_link("host");
        add_veth("host", "pod", 1500);
        link_news(&mut program);
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        exchange(&host, &pod, &answer());
        assert_eq!(program.captured(), 2);
    });
}

#[test]
fn a_question_asked_before_it_could_be_seen_is_answered() {
    with_veth(&Options::default(), |mut program| {
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        let frame = answer().build();
        let send = |program: &mut Loaded| {
            host.send(&frame);
            pod.expect(&frame);
            program.drain().len()
        };
        let attachments = &mut program.capture.attacher.attachments;
        attachments.attach(ROW, "host".into(), own_addresses(), START);
        assert!(attachments.work(now()).is_none(), "one of the programs");
        assert_eq!(send(&mut program), 1, "nobody saw the question");
        assert_eq!(program.work().len(), 1, "both");
        assert_eq!(send(&mut program), 1, "asked just before");
        std::thread::sleep(UNASKED_GRACE + Duration::from_millis(10));
        assert_eq!(send(&mut program), 0, "never asked");
        let unasked = program.capture.counters.of(Reason::NotAsked);
        assert_eq!(unasked.expect("read"), 1);
    });
}

/// Feeds the events of interfaces that have happened to the attachments.
fn link_news(program: &mut Loaded) -> Vec<Input> {
    let Attacher { attachments, links } = &mut program.capture.attacher;
    program.runtime.block_on(async {
        let mut events: Vec<LinkEvent> = Vec::new();
        tokio::time::timeout(PATIENT, links.readable())
            .await
            .expect("an event")
            .expect("the runtime runs");
        links
            .drain(|event| events.push(event))
            .expect("the socket can be read");
        for event in &events {
            attachments.link_event(event, START);
        }
    });
    program.work()
}

#[test]
fn a_filter_that_a_killed_agent_left_is_replaced() {
    in_new_netns(|| {
        let clsact = by(Some(AttachKind::Clsact));
        let (Some(mut killed), Some(mut program)) = (load(&clsact), load(&clsact)) else {
            return;
        };
        add_veth("host", "pod", 1500);
        // One that is only forgotten leaves its filter, as one that is killed does.
        killed.attached("host");
        program.attached("host");
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        exchange(&host, &pod, &answer());
        assert_eq!((killed.captured(), program.captured()), (0, 1));
    });
}

#[test]
fn a_filter_is_replaced_in_one_step() {
    in_new_netns(|| {
        let options = Options {
            shares: false,
            ..by(Some(AttachKind::Clsact))
        };
        let (Some(mut killed), Some(mut program)) = (load(&options), load(&options)) else {
            return;
        };
        add_veth("host", "pod", 1500);
        killed.attached("host");
        let host = Wire::open("host");
        let frame = answer().build();
        let stop = AtomicBool::new(false);
        let sent = thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let mut sent = 0;
                while !stop.load(Ordering::Relaxed) && sent < 10_000 {
                    host.send(&frame);
                    sent += 1;
                    thread::sleep(Duration::from_micros(20));
                }
                sent
            });
            thread::sleep(Duration::from_millis(50));
            program.attached("host");
            thread::sleep(Duration::from_millis(50));
            stop.store(true, Ordering::Relaxed);
            sending.join().expect("no panic")
        });
        let (before, after) = (killed.captured(), program.captured());
        assert!(before > 0 && after > 0, "{before} and {after} of {sent}");
        assert_eq!(before + after, sent);
    });
}

#[test]
fn two_agents_see_the_same_packets_with_tcx() {
    in_new_netns(|| {
        let (Some(mut one), Some(mut other)) = (load(&by(None)), load(&by(None))) else {
            return;
        };
        add_veth("host", "pod", 1500);
        one.attached("host");
        other.attached("host");
        if one.capture.attacher.attachments.program().kind() != Some(AttachKind::Tcx) {
            not_run(&this_test(), "this kernel has no TCX");
            return;
        }
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        exchange(&host, &pod, &answer());
        // The first verdict lets the second program run.
        assert_eq!((one.captured(), other.captured()), (1, 1));
    });
}

#[test]
fn no_frame_is_lost_while_a_program_is_attached_with_tcx() {
    with_veth(&by(None), |mut program| {
        let attachments = &mut program.capture.attacher.attachments;
        if !attachments.program_mut().kernel_has_tcx().expect("known") {
            not_run(&this_test(), "this kernel has no TCX");
            return;
        }
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    exchange(&host, &pod, &answer());
                }
            });
            for _ in 0..10 {
                program.attached("host");
                program.capture.attacher.attachments.detach(ROW);
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert_ne!(program.captured(), 0, "frames came while it was attached");
    });
}

#[test]
fn an_ingress_qdisc_in_the_way_of_clsact_is_named() {
    with_veth(&by(Some(AttachKind::Clsact)), |mut program| {
        add_qdisc_at_ingress(ifindex("host"), "ingress");
        let input = program.attach("host");
        let Input::AttachFailed { reason, .. } = input else {
            panic!("{input:?}");
        };
        assert!(reason.contains("a qdisc of kind ingress"), "{reason}");
    });
}

#[test]
fn the_filters_that_agents_left_can_be_taken_away() {
    for others in [false, true] {
        in_new_netns(|| {
            let Some(mut killed) = load(&by(Some(AttachKind::Clsact))) else {
                return;
            };
            add_veth("host", "pod", 1500);
            assert_eq!(capture::left_filters().expect("a list"), []);
            killed.attached("host");
            if others {
                add_foreign_filter(ifindex("host"), FilterPlace::egress(100));
            }
            let left = capture::left_filters().expect("a list");
            assert_eq!(left.len(), 1);
            assert_eq!(left[0].interface, "host");
            left[0].remove().expect("the kernel removes them");

            let before = killed.counters();
            exchange(&Wire::open("host"), &Wire::open("pod"), &answer());
            assert_eq!(killed.counters(), before);
            assert_eq!(capture::left_filters().expect("a list"), []);
            let standing = survey::ingress_qdisc(ifindex("host")).expect("an answer");
            assert_eq!(standing.as_deref(), others.then_some("clsact"));
        });
    }
}

/// Where this thread mounts a BPF file system of its own.
const BPF_FS: &str = "/sys/fs/bpf";

/// Runs `test` with a directory for what outlives an agent, and a veth, both of this thread's own.
pub(crate) fn with_pins(test: impl FnOnce(&Path) + Send) {
    in_new_netns(|| {
        let own_bpf_fs = || -> io::Result<()> {
            // SAFETY: new mounts of this thread leave memory and file descriptors as they are.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            mount_change("/", private)?;
            Ok(mount("bpf", BPF_FS, "bpf", MountFlags::empty(), None)?)
        };
        if let Err(error) = own_bpf_fs() {
            not_run(
                &this_test(),
                format!("cannot mount a BPF file system: {error}"),
            );
            return;
        }
        add_veth("host", "pod", 1500);
        test(&Path::new(BPF_FS).join("dnsflow"));
    });
}

/// Whether the programs were attached by links; a word about it, if not.
pub(crate) fn is_tcx(program: &Loaded) -> bool {
    let kind = program.capture.attacher.attachments.program().kind();
    if kind != Some(AttachKind::Tcx) {
        not_run(&this_test(), "this kernel has no TCX");
    }
    kind == Some(AttachKind::Tcx)
}

/// An agent that can keep nothing in this part of its directory takes over what an earlier agent has kept there.
fn taken_over_read_only(part: &str) {
    with_pins(|dir| {
        let Some(mut earlier) = load_kept(&Options::default(), Some(dir)) else {
            return;
        };
        earlier.attached("host");
        if !is_tcx(&earlier) {
            return;
        }
        drop(earlier);
        let part = dir.join(part);
        mount_bind(&part, &part).expect("mounted");
        let read_only = MountFlags::BIND | MountFlags::RDONLY;
        mount_remount(&part, read_only, "").expect("mounted");

        let mut program = load_kept(&Options::default(), Some(dir)).expect("as before");
        // One that there was no program on before.
        add_veth("later", "later-pod", 1500);
        let later = RowId::new(2);
        let attachments = &mut program.capture.attacher.attachments;
        attachments.attach(later, "later".into(), own_addresses(), START);
        program.work();
        let retry_at = now() + Duration::from_secs(10);
        let attachments = &mut program.capture.attacher.attachments;
        attachments.handle_timeout(retry_at);
        program.work();
        let attachments = &mut program.capture.attacher.attachments;
        let found = attachments.attach(later, "later".into(), own_addresses(), START);
        assert!(matches!(found, Input::Attached { .. }), "{found:?}");

        program.attached_for_a_while("host");
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        exchange(&host, &pod, &answer());
        assert_eq!(program.captured(), 1);
        // The file stays, and the program with it.
        program.capture.attacher.attachments.detach(ROW);
        program.attached_for_a_while("host");
        exchange(&host, &pod, &answer());
        assert_eq!(program.captured(), 2);
    });
}

#[test]
fn programs_are_taken_over_where_nothing_can_be_kept() {
    taken_over_read_only("");
}

#[test]
fn programs_are_taken_over_where_no_link_can_be_kept() {
    taken_over_read_only("links");
}

/// As the kubelet makes and mounts the only directory of the BPF file system that a container of the agent has.
#[test]
fn a_directory_that_the_kubelet_has_made_is_closed_to_other_users() {
    with_pins(|dir| {
        fs::create_dir(dir).expect("created");
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).expect("changed");
        mount_bind(dir, dir).expect("mounted");
        let Some(mut program) = load_kept(&Options::default(), Some(dir)) else {
            return;
        };
        program.attached("host");
        let mode = fs::metadata(dir).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        drop(program);
        capture::remove_pins(dir).expect("removed");
        assert_eq!(fs::read_dir(dir).expect("still mounted").count(), 0);
    });
}

#[test]
fn a_veth_that_is_replaced_meanwhile_keeps_no_program() {
    with_pins(|dir| {
        let Some(mut program) = load_kept(&Options::default(), Some(dir)) else {
            return;
        };
        let other = ifindex("host") + 100;
        let attached = program
            .capture
            .attacher
            .attachments
            .program_mut()
            .attach("host", other);
        assert!(
            matches!(attached, Err(AttachError::NoInterface { .. })),
            "{attached:?}"
        );
        // The kernel takes a link off its interface in a work queue, a moment after the link's file is gone
        // (`bpf_link_put` in Linux kernel/bpf/syscall.c). Until then the same program cannot be attached again.
        wait_until("the program to be attached again", PATIENT, || {
            let found = program.attach("host");
            let attachments = &mut program.capture.attacher.attachments;
            attachments.handle_timeout(now() + Duration::from_secs(10));
            Ok(matches!(found, Input::Attached { .. }))
        })
        .expect("nothing is on the interface");
    });
}

/// Takes over an answer that an agent held when it ended, so long after; it is still held or not.
fn held_by_an_earlier_agent(later: Duration, expected: bool) {
    with_pins(|dir| {
        let Some(mut killed) = load_kept(&Options::default(), Some(dir)) else {
            return;
        };
        killed.attached("host");
        killed.filter(1, &["example.com"]);
        killed.beat_for_long();
        let answer = answer();
        killed.ask(&query_of(&answer).build());
        assert_eq!(killed.reason(EGRESS, &answer.build()), Reason::Held);
        // An emulated kernel takes seconds for the next load.
        let at = now();
        drop(killed);

        let mut program = load_kept(&Options::default(), Some(dir)).expect("as before");
        let mut found = Vec::new();
        for mut left in program.capture.left.drain(..) {
            left.drain(usize::MAX, at + later, |frame| {
                found.push((frame.bytes.to_vec(), frame.held));
                true
            });
            left.remove();
        }
        assert_eq!(found, [(answer.build(), expected)]);
    });
}

#[test]
fn what_was_held_when_an_agent_ended_goes_back_as_long_as_pods_wait() {
    held_by_an_earlier_agent(Duration::ZERO, true);
    held_by_an_earlier_agent(Duration::from_secs(2), false);
}

#[test]
fn a_process_without_rights_is_told_what_it_needs() {
    if !rustix::process::geteuid().is_root() {
        not_run(&this_test(), "only root can give its rights away");
        return;
    }
    let told = std::thread::spawn(|| {
        let nobody = 65_534;
        // SAFETY: plain integers. The system call, other than libc's function of the same name,
        // changes this thread alone; with root's user id go its capabilities.
        let dropped = unsafe { libc::syscall(libc::SYS_setresuid, nobody, nobody, nobody) };
        assert_eq!(dropped, 0);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let _guard = runtime.enter();
        capture::load(&Options::default(), runtime.handle()).map(|_| ())
    })
    .join()
    .expect("no panic");
    let error = told.expect_err("no rights");
    assert!(matches!(error, CaptureError::Permission(_)), "{error:?}");
    assert!(error.to_string().contains("CAP_BPF"), "{error}");
}
