//! People ask a running agent what it does, and why. The witnesses: what `ovs-ofctl` shows of the switch,
//! and what the pods' own connections come to.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, BufRead as _, BufReader},
    net::{Ipv4Addr, SocketAddrV4},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::PathBuf,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use crate::snapshots::Snapshots;
use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    lab::{Datapath, Lab},
    liar::Behaviour,
    process::{PATIENT, run, wait_until},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);

fn firewall(lab: &Lab, rules: &[RuleSpec]) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    let rules: Vec<_> = rules.iter().cloned().chain([deny]).collect();
    lab.set_firewall("ns1", &rules)
        .expect("the rows are written");
}

fn ask(lab: &Lab, arguments: &[&str]) -> (String, Option<i32>) {
    lab.ask_agent(arguments).expect("the program runs")
}

/// The JSON objects that a list prints, one a line.
fn list(lab: &Lab, arguments: &[&str]) -> Vec<Value> {
    let (text, code) = ask(lab, &[arguments, &["-o", "json"]].concat());
    assert_eq!(code, Some(0), "{text}");
    let lines = text.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("an object"))
        .collect()
}

/// What `explain` says of a connection of pod1, in short.
fn explain(lab: &Lab, pod: &str, target: &str) -> (Option<i32>, String) {
    let (text, code) = ask(lab, &["explain", pod, target, "-o", "json"]);
    let explained: Value = serde_json::from_str(&text).expect("a list");
    let reason = &explained[0]["addresses"][0]["reason"];
    (code, reason.as_str().unwrap_or_default().to_owned())
}

fn fetches(lab: &Lab, pod: &str, url: &str, limit: Duration) -> bool {
    let fetched = lab.pod(pod).fetch(url, limit);
    fetched.expect("curl runs").result.is_ok()
}

#[test]
fn what_a_cleanup_would_remove_is_what_it_removes() {
    let lab = lab!("control-cleanup", agent);
    firewall(&lab, &[RuleSpec::allow_name("example.com")]);
    let state = lab.base().join("state");
    let state = state.to_str().expect("text");
    let agent = lab
        .start_agent(&["--state-dir", state])
        .expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    pod.resolve("example.com").expect("the name is known");
    // Where agents run, and notice each other.
    let command = || {
        let mut command = Command::new(binary());
        command.arg("cleanup").arg("--openflow-socket");
        command.arg(lab.socket("br-int.mgmt"));
        command.args(["--state-dir", state]);
        lab.node().enter(&mut command).expect("it is there");
        command
    };
    let cleanup = |further: &[&str]| run(command().args(further)).expect("it succeeds");
    // With the sentinel flows, too.
    let dump = || {
        let ours = "cookie=0x444e534600000000/0xffffffff00000000";
        let options = [
            "--protocols=OpenFlow15",
            "--no-stats",
            "dump-flows",
            "br-int",
        ];
        let dump = lab.ofctl(&[&options[..], &[ours]].concat());
        let dump = dump.expect("the dump runs");
        let flows = dump.lines().map(str::trim);
        let flows = flows.filter(|line| line.starts_with("cookie="));
        flows.map(str::to_owned).collect::<Vec<String>>()
    };
    let shown = dump();
    assert!(shown.len() > lab.dnsflow_flows().expect("the dump runs").len());
    let would_remove = format!("{} flows would be removed\n", shown.len());
    // Without counters, timeouts and actions.
    let matches = |text: &str| -> BTreeSet<String> {
        let flows = text.lines().filter(|line| line.starts_with("cookie="));
        let parts = flows.map(|flow| {
            let flow = flow.split(" actions=").next().expect("a match");
            let is_match = |part: &&str| {
                let others = ["n_packets=", "hard_timeout="];
                !others.iter().any(|other| part.starts_with(other))
            };
            let parts = flow.split(", ").filter(is_match);
            parts.collect::<Vec<_>>().join(", ")
        });
        parts.collect()
    };
    let listed = cleanup(&["--dry-run"]);
    assert_eq!(matches(&listed), matches(&shown.join("\n")));
    let journal = format!("{state}/journal would be removed\n");
    assert!(
        listed.ends_with(&format!("{would_remove}{journal}")),
        "{listed}"
    );
    assert_eq!(dump().len(), shown.len());
    // The agent would bring the flows back.
    let refused = command().output().expect("it runs");
    assert_eq!(refused.status.code(), Some(1));
    let text = String::from_utf8_lossy(&refused.stderr);
    let pid = agent.pid().as_raw_nonzero();
    let reason = format!("an agent runs on this node: process {pid}, version ");
    assert!(text.contains(&reason), "{text}");
    assert_eq!(dump().len(), shown.len());

    agent.terminate().expect("it stops");
    let listed = cleanup(&["--dry-run"]);
    assert!(
        listed.ends_with(&format!("{would_remove}{journal}")),
        "{listed}"
    );
    assert_eq!(cleanup(&[]), format!("{} flows removed\n", shown.len()));
    assert!(dump().is_empty());
    assert_eq!(cleanup(&["--dry-run"]), "0 flows would be removed\n");

    // As the pod of a DaemonSet, it is ready when the node is clean.
    let mut stays = command();
    stays.args(["--stay", "--listen=127.0.0.1:9473"]);
    let mut stays = stays.stdout(Stdio::null()).spawn().expect("it starts");
    wait_until("the cleanup to be ready", PATIENT, || {
        let mut curl = lab.node_command("curl")?;
        curl.args(["--silent", "--fail", "http://127.0.0.1:9473/readyz"]);
        Ok(curl.status()?.success())
    })
    .expect("it is ready");
    kill_process(Pid::from_child(&stays), Signal::TERM).expect("it runs");
    assert_eq!(stays.wait().expect("a status").code(), Some(0));
}

