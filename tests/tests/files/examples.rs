//! The EgressFirewalls that documents show: an API server stores each, and the agent takes over each rule.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use dnsflow_agent::k8s::{
    convert::{self, Reading},
    egress_firewall::DEFINITION,
};
use dnsflow_core::values::firewall::Destination;
use dnsflow_tests::support;
use regex::Regex;
use serde_json::{Value, json};

/// The line with which an EgressFirewall begins.
const BEGIN: &str = "apiVersion: k8s.ovn.org/v1";

/// All texts below a directory, or one file.
fn texts(path: &Path, found: &mut Vec<PathBuf>) {
    if path.is_dir() {
        let entries = fs::read_dir(path).expect("a directory");
        entries.for_each(|entry| texts(&entry.expect("an entry").path(), found));
    } else if path
        .extension()
        .is_some_and(|ending| ending == "md" || ending == "yaml")
    {
        found.push(path.to_owned());
    }
}

/// The EgressFirewalls in the text, of which a document shows each as an indented block.
fn shown(text: &str) -> Vec<Value> {
    let lines: Vec<&str> = text.lines().collect();
    let begins = (0..lines.len()).filter(|at| lines[*at].trim() == BEGIN);
    let each = begins.map(|at| {
        let indent = lines[at].find(BEGIN).expect("the line has it");
        let rest = lines[at..].iter();
        let block = rest.map_while(|line| {
            line.get(indent..)
                .filter(|_| line[..indent].trim().is_empty())
        });
        let block = block.take_while(|line| !line.starts_with("$ ") && *line != "---");
        let block = block.collect::<Vec<_>>().join("\n");
        serde_saphyr::from_str(&block).unwrap_or_else(|error| panic!("{error}: {block}"))
    });
    each.filter(|object: &Value| object["kind"] == "EgressFirewall")
        .collect()
}

/// Checks a value by the schema of a definition, as an API server does for kubectl's strict validation: a field that
/// the schema does not have is refused, too.
fn fits(schema: &Value, value: &Value, path: &str) -> Result<()> {
    match (schema["type"].as_str(), value) {
        (Some("object"), Value::Object(fields)) => {
            let known = schema["properties"].as_object();
            let others = &schema["additionalProperties"];
            let count = fields.len() as u64;
            let least = schema["minProperties"].as_u64().unwrap_or(0);
            let most = schema["maxProperties"].as_u64().unwrap_or(u64::MAX);
            ensure!((least..=most).contains(&count), "{path}: {count} fields");
            let required = schema["required"].as_array().into_iter().flatten();
            for name in required.filter_map(Value::as_str) {
                ensure!(fields.contains_key(name), "{path}: no {name}");
            }
            for (name, value) in fields {
                let path = format!("{path}.{name}");
                // The definition leaves `metadata` to Kubernetes.
                match known.and_then(|known| known.get(name)) {
                    Some(schema) => fits(schema, value, &path)?,
                    None if others.is_object() => fits(others, value, &path)?,
                    None if path.starts_with(".metadata.") => {}
                    None => bail!("{path} is unknown"),
                }
            }
        }
        (Some("array"), Value::Array(items)) => {
            for (at, item) in items.iter().enumerate() {
                fits(&schema["items"], item, &format!("{path}[{at}]"))?;
            }
        }
        (Some("string"), Value::String(text)) => {
            if let Some(pattern) = schema["pattern"].as_str() {
                ensure!(
                    Regex::new(pattern)?.is_match(text),
                    "{path}: {text} is not {pattern}"
                );
            }
        }
        (Some("integer"), Value::Number(number)) => {
            let number = number
                .as_i64()
                .with_context(|| format!("{path}: {number}"))?;
            let [least, most] = ["minimum", "maximum"].map(|limit| schema[limit].as_i64());
            let limits = least.unwrap_or(i64::MIN)..=most.unwrap_or(i64::MAX);
            ensure!(limits.contains(&number), "{path}: {number}");
        }
        (wanted, _) => bail!("{path}: {value} is no {wanted:?}"),
    }
    Ok(())
}

/// Checks that API server, ovn-kubernetes and agent take an EgressFirewall with all its rules.
fn taken(object: &Value) -> Result<()> {
    let definition: Value = serde_saphyr::from_str(DEFINITION)?;
    let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    fits(schema, object, "")?;
    let converted = convert::firewall(object);
    ensure!(converted.reasons.is_empty(), "{:?}", converted.reasons);
    let Reading::Firewall(_, firewall) = converted.reading else {
        bail!("{:?}", converted.reading);
    };
    for rule in firewall.rules.iter() {
        match &rule.destination {
            Destination::Invalid(why) => bail!("{why}"),
            // Without its DNS name resolver, ovn-kubernetes refuses the whole EgressFirewall.
            Destination::Name(name) => ensure!(!name.is_wildcard(), "{}", name.written()),
            Destination::Cidr(_) | Destination::Nodes => {}
        }
    }
    Ok(())
}

#[test]
fn each_egress_firewall_of_the_documents_is_taken() {
    let workspace = support::workspace().expect("a workspace");
    let mut files = Vec::new();
    for place in ["docs", "deploy", "README.md"] {
        texts(&workspace.join(place), &mut files);
    }
    let mut count = 0;
    for file in files {
        let text = fs::read_to_string(&file).expect("a text");
        let lines = text
            .lines()
            .filter(|line| line.trim() == "kind: EgressFirewall");
        let found = shown(&text);
        assert_eq!(found.len(), lines.count(), "{}", file.display());
        for object in found {
            taken(&object).unwrap_or_else(|why| panic!("{}: {why:#}", file.display()));
            count += 1;
        }
    }
    assert!(count >= 6, "{count}");
}

#[test]
fn an_egress_firewall_that_is_refused_is_found() {
    let with = |rule: Value| {
        json!({
            "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
            "metadata": {"name": "default", "namespace": "ns1"},
            "spec": {"egress": [rule]},
        })
    };
    let to = |to: Value| with(json!({"type": "Allow", "to": to}));
    let port = |port: Value| {
        with(json!({"type": "Allow", "to": {"dnsName": "example.com"}, "ports": [port]}))
    };
    taken(&port(json!({"protocol": "TCP", "port": 443}))).expect("nothing is wrong");
    let mut other_name = to(json!({"dnsName": "example.com"}));
    other_name["metadata"]["name"] = "web".into();
    let mut annotated = to(json!({"dnsName": "example.com"}));
    annotated["metadata"]["annotations"] = json!({"dnsflow.io/subdomain": "false"});
    for refused in [
        to(json!({"dnsName": "my_db.example.com"})),
        to(json!({"dnsName": "*.example.com"})),
        to(json!({"dnsNames": "example.com"})),
        to(json!({"dnsName": "example.com", "cidrSelector": "192.0.2.0/24"})),
        to(json!({"cidrSelector": "192.0.2.1"})),
        to(json!({"cidrSelector": "192.0.2.0/33"})),
        to(json!({})),
        port(json!({"protocol": "TCP", "port": 65536})),
        port(json!({"protocol": "tcp", "port": 443})),
        port(json!({"protocol": "TCP", "port": "443"})),
        port(json!({"port": 443})),
        with(json!({"type": "allow", "to": {"dnsName": "example.com"}})),
        with(json!({"to": {"dnsName": "example.com"}})),
        json!({"apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall"}),
        other_name,
        annotated,
    ] {
        assert!(taken(&refused).is_err(), "{refused}");
    }
}
