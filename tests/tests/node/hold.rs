//! Answers wait for their flows: no first packet is lost, and DNS works whatever happens to the agent
//! or the switch meanwhile.

use std::{
    io::{self, PipeReader, PipeWriter, Write as _},
    net::{Ipv4Addr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use dnsflow_tests::{
    agent::{self, Agent},
    firewall::RuleSpec,
    lab,
    lab::Lab,
    neighbour::syns_repeated,
    process::{ONE_TRY, PATIENT, run, wait_until},
    relay::Relay,
    standstill::{play, unexplained},
};
use rustix::fs::{OFlags, fcntl_setfl};

/// Long enough for something to happen meanwhile.
const HOLD_MAX: Duration = Duration::from_millis(900);
/// So answers wait for the switch, no longer than this. An address whose verdict is in force would wait for nothing.
const HOLDING: [&str; 3] = ["--hold-max", "900ms", "--open-by=flows"];

fn web(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(203, 0, 113, last)
}

/// A name for each web server, and ns1 may reach them all by name.
fn firewall(lab: &Lab) {
    let records: Vec<String> = (1..=CRASHES)
        .map(|last| format!("h{last}.example.com. 30 IN A {}", web(last)))
        .collect();
    firewall_for(lab, &records);
}

/// These records, and ns1 may reach example.com by name and nothing else.
fn firewall_for(lab: &Lab, records: &[String]) {
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    lab.serve_dns(&records).expect("it listens");
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
}

/// How often an agent is killed, until one held an answer.
const CRASHES: u8 = 60;
/// So many names are tried, if the switch is too slow for all but the last.
const NAMES: u8 = 100;
/// The agent's account is a second old at most.
const ACCOUNT_LIMIT: Duration = Duration::from_secs(2);

/// The address of the name `s{number}.example.com`. All lead to the "internet".
fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, number)
}

/// Names that nobody has asked for: some whose servers answer, and more that lead nowhere.
fn serve_names(lab: &Lab) {
    let records: Vec<String> = (0..NAMES)
        .map(|number| format!("s{number}.example.com. 30 IN A {}", address(number)))
        .chain((0..1000).map(|n| {
            let address = Ipv4Addr::new(198, 51, (n / 250) as u8, (n % 250) as u8);
            format!("f{n}.example.com. 30 IN A {address}")
        }))
        .collect();
    firewall_for(lab, &records);
    let mut ip = lab.pod("inet").command("ip").expect("a command");
    run(ip.args(["route", "add", "local", "198.18.0.0/15", "dev", "lo"])).expect("a route");
}

/// Fetches the page of a name that nobody has asked for. Whether its first SYN was answered, because its answer was held.
/// A SYN that was denied has to be one of an answer of which the agent says that it waited in vain.
fn first_packet_passes(lab: &Lab, number: u8) -> bool {
    let gave_up = || lab.account().map(|account| account.gave_up());
    let before = (syns_sent_again(lab), denied(lab));
    let gave_up_before = gave_up().expect("the agent tells");
    let url = format!("http://s{number}.example.com/");
    let fetched = lab.pod("ns1_pod1").fetch(&url, PATIENT);
    assert!(fetched.expect("curl runs").result.is_ok(), "{url}");
    if syns_sent_again(lab) == before.0 {
        return true;
    }
    // The packets of a megaflow count once a revalidator has passed: the one that is on its way may have passed before.
    for _ in 0..2 {
        lab.appctl(&["revalidator/wait"]).expect("a pass");
    }
    let denied = denied(lab) - before.1;
    let explained = || Ok(denied == 0 || gave_up()? > gave_up_before);
    if wait_until("the account", ACCOUNT_LIMIT, explained).is_err() {
        unexplained(format!(
            "{url}: {denied} packets were denied: {:?}",
            lab.account()
        ));
    }
    println!("{url}: a SYN was sent again, and {denied} were denied");
    false
}

/// How many SYNs were sent again in the pod, ever.
fn syns_sent_again(lab: &Lab) -> u64 {
    let count = lab.pod("ns1_pod1").netns().run(syns_repeated);
    count.expect("the kernel counts them")
}

#[test]
fn no_first_packet_is_lost() {
    play(|| {
        let lab = lab!("hold-first", agent);
        serve_names(&lab);
        let _agent = lab.start_agent(&[]).expect("the agent is ready");
        let passed = (0..NAMES).filter(|&number| first_packet_passes(&lab, number));
        assert_eq!(passed.take(8).count(), 8, "nearly every wait was in vain");
    });
}

