//! Answers that come while no agent runs are read by the next one.

use std::{
    collections::BTreeSet,
    fs,
    net::{Ipv4Addr, UdpSocket},
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use dnsflow_agent::capture::UNASKED_GRACE;
use dnsflow_common::key::PENDING_AGE_MAX_NS;
use dnsflow_tests::{
    agent,
    firewall::RuleSpec,
    frames::{Answer, query},
    lab,
    lab::Lab,
    ovs::{Daemon, Stop},
    pod::{DNS, Transport},
    process::wait_until,
    relay::Relay,
    support::is_emulated,
    topology::DNS_POD_PORT,
};

const PATIENT: Duration = Duration::from_secs(30);
/// An emulated machine takes seconds to check the programs of an agent that starts.
const STARTED: Duration = Duration::from_secs(60);
/// So many addresses have more changes than are under way for one pod (`CHANGES_UNDER_WAY_MAX` in the core).
const MANY: u8 = 100;
/// How often an agent is started until one is ready before the questions are forgotten.
const STARTS: u32 = 5;
const PENDING_AGE_MAX: Duration = Duration::from_nanos(PENDING_AGE_MAX_NS);
/// Shorter than TCP's second SYN.
const BLOCKED: Duration = Duration::from_millis(900);

/// The address of the name of this number.
fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 51, 100, number)
}

fn name(number: u8) -> String {
    format!("n{number}.example.com")
}

fn many_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, number)
}

/// A firewall that allows the names, and a server that knows them, `www.example.com` and `many.example.com`.
/// Returns the agents' option to keep their programs.
fn set_up(lab: &Lab) -> String {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    let records = (1..=250).map(|number| format!("{}. 60 IN A {}", name(number), address(number)));
    let mut records: Vec<_> = records.collect();
    records.push("www.example.com. 60 IN A 203.0.113.2".to_owned());
    records.extend((0..MANY).map(|n| format!("many.example.com. 60 IN A {}", many_address(n))));
    let records: Vec<_> = records.iter().map(String::as_str).collect();
    lab.serve_dns(&records).expect("the server starts");
    let dir = lab.pins().expect("a BPF file system");
    format!("--pin-dir={}", dir.display())
}

/// Which of the names are open.
fn open(lab: &Lab) -> BTreeSet<Ipv4Addr> {
    let flows = lab.dnsflow_flows().expect("the dump runs");
    let words = flows.iter().flat_map(|flow| flow.split([',', ' ']));
    let addresses = words.filter_map(|word| word.strip_prefix("nw_dst=")?.parse().ok());
    addresses
        .filter(|address: &Ipv4Addr| address.octets()[0] == 198)
        .collect()
}

/// The pinned files.
fn pinned(dir: &Path) -> Vec<String> {
    let names = |dir: &Path| {
        let entries = fs::read_dir(dir).expect("it can be listed");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        names
            .map(|name| name.to_string_lossy().into_owned())
            .collect::<Vec<_>>()
    };
    let mut found = names(dir);
    found.extend(names(&dir.join("links")));
    found.sort();
    found
}

/// How many of these files are links: none with clsact, whose filters stay by themselves.
fn links_of(files: &[String]) -> usize {
    files.iter().filter(|file| file.contains("dnsflow")).count()
}

