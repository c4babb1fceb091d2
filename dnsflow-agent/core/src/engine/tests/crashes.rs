//! What the agent was told in the last seconds before a crash.

use super::{
    edits::{WAYS, config, node},
    restart::{read_but_southbound, southbound, started},
    starts::{edit, is_open, is_open_at_all},
    *,
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
