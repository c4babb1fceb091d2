use super::*;
use crate::Timestamp;

const NOW: Timestamp = Timestamp::from_nanos(1_000_000_000);

fn answers(resolvers: &[&str]) -> (Answers, Output) {
    let mut out = Output::at(NOW);
    let resolvers = resolvers.iter().map(|text| text.parse().expect("one"));
    let answers = Answers::new(DnsPorts::DNS, resolvers.collect(), &mut out);
    (answers, out)
}

fn resolvers(texts: &[&str]) -> BTreeSet<Resolver> {
    texts
        .iter()
        .map(|text| text.parse().expect("one"))
        .collect()
}

#[test]
fn the_servers_of_options_and_cluster_and_the_cache_are_trusted_and_said_once() {
    let (mut answers, mut out) = answers(&["192.0.2.1"]);
    let first = resolvers(&["192.0.2.1"]);
    assert_eq!(out.commands, [Command::TrustResolvers(first)]);
    out.commands.clear();
    for _ in 0..2 {
        answers.trust(resolvers(&["10.96.0.10"]), &mut out);
    }
    let both = resolvers(&["192.0.2.1", "10.96.0.10"]);
    assert_eq!(out.commands, [Command::TrustResolvers(both)]);
    out.commands.clear();
    answers.trust_dns_cache(resolvers(&["169.254.20.10"]), &mut out);
    answers.trust(resolvers(&[]), &mut out);
    let all = resolvers(&["192.0.2.1", "10.96.0.10", "169.254.20.10"]);
    let rest = resolvers(&["192.0.2.1", "169.254.20.10"]);
    assert_eq!(
        out.commands,
        [all, rest].map(Command::TrustResolvers),
        "the cache stays"
    );
    answers.trust(resolvers(&["10.96.0.10"]), &mut out);
    assert!(answers.is_trusted("10.96.0.10:53".parse().expect("an address")));
    assert!(!answers.is_trusted("10.96.0.10:5353".parse().expect("an address")));
    assert!(!answers.is_trusted("10.96.0.11:53".parse().expect("an address")));
}

#[test]
fn a_frame_that_is_no_dns_is_counted_and_carries_nothing() {
    let (mut answers, mut out) = answers(&[]);
    let frame = Frame {
        ifindex: 7,
        captured_at: NOW,
        bytes: b"noise",
        from_pod: false,
        held: true,
        opened: false,
        gso_size: 0,
        left_out: 0,
    };
    let read = answers.read(frame, Some(&[]), &mut out);
    assert!(read.responses.is_empty() && !read.carries && read.connection.is_none());
    assert_eq!((out.counters.frames, out.counters.frames_not_dns), (1, 1));
}
