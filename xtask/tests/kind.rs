//! `cargo xtask kind` with programs that only write down what they are asked: its order of work,
//! what it expects of a cluster, and that it takes everything down again.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use dnsflow_tests::support::{root_directory, workspace};

const LIMIT: Duration = Duration::from_secs(30);

/// Stands for docker, kind, kubectl and the others, by the name it is called by. The directory of
/// its files is `$FAKES`; a file there named `trouble` is a command that goes wrong.
const FAKE: &str = r#"#!/bin/sh
name=${0##*/}
input=
case "$*" in *"--filename -"*) input=$(cat) ;; esac
said="$name $*"
printf '%s\n' "$said" >>"$FAKES/asked"
if [ -e "$FAKES/trouble" ] && echo "$said" | grep -q -e "$(cat "$FAKES/trouble")"; then
    [ -e "$FAKES/trouble-reaches" ] || exit 1
    echo 172.18.0.8
    exit 0
fi
timed_out() { echo "curl: (28) Connection timed out after 2001 milliseconds" >&2; exit 28; }
case "$said" in
"git clone"*)
    for directory; do :; done
    mkdir -p "$directory/contrib"
    ln -s "$0" "$directory/contrib/kind-helm.sh" ;;
"kind version") echo "kind v$(cat "$FAKES/kind-version" 2>/dev/null || echo 0.30.0) go1.25.0 linux/amd64" ;;
"kind get clusters") cat "$FAKES/clusters" 2>/dev/null || : ;;
"kind get nodes"*) printf 'one\ntwo\n' ;;
"docker inspect"*www) echo 172.18.0.7 ;;
"docker inspect"*rest) echo 172.18.0.8 ;;
*"apply --kustomize"*) : >"$FAKES/deployed" ;;
"kubectl dnsflow preflight"*) echo "one  ok  program" ;;
"kubectl dnsflow uninstall"*) rm -f "$FAKES/deployed"; echo "node one: 7 flows removed" ;;
*"apply --filename"*)
    case "$input" in *_ADDRESS* | *NODE* | *POD_IMAGE*) exit 1 ;; esac
    case "$input" in *'"*.site'*) : >"$FAKES/wildcard" ;; esac ;;
*"get --ignore-not-found"*) grep -Fx -e "${said##* name }" "$FAKES/there" 2>/dev/null || : ;;
*"get services"*) echo '{"items": [{"spec": {"selector": {"k8s-app": "kube-dns"}}}]}' ;;
"kubectl --namespace dnsflow get pods"*)
    echo '{"items": [{"metadata": {"name": "agent"}, "spec": {"nodeName": "two"}}]}' ;;
*"get pods"*)
    echo '{"items": [{"metadata": {"uid": "u"}, "spec": {"nodeName": "one"}, "status":
        {"containerStatuses": [{"restartCount": 0}]}}]}' ;;
*"get nodes"*) echo '{"items": [{"metadata": {"name": "one"}}, {"metadata": {"name": "two"}}]}' ;;
*"get deployments,"*)
    echo "{\"items\": [{\"metadata\": {\"name\": \"coredns\"}, \"data\": \"$(cat "$FAKES/corefile" 2>/dev/null)\"}]}" ;;
*"rollout status"*"--watch=false"*)
    echo again >>"$FAKES/rollout"
    [ "$(wc -l <"$FAKES/rollout")" -lt 3 ] || echo 'daemon set "dnsflow" successfully rolled out' ;;
*" exec agent -- dnsflow check --output json")
    status=$(cat "$FAKES/check" 2>/dev/null || echo ok)
    echo "{\"status\": \"$status\", \"findings\": [{\"check\": \"btf\", \"status\": \"$status\"}]}" ;;
kubectl*" exec pod -- sh "*) echo "200 0.012" ;;
kubectl*" exec pod "*www.site* | kubectl*" exec pod "*//site* | kubectl*" exec pod "*172.18.0.7*)
    [ -e "$FAKES/deployed" ] || timed_out
    echo 172.18.0.7 ;;
kubectl*" exec neighbour "*www.site*)
    [ -e "$FAKES/wildcard" ] || timed_out
    echo 172.18.0.7 ;;
kubectl*" exec "*) timed_out ;;
esac
"#;

