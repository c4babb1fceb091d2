//! Answers that come while no agent runs are read by the next one.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    net::{Ipv4Addr, UdpSocket},
    path::Path,
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
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
    process::{PATIENT, wait_until},
    relay::Relay,
    standstill::{play, unexplained},
    support::{LEFT_TO_OTHERS, not_run, this_test},
    topology::DNS_POD_PORT,
};

/// So many addresses have more changes than are under way for one pod (`CHANGES_UNDER_WAY_MAX` in the core).
const MANY: u8 = 100;
/// How often an agent is started until one is ready before the questions are forgotten.
const STARTS: u32 = 10;
/// In how many rounds an agent may end before a silent switch has spoken again: it waits for half a second only. One that
/// does not wait ends so in each.
const ENDS: u8 = 10;
/// By then, the switch has done what it was sent, or this round says nothing.
const WRITTEN: Duration = Duration::from_secs(5);
/// The agent's account is a second old at most.
const ACCOUNT_LIMIT: Duration = Duration::from_secs(2);
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

/// Where the many addresses of this round are.
fn many_addresses(round: u8) -> BTreeSet<Ipv4Addr> {
    let address = |number| Ipv4Addr::new(198, 18, round, number);
    (0..MANY).map(address).collect()
}

fn many_name(round: u8) -> String {
    format!("many{round}.example.com")
}

/// A firewall that allows the names, and a server that knows them, `www.example.com` and the names of many addresses.
/// Returns the agents' option to keep their programs.
fn set_up(lab: &Lab) -> String {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    let records =
        (1..=250).map(|number| format!("{}. 3600 IN A {}", name(number), address(number)));
    let mut records: Vec<_> = records.collect();
    records.push("www.example.com. 3600 IN A 203.0.113.2".to_owned());
    for round in 0..ENDS {
        let name = many_name(round);
        let addresses = many_addresses(round).into_iter();
        records.extend(addresses.map(|address| format!("{name}. 3600 IN A {address}")));
    }
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
    play(hand_over);
}

fn hand_over() {
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
    wait_until("the agent to answer", PATIENT, || {
        Ok(lab.ask_agent(&["status"])?.1 == Some(0))
    })
    .expect("it answers");
    agent.terminate().expect("it ends");
    lab.start_daemon(Daemon::NbDb).expect("it starts");
    let rings = |files: Vec<String>| files.iter().filter(|file| file.contains("records")).count();
    // Beside programs that go on, it has put none of its own anywhere.
    assert!((1..=2).contains(&rings(pinned(&dir))));

    let mut agent = start();
    let expected: BTreeSet<_> = (1..=20).map(address).collect();
    wait_until("the names in between", PATIENT, || {
        Ok(open(&lab) == expected)
    })
    .expect("they are open");
    wait_until("the ring buffers to be read", PATIENT, || {
        Ok(rings(pinned(&dir)) == 1)
    })
    .expect("they are");
    // It removes the pins first.
    let taken_over = "took over the frames captured without an agent";
    agent.wait_event(taken_over).expect("it says so");
    let events = agent.events().expect("it logs");
    let mut events = events.iter().map(|event| &event["fields"]);
    let taken = events.find(|fields| fields["message"] == taken_over);
    let taken = taken.expect("it was there");
    let [frames, turns] = ["frames", "turns"].map(|field| taken[field].as_u64().expect("a number"));
    assert!(frames >= 20 && turns * 16 >= frames, "{frames} in {turns}");
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

    // What comes after it is held again, or the kernel opens it by what this agent has told it.
    let held = || {
        lab.account()
            .map(|account| account.held + account.by_kernel)
    };
    let before = held().expect("the agent tells");
    pod.resolve(&name(41)).expect("the name is known");
    let is_held = || Ok(held()? > before);
    if wait_until("the account", ACCOUNT_LIMIT, is_held).is_err() {
        unexplained(format!("{} passed unseen: {:?}", name(41), lab.account()));
    }
    let expected: BTreeSet<_> = (1..=41).map(address).collect();
    wait_until("the last name", PATIENT, || Ok(open(&lab) == expected)).expect("it is open");
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
    assert!(!dir.exists(), "{:?}", pinned(&dir));
}

/// A question that was answered, for the failure of a test. Times are since its beginning.
#[derive(Clone, Copy)]
struct Asked {
    at: Duration,
    answered: Duration,
    /// Whether the first question got no answer.
    again: bool,
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            at,
            answered,
            again,
        } = self;
        let times = if *again { "twice" } else { "once" };
        write!(f, "asked {times} from {at:?}, answered at {answered:?}")
    }
}

