//! The OVSDB client and its edges against a real ovsdb-server with the real schemas.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead as _, BufReader, Write},
    net::IpAddr,
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use dnsflow_agent::{
    ovn_db::{OvnCommand, OvnDb, nb, sb},
    vswitch_db::{self, VswitchDb},
};
use dnsflow_core::{
    Input,
    io::input::LOGICAL_FLOW_SAMPLE_MAX,
    ovn::rows::{Changes, InterfaceUpdate, NbUpdate, Pipeline, SbUpdate, Stage, UnreadFronts},
};
use dnsflow_ovsdb::{
    Connection, Database, Event, Kind, Remotes, TableLimits, framing::PIECE_MAX_BYTES,
    session::Conditions,
};
use dnsflow_tests::{process::PATIENT, root::Root};
use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{sleep, timeout},
};

/// The unpacked packages, or `return` after saying why the test cannot run.
macro_rules! packages {
    ($test:literal) => {
        match dnsflow_tests::support::test_root($test) {
            Some(root) => root,
            None => return,
        }
    };
}

/// A program of the unpacked packages.
fn program(root: &Root, name: &str) -> Command {
    let mut command = root.command(name).expect("the packages hold it");
    command.stdin(Stdio::null());
    command
}

/// A server of one database in a directory of its own; both go with it.
struct Server {
    root: Root,
    dir: PathBuf,
    database: &'static str,
    child: Option<Child>,
}

impl Server {
    /// An empty database, not served yet.
    fn new(root: &Root, test: &str, database: &'static Database, schema: &str) -> Self {
        let name = format!("ovsdb-{}-{test}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir(&dir).expect("a directory of its own");
        let status = program(root, "ovsdb-tool")
            .arg("create")
            .arg(dir.join("db"))
            .arg(root.path().join("usr/share").join(schema))
            .status();
        assert!(status.expect("ovsdb-tool starts").success());
        Self {
            root: root.clone(),
            dir,
            database: database.name,
            child: None,
        }
    }

    fn southbound(root: &Root, test: &str) -> Self {
        Self::new(root, test, &sb::DATABASE, "ovn/ovn-sb.ovsschema")
    }

    fn northbound(root: &Root, test: &str) -> Self {
        Self::new(root, test, &nb::DATABASE, "ovn/ovn-nb.ovsschema")
    }

    fn vswitch(root: &Root, test: &str) -> Self {
        let schema = "openvswitch/vswitch.ovsschema";
        Self::new(root, test, &vswitch_db::DATABASE, schema)
    }

    fn started(mut self) -> Self {
        self.start();
        self
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("socket")
    }

    fn remotes(&self) -> Remotes {
        let remote = format!("unix:{}", self.socket().display());
        remote.parse().expect("a remote")
    }

    fn start(&mut self) {
        let child = program(&self.root, "ovsdb-server")
            .arg(self.dir.join("db"))
            .arg(format!("--remote=punix:{}", self.socket().display()))
            .arg(format!("--unixctl={}", self.dir.join("ctl").display()))
            .arg("-vconsole:off")
            .spawn();
        self.child = Some(child.expect("ovsdb-server starts"));
    }

    fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("a child of this process");
            child.wait().expect("a child of this process");
        }
    }

    /// One transaction over a connection of its own.
    fn transact(&self, operations: Value) -> Vec<Value> {
        let Value::Array(operations) = operations else {
            panic!("not an array");
        };
        let mut params = vec![json!(self.database)];
        params.extend(operations);
        let request = json!({"method": "transact", "params": params, "id": 0});
        let mut stream = (0..1000)
            .find_map(|_| {
                let stream = UnixStream::connect(self.socket()).ok();
                if stream.is_none() {
                    std::thread::sleep(Duration::from_millis(10));
                }
                stream
            })
            .expect("the server listens");
        stream
            .write_all(request.to_string().as_bytes())
            .expect("the server reads");
        let mut replies = serde_json::Deserializer::from_reader(stream).into_iter::<Value>();
        let reply = replies.next().expect("an answer").expect("JSON");
        let results = reply["result"].as_array().expect("results").clone();
        for result in &results {
            assert!(result.get("error").is_none(), "{result}");
        }
        results
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            eprintln!("{}: {error}", self.dir.display());
        }
    }
}

fn map(pairs: &[(&str, &str)]) -> Value {
    json!(["map", pairs])
}

fn uuid(results: &[Value], at: usize) -> Value {
    results[at]["uuid"].clone()
}

fn by_id(row: &Value) -> Value {
    json!([["_uuid", "==", row]])
}

