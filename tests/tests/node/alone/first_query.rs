//! A pod's first question, asked as soon as it can be, is seen.
//!
//! The agent may come to a veth behind the question if it waited for a processor for at least as long as it was late: the
//! kernel's own account says so (`schedstat`). What else attaching waits for, such as the kernel's other threads, has no
//! such account. So most rounds must be in time or explained, not all of them.
//!
//! Nothing runs beside it: the kernel's network lock, which attaching needs, is held for tens of
//! milliseconds whenever another lab's interfaces come and go.

use std::time::Duration;

use dnsflow_tests::{
    agent::Agent,
    firewall::RuleSpec,
    lab,
    lab::Lab,
    pod::PodSpec,
    process::{PATIENT, wait_until},
    processor::Processor,
    support::{LEFT_TO_OTHERS, not_run},
};

/// How soon after its veth a pod's first question must be seen.
const FIRST_QUERY: Duration = Duration::from_millis(50);
/// An address that is not open by then had its answer before the programs were there.
const CLOSED: Duration = Duration::from_secs(5);
const ROUNDS: usize = 10;

/// Whether the agent says that its programs are at the pod's veth.
fn is_attached(agent: &Agent, ifindex: u32) -> bool {
    let events = agent.events().expect("its log");
    let mut attached = events.iter().map(|event| &event["fields"]);
    attached.any(|event| event["message"] == "attached" && event["ifindex"] == ifindex)
}

/// Whether the address of the answer is open for the pod.
fn is_open(lab: &Lab, spec: &PodSpec) -> anyhow::Result<bool> {
    let (source, to) = (format!("nw_src={},", spec.address), "nw_dst=203.0.113.2");
    let flows = lab.dnsflow_flows()?;
    let is_it = |flow: &String| flow.contains(&source) && flow.contains(to);
    Ok(flows.iter().any(is_it))
}

#[test]
fn a_first_query_within_50_ms_of_the_veth_is_seen() {
    let lab = lab!("pods-first-query", agent);
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    let spec = PodSpec::new("ns1", "pod9", [10, 244, 0, 9].into());
    let mut soonest = Duration::MAX;
    let mut unexplained = 0;
    for round in 0..ROUNDS {
        let before = Processor::of(agent.pid()).expect("the agent runs");
        let appeared = lab.add_pod(&spec).expect("the pod is created");
        let ifindex = lab.host_index("ns1_pod9").expect("an index");
        lab.wait_wired("ns1_pod9").expect("OVN wires it");
        // Exactly one answer: one that is missed leaves the address closed. (OVN 23.03 loses one
        // in ten of such early queries on its own, agent or not.)
        let (mut asked, mut attached) = (Duration::MAX, false);
        wait_until("an answer", PATIENT, || {
            attached = is_attached(&agent, ifindex);
            asked = appeared.elapsed();
            Ok(lab.pod("ns1_pod9").resolve("www.example.com").is_ok())
        })
        .expect("the name is known");
        let late = if attached {
            Duration::ZERO
        } else {
            wait_until("the programs", PATIENT, || Ok(is_attached(&agent, ifindex)))
                .expect("they are attached in the end");
            appeared.elapsed() - asked
        };
        let now = Processor::of(agent.pid()).expect("the agent runs");
        let waited = now.since(before).waited;
        let limit = if attached { PATIENT } else { CLOSED };
        match wait_until("the address to open", limit, || is_open(&lab, &spec)) {
            Ok(_) => soonest = soonest.min(asked),
            Err(error) => {
                assert!(!attached, "round {round}, asked after {asked:?}: {error}");
                println!(
                    "round {round}: asked after {asked:?}, the programs came {late:?} later; \
                     the agent had waited {waited:?} for a processor"
                );
                unexplained += usize::from(waited < late);
            }
        }
        lab.delete_pod("ns1_pod9").expect("the pod is deleted");
    }
    assert!(
        unexplained <= ROUNDS / 2,
        "in {unexplained} of {ROUNDS} rounds the programs came too late, and not for want of a processor"
    );
    if soonest > FIRST_QUERY {
        let why = format!(
            "a pod that is wired within {FIRST_QUERY:?} takes an idle machine, this one took {soonest:?} at best; \
             {LEFT_TO_OTHERS}"
        );
        not_run("a_first_query_within_50_ms_of_the_veth_is_seen", why);
    }
}
