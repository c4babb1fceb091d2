//! The agent itself: killed, stopped, without memory.

use std::{
    io::Write as _,
    os::unix::{net::UnixStream, process::ExitStatusExt as _},
    thread,
    time::{Duration, Instant},
};

use dnsflow_tests::{
    cgroup::Group,
    lab,
    process::{PATIENT, wait_until},
    standstill::play,
    support::{not_run, this_test},
};
use rustix::process::Signal;

use crate::faults::traffic::{Bound, Scene};

/// How long the agent is away.
const AWAY: Duration = Duration::from_secs(2);
/// How long it stands still: for longer than a pod waits for an answer.
const STILL: Duration = Duration::from_secs(4);

#[test]
fn the_agent_is_killed_and_comes_back() {
    play(|| {
        let lab = lab!("faults-agent-kill", agent);
        let scene = Scene::new(&lab);
        let agent = scene.start_agent();
        let what = "agent, SIGKILL and at once the next one";
        let agent = scene.through(what, Bound::NOTHING, || {
            scene.kill(agent);
            scene.spawn_agent()
        });
        let what = "agent, SIGKILL, the next one after 2 s";
        let agent = scene.through(what, Bound::NOTHING, || {
            scene.kill(agent);
            thread::sleep(AWAY);
            scene.spawn_agent()
        });
        let what = "agent, SIGTERM and at once the next one";
        scene.through(what, Bound::NOTHING, || {
            scene.end(agent);
            scene.spawn_agent()
        });
    });
}

#[test]
fn the_agent_stands_still_and_goes_on() {
    play(|| {
        let lab = lab!("faults-agent-stop", agent);
        let scene = Scene::new(&lab);
        let agent = scene.start_agent();
        scene.through("agent, SIGSTOP, SIGCONT after 4 s", Bound::NOTHING, || {
            scene.stand_still(&agent, STILL);
        });
    });
}

#[test]
fn the_agent_runs_out_of_memory() {
    play(|| {
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
        let what = "agent, out of memory, the next one at once";
        scene.through(what, Bound::NOTHING, || {
            // It is slow before it is killed: the kernel looks for memory first.
            let since = Instant::now();
            group.be_full();
            // Requests that do not end take memory.
            let mut clients = Vec::new();
            let mut status = None;
            let header = format!("GET /v1/status HTTP/1.1\r\nx: {}", "x".repeat(300_000));
            wait_until("the kernel to kill it", PATIENT, || {
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
            scene.has_ended(since);
            let signal = status.and_then(|status| status.signal());
            assert_eq!(signal, Some(Signal::KILL.as_raw()));
            scene.spawn_agent()
        });
    });
}
