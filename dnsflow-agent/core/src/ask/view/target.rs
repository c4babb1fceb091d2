//! The target of a question, in the forms in which people have it: as an address, in a URL, or as they gave it to `nc`.

use std::{net::IpAddr, str::FromStr};

use hickory_proto::rr::Name;

use crate::values::{
    flow::{Protocol, Transport},
    name::DomainName,
};

/// Names of ports and schemes of URLs, with the usual port (IANA's registry of service names and port numbers; `ws` and
/// `wss`: RFC 6455, section 3). The protocol is TCP, but for NTP.
const SERVICES: [(&str, u16); 26] = [
    ("amqp", 5672),
    ("amqps", 5671),
    ("domain", 53),
    ("domain-s", 853),
    ("ftp", 21),
    ("git", 9418),
    ("http", 80),
    ("https", 443),
    ("imap", 143),
    ("imaps", 993),
    ("kerberos", 88),
    ("ldap", 389),
    ("ldaps", 636),
    ("mongodb", 27017),
    ("mqtt", 1883),
    ("mysql", 3306),
    ("ntp", 123),
    ("pop3s", 995),
    ("postgresql", 5432),
    ("redis", 6379),
    ("smtp", 25),
    ("ssh", 22),
    ("submission", 587),
    ("submissions", 465),
    ("ws", 80),
    ("wss", 443),
];

/// The target of the question.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Target {
    /// A name, and every address that the pod was told for it.
    Name(DomainName, Option<Transport>),
    /// An address.
    Address(IpAddr, Option<Transport>),
}

/// A text that is no target.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum TargetError {
    /// It has another form.
    #[error(
        "`{0}` is no target: use a URL, NAME, ADDRESS, NAME:PORT, ADDRESS:PORT or [IPV6]:PORT, and /udp or \
         /sctp behind a port that is not for TCP"
    )]
    Form(String),
    /// It is the pattern of a rule.
    #[error("`{0}` stands for many names: ask for one of them, such as {1}")]
    Wildcard(String, String),
    /// It has a protocol without ports.
    #[error(
        "`{0}`: ICMP is not a matter of ports, and rules with `ports` do not hold for it: ask for {1} alone, \
         and read the rules without ports"
    )]
    Icmp(String, String),
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let text = text.trim();
        let error = || TargetError::Form(text.to_owned());
        if text.starts_with("*.") {
            let one = text.replacen('*', "www", 1);
            return Err(TargetError::Wildcard(text.to_owned(), one));
        }
        if let Some((scheme, rest)) = text.split_once("://") {
            // RFC 3986, sections 3 and 3.2.
            let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
            let host = authority.rsplit('@').next().unwrap_or_default();
            let usual = service(&scheme.to_ascii_lowercase());
            return host_and_port(host, usual).ok_or_else(error);
        }
        let is_icmp = |behind: &str| ["icmp", "icmpv6", "icmp6"].contains(&behind);
        if let Some((host, behind)) = text.rsplit_once(['/', ':', ' '])
            && is_icmp(&behind.to_ascii_lowercase())
        {
            return Err(TargetError::Icmp(text.to_owned(), host.to_owned()));
        }
        let mut words = text.split_ascii_whitespace();
        let both = (words.next(), words.next(), words.next());
        if let (Some(host), Some(port), None) = both {
            let transport = transport(port).ok_or_else(error)?;
            return match host_and_port(host, None).ok_or_else(error)? {
                Self::Name(name, None) => Ok(Self::Name(name, Some(transport))),
                Self::Address(address, None) => Ok(Self::Address(address, Some(transport))),
                _ => Err(error()),
            };
        }
        host_and_port(text, None).ok_or_else(error)
    }
}

/// Parses a host, with its port behind a colon; `usual` holds without one.
fn host_and_port(text: &str, usual: Option<Transport>) -> Option<Target> {
    if let Ok(address) = text.parse() {
        return Some(Target::Address(address, usual));
    }
    let (host, transport) = match text.rsplit_once(':') {
        Some((host, port)) if !text.ends_with(']') => (host, Some(transport(port)?)),
        _ => (text, usual),
    };
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    match bare.unwrap_or(host).parse() {
        Ok(address) => Some(Target::Address(address, transport)),
        Err(_) if bare.is_some() || host.contains(':') => None,
        Err(_) => {
            let name = host_name(host)?;
            // An address with a mistake: no name ends with a number (RFC 3696, section 2).
            let last = name.labels().last().unwrap_or_default();
            (!last.iter().all(u8::is_ascii_digit)).then_some(Target::Name(name, transport))
        }
    }
}

/// Parses a name as people write it. With a slash, it is a network, or a path without a scheme; with a space, several
/// words. Of one that is not ASCII, pods ask for the A-labels (RFC 5891, section 4.4), and a
/// `dnsName` has them.
fn host_name(text: &str) -> Option<DomainName> {
    if text.contains(['/', ' ', '\t']) {
        return None;
    }
    if text.is_ascii() {
        return DomainName::from_presentation(text).ok();
    }
    let name = Name::from_utf8(text).ok()?;
    DomainName::from_labels(name.iter()).ok()
}

