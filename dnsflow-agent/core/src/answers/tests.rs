use super::*;

const NOW: Timestamp = Timestamp::from_nanos(1_000_000_000);

fn answers(resolvers: &[&str]) -> (Answers, Output) {
    let mut out = Output::default();
    let resolvers = resolvers.iter().map(|text| text.parse().expect("one"));
    let refusals = Refusals::new(&[], &[], &[]).expect("few networks");
    let answers = Answers::new(DnsPorts::DNS, resolvers.collect(), refusals, &mut out);
    (answers, out)
}

fn resolvers(texts: &[&str]) -> BTreeSet<Resolver> {
    texts
        .iter()
        .map(|text| text.parse().expect("one"))
        .collect()
}

#[test]
fn the_servers_of_options_and_cluster_are_trusted_and_said_once() {
    let (mut answers, mut out) = answers(&["192.0.2.1"]);
    let first = resolvers(&["192.0.2.1"]);
    assert_eq!(out.commands, [Command::TrustResolvers(first)]);
    out.commands.clear();
    for _ in 0..2 {
        answers.trust(&resolvers(&["10.96.0.10"]), &mut out);
    }
    let both = resolvers(&["192.0.2.1", "10.96.0.10"]);
    assert_eq!(out.commands, [Command::TrustResolvers(both)]);
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
        held: true,
        gso_size: 0,
    };
    let read = answers.read(frame, true, NOW, &mut out);
    assert!(read.answers.is_empty() && !read.carries && read.connection.is_none());
    assert_eq!((out.counters.frames, out.counters.frames_not_dns), (1, 1));
}

#[test]
fn a_refused_address_is_taken_out_counted_each_time_and_told_once() {
    let (mut answers, mut out) = answers(&[]);
    out.reports.clear();
    let name: DomainName = "a.test".parse().expect("a name");
    let ttl = Duration::from_secs(60);
    for _ in 0..2 {
        let mut addresses = vec![
            ("127.0.0.1".parse().expect("one"), ttl),
            ("203.0.113.1".parse().expect("one"), ttl),
        ];
        answers.refuse(&name, &mut addresses, "ns1_p1", &mut out);
        assert_eq!(addresses.len(), 1);
    }
    assert_eq!(answers.refused()[Refused::Loopback], 2);
    assert_eq!(out.reports.len(), 1);
}

#[test]
fn the_clusters_networks_are_refused_once_they_are_known() {
    let (mut answers, mut out) = answers(&[]);
    let name: DomainName = "a.test".parse().expect("a name");
    let network: IpNet = "203.0.113.0/24".parse().expect("a network");
    let mut addresses = vec![("203.0.113.1".parse().expect("one"), Duration::ZERO)];
    answers.refuse(&name, &mut addresses, "ns1_p1", &mut out);
    assert_eq!(addresses.len(), 1);
    answers.learn_networks(vec![network], &mut out);
    answers.refuse(&name, &mut addresses, "ns1_p1", &mut out);
    assert_eq!(addresses, []);
    assert_eq!(answers.refused()[Refused::Cluster], 1);
}
