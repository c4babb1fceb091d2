//! Traffic that runs through a fault, and what the fault has cost.
//!
//! A pod resolves a name that nobody has asked for before and connects at once, every [`PAUSE`]. Beside that, it asks
//! for one name all the time, reads one long page with curl, and tries an address that no rule allows. A pod without a
//! firewall, the twin, visits the same names at the same moments.
//!
//! No bound is a time or a number of packets that a busy machine could break. Each loss has to be explained: the twin
//! lost something at the same time; or there was no agent that could hold the answer; or the agent itself counts an
//! answer that it had to give back too early. What nobody explains, fails.

use std::{
    collections::BTreeSet,
    fmt,
    io::ErrorKind,
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        LazyLock, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use dnsflow_tests::{
    account::Account,
    agent::{self, Agent},
    download::Download,
    firewall::RuleSpec,
    lab::Lab,
    neighbour::sent_again,
    pod::DNS,
    process::{PATIENT, run, wait_until},
    standstill::{Watcher, unexplained, unexplained_beside},
    support::is_emulated,
};
use hickory_proto::{
    op::{Message, Query},
    rr::{Name, RData, RecordType},
};

/// The pod whose traffic it is.
pub(crate) const POD: &str = "ns1_pod1";
const POD_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 5);
/// A pod of the same namespace, which asks for nothing.
const NEIGHBOUR: &str = "ns1_pod2";
/// The twin: dnsflow has nothing to do with it, since its namespace has no firewall.
const WITHOUT: &str = "ns2_pod1";
/// So many times slower is the traffic on an emulated machine. What a fault may cost is the same on each machine.
const SLOWER_IF_EMULATED: u32 = 5;
/// Between two fresh names, and between two questions of the loop.
const PAUSE: Duration = Duration::from_millis(50);
/// The same when a recovery takes long, so that there are names for as long as a test waits.
const PAUSE_LATER: Duration = Duration::from_millis(500);
/// After so much time, a recovery takes long.
const LATER: Duration = Duration::from_secs(20);
/// A resolver asks again by then.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// The second, third and fourth SYN come after one, three and seven seconds (RFC 6298, section 2.1).
const CONNECT_LIMIT: Duration = Duration::from_secs(8);
/// So many names in a row that connect by their first SYN: all is well.
const WELL: usize = 10;
/// For so long the programs trust the last sign of an agent (`BEAT_LASTS` in its capture/heartbeat.rs).
const SIGN_LASTS: Duration = Duration::from_millis(800);
/// An account is that old at most (docs/metrics.md).
const ACCOUNT_AGE: Duration = Duration::from_secs(1);
/// More names than a test asks for, and fewer than one pod may be told.
const NAMES: u32 = 3500;
/// The network for benchmarks (RFC 2544, appendix C.2.2).
const BENCHMARKS: u32 = u32::from_be_bytes([198, 18, 0, 0]);
/// Where the download comes from, and the loop's name leads.
const WEB: (&str, Ipv4Addr) = ("www.example.com", Ipv4Addr::new(203, 0, 113, 2));
/// No rule allows it, and no answer names it.
const FORBIDDEN: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 3);

/// A time of the traffic on this machine.
fn paced(time: Duration) -> Duration {
    static SLOWER: LazyLock<u32> = LazyLock::new(|| match is_emulated() {
        true => SLOWER_IF_EMULATED,
        false => 1,
    });
    time * *SLOWER
}

fn address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(BENCHMARKS + number)
}

/// A lab in which traffic can run: one name is allowed, all else is denied.
pub(crate) struct Scene<'a> {
    pub(crate) lab: &'a Lab,
    pins: PathBuf,
    next: AtomicU32,
    /// What the pod was told.
    told: Mutex<BTreeSet<Ipv4Addr>>,
    /// What may be open and need not be: told after the pod had given up waiting, or before the agent has forgotten it.
    late: Mutex<BTreeSet<Ipv4Addr>>,
    /// Whether the agent was away in this fault.
    absence: Mutex<Option<Absence>>,
}

/// A time in which no agent holds answers. It ends when the agent counts a held answer again.
#[derive(Clone, Copy, Debug)]
struct Absence {
    since: Instant,
    /// Answers to earlier questions may be lost, because they were held.
    lost_before: Option<Instant>,
    /// Whether the same agent comes back, with its counters.
    is_same: bool,
}

