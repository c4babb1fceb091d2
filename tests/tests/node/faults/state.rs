//! The directory of the snapshot: full, read-only, of another version.

use std::{fs, process::Command};

use dnsflow_tests::{agent::Agent, cgroup::around, lab, standstill::play};

use crate::faults::traffic::{Bound, Scene};

/// What is wrong with the directory.
enum Wrong {
    /// It is mounted with these options.
    Mounted(&'static str),
    /// The file in it has this content.
    Holds(&'static str),
}

impl Wrong {
    /// Starts an agent with such a directory. Only the agent sees the mount.
    fn start(&self, scene: &Scene<'_>) -> Agent {
        const MOUNT: &str = r#"mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@""#;
        let command = match self {
            Self::Mounted(options) => {
                let mut outer = Command::new("unshare");
                outer.args(["--mount", "--", "sh", "-c", MOUNT, "sh", options]);
                outer.arg(scene.state());
                let mut command = around(outer, scene.agent_command());
                let node = scene.lab.node();
                node.enter(&mut command).expect("a namespace");
                command
            }
            Self::Holds(content) => {
                fs::write(scene.state().join("cache.json"), content).expect("it is written");
                scene.agent_command()
            }
        };
        scene.lab.spawn_agent_command(command).expect("it starts")
    }
}

/// The agent starts with such a directory and ends again; what it says.
const CASES: &[(&str, Wrong, &str)] = &[
    (
        "state directory full",
        // Its root takes the only inode.
        Wrong::Mounted("nr_inodes=1,mode=700"),
        "cannot write the snapshot",
    ),
    (
        "state directory read-only",
        Wrong::Mounted("ro,mode=700"),
        "cannot write the snapshot",
    ),
    (
        "snapshot of an older version",
        Wrong::Holds(r#"{"version":1,"saved_at_s":1,"entries":[]}"#),
        "version 1 instead of 3",
    ),
];

#[test]
fn without_a_snapshot_nothing_that_is_open_closes() {
    play(|| {
        let lab = lab!("faults-state", agent);
        let scene = Scene::new(&lab);
        fs::create_dir(scene.state()).expect("it is new");
        let mut agent = scene.start_agent();
        for (what, wrong, says) in CASES {
            let what = format!("{what}, the agent anew");
            let started = scene.through(&what, Bound::NOTHING, || {
                scene.end(agent);
                wrong.start(&scene)
            });
            let log = started.log_path().to_owned();
            started.terminate().expect("it ends");
            let log = fs::read_to_string(log).expect("its log");
            assert!(log.contains(says), "{what}: {log}");
            agent = scene.start_agent();
        }
    });
}
