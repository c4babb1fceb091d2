//! The story in the cluster: the scenes of the lab, and what only a cluster has.

use std::{
    collections::BTreeSet,
    fs,
    path::PathBuf,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::{
    pod::Fetch,
    process::run,
    scenes::{Actor, Goal, STILL_OPEN, Scene, Stage, WITH_DNSFLOW, WITHOUT_DNSFLOW, play},
    support::workspace,
};
use serde_json::{Value, json};

use super::cluster::{Cluster, Servers, shown};
use crate::interrupt;

/// For pods to start, and for a DaemonSet to be rolled out.
const ROLLOUT: &str = "--timeout=300s";
const ROLLOUT_LIMIT: Duration = Duration::from_secs(300);
/// For ovn-kubernetes to follow a change of an EgressFirewall.
const FOLLOW_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_secs(1);
const DAEMON_SET: &str = "daemonset/dnsflow";
const SITE: &str = "site.dnsflow-story.svc.cluster.local";

/// What a pod has learnt with a wildcard, and nothing before.
const WITH_WILDCARD: Scene = Scene {
    actor: Actor::Neighbour,
    goal: Goal::Subdomain,
    reached: true,
    shows: "a wildcard allows a sub-domain",
};

/// What is done in one step, and what was seen.
type Play<'a> = fn(&Story<'a>) -> Result<Vec<String>>;

/// The story under way.
pub(super) struct Story<'a> {
    cluster: &'a Cluster,
    servers: Servers,
    /// The node of the pods.
    node: String,
    /// CoreDNS as it was before dnsflow.
    dns_before: Value,
}

impl Stage for Story<'_> {
    fn fetch(&self, actor: Actor, goal: Goal, limit: Duration) -> Result<Fetch> {
        let (namespace, pod) = match actor {
            Actor::Pod => ("dnsflow-story", "pod"),
            Actor::Neighbour => ("dnsflow-story", "neighbour"),
            Actor::Stranger => ("dnsflow-stranger", "stranger"),
        };
        let host = match goal {
            Goal::Name => SITE.to_owned(),
            Goal::Subdomain => format!("www.{SITE}"),
            Goal::SubdomainAddress => self.servers.www.clone(),
            Goal::NeverResolved => self.servers.rest.clone(),
            Goal::NameWithoutRule => "www.rest.dnsflow-story.svc.cluster.local".to_owned(),
        };
        let seconds = limit.as_secs().to_string();
        let mut exec = self
            .cluster
            .kubectl(&["--namespace", namespace, "exec", pod]);
        exec.args(["--", "curl", "--silent", "--show-error", "--max-time"])
            .args([&seconds, &format!("http://{host}/")]);
        let start = Instant::now();
        let output = exec.output()?;
        let took = start.elapsed();
        interrupt::check()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let result = if output.status.success() {
            let page = text(&output.stdout);
            if matches!(goal, Goal::Name | Goal::Subdomain | Goal::SubdomainAddress) {
                ensure!(page == "www", "{host} is not the web server: {page}");
            }
            Ok(page)
        } else {
            Err(text(&output.stderr))
        };
        Ok(Fetch { result, took })
    }
}

impl<'a> Story<'a> {
    /// Puts everything but dnsflow into the cluster.
    pub(super) fn begin(cluster: &'a Cluster, servers: &Servers) -> Result<Self> {
        let node = node_without_dns(cluster)?;
        println!("   the pods run on {node}, where no CoreDNS is");
        let dns_before = dns_state(cluster)?;
        let manifests = manifest("story.yaml")?
            .replace("WWW_ADDRESS", &servers.www)
            .replace("REST_ADDRESS", &servers.rest)
            .replace("NODE", &node);
        cluster.apply(&manifests)?;
        for namespace in ["dnsflow-story", "dnsflow-stranger"] {
            let wait = ["wait", "--for=condition=Ready", "pod", "--all", ROLLOUT];
            shown(cluster.kubectl(&["--namespace", namespace]).args(wait))?;
        }
        Ok(Self {
            cluster,
            servers: servers.clone(),
            node,
            dns_before,
        })
    }

    /// What is shown, in this order.
    pub(super) fn steps(&self) -> Vec<(&'static str, Play<'a>)> {
        let mut steps: Vec<(&str, Play<'a>)> = vec![
            ("without dnsflow", Self::without_dnsflow),
            ("dnsflow is deployed", Self::deploy),
            ("with dnsflow", Self::with_dnsflow),
            ("an agent is restarted", Self::restart),
            ("a rolling update", Self::update),
        ];
        if self.cluster.resolver {
            steps.push(("a wildcard", Self::wildcard));
        }
        steps.push(("CoreDNS is as it was", Self::dns_untouched));
        steps
    }

    fn scenes(&self, scenes: &[Scene]) -> Result<Vec<String>> {
        scenes.iter().map(|scene| play(self, scene)).collect()
    }

    /// Plays until it is as the scene says, at most for [`FOLLOW_LIMIT`].
    fn eventually(&self, scene: &Scene) -> Result<String> {
        let start = Instant::now();
        loop {
            match play(self, scene) {
                Err(_) if start.elapsed() < FOLLOW_LIMIT => {
                    interrupt::check()?;
                    sleep(POLL);
                }
                played => return played,
            }
        }
    }

