use proptest::{collection::vec, prelude::*};

use super::*;

fn name(text: &str) -> NameMatch {
    match parse(text) {
        Ok(AclMatch::Name(name)) => name,
        other => panic!("{text}: {other:?}"),
    }
}

fn port(protocol: Protocol, port: u16) -> Transport {
    Transport {
        protocol,
        port: Some(port),
    }
}

#[test]
fn families_are_told_apart() {
    let v4 = name("(ip4.dst == $a18346816605274050565) && inport == @a9633447981174624809");
    assert_eq!((v4.v4, v4.v6), (Some(18_346_816_605_274_050_565), None));
    assert_eq!(v4.port_group, "a9633447981174624809");
    assert_eq!(v4.transports, []);
    let v6 = name("(ip6.dst == $a2) && inport == @pg_1");
    assert_eq!((v6.v4, v6.v6), (None, Some(2)));
    assert_eq!(v6.port_group, "pg_1");
    let dual = name("(ip4.dst == $a1 || ip6.dst == $a2) && inport == @a3");
    assert_eq!((dual.v4, dual.v6), (Some(1), Some(2)));
}

#[test]
fn a_match_that_is_written_is_read() {
    for text in [
        "(ip4.dst == $a1) && inport == @a3",
        "(ip6.dst == $a2) && inport == @a3 && ((udp))",
        "(ip4.dst == $a1 || ip6.dst == $a2) && inport == @pg_1 && \
         ((udp && ( udp.dst == 53 )) || (tcp) || (sctp && ( sctp.dst == 7 )))",
    ] {
        assert_eq!(name(text).to_string(), text);
    }
}

#[test]
fn no_more_ports_are_kept_than_say_that_there_are_more() {
    for count in [PORTS_PER_RULE_MAX, PORTS_PER_RULE_MAX + 1, 45_000] {
        let all: Vec<_> = (1..=count)
            .map(|number| port(Protocol::Tcp, number as u16))
            .collect();
        let text = format!("(ip4.dst == $a1) && inport == @a3{}", of_ports(&all));
        let kept = name(&text).transports;
        assert_eq!(kept, all[..count.min(PORTS_PER_RULE_MAX + 1)]);
    }
}

#[test]
fn ports_keep_their_protocol() {
    let ports =
        |text: &str| name(&format!("(ip4.dst == $a1) && inport == @a3 && {text}")).transports;
    assert_eq!(
        ports("((udp && ( udp.dst == 53 )) || (tcp && ( tcp.dst == 443 )))"),
        [port(Protocol::Udp, 53), port(Protocol::Tcp, 443)]
    );
    assert_eq!(
        ports("((tcp && ( tcp.dst == 80 || tcp.dst == 443 )))"),
        [port(Protocol::Tcp, 80), port(Protocol::Tcp, 443)]
    );
    assert_eq!(
        ports("((udp) || (sctp && ( sctp.dst == 7 )))"),
        [
            Transport {
                protocol: Protocol::Udp,
                port: None
            },
            port(Protocol::Sctp, 7)
        ]
    );
}

#[test]
fn other_destinations_are_no_names() {
    for text in [
        "(ip4.dst == 172.18.0.2 || ip4.dst == $a1) && inport == @a1",
        "(ip4.dst == 172.18.0.2) && inport == @a1 && ((icmp))",
        "(ip4.dst == 10.20.0.0/16 || ip4.dst == 10.30.0.0/16) && inport == @a1",
        "(ip4.dst == 10.20.0.0/16 && ip4.dst != $a1) && inport == @a1",
        "(ip6.dst == 10.20.0.0/16) && inport == @a1",
        "(ip4.src == 10.20.0.0/16) && inport == @a1",
        // ovn-kubernetes takes an address of IPv6 that stands for one of IPv4 for the latter (`IsIPv6CIDRString` and
        // `net.ParseCIDR`). OVN refuses the match.
        "(ip4.dst == ::ffff:10.0.0.0/104 && ip4.dst != 10.244.0.0/16) && inport == @a1",
        "(ip4.dst == ::ffff:10.0.0.1/0 && ) && inport == @a1",
    ] {
        assert_eq!(parse(text), Ok(AclMatch::Other), "{text}");
    }
}

