//! What `dnsflow learn` has heard, and the EgressFirewall that it comes to.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    io::{self, Write},
    net::IpAddr,
    time::Duration,
};

use dnsflow_core::{
    ask::{history::ConnectionView, view::target_text_of},
    values::{flow::Protocol, name::DomainName},
};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use super::Status;
use crate::{
    egress_firewall::{NAME, SUBDOMAINS_ANNOTATION},
    options::{LearnFormat, LearnOptions},
    output::write_json_line,
};

/// At most this many places without a name come from one node.
const LITERALS_MAX: usize = 1_024;
/// At most this many of them are shown.
const LITERALS_SHOWN: usize = 32;

/// A line of the answer to `learn`.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Line {
    /// A name that a pod was told addresses for, once.
    Name(LearnedName),
    /// The time is over.
    End {
        /// Answers for further names, which found no room.
        left_out: u64,
        /// Where pods have connected without a name. `dnsflow learn` itself adds them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        by_address: Vec<Literal>,
    },
}

/// A place that a pod has connected to without a DNS name.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Literal {
    address: IpAddr,
    protocol: Protocol,
    port: u16,
}

impl Literal {
    /// Those among connections since this time, [`LITERALS_MAX`] at most.
    pub(crate) fn among(connections: &[ConnectionView], since: Duration) -> Vec<Self> {
        let nameless = connections.iter().filter(|connection| {
            connection.names.is_empty() && connection.last_s <= since.as_secs()
        });
        let literals: BTreeSet<Self> = nameless
            .map(|connection| Self {
                address: connection.address,
                protocol: connection.protocol,
                port: connection.port,
            })
            .collect();
        literals.into_iter().take(LITERALS_MAX).collect()
    }
}

/// A name that pods were told addresses for.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct LearnedName {
    /// The name, in presentation format.
    #[serde(deserialize_with = "presentation")]
    pub name: String,
    /// Addresses that it led to.
    pub addresses: Vec<IpAddr>,
}

/// Reads a name, and gives it as a [`DomainName`] is displayed: in visible ASCII characters. Nothing else can come into
/// a manifest, whoever says that it is a name.
fn presentation<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = String::deserialize(from)?;
    let name = DomainName::from_presentation(&text);
    let name = name.map_err(|error| D::Error::custom(format!("no name: {error}")))?;
    Ok(name.to_string())
}

/// What the pods of a namespace have asked for.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Learned {
    /// The namespace.
    pub namespace: String,
    /// For how long.
    pub time: Duration,
    /// The names, by suffix.
    pub names: BTreeMap<BySuffix, BTreeSet<IpAddr>>,
    /// Answers for further names, which found no room.
    pub left_out: u64,
    /// Where its pods have connected without a name.
    pub by_address: BTreeSet<Literal>,
    /// Whether pods of the namespace have IPv4 addresses, and IPv6 addresses.
    pub families: (bool, bool),
    /// Whether the namespace has an EgressFirewall.
    pub has_firewall: bool,
}

/// A name, ordered by its last label, then by the one before, and so on.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct BySuffix(Vec<String>);

impl BySuffix {
    /// The labels of a name.
    pub fn new(name: &str) -> Self {
        Self(
            name.trim_end_matches('.')
                .rsplit('.')
                .map(str::to_owned)
                .collect(),
        )
    }

    /// The name.
    pub fn name(&self) -> String {
        let labels: Vec<_> = self.0.iter().rev().map(String::as_str).collect();
        labels.join(".")
    }

    fn parent(&self) -> Option<Self> {
        let (_, parent) = self.0.split_last()?;
        Some(Self(parent.to_owned()))
    }

    /// Whether an EgressFirewall takes it for a name: letters, digits and hyphens (its definition's
    /// pattern, ovn-kubernetes' `go-controller/pkg/crd/egressfirewall/v1/types.go`).
    fn is_host_name(&self) -> bool {
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        let is_label = |label: &String| !label.is_empty() && label.bytes().all(is_letter);
        self.0.iter().all(is_label)
    }
}