const PROGRAMS: &[&str] = &[
    "docker", "kind", "kubectl", "git", "go", "helm", "jq", "openssl", "curl", "pipx", "skopeo",
];

/// A directory with the programs, and what they were asked.
struct Fakes {
    directory: PathBuf,
    name: String,
}

impl Fakes {
    fn new(test: &str) -> Self {
        let name = format!("fake-{test}-{}", std::process::id());
        let directory = std::env::temp_dir().join(&name);
        fs::create_dir(&directory).expect("a directory");
        let fakes = Self { directory, name };
        fakes.write("fake", FAKE);
        let file = fakes.directory.join("fake");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("a program");
        fs::create_dir(fakes.directory.join("bin")).expect("a directory");
        for program in PROGRAMS {
            symlink(&file, fakes.directory.join("bin").join(program)).expect("a link");
        }
        fakes
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.directory.join(name), text).expect("a file");
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        let path = format!("{}:/usr/bin:/bin", self.directory.join("bin").display());
        command
            .args(["kind", "--edit-pause", "0"])
            .args(arguments)
            .env("PATH", path)
            .env("FAKES", &self.directory)
            // kubectl's plugin is kubectl's to start.
            .env("DNSFLOW_BIN", self.directory.join("fake"))
            .stdin(Stdio::null());
        command
    }

    /// In a cluster that is made.
    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = self.command(&["--name", &self.name]);
        command.args(arguments).output().expect("xtask runs")
    }

    /// In a cluster that is there.
    fn attach(&self, arguments: &[&str]) -> Output {
        let mut command = self.command(&["--attach", "/nowhere/kubeconfig"]);
        command.args(["--www", "172.18.0.7", "--rest", "172.18.0.8"]);
        command.args(arguments).output().expect("xtask runs")
    }

    fn asked(&self) -> Vec<String> {
        let asked = fs::read_to_string(self.directory.join("asked")).unwrap_or_default();
        asked.lines().map(str::to_owned).collect()
    }

    /// Where the first request with this beginning stands.
    fn position(&self, beginning: &str) -> usize {
        let asked = self.asked();
        let found = asked.iter().position(|line| line.starts_with(beginning));
        found.unwrap_or_else(|| panic!("{beginning} was not asked: {asked:#?}"))
    }

    /// The servers and the cluster are the last things that were ended.
    fn assert_taken_down(&self) {
        let asked = self.asked();
        let name = &self.name;
        assert_eq!(
            asked[asked.len() - 2..],
            [
                format!("docker rm --force {name}-www {name}-rest"),
                format!("kind delete cluster --name {name}"),
            ],
            "{asked:#?}"
        );
    }
}

impl Drop for Fakes {
    fn drop(&mut self) {
        let home = root_directory("").expect("target").with_file_name("kind");
        for directory in [self.directory.clone(), home.join(&self.name)] {
            // It may not have come to making the second one.
            let _missing = fs::remove_dir_all(directory);
        }
    }
}

fn text(output: &Output) -> String {
    let out = String::from_utf8_lossy(&output.stdout);
    format!("{out}{}", String::from_utf8_lossy(&output.stderr))
}

#[test]
fn the_whole_story_is_told_and_the_cluster_taken_down() {
    let fakes = Fakes::new("story");
    let output = fakes.run(&[]);
    let printed = text(&output);
    assert!(output.status.success(), "{printed}");
    let name = &fakes.name;
    let order = [
        "git clone --depth 1 --branch v1.3.0".to_owned(),
        "kind-helm.sh --num-workers 2 --enable-dnsnameresolver".to_owned(),
        "docker exec two sh -c mountpoint -q /sys/fs/bpf || mount -t bpf".to_owned(),
        "docker build --file deploy/Containerfile --tag dnsflow:kind".to_owned(),
        format!("kind load docker-image dnsflow:kind curlimages/curl:8.11.1 --name {name}"),
        format!("docker run --detach --rm --name {name}-www --network kind"),
        "kubectl apply --filename -".to_owned(),
        "kubectl --namespace dnsflow-story exec pod".to_owned(),
        "kubectl kustomize".to_owned(),
        "kubectl dnsflow preflight --filename".to_owned(),
        "kubectl apply --kustomize".to_owned(),
        "kubectl --namespace dnsflow rollout status daemonset/dnsflow --timeout".to_owned(),
        "kubectl --namespace dnsflow exec agent -- dnsflow check".to_owned(),
        "kubectl --namespace dnsflow-story exec pod -- sh -c".to_owned(),
        "kubectl --namespace dnsflow delete pod".to_owned(),
        "kubectl --namespace dnsflow rollout restart".to_owned(),
        "kubectl dnsflow uninstall".to_owned(),
        "docker rm".to_owned(),
    ];
    let positions: Vec<usize> = order.iter().map(|line| fakes.position(line)).collect();
    assert!(positions.is_sorted(), "{positions:?}: {:#?}", fakes.asked());
    assert!(printed.contains("run on two"), "{printed}");
    assert!(printed.contains("1 attempts during 4 changes"), "{printed}");
    assert!(printed.contains("7 flows removed"), "{printed}");
    assert!(printed.contains("3 attempts while it went on"), "{printed}");
    assert!(fakes.directory.join("wildcard").exists(), "{printed}");
    fakes.assert_taken_down();
}

