//! Reads and writes the match of an EgressFirewall rule's ACL, as ovn-kubernetes writes it:
//! `(ip4.dst == $a1 || ip6.dst == $a2) && inport == @a3 && ((udp && ( udp.dst == 53 )) || (tcp))`.
//!
//! A match of another form is [`AclMatch::Other`], and no error: OVN alone serves rules without a name.
//! Source of the form: `generateMatch` in `egressfirewall.go` of ovn-kubernetes, and recordings of its output. Blanks may
//! stand between all words, or be missing: it joins the networks that a rule leaves out without any.

use std::{fmt, iter, net::IpAddr, str::FromStr};

use ipnet::IpNet;

use super::hash::Family;
use crate::values::{
    firewall::PORTS_PER_RULE_MAX,
    flow::{Protocol, Transport},
};

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

/// The match of a rule with a `cidrSelector`, without its [`exclusions`]:
/// `(ip4.dst == 0.0.0.0/0 && ip4.dst != 10.244.0.0/16&&ip4.dst != 10.246.0.0/16) && inport == @a3`.
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

/// Where a match leaves out networks: ` && ip4.dst != 10.244.0.0/16&&ip4.dst != 10.246.0.0/16`; empty where it does not.
/// ovn-kubernetes leaves out the networks of the cluster that a rule by CIDR would touch, and no others.
pub fn exclusions(text: &str) -> &str {
    let mut cursor = Cursor { rest: text };
    match cursor.take("(").then(|| cursor.destination()) {
        Some(Ok((_, exclusions))) => exclusions,
        _ => "",
    }
}

/// The networks of [`exclusions`].
pub fn excluded_networks(exclusions: &str) -> impl Iterator<Item = IpNet> {
    let mut cursor = Cursor { rest: exclusions };
    iter::from_fn(move || cursor.exclusion())
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
    let (mut nodes, mut networks) = (Vec::new(), Vec::new());
    loop {
        let (to, _) = cursor.destination()?;
        match to {
            To::Set(Family::V4, hash) => v4 = Some(hash),
            To::Set(Family::V6, hash) => v6 = Some(hash),
            To::Node(address) => nodes.push(address),
            To::Network(network) => networks.push(network),
            To::Other => return Ok(AclMatch::Other),
        }
        if !cursor.take("||") {
            break;
        }
    }
    let rest = cursor.port_group_and_transports();
    let is_name = v4.is_some() || v6.is_some();
    if is_name && nodes.is_empty() && networks.is_empty() {
        let (port_group, transports) = rest?;
        return Ok(AclMatch::Name(NameMatch {
            v4,
            v6,
            port_group,
            transports,
        }));
    }
    // OVN alone serves rules by node and by CIDR: there, a form that is not understood is no error.
    let Ok((_, transports)) = rest else {
        return Ok(AclMatch::Other);
    };
    Ok(match (is_name, &*nodes, &*networks) {
        (false, [_, ..], []) => {
            nodes.sort_unstable();
            nodes.dedup();
            AclMatch::Nodes(NodesMatch {
                addresses: nodes.into(),
                transports,
            })
        }
        (false, [], [network]) => AclMatch::Network(NetworkMatch {
            network: network.trunc(),
            transports,
        }),
        _ => AclMatch::Other,
    })
}

/// One destination of a match.
enum To {
    /// `ip4.dst == $a1`
    Set(Family, u64),
    /// `ip4.dst == 172.18.0.2`
    Node(IpAddr),
    /// `ip4.dst == 0.0.0.0/0`
    Network(IpNet),
    /// Another form.
    Other,
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

    /// Takes the text up to a blank, a bracket or an operator.
    fn value(&mut self) -> &'a str {
        let text = self.rest.trim_start();
        let end = text.find([' ', ')', '&', '|']).unwrap_or(text.len());
        let (value, rest) = text.split_at(end);
        self.rest = rest;
        value
    }

    /// `ip4.dst` or `ip6.dst`, and the operator behind it.
    fn family(&mut self, operator: &str) -> Option<Family> {
        let family = if self.take("ip4.dst") {
            Family::V4
        } else if self.take("ip6.dst") {
            Family::V6
        } else {
            return None;
        };
        self.take(operator).then_some(family)
    }

    /// Takes one of the destinations with `||` between them. Returns its [`exclusions`], too.
    fn destination(&mut self) -> Result<(To, &'a str), AclMatchError> {
        let Some(family) = self.family("==") else {
            return Ok((To::Other, ""));
        };
        if self.take("$a") {
            let hash = self.number("an address set's hash")?;
            return Ok((To::Set(family, hash), ""));
        }
        let value = self.value();
        if let Ok(address) = value.parse()
            && Family::of(address) == family
        {
            return Ok((To::Node(address), ""));
        }
        let exclusions = self.rest;
        while self.exclusion().is_some() {}
        let exclusions = &exclusions[..exclusions.len() - self.rest.len()];
        let to = network(value, family).map_or(To::Other, To::Network);
        Ok((to, exclusions))
    }

    /// Takes `&& ip4.dst != 10.244.0.0/16`, if it comes next.
    fn exclusion(&mut self) -> Option<IpNet> {
        let mut ahead = Cursor { rest: self.rest };
        let family = ahead.take("&&").then(|| ahead.family("!=")).flatten()?;
        let network = network(ahead.value(), family)?;
        self.rest = ahead.rest;
        Some(network)
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
        // Those beyond change nothing: a rule with so many has no room at any address.
        let mut push = |transport| {
            if transports.len() <= PORTS_PER_RULE_MAX {
                transports.push(transport);
            }
        };
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
                    push(Transport {
                        protocol,
                        port: Some(self.number("a port")?),
                    });
                    if !self.take("||") {
                        break;
                    }
                }
                self.expect(")", "`)` of a port")?;
            } else {
                push(Transport {
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

/// A network, if it is one of this family.
fn network(text: &str, family: Family) -> Option<IpNet> {
    let network: IpNet = text.parse().ok()?;
    (Family::of(network.addr()) == family).then_some(network)
}

#[cfg(test)]
mod tests;
