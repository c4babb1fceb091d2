//! Agents and kubelets that end while two pods of their node ask for fresh names and connect at once.

use std::{
    fs,
    net::IpAddr,
    process::Stdio,
    thread::{scope, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use dnsflow_tests::{process::run, support::workspace};
use serde_json::{Value, json};

use super::{
    family::Family,
    nodes::{FIRST, Nodes},
    table::{Counts, Names, Row, Way},
};
use crate::{
    interrupt,
    kind::{
        access::{Access, shown},
        deployment::Deployment,
        step,
    },
};

/// The names of each pod during each restart.
const NAMES: usize = 120;
/// Between two names. All of them take longer than an agent is away.
const PAUSE: Duration = Duration::from_millis(300);
/// The same in a virtual machine, which may be emulated.
const VIRTUAL_PAUSE: Duration = Duration::from_millis(500);
/// From the first name to the restart.
const LEAD: Duration = Duration::from_secs(4);
/// For ovn-kubernetes and the agents to have the firewall and the pods.
const READY_LIMIT: Duration = Duration::from_secs(600);
const POLL: Duration = Duration::from_secs(1);
/// For a new container to be started.
const BACK_LIMIT: Duration = Duration::from_secs(900);
/// The names of the arguments, in a process that does not end with `kubectl exec`, which ends with the kubelet.
const ASK: &str = "rm -f /tmp/done
(dnsflow-lab-helper fresh-names \"$@\" >/tmp/names 2>/tmp/errors; : >/tmp/done) </dev/null >/dev/null 2>&1 &";
/// Its output, once it has ended. What went wrong stands behind a `#`.
const ASKED: &str = "[ -e /tmp/done ] && sed 's/^/# /' /tmp/errors && cat /tmp/names";
const RULES: &str = "dnsflow-restarts";
const PLAIN: &str = "dnsflow-plain";
/// The bits of `--mark-mask`, unless something else is said.
const MARK_MASK: &str = "0xffe00000";
const TABLE: &str = "dnsflow-ways";
/// Where packets leave the node's switch, and nftables' family and hook that sees them.
const WAYS: [(&str, &str, &str); 3] = [
    ("uplink", "netdev", "egress device \"eth0\""),
    (
        "management port",
        "netdev",
        "ingress device \"ovn-k8s-mp0\"",
    ),
    ("the host's stack", "inet", "prerouting"),
];

/// A way for an agent, or its kubelet, to end.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum Restart {
    /// The agent is killed
    Kill,
    /// Its Pod is deleted
    DeletePod,
    /// It is killed for want of memory
    OutOfMemory,
    /// All agents are updated to what they are
    RollingUpdate,
    /// The kubelet restarts
    Kubelet,
    /// The pods come back to a node that was drained, with a new agent, and ask then
    Drained,
    /// All agents are taken back to another version
    ToOther,
    /// They are updated from it
    FromOther,
}

/// A container that crashes a second time waits for its back-off, so that between two crashes the Pod is a new one.
const RESTARTS: [Restart; 8] = [
    Restart::Kill,
    Restart::DeletePod,
    Restart::OutOfMemory,
    Restart::RollingUpdate,
    Restart::Kubelet,
    Restart::Drained,
    Restart::ToOther,
    Restart::FromOther,
];

impl Restart {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::DeletePod => "delete pod",
            Self::OutOfMemory => "out of memory",
            Self::RollingUpdate => "rolling update",
            Self::Kubelet => "kubelet",
            Self::Drained => "drained node",
            Self::ToOther => "to the other",
            Self::FromOther => "from the other",
        }
    }

    fn is_of_versions(self) -> bool {
        matches!(self, Self::ToOther | Self::FromOther)
    }

    /// The program that is a new process afterwards.
    fn program(self) -> &'static str {
        match self {
            Self::Kubelet => "kubelet",
            _ => "dnsflow",
        }
    }

    /// The Service whose names are asked for in this run.
    fn service(self, run: usize) -> String {
        format!("{}-{run}", self.name().replace(" -", "-").replace(' ', "-"))
    }

    /// The address of a name, to which no other one leads.
    fn address(self, family: Family, run: usize, number: usize) -> Result<IpAddr> {
        let network = u8::try_from(run * RESTARTS.len() + self as usize)?;
        Ok(family.server(network, u8::try_from(number + 1)?))
    }

    fn host(self, run: usize, number: usize) -> String {
        format!("n{number}.{}.{RULES}.svc.cluster.local", self.service(run))
    }

    /// A Service without a selector and its EndpointSlice: CoreDNS answers with these addresses (Kubernetes DNS-Based
    /// Service Discovery, version 1.1.0, section 2.4).
    fn objects(self, family: Family, run: usize) -> Result<[Value; 2]> {
        let name = self.service(run);
        let mut endpoints = Vec::new();
        for number in 0..=NAMES {
            endpoints.push(json!({
                "addresses": [self.address(family, run, number)?],
                "hostname": format!("n{number}"),
            }));
        }
        Ok([
            json!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "namespace": RULES},
                "spec": {"clusterIP": "None", "ports": [{"name": "http", "port": 80}]},
            }),
            json!({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": name,
                    "namespace": RULES,
                    "labels": {"kubernetes.io/service-name": name},
                },
                "addressType": family.address_type(),
                "ports": [{"name": "http", "port": 80}],
                "endpoints": endpoints,
            }),
        ])
    }
}