/// What becomes of dnsflow's flows in a fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Flows {
    /// None goes.
    Stay,
    /// They go. Each address that the pod was told is open again.
    ComeBack,
    /// They go, and the agent forgets what the pod was told before the end of the fault: those addresses may be closed.
    AreForgotten,
}

/// What a fault may cost beside what is explained.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    /// Answers that do not come, although the twin loses none at that time.
    pub(crate) answers: usize,
    /// Answers that are held, and lost because their pod goes.
    pub(crate) of_gone: u64,
    pub(crate) flows: Flows,
    /// Whether the download may break.
    pub(crate) breaks: bool,
}

impl Bound {
    /// What is not explained must not be.
    pub(crate) const NOTHING: Self = Self {
        answers: 0,
        of_gone: 0,
        flows: Flows::Stay,
        breaks: false,
    };
}

/// One fresh name.
#[derive(Clone, Copy, Debug)]
struct Visit {
    asked: Instant,
    /// When the answer or the connection was there, or was given up.
    ended: Instant,
    address: Ipv4Addr,
    outcome: Outcome,
}

impl Visit {
    /// Whether both were under way at the same time.
    fn meets(&self, other: &Self) -> bool {
        self.asked <= other.ended && other.asked <= self.ended
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Outcome {
    /// No answer came.
    Unanswered,
    /// The first SYN was answered, or there was no need to connect.
    First,
    /// A later one was.
    Later,
    /// None was.
    Never,
}

/// What one pod has lost.
#[derive(Clone, Copy, Debug)]
struct Losses {
    visits: usize,
    unanswered: usize,
    later: usize,
    never: usize,
}

impl Losses {
    fn of(visits: &[Visit]) -> Self {
        let count = |outcome| {
            let of = visits.iter().filter(|visit| visit.outcome == outcome);
            of.count()
        };
        Self {
            visits: visits.len(),
            unanswered: count(Outcome::Unanswered),
            later: count(Outcome::Later),
            never: count(Outcome::Never),
        }
    }
}

impl fmt::Display for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            visits,
            unanswered,
            later,
            never,
        } = self;
        let told = visits - unanswered;
        write!(
            f,
            "{unanswered} of {visits} answers, {} of {told} first packets ({never} for good)",
            later + never
        )
    }
}

/// What a fault has cost.
#[derive(Debug)]
struct Cost {
    what: String,
    of_pod: Losses,
    of_one_name: Losses,
    of_twin: Losses,
    /// What nobody explains.
    answers: usize,
    first_packets: Vec<Lost>,
    account: Account,
    stall: Duration,
    broken: bool,
    flows_deleted: bool,
    trespasses: usize,
    recovery: Duration,
}

/// A first packet that nobody explains, with times since the end of the gap, or of the fault where there was none.
#[derive(Debug)]
struct Lost {
    address: Ipv4Addr,
    #[expect(dead_code, reason = "for whom a failure tells it")]
    asked_ms: i128,
    #[expect(dead_code, reason = "for whom a failure tells it")]
    ended_ms: i128,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            what,
            of_pod,
            of_one_name,
            of_twin,
            answers,
            first_packets,
            account,
            stall,
            broken,
            flows_deleted,
            trespasses,
            recovery,
        } = self;
        write!(
            f,
            "{what}: lost {of_pod}; of the loop {} of {} answers; without a firewall {of_twin}; unexplained {answers} \
             answers, {} first packets, of which the agent gave {} back too early; download {stall:.0?}{}, \
             flows deleted {flows_deleted}, forbidden {trespasses}, well after {recovery:.1?}",
            of_one_name.unanswered,
            of_one_name.visits,
            first_packets.len(),
            account.gave_up(),
            if *broken { " and broken" } else { "" }
        )
    }
}

/// What a thread of the traffic does in its pod.
type Work<'a> = fn(&Scene<'a>, &Seen) -> Result<()>;

/// What the threads of the traffic share.
struct Seen {
    stop: AtomicBool,
    began: Instant,
    visits: Mutex<Vec<Visit>>,
    /// Those of [`WITHOUT`].
    of_twin: Mutex<Vec<Visit>>,
    /// The questions of the loop.
    of_one_name: Mutex<Vec<Visit>>,
    /// When the download stood still, and for how long.
    stalls: Mutex<Vec<(Instant, Duration)>>,
    broken: AtomicBool,
    trespasses: AtomicUsize,
}