#[test]
fn what_is_logged_can_be_changed_and_a_bundle_has_it_with_all_else() {
    let lab = lab!("control-bundle", agent);
    firewall(&lab, &[RuleSpec::allow_name("example.com")]);
    fs::write(lab.manifests().join("broken.yaml"), "spec: [egress\n").expect("a file");
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    let started_with = "dnsflow_agent::agent::reports=debug,info";
    assert_eq!(
        ask(&lab, &["log-level"]),
        (format!("{started_with}\n"), Some(0))
    );
    assert_eq!(ask(&lab, &["log-level", "loud"]).1, Some(1));
    let changed = "info,kube_client=off,kube_runtime=off";
    let answer = format!("{changed}\nthe agent has started with {started_with}\n");
    assert_eq!(ask(&lab, &["log-level", "info"]), (answer, Some(0)));
    let pod = lab.pod("ns1_pod1");
    pod.resolve("example.com").expect("the name is known");
    ask(&lab, &["log-level", "dnsflow_agent=debug"]);
    pod.resolve("www.example.com").expect("the name is known");

    let directory = lab.base().join("bundle");
    fs::create_dir(&directory).expect("there is room");
    let file = directory.join("bundle.tar.gz");
    let bundle = || {
        let file = file.to_str().expect("text");
        ask(
            &lab,
            &["bundle", file, "--control-socket", &control_socket(&lab)],
        )
        .1
    };
    let unpack = || {
        let mut tar = Command::new("tar");
        run(tar.arg("-xzf").arg(&file).arg("-C").arg(&directory)).expect("it is an archive");
        let files = [
            "contents.json",
            "status.json",
            "cache.jsonl",
            "events.jsonl",
            "metrics.txt",
            "log.txt",
            "log-level.json",
            "options.json",
            "check.json",
        ];
        files.map(|file| {
            let path = directory.join("dnsflow-bundle").join(file);
            fs::read_to_string(path).expect(file)
        })
    };
    assert_eq!(bundle(), Some(0));
    assert_eq!(bundle(), Some(1), "the file is there");
    let [
        contents,
        status,
        cache,
        events,
        metrics,
        log,
        level,
        options,
        check,
    ] = unpack();
    assert!(!contents.contains("error"), "{contents}");
    assert!(status.contains(r#""is_ready":true"#), "{status}");
    assert!(
        status.contains(r#"broken.yaml","is_in_force":false"#),
        "{status}"
    );
    assert_eq!(cache.lines().count(), 2, "{cache}");
    assert!(events.contains("www.example.com"), "{events}");
    assert!(metrics.contains("dnsflow_ready 1\n"), "{metrics}");
    let is_warned_of = |line: &str| line.contains("WARN") && line.contains("broken.yaml");
    assert!(log.lines().any(is_warned_of), "{log}");
    // What pods are told is logged for debugging alone.
    let logged = |name: &str| log.contains(&format!(r#""name":"{name}""#));
    assert_eq!(
        (logged("example.com"), logged("www.example.com")),
        (false, true)
    );
    assert!(level.contains(started_with), "{level}");
    assert!(options.contains("--manifests"), "{options}");
    assert!(check.contains(r#""check": "program""#), "{check}");

    agent.terminate().expect("it stops");
    assert_eq!(ask(&lab, &["status"]), (String::new(), Some(1)));
    fs::remove_file(&file).expect("it is there");
    assert_eq!(bundle(), Some(4));
    let [contents, status, .., check] = unpack();
    assert!(contents.contains("no agent answers at"), "{contents}");
    assert!(status.is_empty(), "{status}");
    assert!(check.contains(r#""check": "program""#), "{check}");
}

/// What `kubectl` does here: the pod agent-1 is the lab's agent, agent-2 cannot be reached, and agent-3 does
/// not run. The labels `odd` are those of agent-1, of agent-4 that is the lab's agent as well, of agent-5 that
/// hangs, and of agent-6 that never stops talking. As the real one, it adds a line to standard error and hands
/// on the exit code.
const KUBECTL: &str = r#"#!/bin/sh
pod() {
    echo "{\"metadata\":{\"name\":\"$1\"},\"spec\":{\"containers\":[],\"nodeName\":\"$2\"},
        \"status\":{\"phase\":\"$3\"}}"
}
echo "$*" >> "$KUBECTL_LOG"
while test "$1" = --context; do shift 2; done
case "$1 $2" in
"get pods")
    test "$6" = odd && exec echo "{\"items\":[$(pod agent-1 node-1 Running),$(pod agent-4 node-4 Running),
        $(pod agent-5 node-5 Running),$(pod agent-6 node-6 Running)]}"
    echo "{\"apiVersion\":\"v1\",\"kind\":\"List\",\"metadata\":{},\"items\":[
        $(pod agent-2 node-2 Running),$(pod agent-1 node-1 Running),$(pod agent-3 node-3 Pending)]}" ;;
"get pod") test "$3" = lost && pod lost node-9 Running || pod "$3" node-1 Running ;;
"config view") echo '{"contexts":[{"name":"test","context":{"cluster":"test","namespace":"ns1"}}]}' ;;
"exec --namespace")
    case "$4" in
    agent-5) exec sleep 60 ;;
    agent-6) exec yes ;;
    esac
    test "$4" = agent-1 || test "$4" = agent-4 || { echo "error: dial tcp 10.0.0.2:10250: no route to host" >&2; exit 1; }
    while test "$1" != --; do shift; done
    shift 2
    "$DNSFLOW" "$@"
    code=$?
    test $code = 0 || echo "command terminated with exit code $code" >&2
    exit $code ;;
