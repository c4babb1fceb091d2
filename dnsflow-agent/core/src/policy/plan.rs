//! The flows of groups, and those by which packets get their tags.
//!
//! The flows of a group are a function of its patterns and of the rules ([`Planner::of_group`]). Those of an address are
//! a function of its port and of the tag (`Planner::of_tag`). Nothing remembers how a flow came about: when a rule
//! changes, the new plan is compared with the old one.

mod patterns;

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
            Action, Cookie, Ends, FlowBody, FlowKey, FlowTemplate, Masked, Registers, Sentinel,
            Source, Tag,
        },
        ids::PortId,
        name::DomainName,
    },
};

pub use patterns::{Pattern, Patterns, SavedGroup};

/// The highest priority of the flows that OVN makes of an EgressFirewall (`EgressFirewallStartPriority` in
/// ovn-kubernetes' go-controller/pkg/types/const.go, and [`ACL_PRIORITY_OFFSET`]).
///
/// [`ACL_PRIORITY_OFFSET`]: crate::policy::rules::ACL_PRIORITY_OFFSET
const RULES_PRIORITY: u16 = 11_000;
/// The priority of the flow that makes the tag of a mark. It only looks at a packet once more, as do those of addresses:
/// if a flow of OVN's comes before it, that one decides as without dnsflow.
const MARK_PRIORITY: u16 = RULES_PRIORITY + 1;
/// The priority of the flows that give tags to the packets to one address: they decide before a mark.
const TAG_PRIORITY: u16 = RULES_PRIORITY + 2;

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
/// Its lower half is a hash of the list. The same list therefore mostly gets the same cookie in the next
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
        let mut low = hash(actions) & OF_ACTIONS | u32::from(is_sentinel);
        while !self.taken.insert(Cookie::new(low)) {
            low = low.wrapping_add(2) & (OF_ACTIONS | 1);
        }
        let cookie = Cookie::new(low);
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

/// The bits that the cookies of action lists may have. Only those of sentinel flows are odd.
const OF_ACTIONS: u32 = !(Cookie::HAS_TAG | 1);

/// FNV-1a with 32 bits (RFC 9923) over the list.
fn hash(actions: &[Action]) -> u32 {
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
            Action::SetTunnel(key) => {
                add(&[6]);
                add(&key.to_be_bytes());
            }
            Action::MoveMark { mask } => {
                add(&[7]);
                add(&mask.to_be_bytes());
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
    /// The OpenFlow table in which tags end, if OVN has such a table.
    pub tags_end: Option<u8>,
}

impl PortFacts<'_> {
    /// The OpenFlow tables in which the rules are enforced.
    pub(crate) fn tables(self) -> BTreeSet<u8> {
        let places = self.sets.iter().flat_map(|set| set.places());
        places
            .map(|(_, table_id)| self.base.saturating_add(table_id))
            .collect()
    }

    fn rule(&self, (set, rule): (usize, usize)) -> &ActiveRule {
        &self.sets[set].rules()[rule]
    }
}

/// The templates of a plan, in the order of [`FlowTemplate::cmp_key`], no key twice.
pub type Plan = Vec<Arc<FlowTemplate>>;

/// The same, shared.
type SharedPlan = Arc<[Arc<FlowTemplate>]>;

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
/// The flow templates of a rule are the same for every group, and those of a tag for every address of a port. The planner
/// makes them once, and all groups and cache entries share them.
#[derive(Debug, Default)]
pub struct Planner {
    cookies: Cookies,
    templates: Templates,
    /// The templates of each rule, as long as nothing has changed that they were made from.
    of_rules: HashMap<TemplateKey, SharedPlan>,
    /// The same of the flows that give a tag, for a port.
    of_tags: HashMap<(PortId, TagFlows), SharedPlan>,
    /// How many plans were made.
    #[cfg(test)]
    planned: usize,
    /// How many names and rules were looked at for them.
    #[cfg(test)]
    looked_at: usize,
}

/// The flows that give packets to an address their tag.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct TagFlows {
    /// The tag.
    pub(crate) tag: Tag,
    /// The IP version of the address.
    pub(crate) is_ipv6: bool,
    /// Whether only packets of established connections get the tag.
    pub(crate) has_ended: bool,
    /// The bits of the mark that say a packet's group.
    pub(crate) mask: Option<u32>,
}

/// A rule in a logical switch, for one address family.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct TemplateKey {
    /// The key of the logical switch.
    datapath: u32,
    /// Whose rule it is.
    port_group: Arc<str>,
    /// In [`RuleSet::rules`].
    rule: usize,
    is_ipv6: bool,
}

/// With fewer templates, a search for unused ones is not worth its time.
const TEMPLATES_MIN: usize = 1024;

impl Planner {
    /// Forgets the templates: rules, ports or the pipeline may have changed.
    pub fn forget(&mut self) {
        self.of_rules.clear();
        self.of_tags.clear();
    }