impl Seen {
    fn new() -> Self {
        Self {
            stop: AtomicBool::default(),
            began: Instant::now(),
            visits: Mutex::default(),
            of_twin: Mutex::default(),
            of_one_name: Mutex::default(),
            stalls: Mutex::default(),
            broken: AtomicBool::default(),
            trespasses: AtomicUsize::default(),
        }
    }

    fn goes_on(&self) -> bool {
        !self.stop.load(Relaxed)
    }

    /// Sleeps until the next of these moments, which are a pause apart.
    fn sleep_until(&self, next: &mut Instant) {
        let pause = match self.began.elapsed() < paced(LATER) {
            true => PAUSE,
            false => PAUSE_LATER,
        };
        *next += paced(pause);
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }

    /// Since when all visits were well, if so many have been.
    fn well_since(&self, from: Instant) -> Option<Instant> {
        let visits = in_order(&self.visits);
        let well = visits.iter().rev();
        let well = well.take_while(|visit| visit.outcome == Outcome::First && visit.asked >= from);
        let well: Vec<_> = well.collect();
        (well.len() >= WELL).then(|| well.last().map(|visit| visit.asked))?
    }
}

/// The visits so far, in the order of their questions.
fn in_order(visits: &Mutex<Vec<Visit>>) -> Vec<Visit> {
    let mut visits = lock(visits).clone();
    visits.sort_by_key(|visit| visit.asked);
    visits
}

/// A panic of another thread fails the test by itself.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stops the traffic, also where the test fails.
struct Stop<'a>(&'a Seen);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Relaxed);
    }
}

impl<'a> Scene<'a> {
    /// Sets the firewall and the names up.
    pub(crate) fn new(lab: &'a Lab) -> Self {
        let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
        lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
            .expect("the rows are written");
        let records = (0..NAMES).map(|n| format!("{}. 600 IN A {}", name(n), address(n)));
        let mut records: Vec<_> = records.collect();
        records.push(format!("{}. 600 IN A {}", WEB.0, WEB.1));
        let records: Vec<_> = records.iter().map(String::as_str).collect();
        lab.serve_dns(&records).expect("the server starts");
        let mut ip = lab.pod("inet").command("ip").expect("a command");
        run(ip.args(["route", "add", "local", "198.18.0.0/15", "dev", "lo"])).expect("a route");
        let pins = lab.pins().expect("a BPF file system");
        Self {
            lab,
            pins,
            next: AtomicU32::new(0),
            told: Mutex::default(),
            late: Mutex::default(),
            absence: Mutex::default(),
        }
    }

    /// Where the agent keeps its programs.
    pub(crate) fn pins(&self) -> &Path {
        &self.pins
    }

    /// Where the agent keeps its journal.
    pub(crate) fn state(&self) -> PathBuf {
        self.lab.base().join("state")
    }

    /// The agent's options: the directories that the DaemonSet gives it.
    pub(crate) fn options(&self) -> Vec<String> {
        vec![
            format!("--pin-dir={}", self.pins.display()),
            format!("--state-dir={}", self.state().display()),
        ]
    }

    /// The agent's command line.
    pub(crate) fn agent_command(&self) -> Command {
        let binary = agent::binary().expect("there is one");
        let mut command = self.lab.agent_command(&binary).expect("a command line");
        command.args(self.options());
        command
    }

    /// Starts the agent and waits until it is ready.
    pub(crate) fn start_agent(&self) -> Agent {
        self.spawn_agent().wait_ready().expect("the agent is ready")
    }

    /// Starts the agent without waiting.
    pub(crate) fn spawn_agent(&self) -> Agent {
        let agent = self.lab.spawn_agent_command(self.agent_command());
        agent.expect("it starts")
    }

    /// Starts the agent, and waits until it answers at its control socket: it may be waiting for databases.
    pub(crate) fn start_waiting_agent(&self) -> Agent {
        let agent = self.spawn_agent();
        let socket = self.lab.control_socket();
        wait_until("the agent to answer", PATIENT, || {
            Ok(UnixStream::connect(&socket).is_ok())
        })
        .expect("it answers");
        agent
    }

