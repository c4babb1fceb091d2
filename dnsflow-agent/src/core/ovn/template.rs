//! Reads a logical flow of an ACL into a template for our own flows.
//!
//! The match of such a row is a run of register tests followed by the ACL's own match in
//! parentheses, at the time when ovn-northd made it; its actions are register loads, perhaps a
//! `log`, a `ct_commit`, and `next`.
//! Logical register N is OpenFlow register N (`ovn-architecture(7)`; `REGn` in OVN's
//! `lib/logical-fields.c`). What is not understood is refused, never guessed.

use std::collections::BTreeMap;

use super::rows::{LogicalFlow, Pipeline};
use crate::core::flow::{Action, Masked};

/// One logical flow of an ACL, ready to be filled in with a pod's port and addresses.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Template {
    /// Where in the datapath's pipeline: the half …
    pub pipeline: Pipeline,
    /// … and the table within it.
    pub table_id: u8,
    /// The OpenFlow priority.
    pub priority: u16,
    /// Register tests in front of the ACL's match.
    pub registers: BTreeMap<u8, Masked>,
    /// What happens to the packet.
    pub steps: Vec<Step>,
    /// `log` actions that were left out: only ovn-controller can number their meters.
    pub logs_left_out: u32,
}

/// An action of a [`Template`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Step {
    /// Load bits of a register.
    Load(u8, Masked),
    /// Go on in the next table.
    Next,
}

/// Why a logical flow cannot serve as a template.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum TemplateError {
    /// There is no match of an ACL in parentheses.
    #[error("its match does not end with that of an ACL: `{0}`")]
    NoAclMatch(String),
    /// A test in front of the ACL's match is no register test.
    #[error("its match has a test that is not understood: `{0}`")]
    Test(String),
    /// An action outside the known set.
    #[error("its actions hold one that is not understood: `{0}`")]
    Action(String),
}

/// Splits the match of a logical flow into the register tests and the ACL's match.
fn split(matches: &str) -> Option<(&str, &str)> {
    // No register test holds a parenthesis.
    matches.strip_suffix(')')?.split_once('(')
}

/// The match of the ACL that a logical flow was made from.
pub fn acl_match(flow: &LogicalFlow) -> Option<&str> {
    split(&flow.matches).map(|(_, acl)| acl)
}

impl Template {
    /// Reads the logical flow of an ACL.
    pub fn parse(flow: &LogicalFlow) -> Result<Self, TemplateError> {
        let (prefix, _) =
            split(&flow.matches).ok_or_else(|| TemplateError::NoAclMatch(flow.matches.clone()))?;
        let mut registers = BTreeMap::new();
        for test in prefix.split("&&").map(str::trim).filter(|t| !t.is_empty()) {
            let understood = test
                .split_once("==")
                .and_then(|(field, value)| register_bits(field, value))
                .and_then(|(register, bits)| merge(&mut registers, register, bits));
            if understood.is_none() {
                return Err(TemplateError::Test(test.to_owned()));
            }
        }
        let (steps, logs_left_out) = steps(&flow.actions)?;
        Ok(Self {
            pipeline: flow.pipeline,
            table_id: flow.table_id,
            priority: flow.priority,
            registers,
            steps,
            logs_left_out,
        })
    }

    /// The OpenFlow table, when the pipeline begins at table `base`.
    pub fn table(&self, base: u8) -> u8 {
        base.saturating_add(self.table_id)
    }

    /// The OpenFlow actions, when the pipeline begins at table `base`.
    pub fn actions(&self, base: u8) -> Vec<Action> {
        self.steps
            .iter()
            .map(|step| match *step {
                Step::Load(register, bits) => Action::SetRegister { register, bits },
                Step::Next => Action::Resubmit {
                    table: self.table(base).saturating_add(1),
                },
            })
            .collect()
    }
}

/// Adds a test of some bits to those of the same register; `None` when they contradict.
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

/// Reads the actions; also counts the `log` actions left out.
fn steps(actions: &str) -> Result<(Vec<Step>, u32), TemplateError> {
    let mut steps = Vec::new();
    let mut logs = 0;
    for action in statements(actions) {
        if action == "next" {
            steps.push(Step::Next);
        } else if action.starts_with("log(") {
            logs += 1;
        } else {
            let (register, bits) = action
                .split_once('=')
                .and_then(|(field, value)| register_bits(field, value))
                .ok_or_else(|| TemplateError::Action(action.to_owned()))?;
            steps.push(Step::Load(register, bits));
        }
    }
    Ok((steps, logs))
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
