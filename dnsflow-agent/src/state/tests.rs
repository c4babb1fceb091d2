use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
};

use super::*;

/// A directory of its own, removed at the end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let name = format!("dnsflow-state-{name}-{}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).expect("the directory is there");
    }
}

fn save(dir: &Path, entries: &[SavedEntry]) -> Result<(), StateError> {
    let mut writing = Writing::begin(dir, wall_clock_s())?;
    writing.add(&SavedPart::Entries(entries.to_vec()))?;
    writing.end()
}

fn entries() -> Vec<SavedEntry> {
    let odd = DomainName::from_labels([&b"a.b"[..], b"\xff"]).expect("labels");
    let saved = |name: DomainName| SavedName {
        name,
        rest: Duration::from_secs(3000),
        deny_rest: Duration::from_secs(3500),
        is_denied: false,
    };
    vec![SavedEntry {
        port: "ns1_p1".into(),
        pod: Some("uid".into()),
        address: "203.0.113.1".parse().expect("an address"),
        names: vec![
            saved("www.example.com".parse().expect("a name")),
            saved(odd),
        ],
    }]
}

#[test]
fn what_is_saved_comes_back() {
    let dir = Dir::new("back");
    assert_eq!(load(&dir.0).expect("nothing").entries, []);
    let mut entries = entries();
    entries[0].names[1].is_denied = true;
    // Of the same logical port.
    entries.push(SavedEntry {
        pod: Some("another".into()),
        names: Vec::new(),
        ..entries[0].clone()
    });
    save(&dir.0, &entries).expect("saved");
    let mut back = load(&dir.0).expect("loaded").entries;
    for name in &mut back[0].names {
        // A second may have passed.
        for (rest, saved_s) in [(&mut name.rest, 3000), (&mut name.deny_rest, 3500)] {
            assert!(*rest >= Duration::from_secs(saved_s - 2), "{rest:?}");
            *rest = Duration::from_secs(saved_s);
        }
    }
    assert_eq!(back, entries);
    remove(&dir.0).expect("removed");
    assert_eq!(load(&dir.0).expect("nothing").entries, []);
}

#[test]
fn what_cannot_be_used_is_set_aside_with_the_reason() {
    let dir = Dir::new("aside");
    fs::create_dir_all(&dir.0).expect("made");
    let line = |line: &str| {
        let end = if line.contains("end") {
            ""
        } else {
            "\n{\"end\":1}"
        };
        format!("{{\"version\":3,\"saved_at_s\":1}}\n{line}{end}")
    };
    let before = |name: &str| {
        let entry = r#"{"port":"p","pod":null,"address":"192.0.2.1","names":[["NAME",1,1]]}"#;
        let entry = entry.replace("NAME", name);
        format!("{{\"version\":2,\"saved_at_s\":1,\"entries\":[{entry}]}}")
    };
    let an_entry = "{\"port\":[\"p\",null]}\n{\"address\":[\"192.0.2.1\",[[0,1,1]]]}";
    for (content, reason) in [
        (String::new(), "EOF"),
        ("{\"version\":3".into(), "EOF"),
        (
            "{\"version\":1,\"saved_at_s\":1,\"entries\":[]}".into(),
            "version 1 instead of 3",
        ),
        (before("a..b"), "`a..b`: the name has an empty label"),
        (line("{\"end\":1}"), "entries are missing"),
        (
            line("{\"name\":\"a..b\"}"),
            "`a..b`: the name has an empty label",
        ),
        (
            line("{\"wire\":\"0361\"}"),
            "`0361` is no name in wire format",
        ),
        (
            line("{\"wire\":\"01x1\"}"),
            "`01x1` is no name in wire format",
        ),
        (
            line("{\"address\":[\"192.0.2.1\",[]]}"),
            "an entry has no port",
        ),
        (line(an_entry), "a name is missing"),
        (line("{\"end\":0}\n{\"name\":\"a.test\"}"), "behind the end"),
        (line("{\"entry\":1}"), "unknown variant `entry`"),
    ] {
        fs::write(dir.0.join(FILE), content).expect("written");
        let error = load(&dir.0).expect_err("unusable").to_string();
        assert!(error.contains(reason), "{error}");
        assert!(!dir.0.join(FILE).exists());
        assert_eq!(load(&dir.0).expect("nothing").entries, []);
    }
}

