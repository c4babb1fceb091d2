//! Turns what a pod was told into the flows that let it go there.
//!
//! The plan is a function of the port, the address, its names and the rules: nothing remembers how
//! a flow came about, so that a changed rule is a new plan and the difference to the old one.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::IpAddr,
};

use super::{
    flow::{Action, Addresses, Cookie, FlowBody, FlowKey, Masked, Match, Transport},
    limits::HARD_TIMEOUT,
    name::DomainName,
    ovn::{
        template::{Copies, Template},
        view::Place,
    },
    rules::{ActiveRule, RuleSet},
};

/// The register that holds the logical input port (`MFF_LOG_INPORT` in OVN's
/// `include/ovn/logical-fields.h`).
const REG_INPORT: u8 = 14;

/// Where in the switch the packets of a port are found.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Spot {
    /// In OVN's pipeline.
    Ovn(Place),
    /// At an OpenFlow port.
    InPort(u32),
}

impl Spot {
    /// The spot that a flow is for.
    pub fn of(key: &FlowKey) -> Option<Self> {
        if let Some(port) = key.matches.in_port {
            return Some(Self::InPort(port));
        }
        Some(Self::Ovn(Place {
            datapath: u32::try_from(key.matches.metadata?).ok()?,
            port: key.matches.registers.get(&REG_INPORT)?.value(),
        }))
    }
}

/// Gives each action list a cookie of its own.
///
/// The tag is a hash of the list, so that the same list mostly gets the same cookie in the next
/// run too, and flows found in the switch can be told apart by it.
#[derive(Debug, Default)]
pub struct Cookies {
    by_actions: BTreeMap<Vec<Action>, Cookie>,
    taken: BTreeSet<Cookie>,
}

impl Cookies {
    /// The cookie of this action list.
    pub fn cookie(&mut self, actions: &[Action]) -> Cookie {
        if let Some(cookie) = self.by_actions.get(actions) {
            return *cookie;
        }
        let mut tag = tag(actions) & EVEN;
        while !self.taken.insert(Cookie::new(tag)) {
            tag = tag.wrapping_add(2);
        }
        let cookie = Cookie::new(tag);
        self.by_actions.insert(actions.to_vec(), cookie);
        cookie
    }
}

/// Tags are even: the last bit of a cookie is not compared when a flow is deleted.
const EVEN: u32 = !1;

/// FNV-1a with 32 bits (RFC 9923) over the list.
fn tag(actions: &[Action]) -> u32 {
    let mut hash = 0x811c_9dc5_u32;
    let mut add = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        }
    };
    for action in actions {
        match action {
            Action::SetRegister { register, bits } => {
                add(&[1, *register]);
                add(&bits.value().to_be_bytes());
                add(&bits.mask().to_be_bytes());
            }
            Action::Resubmit { table } => add(&[2, *table]),
            Action::Copied(bytes) => {
                add(&[3]);
                add(bytes);
            }
        }
    }
    hash
}

/// What is known about a port when its flows are planned.
#[derive(Clone, Copy, Debug)]
pub struct PortFacts<'a> {
    /// Where its packets are found.
    pub spot: Spot,
    /// Its own addresses.
    pub addresses: &'a [IpAddr],
    /// The rules of the port groups that hold it.
    pub sets: &'a [&'a RuleSet],
    /// The OpenFlow table at which the egress pipeline begins.
    pub base: u8,
    /// What can be copied from OVN's own flows.
    pub copies: &'a Copies,
}

/// The flows that open `to` for the port, because of these names.
pub fn flows_for_names<'n>(
    port: PortFacts<'_>,
    to: IpAddr,
    names: impl IntoIterator<Item = &'n DomainName>,
    cookies: &mut Cookies,
) -> BTreeMap<FlowKey, FlowBody> {
    let mut flows = BTreeMap::new();
    for name in names {
        for rule in port.sets.iter().flat_map(|set| set.matching(name)) {
            flows_of_rule(port, to, rule, |key, template| {
                if let Entry::Vacant(entry) = flows.entry(key)
                    && let Some(body) = body(template, port, cookies)
                {
                    entry.insert(body);
                }
            });
        }
    }
    flows
}

