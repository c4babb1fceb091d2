use std::{
    fmt::Write as _,
    fs,
    os::unix::fs::symlink,
    sync::atomic::{AtomicU32, Ordering},
};

use dnsflow_core::values::firewall::Destination;
use tokio::time::timeout;

use super::*;

/// Longer than a change takes to be seen, and shorter than [`RESCAN`], which must not be what
/// finds it.
const PATIENCE: Duration = Duration::from_secs(8);

/// A directory that goes with the test.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("dnsflow-manifests-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).expect("a file");
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.0.join(name)).expect("a file");
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn firewall(namespace: &str, name: &str) -> String {
    format!(
        "apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {{namespace: {namespace}, name: default}}
spec: {{egress: [{{type: Allow, to: {{dnsName: {name}}}}}]}}
"
    )
}

fn show(firewalls: &BTreeMap<FirewallId, Firewall>) -> String {
    let mut text = String::new();
    for (id, firewall) in firewalls {
        let rules = firewall.rules.iter().map(|rule| match &rule.destination {
            Destination::Name(name) => name.written().into_owned(),
            _ => "other".to_owned(),
        });
        let rules = rules.collect::<Vec<_>>().join(" ");
        let _ = write!(text, "{}({rules}) ", id.namespace);
    }
    text.trim_end().to_owned()
}

struct Watch(mpsc::Receiver<Input>, tokio::task::JoinHandle<()>);

impl Watch {
    fn start(dir: &Path) -> Self {
        let (sender, receiver) = mpsc::channel(16);
        Self(
            receiver,
            tokio::spawn(watch_manifests(dir.to_owned(), sender, Objects::default())),
        )
    }

    /// Waits until the list is as expected; each list on the way must be one of `between`.
    async fn becomes_by_way_of(&mut self, expected: &str, between: &[&str]) {
        loop {
            let input = timeout(PATIENCE, self.0.recv()).await;
            let input = input.unwrap_or_else(|_| panic!("no update; expected `{expected}`"));
            let Some(Input::Firewalls(update)) = input else {
                panic!("not an update of firewalls: {input:?}");
            };
            assert!(update.reset);
            let firewalls = update
                .firewalls
                .into_iter()
                .map(|(id, firewall)| (id, firewall.expect("a firewall")))
                .collect();
            let shown = show(&firewalls);
            if shown == expected {
                return;
            }
            assert!(
                between.contains(&shown.as_str()),
                "`{shown}`, not `{expected}`"
            );
        }
    }

    async fn becomes(&mut self, expected: &str) {
        self.becomes_by_way_of(expected, &[]).await;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.1.abort();
    }
}

#[tokio::test]
async fn files_are_followed() {
    let dir = Temporary::new();
    dir.write("notes.txt", "not: a manifest");
    // What an editor may leave.
    dir.write(".a.yaml", &firewall("ns9", "nine.example"));
    let mut watch = Watch::start(&dir.0);
    watch.becomes("").await;
    dir.write("a.yaml", &firewall("ns1", "one.example"));
    watch.becomes("ns1(one.example)").await;
    dir.write("b.yml", &firewall("ns2", "two.example"));
    watch.becomes("ns1(one.example) ns2(two.example)").await;
    dir.write("a.yaml", &firewall("ns1", "uno.example"));
    watch.becomes("ns1(uno.example) ns2(two.example)").await;
    // Atomic replacement.
    dir.write("a.yaml.new", &firewall("ns1", "eins.example"));
    fs::rename(dir.0.join("a.yaml.new"), dir.0.join("a.yaml")).expect("a rename");
    watch.becomes("ns1(eins.example) ns2(two.example)").await;
    dir.remove("a.yaml");
    watch.becomes("ns2(two.example)").await;
    watch.0.close();
    timeout(PATIENCE, &mut watch.1)
        .await
        .expect("an end")
        .expect("no panic");
}

