//! What one node holds and asks for where the cluster has many EgressFirewalls, nearly all of them
//! of namespaces without a pod here. The numbers in docs/sizing.md are those that this prints
//! with `--nocapture`.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use dnsflow_tests::{
    agent,
    firewall::{Network, RuleSpec, acl_match, namespace_port_group},
    lab,
    lab::Lab,
    process::{PATIENT, wait_until},
};
use serde_json::{Value, json};

const FIREWALLS: usize = 5_000;
const RULES: usize = 10;
/// Namespaces whose rows are written in one transaction.
const BATCH: usize = 250;
/// Until an agent is ready that has everything to read: a debug build takes ten seconds alone, and this is for those that
/// have a tenth of a processor, six times over.
const TAKEN_UP: Duration = Duration::from_secs(600);
/// Memory that has not fallen for so long is what later measurements are compared with. If it would have fallen further,
/// they are allowed more.
const SETTLED: Duration = Duration::from_secs(2);
/// Of each rule in a namespace without a pod here, the agent keeps the resource's rule twice (the
/// watch, to tell what changes; the engine), the ACL, and what is missing.
const BYTES_PER_RULE_MAX: usize = 1_600;

/// Services of the cluster, with so many ports each and so many pods behind each port.
const SERVICES: u16 = 1_000;
const PORTS: u16 = 50;
const BACKENDS: u16 = 8;
/// Of each port of a Service, the agent keeps the address and port that pods connect to.
const BYTES_PER_PORT_MAX: usize = 100;

fn namespace(number: usize) -> String {
    format!("namespace-{number:05}")
}

fn rules(number: usize) -> Vec<RuleSpec> {
    let name = |rule| format!("service-{rule}.example-{number}.com");
    let rule = |rule| RuleSpec::allow_name(&name(rule)).ports(&[("tcp", 443)]);
    (0..RULES).map(rule).collect()
}

/// The EgressFirewall, as a cluster of some nodes stores it.
fn firewall(number: usize) -> Value {
    let rules = (0..RULES).map(|rule| {
        json!({"type": "Allow", "to": {"dnsName": format!("service-{rule}.example-{number}.com")},
            "ports": [{"port": 443, "protocol": "TCP"}]})
    });
    json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
        "metadata": {
            "name": "default", "namespace": namespace(number), "resourceVersion": "5",
            "uid": format!("0c8c3b1e-0000-4000-8000-{number:012}"),
        },
        "spec": {"egress": rules.collect::<Vec<_>>()},
        "status": {"status": "EgressFirewall Rules applied",
            "messages": ["node-1: EgressFirewall Rules applied"]},
    })
}

/// An API server with so many EgressFirewalls, in which nothing changes.
struct Server {
    requests: Arc<AtomicUsize>,
    bytes: Arc<AtomicUsize>,
}

impl Server {
    /// Serves at this address of the node.
    fn start(lab: &Lab, address: SocketAddr, firewalls: usize) -> Result<Self> {
        let listener = lab.node().listen(address)?;
        let server = Self {
            requests: Arc::default(),
            bytes: Arc::default(),
        };
        let (requests, bytes) = (Arc::clone(&server.requests), Arc::clone(&server.bytes));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (requests, bytes) = (Arc::clone(&requests), Arc::clone(&bytes));
                thread::spawn(move || serve(stream, firewalls, &requests, &bytes));
            }
        });
        Ok(server)
    }
}

fn serve(stream: TcpStream, firewalls: usize, requests: &AtomicUsize, bytes: &AtomicUsize) {
    let mut lines = BufReader::new(&stream);
    let mut target = String::new();
    loop {
        let mut line = String::new();
        match lines.read_line(&mut line) {
            Ok(length) if length > 0 => {}
            _ => return,
        }
        if target.is_empty() {
            target = line.split(' ').nth(1).unwrap_or_default().to_owned();
        } else if line == "\r\n" {
            requests.fetch_add(1, Relaxed);
            match answer(&stream, &target, firewalls) {
                Ok(sent) => bytes.fetch_add(sent, Relaxed),
                Err(_) => return,
            };
            target.clear();
        }
    }
}

