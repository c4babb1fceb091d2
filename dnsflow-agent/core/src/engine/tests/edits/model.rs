//! An edit at any moment of a life: before a restart, while no agent runs, during the start, and after.
//!
//! The model knows what the pod was told, which of it the present agent can know, and each version of the rules. It
//! knows nothing of plans or marks.

use proptest::{collection::vec, prelude::*};

use super::*;

const NAMES: [&str; 3] = ["a.test", "b.test", "www.a.test"];
const TTL: Duration = Duration::from_secs(600);

#[derive(Clone, Debug)]
enum Step {
    /// The pod is told an address of a name.
    Answer { name: usize, host: u8 },
    /// The rules are edited.
    Edit(First, Vec<Rule>),
    /// Each flow and each mark sees a packet.
    Use,
    /// Time passes, in seconds.
    Pass(u64),
    /// The agent ends, and another one starts.
    Restart {
        has_journal: bool,
        /// In seconds.
        away: u64,
        /// The rules are edited while no agent runs.
        edited: Option<Vec<Rule>>,
        /// The rules are edited during the start.
        during: Option<(First, Vec<Rule>)>,
    },
}

fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let rule = (0..NAMES.len(), any::<bool>());
    vec(rule, 0..4).prop_map(|choice| {
        let mut rules: Vec<Rule> = Vec::new();
        for (name, is_allowed) in choice {
            let rule = match is_allowed {
                true => allow(NAMES[name]),
                false => deny(NAMES[name]),
            };
            let is_new = |known: &Rule| known.destination != rule.destination;
            if rules.iter().all(is_new) {
                rules.push(rule);
            }
        }
        rules.push(deny_all());
        rules
    })
}

fn first() -> impl Strategy<Value = First> {
    prop_oneof![Just(First::Manifest), Just(First::Rows)]
}

fn step() -> impl Strategy<Value = Step> {
    let restart = (
        proptest::bool::weighted(0.7),
        prop_oneof![Just(0), Just(30), Just(66)],
        proptest::option::of(rules()),
        proptest::option::of((first(), rules())),
    );
    prop_oneof![
        5 => (0..NAMES.len(), 1..4_u8).prop_map(|(name, host)| Step::Answer { name, host }),
        4 => (first(), rules()).prop_map(|(first, rules)| Step::Edit(first, rules)),
        2 => Just(Step::Use),
        2 => (1..25_u64).prop_map(Step::Pass),
        3 => restart.prop_map(|(has_journal, away, edited, during)| Step::Restart {
            has_journal, away, edited, during,
        }),
    ]
}

/// What the pod was told.
#[derive(Clone, Copy, Debug)]
struct Answered {
    at: Timestamp,
    /// Whether the present agent knows of it.
    is_known: bool,
    /// Whether each version of the rules since then allows it.
    is_always_allowed: bool,
}

/// Destination and priority.
type Flow = (String, u16);

struct Model {
    rules: Vec<Rule>,
    /// By name and address.
    told: BTreeMap<(usize, u8), Answered>,
    /// Flows whose names the present agent cannot know, and whose rule may have been edited while no agent ran: they stay
    /// if the rule denies.
    excused: BTreeSet<Flow>,
}

fn address(host: u8) -> [u8; 4] {
    [203, 0, 113, host]
}

fn index(priority: u16) -> usize {
    usize::from(11_000 - priority)
}

fn is_for(rule: &Rule, name: &str) -> bool {
    let Destination::Name(of_rule) = &rule.destination else {
        return false;
    };
    let of_rule = of_rule.written();
    name == of_rule || name.ends_with(&format!(".{of_rule}"))
}

/// The index of the rule that allows a name.
fn allowing(rules: &[Rule], name: &str) -> Option<usize> {
    let first = rules.iter().position(|rule| is_for(rule, name))?;
    (rules[first].action == RuleAction::Allow).then_some(first)
}

fn flows(node: &Node) -> BTreeSet<Flow> {
    let open = node.open().into_iter();
    open.map(|(_, dst, priority)| (dst, priority)).collect()
}

impl Model {
    /// What no rule mentions is deferred in the kernel, until a rule does.
    fn tell(&mut self, name: usize, host: u8, is_mentioned: bool, now: Timestamp) {
        let told = Answered {
            at: now,
            is_known: is_mentioned,
            is_always_allowed: allowing(&self.rules, NAMES[name]).is_some(),
        };
        self.told.insert((name, host), told);
    }

