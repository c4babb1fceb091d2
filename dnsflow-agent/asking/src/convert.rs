//! Converts an EgressFirewall to the core's [`Firewall`] while it is parsed: Kubernetes types end here. What exceeds a
//! limit, and what dnsflow does not read, is left in the parser.
//!
//! One bad rule must not make the other rules unreadable, and no rule may lose its index:
//! ovn-kubernetes numbers the ACLs by it. A rule that cannot be used becomes
//! [`Destination::Invalid`] with a reason that names the object, the rule (counted from 0, as in
//! the ACL's `rule-index`) and the remedy.

mod selector;
mod stored;

use std::{fmt, net::IpAddr};

use dnsflow_core::values::{
    firewall::{Destination, Firewall, FirewallId, PORTS_PER_RULE_MAX, Rule, RuleAction},
    flow::{Protocol, Transport},
    name::{DnsName, MAX_LABEL_LEN, NameError},
};
use ipnet::IpNet;
use kube::Resource as _;
use serde::de::{DeserializeSeed as _, IgnoredAny, MapAccess, SeqAccess};
use serde_json::{Map, Value, json};

use self::selector::Shape;
pub use self::stored::Stored;
use super::{
    egress_firewall::{
        ANNOTATION_PREFIX, ANNOTATIONS, DRY_RUN_ANNOTATION, EgressFirewall, HOLD_ANNOTATION, NAME,
        SUBDOMAINS_ANNOTATION,
    },
    lenient::{Any, Plain, Reader, Seen, key, skip},
    nearest::nearest,
};

/// At most this many rules of one EgressFirewall are read.
///
/// ovn-kubernetes gives rule n the priority 10000 − n, keeps what is below 2000 for others, and
/// ignores the rules beyond (`EgressFirewallStartPriority` and
/// `MinimumReservedEgressFirewallPriority` in `go-controller/pkg/types/const.go`).
pub const MAX_RULES: usize = 10_000 - 2_000 + 1;

/// At most this many reasons are reported for one object.
const MAX_REASONS: usize = 16;

/// At most this many characters of a text of the resource are quoted in a reason.
const MAX_QUOTED: usize = 80;

/// The remedy for a rule's destination.
const ONE_DESTINATION: &str = "write exactly one of cidrSelector, dnsName and nodeSelector";

/// The result for one object.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Converted {
    /// The object's name for people: `namespace/name`, with `?` for what is missing.
    pub object: String,
    /// What it says.
    pub reading: Reading,
    /// What is wrong and the remedy, without the object's name.
    pub reasons: Vec<String>,
}

/// The kinds of objects.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Reading {
    /// A firewall; some of its rules may be invalid.
    Firewall(FirewallId, Firewall),
    /// The firewall of this namespace, but its rules cannot be read at all.
    Unreadable(FirewallId),
    /// An object that is no namespace's firewall.
    Ignored,
}

/// Reads an EgressFirewall. `apiVersion` and `kind` are the caller's concern: items of a list
/// have none.
pub fn firewall(object: &Value) -> Converted {
    let object = Any(ObjectReader).deserialize(object);
    // No reader refuses a value, and what is parsed already has no other errors.
    object.unwrap_or_default().convert()
}

/// What is wrong, limited in number.
#[derive(Debug, Default)]
pub(crate) struct Reasons {
    first: Vec<String>,
    more: usize,
}

impl Reasons {
    pub(crate) fn push(&mut self, reason: String) {
        match self.first.len() < MAX_REASONS {
            true => self.first.push(reason),
            false => self.more += 1,
        }
    }

    pub(crate) fn extend(&mut self, reasons: Self) {
        reasons
            .first
            .into_iter()
            .for_each(|reason| self.push(reason));
        self.more += reasons.more;
    }

    /// The first ones, and the number of the others.
    pub(crate) fn texts(self) -> Vec<String> {
        let more = (self.more > 0).then(|| format!("and {} more reasons", self.more));
        self.first.into_iter().chain(more).collect()
    }
}

/// An EgressFirewall, as far as dnsflow reads it.
#[derive(Debug, Default)]
pub(crate) struct Object {
    pub(crate) metadata: Metadata,
    /// `spec.egress`, if it is a list.
    egress: Option<Egress>,
    /// ovn-kubernetes' reason in `status.messages`, if it could not apply the resource.
    refusal: Option<String>,
}