    /// How many flows a group with these patterns has.
    pub(crate) fn size(&mut self, facts: PortFacts<'_>, patterns: &Patterns) -> usize {
        let rules = patterns.rules(facts.sets);
        let sizes = rules.iter();
        sizes
            .map(|place| facts.rule(*place).flow_count(patterns.is_ipv6, 1))
            .sum()
    }

    /// The flows of a group with these patterns.
    pub fn of_group(&mut self, facts: PortFacts<'_>, patterns: &Patterns) -> Plan {
        let matched = patterns.rules(facts.sets);
        #[cfg(test)]
        {
            self.planned += 1;
            self.looked_at += matched.len();
        }
        let mut plan = Plan::new();
        for place in matched {
            plan.extend_from_slice(self.of_rule(facts, place, patterns.is_ipv6));
        }
        in_order(&mut plan);
        plan
    }

    /// The flows of the group that closes its addresses, whatever else rules say.
    pub(crate) fn of_closed(&mut self, facts: PortFacts<'_>, is_ipv6: bool) -> Plan {
        let body = self.body(Vec::new());
        let templates = facts.tables().into_iter().map(|table| FlowTemplate {
            table,
            priority: TAG_PRIORITY,
            metadata: facts.keys.datapath.into(),
            registers: Arc::default(),
            source: Source::Tagged { is_ipv6 },
            transport: None,
            denies: true,
            body: body.clone(),
        });
        self.shared(templates.collect())
    }

    /// The flows that give a tag to the packets from a port to an address.
    pub(crate) fn of_tag(&mut self, facts: PortFacts<'_>, flows: TagFlows) -> Plan {
        let TagFlows {
            tag,
            is_ipv6,
            has_ended,
            mask,
        } = flows;
        let key = (facts.port, flows);
        if let Some(known) = self.of_tags.get(&key) {
            return known.to_vec();
        }
        let registers = at_port(facts);
        let sources = facts.addresses.iter();
        let sources = sources.filter(|src| src.is_ipv6() == is_ipv6);
        let of_source = match has_ended {
            true => Source::Established,
            false => Source::Address,
        };
        let templates = sources.flat_map(|src| {
            facts.tables().into_iter().map(|table| {
                let mut actions = vec![
                    Action::SetTunnel(tag.bits()),
                    // Behind it, the flow does not match any more.
                    Action::Resubmit { table },
                ];
                actions.splice(..0, mask.map(no_mark));
                FlowTemplate {
                    table,
                    priority: TAG_PRIORITY,
                    metadata: facts.keys.datapath.into(),
                    registers: Arc::clone(&registers),
                    source: of_source(*src),
                    transport: None,
                    denies: false,
                    body: FlowBody {
                        cookie: Cookie::of_tag(tag, mask),
                        hard_timeout_s: 0,
                        actions: actions.into(),
                    },
                }
            })
        });
        let plan = self.shared(templates.collect());
        self.of_tags.insert(key, plan.as_slice().into());
        plan
    }

    /// The flows that make the tags of a port's packets of their marks in these bits. All are of this scope.
    pub(crate) fn of_marks(&mut self, facts: PortFacts<'_>, scope: u16, mask: u32) -> Plan {
        let registers = at_port(facts);
        let templates = facts.tables().into_iter().map(|table| {
            let actions = actions_of_marks(scope, table, mask);
            FlowTemplate {
                table,
                priority: MARK_PRIORITY,
                metadata: facts.keys.datapath.into(),
                registers: Arc::clone(&registers),
                source: Source::Whole(Ends::Untranslated),
                transport: None,
                denies: false,
                body: self.body(actions),
            }
        });
        let templates = templates.collect();
        self.shared(templates)
    }

