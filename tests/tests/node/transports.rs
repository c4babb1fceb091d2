//! Answers of a real DNS server lead to working connections, however they travel: over TCP, over
//! IPv6, in fragments, truncated and asked for again, through a chain of CNAMEs, and from a port of its own.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use dnsflow_tests::{
    agent::Agent,
    firewall::RuleSpec,
    lab,
    lab::{Cluster, Lab},
    pod::{DNS, DNS_V6, Transport},
    process::PATIENT,
    topology::{DNS_POD, DNS_POD_PORT},
};

const POD: &str = "ns1_pod1";

/// Addresses beside the true one: with 245 in all, an answer has 3,966 bytes.
const OTHERS: u8 = 244;

fn web(last: u8) -> IpAddr {
    Ipv4Addr::new(203, 0, 113, last).into()
}

fn web_v6(last: u8) -> IpAddr {
    format!("2001:db8::{last}").parse().expect("an address")
}

/// `name` with so many addresses that no datagram on the way takes them all.
fn large(name: &str, last: u8) -> Vec<String> {
    // 198.18.0.0/15 is for benchmarks (RFC 2544); nobody has these.
    let others = (1..=OTHERS).map(|n| format!("{name}. 30 IN A 198.18.0.{n}"));
    let truth = format!("{name}. 30 IN A 203.0.113.{last}");
    others.chain([truth]).collect()
}

/// Eight CNAMEs from `name` to an address, each to another domain. With long labels they do not
/// fit into 512 bytes.
fn chain(name: &str, label_len: usize, last: u8) -> Vec<String> {
    let link = |n: u8| format!("link{n}{}.cdn{n}.test", "x".repeat(label_len));
    let mut zone = vec![format!("{name}. 30 IN CNAME {}.", link(1))];
    zone.extend((1..8).map(|n| format!("{}. 30 IN CNAME {}.", link(n), link(n + 1))));
    zone.push(format!("{}. 30 IN A 203.0.113.{last}", link(8)));
    zone
}

/// ns1 may reach example.com and what is below it, and nothing else.
fn start(lab: &Lab, zone: &[String]) -> Agent {
    let zone: Vec<&str> = zone.iter().map(String::as_str).collect();
    lab.serve_dns(&zone).expect("the server starts");
    let mut rules = vec![RuleSpec::allow_name("example.com")];
    let denied = ["0.0.0.0/0", "::/0"];
    let families = if lab.cluster().dual_stack { 2 } else { 1 };
    rules.extend(
        denied[..families]
            .iter()
            .map(|cidr| RuleSpec::deny(cidr).expect("a CIDR")),
    );
    lab.set_firewall("ns1", &rules)
        .expect("the rows are written");
    // The gateway must know its next hop before a trace can reach it.
    let reach = |to| fetch(lab, "ns2_pod1", to).expect("ns2 has no firewall");
    reach(web(1));
    if lab.cluster().dual_stack {
        reach(web_v6(1));
    }
    let resolvers = format!("--resolver={DNS_V6},{DNS_POD}:{DNS_POD_PORT}");
    let ports = format!("--dns-port=53,{DNS_POD_PORT}");
    lab.start_agent(&[&resolvers, &ports])
        .expect("the agent is ready")
}

fn fetch(lab: &Lab, pod: &str, to: IpAddr) -> Result<String, String> {
    let url = format!("http://{}/", SocketAddr::new(to, 80));
    let fetched = match to {
        IpAddr::V4(_) => lab.pod(pod).fetch(&url, PATIENT),
        IpAddr::V6(_) => lab.pod(pod).fetch_v6(&url, PATIENT),
    };
    fetched.expect("curl runs").result
}

fn is_blocked(lab: &Lab, to: IpAddr) {
    let out = lab.lets_out(POD, "tcp", SocketAddr::new(to, 80));
    assert!(!out.expect("a trace"), "{to} is open already");
}

/// Asks for `name`, which leads to `to`: blocked before, open after. Returns how many addresses
/// the answer had.
fn opens(lab: &Lab, transport: Transport, server: SocketAddr, name: &str, to: IpAddr) -> usize {
    is_blocked(lab, to);
    let kind = if to.is_ipv4() { "A" } else { "AAAA" };
    let told: Vec<IpAddr> = lab
        .pod(POD)
        .ask(transport, server, kind, &[name])
        .unwrap_or_else(|error| panic!("{name}: {error:#}"));
    assert!(told.contains(&to), "{name}: {told:?}");
    let fetched = fetch(lab, POD, to);
    let page = fetched.unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(page.starts_with(&format!("{to} greets ")), "{page}");
    told.len()
}