/// `metadata`.
#[derive(Debug, Default)]
pub(crate) struct Metadata {
    pub(crate) namespace: Seen,
    pub(crate) name: Seen,
    pub(crate) uid: Seen,
    pub(crate) resource_version: Seen,
    subdomains: Seen,
    dry_run: Seen,
    hold: Seen,
    /// What is wrong with the names of annotations.
    misspelt: Reasons,
}

/// `spec.egress`.
#[derive(Debug, Default)]
struct Egress {
    rules: Vec<Rule>,
    /// How many further rules there are.
    more: usize,
    reasons: Reasons,
}

impl Object {
    /// Reads a field of the object.
    pub(crate) fn field<'de, A: MapAccess<'de>>(
        &mut self,
        key: &str,
        fields: &mut A,
    ) -> Result<(), A::Error> {
        match key {
            "metadata" => self.metadata = fields.next_value_seed(Any(MetadataReader))?,
            "spec" => self.egress = fields.next_value_seed(Any(Field("egress", EgressReader)))?,
            "status" => {
                self.refusal = fields.next_value_seed(Any(Field("messages", RefusalReader)))?;
            }
            _ => skip(fields)?,
        }
        Ok(())
    }

    /// What the object says.
    pub(crate) fn convert(self) -> Converted {
        let name_of = |part: &Seen| match part.text() {
            None | Some("") => None,
            Some(text) => Some(text.to_owned()),
        };
        let Metadata {
            namespace, name, ..
        } = &self.metadata;
        let (namespace, name) = (name_of(namespace), name_of(name));
        let text = |part: &Option<String>| part.as_deref().unwrap_or("?").to_owned();
        let label = format!("{}/{}", text(&namespace), text(&name));
        let label = shorten(&label, 2 * MAX_QUOTED).escape_debug().to_string();
        let mut reasons = Reasons::default();
        let reading = self.read(namespace, name, &label, &mut reasons);
        Converted {
            object: label,
            reading,
            reasons: reasons.texts(),
        }
    }

    fn read(
        self,
        namespace: Option<String>,
        name: Option<String>,
        label: &str,
        reasons: &mut Reasons,
    ) -> Reading {
        let Some(namespace) = namespace else {
            reasons.push("metadata.namespace is missing; write the namespace's name".into());
            return Reading::Ignored;
        };
        if name.as_deref() != Some(NAME) {
            reasons.push(format!(
                "metadata.name is not `{NAME}`, the only name that ovn-kubernetes uses; rename it"
            ));
            return Reading::Ignored;
        }
        let id = FirewallId {
            namespace,
            name: NAME.to_owned(),
        };
        let Some(Egress {
            mut rules,
            more,
            reasons: of_rules,
        }) = self.egress
        else {
            reasons.push("spec.egress is not a list; write a list of rules".into());
            return Reading::Unreadable(id);
        };
        if more > 0 {
            reasons.push(format!(
                "the {more} rules from rule {MAX_RULES} on are ignored, as ovn-kubernetes does; remove some"
            ));
        }
        let Metadata {
            subdomains,
            dry_run,
            hold,
            misspelt,
            ..
        } = self.metadata;
        let (subdomains, dry_run, hold) = (&subdomains, &dry_run, &hold);
        let subdomains = switch(subdomains, SUBDOMAINS_ANNOTATION, reasons);
        let dry_run = switch(dry_run, DRY_RUN_ANNOTATION, reasons);
        let hold = switch(hold, HOLD_ANNOTATION, reasons);
        for rule in &mut rules {
            if let Destination::Invalid(reason) = &mut rule.destination {
                reason.insert_str(0, ": ");
                reason.insert_str(0, label);
                reason.shrink_to_fit();
            }
        }
        reasons.extend(misspelt);
        reasons.extend(of_rules);
        Reading::Firewall(
            id,
            Firewall {
                rules: rules.into(),
                subdomains,
                dry_run: dry_run.unwrap_or_default(),
                hold_off: hold == Some(false),
                refusal: self.refusal,
            },
        )
    }
}

/// Takes an object.
pub(crate) struct ObjectReader;

impl Reader for ObjectReader {
    type Value = Object;

    fn other(self, _: Seen) -> Object {
        Object::default()
    }

    fn mapping<'de, A: MapAccess<'de>>(self, mut fields: A) -> Result<Object, A::Error> {
        let mut object = Object::default();
        while let Some(key) = key(&mut fields)? {
            object.field(&key, &mut fields)?;
        }
        Ok(object)
    }
}