/// The edge to the OVN databases, at work.
struct Ovn {
    inputs: mpsc::Receiver<Input>,
    commands: mpsc::Sender<OvnCommand>,
    task: JoinHandle<()>,
}

impl Ovn {
    fn start(nb: &Server, sb: &Server) -> Self {
        Self::at(nb.remotes(), sb.remotes())
    }

    fn at(nb: Remotes, sb: Remotes) -> Self {
        Self::run(OvnDb::new(Some(nb), Some(sb)))
    }

    fn run(edge: OvnDb) -> Self {
        let (inputs, receiver) = mpsc::channel(16);
        let (commands, orders) = mpsc::channel(16);
        Self {
            inputs: receiver,
            commands,
            task: tokio::spawn(edge.run(inputs, orders)),
        }
    }

    async fn next(&mut self) -> Input {
        let input = timeout(PATIENT, self.inputs.recv()).await;
        input.expect("something happens").expect("the edge runs")
    }

    async fn nb(&mut self) -> NbUpdate {
        loop {
            if let Input::Nb(update) = self.next().await {
                return update;
            }
        }
    }

    async fn sb(&mut self) -> SbUpdate {
        loop {
            if let Input::Sb(update) = self.next().await {
                return update;
            }
        }
    }

    async fn watch(&self, priorities: &[u16]) {
        let priorities = priorities.iter().copied().collect();
        let watch = OvnCommand::WatchLogicalFlows { priorities };
        self.commands.send(watch).await.expect("the edge runs");
    }

    /// The edge ends when nobody listens any more.
    async fn end(self) {
        drop(self.inputs);
        let ended = timeout(PATIENT, self.task).await;
        ended.expect("the edge ends").expect("without a panic");
    }
}

fn values<Row>(changes: Changes<Row>) -> Vec<Option<Row>> {
    changes.into_iter().map(|(_, row)| row).collect()
}

fn flow(priority: u16, hint: Option<&str>, datapath: &Value) -> Value {
    let ids: Vec<(&str, &str)> = hint.map(|hint| ("stage-hint", hint)).into_iter().collect();
    json!({"op": "insert", "table": "Logical_Flow", "row": {
        "logical_datapath": datapath,
        "pipeline": "egress",
        "table_id": 4,
        "priority": priority,
        "match": "ip4",
        "actions": "next;",
        "external_ids": map(&ids),
    }})
}

fn port(name: &str, key: u32, datapath: &Value) -> Value {
    json!({"op": "insert", "table": "Port_Binding", "row": {
        "logical_port": name,
        "datapath": datapath,
        "tunnel_key": key,
        "external_ids": map(&[("namespace", "ns1"), ("pod", "true")]),
    }})
}

fn datapath(server: &Server) -> Value {
    let row = json!({"tunnel_key": 3});
    let results =
        server.transact(json!([{"op": "insert", "table": "Datapath_Binding", "row": row}]));
    uuid(&results, 0)
}

