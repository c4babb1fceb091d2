//! What the rows share: a lab with rules, a DNS server that knows every name, an acceptor behind
//! every address, and the agent in each of its modes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::Ipv4Addr,
    ops::Range,
    os::unix::fs::symlink,
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use dnsflow_core::values::flow::FlowKey;
use dnsflow_tests::{
    account::Account,
    agent::{self, Agent},
    firewall::RuleSpec,
    lab::{Datapath, Lab},
    process::{run, wait_until},
    topology::DNS_POD_PORT,
};
use serde_json::Value;

use super::{
    loader::{Acceptor, Asker, Connector},
    openflow::Client,
    server::Server,
    wire,
};

/// The pod whose namespace has the firewall.
pub(crate) const RULED: &str = "ns1_pod1";
/// The pod of the cluster's DNS.
pub(crate) const DNS_POD: &str = "dns";
/// The pod whose namespace has none.
pub(crate) const FREE: &str = "ns2_pod1";
/// The address of [`FREE`].
pub(crate) const FREE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 7);
/// How long the agent may take to tell what it has done.
const EVENTS_LIMIT: Duration = Duration::from_secs(20);
const EVENTS_POLL: Duration = Duration::from_millis(100);

/// `--hold` of the agent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mode {
    /// Answers wait for their flows.
    Hold,
    /// Answers pass at once.
    Observe,
}

/// `--open-by` of the agent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OpenBy {
    /// A flow opens an address.
    Flows,
    /// A mark opens an address.
    Marks,
}

impl OpenBy {
    /// What is added to the names of figures that were measured in this way.
    pub(crate) fn told(self) -> &'static str {
        match self {
            Self::Flows => "",
            Self::Marks => ", by marks",
        }
    }
}

/// The stage.
#[derive(Debug)]
pub(crate) struct Stage<'a> {
    pub(crate) lab: &'a Lab,
    pub(crate) short: bool,
    /// How the next agents open addresses.
    pub(crate) open_by: OpenBy,
    /// The flow that opens an address, as dnsflow writes it.
    pub(crate) flow: FlowTemplate,
    server: Mutex<Option<Server>>,
    acceptor: Acceptor,
    next_number: AtomicU32,
}

/// The flow that opens an address.
#[derive(Clone, Debug)]
pub(crate) struct FlowTemplate {
    /// For our own client.
    pub(crate) key: FlowKey,
    /// For ovs-ofctl, without the destination and without cookie.
    matches: String,
    actions: String,
}

impl FlowTemplate {
    /// As `ovs-ofctl add-flow` takes it.
    pub(crate) fn text(&self, destination: Ipv4Addr) -> String {
        let Self {
            matches, actions, ..
        } = self;
        format!("{matches},nw_dst={destination},actions={actions}")
    }
}

impl<'a> Stage<'a> {
    /// Sets it.
    pub(crate) fn set(lab: &'a Lab, short: bool) -> Result<Self> {
        lab.set_firewall(
            "ns1",
            &[
                RuleSpec::allow_name(RULE_NAME),
                RuleSpec::deny("0.0.0.0/0")?,
            ],
        )?;
        run(lab.pod("inet").command("ip")?.args([
            "route",
            "add",
            "local",
            "198.18.0.0/15",
            "dev",
            "lo",
        ]))?;
        lab.stop_dns()?;
        let server = Server::start(lab, DNS_POD, DNS_POD_PORT)?;
        let acceptor = Acceptor::start(lab)?;
        // The gateway learns its next hop, which `ofproto/trace` cannot.
        Connector::new(lab, FREE).connect_patiently(wire::address(0))?;
        let flow = template(lab)?;
        let stage = Self {
            lab,
            short,
            open_by: OpenBy::Flows,
            flow,
            server: Mutex::new(Some(server)),
            acceptor,
            next_number: AtomicU32::new(1),
        };
        stage.clear()?;
        Ok(stage)
    }

    /// Ends what would not end by itself.
    pub(crate) fn strike(self) -> Result<()> {
        self.acceptor.stop(self.lab)
    }

    /// How much is measured: `full`, or `short` in the short form.
    pub(crate) fn scale<T>(&self, full: T, short: T) -> T {
        if self.short { short } else { full }
    }

