//! Agents that end in four ways while two pods of their node ask for fresh names and connect at once.

use std::{
    fs,
    net::Ipv4Addr,
    process::Stdio,
    thread::{scope, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::support::workspace;
use serde_json::{Value, json};

use super::{
    nodes::{FIRST, Nodes},
    table::{Counts, Names, Row, Uplink},
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
/// Milliseconds between two names. All of them take longer than an agent is away.
const PAUSE: &str = "300";
/// From the first name to the restart.
const LEAD: Duration = Duration::from_secs(4);
/// For ovn-kubernetes and the agents to have the firewall and the pods.
const READY_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_secs(1);
/// For a new container to be started.
const BACK_LIMIT: Duration = Duration::from_secs(120);
const RULES: &str = "dnsflow-restarts";
const PLAIN: &str = "dnsflow-plain";
const DNS: &str = "10.96.0.10:53";
/// The bits of `--mark-mask`, unless something else is said.
const MARK_MASK: &str = "0xffe00000";
const TABLE: &str = "dnsflow-uplink";

/// A way for an agent to end.
#[derive(Clone, Copy, Debug)]
enum Restart {
    Kill,
    DeletePod,
    OutOfMemory,
    RollingUpdate,
}

/// A container that crashes a second time waits for its back-off, so that between two crashes the Pod is a new one.
const RESTARTS: [Restart; 4] = [
    Restart::Kill,
    Restart::DeletePod,
    Restart::OutOfMemory,
    Restart::RollingUpdate,
];

impl Restart {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::DeletePod => "delete pod",
            Self::OutOfMemory => "out of memory",
            Self::RollingUpdate => "rolling update",
        }
    }

    /// The Service whose names are asked for.
    fn service(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::DeletePod => "delete-pod",
            Self::OutOfMemory => "out-of-memory",
            Self::RollingUpdate => "rolling-update",
        }
    }

    /// Addresses that no other restart's names lead to (RFC 5737): the last number of the first one is 1.
    fn network(self) -> ([u8; 3], u8) {
        match self {
            Self::Kill => ([192, 0, 2], 1),
            Self::DeletePod => ([192, 0, 2], 129),
            Self::OutOfMemory => ([198, 51, 100], 1),
            Self::RollingUpdate => ([198, 51, 100], 129),
        }
    }

    fn host(self, number: usize) -> String {
        format!("n{number}.{}.{RULES}.svc.cluster.local", self.service())
    }

    /// A Service without a selector and its EndpointSlice: CoreDNS answers with these addresses (Kubernetes DNS-Based
    /// Service Discovery, version 1.1.0, section 2.4).
    fn objects(self) -> Result<[Value; 2]> {
        let name = self.service();
        let ([a, b, c], first) = self.network();
        let mut endpoints = Vec::new();
        for number in 0..=NAMES {
            let last = u8::try_from(usize::from(first) + number)?;
            endpoints.push(json!({
                "addresses": [Ipv4Addr::new(a, b, c, last)],
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
                "addressType": "IPv4",
                "ports": [{"name": "http", "port": 80}],
                "endpoints": endpoints,
            }),
        ])
    }
}

/// The pods that ask.
pub(super) struct Restarts<'a> {
    nodes: &'a Nodes,
    access: &'a Access,
    deployment: &'a Deployment,
}

impl<'a> Restarts<'a> {
    /// Starts the pods.
    pub(super) fn begin(
        nodes: &'a Nodes,
        access: &'a Access,
        deployment: &'a Deployment,
    ) -> Result<Self> {
        let file = workspace()?.join("tests/cluster/restarts.yaml");
        access.apply(&fs::read_to_string(file)?)?;
        for restart in RESTARTS {
            for object in restart.objects()? {
                access.apply(&object.to_string())?;
            }
        }
        for namespace in [RULES, PLAIN] {
            let wait = ["--namespace", namespace, "wait", "pod/pod"];
            shown(
                access
                    .kubectl(&wait)
                    .args(["--for=condition=Ready", "--timeout=120s"]),
            )?;
        }
        Ok(Self {
            nodes,
            access,
            deployment,
        })
    }

