//! What pods have in common in the kernel: what one takes from the others, and what several take together.

use std::{thread, time::Duration};

use aya::maps::HashMap;
use dnsflow_agent::{
    capture::{EGRESS, INGRESS, Options, RING_BYTES},
    clock::now,
};
use dnsflow_common::{
    Reason,
    key::{
        AttemptKey, FRAGMENTS_MAX, FragmentKey, HELD_MAX, HeldKey, NETWORKS_MAX, PENDING_MAX,
        Pending, SHARES_MAX, Share, SlotKey,
    },
    question::Depth,
    record::{ATTEMPTS_MAX, DEFER_BURST, DEFERRED_MAX},
    walk::{TCP_ACK, TCP_SYN, Version},
};
use dnsflow_core::{ovn::rows::RowId, values::connection::PendingQuery};
use dnsflow_tests::frames::{Fragment, Frame, Transport};
use ipnet::{IpNet, Ipv4Net};
use zerocopy::FromBytes as _;

use crate::{
    CONTINUE, Loaded, load,
    marks::marking,
    netns::{add_veth, ifindex},
    test_run::{answer, query_of},
    unshared, with_veth,
};

/// The interface of the pod that takes what it can.
const FLOODING: u32 = 1;

/// A TCP segment from the DNS server with so much data.
fn segment(seq: u32, data: usize) -> Vec<u8> {
    let segment = Frame {
        transport: Transport::Tcp {
            seq,
            ack: 0,
            flags: TCP_ACK,
            options: 0,
        },
        payload: vec![7; data],
        ..answer()
    };
    segment.build()
}

impl Loaded {
    /// The agent has read the ring buffer for the last time: no share of it comes back.
    fn nobody_reads(&mut self) {
        let before = now().checked_sub(Duration::from_secs(10)).expect("later");
        self.capture.heartbeat.reads(before).expect("the map");
    }

    fn count(&self, reason: Reason) -> u64 {
        self.capture.counters.of(reason).expect("read")
    }

    /// Sends the pod at an interface twice what the ring buffer takes.
    fn flood(&mut self, ifindex: u32) {
        self.at = ifindex;
        let frame = segment(1, 1400);
        let runs = 2 * RING_BYTES / frame.len() as u32;
        self.run(EGRESS, &frame, runs).expect("runs");
    }

    /// The keys in a map of the programs.
    fn keys<const KEY: usize, const VALUE: usize>(&mut self, map: &str) -> Vec<[u8; KEY]> {
        let map = self.ebpf().map_mut(map).expect("the map");
        let map: HashMap<_, [u8; KEY], [u8; VALUE]> = map.try_into().expect("its types");
        map.keys().collect::<Result<_, _>>().expect("read")
    }

    fn pending_at(&self, ifindex: u32) -> Vec<PendingQuery> {
        self.capture.queries.of(ifindex).expect("read")
    }
}

/// The pods' answers that nobody has read are those that the next agent learns of.
#[test]
fn while_nobody_reads_a_pod_has_its_burst_and_no_more() {
    with_veth(&Options::default(), |mut program| {
        let other = ifindex("host");
        program.trust_at(other);
        program.nobody_reads();
        program.flood(FLOODING);
        let captured = program.count(Reason::Captured);
        assert!(captured > 0);
        thread::sleep(Duration::from_millis(200));
        program.flood(FLOODING);
        assert_eq!(program.count(Reason::Captured), captured, "came back");
        assert_eq!(program.count(Reason::RingFull), 0);
        program.at = other;
        let frame = segment(1, 100);
        assert_eq!(program.reason(EGRESS, &frame), Reason::Captured);
        // The next agent reads.
        program.drain();
        program.capture.heartbeat.reads(now()).expect("the map");
        program.at = FLOODING;
        assert_eq!(program.reason(EGRESS, &frame), Reason::Captured);
    });
}

#[test]
fn three_pods_leave_room_in_the_ring_buffer_and_five_do_not() {
    with_veth(&Options::default(), |mut program| {
        add_veth("host2", "pod2", 1500);
        add_veth("host3", "pod3", 1500);
        program.nobody_reads();
        let pods = ["host", "pod", "host2", "pod2"].map(ifindex);
        let other = ifindex("host3");
        for ifindex in pods.into_iter().chain([other]) {
            program.trust_at(ifindex);
        }
        program.flood(FLOODING);
        program.flood(pods[0]);
        program.flood(pods[1]);
        assert_eq!(program.count(Reason::RingFull), 0);
        program.flood(pods[2]);
        program.flood(pods[3]);
        let full = program.count(Reason::RingFull);
        assert!(full > 0);
        program.at = other;
        let (verdict, _) = program.run(EGRESS, &segment(1, 1400), 1).expect("runs");
        assert_eq!(verdict, CONTINUE, "it passes");
        assert_eq!(program.count(Reason::RingFull), full + 1, "unseen");
    });
}