/// The pod's own resolver asks for `name`, and curl goes to what it was told.
fn opens_by_name(lab: &Lab, name: &str, to: IpAddr) {
    is_blocked(lab, to);
    let fetched = lab.pod(POD).fetch(&format!("http://{name}/"), PATIENT);
    let page = fetched.expect("curl runs").result;
    let page = page.unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(page.starts_with(&format!("{to} greets ")), "{page}");
}

/// Over UDP without EDNS, the server has no answer but TC=1.
fn is_truncated(lab: &Lab, server: SocketAddr, name: &str) {
    let told = lab
        .pod(POD)
        .ask::<IpAddr>(Transport::Udp, server, "A", &[name]);
    let why = format!("{:#}", told.expect_err("too much for a datagram"));
    assert!(why.contains("truncated"), "{why}");
}

#[test]
fn large_answers_and_chains_lead_to_connections() {
    let lab = lab!("transports-v4", agent);
    let zone = [
        vec!["tcp.example.com. 30 IN A 203.0.113.1".to_owned()],
        large("fragments.example.com", 2),
        large("again.example.com", 3),
        chain("chain.example.com", 0, 4),
        chain("long-chain.example.com", 50, 5),
        vec!["port.example.com. 30 IN A 203.0.113.6".to_owned()],
    ];
    let _agent = start(&lab, &zone.concat());

    opens(&lab, Transport::Tcp, DNS, "tcp.example.com", web(1));
    let all = usize::from(OTHERS) + 1;
    let told = opens(&lab, Transport::Edns, DNS, "fragments.example.com", web(2));
    assert_eq!(told, all, "over UDP, in fragments");
    is_truncated(&lab, DNS, "again.example.com");
    let told = opens(&lab, Transport::Tcp, DNS, "again.example.com", web(3));
    assert_eq!(told, all, "over TCP after TC=1");
    opens(&lab, Transport::Udp, DNS, "chain.example.com", web(4));
    is_truncated(&lab, DNS, "long-chain.example.com");
    opens_by_name(&lab, "long-chain.example.com", web(5));
    // Past the Service, at a port of its own.
    let server = SocketAddr::new(DNS_POD.into(), DNS_POD_PORT);
    opens(&lab, Transport::Udp, server, "port.example.com", web(6));
    is_blocked(&lab, web(7));
}

#[test]
fn a_dns_server_with_an_ipv6_address_is_trusted() {
    let cluster = Cluster {
        dual_stack: true,
        ..Cluster::default()
    };
    let lab = lab!("transports-v6", agent, cluster);
    let zone = [
        vec![
            "udp.example.com. 30 IN A 203.0.113.1".to_owned(),
            "udp.example.com. 30 IN AAAA 2001:db8::1".to_owned(),
            "tcp.example.com. 30 IN AAAA 2001:db8::2".to_owned(),
        ],
        large("fragments.example.com", 3),
        large("again.example.com", 4),
        chain("chain.example.com", 0, 5),
        chain("long-chain.example.com", 50, 6),
    ];
    let _agent = start(&lab, &zone.concat());

    opens(&lab, Transport::Udp, DNS_V6, "udp.example.com", web(1));
    opens(&lab, Transport::Udp, DNS_V6, "udp.example.com", web_v6(1));
    opens(&lab, Transport::Tcp, DNS_V6, "tcp.example.com", web_v6(2));
    let all = usize::from(OTHERS) + 1;
    let told = opens(
        &lab,
        Transport::Edns,
        DNS_V6,
        "fragments.example.com",
        web(3),
    );
    assert_eq!(told, all, "over UDP, in fragments");
    is_truncated(&lab, DNS_V6, "again.example.com");
    let told = opens(&lab, Transport::Tcp, DNS_V6, "again.example.com", web(4));
    assert_eq!(told, all, "over TCP after TC=1");
    opens(&lab, Transport::Udp, DNS_V6, "chain.example.com", web(5));
    // The pod's own resolver asks the same server.
    lab.name_server(DNS_V6.ip()).expect("a file");
    is_truncated(&lab, DNS_V6, "long-chain.example.com");
    opens_by_name(&lab, "long-chain.example.com", web(6));
    is_blocked(&lab, web_v6(7));
}