/// Parses `443`, `53/udp`, `https`.
fn transport(text: &str) -> Option<Transport> {
    let (port, protocol) = match text.split_once('/') {
        Some((port, protocol)) => (port, Some(Protocol::of_name(protocol)?)),
        None => (text, None),
    };
    let usual = match port.parse() {
        Ok(0) => return None,
        Ok(port) => Transport {
            protocol: Protocol::Tcp,
            port: Some(port),
        },
        Err(_) => service(port)?,
    };
    Some(Transport {
        protocol: protocol.unwrap_or(usual.protocol),
        ..usual
    })
}

/// The usual port of a service.
fn service(name: &str) -> Option<Transport> {
    let (name, port) = SERVICES.into_iter().find(|(known, _)| *known == name)?;
    Some(Transport {
        protocol: match name {
            "ntp" => Protocol::Udp,
            _ => Protocol::Tcp,
        },
        port: Some(port),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<Target> {
        text.parse().ok()
    }

    fn port(protocol: Protocol, port: u16) -> Option<Transport> {
        Some(Transport {
            protocol,
            port: Some(port),
        })
    }

    fn tcp(number: u16) -> Option<Transport> {
        port(Protocol::Tcp, number)
    }

    fn name() -> DomainName {
        DomainName::from_presentation("example.com").expect("a name")
    }

    #[test]
    fn targets_are_parsed() {
        let v6 = "2001:db8::1".parse::<IpAddr>().expect("an address");
        for written in ["2001:db8::1", "[2001:db8::1]"] {
            assert_eq!(parse(written), Some(Target::Address(v6, None)));
        }
        assert_eq!(
            parse("[2001:db8::1]:443"),
            Some(Target::Address(v6, tcp(443)))
        );
        for written in ["Example.com:443/tcp", "example.com.:443"] {
            let named = Target::Name(name(), tcp(443));
            assert_eq!(parse(written), Some(named), "{written}");
        }
        for wrong in [
            "",
            " ",
            "example.com:0",
            "[x]:443",
            "[2001:db8::1",
            "a..b",
            "203.0.113.300",
            "203.0.113.0/24:443",
            "2001:db8::/32",
            "mün chen.example.com",
            "203.0.113.0/24",
            "example.com/path",
            "example.com/udp",
            "example.com 443 80",
            "example.com:443 80",
            "example.com:nothing",
            "https://",
            "https://user@:443/",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn targets_are_taken_as_they_are_pasted() {
        for (written, transport) in [
            ("https://example.com", tcp(443)),
            ("HTTPS://Example.com/path:1?query=a:2#part", tcp(443)),
            ("http://user:secret@example.com:8080/", tcp(8080)),
            ("http://example.com?query", tcp(80)),
            ("postgresql://db@example.com/table", tcp(5432)),
            ("other://example.com/", None),
            ("other://example.com:7", tcp(7)),
            ("example.com 443", tcp(443)),
            ("example.com  53/udp", port(Protocol::Udp, 53)),
            ("example.com:https", tcp(443)),
            ("example.com:ntp", port(Protocol::Udp, 123)),
            ("example.com:domain/udp", port(Protocol::Udp, 53)),
        ] {
            let named = Target::Name(name(), transport);
            assert_eq!(parse(written), Some(named), "{written}");
        }
        let v6 = "2001:db8::1".parse::<IpAddr>().expect("an address");
        for written in [
            "https://[2001:db8::1]/",
            "2001:db8::1 443",
            "[2001:db8::1]:https",
        ] {
            assert_eq!(
                parse(written),
                Some(Target::Address(v6, tcp(443))),
                "{written}"
            );
        }
    }

    #[test]
    fn a_refused_target_is_refused_with_what_to_ask() {
        for (written, expected) in [
            (
                "*.example.com:443",
                "`*.example.com:443` stands for many names: ask for one of them, such as www.example.com:443",
            ),
            (
                "example.com/icmp",
                "`example.com/icmp`: ICMP is not a matter of ports, and rules with `ports` do not hold for it: ask \
                 for example.com alone, and read the rules without ports",
            ),
        ] {
            let error = written.parse::<Target>().expect_err(written);
            assert_eq!(error.to_string(), expected);
        }
        for written in ["2001:db8::1 icmp", "203.0.113.1/ICMP", "example.com:icmpv6"] {
            let error = written.parse::<Target>().expect_err(written);
            assert!(matches!(error, TargetError::Icmp(..)), "{error}");
        }
    }

    #[test]
    fn services_are_in_order_and_each_is_there_once() {
        assert!(SERVICES.is_sorted_by(|(one, _), (other, _)| one < other));
    }
}