    /// A name that nobody has asked for, and where it leads.
    pub(crate) fn fresh(&self) -> (String, Ipv4Addr) {
        let number = self.next.fetch_add(1, Relaxed);
        assert!(number < NAMES, "more names than there are");
        (name(number), address(number))
    }

    /// Kills the agent: what it holds at that moment may be lost.
    pub(crate) fn kill(&self, agent: Agent) {
        let since = Instant::now();
        agent.kill().expect("it is killed");
        self.is_away(since, Some(Instant::now()));
    }

    /// Ends the agent: it puts back what it holds.
    pub(crate) fn end(&self, agent: Agent) {
        let since = Instant::now();
        let status = agent.terminate().expect("it ends");
        assert!(status.success(), "{status}");
        self.is_away(since, None);
    }

    /// The agent has ended by something that began then.
    pub(crate) fn has_ended(&self, since: Instant) {
        self.is_away(since, Some(Instant::now()));
    }

    fn is_away(&self, since: Instant, lost_before: Option<Instant>) {
        *lock(&self.absence) = Some(Absence {
            since,
            lost_before,
            is_same: false,
        });
    }

    /// Stops the agent where it is, for so long.
    pub(crate) fn stand_still(&self, agent: &Agent, time: Duration) {
        let since = Instant::now();
        agent.freeze().expect("it is stopped");
        *lock(&self.absence) = Some(Absence {
            since,
            lost_before: Some(Instant::now() + SIGN_LASTS),
            is_same: true,
        });
        thread::sleep(time);
        agent.thaw().expect("it goes on");
    }