/// The agent behind a relay, with everything in place, and the relay silent: the next answer is held.
fn in_the_middle_of_holding(lab: &Lab) -> (Agent, Relay) {
    firewall(lab);
    let relay = Relay::start(lab.socket("br-int.relay"), lab.socket("br-int.mgmt"));
    let relay = relay.expect("a relay");
    let agent = lab.start_agent_behind(&relay, &HOLDING);
    let agent = agent.expect("the agent is ready");
    assert!(resolves(lab, 1), "while all is well");
    relay.be_silent(true);
    (agent, relay)
}

fn resolves(lab: &Lab, last: u8) -> bool {
    let name = format!("h{last}.example.com");
    let told = lab.pod("ns1_pod1").resolve(&name);
    told.is_ok_and(|told| told == [web(last)])
}

#[test]
fn without_the_switch_an_answer_is_released_at_hold_max() {
    play(|| {
        let lab = lab!("hold-switch", agent);
        let (_agent, relay) = in_the_middle_of_holding(&lab);
        let start = Instant::now();
        assert!(resolves(&lab, 2));
        if start.elapsed() < HOLD_MAX {
            unexplained(format!("it came after {:?}", start.elapsed()));
        }
        assert!(resolves(&lab, 1), "what is installed waits for nothing");
        // It was only late.
        relay.be_silent(false);
        lab.wait_flows("the address", |flows| {
            flows.iter().any(|flow| flow.contains(&web(2).to_string()))
        })
        .expect("the flows come");
    });
}

#[test]
fn after_a_crash_in_the_middle_of_holding_dns_works_on_the_next_try() {
    let lab = lab!("hold-crash", agent);
    let (agent, relay) = in_the_middle_of_holding(&lab);
    let mut agent = Some(agent);
    // On a busy machine, the answer may come later than the crash, or go back before: then once more.
    let lost = (2..=CRASHES).find(|&last| {
        let agent = agent.take().unwrap_or_else(|| {
            relay.be_silent(false);
            let agent = lab.start_agent_behind(&relay, &HOLDING);
            relay.be_silent(true);
            agent.expect("the agent is ready")
        });
        thread::scope(|scope| {
            let lab = &lab;
            let answered = scope.spawn(move || resolves(lab, last));
            thread::sleep(HOLD_MAX / 3);
            agent.kill().expect("it is killed");
            !answered.join().expect("no panic")
        })
    });
    assert!(resolves(&lab, lost.expect("one was held when it crashed")));
}

/// A pipe that takes no byte more until somebody reads.
fn full_pipe() -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, mut writer) = io::pipe()?;
    fcntl_setfl(&writer, OFlags::NONBLOCK)?;
    while writer.write(b"x").is_ok() {}
    fcntl_setfl(&writer, OFlags::empty())?;
    Ok((reader, writer))
}

#[test]
fn an_agent_whose_log_nobody_reads_goes_on_answering() {
    let lab = lab!("hold-log", agent);
    firewall(&lab);
    let (_nobody_reads, stderr) = full_pipe().expect("a pipe");
    let binary = agent::binary().expect("the agent");
    let mut command = lab.agent_command(&binary).expect("its command line");
    command.env("RUST_LOG", "debug");
    let agent = lab
        .spawn_agent_logging_to(command, stderr.into())
        .expect("it starts");
    for last in 1..=8 {
        let url = format!("http://h{last}.example.com/");
        wait_until("the address to open", PATIENT, || {
            let fetched = lab.pod("ns1_pod1").fetch(&url, ONE_TRY)?;
            Ok(fetched.result.is_ok())
        })
        .expect("the log is not waited for");
    }
    let status = agent.terminate().expect("it ends");
    assert!(status.success(), "{status}");
}

/// Sends a datagram to an address that no rule allows.
fn send_denied(lab: &Lab, to: Ipv4Addr) {
    let sent = lab.pod("ns1_pod1").netns().run(|| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        Ok(socket.send_to(b"denied", (to, 9))?)
    });
    sent.expect("it is sent");
}

/// How many packets the flows have dropped that deny everything in ns1. Their priority is that of the
/// second rule's ACL, as ovn-kubernetes numbers them, and 1000.
fn denied(lab: &Lab) -> u64 {
    let dump = lab.ofctl(&["dump-flows", "br-int"]).expect("a dump");
    let flows = dump.lines().filter(|flow| flow.contains("priority=10999,"));
    let packets = flows.map(|flow| {
        let (_, rest) = flow.split_once("n_packets=").expect("a counter");
        let (packets, _) = rest.split_once(',').expect("and more");
        packets.parse::<u64>().expect("a number")
    });
    packets.sum()
}