#[test]
fn time_passes_between_runs() {
    let dir = Dir::new("age");
    save(&dir.0, &entries()).expect("saved");
    let path = dir.0.join(FILE);
    let text = fs::read_to_string(&path).expect("read");
    // The next second may have begun since.
    let Head {
        saved_at_s: now, ..
    } = serde_json::from_str(text.lines().next().expect("a line")).expect("the form");
    let older = text.replace(
        &format!("\"saved_at_s\":{now}"),
        &format!("\"saved_at_s\":{}", now - 1000),
    );
    fs::write(&path, older).expect("written");
    let name = load(&dir.0).expect("loaded").entries[0].names[0].clone();
    assert!(name.rest <= Duration::from_secs(2000), "{name:?}");
    assert!(name.deny_rest <= Duration::from_secs(2500), "{name:?}");
}

#[test]
fn a_clock_that_was_set_adds_no_time() {
    let dir = Dir::new("clock");
    save(&dir.0, &entries()).expect("saved");
    let path = dir.0.join(FILE);
    let text = fs::read_to_string(&path).expect("read");
    let Head {
        saved_at_s: now, ..
    } = serde_json::from_str(text.lines().next().expect("a line")).expect("the form");
    let rest = |saved_at_s: u64| {
        let [before, after] = [now, saved_at_s].map(|at| format!("\"saved_at_s\":{at}"));
        fs::write(&path, text.replace(&before, &after)).expect("written");
        let name = load(&dir.0).expect("loaded").entries[0].names[0].clone();
        (name.rest.as_secs(), name.deny_rest.as_secs())
    };
    // Set back by a year: what was left when it was saved.
    assert_eq!(rest(now + 31_536_000), (3000, 3500));
    assert_eq!(rest(u64::MAX), (3000, 3500));
    // Set forward: nothing is left, and what is in use stays open.
    assert_eq!(rest(now - 31_536_000), (0, 0));
    assert_eq!(rest(0), (0, 0));
}

#[test]
fn what_the_version_before_has_saved_is_read() {
    let dir = Dir::new("before");
    fs::create_dir_all(&dir.0).expect("made");
    let content = format!(
        r#"{{"version":2,"saved_at_s":{},"entries":[{{"port":"ns1_p1","pod":"uid","address":"203.0.113.1","names":[["www.example.com",3000,3500],["a\\.b.\\255",3000,3500]]}}]}}"#,
        // A clock that is set back: nothing is taken off.
        u64::MAX,
    );
    fs::write(dir.0.join(FILE), content).expect("written");
    assert_eq!(load(&dir.0).expect("loaded").entries, entries());
}

#[test]
fn each_name_is_written_once_and_an_octet_takes_two_bytes_at_most() {
    let dir = Dir::new("once");
    let longest = [&[0xff_u8; 63][..], &[b'\\'; 63], &[0; 63], &[b'.'; 61]];
    let names = [
        DomainName::from_labels(longest).expect("a name"),
        "www.example.com".parse().expect("a name"),
    ];
    let mut entries = Vec::new();
    for port in ["ns1_p1", "ns1_p2"] {
        for host in 0..8 {
            entries.push(SavedEntry {
                port: port.into(),
                pod: None,
                address: [203, 0, 113, host].into(),
                names: names
                    .iter()
                    .map(|name| SavedName {
                        name: name.clone(),
                        rest: Duration::ZERO,
                        deny_rest: Duration::ZERO,
                        is_denied: false,
                    })
                    .collect(),
            });
        }
    }
    save(&dir.0, &entries).expect("saved");
    assert_eq!(load(&dir.0).expect("loaded").entries, entries);
    let text = fs::read_to_string(dir.0.join(FILE)).expect("read");
    assert_eq!(text.matches("www.example.com").count(), 1);
    assert_eq!(text.matches("ns1_p1").count(), 1);
    let longest = text.lines().map(str::len).max().expect("a line");
    assert_eq!(longest, "{\"wire\":\"\"}".len() + 2 * names[0].wire().len());
    // The first line, two ports, two names, the entries, the end.
    assert_eq!(text.lines().count(), 1 + 2 + 2 + 16 + 1);
}

#[test]
fn until_its_end_a_snapshot_takes_the_place_of_no_other() {
    let dir = Dir::new("unfinished");
    save(&dir.0, &entries()).expect("saved");
    let mut writing = Writing::begin(&dir.0, 0).expect("begun");
    let nothing = SavedPart::Entries(Vec::new());
    writing.add(&nothing).expect("written");
    assert_eq!(load(&dir.0).expect("the last one").entries.len(), 1);
    drop(writing);
    assert_eq!(load(&dir.0).expect("the last one").entries.len(), 1);
    save(&dir.0, &[]).expect("saved");
    assert_eq!(load(&dir.0).expect("another one").entries, []);
}