/// By marks, the programs go on to open addresses without an agent, also for a pod that has asked much.
#[test]
fn beyond_its_share_a_pod_without_an_agent_has_addresses_opened_untold() {
    let Some(mut program) = load(&marking()) else {
        return;
    };
    program.filter(FLOODING, &["example.com"]);
    program.open_class("example.com", Depth::Child, Version::V4);
    program.nobody_reads();
    let (asked, frame) = (query_of(&answer()).build(), answer().build());
    let opened = |program: &mut Loaded| {
        program.ask(&asked);
        program.reason(EGRESS, &frame)
    };
    let mut reason = Reason::Opened;
    // As long as its share lasts.
    for _ in 0..RING_BYTES / 256 {
        if reason == Reason::Opened {
            reason = opened(&mut program);
        }
    }
    assert_eq!(reason, Reason::OpenedUntold);
    program.beat_for_long();
    assert_eq!(opened(&mut program), Reason::OverShare, "with an agent");
}

/// A share that gave way would begin anew: with all of its burst, and with no segments left out.
#[test]
fn no_interface_takes_the_share_of_another_one() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    program.nobody_reads();
    program.flood(FLOODING);
    let frame = segment(1, 1400);
    assert_eq!(program.reason(EGRESS, &frame), Reason::OverShare);
    let map = program.ebpf().map_mut("SHARES").expect("the map");
    let map: Result<HashMap<_, u32, [u8; size_of::<Share>()]>, _> = map.try_into();
    let mut map = map.expect("its types");
    for ifindex in 2..4 * SHARES_MAX {
        // Beyond the limit there is no room.
        let _ = map.insert(ifindex, [0; size_of::<Share>()], 0);
    }
    assert_eq!(program.reason(EGRESS, &frame), Reason::OverShare);
}

/// Pods that come and go do not fill the maps.
#[test]
fn what_is_remembered_of_an_interface_goes_with_it() {
    with_veth(&Options::default(), |mut program| {
        let host = ifindex("host");
        program.attached("host");
        program.at = host;
        let (asked, answer) = (query_of(&answer()).build(), answer().build());
        program.run(INGRESS, &asked, 1).expect("runs");
        assert_eq!(program.pending_at(host).len(), 1);
        program.flood(host);
        let left_out = program.capture.shares.left_out().expect("read");
        assert!(left_out.contains_key(&host));
        let attachments = &mut program.capture.attacher.attachments;
        attachments.detach(RowId::new(1));
        assert_eq!(program.pending_at(host), []);
        let of_host = |key: &[u8; 4]| u32::from_ne_bytes(*key) == host;
        let shares = program.keys::<4, { size_of::<Share>() }>("SHARES");
        assert!(!shares.iter().any(of_host));
        // Answers count no longer without a question, although the program was attached just now.
        program.trust_at(host);
        let captured = program.count(Reason::Captured);
        program.run(EGRESS, &answer, 1).expect("runs");
        assert_eq!(program.count(Reason::Captured), captured);
    });
}

/// The map has room for what 256 pods ask without being answered.
#[test]
fn questions_of_256_pods_give_way_to_that_of_another_one() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    const VALUE: usize = size_of::<Pending>();
    let map = program.ebpf().map_mut("PENDING").expect("the map");
    let map: Result<HashMap<_, [u8; 8], [u8; VALUE]>, _> = map.try_into();
    let mut map = map.expect("its types");
    for number in 0..PENDING_MAX {
        let slot = SlotKey {
            ifindex: 1000 + number / 512,
            slot: number % 512,
        };
        let slot: [u8; 8] = zerocopy::transmute!(slot);
        map.insert(slot, [7; VALUE], 0).expect("room");
    }
    assert_eq!(
        program.ask(&query_of(&answer()).build()),
        Reason::QueryRecorded
    );
    let others = program.keys::<8, VALUE>("PENDING").len() - 1;
    assert!(others < PENDING_MAX as usize, "{others}");
    assert_eq!(program.run_once(&answer().build()).0, Reason::Captured);
}

#[test]
fn a_pod_that_is_sent_fragments_pushes_out_none_of_another() {
    with_veth(&Options::default(), |mut program| {
        let other = ifindex("host");
        program.trust_at(other);
        program.nobody_reads();
        let mut first = answer();
        first.payload.resize(1400, 0);
        first.transport = Transport::Udp { len: Some(4000) };
        let asked = query_of(&answer()).build();
        let mut begins = |program: &mut Loaded, ifindex, id| {
            first.fragment = Some(Fragment {
                id,
                offset: 0,
                more: true,
            });
            program.at = ifindex;
            program.run(INGRESS, &asked, 1).expect("runs");
            program.run(EGRESS, &first.build(), 1).expect("runs");
        };
        begins(&mut program, other, 1);
        for id in 0..FRAGMENTS_MAX + 4000 {
            begins(&mut program, FLOODING, id);
        }
        let keys = program.keys::<{ size_of::<FragmentKey>() }, 8>("FRAGMENTS");
        let keys = keys.iter().map(|key| {
            let key = FragmentKey::read_from_bytes(key);
            key.expect("its length").ifindex
        });
        let (of_other, of_flooding): (Vec<_>, Vec<_>) = keys.partition(|at| *at == other);
        assert_eq!(of_other.len(), 1);
        // What was captured, and no more.
        let captured = program.count(Reason::Captured);
        assert_eq!(of_flooding.len() as u64, captured - 1);
    });
}

