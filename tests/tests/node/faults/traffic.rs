//! Traffic that runs through a fault, and what the fault has cost.
//!
//! A pod resolves a name that nobody has asked for before and connects at once, every [`PAUSE`]. Beside that, it asks
//! for one name all the time, reads one long page with curl, and tries an address that no rule allows. A pod without a
//! firewall asks for the same name at the same moments: what it loses, the fault costs without dnsflow, too.

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
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use dnsflow_tests::{
    agent::{self, Agent},
    download::Download,
    firewall::RuleSpec,
    lab::Lab,
    pod::DNS,
    process::{run, wait_until},
    support::is_emulated,
};
use hickory_proto::{
    op::{Message, Query},
    rr::{Name, RData, RecordType},
};

/// The pod whose traffic it is.
pub(crate) const POD: &str = "ns1_pod1";
/// A pod of the same namespace, which asks for nothing.
const NEIGHBOUR: &str = "ns1_pod2";
/// A pod that dnsflow has nothing to do with: its namespace has no firewall.
const WITHOUT: &str = "ns2_pod1";
/// So many times slower is the traffic on an emulated machine, and so are the times for which it waits. What a fault may
/// cost is a number of names and answers, the same on each machine.
const SLOWER_IF_EMULATED: u32 = 5;
/// Between two fresh names, and between two questions of the loop.
const PAUSE: Duration = Duration::from_millis(50);
/// A resolver asks again by then.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Before TCP's second SYN, which comes after one second (RFC 6298, section 2.1).
const FIRST_SYN: Duration = Duration::from_millis(900);
/// The second, third and fourth SYN come after one, three and seven seconds.
const CONNECT_LIMIT: Duration = Duration::from_secs(8);
/// So many names in a row that connect by their first SYN: all is well.
const WELL: usize = 10;
/// How long a recovery may take before the test gives up.
const RECOVERY_LIMIT: Duration = Duration::from_secs(40);
/// How long a start of the agent may take: an emulated machine verifies its programs for seconds.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long the agent may take to put flows back that it knows of.
const FLOWS_LIMIT: Duration = Duration::from_secs(15);
/// More names than a test asks for.
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
}

/// What may be asked for again after a fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kept {
    /// Each address that the pod was told is open again.
    All,
    /// The agent has lost what the pod was told before the end of the fault: those addresses may be closed.
    SinceTheEnd,
}

/// What a fault may cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    /// Answers to fresh names, and of the loop, that do not come, beyond those that do not come to the pod without a
    /// firewall either.
    pub(crate) answers: usize,
    /// First packets that are lost.
    pub(crate) first_packets: usize,
    /// Fresh names whose address does not open in time.
    pub(crate) never: usize,
    /// How long the download may stand still. `None`: the connection may break.
    pub(crate) stall: Option<Duration>,
    pub(crate) kept: Kept,
}

impl Bound {
    /// Nothing but the pauses of a busy machine.
    pub(crate) const NOTHING: Self = Self {
        answers: 0,
        first_packets: 2,
        never: 0,
        stall: Some(Duration::from_secs(1)),
        kept: Kept::All,
    };
}

/// One fresh name.
#[derive(Clone, Copy, Debug)]
struct Visit {
    asked: Instant,
    address: Ipv4Addr,
    outcome: Outcome,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Outcome {
    /// No answer came.
    Unanswered,
    /// The first SYN was answered.
    First,
    /// A later one was.
    Later,
    /// None was.
    Never,
}

/// What a fault has cost.
#[derive(Debug)]
pub(crate) struct Cost {
    what: String,
    visits: usize,
    unanswered: usize,
    later: usize,
    never: usize,
    of_one_name: Answers,
    without: Answers,
    stall: Duration,
    broken: bool,
    trespasses: usize,
    recovery: Duration,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            what,
            visits,
            unanswered,
            later,
            never,
            of_one_name,
            without,
            stall,
            broken,
            trespasses,
            recovery,
        } = self;
        let lost = later + never;
        let told = visits - unanswered;
        write!(
            f,
            "{what}: answers lost {unanswered} of {visits} and {of_one_name} ({without} without a firewall), first \
             packets lost {lost} of {told} ({never} for good), download {stall:.0?}{}, forbidden {trespasses}, well after \
             {recovery:.1?}",
            if *broken { " and broken" } else { "" }
        )
    }
}

/// What a thread of the traffic does in its pod.
type Work<'a> = fn(&Scene<'a>, &Seen) -> Result<()>;

/// Questions for the same name all the time.
#[derive(Default)]
struct Questions {
    asked: AtomicUsize,
    unanswered: AtomicUsize,
}

impl Questions {
    fn answers(&self) -> Answers {
        Answers {
            lost: self.unanswered.load(Relaxed),
            of: self.asked.load(Relaxed),
        }
    }
}

