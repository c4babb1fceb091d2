//! A pod connects at once to an address that it was just told, and that it was denied a moment before:
//! the megaflow which drops its packets may still be in the datapath.

use std::{
    fs,
    net::{Ipv4Addr, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::Result;
use dnsflow_tests::{
    agent::{self, Agent},
    firewall::RuleSpec,
    lab,
    lab::{Datapath, Lab},
    neighbour::{sent_again, uptime},
    ovs::Daemon,
    process::{PATIENT, run},
    standstill::{self, play},
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
/// The agent may give up waiting for ovs-vswitchd: where other work keeps the processors busy, a pass of the revalidators
/// takes longer than answers are held. Of one answer in so many at least, the wait must end well, or nothing is shown.
const WELL_ONE_IN: usize = 10;
/// A pod without a firewall, which connects all the time.
const TWIN: &str = "ns2_pod1";
/// Between two connections of the twin.
const TWIN_PAUSE: Duration = Duration::from_millis(100);
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
    play(|| get_through(&lab!("first-packet", agent), &[]));
}

/// The same where addresses are opened by marks. Both tests print how long answers waited.
#[test]
fn first_packets_get_through_by_verdict() {
    play(|| {
        let lab = lab!("first-packet-verdict", agent);
        if lab.datapath() != Datapath::System {
            not_run(
                &this_test(),
                format!("the packets of the userspace datapath have no marks; {LEFT_TO_VM}"),
            );
            return;
        }
        get_through(&lab, &["--open-by", "marks"]);
        let flows = lab.dnsflow_flows_as_they_are().expect("the dump runs");
        assert!(
            flows.iter().all(|flow| !flow.contains("nw_dst=198")),
            "{flows:#?}"
        );
        // The flow that makes the tag of the mark, and those of the group.
        let makes_tags = |flow: &String| flow.contains("move:NXM_NX_PKT_MARK[");
        assert!(flows.iter().any(makes_tags), "{flows:#?}");
        assert!(Lab::of_groups(&flows).count() > 0, "{flows:#?}");
    });
}

/// A connection that had to repeat its SYN.
#[derive(Clone, Debug)]
struct Lost {
    name: String,
    began: Duration,
    ended: Duration,
}

impl Lost {
    /// Whether both were under way at the same time: then the machine or the switch has lost both.
    fn meets(&self, other: &Self) -> bool {
        self.began <= other.ended && other.began <= self.ended
    }
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
    let (lost, of_twin) = thread::scope(|scope| {
        scope.spawn(|| visit_denied(lab, told, &stop));
        let twin = scope.spawn(|| lost_without_firewall(lab, told, &stop));
        let stop = Stop(&stop);
        let lost = pairs.chunks(pairs.len().div_ceil(PARTS)).map(|pairs| {
            thread::sleep(REST);
            lost_first_packets(lab, pairs)
        });
        let lost: Result<Vec<_>> = lost.collect();
        drop(stop);
        (lost, twin.join().expect("no panic"))
    });
    let lost = match (lost, lab.switch_failed_assertion()) {
        (Ok(lost), _) => lost,
        (Err(_), Some(assertion)) => {
            not_run(
                &this_test(),
                format!("ovs-vswitchd has ended by itself: {assertion}"),
            );
            return;
        }
        (Err(error), None) => panic!(
            "not every address is reached: {error:#}\novs-vswitchd: {:?}\n{}\nthe agent:\n{}",
            lab.daemon(Daemon::Vswitchd),
            lab.log_tail("ovs-vswitchd.log"),
            lab.log_tail("dnsflow.log"),
        ),
    };
    let lost: Vec<_> = lost.into_iter().flatten().collect();
    let log = agent.log_path().to_owned();
    assert!(agent.terminate().expect("it ends").success());
    let log = fs::read_to_string(log).expect("its log");
    let given_up = given_up(&log);
    let alone = |lost: &&Lost| !of_twin.iter().any(|of_twin| of_twin.meets(lost));
    let unexplained = lost.iter().filter(alone);
    let unexplained: Vec<_> = unexplained.map(|lost| &lost.name).collect();
    println!(
        "{} of {told} first packets were lost, {} of them while a pod without a firewall lost none; {given_up} answers \
         waited in vain",
        lost.len(),
        unexplained.len()
    );
    println!("{}", activations(&log));
    let told = told as usize;
    if unexplained.len() > given_up || (told - given_up.min(told)) * WELL_ONE_IN < told {
        standstill::unexplained(format!("{log}\n{unexplained:?}, {given_up} waited in vain"));
    }
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
fn given_up(log: &str) -> usize {
    let held = log
        .lines()
        .rfind(|line| line.contains(r#""message":"held""#));
    let held = held.expect("the agent logs what became of answers");
    let count = |label: &str| -> usize {
        let (_, rest) = held.split_once(label).unwrap_or_default();
        let digits = rest.trim_start_matches(|c: char| !c.is_ascii_digit());
        let end = digits.find(|c: char| !c.is_ascii_digit());
        digits[..end.unwrap_or(digits.len())].parse().unwrap_or(0)
    };
    count("Dropping") + count("Overrun")
}

/// The connections of a pod to addresses that it was told just before, as far as they had to repeat a SYN.
fn lost_first_packets(lab: &Lab, pairs: &[String]) -> Result<Vec<Lost>> {
    let pod = lab.pod(POD);
    let mut command = pod.helper().expect("a command");
    command.args(["first-packets", "10.96.0.10:53"]).args(pairs);
    let reached = run(&mut command)?;
    let lines: Vec<&str> = reached.lines().collect();
    assert_eq!(lines.len(), pairs.len(), "{reached}");
    let lost = lines.iter().filter_map(|line| {
        let [name, repeated, began, ended] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let at = |millis: &str| Duration::from_millis(millis.parse().expect("a number"));
        (repeated != "0").then(|| Lost {
            name: name.to_owned(),
            began: at(began),
            ended: at(ended),
        })
    });
    Ok(lost.collect())
}

/// Connects from a pod without a firewall until it is told to stop, and returns what had to repeat a SYN.
fn lost_without_firewall(lab: &Lab, told: u32, stop: &AtomicBool) -> Vec<Lost> {
    let connections = || {
        let mut lost = Vec::new();
        for number in (0..told).cycle() {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let began = uptime();
            let connected = TcpStream::connect_timeout(&(scattered(number), 80).into(), PATIENT);
            // Where the switch stands still, not even a neighbour is found.
            let is_lost = match &connected {
                Ok(connected) => sent_again(connected)? > 0,
                Err(_) => true,
            };
            if is_lost {
                lost.push(Lost {
                    name: TWIN.to_owned(),
                    began,
                    ended: uptime(),
                });
            }
            drop(connected);
            thread::sleep(TWIN_PAUSE);
        }
        Ok(lost)
    };
    let lost = lab.pod(TWIN).netns().run(connections);
    lost.expect("all addresses are reached")
}
