//! The agent does its work with the capabilities of `deploy/components/restricted` and nothing else,
//! and each of them is needed.

use std::{
    collections::BTreeSet,
    fs,
    net::Ipv4Addr,
    os::unix::fs::{PermissionsExt as _, chown},
    path::PathBuf,
    process::Command,
    thread,
};

use crate::manifests::{directory, documents};
use anyhow::{Context, Result, bail};
use dnsflow_agent::{
    capture::{self, Attach as _, AttachKind, survey},
    rights::{WHILE_RUNNING, bpf_while_running, keep_only},
};
use dnsflow_tests::{
    agent::{self, Agent},
    firewall::RuleSpec,
    lab,
    lab::Lab,
    pod::{DNS, Transport},
    process::{PATIENT, wait_until},
    support::{not_run, this_test},
};
use rustix::{
    process::geteuid,
    thread::{CapabilitySet, UnshareFlags, unshare_unsafe},
};
use serde_json::Value;
use tokio::runtime;

/// Nobody in particular, who owns the sockets of Open vSwitch and OVN, as `openvswitch` does in
/// distributions of Red Hat.
const OTHER_USER: u32 = 60_123;

/// The capabilities that the component adds to none, in the words of setpriv(1).
fn capabilities() -> Result<BTreeSet<String>> {
    let patch = documents(&directory("components/restricted/daemonset.yaml"))?;
    let pod = &patch[0]["spec"]["template"]["spec"];
    let capabilities = &pod["containers"][0]["securityContext"]["capabilities"];
    assert_eq!(capabilities["drop"], serde_json::json!(["ALL"]));
    let added = capabilities["add"].as_array().context("a list")?;
    let added = added
        .iter()
        .map(|name| name.as_str().map(str::to_lowercase));
    added.collect::<Option<_>>().context("names")
}

/// Makes the root filesystem read-only but for the two directories that are named first, and runs what
/// follows.
const READ_ONLY: &str = r#"
set -e
mount --bind "$1" "$1"
mount --bind "$2" "$2"
mount -o remount,bind,ro /
if test -w /; then echo "/ can still be written to" >&2; exit 1; fi
shift 2
exec "$@"
"#;

/// The command line of the agent, or of another subcommand with the same options. It has these
/// capabilities, no way to others, and a read-only root filesystem, as the process of a container.
fn restricted(lab: &Lab, capabilities: &BTreeSet<String>, subcommand: &str) -> Result<Command> {
    let bounding = capabilities.iter().map(|name| format!(",+{name}"));
    let agent = lab.agent_command(&agent::binary()?)?;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--", "sh", "-c", READ_ONLY, "sh"])
        .arg(lab.base().join("state"))
        .arg(control_directory(lab)?)
        .arg("setpriv")
        .arg(format!(
            "--bounding-set=-all{}",
            bounding.collect::<String>()
        ))
        .args(["--inh-caps=-all", "--no-new-privs", "--"])
        .arg(agent.get_program())
        .arg(subcommand)
        .args(agent.get_args().skip(1));
    for (name, value) in agent.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    lab.node().enter(&mut command)?;
    Ok(command)
}

/// Where the control socket is made.
fn control_directory(lab: &Lab) -> Result<PathBuf> {
    let socket = lab.control_socket();
    Ok(socket.parent().context("a directory")?.to_owned())
}

/// The lab whose sockets are not root's, with a firewall and names in it.
fn prepare(lab: &Lab) -> Result<()> {
    let names = ["udp", "tcp", "later"];
    let records =
        names.map(|name| format!("{name}.example.com. 600 IN A 203.0.113.{}", name.len()));
    lab.serve_dns(&records.each_ref().map(String::as_str))?;
    let deny = RuleSpec::deny("0.0.0.0/0")?;
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])?;
    fs::create_dir(lab.base().join("state"))?;
    fs::create_dir(control_directory(lab)?)?;
    let run = lab.socket("");
    chown(&run, Some(OTHER_USER), Some(OTHER_USER))?;
    fs::set_permissions(&run, fs::Permissions::from_mode(0o700))?;
    Ok(())
}

/// The capabilities of each thread (proc_pid_status(5)): permitted, inheritable, effective, ambient and
/// bounding, and whether there are no new privileges.
fn of_threads(agent: &Agent) -> Result<Vec<[u64; 6]>> {
    let tasks = format!("/proc/{}/task", agent.pid().as_raw_nonzero());
    let mut threads = Vec::new();
    for task in fs::read_dir(tasks)? {
        let status = fs::read_to_string(task?.path().join("status"))?;
        let fields = [
            "CapPrm",
            "CapInh",
            "CapEff",
            "CapAmb",
            "CapBnd",
            "NoNewPrivs",
        ];
        let values = fields.map(|name| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            u64::from_str_radix(line.strip_prefix(':')?.trim(), 16).ok()
        });
        let values: Option<Vec<u64>> = values.into_iter().collect();
        threads.push(values.context("six fields")?[..].try_into()?);
    }
    Ok(threads)
}