    /// Numbers of names that nobody has asked for since the last [`Stage::clear`].
    pub(crate) fn fresh(&self, count: u32) -> Range<u32> {
        let first = self.next_number.fetch_add(count, Ordering::Relaxed);
        first..first + count
    }

    /// Removes every flow and every connection of a row. Its agent has ended.
    ///
    /// The next row's connections go to the same addresses. One with the source port of an earlier one
    /// ends Open vSwitch 3.1: `assertion conn->conn_type == CT_CONN_TYPE_DEFAULT failed in
    /// conn_update_state()` (its lib/conntrack.c, the userspace datapath's).
    pub(crate) fn clear(&self) -> Result<()> {
        self.delete_flows()?;
        self.lab.appctl(&["dpctl/flush-conntrack"])?;
        let ours = format!("cookie={OFCTL_COOKIE}/-1");
        self.lab
            .ofctl(&["--protocols=OpenFlow15", "del-flows", "br-int", &ours])?;
        self.next_number.store(1, Ordering::Relaxed);
        Ok(())
    }

    /// Deletes every flow of dnsflow's behind its back.
    pub(crate) fn delete_flows(&self) -> Result<()> {
        const COOKIES: &str = "cookie=0x444e534600000000/0xffffffff00000000";
        self.lab
            .ofctl(&["--protocols=OpenFlow15", "del-flows", "br-int", COOKIES])?;
        Ok(())
    }

