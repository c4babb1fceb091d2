//! A pod connects at once to an address that it was just told, and that it was denied a moment before:
//! the megaflow which drops its packets may still be in the datapath.

use std::{
    fs,
    net::{Ipv4Addr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use dnsflow_tests::{
    agent::{self, Agent},
    firewall::RuleSpec,
    lab,
    lab::{Datapath, Lab},
    process::run,
    support::{LEFT_TO_VM, not_run, this_test},
};

const POD: &str = "ns1_pod1";
/// Addresses that the pod is told one after the other, unless the variable says another number.
const TOLD: u32 = 60;
const TOLD_VARIABLE: &str = "DNSFLOW_FIRST_PACKETS";
/// In so many parts; before each of them, the pod rests.
const PARTS: usize = 3;
/// Longer than Open vSwitch keeps a megaflow without packets, and than the agent keeps what it saw
/// of revalidations (`vswitchd.rs`).
const REST: Duration = Duration::from_secs(12);
/// For one answer of so many at most, the agent may give up waiting for ovs-vswitchd: where other work
/// keeps both processors of the machine busy, a pass of the revalidators takes longer than answers are held.
const GIVEN_UP_ONE_IN: u64 = 20;
/// Addresses that the pod is denied all the time, so that there are many megaflows.
const DENIED: u32 = 600;
/// Between two datagrams to them.
const PAUSE: Duration = Duration::from_millis(2);

/// The network for benchmarks, a /15 (RFC 2544, appendix C.2.2).
const BENCHMARKS: u32 = u32::from_be_bytes([198, 18, 0, 0]);

/// Scattered, so that few have a megaflow in common; each once, as 197 is odd.
fn scattered(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(BENCHMARKS + number * 197 % (1 << 17))
}

fn name(number: u32) -> String {
    format!("n{number}.example.com")
}

/// Every name leads to an address of its own, behind which somebody answers.
fn stage(lab: &Lab, told: u32) {
    let records: Vec<String> = (0..told)
        .map(|number| format!("{}. 30 IN A {}", name(number), scattered(number)))
        .collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    lab.serve_dns(&records).expect("it listens");
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    let mut ip = lab.pod("inet").command("ip").expect("a command");
    run(ip.args(["route", "add", "local", "198.18.0.0/15", "dev", "lo"])).expect("a route");
}

/// Says to stop, also where the test fails: else its other thread would go on for ever.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sends datagrams to denied addresses until it is told to stop.
fn visit_denied(lab: &Lab, told: u32, stop: &AtomicBool) {
    let socket = lab
        .pod(POD)
        .netns()
        .run(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?));
    let socket = socket.expect("a socket");
    for number in (told..told + DENIED).cycle() {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        socket
            .send_to(&[0], (scattered(number), 9))
            .expect("it is sent");
        thread::sleep(PAUSE);
    }
}

#[test]
fn first_packets_to_addresses_that_were_just_denied_get_through() {
    get_through(&lab!("first-packet", agent), &[]);
}

/// The same where addresses are opened by marks. Both tests print how long answers waited.
#[test]
fn first_packets_get_through_by_verdict() {
    let lab = lab!("first-packet-verdict", agent);
    if lab.datapath() != Datapath::System {
        not_run(
            &this_test(),
            format!("the packets of the userspace datapath have no marks; {LEFT_TO_VM}"),
        );
        return;
    }
    get_through(&lab, &["--verdict", "kernel"]);
    let flows = lab.dnsflow_flows_as_they_are().expect("the dump runs");
    assert!(
        flows.iter().all(|flow| !flow.contains("nw_dst=198")),
        "{flows:#?}"
    );
    assert!(
        flows.iter().any(|flow| flow.contains("pkt_mark=")),
        "{flows:#?}"
    );
}

fn get_through(lab: &Lab, options: &[&str]) {
    let told = std::env::var(TOLD_VARIABLE).map(|told| told.parse().expect("a number"));
    let told = told.unwrap_or(TOLD);
    stage(lab, told);
    let agent = start_agent(lab, options);
    let stop = AtomicBool::new(false);
    let pairs: Vec<String> = (0..told)
        .map(|number| format!("{}={}:80", name(number), scattered(number)))
        .collect();
    let lost: Vec<String> = thread::scope(|scope| {
        scope.spawn(|| visit_denied(lab, told, &stop));
        let _stop = Stop(&stop);
        let lost = pairs.chunks(pairs.len().div_ceil(PARTS)).flat_map(|pairs| {
            thread::sleep(REST);
            lost_first_packets(lab, pairs)
        });
        lost.collect()
    });
    let log = agent.log_path().to_owned();
    assert!(agent.terminate().expect("it ends").success());
    let log = fs::read_to_string(log).expect("its log");
    let given_up = given_up(&log);
    println!(
        "{} of {told} first packets were lost, {given_up} answers waited in vain",
        lost.len()
    );
    println!("{}", activations(&log));
    let unexplained = u64::try_from(lost.len()).expect("few") > given_up;
    let too_many = given_up * GIVEN_UP_ONE_IN > u64::from(told);
    assert!(!unexplained && !too_many, "{lost:?}\n{log}");
}

/// How long it took from an answer to the end of its opening, by the agent's own reports.
fn activations(log: &str) -> String {
    let lines = log.lines().filter_map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        let fields = line.get("fields").unwrap_or(&line);
        fields.get("activation_us")?.as_u64()
    });
    let mut micros: Vec<u64> = lines.collect();
    micros.sort_unstable();
    let at = |part: usize| micros.get(micros.len() * part / 100).copied();
    format!(
        "{} openings: p50 {:?} us, p90 {:?} us, p99 {:?} us",
        micros.len(),
        at(50),
        at(90),
        at(99)
    )
}

/// Starts an agent that logs its counters when it ends.
fn start_agent(lab: &Lab, options: &[&str]) -> Agent {
    let mut command = agent::binary()
        .and_then(|binary| lab.agent_command(&binary))
        .expect("a command");
    command.args(options);
    command.env("RUST_LOG", "info,dnsflow_agent::agent=debug");
    let agent = lab.spawn_agent_command(command).expect("an agent");
    agent.wait_ready().expect("the agent is ready")
}

/// How many answers the agent gave back although a megaflow still dropped packets on the path, or
/// although the switch had not confirmed the flow: they had been held for as long as is allowed. An answer
/// is counted as one of both (`what_ended_the_wait_of_an_answer_is_counted_once` in the core).
fn given_up(log: &str) -> u64 {
    let held = log
        .lines()
        .rfind(|line| line.contains(r#""message":"held""#));
    let held = held.expect("the agent logs what became of answers");
    let count = |label: &str| -> u64 {
        let (_, rest) = held.split_once(label).unwrap_or_default();
        let digits = rest.trim_start_matches(|c: char| !c.is_ascii_digit());
        let end = digits.find(|c: char| !c.is_ascii_digit());
        digits[..end.unwrap_or(digits.len())].parse().unwrap_or(0)
    };
    count("Dropping") + count("Overrun")
}

/// The names whose addresses were reached by a repeated SYN only.
fn lost_first_packets(lab: &Lab, pairs: &[String]) -> Vec<String> {
    let pod = lab.pod(POD);
    let mut command = pod.helper().expect("a command");
    command.args(["first-packets", "10.96.0.10:53"]).args(pairs);
    let reached = run(&mut command).expect("every address is reached");
    let lines: Vec<&str> = reached.lines().collect();
    assert_eq!(lines.len(), pairs.len(), "{reached}");
    let lost = lines.iter().filter(|line| !line.ends_with(" 0"));
    lost.map(|line| (*line).to_owned()).collect()
}
