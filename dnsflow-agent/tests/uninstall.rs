//! Nodes are checked before dnsflow comes, and cleaned before it goes: `kubectl dnsflow preflight` and `uninstall` with a
//! kubectl that writes down what it is asked, and `dnsflow cleanup-nodes` with an API server that does so.

mod fake;

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use dnsflow_agent::asking::rollout::cleanup_patch;
use fake::Server;
use serde_json::{Value, json};

/// Stands for kubectl. Its answers are files in `$FAKE`; what it reads on standard input goes there, too.
const KUBECTL: &str = r#"#!/bin/sh
echo "$*" >>"$FAKE/log"
of() { cat "$FAKE/$1" 2>/dev/null || :; }
case "$*" in
"get daemonset dnsflow-preflight "*) of preflight.json ;;
"get daemonset dnsflow "*) of daemonset.json ;;
"get pods "*) of pods.json ;;
"get podmonitors."*) of podmonitors.json ;;
"get prometheusrules."*)
    echo "error: the server doesn't have a resource type \"prometheusrules\"" >&2
    exit 1 ;;
"get --ignore-not-found "*) cat >"$FAKE/asked.json"; of there.json ;;
"get "*) of objects.json ;;
"patch "*) ;;
"create "*) cat >"$FAKE/created.json"; test ! -e "$FAKE/refused" ;;
"delete "*) cat >>"$FAKE/deleted.json"; echo >>"$FAKE/deleted.json"; echo "deleted" ;;
"exec "*"-- dnsflow cleanup --dry-run") cat "$FAKE/would" ;;
"exec "*"-- dnsflow check "*) echo '{"findings":[{"check":"btf","status":"ok","text":"it is there"}]}' ;;
"logs "*) echo "1 flows removed" ;;
*) exit 1 ;;
esac
"#;

/// A directory with kubectl and its plugin.
struct Fake {
    directory: PathBuf,
}

impl Fake {
    fn new(test: &str) -> Self {
        let name = format!("dnsflow-uninstall-{test}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir(&directory).expect("a directory");
        let fake = Self { directory };
        fake.write("kubectl", KUBECTL);
        let file = fake.directory.join("kubectl");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("a program");
        let plugin = fake.directory.join("kubectl-dnsflow");
        symlink(env!("CARGO_BIN_EXE_dnsflow"), plugin).expect("a link");
        let pod = |node: &str| {
            json!({
                "metadata": {"name": format!("pod-of-{node}")},
                "spec": {"nodeName": node, "containers": [{"name": "agent", "args": ["cleanup", "--stay"]}]},
                "status": {"phase": "Running", "conditions": [
                    {"type": "Ready", "status": if node == "n1" { "True" } else { "False" }},
                ]},
            })
        };
        fake.json("pods.json", &json!({"items": [pod("n1"), pod("n2")]}));
        fake.json("daemonset.json", &daemon_set(2));
        fake.json("preflight.json", &daemon_set(2));
        fake.write(
            "would",
            "cookie=0x444e, table=1\n1 flows would be removed\n/bpf would be removed\n",
        );
        fake
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.directory.join(name), text).expect("a file");
    }

    fn json(&self, name: &str, value: &Value) {
        self.write(name, &value.to_string());
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.directory.join(name)).unwrap_or_default()
    }

    /// The names of the objects that kubectl was given, one list a line.
    fn given(&self, name: &str) -> Vec<Vec<String>> {
        let text = self.read(name);
        let lists = text.lines().map(|line| {
            let list: Value = serde_json::from_str(line).expect("a list");
            let items = list["items"].as_array().expect("items").iter();
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let shown = items.map(|item| {
                let [kind, name] = [&item["kind"], &item["metadata"]["name"]].map(text);
                format!("{kind} {name}")
            });
            shown.collect()
        });
        lists.collect()
    }

    /// Runs `kubectl dnsflow` with these arguments.
    fn run(&self, arguments: &[&str]) -> (String, String, Option<i32>) {
        let path = std::env::var("PATH").expect("text");
        let output = Command::new(self.directory.join("kubectl-dnsflow"))
            .args(arguments)
            .env("PATH", format!("{}:{path}", self.directory.display()))
            .env("FAKE", &self.directory)
            .stdin(Stdio::null())
            .output();
        said(output.expect("it runs"))
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.directory);
    }
}

