use proptest::prelude::*;

use super::*;

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn networks(texts: &[&str]) -> Vec<IpNet> {
    texts
        .iter()
        .map(|text| parse_network(text).expect("a network"))
        .collect()
}

fn denied(texts: &[&str]) -> Vec<DeniedNetwork> {
    texts
        .iter()
        .map(|text| text.parse().expect("a network or `private`"))
        .collect()
}

/// What the options `--cluster-networks`, `--deny-answers` and `--allow-answers` come to.
fn refusals(cluster: &[&str], deny: &[&str], allow: &[&str]) -> Refusals {
    Refusals::new(&networks(cluster), &denied(deny), &networks(allow)).expect("few networks")
}

#[test]
fn each_address_is_refused_under_its_reason() {
    let refusals = refusals(&["10.244.0.0/16", "fd00:10:244::/48"], &[], &[]);
    for (text, reason) in [
        ("0.0.0.0", Refused::Unspecified),
        ("0.1.2.3", Refused::Unspecified),
        ("::", Refused::Unspecified),
        ("127.0.0.1", Refused::Loopback),
        ("127.255.255.255", Refused::Loopback),
        ("::1", Refused::Loopback),
        ("169.254.169.254", Refused::Metadata),
        ("fd00:ec2::254", Refused::Metadata),
        ("fd20:ce::254", Refused::Metadata),
        ("168.63.129.16", Refused::Metadata),
        ("100.100.100.200", Refused::Metadata),
        ("192.0.0.192", Refused::Metadata),
        ("169.254.128.1", Refused::LinkLocal),
        ("fe80::1", Refused::LinkLocal),
        ("febf::1", Refused::LinkLocal),
        ("fec0::1", Refused::LinkLocal),
        ("224.0.0.1", Refused::Multicast),
        ("239.255.255.255", Refused::Multicast),
        ("ff02::1", Refused::Multicast),
        ("255.255.255.255", Refused::Broadcast),
        ("240.0.0.1", Refused::Reserved),
        ("255.255.255.254", Refused::Reserved),
        ("10.244.3.4", Refused::Cluster),
        ("fd00:10:244:1::5", Refused::Cluster),
        ("100.64.0.2", Refused::Cluster),
        ("100.65.0.2", Refused::Cluster),
        ("100.88.0.2", Refused::Cluster),
        ("169.254.0.1", Refused::Cluster),
        ("fd69::5", Refused::Cluster),
        ("fd97::1", Refused::Cluster),
        ("fd98::1", Refused::Cluster),
        ("fd99::1", Refused::Cluster),
    ] {
        assert_eq!(refusals.check(address(text)), Err(reason), "{text}");
    }
}

#[test]
fn the_neighbours_of_refused_networks_are_open() {
    let refusals = refusals(&["10.244.0.0/16"], &[], &[]);
    for text in [
        "1.0.0.0",
        "126.255.255.255",
        "128.0.0.0",
        "169.253.255.255",
        "169.255.0.0",
        "223.255.255.255",
        "10.243.255.255",
        "10.245.0.0",
        "192.168.1.1",
        "100.66.0.1",
        "203.0.113.1",
        "2001:db8::1",
        "fd00::1",
        "fe7f::1",
        "2002:cb00:7101::1",
        "64:ff9b::203.0.113.1",
        "::ffff:203.0.113.1",
        // In each of the places that RFC 6052 has for a prefix of the network's own.
        "64:ff9b:1:cb00:71:100::",
        "64:ff9b:1:cb:0:7101::",
        "64:ff9b:1:0:cb:71:100:0",
        "64:ff9b:1::203.0.113.1",
    ] {
        assert_eq!(refusals.check(address(text)), Ok(()), "{text}");
    }
}

#[test]
fn an_ipv4_address_is_refused_in_every_disguise() {
    let refusals = refusals(&["10.244.0.0/16"], &["198.51.100.0/24"], &[]);
    for (inner, reason) in [
        ("127.0.0.1", Refused::Loopback),
        ("169.254.169.254", Refused::Metadata),
        ("10.244.1.1", Refused::Cluster),
        ("198.51.100.7", Refused::Denied),
    ] {
        for disguised in disguises(inner.parse().expect("an address")) {
            assert_eq!(refusals.check(disguised), Err(reason), "{disguised}");
        }
    }
}

