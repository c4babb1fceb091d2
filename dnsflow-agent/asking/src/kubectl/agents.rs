//! Finds the agents of a cluster, and asks them, by kubectl.

use std::{
    io,
    process::{ExitStatus, Output, Stdio},
    slice,
    time::Duration,
};

use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tokio::{
    io::{
        AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader, copy,
        sink,
    },
    process::Command,
    sync::mpsc,
    time::timeout,
    try_join,
};

use crate::{
    Status,
    exit::Exit,
    output::{FORMAT_VERSION, FORMAT_VERSION_KEY},
    rollout::CONTAINER,
};

/// Agents that are asked at the same time.
const AT_ONCE: usize = 16;
/// The longest answer that is taken, in bytes.
const ANSWER_MAX: u64 = 256 * 1024 * 1024;
/// The longest line of an agent that is followed, in bytes.
const LINE_MAX: u64 = 1024 * 1024;
/// What is taken of what kubectl says on standard error, in bytes.
const ERRORS_MAX: u64 = 16 * 1024;
/// Lines of agents that wait to be printed. An agent waits while there are more.
const LINES_MAX: usize = 256;

/// An agent's pod.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Agent {
    /// Its node, or the pod where it has none yet.
    pub(super) node: String,
    /// The pod; none where the node has no agent.
    pub(super) pod: Option<String>,
    /// Whether it runs.
    is_running: bool,
}

/// The agents of these nodes. A node without one has its place among them: what it is asked for is missing.
pub(super) fn on(agents: Vec<Agent>, nodes: &[String]) -> Vec<Agent> {
    let of_nodes = agents.into_iter();
    let mut of_nodes: Vec<Agent> = of_nodes
        .filter(|agent| nodes.contains(&agent.node))
        .collect();
    for node in nodes {
        if !of_nodes.iter().any(|agent| agent.node == *node) {
            of_nodes.push(Agent {
                node: node.clone(),
                pod: None,
                is_running: false,
            });
        }
    }
    of_nodes
}

/// What kubectl prints of the kubeconfig's context.
#[derive(Deserialize)]
struct Kubeconfig {
    contexts: Option<Vec<NamedContext>>,
}

/// A context with its name.
#[derive(Deserialize)]
struct NamedContext {
    context: Context,
}

/// A context.
#[derive(Deserialize)]
struct Context {
    namespace: Option<String>,
}

/// The objects that kubectl prints, as `kind: List`.
#[derive(Deserialize)]
pub(super) struct List<T> {
    pub(super) items: Vec<T>,
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
    /// What the agent has said is missing of its answer, if something is.
    pub(super) missing: Option<String>,
}

/// The archive of a node, in bytes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Archive {
    /// The archive.
    pub(super) bytes: Vec<u8>,
    /// What the agent has said is missing in it, if something is.
    pub(super) missing: Option<String>,
}

/// What comes of an agent that is followed.
#[derive(Debug)]
pub(super) enum Heard {
    /// It answers: its status, before the first line.
    Began(Box<Status>),
    /// A line.
    Line(Value),
    /// There are no more, for this reason if it is one.
    End(Result<(), String>),
}

/// Why kubectl has failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum KubectlError {
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
    /// It says too much.
    #[error("an answer of more than {max} bytes")]
    TooLong {
        /// The longest that is taken, in bytes.
        max: u64,
    },
    /// The pod has no port whose connections an agent knows.
    #[error("the pod {namespace}/{pod} {why}")]
    NoPort {
        /// Its namespace.
        namespace: String,
        /// Its name.
        pod: String,
        /// Why.
        why: &'static str,
    },
}

/// What an agent has said is missing of its answer, if it has answered and something is.
fn missing(output: &Output) -> Option<String> {
    let is_part =
        output.status.code() == Some(Exit::Incomplete as i32) && !output.stdout.is_empty();
    is_part.then(|| match one_line(&output.stderr) {
        said if said.is_empty() => "a part of its answer is missing".to_owned(),
        said => said,
    })
}

/// The node whose agent knows the connections of a pod, or why there is none.
fn node_of(pod: &Pod) -> Result<String, &'static str> {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    let spec = pod.spec.as_ref();
    if spec.and_then(|spec| spec.host_network) == Some(true) {
        Err("is on the host's network: no EgressFirewall holds for its connections")
    } else if let Some("Succeeded" | "Failed") = phase {
        Err("has ended")
    } else {
        let node = spec.and_then(|spec| spec.node_name.clone());
        node.ok_or("is on no node yet")
    }
}