#[test]
fn networks_are_read() {
    let all = "(ip4.dst == 0.0.0.0/0 && ip4.dst != 10.244.0.0/16&&ip4.dst != 10.245.0.0/16) && inport == @a1";
    for (text, network, transports) in [
        // As ovn-kubernetes has written it.
        (
            "(ip4.dst == 0.0.0.0/0 && ip4.dst != 10.244.0.0/16) && inport == @a9633447981174624809",
            "0.0.0.0/0",
            vec![],
        ),
        (all, "0.0.0.0/0", vec![]),
        ("(ip6.dst == ::/0) && inport == @a1", "::/0", vec![]),
        (
            "(ip4.dst == 172.18.0.2/24) && inport == @a1",
            "172.18.0.0/24",
            vec![],
        ),
        (
            "(ip4.dst == 10.20.0.0/16) && inport == @a1 && ((tcp && ( tcp.dst == 80 )))",
            "10.20.0.0/16",
            vec![port(Protocol::Tcp, 80)],
        ),
    ] {
        let expected = AclMatch::Network(NetworkMatch {
            network: network.parse().expect("a network"),
            transports,
        });
        assert_eq!(parse(text), Ok(expected), "{text}");
    }
}

/// The destination of a rule, as ovn-kubernetes knows it.
#[derive(Clone, Debug)]
enum Selected {
    /// The hashes of its address sets.
    Name([Option<u64>; 2]),
    /// The addresses of the nodes: at least one.
    Nodes(Vec<IpAddr>),
    /// Some bits may stand behind the prefix.
    Cidr(IpNet),
}

/// `IPNet.Contains` of Go, for networks without bits behind their prefixes.
fn meet(one: &IpNet, other: &IpNet) -> bool {
    one.contains(&other.addr()) || other.contains(&one.addr())
}

/// The match that ovn-kubernetes writes for a rule (`validateAndGetEgressFirewallDestination`, `addEgressFirewallRules`,
/// `toExpr` and `generateMatch`), and the networks in it that are left out.
fn generated(to: &Selected, subnets: &[IpNet], ports: &[(&str, u16)]) -> (String, Vec<IpNet>) {
    let version = |address: IpAddr| if address.is_ipv4() { "ip4" } else { "ip6" };
    let mut left_out = Vec::new();
    let destinations: Vec<String> = match to {
        Selected::Name(sets) => {
            let sets = ["ip4", "ip6"].into_iter().zip(sets);
            let sets =
                sets.filter_map(|(version, set)| Some(format!("{version}.dst == $a{}", (*set)?)));
            sets.collect()
        }
        Selected::Nodes(addresses) => {
            let mut texts: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
            texts.sort();
            let version = |text: &String| version(text.parse().expect("an address"));
            let texts = texts.iter();
            texts
                .map(|text| format!("{}.dst == {text}", version(text)))
                .collect()
        }
        Selected::Cidr(cidr) => {
            let subnets = subnets.iter().filter(|subnet| meet(subnet, &cidr.trunc()));
            left_out.extend(subnets.copied());
            let version = version(cidr.addr());
            let mut text = format!("{version}.dst == {cidr}");
            if !left_out.is_empty() {
                let texts = left_out
                    .iter()
                    .map(|subnet| format!("{version}.dst != {subnet}"));
                text += &format!(" && {}", texts.collect::<Vec<_>>().join("&&"));
            }
            vec![text]
        }
    };
    let mut text = format!(
        "({}) && inport == @a9633447981174624809",
        destinations.join(" || ")
    );
    if !ports.is_empty() {
        text += &format!(" && ({})", generated_ports(ports));
    }
    (text, left_out)
}

/// `egressGetL4Match`.
fn generated_ports(ports: &[(&str, u16)]) -> String {
    let mut texts = Vec::new();
    for protocol in ["udp", "tcp", "sctp"] {
        let mut of_protocol = ports.iter().filter(|(of, _)| *of == protocol).peekable();
        if of_protocol.peek().is_none() {
            continue;
        }
        // No port stands for all of them, and for those in front of it.
        texts.push(match of_protocol.clone().any(|(_, port)| *port == 0) {
            true => format!("({protocol})"),
            false => {
                let ports = of_protocol.map(|(_, port)| format!(" {protocol}.dst == {port} "));
                format!("({protocol} && ({}))", ports.collect::<Vec<_>>().join("||"))
            }
        });
    }
    texts.join(" || ")
}

