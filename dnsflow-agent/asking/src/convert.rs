//! Converts an EgressFirewall from JSON to the core's [`Firewall`]: Kubernetes types end here.
//!
//! One bad rule must not make the other rules unreadable, and no rule may lose its index:
//! ovn-kubernetes numbers the ACLs by it. A rule that cannot be used becomes
//! [`Destination::Invalid`] with a reason that names the object, the rule (counted from 0, as in
//! the ACL's `rule-index`) and the remedy.

use std::{fmt, net::IpAddr};

use dnsflow_core::values::{
    firewall::{Destination, Firewall, FirewallId, Rule, RuleAction},
    flow::{Protocol, Transport},
    name::{DnsName, MAX_LABEL_LEN, NameError},
};
use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::Resource as _;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::egress_firewall::{
    DRY_RUN_ANNOTATION, EgressFirewall, HOLD_ANNOTATION, NAME, SUBDOMAINS_ANNOTATION,
};

/// At most this many rules of one EgressFirewall are read.
///
/// ovn-kubernetes gives rule n the priority 10000 − n, keeps what is below 2000 for others, and
/// ignores the rules beyond (`EgressFirewallStartPriority` and
/// `MinimumReservedEgressFirewallPriority` in `go-controller/pkg/types/const.go`).
pub const MAX_RULES: usize = 10_000 - 2_000 + 1;

/// At most this many `ports` of one rule are read.
const MAX_PORTS: usize = 1_024;

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
    let metadata = &object["metadata"];
    let namespace = text(&metadata["namespace"]);
    let name = text(&metadata["name"]);
    let label = format!("{}/{}", namespace.unwrap_or("?"), name.unwrap_or("?"));
    let label = shorten(&label, 2 * MAX_QUOTED).escape_debug().to_string();
    let mut reasons = Vec::new();
    let reading = read(object, namespace, name, &label, &mut reasons);
    if reasons.len() > MAX_REASONS {
        let more = reasons.len() - MAX_REASONS;
        reasons.truncate(MAX_REASONS);
        reasons.push(format!("and {more} more reasons"));
    }
    Converted {
        object: label,
        reading,
        reasons,
    }
}

