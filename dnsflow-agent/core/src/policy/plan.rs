//! Turns the addresses that a pod was told into the flows that let the pod reach them.
//!
//! The plan is a function of the port, the address, its names and the rules, and of the room for its flows. Nothing
//! remembers how a flow came about: when a rule changes, the new plan is compared with the old one.

mod deciding;
mod patterns;
mod room;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    net::IpAddr,
    sync::Arc,
};

use smallvec::SmallVec;

use crate::{
    ovn::{
        template::{AclTemplate, CachedActions},
        view::TunnelKeys,
    },
    policy::rules::{ActiveRule, RuleSet},
    tools::table::HashMap,
    values::{
        firewall::RuleAction,
        flow::{
            Action, Cookie, FlowBody, FlowKey, FlowTemplate, Masked, Registers, Sentinel, Transport,
        },
        ids::PortId,
        name::DomainName,
    },
};

pub(crate) use deciding::{Basis, Deciding, ManyNames};
pub(crate) use patterns::Patterns;
pub(crate) use room::{Planned, Room, Space};

/// The register that holds the logical input port (`MFF_LOG_INPORT` in OVN's
/// `include/ovn/logical-fields.h`).
const REG_INPORT: u8 = 14;

/// The tunnel keys of the port that a flow is for; `None` if the flow is for no port.
pub fn keys_of(key: &FlowKey) -> Option<TunnelKeys> {
    Some(TunnelKeys {
        datapath: u32::try_from(key.matches.metadata).ok()?,
        port: key.matches.registers.get(&REG_INPORT)?.value(),
    })
}

/// Gives each action list its own cookie.
///
/// The tag is a hash of the list. The same list therefore mostly gets the same cookie in the next
/// run, and the cookie of a flow in the switch tells its actions.
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
        let is_sentinel = matches!(actions, [Action::DeleteLearned(_)]);
        let mut tag = tag(actions) & EVEN | u32::from(is_sentinel);
        while !self.taken.insert(Cookie::new(tag)) {
            tag = tag.wrapping_add(2);
        }
        let cookie = Cookie::new(tag);
        self.by_actions.insert(actions.to_vec(), cookie);
        cookie
    }

    /// Forgets the cookies that no flow has any more, and those of their sentinel flows.
    fn keep(&mut self, in_use: impl Iterator<Item = Cookie>) {
        let in_use: BTreeSet<Cookie> = in_use.collect();
        let Self { by_actions, taken } = self;
        by_actions.retain(|actions, cookie| {
            let of_flow = match &actions[..] {
                [Action::DeleteLearned(sentinel)] => &sentinel.cookie,
                _ => &*cookie,
            };
            let stays = in_use.contains(of_flow);
            if !stays {
                taken.remove(cookie);
            }
            stays
        });
    }
}

/// Only the tags of sentinel flows are odd: the last bit of a cookie is not compared when a flow is
/// deleted.
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
            Action::SetMark(bits) => {
                add(&[5]);
                add(&bits.value().to_be_bytes());
                add(&bits.mask().to_be_bytes());
            }
            Action::Resubmit { table } => add(&[2, *table]),
            Action::Copied(bytes) => {
                add(&[3]);
                add(bytes);
            }
            Action::DeleteLearned(Sentinel { table, cookie }) => {
                add(&[4, *table]);
                add(&cookie.bits().to_be_bytes());
            }
        }
    }
    hash
}

/// The facts from which the flows of a port are planned.
#[derive(Clone, Copy, Debug)]
pub struct PortFacts<'a> {
    /// The port.
    pub port: PortId,
    /// Its tunnel keys.
    pub keys: TunnelKeys,
    /// Its own addresses.
    pub addresses: &'a [IpAddr],
    /// The rules of the port groups that hold it.
    pub sets: &'a [&'a RuleSet],
    /// The OpenFlow table at which the egress pipeline begins.
    pub base: u8,
    /// The actions that can be copied from OVN's own flows.
    pub cached_actions: &'a CachedActions,
    /// The bits of the mark that say a packet's group, if the port's packets have groups.
    pub mark_mask: Option<u32>,
    /// The OpenFlow table in which marks end, if the port's packets have groups and OVN has such a table.
    pub marks_end: Option<u8>,
}

