//! What a node says of itself before and while the agent runs: `dnsflow check`, `/livez` and
//! `/readyz`.

use std::{
    ffi::OsString,
    process::{Command, Output},
};

use anyhow::{Context, Result};
use dnsflow_tests::{
    agent,
    firewall::RuleSpec,
    lab,
    lab::Lab,
    ovs::{Daemon, Stop},
    process::{PATIENT, run, wait_until},
    support::{LEFT_TO_VM, not_run, this_test},
};
use serde_json::Value;

/// `dnsflow check` with the lab agent's arguments, some of them with other values.
pub(crate) fn check(lab: &Lab, further: &[&str], instead: &[(&str, &str)]) -> Result<Output> {
    let binary = agent::binary()?;
    let agent = lab.agent_command(&binary)?;
    let mut arguments: Vec<OsString> = agent.get_args().map(OsString::from).collect();
    arguments[0] = "check".into();
    for (option, value) in instead {
        let at = arguments.iter().position(|argument| argument == option);
        let at = at.with_context(|| format!("the agent gets no {option}"))?;
        arguments[at + 1] = value.into();
    }
    let mut command = Command::new(binary);
    command.args(arguments).args(further);
    lab.node().enter(&mut command)?;
    Ok(command.output()?)
}

/// The status of each finding, from what `--output json` prints.
fn statuses(output: &Output) -> Vec<(String, String)> {
    let printed: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let findings = printed["findings"].as_array().expect("findings");
    let text = |finding: &Value, field: &str| finding[field].as_str().expect(field).to_owned();
    findings
        .iter()
        .map(|finding| (text(finding, "check"), text(finding, "status")))
        .collect()
}

fn status<'a>(statuses: &'a [(String, String)], check: &str) -> &'a str {
    let found = statuses.iter().find(|(name, _)| name == check);
    found.map_or("not asked", |(_, status)| status)
}

#[test]
fn a_node_of_the_lab_is_in_order_and_stays_as_it_was() {
    let lab = lab!("check", agent);
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    // OVN installs nothing for a name without addresses, and must not be looked for there alone.
    let unresolved = (0..1_000).map(|n| RuleSpec::allow_name(&format!("n{n}.example.com")));
    let rules: Vec<RuleSpec> = unresolved.chain([deny]).collect();
    lab.set_firewall("ns1", &rules)
        .expect("the rows are written");
    let state = || {
        let flows = lab
            .ofctl(&["--no-stats", "dump-flows", "br-int"])
            .expect("the dump runs");
        let mut command = lab.node_command("tc").expect("tc");
        let qdiscs = command
            .args(["qdisc", "show"])
            .output()
            .expect("tc runs")
            .stdout;
        assert!(!qdiscs.is_empty());
        (flows, qdiscs)
    };
    let before = state();

    let output = check(&lab, &["-o", "json"], &[]).expect("it runs");
    let found = statuses(&output);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(found.iter().all(|(_, status)| status == "ok"), "{printed}");
    assert!(output.status.success());
    for check in [
        "program",
        "attach",
        "interfaces",
        "openflow",
        "open-by",
        "acl-template",
        "manifests",
    ] {
        assert_eq!(status(&found, check), "ok", "{check}");
    }
    assert_eq!(state(), before);
}

#[test]
fn what_is_missing_is_said_and_the_exit_status_tells() {
    let lab = lab!("check-missing", agent);
    lab.vsctl(&["set", "Open_vSwitch", ".", "other_config:hw-offload=true"])
        .expect("it is set");
    let gone = [
        ("--openflow-socket", "/nowhere"),
        ("--ovn-nb", "unix:/nowhere"),
    ];
    let output = check(&lab, &["-o", "json"], &gone).expect("it runs");
    let found = statuses(&output);
    assert_eq!(output.status.code(), Some(3), "{found:?}");
    for (check, expected) in [
        ("openflow", "failed"),
        ("ovn-nb", "failed"),
        ("ovn-sb", "ok"),
        ("offload", "warning"),
        ("acl-template", "not asked"),
        ("program", "ok"),
    ] {
        assert_eq!(status(&found, check), expected, "{check}");
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("/nowhere"), "{printed}");

    // What is left is the warning about offloading.
    for (further, code) in [(&[][..], 0), (&["--strict"][..], 3)] {
        let output = check(&lab, further, &[]).expect("it runs");
        assert_eq!(output.status.code(), Some(code), "{output:?}");
    }
}