/// Those of `found` that some rule of the port would write for `to`, whatever the name: flows of
/// an earlier run.
pub fn flows_still_ruled(
    port: PortFacts<'_>,
    to: IpAddr,
    found: &BTreeMap<FlowKey, Cookie>,
    cookies: &mut Cookies,
) -> BTreeMap<FlowKey, FlowBody> {
    let mut flows = BTreeMap::new();
    for rule in port.sets.iter().flat_map(|set| set.rules()) {
        flows_of_rule(port, to, rule, |key, template| {
            if let Some(cookie) = found.get(&key)
                && let Some(body) = body(template, port, cookies)
                && body.cookie == *cookie
            {
                flows.insert(key, body);
            }
        });
    }
    flows
}

fn flows_of_rule(
    port: PortFacts<'_>,
    to: IpAddr,
    rule: &ActiveRule,
    mut emit: impl FnMut(FlowKey, &Template),
) {
    let family = match to {
        IpAddr::V4(_) => rule.v4,
        IpAddr::V6(_) => rule.v6,
    };
    if !family {
        return;
    }
    let any = [None];
    let some: Vec<Option<Transport>> = rule.transports.iter().copied().map(Some).collect();
    let transports = if some.is_empty() { &any[..] } else { &some };
    for template in &rule.templates {
        for from in port.addresses {
            let addresses = match (*from, to) {
                (IpAddr::V4(src), IpAddr::V4(dst)) => Addresses::V4 { src, dst },
                (IpAddr::V6(src), IpAddr::V6(dst)) => Addresses::V6 { src, dst },
                _ => continue,
            };
            for transport in transports {
                emit(key(port, template, addresses, *transport), template);
            }
        }
    }
}

fn key(
    port: PortFacts<'_>,
    template: &Template,
    addresses: Addresses,
    transport: Option<Transport>,
) -> FlowKey {
    let mut registers = template.registers.clone();
    let (metadata, in_port) = match port.spot {
        Spot::Ovn(place) => {
            registers.insert(REG_INPORT, Masked::new(place.port, u32::MAX));
            (Some(u64::from(place.datapath)), None)
        }
        Spot::InPort(number) => (None, Some(number)),
    };
    FlowKey {
        table: template.table(port.base),
        priority: template.priority,
        matches: Match {
            metadata,
            registers,
            in_port,
            addresses,
            transport,
        },
    }
}

fn body(template: &Template, port: PortFacts<'_>, cookies: &mut Cookies) -> Option<FlowBody> {
    let actions = template.actions(port.base, port.copies)?;
    Some(FlowBody {
        cookie: cookies.cookie(&actions),
        hard_timeout_s: u16::try_from(HARD_TIMEOUT.as_secs()).unwrap_or(u16::MAX),
        actions,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_cookie_stands_for_one_action_list() {
        let mut cookies = Cookies::default();
        let next = [Action::Resubmit { table: 47 }];
        let other = [Action::Resubmit { table: 52 }];
        assert_eq!(cookies.cookie(&next), cookies.cookie(&next));
        assert_ne!(cookies.cookie(&next), cookies.cookie(&other));
        assert_eq!(
            cookies.cookie(&next),
            Cookies::default().cookie(&next),
            "the same in the next run"
        );
    }

    #[test]
    fn colliding_tags_are_told_apart() {
        let mut cookies = Cookies::default();
        let actions = [Action::Resubmit { table: 1 }];
        let collision = Cookie::new(tag(&actions) & EVEN);
        cookies.taken.insert(collision);
        assert_eq!(
            cookies.cookie(&actions),
            Cookie::new((tag(&actions) & EVEN) + 2)
        );
    }
}