struct MetadataReader;

impl Reader for MetadataReader {
    type Value = Metadata;

    fn other(self, _: Seen) -> Metadata {
        Metadata::default()
    }

    fn mapping<'de, A: MapAccess<'de>>(self, mut fields: A) -> Result<Metadata, A::Error> {
        let mut metadata = Metadata::default();
        while let Some(key) = key(&mut fields)? {
            let part = match key.as_str() {
                "namespace" => &mut metadata.namespace,
                "name" => &mut metadata.name,
                "uid" => &mut metadata.uid,
                "resourceVersion" => &mut metadata.resource_version,
                "annotations" => {
                    fields.next_value_seed(Any(AnnotationsReader(&mut metadata)))?;
                    continue;
                }
                _ => {
                    skip(&mut fields)?;
                    continue;
                }
            };
            *part = fields.next_value_seed(Any(Plain))?;
        }
        Ok(metadata)
    }
}

struct AnnotationsReader<'a>(&'a mut Metadata);

impl Reader for AnnotationsReader<'_> {
    type Value = ();

    fn other(self, _: Seen) {}

    fn mapping<'de, A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        while let Some(key) = key(&mut fields)? {
            let part = match key.as_str() {
                SUBDOMAINS_ANNOTATION => &mut self.0.subdomains,
                DRY_RUN_ANNOTATION => &mut self.0.dry_run,
                HOLD_ANNOTATION => &mut self.0.hold,
                other => {
                    if other.starts_with(ANNOTATION_PREFIX) {
                        self.0.misspelt.push(format!(
                            "the annotation {:?} is unknown and has no effect; the nearest one is {}",
                            shorten(other, MAX_QUOTED),
                            nearest(other, ANNOTATIONS).unwrap_or_default()
                        ));
                    }
                    skip(&mut fields)?;
                    continue;
                }
            };
            *part = fields.next_value_seed(Any(Plain))?;
        }
        Ok(())
    }
}

