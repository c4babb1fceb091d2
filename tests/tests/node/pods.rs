//! Pods come, go, and come again with the same address.

use std::time::Duration;

use dnsflow_tests::{firewall::RuleSpec, lab, lab::Lab, pod::PodSpec, process::PATIENT};

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);

fn firewall(lab: &Lab) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
}

fn fetch(lab: &Lab, url: &str, limit: Duration) -> Result<String, String> {
    lab.pod("ns1_pod9")
        .fetch(url, limit)
        .expect("curl runs")
        .result
}

#[test]
fn a_pod_that_comes_again_with_its_old_address_must_ask_again() {
    let lab = lab!("pods-again", agent);
    firewall(&lab);
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    let spec = PodSpec::new("ns1", "pod9", [10, 244, 0, 9].into());
    for round in 0..3 {
        lab.add_pod(&spec).expect("the pod is created");
        lab.wait_wired("ns1_pod9").expect("OVN wires it");
        let fetched = fetch(&lab, "http://203.0.113.2/", BLOCKED);
        assert!(
            fetched.is_err(),
            "round {round}, before it asked: {fetched:?}"
        );
        fetch(&lab, "http://www.example.com/", PATIENT).expect("the rule allows it");
        assert!(!lab.dnsflow_flows().expect("the dump runs").is_empty());

        lab.delete_pod("ns1_pod9").expect("the pod is deleted");
        lab.wait_flows("the pod's flows to go", <[String]>::is_empty)
            .expect("they go");
    }
}
