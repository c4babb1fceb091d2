//! The agent under test: `dnsflow agent`, in the node's namespace of a lab.

use std::{
    collections::BTreeSet,
    env,
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr},
    os::unix::{
        net::UnixStream,
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde_json::Value;

use crate::{
    lab::{Datapath, Lab},
    marks,
    process::{PATIENT, wait_until},
    relay::Relay,
    support::{OPEN_BY_VARIABLE, is_by_marks},
    topology::DNS_SERVICE,
};

/// The cookies of dnsflow's flows without sentinel flows, in ovs-ofctl's form: "DNSF" in the upper
/// half. The cookies of sentinel flows, which open nothing, end with a one.
const COOKIES: &str = "cookie=0x444e534600000000/0xffffffff00000001";

/// The actions of what stands for a mark among flows, before the number of the group.
const MARK: &str = "mark:0x";
/// The lowest bit of `--mark-mask`, by default.
const MARK_SHIFT: u32 = 21;

/// What gives packets their tag.
#[derive(Clone, Copy)]
enum Given {
    /// A flow, this tag.
    Tag(u32),
    /// A mark, a tag with this number of a group.
    Number(u32),
}

impl Given {
    fn is(self, tag: u32) -> bool {
        match self {
            Self::Tag(given) => tag == given,
            Self::Number(number) => tag & 0xfff == number,
        }
    }
}

/// What gives packets their tag, if this is one of the flows that do, or stands for a mark.
fn given(flow: &str) -> Option<Given> {
    let (_, actions) = flow.split_once(" actions=")?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    if let Some(mark) = actions.strip_prefix(MARK) {
        return Some(Given::Number(number(mark)?));
    }
    let (_, rest) = actions.split_once("set_field:0x")?;
    Some(Given::Tag(number(rest.split_once("->tun_id")?.0)?))
}

/// The tag that a flow of a group matches.
fn tag_matched(flow: &str) -> Option<u32> {
    let (matches, _) = flow.split_once(" actions=")?;
    let mut fields = matches.split([',', ' ']);
    let tag = fields.find_map(|field| field.strip_prefix("tun_id=0x"))?;
    u32::from_str_radix(tag, 16).ok()
}

/// The environment variable that names the agent's binary.
pub const BINARY_VARIABLE: &str = "DNSFLOW_BIN";

/// A running agent. Dropping it kills it.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    log: PathBuf,
}

/// The agent's binary: `DNSFLOW_BIN`, or what cargo has built beside this program.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(BINARY_VARIABLE) {
        return Ok(path.into());
    }
    let path = beside_this_program("dnsflow")?;
    ensure!(
        path.is_file(),
        "{} is missing: cargo build --package dnsflow-agent, or set {BINARY_VARIABLE}",
        path.display()
    );
    Ok(path)
}

/// A binary of this workspace, of the same profile as the running program.
pub(crate) fn beside_this_program(name: &str) -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let mut directory = program.parent().context("a program without directory")?;
    // cargo puts test programs one directory deeper.
    if directory.ends_with("deps") {
        directory = directory.parent().unwrap_or(directory);
    }
    Ok(directory.join(name))
}

impl Lab {
    /// The agent's command line for this lab.
    pub fn agent_command(&self, binary: &Path) -> Result<Command> {
        self.agent_command_at(binary, &self.socket("br-int.mgmt"))
    }

    /// The same for an agent that reaches the switch at this socket.
    pub fn agent_command_at(&self, binary: &Path, openflow: &Path) -> Result<Command> {
        let mut command = Command::new(binary);
        // The variables of the tests are no options.
        for (name, _) in env::vars_os() {
            let is_of_tests = name
                .to_str()
                .is_some_and(|name| name.starts_with("DNSFLOW_") && name != OPEN_BY_VARIABLE);
            if is_of_tests {
                command.env_remove(name);
            }
        }
        command
            .arg("agent")
            .arg("--manifests")
            .arg(self.manifests())
            .args(["--ovs-db", &self.remote("db.sock")])
            .arg("--openflow-socket")
            .arg(openflow)
            .args(["--resolver", &DNS_SERVICE.to_string()])
            .arg("--control-socket")
            .arg(self.control_socket())
            .args(["--log-format", "json"])
            // As in a cluster, the next agent knows the names.
            .env("DNSFLOW_STATE_DIR", self.state())
            // The default log, and each address that is opened.
            .env("RUST_LOG", "info,dnsflow_agent::agent::reports=debug")
            .args(["--ovn-nb", &self.remote("ovnnb_db.sock")])
            .args(["--ovn-sb", &self.remote("ovnsb_db.sock")]);
        if is_by_marks() {
            // As flows do, marks outlive the agent then; and the lab can read them.
            command.env("DNSFLOW_PIN_DIR", self.pins()?);
        } else if self.datapath() == Datapath::System {
            // With programs that outlive the agent, the default is marks here.
            command.env(OPEN_BY_VARIABLE, "flows");
        }
        self.node().enter(&mut command)?;
        Ok(command)
    }

