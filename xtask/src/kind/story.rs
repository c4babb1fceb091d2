//! The story in the cluster: the scenes of the lab, and what only a cluster has.

use std::{
    fs,
    net::IpAddr,
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::Stdio,
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
use serde_json::Value;

use super::{
    access::{Access, items, shown},
    deployment::{Deployment, ROLLOUT},
    dns::Dns,
};
use crate::interrupt;

const ROLLOUT_LIMIT: Duration = Duration::from_secs(900);
/// For ovn-kubernetes to follow a change of an EgressFirewall.
const FOLLOW_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_secs(1);
const DAEMON_SET: &str = "daemonset/dnsflow";
const NAMESPACES: [&str; 2] = ["dnsflow-story", "dnsflow-stranger"];
/// Rules around the one that counts: it moves back and forth, and so does its ACL's priority.
const EDITS: &[&str] = &["before.yaml", "after.yaml", "before.yaml", "after.yaml"];
const SITE: &str = "site.dnsflow-story.svc.cluster.local";

/// What a pod has learned with a wildcard, and nothing before.
const WITH_WILDCARD: Scene = Scene {
    actor: Actor::Neighbour,
    goal: Goal::Subdomain,
    reached: true,
    shows: "a wildcard allows a sub-domain",
};

/// One step: runs, and returns what was seen.
type Play<'a> = fn(&Story<'a>) -> Result<Vec<String>>;

/// The addresses of the web servers.
#[derive(Clone, Debug)]
pub(super) struct Servers {
    /// Behind the name that the firewall allows.
    pub(super) www: String,
    /// Behind a name that no rule mentions.
    pub(super) rest: String,
}

/// What a cluster has for the story.
#[derive(Debug)]
pub(super) struct Setting<'a> {
    pub(super) access: &'a Access,
    pub(super) deployment: &'a Deployment,
    pub(super) dns: &'a Dns,
    pub(super) servers: &'a Servers,
    /// The image of the pods, which has curl and a shell.
    pub(super) pod_image: &'a str,
    /// Where the pods run; one without a DNS server, if nothing is said.
    pub(super) node: Option<&'a str>,
    /// Whether ovn-kubernetes takes a wildcard.
    pub(super) wildcard: bool,
    /// Between two changes of the rules, and before the first.
    pub(super) edit_pause: Duration,
}

impl Setting<'_> {
    /// A file of tests/kind, filled in.
    fn manifest(&self, name: &str, node: &str) -> Result<String> {
        let path: PathBuf = workspace()?.join("tests/kind").join(name);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        // Addresses of a rule that nobody meets: for documentation (RFC 5737), and those that routers
        // discard (RFC 6666). A web server of a test may have one of 2001:db8::/32.
        let (family, any, other) = match self.servers.www.parse()? {
            IpAddr::V4(_) => ("IPv4", "0.0.0.0/0", "192.0.2.0/24"),
            IpAddr::V6(_) => ("IPv6", "::/0", "100::/64"),
        };
        Ok(text
            .replace("WWW_ADDRESS", &format!("{:?}", self.servers.www))
            .replace("REST_ADDRESS", &format!("{:?}", self.servers.rest))
            .replace("ADDRESS_FAMILY", family)
            .replace("ANY_ADDRESS", any)
            .replace("OTHER_ADDRESSES", other)
            .replace("POD_IMAGE", self.pod_image)
            .replace("NODE", node))
    }
}

/// The story under way.
pub(super) struct Story<'a> {
    setting: &'a Setting<'a>,
    /// The node of the pods.
    node: String,
    /// The cluster's DNS as it was before dnsflow.
    dns_before: Value,
}

impl Stage for Story<'_> {
    fn fetch(&self, actor: Actor, goal: Goal, limit: Duration) -> Result<Fetch> {
        let (namespace, pod) = match actor {
            Actor::Pod => ("dnsflow-story", "pod"),
            Actor::Neighbour => ("dnsflow-story", "neighbour"),
            Actor::Stranger => ("dnsflow-stranger", "stranger"),
        };
        let servers = self.setting.servers;
        let (host, server) = match goal {
            Goal::Name => (SITE.to_owned(), &servers.www),
            Goal::Subdomain => (format!("www.{SITE}"), &servers.www),
            Goal::SubdomainAddress => (servers.www.clone(), &servers.www),
            Goal::NeverResolved => (servers.rest.clone(), &servers.rest),
            Goal::NameWithoutRule => {
                let name = "www.rest.dnsflow-story.svc.cluster.local";
                (name.to_owned(), &servers.rest)
            }
        };
        let seconds = limit.as_secs().to_string();
        let mut exec = self
            .setting
            .access
            .kubectl(&["--namespace", namespace, "exec", pod]);
        exec.args(["--", "curl", "--silent", "--show-error"])
            .args(["--output", "/dev/null", "--write-out", "%{remote_ip}"])
            .args(["--max-time", &seconds, &url(&host)]);
        let start = Instant::now();
        let output = exec.output()?;
        let took = start.elapsed();
        interrupt::check()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let result = if output.status.success() {
            let reached = text(&output.stdout);
            ensure!(
                reached == *server,
                "{host} leads to {reached}, not to {server}"
            );
            Ok(reached)
        } else {
            Err(text(&output.stderr))
        };
        Ok(Fetch { result, took })
    }
}