/// A frame that was forgotten would be held again, if another program takes the mark off it.
#[test]
fn a_pod_that_is_sent_segments_pushes_out_no_held_frame_of_another() {
    with_veth(&Options::default(), |mut program| {
        let other = ifindex("host");
        program.trust_at(other);
        program.beat_for_long();
        program.nobody_reads();
        for ifindex in [FLOODING, other] {
            program.filter(ifindex, &["example.com"]);
        }
        program.at = other;
        program.run(EGRESS, &segment(1, 1400), 1).expect("runs");
        program.at = FLOODING;
        for seq in 0..HELD_MAX + 4000 {
            program.run(EGRESS, &segment(seq, 1400), 1).expect("runs");
        }
        let keys = program.keys::<{ size_of::<HeldKey>() }, 8>("HELD");
        let keys = keys.iter().map(|key| {
            let key = HeldKey::read_from_bytes(key);
            key.expect("its length").ifindex
        });
        let (of_other, of_flooding): (Vec<_>, Vec<_>) = keys.partition(|at| *at == other);
        assert_eq!(of_other.len(), 1);
        let held = program.count(Reason::Held);
        assert_eq!(of_flooding.len() as u64, held - 1);
    });
}

/// Many pods together push out attempts of others. The agent is told of these once more, and loses none.
#[test]
fn an_attempt_that_gave_way_is_told_of_again() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    program.capture.watched.set(FLOODING, true);
    let mut syn = Frame::from_pod(Vec::new());
    syn.dst.set_port(443);
    syn.transport = Transport::Tcp {
        seq: 1,
        ack: 0,
        flags: TCP_SYN,
        options: 5,
    };
    let syn = syn.build();
    assert_eq!(program.ask(&syn), Reason::Attempt);
    let map = program.ebpf().map_mut("ATTEMPTS").expect("the map");
    let map: Result<HashMap<_, [u8; size_of::<AttemptKey>()], u64>, _> = map.try_into();
    let mut map = map.expect("its types");
    for number in 0..2 * ATTEMPTS_MAX {
        let mut key = [0xee; size_of::<AttemptKey>()];
        key[..4].copy_from_slice(&number.to_ne_bytes());
        map.insert(key, now().as_nanos(), 0).expect("room");
    }
    assert_eq!(program.ask(&syn), Reason::Attempt);
}

/// A rule may come that mentions the names of the others' answers.
#[test]
fn a_pod_takes_no_room_of_deferred_answers_from_another() {
    with_veth(&unshared(), |mut program| {
        let other = ifindex("host");
        program.trust_at(other);
        for ifindex in [FLOODING, other] {
            program.filter(ifindex, &[]);
        }
        let (asked, answer) = (query_of(&answer()).build(), answer().build());
        let defer = |program: &mut Loaded, ifindex| {
            program.at = ifindex;
            program.run(INGRESS, &asked, 1).expect("runs");
            program.run(EGRESS, &answer, 1).expect("runs");
        };
        for _ in 0..3 {
            defer(&mut program, other);
        }
        // As often as the agent looks, with no more in between than a pod has at once.
        let times = 2 * u64::from(DEFERRED_MAX) / DEFER_BURST;
        for _ in 0..times {
            for _ in 0..DEFER_BURST {
                defer(&mut program, FLOODING);
            }
            program.capture.deferred.collect().expect("read");
        }
        let (mut of_other, mut of_flooding) = (0, 0);
        let deferred = &mut program.capture.deferred;
        let replayed = deferred.replay(|frame| {
            let count = match frame.ifindex == other {
                true => &mut of_other,
                false => &mut of_flooding,
            };
            *count += 1;
            true
        });
        replayed.expect("read");
        assert_eq!((of_other, of_flooding), (3, DEFERRED_MAX - 3));
        // What an interface has left goes with it, also what the agent has not looked at.
        defer(&mut program, FLOODING);
        let deferred = &mut program.capture.deferred;
        deferred.forget_interface(FLOODING).expect("read");
        let mut left = Vec::new();
        let replayed = deferred.replay(|frame| {
            left.push(frame.ifindex);
            true
        });
        replayed.expect("read");
        assert_eq!(left, [other; 3]);
    });
}

/// There is room for all that the agent may know, if the kernel has memory. Without, the agent lets the kernel open
/// nothing.
#[test]
fn networks_beyond_those_there_is_room_for_are_known_to_be_missing() {
    let Some(mut program) = load(&marking()) else {
        return;
    };
    let network = |number: u32| {
        let address = (0x0a00_0000 + (number << 8)).into();
        IpNet::V4(Ipv4Net::new(address, 24).expect("a length"))
    };
    let networks = &mut program.capture.networks;
    let all = (0..=NETWORKS_MAX).map(|number| (network(number), true));
    assert!(networks.change(&all.collect()).is_err());
    assert!(!networks.has_all());
    let fewer = [(network(0), false)].into();
    networks.change(&fewer).expect("room");
    assert!(networks.has_all());
}
