use proptest::prelude::*;

use super::*;
use crate::{
    Timestamp,
    ovn::{
        rows::{
            Acl, Changes, Encapsulation, GatewayPort, LoadBalancer, LogicalSwitch, NbUpdate,
            NodeSet, RowId, SbUpdate, TemplateVariables, UnreadFronts,
        },
        view::OvnView,
    },
};

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
    Refusals::new(&networks(cluster), &denied(deny), &networks(allow), &[]).expect("few networks")
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
fn networks_that_the_cluster_tells_replace_those_told_before_up_to_a_limit() {
    let mut refused = owner();
    let mut out = Output::default();
    let learn = |pods: BTreeSet<IpNet>| changes([(Concerned::Everybody, pods)].into(), []);
    let check =
        |refused: &RefusedAddresses, text: &str| refused.check(address(text), &row(None), None);
    refused.learn(
        learn(networks(&["10.132.0.0/14"]).into_iter().collect()),
        &mut out,
    );
    assert_eq!(check(&refused, "10.132.0.1"), Err(Refused::Cluster));
    refused.learn(learn(BTreeSet::new()), &mut out);
    assert_eq!(check(&refused, "10.132.0.1"), Ok(()));
    // Of too many, the smallest are left out.
    let small = (0..CLUSTER_NETWORKS_MAX).map(|i| {
        let bits = 0x0a00_0000 + 2 * u32::try_from(i).expect("few");
        IpNet::from(IpAddr::from(Ipv4Addr::from(bits)))
    });
    let many = small.chain(networks(&["192.0.2.0/24"])).collect();
    out.reports.clear();
    refused.learn(learn(many), &mut out);
    let left_out = out.reports.iter().find_map(|report| match report {
        Report::ClusterNetworks { left_out, .. } => Some(*left_out),
        _ => None,
    });
    assert_eq!(left_out, Some(1));
    assert_eq!(check(&refused, "192.0.2.1"), Err(Refused::Cluster));
}