    /// There is another version of the rules; `is_seen`: the agent has seen the one before.
    fn edit(&mut self, rules: &[Rule], is_seen: bool) {
        for ((name, _), told) in &mut self.told {
            told.is_always_allowed &= allowing(rules, NAMES[*name]).is_some();
        }
        let before = std::mem::replace(&mut self.rules, rules.to_vec());
        let is_same = |flow: &Flow| before.get(index(flow.1)) == self.rules.get(index(flow.1));
        self.excused.retain(|flow| !is_seen || is_same(flow));
    }

    /// A journal has the names of these addresses, and they decide. Denials that a start without a journal has kept stay.
    fn excuse_nameless(&mut self, node: &Node) {
        let told = self.told.iter();
        let known = told.filter(|(_, told)| told.is_known && told.at + TTL > node.now);
        let known: BTreeSet<String> = known
            .map(|((_, host), _)| Ipv4Addr::from(address(*host)).to_string())
            .collect();
        self.excused.retain(|(dst, _)| !known.contains(dst));
    }

    /// What is always allowed and known is open, by the rules of one of these versions. Between two versions, what
    /// another rule allows than before waits for OVN.
    fn check_least(&self, node: &Node, versions: [&[Rule]; 2], step: &Step) {
        let open = flows(node);
        for ((name, host), told) in &self.told {
            let [before, after] =
                versions.map(|rules| Some(&rules[allowing(rules, NAMES[*name])?]));
            let is_due = told.is_known && told.is_always_allowed && told.at + TTL > node.now;
            if !is_due || before != after {
                continue;
            }
            let dst = Ipv4Addr::from(address(*host)).to_string();
            let is_open = versions.iter().any(|rules| {
                let index =
                    allowing(rules, NAMES[*name]).and_then(|index| u16::try_from(index).ok());
                index.is_some_and(|index| open.contains(&(dst.clone(), 11_000 - index)))
            });
            assert!(
                is_open,
                "{step:?}: {} at {dst} closes: {open:?}",
                NAMES[*name]
            );
        }
    }

    /// Nothing is open but by a rule that matches a name of the address.
    fn check_most(&mut self, node: &Node, step: &Step) {
        let open = flows(node);
        self.excused.retain(|flow| open.contains(flow));
        for flow in &open {
            let rule = self.rules.get(index(flow.1));
            let mut told = self.told.keys();
            let is_ruled = told.any(|(name, host)| {
                Ipv4Addr::from(address(*host)).to_string() == flow.0
                    && rule.is_some_and(|rule| is_for(rule, NAMES[*name]))
            });
            let denies = rule.is_some_and(|rule| rule.action == RuleAction::Deny);
            assert!(
                is_ruled || denies && self.excused.contains(flow),
                "{step:?}: {flow:?} is open by {rule:?}"
            );
        }
    }
}

/// An edit plans each address to which it matters: another plan of all of them opens and closes nothing.
fn check_planned(node: &mut Node, step: &Step) {
    let before = flows(node);
    let engine = &mut node.engine;
    engine.out.begin(node.now);
    let mut batch = engine.switch.begin(node.now);
    engine.replan_all(&mut batch);
    engine.finish(Some(batch), node.now);
    node.obey();
    assert_eq!(flows(node), before, "{step:?}");
}

fn edit_by_steps(node: &mut Node, model: &mut Model, first: First, rules: &[Rule], step: &Step) {
    let before = model.rules.clone();
    model.edit(rules, true);
    let manifest = |node: &mut Node| node.set_firewall(rules);
    let nb = |node: &mut Node| node.set_nb(rules);
    let sb = |node: &mut Node| node.set_sb(rules);
    let steps: [&dyn Fn(&mut Node); 3] = match first {
        First::Manifest => [&manifest, &nb, &sb],
        First::Rows => [&nb, &sb, &manifest],
    };
    for one in steps {
        one(node);
        model.check_least(node, [&before, rules], step);
    }
}