#[cfg(test)]
impl<'a> PortFacts<'a> {
    /// A port with one address, whose packets have no groups.
    fn of_test(sets: &'a [&'a RuleSet], cached_actions: &'a CachedActions) -> Self {
        const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 244, 0, 5));
        Self {
            port: PortId(1),
            keys: TunnelKeys {
                datapath: 3,
                port: 5,
            },
            addresses: &[ADDRESS],
            sets,
            base: 8,
            cached_actions,
            mark_mask: None,
            marks_end: None,
        }
    }
}

impl PortFacts<'_> {
    /// How many of the port's own addresses are of this family.
    fn sources(&self, v6: bool) -> usize {
        let sources = self.addresses.iter();
        sources.filter(|src| src.is_ipv6() == v6).count()
    }
}

/// The templates of a plan, in the order of [`FlowTemplate::cmp_key`], no key twice.
pub type Plan = Vec<Arc<FlowTemplate>>;

/// The rules of a port that match a name: for each, the index of the set in [`PortFacts::sets`] and
/// the index of the rule in [`RuleSet::rules`].
pub type MatchedRules = SmallVec<[(usize, usize); 4]>;

/// The rules that match a name.
pub fn matched_rules<'a>(
    sets: &'a [&'a RuleSet],
    name: &'a DomainName,
) -> impl Iterator<Item = (usize, usize)> + 'a {
    let sets = sets.iter().enumerate();
    sets.flat_map(move |(at, set)| set.matching_indices(name).map(move |rule| (at, rule)))
}

/// The rules that match one of these names. The rules of a name are looked at once for all names below it, and some may
/// come twice.
pub(crate) fn matched_by_any<'a>(
    sets: &[&RuleSet],
    names: impl Iterator<Item = &'a DomainName>,
) -> MatchedRules {
    let mut seen = HashSet::new();
    let mut matched = MatchedRules::new();
    for name in names {
        for (at, set) in sets.iter().enumerate() {
            for (rules, extra) in set.by_suffix(name) {
                if seen.insert((std::ptr::from_ref(rules), extra)) {
                    matched.extend(set.covering(rules, extra).map(|rule| (at, rule)));
                }
            }
        }
    }
    matched
}

/// Where a rule stands among those of all sets.
fn place_of(sets: &[&RuleSet], (set, rule): (usize, usize)) -> (usize, u32, usize) {
    (set, sets[set].rules()[rule].index, rule)
}

/// Makes plans.
///
/// The flow templates of a rule for a port are the same for every address. The planner makes them
/// once, and all cache entries share them: planning is then little more than finding the rules.
#[derive(Debug, Default)]
pub struct Planner {
    cookies: Cookies,
    templates: Templates,
    /// The templates of each rule, as long as nothing has changed that they were made from.
    made: HashMap<TemplateKey, Arc<[Arc<FlowTemplate>]>>,
    /// The templates of the flows in which the marks of a port's packets end, by family (whether it is IPv6).
    ends: HashMap<(PortId, bool), Arc<[Arc<FlowTemplate>]>>,
    /// How many plans were made.
    #[cfg(test)]
    planned: usize,
    /// How many names and rules were looked at for them.
    #[cfg(test)]
    looked_at: usize,
}

/// A rule of a port, for one address family.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct TemplateKey {
    port: PortId,
    /// In [`PortFacts::sets`].
    set: usize,
    /// In [`RuleSet::rules`].
    rule: usize,
    v6: bool,
    /// Whether the rule is for all traffic, whatever its ports.
    all_traffic: bool,
}

/// With fewer templates, a search for unused ones is not worth its time.
const TEMPLATES_MIN: usize = 1024;

impl Planner {
    /// Forgets the templates of rules: rules, ports or the pipeline may have changed.
    pub fn forget(&mut self) {
        self.made.clear();
        self.ends.clear();
    }

