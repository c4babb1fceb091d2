use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
};

use dnsflow_core::{
    cache::journal::{Patterns, RecordedTerm, SavedGroup},
    policy::rules::NamePattern,
    values::{flow::Tag, ids::PortId, limits::PATTERNS_MAX, name::DomainName},
};

use super::*;

/// A directory of its own, removed at the end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let name = format!("dnsflow-state-{name}-{}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    fn file(&self) -> PathBuf {
        self.0.join(FILE)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).expect("the directory is there");
    }
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::default() + Duration::from_secs(seconds)
}

fn name(text: &str) -> DomainName {
    text.parse().expect("a name")
}

fn told(host: u8, name: DomainName) -> Record {
    Record::Name {
        port: PortId(7),
        address: [203, 0, 113, host].into(),
        name,
        term: RecordedTerm {
            until: at(160),
            deny_until: at(3700),
            is_denied: host == 2,
            is_ended: host == 3,
        },
    }
}

/// A group with these patterns, in their order.
fn group(scope: u16, patterns: impl IntoIterator<Item = (DomainName, NamePattern)>) -> Record {
    let group = SavedGroup {
        datapath: u32::MAX,
        port_groups: ["a1".into(), "a2".into()].into(),
        patterns: Patterns {
            is_ipv6: scope == 1,
            are_denials: scope == 2,
            patterns: patterns.into_iter().collect(),
        },
    };
    Record::Group {
        tag: Tag::new(scope, Tag::NUMBER_MAX),
        group: Some(group),
    }
}

/// A group with as many patterns as one may have, all with the longest names that there are.
fn largest_group() -> Record {
    let names = (0..PATTERNS_MAX).map(|number| {
        let last = format!("{number:061}");
        let labels = [&[b'a'; 63][..], &[b'b'; 63], &[b'c'; 63], last.as_bytes()];
        let name = DomainName::from_labels(labels).expect("labels");
        (name, NamePattern::Subdomains)
    });
    let names: std::collections::BTreeSet<_> = names.collect();
    group(3, names)
}

/// Some of each kind.
fn records() -> Vec<Record> {
    let port = |number, name: &str, pod: Option<&str>| Record::Port {
        number: PortId(number),
        name: name.into(),
        pod: pod.map(Into::into),
    };
    let gone = Record::NameGone {
        port: PortId(7),
        address: [203, 0, 113, 4].into(),
        name: name("gone.example.com"),
    };
    let rules = |namespace: &str, hash| Record::Rules {
        namespace: namespace.into(),
        hash,
    };
    let odd = DomainName::from_labels([&b"a.b"[..], b"\xff"]).expect("labels");
    vec![
        port(7, "ns1_p1", Some("uid")),
        port(8, "ns1_p2", None),
        told(1, name("www.example.com")),
        told(2, odd),
        told(4, name("gone.example.com")),
        gone,
        Record::PortGone("ns1_p2".into()),
        rules("ns1", Some(u64::MAX)),
        rules("ns2", Some(3)),
        rules("ns2", None),
        Record::Denials(at(3600)),
        group(
            1,
            [
                (name("example.com"), NamePattern::Exact),
                (name("example.com"), NamePattern::Subdomains),
                (name("example.com"), NamePattern::OneLabel),
            ],
        ),
        group(2, [(name("www.example.com"), NamePattern::OneLabel)]),
        group(4, []),
        Record::Group {
            tag: Tag::new(4, Tag::NUMBER_MAX),
            group: None,
        },
    ]
}

fn folded<'a>(records: impl IntoIterator<Item = &'a Record>) -> Saved {
    let mut folding = Folding::default();
    let records = records.into_iter().cloned();
    records.for_each(|record| folding.take(record));
    folding.end(at(100))
}

/// The journal, and what was left in it.
fn opened(dir: &Dir) -> (Journal, Option<Saved>) {
    let (journal, saved, refusal) = open(&dir.0, at(100)).expect("it can be used");
    assert!(refusal.is_none(), "{refusal:?}");
    (journal, saved)
}

