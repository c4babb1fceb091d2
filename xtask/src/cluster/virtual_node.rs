//! A node in a virtual machine: its kernel has Open vSwitch's datapath, and `tests/cluster/machine.sh` brings it up.

use std::{
    fs::{self, File},
    io::Write as _,
    path::Path,
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use super::programs::Programs;
use crate::{
    interrupt,
    vm::{Equipment, Event, Job, Machine, Network},
};

/// Enough for the node's programs, and for its files, which are in memory.
const MEMORY: &str = "6G";
/// The machine is ended from outside.
const LIMIT: Duration = Duration::from_hours(24);

/// How ovn-kubernetes lets a node's pods leave the cluster.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Gateway {
    /// Through the uplink's bridge
    Shared,
    /// Through the node's own network stack
    Local,
}

/// A node in a virtual machine.
#[derive(Debug)]
pub(super) struct VirtualNode {
    gateway: Gateway,
    state: State,
}

#[derive(Debug)]
enum State {
    Off(Machine),
    On(JoinHandle<Result<Vec<String>>>),
    /// It is ended from outside, which is a failure to the one who waits for it.
    Ending(JoinHandle<Result<Vec<String>>>),
    Ended,
}

impl VirtualNode {
    pub(super) fn new(machine: Machine, gateway: Gateway) -> Self {
        Self {
            gateway,
            state: State::Off(machine),
        }
    }

    /// As ovn-kubernetes' `--gateway-mode` takes it.
    pub(super) fn gateway(&self) -> &'static str {
        match self.gateway {
            Gateway::Shared => "shared",
            Gateway::Local => "local",
        }
    }

    /// Starts the machine, once. The node is up later.
    pub(super) fn boot(
        &mut self,
        node: &str,
        directory: &Path,
        programs: &Programs,
        variables: &[(&'static str, String)],
    ) -> Result<()> {
        let State::Off(machine) = std::mem::replace(&mut self.state, State::Ended) else {
            bail!("the virtual machine has been started before");
        };
        let programs = programs.directory();
        let mut name = variables.iter().filter(|(variable, _)| *variable == "NAME");
        let (_, name) = name.next().context("a name")?;
        let machine = machine.equipped(Equipment {
            memory: MEMORY,
            shares: vec![
                (programs.to_owned(), false),
                (programs.join("node"), false),
                (directory.to_owned(), true),
            ],
            network: Some(Network {
                namespace: format!("/run/netns/{name}-outside").into(),
                tap: node.to_owned(),
            }),
        });
        let script = directory.join("scripts/machine.sh");
        let job = Job {
            name: node.to_owned(),
            program: "/bin/bash".into(),
            arguments: vec![script.to_string_lossy().into_owned(), node.to_owned()],
            environment: variables.to_vec(),
            directory: "/".into(),
            stdout: None,
            limit: LIMIT,
        };
        let mut log = File::create(directory.join("log/machine.log"))?;
        let ended = directory.join(format!("run/{node}.ended"));
        self.state = State::On(thread::spawn(move || {
            let result = machine.run(&[job], |event| {
                if let Event::Line(line) = event {
                    // The run does not depend on its log.
                    let _written = writeln!(log, "{line}");
                }
            });
            fs::write(ended, "")?;
            result
        }));
        Ok(())
    }

    /// The machine is ended next.
    pub(super) fn will_end(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Ended) {
            State::On(thread) if !thread.is_finished() => State::Ending(thread),
            state => state,
        };
    }

    /// Waits for the end of the machine, and says why it has ended by itself if it has.
    pub(super) fn ended(&mut self) {
        let (thread, is_by_itself) = match std::mem::replace(&mut self.state, State::Ended) {
            State::Ending(thread) => (thread, false),
            State::On(thread) => (thread, interrupt::check().is_ok()),
            state @ (State::Off(_) | State::Ended) => {
                self.state = state;
                return;
            }
        };
        let result = thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if is_by_itself {
            match result {
                Ok(_) => eprintln!("error: machine.sh has ended (log/machine.log)"),
                Err(error) => eprintln!("error: {error:#}"),
            }
        }
    }
}