/// kubectl, with the options that the user has given.
#[derive(Clone, Debug)]
pub(super) struct Kubectl {
    /// The options of every call.
    pub(super) options: Vec<String>,
    /// The namespace of the agents.
    pub(super) namespace: String,
    /// The time that one call may take.
    pub(super) patience: Duration,
}

impl Kubectl {
    /// The agents, by node.
    pub(super) async fn agents(&self, selector: &str) -> Result<Vec<Agent>, KubectlError> {
        let pods = self.pods(selector).await?.into_iter();
        let mut agents: Vec<Agent> = pods
            .map(|pod| {
                let name = pod.metadata.name.unwrap_or_default();
                let phase = pod.status.and_then(|status| status.phase);
                Agent {
                    node: pod
                        .spec
                        .and_then(|spec| spec.node_name)
                        .unwrap_or_else(|| name.clone()),
                    pod: Some(name),
                    is_running: phase.as_deref() == Some("Running"),
                }
            })
            .collect();
        agents.sort_by(|one, other| (&one.node, &one.pod).cmp(&(&other.node, &other.pod)));
        Ok(agents)
    }

    /// The pods with these labels in the namespace of the agents.
    pub(super) async fn pods(&self, selector: &str) -> Result<Vec<Pod>, KubectlError> {
        let of = ["--namespace", &self.namespace, "--selector", selector];
        let arguments = [&["get", "pods"], &of[..], &["--output", "json"]].concat();
        let List { items } = self.get(&arguments).await?;
        Ok(items)
    }

    /// The namespace of the context, as kubectl takes it.
    pub(super) async fn namespace_of_context(&self) -> Result<String, KubectlError> {
        let arguments = ["config", "view", "--minify", "--output", "json"];
        let Kubeconfig { contexts } = self.get(&arguments).await?;
        let context = contexts.into_iter().flatten().next();
        let namespace = context.and_then(|named| named.context.namespace);
        Ok(namespace.unwrap_or_else(|| "default".to_owned()))
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
        node_of(&found).map_err(|why| KubectlError::NoPort {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            why,
        })
    }

    /// Runs `dnsflow` with these arguments and this standard input in the container of each agent. The
    /// answers are in the order of the agents.
    pub(super) async fn ask(
        &self,
        agents: Vec<Agent>,
        arguments: &[String],
        input: Option<&str>,
    ) -> Vec<Answer> {
        let answers = stream::iter(agents).map(async |agent| Answer {
            said: self.ask_one(&agent, arguments, input).await,
            node: agent.node,
        });
        answers.buffered(AT_ONCE).collect().await
    }

    async fn ask_one(
        &self,
        agent: &Agent,
        arguments: &[String],
        input: Option<&str>,
    ) -> Result<Said, String> {
        let arguments = self.exec(agent, arguments, input.is_some())?;
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = self.run(&arguments, input).await;
        let output = output.map_err(|error| error.to_string())?;
        let is_no = output.status.code() == Some(Exit::No as i32);
        let missing = missing(&output);
        if !output.status.success() && !is_no && missing.is_none() {
            return Err(failure(output.status, &output.stderr));
        }
        Ok(Said {
            values: values(&output.stdout)?,
            is_no,
            missing,
        })
    }

    /// What `dnsflow bundle` writes in the container of an agent.
    pub(super) async fn archive(&self, agent: &Agent) -> Result<Archive, String> {
        let arguments = self.exec(agent, &["bundle".to_owned()], false)?;
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = self.run(&arguments, None).await;
        let output = output.map_err(|error| error.to_string())?;
        let missing = missing(&output);
        match output.status.success() || missing.is_some() {
            true => Ok(Archive {
                bytes: output.stdout,
                missing,
            }),
            false => Err(failure(output.status, &output.stderr)),
        }
    }

    /// What kubectl prints for each agent, by the arguments that it has for it. The texts are in the order of the
    /// agents.
    pub(super) async fn texts(
        &self,
        agents: Vec<Agent>,
        of: impl Fn(&Agent) -> Result<Vec<String>, String>,
    ) -> Vec<(String, Result<String, String>)> {
        let texts = stream::iter(agents).map(async |agent| {
            let text = async {
                let arguments = of(&agent)?;
                let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
                let printed = self.printed(&arguments, None).await;
                printed.map_err(|error| error.to_string())
            };
            (agent.node.clone(), text.await)
        });
        texts.buffered(AT_ONCE).collect().await
    }