fn said(output: Output) -> (String, String, Option<i32>) {
    let text = |bytes| String::from_utf8(bytes).expect("text");
    let code = output.status.code();
    (text(output.stdout), text(output.stderr), code)
}

/// A DaemonSet of two nodes, so many of which have what they are to have.
fn daemon_set(done: i32) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": "dnsflow", "namespace": "dnsflow", "generation": 2},
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": "dnsflow"}},
            "template": {"spec": {
                "containers": [{"name": "agent", "volumeMounts": [
                    {"name": "run", "mountPath": "/run/dnsflow"}, {"name": "bpf", "mountPath": "/bpf"},
                ]}],
                "volumes": [
                    {"name": "run", "emptyDir": {}},
                    {"name": "bpf", "hostPath": {"path": "/sys/fs/bpf/dnsflow"}},
                ],
            }},
        },
        "status": {
            "observedGeneration": 2, "desiredNumberScheduled": 2, "currentNumberScheduled": 2,
            "numberMisscheduled": 0, "numberReady": done, "updatedNumberScheduled": done,
            "numberAvailable": done,
        },
    })
}

fn object(kind: &str, namespace: Option<&str>, name: &str) -> Value {
    let metadata = match namespace {
        Some(namespace) => json!({"name": name, "namespace": namespace}),
        None => json!({"name": name}),
    };
    json!({"apiVersion": "v1", "kind": kind, "metadata": metadata})
}

/// A list of dnsflow's objects.
fn objects() -> Value {
    json!({"items": [
        object("Namespace", None, "dnsflow"),
        object("ConfigMap", Some("dnsflow"), "dnsflow-options-x"),
        object("DaemonSet", Some("dnsflow"), "dnsflow"),
    ]})
}

#[test]
fn every_node_is_cleaned_before_an_object_is_deleted() {
    let fake = Fake::new("whole");
    fake.json("objects.json", &objects());
    let monitors = json!({"items": [object("PodMonitor", Some("dnsflow"), "dnsflow")]});
    fake.json("podmonitors.json", &monitors);
    let (output, errors, code) = fake.run(&["uninstall"]);
    assert_eq!((&*errors, code), ("", Some(0)));
    assert_eq!(
        output,
        "node n1: 1 flows removed\nnode n2: 1 flows removed\ndeleted\n"
    );
    let log = fake.read("log");
    let patch = format!("--patch {}\n", cleanup_patch());
    assert!(log.contains(&patch), "{log}");
    let place = |beginning: &str| log.lines().position(|line| line.starts_with(beginning));
    assert!(place("patch ") < place("delete "), "{log}");
    assert_eq!(
        fake.given("deleted.json"),
        [[
            "PodMonitor dnsflow",
            "DaemonSet dnsflow",
            "ConfigMap dnsflow-options-x",
            "Namespace dnsflow",
        ]]
    );
}

#[test]
fn while_a_node_is_not_clean_nothing_is_deleted() {
    let fake = Fake::new("part");
    fake.json("daemonset.json", &daemon_set(1));
    fake.json("objects.json", &objects());
    let (output, errors, code) = fake.run(&["uninstall", "--timeout", "1s"]);
    assert_eq!((&*output, code), ("", Some(4)), "{errors}");
    let lines = "1 of 2 nodes are clean\nnode n2: it has not cleaned up yet\nno object was deleted";
    assert!(errors.starts_with(lines), "{errors}");
    assert_eq!(fake.read("deleted.json"), "");
}

#[test]
fn a_dry_run_changes_nothing() {
    let fake = Fake::new("dry");
    fake.json("objects.json", &objects());
    let (output, errors, code) = fake.run(&["uninstall", "--dry-run"]);
    assert_eq!((&*errors, code), ("", Some(0)));
    assert_eq!(
        output,
        "\
node n1: 1 flows would be removed
node n1: /sys/fs/bpf/dnsflow would be removed
node n2: 1 flows would be removed
node n2: /sys/fs/bpf/dnsflow would be removed
DaemonSet dnsflow/dnsflow would be deleted
ConfigMap dnsflow/dnsflow-options-x would be deleted
Namespace dnsflow would be deleted
"
    );
    let log = fake.read("log");
    for verb in ["patch ", "delete ", "create "] {
        assert!(!log.lines().any(|line| line.starts_with(verb)), "{log}");
    }
}