impl Learned {
    /// Takes in what a node says of itself. Returns whether pods of the namespace are there.
    pub(crate) fn meet(&mut self, status: &Status) -> bool {
        let ports = status.node.ports.iter();
        let mut ports = ports
            .filter(|port| port.namespace == self.namespace)
            .peekable();
        let is_there = ports.peek().is_some();
        let (has_v4, has_v6) = &mut self.families;
        for address in ports.flat_map(|port| &port.addresses) {
            *has_v4 |= address.is_ipv4();
            *has_v6 |= address.is_ipv6();
        }
        let mut firewalls = status.node.firewalls.iter();
        self.has_firewall |= firewalls.any(|firewall| firewall.namespace == self.namespace);
        is_there
    }

    /// Prints what was heard, but for lines, which are printed as they come.
    pub(crate) fn write(&self, options: &LearnOptions, output: &mut impl Write) -> io::Result<()> {
        match options.output {
            // Without a name, it would only deny.
            LearnFormat::Manifest if self.heard_nothing() => Ok(()),
            LearnFormat::Manifest => write!(output, "{}", self.manifest(&options.wildcard)),
            LearnFormat::Json => {
                let mut names = self.names();
                names.try_for_each(|name| write_json_line(&name, output))
            }
            LearnFormat::Lines => Ok(()),
        }
    }

    /// Whether no name was heard.
    pub(crate) fn heard_nothing(&self) -> bool {
        self.names.is_empty()
    }

    /// What to say if no name was heard.
    pub(crate) fn nothing_heard(&self) -> String {
        let time = humantime::format_duration(self.time);
        let mut text = format!(
            "no pod of {} was told an address within {time}, and there is nothing to allow by name: record for longer, \
             while the pods do their work",
            self.namespace
        );
        if let Some(places) = self.literals() {
            let _ = write!(text, "; without a name, pods have connected to {places}");
        }
        text
    }

    /// The places of connections without a name, if there are some.
    fn literals(&self) -> Option<String> {
        let all = self.by_address.iter();
        let shown: Vec<String> = all
            .take(LITERALS_SHOWN)
            .map(|one| target_text_of(one.address, one.protocol, one.port))
            .collect();
        let more = self.by_address.len() - shown.len();
        match (shown.is_empty(), more) {
            (true, _) => None,
            (false, 0) => Some(shown.join(", ")),
            (false, more) => Some(format!("{} and {more} more", shown.join(", "))),
        }
    }

    /// Takes a line.
    pub fn take(&mut self, line: Line) {
        match line {
            Line::Name(LearnedName { name, addresses }) => {
                let known = self.names.entry(BySuffix::new(&name)).or_default();
                known.extend(addresses);
            }
            Line::End {
                left_out,
                by_address,
            } => {
                self.left_out += left_out;
                self.by_address.extend(by_address);
            }
        }
    }

    /// The names, in their order.
    pub fn names(&self) -> impl Iterator<Item = LearnedName> {
        self.names.iter().map(|(name, addresses)| LearnedName {
            name: name.name(),
            addresses: addresses.iter().copied().collect(),
        })
    }