#[test]
fn answers_between_two_agents_open_without_being_asked_for_again() {
    let lab = lab!("handover", agent);
    let option = set_up(&lab);
    let dir = lab.pins().expect("a BPF file system");
    let start = || lab.start_agent(&[&option]).expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    let fetch = |url, limit| pod.fetch(url, limit).expect("curl runs").result;

    let agent = start();
    pod.resolve(&name(1)).expect("the name is known");
    let first = BTreeSet::from([address(1)]);
    wait_until("the first name", PATIENT, || Ok(open(&lab) == first)).expect("it is open");
    let links = pinned(&dir);
    agent.terminate().expect("it ends");
    assert_eq!(pinned(&dir), links, "they outlive the agent");
    for number in 2..=20 {
        pod.resolve(&name(number)).expect("the name is known");
    }
    pod.resolve("www.example.com").expect("the name is known");
    fetch("http://203.0.113.2/", BLOCKED).expect_err("nobody opens it");

    // An agent that ends before it knows the node leaves them to the next one.
    lab.stop_daemon(Daemon::NbDb, Stop::Terminate)
        .expect("it stops");
    let agent = lab.spawn_agent(&[&option]).expect("it starts");
    wait_until("the agent to answer", STARTED, || {
        Ok(lab.ask_agent(&["status"])?.1 == Some(0))
    })
    .expect("it answers");
    agent.terminate().expect("it ends");
    lab.start_daemon(Daemon::NbDb).expect("it starts");
    let rings = |files: Vec<String>| files.iter().filter(|file| file.contains("records")).count();
    assert_eq!(rings(pinned(&dir)), 2);

    let agent = start();
    let expected: BTreeSet<_> = (1..=20).map(address).collect();
    wait_until("the names in between", PATIENT, || {
        Ok(open(&lab) == expected)
    })
    .expect("they are open");
    assert_eq!(rings(pinned(&dir)), 1, "they were read");
    fetch("http://203.0.113.2/", PATIENT).expect("it is open");
    assert_eq!(
        pinned(&dir).len(),
        links.len(),
        "one ring buffer, the same links"
    );

    // However an agent ends; and an answer that it had taken off the wire is not lost.
    agent.kill().expect("it is killed");
    for number in 21..=40 {
        pod.resolve(&name(number)).expect("the name is known");
    }
    let agent = start();
    let expected: BTreeSet<_> = (1..=40).map(address).collect();
    wait_until("the names in between", PATIENT, || {
        Ok(open(&lab) == expected)
    })
    .expect("they are open");

    // What comes after it is held again: the first packet passes. On an emulated machine, an answer may be held for as
    // long as is allowed, which is too short.
    let is_open_at_once = |number| {
        pod.resolve(&name(number)).expect("the name is known");
        open(&lab).contains(&address(number))
    };
    let tries = if is_emulated() { 41..=45 } else { 41..=41 };
    assert!(tries.into_iter().any(is_open_at_once));
    lab.delete_pod("ns1_pod1").expect("the pod is deleted");
    wait_until("the pod's links to go", PATIENT, || {
        let left = links_of(&pinned(&dir));
        Ok(left == links_of(&links).saturating_sub(2))
    })
    .expect("they go");
    agent.terminate().expect("it ends");

    let binary = agent::binary().expect("there is one");
    let mut cleanup = Command::new(binary);
    cleanup.arg("cleanup").arg(&option);
    cleanup
        .arg("--openflow-socket")
        .arg(lab.socket("br-int.mgmt"));
    let cleaned = cleanup.status().expect("it runs");
    assert!(cleaned.success());
    assert_eq!(pinned(&dir), ["links"]);
}

#[test]
fn no_answer_is_missed_while_one_agent_replaces_another() {
    let lab = lab!("handover-load", agent);
    let option = set_up(&lab);
    let agent = lab.start_agent(&[&option]).expect("the agent is ready");
    let replaced = AtomicBool::new(false);
    let asked = thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let pod = lab.pod("ns1_pod1");
            let mut asked = BTreeSet::new();
            let mut after = 0;
            for number in 1..=250 {
                // A few with the new agent, too, and more where a lost answer has taken the time of many.
                after += u8::from(replaced.load(Ordering::Relaxed));
                if after > 5 && asked.len() > 20 {
                    break;
                }
                // An answer that the old agent had taken off the wire when it ended is asked for again,
                // as resolvers do.
                let answer = pod.resolve(&name(number));
                let answer = answer.or_else(|_| pod.resolve(&name(number)));
                assert_eq!(answer.expect("the name is known"), [address(number)]);
                asked.insert(address(number));
                thread::sleep(Duration::from_millis(20));
            }
            asked
        });
        thread::sleep(Duration::from_millis(300));
        agent.terminate().expect("it ends");
        let agent = lab.start_agent(&[&option]).expect("the agent is ready");
        replaced.store(true, Ordering::Relaxed);
        let asked = asking.join().expect("no panic");
        let mut missing = BTreeSet::new();
        let opened = wait_until("all names", PATIENT, || {
            missing = &asked - &open(&lab);
            Ok(missing.is_empty())
        });
        let log = || agent.log().unwrap_or_default();
        opened.unwrap_or_else(|error| panic!("{error}: {missing:?} of {asked:?}\n{}", log()));
        drop(agent);
        asked
    });
    println!("{} names were asked for, and all are open", asked.len());
    assert!(asked.len() > 20, "{asked:?}");
}