/// Takes one field of a mapping, if it is there.
struct Field<R>(&'static str, R);

impl<T, R: Reader<Value = Option<T>> + Copy> Reader for Field<R> {
    type Value = Option<T>;

    fn other(self, _: Seen) -> Option<T> {
        None
    }

    fn mapping<'de, A: MapAccess<'de>>(self, mut fields: A) -> Result<Option<T>, A::Error> {
        let mut found = None;
        while let Some(key) = key(&mut fields)? {
            match key == self.0 {
                true => found = fields.next_value_seed(Any(self.1))?,
                false => skip(&mut fields)?,
            }
        }
        Ok(found)
    }
}

#[derive(Clone, Copy)]
struct EgressReader;

impl Reader for EgressReader {
    type Value = Option<Egress>;

    fn other(self, _: Seen) -> Option<Egress> {
        None
    }

    fn list<'de, A: SeqAccess<'de>>(self, mut items: A) -> Result<Option<Egress>, A::Error> {
        let mut egress = Egress::default();
        while egress.rules.len() < MAX_RULES
            && let Some(entry) = items.next_element_seed(Any(RuleReader))?
        {
            let index = egress.rules.len();
            let (mut rule, reason) = entry;
            if let Some(reason) = reason {
                let reason = format!("rule {index}: {reason}");
                if let Destination::Invalid(full) = &mut rule.destination {
                    full.clone_from(&reason);
                }
                egress.reasons.push(reason);
            }
            egress.rules.push(rule);
        }
        while items.next_element::<IgnoredAny>()?.is_some() {
            egress.more += 1;
        }
        Ok(Some(egress))
    }
}

/// Writes an EgressFirewall as the resource has it, so that [`firewall`] reads the same rules. A rule that
/// cannot be used has no destination.
pub fn resource(namespace: &str, firewall: &Firewall) -> Value {
    let Firewall {
        rules,
        subdomains,
        dry_run,
        hold_off,
        refusal: _,
    } = firewall;
    let switches = [
        (SUBDOMAINS_ANNOTATION, *subdomains),
        (DRY_RUN_ANNOTATION, dry_run.then_some(true)),
        (HOLD_ANNOTATION, hold_off.then_some(false)),
    ];
    let switches = switches.into_iter();
    let annotations: Map<String, Value> = switches
        .filter_map(|(name, value)| Some((name.to_owned(), value?.to_string().into())))
        .collect();
    let rule = |rule: &Rule| {
        let to = match &rule.destination {
            Destination::Name(name) => json!({ "dnsName": name.written() }),
            Destination::Cidr(network) => json!({ "cidrSelector": network.to_string() }),
            Destination::Nodes => json!({ "nodeSelector": {} }),
            Destination::Invalid(_) => json!({}),
        };
        let port = |transport: &Transport| {
            let protocol = transport.protocol.name().to_ascii_uppercase();
            json!({ "protocol": protocol, "port": transport.port.unwrap_or(0) })
        };
        let action = match rule.action {
            RuleAction::Allow => "Allow",
            RuleAction::Deny => "Deny",
        };
        let mut entry = json!({ "type": action, "to": to });
        if !rule.ports.is_empty() {
            entry["ports"] = rule.ports.iter().map(port).collect();
        }
        entry
    };
    json!({
        "apiVersion": EgressFirewall::api_version(&()),
        "kind": EgressFirewall::kind(&()),
        "metadata": { "name": NAME, "namespace": namespace, "annotations": annotations },
        "spec": { "egress": rules.iter().map(rule).collect::<Vec<Value>>() },
    })
}

/// What ovn-kubernetes writes into `status.messages` for each zone that could not apply the resource,
/// behind the zone's name and before the reason (`EgressFirewallErrorMsg` in
/// go-controller/pkg/types/resource_status.go).
const NOT_APPLIED: &str = "EgressFirewall Rules not correctly applied";

/// Takes the reason of the first zone that could not apply the resource.
#[derive(Clone, Copy)]
struct RefusalReader;

impl Reader for RefusalReader {
    type Value = Option<String>;

    fn other(self, _: Seen) -> Option<String> {
        None
    }

    fn list<'de, A: SeqAccess<'de>>(self, mut items: A) -> Result<Option<String>, A::Error> {
        let mut first = None;
        while let Some(message) = items.next_element_seed(Any(Plain))? {
            let reason = message.text().and_then(|text| text.split_once(NOT_APPLIED));
            if let (None, Some((_, reason))) = (&first, reason) {
                let reason = reason.trim_start_matches([':', ' ']);
                let reason = shorten(reason, 2 * MAX_QUOTED);
                first = Some(reason.escape_debug().to_string());
            }
        }
        Ok(first)
    }
}

/// The value of an annotation that switches something on or off, if it is usable.
fn switch(value: &Seen, annotation: &str, reasons: &mut Reasons) -> Option<bool> {
    match value {
        Seen::Null => None,
        Seen::Text(value) if value == "true" => Some(true),
        Seen::Text(value) if value == "false" => Some(false),
        other => {
            reasons.push(format!(
                "the annotation {annotation} is {} and has no effect; write \"true\" \
                 or \"false\"",
                Quoted(other)
            ));
            None
        }
    }
}

/// Takes one entry of `spec.egress`, and says what is wrong with it.
struct RuleReader;

impl Reader for RuleReader {
    type Value = (Rule, Option<String>);

    fn other(self, _: Seen) -> Self::Value {
        // If the type is unknown, nothing must be opened.
        invalid(
            RuleAction::Deny,
            "it is not a mapping; write `type` and `to`".to_owned(),
        )
    }

    fn mapping<'de, A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let mut kind = Seen::Null;
        let mut ports = Ports::default();
        let mut destination = DestinationReader.other(Seen::Null);
        while let Some(key) = key(&mut fields)? {
            match key.as_str() {
                "type" => kind = fields.next_value_seed(Any(Plain))?,
                "ports" => ports = fields.next_value_seed(Any(PortsReader))?,
                "to" => destination = fields.next_value_seed(Any(DestinationReader))?,
                _ => skip(&mut fields)?,
            }
        }
        Ok(rule(&kind, ports, destination))
    }
}

fn invalid(action: RuleAction, reason: String) -> (Rule, Option<String>) {
    let rule = Rule {
        action,
        destination: Destination::Invalid(String::new()),
        ports: Vec::new(),
    };
    (rule, Some(reason))
}