    /// Runs `dnsflow` with these arguments in the container of each agent that is wanted, and hands on each
    /// line as it comes. An agent is first asked for its status, so that one that does not answer is known.
    pub(super) fn follow(
        &self,
        agents: Vec<Agent>,
        arguments: &[String],
        is_wanted: impl Fn(&Status) -> bool + Clone + Send + 'static,
    ) -> mpsc::Receiver<(String, Heard)> {
        let (sender, receiver) = mpsc::channel(LINES_MAX);
        for agent in agents {
            let (kubectl, sender) = (self.clone(), sender.clone());
            let (arguments, is_wanted) = (arguments.to_vec(), is_wanted.clone());
            tokio::spawn(async move {
                let followed = kubectl.follow_one(&agent, &arguments, is_wanted, &sender);
                let end = Heard::End(followed.await);
                // Nobody reads any longer where this fails.
                let _gone = sender.send((agent.node, end)).await;
            });
        }
        receiver
    }

    async fn follow_one(
        &self,
        agent: &Agent,
        arguments: &[String],
        is_wanted: impl Fn(&Status) -> bool,
        sender: &mpsc::Sender<(String, Heard)>,
    ) -> Result<(), String> {
        let hand_on = async |heard| {
            let sent = sender.send((agent.node.clone(), heard)).await;
            sent.map_err(|_| "nobody reads".to_owned())
        };
        let status = ["status", "--output", "json"].map(str::to_owned);
        let said = self.ask_one(agent, &status, None).await?;
        let status = said.values.into_iter().next().unwrap_or_default();
        let status: Status = serde_json::from_value(status)
            .map_err(|error| format!("its agent is of another version: {error}"))?;
        if !is_wanted(&status) {
            return Ok(());
        }
        hand_on(Heard::Began(Box::new(status))).await?;
        let arguments = self.exec(agent, arguments, false)?;
        let mut command = self.command(arguments.iter().map(String::as_str));
        // What interrupts this program does not interrupt kubectl: what comes until then is read.
        command.process_group(0);
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let (Some(output), Some(errors)) = (child.stdout.take(), child.stderr.take()) else {
            return Err("it cannot be read".to_owned());
        };
        let lines = async {
            let mut output = BufReader::new(output);
            loop {
                let mut line = Vec::new();
                let mut part = (&mut output).take(LINE_MAX);
                let read = part.read_until(b'\n', &mut line).await;
                match read.map_err(|error| error.to_string())? {
                    0 => return Ok(()),
                    _ if line.last() == Some(&b'\n') => {}
                    _ if line.len() as u64 == LINE_MAX => {
                        return Err(format!("a line of more than {LINE_MAX} bytes"));
                    }
                    _ => return Err("it has broken off within a line".to_owned()),
                }
                for value in values(&line)? {
                    hand_on(Heard::Line(value)).await?;
                }
            }
        };
        let errors = async { Ok::<_, String>(read_start(errors).await.unwrap_or_default()) };
        let ((), errors) = try_join!(lines, errors)?;
        let status = child.wait().await.map_err(|error| error.to_string())?;
        match status.success() {
            true => Ok(()),
            false => Err(failure(status, &errors)),
        }
    }

    /// The arguments of kubectl that run `dnsflow` with these ones in the container of an agent.
    pub(super) fn exec(
        &self,
        agent: &Agent,
        arguments: &[String],
        has_input: bool,
    ) -> Result<Vec<String>, String> {
        let Some(pod) = &agent.pod else {
            return Err(format!(
                "no agent's pod is on this node: kubectl --namespace {} describe daemonset dnsflow",
                self.namespace
            ));
        };
        if !agent.is_running {
            return Err(format!("the agent's pod {pod} does not run"));
        }
        let exec = ["exec", "--namespace", &self.namespace, pod];
        let exec = exec.into_iter().chain(["--container", CONTAINER]);
        let exec = exec.chain(has_input.then_some("--stdin"));
        let exec = exec.chain(["--", "dnsflow"]).map(str::to_owned);
        Ok(exec.chain(arguments.iter().cloned()).collect())
    }

    async fn get<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T, KubectlError> {
        let output = self.succeeded(arguments, None).await?;
        serde_json::from_slice(&output).map_err(|error| failed(arguments, error.to_string()))
    }

    /// The object that kubectl prints with `--ignore-not-found`, if it is there.
    pub(super) async fn find<T: DeserializeOwned>(
        &self,
        arguments: &[&str],
        input: Option<&str>,
    ) -> Result<Option<T>, KubectlError> {
        let output = self.succeeded(arguments, input).await?;
        match output.trim_ascii() {
            b"" => Ok(None),
            json => serde_json::from_slice(json)
                .map(Some)
                .map_err(|error| failed(arguments, error.to_string())),
        }
    }

