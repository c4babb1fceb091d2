//! The kernel and the host run the same walk over the same frames, and must agree on each.

use std::collections::BTreeMap;

use dnsflow_agent::replay::kernel::{Kernel, Sent};
use dnsflow_common::{
    Reason,
    key::{ResolverKey, SourceKey},
    question::NameHash,
    walk::{Ports, TCP_ACK, TCP_FIN, TCP_SYN},
};
use dnsflow_core::values::name::DomainName;
use dnsflow_tests::frames::{Answer, Extension, Fragment, Frame, POD_MAC, Transport};
use proptest::{prelude::*, strategy::ValueTree as _, test_runner::TestRunner};

use crate::{
    load, own_addresses, resolvers,
    test_run::{query_of, skipped},
    unshared,
};

/// Newer kernels refuse to run a program on frames that end within their IPv4 or IPv6 header
/// (`bpf_prog_test_run_skb` in Linux net/bpf/test_run.c); [`crate::attach`] sends those.
const ALWAYS_RUNS: usize = 14 + 40;

/// The kernel runs programs under test on this namespace's loopback interface.
const IFINDEX: u32 = 1;

/// How often each reason was met.
type Met = BTreeMap<Reason, u32>;

fn extension() -> impl Strategy<Value = Extension> {
    // Programs under test run on frames of a page at most.
    let options = |protocol| {
        prop_oneof![4 => 0u8..3, 1 => Just(20)]
            .prop_map(move |len| Extension::Options { protocol, len })
    };
    prop_oneof![
        options(0),
        options(43),
        options(60),
        Just(Extension::Fragment)
    ]
}

fn transport() -> impl Strategy<Value = Transport> {
    prop_oneof![
        6 => Just(Transport::Udp { len: None }),
        // A first fragment of something longer, or a lie.
        2 => Just(Transport::Udp { len: Some(4000) }),
        2 => (0u8..6, prop::sample::select(vec![TCP_ACK, TCP_SYN, TCP_FIN])).prop_map(
            |(options, flags)| Transport::Tcp { seq: 1, ack: 0, flags, options }
        ),
        1 => Just(Transport::Nothing),
    ]
}

fn fragment() -> impl Strategy<Value = Option<Fragment>> {
    let fragment = (0u16..3, any::<bool>());
    prop::option::weighted(
        0.4,
        fragment.prop_map(|(offset, more)| Fragment {
            id: 0,
            offset,
            more,
        }),
    )
}

/// Answers with every combination of what may be around them.
fn answers() -> impl Strategy<Value = Frame> {
    let tag = (prop::sample::select(vec![0x8100u16, 0x88a8]), any::<u16>());
    let name = prop::collection::vec("[a-bA-B]{1,2}", 1..20).prop_map(|labels| labels.join("."));
    (
        (
            any::<bool>(),
            prop::collection::vec(tag, 0..=3),
            prop::collection::vec(any::<u32>(), 0..=10),
            prop::collection::vec(extension(), 0..=3),
            prop_oneof![9 => Just(None), 1 => prop::collection::vec(extension(), 5..=7).prop_map(Some)],
        ),
        (transport(), fragment(), name, any::<bool>()),
    )
        .prop_map(
            |((v6, tags, options, extensions, many), (transport, fragment, name, port))| {
                let mut frame = Frame::to_pod(Answer::new(&name, &[[192, 0, 2, 1].into()]).build());
                frame.tags = tags;
                frame.options = options.iter().flat_map(|word| word.to_be_bytes()).collect();
                frame.extensions = many.unwrap_or(extensions);
                frame.transport = transport;
                frame.fragment = fragment;
                if port {
                    frame.dst.set_port(40_001);
                }
                if v6 { frame.over_v6() } else { frame }
            },
        )
}

fn hash(name: &str) -> NameHash {
    let name: DomainName = name.parse().expect("a name");
    NameHash::of(name.wire())
}

#[test]
fn kernel_and_host_agree() {
    let sent = [
        Reason::QueryRecorded,
        Reason::Captured,
        Reason::ForeignAddress,
        Reason::Tagged,
        Reason::UntrustedResolver,
        Reason::FragmentedQuery,
        Reason::FragmentedTcp,
        Reason::NotQuery,
    ];
    agree(false, &sent);
}

#[test]
fn kernel_and_host_agree_on_attempts() {
    let sent = [
        Reason::QueryRecorded,
        Reason::Attempt,
        Reason::ForeignAddress,
        Reason::Tagged,
    ];
    agree(true, &sent);
}