*) exit 1 ;;
esac
"#;

/// `kubectl dnsflow`, with [`KUBECTL`].
struct Plugin<'a> {
    lab: &'a Lab,
    directory: PathBuf,
    program: PathBuf,
}

impl<'a> Plugin<'a> {
    fn new(lab: &'a Lab) -> Self {
        let directory = lab.base().join("bin");
        fs::create_dir(&directory).expect("there is room");
        let file = directory.join("kubectl");
        fs::write(&file, KUBECTL).expect("there is room");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("it is ours");
        let program = directory.join("kubectl-dnsflow");
        for name in ["kubectl-dnsflow", "kubectl_complete-dnsflow"] {
            symlink(binary(), directory.join(name)).expect("there is room");
        }
        Self {
            lab,
            directory,
            program,
        }
    }

    /// What kubectl was asked, a call a line.
    fn log(&self) -> PathBuf {
        self.directory.join("log")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let path = std::env::var("PATH").expect("text");
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .env("PATH", format!("{}:{path}", self.directory.display()))
            .env("KUBECTL_LOG", self.log())
            .env("DNSFLOW", binary())
            .env("DNSFLOW_CONTROL_SOCKET", self.lab.control_socket());
        command
    }
}

fn binary() -> PathBuf {
    dnsflow_tests::agent::binary().expect("it is built")
}

#[test]
fn kubectl_asks_all_nodes_and_names_those_that_do_not_answer() {
    let lab = lab!("control-kubectl", agent);
    firewall(&lab, &[RuleSpec::allow_name("example.com")]);
    // What is printed shows flows to addresses.
    let agent = lab.start_agent(&["--open-by=flows"]);
    let _agent = agent.expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    pod.resolve("example.com").expect("the name is known");
    let plugin = Plugin::new(&lab);
    let ask = |arguments: &[&str]| {
        let output = plugin.command(arguments).output().expect("it runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        (
            text(output.stdout),
            text(output.stderr),
            output.status.code(),
        )
    };
    let (cache, silent, code) = ask(&["cache", "list", "--namespace", "ns1"]);
    assert_eq!(code, Some(4), "{silent}");
    assert!(cache.starts_with("NODE     POD "), "{cache}");
    assert!(
        cache.contains("node-1   ns1/pod1   example.com   203.0.113.1"),
        "{cache}"
    );
    assert_eq!(
        silent,
        "node node-2: error: dial tcp 10.0.0.2:10250: no route to host\n\
         node node-3: the agent's pod agent-3 does not run\n"
    );
    let (status, silent, code) = ask(&["status", "--node", "node-1", "--context", "test"]);
    assert_eq!((&*silent, code), ("", Some(0)));
    assert!(status.starts_with("NODE     AGENT "), "{status}");
    let log = fs::read_to_string(plugin.log()).expect("it was called");
    assert!(
        log.ends_with(
            "--context test get pods --namespace dnsflow --selector app.kubernetes.io/name=dnsflow \
             --output json\n--context test exec --namespace dnsflow agent-1 --container agent -- dnsflow \
             status --output json\n"
        ),
        "{log}"
    );
    let bundles = lab.base().join("bundles");
    let (written, silent, code) = ask(&["bundle", bundles.to_str().expect("text")]);
    assert_eq!(code, Some(4), "{silent}");
    assert!(silent.contains("node node-2: error: dial tcp"), "{silent}");
    let archive = bundles.join("node-1.tar.gz");
    assert_eq!(written, format!("{}\n", archive.display()));
    let bytes = fs::read(archive).expect("it is there");
    // RFC 1952, section 2.3.1.
    assert!(bytes.starts_with(&[0x1f, 0x8b]), "no gzip");
    // Only the agent of the pod's node can know, and its no is the answer.
    let (explained, silent, code) = ask(&["explain", "ns1/pod1", "203.0.113.9:443"]);
    assert_eq!((&*silent, code), ("", Some(3)), "{explained}");
    assert!(
        explained.starts_with("node node-1\npod ns1/pod1 to 203.0.113.9:443\n"),
        "{explained}"
    );
    assert!(
        explained.contains("203.0.113.9 NOT YET (not_resolved)"),
        "{explained}"
    );
    // The namespace of the context.
    let (same, _, _) = ask(&["explain", "pod1", "203.0.113.9:443"]);
    assert!(
        same.starts_with("node node-1\npod ns1/pod1 to 203.0.113.9:443\n"),
        "{same}"
    );
    let (text, lost, code) = ask(&["explain", "ns1/lost", "203.0.113.9:443"]);
    assert_eq!((&*text, code), ("", Some(4)));
    assert!(
        lost.starts_with("node node-9: no agent's pod is on this node: "),
        "{lost}"
    );
    let (_, refused, code) = ask(&["cleanup"]);
    assert_eq!(code, Some(2));
    assert!(
        refused.contains("unrecognized subcommand 'cleanup'"),
        "{refused}"
    );
    let mut complete = Command::new(plugin.directory.join("kubectl_complete-dnsflow"));
    let output = complete.args(["observe", "--event", "den"]).output();
    let output = output.expect("it runs").stdout;
    assert!(output.starts_with(b"denied\t"), "{output:?}");
    let (_, _, code) = ask(&["cache", "lst"]);
    assert_eq!(code, Some(2));
    let mut snapshots = Snapshots::default();
    for command in [
        "--help",
        "status",
        "cache list",
        "flows list",
        "explain ns1/pod1 example.com",
        "observe --event opened",
        "log-level",
    ] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let (output, silent, code) = ask(&arguments);
        let output = format!("{output}{silent}");
        snapshots.add(
            "kubectl",
            &format!("kubectl dnsflow {command}"),
            &output,
            code,
        );
    }
    snapshots.check();
}