fn mode(path: &Path) -> u32 {
    let metadata = fs::symlink_metadata(path).expect("it is there");
    metadata.mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
}

#[test]
fn directory_and_file_are_closed_to_other_users() {
    let dir = Dir::new("closed");
    save(&dir.0, &entries()).expect("saved");
    assert_eq!(mode(&dir.0), 0o700);
    assert_eq!(mode(&dir.0.join(FILE)), 0o600);
    // As the kubelet makes it, with what a crash leaves behind.
    set_mode(&dir.0, 0o755);
    fs::write(dir.0.join("cache.json.new"), "half").expect("written");
    save(&dir.0, &entries()).expect("saved");
    assert_eq!(mode(&dir.0), 0o700);
    let found = fs::read_dir(&dir.0).expect("it can be read").count();
    assert_eq!(found, 1, "nothing but the snapshot is left");
}

#[test]
fn no_symbolic_link_is_followed() {
    let dir = Dir::new("links");
    let victim = Dir::new("victim");
    save(&victim.0, &entries()).expect("saved");
    fs::create_dir_all(&dir.0).expect("made");
    let file = victim.0.join(FILE);
    let content = fs::read_to_string(&file).expect("read");
    symlink(&file, dir.0.join(FILE)).expect("linked");
    symlink(&file, dir.0.join("cache.json.new")).expect("linked");
    let error = load(&dir.0).expect_err("a link").to_string();
    assert!(error.contains("symbolic links"), "{error}");
    save(&dir.0, &[]).expect("saved");
    assert_eq!(load(&dir.0).expect("a file now").entries, []);
    assert_eq!(fs::read_to_string(&file).expect("read"), content);
    // Nor is the directory one, with or without a slash at the end.
    let link = dir.0.join("link");
    symlink(&victim.0, &link).expect("linked");
    for path in [link.clone(), link.join("")] {
        assert!(load(&path).is_err(), "{}", path.display());
        assert!(save(&path, &[]).is_err(), "{}", path.display());
    }
}

#[test]
fn what_others_may_have_written_is_not_believed() {
    let dir = Dir::new("others");
    save(&dir.0, &entries()).expect("saved");
    set_mode(&dir.0.join(FILE), 0o622);
    let error = load(&dir.0).expect_err("anybody's").to_string();
    assert!(error.contains("other users"), "{error}");
    save(&dir.0, &entries()).expect("it is replaced");
    load(&dir.0).expect("it is ours");
    // A directory that is not the agent's alone stays as it is.
    fs::write(dir.0.join("other"), "").expect("written");
    set_mode(&dir.0, 0o755);
    load(&dir.0).expect("nobody else can write there");
    assert_eq!(mode(&dir.0), 0o755);
    set_mode(&dir.0, 0o1777);
    let error = save(&dir.0, &[]).expect_err("anybody's").to_string();
    assert!(error.contains("other users"), "{error}");
    assert_eq!(mode(&dir.0), 0o1777);
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    let dir = Dir::new("fifo");
    fs::create_dir_all(&dir.0).expect("made");
    let fifo = rustix::fs::Mode::from_raw_mode(0o600);
    let made = rustix::fs::mkfifoat(rustix::fs::CWD, dir.0.join(FILE), fifo);
    made.expect("made");
    let error = load(&dir.0).expect_err("a pipe").to_string();
    assert!(error.contains("no regular file"), "{error}");
}

#[test]
fn rules_come_back() {
    let dir = Dir::new("rules");
    let name = |text: &str| text.parse::<DomainName>().expect("a name");
    let rules = vec![SavedRules {
        namespace: "ns1".into(),
        is_partial: true,
        rules: vec![
            (
                (
                    name("example.com"),
                    NamePattern::Subdomains,
                    RuleAction::Allow,
                ),
                10_000,
            ),
            (
                (name("example.net"), NamePattern::OneLabel, RuleAction::Deny),
                9999,
            ),
        ],
    }];
    let mut writing = Writing::begin(&dir.0, wall_clock_s()).expect("begun");
    for part in [
        SavedPart::Rules(rules.clone()),
        SavedPart::Entries(entries()),
    ] {
        writing.add(&part).expect("written");
    }
    writing.end().expect("saved");
    let saved = load(&dir.0).expect("loaded");
    assert_eq!((saved.rules, saved.entries.len()), (rules, 1));
}