fn read(
    object: &Value,
    namespace: Option<&str>,
    name: Option<&str>,
    label: &str,
    reasons: &mut Vec<String>,
) -> Reading {
    let Some(namespace) = namespace else {
        reasons.push("metadata.namespace is missing; write the namespace's name".into());
        return Reading::Ignored;
    };
    if name != Some(NAME) {
        reasons.push(format!(
            "metadata.name is not `{NAME}`, the only name that ovn-kubernetes uses; rename it"
        ));
        return Reading::Ignored;
    }
    let id = FirewallId {
        namespace: namespace.to_owned(),
        name: NAME.to_owned(),
    };
    let Some(entries) = object["spec"]["egress"].as_array() else {
        reasons.push("spec.egress is not a list; write a list of rules".into());
        return Reading::Unreadable(id);
    };
    if entries.len() > MAX_RULES {
        reasons.push(format!(
            "the {} rules from rule {MAX_RULES} on are ignored, as ovn-kubernetes does; remove \
             some",
            entries.len() - MAX_RULES
        ));
    }
    let annotations = &object["metadata"]["annotations"];
    let subdomains = switch(annotations, SUBDOMAINS_ANNOTATION, reasons);
    let dry_run = switch(annotations, DRY_RUN_ANNOTATION, reasons);
    let hold = switch(annotations, HOLD_ANNOTATION, reasons);
    let rules = entries
        .iter()
        .take(MAX_RULES)
        .enumerate()
        .map(|(index, entry)| {
            rule(entry, |reason| {
                let reason = format!("rule {index}: {reason}");
                let full = format!("{label}: {reason}");
                reasons.push(reason);
                full
            })
        })
        .collect();
    let refusal = refusal(&object["status"]["messages"]);
    Reading::Firewall(
        id,
        Firewall {
            rules,
            subdomains,
            dry_run: dry_run.unwrap_or_default(),
            hold_off: hold == Some(false),
            refusal,
        },
    )
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

/// The reason of the first zone that could not apply the resource.
fn refusal(messages: &Value) -> Option<String> {
    let messages = messages.as_array()?.iter().filter_map(Value::as_str);
    let reason = messages.filter_map(|text| Some(text.split_once(NOT_APPLIED)?.1));
    let reason = reason
        .map(|text| text.trim_start_matches([':', ' ']))
        .next()?;
    Some(shorten(reason, 2 * MAX_QUOTED).escape_debug().to_string())
}

/// The value of an annotation that switches something on or off, if it is usable.
fn switch(annotations: &Value, annotation: &str, reasons: &mut Vec<String>) -> Option<bool> {
    match &annotations[annotation] {
        Value::Null => None,
        Value::String(value) if value == "true" => Some(true),
        Value::String(value) if value == "false" => Some(false),
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

/// Reads one entry of `spec.egress`. `refuse` takes what is wrong and returns the full reason.
fn rule(entry: &Value, refuse: impl FnOnce(String) -> String) -> Rule {
    let action = action(&entry["type"]);
    let parts = || {
        if !entry.is_object() {
            return Err("it is not a mapping; write `type` and `to`".to_owned());
        }
        action.clone()?;
        let ports = ports(&entry["ports"])?;
        Ok((destination(&entry["to"])?, ports))
    };
    let (destination, ports) =
        parts().unwrap_or_else(|reason| (Destination::Invalid(refuse(reason)), Vec::new()));
    Rule {
        // If the type is unknown, nothing must be opened.
        action: action.unwrap_or(RuleAction::Deny),
        destination,
        ports,
    }
}

fn action(value: &Value) -> Result<RuleAction, String> {
    match value.as_str() {
        Some("Allow") => Ok(RuleAction::Allow),
        Some("Deny") => Ok(RuleAction::Deny),
        _ => Err(format!("type is {}; write Allow or Deny", Quoted(value))),
    }
}

fn ports(value: &Value) -> Result<Vec<Transport>, String> {
    let entries = match value {
        Value::Null => return Ok(Vec::new()),
        Value::Array(entries) => entries,
        other => return Err(format!("ports is {}; write a list", Quoted(other))),
    };
    if entries.len() > MAX_PORTS {
        return Err(format!(
            "it has {} ports, more than {MAX_PORTS}; split the rule",
            entries.len()
        ));
    }
    let ports: Result<Vec<_>, _> = entries
        .iter()
        .enumerate()
        .map(|(index, entry)| {
            Ok(Transport {
                protocol: protocol(&entry["protocol"])
                    .map_err(|reason| format!("ports[{index}].{reason}"))?,
                port: port(&entry["port"]).map_err(|reason| format!("ports[{index}].{reason}"))?,
            })
        })
        .collect();
    ports
}

fn protocol(value: &Value) -> Result<Protocol, String> {
    match value.as_str() {
        Some("TCP") => Ok(Protocol::Tcp),
        Some("UDP") => Ok(Protocol::Udp),
        Some("SCTP") => Ok(Protocol::Sctp),
        _ => Err(format!(
            "protocol is {}; write TCP, UDP or SCTP",
            Quoted(value)
        )),
    }
}

/// A port number; 0 or none stands for all of them (ovn-kubernetes, `egressGetL4Match`).
fn port(value: &Value) -> Result<Option<u16>, String> {
    let number = match value {
        Value::Null => Some(0),
        other => other.as_u64().and_then(|number| u16::try_from(number).ok()),
    };
    match number {
        Some(0) => Ok(None),
        Some(number) => Ok(Some(number)),
        None => Err(format!(
            "port is {}; write a number from 1 to 65535",
            Quoted(value)
        )),
    }
}

fn destination(to: &Value) -> Result<Destination, String> {
    let Value::Object(fields) = to else {
        return Err(format!("to is {}; {ONE_DESTINATION}", Quoted(to)));
    };
    let [cidr, name, nodes] =
        ["cidrSelector", "dnsName", "nodeSelector"].map(|field| present(fields, field));
    match (cidr, name, nodes) {
        (Some(cidr), None, None) => network(cidr),
        (None, Some(name), None) => dns_name(name),
        (None, None, Some(nodes)) => match LabelSelector::deserialize(nodes) {
            Ok(_) => Ok(Destination::Nodes),
            Err(error) => Err(format!(
                "nodeSelector: {}; write matchLabels or matchExpressions",
                shorten(&error.to_string(), 2 * MAX_QUOTED)
            )),
        },
        (None, None, None) => Err(format!("to names no destination; {ONE_DESTINATION}")),
        _ => Err(format!(
            "to names more than one destination; {ONE_DESTINATION}"
        )),
    }
}

fn present<'a>(fields: &'a Map<String, Value>, field: &str) -> Option<&'a Value> {
    fields.get(field).filter(|value| !value.is_null())
}

fn network(value: &Value) -> Result<Destination, String> {
    let text = value
        .as_str()
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

fn dns_name(value: &Value) -> Result<Destination, String> {
    let text = value
        .as_str()
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

fn text(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
}

/// A value of the resource, quoted in a reason: on one line, and shortened if it is long.
struct Quoted<'a>(&'a Value);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Value::Null => f.write_str("missing"),
            Value::Bool(value) => write!(f, "{value}"),
            Value::Number(value) => write!(f, "{value}"),
            Value::String(value) => write!(f, "{:?}", shorten(value, MAX_QUOTED)),
            Value::Array(_) => f.write_str("a list"),
            Value::Object(_) => f.write_str("a mapping"),
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