fn append(journal: &mut Journal, records: &[Record]) {
    journal.append(records, at(100)).expect("there is space");
}

#[test]
fn what_is_recorded_comes_back() {
    let dir = Dir::new("back");
    let (mut journal, saved) = opened(&dir);
    assert_eq!(saved, None);
    for record in records() {
        append(&mut journal, &[record]);
    }
    append(&mut journal, &[largest_group()]);
    drop(journal);
    let (_, saved) = opened(&dir);
    let saved = saved.expect("something was left");
    let all = records();
    assert_eq!(saved, folded(all.iter().chain([&largest_group()])));
    assert_eq!(saved.entries.len(), 2);
    assert_eq!(saved.rules.len(), 1);
    assert_eq!(saved.groups.len(), 3);
    remove(&dir.0).expect("removed");
    assert_eq!(opened(&dir).1, None);
}

/// The agent is killed in a record, at each of its octets. The next one appends behind the records that are whole.
#[test]
fn a_record_that_is_not_whole_ends_the_journal() {
    let dir = Dir::new("torn");
    let (mut journal, _) = opened(&dir);
    append(&mut journal, &records());
    let len = fs::metadata(dir.file()).expect("a file").len();
    append(&mut journal, &[told(9, name("last.example.com"))]);
    drop(journal);
    let whole = fs::read(dir.file()).expect("read");
    let further = told(10, name("further.example.com"));
    for cut_at in len as usize..whole.len() {
        fs::write(dir.file(), &whole[..cut_at]).expect("written");
        let (mut journal, saved) = opened(&dir);
        assert_eq!(saved, Some(folded(&records())), "{cut_at}");
        append(&mut journal, std::slice::from_ref(&further));
        drop(journal);
        let (_, saved) = opened(&dir);
        let all = records();
        assert_eq!(
            saved,
            Some(folded(all.iter().chain([&further]))),
            "{cut_at}"
        );
    }
}

#[test]
fn nothing_is_left_of_another_boot() {
    let dir = Dir::new("boot");
    let (mut journal, _) = opened(&dir);
    append(&mut journal, &records());
    let mut file = fs::read(dir.file()).expect("read");
    let of_boot = FORM.len() + 1;
    file[of_boot] = if file[of_boot] == b'0' { b'1' } else { b'0' };
    fs::write(dir.file(), file).expect("written");
    assert_eq!(opened(&dir).1, None);
    let left = fs::metadata(dir.file()).expect("a new file").len();
    assert_eq!(left, head().expect("a boot").len() as u64);
}

#[test]
fn what_cannot_be_used_is_set_aside_with_the_reason() {
    let dir = Dir::new("aside");
    let head = head().expect("a boot").into_bytes();
    let record = |octets: &[u8]| {
        let len = u16::try_from(octets.len()).expect("a short record");
        [&head[..], &len.to_le_bytes(), octets].concat()
    };
    for (content, reason) in [
        (Vec::new(), "another form"),
        (b"{\"version\":3}\n".to_vec(), "another form"),
        (record(&[200]), "behind"),
        // A port's name is gone, and an octet is left.
        (record(&[1, 1, b'p', 0]), "1 octets are left"),
        // A label is longer than what there is of the name.
        (record(&[3, 7, 0, 192, 0, 2, 1, 2, 9, b'a']), "is no name"),
    ] {
        drop(opened(&dir));
        fs::write(dir.file(), content).expect("written");
        let (_, saved, refusal) = open(&dir.0, at(100)).expect("a new one is begun");
        assert_eq!(saved, None);
        let refusal = refusal.expect("unusable").to_string();
        assert!(refusal.contains(reason), "{refusal}");
        assert!(dir.0.join(UNUSABLE).is_file());
        assert_eq!(opened(&dir).1, Some(Saved::default()));
    }
}