#[tokio::test]
async fn the_southbound_edge_follows_the_database() {
    let root = packages!("the_southbound_edge_follows_the_database");
    let nb = Server::northbound(&root, "follow-nb").started();
    let sb = Server::southbound(&root, "follow-sb").started();
    let datapath = datapath(&sb);
    let rows = sb.transact(json!([
        port("ns1_p1", 4, &datapath),
        {"op": "insert", "table": "Port_Binding", "row": {
            "logical_port": "stor", "type": "patch", "datapath": datapath, "tunnel_key": 1,
        }},
        {"op": "insert", "table": "Port_Group", "row": {"name": "3_a5", "ports": "ns1_p1"}},
        flow(11000, Some("32cb9193"), &datapath),
        flow(11000, None, &datapath),
        flow(10999, Some("1d9667c7"), &datapath),
    ]));

    let mut edge = Ovn::start(&nb, &sb);
    let first = edge.sb().await;
    assert!(first.reset);
    assert_eq!(first.datapaths.len(), 1);
    let ports = values(first.port_bindings);
    let port_row = ports[0].clone().expect("a row");
    assert_eq!(ports.len(), 1, "a patch port is no VIF");
    assert_eq!(
        (
            &port_row.logical_port[..],
            port_row.tunnel_key,
            port_row.namespace.as_deref()
        ),
        ("ns1_p1", 4, Some("ns1"))
    );
    assert_eq!(first.port_groups.len(), 1);
    assert_eq!(first.logical_flows, [], "none was asked for");

    // The condition brings the rows that are there, and only those with a stage-hint.
    edge.watch(&[11000]).await;
    let update = edge.sb().await;
    assert!(!update.reset);
    let flows = values(update.logical_flows);
    assert_eq!(flows.len(), 1);
    assert_eq!(
        flows[0].as_ref().and_then(|flow| flow.stage_hint),
        Some(0x32cb_9193)
    );

    // One transaction, one update, over all tables; rows that read the same are not told.
    sb.transact(json!([
        port("ns1_p2", 5, &datapath),
        {"op": "mutate", "table": "Port_Group", "where": by_id(&uuid(&rows, 2)),
         "mutations": [["ports", "insert", ["set", ["ns1_p2"]]]]},
        {"op": "mutate", "table": "Port_Binding", "where": by_id(&uuid(&rows, 0)),
         "mutations": [["external_ids", "insert", map(&[("unrelated", "x")])]]},
        {"op": "update", "table": "Logical_Flow", "where": by_id(&uuid(&rows, 3)),
         "row": {"actions": "drop;"}},
        {"op": "update", "table": "Logical_Flow", "where": by_id(&uuid(&rows, 5)),
         "row": {"actions": "drop;"}},
    ]));
    let update = edge.sb().await;
    assert_eq!(update.datapaths, []);
    let ports = values(update.port_bindings);
    assert_eq!(ports.len(), 1);
    assert_eq!(
        ports[0].as_ref().map(|port| &port.logical_port[..]),
        Some("ns1_p2")
    );
    let groups = values(update.port_groups);
    let group = groups[0].as_ref().expect("a row");
    assert_eq!(group.name, "a5");
    assert_eq!(
        group.ports,
        BTreeSet::from(["ns1_p1", "ns1_p2"].map(str::to_owned))
    );
    let flows = values(update.logical_flows);
    assert_eq!(flows.len(), 1);
    assert_eq!(
        flows[0].as_ref().map(|flow| &flow.actions[..]),
        Some("drop;")
    );

    // Map differences: a changed value, a removed key, a new key.
    sb.transact(json!([
        {"op": "mutate", "table": "Port_Binding", "where": by_id(&uuid(&rows, 0)), "mutations": [
            ["external_ids", "delete", ["set", ["namespace", "pod"]]],
            ["external_ids", "insert", map(&[("namespace", "ns2")])],
        ]},
    ]));
    let ports = values(edge.sb().await.port_bindings);
    let namespace = ports[0].as_ref().and_then(|port| port.namespace.as_deref());
    assert_eq!(namespace, Some("ns2"));

    // Other conditions; the rows that leave are told, too.
    edge.watch(&[10999]).await;
    let mut flows = values(edge.sb().await.logical_flows);
    flows.sort_by_key(Option::is_some);
    assert!(
        matches!(&flows[..], [None, Some(flow)] if flow.priority == 10999),
        "{flows:?}"
    );
    edge.watch(&[]).await;
    assert_eq!(values(edge.sb().await.logical_flows), [None]);

    sb.transact(json!([
        {"op": "delete", "table": "Port_Group", "where": []},
        {"op": "delete", "table": "Port_Binding", "where": [["logical_port", "==", "ns1_p1"]]},
    ]));
    let update = edge.sb().await;
    assert_eq!(values(update.port_groups), [None]);
    assert_eq!(values(update.port_bindings), [None]);
    edge.end().await;
}

#[tokio::test]
async fn samples_are_answered_once_each_and_are_limited() {
    let root = packages!("samples_are_answered_once_each_and_are_limited");
    let nb = Server::northbound(&root, "sample-nb").started();
    let sb = Server::southbound(&root, "sample-sb").started();
    let datapath = datapath(&sb);
    let flows: Vec<Value> = (0..100).map(|_| flow(0, None, &datapath)).collect();
    sb.transact(json!(flows));
    let mut edge = Ovn::start(&nb, &sb);
    for (pipeline, expected) in [
        (Pipeline::Egress, LOGICAL_FLOW_SAMPLE_MAX),
        (Pipeline::Ingress, 0),
    ] {
        let stage = Stage::Table(pipeline, 4);
        let ask = OvnCommand::SampleLogicalFlows(stage);
        edge.commands.send(ask).await.expect("the edge runs");
        let found = loop {
            if let Input::LogicalFlowSample {
                stage: answered,
                flows,
            } = edge.next().await
            {
                assert_eq!(answered, stage);
                break flows;
            }
        };
        assert_eq!(found.len(), expected);
    }
    edge.end().await;
}