fn rule(
    kind: &Seen,
    ports: Ports,
    destination: Result<Destination, String>,
) -> (Rule, Option<String>) {
    let action = match action(kind) {
        Ok(action) => action,
        Err(reason) => return invalid(RuleAction::Deny, reason),
    };
    let many = (ports.count > PORTS_PER_RULE_MAX).then(|| {
        let effect = match action {
            RuleAction::Allow => "it allows nothing",
            RuleAction::Deny => "it denies every port of a name",
        };
        format!(
            "it has {} ports, more than {PORTS_PER_RULE_MAX}: {effect}; split the rule",
            ports.count
        )
    });
    let wrong = match (action, many.clone(), ports.wrong) {
        (RuleAction::Allow, Some(many), _) => Some(many),
        (_, _, wrong) => wrong,
    };
    match (wrong, destination) {
        (Some(reason), _) | (None, Err(reason)) => invalid(action, reason),
        (None, Ok(destination)) => {
            let rule = Rule {
                action,
                destination,
                ports: ports.first,
            };
            (rule, many)
        }
    }
}

fn action(value: &Seen) -> Result<RuleAction, String> {
    match value.text() {
        Some("Allow") => Ok(RuleAction::Allow),
        Some("Deny") => Ok(RuleAction::Deny),
        _ => Err(format!("type is {}; write Allow or Deny", Quoted(value))),
    }
}

/// The `ports` of a rule.
#[derive(Debug, Default)]
struct Ports {
    /// The first ones, and one more than [`PORTS_PER_RULE_MAX`] where there are more.
    first: Vec<Transport>,
    count: usize,
    /// What is wrong with the first entry that is not usable.
    wrong: Option<String>,
}

struct PortsReader;

impl Reader for PortsReader {
    type Value = Ports;

    fn other(self, seen: Seen) -> Ports {
        let wrong =
            (seen != Seen::Null).then(|| format!("ports is {}; write a list", Quoted(&seen)));
        Ports {
            wrong,
            ..Ports::default()
        }
    }

    fn list<'de, A: SeqAccess<'de>>(self, mut items: A) -> Result<Ports, A::Error> {
        let mut ports = Ports::default();
        while ports.first.len() <= PORTS_PER_RULE_MAX
            && ports.wrong.is_none()
            && let Some(entry) = items.next_element_seed(Any(PortReader))?
        {
            match entry {
                Ok(port) => ports.first.push(port),
                Err(reason) => ports.wrong = Some(format!("ports[{}].{reason}", ports.count)),
            }
            ports.count += 1;
        }
        ports.first.shrink_to_fit();
        while items.next_element::<IgnoredAny>()?.is_some() {
            ports.count += 1;
        }
        Ok(ports)
    }
}

struct PortReader;

impl Reader for PortReader {
    type Value = Result<Transport, String>;

    fn other(self, _: Seen) -> Self::Value {
        transport(&Seen::Null, &Seen::Null)
    }

    fn mapping<'de, A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let (mut protocol, mut port) = (Seen::Null, Seen::Null);
        while let Some(key) = key(&mut fields)? {
            match key.as_str() {
                "protocol" => protocol = fields.next_value_seed(Any(Plain))?,
                "port" => port = fields.next_value_seed(Any(Plain))?,
                _ => skip(&mut fields)?,
            }
        }
        Ok(transport(&protocol, &port))
    }
}

fn transport(protocol: &Seen, port: &Seen) -> Result<Transport, String> {
    let protocol = match protocol.text() {
        Some("TCP") => Protocol::Tcp,
        Some("UDP") => Protocol::Udp,
        Some("SCTP") => Protocol::Sctp,
        _ => {
            return Err(format!(
                "protocol is {}; write TCP, UDP or SCTP",
                Quoted(protocol)
            ));
        }
    };
    // 0 or none stands for all of them (ovn-kubernetes, `egressGetL4Match`).
    let number = match port {
        Seen::Null => Some(0),
        Seen::Number(number) => number
            .as_u64()
            .and_then(|number| u16::try_from(number).ok()),
        _ => None,
    };
    let Some(number) = number else {
        return Err(format!(
            "port is {}; write a number from 1 to 65535",
            Quoted(port)
        ));
    };
    Ok(Transport {
        protocol,
        port: (number != 0).then_some(number),
    })
}

/// Takes the `to` of a rule.
struct DestinationReader;

impl Reader for DestinationReader {
    type Value = Result<Destination, String>;

    fn other(self, seen: Seen) -> Self::Value {
        Err(format!("to is {}; {ONE_DESTINATION}", Quoted(&seen)))
    }