/// Parts of all that lives, which come in turns with records.
#[test]
fn a_new_file_has_what_lives_and_what_comes_meanwhile() {
    let dir = Dir::new("anew");
    let (mut journal, _) = opened(&dir);
    append(&mut journal, &records());
    let renewed = told(1, name("www.example.com"));
    while !journal.is_rewriting() {
        append(&mut journal, std::slice::from_ref(&renewed));
        journal.begin_if_due(at(100)).expect("there is space");
    }
    let before = fs::metadata(dir.file()).expect("a file").len();
    assert!(before >= REWRITE_AT_LEAST);
    let meanwhile = told(5, name("meanwhile.example.com"));
    let mut left = records().into_iter();
    let all: Vec<Record> = records().into_iter().chain([meanwhile.clone()]).collect();
    while journal.is_rewriting() {
        // A part of it, or the end.
        let part = left.next().map(|record| vec![record]);
        let is_port = matches!(part.as_deref(), Some([Record::PortGone(_)]));
        journal.go_on(|_| part, at(100)).expect("there is space");
        if is_port {
            append(&mut journal, std::slice::from_ref(&meanwhile));
        }
        // Killed at any time.
        let (mut folding, file) = (Folding::default(), fs::read(dir.file()).expect("read"));
        let mut octets = &file[head().expect("a boot").len()..];
        while let form::Read::Record(record, _) = form::read(&mut octets).expect("read") {
            folding.take(record);
        }
        let found = folding.end(at(100));
        assert!([folded(&all), folded(&records())].contains(&found));
    }
    let after = fs::metadata(dir.file()).expect("a file").len();
    assert!(after < 1000, "{before} before, {after} now");
    append(&mut journal, &[told(6, name("behind.example.com"))]);
    drop(journal);
    let (_, saved) = opened(&dir);
    let behind = told(6, name("behind.example.com"));
    assert_eq!(saved, Some(folded(all.iter().chain([&behind]))));
}

/// All that lives, in one part. Then the file whose place it took is given back.
fn rewrite(journal: &mut Journal, all: &[Record]) {
    let mut parts = [all.to_vec()].into_iter();
    while journal.is_rewriting() {
        let written = journal.go_on(|_| parts.next(), at(100));
        written.expect("there is space");
    }
}

/// A file into which nothing can be written.
fn full() -> Appended {
    let file = File::options().append(true).open("/dev/full");
    let file = file.expect("Linux has one");
    Appended { file, len: 100 }
}

/// The file system takes milliseconds to give back a large file at once, in which answers would wait.
#[test]
fn a_file_that_is_replaced_is_given_back_piece_by_piece() {
    let dir = Dir::new("pieces");
    let (mut journal, _) = opened(&dir);
    let many = vec![told(1, name("www.example.com")); 10_000];
    let written = |journal: &Journal| journal.file.as_ref().map_or(0, |file| file.len);
    while written(&journal) <= 2 * CUT {
        append(&mut journal, &many);
    }
    let replaced = File::open(dir.file()).expect("to read");
    let mut len = written(&journal);
    journal.begin_if_due(at(100)).expect("there is space");
    let mut parts = [records()].into_iter();
    while journal.is_rewriting() {
        journal.go_on(|_| parts.next(), at(100)).expect("written");
        let left = replaced.metadata().expect("it is open").len();
        assert!(left >= len.saturating_sub(CUT), "{left} of {len}");
        len = left;
    }
    assert!(len <= CUT);
    assert_eq!(opened(&dir).1, Some(folded(&records())));
}