#[test]
fn kubectl_follows_all_nodes_and_makes_one_answer_of_theirs() {
    let lab = lab!("control-nodes", agent);
    firewall(&lab, &[RuleSpec::allow_name("example.com")]);
    let fresh: Vec<_> = (1..=30).map(|n| format!("fresh{n}.example.com")).collect();
    let mut records = vec![
        "example.com. 30 IN A 203.0.113.1".to_owned(),
        "www.example.com. 30 IN A 203.0.113.2".to_owned(),
    ];
    records.extend(
        (1..)
            .zip(&fresh)
            .map(|(n, name)| format!("{name}. 30 IN A 198.51.100.{n}")),
    );
    let records: Vec<_> = records.iter().map(String::as_str).collect();
    lab.serve_dns(&records).expect("the server starts");
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    let plugin = Plugin::new(&lab);
    // A virtual machine may be emulated.
    let patience = match lab.datapath() {
        Datapath::Netdev => "3s",
        Datapath::System => "20s",
    };
    let odd_within = |patience, nodes: &[&str], arguments: &[&str]| {
        let mut all = vec!["--agents-selector", "odd", "--timeout", patience];
        all.extend(nodes.iter().flat_map(|node| ["--node", node]));
        all.extend(arguments);
        let mut command = plugin.command(&all);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let odd = |nodes: &[&str], arguments: &[&str]| odd_within(patience, nodes, arguments);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    let answer = |mut command: Command| {
        let output = command.output().expect("it runs");
        (
            text(output.stdout),
            text(output.stderr),
            output.status.code(),
        )
    };
    let ask_odd = |nodes: &[&str], arguments: &[&str]| answer(odd(nodes, arguments));
    let both = ["node-1", "node-4"];

    // Neither who hangs nor who says too much keeps the others from being heard.
    let hangs = format!("node node-5: kubectl exec: no answer within {patience}\n");
    let says_too_much = "node node-6: an answer of more than 268435456 bytes\n";
    for (patience, node, complaint) in [
        (patience, "node-5", hangs.as_str()),
        // So much takes a debug build seconds to read.
        ("60s", "node-6", says_too_much),
    ] {
        let (status, silent, code) = answer(odd_within(patience, &["node-1", node], &["status"]));
        assert_eq!((&*silent, code), (complaint, Some(4)));
        assert_eq!(status.lines().count(), 2, "{status}");
    }

    // One agent records for three who ask, two of them as nodes.
    let learn = ["learn", "--namespace", "ns1", "--for", "3s"];
    let (alone, merged) = thread::scope(|scope| {
        let alone = scope.spawn(|| ask(&lab, &learn));
        let merged = scope.spawn(|| ask_odd(&both, &learn));
        // Neither begins at once.
        while !(alone.is_finished() && merged.is_finished()) {
            for name in ["www.example.com", "example.com"] {
                pod.resolve(name).expect("the name is known");
            }
        }
        (
            alone.join().expect("no panic"),
            merged.join().expect("no panic"),
        )
    });
    assert!(
        alone.0.contains("dnsName: \"www.example.com\""),
        "{alone:?}"
    );
    assert_eq!(merged, (alone.0, String::new(), alone.1));
    let (_, silent, code) = ask_odd(&both, &["learn", "-n", "nowhere", "--for", "1s"]);
    assert_eq!(code, Some(1));
    assert!(
        silent.contains("no pod of nowhere has an interface"),
        "{silent}"
    );

    // What two nodes have done is the sum, here twice the same.
    assert!(fetches(&lab, "ns1_pod1", "http://203.0.113.1/", PATIENT));
    assert!(!fetches(&lab, "ns1_pod1", "http://203.0.113.9/", BLOCKED));
    let nb = format!("unix:{}", lab.socket("ovnnb_db.sock").display());
    let unused = ["unused", "-n", "ns1", "--ovn-nb", &nb, "-o", "json"];
    let rules = |text: &str| -> Vec<(String, u64)> {
        let answer: Value = serde_json::from_str(text).expect("an object");
        let rules = answer["rules"].as_array().expect("a list").iter();
        let of_rule = rules.map(|rule| {
            let used = rule["used"].as_str().expect("a word").to_owned();
            (used, rule["places"].as_u64().expect("a number"))
        });
        of_rule.collect()
    };
    wait_until("both connections", PATIENT, || {
        let known = rules(&ask(&lab, &unused).0);
        Ok(known.iter().all(|(_, places)| *places == 1))
    })
    .expect("they are known");
    let (answer, silent, code) = ask_odd(&both, &unused);
    assert_eq!((&*silent, code), ("", Some(0)), "{answer}");
    let used = |used: &str, places| (used.to_owned(), places);
    assert_eq!(rules(&answer), [used("connected", 2), used("connected", 2)]);
    let (answer, _, code) = ask_odd(&[], &unused);
    assert_eq!((rules(&answer).len(), code), (2, Some(4)));

    // The manifest is on the user's machine.
    let file = lab.base().join("tried.yaml");
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    let manifest = dnsflow_tests::firewall::manifest("ns1", &[deny]);
    fs::write(&file, manifest).expect("there is room");
    let file = file.to_str().expect("text");
    let (answer, silent, code) = ask_odd(&both, &["try", "-f", file]);
    assert_eq!((&*silent, code), ("", Some(3)), "{answer}");
    for line in [
        "would deny    2\n",
        "not known     2\n",
        "\nNODE     CHANGE  ",
    ] {
        assert!(answer.contains(line), "{answer}");
    }
    for node in both {
        let row = format!("\n{node}   would deny   ns1/pod1   203.0.113.1:80 ");
        assert!(answer.contains(&row), "{answer}");
    }
    let log = fs::read_to_string(plugin.log()).expect("it was called");
    let exec = "--container agent --stdin -- dnsflow try -f - --output json";
    assert!(log.contains(exec), "{log}");

    // One page of them all, which is written once.
    let file = lab.base().join("nodes.html");
    let report = ["report", "--html", file.to_str().expect("text")];
    let (answer, silent, code) = ask_odd(&["node-1", "node-4", "node-5"], &report);
    assert_eq!((&*answer, code), ("", Some(4)), "{silent}");
    let page = fs::read_to_string(&file).expect("it is there");
    for line in [
        "<h1>dnsflow <small>report on 2 nodes</small></h1>",
        "<h2>Node node-1</h2>",
        "<h2>Node node-4</h2>",
        "Node node-5 has not answered: ",
    ] {
        assert!(page.contains(line), "{line}: {page}");
    }
    assert_eq!(page.matches("203.0.113.9:80").count(), 2, "denied on both");
    let (_, refused, code) = ask_odd(&both, &report);
    assert_eq!(code, Some(1));
    let refusal = format!("Error: cannot write {}\n", file.display());
    assert!(refused.starts_with(&refusal), "{refused}");
    assert!(refused.contains("File exists"), "{refused}");

    // Events come as they happen, and end with the agents.
    let following = ["observe", "--follow", "--event", "opened"];
    let mut followed = odd(&["node-1", "node-4", "node-5"], &following);
    let mut followed = followed.spawn().expect("it runs");
    let lines = BufReader::new(followed.stdout.take().expect("a pipe")).lines();
    let (sender, came) = mpsc::channel();
    thread::spawn(move || {
        let mut lines = lines.map_while(Result::ok);
        lines.try_for_each(|line| sender.send(line))
    });
    let asked_before = log.matches("-- dnsflow observe").count();
    wait_until("both to be followed", PATIENT, || {
        let log = fs::read_to_string(plugin.log())?;
        Ok(log.matches("-- dnsflow observe").count() == asked_before + 2)
    })
    .expect("they are");
    // Events count from a moment that nobody is told.
    let mut waiting = BTreeSet::from(both);
    let mut wait = Duration::from_secs(1);
    for name in &fresh {
        pod.resolve(name).expect("the name is known");
        let until = Instant::now() + wait;
        wait = (2 * wait).min(Duration::from_secs(16));
        while !waiting.is_empty()
            && let Ok(line) = came.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            assert!(line.contains("  ns1/pod1  opened  fresh"), "{line}");
            waiting.retain(|node| !line.starts_with(&format!("{node}  20")));
        }
        if waiting.is_empty() {
            break;
        }
    }
    assert!(waiting.is_empty(), "{waiting:?}");
    agent.terminate().expect("it stops");
    let output = followed.wait_with_output().expect("it ends");
    let silent = text(output.stderr);
    assert_eq!(output.status.code(), Some(4), "{silent}");
    for node in ["node-1", "node-4", "node-5"] {
        assert!(silent.contains(&format!("node {node}: ")), "{silent}");
    }
}