/// Answers, and returns how many bytes of objects that was.
fn answer(mut stream: &TcpStream, target: &str, firewalls: usize) -> Result<usize> {
    let query = |name: &str| {
        let (_, query) = target.split_once('?')?;
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.find_map(|(key, value)| (key == name).then_some(value))
    };
    if query("watch") == Some("true") {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\
                    transfer-encoding: chunked\r\n\r\n";
        stream.write_all(head.as_bytes())?;
        // Until the client has had enough.
        let _ended = stream.read(&mut [0])?;
        return Ok(0);
    }
    let mut list =
        json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "9"}});
    if target.contains("/egressfirewalls") {
        let first = query("continue").map_or(Ok(0), str::parse)?;
        let limit = query("limit").map_or(Ok(firewalls), str::parse)?;
        let next = usize::min(first + limit, firewalls);
        list["items"] = (first..next).map(firewall).collect();
        if next < firewalls {
            list["metadata"]["continue"] = json!(next.to_string());
        }
    } else {
        list["items"] = json!([]);
    }
    let body = list.to_string();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes())?;
    Ok(body.len())
}

/// The ACLs of the first so many firewalls, as a zone of ovn-kubernetes has them whether it has a
/// pod of the namespace or not. The address sets are left out: nothing here reads them.
fn write_acls(lab: &Lab, firewalls: usize) -> Result<()> {
    let mut nb = lab.nb()?;
    for first in (0..firewalls).step_by(BATCH) {
        let mut operations = Vec::new();
        for number in first..usize::min(first + BATCH, firewalls) {
            let namespace = namespace(number);
            let network = Network::default_of(&namespace);
            let mut acls = Vec::new();
            for (index, rule) in rules(number).iter().enumerate() {
                let uuid = format!("acl_{number}_{index}");
                let ids = dnsflow_tests::database::map([
                    ("k8s.ovn.org/name", namespace.as_str()),
                    ("k8s.ovn.org/owner-type", "EgressFirewall"),
                    ("rule-index", &index.to_string()),
                ]);
                operations.push(
                    json!({"op": "insert", "table": "ACL", "uuid-name": uuid, "row": {
                        "action": "allow", "direction": "to-lport", "priority": 10_000 - index,
                        "match": acl_match(&network, rule, lab.cluster()), "external_ids": ids,
                    }}),
                );
                acls.push(json!(["named-uuid", uuid]));
            }
            let group = json!({"name": namespace_port_group(&namespace), "acls": ["set", acls]});
            operations.push(json!({"op": "insert", "table": "Port_Group", "row": group}));
        }
        nb.transact(&operations)?;
    }
    Ok(())
}

/// The load balancers of Services as ovn-kubernetes writes them.
fn write_load_balancers(lab: &Lab) -> Result<()> {
    let backends: Vec<_> = (0..BACKENDS)
        .map(|number| format!("10.244.{number}.17:8080"))
        .collect();
    let backends = backends.join(",");
    let mut nb = lab.nb()?;
    for first in (0..SERVICES).step_by(BATCH) {
        let services = first..SERVICES.min(first + BATCH as u16);
        let operations: Vec<_> = services
            .map(|number| {
                let [high, low] = number.to_be_bytes();
                let vips = (1..=PORTS)
                    .map(|port| [format!("10.97.{high}.{low}:{port}"), backends.clone()]);
                let service = format!("namespace/service-{number}");
                let ids = dnsflow_tests::database::map([
                    ("k8s.ovn.org/kind", "Service"),
                    ("k8s.ovn.org/owner", &service),
                ]);
                json!({"op": "insert", "table": "Load_Balancer", "row": {
                    "name": format!("Service_{service}_TCP_cluster"), "protocol": "tcp",
                    "vips": ["map", vips.collect::<Vec<_>>()], "external_ids": ids,
                }})
            })
            .collect();
        nb.transact(&operations)?;
    }
    Ok(())
}

/// An agent that reads from the API server. Dropping it kills it.
struct Running(Child);