#[tokio::test]
async fn a_broken_file_keeps_what_it_said_and_spoils_no_other() {
    let dir = Temporary::new();
    dir.write("a.yaml", &firewall("ns1", "one.example"));
    let mut watch = Watch::start(&dir.0);
    watch.becomes("ns1(one.example)").await;
    dir.write("a.yaml", "kind: [");
    dir.write("b.yaml", &firewall("ns2", "two.example"));
    watch.becomes("ns1(one.example) ns2(two.example)").await;
    // Truncated, as before a rewrite in place.
    dir.write("a.yaml", "");
    dir.write("b.yaml", &firewall("ns2", "dos.example"));
    watch.becomes("ns1(one.example) ns2(dos.example)").await;
    dir.write("a.yaml", &firewall("ns1", "uno.example"));
    watch.becomes("ns1(uno.example) ns2(dos.example)").await;
    dir.write("a.yaml", "# nothing any more\n");
    watch.becomes("ns2(dos.example)").await;
}

/// As the kubelet mounts a ConfigMap: the files are links into `..data`, a link to a directory,
/// which is replaced by a rename.
#[tokio::test]
async fn a_config_map_mount_is_followed() {
    let dir = Temporary::new();
    let version = |name: &str, text: &str| {
        fs::create_dir(dir.0.join(name)).expect("a directory");
        fs::write(dir.0.join(name).join("a.yaml"), text).expect("a file");
        symlink(name, dir.0.join("..data_tmp")).expect("a link");
        fs::rename(dir.0.join("..data_tmp"), dir.0.join("..data")).expect("a rename");
    };
    version("..1", &firewall("ns1", "one.example"));
    symlink("..data/a.yaml", dir.0.join("a.yaml")).expect("a link");
    let mut watch = Watch::start(&dir.0);
    watch.becomes("ns1(one.example)").await;
    version("..2", &firewall("ns1", "uno.example"));
    fs::remove_dir_all(dir.0.join("..1")).expect("the old version");
    watch.becomes("ns1(uno.example)").await;
}

#[tokio::test]
async fn the_directory_may_come_go_and_be_replaced() {
    let above = Temporary::new();
    let dir = above.0.join("not/yet/here");
    let mut watch = Watch::start(&dir);
    let put = |dir: &Path, text: &str| {
        fs::create_dir_all(dir).expect("a directory");
        fs::write(dir.join("a.yaml"), text).expect("a file");
    };
    put(&dir, &firewall("ns1", "one.example"));
    watch.becomes_by_way_of("ns1(one.example)", &[""]).await;
    // Renamed away at once, so that it is the directory that is missing and no file.
    fs::rename(&dir, above.0.join("old")).expect("a rename");
    put(&above.0.join("new"), &firewall("ns1", "uno.example"));
    fs::rename(above.0.join("new"), &dir).expect("a rename");
    watch.becomes("ns1(uno.example)").await;
    // The new directory is watched now.
    put(&dir, &firewall("ns1", "eins.example"));
    watch.becomes("ns1(eins.example)").await;
    // A link in its place, then another.
    fs::rename(&dir, above.0.join("older")).expect("a rename");
    symlink(above.0.join("old"), &dir).expect("a link");
    watch.becomes("ns1(one.example)").await;
    put(&above.0.join("old"), &firewall("ns1", "un.example"));
    watch.becomes("ns1(un.example)").await;
    symlink(above.0.join("older"), above.0.join("link")).expect("a link");
    fs::rename(above.0.join("link"), &dir).expect("a rename");
    watch.becomes("ns1(eins.example)").await;
    // Deleted and made again, perhaps with the same inode number.
    fs::remove_file(&dir).expect("a link");
    for round in 0..5 {
        put(&dir, &firewall("ns2", &format!("{round}.example")));
        let expected = format!("ns2({round}.example)");
        watch.becomes_by_way_of(&expected, &[""]).await;
        fs::remove_dir_all(&dir).expect("the directory");
    }
}

/// A file that is written in place is mostly not read between two writes.
#[tokio::test]
async fn a_file_is_read_when_it_is_left_alone() {
    const ROUNDS: u32 = 20;
    let dir = Temporary::new();
    let mut watch = Watch::start(&dir.0);
    watch.becomes("").await;
    let mut half = 0;
    for round in 0..ROUNDS {
        let first = firewall("ns1", &format!("{round}.example"));
        let second = firewall("ns2", &format!("{round}.example"));
        dir.write("a.yaml", &first);
        tokio::time::sleep(Duration::from_millis(5)).await;
        dir.write("a.yaml", &format!("{first}---\n{second}"));
        loop {
            let input = timeout(PATIENCE, watch.0.recv()).await.expect("an update");
            let Some(Input::Firewalls(update)) = input else {
                panic!("not an update of firewalls: {input:?}");
            };
            if update.firewalls.len() == 2 {
                break;
            }
            half += 1;
        }
    }
    assert!(
        half <= ROUNDS / 2,
        "half a file was read {half} times of {ROUNDS}"
    );
}