#[test]
fn the_kubelet_learns_when_the_agent_is_ready_and_when_the_switch_is_away() {
    let lab = lab!("check-ready", agent);
    let get = |path: &str| {
        let mut command = lab.node_command("curl")?;
        command.args(["--silent", "--write-out", "%{http_code}"]);
        run(command.arg(format!("http://127.0.0.1:9473/{path}")))
    };
    let agent = lab
        .start_agent(&["--listen=127.0.0.1:9473"])
        .expect("the agent is ready");
    // The event `ready` is logged a moment after the answer changes, on another thread's socket.
    wait_until("/readyz to answer", PATIENT, || {
        Ok(get("readyz").is_ok_and(|text| text == "ok\n200"))
    })
    .expect("it is ready");
    lab.stop_daemon(Daemon::Vswitchd, Stop::Terminate)
        .expect("it stops");
    wait_until("/readyz to say so", PATIENT, || {
        Ok(get("readyz")? == "no connection to the switch\n503")
    })
    .expect("it is not ready");
    assert_eq!(get("livez").expect("curl runs"), "ok\n200");
    lab.restart(Daemon::Vswitchd, Stop::Terminate)
        .expect("it starts");
    wait_until("/readyz to say so", PATIENT, || {
        Ok(get("readyz")? == "ok\n200")
    })
    .expect("it is ready again");
    agent.terminate().expect("it stops");
}

fn ip(lab: &Lab, words: &str) -> Result<()> {
    let mut command = lab.node_command("ip")?;
    run(command.args(words.split(' ')))?;
    Ok(())
}

/// The route that ovn-kubernetes makes to the Services. The interfaces that plugins of CNI make give the node no address
/// and no DNS cache: a tenant chooses their names and addresses.
#[test]
fn the_networks_of_services_are_found_and_no_address_of_a_plugin() {
    let lab = lab!("check-found", agent);
    for words in [
        "link add nodelocaldns type veth peer name nodelocalpeer",
        "address add 169.254.20.10/32 dev nodelocaldns",
        "link set nodelocaldns up",
        "link set nodelocalpeer up",
        "route add 10.197.0.0/16 via 169.254.0.4 dev nodelocaldns onlink",
        "link add cni0 type bridge",
        "address add 198.51.100.1/24 dev cni0",
        "link set cni0 up",
    ] {
        ip(&lab, words).expect(words);
    }
    let rules = [
        RuleSpec::allow_name("example.com"),
        RuleSpec::deny("0.0.0.0/0").expect("a CIDR"),
    ];
    lab.set_firewall("ns1", &rules)
        .expect("the rows are written");
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    let explained = |target: &str| {
        let (text, _) = lab.ask_agent(&["explain", "ns1/pod1", target])?;
        Ok::<_, anyhow::Error>(text)
    };
    wait_until("the route to be found", PATIENT, || {
        Ok(explained("10.197.7.7:443")?.contains("address_refused"))
    })
    .expect("it is found");
    for other in ["10.198.7.7:443", "198.51.100.1:443"] {
        let text = explained(other).expect("the agent answers");
        assert!(!text.contains("address_refused"), "{text}");
    }
    let (status, _) = lab.ask_agent(&["status"]).expect("the agent answers");
    assert!(!status.contains("169.254.20.10"), "{status}");
    agent.terminate().expect("it stops");
}

/// The interface that NodeLocal DNSCache makes.
#[test]
fn the_dns_cache_of_the_node_is_trusted() {
    let lab = lab!("check-cache", agent);
    if ip(&lab, "link add nodelocaldns type dummy").is_err() {
        return not_run(
            &this_test(),
            format!("this kernel makes no dummy interface; {LEFT_TO_VM}"),
        );
    }
    ip(&lab, "address add 169.254.20.10/32 dev nodelocaldns").expect("an address");
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    wait_until("the cache to be trusted", PATIENT, || {
        let (status, _) = lab.ask_agent(&["status"])?;
        Ok(status.contains("169.254.20.10:53"))
    })
    .expect("it is trusted");
    agent.terminate().expect("it stops");
}