/// The pods that ask.
#[derive(Debug)]
pub(super) struct Restarts<'a> {
    nodes: &'a Nodes,
    access: &'a Access,
    deployment: &'a Deployment,
    /// That of another version.
    other: Option<&'a Deployment>,
}

impl<'a> Restarts<'a> {
    /// Starts the pods.
    pub(super) fn begin(
        nodes: &'a Nodes,
        access: &'a Access,
        deployment: &'a Deployment,
        other: Option<&'a Deployment>,
    ) -> Result<Self> {
        let restarts = Self {
            nodes,
            access,
            deployment,
            other,
        };
        restarts.start_pods()?;
        Ok(restarts)
    }

    fn start_pods(&self) -> Result<()> {
        let file = workspace()?.join("tests/cluster/restarts.yaml");
        let manifests = fs::read_to_string(file)?;
        let any = self.nodes.family().any();
        self.access.apply(&manifests.replace("ANY_ADDRESS", any))?;
        for namespace in [RULES, PLAIN] {
            let wait = ["--namespace", namespace, "wait", "pod/pod"];
            let mut wait = self.access.kubectl(&wait);
            shown(wait.args(["--for=condition=Ready", "--timeout=900s"]))?;
        }
        Ok(())
    }

    /// All restarts, one after the other, this many times.
    pub(super) fn run(&self, runs: usize, only: &[Restart]) -> Result<Counts> {
        self.count_ways()?;
        let mut rows = Vec::new();
        for run in 1..=runs {
            for restart in RESTARTS {
                let is_wanted = only.is_empty() || only.contains(&restart);
                if !is_wanted || self.other.is_none() && restart.is_of_versions() {
                    continue;
                }
                let title = format!("{}, run {run} of {runs}", restart.name());
                rows.push(step(&title, || self.during(restart, run))?);
            }
        }
        Ok(Counts {
            restarts: rows,
            ways: self.ways()?,
        })
    }

    /// Makes the names of a run, and waits until both pods reach the first. How long asking took.
    pub(super) fn reached(&self, restart: Restart, run: usize) -> Result<Duration> {
        for object in restart.objects(self.nodes.family(), run)? {
            self.access.apply(&object.to_string())?;
        }
        let mut took = Duration::ZERO;
        for namespace in [RULES, PLAIN] {
            let start = Instant::now();
            loop {
                let asked = Instant::now();
                if self.ask(namespace, &[restart.host(run, 0)])?.first == 1 {
                    took = took.max(asked.elapsed());
                    break;
                }
                ensure!(
                    start.elapsed() < READY_LIMIT,
                    "{namespace}: {} is not reached",
                    restart.host(run, 0)
                );
                sleep(POLL);
            }
        }
        Ok(took)
    }

