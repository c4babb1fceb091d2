//! An EgressFirewall for a lab, as people write it.

use anyhow::{Context, Result, bail, ensure};
use dnsflow_tests::firewall::{Action, PortSpec, RuleSpec, To};
use serde::Deserialize;

/// The parts of an EgressFirewall that a lab has.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    api_version: String,
    kind: String,
    metadata: Metadata,
    spec: Spec,
}

#[derive(Debug, Deserialize)]
struct Metadata {
    name: String,
    namespace: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Spec {
    egress: Vec<Rule>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    #[serde(rename = "type")]
    action: String,
    to: Destination,
    #[serde(default)]
    ports: Vec<Port>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Destination {
    dns_name: Option<String>,
    cidr_selector: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Port {
    protocol: String,
    port: u16,
}

/// The namespace of a manifest, and its rules.
///
/// # Errors
///
/// Also for what a lab does not have, such as a rule by `nodeSelector`.
pub(super) fn parse(text: &str) -> Result<(String, Vec<RuleSpec>)> {
    let manifest: Manifest = serde_saphyr::from_str(text)?;
    let kind = (&*manifest.api_version, &*manifest.kind);
    ensure!(
        kind == ("k8s.ovn.org/v1", "EgressFirewall"),
        "{kind:?}: not an EgressFirewall"
    );
    let Metadata { name, namespace } = manifest.metadata;
    ensure!(
        name == "default",
        "{name}: only the EgressFirewall `default` counts"
    );
    let rules = manifest.spec.egress.iter().map(rule);
    Ok((namespace, rules.collect::<Result<_>>()?))
}

fn rule(rule: &Rule) -> Result<RuleSpec> {
    let action = match &*rule.action {
        "Allow" => Action::Allow,
        "Deny" => Action::Deny,
        other => bail!("{other}: a rule allows or denies"),
    };
    let to = match (&rule.to.dns_name, &rule.to.cidr_selector) {
        (Some(name), None) => To::Name(name.clone()),
        (None, Some(cidr)) => To::Cidr(cidr.parse().with_context(|| format!("`{cidr}`"))?),
        _ => bail!("a rule of a lab has a dnsName or a cidrSelector"),
    };
    let ports = rule.ports.iter().map(port).collect::<Result<_>>()?;
    Ok(RuleSpec { action, to, ports })
}

fn port(port: &Port) -> Result<PortSpec> {
    let known = ["udp", "tcp", "sctp"].into_iter();
    let mut same = known.filter(|protocol| port.protocol.eq_ignore_ascii_case(protocol));
    let protocol = same
        .next()
        .with_context(|| format!("{}: no protocol", port.protocol))?;
    Ok((protocol, port.port))
}

#[cfg(test)]
mod tests {
    use dnsflow_tests::firewall::manifest;

    use super::*;

    #[test]
    fn a_manifest_of_the_lab_is_read() {
        let rules = [
            RuleSpec::allow_name("example.com").ports(&[("tcp", 443)]),
            RuleSpec::deny("0.0.0.0/0").expect("a network"),
        ];
        let (namespace, read) = parse(&manifest("ns1", &rules)).expect("it is understood");
        assert_eq!((&*namespace, &*read), ("ns1", &rules[..]));
    }

    #[test]
    fn what_a_lab_does_not_have_is_refused() {
        let text = manifest("ns1", &[RuleSpec::allow_name("example.com")]);
        for (from, to, expected) in [
            (
                "dnsName: \"example.com\"",
                "nodeSelector: {}",
                "nodeSelector",
            ),
            ("type: Allow", "type: Maybe", "Maybe"),
            (
                "name: default",
                "name: other",
                "only the EgressFirewall `default` counts",
            ),
            (
                "kind: EgressFirewall",
                "kind: NetworkPolicy",
                "not an EgressFirewall",
            ),
        ] {
            let error = parse(&text.replace(from, to)).expect_err(to);
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        }
    }
}