    /// Where agents keep their journal.
    pub fn state(&self) -> PathBuf {
        self.base().join("state")
    }

    /// Where agents pin what outlives them.
    pub fn pins(&self) -> Result<PathBuf> {
        Ok(self.bpf_fs()?.join("dnsflow"))
    }

    /// The control socket of the lab's agent.
    pub fn control_socket(&self) -> PathBuf {
        self.base().join("control/dnsflow.sock")
    }

    /// What a subcommand that asks the lab's agent prints, with its exit code.
    pub fn ask_agent(&self, arguments: &[&str]) -> Result<(String, Option<i32>)> {
        let output = Command::new(binary()?)
            .args(arguments)
            .env("DNSFLOW_CONTROL_SOCKET", self.control_socket())
            .stderr(Stdio::inherit())
            .output()?;
        Ok((String::from_utf8(output.stdout)?, output.status.code()))
    }

    /// The metrics of the lab's agent, in the format of OpenMetrics, without comments. They are up to a second old.
    pub fn agent_metrics(&self) -> Result<String> {
        let mut client = UnixStream::connect(self.control_socket())?;
        client.write_all(b"GET /v1/metrics HTTP/1.0\r\nhost: agent\r\n\r\n")?;
        let mut answer = String::new();
        client.read_to_string(&mut answer)?;
        let lines = answer.lines().filter(|line| line.starts_with("dnsflow_"));
        Ok(lines.collect::<Vec<_>>().join("\n"))
    }

    /// The addresses for which the kernel marks packets from the pod's veth.
    pub fn marked(&self, lsp: &str) -> Result<Vec<IpAddr>> {
        let ifindex = self.host_index(lsp)?;
        let marks = marks::read(&self.pins()?)?;
        let marks = marks::of_interface(&marks, ifindex);
        Ok(marks.map(|(address, _)| address).collect())
    }

    /// The flows of groups among these: they do what rules say, to all packets with a tag.
    pub fn of_groups(flows: &[String]) -> impl Iterator<Item = &String> {
        flows.iter().filter(|flow| tag_matched(flow).is_some())
    }

    /// The flows of the groups whose tags these flows give to packets to an address. A mark gives the number of the
    /// tag.
    pub fn of_groups_of(flows: &[String], address: IpAddr) -> Vec<&String> {
        let field = if address.is_ipv6() {
            "ipv6_dst"
        } else {
            "nw_dst"
        };
        let to = format!("{field}={address} ");
        let to_address = flows.iter().filter(|flow| flow.contains(&to));
        let given: Vec<Given> = to_address.filter_map(|flow| given(flow)).collect();
        let flows = flows.iter();
        flows
            .filter(|flow| tag_matched(flow).is_some_and(|tag| given.iter().any(|one| one.is(tag))))
            .collect()
    }

    /// The destinations to which packets from an address get the tag of a group whose flows are there, also those of new
    /// connections.
    pub fn led_to(flows: &[String], source: Ipv4Addr) -> Vec<Ipv4Addr> {
        let tags: BTreeSet<u32> = flows.iter().filter_map(|flow| tag_matched(flow)).collect();
        let source = format!("nw_src={source},");
        let of_source = flows.iter().filter(|flow| flow.contains(&source));
        let leading = of_source
            .filter(|flow| !flow.contains("+est"))
            .filter(|flow| given(flow).is_some_and(|given| tags.iter().any(|tag| given.is(*tag))));
        let words = leading.flat_map(|flow| flow.split([',', ' ']));
        words
            .filter_map(|word| word.strip_prefix("nw_dst=")?.parse().ok())
            .collect()
    }

    /// What lets pods reach addresses: dnsflow's flows, without their statistics, sorted. Each mark that the kernel gives
    /// is there, too, as a flow from the pod to the address.
    pub fn dnsflow_flows(&self) -> Result<Vec<String>> {
        let mut flows = self.dnsflow_flows_as_they_are()?;
        if !is_by_marks() {
            return Ok(flows);
        }
        let marks = marks::read(&self.pins()?)?;
        for (ifindex, spec) in self.pods_at_interfaces()? {
            for (to, bits) in marks::of_interface(&marks, ifindex) {
                let addresses = match to {
                    IpAddr::V4(to) => format!("nw_src={},nw_dst={to}", spec.address),
                    IpAddr::V6(to) => format!("ipv6_src={},ipv6_dst={to}", spec.address_v6()),
                };
                let number = bits >> MARK_SHIFT;
                flows.push(format!("{addresses} actions={MARK}{number:x}"));
            }
        }
        flows.sort();
        Ok(flows)
    }