/// The reasons in a directory with these files, one per line.
fn reasons(files: &[(&str, &str)]) -> (String, String) {
    let dir = Temporary::new();
    for (name, text) in files {
        dir.write(name, text);
    }
    let mut directory = Directory::new(dir.0.clone());
    let snapshot = directory.read().expect("a directory");
    let prefix = format!("{}/", dir.0.display());
    let mut text = String::new();
    for (object, reasons) in &snapshot.reasons {
        for reason in reasons {
            let _ = writeln!(text, "{object}: {reason}");
        }
    }
    (
        show(&snapshot.firewalls),
        text.replace(&prefix, "").trim_end().to_owned(),
    )
}

#[test]
fn lists_and_other_objects_are_read() {
    let one = r#"{"apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall", "metadata": {"namespace": "ns1", "name": "default"}, "spec": {"egress": []}}"#;
    let two = one.replace("ns1", "ns2");
    let json = format!(r#"{{"apiVersion": "v1", "kind": "List", "items": [{one}, {two}]}}"#);
    let yaml = format!(
        "apiVersion: v1\nkind: Namespace\nmetadata: {{name: ns3}}\n---\n{}---\n---\n{}",
        firewall("ns3", "three.example"),
        firewall("ns4", "four.example"),
    );
    let (firewalls, reasons) = reasons(&[("a.json", &json), ("b.yaml", &yaml)]);
    assert_eq!(
        firewalls,
        "ns1() ns2() ns3(three.example) ns4(four.example)"
    );
    assert_eq!(reasons, "");
}

#[test]
fn what_cannot_be_used_is_named() {
    let files = [
        (
            "a.yaml",
            firewall("ns1", "a..b") + "---\n" + &firewall("ns2", "two.example"),
        ),
        ("b.yaml", firewall("ns2", "other.example")),
        (
            "c.yaml",
            firewall("ns3", "c.example").replace("org/v1", "org/v2"),
        ),
        (
            "d.yaml",
            firewall("ns4", "d.example").replace("name: default", "name: mine"),
        ),
        ("e.yaml", "- 1\n---\nkind: List\n".to_owned()),
        ("f.yaml", "a: b: c".to_owned()),
        ("g.json", "{".to_owned()),
        ("h.yaml", String::new()),
    ];
    let (firewalls, text) = reasons(&files.each_ref().map(|(name, text)| (*name, text.as_str())));
    assert_eq!(firewalls, "ns1(other) ns2(two.example)");
    let expected = [
        "a.yaml: ns1/default: rule 0: dnsName \"a..b\": the name has an empty label; write a.b",
        "b.yaml: ns2/default: ignored: a.yaml already defines this namespace's firewall; remove one",
        "c.yaml: the apiVersion of an EgressFirewall is \"k8s.ovn.org/v2\"; write k8s.ovn.org/v1",
        "d.yaml: ns4/mine: metadata.name is not `default`, the only name that ovn-kubernetes uses; rename it",
        "e.yaml: an object has no kind; write apiVersion: k8s.ovn.org/v1 and kind: EgressFirewall",
        "e.yaml: a List has no items; write a list of objects",
        "f.yaml: document 1, line 1, column 5: mapping values are not allowed in this context",
        "g.json: document 1, line 1, column 1: EOF while parsing an object",
        "h.yaml: is empty and taken for half written; delete it if it is not needed",
    ];
    for (line, expected) in text.lines().zip(expected) {
        assert_eq!(line, expected);
    }
    assert_eq!(text.lines().count(), expected.len(), "{text}");
}

#[test]
fn an_unreadable_object_keeps_what_it_said() {
    let dir = Temporary::new();
    dir.write("a.yaml", &firewall("ns1", "one.example"));
    let mut directory = Directory::new(dir.0.clone());
    directory.read().expect("a directory");
    let odd = "apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {namespace: ns1, name: default}
spec: {egress: all}
---
";
    dir.write(
        "a.yaml",
        &(odd.to_owned() + &firewall("ns2", "two.example")),
    );
    let snapshot = directory.read().expect("a directory");
    assert_eq!(
        show(&snapshot.firewalls),
        "ns1(one.example) ns2(two.example)"
    );
    let text = format!("{:?}", snapshot.reasons);
    assert!(
        text.contains("spec.egress is not a list") && text.contains("stays in force"),
        "{text}"
    );
}

#[test]
fn sizes_are_limited_and_special_files_are_refused() {
    let dir = Temporary::new();
    // Refused at the first character, so that nothing is spent on the rest.
    let text = "}".repeat(usize::try_from(MAX_FILE_BYTES).expect("a size"));
    for index in 0..17 {
        dir.write(&format!("{index:02}.json"), &text);
    }
    dir.write("large.yaml", &(text + "}"));
    fs::write(dir.0.join("0.yaml"), b"a: \xff").expect("a file");
    fs::create_dir(dir.0.join("dir.yaml")).expect("a directory");
    let fifo = dir.0.join("fifo.yaml");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0)
        .expect("a FIFO");
    symlink("nowhere", dir.0.join("link.yaml")).expect("a link");
    let snapshot = Directory::new(dir.0.clone()).read().expect("a directory");
    let reason = |name: &str| {
        let key = dir.0.join(name).display().to_string();
        snapshot
            .reasons
            .get(&key)
            .map_or(String::new(), |reasons| reasons.join(" "))
    };
    assert!(reason("15.json").contains("line 1, column 1"));
    assert_eq!(
        reason("16.json"),
        "is not read: the files before it already hold 64 MiB"
    );
    assert_eq!(reason("large.yaml"), "is larger than 4 MiB; split it");
    assert_eq!(reason("0.yaml"), "is not UTF-8 text at byte 3");
    assert_eq!(
        reason("dir.yaml"),
        "cannot be read: it is not a regular file"
    );
    assert_eq!(
        reason("fifo.yaml"),
        "cannot be read: it is not a regular file"
    );
    assert!(
        reason("link.yaml").starts_with("cannot be opened: "),
        "{}",
        reason("link.yaml")
    );
}