/// What comes behind records that are missing would be believed without them.
#[test]
fn a_file_that_takes_no_records_goes_until_a_new_one_takes_its_place() {
    let dir = Dir::new("goes");
    let (mut journal, _) = opened(&dir);
    append(&mut journal, &records());
    journal.file = Some(full());
    let lost = [told(8, name("lost.example.com"))];
    let error = journal.append(&lost, at(100)).expect_err("it is full");
    assert!(error.to_string().contains("No space left"), "{error}");
    assert_eq!((find(&dir.0), journal.take_lost()), (None, 1));
    let behind = [told(9, name("behind.example.com"))];
    append(&mut journal, &behind);
    assert_eq!((find(&dir.0), journal.take_lost()), (None, 1));
    let again = at(100) + RETRY_INTERVAL;
    assert_eq!(journal.deadline(), Some(again));
    journal.begin_if_due(again).expect("there is space");
    let all: Vec<Record> = [records(), lost.to_vec(), behind.to_vec()].concat();
    rewrite(&mut journal, &all);
    assert_eq!(opened(&dir).1, Some(folded(&all)));
    // One that is given up leaves nothing.
    journal.begin().expect("there is space");
    journal.give_up(at(100));
    let found = fs::read_dir(&dir.0).expect("it can be read").count();
    assert_eq!((found, journal.take_lost()), (1, 0));
}

/// Some are in a new file alone, which has no space for the others, or cannot take the place of the old one.
#[test]
fn records_of_a_new_file_that_is_given_up_are_counted() {
    for has_old in [true, false] {
        let dir = Dir::new("given-up");
        let (mut journal, _) = opened(&dir);
        append(&mut journal, &records());
        journal.begin().expect("there is space");
        if !has_old {
            journal.end_file();
        }
        append(&mut journal, &[told(8, name("a.example.com"))]);
        assert_eq!(journal.take_lost(), 0, "the new file has it");
        journal.rewriting.as_mut().expect("it is begun").file = full();
        let behind = [told(9, name("b.example.com"))];
        journal.append(&behind, at(100)).expect_err("it is full");
        let lost = if has_old { 0 } else { 2 };
        assert_eq!(journal.take_lost(), lost, "old file: {has_old}");
    }
    let dir = Dir::new("in-the-way");
    let (mut journal, _) = opened(&dir);
    journal.begin().expect("there is space");
    journal.end_file();
    append(&mut journal, &records()[..2]);
    fs::create_dir(dir.file()).expect("nothing is there");
    journal.go_on(|_| None, at(100)).expect_err("no file");
    assert_eq!(journal.take_lost(), 2);
}

/// An edit denies the names of all pods, and is taken back while a new file is written.
#[test]
fn records_that_come_meanwhile_put_no_further_file_off() {
    let dir = Dir::new("edits");
    let (mut journal, _) = opened(&dir);
    let live = records();
    append(&mut journal, &live);
    let edit: Vec<Record> = (0..=u8::MAX)
        .flat_map(|host| vec![told(host, name("a.test")); 500])
        .collect();
    for _ in 0..3 {
        append(&mut journal, &edit);
        assert!(
            journal.buffer.capacity() < 4 * form::PIECE,
            "it is written in pieces"
        );
        journal.begin_if_due(at(100)).expect("there is space");
        assert!(journal.is_rewriting());
        append(&mut journal, &edit);
        rewrite(&mut journal, &live);
    }
    let Appended { len, .. } = journal.file.as_ref().expect("a file");
    assert!(*len > 2 * REWRITE_AT_LEAST, "{len}");
    // However much lives.
    journal.begin().expect("there is space");
    let rewriting = journal.rewriting.as_mut().expect("it is begun");
    rewriting.live = SIZE_MAX;
    rewrite(&mut journal, &live);
    assert_eq!(journal.rewrite_at, REWRITE_AT_MOST);
}

/// The next start would not read it.
#[test]
fn a_file_grows_no_larger_than_one_that_is_read() {
    let dir = Dir::new("grows");
    let (mut journal, _) = opened(&dir);
    let Appended { file, len } = journal.file.as_mut().expect("a file");
    file.set_len(SIZE_MAX - 10).expect("sparse");
    *len = SIZE_MAX - 10;
    let record = [told(8, name("a.example.com"))];
    let error = journal.append(&record, at(100)).expect_err("it is large");
    assert!(error.to_string().contains("file too large"), "{error}");
    assert_eq!(find(&dir.0), None);
}

