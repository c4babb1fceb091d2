//! Reads and writes the match of an EgressFirewall rule's ACL, as ovn-kubernetes writes it:
//! `(ip4.dst == $a1 || ip6.dst == $a2) && inport == @a3 && ((udp && ( udp.dst == 53 )) || (tcp))`.
//!
//! A match of another form is [`AclMatch::Other`], and no error: OVN alone serves rules without a name.
//! Source of the form: `egressfirewall.go` of ovn-kubernetes, and recordings of its output.

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::IpNet;

use crate::values::flow::{Protocol, Transport};

/// The destination in an ACL's match.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum AclMatch {
    /// The destination is the address set of a DNS name.
    Name(NameMatch),
    /// The destination is the addresses of the selected nodes.
    Nodes(NodesMatch),
    /// The destination is a network.
    Network(NetworkMatch),
    /// Another destination.
    Other,
}

/// The match of a rule with a `nodeSelector`: `(ip4.dst == 172.18.0.2 || ip6.dst == fd00:172:18::2) && inport == @a3`.
///
/// ovn-kubernetes writes the addresses without a prefix length. A `cidrSelector` always has one: it is checked by
/// `net.ParseCIDR` (`addEgressFirewallRules` and `validateAndGetEgressFirewallDestination` in its egressfirewall.go).
/// Without a selected node there is no ACL.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NodesMatch {
    /// All host addresses of the selected nodes, in order.
    pub addresses: Box<[IpAddr]>,
    /// Protocols and ports; empty means all traffic.
    pub transports: Vec<Transport>,
}

/// The match of a rule with a `cidrSelector`: `(ip4.dst == 0.0.0.0/0 && ip4.dst != 10.244.0.0/16) && inport == @a3`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NetworkMatch {
    /// The network, without the bits behind its prefix.
    pub network: IpNet,
    /// Protocols and ports; empty means all traffic.
    pub transports: Vec<Transport>,
}

/// The match of a rule with a `dnsName`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NameMatch {
    /// The hash in the name of the IPv4 address set, if the cluster has IPv4.
    pub v4: Option<u64>,
    /// The hash in the name of the IPv6 address set, if the cluster has IPv6.
    pub v6: Option<u64>,
    /// The NB name of the namespace's port group.
    pub port_group: String,
    /// Protocols and ports; empty means all traffic.
    pub transports: Vec<Transport>,
}

/// As ovn-kubernetes writes it.
impl fmt::Display for NameMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sets = [("ip4", self.v4), ("ip6", self.v6)].into_iter();
        let sets = sets.filter_map(|(family, hash)| Some(format!("{family}.dst == $a{}", hash?)));
        let sets: Vec<_> = sets.collect();
        let ports = of_ports(&self.transports);
        write!(
            f,
            "({}) && inport == @{}{ports}",
            sets.join(" || "),
            self.port_group
        )
    }
}

/// The end of a match, for the ports of a rule.
pub(crate) fn of_ports(transports: &[Transport]) -> String {
    let ports = transports.iter().map(|Transport { protocol, port }| {
        let protocol = protocol.name();
        match port {
            Some(port) => format!("({protocol} && ( {protocol}.dst == {port} ))"),
            None => format!("({protocol})"),
        }
    });
    let ports: Vec<_> = ports.collect();
    if ports.is_empty() {
        return String::new();
    }
    format!(" && ({})", ports.join(" || "))
}

/// A match that cannot be read, with the expected text and its place.
#[derive(Clone, Debug, Eq, Hash, PartialEq, thiserror::Error)]
#[error("expected {expected} at `{rest}`")]
pub struct AclMatchError {
    expected: &'static str,
    rest: String,
}

/// The networks that a rule's match leaves out: `ip4.dst != 10.244.0.0/16`. ovn-kubernetes leaves
/// out the networks of the cluster that a rule by CIDR would touch, and no others (`generateMatch`
/// in its egressfirewall.go).
pub fn excluded_networks(text: &str) -> impl Iterator<Item = IpNet> {
    let parts = text.split(".dst != ").skip(1);
    parts.filter_map(|part| part.split([' ', ')']).next()?.parse().ok())
}

