//! What the agent was told in the last seconds before a crash.

use super::{
    edits::{self, WAYS, config, node},
    restart::{read_but_southbound, southbound, started},
    starts::{edit, is_open, is_open_at_all},
    *,
};
use crate::{
    ask::view::{Judged, told_names::WORK},
    values::connection::Attempt,
};

/// The agent is killed. The next one has this snapshot, and reads these rules.
fn killed(before: &mut Node, saved: Saved, way: Option<u32>, rules: &[Rule]) -> Node {
    let mut node = started(before, &[], config(way));
    node.engine.load_snapshot(saved, node.now);
    let mut node = read_but_southbound(node, before, rules);
    let sb = southbound(&node, rules);
    node.give(Input::Sb(sb));
    node
}

/// The snapshot on disk, which is written every ten seconds if there is something new.
struct Disk {
    saved: Saved,
    version: u64,
}

impl Disk {
    fn new(node: &Node) -> Self {
        Self {
            saved: node.engine.saved(node.now),
            version: node.engine.cache_version(),
        }
    }

    /// Time passes.
    fn pass(&mut self, node: &mut Node, time: Duration) {
        let end = node.now + time;
        while node.now < end {
            node.pass(Duration::from_secs(10));
            if node.engine.cache_version() != self.version {
                *self = Self::new(node);
            }
        }
    }
}

/// A flow of our own to this address.
fn has_flow(node: &Node, address: [u8; 4]) -> bool {
    let mut keys = node.of_rules();
    keys.any(|key| key.matches.ends.dst() == Some(address.into()))
}

/// A Deny by name comes, and the pod asks for the name. The agent is killed within seconds of that: the snapshot has
/// neither the name nor the rule. All that is not denied is allowed.
#[test]
fn a_denial_of_the_last_seconds_is_there_behind_a_start() {
    let former = [allow("other.test")];
    let rules = [allow("other.test"), deny("bad.test")];
    let mut open = Vec::new();
    for way in WAYS {
        for rule_is_saved in [true, false] {
            let mut before = node(way, if rule_is_saved { &rules } else { &former[..] });
            before.answer("p1", "other.test", &[OTHER], 600);
            let saved = before.engine.saved(before.now);
            if !rule_is_saved {
                edit(&mut before, &rules);
            }
            before.answer("p1", "bad.test", &[ADDRESS], 600);
            before.pass(Duration::from_secs(5));
            assert!(has_flow(&before, ADDRESS));
            let mut node = killed(&mut before, saved, way, &rules);
            node.pass(COMPARE_INTERVAL);
            if !has_flow(&node, ADDRESS) {
                open.push(format!("{way:?}, rule in the snapshot: {rule_is_saved}"));
            }
        }
    }
    assert_eq!(open, [] as [String; 0]);
}

/// The same, with a rule that is in force for ten minutes. Nothing else has happened on the node since, or an answer
/// has.
#[test]
fn a_rule_of_ten_minutes_is_in_the_snapshot() {
    let former = [allow("other.test"), deny_all()];
    let open_to_all = [allow("other.test")];
    let mut wrong = Vec::new();
    for way in WAYS {
        for denies in [false, true] {
            for is_quiet in [false, true] {
                let former = if denies { &open_to_all } else { &former[..] };
                let mut rules = former.to_vec();
                let rule = if denies {
                    deny("new.test")
                } else {
                    allow("new.test")
                };
                rules.insert(1, rule);
                let mut before = node(way, former);
                before.answer("p1", "other.test", &[OTHER], 3600);
                let mut disk = Disk::new(&before);
                disk.pass(&mut before, Duration::from_secs(60));
                edit(&mut before, &rules);
                disk.pass(&mut before, Duration::from_secs(300));
                if !is_quiet {
                    before.answer("p1", "other.test", &[OTHER], 3600);
                }
                disk.pass(&mut before, Duration::from_secs(300));
                before.answer("p1", "new.test", &[ADDRESS], 600);
                before.pass(Duration::from_secs(5));
                let is_right = |node: &Node| match denies {
                    true => has_flow(node, ADDRESS),
                    false => is_open_at_all(node, ADDRESS),
                };
                assert!(is_right(&before));
                let mut node = killed(&mut before, disk.saved, way, &rules);
                node.pass(Duration::from_secs(1));
                if !is_right(&node) {
                    wrong.push(format!("{way:?}, denies: {denies}, quiet: {is_quiet}"));
                }
            }
        }
    }
    assert_eq!(wrong, [] as [String; 0]);
}

/// The rows of so many rules.
fn rows_of(rules: &[Rule]) -> (NbUpdate, Vec<(RowId, Option<LogicalFlow>)>) {
    let all = 0..rules.len() as u32;
    let acls = all.clone().map(|at| (acl_row(at), acl(at, rules)));
    let logical_flows = all.map(|at| (logical_flow_row(at), logical_flow(at, rules)));
    let update = NbUpdate {
        acls: acls.collect(),
        ..NbUpdate::default()
    };
    (update, logical_flows.collect())
}