#[test]
fn whoever_has_read_enough_ends_a_command_quietly() {
    let lab = lab!("control-unread", agent);
    firewall(&lab, &[RuleSpec::allow_name("example.com")]);
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    pod.resolve("example.com").expect("the name is known");
    let plugin = Plugin::new(&lab);
    let socket = lab.socket("br-int.mgmt").display().to_string();
    let cleanup = format!("cleanup --dry-run --openflow-socket {socket}");
    let alone = [
        "status",
        "cache list",
        "flows list -o json",
        "explain ns1/pod1 203.0.113.9",
        "observe --event opened",
        "learn -n ns1 --for 1s -o lines",
        "log-level",
        "bundle",
        "check",
        "completion bash",
        "man",
        "crd",
        &cleanup,
    ];
    let alone = alone.map(|command| {
        let mut program = Command::new(binary());
        program.env("DNSFLOW_CONTROL_SOCKET", lab.control_socket());
        (program, command)
    });
    let merged = ["--node node-1 cache list", "--node node-1 status -o yaml"];
    let merged = merged.map(|command| (plugin.command(&[]), command));
    for (mut program, arguments) in alone.into_iter().chain(merged) {
        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        program.args(arguments.split(' ')).stdout(writer);
        let output = program.output().expect("it runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            (output.status.code(), &*errors),
            (Some(0), ""),
            "{arguments}"
        );
    }
}

