//! What one node holds and asks for where the cluster has many EgressFirewalls, nearly all of them
//! of namespaces without a pod here. The numbers in docs/sizing.md are those that this prints
//! with `--nocapture`.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::unix::net::UnixStream,
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
    cgroup::Group,
    firewall::{Network, RuleSpec, acl_match, namespace_port_group},
    lab,
    lab::Lab,
    process::{PATIENT, wait_until},
    support::{not_run, this_test},
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

/// The largest EgressFirewalls that an API server takes: one rule with so many ports is 1.39 MB, of 1.5 MiB that etcd
/// takes.
const LARGE_PORTS: u32 = 45_000;
/// How many of them there are, beside others.
const LARGE: usize = 100;
const BESIDE_LARGE: usize = 20;
/// Half of the container's limit in deploy/base. BPF maps count there, too.
const MEMORY_MAX: u64 = 256 << 20;

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

/// What an API server has.
#[derive(Clone, Copy, Debug)]
struct Firewalls {
    /// The first ones are as large as can be. All are edited once, with the last one, as soon as somebody watches.
    large: usize,
    all: usize,
}

impl Firewalls {
    /// So many usual ones, in which nothing changes.
    fn usual(all: usize) -> Self {
        Self { large: 0, all }
    }

    /// One of them, as text: of a large one, the tree of its values would take 25 times as much.
    fn text(self, number: usize) -> String {
        if number >= self.large {
            return firewall(number).to_string();
        }
        let ports =
            (1..=LARGE_PORTS).map(|port| format!("{{\"port\":{port},\"protocol\":\"TCP\"}}"));
        let ports: Vec<_> = ports.collect();
        let mut object = firewall(number);
        object["spec"]["egress"] =
            json!([{"type": "Deny", "to": {"dnsName": "large.example"}, "ports": ["PORTS"]}]);
        object.to_string().replace("\"PORTS\"", &ports.join(","))
    }

    /// The edits, of a large one and of the last one.
    fn edits(self) -> String {
        let event = |object: String| format!("{{\"type\":\"MODIFIED\",\"object\":{object}}}\n");
        let last = self.text(self.all - 1);
        event(self.text(0)) + &event(last.replace("service-0.", "edited."))
    }
}

/// An API server with EgressFirewalls.
struct Server {
    requests: Arc<AtomicUsize>,
    bytes: Arc<AtomicUsize>,
}