    /// dnsflow's flows in br-int, without their statistics, sorted.
    pub fn dnsflow_flows_as_they_are(&self) -> Result<Vec<String>> {
        let dump = self.ofctl(&[
            "--protocols=OpenFlow15",
            "--no-stats",
            "dump-flows",
            "br-int",
            COOKIES,
        ])?;
        let mut flows: Vec<_> = dump
            .lines()
            .map(str::trim)
            .filter(|line| line.starts_with("cookie="))
            .map(str::to_owned)
            .collect();
        flows.sort();
        Ok(flows)
    }

    /// How many flows [`Lab::dnsflow_flows`] has.
    pub fn dnsflow_flow_count(&self) -> Result<usize> {
        if is_by_marks() {
            return Ok(self.dnsflow_flows()?.len());
        }
        self.dnsflow_flow_count_as_they_are()
    }

    /// How many flows dnsflow has in br-int.
    pub fn dnsflow_flow_count_as_they_are(&self) -> Result<usize> {
        let reply = self.ofctl(&[
            "--protocols=OpenFlow15",
            "dump-aggregate",
            "br-int",
            COOKIES,
        ])?;
        reply
            .split_once("flow_count=")
            .and_then(|(_, count)| count.trim().parse().ok())
            .with_context(|| format!("not a flow count: {reply}"))
    }

    /// Starts to record the changes of flows in br-int.
    pub fn watch_flows(&self) -> Result<FlowWatch> {
        let log = self.base().join("log/flow-monitor.log");
        let output = File::create(&log)?;
        let mut command = self.node_command("ovs-ofctl")?;
        command
            .args(["monitor", "br-int", "watch:!initial"])
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        // SAFETY: one system call; no allocation, no lock.
        unsafe {
            command.pre_exec(|| {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                Ok(())
            });
        }
        let child = command
            .spawn()
            .with_context(|| format!("cannot run {command:?}"))?;
        let mut watch = FlowWatch { child, log };
        // The monitor works once it has reported a first flow.
        wait_until("the flow monitor", PATIENT, || {
            self.ofctl(&["add-flow", "br-int", &format!("{WATCHED},actions=drop")])?;
            self.ofctl(&["--strict", "del-flows", "br-int", WATCHED])?;
            Ok(watch.written()?.contains("event=DELETED"))
        })?;
        Ok(watch)
    }

    /// Waits until dnsflow's flows are as `condition` wants them, and returns them.
    pub fn wait_flows(
        &self,
        what: &str,
        condition: impl Fn(&[String]) -> bool,
    ) -> Result<Vec<String>> {
        let mut flows = Vec::new();
        wait_until(what, PATIENT, || {
            flows = self.dnsflow_flows()?;
            Ok(condition(&flows))
        })
        .with_context(|| format!("the flows are:\n{}", flows.join("\n")))?;
        Ok(flows)
    }

    /// Waits until the agent sees what pods ask and are told, of at least so many.
    pub fn wait_attached(&self, pods: usize) -> Result<()> {
        wait_until("programs at all pods", PATIENT, || {
            let (status, _) = self.ask_agent(&["status", "-o", "json"])?;
            let status: Value = serde_json::from_str(&status)?;
            let ports = status["ports"].as_array().context("no ports")?;
            let is_attached = |port: &Value| port["attachment"] == "attached";
            Ok(ports.len() >= pods && ports.iter().all(is_attached))
        })?;
        Ok(())
    }

    /// Starts the agent with these further arguments and waits until it is ready.
    pub fn start_agent(&self, arguments: &[&str]) -> Result<Agent> {
        let agent = self.spawn_agent(arguments)?;
        agent.wait_ready()
    }

    /// Starts the agent, which reaches the switch through `relay`, and waits until it is ready.
    pub fn start_agent_behind(&self, relay: &Relay, arguments: &[&str]) -> Result<Agent> {
        let command = self.agent_command_at(&binary()?, relay.path())?;
        self.spawn(command, arguments)?.wait_ready()
    }

    /// Starts the agent without waiting.
    pub fn spawn_agent(&self, arguments: &[&str]) -> Result<Agent> {
        self.spawn(self.agent_command(&binary()?)?, arguments)
    }

    fn spawn(&self, mut command: Command, arguments: &[&str]) -> Result<Agent> {
        command.args(arguments);
        self.spawn_agent_command(command)
    }

    /// Starts a command of [`Lab::agent_command`], which the caller may have changed, without
    /// waiting.
    pub fn spawn_agent_command(&self, command: Command) -> Result<Agent> {
        let output = File::create(self.agent_log())?;
        self.spawn_agent_logging_to(command, output.into())
    }

