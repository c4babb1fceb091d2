//! `--verdict`: which way an agent takes, and what another way than the last agent's costs.

use std::{
    collections::BTreeSet,
    io::ErrorKind,
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use dnsflow_tests::{
    agent::Agent,
    firewall::RuleSpec,
    lab,
    lab::{Datapath, Lab},
    ovs::{Daemon, Stop},
    process::wait_until,
    support::{LEFT_TO_VM, not_run, this_test},
};

/// A start of the agent on an emulated machine.
const PATIENT: Duration = Duration::from_secs(60);
/// Between two datagrams.
const PAUSE: Duration = Duration::from_millis(20);
/// By then, the last datagram is back.
const BACK: Duration = Duration::from_secs(2);
const NAME: &str = "www.example.com";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);

fn set_up(lab: &Lab) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    lab.serve_dns(&[&format!("{NAME}. 600 IN A {ADDRESS}")])
        .expect("the server starts");
}

/// The directories of an agent that has a next one, as in a cluster.
fn directories(lab: &Lab) -> [String; 2] {
    let pins = lab.pins().expect("a BPF file system");
    [
        format!("--pin-dir={}", pins.display()),
        format!("--state-dir={}", lab.base().join("state").display()),
    ]
}

fn start(lab: &Lab, verdict: &str) -> Agent {
    let [pins, state] = directories(lab);
    let agent = lab.start_agent(&[&pins, &state, verdict]);
    agent.expect("the agent is ready")
}

#[test]
fn auto_takes_flows_until_open_vswitch_answers() {
    let lab = lab!("ways-auto", agent);
    set_up(&lab);
    let [pins, state] = directories(&lab);
    let arguments = [pins.as_str(), state.as_str(), "--verdict=auto"];
    lab.stop_daemon(Daemon::Vswitchd, Stop::Terminate)
        .expect("it stops");
    let mut first = lab.spawn_agent(&arguments).expect("it starts");
    let flows = "addresses are opened by flows of their own";
    first
        .wait_event(&format!("{flows} until Open vSwitch answers"))
        .expect("it says so");
    lab.start_daemon(Daemon::Vswitchd).expect("it starts");
    let agent = match lab.datapath() {
        Datapath::Netdev => {
            first.wait_event(flows).expect("it says so");
            let log = first.log().expect("its log");
            assert!(
                log.contains("the bridge is not in the kernel's datapath"),
                "{log}"
            );
            assert_eq!(first.exit_status().expect("it is ours"), None);
            first.wait_ready().expect("the agent is ready")
        }
        Datapath::System => {
            let mut status = None;
            wait_until("the agent to end", PATIENT, || {
                status = first.exit_status()?;
                Ok(status.is_some())
            })
            .expect("it ends");
            assert_eq!(status.and_then(|status| status.code()), Some(1));
            let log = first.log().expect("its log");
            assert!(log.contains("and packets can be marked"), "{log}");
            let next = lab.start_agent(&arguments).expect("the agent is ready");
            let log = next.log().expect("its log");
            assert!(log.contains("addresses are opened by marks"), "{log}");
            next
        }
    };
    let pod = lab.pod("ns1_pod1");
    assert_eq!(pod.resolve(NAME).expect("the name is known"), [ADDRESS]);
    let fetched = pod.fetch(&format!("http://{ADDRESS}/"), PATIENT);
    fetched.expect("curl runs").result.expect("it is open");
    drop(agent);
}

