use super::*;

const PORT: PortId = PortId(1);
const QUIET: PortId = PortId(2);

fn at(millis: u64) -> Timestamp {
    Timestamp::from_nanos(1_000_000_000_000) + Duration::from_millis(millis)
}

const FLOW: Changes = Changes { flows: 1, marks: 0 };
const MARK: Changes = Changes { flows: 0, marks: 1 };

/// Spends one flow after the other as long as that is possible; returns how many that were.
fn spend_all(budget: &mut FlowBudget, port: PortId, now: Timestamp) -> u32 {
    spend_all_as(budget, port, FLOW, now)
}

fn spend_all_as(budget: &mut FlowBudget, port: PortId, each: Changes, now: Timestamp) -> u32 {
    let mut count = 0;
    while budget.has_left(port, now) {
        budget.spend(port, each, now);
        count += 1;
        assert!(count < 1_000_000, "without end");
    }
    count
}

fn burst(per_second: u32) -> u32 {
    per_second * u32::try_from(FLOW_BURST_TIME.as_secs()).expect("few")
}

#[test]
fn a_pod_spends_its_burst_at_once_and_its_rate_after_that() {
    let mut budget = FlowBudget::new(100);
    assert_eq!(spend_all(&mut budget, PORT, at(0)), burst(100));
    assert_eq!(spend_all(&mut budget, PORT, at(0)), 0);
    assert_eq!(spend_all(&mut budget, PORT, at(100)), 10);
    assert_eq!(spend_all(&mut budget, PORT, at(1100)), 100);
    // Nothing is saved up beyond the burst.
    assert_eq!(spend_all(&mut budget, PORT, at(1_000_000)), burst(100));
}

#[test]
fn marks_cost_a_part_of_what_flows_cost() {
    let mut budget = FlowBudget::new(100);
    let marks = spend_all_as(&mut budget, PORT, MARK, at(0));
    assert_eq!(marks, burst(100) * MARKS_PER_FLOW_CHANGE);
    assert_eq!(
        spend_all(&mut budget, PORT, at(100)),
        10,
        "one account for both"
    );
    let both = Changes { flows: 3, marks: 5 };
    let more = Changes { flows: 4, marks: 7 };
    assert_eq!(more.since(both), Changes { flows: 1, marks: 2 });
}

#[test]
fn a_debt_has_an_end() {
    let mut budget = FlowBudget::new(100);
    let all = Changes {
        flows: usize::MAX,
        marks: usize::MAX,
    };
    budget.spend(PORT, all, at(0));
    let burst_ms = u64::try_from(FLOW_BURST_TIME.as_millis()).expect("few");
    assert!(!budget.has_left(PORT, at(burst_ms)));
    assert!(budget.has_left(PORT, at(burst_ms + 10)));
}

#[test]
fn what_one_pod_spends_is_not_taken_from_another() {
    let mut budget = FlowBudget::new(100);
    spend_all(&mut budget, PORT, at(0));
    assert_eq!(spend_all(&mut budget, QUIET, at(0)), burst(100));
}

#[test]
fn where_the_node_has_nothing_left_pods_that_have_used_little_go_on() {
    let mut budget = FlowBudget::new(100);
    let mut ports = (10..).map(PortId);
    while budget.node.has_left(budget.of_node, at(0)) {
        spend_all(&mut budget, ports.next().expect("without end"), at(0));
    }
    // Half of the burst, and the one behind it.
    assert_eq!(spend_all(&mut budget, QUIET, at(0)), burst(100) / 2 + 1);
    // The node's budget comes back.
    assert!(budget.has_left(QUIET, at(60_000)));
}

#[test]
fn a_pod_over_budget_is_reported_once_a_minute() {
    let mut budget = FlowBudget::new(100);
    let reported: Vec<u64> = (0..130_000)
        .step_by(500)
        .filter(|millis| budget.is_to_be_reported(PORT, &Limit::FlowChanges, at(*millis)))
        .collect();
    assert_eq!(reported, [0, 60_000, 120_000]);
    assert!(budget.is_to_be_reported(QUIET, &Limit::FlowChanges, at(1)));
    budget.forget(PORT);
    budget.forget(QUIET);
    assert_eq!(budget.accounts(), 0);
}