fn control_socket(lab: &Lab) -> String {
    lab.control_socket().display().to_string()
}

/// Asks about a pod that was told three addresses: the flows are those in the switch, and connections come to what the
/// explanations say.
#[test]
fn what_is_listed_and_explained_is_so() {
    let lab = lab!("control-explain", agent);
    let other_port = RuleSpec::allow_name("mail.example.net").ports(&[("tcp", 25)]);
    let denied = RuleSpec::deny("203.0.113.4/32").expect("a CIDR");
    let allowed = RuleSpec::allow("203.0.113.5/32").expect("a CIDR");
    let nodes = RuleSpec::allow_nodes(["203.0.113.7".parse().expect("an address")]);
    let names = RuleSpec::allow_name("example.com");
    firewall(&lab, &[other_port, denied, allowed, nodes, names]);
    lab.serve_dns(&[
        "www.example.com. 30 IN A 203.0.113.2",
        "mail.example.net. 30 IN A 203.0.113.3",
        "denied.example.com. 30 IN A 203.0.113.4",
        "local.example.com. 30 IN A 127.0.0.1",
    ])
    .expect("the server starts");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    for name in [
        "www.example.com",
        "mail.example.net",
        "denied.example.com",
        "local.example.com",
    ] {
        pod.resolve(name).expect("the name is known");
    }
    let listed = list(&lab, &["flows", "list"]);
    let listed: BTreeSet<&str> = listed
        .iter()
        .map(|flow| flow["flow"].as_str().expect("a text"))
        .collect();
    // Those of addresses and of groups. No flow of a port or of a logical switch opens anything.
    let shown = lab.dnsflow_flows_as_they_are().expect("the dump runs");
    let of_addresses = shown.iter().filter(|flow| flow.contains("nw_dst="));
    let shown = of_addresses.chain(Lab::of_groups(&shown));
    assert_eq!(listed, shown.map(String::as_str).collect());
    assert!(!listed.is_empty());
    let told = |filter: &[&str]| -> Vec<String> {
        let entries = list(&lab, &[&["cache", "list"], filter].concat());
        let addresses = entries.iter().map(|entry| entry["address"].as_str());
        let addresses = addresses.map(|address| address.expect("a text").to_owned());
        addresses.collect()
    };
    let [www, mail, denied] = ["203.0.113.2", "203.0.113.3", "203.0.113.4"];
    for (filter, expected) in [
        (&[][..], &[www, mail, denied][..]),
        (
            &["--namespace", "ns1", "--pod", "pod1"],
            &[www, mail, denied],
        ),
        (&["--namespace", "ns2"], &[]),
        (&["--pod", "pod2"], &[]),
        (&["--name", "example.com"], &[www, denied]),
        (&["--name", "www.example.com"], &[www]),
        (&["--address", mail], &[mail]),
    ] {
        assert_eq!(told(filter), expected, "{filter:?}");
    }
    for (pod, count) in [("pod1", 3), ("pod2", 0)] {
        let (events, _) = ask(&lab, &["observe", "--namespace", "ns1", "--pod", pod]);
        assert_eq!(events.matches("  opened  ").count(), count, "{events}");
    }
    let yaml = ask(&lab, &["status", "-o", "yaml"]).0;
    assert!(yaml.contains("is_ready: true"), "{yaml}");

    for (pod, address, reason) in [
        ("pod1", "203.0.113.2", "allowed_by_name"),
        ("pod1", "203.0.113.5", "allowed_by_network"),
        ("pod1", "203.0.113.7", "allowed_by_network"),
        ("pod1", "203.0.113.3", "wrong_port"),
        ("pod1", "203.0.113.4", "denied_by_earlier_rule"),
        ("pod1", "203.0.113.6", "not_resolved"),
        ("pod2", "203.0.113.2", "told_to_other_pod"),
    ] {
        let (code, said) = explain(&lab, &format!("ns1/{pod}"), &format!("{address}:80"));
        assert_eq!(said, reason, "{pod} {address}");
        let passes = code == Some(0);
        assert!(passes || code == Some(3), "{pod} {address}: {code:?}");
        let limit = if passes { PATIENT } else { BLOCKED };
        let url = format!("http://{address}/");
        assert_eq!(
            fetches(&lab, &format!("ns1_{pod}"), &url, limit),
            passes,
            "{pod} {address}"
        );
    }
    let said = explain(&lab, "ns1/pod1", "nobody.example.com");
    assert_eq!(said, (Some(4), "depends_on_address".to_owned()));
    let said = explain(&lab, "ns1/pod1", "mail.example.net:25");
    assert_eq!(said, (Some(0), "allowed_by_name".to_owned()));
    let said = explain(&lab, "ns1/pod1", "example.org:443");
    assert_eq!(said, (Some(4), "depends_on_address".to_owned()));
    let said = explain(&lab, "ns2/pod1", "203.0.113.6:80");
    assert_eq!(said, (Some(0), "no_firewall".to_owned()));
    let (text, code) = ask(&lab, &["explain", "ns1/nobody", "203.0.113.2"]);
    assert_eq!((text.as_str(), code), ("", Some(1)));
}