    /// The flows that open `to` for the port, because of these names.
    pub fn for_names<'n>(
        &mut self,
        facts: PortFacts<'_>,
        to: IpAddr,
        names: impl IntoIterator<Item = &'n DomainName>,
    ) -> Plan {
        let names = names.into_iter();
        let matched: MatchedRules = names
            .flat_map(|name| matched_rules(facts.sets, name))
            .collect();
        self.for_rules(facts, to, &matched, &Space::default()).plan
    }

    /// Adds the flows in which the marks of packets to the addresses of a plan end.
    pub(crate) fn end_marks(&mut self, facts: PortFacts<'_>, to: IpAddr, plan: &mut Plan) {
        let v6 = to.is_ipv6();
        let (Some(mask), Some(table), false) = (facts.mark_mask, facts.marks_end, plan.is_empty())
        else {
            return;
        };
        let ends = self.ends.get(&(facts.port, v6)).cloned();
        let ends = ends.unwrap_or_else(|| {
            let actions = [
                Action::SetMark(Masked::new(0, mask)),
                // Behind it, the flow does not match any more.
                Action::Resubmit { table },
            ];
            let body = FlowBody {
                cookie: self.cookies.cookie(&actions),
                hard_timeout_s: 0,
                actions: Arc::new(actions),
            };
            let sources = facts.addresses.iter().filter(|src| src.is_ipv6() == v6);
            let registers = at_port(facts, Registers::new());
            let ends = sources.map(|src| FlowTemplate {
                table,
                priority: u16::MAX,
                metadata: facts.keys.datapath.into(),
                registers: Arc::clone(&registers),
                src: *src,
                transport: None,
                denies: false,
                body: body.clone(),
            });
            let ends = self.templates.share(ends.collect(), &mut self.cookies);
            self.ends.insert((facts.port, v6), Arc::clone(&ends));
            ends
        });
        plan.extend_from_slice(&ends);
    }

    /// The cookie that a flow with these actions has where addresses have no marks.
    pub fn cookie_without_mark(&mut self, body: &FlowBody) -> Cookie {
        match &body.actions[..] {
            [Action::SetMark(_), others @ ..] => self.cookies.cookie(others),
            all => self.cookies.cookie(all),
        }
    }

    /// The sentinel flows that the flows of all cache entries need.
    pub fn sentinels(&self) -> BTreeSet<Sentinel> {
        self.templates
            .all
            .iter()
            .filter(|template| is_in_use(template))
            .map(|template| Sentinel {
                table: template.table,
                cookie: template.body.cookie,
            })
            .collect()
    }

    /// Cookie, timeout and actions of a sentinel flow that ends `hard_timeout_s` seconds after its last
    /// renewal.
    pub fn sentinel_body(&mut self, sentinel: Sentinel, hard_timeout_s: u16) -> FlowBody {
        let actions = sentinel.actions();
        FlowBody {
            cookie: self.cookies.cookie(&actions),
            hard_timeout_s,
            actions,
        }
    }

    /// How many plans were made since the last call.
    #[cfg(test)]
    pub(crate) fn take_planned(&mut self) -> usize {
        std::mem::take(&mut self.planned)
    }

    /// How many names and rules were looked at for plans since the last call.
    #[cfg(test)]
    pub(crate) fn take_looked_at(&mut self) -> usize {
        std::mem::take(&mut self.looked_at)
    }

    /// The flow templates of a rule for the port; `all_traffic`: as if the rule named no ports.
    /// Whether a rule of a port that denies would write this flow, whatever the name.
    pub(crate) fn is_denial(
        &mut self,
        facts: PortFacts<'_>,
        (key, cookie): (&FlowKey, Cookie),
    ) -> bool {
        let v6 = key.matches.ends.src().is_ipv6();
        facts.sets.iter().enumerate().any(|(at, set)| {
            let mut places = set.at_priority(key.priority).iter();
            places.any(|place| {
                let denies = set.rules()[*place].action == RuleAction::Deny;
                denies
                    && [false, true].into_iter().any(|all_traffic| {
                        let templates = self.templates_of(facts, (at, *place), v6, all_traffic);
                        let mut templates = templates.iter();
                        templates.any(|flow| flow.cmp_to(key).is_eq() && flow.body.cookie == cookie)
                    })
            })
        })
    }

    fn templates_of(
        &mut self,
        facts: PortFacts<'_>,
        (set, rule): (usize, usize),
        v6: bool,
        all_traffic: bool,
    ) -> &[Arc<FlowTemplate>] {
        let key = TemplateKey {
            port: facts.port,
            set,
            rule,
            v6,
            all_traffic,
        };
        let Self {
            cookies,
            templates,
            made,
            ..
        } = self;
        made.entry(key).or_insert_with(|| {
            let rule = &facts.sets[set].rules()[rule];
            let transports = match all_traffic {
                true => &[],
                false => &rule.transports[..],
            };
            let new = make_templates(facts, rule, transports, v6, cookies).collect();
            templates.share(new, cookies)
        })
    }
}