    /// The names of both pods during one restart.
    fn during(&self, restart: Restart, run: usize) -> Result<Row> {
        // The firewall and the ways are ready before the counting begins. Asking takes kubectl some time, too.
        let lead = LEAD + self.reached(restart, run)?;
        let before = self.process(restart)?;
        let is_over = || self.process(restart).is_ok_and(|process| process != before);
        let hosts: Vec<String> = (1..=NAMES)
            .map(|number| restart.host(run, number))
            .collect();
        if restart == Restart::Drained {
            self.make(restart)?;
        }
        let row = scope(|scope| {
            let [rules, plain] =
                [RULES, PLAIN].map(|namespace| scope.spawn(|| self.ask(namespace, &hosts)));
            let made = match restart {
                Restart::Drained => Ok(()),
                _ => {
                    sleep(lead);
                    self.make(restart)
                }
            };
            let [rules, plain] = [rules, plain].map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            made?;
            Ok::<_, anyhow::Error>(Row {
                run,
                restart: restart.name(),
                is_of_versions: restart.is_of_versions(),
                is_covered: is_over(),
                rules: rules?,
                plain: plain?,
            })
        })?;
        let start = Instant::now();
        while !is_over() {
            ensure!(start.elapsed() < BACK_LIMIT, "no new agent");
            interrupt::check()?;
            sleep(POLL);
        }
        self.deployment.rolled_out()?;
        self.save_logs(&restart.service(run))?;
        for (pod, names) in [("with rules", row.rules), ("without", row.plain)] {
            ensure!(names.count() == NAMES, "{pod}: {names:?}");
            println!(
                "   {pod}: {} by the first SYN, {} late, {} lost",
                names.first, names.late, names.lost
            );
        }
        Ok(row)
    }

