//! Reads what `dpctl/dump-conntrack` prints: a line for each connection (`ct_dpif_format_entry` in
//! Open vSwitch's lib/ct-dpif.c, the same for these fields in 3.1, 3.5 and 4.0).

use std::net::{IpAddr, SocketAddr};

use dnsflow_core::values::flow::Protocol;

use super::{BLOCKED, Marked, Tracked};

/// The marked connections of a dump. Protocols without ports are left out: with each packet
/// (`ping`), the pod begins anew.
pub(super) fn blocked(dump: &str) -> Marked {
    let mut marked = Marked::default();
    for tracked in dump.lines().filter_map(line) {
        marked.push(tracked);
    }
    marked
}

/// A line such as `tcp,orig=(src=10.244.0.5,dst=203.0.113.2,sport=40000,dport=443),reply=(…),
/// zone=7,mark=1,protoinfo=(state=ESTABLISHED)`, if the connection is marked.
fn line(line: &str) -> Option<Tracked> {
    let (protocol, rest) = line.split_once(",orig=(")?;
    let protocol = Protocol::of_name(protocol)?;
    let (orig, rest) = rest.split_once(')')?;
    let (_, rest) = rest.split_once(')')?;
    let value = |text: &'_ str, key: &str| -> Option<String> {
        let mut fields = text.split(',');
        fields.find_map(|field| Some(field.strip_prefix(key)?.strip_prefix('=')?.to_owned()))
    };
    let mark: u32 = value(rest, "mark")?.parse().ok()?;
    if mark & BLOCKED == 0 {
        return None;
    }
    let socket = |address: &str, port: &str| -> Option<SocketAddr> {
        let address: IpAddr = value(orig, address)?.parse().ok()?;
        Some(SocketAddr::new(address, value(orig, port)?.parse().ok()?))
    };
    Some(Tracked {
        // Zone 0 is not printed.
        zone: value(rest, "zone").map_or(Some(0), |zone| zone.parse().ok())?,
        protocol,
        src: socket("src", "sport")?,
        dst: socket("dst", "dport")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conntrack::FOUND_MAX;

    /// As Open vSwitch 3.1 prints it.
    const DUMP: &str = "\
tcp,orig=(src=10.244.0.5,dst=203.0.113.2,sport=40000,dport=443),reply=(src=203.0.113.2,dst=10.244.0.5,sport=443,dport=40000),zone=7,mark=1,protoinfo=(state=ESTABLISHED)
tcp,orig=(src=10.244.0.5,dst=203.0.113.2,sport=40001,dport=443),reply=(src=203.0.113.2,dst=10.244.0.5,sport=443,dport=40001),zone=7,protoinfo=(state=ESTABLISHED)
tcp,orig=(src=10.244.0.5,dst=203.0.113.2,sport=40002,dport=443),reply=(src=203.0.113.2,dst=10.244.0.5,sport=443,dport=40002),zone=7,mark=2,labels=0x3,protoinfo=(state=ESTABLISHED)
udp,orig=(src=fd00::5,dst=2001:db8::1,sport=40000,dport=443),reply=(src=2001:db8::1,dst=fd00::5,sport=443,dport=40000),zone=65535,mark=3,labels=0x3
icmp,orig=(src=10.244.0.5,dst=203.0.113.2,id=3,type=8,code=0),reply=(src=203.0.113.2,dst=10.244.0.5,id=3,type=0,code=0),zone=7,mark=1
sctp,orig=(src=10.244.0.5,dst=203.0.113.2,sport=1,dport=2),reply=(src=203.0.113.2,dst=10.244.0.5,sport=2,dport=1),mark=1
";

    #[test]
    fn the_marked_connections_are_read() {
        let tracked = |zone, protocol, src: &str, dst: &str| Tracked {
            zone,
            protocol,
            src: src.parse().expect("an address"),
            dst: dst.parse().expect("an address"),
        };
        let wanted = [
            tracked(7, Protocol::Tcp, "10.244.0.5:40000", "203.0.113.2:443"),
            tracked(
                65_535,
                Protocol::Udp,
                "[fd00::5]:40000",
                "[2001:db8::1]:443",
            ),
            tracked(0, Protocol::Sctp, "10.244.0.5:1", "203.0.113.2:2"),
        ];
        assert_eq!(blocked(DUMP).connections, wanted);
    }

    #[test]
    fn what_is_cut_or_odd_is_left_out() {
        let first = DUMP.lines().next().expect("a line");
        for cut in 0..first.find("mark=1").expect("it is marked") + 6 {
            assert_eq!(blocked(&first[..cut]).connections, [], "{cut}");
        }
        for odd in [
            first.replace("mark=1", "mark=x"),
            first.replace("zone=7", "zone=70000"),
            first.replace("sport=40000", "sport=-"),
            first.replace("src=10", "src=999"),
        ] {
            assert_eq!(blocked(&odd).connections, [], "{odd}");
        }
    }

    /// What stays blocked is found first by each search.
    #[test]
    fn connections_of_one_pod_leave_room_for_those_of_others() {
        let (first, _) = DUMP.split_once('\n').expect("a line");
        let mut dump = format!("{first}\n").repeat(FOUND_MAX);
        dump += &first.replace("zone=7", "zone=8");
        let Marked {
            connections,
            left_out,
            ..
        } = blocked(&dump);
        assert_eq!(connections.last().map(|last| last.zone), Some(8));
        assert_eq!(connections.len() + left_out, FOUND_MAX + 1);
    }
}