fn acl(owner: &str, index: &str) -> Value {
    json!({"op": "insert", "table": "ACL", "uuid-name": format!("acl{index}"), "row": {
        "direction": "to-lport",
        "priority": 10000,
        "match": "ip4",
        "action": "allow",
        "external_ids": map(&[
            ("k8s.ovn.org/owner-type", owner),
            ("k8s.ovn.org/name", "ns1"),
            ("rule-index", index),
        ]),
    }})
}

#[tokio::test]
async fn the_northbound_edge_reads_the_acls_of_egress_firewalls_only() {
    let root = packages!("the_northbound_edge_reads_the_acls_of_egress_firewalls_only");
    let nb = Server::northbound(&root, "acl-nb").started();
    let sb = Server::southbound(&root, "acl-sb").started();
    // ACLs without a switch or a group that holds them are removed at once.
    let rows = nb.transact(json!([
        acl("EgressFirewall", "0"),
        acl("NetworkPolicy", "1"),
        acl("EgressFirewall", "x"),
        {"op": "insert", "table": "Port_Group", "row": {"name": "a5", "acls": ["set", [
            ["named-uuid", "acl0"], ["named-uuid", "acl1"], ["named-uuid", "aclx"],
        ]]}},
    ]));
    let mut edge = Ovn::start(&nb, &sb);
    let first = edge.nb().await;
    assert!(first.reset);
    let acls = values(first.acls);
    assert_eq!(acls.len(), 1, "an unreadable rule-index leaves its row out");
    let first = acls[0].as_ref().expect("a row");
    assert_eq!((&first.namespace[..], first.rule_index), ("ns1", 0));

    nb.transact(json!([
        {"op": "update", "table": "ACL", "where": by_id(&uuid(&rows, 0)), "row": {"action": "drop"}},
        {"op": "update", "table": "ACL", "where": by_id(&uuid(&rows, 1)), "row": {"action": "drop"}},
    ]));
    let acls = values(edge.nb().await.acls);
    assert_eq!(acls.len(), 1);
    assert_eq!(acls[0].as_ref().map(|acl| &acl.action[..]), Some("drop"));

    // A row that ceases to be an EgressFirewall's is gone.
    nb.transact(
        json!([{"op": "update", "table": "ACL", "where": by_id(&uuid(&rows, 0)),
        "row": {"external_ids": map(&[])}}]),
    );
    assert_eq!(values(edge.nb().await.acls), [None]);
    edge.end().await;
}

#[tokio::test]
async fn a_restarted_server_brings_a_reset_with_the_conditions_of_before() {
    let root = packages!("a_restarted_server_brings_a_reset_with_the_conditions_of_before");
    let nb = Server::northbound(&root, "restart-nb").started();
    let mut sb = Server::southbound(&root, "restart-sb").started();
    let datapath = datapath(&sb);
    let rows = sb.transact(json!([
        flow(11000, Some("32cb9193"), &datapath),
        port("ns1_p1", 4, &datapath),
    ]));
    let mut edge = Ovn::start(&nb, &sb);
    assert!(edge.sb().await.reset);
    edge.watch(&[11000]).await;
    assert_eq!(edge.sb().await.logical_flows.len(), 1);
    for _ in 0..2 {
        sb.stop();
        sb.start();
        let update = edge.sb().await;
        assert!(update.reset);
        assert_eq!(update.datapaths.len(), 1);
        assert_eq!(update.port_bindings.len(), 1);
        assert_eq!(
            update.logical_flows.len(),
            1,
            "in the same update as the ports"
        );
    }
    sb.transact(
        json!([{"op": "delete", "table": "Logical_Flow", "where": by_id(&uuid(&rows, 0))}]),
    );
    let update = edge.sb().await;
    assert!(!update.reset);
    assert_eq!(values(update.logical_flows), [None]);
    edge.end().await;
}

#[tokio::test]
async fn a_question_asked_before_the_server_is_there_is_answered_later() {
    let root = packages!("a_question_asked_before_the_server_is_there_is_answered_later");
    let nb = Server::northbound(&root, "late-nb");
    let mut sb = Server::southbound(&root, "late-sb");
    let mut edge = Ovn::start(&nb, &sb);
    let ask = OvnCommand::SampleLogicalFlows(Stage::Table(Pipeline::Egress, 4));
    edge.commands.send(ask).await.expect("the edge runs");
    edge.watch(&[11000]).await;
    sleep(Duration::from_millis(300)).await;
    sb.start();
    let datapath = datapath(&sb);
    sb.transact(json!([flow(11000, Some("32cb9193"), &datapath)]));
    let (mut sampled, mut watched) = (false, false);
    while !(sampled && watched) {
        match edge.next().await {
            Input::LogicalFlowSample { .. } => sampled = true,
            Input::Sb(update) => watched |= !update.logical_flows.is_empty(),
            Input::LogicalFlowsWatched { priorities } => {
                assert_eq!(priorities, BTreeSet::from([11000]));
            }
            other => panic!("unexpected: {other:?}"),
        }
    }
    edge.end().await;
}

