//! Reads a logical flow of an ACL as a template for our own flows.
//!
//! The match of such a row is a sequence of register tests with the ACL's match in parentheses behind it, or the
//! ACL's match alone. This is the ACL's match from the time at which ovn-northd made the row. The actions are
//! register loads, perhaps a `log`, a `ct_commit`, and `next`. Logical register N is OpenFlow register N
//! (`ovn-architecture(7)`; `REGn` in OVN's `lib/logical-fields.c`). All other actions are copied from
//! ovn-controller's flows of the same text. Nothing is guessed.

use std::collections::BTreeMap;

use super::rows::{LogicalFlow, Pipeline};
use crate::values::flow::{Action, Masked};

/// One logical flow of an ACL, to be filled in with a pod's port and addresses.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AclTemplate {
    /// Ingress or egress.
    pub pipeline: Pipeline,
    /// The table within that pipeline.
    pub table_id: u8,
    /// The OpenFlow priority.
    pub priority: u16,
    /// Register tests in front of the ACL's match.
    pub registers: BTreeMap<u8, Masked>,
    /// The actions.
    pub actions: ActionTemplate,
}

/// How the actions of an [`AclTemplate`] are made.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ActionTemplate {
    /// Built from steps that are understood.
    Build(Vec<Step>),
    /// Copied from ovn-controller's flow of the same text in the same stage: `log` needs a number that only
    /// ovn-controller gives to its meter, and `ct_commit` is compiled differently from release to release.
    Copy {
        /// The text and its stage.
        source: ActionText,
        /// The actions while there is nothing to copy: without the `log`s, and without the
        /// `ct_commit` of a drop. `None` if that is not enough.
        meanwhile: Option<Vec<Step>>,
    },
}

/// A text of logical actions in a stage. In one stage, ovn-controller makes the same OpenFlow
/// actions of the same text.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct ActionText {
    /// The pipeline.
    pub pipeline: Pipeline,
    /// The table within the pipeline; `next` is the table after it.
    pub table_id: u8,
    /// `Logical_Flow.actions`.
    pub actions: String,
}

impl ActionText {
    /// The text and the stage of a logical flow's actions.
    pub fn of(flow: &LogicalFlow) -> Self {
        Self {
            pipeline: flow.pipeline,
            table_id: flow.table_id,
            actions: flow.actions.clone(),
        }
    }
}

/// OpenFlow actions that ovn-controller made, by their text.
pub type CachedActions = BTreeMap<ActionText, Vec<u8>>;

/// An action of an [`AclTemplate`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Step {
    /// Load bits of a register.
    Load(u8, Masked),
    /// Continue in the next table.
    Next,
}

/// Why a logical flow cannot be read as a template.
#[derive(Clone, Debug, Eq, Hash, PartialEq, thiserror::Error)]
pub enum AclTemplateError {
    /// There is no match of an ACL in parentheses.
    #[error("its match does not end with that of an ACL: `{0}`")]
    NoAclMatch(String),
    /// A test in front of the ACL's match is no register test.
    #[error("its match has a test that is not understood: `{0}`")]
    Test(String),
    /// The actions can neither be built nor copied.
    #[error(
        "its actions hold `{0}`: dnsflow copies such actions from a flow of OVN's, and there is none yet"
    )]
    NoCopy(String),
}

/// Splits the match of a logical flow into the register tests and the ACL's match. The ACL's match
/// is in parentheses, or stands alone if there is no register test (seen on OVN 23.03 when the
/// switch has no conntrack).
fn split(matches: &str) -> Option<(&str, &str)> {
    // No register test holds a parenthesis.
    let start = matches.find('(')?;
    let (prefix, rest) = matches.split_at(start);
    let mut depth = 0;
    let end = rest.find(|c| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        depth == 0
    })?;
    if end + 1 == rest.len() {
        Some((prefix, &rest[1..end]))
    } else if prefix.is_empty() {
        Some((prefix, rest))
    } else {
        None
    }
}

/// The match of the ACL that a logical flow was made from.
pub fn acl_match(flow: &LogicalFlow) -> Option<&str> {
    split(&flow.matches).map(|(_, acl)| acl)
}

impl AclTemplate {
    /// Reads the logical flow of an ACL.
    pub fn parse(flow: &LogicalFlow) -> Result<Self, AclTemplateError> {
        let (prefix, _) = split(&flow.matches)
            .ok_or_else(|| AclTemplateError::NoAclMatch(flow.matches.clone()))?;
        let mut registers = BTreeMap::new();
        for test in prefix.split("&&").map(str::trim).filter(|t| !t.is_empty()) {
            let understood = test
                .split_once("==")
                .and_then(|(field, value)| register_bits(field, value))
                .and_then(|(register, bits)| merge(&mut registers, register, bits));
            if understood.is_none() {
                return Err(AclTemplateError::Test(test.to_owned()));
            }
        }
        Ok(Self {
            pipeline: flow.pipeline,
            table_id: flow.table_id,
            priority: flow.priority,
            registers,
            actions: action_template(flow),
        })
    }