    fn mapping<'de, A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let (mut cidr, mut name, mut nodes) = (None, None, None);
        while let Some(key) = key(&mut fields)? {
            match key.as_str() {
                "cidrSelector" => {
                    let seen = fields.next_value_seed(Any(Plain))?;
                    cidr = (seen != Seen::Null).then(|| network(&seen));
                }
                "dnsName" => {
                    let seen = fields.next_value_seed(Any(Plain))?;
                    name = (seen != Seen::Null).then(|| dns_name(&seen));
                }
                "nodeSelector" => {
                    let wrong = fields.next_value_seed(Any(Shape::Selector))?;
                    nodes = wrong.map(|wrong| match wrong {
                        None => Ok(Destination::Nodes),
                        Some(wrong) => Err(format!("nodeSelector{wrong}")),
                    });
                }
                _ => skip(&mut fields)?,
            }
        }
        let mut found = [cidr, name, nodes].into_iter().flatten();
        match (found.next(), found.next()) {
            (Some(destination), None) => Ok(destination),
            (None, _) => Ok(Err(format!("to names no destination; {ONE_DESTINATION}"))),
            (Some(_), Some(_)) => Ok(Err(format!(
                "to names more than one destination; {ONE_DESTINATION}"
            ))),
        }
    }
}

fn network(value: &Seen) -> Result<Destination, String> {
    let text = value
        .text()
        .ok_or_else(|| format!("cidrSelector is {}; write a text", Quoted(value)))?;
    if let Ok(network) = text.parse::<IpNet>() {
        return Ok(Destination::Cidr(network));
    }
    let remedy = match text.parse::<IpAddr>() {
        Ok(address) => IpNet::from(address).to_string(),
        Err(_) => "a network such as 192.0.2.0/24".to_owned(),
    };
    Err(format!(
        "cidrSelector {} is no network; write {remedy}",
        Quoted(value)
    ))
}

fn dns_name(value: &Seen) -> Result<Destination, String> {
    let text = value
        .text()
        .ok_or_else(|| format!("dnsName is {}; write a text", Quoted(value)))?;
    if let Ok(address) = text.parse::<IpAddr>() {
        return Err(format!(
            "dnsName {} is an address; write cidrSelector: {}",
            Quoted(value),
            IpNet::from(address)
        ));
    }
    match text.parse::<DnsName>() {
        Ok(name) => Ok(Destination::Name(name)),
        Err(error) => Err(format!(
            "dnsName {}: {}",
            Quoted(value),
            name_reason(text, &error)
        )),
    }
}

/// What is wrong with a name, and the remedy.
fn name_reason(text: &str, error: &NameError) -> String {
    const EXAMPLE: &str = "write a name such as example.com or *.example.com";
    match error {
        NameError::Empty => format!("the name is empty; {EXAMPLE}"),
        NameError::EmptyLabel => {
            let mended: Vec<&str> = text.split('.').filter(|label| !label.is_empty()).collect();
            format!("{error}; write {}", shorten(&mended.join("."), MAX_QUOTED))
        }
        NameError::LabelTooLong(_) => format!(
            "a label is longer than {MAX_LABEL_LEN} characters, so that no DNS server can hold \
             the name; shorten it"
        ),
        NameError::TooLong => format!("{error}; shorten it"),
        NameError::BadCharacter(bad) => format!(
            "the character {bad:?} cannot stand in a dnsName; write letters, digits, hyphens and \
             dots"
        ),
        NameError::Wildcard => error.to_string(),
    }
}

/// A value of the resource, quoted in a reason: on one line, and shortened if it is long.
struct Quoted<'a>(&'a Seen);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Seen::Null => f.write_str("missing"),
            Seen::Bool(value) => write!(f, "{value}"),
            Seen::Number(value) => write!(f, "{value}"),
            Seen::Text(value) => write!(f, "{:?}", shorten(value, MAX_QUOTED)),
            Seen::List => f.write_str("a list"),
            Seen::Mapping => f.write_str("a mapping"),
        }
    }
}

/// `text`, or its first `max` characters and an ellipsis.
pub fn shorten(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// `text`, or its beginning and an ellipsis, in at most so many bytes.
pub fn shorten_to_bytes(text: &str, max: usize) -> String {
    const ELLIPSIS: &str = "…";
    if text.len() <= max {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(max.saturating_sub(ELLIPSIS.len()));
    format!("{}{ELLIPSIS}", &text[..end])
}

#[cfg(test)]
mod tests;