#[test]
fn what_is_not_as_said_is_named_and_the_cluster_taken_down() {
    for (trouble, reaches, expected) in [
        ("kind load", false, "the image: not as it should be"),
        ("docker run", false, "web servers"),
        ("exec pod -- .*//172.18.0.8/", true, "stays blocked"),
        ("rollout restart", false, "a rolling update"),
    ] {
        let fakes = Fakes::new("trouble");
        fakes.write("trouble", trouble);
        if reaches {
            fakes.write("trouble-reaches", "");
        }
        let output = fakes.run(&["--without-resolver"]);
        let printed = text(&output);
        assert_eq!(output.status.code(), Some(1), "{trouble}: {printed}");
        assert!(printed.contains(expected), "{trouble}: {printed}");
        fakes.assert_taken_down();
    }
}

#[test]
fn a_cluster_of_somebody_else_is_left_alone() {
    let fakes = Fakes::new("theirs");
    fakes.write("clusters", &format!("other\n{}\n", fakes.name));
    let output = fakes.run(&[]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert_eq!(
        fakes.asked().last().map(String::as_str),
        Some("kind get clusters")
    );
}

#[test]
fn what_is_missing_is_named_and_ends_with_a_status_of_its_own() {
    let fakes = Fakes::new("missing");
    for missing in ["kind", "helm"] {
        fs::remove_file(fakes.directory.join("bin").join(missing)).expect("it was there");
    }
    fakes.write("trouble", "^docker info");
    let output = fakes
        .command(&["--name", &fakes.name])
        .env(
            "PATH",
            format!("{}:/bin", fakes.directory.join("bin").display()),
        )
        .output()
        .expect("xtask runs");
    let printed = text(&output);
    assert_eq!(output.status.code(), Some(69), "{printed}");
    assert!(!printed.contains("pipx"), "{printed}");
    for missing in ["docker (", "kind (", "helm ("] {
        assert!(printed.contains(missing), "{missing}: {printed}");
    }
    assert!(!printed.contains("kubectl ("), "{printed}");
    assert!(!fakes.asked().iter().any(|line| line.starts_with("kind")));

    // An old kind, and neither of two programs of which one is enough.
    let fakes = Fakes::new("old");
    fakes.write("kind-version", "0.26.0");
    fs::remove_file(fakes.directory.join("bin/pipx")).expect("it was there");
    let output = fakes.run(&[]);
    let printed = text(&output);
    assert_eq!(output.status.code(), Some(69), "{printed}");
    for missing in ["kind 0.27", "jinjanate", "pipx"] {
        assert!(printed.contains(missing), "{missing}: {printed}");
    }

    // No internet.
    let fakes = Fakes::new("offline");
    fakes.write("trouble", "^git ls-remote");
    let output = fakes.run(&[]);
    assert_eq!(output.status.code(), Some(69), "{}", text(&output));
    assert!(text(&output).contains("internet"), "{}", text(&output));
}

#[test]
fn ctrl_c_takes_the_cluster_down() {
    let fakes = Fakes::new("interrupted");
    // A pod that never becomes ready, until the signal comes.
    let slow = FAKE.replace(
        "case \"$said\" in",
        "case \"$said\" in\n*\" wait \"*) sleep 60 ;;",
    );
    fakes.write("fake", &slow);
    let child = fakes
        .command(&["--name", &fakes.name])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut child = child.expect("xtask runs");
    let start = Instant::now();
    while !fakes.asked().iter().any(|line| line.contains(" wait ")) {
        assert!(start.elapsed() < LIMIT, "{:#?}", fakes.asked());
        sleep(Duration::from_millis(20));
    }
    interrupt(&child);
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(130));
    fakes.assert_taken_down();
}