/// Every template that is in use, and some that are no longer in use.
#[derive(Debug, Default)]
struct Templates {
    all: HashSet<Arc<FlowTemplate>>,
    /// With more templates than this, those that are not in use are dropped.
    max: usize,
}

impl Templates {
    /// The known ones of these templates, and the others from now on.
    fn share(&mut self, new: Vec<FlowTemplate>, cookies: &mut Cookies) -> Arc<[Arc<FlowTemplate>]> {
        let Self { all, max } = self;
        let shared = new.into_iter().map(|template| match all.get(&template) {
            Some(known) => Arc::clone(known),
            None => {
                let template = Arc::new(template);
                all.insert(Arc::clone(&template));
                template
            }
        });
        let shared = shared.collect();
        if all.len() > (*max).max(TEMPLATES_MIN) {
            all.retain(is_in_use);
            *max = 2 * all.len();
            cookies.keep(all.iter().map(|template| template.body.cookie));
        }
        shared
    }
}

/// Whether a cache entry may have the template: the set of all templates is one owner, `made` may
/// be another.
fn is_in_use(template: &Arc<FlowTemplate>) -> bool {
    Arc::strong_count(template) > 1
}

/// Makes a plan of templates: of several with the same key, the first counts.
pub fn in_order(templates: &mut Plan) {
    if templates.len() > 1 {
        templates.sort_by(|one, other| one.cmp_key(other));
        templates.dedup_by(|later, first| later.cmp_key(first).is_eq());
    }
}

fn make_templates(
    facts: PortFacts<'_>,
    rule: &ActiveRule,
    transports: &[Transport],
    v6: bool,
    cookies: &mut Cookies,
) -> impl Iterator<Item = FlowTemplate> {
    let is_for_family = if v6 { rule.v6 } else { rule.v4 };
    let templates = rule.templates.iter().filter(move |_| is_for_family);
    templates
        .filter_map(move |acl_template| Some((acl_template, body(acl_template, facts, cookies)?)))
        .flat_map(move |(acl_template, body)| {
            let sources = facts
                .addresses
                .iter()
                .filter(move |src| src.is_ipv6() == v6);
            sources.flat_map(move |src| {
                let any = transports.is_empty().then_some(None);
                let transports = transports.iter().copied().map(Some).chain(any);
                let body = body.clone();
                let registers = at_port(facts, acl_template.registers.clone());
                transports.map(move |transport| FlowTemplate {
                    table: acl_template.table(facts.base),
                    priority: acl_template.priority,
                    metadata: facts.keys.datapath.into(),
                    registers: Arc::clone(&registers),
                    src: *src,
                    transport,
                    denies: rule.action == RuleAction::Deny,
                    body: body.clone(),
                })
            })
        })
}

/// These registers, for packets of the port.
fn at_port(facts: PortFacts<'_>, mut registers: Registers) -> Arc<Registers> {
    registers.insert(REG_INPORT, Masked::new(facts.keys.port, u32::MAX));
    Arc::new(registers)
}

fn body(
    acl_template: &AclTemplate,
    facts: PortFacts<'_>,
    cookies: &mut Cookies,
) -> Option<FlowBody> {
    let mut actions = acl_template.actions(facts.base, facts.cached_actions)?;
    // What leaves the pipeline has the mark that it would have without dnsflow. What is dropped needs none.
    if let Some(mask) = facts.mark_mask
        && !actions.is_empty()
    {
        actions.insert(0, Action::SetMark(Masked::new(0, mask)));
    }
    Some(FlowBody {
        cookie: cookies.cookie(&actions),
        // A sentinel flow ends it.
        hard_timeout_s: 0,
        actions: actions.into(),
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