// Linux include/uapi/linux/capability.h.
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_NET_ADMIN: u32 = 12;
const CAP_BPF: u32 = 39;

/// What is left once the agent is ready: `CAP_BPF` only where the kernel asks for it whenever a map is
/// used, before Linux 5.19.
fn left() -> u64 {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("it can be read");
    let mut numbers = release.split(|digit: char| !digit.is_ascii_digit());
    let mut number = || numbers.next().and_then(|text| text.parse::<u32>().ok());
    let is_old = (number(), number()) < (Some(5), Some(19));
    1 << CAP_DAC_OVERRIDE | 1 << CAP_NET_ADMIN | u64::from(is_old) << CAP_BPF
}

#[test]
fn the_main_job_is_done_with_the_capabilities_of_the_restricted_overlay() {
    let lab = lab!("rights", agent);
    prepare(&lab).expect("it is prepared");
    let capabilities = capabilities().expect("a list");
    let state = lab.base().join("state");
    let start = || {
        let mut command = restricted(&lab, &capabilities, "agent").expect("a command line");
        command.arg("--state-dir").arg(&state);
        let agent = lab.spawn_agent_command(command).expect("it starts");
        agent.wait_ready().expect("it is ready")
    };
    let fetch = |url: &str| {
        let fetched = lab.pod("ns1_pod1").fetch(url, PATIENT);
        fetched.expect("curl runs").result.expect(url);
    };
    let agent = start();
    // Held and put back: else nothing would answer, or the first packet be lost.
    fetch("http://udp.example.com/");
    let told: Vec<std::net::IpAddr> = lab
        .pod("ns1_pod1")
        .ask(Transport::Tcp, DNS, "A", &["tcp.example.com"])
        .expect("an answer");
    assert_eq!(told.len(), 1);
    // By marks, a port without an address may get its own flow with the restart.
    let told = lab.pod("ns1_pod2").resolve("udp.example.com");
    assert_eq!(told.expect("the name is known").len(), 1);
    let threads = of_threads(&agent).expect("they are there");
    assert!(threads.len() >= 4, "{threads:x?}");
    for thread in &threads {
        let [permitted, inheritable, effective, ambient, _, no_new] = *thread;
        assert!(permitted == left() || permitted == 0, "{threads:x?}");
        assert_eq!((inheritable, ambient, no_new), (0, 0, 1), "{threads:x?}");
        assert_eq!(permitted, effective, "{threads:x?}");
    }
    // The log's thread writes lines, and needs no right for that.
    assert_eq!(threads.iter().filter(|thread| thread[0] == 0).count(), 1);
    let before = lab.dnsflow_flows().expect("a dump");
    assert!(agent.terminate().expect("it ends").success());
    assert!(state.join("journal").is_file());

    let agent = start();
    let after = lab.dnsflow_flows().expect("a dump");
    assert_eq!(after, before, "a restart closes nothing");
    fetch("http://later.example.com/");
    assert!(agent.terminate().expect("it ends").success());
}

#[test]
fn privileged_it_gives_up_the_rest_by_itself() {
    let lab = lab!("rights-base", agent);
    prepare(&lab).expect("it is prepared");
    // As in a cluster: then the agent also asks Open vSwitch which way it can take, before it gives anything up.
    let pins = lab.pins().expect("a BPF file system");
    let agent = lab.start_agent(&[&format!("--pin-dir={}", pins.display()), "--open-by=auto"]);
    let agent = agent.expect("the agent is ready");
    let threads = of_threads(&agent).expect("they are there");
    for thread in &threads {
        let [permitted, inheritable, effective, ambient, bounding, no_new] = *thread;
        assert!(permitted == left() || permitted == 0, "{threads:x?}");
        assert_eq!(permitted, effective, "{threads:x?}");
        assert_eq!((inheritable, ambient, no_new), (0, 0, 1), "{threads:x?}");
        assert_eq!(bounding, 0, "{threads:x?}");
    }
    let events = agent.events().expect("its log");
    let fields = events.iter().map(|event| &event["fields"]);
    let mut kept = fields.filter_map(|fields| fields["capabilities"].as_str());
    let kept = kept.next().expect("it says what it keeps");
    assert!(kept.starts_with("CAP_DAC_OVERRIDE,CAP_NET_ADMIN"), "{kept}");
}

