//! The directory of the journal: full, read-only, with a file of another form.

use std::{fs, path::PathBuf, process::Command, time::Duration};

use dnsflow_tests::{
    agent::{self, Agent},
    cgroup::around,
    firewall::RuleSpec,
    lab,
    lab::Lab,
    process::{PATIENT, run, wait_until},
    standstill::play,
};

/// Where the agent answers Prometheus.
const METRICS: &str = "127.0.0.1:9473";
/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);

/// What is wrong with the directory.
enum Wrong {
    /// It is mounted with these options.
    Mounted(&'static str),
    /// The file in it has this content.
    Holds(&'static str),
}

impl Wrong {
    /// Starts an agent with such a directory. Only the agent sees the mount.
    fn start(&self, lab: &Lab, arguments: &[&str]) -> Agent {
        const MOUNT: &str = r#"mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@""#;
        let binary = agent::binary().expect("there is one");
        let mut plain = lab.agent_command(&binary).expect("a command line");
        plain.args(arguments);
        let command = match self {
            Self::Mounted(options) => {
                let mut outer = Command::new("unshare");
                outer.args(["--mount", "--", "sh", "-c", MOUNT, "sh", options]);
                outer.arg(lab.state());
                let mut command = around(outer, plain);
                lab.node().enter(&mut command).expect("a namespace");
                command
            }
            Self::Holds(content) => {
                fs::write(lab.state().join("journal"), content).expect("it is written");
                plain
            }
        };
        let started = lab.spawn_agent_command(command).expect("it starts");
        started.wait_ready().expect("it is ready")
    }
}

/// The agent starts with such a directory and ends again; what it says.
const CASES: &[(&str, Wrong, &str)] = &[
    (
        "full",
        // Its root takes the only inode.
        Wrong::Mounted("nr_inodes=1,mode=700"),
        "this start knows no names of an earlier agent",
    ),
    (
        "read-only",
        Wrong::Mounted("ro,mode=700"),
        "this start knows no names of an earlier agent",
    ),
    (
        "of another form",
        Wrong::Holds("{\"version\":3}\n"),
        "it has another form",
    ),
];

fn prepare(lab: &Lab) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
}

/// Without its names, an address closes, and the pod's next query opens it.
#[test]
fn without_a_journal_what_is_open_closes_until_pods_ask_again() {
    play(|| {
        let lab = lab!("faults-state", agent);
        prepare(&lab);
        let fetch = |url: &str, limit| {
            let fetched = lab.pod("ns1_pod1").fetch(url, limit);
            fetched.expect("curl runs").result
        };
        let (by_name, by_address) = ("http://www.example.com/", "http://203.0.113.2/");
        for (what, wrong, says) in CASES {
            let known = lab.start_agent(&[]).expect("the agent is ready");
            fetch(by_name, PATIENT).expect("the rule allows it");
            known.terminate().expect("it ends");
            let known = lab.start_agent(&[]).expect("the agent is ready");
            fetch(by_address, PATIENT).expect("the journal has its name");
            known.terminate().expect("it ends");
            let unknown = wrong.start(&lab, &[]);
            fetch(by_address, BLOCKED).expect_err(what);
            fetch(by_name, PATIENT).expect("it opens again");
            let log = unknown.log_path().to_owned();
            unknown.terminate().expect("it ends");
            let log = fs::read_to_string(log).expect("its log");
            assert!(log.contains(says), "{what}: {log}");
        }
    });
}

/// The file system has no space for a while. The names are long, and take more than what is left of the page in which the
/// journal ends.
#[test]
fn records_that_do_not_fit_are_counted_and_written_later() {
    const NAMES: usize = 40;
    let label = "a".repeat(60);
    let name = |number: usize| format!("n{number}.{label}.{label}.{label}.example.com");
    play(|| {
        let lab = lab!("faults-state-space", agent);
        prepare(&lab);
        let records = (0..NAMES).map(|number| format!("{}. 600 IN A 203.0.113.2", name(number)));
        let records: Vec<String> = records.collect();
        let records: Vec<&str> = records.iter().map(String::as_str).collect();
        lab.serve_dns(&records).expect("it listens");
        fs::create_dir(lab.state()).expect("it is new");
        let agent = {
            let wrong = Wrong::Mounted("size=64k,mode=700");
            wrong.start(&lab, &[&format!("--listen={METRICS}")])
        };
        // As the agent sees it.
        let root = PathBuf::from(format!("/proc/{}/root", agent.pid().as_raw_nonzero()));
        let directory = lab.state();
        let directory = root.join(directory.strip_prefix("/").expect("an absolute path"));
        let last = format!("n{}", NAMES - 1);
        let journal = directory.join("journal");
        let has_last = || {
            let journal = fs::read(&journal).unwrap_or_default();
            journal
                .windows(last.len())
                .any(|part| part == last.as_bytes())
        };
        let filler = directory.join("filler");
        fs::write(&filler, vec![0; 1 << 20]).expect_err("no space is left");
        for number in 0..NAMES {
            let resolved = lab.pod("ns1_pod1").resolve(&name(number));
            resolved.expect("the name is known");
        }
        let says = "cannot write the journal";
        wait_until(says, PATIENT, || {
            Ok(fs::read_to_string(agent.log_path())?.contains(says))
        })
        .expect("it is said");
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--fail", &format!("http://{METRICS}/metrics")]);
        lab.node().enter(&mut curl).expect("a namespace");
        let metrics = run(&mut curl).expect("it answers");
        let lost = metrics.lines().find_map(|line| {
            let count = line.strip_prefix("dnsflow_journal_records_lost_total ")?;
            count.parse::<u64>().ok()
        });
        assert!(lost.is_some_and(|lost| lost > 0), "{lost:?}");
        assert!(!journal.exists(), "a start would miss names");
        fs::remove_file(&filler).expect("it is there");
        wait_until("the last name in the journal", PATIENT, || Ok(has_last()))
            .expect("a new file is written");
        agent.terminate().expect("it ends");
    });
}