    /// The text that kubectl prints, as lines that do nothing to a terminal.
    pub(super) async fn printed(
        &self,
        arguments: &[&str],
        input: Option<&str>,
    ) -> Result<String, KubectlError> {
        let output = self.succeeded(arguments, input).await?;
        let text = String::from_utf8_lossy(&output);
        Ok(text.lines().map(|line| visible(line) + "\n").collect())
    }

    async fn succeeded(
        &self,
        arguments: &[&str],
        input: Option<&str>,
    ) -> Result<Vec<u8>, KubectlError> {
        let output = self.run(arguments, input).await?;
        match output.status.success() {
            true => Ok(output.stdout),
            false => Err(failed(arguments, failure(output.status, &output.stderr))),
        }
    }

    /// kubectl with these arguments. It ends with whoever holds it.
    fn command<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = Command::new("kubectl");
        command
            .args(&self.options)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    async fn run(&self, arguments: &[&str], input: Option<&str>) -> Result<Output, KubectlError> {
        match timeout(self.patience, self.output(arguments, input)).await {
            Ok(output) => output,
            Err(_) => Err(KubectlError::Failed {
                command: arguments.first().copied().unwrap_or_default().to_owned(),
                reason: format!(
                    "no answer within {}",
                    humantime::format_duration(self.patience)
                ),
            }),
        }
    }

    /// What kubectl prints. No more is read than is taken.
    async fn output(
        &self,
        arguments: &[&str],
        input: Option<&str>,
    ) -> Result<Output, KubectlError> {
        let mut command = self.command(arguments.iter().copied());
        if input.is_some() {
            command.stdin(Stdio::piped());
        }
        let mut child = command.spawn().map_err(KubectlError::Run)?;
        let (pipe, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let feed = async {
            if let (Some(mut pipe), Some(input)) = (pipe, input) {
                // Whoever reads no further says why.
                let _ended = pipe.write_all(input.as_bytes()).await;
            }
            Ok(())
        };
        let read = async {
            let mut stdout = Vec::new();
            if let Some(output) = output {
                let read = output.take(ANSWER_MAX + 1).read_to_end(&mut stdout).await;
                read.map_err(KubectlError::Run)?;
            }
            match stdout.len() as u64 > ANSWER_MAX {
                true => Err(KubectlError::TooLong { max: ANSWER_MAX }),
                false => Ok(stdout),
            }
        };
        let read_errors = async {
            match errors {
                Some(errors) => read_start(errors).await.map_err(KubectlError::Run),
                None => Ok(Vec::new()),
            }
        };
        let ((), stdout, stderr) = try_join!(feed, read, read_errors)?;
        let status = child.wait().await.map_err(KubectlError::Run)?;
        Ok(Output {
            status,
            stdout,
            stderr,
        })
    }
}

/// Reads all, and keeps the start.
async fn read_start(mut from: impl AsyncRead + Unpin) -> io::Result<Vec<u8>> {
    let mut start = Vec::new();
    (&mut from).take(ERRORS_MAX).read_to_end(&mut start).await?;
    copy(&mut from, &mut sink()).await?;
    Ok(start)
}

/// The JSON values that an agent has said. Whoever has taken over its node can say anything: no text of it can do more
/// to a terminal than be seen, nor begin another line.
fn values(said: &[u8]) -> Result<Vec<Value>, String> {
    let values = serde_json::Deserializer::from_slice(said).into_iter();
    let values = values.map(|value| {
        let value = value.map_err(|error| format!("its answer is not understood: {error}"))?;
        without_version(visible_value(value))
    });
    values.collect()
}

/// An object, or a list of them, without the version of the format: whoever prints it adds the own one.
fn without_version(mut value: Value) -> Result<Value, String> {
    let objects = match &mut value {
        Value::Array(values) => &mut values[..],
        value => slice::from_mut(value),
    };
    for object in objects {
        let fields = object.as_object_mut();
        let version = fields.and_then(|fields| fields.remove(FORMAT_VERSION_KEY));
        if let Some(version) = version.filter(|version| *version != FORMAT_VERSION) {
            return Err(format!(
                "its agent is of another version: it answers in format {version}, not {FORMAT_VERSION}"
            ));
        }
    }
    Ok(value)
}

fn visible_value(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(visible(&text)),
        Value::Array(values) => values.into_iter().map(visible_value).collect(),
        Value::Object(fields) => {
            let fields = fields.into_iter();
            let fields = fields.map(|(name, value)| (visible(&name), visible_value(value)));
            Value::Object(fields.collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value,
    }
}

/// The text with all characters escaped that move a cursor, begin a line, or change or hide what stands beside them.
fn visible(text: &str) -> String {
    let mut visible = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            // Separators of lines and paragraphs; what is invisible, or changes the direction of text: most of
            // Unicode's category Cf.
            '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}' => visible.extend(character.escape_default()),
            _ if character.is_control() => visible.extend(character.escape_default()),
            _ => visible.push(character),
        }
    }
    visible
}