/// Networks that ovn-kubernetes has read: without bits behind the prefix, some within others.
fn subnet() -> impl Strategy<Value = IpNet> {
    let v4 = (8..=30_u8, 0..4_u32, any::<u32>()).prop_map(|(len, net, bits)| {
        let bits = 0x0a00_0000 | net << 16 | bits & 0xffff;
        IpNet::new(IpAddr::from(bits.to_be_bytes()), len).expect("few bits")
    });
    let v6 = (16..=64_u8, 0..4_u128, any::<u64>()).prop_map(|(len, net, bits)| {
        let bits = 0xfd00 << 112 | net << 64 | u128::from(bits);
        IpNet::new(IpAddr::from(bits.to_be_bytes()), len).expect("few bits")
    });
    prop_oneof![v4, v6].prop_map(|network| network.trunc())
}

fn selected() -> impl Strategy<Value = Selected> {
    let name = (any::<u64>(), any::<u64>(), 0..3_u8).prop_map(|(v4, v6, has)| {
        Selected::Name([(has != 1).then_some(v4), (has != 0).then_some(v6)])
    });
    let nodes = vec(any::<IpAddr>(), 1..5)
        .prop_filter("Go writes it as one of IPv4", |addresses| {
            addresses.iter().all(|one| one.to_canonical() == *one)
        });
    // One of them, something within it, and all there is.
    let cidr = (subnet(), any::<u32>(), 0..33_u8).prop_map(|(subnet, bits, shorter)| {
        let address = match subnet.addr() {
            IpAddr::V4(address) => IpAddr::from((u32::from(address) | bits & 0xffff).to_be_bytes()),
            IpAddr::V6(address) => {
                IpAddr::from((u128::from(address) | u128::from(bits)).to_be_bytes())
            }
        };
        let len = subnet.prefix_len().saturating_sub(shorter);
        Selected::Cidr(IpNet::new(address, len).expect("no longer"))
    });
    prop_oneof![1 => name, 1 => nodes.prop_map(Selected::Nodes), 4 => cidr]
}

fn ports() -> impl Strategy<Value = Vec<(&'static str, u16)>> {
    // The pattern in the resource's definition, `^TCP|UDP|SCTP$`, allows others, which are left out.
    let protocols = ["udp", "tcp", "sctp", "tcpx"];
    vec((0..protocols.len(), 0..4_u16), 0..6).prop_map(move |ports| {
        ports
            .into_iter()
            .map(|(at, port)| (protocols[at], port))
            .collect()
    })
}

/// What a match with these ports means; `None`: OVN refuses it.
fn transports(ports: &[(&str, u16)]) -> Option<Vec<Transport>> {
    let mut transports = Vec::new();
    for name in ["udp", "tcp", "sctp"] {
        let protocol = Protocol::of_name(name).expect("one of three");
        let of_protocol = ports.iter().filter(|(of, _)| *of == name);
        let of_protocol: Vec<u16> = of_protocol.map(|(_, port)| *port).collect();
        match of_protocol.contains(&0) {
            true => transports.push(Transport {
                protocol,
                port: None,
            }),
            false => {
                transports.extend(of_protocol.into_iter().map(|number| port(protocol, number)))
            }
        }
    }
    (ports.is_empty() || !transports.is_empty()).then_some(transports)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_ovn_kubernetes_writes_is_read(
        to in selected(),
        subnets in vec(subnet(), 0..8),
        ports in ports(),
    ) {
        let (text, left_out) = generated(&to, &subnets, &ports);
        // Blanks change nothing, and OVN writes the match into its logical flows as it is.
        let without = text.replace(' ', "");
        let with = ["&&", "||", "(", ")", "==", "!="]
            .into_iter()
            .fold(text.clone(), |text, sign| text.replace(sign, &format!(" {sign} ")));
        for text in [&text, &without, &with] {
            let read: Vec<IpNet> = excluded_networks(exclusions(text)).collect();
            prop_assert_eq!(&read, &left_out, "{}", text);
            let parsed = parse(text);
            let Some(transports) = transports(&ports) else {
                let is_name = matches!(to, Selected::Name(_));
                prop_assert!(if is_name { parsed.is_err() } else { parsed == Ok(AclMatch::Other) }, "{}", text);
                continue;
            };
            let expected = match &to {
                Selected::Name([v4, v6]) => AclMatch::Name(NameMatch {
                    v4: *v4,
                    v6: *v6,
                    port_group: "a9633447981174624809".into(),
                    transports,
                }),
                Selected::Nodes(addresses) => {
                    let addresses: std::collections::BTreeSet<IpAddr> = addresses.iter().copied().collect();
                    let addresses = addresses.into_iter().collect();
                    AclMatch::Nodes(NodesMatch { addresses, transports })
                }
                Selected::Cidr(cidr) => AclMatch::Network(NetworkMatch { network: cidr.trunc(), transports }),
            };
            prop_assert_eq!(parsed, Ok(expected), "{}", text);
        }
    }

    #[test]
    fn any_text_is_read_or_refused(text in "[(]?(ip[46]\\.dst|==|!=|&&|\\|\\||[$]a1|10\\.0\\.0\\.0/8|::1|[()@ ]|é){0,12}") {
        let networks = excluded_networks(exclusions(&text)).count();
        prop_assert!(networks <= text.matches("!=").count());
        let _ = parse(&text);
    }
}