    /// An EgressFirewall that allows these names, without the names below them, and denies all else, for `kubectl apply`.
    /// Names that are one label longer than one of `wildcards` come to a wildcard.
    pub fn manifest(&self, wildcards: &[DomainName]) -> String {
        let Self {
            namespace,
            time,
            names,
            left_out,
            by_address: _,
            families: (has_v4, has_v6),
            has_firewall,
        } = self;
        let time = humantime::format_duration(*time);
        let mut text = format!(
            "# What pods of {namespace} were told addresses for within {time}. A name that was asked for is \
             not\n# always connected to, and what is asked for more rarely is missing: read before you \
             apply.\n"
        );
        if *left_out > 0 {
            let _ = writeln!(
                text,
                "# {left_out} answers for further names found no room."
            );
        }
        match self.literals() {
            Some(places) => {
                let _ = writeln!(
                    text,
                    "# Without a name, pods have connected to {places}:\n# a cidrSelector allows an address."
                );
            }
            None if *has_firewall => {}
            None => text.push_str(
                "# Connections to an address without a name are not known: only pods behind an EgressFirewall are watched.\n",
            ),
        }
        if *has_firewall {
            text.push_str("# The namespace has an EgressFirewall, which this one replaces.\n");
        }
        let _ = write!(
            text,
            "apiVersion: k8s.ovn.org/v1\nkind: EgressFirewall\nmetadata:\n  name: {NAME}\n  \
             namespace: {namespace}\n  annotations:\n    {SUBDOMAINS_ANNOTATION}: \"false\"\nspec:\n  egress:\n"
        );
        let suffixes = wildcards
            .iter()
            .map(|name| BySuffix::new(&name.to_string()));
        let suffixes: BTreeSet<BySuffix> = suffixes.collect();
        let mut written = BTreeSet::new();
        for (name, addresses) in names {
            if !name.is_host_name() {
                let _ = writeln!(text, "  # left out, no host name: {}", name.name());
                continue;
            }
            let suffix = name.parent().filter(|parent| suffixes.contains(parent));
            let (rule, comment) = match suffix {
                Some(suffix) if !written.insert(suffix.clone()) => continue,
                Some(suffix) => (format!("*.{}", suffix.name()), "as asked for".to_owned()),
                None => {
                    let addresses: Vec<_> = addresses.iter().map(IpAddr::to_string).collect();
                    (name.name(), addresses.join(", "))
                }
            };
            let _ = writeln!(
                text,
                "  - type: Allow\n    to:\n      dnsName: \"{rule}\" # {comment}"
            );
        }
        // Without pods nothing is known, and a rule for both is none too many.
        let both = !has_v4 && !has_v6;
        for (is_there, all) in [(*has_v4, "0.0.0.0/0"), (*has_v6, "::/0")] {
            if is_there || both {
                let _ = writeln!(
                    text,
                    "  - type: Deny\n    to:\n      cidrSelector: \"{all}\""
                );
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use dnsflow_core::{
        ask::{
            trial::{Facts, Trial},
            view::Verdict,
        },
        values::flow::{Protocol, Transport},
    };

    use super::*;
    use crate::{
        convert::{self, Reading},
        egress_firewall::EgressFirewall,
        fixtures::connection,
        options::ControlSocket,
    };

    fn learned() -> Learned {
        let mut learned = Learned {
            namespace: "ns1".into(),
            time: Duration::from_secs(600),
            families: (true, false),
            has_firewall: true,
            ..Learned::default()
        };
        for (name, address) in [
            ("www.example.com", "203.0.113.1"),
            ("a.test", "203.0.113.9"),
            ("example.com", "203.0.113.2"),
            ("deep.www.example.com", "203.0.113.3"),
            ("api.example.com", "2001:db8::1"),
            ("_sip.example.com", "203.0.113.5"),
            ("www.example.com", "203.0.113.4"),
        ] {
            learned.take(Line::Name(LearnedName {
                name: name.into(),
                addresses: vec![address.parse().expect("an address")],
            }));
        }
        learned.take(Line::End {
            left_out: 3,
            by_address: Vec::new(),
        });
        learned
    }

    #[test]
    fn names_become_an_egress_firewall_by_suffix() {
        assert_eq!(
            learned().manifest(&[]),
            "\
# What pods of ns1 were told addresses for within 10m. A name that was asked for is not
# always connected to, and what is asked for more rarely is missing: read before you apply.
# 3 answers for further names found no room.
# The namespace has an EgressFirewall, which this one replaces.
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata:
  name: default
  namespace: ns1
  annotations:
    dnsflow.io/subdomains: \"false\"
spec:
  egress:
  - type: Allow
    to:
      dnsName: \"example.com\" # 203.0.113.2
  # left out, no host name: _sip.example.com
  - type: Allow
    to:
      dnsName: \"api.example.com\" # 2001:db8::1
  - type: Allow
    to:
      dnsName: \"www.example.com\" # 203.0.113.1, 203.0.113.4
  - type: Allow
    to:
      dnsName: \"deep.www.example.com\" # 203.0.113.3
  - type: Allow
    to:
      dnsName: \"a.test\" # 203.0.113.9
  - type: Deny
    to:
      cidrSelector: \"0.0.0.0/0\"
"
        );
    }

    #[test]
    fn connections_without_a_name_are_told() {
        let connections = [
            connection(9, 5, &[]),
            connection(8, 5, &["a.test"]),
            connection(7, 700, &[]),
        ];
        let by_address = Literal::among(&connections, Duration::from_secs(600));
        let mut learned = learned();
        learned.take(Line::End {
            left_out: 0,
            by_address,
        });
        let manifest = learned.manifest(&[]);
        let told = "\n# Without a name, pods have connected to 203.0.113.9:443:\n# a cidrSelector allows an address.\n";
        assert!(manifest.contains(told), "{manifest}");
        let unwatched = Learned {
            by_address: BTreeSet::new(),
            has_firewall: false,
            ..learned
        };
        let manifest = unwatched.manifest(&[]);
        assert!(
            manifest.contains("\n# Connections to an address without a name are not known"),
            "{manifest}"
        );
        let line = r#"{"kind": "end", "left_out": 0}"#;
        let of_older_agent: Line = serde_json::from_str(line).expect("a line");
        assert!(matches!(of_older_agent, Line::End { by_address, .. } if by_address.is_empty()));
    }

    #[test]
    fn nothing_heard_is_no_manifest() {
        let mut learned = Learned {
            namespace: "ns1".into(),
            time: Duration::from_secs(8),
            ..Learned::default()
        };
        let options = LearnOptions {
            namespace: "ns1".into(),
            time: learned.time,
            wildcard: Vec::new(),
            output: LearnFormat::Manifest,
            socket: ControlSocket { path: "/c".into() },
        };
        let mut output = Vec::new();
        learned
            .write(&options, &mut output)
            .expect("memory has room");
        assert!(learned.heard_nothing() && output.is_empty());
        learned.take(Line::End {
            left_out: 0,
            by_address: Literal::among(&[connection(9, 5, &[])], learned.time),
        });
        assert_eq!(
            learned.nothing_heard(),
            "no pod of ns1 was told an address within 8s, and there is nothing to allow by name: record for longer, \
             while the pods do their work; without a name, pods have connected to 203.0.113.9:443"
        );
    }

    #[test]
    fn a_name_brings_nothing_else_into_the_manifest() {
        let mut learned = Learned::default();
        let hostile = "x\n---\nkind: ClusterRoleBinding\u{85}\u{2028}\u{1b}[2J";
        let line = serde_json::json!({"kind": "name", "name": hostile, "addresses": []});
        learned.take(serde_json::from_value(line).expect("a name, if a strange one"));
        let manifest = learned.manifest(&[]);
        let visible = |c: char| c == '\n' || c == ' ' || c.is_ascii_graphic();
        assert!(manifest.chars().all(visible), "{manifest:?}");
        assert!(!manifest.contains("\nkind: ClusterRole"), "{manifest}");
        for none in ["", ".", "a..b", &"a".repeat(64)] {
            let line = serde_json::json!({"kind": "name", "name": none, "addresses": []});
            serde_json::from_value::<Line>(line).expect_err(none);
        }
    }

    #[test]
    fn a_manifest_allows_what_was_learned_and_nothing_below_it() {
        let wildcards = ["example.com".parse().expect("a name")];
        for (wildcards, name, is_allowed) in [
            (&[][..], "www.example.com", true),
            (&[], "evil.www.example.com", false),
            (&[], "other.example.com", false),
            (&wildcards, "other.example.com", true),
            (&wildcards, "evil.other.example.com", false),
            (&wildcards, "evil.a.test", false),
        ] {
            let manifest: serde_json::Value =
                serde_saphyr::from_str(&learned().manifest(wildcards)).expect("YAML");
            let Reading::Firewall(_, firewall) = convert::firewall(&manifest).reading else {
                panic!("{manifest}");
            };
            // The agent's option is for EgressFirewalls that do not say.
            let trial = Trial::new(&firewall, true);
            let facts = Facts {
                address: [203, 0, 113, 7].into(),
                transport: Transport {
                    protocol: Protocol::Tcp,
                    port: Some(443),
                },
                names: &[name.parse().expect("a name")],
                is_refused: false,
                is_node: false,
            };
            let verdict = trial.decide(&facts).verdict;
            assert_eq!(
                verdict == Verdict::Allowed,
                is_allowed,
                "{name}: {manifest}"
            );
        }
    }

    #[test]
    fn wildcards_stand_only_where_they_are_asked_for() {
        let wildcards = ["example.com".parse().expect("a name")];
        let manifest = learned().manifest(&wildcards);
        let firewall: EgressFirewall = serde_saphyr::from_str(&manifest).expect("the resource");
        let names: Vec<_> = firewall
            .spec
            .egress
            .iter()
            .map(|rule| rule.to.dns_name.clone().unwrap_or_default())
            .collect();
        assert_eq!(
            names,
            [
                "example.com",
                "*.example.com",
                "deep.www.example.com",
                "a.test",
                ""
            ]
        );
    }
}
