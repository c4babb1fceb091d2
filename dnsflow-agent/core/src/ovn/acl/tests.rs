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
    ] {
        assert_eq!(parse(text), Ok(AclMatch::Other), "{text}");
    }
}

#[test]
fn networks_are_read() {
    let all = "(ip4.dst == 0.0.0.0/0 && ip4.dst != 10.244.0.0/16 && ip4.dst != 10.245.0.0/16) && inport == @a1";
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