fn interrupt(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it runs");
}

/// What is asked of a cluster that is there, when nothing is to be left in it.
fn assert_taken_away(fakes: &Fakes) {
    let asked = fakes.asked();
    let place = |beginning: &str| asked.iter().rposition(|line| line.starts_with(beginning));
    let uninstalled = place("kubectl dnsflow uninstall").expect("it is");
    let deleted = place("kubectl delete --ignore-not-found --kustomize").expect("it is");
    assert!(uninstalled < deleted, "{asked:#?}");
    let last = asked.last().expect("something was asked");
    assert_eq!(
        last,
        "kubectl delete namespace --ignore-not-found dnsflow-story dnsflow-stranger"
    );
    let others = asked.iter().filter(|line| !line.starts_with("kubectl "));
    assert_eq!(others.collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn the_story_is_told_in_a_cluster_that_is_there_and_taken_away() {
    let fakes = Fakes::new("attached");
    let output = fakes.attach(&[]);
    let printed = text(&output);
    assert!(output.status.success(), "{printed}");
    assert!(printed.contains("the cluster is as it was"), "{printed}");
    // Without the resolver's definition there is no wildcard.
    assert!(!fakes.directory.join("wildcard").exists(), "{printed}");
    assert_taken_away(&fakes);

    let fakes = Fakes::new("attached-resolver");
    fakes.write(
        "there",
        "customresourcedefinition/dnsnameresolvers.network.openshift.io\n",
    );
    let output = fakes.attach(&[]);
    assert!(output.status.success(), "{}", text(&output));
    assert!(
        fakes.directory.join("wildcard").exists(),
        "{}",
        text(&output)
    );
}

#[test]
fn what_goes_wrong_in_a_cluster_that_is_there_leaves_nothing_there() {
    for (trouble, expected) in [
        ("wait --for", "names, firewalls and pods"),
        ("dnsflow preflight", "could it work here?"),
        ("rollout restart", "a rolling update"),
    ] {
        let fakes = Fakes::new("attached-trouble");
        fakes.write("trouble", trouble);
        let output = fakes.attach(&[]);
        let printed = text(&output);
        assert_eq!(output.status.code(), Some(1), "{trouble}: {printed}");
        assert!(printed.contains(expected), "{trouble}: {printed}");
        assert_taken_away(&fakes);
    }

    // An agent that is not content with the pods' node.
    let fakes = Fakes::new("attached-warning");
    fakes.write("check", "warning");
    let output = fakes.attach(&[]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(
        text(&output).contains("what the agents say"),
        "{}",
        text(&output)
    );
    assert_taken_away(&fakes);
}

#[test]
fn where_dnsflow_runs_already_nothing_is_touched() {
    for there in [
        "namespace/dnsflow",
        "clusterrole/dnsflow",
        "namespace dnsflow-stranger",
    ] {
        let fakes = Fakes::new("attached-theirs");
        fakes.write("there", &format!("{there}\n"));
        let output = fakes.attach(&[]);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        let asked = fakes.asked();
        let changes = asked.iter().filter(|line| {
            ["apply", "delete", "create", "patch"]
                .iter()
                .any(|verb| line.contains(verb))
        });
        assert_eq!(changes.count(), 0, "{asked:#?}");
    }
}

#[test]
fn the_manifests_name_no_image_of_their_own() {
    let directory = workspace().expect("a workspace").join("tests/kind");
    let story = fs::read_to_string(directory.join("story.yaml")).expect("a file");
    let images: Vec<&str> = story
        .lines()
        .filter_map(|line| line.trim().strip_prefix("image: "))
        .collect();
    assert_eq!(images, ["POD_IMAGE"; 3]);
}