/// OVN enforces all of these rules.
pub(super) fn follow(node: &mut Node, rules: &[Rule]) {
    let (acls, logical_flows) = rows_of(rules);
    node.give(Input::Nb(acls));
    node.give(Input::Sb(SbUpdate {
        logical_flows,
        ..SbUpdate::default()
    }));
}

/// What the snapshot lacks.
#[derive(Clone, Copy, Debug)]
enum Lost {
    Nothing,
    /// The names of the addresses.
    Names,
    /// And the rules.
    All,
}

/// What was planned since the last call, and how many names and rules were looked at for that.
fn work(node: &mut Node) -> [usize; 2] {
    let planner = node.engine.told.plans.planner();
    [planner.take_planned(), planner.take_looked_at()]
}

/// The pod is told this name for so many addresses behind these rules, and the agent is killed. Returns the next one,
/// which has compared.
fn killed_behind(rules: &[Rule], (name, told): (&str, u32), lost: Lost) -> Node {
    let mut before = node(None, rules);
    follow(&mut before, rules);
    before.answer("p1", name, &addresses(0, told), 3600);
    before.pass(Duration::from_secs(5));
    let mut saved = before.engine.saved(before.now);
    match lost {
        Lost::Nothing => {}
        Lost::Names => saved.entries.clear(),
        Lost::All => saved = Saved::default(),
    }
    let closed_or_open = before.destinations();
    assert_eq!(closed_or_open.len(), told as usize);
    let mut node = started(&mut before, &[], config(None));
    node.engine.load_snapshot(saved, node.now);
    let mut node = read_but_southbound(node, &before, rules);
    let (acls, logical_flows) = rows_of(rules);
    node.give(Input::Nb(acls));
    let southbound = SbUpdate {
        logical_flows,
        ..southbound(&node, rules)
    };
    work(&mut node);
    node.give(Input::Sb(southbound));
    assert!(node.engine.switch.is_compared());
    assert_eq!(node.destinations(), closed_or_open);
    node
}

fn many_names(count: usize) -> Vec<Rule> {
    let names = (0..count).map(|name| allow(&format!("name{name:05}.test")));
    names.chain([deny_all()]).collect()
}

#[test]
fn a_start_looks_for_an_address_without_a_name_at_the_rules_in_place_of_its_flows_alone() {
    for lost in [Lost::Names, Lost::All] {
        let [of_few, of_many] = [4, 400].map(|count| {
            let told = ("name00003.test", 16);
            work(&mut killed_behind(&many_names(count), told, lost))
        });
        assert_eq!(of_many[0], of_few[0], "{lost:?}");
        // Each is found by bisection in the snapshot.
        let is_right = of_many[1] <= 4 * of_few[1];
        assert!(is_right, "{lost:?}: {of_few:?} {of_many:?}");
    }
}

#[test]
fn an_edit_looks_at_no_address_without_a_name_that_other_rules_have_opened() {
    let mut works = Vec::new();
    for lost in [Lost::Nothing, Lost::Names, Lost::All] {
        let mut rules = many_names(100);
        let mut node = killed_behind(&rules, ("name00003.test", 16), lost);
        node.pass(Duration::from_secs(1));
        work(&mut node);
        rules[0] = allow("edited.test");
        node.set_firewall(&rules);
        follow(&mut node, &rules);
        works.push(work(&mut node));
        assert_eq!(node.destinations().len(), 16, "{lost:?}");
        // One of its own rule does.
        rules[3] = allow("another.test");
        node.set_firewall(&rules);
        follow(&mut node, &rules);
        assert_eq!(node.destinations().len(), 0, "{lost:?}");
    }
    assert_eq!(works, [[0, 0]; 3]);
}

/// Their use is looked at whenever their time is over.
#[test]
fn an_address_without_a_name_in_use_has_not_all_rules_looked_at() {
    let works = [4, 400].map(|count| {
        let mut node = killed_behind(&many_names(count), ("name00003.test", 16), Lost::All);
        work(&mut node);
        for _ in 0..12 {
            edits::use_all(&mut node);
            node.pass(COMPARE_INTERVAL);
        }
        assert_eq!(node.destinations().len(), 16);
        work(&mut node)
    });
    assert!(works[0][0] >= 16, "they are planned again");
    assert_eq!(works[1], works[0]);
}