/// Runs both over the same frames. What pods send has to meet with each of the reasons in `sent`.
fn agree(is_watched: bool, sent: &[Reason]) {
    let Some(mut program) = load(&unshared()) else {
        return;
    };
    program.capture.watched.set(IFINDEX, is_watched);
    let rules = ["a", "b.b", "aa.ab"];
    program.filter(1, &rules);
    let [a, b, c, d, e, f] = POD_MAC;
    let own = own_addresses().ips.into_iter();
    let own = own.map(|ip| (SourceKey::new(IFINDEX, ip), [a, b, c, d, e, f, 0, 0]));
    let mut model = Kernel::new(Ports::DNS);
    let trusted = resolvers(53).map(|(ip, port)| ResolverKey::new(ip, port));
    model.resolvers = trusted.into();
    model.names = Some(rules.map(hash).into());
    model.sources = own.collect();
    model.is_watched = is_watched;
    let (mut met, mut met_sent) = (Met::new(), Met::new());
    let mut egress = |frame: &[u8], model: &mut Kernel, program: &mut crate::Loaded| -> Reason {
        let (reason, captured) = program.run_once(frame);
        let expected = model.egress(IFINDEX, frame).err();
        assert_eq!(reason, expected.unwrap_or(Reason::Captured), "{frame:02x?}");
        let expected = (reason == Reason::Captured).then_some(frame);
        assert_eq!(captured.as_ref().map(|it| &it.bytes[..]), expected);
        *met.entry(reason).or_default() += 1;
        reason
    };
    for (expected, frame) in skipped() {
        let reason = egress(&frame, &mut model, &mut program);
        assert_eq!(reason, expected, "{frame:02x?}");
    }
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let changes = prop_oneof![2 => Just(Vec::new()), 1 => changes];
    let len = prop_oneof![3 => Just(None), 1 => any::<prop::sample::Index>().prop_map(Some)];
    let strategy = (answers(), changes, len);
    let mut runner = TestRunner::deterministic();
    for id in 0..4000 {
        let (mut answer, changes, len) = strategy.new_tree(&mut runner).expect("a frame").current();
        // The kernel forgets after a second, the model does not: no datagram comes twice.
        if let Some(fragment) = &mut answer.fragment {
            fragment.id = id;
        }
        let mut query = query_of(&answer);
        let with_records = answer.clone();
        // Some by TCP, in pieces, with a tag, or from elsewhere.
        match id % 16 {
            0 => query.transport = answer.transport,
            1 => query.tags.clone_from(&answer.tags),
            2 => query.fragment = answer.fragment,
            3 => query.src.set_port(1),
            4 => query.mac_src[5] ^= 1,
            5 => (query.transport, query.fragment) = (answer.transport, answer.fragment),
            // Some answers without records, with the same answer behind, but with records.
            6 => answer.payload[3] |= 3,
            7 => answer.payload[7] = 0,
            _ => {}
        }
        let mut asked = query.build();
        let mut frame = answer.build();
        for (at, value) in &changes {
            // Every other change goes to the query.
            let bytes = if value % 2 == 0 {
                &mut frame
            } else {
                &mut asked
            };
            let at = at.index(bytes.len());
            bytes[at] = *value;
        }
        if let Some(len) = len {
            let len = ALWAYS_RUNS + len.index(frame.len());
            frame.resize(len, 0);
        }
        asked.resize(asked.len().max(ALWAYS_RUNS), 0);
        frame.resize(frame.len().max(ALWAYS_RUNS), 0);
        let decided = program.ask(&asked);
        let expected = match model.ingress(IFINDEX, &asked) {
            Ok(Sent::Question) => Reason::QueryRecorded,
            Ok(Sent::Segment) => Reason::Captured,
            // The model has no time: it tells of each attempt.
            Ok(Sent::Attempt(..)) if decided == Reason::AttemptKnown => decided,
            Ok(Sent::Attempt(..)) => Reason::Attempt,
            Err(reason) => reason,
        };
        assert_eq!(decided, expected, "{asked:02x?}");
        let captured = program.drain();
        assert_eq!(captured.len(), usize::from(decided == Reason::Captured));
        assert!(captured.iter().all(|it| it.from_pod && it.bytes == asked));
        *met_sent.entry(decided).or_default() += 1;
        egress(&frame, &mut model, &mut program);
        if matches!(id % 16, 6 | 7) {
            let mut frame = with_records.build();
            frame.resize(frame.len().max(ALWAYS_RUNS), 0);
            egress(&frame, &mut model, &mut program);
        }
    }
    for reason in [
        Reason::Captured,
        Reason::TooManyTags,
        Reason::InvalidIpv4,
        Reason::TruncatedIpv4,
        Reason::InvalidIpv6,
        Reason::TruncatedExtension,
        Reason::TooManyExtensions,
        Reason::OtherProtocol,
        Reason::FragmentedTcp,
        Reason::UnexpectedFragment,
        Reason::TruncatedUdp,
        Reason::InvalidUdp,
        Reason::TruncatedTcp,
        Reason::TruncatedDns,
        Reason::TruncatedQuestion,
        Reason::Rcode,
        Reason::NoAnswers,
        Reason::UntrustedResolver,
        Reason::NotAsked,
        Reason::OtherQuestion,
        Reason::NoRule,
        Reason::ForeignAddress,
    ] {
        assert!(met.contains_key(&reason), "{reason} was never met: {met:?}");
    }
    for reason in sent {
        let met = &met_sent;
        assert!(met.contains_key(reason), "{reason} was never met: {met:?}");
    }
}