#[tokio::test]
async fn the_first_address_that_serves_the_database_is_used() {
    let root = packages!("the_first_address_that_serves_the_database_is_used");
    let other = Server::northbound(&root, "candidates-other").started();
    let mut sb = Server::southbound(&root, "candidates-sb");
    let remotes = format!(
        "unix:/nonexistent/socket,unix:{},unix:{}",
        other.socket().display(),
        sb.socket().display()
    );
    let remotes: Remotes = remotes.parse().expect("remotes");
    let mut connection = Connection::new(&sb::DATABASE, Conditions::new(), &remotes, "--ovn-sb");
    let counters = connection.counters();
    let started = Instant::now();
    while counters.failures.load(Relaxed) < 3 {
        let early = timeout(Duration::from_millis(100), connection.next()).await;
        assert!(early.is_err(), "nobody serves it yet");
        assert!(started.elapsed() < PATIENT, "not each address is tried");
    }
    sb.start();
    let event = timeout(PATIENT, connection.next()).await;
    assert_eq!(event.expect("in time"), Event::Synced);
    assert_eq!(counters.synced.load(Relaxed), 1);
}

/// The environment variable that says how large the first content of a database is, in MiB.
const LARGE_VARIABLE: &str = "DNSFLOW_OVSDB_MIB";
const LARGE_MIB: usize = 4;
/// The ports of a Service, and the pods behind it.
const PORTS: usize = 100;
const PODS: usize = 100;
/// About so many bytes have a load balancer of such a Service, and an ACL.
const BALANCER_BYTES: usize = 165_000;
const ACL_BYTES: usize = 370;

/// The ACL of a rule, as ovn-kubernetes makes it.
fn rule(at: usize) -> Value {
    json!({"op": "insert", "table": "ACL", "uuid-name": format!("acl{at}"), "row": {
        "action": "allow",
        "direction": "to-lport",
        "priority": 10_000 - at % 8000,
        "match": format!("ip4.dst == $a{:020} && inport == @a{:020}", at, at / 8000),
        "external_ids": map(&[
            ("k8s.ovn.org/owner-type", "EgressFirewall"),
            ("k8s.ovn.org/name", &format!("ns{}", at / 8000)),
            ("rule-index", &(at % 8000).to_string()),
        ]),
    }})
}

/// The load balancer of a Service.
fn balancer(at: usize, vips: &[(String, String)]) -> Value {
    json!({"op": "insert", "table": "Load_Balancer", "row": {
        "name": format!("Service_ns/s{at}_TCP_cluster"),
        "vips": ["map", vips],
        "external_ids": map(&[("k8s.ovn.org/kind", "Service"), ("k8s.ovn.org/owner", &format!("ns/s{at}"))]),
    }})
}

/// The highest resident memory of this process since the last call, in MiB.
fn peak_mib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("proc");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.and_then(|peak| peak.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    // proc_pid_clear_refs(5).
    fs::write("/proc/self/clear_refs", "5").expect("proc");
    peak.expect("a peak") >> 10
}

/// The bytes of the first content, and how long the server says nothing before: the answer to a request for both
/// tables as the edge makes it.
fn first_content(server: &Server) -> (usize, Duration) {
    let table = |columns: &[&str]| json!([{"columns": columns}]);
    let tables = json!({
        "ACL": table(&["priority", "match", "action", "external_ids"]),
        "Load_Balancer": table(&["name", "vips", "external_ids"]),
    });
    let params = json!([server.database, "size", tables]);
    let request = json!({"method": "monitor_cond", "params": params, "id": 0});
    let mut stream = UnixStream::connect(server.socket()).expect("the server listens");
    stream
        .write_all(request.to_string().as_bytes())
        .expect("the server reads");
    let asked = Instant::now();
    let mut stream = BufReader::new(stream);
    stream.fill_buf().expect("an answer");
    let silence = asked.elapsed();
    let mut answers =
        serde_json::Deserializer::from_reader(stream).into_iter::<serde::de::IgnoredAny>();
    answers.next().expect("an answer").expect("JSON");
    (answers.byte_offset(), silence)
}