fn run(way: Option<u32>, steps: Vec<Step>) {
    let mut model = Model {
        rules: vec![allow("a.test"), deny_all()],
        told: BTreeMap::new(),
        excused: BTreeSet::new(),
    };
    let mut node = node(way, &model.rules);
    for step in steps {
        match step.clone() {
            Step::Answer { name, host } => {
                node.answer("p1", NAMES[name], &[address(host)], 600);
                let mentioned = model.rules.iter().any(|rule| is_for(rule, NAMES[name]));
                model.tell(name, host, mentioned, node.now);
            }
            Step::Edit(first, rules) => edit_by_steps(&mut node, &mut model, first, &rules, &step),
            Step::Use => use_all(&mut node),
            Step::Pass(seconds) => node.pass(Duration::from_secs(seconds)),
            Step::Restart {
                has_journal,
                away,
                edited,
                during,
            } => {
                let away = Duration::from_secs(away);
                let mut saved = Some(aged(node.folded(&[]), away));
                model.excuse_nameless(&node);
                if !has_journal {
                    saved = None;
                    model.excused = flows(&node);
                    let answers = model.told.values_mut();
                    answers.for_each(|told| told.is_known = false);
                }
                if let Some(rules) = &edited {
                    model.edit(rules, false);
                }
                node.now = node.now + away;
                let after = super::super::restart::started_with(&mut node, saved, config(way));
                let mut after = read_but_southbound(after, &node, &model.rules);
                let before = model.rules.clone();
                match &during {
                    Some((First::Rows, rules)) => {
                        model.edit(rules, false);
                        after.set_nb(rules);
                        let sb = southbound(&after, rules);
                        after.give(Input::Sb(sb));
                        model.check_least(&after, [&before, rules], &step);
                        after.set_firewall(rules);
                    }
                    Some((First::Manifest, rules)) => {
                        model.edit(rules, true);
                        after.set_firewall(rules);
                        let sb = southbound(&after, &before);
                        after.give(Input::Sb(sb));
                        model.check_least(&after, [&before, rules], &step);
                        after.set_ovn(rules);
                    }
                    None => {
                        let sb = southbound(&after, &model.rules);
                        after.give(Input::Sb(sb));
                    }
                }
                node = after;
            }
        }
        model.check_least(&node, [&model.rules, &model.rules], &step);
        if matches!(step, Step::Edit(..) | Step::Restart { .. }) {
            check_planned(&mut node, &step);
        }
        node.pass(COMPARE_INTERVAL);
        model.check_least(&node, [&model.rules, &model.rules], &step);
        model.check_most(&node, &step);
    }
}

/// A start without a journal keeps what the rules deny, and so does a further one: nobody knows the names.
#[test]
fn a_denial_without_a_name_stays_over_two_starts() {
    let restart = |has_journal, edited: Option<Rule>| Step::Restart {
        has_journal,
        away: 0,
        edited: edited.map(|rule| vec![rule, deny_all()]),
        during: None,
    };
    for way in WAYS {
        let rules = vec![deny("b.test"), deny_all()];
        let steps = vec![
            Step::Edit(First::Manifest, rules),
            Step::Answer { name: 1, host: 1 },
            restart(false, Some(deny("a.test"))),
            restart(true, None),
        ];
        run(way, steps);
    }
}

/// A start without a journal keeps flows of nobody that deny. Those of a group with a name follow the edit.
#[test]
fn a_denial_with_a_name_follows_an_edit_over_two_starts() {
    let restart = |has_journal, edited| Step::Restart {
        has_journal,
        away: 0,
        edited,
        during: None,
    };
    for way in WAYS {
        let edited = vec![deny("b.test"), deny("www.a.test"), deny_all()];
        let steps = vec![
            Step::Edit(
                First::Manifest,
                vec![deny("www.a.test"), deny("b.test"), deny_all()],
            ),
            restart(false, None),
            Step::Answer { name: 1, host: 1 },
            restart(true, Some(edited)),
        ];
        run(way, steps);
    }
}

/// The flow that a start without a journal has kept comes before a mark.
#[test]
fn a_name_that_is_allowed_opens_an_address_that_flows_of_an_earlier_run_deny() {
    for way in WAYS {
        let steps = vec![
            Step::Edit(First::Manifest, vec![deny("www.a.test"), deny_all()]),
            Step::Answer { name: 2, host: 1 },
            Step::Restart {
                has_journal: false,
                away: 0,
                edited: Some(vec![deny("www.a.test"), allow("b.test"), deny_all()]),
                during: None,
            },
            Step::Answer { name: 1, host: 1 },
        ];
        run(way, steps);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_edit_at_any_moment_of_a_life(steps in vec(step(), 1..16)) {
        run(None, steps);
    }

    #[test]
    fn an_edit_at_any_moment_of_a_life_by_marks(steps in vec(step(), 1..16)) {
        run(MARKS, steps);
    }
}