/// What a program says on standard error, on one line, without what kubectl adds.
fn one_line(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let lines = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with("command terminated with exit code"));
    visible(&lines.collect::<Vec<_>>().join(" "))
}

/// kubectl has failed with these arguments.
fn failed(arguments: &[&str], reason: String) -> KubectlError {
    KubectlError::Failed {
        command: arguments.join(" "),
        reason,
    }
}

/// Why a program has failed, as it says.
fn failure(status: ExitStatus, stderr: &[u8]) -> String {
    match one_line(stderr) {
        said if said.is_empty() => format!("kubectl has ended, {status}"),
        said => said,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "\u{1b}]0;x\u{7} \u{9b}2J \r\n--- \u{202e} \u{2028} \u{7f} \u{200b}";
    const VISIBLE: &str = r"\u{1b}]0;x\u{7} \u{9b}2J \r\n--- \u{202e} \u{2028} \u{7f} \u{200b}";

    #[test]
    fn no_text_of_an_agent_does_anything_to_a_terminal() {
        let said = serde_json::json!({HOSTILE: [{"name": HOSTILE}, 1, null]});
        let said = format!("{said}\n{}", serde_json::json!("Grüße, a\\b"));
        let values = values(said.as_bytes()).expect("JSON");
        let visible = serde_json::json!({VISIBLE: [{"name": VISIBLE}, 1, null]});
        assert_eq!(values, [visible, "Grüße, a\\b".into()]);
    }

    #[test]
    fn an_answer_in_another_format_is_refused() {
        let known = values(b"[{\"format_version\": 1, \"a\": 2}]\n{\"b\": 3}");
        let expected = [serde_json::json!([{"a": 2}]), serde_json::json!({"b": 3})];
        assert_eq!(known.expect("it is known"), expected);
        let other = values(b"{\"format_version\": 2}").expect_err("it is another");
        assert!(other.ends_with("it answers in format 2, not 1"), "{other}");
    }

    #[test]
    fn a_pod_without_a_port_has_its_own_answer() {
        let node = |spec, status| {
            let pod = serde_json::json!({"metadata": {}, "spec": spec, "status": status});
            node_of(&serde_json::from_value(pod).expect("a pod"))
        };
        let running = serde_json::json!({"phase": "Running"});
        let spec = serde_json::json!({"containers": [], "nodeName": "n1"});
        assert_eq!(node(spec.clone(), running.clone()), Ok("n1".to_owned()));
        let of_host = serde_json::json!({"containers": [], "nodeName": "n1", "hostNetwork": true});
        let why = node(of_host, running.clone()).expect_err("it has no port");
        assert!(why.contains("no EgressFirewall holds"), "{why}");
        let ended = node(spec, serde_json::json!({"phase": "Succeeded"}));
        assert_eq!(ended, Err("has ended"));
        let pending = node(serde_json::json!({"containers": []}), running);
        assert_eq!(pending, Err("is on no node yet"));
    }

    #[test]
    fn a_node_without_an_agent_is_named() {
        let agent = |node: &str| Agent {
            node: node.to_owned(),
            pod: Some(format!("agent-of-{node}")),
            is_running: true,
        };
        let all = vec![agent("n1"), agent("n2"), agent("n3")];
        let found = on(all, &["n2".to_owned(), "n9".to_owned()]);
        let pods: Vec<_> = found
            .iter()
            .map(|agent| (&*agent.node, agent.pod.as_deref()))
            .collect();
        assert_eq!(pods, [("n2", Some("agent-of-n2")), ("n9", None)]);
        let kubectl = Kubectl {
            options: Vec::new(),
            namespace: "dnsflow".to_owned(),
            patience: Duration::from_secs(1),
        };
        let refused = kubectl.exec(&found[1], &[], false).expect_err("no pod");
        assert!(
            refused.starts_with("no agent's pod is on this node"),
            "{refused}"
        );
    }

    #[test]
    fn no_error_of_an_agent_does_so_either() {
        let said = one_line(b"one\n \x1b[2Jtwo\xff\ncommand terminated with exit code 1\n");
        assert_eq!(said, "one \\u{1b}[2Jtwo\u{fffd}");
    }
}
