use super::*;

const PORT: PortId = PortId(1);
const QUIET: PortId = PortId(2);

fn at(millis: u64) -> Timestamp {
    Timestamp::from_nanos(1_000_000_000_000) + Duration::from_millis(millis)
}

/// Spends one by one as long as that is possible; returns how many that were.
fn spend_all(budget: &mut FlowBudget, port: PortId, now: Timestamp) -> u32 {
    let mut count = 0;
    while budget.has_left(port, now) {
        budget.spend(port, 1, now);
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
fn a_debt_has_an_end() {
    let mut budget = FlowBudget::new(100);
    budget.spend(PORT, usize::MAX, at(0));
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
        .filter(|millis| budget.is_to_be_reported(PORT, at(*millis)))
        .collect();
    assert_eq!(reported, [0, 60_000, 120_000]);
    assert!(budget.is_to_be_reported(QUIET, at(1)));
    budget.forget(PORT);
    budget.forget(QUIET);
    assert_eq!(budget.accounts(), 0);
}