#[tokio::test]
async fn a_large_database_is_read_row_by_row() {
    let root = packages!("a_large_database_is_read_row_by_row");
    let mib = std::env::var(LARGE_VARIABLE).map_or(LARGE_MIB, |mib| {
        mib.parse().expect("DNSFLOW_OVSDB_MIB is a number")
    });
    let nb = Server::northbound(&root, "rows-nb").started();
    let sb = Server::southbound(&root, "rows-sb").started();
    // The ACLs come in the answer to the first request, the load balancers in an update of their own.
    let acls = (mib << 20) * 3 / 8 / ACL_BYTES;
    let balancers = (mib << 20) * 5 / 8 / BALANCER_BYTES;
    for first in (0..acls).step_by(2000) {
        let some = first..acls.min(first + 2000);
        let members: Vec<Value> = some
            .clone()
            .map(|at| json!(["named-uuid", format!("acl{at}")]))
            .collect();
        // The server removes an ACL that nothing refers to.
        let group = json!({"name": format!("group{first}"), "acls": ["set", members]});
        let group = json!({"op": "insert", "table": "Port_Group", "row": group});
        nb.transact(some.map(rule).chain([group]).collect());
    }
    let backends = (0..PODS).map(|pod| format!("10.128.1.{pod}:8080"));
    let backends = backends.collect::<Vec<_>>().join(",");
    for at in 0..balancers {
        let ports = (0..PORTS).map(|port| {
            let vip = format!("10.96.{}.{}:{}", at >> 8, at & 0xff, 8000 + port);
            (vip, backends.clone())
        });
        nb.transact(json!([balancer(at, &ports.collect::<Vec<_>>())]));
    }
    let (bytes, silence) = first_content(&nb);
    peak_mib();
    let before = peak_mib();

    let mut edge = Ovn::start(&nb, &sb);
    let update = edge.nb().await;
    let peak = peak_mib();
    println!(
        "{} MiB of {acls} ACLs and {balancers} load balancers, the first byte after {silence:?}; {before} MiB \
         resident before, {peak} MiB at most",
        bytes >> 20,
    );
    assert!(
        bytes > (mib << 20) * 7 / 8,
        "{bytes} bytes are fewer than asked for"
    );
    assert!(update.reset);
    assert_eq!(values(update.acls).iter().flatten().count(), acls);
    let found = values(update.load_balancers);
    let found: BTreeSet<_> = found.into_iter().flatten().map(|one| one.service).collect();
    assert_eq!(found.len(), balancers);
    edge.end().await;
}

#[tokio::test]
async fn a_row_that_is_too_long_is_left_out_alone() {
    let root = packages!("a_row_that_is_too_long_is_left_out_alone");
    let nb = Server::northbound(&root, "long-nb").started();
    let sb = Server::southbound(&root, "long-sb").started();
    let vip = |port: u16| format!("10.96.0.1:{port}");
    let long = "10.128.0.1:8080,".repeat(PIECE_MAX_BYTES / 16);
    let rows = nb.transact(json!([
        balancer(0, &[(vip(80), long)]),
        balancer(1, &[(vip(81), "10.128.0.1:8080".to_owned())]),
    ]));
    let mut edge = Ovn::start(&nb, &sb);
    let services = |update: NbUpdate| -> Vec<Option<String>> {
        let balancers = values(update.load_balancers).into_iter();
        balancers.map(|one| one?.service).collect()
    };
    let first = edge.nb().await;
    // Any address may be in front.
    assert_eq!(values(first.unread_fronts.clone()), [Some(UnreadFronts)]);
    assert_eq!(services(first), [Some("ns/s1".to_owned())]);
    // What is left out takes part in no later change.
    nb.transact(json!([
        {"op": "mutate", "table": "Load_Balancer", "where": by_id(&uuid(&rows, 0)),
         "mutations": [["vips", "insert", map(&[(&vip(82), "")])]]},
        balancer(2, &[]),
    ]));
    assert_eq!(services(edge.nb().await), [Some("ns/s2".to_owned())]);
    edge.end().await;
}