/// The switch is slow when the agent ends.
#[test]
fn what_the_switch_has_not_confirmed_is_written_before_an_agent_ends() {
    let lab = lab!("handover-writing", agent);
    let option = set_up(&lab);
    let relay = Relay::start(lab.socket("br-int.relay"), lab.socket("br-int.mgmt"));
    let relay = relay.expect("a relay");
    let agent = lab.start_agent_behind(&relay, &[&option]);
    let agent = agent.expect("the agent is ready");
    relay.be_silent(true);
    let pod = lab.pod("ns1_pod1");
    // With a mark for each address, the first of them waits for the flows that match the mark. With flows, the second
    // answer waits for those of the first, which are many.
    let many: Vec<_> = (0..MANY).map(many_address).collect();
    let told = pod.ask(Transport::Edns, DNS, "A", &["many.example.com"]);
    let told: BTreeSet<_> = told.expect("the name is known").into_iter().collect();
    assert_eq!(told, many.into_iter().collect());
    pod.resolve(&name(1)).expect("the name is known");
    let log = agent.log_path().to_owned();
    thread::scope(|scope| {
        let ending = scope.spawn(|| agent.terminate());
        let stopping = wait_until("the end to begin", PATIENT, || {
            Ok(fs::read_to_string(&log)?.contains("SIGTERM: stopping"))
        });
        // An agent that did not wait would be gone by then.
        thread::sleep(Duration::from_millis(50));
        relay.be_silent(false);
        stopping.expect("it logs that it stops");
        ending.join().expect("no panic").expect("it ends");
    });
    let expected = &told | &BTreeSet::from([address(1)]);
    let opened = wait_until("all addresses", PATIENT, || Ok(open(&lab) == expected));
    opened.unwrap_or_else(|error| panic!("{error}: {:?}", &expected - &open(&lab)));
}

/// The name server is slow, and agents come and go meanwhile.
#[test]
fn an_answer_counts_although_the_pod_asked_in_the_time_of_an_earlier_agent() {
    let lab = lab!("handover-slow", agent);
    let option = set_up(&lab);
    let start = || lab.start_agent(&[&option]).expect("the agent is ready");
    lab.stop_dns().expect("it stops");
    // A socket stays in the namespace that it was made in.
    let bind = |pod, port| {
        let netns = lab.pod(pod).netns();
        let socket = netns.run(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?));
        let socket = socket.expect("the port is free");
        socket.set_read_timeout(Some(PATIENT)).expect("a time");
        socket
    };
    let (server, client) = (bind("dns", DNS_POD_PORT), bind("ns1_pod1", 0));
    let ask = |number: u8| {
        let question = query(number.into(), &name(number));
        client.send_to(&question, DNS).expect("it is sent");
        let (_, from) = server.recv_from(&mut [0; 512]).expect("the question");
        from
    };
    let answer = |number: u8, to| {
        let answer = Answer {
            id: number.into(),
            ..Answer::new(&name(number), &[address(number)])
        };
        server.send_to(&answer.build(), to).expect("it is sent");
        client.recv_from(&mut [0; 512]).expect("the answer");
    };

    // The programs forget a question of too long ago, and an emulated machine may need that long to start an agent.
    let (agent, first) = (1..=STARTS)
        .find_map(|round| {
            let agent = start();
            let began = Instant::now();
            let first = ask(1);
            agent.kill().expect("it is killed");
            // Nobody runs, and the programs see the question.
            let second = ask(2);
            let agent = start();
            thread::sleep(2 * UNASKED_GRACE);
            let age = began.elapsed();
            if age > PENDING_AGE_MAX - UNASKED_GRACE {
                println!("round {round}: an agent needed {age:?} to start");
                agent.terminate().expect("it ends");
                return None;
            }
            answer(1, first);
            answer(2, second);
            Some((agent, first))
        })
        .expect("an agent starts before the questions are forgotten");
    let expected = BTreeSet::from([address(1), address(2)]);
    wait_until("both names", PATIENT, || Ok(open(&lab) == expected)).expect("they are open");
    // Once more: each question has one answer.
    let forged = Answer {
        id: 1,
        ..Answer::new(&name(1), &[address(3)])
    };
    server.send_to(&forged.build(), first).expect("it is sent");
    client.recv_from(&mut [0; 512]).expect("the answer");
    agent.terminate().expect("it ends");
    assert_eq!(open(&lab), expected);
}
