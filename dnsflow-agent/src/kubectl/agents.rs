//! Finds the agents of a cluster, and asks them, by kubectl.

use std::{io, process::Stdio, time::Duration};

use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tokio::{process::Command, time::timeout};

/// Agents that are asked at the same time.
const AT_ONCE: usize = 16;
/// The time that kubectl may take for one agent.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest answer that is taken, in bytes.
const ANSWER_MAX: usize = 256 * 1024 * 1024;
/// The container of the agent, as in `deploy/base/daemonset.yaml`.
const CONTAINER: &str = "agent";
/// The exit code of `dnsflow` where the answer is no (`exit.rs`): an answer all the same.
const NO: i32 = 3;

/// An agent's pod.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Agent {
    /// Its node, or the pod where it has none yet.
    pub(super) node: String,
    /// The pod.
    pub(super) pod: String,
    /// Whether it runs.
    is_running: bool,
}

/// The pods that kubectl prints, as `kind: List`.
#[derive(Deserialize)]
struct Pods {
    items: Vec<Pod>,
}

/// What an agent has said.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer {
    /// The node.
    pub(super) node: String,
    /// The JSON values, or why there are none.
    pub(super) said: Result<Said, String>,
}

/// An answer in JSON.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Said {
    /// The values.
    pub(super) values: Vec<Value>,
    /// Whether the exit code was that of a no.
    pub(super) is_no: bool,
}

/// Why kubectl has failed.
#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    /// It cannot be run.
    #[error("cannot run kubectl, which has to be on the PATH")]
    Run(#[source] io::Error),
    /// It has failed.
    #[error("kubectl {command}: {reason}")]
    Failed {
        /// What it was asked.
        command: String,
        /// What it says.
        reason: String,
    },
    /// The pod has no node.
    #[error("the pod {namespace}/{pod} is on no node yet")]
    NoNode {
        /// Its namespace.
        namespace: String,
        /// Its name.
        pod: String,
    },
}

/// kubectl, with the options that the user has given.
#[derive(Debug)]
pub(super) struct Kubectl {
    options: Vec<String>,
    namespace: String,
}

impl Kubectl {
    /// With these options of every call; the agents are in `namespace`.
    pub(super) fn new(options: Vec<String>, namespace: String) -> Self {
        Self { options, namespace }
    }

    /// The agents, by node.
    pub(super) async fn agents(&self, selector: &str) -> Result<Vec<Agent>, KubectlError> {
        let of = ["--namespace", &self.namespace, "--selector", selector];
        let arguments = [&["get", "pods"], &of[..], &["--output", "json"]].concat();
        let Pods { items } = self.get(&arguments).await?;
        let mut agents: Vec<Agent> = items
            .into_iter()
            .map(|pod| {
                let name = pod.metadata.name.unwrap_or_default();
                let phase = pod.status.and_then(|status| status.phase);
                Agent {
                    node: pod
                        .spec
                        .and_then(|spec| spec.node_name)
                        .unwrap_or_else(|| name.clone()),
                    pod: name,
                    is_running: phase.as_deref() == Some("Running"),
                }
            })
            .collect();
        agents.sort_by(|one, other| (&one.node, &one.pod).cmp(&(&other.node, &other.pod)));
        Ok(agents)
    }

    /// The node of a pod.
    pub(super) async fn node_of(&self, namespace: &str, pod: &str) -> Result<String, KubectlError> {
        let arguments = [
            "get",
            "pod",
            pod,
            "--namespace",
            namespace,
            "--output",
            "json",
        ];
        let found: Pod = self.get(&arguments).await?;
        let node = found.spec.and_then(|spec| spec.node_name);
        node.ok_or_else(|| KubectlError::NoNode {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
        })
    }

    /// Runs `dnsflow` with these arguments in the container of each agent. The answers are in the order of
    /// the agents.
    pub(super) async fn ask(&self, agents: Vec<Agent>, arguments: &[String]) -> Vec<Answer> {
        let answers = stream::iter(agents).map(async |agent| Answer {
            said: match agent.is_running {
                true => self.ask_one(&agent.pod, arguments).await,
                false => Err(format!("the agent's pod {} does not run", agent.pod)),
            },
            node: agent.node,
        });
        answers.buffered(AT_ONCE).collect().await
    }

    async fn ask_one(&self, pod: &str, arguments: &[String]) -> Result<Said, String> {
        let exec = [
            "exec",
            "--namespace",
            &self.namespace,
            pod,
            "--container",
            CONTAINER,
        ];
        let exec = exec.into_iter().chain(["--", "dnsflow"]);
        let arguments: Vec<&str> = exec.chain(arguments.iter().map(String::as_str)).collect();
        let output = self
            .run(&arguments)
            .await
            .map_err(|error| error.to_string())?;
        let is_no = output.status.code() == Some(NO);
        if !output.status.success() && !is_no {
            return Err(reason(&output.stderr));
        }
        if output.stdout.len() > ANSWER_MAX {
            return Err(format!("an answer of more than {ANSWER_MAX} bytes"));
        }
        let values = serde_json::Deserializer::from_slice(&output.stdout).into_iter();
        let values: Result<Vec<Value>, _> = values.collect();
        let values = values.map_err(|error| format!("its answer is not understood: {error}"))?;
        Ok(Said { values, is_no })
    }

    async fn get<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T, KubectlError> {
        let failed = |reason| KubectlError::Failed {
            command: arguments.join(" "),
            reason,
        };
        let output = self.run(arguments).await?;
        if !output.status.success() {
            return Err(failed(reason(&output.stderr)));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| failed(error.to_string()))
    }

    async fn run(&self, arguments: &[&str]) -> Result<std::process::Output, KubectlError> {
        let mut command = Command::new("kubectl");
        command
            .args(&self.options)
            .args(arguments)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        match timeout(PATIENCE, command.output()).await {
            Ok(output) => output.map_err(KubectlError::Run),
            Err(_) => Err(KubectlError::Failed {
                command: arguments.first().copied().unwrap_or_default().to_owned(),
                reason: format!("no answer within {} s", PATIENCE.as_secs()),
            }),
        }
    }
}

/// What a program says on standard error, on one line, without what kubectl adds.
fn reason(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let lines = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with("command terminated with exit code"));
    lines.collect::<Vec<_>>().join(" ")
}