#[tokio::test]
async fn whatever_load_balancers_have_in_front_is_read() {
    let root = packages!("whatever_load_balancers_have_in_front_is_read");
    let nb = Server::northbound(&root, "fronts-nb").started();
    let sb = Server::southbound(&root, "fronts-sb").started();
    let fronts = |update: NbUpdate| {
        let balancers = values(update.load_balancers).into_iter().flatten();
        let balancers = balancers.flat_map(|row| row.addresses);
        let variables = values(update.template_variables).into_iter().flatten();
        let variables = variables.flat_map(|row| row.addresses);
        balancers
            .chain(variables)
            .map(|address| address.to_string())
            .collect::<Vec<_>>()
    };
    let balancer = |name: &str, vip: &str| {
        json!({"op": "insert", "table": "Load_Balancer",
               "row": {"name": name, "vips": map(&[(vip, "203.0.113.3:80")])}})
    };
    let variables = |address: &str| map(&[("NODEIP_IPv4_0", address), ("pods", "10.244.0.3:80")]);
    let rows = nb.transact(json!([
        {"op": "insert", "table": "Chassis_Template_Var",
         "row": {"chassis": "node1", "variables": variables("172.18.0.2")}},
        balancer("template", "^NODEIP_IPv4_0:31080"),
        balancer("other", "192.0.2.80:80"),
    ]));
    let mut edge = Ovn::start(&nb, &sb);
    assert_eq!(fronts(edge.nb().await), ["192.0.2.80", "172.18.0.2"]);
    nb.transact(json!([
        {"op": "update", "table": "Chassis_Template_Var", "where": by_id(&uuid(&rows, 0)),
         "row": {"variables": variables("172.18.0.3")}},
        balancer("another", "192.0.2.81:80"),
    ]));
    assert_eq!(fronts(edge.nb().await), ["192.0.2.81", "172.18.0.3"]);
    edge.end().await;
}

#[tokio::test]
async fn a_table_that_is_too_large_is_left_out_if_an_option_takes_its_place() {
    let root = packages!("a_table_that_is_too_large_is_left_out_if_an_option_takes_its_place");
    let nb = Server::northbound(&root, "tables-nb").started();
    let sb = Server::southbound(&root, "tables-sb").started();
    let group = json!({"name": "group", "acls": ["named-uuid", "acl0"]});
    let group = json!({"op": "insert", "table": "Port_Group", "row": group});
    nb.transact(json!([rule(0), group, balancer(0, &[]), balancer(1, &[])]));
    let limits = TableLimits {
        rows: 2,
        ..TableLimits::default()
    };
    let edge = || OvnDb::new(Some(nb.remotes()), Some(sb.remotes())).limited_to(limits);
    let large = |input: Input| match input {
        Input::LargeTables { tables, .. } => {
            let tables = tables.into_iter();
            let tables = tables.map(|table| (table.database, table.table, table.is_left_out));
            Some(tables.collect::<Vec<_>>())
        }
        Input::Sb(_) => None,
        other => panic!("unexpected: {other:?}"),
    };
    async fn next<T>(edge: &mut Ovn, wanted: impl Fn(Input) -> Option<T>) -> T {
        loop {
            if let Some(found) = wanted(edge.next().await) {
                return found;
            }
        }
    }

    let networks = ["10.96.0.0/16".parse().expect("a network")];
    let mut with = Ovn::run(edge().beside(&networks));
    let first = with.nb().await;
    assert_eq!((first.load_balancers.len(), first.acls.len()), (2, 1));
    nb.transact(json!([
        balancer(2, &[]),
        {"op": "insert", "table": "Logical_Switch", "row": {"name": "switch"}},
    ]));
    let told = next(&mut with, large).await;
    assert_eq!(told, [("OVN_Northbound", "Load_Balancer", true)]);
    let update = with.nb().await;
    assert!(!update.reset);
    assert_eq!(values(update.load_balancers), [None, None]);
    assert_eq!(values(update.unread_fronts), [Some(UnreadFronts)]);
    assert_eq!((update.switches.len(), update.acls.len()), (1, 0));
    with.end().await;

    let mut without = Ovn::run(edge().beside(&[]));
    let told = next(&mut without, large).await;
    assert_eq!(told, [("OVN_Northbound", "Load_Balancer", false)]);
    without.end().await;
}

async fn interfaces(inputs: &mut mpsc::Receiver<Input>) -> InterfaceUpdate {
    let input = timeout(PATIENT, inputs.recv()).await;
    match input.expect("something happens") {
        Some(Input::Interfaces(update)) => update,
        other => panic!("unexpected: {other:?}"),
    }
}