    /// Runs traffic through a fault, which is over when `fault` returns. Says what the fault has cost, and checks that
    /// it is within `bound`, and that the flows in the switch are then those that should be there.
    pub(crate) fn through<T>(&self, what: &str, bound: Bound, fault: impl FnOnce() -> T) -> T {
        let standstill = Watcher::start();
        let logged = self.lab.switch_has_logged();
        let seen = Seen::new();
        *lock(&self.absence) = None;
        let mut download = self.start_download();
        let deleted = match bound.flows {
            Flows::Stay => Some(self.lab.watch_flows().expect("the monitor runs")),
            Flows::ComeBack | Flows::AreForgotten => None,
        };
        let (judged_from, began, over, back, before, result) = thread::scope(|scope| {
            let _stop = Stop(&seen);
            let (with_twin, of_twin) = mpsc::channel();
            scope.spawn(|| {
                let netns = self.lab.pod(POD).netns();
                let visits = || self.visit_fresh(&seen, with_twin);
                netns.run(visits).expect("traffic");
            });
            scope.spawn(|| {
                let netns = self.lab.pod(WITHOUT).netns();
                let visits = || visit_each(&seen.of_twin, of_twin);
                netns.run(visits).expect("traffic");
            });
            let threads: [Work<'a>; 2] = [|_, seen| ask(seen), Self::trespass];
            for work in threads {
                let (netns, seen) = (self.lab.pod(POD).netns(), &seen);
                scope.spawn(move || netns.run(|| work(self, seen)).expect("traffic"));
            }
            scope.spawn(|| watch(&mut download, &seen));
            // Each question that is judged comes behind the account that explains it.
            let before = self.lab.account().expect("the agent tells");
            let judged_from = Instant::now();
            self.wait_well(what, "before", &seen, judged_from);
            let began = Instant::now();
            let result = fault();
            let over = Instant::now();
            let back = self.wait_back(what, bound.flows);
            let well_from = back.map_or(over, |back| back.at);
            self.wait_well(what, "after", &seen, well_from);
            (judged_from, began, over, back, before, result)
        });
        let absence = *lock(&self.absence);
        let deleted =
            deleted.is_some_and(|watch| watch.has_deleted_of(POD_ADDRESS).expect("its log"));
        let account = self.wait_put_back(what, &bound);
        let lost = match absence {
            Some(absence) if !absence.is_same => account.lost,
            _ => account.since(before).lost,
        };
        // What an agent gave back in a gap says nothing of what came after it.
        let account = Account {
            lost,
            ..account.since(back.map_or(before, |back| back.account))
        };
        let from = match (absence, bound.flows) {
            (Some(absence), Flows::Stay) => absence.since,
            _ => began,
        };
        let back = back.map(|back| back.at);
        let windows = Windows {
            judged_from,
            began,
            over,
            gap: back.map(|back| (from, back)),
            lost_before: absence.and_then(|absence| absence.lost_before),
        };
        let cost = cost(what, &seen, account, &windows, deleted);
        println!("{cost}");
        let visits = in_order(&seen.visits);
        for visit in &visits {
            let told = match visit.outcome {
                Outcome::Unanswered => &self.late,
                Outcome::First | Outcome::Later | Outcome::Never => &self.told,
            };
            lock(told).insert(visit.address);
        }
        let well = back.unwrap_or(over).max(over + cost.recovery);
        let after = visits.iter().filter(|visit| visit.asked >= well);
        let after: BTreeSet<_> = after.map(|visit| visit.address).collect();
        if bound.flows == Flows::AreForgotten {
            let open = self.open().expect("the dump runs");
            let mut told = lock(&self.told);
            let gone = |address: &Ipv4Addr| !after.contains(address) && !open.contains(address);
            lock(&self.late).extend(told.iter().copied().filter(gone));
            told.retain(|address| !gone(address));
        }
        self.check_flows(what);
        self.check_forbidden(what, after.first().copied());
        let log = || {
            let of_lost = cost.first_packets.iter().map(|lost| {
                let address = format!("\"{}\"", lost.address);
                self.lab.log_lines_with("dnsflow.log", &address)
            });
            format!(
                "the machine stood still for {:?}\n{}\nof the lost packets:\n{}",
                standstill.longest(),
                self.log(),
                of_lost.collect::<Vec<_>>().join("\n")
            )
        };
        cost.check(&bound, self.lab.switch_stood_still(logged), log);
        result
    }

    /// A pod asks for a fresh name, and its first packet to the address passes: the answer was held until it could.
    pub(crate) fn first_packet_passes(&self, pod: &str) {
        let before = self.lab.account().expect("the agent tells").gave_up();
        let (name, address) = self.fresh();
        let outcome = self.lab.pod(pod).netns().run(|| visit(&name, address));
        let outcome = outcome.expect("a visit");
        let gave_up = || Ok(self.lab.account()?.gave_up() > before);
        if outcome != Outcome::First && wait_until("the account", 2 * ACCOUNT_AGE, gave_up).is_err()
        {
            unexplained(format!("{pod}, {name}: {outcome:?}\n{}", self.log()));
        }
    }

    fn wait_well(&self, what: &str, when: &str, seen: &Seen, from: Instant) {
        let well = wait_until("the traffic to be well", paced(PATIENT), || {
            Ok(seen.well_since(from).is_some())
        });
        well.unwrap_or_else(|error| {
            let counters = self.counters().unwrap_or_default();
            panic!("{}\n{counters}\n{when} {what}: {error:#}", self.log())
        });
    }

    /// Waits until answers are held again, if the agent was away or knows nothing any more, and until what the pod was
    /// told is open again, if the flows had gone. Returns when that was so, if there was anything to wait for.
    fn wait_back(&self, what: &str, flows: Flows) -> Option<Back> {
        let absence = *lock(&self.absence);
        let mut account = Account::default();
        if absence.is_some() || flows == Flows::AreForgotten {
            let mut held_before = match absence {
                Some(absence) if !absence.is_same => Some(0),
                _ => None,
            };
            let held = wait_until("an answer to be held", PATIENT, || {
                // A new agent may not answer yet, and holds before it knows what to wait for.
                let Ok(told) = self.lab.account() else {
                    return Ok(false);
                };
                account = told;
                let before = *held_before.get_or_insert(account.held);
                Ok(account.held > before && self.is_ready()?)
            });
            held.unwrap_or_else(|error| panic!("{}\nafter {what}: {error:#}", self.log()));
        }
        if flows == Flows::ComeBack {
            self.lab.sync().expect("OVN is in step");
            let told = lock(&self.told).clone();
            let mut missing = BTreeSet::new();
            let open = wait_until("the flows to come back", PATIENT, || {
                account = self.lab.account()?;
                missing = &told - &self.open()?.into_iter().collect();
                Ok(missing.is_empty())
            });
            open.unwrap_or_else(|error| {
                panic!("{}\nafter {what}: {error:#}: {missing:?}", self.log())
            });
        }
        (absence.is_some() || flows != Flows::Stay).then(|| Back {
            account,
            at: Instant::now(),
        })
    }

    fn is_ready(&self) -> Result<bool> {
        let metrics = self.lab.agent_metrics()?;
        Ok(metrics.lines().any(|line| line == "dnsflow_ready 1"))
    }

    /// Waits until the agent has put back all that was taken off the wire, or says why not: the traffic has ended.
    /// Returns its account.
    fn wait_put_back(&self, what: &str, bound: &Bound) -> Account {
        // What is read before may be of a time when the traffic still ran.
        thread::sleep(ACCOUNT_AGE);
        let mut account = Account::default();
        let back = wait_until("what was held to be put back", PATIENT, || {
            account = self.lab.account()?;
            // Nobody counts what goes back to an interface that has left the bridge.
            let is_counted = bound.flows != Flows::AreForgotten;
            Ok(!is_counted || account.held <= account.released + bound.of_gone)
        });
        back.unwrap_or_else(|error| panic!("{}\nafter {what}: {error:#}: {account:?}", self.log()));
        account
    }

    /// A download that has begun.
    fn start_download(&self) -> Download {
        let pod = self.lab.pod(POD);
        pod.resolve(WEB.0).expect("the name is known");
        lock(&self.told).insert(WEB.1);
        let mut download = pod.download(WEB.0).expect("curl starts");
        download.goes_on(1).expect("the rule allows it");
        download
    }

    /// Visits fresh names, and tells the twin of each.
    fn visit_fresh(&self, seen: &Seen, twin: mpsc::Sender<Fresh>) -> Result<()> {
        let (fresh, of_pod) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut next = Instant::now();
                while seen.goes_on() {
                    let name = self.fresh();
                    // Both receive until there is nothing more to come.
                    let (_sent, _sent_too) = (fresh.send(name.clone()), twin.send(name));
                    seen.sleep_until(&mut next);
                }
                drop((fresh, twin));
            });
            visit_each(&seen.visits, of_pod)
        })
    }

    /// Tries what no rule allows.
    fn trespass(&self, seen: &Seen) -> Result<()> {
        let forbidden = SocketAddr::from((FORBIDDEN, 80));
        while seen.goes_on() {
            if TcpStream::connect_timeout(&forbidden, paced(PAUSE)).is_ok() {
                seen.trespasses.fetch_add(1, Relaxed);
            }
        }
        Ok(())
    }

    /// The addresses whose packets get the tag of a group with flows.
    fn open(&self) -> Result<Vec<Ipv4Addr>> {
        let flows = self.lab.dnsflow_flows()?;
        Ok(Lab::led_to(&flows, POD_ADDRESS))
    }

    /// The flows are those of what the pod was told: none is missing, and none is beside them.
    fn check_flows(&self, what: &str) {
        let told = lock(&self.told).clone();
        let late = lock(&self.late).clone();
        let mut open = Vec::new();
        let (mut missing, mut beside) = (BTreeSet::new(), BTreeSet::new());
        let reached = wait_until("the flows", PATIENT, || {
            open = self.open()?;
            let found: BTreeSet<_> = open.iter().copied().collect();
            missing = &told - &found;
            beside = &(&found - &told) - &late;
            Ok(missing.is_empty() && beside.is_empty())
        });
        if let Err(error) = reached {
            let of_missing = missing.first().map(|address| {
                let target = format!("{address}:80");
                self.lab.ask_agent(&["explain", "ns1/pod1", &target])
            });
            // The last lines of an output are those that are kept.
            panic!(
                "{}\n{}\n{of_missing:?}\nafter {what}: {error}; {} flows, missing {missing:?}, beside them {beside:?}",
                self.log(),
                self.counters().unwrap_or_default(),
                open.len(),
            );
        }
    }

    /// What is forbidden is closed, and so is for a neighbour what the pod was told.
    fn check_forbidden(&self, what: &str, told: Option<Ipv4Addr>) {
        let closed = |pod: &str, address: Ipv4Addr| {
            let lets_out = self.lab.lets_out(pod, "tcp", (address, 80).into());
            let lets_out = lets_out.unwrap_or_else(|error| panic!("after {what}: {error:#}"));
            assert!(!lets_out, "after {what}: {address} is open for {pod}");
        };
        closed(POD, FORBIDDEN);
        closed(NEIGHBOUR, told.expect("the pod was told one"));
    }

    /// The agent's counters that are not zero.
    fn counters(&self) -> Result<String> {
        let metrics = self.lab.agent_metrics()?;
        let lines = metrics.lines().filter(|line| !line.ends_with(" 0"));
        Ok(lines.collect::<Vec<_>>().join("\n"))
    }

    /// What the agent has logged, and the switch.
    fn log(&self) -> String {
        ["dnsflow.log", "ovs-vswitchd.log"]
            .map(|file| self.lab.log_tail(file))
            .join("\n")
    }
}