/// All that answers need not wait for megaflows for hangs on this: the packet that makes a megaflow is
/// counted by the flow that denies it as soon as the megaflow is there.
#[test]
fn the_first_denied_packet_is_counted_before_any_revalidation() {
    let lab = lab!("hold-counted");
    firewall(&lab);
    lab.sync().expect("OVN follows");
    // The way to the gateway is found first.
    send_denied(&lab, web(100));
    wait_until("a denied packet", PATIENT, || Ok(denied(&lab) > 0)).expect("it is denied");
    // No revalidator comes by any more, unless a flow changes.
    lab.vsctl(&[
        "set",
        "Open_vSwitch",
        ".",
        "other_config:max-idle=600000",
        "other_config:max-revalidator=600000",
    ])
    .expect("it is set");
    thread::sleep(Duration::from_secs(2));
    let megaflows = || lab.appctl(&["dpctl/dump-flows"]).expect("a dump");
    let before = denied(&lab);
    // In the other half of all addresses than the first, whose megaflow may cover as much.
    let address = Ipv4Addr::new(100, 127, 0, 1);
    send_denied(&lab, address);
    wait_until("the first to be counted", PATIENT, || {
        Ok(denied(&lab) > before)
    })
    .expect("no revalidator is needed for it");
    for _ in 0..2 {
        send_denied(&lab, address);
    }
    // Nobody reports the others: they met the megaflow that the first made.
    let is_it = |flow: &str| flow.contains("eth_type(0x0800)") && flow.contains("packets:2,");
    wait_until("the megaflow", PATIENT, || {
        Ok(megaflows().lines().any(is_it))
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", megaflows()));
    assert_eq!(denied(&lab) - before, 1);
}

/// What the agent says of the wait for revalidation when it opens a name. Its log may come behind the
/// answer.
fn revalidation_wait(agent: &Agent, name: &str) -> String {
    let mut said = None;
    wait_until("the event", PATIENT, || {
        let events = agent.events()?;
        let opened = events.iter().map(|event| &event["fields"]);
        let mut opened = opened.filter(|fields| fields["message"] == "opened");
        let of_name = opened.find(|fields| fields["name"] == name);
        said = of_name.and_then(|fields| Some(fields["revalidation_wait"].as_str()?.to_owned()));
        Ok(said.is_some())
    })
    .expect("it is opened");
    said.expect("it says so")
}

#[test]
fn answers_wait_for_revalidation_only_where_packets_were_denied_lately() {
    play(|| {
        let lab = lab!("hold-denied", agent);
        serve_names(&lab);
        // Where other work keeps the machine busy, a pass of the revalidators takes long.
        let agent = lab.start_agent(&HOLDING).expect("the agent is ready");
        let mut names = (0..1000).map(|n| format!("f{n}.example.com"));
        let mut fresh = || {
            let name = names.next().expect("another name");
            let told = lab.pod("ns1_pod1").resolve(&name).expect("it asks");
            assert_eq!(told.len(), 1, "{name}");
            revalidation_wait(&agent, &name)
        };
        assert_eq!(fresh(), "denied_lately", "nobody has looked yet");
        let mut quiet = || {
            wait_until("quiet", PATIENT, || {
                thread::sleep(Duration::from_millis(500));
                Ok(fresh() == "quiet")
            })
            .expect("nothing is denied");
        };
        quiet();
        // One after the other, so that each has an address that no other name has opened before.
        let mut servers = 0..NAMES;
        let mut fetch = || {
            let number = servers.next().expect("another name");
            let passed = first_packet_passes(&lab, number);
            let name = format!("s{number}.example.com");
            (passed, revalidation_wait(&agent, &name))
        };
        // A neighbour is denied, then the name is resolved and connected to at once. On a machine that stands still,
        // that was not lately.
        let mut denied_lately = || {
            let before = denied(&lab);
            send_denied(&lab, web(2));
            wait_until("the packet to be denied", PATIENT, || {
                Ok(denied(&lab) > before)
            })
            .expect("the switch sees it");
            fetch() == (true, "denied_lately".to_owned())
        };
        assert!((0..20).any(|_| denied_lately()), "no answer has waited");
        quiet();
        // The estimate of a pass may grow meanwhile, and with it the time for which nothing may be denied.
        wait_until("a quiet fetch", PATIENT, || {
            let is_quiet = fetch() == (true, "quiet".to_owned());
            thread::sleep(Duration::from_secs(2 * u64::from(!is_quiet)));
            Ok(is_quiet)
        })
        .expect("nothing is denied");
    });
}