    /// The flows in which the tags of a logical switch's packets end, and the marks in these bits: what leaves the pipeline
    /// is as it would be without dnsflow.
    pub(crate) fn of_ends(&mut self, facts: PortFacts<'_>, mask: Option<u32>) -> Plan {
        let Some(table) = facts.tags_end else {
            return Plan::new();
        };
        let next = Action::Resubmit { table };
        let end_of_tag = (Ends::AnyTag, vec![Action::SetTunnel(0), next.clone()]);
        // A flow that OVN has for a packet may come before the one that looks at the mark.
        let bits = (0..u32::BITS).map(|bit| 1 << bit);
        let ends_of_mark = mask.into_iter().flat_map(|mask| {
            let bits = bits.clone().filter(move |bit| mask & bit != 0);
            bits.map(move |bit| {
                (
                    Ends::Marked { bit },
                    vec![no_mark(mask), Action::Resubmit { table }],
                )
            })
        });
        let ends = std::iter::once(end_of_tag).chain(ends_of_mark);
        let templates = ends.map(|(ends, actions)| FlowTemplate {
            table,
            priority: u16::MAX,
            metadata: facts.keys.datapath.into(),
            registers: Arc::default(),
            source: Source::Whole(ends),
            transport: None,
            denies: false,
            body: self.body(actions),
        });
        let templates = templates.collect();
        self.shared(templates)
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

    /// Whether a rule of a port that denies would write this flow, whatever the group.
    pub(crate) fn is_denial(
        &mut self,
        facts: PortFacts<'_>,
        (key, cookie): (&FlowKey, Cookie),
    ) -> bool {
        let Ends::Tagged { is_ipv6, .. } = key.matches.ends else {
            return false;
        };
        facts.sets.iter().enumerate().any(|(at, set)| {
            let mut places = set.at_priority(key.priority).iter();
            places.any(|place| {
                set.rules()[*place].action == RuleAction::Deny && {
                    let mut templates = self.of_rule(facts, (at, *place), is_ipv6).iter();
                    templates.any(|flow| flow.cmp_to(key).is_eq() && flow.body.cookie == cookie)
                }
            })
        })
    }

    /// The flow templates of a rule.
    fn of_rule(
        &mut self,
        facts: PortFacts<'_>,
        (set, rule): (usize, usize),
        is_ipv6: bool,
    ) -> &[Arc<FlowTemplate>] {
        let key = TemplateKey {
            datapath: facts.keys.datapath,
            port_group: facts.sets[set].group().clone(),
            rule,
            is_ipv6,
        };
        let Self {
            cookies,
            templates,
            of_rules,
            ..
        } = self;
        of_rules.entry(key).or_insert_with(|| {
            let rule = facts.rule((set, rule));
            let new = make_templates(facts, rule, is_ipv6, cookies).collect();
            templates.share(new, cookies)
        })
    }

    fn body(&mut self, actions: Vec<Action>) -> FlowBody {
        body(actions, &mut self.cookies)
    }

    fn shared(&mut self, templates: Vec<FlowTemplate>) -> Plan {
        let mut plan = self.templates.share(templates, &mut self.cookies).to_vec();
        in_order(&mut plan);
        plan
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
    is_ipv6: bool,
    cookies: &mut Cookies,
) -> impl Iterator<Item = FlowTemplate> {
    let is_for_family = if is_ipv6 { rule.v6 } else { rule.v4 };
    let templates = rule.templates.iter().filter(move |_| is_for_family);
    templates
        .filter_map(move |acl_template| {
            Some((acl_template, body_of(acl_template, facts, cookies)?))
        })
        .flat_map(move |(acl_template, body)| {
            let ports = rule.ports_of_flows();
            let any = ports.is_empty().then_some(None);
            let transports = ports.iter().copied().map(Some).chain(any);
            let registers = Arc::new(acl_template.registers.clone());
            transports.map(move |transport| FlowTemplate {
                table: acl_template.table(facts.base),
                priority: acl_template.priority,
                metadata: facts.keys.datapath.into(),
                registers: Arc::clone(&registers),
                source: Source::Tagged { is_ipv6 },
                transport,
                denies: rule.action == RuleAction::Deny,
                body: body.clone(),
            })
        })
}

/// The registers of all packets of a port.
fn at_port(facts: PortFacts<'_>) -> Arc<Registers> {
    let port = Masked::new(facts.keys.port, u32::MAX);
    Arc::new(Registers::from([(REG_INPORT, port)]))
}

/// Makes the tag of the mark, in this table and for this scope.
fn actions_of_marks(scope: u16, table: u8, mask: u32) -> Vec<Action> {
    vec![
        Action::SetTunnel(Tag::new(scope, 0).bits()),
        Action::MoveMark { mask },
        no_mark(mask),
        Action::Resubmit { table },
    ]
}

/// The scope for which a flow with this cookie makes tags of marks, of the first few.
#[cfg(any(test, feature = "test-util"))]
pub fn scope_of_marks(cookie: Cookie, table: u8, mask: u32) -> Option<u16> {
    let cookie_of = |scope| Cookie::new(hash(&actions_of_marks(scope, table, mask)) & OF_ACTIONS);
    (1..32).find(|scope| cookie_of(*scope) == cookie)
}

/// Takes the group out of the mark.
fn no_mark(mask: u32) -> Action {
    Action::SetMark(Masked::new(0, mask))
}

fn body_of(
    acl_template: &AclTemplate,
    facts: PortFacts<'_>,
    cookies: &mut Cookies,
) -> Option<FlowBody> {
    let mut actions = acl_template.actions(facts.base, facts.cached_actions)?;
    // The tag has done its work. What is dropped needs none.
    if !actions.is_empty() {
        actions.insert(0, Action::SetTunnel(0));
    }
    Some(body(actions, cookies))
}

fn body(actions: Vec<Action>, cookies: &mut Cookies) -> FlowBody {
    FlowBody {
        cookie: cookies.cookie(&actions),
        // A sentinel flow ends it.
        hard_timeout_s: 0,
        actions: actions.into(),
    }
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
        let collision = Cookie::new(hash(&actions) & OF_ACTIONS);
        cookies.taken.insert(collision);
        assert_eq!(
            cookies.cookie(&actions),
            Cookie::new((hash(&actions) & OF_ACTIONS) + 2)
        );
    }
}