#[test]
fn the_number_of_files_is_limited() {
    let dir = Temporary::new();
    for index in 0..=MAX_FILES {
        dir.write(&format!("{index:04}.yaml"), "{kind: Namespace}");
    }
    let snapshot = Directory::new(dir.0.clone()).read().expect("a directory");
    assert_eq!(
        snapshot.too_many.as_deref(),
        Some("it has 1025 manifests; those from 1024.yaml on are ignored, keep to 1024")
    );
    assert_eq!(snapshot.reasons.len(), MAX_FILES);
}

#[test]
fn files_are_read_by_themselves_and_an_error_names_the_file() {
    let directory = Temporary::new();
    directory.write("a.yaml", &firewall("a", "a.test"));
    directory.write("b.yaml", &firewall("b", "\"*.*\""));
    directory.write("other.yaml", "kind: Pod\nmetadata: {name: a}\n");
    directory.write("bad.json", "{");
    let path = |name: &str| directory.0.join(name);
    let files = Files::read(&[path("a.yaml"), path("b.yaml"), path("other.yaml")]);
    let files = files.expect("they can be read");
    let ids = files.firewalls.iter().map(|(id, ..)| id.to_string());
    assert_eq!(ids.collect::<Vec<_>>(), ["a/default", "b/default"]);
    assert!(files.firewalls[0].2.is_empty());
    let problems = &files.firewalls[1].2;
    assert!(problems[0].starts_with("rule 0: dnsName"), "{problems:?}");
    for (paths, expected) in [
        (vec![path("bad.json")], "bad.json: document 1, line 1"),
        (vec![path("none.yaml")], "none.yaml: cannot be opened"),
        (vec![directory.0.clone()], "it is not a regular file"),
        (
            vec![path("a.yaml"), path("a.yaml")],
            "a second EgressFirewall a/default",
        ),
    ] {
        let error = Files::read(&paths).expect_err(expected);
        assert!(error.contains(expected), "{error}");
    }
}