#[test]
fn what_helm_has_installed_is_left_to_helm() {
    let fake = Fake::new("helm");
    let mut found = daemon_set(2);
    found["metadata"]["labels"] = json!({"app.kubernetes.io/managed-by": "Helm"});
    found["metadata"]["annotations"] = json!({
        "meta.helm.sh/release-name": "dnsflow", "meta.helm.sh/release-namespace": "default",
    });
    fake.json("daemonset.json", &found);
    let (_, errors, code) = fake.run(&["uninstall"]);
    assert_eq!(code, Some(1));
    assert!(
        errors.contains("helm uninstall dnsflow --namespace default"),
        "{errors}"
    );
    assert_eq!(fake.read("log").lines().count(), 1);
}

/// Its ClusterRole would be found by its labels.
#[test]
fn what_helm_has_installed_in_another_namespace_is_left_to_helm() {
    let fake = Fake::new("helm-elsewhere");
    fake.write("daemonset.json", "");
    let mut role = object("ClusterRole", None, "dnsflow");
    role["metadata"]["labels"] = json!({"app.kubernetes.io/managed-by": "Helm"});
    role["metadata"]["annotations"] = json!({
        "meta.helm.sh/release-name": "firewall", "meta.helm.sh/release-namespace": "kube-system",
    });
    fake.json("objects.json", &json!({"items": [role]}));
    let (_, errors, code) = fake.run(&["uninstall"]);
    assert_eq!(code, Some(1));
    assert_eq!(
        errors,
        "Error: Helm has installed dnsflow here, and removes it: helm uninstall firewall --namespace kube-system\n"
    );
    assert_eq!(fake.read("deleted.json"), "");
}

#[test]
fn an_error_is_a_sentence_without_a_stack_trace() {
    let fake = Fake::new("trace");
    let mut command = Command::new(env!("CARGO_BIN_EXE_dnsflow"));
    let kubeconfig = fake.directory.join("nowhere");
    command
        .args(["cleanup-nodes", "--kubeconfig"])
        .arg(&kubeconfig);
    let output = command.env("RUST_BACKTRACE", "1").output();
    let (_, errors, code) = said(output.expect("it runs"));
    assert_eq!(code, Some(1));
    assert!(
        errors.starts_with("Error: nodes may not be clean\n\nCaused by:\n    "),
        "{errors}"
    );
    assert!(!errors.contains("backtrace"), "{errors}");
}

/// The manifests of a preflight, in a file.
fn manifests(fake: &Fake) -> String {
    let labels =
        json!({"app.kubernetes.io/name": "dnsflow", "app.kubernetes.io/part-of": "dnsflow"});
    let daemon_set = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": "dnsflow", "namespace": "dnsflow", "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": {
            "metadata": {"labels": labels},
            "spec": {"containers": [{"name": "agent", "args": ["agent"]}]},
        }},
    });
    let documents = [
        daemon_set,
        object("ConfigMap", Some("dnsflow"), "dnsflow-options-x"),
        object("PodMonitor", Some("dnsflow"), "dnsflow"),
        object("Namespace", None, "dnsflow"),
    ];
    let text = documents
        .map(|document| document.to_string())
        .join("\n---\n");
    fake.write("manifests.yaml", &text);
    fake.directory.join("manifests.yaml").display().to_string()
}

#[test]
fn a_preflight_asks_each_node_and_deletes_what_it_has_created() {
    let fake = Fake::new("preflight");
    // Some of it is in use.
    fake.json("there.json", &object("Namespace", None, "dnsflow"));
    let (output, errors, code) = fake.run(&["preflight", "-f", &manifests(&fake)]);
    assert_eq!((&*errors, code), ("", Some(0)));
    assert_eq!(
        output,
        "\
NODE   STATUS   CHECK   ANSWER
n1     ok       btf     it is there
n2     ok       btf     it is there
"
    );
    let waiting = "DaemonSet dnsflow-preflight";
    let asked = ["Namespace dnsflow", "ConfigMap dnsflow-options-x", waiting];
    assert_eq!(fake.given("asked.json"), [asked]);
    assert_eq!(
        fake.given("created.json"),
        [["ConfigMap dnsflow-options-x", waiting]]
    );
    assert_eq!(
        fake.given("deleted.json"),
        [vec![waiting], vec![waiting, "ConfigMap dnsflow-options-x"]]
    );
}