impl Server {
    /// Serves at this address of the node.
    fn start(lab: &Lab, address: SocketAddr, firewalls: Firewalls) -> Result<Self> {
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

fn serve(stream: TcpStream, firewalls: Firewalls, requests: &AtomicUsize, bytes: &AtomicUsize) {
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
fn answer(mut stream: &TcpStream, target: &str, firewalls: Firewalls) -> Result<usize> {
    let query = |name: &str| {
        let (_, query) = target.split_once('?')?;
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.find_map(|(key, value)| (key == name).then_some(value))
    };
    if query("watch") == Some("true") {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\
                    transfer-encoding: chunked\r\n\r\n";
        stream.write_all(head.as_bytes())?;
        if target.contains("/egressfirewalls") && firewalls.large > 0 {
            let edits = firewalls.edits();
            let chunk = format!("{:x}\r\n{edits}\r\n", edits.len());
            stream.write_all(chunk.as_bytes())?;
        }
        // Until the client has had enough.
        let _ended = stream.read(&mut [0])?;
        return Ok(0);
    }
    let mut items = 0..0;
    let mut metadata = json!({"resourceVersion": "9"});
    if target.contains("/egressfirewalls") {
        let first = query("continue").map_or(Ok(0), str::parse)?;
        let limit = query("limit").map_or(Ok(firewalls.all), str::parse)?;
        items = first..usize::min(first + limit, firewalls.all);
        if items.end < firewalls.all {
            metadata["continue"] = json!(items.end.to_string());
        }
    }
    // In the order of the API server, which sorts the keys of a custom resource.
    let before = "{\"apiVersion\":\"v1\",\"items\":[";
    let behind = format!("],\"kind\":\"List\",\"metadata\":{metadata}}}");
    let first = items.start;
    let items = items.map(|number| match number == first {
        true => firewalls.text(number),
        false => format!(",{}", firewalls.text(number)),
    });
    let sizes = items.clone().map(|item| item.len());
    let length = before.len() + sizes.sum::<usize>() + behind.len();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{before}"
    );
    stream.write_all(head.as_bytes())?;
    for item in items {
        stream.write_all(item.as_bytes())?;
    }
    stream.write_all(behind.as_bytes())?;
    Ok(length)
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
        Self::start_within(lab, api, |command| command)
    }

    /// The same, by the command that `within` makes of its own.
    fn start_within(
        lab: &Lab,
        api: SocketAddr,
        within: impl FnOnce(Command) -> Command,
    ) -> Result<Self> {
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
            .arg("--dns-service=kube-system/k8s-app=kube-dns");
        let mut command = within(command);
        command
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

    /// The memory of its own that is in use.
    fn memory_bytes(&self) -> Result<usize> {
        self.status_bytes("RssAnon")
    }

    /// A field of proc_pid_status(5).
    fn status_bytes(&self, field: &str) -> Result<usize> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        let kilobytes = line.context("the field")?.trim().trim_end_matches(" kB");
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
    let few = Server::start(&lab, address(6443), Firewalls::usual(1)).expect("it listens");
    let measure = |port, allowed| measure(&lab, address(port), allowed);
    let (alone, quiet) = measure(6443, usize::MAX).expect("it is ready");
    let allowed = alone + BYTES_PER_RULE_MAX * FIREWALLS * RULES;
    let asked = few.requests.load(Relaxed);

    let many = Server::start(&lab, address(6444), Firewalls::usual(FIREWALLS)).expect("it listens");
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
    let _server = Server::start(&lab, address, Firewalls::usual(1)).expect("it listens");
    let (alone, _) = measure(&lab, address, usize::MAX).expect("it is ready");
    let ports = usize::from(SERVICES * PORTS);
    let allowed = alone + BYTES_PER_PORT_MAX * ports;
    write_load_balancers(&lab).expect("the rows are written");
    let (with_services, _) = measure(&lab, address, allowed).expect("it is in proportion");
    let per_port = with_services.saturating_sub(alone) / ports;
    println!("{per_port} bytes for each port of {SERVICES} Services");
}

/// What the agent has of the EgressFirewall of a namespace.
fn known(lab: &Lab, namespace: &str) -> Result<String> {
    let mut socket = UnixStream::connect(lab.control_socket())?;
    let request = format!("GET /v1/firewall?namespace={namespace} HTTP/1.0\r\nhost: agent\r\n\r\n");
    socket.write_all(request.as_bytes())?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn the_largest_firewalls_of_many_namespaces_take_no_agent_away() {
    let lab = lab!("scale-large", agent);
    let group = match Group::make(lab.name()) {
        Ok(group) => group,
        Err(why) => return not_run(&this_test(), why),
    };
    group.set_limit(MEMORY_MAX).expect("it is limited");
    // Fewer, for the figures of docs/sizing.md.
    let large = std::env::var("DNSFLOW_LARGE_FIREWALLS")
        .map_or(LARGE, |text| text.parse().expect("a number"));
    let all = large + BESIDE_LARGE;
    let address = SocketAddr::from(([127, 0, 0, 1], 6443));
    let _server = Server::start(&lab, address, Firewalls { large, all }).expect("it listens");
    let agent = Running::start_within(&lab, address, |command| group.run(command));
    let mut agent = agent.expect("it starts");
    let log = lab.base().join("log/dnsflow.log");
    let mut followed = |number: usize, name: &str| {
        wait_until("the agent to follow an EgressFirewall", TAKEN_UP, || {
            if let Some(status) = agent.0.try_wait()? {
                anyhow::bail!("the agent has ended: {status}");
            }
            Ok(known(&lab, &namespace(number)).is_ok_and(|known| known.contains(name)))
        })
        .with_context(|| fs::read_to_string(&log).unwrap_or_default())
    };
    let first = format!("service-1.example-{large}.com");
    followed(large, &first).expect("a usual one is followed");
    let edited = format!("edited.example-{}.com", all - 1);
    followed(all - 1, &edited).expect("its edit is followed");
    if large > 0 {
        followed(0, "large.example").expect("a large one still denies");
        let (status, _) = lab.ask_agent(&["status"]).expect("it answers");
        let said = format!("it has {LARGE_PORTS} ports");
        assert!(status.contains(&said), "{status}");
    }
    let mib = |bytes: u64| bytes >> 20;
    println!(
        "{large} EgressFirewalls of {} bytes: {} MiB resident at most, {:?} MiB in the group",
        Firewalls { large, all }.text(0).len(),
        mib(agent.status_bytes("VmHWM").expect("a number") as u64),
        group.peak_bytes().map(mib),
    );
}
