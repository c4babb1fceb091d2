//! The agent itself: killed, stopped, without memory.

use std::{
    fs,
    io::Write as _,
    os::unix::{net::UnixStream, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use dnsflow_tests::{
    lab,
    process::wait_until,
    support::{not_run, this_test},
};
use rustix::process::Signal;

use crate::faults::traffic::{Bound, Scene};

/// How long the agent is away.
const AWAY: Duration = Duration::from_secs(2);
/// How long it stands still: for longer than a pod waits for an answer.
const STILL: Duration = Duration::from_secs(4);
/// So many answers wait for their flows at most: those of half a second (`--hold-max`).
pub(crate) const HELD: usize = 12;
/// Until the next agent knows the node, nobody holds an answer, and the first packet to its addresses is lost. An agent
/// needs a second or two for its start, on a busy machine more.
const START: usize = 120;

#[test]
fn the_agent_is_killed_and_comes_back() {
    let lab = lab!("faults-agent-kill", agent);
    let scene = Scene::new(&lab);
    let agent = scene.start_agent();
    // What was held at this moment is lost.
    let killed = Bound {
        answers: HELD,
        first_packets: START,
        ..Bound::NOTHING
    };
    let agent = scene.through("agent, SIGKILL and at once the next one", killed, || {
        agent.kill().expect("it is killed");
        scene.spawn_agent()
    });
    let agent = scene.through("agent, SIGKILL, the next one after 2 s", killed, || {
        agent.kill().expect("it is killed");
        thread::sleep(AWAY);
        scene.spawn_agent()
    });
    let ended = Bound {
        first_packets: START,
        ..Bound::NOTHING
    };
    scene.through("agent, SIGTERM and at once the next one", ended, || {
        agent.terminate().expect("it ends");
        scene.spawn_agent()
    });
}

#[test]
fn the_agent_stands_still_and_goes_on() {
    let lab = lab!("faults-agent-stop", agent);
    let scene = Scene::new(&lab);
    let agent = scene.start_agent();
    // For 0.8 s the programs cannot know that the agent stands still: what they hold then comes too late.
    let bound = Bound {
        answers: 30,
        first_packets: START,
        ..Bound::NOTHING
    };
    scene.through("agent, SIGSTOP, SIGCONT after 4 s", bound, || {
        agent.freeze().expect("it is stopped");
        thread::sleep(STILL);
        agent.thaw().expect("it goes on");
    });
}

/// A control group that limits memory.
struct Group {
    dir: PathBuf,
    limit: &'static str,
    usage: &'static str,
}

impl Group {
    /// Version 1 or version 2 of control groups, or why there is neither.
    fn make(name: &str) -> Result<Self, String> {
        let version1 = Path::new("/sys/fs/cgroup/memory");
        let version2 = Path::new("/sys/fs/cgroup");
        let (parent, limit, usage) = if version1.join("memory.limit_in_bytes").exists() {
            (version1, "memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            (version2, "memory.max", "memory.current")
        };
        let dir = parent.join(name);
        match fs::create_dir(&dir) {
            Ok(()) => {}
            Err(error) => return Err(format!("no control group {}: {error}", dir.display())),
        }
        let group = Self { dir, limit, usage };
        match group.dir.join(limit).exists() {
            true => Ok(group),
            false => Err("no control group limits memory".into()),
        }
    }

    /// The command, run within the group.
    fn run(&self, command: Command) -> Command {
        const ENTER: &str = r#"echo $$ >"$1/cgroup.procs" && shift && exec "$@""#;
        let mut inside = Command::new("sh");
        inside.args(["-c", ENTER, "sh"]).arg(&self.dir);
        around(inside, command)
    }

    /// Leaves no memory beside what is in use.
    fn be_full(&self) {
        let usage = fs::read_to_string(self.dir.join(self.usage)).expect("a number");
        // Version 1 refuses a limit below what is in use, and frees caches when it is tried.
        let _refused = fs::write(self.dir.join(self.limit), "65536");
        let usage_now = fs::read_to_string(self.dir.join(self.usage)).expect("a number");
        println!(
            "{} bytes in use, {} without caches",
            usage.trim(),
            usage_now.trim()
        );
        // In version 2, it may have been killed by now.
        let _ended = fs::write(self.dir.join(self.limit), usage_now.trim());
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let limit = Duration::from_secs(5);
        let removed = wait_until("the control group to be empty", limit, || {
            Ok(fs::remove_dir(&self.dir).is_ok())
        });
        if let Err(error) = removed {
            eprintln!("{error}");
        }
    }
}

/// The outer command, which executes the inner one with its arguments and its namespace.
pub(crate) fn around(mut outer: Command, inner: Command) -> Command {
    outer.arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        outer.env(name, value.unwrap_or_default());
    }
    outer
}

#[test]
fn the_agent_runs_out_of_memory() {
    let lab = lab!("faults-agent-memory", agent);
    let scene = Scene::new(&lab);
    let group = match Group::make(lab.name()) {
        Ok(group) => group,
        Err(why) => return not_run(&this_test(), why),
    };
    let mut command = group.run(scene.agent_command());
    lab.node().enter(&mut command).expect("a namespace");
    let agent = lab.spawn_agent_command(command).expect("it starts");
    let mut agent = agent.wait_ready().expect("it is ready");
    // It is slow before it is killed: the kernel looks for memory first.
    let bound = Bound {
        answers: 60,
        first_packets: START,
        ..Bound::NOTHING
    };
    scene.through("agent, out of memory, the next one at once", bound, || {
        group.be_full();
        // Requests that do not end take memory.
        let mut clients = Vec::new();
        let mut status = None;
        let header = format!("GET /v1/status HTTP/1.1\r\nx: {}", "x".repeat(300_000));
        wait_until("the kernel to kill it", Duration::from_secs(20), || {
            if let Ok(mut client) = UnixStream::connect(lab.control_socket()) {
                client.set_write_timeout(Some(Duration::from_millis(100)))?;
                // It takes less if it has ended.
                let _short = client.write_all(header.as_bytes());
                clients.push(client);
            }
            status = agent.exit_status()?;
            Ok(status.is_some())
        })
        .expect("it is killed");
        let signal = status.and_then(|status| status.signal());
        assert_eq!(signal, Some(Signal::KILL.as_raw()));
        scene.spawn_agent()
    });
}