/// Answers that did not come.
#[derive(Clone, Copy, Debug)]
struct Answers {
    lost: usize,
    of: usize,
}

impl fmt::Display for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.lost, self.of)
    }
}

/// What the threads of the traffic share.
#[derive(Default)]
struct Seen {
    stop: AtomicBool,
    visits: Mutex<Vec<Visit>>,
    of_one_name: Questions,
    /// Those of [`WITHOUT`].
    without: Questions,
    /// When the download stood still, and for how long.
    stalls: Mutex<Vec<(Instant, Duration)>>,
    broken: AtomicBool,
    trespasses: AtomicUsize,
}

impl Seen {
    fn goes_on(&self) -> bool {
        !self.stop.load(Relaxed)
    }

    /// The visits so far, in the order of their questions.
    fn visits(&self) -> Vec<Visit> {
        let mut visits = lock(&self.visits).clone();
        visits.sort_by_key(|visit| visit.asked);
        visits
    }

    /// Since when all visits were well, if so many have been.
    fn well_since(&self, from: Instant) -> Option<Instant> {
        let visits = self.visits();
        let well = visits.iter().rev();
        let well = well.take_while(|visit| visit.outcome == Outcome::First && visit.asked >= from);
        let well: Vec<_> = well.collect();
        (well.len() >= WELL).then(|| well.last().map(|visit| visit.asked))?
    }
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
        }
    }

    /// Where the agent keeps its programs.
    pub(crate) fn pins(&self) -> &Path {
        &self.pins
    }

    /// Where the agent keeps its snapshot.
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
        wait_until("the agent to answer", START_LIMIT, || {
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

    /// Runs traffic through a fault, which is over when `fault` returns. Says what the fault has cost, and checks that
    /// it is within `bound`, and that the flows in the switch are then those that should be there.
    pub(crate) fn through<T>(&self, what: &str, bound: Bound, fault: impl FnOnce() -> T) -> T {
        let seen = Seen::default();
        let mut download = self.start_download();
        let (began, over, result) = thread::scope(|scope| {
            let _stop = Stop(&seen);
            let threads: [(&str, Work<'a>); 4] = [
                (POD, Self::visit),
                (POD, |_, seen| ask(seen, &seen.of_one_name)),
                (POD, Self::trespass),
                (WITHOUT, |_, seen| ask(seen, &seen.without)),
            ];
            for (pod, work) in threads {
                let (netns, seen) = (self.lab.pod(pod).netns().clone(), &seen);
                scope.spawn(move || netns.run(|| work(self, seen)).expect("traffic"));
            }
            scope.spawn(|| watch(&mut download, &seen));
            let from = Instant::now();
            wait_until("the traffic to be well", paced(RECOVERY_LIMIT), || {
                Ok(seen.well_since(from).is_some())
            })
            .unwrap_or_else(|error| panic!("before {what}: {error:#}\n{}", self.log()));
            let began = Instant::now();
            let result = fault();
            let over = Instant::now();
            wait_until("the traffic to be well", paced(RECOVERY_LIMIT), || {
                Ok(seen.well_since(over).is_some())
            })
            .unwrap_or_else(|error| panic!("after {what}: {error:#}\n{}", self.log()));
            (began, over, result)
        });
        drop(download);
        let visits = seen.visits();
        let cost = cost(what, &seen, &visits, began, over);
        println!("{cost}");
        for visit in &visits {
            let told = match visit.outcome {
                Outcome::Unanswered => &self.late,
                Outcome::First | Outcome::Later | Outcome::Never => &self.told,
            };
            lock(told).insert(visit.address);
        }
        let after = visits
            .iter()
            .filter(|visit| visit.asked >= over + cost.recovery);
        let after: BTreeSet<_> = after.map(|visit| visit.address).collect();
        if bound.kept == Kept::SinceTheEnd {
            let open = self.open().expect("the dump runs");
            let mut told = lock(&self.told);
            let gone = |address: &Ipv4Addr| !after.contains(address) && !open.contains(address);
            lock(&self.late).extend(told.iter().copied().filter(gone));
            told.retain(|address| !gone(address));
        }
        self.check_flows(what);
        self.check_forbidden(what, after.first().copied());
        cost.check(&bound, &self.log());
        result
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

    /// Resolves fresh names and connects at once.
    fn visit(&self, seen: &Seen) -> Result<()> {
        let mut next = Instant::now();
        thread::scope(|scope| {
            while seen.goes_on() {
                let (name, address) = self.fresh();
                scope.spawn(move || {
                    let asked = Instant::now();
                    let outcome = visit(&name, address).expect("a visit");
                    let visit = Visit {
                        asked,
                        address,
                        outcome,
                    };
                    lock(&seen.visits).push(visit);
                });
                sleep_until(&mut next);
            }
        });
        Ok(())
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

    /// The addresses for which the pod has flows, with their number.
    fn open(&self) -> Result<Vec<Ipv4Addr>> {
        let source = "nw_src=10.244.0.5,";
        let flows = self.lab.dnsflow_flows()?;
        let flows = flows.iter().filter(|flow| flow.contains(source));
        let words = flows.flat_map(|flow| flow.split([',', ' ']));
        Ok(words
            .filter_map(|word| word.strip_prefix("nw_dst=")?.parse().ok())
            .collect())
    }

    /// The flows are those of what the pod was told: none is missing, and none is beside them.
    fn check_flows(&self, what: &str) {
        let told = lock(&self.told).clone();
        let late = lock(&self.late).clone();
        let mut open = Vec::new();
        let (mut missing, mut beside) = (BTreeSet::new(), BTreeSet::new());
        let reached = wait_until("the flows", paced(FLOWS_LIMIT), || {
            open = self.open()?;
            let found: BTreeSet<_> = open.iter().copied().collect();
            missing = &told - &found;
            beside = &(&found - &told) - &late;
            // Of new and of established connections. A killed agent may have written one flow of two for an answer
            // that it still held.
            let of_told = open.iter().filter(|address| told.contains(address));
            let is_whole = of_told.count() == 2 * told.len();
            Ok(missing.is_empty() && beside.is_empty() && is_whole)
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

/// Sleeps until the next of these moments, which are [`PAUSE`] apart.
fn sleep_until(next: &mut Instant) {
    *next += paced(PAUSE);
    thread::sleep(next.saturating_duration_since(Instant::now()));
}

fn name(number: u32) -> String {
    format!("f{number}.example.com")
}

/// Asks for the same name all the time, at the same moments as for the fresh names.
fn ask(seen: &Seen, questions: &Questions) -> Result<()> {
    let mut next = Instant::now();
    thread::scope(|scope| {
        while seen.goes_on() {
            scope.spawn(|| {
                questions.asked.fetch_add(1, Relaxed);
                if resolve(WEB.0).expect("a question").is_none() {
                    questions.unanswered.fetch_add(1, Relaxed);
                }
            });
            sleep_until(&mut next);
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
    let start = Instant::now();
    let connected = TcpStream::connect_timeout(&(told, 80).into(), paced(CONNECT_LIMIT));
    Ok(match connected {
        Ok(_) if start.elapsed() < FIRST_SYN => Outcome::First,
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

fn cost(what: &str, seen: &Seen, visits: &[Visit], began: Instant, over: Instant) -> Cost {
    // What was under way when the fault began is the fault's, too.
    let from = began.checked_sub(paced(ANSWER_LIMIT)).unwrap_or(began);
    let visits: Vec<_> = visits.iter().filter(|visit| visit.asked >= from).collect();
    let count = |outcome| {
        let of = visits.iter().filter(|visit| visit.outcome == outcome);
        of.count()
    };
    let well = seen.well_since(over).unwrap_or(over);
    // The first question after the end comes up to a pause later.
    let bad = |visit: &&&Visit| visit.outcome != Outcome::First && visit.asked >= over;
    let recovery = match visits.iter().filter(bad).count() {
        0 => Duration::ZERO,
        _ => well.duration_since(over),
    };
    let stalls = lock(&seen.stalls);
    let stalls = stalls.iter().filter(|(at, stall)| *at + *stall >= began);
    Cost {
        what: what.to_owned(),
        visits: visits.len(),
        unanswered: count(Outcome::Unanswered),
        later: count(Outcome::Later),
        never: count(Outcome::Never),
        of_one_name: seen.of_one_name.answers(),
        without: seen.without.answers(),
        stall: stalls.map(|(_, stall)| *stall).max().unwrap_or_default(),
        broken: seen.broken.load(Relaxed),
        trespasses: seen.trespasses.load(Relaxed),
        recovery,
    }
}

impl Cost {
    fn check(&self, bound: &Bound, log: &str) {
        let Bound {
            answers,
            first_packets,
            never,
            stall,
            kept: _,
        } = *bound;
        // TCP's timers are the same on a slow machine: there, a SYN that is late looks like one that was lost.
        let in_time = self.later + self.never <= first_packets
            && stall.is_none_or(|stall| self.stall <= stall && !self.broken);
        let within = self.trespasses == 0
            && self.unanswered <= self.without.lost + answers
            && self.of_one_name.lost <= self.without.lost + answers
            && self.never <= never
            && (in_time || is_emulated());
        assert!(within, "{self}\nmay cost {bound:?}\n{log}");
    }
}
