//! The rules on a bridge without OVN's ACLs: an option says how they are enforced.
//!
//! The option gives one flow in the syntax of `ovs-ofctl(8)`: table, the priority of rule 0 (each
//! further rule is one lower), register tests of every flow, and the actions of a rule that allows.
//! A rule that denies drops. Flows match a pod by its OpenFlow port. The pod's namespace is the
//! part of its `iface-id` before the first underscore.

use std::{collections::BTreeMap, str::FromStr, sync::Arc};

use crate::{
    ovn::{
        rows::{Interface, Pipeline},
        template::{AclTemplate, ActionTemplate, Step},
    },
    policy::rules::{ActiveRule, NamePattern, NamespaceRules, problems_of_resource},
    values::{
        firewall::{Destination, Firewall, RuleAction},
        flow::Masked,
    },
};

/// Where the rules go.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StaticProfile {
    table: u8,
    priority: u16,
    registers: BTreeMap<u8, Masked>,
    /// The actions of a rule that allows.
    steps: Vec<Step>,
}

/// Why the option's text is no profile.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// A part is missing.
    #[error(
        "`{0}` is missing; write for example table=44,priority=10000,reg0=0x100/0x100,actions=resubmit(,45)"
    )]
    Missing(&'static str),
    /// A part is not understood.
    #[error(
        "`{0}` is not understood; table=N, priority=N, regN=VALUE[/MASK] and actions=resubmit(,N) or set_field:VALUE[/MASK]->regN are"
    )]
    Unknown(String),
}

impl FromStr for StaticProfile {
    type Err = ProfileError;

    fn from_str(text: &str) -> Result<Self, ProfileError> {
        let (matches, actions) = text
            .split_once("actions=")
            .ok_or(ProfileError::Missing("actions"))?;
        let (mut table, mut priority) = (None, None);
        let mut registers = BTreeMap::new();
        for part in matches.split(',').filter(|part| !part.trim().is_empty()) {
            let unknown = || ProfileError::Unknown(part.trim().to_owned());
            let (key, value) = part.trim().split_once('=').ok_or_else(unknown)?;
            match key {
                "table" => table = Some(value.parse().map_err(|_| unknown())?),
                "priority" => priority = Some(value.parse().map_err(|_| unknown())?),
                _ => {
                    let register = register(key).ok_or_else(unknown)?;
                    let bits = masked(value).ok_or_else(unknown)?;
                    registers.insert(register, bits);
                }
            }
        }
        let table = table.ok_or(ProfileError::Missing("table"))?;
        Ok(Self {
            table,
            priority: priority.ok_or(ProfileError::Missing("priority"))?,
            registers,
            steps: steps(actions, table)?,
        })
    }
}

/// Reads the actions. The last may be a resubmit to another table than the next.
fn steps(actions: &str, table: u8) -> Result<Vec<Step>, ProfileError> {
    let mut steps = Vec::new();
    // The comma of `resubmit(,45)` is no separator.
    for action in actions.replace("(,", "(").split(',') {
        let action = action.trim();
        let unknown = || ProfileError::Unknown(action.to_owned());
        let step = if let Some(rest) = action.strip_prefix("resubmit(") {
            let to = rest.strip_suffix(')').ok_or_else(unknown)?;
            let to: u8 = to.parse().map_err(|_| unknown())?;
            if to == table.wrapping_add(1) {
                Step::Next
            } else {
                Step::Goto(to)
            }
        } else {
            let field = action.strip_prefix("set_field:").ok_or_else(unknown)?;
            let (value, to) = field.split_once("->").ok_or_else(unknown)?;
            Step::Load(
                register(to).ok_or_else(unknown)?,
                masked(value).ok_or_else(unknown)?,
            )
        };
        steps.push(step);
    }
    Ok(steps)
}

fn register(text: &str) -> Option<u8> {
    text.strip_prefix("reg")?
        .parse()
        .ok()
        .filter(|register| *register <= 15)
}