    /// The OpenFlow table, if the pipeline begins at table `base`.
    pub fn table(&self, base: u8) -> u8 {
        base.saturating_add(self.table_id)
    }

    /// The OpenFlow actions, if the pipeline begins at table `base`; `None` while there is no flow
    /// to copy them from.
    pub fn actions(&self, base: u8, cached_actions: &CachedActions) -> Option<Vec<Action>> {
        let steps = match &self.actions {
            ActionTemplate::Build(steps) => steps,
            ActionTemplate::Copy { source, meanwhile } => match cached_actions.get(source) {
                Some(bytes) if bytes.is_empty() => return Some(Vec::new()),
                Some(bytes) => return Some(vec![Action::Copied(bytes.clone())]),
                None => meanwhile.as_ref()?,
            },
        };
        let next = self.table(base).saturating_add(1);
        Some(
            steps
                .iter()
                .map(|step| match *step {
                    Step::Load(register, bits) => Action::SetRegister { register, bits },
                    Step::Next => Action::Resubmit { table: next },
                })
                .collect(),
        )
    }
}

/// Adds a test of some bits to the tests of the same register; `None` if the tests contradict each
/// other.
fn merge(registers: &mut BTreeMap<u8, Masked>, register: u8, bits: Masked) -> Option<()> {
    let known = registers
        .get(&register)
        .copied()
        .unwrap_or(Masked::new(0, 0));
    let common = known.mask() & bits.mask();
    if known.value() & common != bits.value() & common {
        return None;
    }
    registers.insert(
        register,
        Masked::new(known.value() | bits.value(), known.mask() | bits.mask()),
    );
    Some(())
}

/// Reads `reg8[30..31]`, `reg0[7]` or `reg3`, and a decimal or hexadecimal value for it.
fn register_bits(field: &str, value: &str) -> Option<(u8, Masked)> {
    let field = field.trim().strip_prefix("reg")?;
    let (number, low, high) = match field.strip_suffix(']') {
        Some(field) => {
            let (number, bits) = field.split_once('[')?;
            match bits.split_once("..") {
                Some((low, high)) => (number, low.parse().ok()?, high.parse().ok()?),
                None => (number, bits.parse().ok()?, bits.parse().ok()?),
            }
        }
        None => (field, 0u32, 31u32),
    };
    let register: u8 = number.parse().ok().filter(|&n| n <= 15)?;
    if low > high || high > 31 {
        return None;
    }
    let width = high - low + 1;
    let value = value.trim();
    let value: u32 = match value.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok()?,
        None => value.parse().ok()?,
    };
    let ones = u32::MAX >> (32 - width);
    if value > ones {
        return None;
    }
    Some((register, Masked::new(value << low, ones << low)))
}

fn action_template(flow: &LogicalFlow) -> ActionTemplate {
    let mut steps = Vec::new();
    let (mut is_whole, mut is_understood) = (true, true);
    for action in statements(&flow.actions) {
        match step(action) {
            Some(step) => steps.push(step),
            None => {
                is_whole = false;
                is_understood &= action.starts_with("log(") || marks_as_blocked(action);
            }
        }
    }
    if is_whole {
        return ActionTemplate::Build(steps);
    }
    ActionTemplate::Copy {
        source: ActionText::of(flow),
        meanwhile: is_understood.then_some(steps),
    }
}

/// The step of an action; `None` if the action cannot be built.
fn step(action: &str) -> Option<Step> {
    if action == "next" {
        return Some(Step::Next);
    }
    let (field, value) = action.split_once('=')?;
    let (register, bits) = register_bits(field, value)?;
    Some(Step::Load(register, bits))
}

/// Whether an action marks the connection in conntrack as blocked. ACLs that drop mark established
/// connections so (`build_acl_log_related_flows` and `consider_acl` in OVN's northd/northd.c); a
/// later action drops the packet.
fn marks_as_blocked(action: &str) -> bool {
    action.starts_with("ct_commit") && action.contains("ct_mark.blocked = 1")
}

/// Whether some action of a text marks the connection as blocked.
pub fn any_marks_as_blocked(actions: &str) -> bool {
    statements(actions).any(marks_as_blocked)
}

/// The first action of a text that can only be copied.
pub fn first_to_copy(actions: &str) -> Option<&str> {
    statements(actions).find(|action| step(action).is_none())
}

/// Splits at semicolons outside quotes, parentheses and braces; drops comments and blanks.
fn statements(actions: &str) -> impl Iterator<Item = &str> {
    let (mut depth, mut quoted) = (0u32, false);
    actions
        .split(move |c| {
            match c {
                '"' => quoted = !quoted,
                '(' | '{' if !quoted => depth += 1,
                ')' | '}' if !quoted => depth = depth.saturating_sub(1),
                _ => {}
            }
            c == ';' && depth == 0 && !quoted
        })
        .map(str::trim)
        .filter(|text| !text.is_empty() && *text != "/* drop */")
}

#[cfg(test)]
mod tests;