/// A fresh name, and where it leads.
type Fresh = (String, Ipv4Addr);

fn name(number: u32) -> String {
    format!("f{number}.example.com")
}

/// Asks for the same name all the time.
fn ask(seen: &Seen) -> Result<()> {
    let mut next = Instant::now();
    thread::scope(|scope| {
        while seen.goes_on() {
            scope.spawn(|| {
                let asked = Instant::now();
                let told = resolve(WEB.0).expect("a question");
                let visit = Visit {
                    asked,
                    ended: Instant::now(),
                    address: WEB.1,
                    outcome: told.map_or(Outcome::Unanswered, |_| Outcome::First),
                };
                lock(&seen.of_one_name).push(visit);
            });
            seen.sleep_until(&mut next);
        }
    });
    Ok(())
}

/// Resolves each of these names when it comes, and connects at once.
fn visit_each(visits: &Mutex<Vec<Visit>>, names: mpsc::Receiver<Fresh>) -> Result<()> {
    thread::scope(|scope| {
        for (name, address) in names {
            scope.spawn(move || {
                let asked = Instant::now();
                let outcome = visit(&name, address).expect("a visit");
                let visit = Visit {
                    asked,
                    ended: Instant::now(),
                    address,
                    outcome,
                };
                lock(visits).push(visit);
            });
        }
    });
    Ok(())
}