    /// Asks for these names in the pod of a namespace.
    fn ask(&self, namespace: &str, hosts: &[String]) -> Result<Names> {
        let pause = match self.nodes.is_virtual() {
            true => VIRTUAL_PAUSE,
            false => PAUSE,
        };
        let exec = ["--namespace", namespace, "exec", "pod", "--", "sh", "-c"];
        let mut ask = self.access.kubectl(&exec);
        let pause_ms = pause.as_millis().to_string();
        ask.args([ASK, "sh", self.nodes.family().dns(), "80", &pause_ms])
            .args(hosts);
        run(&mut ask)?;
        let start = Instant::now();
        // No program of the node's reads the output meanwhile.
        let all = pause * u32::try_from(hosts.len() - 1)?;
        let text = loop {
            interrupt::check()?;
            if start.elapsed() >= all {
                let mut asked = self.access.kubectl(&exec);
                asked
                    .arg(ASKED)
                    .stdin(Stdio::null())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::null());
                // It fails, too, while the kubelet is away.
                let (status, text) = interrupt::output(&mut asked)?;
                if status.success() {
                    break text;
                }
            }
            ensure!(
                start.elapsed() < all + BACK_LIMIT,
                "{namespace}: the names are not asked for"
            );
            sleep(POLL);
        };
        let (errors, outcomes): (Vec<_>, Vec<_>) =
            text.lines().partition(|line| line.starts_with('#'));
        for line in outcomes.iter().filter(|line| !line.contains(" first ")) {
            println!("   {namespace}: {line}");
        }
        for line in errors {
            println!("   {namespace}: {line}");
        }
        Names::parse(&outcomes.join("\n"))
    }

    fn make(&self, restart: Restart) -> Result<()> {
        let kubectl =
            |words: &[&str]| shown(self.access.kubectl(&["--namespace", "dnsflow"]).args(words));
        let on_node = |words: &[&str]| self.nodes.run_on(FIRST, words).map(drop);
        let delete_agent = || {
            let node = format!("spec.nodeName={FIRST}");
            let label = "app.kubernetes.io/name=dnsflow";
            kubectl(&[
                "delete",
                "pod",
                "--selector",
                label,
                "--field-selector",
                &node,
            ])
        };
        match restart {
            Restart::Kill => on_node(&["pkill", "--signal", "KILL", "--exact", "dnsflow"]),
            Restart::DeletePod => delete_agent(),
            Restart::OutOfMemory => on_node(&["bash", "/cluster/scripts/out-of-memory.sh"]),
            Restart::RollingUpdate => {
                kubectl(&["rollout", "restart", "daemonset/dnsflow"])?;
                self.deployment.rolled_out()
            }
            Restart::Kubelet => on_node(&["bash", "/cluster/scripts/kubelet.sh", FIRST]),
            Restart::Drained => {
                kubectl(&["drain", FIRST, "--force", "--ignore-daemonsets"])?;
                delete_agent()?;
                self.deployment.rolled_out()?;
                kubectl(&["uncordon", FIRST])?;
                self.start_pods()
            }
            Restart::ToOther => self.other.context("another version")?.roll_out(),
            Restart::FromOther => self.deployment.roll_out(),
        }
    }

    /// Writes the agents' logs to a file.
    fn save_logs(&self, name: &str) -> Result<()> {
        let label = "--selector=app.kubernetes.io/name=dnsflow";
        let logs = ["--namespace", "dnsflow", "logs", "--prefix", "--tail=-1"];
        let text = run(self.access.kubectl(&logs).arg(label))?;
        let file = self
            .nodes
            .directory()
            .join(format!("log/agents-{name}.log"));
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
    }

    /// The process that is to be a new one.
    fn process(&self, restart: Restart) -> Result<String> {
        let pgrep = ["pgrep", "--exact", restart.program()];
        self.nodes.run_on(FIRST, &pgrep)
    }

    /// Counts the packets that leave the node's switch from now on.
    fn count_ways(&self) -> Result<()> {
        let mut rules = String::new();
        for (number, (way, family, hook)) in WAYS.into_iter().enumerate() {
            // Adding a table that is there adds to it (nft(8)).
            rules += &format!(
                "table {family} {TABLE} {{\nchain way{number} {{\n\
                 type filter hook {hook} priority -300\n\
                 counter comment \"{way}: all\"\n\
                 meta mark and {MARK_MASK} != 0 counter comment \"{way}: marked\"\n}}\n}}\n"
            );
        }
        self.nodes.run_on(FIRST, &["nft", &rules]).map(drop)
    }

    fn ways(&self) -> Result<Vec<Way>> {
        let mut ways = Vec::new();
        for (way, family, _) in WAYS {
            let list = ["nft", "--json", "list", "table", family, TABLE];
            let list: Value = serde_json::from_str(&self.nodes.run_on(FIRST, &list)?)?;
            let count = |comment: String| {
                let mut objects = list["nftables"].as_array().into_iter().flatten();
                let rule = objects.find(|object| object["rule"]["comment"] == *comment)?;
                let mut parts = rule["rule"]["expr"].as_array()?.iter();
                parts.find_map(|part| part["counter"]["packets"].as_u64())
            };
            ways.push(Way {
                way,
                packets: count(format!("{way}: all")).context("a counter")?,
                marked: count(format!("{way}: marked")).context("a counter")?,
            });
        }
        Ok(ways)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_address_stands_for_two_names() {
        let mut addresses = Vec::new();
        let runs = RESTARTS.into_iter().flat_map(|restart| {
            let families = [Family::Ipv4, Family::Ipv6];
            families.map(|family| [(restart, family, 1), (restart, family, 2)])
        });
        for (restart, family, run) in runs.flatten() {
            let objects = restart.objects(family, run);
            let [_, slice] = objects.expect("addresses of the network");
            let endpoints = slice["endpoints"].as_array().expect("a list");
            assert_eq!(endpoints.len(), NAMES + 1);
            let of = |endpoint: &Value| endpoint["addresses"][0].to_string();
            addresses.extend(endpoints.iter().map(of));
        }
        let count = addresses.len();
        addresses.sort();
        addresses.dedup();
        assert_eq!(addresses.len(), count);
    }
}