#[test]
fn an_attempt_at_an_address_without_a_name_looks_at_the_rules_of_its_flows_alone() {
    let works = [4, 400].map(|count| {
        let node = killed_behind(&many_names(count), ("name00003.test", 16), Lost::All);
        let attempt = Attempt {
            ifindex: ifindex_of(node.pods["ns1_p1"]),
            protocol: Protocol::Tcp,
            address: addresses(0, 1)[0].into(),
            port: 443,
            at: node.now,
        };
        let before = WORK.get();
        let judged = node.engine.view().judge_attempt(&attempt, &[], node.now);
        let work = WORK.get() - before;
        match judged {
            Judged::Allowed(tried) => (tried.rule, work),
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(works[0].0, Some(3));
    assert_eq!(works[0], works[1]);
}

/// Rules that deny a port each. The pod is told a further name.
#[test]
fn an_answer_for_a_denied_name_does_not_look_at_each_rule_for_each_rule() {
    let works = [Lost::Nothing, Lost::All].map(|lost| {
        let rules = tcp(200).into_iter().map(|port| Rule {
            ports: vec![port],
            ..deny("bad.test")
        });
        let rules: Vec<Rule> = rules.chain([deny_all()]).collect();
        let mut node = killed_behind(&rules, ("bad.test", 16), lost);
        work(&mut node);
        node.answer("p1", "further.bad.test", &addresses(0, 16), 3600);
        work(&mut node)
    });
    let [of_names, without_names] = works;
    assert_eq!(without_names[0], of_names[0]);
    assert!(without_names[1] <= 8 * of_names[1], "{works:?}");
}

/// Rules that deny many ports together close all of them in one flow, which stays until all of these rules have given
/// theirs. The last one that has not is taken away.
#[test]
fn a_flow_without_a_name_that_closes_all_ports_goes_with_the_last_rule_that_it_may_stand_for() {
    let of_ports = |name, ports| Rule {
        ports: tcp(ports),
        ..deny(name)
    };
    let mut rules = vec![
        of_ports("bad.test", 200),
        of_ports("evil.test", 100),
        of_ports("worse.test", 1),
    ];
    let mut before = node(None, &rules);
    for name in ["bad.test", "evil.test"] {
        before.answer("p1", name, &[ADDRESS], 600);
    }
    let mut node = killed(&mut before, Saved::default(), None, &rules);
    node.answer("p1", "bad.test", &[ADDRESS], 600);
    let closes_all = |node: &Node| {
        let mut keys = node.switch.keys();
        keys.any(|key| key.matches.transport.is_none())
    };
    assert!(closes_all(&node));
    while rules.len() > 1 {
        rules.pop();
        edit(&mut node, &rules);
        let gone = rules.len() as u32;
        node.give(Input::Nb(NbUpdate {
            acls: vec![(acl_row(gone), None)],
            ..NbUpdate::default()
        }));
        node.give(Input::Sb(SbUpdate {
            logical_flows: vec![(logical_flow_row(gone), None)],
            ..SbUpdate::default()
        }));
        assert_eq!(closes_all(&node), rules.len() > 1, "{gone} rules");
    }
}

/// The flows of so many addresses without a name are adopted, of a namespace with so many rules. Returns how many rules
/// are looked at for that.
fn looked_at(rules: usize, told: u32, with_rules: bool) -> usize {
    let mut all: Vec<Rule> = (0..rules)
        .map(|name| allow(&format!("name{name:05}.test")))
        .collect();
    all.push(deny_all());
    let mut before = node(None, &all);
    let (acls, logical_flows) = rows_of(&all);
    before.give(Input::Nb(acls));
    before.give(Input::Sb(SbUpdate {
        logical_flows,
        ..SbUpdate::default()
    }));
    let mut saved = before.engine.saved(before.now);
    assert_eq!(saved.rules[0].rules.len(), rules);
    if !with_rules {
        saved.rules.clear();
    }
    let told = addresses(0, told);
    before.answer("p1", "name00000.test", &told, 600);
    before.pass(Duration::from_secs(5));
    let mut node = started(&mut before, &[], config(None));
    node.engine.load_snapshot(saved, node.now);
    let mut node = read_but_southbound(node, &before, &all);
    let (acls, logical_flows) = rows_of(&all);
    node.give(Input::Nb(acls));
    let southbound = SbUpdate {
        logical_flows,
        ..southbound(&node, &all)
    };
    node.engine.told.plans.planner().take_looked_at();
    node.give(Input::Sb(southbound));
    assert!(told.iter().all(|address| is_open(&node, *address, 0)));
    node.engine.told.plans.planner().take_looked_at()
}

#[test]
fn an_address_without_a_name_has_no_rule_compared_with_all_rules_of_the_snapshot() {
    let (rules, told) = (400, 16);
    let [without, with] = [false, true].map(|with_rules| looked_at(rules, told, with_rules));
    let most = without + 2 * rules * told as usize;
    assert!(with <= most, "{with}, without the rules {without}");
}