    /// Does `work` while the DNS pod's port is free for another server.
    pub(crate) fn without_server<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        *server = None;
        let result = work();
        self.lab.stop_dns()?;
        *server = Some(Server::start(self.lab, DNS_POD, DNS_POD_PORT)?);
        result
    }

    /// An agent in this mode, ready and warm, that logs what it opens.
    pub(crate) fn agent(&self, mode: Mode, arguments: &[&str]) -> Result<Agent> {
        self.agent_with_log(mode, arguments, "info,dnsflow_agent::agent=debug")
    }

    /// The same with the log of an installation: nothing is logged of an address that is opened.
    pub(crate) fn installed_agent(&self, mode: Mode) -> Result<Agent> {
        self.agent_with_log(mode, &[], "info")
    }

    /// An agent that is ready and warm, and does not know yet that no packet was denied before its start.
    pub(crate) fn new_agent(&self, open_by: OpenBy) -> Result<Agent> {
        self.start(Mode::Hold, open_by, &[], "info")
    }

    fn agent_with_log(&self, mode: Mode, arguments: &[&str], log: &str) -> Result<Agent> {
        let agent = self.start(mode, self.open_by, arguments, log)?;
        // An agent runs for months; only in its first seconds it cannot know that nothing was denied, for which held
        // answers wait.
        if mode == Mode::Hold {
            thread::sleep(self.scale(KNOWS_AFTER, Duration::ZERO));
        }
        Ok(agent)
    }

    /// The agent's account once it has told of so many openings, or tells of no more. It may have many records to read.
    fn account_of(&self, expected: u64) -> Result<Account> {
        let mut told = None;
        loop {
            thread::sleep(METRICS_AGE);
            let account = self.lab.account()?;
            if account.opening >= expected || told.replace(account.opening) == Some(account.opening)
            {
                return Ok(account);
            }
        }
    }

    /// Ends an agent that was to open `opened` addresses, beside those of its warm-up. Fails if the agent's own account
    /// names another number, answers that were not held although the mode is to hold, or a limit that took part:
    /// then the row would be of something else than it says. The short form only reads the account.
    pub(crate) fn end(&self, agent: Agent, mode: Mode, opened: u32) -> Result<()> {
        let expected = u64::from(opened + WARM_UP);
        let account = self.account_of(expected)?;
        ensure!(agent.terminate()?.success(), "the agent has failed");
        if self.short {
            // Nobody looks at the values of the short form, and other work may keep the agent from the processor.
            return Ok(());
        }
        let losses = account.losses();
        ensure!(
            losses.is_empty(),
            "a limit took part: {}",
            losses.join(", ")
        );
        ensure!(
            account.opening == expected,
            "{} of {expected} answers opened an address",
            account.opening
        );
        // The kernel opens in either mode.
        let is_right = match mode {
            Mode::Hold => account.held + account.by_kernel >= expected,
            Mode::Observe => account.held == 0,
        };
        ensure!(
            is_right,
            "{} answers were held, and the kernel has opened {} addresses",
            account.held,
            account.by_kernel
        );
        Ok(())
    }

    /// The switch's socket in a place where nobody says which datapath it has: `--open-by=marks` is taken at its word.
    fn silent_switch(&self) -> Result<PathBuf> {
        let dir = self.lab.base().join("silent");
        let socket = dir.join("br-int.mgmt");
        if !dir.exists() {
            fs::create_dir(&dir)?;
            symlink(self.lab.socket("br-int.mgmt"), &socket)?;
        }
        Ok(socket)
    }

    fn start(&self, mode: Mode, open_by: OpenBy, arguments: &[&str], log: &str) -> Result<Agent> {
        let mode = match mode {
            Mode::Hold => "--hold=true",
            Mode::Observe => "--hold=false",
        };
        let mut command = match (open_by, self.lab.datapath()) {
            (OpenBy::Marks, Datapath::Netdev) => self
                .lab
                .agent_command_at(&agent::binary()?, &self.silent_switch()?)?,
            _ => self.lab.agent_command(&agent::binary()?)?,
        };
        command.env("RUST_LOG", log);
        // What the row before was told is no concern of this one.
        match fs::remove_dir_all(self.lab.state()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let open_by = match open_by {
            OpenBy::Flows => "--open-by=flows",
            OpenBy::Marks => "--open-by=marks",
        };
        command.args([mode, open_by]).args(arguments);
        let agent = self.lab.spawn_agent_command(command)?.wait_ready()?;
        let mut asker = Asker::new(self.lab, RULED)?;
        for number in self.fresh(WARM_UP) {
            asker.ask(&matching(number))?;
        }
        Ok(agent)
    }

    /// The pod resolves all of these names, until the agent has all of their addresses in its cache beside the
    /// `known` ones. No answer is over the pod's share of the ring buffer: names are asked for in portions.
    pub(crate) fn resolve(&self, asker: &mut Asker, numbers: Range<u32>, known: u32) -> Result<()> {
        let mut resolved = known;
        let mut rest = numbers;
        while !rest.is_empty() {
            let portion = rest.start..rest.end.min(rest.start + SHARE_PORTION);
            rest.start = portion.end;
            resolved += portion.len() as u32;
            let start = Instant::now();
            asker.ask_all(portion.map(matching), IN_FLIGHT)?;
            wait_until("the addresses in the cache", EVENTS_LIMIT, || {
                Ok(self.addresses()? == u64::from(resolved))
            })?;
            thread::sleep(SHARE_TIME.saturating_sub(start.elapsed()));
        }
        Ok(())
    }

    /// How many flows each further address gets. Those of its group are there once for all addresses.
    pub(crate) fn flows_of_an_address(&self) -> usize {
        match self.open_by {
            OpenBy::Flows => 1,
            OpenBy::Marks => 0,
        }
    }

    /// How many addresses the agent has in its cache.
    pub(crate) fn addresses(&self) -> Result<u64> {
        let (status, _) = self.lab.ask_agent(&["status", "--output=json"])?;
        let status: Value = serde_json::from_str(&status).context("the status as JSON")?;
        let addresses = &status["addresses"];
        addresses.as_u64().context("a number of addresses")
    }

    /// What the agent has logged as opened so far.
    pub(crate) fn opened(&self, agent: &Agent) -> Result<BTreeMap<u32, f64>> {
        let events = agent.events()?;
        Ok(events
            .iter()
            .filter_map(|event| opened(&event["fields"]))
            .collect())
    }

    /// What the agent has logged as opened: microseconds from capture to barrier, by the number
    /// of the name. Waits until all of `numbers` are there.
    pub(crate) fn activations(&self, agent: &Agent, numbers: &[u32]) -> Result<BTreeMap<u32, f64>> {
        let start = Instant::now();
        let numbers: BTreeSet<u32> = numbers.iter().copied().collect();
        loop {
            let mut opened = self.opened(agent)?;
            opened.retain(|number, _| numbers.contains(number));
            if opened.len() == numbers.len() {
                return Ok(opened);
            }
            if start.elapsed() > EVENTS_LIMIT {
                bail!(
                    "the agent has opened {} of {} answers:\n{}",
                    opened.len(),
                    numbers.len(),
                    agent
                        .log()?
                        .lines()
                        .rev()
                        .take(5)
                        .collect::<Vec<_>>()
                        .join("\n")
                );
            }
            std::thread::sleep(EVENTS_POLL);
        }
    }
}