/// Sends numbered datagrams to the address, which sends them back, while `change` runs. Returns how many there were, and
/// the numbers of those that did not come back. What was lost more than a datagram before the change is not its loss.
fn through(lab: &Lab, change: impl FnOnce()) -> (u32, BTreeSet<u32>) {
    let stop = AtomicBool::new(false);
    let sent = AtomicU32::new(0);
    let netns = lab.pod("ns1_pod1").netns();
    let exchange = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(SocketAddrV4::new(ADDRESS, 80))?;
        let mut buffer = [0; 4];
        // Two packets of a connection that is not known yet may both be the first, and the kernel drops one.
        socket.set_read_timeout(Some(BACK))?;
        socket.send(&buffer)?;
        socket.recv(&mut buffer)?;
        let mut lost = BTreeSet::new();
        let mut end = None;
        while end.is_none_or(|end| Instant::now() < end && !lost.is_empty()) {
            if end.is_none() {
                let number = sent.fetch_add(1, Relaxed);
                socket.send(&u32::to_be_bytes(number))?;
                lost.insert(number);
                end = stop.load(Relaxed).then(|| Instant::now() + BACK);
            }
            let next = Instant::now() + PAUSE;
            while let Some(left) = next.checked_duration_since(Instant::now())
                && !left.is_zero()
            {
                socket.set_read_timeout(Some(left))?;
                match socket.recv(&mut buffer) {
                    Ok(_) => _ = lost.remove(&u32::from_be_bytes(buffer)),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(lost)
    };
    thread::scope(|scope| {
        let exchange = scope.spawn(|| netns.run(exchange).expect("datagrams"));
        thread::sleep(Duration::from_secs(1));
        let before = sent.load(Relaxed).saturating_sub(1);
        change();
        thread::sleep(Duration::from_secs(1));
        stop.store(true, Relaxed);
        let mut lost = exchange.join().expect("no panic");
        let of_change = lost.split_off(&before);
        println!("lost before the change: {lost:?}");
        (sent.load(Relaxed) - before, of_change)
    })
}

/// Whether a flow of dnsflow's matches the address.
fn has_flow(lab: &Lab) -> bool {
    let flows = lab.dnsflow_flows_as_they_are().expect("the dump runs");
    let address = format!("nw_dst={ADDRESS}");
    flows.iter().any(|flow| flow.contains(&address))
}

#[test]
fn an_open_address_stays_open_from_flows_to_marks() {
    let lab = lab!("ways-change", agent);
    if lab.datapath() == Datapath::Netdev {
        let why = "no packet of the userspace datapath has a mark";
        return not_run(&this_test(), format!("{why}; {LEFT_TO_VM}"));
    }
    set_up(&lab);
    lab.serve_echo().expect("the server starts");
    let flows = start(&lab, "--verdict=flows");
    let pod = lab.pod("ns1_pod1");
    assert_eq!(pod.resolve(NAME).expect("the name is known"), [ADDRESS]);
    wait_until("its flow", PATIENT, || Ok(has_flow(&lab))).expect("it comes");
    let mut agent = None;
    let (sent, lost) = through(&lab, || {
        flows.terminate().expect("it ends");
        agent = Some(start(&lab, "--verdict=kernel"));
        wait_until("the flows to go", PATIENT, || Ok(!has_flow(&lab))).expect("they go");
    });
    assert!(
        lost.is_empty(),
        "lost {lost:?} of {sent}, one each 20 ms\n{}",
        agent
            .map(|agent| agent.log().unwrap_or_default())
            .unwrap_or_default()
    );

    // There is a gap on the way back: the marks go before the flows are in force.
    let (sent, lost) = through(&lab, || {
        let marks = agent.take().expect("one runs");
        marks.terminate().expect("it ends");
        agent = Some(start(&lab, "--verdict=flows"));
        wait_until("the flows to come", PATIENT, || Ok(has_flow(&lab))).expect("they come");
    });
    println!(
        "from marks to flows: {} of {sent} datagrams lost",
        lost.len()
    );
    let fetched = pod.fetch(&format!("http://{ADDRESS}/"), PATIENT);
    fetched.expect("curl runs").result.expect("it is open");
    let neighbour = lab.pod("ns1_pod2");
    let fetched = neighbour.fetch(&format!("http://{ADDRESS}/"), Duration::from_millis(900));
    fetched
        .expect("curl runs")
        .result
        .expect_err("nobody told it of the address");
}