#[tokio::test]
async fn the_local_edge_follows_pods() {
    let root = packages!("the_local_edge_follows_pods");
    let mut server = Server::vswitch(&root, "pods");
    let (inputs, mut receiver) = mpsc::channel(16);
    let task = tokio::spawn(VswitchDb::new(Some(server.remotes())).run(inputs));
    // The edge is there before the server.
    sleep(Duration::from_millis(50)).await;
    server.start();
    assert_eq!(
        interfaces(&mut receiver).await,
        InterfaceUpdate {
            reset: true,
            interfaces: vec![]
        }
    );

    let rows = server.transact(json!([
        {"op": "insert", "table": "Open_vSwitch", "row": {"bridges": ["named-uuid", "br"]}},
        {"op": "insert", "table": "Bridge", "uuid-name": "br",
         "row": {"name": "br-int", "ports": ["named-uuid", "port"]}},
        {"op": "insert", "table": "Port", "uuid-name": "port",
         "row": {"name": "veth", "interfaces": ["named-uuid", "interface"]}},
        {"op": "insert", "table": "Interface", "uuid-name": "interface", "row": {
            "name": "veth",
            "external_ids": map(&[
                ("iface-id", "ns1_p1"),
                ("iface-id-ver", "uid"),
                ("ip_addresses", "10.244.0.3/24"),
                ("sandbox", "abc"),
            ]),
        }},
    ]));
    let update = interfaces(&mut receiver).await;
    assert!(!update.reset);
    let pod = values(update.interfaces).remove(0).expect("a row");
    assert_eq!(
        (&pod.name[..], &pod.iface_id[..], pod.ifindex),
        ("veth", "ns1_p1", None)
    );
    assert_eq!(pod.addresses, [IpAddr::from([10, 244, 0, 3])]);

    let interface = uuid(&rows, 3);
    server.transact(
        json!([{"op": "update", "table": "Interface", "where": by_id(&interface),
        "row": {"ifindex": 42, "statistics": ["map", [["rx_packets", 1]]]}}]),
    );
    let pod = values(interfaces(&mut receiver).await.interfaces)
        .remove(0)
        .expect("a row");
    assert_eq!(pod.ifindex, Some(42));

    // Statistics are not told: the next thing heard is the end of the interface.
    server.transact(
        json!([{"op": "update", "table": "Interface", "where": by_id(&interface),
        "row": {"statistics": ["map", [["rx_packets", 2]]]}}]),
    );
    server.transact(
        json!([{"op": "update", "table": "Interface", "where": by_id(&interface),
        "row": {"ifindex": ["set", []]}}]),
    );
    let pod = values(interfaces(&mut receiver).await.interfaces)
        .remove(0)
        .expect("a row");
    assert_eq!(pod.ifindex, None);

    server.transact(
        json!([{"op": "mutate", "table": "Interface", "where": by_id(&interface),
        "mutations": [["external_ids", "delete", ["set", ["iface-id"]]]]}]),
    );
    assert_eq!(values(interfaces(&mut receiver).await.interfaces), [None]);

    server.stop();
    server.start();
    let update = interfaces(&mut receiver).await;
    assert_eq!((update.reset, update.interfaces.len()), (true, 0));

    drop(receiver);
    let ended = timeout(PATIENT, task).await;
    ended.expect("the edge ends").expect("without a panic");
}

/// The kind of a column, from its type in the schema (RFC 7047, section 3.2).
fn kind(column: &Value) -> Kind {
    let kind = &column["type"];
    let several = kind.get("max").is_some_and(|max| max != 1);
    match (kind.get("value").is_some(), several) {
        (true, true) => Kind::Map,
        (false, true) => Kind::Set,
        (_, false) => Kind::Scalar,
    }
}

#[test]
fn the_kinds_of_the_columns_are_those_of_the_schemas() {
    let root = packages!("the_kinds_of_the_columns_are_those_of_the_schemas");
    for (database, file) in [
        (&nb::DATABASE, "ovn/ovn-nb.ovsschema"),
        (&sb::DATABASE, "ovn/ovn-sb.ovsschema"),
        (&vswitch_db::DATABASE, "openvswitch/vswitch.ovsschema"),
    ] {
        let text = fs::read(root.path().join("usr/share").join(file)).expect("the schema");
        let schema: Value = serde_json::from_slice(&text).expect("JSON");
        assert_eq!(schema["name"], database.name);
        let expected: BTreeMap<_, _> = database
            .tables
            .iter()
            .flat_map(|table| table.columns.iter().map(move |column| (table.name, column)))
            .map(|(table, column)| {
                let found = &schema["tables"][table]["columns"][column.name];
                assert!(found.is_object(), "{table} has no {}", column.name);
                ((table, column.name), (column.kind, kind(found)))
            })
            .collect();
        for (column, (ours, theirs)) in expected {
            assert_eq!(ours, theirs, "{column:?}");
        }
    }
}