    /// All restarts, one after the other.
    pub(super) fn run(&self) -> Result<Counts> {
        self.count_uplink()?;
        let mut rows = Vec::new();
        for restart in RESTARTS {
            rows.push(step(restart.name(), || self.during(restart))?);
        }
        Ok(Counts {
            restarts: rows,
            uplink: self.uplink()?,
        })
    }

    /// The names of both pods during one restart.
    fn during(&self, restart: Restart) -> Result<Row> {
        // The firewall and the ways are ready before the counting begins.
        for namespace in [RULES, PLAIN] {
            let start = Instant::now();
            while self.ask(namespace, &[restart.host(0)])?.first == 0 {
                ensure!(
                    start.elapsed() < READY_LIMIT,
                    "{namespace}: {} is not reached",
                    restart.host(0)
                );
                sleep(POLL);
            }
        }
        let before = self.agent()?;
        let hosts: Vec<String> = (1..=NAMES).map(|number| restart.host(number)).collect();
        let row = scope(|scope| {
            let [rules, plain] =
                [RULES, PLAIN].map(|namespace| scope.spawn(|| self.ask(namespace, &hosts)));
            sleep(LEAD);
            let made = self.make(restart);
            let [rules, plain] = [rules, plain].map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            made?;
            Ok::<_, anyhow::Error>(Row {
                restart: restart.name(),
                rules: rules?,
                plain: plain?,
            })
        })?;
        let start = Instant::now();
        while self.agent().ok().is_none_or(|agent| agent == before) {
            ensure!(start.elapsed() < BACK_LIMIT, "no new agent");
            interrupt::check()?;
            sleep(POLL);
        }
        self.deployment.rolled_out()?;
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
        let exec = ["--namespace", namespace, "exec", "pod", "--"];
        let mut ask = self.access.kubectl(&exec);
        ask.args(["dnsflow-lab-helper", "fresh-names", DNS, "80", PAUSE])
            .args(hosts)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let (status, text) = interrupt::output(&mut ask)?;
        ensure!(status.success(), "{namespace}: {status}: {text}");
        for line in text.lines().filter(|line| !line.contains(" first ")) {
            println!("   {namespace}: {line}");
        }
        Names::parse(&text)
    }

    fn make(&self, restart: Restart) -> Result<()> {
        let kubectl =
            |words: &[&str]| shown(self.access.kubectl(&["--namespace", "dnsflow"]).args(words));
        let on_node = |words: &[&str]| self.nodes.run_on(FIRST, words).map(drop);
        match restart {
            Restart::Kill => on_node(&["pkill", "--signal", "KILL", "--exact", "dnsflow"]),
            Restart::DeletePod => {
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
            }
            Restart::OutOfMemory => on_node(&["bash", "/cluster/scripts/out-of-memory.sh"]),
            Restart::RollingUpdate => {
                kubectl(&["rollout", "restart", "daemonset/dnsflow"])?;
                self.deployment.rolled_out()
            }
        }
    }

    /// The process of the agent.
    fn agent(&self) -> Result<String> {
        self.nodes.run_on(FIRST, &["pgrep", "--exact", "dnsflow"])
    }

    /// Counts the packets that leave the node from now on.
    fn count_uplink(&self) -> Result<()> {
        let rules = format!(
            "table netdev {TABLE} {{\nchain egress {{\n\
             type filter hook egress device \"eth0\" priority 0\n\
             counter comment \"all\"\n\
             meta mark and {MARK_MASK} != 0 counter comment \"marked\"\n}}\n}}"
        );
        self.nodes.run_on(FIRST, &["nft", &rules]).map(drop)
    }

    fn uplink(&self) -> Result<Uplink> {
        let list = ["nft", "--json", "list", "table", "netdev", TABLE];
        let list: Value = serde_json::from_str(&self.nodes.run_on(FIRST, &list)?)?;
        let count = |comment: &str| {
            let mut objects = list["nftables"].as_array().into_iter().flatten();
            let rule = objects.find(|object| object["rule"]["comment"] == comment)?;
            let mut parts = rule["rule"]["expr"].as_array()?.iter();
            parts.find_map(|part| part["counter"]["packets"].as_u64())
        };
        Ok(Uplink {
            packets: count("all").context("a counter")?,
            marked: count("marked").context("a counter")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_address_stands_for_two_names() {
        let mut addresses = Vec::new();
        for restart in RESTARTS {
            let [_, slice] = restart.objects().expect("addresses of the network");
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