#[test]
fn check_says_what_it_cannot_try() {
    let lab = lab!("rights-check", agent);
    prepare(&lab).expect("it is prepared");
    let capabilities = capabilities().expect("a list");
    let mut command = restricted(&lab, &capabilities, "check").expect("a command line");
    let output = command.args(["-o", "json"]).output().expect("it runs");
    let printed: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let findings = printed["findings"].as_array().expect("findings").iter();
    let (attach, others): (Vec<&Value>, Vec<&Value>) =
        findings.partition(|finding| finding["check"] == "attach");
    // The witness attaches the program.
    let witness = thread::spawn(|| attach_with(CapabilitySet::all(), Some(AttachKind::Tcx)));
    let (has_tcx, _) = witness.join().expect("no panic").expect("it is loaded");
    let wanted = if has_tcx { "ok" } else { "warning" };
    assert_eq!(attach[0]["status"], wanted, "{printed}");
    let text = attach[0]["text"].as_str().expect("a text");
    assert!(text.contains("CAP_SYS_ADMIN"), "{printed}");
    assert!(
        others.iter().all(|other| other["status"] == "ok"),
        "{printed}"
    );
    assert!(output.status.success());
}

/// Loads the programs, gives up everything but `kept`, and attaches to the loopback interface of a new
/// network namespace. Returns whether that went well and the programs there can be listed, and whether the maps can be
/// written to then.
fn attach_with(kept: CapabilitySet, kind: Option<AttachKind>) -> Result<(bool, bool)> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let _entered = runtime.enter();
    let options = capture::Options {
        attach: kind,
        ..capture::Options::default()
    };
    let mut capture = capture::load(&options, runtime.handle())?;
    // SAFETY: a new network namespace leaves memory and file descriptors as they are, and only this
    // thread is in it.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
    let bpf = bpf_while_running(|| capture.counters.read().is_ok())?;
    keep_only(kept | bpf)?;
    let program = capture.attacher.attachments.program_mut();
    let ifindex = program.ifindex("lo").context("lo")?;
    let attached = program
        .attach("lo", ifindex)
        .and_then(|mut link| program.complete("lo", ifindex, &mut link));
    let in_front = survey::in_front(ifindex, None);
    let server = (Ipv4Addr::new(10, 96, 0, 10).into(), 53);
    Ok((
        attached.is_ok() && in_front.is_ok(),
        capture.resolvers.set(&[server]).is_empty(),
    ))
}

#[test]
fn what_is_kept_suffices_for_pods_that_come_later() {
    if !geteuid().is_root() {
        not_run(&this_test(), "not root");
        return;
    }
    let attach_with = |kept, kind| {
        let thread = thread::spawn(move || attach_with(kept, kind));
        thread.join().expect("no panic").expect("it is loaded")
    };
    for kind in [None, Some(AttachKind::Clsact)] {
        assert_eq!(attach_with(WHILE_RUNNING, kind), (true, true), "{kind:?}");
    }
    // The kernel asks for CAP_NET_ADMIN where a qdisc is made, and where programs are listed (`bpf_prog_query` in Linux
    // kernel/bpf/syscall.c); for nothing where a map is used.
    let without = WHILE_RUNNING - CapabilitySet::NET_ADMIN;
    for kind in [None, Some(AttachKind::Clsact)] {
        assert_eq!(attach_with(without, kind), (false, true), "{kind:?}");
    }
}

/// What the agent says without a capability, once it has ended or goes on in vain.
fn complaint(lab: &Lab, missing: &str) -> Result<String> {
    let mut capabilities = capabilities()?;
    if !capabilities.remove(missing) {
        bail!("it has no {missing}");
    }
    let mut agent = lab.spawn_agent_command(restricted(lab, &capabilities, "agent")?)?;
    let mut said = None;
    wait_until("the agent to complain", PATIENT, || {
        let ended = agent.has_ended()?;
        let events = agent.events()?;
        anyhow::ensure!(
            !events
                .iter()
                .any(|event| event["fields"]["message"] == "ready"),
            "ready without {missing}"
        );
        let mut troubles = events.iter().filter(|event| {
            let level = event["level"].as_str();
            (ended && level == Some("ERROR"))
                || (missing == "dac_override" && level == Some("WARN"))
        });
        said = troubles.next().map(|event| event["fields"].to_string());
        Ok(said.is_some())
    })?;
    said.context("it was waited for")
}

#[test]
fn without_one_of_them_it_says_what_is_missing() {
    let lab = lab!("rights-missing", agent);
    prepare(&lab).expect("it is prepared");
    let expected = [
        ("bpf", "CAP_BPF"),
        ("dac_override", "Permission denied"),
        ("net_admin", "CAP_NET_ADMIN"),
        ("net_raw", "CAP_NET_RAW"),
        ("perfmon", "CAP_PERFMON"),
    ];
    let all = capabilities().expect("a list");
    assert!(all.iter().eq(expected.map(|(name, _)| name)), "{all:?}");
    for (missing, reason) in expected {
        let said = complaint(&lab, missing).expect(missing);
        assert!(said.contains(reason), "{missing}: {said}");
    }
}