/// A user-defined network can have 400 networks, and a tenant many of them.
#[test]
fn a_tenant_with_many_networks_leaves_out_no_network_of_another() {
    let mut refused = owner();
    let many = (0..CLUSTER_NETWORKS_MAX as u32).map(|i| {
        let address = Ipv4Addr::from(0x0a00_0000 + (i << 10));
        IpNet::new(address.into(), 23).expect("few bits")
    });
    let pods = [
        (Concerned::Network("many".into()), many.collect()),
        (
            Concerned::Network("small".into()),
            networks(&["192.0.2.128/25"]).into_iter().collect(),
        ),
    ];
    let mut out = Output::default();
    for _ in 0..2 {
        refused.learn(changes(pods.clone().into(), []), &mut out);
    }
    let check = |text: &str, network| refused.check(address(text), &row(Some(network)), None);
    assert_eq!(check("192.0.2.129", "small"), Err(Refused::Cluster));
    assert_eq!(check("10.0.0.1", "many"), Err(Refused::Cluster));
    assert_eq!(check("10.63.252.1", "many"), Ok(()), "the last one");
    refused.learn(changes(PodNetworks::new(), []), &mut out);
    let told = out.reports.iter().filter_map(|report| match report {
        Report::ClusterNetworks { left_out, .. } => Some(*left_out),
        _ => None,
    });
    assert_eq!(
        told.collect::<Vec<_>>(),
        [1, 0],
        "once, and when it is over"
    );
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
    let error = Refusals::new(&many, &[], &[], &[]).expect_err("too many");
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
    fn outside_of_translating_networks_an_address_stands_for_itself_alone(inner: Ipv4Addr, other: Ipv6Addr) {
        let is_inside = |address: &Ipv6Addr| TRANSLATING.iter().any(|network| network.contains(address));
        prop_assert!(is_inside(&other) || embedded(other).is_empty());
        for disguised in disguises(inner) {
            let IpAddr::V6(disguised) = disguised else { continue };
            prop_assert!(is_inside(&disguised), "{}", disguised);
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

fn owner() -> RefusedAddresses {
    RefusedAddresses::new(refusals(&[], &[], &[]), &mut Output::default())
}

fn changes<const N: usize>(
    pods: PodNetworks,
    addresses: [(&str, Owners); N],
) -> ClusterChanges<impl Iterator<Item = (IpAddr, Owners)>> {
    let addresses = addresses.into_iter();
    ClusterChanges {
        pods: Some(pods),
        addresses: addresses.map(|(text, owners)| (address(text), owners)),
        backends: BTreeSet::new(),
        are_fronts_unread: false,
    }
}

/// Pods come and go behind Services. Nobody was told their addresses.
#[test]
fn of_the_addresses_that_services_lead_to_those_of_pods_are_not_checked_again() {
    let mut refused = owner();
    let pods = networks(&["10.244.0.0/16"]).into_iter().collect();
    let pods = PodNetworks::from([(Concerned::Everybody, pods)]);
    refused.learn(changes(pods, []), &mut Output::default());
    let mut learn = |texts: &[&str]| {
        let changes = ClusterChanges {
            pods: None,
            addresses: std::iter::empty(),
            backends: texts.iter().map(|text| address(text)).collect(),
            are_fronts_unread: false,
        };
        refused.learn(changes, &mut Output::default())
    };
    assert!(learn(&["10.244.0.5", "10.244.7.6"]).is_empty());
    let outside = Recheck {
        addresses: [address("203.0.113.1")].into(),
        ..Recheck::default()
    };
    assert_eq!(learn(&["10.244.0.5", "203.0.113.1"]), outside);
}

fn a_node() -> Owners {
    Owners {
        is_node: true,
        ..Owners::default()
    }
}

fn row(network: Option<&str>) -> Interface {
    Interface {
        name: "veth1".into(),
        iface_id: "ns1_p1".into(),
        iface_id_ver: None,
        addresses: vec![],
        mac: None,
        network: network.map(str::to_owned),
        sandbox: None,
        ifindex: None,
        policing_kbps: 0,
    }
}

fn take_out(refused: &mut RefusedAddresses, text: &str, now: Timestamp, out: &mut Output) -> bool {
    out.begin(now);
    let name: DomainName = "a.test".parse().expect("a name");
    let ttl = Duration::from_secs(60);
    let mut addresses = vec![(address(text), ttl), (address("192.0.2.1"), ttl)];
    let port = (PORT, &row(None), Some("ns1"));
    refused.take_out(port, &name, &mut addresses, out);
    assert!(addresses.contains(&(address("192.0.2.1"), ttl)));
    addresses.len() == 1
}

#[test]
fn a_refused_address_is_taken_out_counted_each_time_and_reported_once() {
    let mut refused = owner();
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
    let mut refused = owner();
    let mut out = Output::default();
    assert!(!take_out(&mut refused, "203.0.113.1", NOW, &mut out));
    let pods = networks(&["203.0.113.0/24"]).into_iter().collect();
    let pods: PodNetworks = [(Concerned::Everybody, pods)].into();
    let mut learn = |pods| refused.learn(changes(pods, []), &mut out);
    let all = Networks::new(networks(&["203.0.113.0/24"]));
    let recheck = Recheck {
        networks: [(Concerned::Everybody, all)].into(),
        ..Recheck::default()
    };
    assert_eq!(learn(pods.clone()), recheck);
    assert!(learn(pods).is_empty());
    assert!(take_out(&mut refused, "203.0.113.1", NOW, &mut out));
    assert_eq!(refused.counts()[Refused::Cluster], 1);
}

#[test]
fn a_pod_that_is_told_many_refused_addresses_gets_a_few_reports_each_minute() {
    let mut refused = owner();
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

#[test]
fn what_belongs_to_a_user_defined_network_concerns_its_own_ports_alone() {
    let mut refused = owner();
    let mut out = Output::default();
    let nets = |texts: &[&str]| networks(texts).into_iter().collect();
    refused.learn(
        changes(
            [
                (Concerned::Everybody, nets(&["10.244.0.0/16"])),
                (Concerned::Network("udn3".into()), nets(&["203.0.113.0/24"])),
                (
                    Concerned::Namespace("ns4".into()),
                    nets(&["198.51.100.0/24"]),
                ),
            ]
            .into(),
            [],
        ),
        &mut out,
    );
    let told = Report::ClusterNetworks {
        networks: networks(&["10.244.0.0/16"]),
        left_out: 0,
    };
    assert_eq!(out.reports, [told]);
    let check = |text: &str, network: Option<&str>, namespace: &str| {
        refused.check(address(text), &row(network), Some(namespace))
    };
    let cases = [
        ("203.0.113.1", None, "ns1", Ok(())),
        ("203.0.113.1", Some("udn9"), "ns1", Ok(())),
        ("203.0.113.1", Some("udn3"), "ns3", Err(Refused::Cluster)),
        ("198.51.100.1", None, "ns1", Ok(())),
        ("198.51.100.1", None, "ns4", Err(Refused::Cluster)),
        ("10.244.7.1", Some("udn3"), "ns3", Err(Refused::Cluster)),
    ];
    for (text, network, namespace, checked) in cases {
        assert_eq!(
            check(text, network, namespace),
            checked,
            "{text} {network:?} {namespace}"
        );
    }
}

#[test]
fn services_and_nodes_are_refused_in_every_form_and_only_as_long_as_they_are_there() {
    let mut refused = owner();
    let mut out = Output::default();
    let service = Owners {
        services: [Concerned::Everybody].into(),
        ..Owners::default()
    };
    let owned = [("10.96.0.1", service), ("192.0.2.9", a_node())];
    let recheck = refused.learn(changes(PodNetworks::new(), owned), &mut out);
    let addresses = BTreeSet::from(["10.96.0.1", "192.0.2.9"].map(address));
    assert_eq!(recheck.addresses, addresses);
    assert_eq!(recheck.networks, BTreeMap::new());
    let form = "64:ff9b::192.0.2.9".parse().expect("an address");
    let inner = refused.refusals.translation().inner(form);
    assert_eq!(inner.collect::<Vec<_>>(), [Ipv4Addr::new(192, 0, 2, 9)]);
    let check =
        |refused: &RefusedAddresses, text: &str| refused.check(address(text), &row(None), None);
    for (text, checked) in [
        ("10.96.0.1", Err(Refused::Service)),
        ("::ffff:10.96.0.1", Err(Refused::Service)),
        ("192.0.2.9", Err(Refused::Node)),
        ("64:ff9b::192.0.2.9", Err(Refused::Node)),
        ("10.96.0.2", Ok(())),
    ] {
        assert_eq!(check(&refused, text), checked, "{text}");
    }
    refused.learn_dns([address("10.96.0.10")].into(), &mut out);
    assert_eq!(check(&refused, "10.96.0.10"), Err(Refused::Service));
    let gone = [("10.96.0.1", Owners::default())];
    refused.learn(changes(PodNetworks::new(), gone), &mut out);
    assert_eq!(check(&refused, "10.96.0.1"), Ok(()));
    assert_eq!(check(&refused, "10.96.0.10"), Err(Refused::Service));
}

#[test]
fn behind_a_nat64_prefix_the_ipv4_address_decides() {
    // The examples of RFC 6052, section 2.4, with 192.0.2.33.
    let examples = [
        ("2001:db8::/32", "2001:db8:c000:221::"),
        ("2001:db8:100::/40", "2001:db8:1c0:2:21::"),
        ("2001:db8:122::/48", "2001:db8:122:c000:2:2100::"),
        ("2001:db8:122:300::/56", "2001:db8:122:3c0:0:221::"),
        ("2001:db8:122:344::/64", "2001:db8:122:344:c0:2:2100::"),
        ("2001:db8:122:344::/96", "2001:db8:122:344::192.0.2.33"),
    ];
    for (prefix, example) in examples {
        let prefix: Nat64Prefix = prefix.parse().expect("a prefix");
        let check = |denied: &[&str]| {
            let denied = self::denied(denied);
            let refusals = Refusals::new(&[], &denied, &[], &[prefix]).expect("few");
            refusals.check(address(example))
        };
        assert_eq!(check(&["192.0.2.33"]), Err(Refused::Denied), "{prefix:?}");
        assert_eq!(check(&["192.0.2.32"]), Ok(()), "{prefix:?}");
    }
    for bad in ["2001:db8::/33", "192.0.2.0/24", "2001:db8::", "x"] {
        assert!(bad.parse::<Nat64Prefix>().is_err(), "{bad}");
    }
}

#[test]
fn what_an_option_allows_against_all_this_is_said() {
    let mut out = Output::default();
    let allowed = refusals(&[], &[], &["10.0.0.0/8", "203.0.113.0/24"]);
    let mut refused = RefusedAddresses::new(allowed, &mut out);
    assert_eq!(out.reports, []);
    let pods = networks(&["10.244.0.0/16"]).into_iter().collect();
    let pods = [(Concerned::Everybody, pods)].into();
    refused.learn(changes(pods, [("10.0.0.4", a_node())]), &mut out);
    assert_eq!(refused.check(address("10.0.0.4"), &row(None), None), Ok(()));
    let [network] = networks(&["10.0.0.0/8"])[..] else {
        panic!("one");
    };
    let told = Report::AllowedAnyway([(network, ["cluster", "node"].into())].into());
    assert!(out.reports.contains(&told), "{:?}", out.reports);
}

#[test]
fn a_resolver_that_others_may_answer_for_is_said_once() {
    let mut refused = owner();
    let mut out = Output::default();
    let pods = networks(&["192.0.2.0/24"]).into_iter().collect();
    let pods = [(Concerned::Network("udn3".into()), pods)].into();
    refused.learn(changes(pods, []), &mut out);
    out.reports.clear();
    let resolvers = ["10.96.0.10", "10.96.0.11", "192.0.2.53"].map(|text| Resolver {
        address: address(text),
        port: 53,
    });
    for _ in 0..2 {
        let services_at = |at: IpAddr| {
            let names = ["kube-system/dns", "evil/dns", "evil/dns"].into_iter();
            names.filter(move |_| at == address("10.96.0.11"))
        };
        refused.look_at_resolvers(&resolvers.into(), services_at, &mut out);
    }
    let told: Vec<_> = out
        .reports
        .iter()
        .filter_map(|report| match report {
            Report::ResolverCovered { resolver, by } => Some((
                resolver.address.to_string(),
                by.iter().cloned().collect::<Vec<_>>().join(", "),
            )),
            _ => None,
        })
        .collect();
    let wanted = [
        (
            "10.96.0.11",
            "the Service evil/dns, the Service kube-system/dns",
        ),
        ("192.0.2.53", "the user-defined network udn3"),
    ];
    assert_eq!(
        told,
        wanted.map(|(one, by)| (one.to_owned(), by.to_owned()))
    );
}

/// An address of the network may come to be refused by itself in the same update.
#[test]
fn a_network_goes_from_the_kernel_behind_the_addresses_that_wait() {
    let mut refused = owner();
    let given = |refused: &mut RefusedAddresses, addresses_wait| {
        let mut out = Output::default();
        refused.give_out_networks((true, addresses_wait), &mut out);
        let mut commands = out.commands.into_iter();
        match commands.next() {
            Some(Command::LeaveNetworks(changes)) => changes,
            _ => BTreeMap::new(),
        }
    };
    given(&mut refused, false);
    let [network] = networks(&["203.0.113.0/24"])[..] else {
        panic!("one");
    };
    let pods = PodNetworks::from([(Concerned::Everybody, [network].into())]);
    let service = || Owners {
        services: [Concerned::Everybody].into(),
        ..Owners::default()
    };
    let out = &mut Output::default();
    refused.learn(changes(pods, [("198.51.100.1", service())]), out);
    let single = IpNet::from(address("198.51.100.1"));
    // What comes, comes at once.
    let come = [(network, true), (single, true)];
    assert_eq!(given(&mut refused, true), come.into());
    let gone = changes(PodNetworks::new(), [("198.51.100.1", Owners::default())]);
    refused.learn(gone, out);
    assert_eq!(given(&mut refused, true), [(single, false)].into());
    let owned = [("203.0.113.1", service())];
    refused.learn(changes(PodNetworks::new(), owned), out);
    let last = [(address("203.0.113.1").into(), true), (network, false)];
    assert_eq!(given(&mut refused, false), last.into());
}

proptest! {
    #[test]
    fn sorted_networks_contain_what_one_of_them_does(
        parts in proptest::collection::vec((any::<u32>(), 0..=32_u8), 0..20),
        addresses: [u32; 8],
    ) {
        let networks: Vec<IpNet> = parts
            .iter()
            .map(|(bits, len)| IpNet::new(Ipv4Addr::from(*bits).into(), *len).expect("a network").trunc())
            .collect();
        let sorted = Networks::new(networks.iter().copied());
        let of_networks = networks.iter().flat_map(|network| [network.network(), network.broadcast()]);
        let others = addresses.map(|bits| Ipv4Addr::from(bits).into());
        for address in of_networks.chain(others) {
            let is_in = networks.iter().any(|network| network.contains(&address));
            prop_assert_eq!(sorted.contains(address), is_in, "{}", address);
        }
    }
}

/// The rows of a database, and what has been seen of them.
#[derive(Clone, Debug, Default)]
struct Rows {
    acls: BTreeMap<u128, Acl>,
    switches: BTreeMap<u128, LogicalSwitch>,
    gateway_ports: BTreeMap<u128, GatewayPort>,
    node_sets: BTreeMap<u128, NodeSet>,
    load_balancers: BTreeMap<u128, LoadBalancer>,
    template_variables: BTreeMap<u128, TemplateVariables>,
    unread_fronts: BTreeMap<u128, UnreadFronts>,
    encapsulations: BTreeMap<u128, Encapsulation>,
}

#[derive(Clone, Debug)]
enum Change {
    Acl(Option<Acl>),
    Switch(Option<LogicalSwitch>),
    GatewayPort(Option<GatewayPort>),
    NodeSet(Option<NodeSet>),
    LoadBalancer(Option<LoadBalancer>),
    TemplateVariables(Option<TemplateVariables>),
    UnreadFronts(Option<UnreadFronts>),
    Encapsulation(Option<Encapsulation>),
}

#[derive(Clone, Debug)]
enum Step {
    /// One row changes.
    Row(u128, Change),
    /// A database is read again; a change was missed.
    Again(u128, Change),
    /// A part of the addresses is learned, so many of each kind.
    Part(usize),
    /// It is decided over an address, the one at this place.
    Decide(usize),
    /// All changes are learned.
    Learn,
}

const ADDRESSES: [&str; 5] = [
    "10.96.0.1",
    "10.96.0.2",
    "203.0.113.1",
    "2001:db8::1",
    "198.51.100.7",
];
const NETWORKS: [Option<&str>; 3] = [None, Some("udn1"), Some("udn2")];

fn change() -> impl Strategy<Value = Change> {
    use proptest::{option::weighted, sample::subsequence};
    let addresses = || {
        let some = subsequence(&ADDRESSES[..], 0..4);
        some.prop_map(|texts| texts.into_iter().map(address).collect::<BTreeSet<_>>())
    };
    let network = || (0..NETWORKS.len()).prop_map(|at| NETWORKS[at].map(str::to_owned));
    let excluded = subsequence(
        &["203.0.113.0/24", "198.51.100.0/24", "10.96.0.0/16"][..],
        1..4,
    );
    let acl = (excluded, any::<bool>()).prop_map(|(excluded, is_default)| {
        // As ovn-kubernetes joins them.
        let excluded: Vec<_> = excluded
            .iter()
            .map(|one| format!("ip4.dst != {one}"))
            .collect();
        let namespace = "ns1";
        let group = match is_default {
            true => crate::ovn::hash::default_port_group(namespace),
            false => "a1".to_owned(),
        };
        Acl {
            namespace: namespace.into(),
            rule_index: 0,
            priority: 10_000,
            matches: format!(
                "(ip4.dst == 0.0.0.0/0 && {}) && inport == @{group}",
                excluded.join("&&")
            ),
            action: "allow".into(),
        }
    });
    let switch = (
        network(),
        subsequence(&["203.0.113.0/25", "10.96.0.0/31"][..], 0..2),
    );
    let switch = switch.prop_map(|(network, texts)| LogicalSwitch {
        network,
        is_primary: false,
        networks: networks(&texts),
    });
    let balancer = (0..4u8, network(), addresses(), addresses());
    let balancer = balancer.prop_map(|(service, network, addresses, backends)| LoadBalancer {
        service: match service {
            0 => Some("default/kubernetes".to_owned()),
            1 => None,
            _ => Some(format!("ns/{service}")),
        },
        network,
        addresses,
        backends: backends.into_iter().collect(),
    });
    let variables = addresses().prop_map(|addresses| TemplateVariables { addresses });
    let gateway = addresses().prop_map(|addresses| GatewayPort { addresses });
    let node_set = addresses().prop_map(|addresses| NodeSet { addresses });
    let encapsulation = (0..ADDRESSES.len()).prop_map(|at| Encapsulation {
        ip: address(ADDRESSES[at]),
    });
    prop_oneof![
        1 => weighted(0.7, acl).prop_map(Change::Acl),
        1 => weighted(0.7, switch).prop_map(Change::Switch),
        2 => weighted(0.7, gateway).prop_map(Change::GatewayPort),
        1 => weighted(0.7, node_set).prop_map(Change::NodeSet),
        6 => weighted(0.7, balancer).prop_map(Change::LoadBalancer),
        1 => weighted(0.7, variables).prop_map(Change::TemplateVariables),
        1 => weighted(0.3, Just(UnreadFronts)).prop_map(Change::UnreadFronts),
        2 => weighted(0.7, encapsulation).prop_map(Change::Encapsulation),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4u128, change()).prop_map(|(id, change)| Step::Row(id, change)),
        1 => (0..4u128, change()).prop_map(|(id, change)| Step::Again(id, change)),
        3 => (1..3usize).prop_map(Step::Part),
        3 => (0..100usize).prop_map(Step::Decide),
        3 => Just(Step::Learn),
    ]
}

impl Rows {
    fn set(&mut self, id: u128, change: Change) {
        fn set<Row>(rows: &mut BTreeMap<u128, Row>, id: u128, row: Option<Row>) {
            match row {
                Some(row) => rows.insert(id, row),
                None => rows.remove(&id),
            };
        }
        match change {
            Change::Acl(row) => set(&mut self.acls, id, row),
            Change::Switch(row) => set(&mut self.switches, id, row),
            Change::NodeSet(row) => set(&mut self.node_sets, id, row),
            Change::GatewayPort(row) => set(&mut self.gateway_ports, id, row),
            Change::LoadBalancer(row) => set(&mut self.load_balancers, id, row),
            Change::TemplateVariables(row) => set(&mut self.template_variables, id, row),
            Change::UnreadFronts(row) => set(&mut self.unread_fronts, id, row),
            Change::Encapsulation(row) => set(&mut self.encapsulations, id, row),
        }
    }

    /// All of them, as an agent reads them behind a reconnect.
    fn read_again(&self, view: &mut OvnView) {
        fn all<Row: Clone>(rows: &BTreeMap<u128, Row>) -> Changes<Row> {
            let rows = rows.iter();
            rows.map(|(id, row)| (RowId::new(*id), Some(row.clone())))
                .collect()
        }
        view.apply_nb(NbUpdate {
            reset: true,
            acls: all(&self.acls),
            switches: all(&self.switches),
            gateway_ports: all(&self.gateway_ports),
            load_balancers: all(&self.load_balancers),
            template_variables: all(&self.template_variables),
            unread_fronts: all(&self.unread_fronts),
            node_sets: all(&self.node_sets),
        });
        view.apply_sb(SbUpdate {
            reset: true,
            encapsulations: all(&self.encapsulations),
            ..SbUpdate::default()
        });
    }

    /// What they come to, from all of them.
    fn learned(&self) -> Learned {
        let on = |network: &Option<String>| match network {
            Some(network) => Concerned::Network(network.clone()),
            None => Concerned::Everybody,
        };
        let mut pods = PodNetworks::new();
        for switch in self.switches.values() {
            let networks = pods.entry(on(&switch.network)).or_default();
            networks.extend(switch.networks.iter().copied());
        }
        for acl in self.acls.values() {
            let whose = match acl.matches.contains("@a1") {
                true => Concerned::Namespace("ns1".into()),
                false => Concerned::Everybody,
            };
            let excluded = acl.matches.split("!= ").skip(1);
            let excluded = excluded.filter_map(|rest| rest.split(['&', ')']).next());
            let excluded = excluded.map(|text| text.parse::<IpNet>().expect("a network"));
            pods.entry(whose).or_default().extend(excluded);
        }
        pods.retain(|_, networks| !networks.is_empty());
        let pods = pods.into_iter();
        let (mut services, mut fronts) = (BTreeSet::new(), BTreeSet::new());
        for row in self.template_variables.values() {
            let addresses = row.addresses.iter();
            fronts.extend(addresses.map(|address| (*address, Concerned::Everybody)));
        }
        for row in self.load_balancers.values() {
            for address in &row.addresses {
                let owners = match row.service {
                    Some(_) => &mut services,
                    None => &mut fronts,
                };
                owners.insert((*address, on(&row.network)));
            }
        }
        let gateways = self.gateway_ports.values().flat_map(|port| &port.addresses);
        let node_sets = self.node_sets.values().flat_map(|set| &set.addresses);
        let encapsulations = self.encapsulations.values().map(|row| &row.ip);
        let balancers = self.load_balancers.values();
        let api_servers = balancers
            .filter(|row| {
                row.service.as_deref() == Some("default/kubernetes") && row.network.is_none()
            })
            .flat_map(|row| &row.backends);
        Learned {
            pods: pods
                .map(|(whose, nets)| (whose, Networks::new(nets)))
                .collect(),
            service_networks: Networks::default(),
            services,
            fronts,
            are_fronts_unread: !self.unread_fronts.is_empty(),
            nodes: gateways
                .chain(node_sets)
                .chain(encapsulations)
                .copied()
                .collect(),
            own: BTreeSet::new(),
            api_servers: api_servers.copied().collect(),
            dns: BTreeSet::new(),
            dns_cache: BTreeSet::new(),
        }
    }
}

/// The kinds of pods: their networks and namespaces.
fn kinds() -> impl Iterator<Item = (Option<&'static str>, Option<&'static str>)> {
    let networks = NETWORKS.iter();
    networks.flat_map(|network| [None, Some("ns1")].map(|namespace| (*network, namespace)))
}

/// Whether an address is refused to a kind of pod, and whether it is in front of a load balancer.
type Checked = (Result<(), Refused>, bool);

/// The same of each address, for each kind of pod.
fn checks(refused: &RefusedAddresses) -> BTreeMap<IpAddr, Vec<Checked>> {
    let forms = ADDRESSES
        .iter()
        .map(|text| address(text))
        .flat_map(|address| match address {
            IpAddr::V4(inner) => disguises(inner).into_iter().chain([address]).collect(),
            IpAddr::V6(_) => vec![address],
        });
    let check = |address: IpAddr| {
        let checked = kinds().map(|(network, ns)| {
            let row = row(network);
            let is_front = refused.is_front(address, &row, ns);
            (refused.check(address, &row, ns), is_front)
        });
        (address, checked.collect())
    };
    forms.map(check).collect()
}

/// The addresses that are left to the agent at ports of each kind, as far as the kernel opens anything there.
fn left(
    refused: &RefusedAddresses,
    checks: &BTreeMap<IpAddr, Vec<Checked>>,
) -> BTreeSet<(IpAddr, usize)> {
    let kinds = kinds()
        .enumerate()
        .filter(|(_, (network, namespace))| refused.kernel_knows_all(&row(*network), *namespace));
    let left = kinds.flat_map(|(kind, _)| {
        let left = checks
            .iter()
            .filter(move |(_, checked)| checked[kind] != (Ok(()), false));
        left.map(move |(address, _)| (*address, kind))
    });
    left.collect()
}

/// An owner of what these rows come to, all at once.
fn at_once(rows: &Rows, allowed: &Refusals) -> RefusedAddresses {
    let mut refused = RefusedAddresses::new(allowed.clone(), &mut Output::default());
    refused.refusals.learned = rows.learned();
    refused
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    /// In whatever parts, what is refused is what all rows come to, and whatever has changed is told to whom it
    /// concerns. A decision in between is one by all rows. What has been refused all the time, the kernel does not open.
    #[test]
    fn changes_of_rows_come_to_what_all_rows_do(steps in proptest::collection::vec(step(), 1..30)) {
        let mut out = Output::default();
        let allowed = refusals(&[], &[], &["10.96.0.2", "198.51.100.0/24"]);
        let mut refused = RefusedAddresses::new(allowed.clone(), &mut out);
        let mut view = OvnView::default();
        let mut rows = Rows::default();
        let mut backends = BTreeSet::new();
        // By the last decision over each.
        let mut decided = checks(&refused);
        let mut told_backends = BTreeSet::new();
        let mut left_since = left(&refused, &decided);
        let mut kernel = BTreeSet::new();
        for step in steps.into_iter().chain([Step::Learn]) {
            // Networks are learned at once.
            let most = match step {
                Step::Row(..) | Step::Again(..) => 0,
                Step::Part(most) => most,
                Step::Decide(_) | Step::Learn => usize::MAX,
            };
            let is_all = matches!(step, Step::Learn);
            match step {
                Step::Row(id, change) => {
                    rows.set(id, change.clone());
                    let id = RowId::new(id);
                    let mut nb = NbUpdate::default();
                    let mut sb = SbUpdate::default();
                    match change {
                        Change::Acl(row) => nb.acls.push((id, row)),
                        Change::Switch(row) => nb.switches.push((id, row)),
                        Change::NodeSet(row) => nb.node_sets.push((id, row)),
                        Change::GatewayPort(row) => nb.gateway_ports.push((id, row)),
                        Change::LoadBalancer(row) => nb.load_balancers.push((id, row)),
                        Change::TemplateVariables(row) => nb.template_variables.push((id, row)),
                        Change::UnreadFronts(row) => nb.unread_fronts.push((id, row)),
                        Change::Encapsulation(row) => sb.encapsulations.push((id, row)),
                    }
                    view.apply_nb(nb);
                    view.apply_sb(sb);
                }
                Step::Again(id, change) => {
                    rows.set(id, change);
                    rows.read_again(&mut view);
                }
                Step::Decide(at) => {
                    let at = at % decided.len();
                    let (address, checked) = decided.iter_mut().nth(at).expect("there are some");
                    refused.catch_up(*address, |form| view.changed_owners(form));
                    *checked = checks(&refused).remove(address).expect("it is one of them");
                    let wanted = checks(&at_once(&rows, &allowed));
                    prop_assert_eq!(&*checked, &wanted[address], "{}", address);
                    continue;
                }
                Step::Part(_) | Step::Learn => {}
            }
            let all_rows = at_once(&rows, &allowed);
            let wanted = checks(&all_rows);
            left_since = &left_since & &left(&all_rows, &wanted);
            let changes = view.take_cluster_changes(most);
            let recheck = changes.map(|changes| refused.learn(changes, &mut out));
            let recheck = recheck.unwrap_or_default();
            for (address, checked) in &mut decided {
                for ((network, namespace), (before, now)) in kinds().zip(checked.iter_mut().zip(&wanted[address])) {
                    let networks = recheck.networks_of(&row(network), namespace);
                    if refused.is_rechecked(*address, &recheck, &networks) {
                        *before = *now;
                    }
                }
            }
            for address in ADDRESSES.iter().map(|text| address(text)) {
                if refused.is_rechecked(address, &recheck, &recheck.networks_of_all()) {
                    told_backends.insert(address);
                }
            }
            out.commands.clear();
            refused.give_out_networks((true, view.waiting_addresses() > 0), &mut out);
            for command in &out.commands {
                let Command::LeaveNetworks(changes) = command else {
                    continue;
                };
                for (network, is_left) in changes {
                    match is_left {
                        true => kernel.insert(*network),
                        false => kernel.remove(network),
                    };
                }
            }
            let is_in_kernel = |address: &IpAddr| kernel.iter().any(|network| network.contains(address));
            for (address, kind) in &left_since {
                prop_assert!(is_in_kernel(address), "{} is open for {:?}", address, kinds().nth(*kind));
            }
            if is_all {
                prop_assert_eq!(&refused.refusals.learned, &rows.learned());
                prop_assert_eq!(&decided, &wanted);
                let mut overridden = refused.refusals.overridden();
                overridden.retain(|_, reasons| !reasons.is_empty());
                prop_assert_eq!(&refused.overridden, &overridden);
                // What the kernel may open at a port is not refused to the port, and in front of nothing.
                left_since = left(&refused, &wanted);
                for (address, kind) in &left_since {
                    prop_assert!(is_in_kernel(address), "{} is open for {:?}", address, kinds().nth(*kind));
                }
                let wanted = refused.left_by_kernel.iter().copied();
                let addresses = refused.addresses_left.iter().copied().map(IpNet::from);
                let wanted: BTreeSet<_> = wanted.chain(addresses).collect();
                prop_assert_eq!(&kernel, &wanted);
                let balancers = rows.load_balancers.values();
                let now: BTreeSet<IpAddr> = balancers.flat_map(|row| row.backends.iter().copied()).collect();
                for address in ADDRESSES.iter().map(|text| address(text)) {
                    prop_assert_eq!(view.is_backend(address), now.contains(&address));
                }
                let pods = refused.refusals.learned.pods.get(&Concerned::Everybody);
                for address in now.symmetric_difference(&backends) {
                    let is_pod = pods.is_some_and(|pods| pods.contains(*address));
                    prop_assert!(told_backends.contains(address) || is_pod, "{} is not told", address);
                }
                backends = now;
                told_backends.clear();
            }
        }
    }
}
