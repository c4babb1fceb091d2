//! Which rule decides over a connection, and whether that is certain.
//!
//! Everybody who says something of a connection asks here: the explanation, the report of a denied connection, and the
//! trial of an EgressFirewall. Each says how every rule bears on the connection. Here the first match wins.

use crate::values::firewall::RuleAction;

/// A rule that matches a connection, or may match it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Bearing {
    /// Its index in `spec.egress`.
    pub(crate) rule: u32,
    /// Its action.
    pub(crate) action: RuleAction,
    /// Whether it matches only once the pod has asked for a name.
    pub(crate) once_asked: bool,
    /// Why it may not match.
    pub(crate) doubt: Option<Doubt>,
}

/// Why it is not certain that a rule matches. A later one in this order weighs more.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Doubt {
    /// The question has a name without an address, and the rule has another one: both may lead to one address.
    OtherName,
    /// The rule has ports, and the question has none.
    Port,
    /// The question has no address.
    Address,
    /// ovn-kubernetes may have resolved the rule's name to the address.
    Resolved,
    /// The rule selects nodes, and it is not known which.
    Node,
    /// OVN has an ACL that no rule of the EgressFirewall has.
    LeftBehind,
    /// The switch has not confirmed the flows of the rule.
    Unconfirmed,
    /// OVN is following an edit of the EgressFirewall.
    Edit,
    /// The address has flows, or changes of flows wait, that are not those of the rules.
    OtherFlows,
}

/// The decision over a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Decided {
    /// The action of the first rule that matches for certain. Without one, OVN lets pass.
    pub(crate) action: RuleAction,
    /// That rule.
    pub(crate) rule: Option<u32>,
    /// A rule of the other action before it that may match: the one with the heaviest doubt.
    pub(crate) unless: Option<Unless>,
}

/// A rule that would decide otherwise.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Unless {
    /// The rule.
    pub(crate) rule: u32,
    /// Why it may not match.
    pub(crate) doubt: Doubt,
    /// The doubt that weighs most, of the rules on which the decision rests.
    pub(crate) heaviest: Doubt,
}

impl Decided {
    /// Whether a connection may be allowed.
    pub(crate) fn may_be_allowed(&self) -> bool {
        self.action == RuleAction::Allow || self.unless.is_some()
    }
}

/// The decision by these rules, in their order. `is_asked`: as if the pod had asked for the name.
pub(crate) fn decide(bearings: &[Bearing], is_asked: bool) -> Decided {
    let matching = bearings
        .iter()
        .filter(|bearing| is_asked || !bearing.once_asked);
    let certain = matching.clone().find(|bearing| bearing.doubt.is_none());
    let action = certain.map_or(RuleAction::Allow, |bearing| bearing.action);
    let doubtful = matching.map_while(|bearing| Some((bearing, bearing.doubt?)));
    let differs = |(bearing, _): &(&Bearing, Doubt)| bearing.action != action;
    let others = doubtful.clone().filter(differs);
    // Of the same weight, the first one.
    let unless = others.clone().reduce(|one, other| match other.1 > one.1 {
        true => other,
        false => one,
    });
    // A doubt behind the last rule of the other action changes nothing.
    let last = others.last().map(|(bearing, _)| bearing.rule);
    let rest_on = doubtful.take_while(|(bearing, _)| Some(bearing.rule) <= last);
    let heaviest = rest_on.map(|(_, doubt)| doubt).max();
    Decided {
        action,
        rule: certain.map(|bearing| bearing.rule),
        unless: unless
            .zip(heaviest)
            .map(|((bearing, doubt), heaviest)| Unless {
                rule: bearing.rule,
                doubt,
                heaviest,
            }),
    }
}

#[cfg(test)]
mod tests;