#[test]
fn no_answer_is_missed_while_one_agent_replaces_another() {
    let lab = lab!("handover-load", agent);
    let option = set_up(&lab);
    let agent = lab.start_agent(&[&option]).expect("the agent is ready");
    let start = Instant::now();
    let replaced = AtomicBool::new(false);
    let asked = Mutex::new(BTreeMap::new());
    let count = || asked.lock().expect("no panic").len();
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let pod = lab.pod("ns1_pod1");
            let mut after = 0;
            for number in 1..=250 {
                if number > 200 {
                    let ready = || Ok(replaced.load(Ordering::Relaxed));
                    wait_until("the next agent", PATIENT, ready).expect("it is ready");
                }
                // A few with the new agent, too, and more where a lost answer has taken the time of many.
                after += u8::from(replaced.load(Ordering::Relaxed));
                if after > 5 && count() > 20 {
                    break;
                }
                let at = start.elapsed();
                // An answer that the old agent had taken off the wire when it ended is asked for again,
                // as resolvers do.
                let first = pod.resolve(&name(number));
                let again = first.is_err();
                let answer = first.or_else(|_| pod.resolve(&name(number)));
                assert_eq!(answer.expect("the name is known"), [address(number)]);
                let question = Asked {
                    at,
                    answered: start.elapsed(),
                    again,
                };
                let mut asked = asked.lock().expect("no panic");
                asked.insert(address(number), question);
                drop(asked);
                thread::sleep(Duration::from_millis(20));
            }
        });
        wait_until("some names", PATIENT, || Ok(count() >= 5)).expect("they are asked for");
        let ending = start.elapsed();
        let before = lab.agent_metrics().expect("the agent tells");
        let old_log = agent.log().expect("its log");
        agent.terminate().expect("it ends");
        let ended = start.elapsed();
        let agent = lab.start_agent(&[&option]).expect("the agent is ready");
        let ready = start.elapsed();
        replaced.store(true, Ordering::Relaxed);
        asking.join().expect("no panic");
        let asked = asked.lock().expect("no panic").clone();
        let mut missing = BTreeMap::new();
        let opened = wait_until("all names", PATIENT, || {
            let open = open(&lab);
            missing = asked.clone();
            missing.retain(|address, _| !open.contains(address));
            Ok(missing.is_empty())
        });
        opened.unwrap_or_else(|error| {
            // What it takes to see where an answer went.
            let missing: Vec<_> = missing
                .iter()
                .map(|(address, asked)| format!("{address} {asked}"))
                .collect();
            panic!(
                "{old_log}\n{}\n{before}\n{}\n{error}: {missing:#?} of {}; the old agent was ended at {ending:?} and \
                 gone at {ended:?}, the next one ready at {ready:?}",
                agent.log().unwrap_or_default(),
                lab.agent_metrics().unwrap_or_default(),
                asked.len()
            )
        });
    });
    println!("{} names were asked for, and all are open", count());
    assert!(count() > 20, "{}", count());
}

/// The switch is slow when the agent ends.
#[test]
fn what_the_switch_has_not_confirmed_is_written_before_an_agent_ends() {
    let lab = lab!("handover-writing", agent);
    let option = set_up(&lab);
    let relay = Relay::start(lab.socket("br-int.relay"), lab.socket("br-int.mgmt"));
    let relay = relay.expect("a relay");
    let written = (0..ENDS).any(|round| is_written_before_the_end(&lab, &relay, &option, round));
    assert!(written, "no agent has waited for the switch");
}

/// Ends an agent that waits for a silent switch. Whether what it had to write is in the switch then.
fn is_written_before_the_end(lab: &Lab, relay: &Relay, option: &str, round: u8) -> bool {
    let agent = lab.start_agent_behind(relay, &[option]);
    let agent = agent.expect("the agent is ready");
    relay.be_silent(true);
    let pod = lab.pod("ns1_pod1");
    // With a mark for each address, the first of them waits for the flows that match the mark. With flows, the second
    // answer waits for those of the first, which are many.
    let told = pod.ask(Transport::Edns, DNS, "A", &[&many_name(round)]);
    let told: BTreeSet<_> = told.expect("the name is known").into_iter().collect();
    assert_eq!(told, many_addresses(round));
    pod.resolve(&name(round + 1)).expect("the name is known");
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
    let expected = &told | &BTreeSet::from([address(round + 1)]);
    // What the agent has sent, the switch may still be about to do.
    let written = wait_until("all addresses", WRITTEN, || {
        Ok(expected.is_subset(&open(lab)))
    });
    if let Err(error) = &written {
        println!("round {round}: {error}");
    }
    written.is_ok()
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

    // The programs forget a question of too long ago, and a busy machine may need that long to start an agent.
    let round = |round| {
        let agent = start();
        let began = Instant::now();
        let first = ask(1);
        agent.kill().expect("it is killed");
        // Nobody runs, and the programs see the question.
        let second = ask(2);
        let agent = start();
        thread::sleep(2 * UNASKED_GRACE);
        // An answer of much later does not even reach the pod: connection tracking has forgotten the question.
        let is_late = || began.elapsed() >= PENDING_AGE_MAX;
        if !is_late() {
            answer(1, first);
            answer(2, second);
        }
        if is_late() {
            println!(
                "round {round}: the answers came after {:?}",
                began.elapsed()
            );
            agent.terminate().expect("it ends");
            return None;
        }
        Some((agent, first))
    };
    let Some((agent, first)) = (1..=STARTS).find_map(round) else {
        let why = format!("no agent was ready within {PENDING_AGE_MAX:?}; {LEFT_TO_OTHERS}");
        return not_run(&this_test(), why);
    };
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