/// The IPv6 addresses that lead to an IPv4 address.
fn disguises(inner: Ipv4Addr) -> Vec<IpAddr> {
    let [a, b, c, d] = inner.octets();
    let octets = |prefix: &[u8]| {
        let mut octets = [0; 16];
        octets[..prefix.len()].copy_from_slice(prefix);
        octets
    };
    let last = |prefix: &[u8]| {
        let mut octets = octets(prefix);
        octets[12..].copy_from_slice(&[a, b, c, d]);
        octets
    };
    [
        last(&[]),
        last(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]),
        last(&[0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]),
        last(&[0, 0x64, 0xff, 0x9b]),
        last(&[0, 0x64, 0xff, 0x9b, 0, 1]),
        octets(&[0, 0x64, 0xff, 0x9b, 0, 1, a, b, 0, c, d]),
        octets(&[0, 0x64, 0xff, 0x9b, 0, 1, 0, a, 0, b, c, d]),
        octets(&[0, 0x64, 0xff, 0x9b, 0, 1, 0, 0, 0, a, b, c, d]),
        octets(&[0x20, 0x02, a, b, c, d]),
    ]
    .map(IpAddr::from)
    .to_vec()
}

#[test]
fn options_deny_and_except() {
    let plain = refusals(&[], &[], &[]);
    let private = refusals(&[], &["private", "203.0.113.0/24"], &["10.1.0.0/16"]);
    for text in [
        "10.0.0.1",
        "172.31.0.1",
        "192.168.0.1",
        "100.127.0.1",
        "fd12::1",
    ] {
        assert_eq!(plain.check(address(text)), Ok(()), "{text}");
        assert_eq!(
            private.check(address(text)),
            Err(Refused::Private),
            "{text}"
        );
    }
    assert_eq!(private.check(address("203.0.113.1")), Err(Refused::Denied));
    assert_eq!(private.check(address("10.1.2.3")), Ok(()));
    assert_eq!(private.check(address("64:ff9b::10.1.2.3")), Ok(()));
    assert_eq!(
        private.check(address("64:ff9b::10.2.2.3")),
        Err(Refused::Private)
    );
    // An exception holds for everything that is refused.
    let excepted = refusals(&["10.244.0.0/16"], &["10.0.0.0/8"], &["10.244.0.53", "::1"]);
    assert_eq!(excepted.check(address("10.244.0.53")), Ok(()));
    assert_eq!(excepted.check(address("::1")), Ok(()));
    assert_eq!(excepted.check(address("10.244.0.54")), Err(Refused::Denied));
}

#[test]
fn networks_that_the_cluster_tells_replace_those_told_before() {
    let mut refusals = refusals(&[], &[], &[]);
    assert_eq!(refusals.check(address("10.132.0.1")), Ok(()));
    assert_eq!(refusals.learn(&networks(&["10.132.0.0/14"])), Ok(true));
    assert_eq!(refusals.learn(&networks(&["10.132.0.0/14"])), Ok(false));
    assert_eq!(refusals.check(address("10.132.0.1")), Err(Refused::Cluster));
    assert_eq!(refusals.learn(&[]), Ok(true));
    assert_eq!(refusals.check(address("10.132.0.1")), Ok(()));
    let many = vec![IpNet::from(address("10.0.0.1")); NETWORKS_MAX + 1];
    assert_eq!(refusals.learn(&many), Err(TooManyNetworks(257)));
}

#[test]
fn networks_are_read_and_refused_with_the_cure() {
    assert_eq!(networks(&["10.1.2.3/8"]), networks(&["10.0.0.0/8"]));
    assert_eq!(networks(&["10.1.2.3"]), networks(&["10.1.2.3/32"]));
    let check = |error: NetworkError, text: &str| assert_eq!(error.to_string(), text);
    check(
        parse_network("10.0.0.0/33").expect_err("too long"),
        "`10.0.0.0/33` is no network; use an address or a CIDR such as 10.0.0.0/8",
    );
    check(
        "privat".parse::<DeniedNetwork>().expect_err("a typo"),
        "`privat` is no network; use an address or a CIDR such as 10.0.0.0/8, or `private`",
    );
    let many = vec![IpNet::from(address("10.0.0.1")); NETWORKS_MAX + 1];
    let error = Refusals::new(&many, &[], &[]).expect_err("too many");
    assert_eq!(
        error.to_string(),
        "257 networks given, more than 256; join neighbouring ones"
    );
}