/// Looks how the download goes.
fn watch(download: &mut Download, seen: &Seen) {
    let mut last = (Instant::now(), download.received());
    while seen.goes_on() {
        let received = download.received();
        if received > last.1 {
            lock(&seen.stalls).push((last.0, last.0.elapsed()));
            last = (Instant::now(), received);
        }
        if download.has_ended().expect("curl is ours") {
            seen.broken.store(true, Relaxed);
            break;
        }
        thread::sleep(Duration::from_millis(5));
    }
    lock(&seen.stalls).push((last.0, last.0.elapsed()));
}

fn visit(name: &str, address: Ipv4Addr) -> Result<Outcome> {
    let Some(told) = resolve(name)? else {
        return Ok(Outcome::Unanswered);
    };
    assert_eq!(told, address, "{name}");
    let connected = TcpStream::connect_timeout(&(told, 80).into(), paced(CONNECT_LIMIT));
    Ok(match connected {
        Ok(stream) if sent_again(&stream)? == 0 => Outcome::First,
        Ok(_) => Outcome::Later,
        Err(_) => Outcome::Never,
    })
}

/// One question, and the address of its answer, if one comes.
fn resolve(name: &str) -> Result<Option<Ipv4Addr>> {
    let mut query = Message::query();
    query.metadata.recursion_desired = true;
    let mut name = Name::from_ascii(name)?;
    name.set_fqdn(true);
    query.add_query(Query::query(name, RecordType::A));
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(DNS)?;
    socket.send(&query.to_vec()?)?;
    let end = Instant::now() + paced(ANSWER_LIMIT);
    let mut buffer = [0; 512];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let length = match socket.recv(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let answer = Message::from_vec(&buffer[..length])?;
        // A late answer may meet a socket that has the port of the one that has asked.
        if answer.metadata.id != query.metadata.id || answer.queries != query.queries {
            continue;
        }
        let address = answer.answers.first().map(|record| &record.data);
        let Some(RData::A(address)) = address else {
            anyhow::bail!("{answer}");
        };
        return Ok(Some(address.0));
    }
}

/// The end of a gap.
#[derive(Clone, Copy)]
struct Back {
    /// The agent's account of shortly before: of each later question it counts nothing yet.
    account: Account,
    at: Instant,
}