#[test]
fn a_file_that_is_too_large_goes() {
    let dir = Dir::new("large");
    drop(opened(&dir));
    let file = File::options().write(true).open(dir.file());
    file.and_then(|file| file.set_len(SIZE_MAX + 1))
        .expect("sparse");
    let (_, saved, refusal) = open(&dir.0, at(100)).expect("a new one is begun");
    assert_eq!(saved, None);
    assert!(matches!(refusal, Some(StateError::TooLarge { .. })));
    let found = fs::read_dir(&dir.0).expect("it can be read").count();
    assert_eq!(found, 1);
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
    drop(opened(&dir));
    assert_eq!(mode(&dir.0), 0o700);
    assert_eq!(mode(&dir.file()), 0o600);
    fs::remove_file(dir.file()).expect("it is there");
    // As the kubelet makes it, with what an end in the midst of a new file leaves behind.
    set_mode(&dir.0, 0o755);
    fs::write(dir.0.join("journal.new"), "half").expect("written");
    drop(opened(&dir));
    assert_eq!(mode(&dir.0), 0o700);
    let found = fs::read_dir(&dir.0).expect("it can be read").count();
    assert_eq!(found, 1, "nothing but the journal is left");
}

#[test]
fn no_symbolic_link_is_followed() {
    let dir = Dir::new("links");
    let victim = Dir::new("victim");
    append(&mut opened(&victim).0, &records());
    fs::create_dir_all(&dir.0).expect("made");
    let content = fs::read(victim.file()).expect("read");
    symlink(victim.file(), dir.file()).expect("linked");
    symlink(victim.file(), dir.0.join("journal.new")).expect("linked");
    let (_, saved, refusal) = open(&dir.0, at(100)).expect("a new one is begun");
    assert_eq!(saved, None);
    let refusal = refusal.expect("a link").to_string();
    assert!(refusal.contains("symbolic links"), "{refusal}");
    assert_eq!(opened(&dir).1, Some(Saved::default()));
    assert_eq!(fs::read(victim.file()).expect("read"), content);
    // Nor is the directory one, with or without a slash at the end.
    let link = dir.0.join("link");
    symlink(&victim.0, &link).expect("linked");
    for path in [link.clone(), link.join("")] {
        assert!(open(&path, at(100)).is_err(), "{}", path.display());
    }
}

#[test]
fn what_others_may_have_written_is_not_believed() {
    let dir = Dir::new("others");
    append(&mut opened(&dir).0, &records());
    set_mode(&dir.file(), 0o622);
    let (_, saved, refusal) = open(&dir.0, at(100)).expect("a new one is begun");
    assert_eq!(saved, None);
    let refusal = refusal.expect("anybody's").to_string();
    assert!(refusal.contains("other users"), "{refusal}");
    assert_eq!(opened(&dir).1, Some(Saved::default()));
    // A directory that is not the agent's alone stays as it is.
    fs::write(dir.0.join("other"), "").expect("written");
    set_mode(&dir.0, 0o755);
    drop(opened(&dir));
    assert_eq!(mode(&dir.0), 0o755);
    set_mode(&dir.0, 0o1777);
    let error = open(&dir.0, at(100)).expect_err("anybody's").to_string();
    assert!(error.contains("other users"), "{error}");
    assert_eq!(mode(&dir.0), 0o1777);
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    let dir = Dir::new("fifo");
    fs::create_dir_all(&dir.0).expect("made");
    let fifo = rustix::fs::Mode::from_raw_mode(0o600);
    let made = rustix::fs::mkfifoat(rustix::fs::CWD, dir.file(), fifo);
    made.expect("made");
    let (_, _, refusal) = open(&dir.0, at(100)).expect("a new one is begun");
    let refusal = refusal.expect("a pipe").to_string();
    assert!(refusal.contains("no regular file"), "{refusal}");
}