#[cfg(test)]
thread_local! {
    static PARSED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// How many matches this thread has parsed since the last call.
#[cfg(test)]
pub(crate) fn take_parsed() -> usize {
    PARSED.take()
}

/// Parses the `match` of an EgressFirewall ACL.
pub fn parse(text: &str) -> Result<AclMatch, AclMatchError> {
    #[cfg(test)]
    PARSED.set(PARSED.get() + 1);
    let mut cursor = Cursor { rest: text };
    cursor.expect("(", "`(`")?;
    let (mut v4, mut v6) = (None, None);
    let mut nodes = Vec::new();
    loop {
        let (family, is_ipv6) = if cursor.take("ip4.dst") {
            (&mut v4, false)
        } else if cursor.take("ip6.dst") {
            (&mut v6, true)
        } else {
            return Ok(AclMatch::Other);
        };
        if !cursor.take("==") {
            return Ok(AclMatch::Other);
        }
        if cursor.take("$a") {
            *family = Some(cursor.number("an address set's hash")?);
        } else if let Some(address) = cursor.parsed::<IpAddr>()
            && address.is_ipv6() == is_ipv6
        {
            nodes.push(address);
        } else {
            let network = cursor.network_match(is_ipv6);
            return Ok(network.map_or(AclMatch::Other, AclMatch::Network));
        }
        if !cursor.take("||") {
            break;
        }
    }
    let rest = cursor.port_group_and_transports();
    if nodes.is_empty() {
        let (port_group, transports) = rest?;
        return Ok(AclMatch::Name(NameMatch {
            v4,
            v6,
            port_group,
            transports,
        }));
    }
    // OVN alone serves rules by node: here, a form that is not understood is no error.
    Ok(match rest {
        Ok((_, transports)) if (v4, v6) == (None, None) => {
            nodes.sort_unstable();
            nodes.dedup();
            AclMatch::Nodes(NodesMatch {
                addresses: nodes.into(),
                transports,
            })
        }
        _ => AclMatch::Other,
    })
}

struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    fn error(&self, expected: &'static str) -> AclMatchError {
        AclMatchError {
            expected,
            rest: self.rest.chars().take(40).collect(),
        }
    }

    /// Skips blanks, then takes `token` if it comes next.
    fn take(&mut self, token: &str) -> bool {
        match self.rest.trim_start().strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, token: &str, expected: &'static str) -> Result<(), AclMatchError> {
        if self.take(token) {
            Ok(())
        } else {
            Err(self.error(expected))
        }
    }

    fn word(&mut self, expected: &'static str) -> Result<&'a str, AclMatchError> {
        let text = self.rest.trim_start();
        let end = text
            .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
            .unwrap_or(text.len());
        if end == 0 {
            return Err(self.error(expected));
        }
        let (word, rest) = text.split_at(end);
        self.rest = rest;
        Ok(word)
    }

    fn number<N: FromStr>(&mut self, expected: &'static str) -> Result<N, AclMatchError> {
        let word = self.word(expected)?;
        word.parse().map_err(|_| AclMatchError {
            expected,
            rest: word.to_owned(),
        })
    }

    /// Takes the text up to a blank or a bracket, if it can be parsed.
    fn parsed<T: FromStr>(&mut self) -> Option<T> {
        let text = self.rest.trim_start();
        let end = text.find([' ', ')']).unwrap_or(text.len());
        let (text, rest) = text.split_at(end);
        let parsed = text.parse().ok()?;
        self.rest = rest;
        Some(parsed)
    }

    /// `0.0.0.0/0 && ip4.dst != 10.244.0.0/16) && inport == @a3`, and the ports if there are any.
    fn network_match(&mut self, is_ipv6: bool) -> Option<NetworkMatch> {
        let destination = if is_ipv6 { "ip6.dst" } else { "ip4.dst" };
        let network: IpNet = self.parsed()?;
        if network.addr().is_ipv6() != is_ipv6 {
            return None;
        }
        while self.take("&&") {
            let is_left_out = self.take(destination) && self.take("!=");
            is_left_out.then(|| self.parsed::<IpNet>())??;
        }
        let (_, transports) = self.port_group_and_transports().ok()?;
        Some(NetworkMatch {
            network: network.trunc(),
            transports,
        })
    }

    fn end(&self) -> Result<(), AclMatchError> {
        if self.rest.trim().is_empty() {
            Ok(())
        } else {
            Err(self.error("the end"))
        }
    }

    /// `) && inport == @a3`, and the ports if there are any.
    fn port_group_and_transports(&mut self) -> Result<(String, Vec<Transport>), AclMatchError> {
        self.expect(")", "`)`")?;
        self.expect("&&", "`&& inport`")?;
        self.expect("inport", "`inport`")?;
        self.expect("==", "`==`")?;
        self.expect("@", "a port group")?;
        let port_group = self.word("a port group's name")?.to_owned();
        let transports = if self.take("&&") {
            self.transports()?
        } else {
            Vec::new()
        };
        self.end()?;
        Ok((port_group, transports))
    }

    /// `((udp && ( udp.dst == 53 || udp.dst == 54 )) || (tcp))`
    fn transports(&mut self) -> Result<Vec<Transport>, AclMatchError> {
        let mut transports = Vec::new();
        self.expect("(", "`(` of the ports")?;
        loop {
            self.expect("(", "`(` of a protocol")?;
            let name = self.word("a protocol")?;
            let protocol = Protocol::of_name(name).ok_or_else(|| AclMatchError {
                expected: "tcp, udp or sctp",
                rest: name.to_owned(),
            })?;
            if self.take("&&") {
                self.expect("(", "`(` of a port")?;
                loop {
                    self.expect(name, "the protocol again")?;
                    self.expect(".dst", "`.dst`")?;
                    self.expect("==", "`==`")?;
                    transports.push(Transport {
                        protocol,
                        port: Some(self.number("a port")?),
                    });
                    if !self.take("||") {
                        break;
                    }
                }
                self.expect(")", "`)` of a port")?;
            } else {
                transports.push(Transport {
                    protocol,
                    port: None,
                });
            }
            self.expect(")", "`)` of a protocol")?;
            if !self.take("||") {
                break;
            }
        }
        self.expect(")", "`)` of the ports")?;
        Ok(transports)
    }
}

#[cfg(test)]
mod tests;