    fn agent_log(&self) -> PathBuf {
        self.base().join("log/dnsflow.log")
    }

    /// As [`Lab::spawn_agent_command`], with another standard error than the file of the log.
    pub fn spawn_agent_logging_to(&self, mut command: Command, stderr: Stdio) -> Result<Agent> {
        let log = self.agent_log();
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr);
        // SAFETY: one system call; no allocation, no lock.
        unsafe {
            command.pre_exec(|| {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                Ok(())
            });
        }
        let child = command
            .spawn()
            .with_context(|| format!("cannot run {command:?}"))?;
        Ok(Agent { child, log })
    }
}

/// A flow that no packet meets: table 250 is not OVN's.
const WATCHED: &str = "table=250,priority=1,ip,nw_dst=198.51.100.254";

/// A running flow monitor (`ovs-ofctl monitor`). Dropping it ends it.
#[derive(Debug)]
pub struct FlowWatch {
    child: Child,
    log: PathBuf,
}

impl FlowWatch {
    /// Whether a flow of dnsflow's was deleted.
    pub fn has_deleted(&self) -> Result<bool> {
        let events = fs::read_to_string(&self.log)?;
        Ok(events.lines().any(is_deletion))
    }

    /// Whether a flow of dnsflow's for this pod was deleted.
    pub fn has_deleted_of(&self, source: Ipv4Addr) -> Result<bool> {
        let source = format!("nw_src={source},");
        let events = fs::read_to_string(&self.log)?;
        let mut events = events.lines();
        Ok(events.any(|event| is_deletion(event) && event.contains(&source)))
    }

    fn written(&mut self) -> Result<String> {
        ensure!(
            self.child.try_wait()?.is_none(),
            "ovs-ofctl has ended: {}",
            fs::read_to_string(&self.log)?
        );
        Ok(fs::read_to_string(&self.log)?)
    }

    /// The recorded events, one line each.
    pub fn finish(mut self) -> Result<String> {
        self.written()
    }
}

/// Whether the event is the end of a flow of dnsflow's.
fn is_deletion(event: &str) -> bool {
    event.contains("event=DELETED") && event.contains("cookie=0x444e5346")
}

impl Drop for FlowWatch {
    fn drop(&mut self) {
        let killed = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = killed {
            eprintln!("cannot end the flow monitor: {error}");
        }
    }
}

impl Agent {
    /// Its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.exit_status()?.is_some())
    }

    /// How it has ended, if it has.
    pub fn exit_status(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits for the event `ready`: programs attached, databases read, switch connected.
    pub fn wait_ready(mut self) -> Result<Self> {
        self.wait_event("ready")?;
        Ok(self)
    }

    /// Waits for a log event with this message.
    pub fn wait_event(&mut self, message: &str) -> Result<()> {
        let waited = wait_until(&format!("the agent's event `{message}`"), PATIENT, || {
            if let Some(status) = self.child.try_wait()? {
                anyhow::bail!("the agent has ended ({status})");
            }
            Ok(self
                .events()?
                .iter()
                .any(|event| event["fields"]["message"] == message))
        });
        waited.map(drop).with_context(|| self.describe())
    }

    /// The agent's log so far, one JSON object per event.
    pub fn events(&self) -> Result<Vec<Value>> {
        Ok(self
            .log()?
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect())
    }

    /// The file that it logs to.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// The agent's log so far.
    pub fn log(&self) -> Result<String> {
        Ok(fs::read_to_string(&self.log)?)
    }

    fn describe(&self) -> String {
        let log = self.log().unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(40)..];
        format!("the end of {}:\n{}", self.log.display(), tail.join("\n"))
    }

    /// Asks it to stop (SIGTERM) and returns its exit status.
    pub fn terminate(mut self) -> Result<ExitStatus> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let mut status = None;
        wait_until("the agent to stop after SIGTERM", PATIENT, || {
            status = self.child.try_wait()?;
            Ok(status.is_some())
        })
        .with_context(|| self.describe())?;
        let status = status.context("it ended")?;
        ensure!(
            status.signal().is_none(),
            "SIGTERM ended it instead of being handled\n{}",
            self.describe()
        );
        Ok(status)
    }

    /// Stops it where it is (SIGSTOP): stuck, and not gone.
    pub fn freeze(&self) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), Signal::STOP)?)
    }

    /// Lets a frozen one go on (SIGCONT).
    pub fn thaw(&self) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), Signal::CONT)?)
    }

    /// Kills it (SIGKILL), as a crash.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // The agent may have ended already; both calls then do nothing.
        let killed = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = killed {
            eprintln!("cannot kill the agent: {error}");
        }
    }
}
