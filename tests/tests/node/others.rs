//! Programs of others on the veths of pods, beside a running agent.

use std::time::Duration;

use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    process::{PATIENT, wait_until},
    raw_program::RawProgram,
    support::{not_run, this_test},
    wire::ifindex,
};

use crate::check::check;

/// `TCX_PASS`: no program behind runs.
const PASS: i32 = 0;

#[test]
fn a_program_that_keeps_answers_away_is_overtaken_and_named() {
    let lab = lab!("others", agent);
    lab.serve_dns(&["www.example.com. 3600 IN A 203.0.113.2"])
        .expect("the server starts");
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    let pins = lab.pins().expect("a BPF file system");
    let pins = format!("--pin-dir={}", pins.display());
    let agent = lab.start_agent(&[&pins]);
    let mut agent = agent.expect("the agent is ready");
    let veth = lab.host_veth("ns1_pod1").expect("the pod has one");
    let put_first = |program: &RawProgram| {
        lab.node()
            .run(|| Ok(program.attach_first(ifindex(&veth))?))
            .ok()
    };

    let other = RawProgram::returning(PASS);
    let Some(_links) = put_first(&other) else {
        not_run(&this_test(), "this kernel has no TCX");
        return;
    };
    agent
        .wait_event("attaching the TC programs again: answers may have been missed")
        .expect("it finds the program");
    // The event comes before the programs are attached.
    let is_seen = || {
        let fetched = lab
            .pod("ns1_pod1")
            .fetch("http://www.example.com/", Duration::from_secs(2));
        Ok(fetched?.result.is_ok())
    };
    wait_until("an answer to be seen", PATIENT, is_seen).expect("it is seen");

    let again = RawProgram::returning(PASS);
    let links = put_first(&again).expect("as before");
    let named = format!("program {} at egress", again.id());
    let is_named = || Ok(lab.ask_agent(&["status"])?.0.contains(&named));
    wait_until("the program to be named", PATIENT, is_named).expect("the agent names it");
    let checked = check(&lab, &[&pins], &[]).expect("it runs");
    let checked = String::from_utf8_lossy(&checked.stdout).into_owned();
    let hooks = checked.lines().find(|line| line.contains(" hooks "));
    let hooks = hooks.expect("it is checked");
    assert!(
        hooks.starts_with("warning") && hooks.contains(&named),
        "{hooks}"
    );
    drop(links);
    wait_until("the program to be forgotten", PATIENT, || Ok(!is_named()?)).expect("it is gone");
    agent.terminate().expect("it stops");
}
