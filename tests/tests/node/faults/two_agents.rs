//! Two agents on one node: the second one refuses to start, and says whom it met.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::PathBuf,
    time::Instant,
};

use dnsflow_agent::one_agent::PATIENCE;
use dnsflow_tests::{
    agent::{self, Agent},
    lab,
    process::{PATIENT, wait_until},
    standstill::play,
};

use crate::faults::traffic::{Bound, Scene};

/// The exit code for it.
const ANOTHER: i32 = 5;

/// Another agent, with a log of its own.
struct Second {
    agent: Agent,
    log: PathBuf,
}

impl Second {
    /// With the directories that the first one has, or with none.
    fn start(scene: &Scene<'_>, name: &str, with_directories: bool) -> Self {
        let command = match with_directories {
            true => scene.agent_command(),
            false => {
                let binary = agent::binary().expect("there is one");
                scene.lab.agent_command(&binary).expect("a command line")
            }
        };
        let log = scene.lab.base().join("log").join(name);
        let file = File::create(&log).expect("a file");
        let agent = scene.lab.spawn_agent_logging_to(command, file.into());
        Self {
            agent: agent.expect("it starts"),
            log,
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("its log")
    }

    fn wait_log(&self, text: &str) {
        let waited = wait_until(text, PATIENT, || Ok(self.log().contains(text)));
        waited.unwrap_or_else(|error| panic!("{error}\n{}", self.log()));
    }
}

/// The files of the agent's programs.
fn pinned(scene: &Scene<'_>) -> BTreeSet<PathBuf> {
    let dirs = [scene.pins().to_owned(), scene.pins().join("links")];
    let entries = dirs.map(|dir| fs::read_dir(dir).expect("it can be listed"));
    let entries = entries.into_iter().flatten();
    entries
        .map(|entry| entry.expect("an entry").path())
        .collect()
}

#[test]
fn the_second_agent_refuses_to_start_and_takes_nothing_away() {
    play(|| {
        let lab = lab!("faults-two", agent);
        let scene = Scene::new(&lab);
        let first = scene.start_agent();
        let pinned = pinned(&scene);
        let what = "a second agent, twice";
        scene.through(what, Bound::NOTHING, || {
            let start = Instant::now();
            let mut others = [
                Second::start(&scene, "second.log", true),
                Second::start(&scene, "third.log", false),
            ];
            for other in &mut others {
                let mut status = None;
                wait_until("the second agent to end", PATIENCE + PATIENT, || {
                    status = other.agent.exit_status()?;
                    Ok(status.is_some())
                })
                .expect("it ends");
                assert!(start.elapsed() >= PATIENCE, "it waits for the first one");
                let code = status.and_then(|status| status.code());
                let log = other.log();
                assert_eq!(code, Some(ANOTHER), "{log}");
                let pid = first.pid().as_raw_nonzero();
                for text in [
                    "another agent runs on this node",
                    &format!("process {pid}, version "),
                    "started 20",
                ] {
                    assert!(log.contains(text), "{log}");
                }
            }
            assert_eq!(self::pinned(&scene), pinned);
        });

        // An update: the Pod of the old agent takes a while to end.
        let what = "agent replaced by one that waits for it";
        let (_next, _log) = scene.through(what, Bound::NOTHING, || {
            let next = Second::start(&scene, "next.log", true);
            next.wait_log("waiting");
            scene.end(first);
            (next.agent, next.log)
        });
    });
}
