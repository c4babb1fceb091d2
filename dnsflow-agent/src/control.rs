//! The control socket: people ask a running agent what it does, and why.
//!
//! The agent answers by HTTP with JSON over a Unix socket that only root can use. `kubectl exec` into its
//! container is enough to ask ([`commands`]).
//!
//! The hot thread owns what is asked for. [`Inquiries`] hand it one small question at a time, and the
//! server waits; a list is asked for in parts. All else (JSON, filters, slow clients) is the server's.

pub mod client;
pub mod commands;
#[cfg(test)]
mod fixtures;
pub mod history;
pub mod journal;
pub mod learned;
pub(crate) mod print;
pub mod pruned;
pub mod reported;
pub mod server;
pub mod trial;

use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    time::{Duration, SystemTime},
};

use clap::CommandFactory as _;
use dnsflow_core::{Timestamp, engine::Engine, view::NodeView};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use crate::options::Cli;

/// Where the socket is, unless an option says something else.
pub const SOCKET: &str = "/run/dnsflow/dnsflow.sock";

/// One question waits while another is answered: each costs the hot thread some microseconds, and an
/// answer to a pod must not wait for many of them.
const INQUIRIES_MAX: usize = 1;
/// After this time, the hot thread is stuck, and `/livez` says so.
const PATIENCE: Duration = Duration::from_secs(10);

/// A question to the hot thread, with the way back.
pub type Inquiry = Box<dyn FnOnce(&Engine, Timestamp) + Send>;

/// Where questions to the hot thread are asked.
#[derive(Clone, Debug)]
pub struct Inquiries(mpsc::Sender<Inquiry>);

/// The way of questions to the hot thread.
pub fn inquiries() -> (Inquiries, mpsc::Receiver<Inquiry>) {
    let (sender, receiver) = mpsc::channel(INQUIRIES_MAX);
    (Inquiries(sender), receiver)
}

impl Inquiries {
    /// Asks the hot thread; `None` where it does not answer in time. What `question` does takes the hot
    /// thread's time: little.
    pub async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Engine, Timestamp) -> T + Send + 'static,
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        let inquiry: Inquiry = Box::new(move |engine, now| {
            // Whoever has asked may have gone.
            let _gone = reply.send(question(engine, now));
        });
        let answered = async {
            self.0.send(inquiry).await.ok()?;
            answer.await.ok()
        };
        timeout(PATIENCE, answered).await.ok()?
    }
}

/// The answer to `status`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Status {
    /// The version of the agent, with its commit where that is known.
    pub version: String,
    /// The seconds since the agent has started.
    pub up_s: u64,
    /// What the agent knows of its node.
    #[serde(flatten)]
    pub node: NodeView,
}

/// How an agent was started: what its options are, each as it was given.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct AgentCommand {
    /// The version of the agent, with its commit where that is known.
    pub version: String,
    /// The command line.
    pub arguments: Vec<String>,
    /// The options that came by environment, and `RUST_LOG`. No other variable is told.
    pub environment: BTreeMap<String, String>,
}

impl AgentCommand {
    /// That of this process.
    fn of_this_process() -> Self {
        let text = |value: OsString| value.to_string_lossy().into_owned();
        let cli = Cli::command();
        let options = cli.find_subcommand("agent").into_iter();
        let options = options.flat_map(|agent| agent.get_arguments());
        let names = options.filter_map(|option| Some(option.get_env()?.to_owned()));
        let names = names.chain([OsString::from("RUST_LOG")]);
        let environment = names.filter_map(|name| Some((env::var_os(&name)?, name)));
        Self {
            version: env!("DNSFLOW_VERSION").to_owned(),
            arguments: env::args_os().map(text).collect(),
            environment: environment
                .map(|(value, name)| (text(name), text(value)))
                .collect(),
        }
    }
}

/// A moment, as RFC 3339 writes it, in UTC with microseconds.
pub(crate) fn rfc3339_micros(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time).map_or_else(|_| String::new(), |time| format!("{time:.6}"))
}

/// A moment, as RFC 3339 writes it, in UTC with milliseconds.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time).map_or_else(|_| String::new(), |time| format!("{time:.3}"))
}