/// The page of a host, which may be an IPv6 address.
fn url(host: &str) -> String {
    match host.parse() {
        Ok(IpAddr::V6(address)) => format!("http://[{address}]/"),
        Ok(IpAddr::V4(_)) | Err(_) => format!("http://{host}/"),
    }
}

impl<'a> Story<'a> {
    /// Puts everything but dnsflow into the cluster.
    pub(super) fn begin(setting: &'a Setting<'a>) -> Result<Self> {
        let Setting { access, dns, .. } = *setting;
        let node = match setting.node {
            Some(node) => node.to_owned(),
            None => dns.node_without_it(access)?,
        };
        println!("   the pods run on {node}");
        let dns_before = dns.state(access)?;
        access.apply(&setting.manifest("story.yaml", &node)?)?;
        for namespace in NAMESPACES {
            let wait = ["wait", "--for=condition=Ready", "pod", "--all", ROLLOUT];
            shown(access.kubectl(&["--namespace", namespace]).args(wait))?;
        }
        Ok(Self {
            setting,
            node,
            dns_before,
        })
    }

    /// An error if there is anything that the story would take away in the end.
    pub(super) fn ensure_absent(access: &Access) -> Result<()> {
        for namespace in NAMESPACES {
            let there = access.has(&["namespace", namespace])?;
            ensure!(!there, "the namespace {namespace} is there already");
        }
        Ok(())
    }

    /// Removes what [`Self::begin`] made, also after a signal.
    pub(super) fn remove(access: &Access) -> Result<()> {
        let mut delete = access.kubectl(&["delete", "namespace", "--ignore-not-found"]);
        delete
            .args(NAMESPACES)
            .process_group(0)
            .stdin(Stdio::null());
        ensure!(delete.status()?.success(), "left to be done: {delete:?}");
        Ok(())
    }