/// They are never written for an address set, nor for a node.
#[test]
fn an_exclusion_behind_a_set_or_a_node_is_not_left_aside() {
    let set = "(ip4.dst == $a1 && ip4.dst != 10.244.0.0/16) && inport == @a1";
    assert!(parse(set).is_err());
    let node = "(ip4.dst == 172.18.0.2 && ip4.dst != 10.244.0.0/16) && inport == @a1";
    assert_eq!(parse(node), Ok(AclMatch::Other));
}

#[test]
fn exclusions_are_read_though_the_rest_is_not_understood() {
    for text in [
        "(ip4.dst == ::ffff:10.0.0.0/104 && ip4.dst != 10.244.0.0/16&&ip4.dst != 10.246.0.0/16) && inport == @a1",
        "(ip4.dst == 0.0.0.0/0 && ip4.dst != 10.244.0.0/16&&ip4.dst != 10.246.0.0/16) && inport == @a1 && ()",
    ] {
        let read: Vec<_> = excluded_networks(exclusions(text))
            .map(|one| one.to_string())
            .collect();
        assert_eq!(read, ["10.244.0.0/16", "10.246.0.0/16"], "{text}");
        assert_eq!(parse(text), Ok(AclMatch::Other), "{text}");
    }
}

#[test]
fn nodes_are_their_addresses() {
    let nodes = |text: &str| match parse(text) {
        Ok(AclMatch::Nodes(NodesMatch {
            addresses,
            transports,
        })) => (addresses, transports),
        other => panic!("{text}: {other:?}"),
    };
    let address = |text: &str| -> IpAddr { text.parse().expect("an address") };
    // As ovn-kubernetes has written it, for a node with both families.
    let both =
        "(ip4.dst == 172.18.0.2 || ip6.dst == fd00:172:18::2) && inport == @a9633444682639740176";
    let (addresses, transports) = nodes(both);
    let expected = ["172.18.0.2", "fd00:172:18::2"].map(address);
    assert_eq!((&*addresses, &*transports), (&expected[..], &[][..]));
    // ovn-kubernetes sorts them as texts.
    let (addresses, transports) = nodes(
        "(ip4.dst == 172.18.0.10 || ip4.dst == 172.18.0.2) && inport == @a1 && ((tcp && ( tcp.dst == 6443 )))",
    );
    let expected = ["172.18.0.2", "172.18.0.10"].map(address);
    let port = [port(Protocol::Tcp, 6443)];
    assert_eq!((&*addresses, &*transports), (&expected[..], &port[..]));
}

#[test]
fn what_is_not_understood_is_named() {
    let check = |text: &str, error: &str| {
        assert_eq!(
            parse(text).map_err(|e| e.to_string()),
            Err(error.to_owned()),
            "{text}"
        );
    };
    check("ip4.dst == $a1", "expected `(` at `ip4.dst == $a1`");
    check(
        "(ip4.dst == $a1) && outport == @a3",
        "expected `inport` at ` outport == @a3`",
    );
    check(
        "(ip4.dst == $a1) && inport == @a3 && ((icmp))",
        "expected tcp, udp or sctp at `icmp`",
    );
    check(
        "(ip4.dst == $a1) && inport == @a3 && ((tcp && ( tcp.dst == 70000 )))",
        "expected a port at `70000`",
    );
    check(
        "(ip4.dst == $a1) && inport == @a3 && ((tcp)) && ip.ttl == 1",
        "expected the end at ` && ip.ttl == 1`",
    );
}