impl Running {
    fn start(lab: &Lab, api: SocketAddr) -> Result<Self> {
        let kubeconfig = lab.base().join("kubeconfig");
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{api}")}}],
            "users": [{"name": "c", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        });
        fs::write(&kubeconfig, text.to_string())?;
        let usual = lab.agent_command(&agent::binary()?)?;
        let arguments: Vec<_> = usual.get_args().collect();
        let manifests = arguments.iter().position(|word| *word == "--manifests");
        let manifests = manifests.context("--manifests")?;
        let mut command = Command::new(usual.get_program());
        command
            .args(&arguments[..manifests])
            .args(&arguments[manifests + 2..])
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .arg("--dns-service=kube-system/k8s-app=kube-dns")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(lab.base().join("log/dnsflow.log"))?);
        lab.node().enter(&mut command)?;
        Ok(Self(command.spawn()?))
    }

    /// The size of what the process keeps in memory of its own, once that falls no more: the agent gives what is free back
    /// to the kernel just after it is ready, which a busy machine lets it do later.
    fn settled_memory_bytes(&self, allowed: usize) -> Result<usize> {
        let mut least = usize::MAX;
        let mut fell = Instant::now();
        let settled = wait_until("the agent's memory to settle", PATIENT, || {
            let bytes = self.memory_bytes()?;
            if bytes < least {
                (least, fell) = (bytes, Instant::now());
            }
            Ok(least <= allowed && fell.elapsed() > SETTLED)
        });
        settled.with_context(|| format!("{least} bytes, {allowed} are allowed"))?;
        Ok(least)
    }

    /// Field `RssAnon` of proc_pid_status(5).
    fn memory_bytes(&self) -> Result<usize> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kilobytes = line.context("RssAnon")?.trim().trim_end_matches(" kB");
        Ok(kilobytes.parse::<usize>()? * 1024)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let ended = self.0.kill().and_then(|()| self.0.wait());
        if let Err(error) = ended {
            eprintln!("cannot end the agent: {error}");
        }
    }
}

/// Runs an agent until it is ready; its memory once that has settled below what is allowed, and the lines that it has
/// logged.
fn measure(lab: &Lab, api: SocketAddr, allowed: usize) -> Result<(usize, usize)> {
    let agent = Running::start(lab, api)?;
    let log = lab.base().join("log/dnsflow.log");
    wait_until("the agent to be ready", TAKEN_UP, || {
        Ok(fs::read_to_string(&log)?.contains("\"message\":\"ready\""))
    })
    .with_context(|| fs::read_to_string(&log).unwrap_or_default())?;
    let lines = fs::read_to_string(&log)?.lines().count();
    Ok((agent.settled_memory_bytes(allowed)?, lines))
}

#[test]
fn what_is_of_no_concern_here_costs_little() {
    let lab = lab!("scale", agent);
    let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let few = Server::start(&lab, address(6443), 1).expect("it listens");
    let measure = |port, allowed| measure(&lab, address(port), allowed);
    let (alone, quiet) = measure(6443, usize::MAX).expect("it is ready");
    let allowed = alone + BYTES_PER_RULE_MAX * FIREWALLS * RULES;
    let asked = few.requests.load(Relaxed);

    let many = Server::start(&lab, address(6444), FIREWALLS).expect("it listens");
    let (with_firewalls, _) = measure(6444, allowed).expect("it is in proportion");
    let (requests, bytes) = (many.requests.load(Relaxed), many.bytes.load(Relaxed));

    write_acls(&lab, FIREWALLS).expect("the rows are written");
    let (with_acls, lines) = measure(6444, allowed).expect("it is in proportion");
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    println!(
        "RssAnon: {:.1} MiB with 1 EgressFirewall; {:.1} MiB with {FIREWALLS} of {RULES} rules; \
         {:.1} MiB with their ACLs; {} -> {requests} requests, {bytes} bytes; {quiet} -> {lines} lines of log",
        mib(alone),
        mib(with_firewalls),
        mib(with_acls),
        asked,
    );
    assert!(lines < quiet + 20, "{lines} lines of log");
}

#[test]
fn the_services_of_the_cluster_cost_little() {
    let lab = lab!("scale-services", agent);
    let address = SocketAddr::from(([127, 0, 0, 1], 6443));
    let _server = Server::start(&lab, address, 1).expect("it listens");
    let (alone, _) = measure(&lab, address, usize::MAX).expect("it is ready");
    let ports = usize::from(SERVICES * PORTS);
    let allowed = alone + BYTES_PER_PORT_MAX * ports;
    write_load_balancers(&lab).expect("the rows are written");
    let (with_services, _) = measure(&lab, address, allowed).expect("it is in proportion");
    let per_port = with_services.saturating_sub(alone) / ports;
    println!("{per_port} bytes for each port of {SERVICES} Services");
}