/// Answers before anything is measured.
pub(crate) const WARM_UP: u32 = 20;
/// The agent's metrics are up to this old.
pub(crate) const METRICS_AGE: Duration = Duration::from_millis(1100);
/// Names whose answers fit into the burst of a pod's share of the ring buffer (`SHARE_BURST_BYTES`): a record has
/// `SHARE_RECORD_BYTES` at least.
pub(crate) const SHARE_PORTION: u32 = 1000;
/// In this time the share gives back what a portion takes (`SHARE_NS_PER_BYTE`), and some more.
pub(crate) const SHARE_TIME: Duration = Duration::from_millis(250);
/// Questions that are open at the same time.
const IN_FLIGHT: usize = 64;
/// So long after its start an agent knows that no packet was denied before: longer than megaflows stay.
const KNOWS_AFTER: Duration = Duration::from_secs(16);

/// Number and microseconds of an event `opened`.
fn opened(fields: &Value) -> Option<(u32, f64)> {
    if fields["message"] != "opened" {
        return None;
    }
    let name = fields["name"].as_str()?;
    let first = name.split('.').next()?;
    let micros = fields["activation_us"].as_f64()?;
    Some((wire::digits(first.as_bytes())?, micros))
}

/// The name in the rule of [`RULED`].
pub(crate) const RULE_NAME: &str = "example.com";

/// The name with this number that the rule of [`RULED`] is for.
pub(crate) fn matching(number: u32) -> String {
    format!("n{number}.{RULE_NAME}")
}

/// Another one, whose answer the kernel leaves to the agent.
pub(crate) fn left(number: u32) -> String {
    let mut name = matching(number);
    name.insert(0, wire::LEFT);
    name
}

/// A name that no rule is for, of the kind that a pod's search list makes.
pub(crate) fn unrelated(number: u32) -> String {
    format!("n{number}.shop.svc.cluster.local")
}

/// The cookie of flows that the bench itself writes by ovs-ofctl.
const OFCTL_COOKIE: &str = "0xbe9c";

/// Learns from the agent which flow lets packets out.
fn template(lab: &Lab) -> Result<FlowTemplate> {
    let address = wire::address(0);
    let agent = lab.start_agent(&["--open-by=flows"])?;
    Asker::new(lab, RULED)?.ask(&matching(0))?;
    let to = format!("nw_dst={address}");
    let texts = lab.wait_flows("the flows of an answer", |flows| {
        !Lab::of_groups_of(flows, address.into()).is_empty()
    })?;
    let keys = Client::connect(lab.socket("br-int.mgmt"))?.flows()?;
    ensure!(agent.terminate()?.success(), "the agent has failed");
    let is_to_address = |key: &&FlowKey| key.matches.ends.dst() == Some(address.into());
    let key = keys.iter().find(is_to_address).context("a flow")?.clone();
    let of_address = texts.iter().filter(|flow| flow.contains(&to));
    let mut parts = of_address.flat_map(|flow| flow.split([',', ' ']));
    let source = parts.find(|part| part.starts_with("nw_src="));
    let source = source.context("a source")?;
    // A flow of a group, for one address: it opens by itself, also where the flows of groups are deleted.
    for text in Lab::of_groups_of(&texts, address.into()) {
        let (matches, actions) = text
            .split_once(" actions=")
            .context("a flow with actions")?;
        let matches: Vec<_> = matches
            .split([',', ' '])
            .filter(|part| {
                let left_out = ["cookie=", "tun_id=", "hard_timeout="];
                !part.is_empty() && !left_out.iter().any(|key| part.starts_with(key))
            })
            .collect();
        let template = FlowTemplate {
            key: key.clone(),
            matches: format!("cookie={OFCTL_COOKIE},{},{source}", matches.join(",")),
            actions: actions.to_owned(),
        };
        lab.ofctl(&[
            "--protocols=OpenFlow15",
            "del-flows",
            "br-int",
            &format!("table={},{to},ip", key.table),
        ])?;
        let flow = template.text(address);
        lab.ofctl(&["--protocols=OpenFlow15", "add-flow", "br-int", &flow])?;
        if lab.lets_out(RULED, "tcp", (address, 80).into())? {
            return Ok(template);
        }
    }
    bail!(
        "none of these flows lets a packet out:\n{}",
        texts.join("\n")
    )
}