proptest! {
    #[test]
    fn a_refused_ipv4_address_is_refused_in_every_disguise(inner: Ipv4Addr) {
        let refusals = refusals(&["10.244.0.0/16"], &["private"], &[]);
        // 0.x in the place of a network's own prefix may as well be no address.
        if inner.octets()[0] != 0 && refusals.check(inner.into()).is_err() {
            for disguised in disguises(inner) {
                prop_assert!(refusals.check(disguised).is_err(), "{}", disguised);
            }
        }
    }

    #[test]
    fn what_is_allowed_is_never_refused(inner: Ipv4Addr, other: Ipv6Addr) {
        let refusals = refusals(&[], &["0.0.0.0/0", "::/0"], &["0.0.0.0/0", "::/0"]);
        prop_assert_eq!(refusals.check(inner.into()), Ok(()));
        prop_assert_eq!(refusals.check(other.into()), Ok(()));
    }

    #[test]
    fn the_standard_library_knows_no_special_address_that_is_open(octets: [u8; 4], other: Ipv6Addr) {
        let refusals = refusals(&[], &[], &[]);
        let v4 = Ipv4Addr::from(octets);
        if v4.is_loopback() || v4.is_link_local() || v4.is_multicast() || v4.is_unspecified()
            || v4.is_broadcast()
        {
            prop_assert!(refusals.check(v4.into()).is_err());
        }
        if other.is_loopback() || other.is_multicast() || other.is_unspecified()
            || other.is_unicast_link_local()
        {
            prop_assert!(refusals.check(other.into()).is_err());
        }
    }
}

const PORT: PortId = PortId(1);
const NOW: Timestamp = Timestamp::from_nanos(1_000_000_000_000);

fn take_out(refused: &mut RefusedAddresses, text: &str, now: Timestamp, out: &mut Output) -> bool {
    let name: DomainName = "a.test".parse().expect("a name");
    let ttl = Duration::from_secs(60);
    let mut addresses = vec![(address(text), ttl), (address("192.0.2.1"), ttl)];
    refused.take_out(PORT, "ns1_p1", &name, &mut addresses, now, out);
    assert!(addresses.contains(&(address("192.0.2.1"), ttl)));
    addresses.len() == 1
}

#[test]
fn a_refused_address_is_taken_out_counted_each_time_and_reported_once() {
    let mut refused = RefusedAddresses::new(refusals(&[], &[], &[]));
    let mut out = Output::default();
    for _ in 0..2 {
        assert!(take_out(&mut refused, "127.0.0.1", NOW, &mut out));
        assert!(!take_out(&mut refused, "203.0.113.1", NOW, &mut out));
    }
    assert_eq!(refused.counts()[Refused::Loopback], 2);
    assert_eq!(out.reports.len(), 1);
}

#[test]
fn the_clusters_networks_are_refused_once_they_are_known() {
    let mut refused = RefusedAddresses::new(refusals(&[], &[], &[]));
    let mut out = Output::default();
    assert!(!take_out(&mut refused, "203.0.113.1", NOW, &mut out));
    refused.learn_networks(networks(&["203.0.113.0/24"]), &mut out);
    assert!(take_out(&mut refused, "203.0.113.1", NOW, &mut out));
    assert_eq!(refused.counts()[Refused::Cluster], 1);
}

#[test]
fn a_pod_that_is_told_many_refused_addresses_gets_a_few_reports_each_minute() {
    let mut refused = RefusedAddresses::new(refusals(&[], &[], &[]));
    let mut out = Output::default();
    for number in 0..60_000_u32 {
        let loopback = Ipv4Addr::from(0x7f00_0001 + number).to_string();
        let now = NOW + Duration::from_millis(u64::from(number));
        assert!(take_out(&mut refused, &loopback, now, &mut out));
    }
    assert_eq!(refused.counts()[Refused::Loopback], 60_000);
    assert!(
        (16..=32).contains(&out.reports.len()),
        "{}",
        out.reports.len()
    );
    let left_out = out.counters.reports_left_out;
    assert_eq!(left_out, 60_000 - out.reports.len() as u64);
    assert_eq!(refused.remembered().0, 1);
    assert!(refused.remembered().1 <= REFUSALS_REPORTED_MAX);
    refused.forget(PORT);
    assert_eq!(refused.remembered().0, 0);
}