    fn without_dnsflow(&self) -> Result<Vec<String>> {
        // ovn-kubernetes may be at it still.
        let scenes = WITHOUT_DNSFLOW.iter();
        scenes.map(|scene| self.eventually(scene)).collect()
    }

    fn deploy(&self) -> Result<Vec<String>> {
        let overlay = workspace()?.join("deploy/overlays/kind");
        let mut apply = self.cluster.kubectl(&["apply", "--kustomize"]);
        shown(apply.arg(overlay))?;
        self.rolled_out()?;
        Ok(Vec::new())
    }

    /// Waits until every agent is ready.
    fn rolled_out(&self) -> Result<()> {
        let status = ["--namespace", "dnsflow", "rollout", "status", DAEMON_SET];
        shown(self.cluster.kubectl(&status).arg(ROLLOUT))
    }

    fn with_dnsflow(&self) -> Result<Vec<String>> {
        self.scenes(WITH_DNSFLOW)
    }

    /// The agent of the pods' node ends, and another one starts.
    fn restart(&self) -> Result<Vec<String>> {
        let node = format!("spec.nodeName={}", self.node);
        let mut delete = self
            .cluster
            .kubectl(&["--namespace", "dnsflow", "delete", "pod"]);
        delete
            .args(["--selector", "app.kubernetes.io/name=dnsflow"])
            .args(["--field-selector", &node]);
        shown(&mut delete)?;
        let mut seen = self.scenes(STILL_OPEN)?;
        self.rolled_out()?;
        seen.extend(self.scenes(STILL_OPEN)?);
        seen.extend(self.scenes(&WITH_DNSFLOW[..1])?);
        Ok(seen)
    }

    /// Every agent is replaced, one after the other; at no moment is closed what was open.
    fn update(&self) -> Result<Vec<String>> {
        let restart = ["--namespace", "dnsflow", "rollout", "restart", DAEMON_SET];
        shown(&mut self.cluster.kubectl(&restart))?;
        let start = Instant::now();
        let mut attempts = 0;
        loop {
            self.scenes(STILL_OPEN)?;
            attempts += STILL_OPEN.len();
            // Without waiting, it says how far it is and succeeds all the same.
            let status = ["--namespace", "dnsflow", "rollout", "status", DAEMON_SET];
            let status = run(self.cluster.kubectl(&status).arg("--watch=false"))?;
            if status.contains("successfully rolled out") {
                break;
            }
            ensure!(start.elapsed() < ROLLOUT_LIMIT, "not over yet: {status}");
            interrupt::check()?;
            sleep(POLL);
        }
        let mut seen = vec![format!(
            "{attempts} attempts while it went on, all with success"
        )];
        seen.extend(self.scenes(&WITH_DNSFLOW[..1])?);
        Ok(seen)
    }

    fn wildcard(&self) -> Result<Vec<String>> {
        self.cluster.apply(&manifest("wildcard.yaml")?)?;
        Ok(vec![self.eventually(&WITH_WILDCARD)?])
    }

    fn dns_untouched(&self) -> Result<Vec<String>> {
        let now = dns_state(self.cluster)?;
        ensure!(
            now == self.dns_before,
            "CoreDNS was {}, and is {now}",
            self.dns_before
        );
        Ok(Vec::new())
    }
}

/// A file of tests/kind.
fn manifest(name: &str) -> Result<String> {
    let path: PathBuf = workspace()?.join("tests/kind").join(name);
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// What kubectl says in JSON.
fn json_of(cluster: &Cluster, arguments: &[&str]) -> Result<Value> {
    let text = run(cluster.kubectl(arguments).args(["--output", "json"]))?;
    serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list["items"].as_array().into_iter().flatten()
}

const DNS_PODS: &[&str] = &[
    "--namespace",
    "kube-system",
    "get",
    "pods",
    "--selector",
    "k8s-app=kube-dns",
];

/// A node that no CoreDNS runs on.
fn node_without_dns(cluster: &Cluster) -> Result<String> {
    let pods = json_of(cluster, DNS_PODS)?;
    let with_dns: BTreeSet<&str> = items(&pods)
        .filter_map(|pod| pod["spec"]["nodeName"].as_str())
        .collect();
    ensure!(!with_dns.is_empty(), "there is no CoreDNS: {pods}");
    let nodes = json_of(cluster, &["get", "nodes"])?;
    let mut names = items(&nodes).filter_map(|node| node["metadata"]["name"].as_str());
    let free = names.find(|name| !with_dns.contains(name));
    let free = free.with_context(|| format!("CoreDNS runs on every node: {with_dns:?}"))?;
    Ok(free.to_owned())
}

/// What of CoreDNS only people change: its Deployment, configuration and Service, and its pods.
fn dns_state(cluster: &Cluster) -> Result<Value> {
    let objects = json_of(
        cluster,
        &[
            "--namespace",
            "kube-system",
            "get",
            "deployment/coredns",
            "configmap/coredns",
            "service/kube-dns",
        ],
    )?;
    let wanted = items(&objects).map(|object| json!([object["spec"], object["data"]]));
    let pods = json_of(cluster, DNS_PODS)?;
    let running = items(&pods).map(|pod| {
        let restarts: Vec<&Value> = pod["status"]["containerStatuses"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|container| &container["restartCount"])
            .collect();
        json!([pod["metadata"]["uid"], restarts])
    });
    Ok(json!({
        "objects": wanted.collect::<Vec<_>>(),
        "pods": running.collect::<Vec<_>>(),
    }))
}