/// When what may be lost.
struct Windows {
    /// Earlier questions are not judged: the account may have counted what became of them before.
    judged_from: Instant,
    began: Instant,
    over: Instant,
    /// From then to then, no agent holds answers, or flows are missing.
    gap: Option<(Instant, Instant)>,
    /// Answers to earlier questions may be lost, because an agent that has ended held them.
    lost_before: Option<Instant>,
}

fn cost(what: &str, seen: &Seen, account: Account, windows: &Windows, flows_deleted: bool) -> Cost {
    // What was under way when the fault began is the fault's, too.
    let of_fault = |visits: &Mutex<Vec<Visit>>| {
        let mut visits = in_order(visits);
        visits.retain(|visit| visit.ended >= windows.began);
        visits
    };
    let [mut visits, mut of_one_name, of_twin] =
        [&seen.visits, &seen.of_one_name, &seen.of_twin].map(of_fault);
    for judged in [&mut visits, &mut of_one_name] {
        judged.retain(|visit| visit.asked >= windows.judged_from);
    }
    let of_twin_lost: Vec<_> = of_twin
        .iter()
        .filter(|visit| visit.outcome != Outcome::First)
        .collect();
    let twin_lost = |visit: &Visit| of_twin_lost.iter().any(|lost| lost.meets(visit));
    let was_held = |visit: &Visit| windows.lost_before.is_some_and(|end| visit.asked <= end);
    let in_gap = |visit: &Visit| {
        let gap = windows.gap;
        gap.is_some_and(|(from, to)| visit.asked <= to && visit.ended >= from)
    };
    let unexplained_answers = |visits: &[Visit]| {
        let lost = visits.iter().filter(|visit| {
            visit.outcome == Outcome::Unanswered && !twin_lost(visit) && !was_held(visit)
        });
        lost.count()
    };
    let first_packets = visits.iter().filter(|visit| {
        let is_lost = matches!(visit.outcome, Outcome::Later | Outcome::Never);
        is_lost && !twin_lost(visit) && !in_gap(visit)
    });
    let end = windows.gap.map_or(windows.over, |(_, to)| to);
    let since_end = |at: Instant| match at.checked_duration_since(end) {
        Some(behind) => behind.as_millis().cast_signed(),
        None => -(end.duration_since(at).as_millis().cast_signed()),
    };
    let first_packets = first_packets.map(|visit| Lost {
        address: visit.address,
        asked_ms: since_end(visit.asked),
        ended_ms: since_end(visit.ended),
    });
    let well = seen.well_since(windows.over).unwrap_or(windows.over);
    // The first question after the end comes up to a pause later.
    let bad = |visit: &&Visit| visit.outcome != Outcome::First && visit.asked >= windows.over;
    let recovery = match visits.iter().filter(bad).count() {
        0 => Duration::ZERO,
        _ => well.duration_since(windows.over),
    };
    let stalls = lock(&seen.stalls);
    let stalls = stalls
        .iter()
        .filter(|(at, stall)| *at + *stall >= windows.began);
    Cost {
        what: what.to_owned(),
        of_pod: Losses::of(&visits),
        of_one_name: Losses::of(&of_one_name),
        of_twin: Losses::of(&of_twin),
        answers: unexplained_answers(&visits).max(unexplained_answers(&of_one_name)),
        first_packets: first_packets.collect(),
        account,
        stall: stalls.map(|(_, stall)| *stall).max().unwrap_or_default(),
        broken: seen.broken.load(Relaxed),
        flows_deleted,
        trespasses: seen.trespasses.load(Relaxed),
        recovery,
    }
}

impl Cost {
    fn check(&self, bound: &Bound, switch_stood: Duration, log: impl Fn() -> String) {
        let Bound {
            answers,
            of_gone,
            flows: _,
            breaks,
        } = *bound;
        let told = || {
            format!(
                "{self}\nmay cost {bound:?}, {:?}\nfirst packets: {:?}\n{}",
                self.account,
                self.first_packets,
                log()
            )
        };
        let is_named = self.trespasses > 0
            || self.account.lost > of_gone
            || self.flows_deleted
            || (self.broken && !breaks);
        assert!(!is_named, "{}", told());
        let gave_up = usize::try_from(self.account.gave_up()).expect("few");
        if self.answers > answers || self.first_packets.len() > gave_up {
            unexplained_beside(switch_stood, told());
        }
    }
}