#[test]
fn a_preflight_that_fails_leaves_nothing() {
    let fake = Fake::new("refused");
    fake.write("refused", "");
    let (output, errors, code) = fake.run(&["preflight", "-f", &manifests(&fake)]);
    assert_eq!((&*output, code), ("", Some(1)), "{errors}");
    let deleted = fake.given("deleted.json");
    assert_eq!(
        deleted[1],
        fake.given("created.json")[0]
            .iter()
            .rev()
            .cloned()
            .collect::<Vec<_>>()
    );

    let (_, errors, code) = fake.run(&["preflight", "-f", "/nowhere"]);
    assert_eq!(code, Some(1));
    assert!(errors.contains("cannot read the manifests"), "{errors}");
}

/// `dnsflow cleanup-nodes` at this API server.
fn cleanup_nodes(server: &Server, fake: &Fake) -> tokio::process::Child {
    let url = format!("http://{}", server.address);
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
    });
    fake.json("kubeconfig", &kubeconfig);
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_dnsflow"));
    command.args(["cleanup-nodes", "--timeout", "500ms", "--kubeconfig"]);
    command.arg(fake.directory.join("kubeconfig"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("it starts")
}

const DAEMON_SET: &str = "/apis/apps/v1/namespaces/dnsflow/daemonsets/dnsflow";

#[tokio::test]
async fn the_hook_waits_until_every_node_is_clean() {
    let mut server = Server::start("127.0.0.1:0").await;
    let fake = Fake::new("nodes-clean");
    let child = cleanup_nodes(&server, &fake);
    let mut expect = async |method: &str, answer: Value| {
        let request = server.request().await;
        assert_eq!((&*request.method, request.path()), (method, DAEMON_SET));
        let body = request.body.clone();
        request.json(200, answer).await;
        body
    };
    expect("GET", daemon_set(2)).await;
    let patch = expect("PATCH", daemon_set(2)).await;
    let patch: Value = serde_json::from_slice(&patch).expect("a patch");
    assert_eq!(patch, cleanup_patch());
    for done in 0..=2 {
        expect("GET", daemon_set(done)).await;
    }
    let output = child.wait_with_output().await.expect("it ends");
    let (output, errors, code) = said(output);
    assert_eq!(
        (&*output, &*errors, code),
        ("2 of 2 nodes are clean\n", "", Some(0))
    );
}

#[tokio::test]
async fn the_hook_fails_where_a_node_is_not_clean() {
    let mut server = Server::start("127.0.0.1:0").await;
    let fake = Fake::new("nodes-part");
    let child = cleanup_nodes(&server, &fake);
    loop {
        let request = server.request().await;
        if request.path() == DAEMON_SET {
            request.json(200, daemon_set(1)).await;
            continue;
        }
        assert_eq!(request.path(), "/api/v1/namespaces/dnsflow/pods");
        assert!(
            request
                .target
                .contains("labelSelector=app.kubernetes.io%2Fname%3Ddnsflow")
        );
        let pods: Value = serde_json::from_str(&fake.read("pods.json")).expect("pods");
        let pods =
            json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": pods["items"]});
        request.json(200, pods).await;
        break;
    }
    let (output, errors, code) = said(child.wait_with_output().await.expect("it ends"));
    assert_eq!((&*output, code), ("1 of 2 nodes are clean\n", Some(4)));
    assert_eq!(errors, "node n2: it has not cleaned up yet\n");
}

#[tokio::test]
async fn without_agents_the_hook_has_nothing_to_do() {
    let mut server = Server::start("127.0.0.1:0").await;
    let fake = Fake::new("nodes-none");
    let child = cleanup_nodes(&server, &fake);
    let missing = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
        "reason": "NotFound", "message": "there is none",
    });
    server.request().await.json(404, missing).await;
    let (output, _, code) = said(child.wait_with_output().await.expect("it ends"));
    assert_eq!(
        (&*output, code),
        ("there is no DaemonSet dnsflow/dnsflow\n", Some(0))
    );
}
