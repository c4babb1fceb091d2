//! `--open-by`: which way an agent takes, and what another way than the last agent's costs.

use std::{
    collections::BTreeMap,
    io::ErrorKind,
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use dnsflow_tests::{
    agent::Agent,
    firewall::RuleSpec,
    lab,
    lab::{Datapath, Lab},
    ovs::{Daemon, Stop},
    process::{PATIENT, wait_until},
    standstill::{play, unexplained},
    support::{LEFT_TO_VM, not_run, this_test},
};

/// A pod of a namespace without a firewall.
const TWIN: &str = "ns2_pod1";
/// Between two datagrams.
const PAUSE: Duration = Duration::from_millis(20);
/// By then, the last datagram is back.
const BACK: Duration = Duration::from_secs(10);
/// So many datagrams, before and after a change.
const SOME: u32 = 50;
/// What two pods lose within this time, they have lost together.
const TOGETHER: Duration = Duration::from_millis(200);
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
    let arguments = [pins.as_str(), state.as_str(), "--open-by=auto"];
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

/// Numbered datagrams to the address, which sends them back.
#[derive(Default)]
struct Datagrams {
    stop: AtomicBool,
    sent: AtomicU32,
}

impl Datagrams {
    /// Sends them until it is told to stop. Returns when each was sent that did not come back.
    fn exchange(&self) -> Result<BTreeMap<u32, Instant>> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(SocketAddrV4::new(ADDRESS, 80))?;
        let mut buffer = [0; 4];
        // Two packets of a connection that is not known yet may both be the first, and the kernel drops one.
        socket.set_read_timeout(Some(BACK))?;
        wait_until("the first datagram to come back", PATIENT, || {
            socket.send(&buffer)?;
            Ok(socket.recv(&mut buffer).is_ok())
        })?;
        let mut lost = BTreeMap::new();
        let mut end = None;
        while end.is_none_or(|end| Instant::now() < end && !lost.is_empty()) {
            if end.is_none() {
                let number = self.sent.fetch_add(1, Relaxed);
                lost.insert(number, Instant::now());
                socket.send(&u32::to_be_bytes(number))?;
                end = self.stop.load(Relaxed).then(|| Instant::now() + BACK);
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
    }

    fn wait_some(&self) {
        let before = self.sent.load(Relaxed);
        let some = || Ok(self.sent.load(Relaxed) >= before + SOME);
        wait_until("some datagrams", PATIENT, some).expect("they are sent");
    }
}

/// What became of datagrams that were sent through a change.
struct Through {
    sent: u32,
    /// How long after the beginning of the change each was sent that was lost.
    lost: Vec<Duration>,
    /// Those of them at whose time the twin lost none.
    alone: Vec<Duration>,
}

/// Sends datagrams while `change` runs, from a pod behind the firewall and from one without. What was lost more than a
/// datagram before the change is not its loss.
fn through(lab: &Lab, change: impl FnOnce()) -> Through {
    let [of_pod, of_twin] = [Datagrams::default(), Datagrams::default()];
    let exchange = |pod, datagrams: &Datagrams| {
        let netns = lab.pod(pod).netns();
        netns.run(|| datagrams.exchange()).expect("datagrams")
    };
    thread::scope(|scope| {
        let pod = scope.spawn(|| exchange("ns1_pod1", &of_pod));
        let twin = scope.spawn(|| exchange(TWIN, &of_twin));
        let _end = [End(&of_pod), End(&of_twin)];
        of_pod.wait_some();
        let before = of_pod.sent.load(Relaxed);
        let began = Instant::now();
        change();
        of_pod.wait_some();
        for datagrams in [&of_pod, &of_twin] {
            datagrams.stop.store(true, Relaxed);
        }
        let lost = pod.join().expect("no panic");
        let of_twin_lost = twin.join().expect("no panic");
        let together = |at: Instant| {
            let mut of_twin = of_twin_lost.values();
            of_twin.any(|of_twin| at.max(*of_twin).duration_since(at.min(*of_twin)) < TOGETHER)
        };
        let lost = lost.into_values();
        let lost: Vec<_> = lost.filter(|at| *at + PAUSE >= began).collect();
        let alone = lost.iter().copied().filter(|at| !together(*at));
        let since = |at: Instant| at.saturating_duration_since(began);
        Through {
            sent: of_pod.sent.load(Relaxed) - before,
            alone: alone.map(since).collect(),
            lost: lost.into_iter().map(since).collect(),
        }
    })
}

/// Stops the datagrams, also where the test fails.
struct End<'a>(&'a Datagrams);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Relaxed);
    }
}

/// Whether a flow of dnsflow's matches the address.
fn has_flow(lab: &Lab) -> bool {
    let flows = lab.dnsflow_flows_as_they_are().expect("the dump runs");
    let address = format!("nw_dst={ADDRESS}");
    flows.iter().any(|flow| flow.contains(&address))
}

#[test]
fn an_open_address_stays_open_from_flows_to_marks() {
    play(|| {
        let lab = lab!("ways-change", agent);
        if lab.datapath() == Datapath::Netdev {
            let why = "no packet of the userspace datapath has a mark";
            return not_run(&this_test(), format!("{why}; {LEFT_TO_VM}"));
        }
        set_up(&lab);
        lab.serve_echo().expect("the server starts");
        let flows = start(&lab, "--open-by=flows");
        let pod = lab.pod("ns1_pod1");
        assert_eq!(pod.resolve(NAME).expect("the name is known"), [ADDRESS]);
        wait_until("its flow", PATIENT, || Ok(has_flow(&lab))).expect("it comes");
        let mut agent = None;
        let Through { sent, lost, alone } = through(&lab, || {
            flows.terminate().expect("it ends");
            agent = Some(start(&lab, "--open-by=marks"));
            wait_until("the flows to go", PATIENT, || Ok(!has_flow(&lab))).expect("they go");
        });
        println!(
            "from flows to marks: {} of {sent} datagrams lost",
            lost.len()
        );
        if !alone.is_empty() {
            let log = agent.map(|agent| agent.log().unwrap_or_default());
            unexplained(format!(
                "lost {lost:?} after the beginning, alone {alone:?}, of {sent}, one each 20 ms\n{}\n{}",
                log.unwrap_or_default(),
                lab.agent_metrics().unwrap_or_default()
            ));
        }

        // There is a gap on the way back: the marks go before the flows are in force.
        let Through { sent, lost, .. } = through(&lab, || {
            let marks = agent.take().expect("one runs");
            marks.terminate().expect("it ends");
            agent = Some(start(&lab, "--open-by=flows"));
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
    });
}