    /// The steps, in their order.
    pub(super) fn steps(&self) -> Vec<(&'static str, Play<'a>)> {
        let mut steps: Vec<(&str, Play<'a>)> = vec![
            ("without dnsflow", Self::without_dnsflow),
            ("could it work here?", Self::preflight),
            ("dnsflow is deployed", Self::deploy),
            ("with dnsflow", Self::with_dnsflow),
            ("what the agents say of their nodes", Self::check),
            ("rules are moved under traffic", Self::edit),
            ("an agent is restarted", Self::restart),
            ("a rolling update", Self::update),
        ];
        if self.setting.wildcard {
            steps.push(("a wildcard", Self::wildcard));
        }
        steps.push(("the cluster's DNS is as it was", Self::dns_untouched));
        steps.push(("dnsflow is taken away", Self::clean_up));
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

    fn preflight(&self) -> Result<Vec<String>> {
        let printed = self.setting.deployment.preflight()?;
        Ok(printed.lines().map(str::to_owned).collect())
    }

    fn deploy(&self) -> Result<Vec<String>> {
        self.setting.deployment.roll_out()?;
        Ok(Vec::new())
    }

    fn with_dnsflow(&self) -> Result<Vec<String>> {
        self.scenes(WITH_DNSFLOW)
    }

    /// `dnsflow check` in each agent's container, with the agent's own options.
    fn check(&self) -> Result<Vec<String>> {
        let access = self.setting.access;
        // The Pod of `helm test` has ended.
        let running = ["--field-selector", "status.phase=Running"];
        let pods = ["--namespace", "dnsflow", "get", "pods"];
        let pods = access.json(&[&pods[..], &running].concat())?;
        let mut seen = Vec::new();
        for pod in items(&pods) {
            let name = pod["metadata"]["name"].as_str().context("a name")?;
            let node = pod["spec"]["nodeName"].as_str().context("a node")?;
            let mut exec = access.kubectl(&["--namespace", "dnsflow", "exec", name, "--"]);
            let said = run(exec.args(["dnsflow", "check", "--output", "json"]))?;
            let said: Value = serde_json::from_str(&said).context("what check says")?;
            let findings = said["findings"].as_array().context("findings")?;
            let ok = |finding: &&Value| finding["status"] == "ok";
            let count = findings.iter().filter(ok).count();
            seen.push(format!("{node}: {count} of {} ok", findings.len()));
            for finding in findings.iter().filter(|finding| !ok(finding)) {
                seen.push(format!("{node}: {finding}"));
            }
            ensure!(
                said["status"] == "ok",
                "not everything is as it should be: {seen:#?}"
            );
        }
        Ok(seen)
    }

    /// A pod keeps coming back to an address that it was told, while the rule that opens it moves.
    fn edit(&self) -> Result<Vec<String>> {
        let access = self.setting.access;
        let pauses = u32::try_from(EDITS.len())? + 1;
        let seconds = (self.setting.edit_pause * pauses).as_secs();
        // The pod asks first: on a busy machine, what it was told by now may have run out.
        let script = format!(
            "curl --silent --output /dev/null --max-time 5 {}; end=$(($(date +%s) + {seconds})); \
             while [ $(date +%s) -lt $end ]; do curl --silent --output /dev/null --max-time 5 \
             --write-out '%{{http_code}} %{{time_total}}\\n' {}; sleep 0.1; done; true",
            url(SITE),
            url(&self.setting.servers.www)
        );
        let mut traffic = access.kubectl(&["--namespace", "dnsflow-story", "exec", "pod", "--"]);
        traffic
            .args(["sh", "-c", &script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let traffic = interrupt::spawn(&mut traffic)?;
        for edit in EDITS {
            sleep(self.setting.edit_pause);
            access.apply(&self.setting.manifest(edit, &self.node)?)?;
        }
        let output = traffic.wait_with_output()?;
        interrupt::check()?;
        ensure!(
            output.status.success(),
            "the pod's requests: {}",
            output.status
        );
        let lines = String::from_utf8(output.stdout)?;
        let mut slowest = 0.0_f64;
        let mut attempts = 0;
        for line in lines.lines() {
            let (code, took) = line.split_once(' ').context("a code and a time")?;
            attempts += 1;
            ensure!(
                code != "000",
                "attempt {attempts} of the pod's failed: {lines}"
            );
            slowest = slowest.max(took.parse()?);
        }
        ensure!(attempts > 0, "the pod made no attempt");
        let mut seen = vec![format!(
            "{attempts} attempts during {} changes, all with success, the slowest in {slowest} s",
            EDITS.len()
        )];
        seen.extend(self.scenes(&WITH_DNSFLOW[..1])?);
        Ok(seen)
    }

    /// The agent of the pods' node ends, and another one starts.
    fn restart(&self) -> Result<Vec<String>> {
        let node = format!("spec.nodeName={}", self.node);
        let mut delete = self
            .setting
            .access
            .kubectl(&["--namespace", "dnsflow", "delete", "pod"]);
        delete
            .args(["--selector", "app.kubernetes.io/name=dnsflow"])
            .args(["--field-selector", &node]);
        shown(&mut delete)?;
        let mut seen = self.scenes(STILL_OPEN)?;
        self.setting.deployment.rolled_out()?;
        seen.extend(self.scenes(STILL_OPEN)?);
        seen.extend(self.scenes(&WITH_DNSFLOW[..1])?);
        Ok(seen)
    }

    /// Replaces every agent, one after the other. Open addresses stay open at every moment.
    fn update(&self) -> Result<Vec<String>> {
        let access = self.setting.access;
        let restart = ["--namespace", "dnsflow", "rollout", "restart", DAEMON_SET];
        shown(&mut access.kubectl(&restart))?;
        let start = Instant::now();
        let mut attempts = 0;
        loop {
            self.scenes(STILL_OPEN)?;
            attempts += STILL_OPEN.len();
            // Without waiting, it says how far it is and succeeds all the same.
            let status = ["--namespace", "dnsflow", "rollout", "status", DAEMON_SET];
            let status = run(access.kubectl(&status).arg("--watch=false"))?;
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
        let manifest = self.setting.manifest("wildcard.yaml", &self.node)?;
        self.setting.access.apply(&manifest)?;
        Ok(vec![self.eventually(&WITH_WILDCARD)?])
    }

    fn dns_untouched(&self) -> Result<Vec<String>> {
        let now = self.setting.dns.state(self.setting.access)?;
        ensure!(
            now == self.dns_before,
            "the cluster's DNS was {}, and is {now}",
            self.dns_before
        );
        Ok(Vec::new())
    }

    /// The agents end, and with them everything that they opened, at once.
    fn clean_up(&self) -> Result<Vec<String>> {
        let printed = self.setting.deployment.uninstall()?;
        let mut seen: Vec<String> = printed.lines().map(str::to_owned).collect();
        seen.extend(self.scenes(WITHOUT_DNSFLOW)?);
        Ok(seen)
    }
}