/// The rules with the change that a remedy names.
pub(crate) fn applied(mut rules: Vec<RuleSpec>, remedy: &str) -> Vec<RuleSpec> {
    let remedy = remedy.trim_start_matches("if the pod connects without a name, ");
    let words: Vec<&str> = remedy.split([' ', ';', ',']).collect();
    let index = |word: &str| word.parse::<usize>().expect("the index of a rule");
    match words[..] {
        ["move", "rule", from, "before", "rule", to, ..] => {
            let rule = rules.remove(index(from));
            rules.insert(index(to), rule);
        }
        ["add", port, "to", "the", "ports", "of", "rule", rule] => {
            assert_eq!(port, "tcp/80");
            rules[index(rule)].ports.push(("tcp", 80));
        }
        ["allow", "it", "before", "rule", before, "with", by, to, ..] => {
            let to = to.trim_end_matches('`');
            let rule = match by {
                "`dnsName:" => RuleSpec::allow_name(to),
                "`cidrSelector:" => RuleSpec::allow(to).expect("a CIDR"),
                _ => panic!("no known remedy: {remedy}"),
            };
            rules.insert(index(before), rule);
        }
        _ => panic!("no known remedy: {remedy}"),
    }
    rules
}

/// The remedy of each blocked connection is applied to the EgressFirewall, or to the agent's options, as it says, and the
/// pod connects.
#[test]
fn a_remedy_lets_the_connection_pass() {
    let lab = lab!("control-remedies", agent);
    let rules = vec![
        RuleSpec::allow_name("mail.example.net").ports(&[("tcp", 25)]),
        RuleSpec::deny("203.0.113.4/32").expect("a CIDR"),
        RuleSpec::allow_name("example.com"),
        RuleSpec::deny("0.0.0.0/0").expect("a CIDR"),
    ];
    let set = |rules: &[RuleSpec]| {
        let written = lab.set_firewall("ns1", rules);
        written.expect("the rows are written");
    };
    set(&rules);
    lab.serve_dns(&[
        "mail.example.net. 30 IN A 203.0.113.3",
        "denied.example.com. 30 IN A 203.0.113.4",
        "cdn.example.org. 30 IN A 203.0.113.6",
        "limit.example.com. 30 IN A 203.0.113.1",
        "aa.example.org. 30 IN A 203.0.113.5",
        "zz.example.org. 30 IN A 203.0.113.5",
    ])
    .expect("the server starts");
    let limited = ["--max-addresses-per-name=1"];
    let agent = lab.start_agent(&limited).expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    // Names that no rule mentions, and servers that are not trusted, come to the agent beside the others.
    let remedy = |target: &str, address: &str, begins: &[&str]| {
        let arguments = ["explain", "ns1/pod1", target, "-o", "json"];
        let (mut remedy, mut text) = (String::new(), String::new());
        wait_until("a remedy", PATIENT, || {
            text = ask(&lab, &arguments).0;
            let explained: Value = serde_json::from_str(&text)?;
            let found = &explained[0]["addresses"][0];
            remedy = found["remedy"].as_str().unwrap_or_default().to_owned();
            let by_address = format!("with `cidrSelector: {address}");
            let is_it = begins.iter().any(|begin| remedy.starts_with(begin));
            // The remedy before may have added a rule, and is taken back beside the question. The last rule is for all.
            let steps = found["steps"].as_array();
            let last = steps.and_then(|steps| steps.last()?["rule"].as_u64());
            let is_of_rules = last == Some(rules.len() as u64 - 1);
            Ok(is_it && is_of_rules && !remedy.contains(&by_address))
        })
        .unwrap_or_else(|error| panic!("{target}: {error}: {text}"));
        remedy
    };
    let is_blocked = |address: &str| {
        let url = format!("http://{address}/");
        assert!(!fetches(&lab, "ns1_pod1", &url, BLOCKED), "{address}");
    };
    let passes = |address: &str, remedy: &str, resolve: &dyn Fn() -> anyhow::Result<()>| {
        let url = format!("http://{address}/");
        wait_until("the connection", PATIENT, || {
            resolve()?;
            Ok(fetches(&lab, "ns1_pod1", &url, BLOCKED))
        })
        .unwrap_or_else(|error| panic!("{address}, {remedy}: {error}"));
    };
    for (name, address) in [
        ("mail.example.net", "203.0.113.3"),
        ("denied.example.com", "203.0.113.4"),
        ("cdn.example.org", "203.0.113.6"),
    ] {
        set(&rules);
        pod.resolve(name).expect("the name is known");
        let remedy = remedy(&format!("{address}:80"), address, &["move", "add", "allow"]);
        is_blocked(address);
        set(&applied(rules.clone(), &remedy));
        passes(address, &remedy, &|| pod.resolve(name).map(|_| ()));
    }
    set(&rules);

    // Two names of an address: the remedy is for the one that is asked about, and the pod asks for this one alone.
    for name in ["aa.example.org", "zz.example.org"] {
        pod.resolve(name).expect("the name is known");
    }
    let (name, address) = ("aa.example.org", "203.0.113.5");
    let by_name = remedy(&format!("{name}:80"), address, &["allow"]);
    is_blocked(address);
    set(&applied(rules.clone(), &by_name));
    passes(address, &by_name, &|| pod.resolve(name).map(|_| ()));
    set(&rules);

    // A second address of a name is one too many, and the pod asks a server that is not trusted.
    let name = "limit.example.com";
    pod.resolve(name).expect("the name is known");
    lab.serve_dns(&["limit.example.com. 30 IN A 203.0.113.2"])
        .expect("the server starts");
    pod.resolve(name).expect("the name is known");
    let addresses = ["203.0.113.1", "203.0.113.2"];
    let is_limited = |address: &&str| explain(&lab, "ns1/pod1", address).1 == "limit_reached";
    let refused = addresses.into_iter().find(is_limited).expect("one of them");
    let raise = remedy(&format!("{refused}:80"), refused, &["raise"]);
    assert_eq!(raise, "raise --max-addresses-per-name, now 1");
    is_blocked(refused);
    lab.serve_liar("ns1_pod2", 53).expect("it listens");
    let (server, elsewhere) = (SocketAddrV4::new([10, 244, 0, 6].into(), 53), "203.0.113.7");
    let resolve = || {
        let told = pod.resolve_at(server, &Behaviour::Honest.name(7, "example.com"))?;
        assert_eq!(told, [Ipv4Addr::new(203, 0, 113, 7)]);
        Ok(())
    };
    // Trust is for all pods: it is no remedy, but a hint, for a minute.
    let mut trust = String::new();
    wait_until("a hint", PATIENT, || {
        resolve()?;
        let target = format!("{elsewhere}:80");
        let (text, _) = ask(&lab, &["explain", "ns1/pod1", &target, "-o", "json"]);
        let explained: Value = serde_json::from_str(&text)?;
        let remedy = explained[0]["addresses"][0]["remedy"].as_str();
        assert!(
            remedy.is_none_or(|remedy| !remedy.contains("resolver")),
            "{text}"
        );
        let hints = explained[0]["hints"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let mut hints = hints.iter().filter_map(Value::as_str);
        let hint = hints.find(|hint| hint.starts_with("the pod asked"));
        trust = hint.unwrap_or_default().to_owned();
        Ok(hint.is_some())
    })
    .expect("there is one");
    is_blocked(elsewhere);
    agent.terminate().expect("it stops");

    lab.serve_dns(&[&*format!("{name}. 30 IN A {refused}")])
        .expect("the server starts");
    let mut options = vec!["--max-addresses-per-name=2"];
    let (_, resolver) = trust.split_once("may trust it, ").expect("an option");
    options.extend(resolver.split(' '));
    let _agent = lab.start_agent(&options).expect("the agent is ready");
    passes(refused, &raise, &|| pod.resolve(name).map(|_| ()));
    passes(elsewhere, &trust, &resolve);
}

/// The pod has asked, and what it got decides: no address, or the address of another name.
#[test]
fn what_a_pod_was_told_for_a_name_decides() {
    let lab = lab!("control-asked", agent);
    let rules = vec![
        RuleSpec::allow_name("example.com"),
        RuleSpec::deny("0.0.0.0/0").expect("a CIDR"),
    ];
    let set = |rules: &[RuleSpec]| {
        let written = lab.set_firewall("ns1", rules);
        written.expect("the rows are written");
    };
    set(&rules);
    // The zone of a search domain has a wildcard.
    let wildcard = "*.corp.example.net. 30 IN A 203.0.113.6";
    lab.serve_dns(&[wildcard]).expect("the server starts");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    let comes_to_be = |target: &str, expected: (i32, &str), ask_again: &dyn Fn()| {
        let mut said = (None, String::new());
        wait_until("the explanation", PATIENT, || {
            ask_again();
            said = explain(&lab, "ns1/pod1", target);
            Ok((said.0, &*said.1) == (Some(expected.0), expected.1))
        })
        .unwrap_or_else(|error| panic!("{target}: {error}: {said:?}"));
    };
    let missing = "missing.example.com";
    let target = format!("{missing}:80");
    let not_yet = (Some(0), "not_resolved".to_owned());
    assert_eq!(explain(&lab, "ns1/pod1", &target), not_yet);
    comes_to_be(&target, (3, "answered_with_error"), &|| {
        // There is no such name.
        let _ = pod.resolve(missing);
    });
    lab.serve_dns(&[wildcard, "missing.example.com. 30 IN A 203.0.113.2"])
        .expect("the server starts");
    pod.resolve(missing).expect("the name is known");
    comes_to_be(&target, (0, "allowed_by_name"), &|| {});
    assert!(fetches(&lab, "ns1_pod1", "http://203.0.113.2/", PATIENT));

    let told = "www.example.com.corp.example.net";
    pod.resolve(told).expect("the name is known");
    let target = "www.example.com:80";
    comes_to_be(target, (3, "denied_by_rule"), &|| {});
    assert!(!fetches(&lab, "ns1_pod1", "http://203.0.113.6/", BLOCKED));
    let (text, _) = ask(&lab, &["explain", "ns1/pod1", target, "-o", "json"]);
    let explained: Value = serde_json::from_str(&text).expect("a list");
    let remedy = explained[0]["addresses"][0]["remedy"].as_str();
    let remedy = remedy.expect("a remedy");
    set(&applied(rules, remedy));
    wait_until("the connection", PATIENT, || {
        pod.resolve(told)?;
        Ok(fetches(&lab, "ns1_pod1", "http://203.0.113.6/", BLOCKED))
    })
    .unwrap_or_else(|error| panic!("{remedy}: {error}"));
    comes_to_be(target, (0, "allowed_by_name"), &|| {});
}