fn masked(text: &str) -> Option<Masked> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    match text.split_once('/') {
        Some((value, mask)) => Some(Masked::new(number(value)?, number(mask)?)),
        None => Some(Masked::new(number(text)?, u32::MAX)),
    }
}

impl StaticProfile {
    /// The namespace of an interface.
    pub fn namespace_of(row: &Interface) -> Option<&str> {
        row.iface_id.split_once('_').map(|(namespace, _)| namespace)
    }

    /// The rules of a firewall with their priorities. Their only port group has the name of the
    /// namespace.
    pub fn rules(&self, namespace: &str, firewall: &Firewall, subdomains: bool) -> NamespaceRules {
        let mut result = NamespaceRules {
            problems: problems_of_resource(firewall),
            ..NamespaceRules::default()
        };
        for (index, rule) in (0u16..).zip(firewall.rules.iter()) {
            let name = match &rule.destination {
                Destination::Name(name) => name,
                Destination::Invalid(_) | Destination::Cidr(_) | Destination::Nodes => continue,
            };
            let template = AclTemplate {
                pipeline: Pipeline::Egress,
                table_id: self.table,
                priority: self.priority.saturating_sub(index),
                registers: self.registers.clone(),
                actions: ActionTemplate::Build(match rule.action {
                    RuleAction::Allow => self.steps.clone(),
                    RuleAction::Deny => Vec::new(),
                }),
            };
            let set = result.sets.entry(namespace.to_owned()).or_default();
            let pattern = NamePattern::of(name, firewall, subdomains);
            set.push(ActiveRule {
                templates: vec![Arc::new(template)],
                ..ActiveRule::without_acl(namespace, index.into(), rule, name, pattern)
            });
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::firewall::Rule;

    #[test]
    fn the_flow_of_ovs_ofctl_is_read() {
        let profile: StaticProfile =
            "table=44,priority=10000,reg0=0x100/0x100,reg3=7,actions=set_field:0x2/0x2->reg0,resubmit(,45)"
                .parse()
                .expect("a profile");
        assert_eq!(
            profile,
            StaticProfile {
                table: 44,
                priority: 10_000,
                registers: [
                    (0, Masked::new(0x100, 0x100)),
                    (3, Masked::new(7, u32::MAX))
                ]
                .into(),
                steps: vec![Step::Load(0, Masked::new(2, 2)), Step::Next],
            }
        );
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let check = |text: &str, named: &str| {
            let error = text.parse::<StaticProfile>().expect_err(text).to_string();
            assert!(error.starts_with(&format!("`{named}`")), "{error}");
        };
        check("table=44,priority=1", "actions");
        check("priority=1,actions=resubmit(,45)", "table");
        check("table=44,actions=resubmit(,45)", "priority");
        check("table=300,priority=1,actions=resubmit(,45)", "table=300");
        check("table=1,priority=1,ip,actions=resubmit(,45)", "ip");
        check(
            "table=1,priority=1,reg16=1,actions=resubmit(,45)",
            "reg16=1",
        );
        check("table=1,priority=1,actions=output:3", "output:3");
    }

    #[test]
    fn rules_keep_their_order() {
        let profile: StaticProfile = "table=44,priority=10000,actions=resubmit(,40)"
            .parse()
            .expect("a profile");
        let rule = |name: &str, action| Rule {
            action,
            destination: Destination::Name(name.parse().expect("a name")),
            ports: vec![],
        };
        let firewall = Firewall {
            dry_run: false,
            rules: [
                rule("a.test", RuleAction::Allow),
                rule("b.test", RuleAction::Deny),
            ]
            .into(),
            subdomains: None,
            refusal: None,
        };
        let rules = profile.rules("ns1", &firewall, true);
        let places: Vec<_> = rules.sets["ns1"]
            .rules()
            .iter()
            .map(|rule| (rule.templates[0].priority, &rule.templates[0].actions))
            .collect();
        assert_eq!(
            places,
            [
                (10_000, &ActionTemplate::Build(vec![Step::Goto(40)])),
                (9_999, &ActionTemplate::Build(vec![]))
            ]
        );
    }
}
