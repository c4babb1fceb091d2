//! The subcommands that ask a running agent.

use std::{
    io::{self, IsTerminal as _, Write},
    path::Path,
};

use dnsflow_core::view::{EntryView, Explanation, Verdict};
use serde::{Serialize, de::DeserializeOwned};
use tokio::runtime;

use super::{
    Status,
    client::{self, AskError},
    journal::Event,
    print::{self, CacheRow, FlowRow},
};
use crate::options::{ControlOptions, ExplainOptions, FilterOptions, ObserveOptions, OutputFormat};

/// Why a subcommand has failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// No runtime.
    #[error("cannot start the runtime")]
    Runtime(#[source] io::Error),
    /// The agent has not answered.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The answer cannot be written.
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
    /// The pod is not on this node.
    #[error(
        "no pod {namespace}/{pod} has an interface on this node: ask the agent of the pod's node, and \
         see `dnsflow status`"
    )]
    NoSuchPod {
        /// Its namespace.
        namespace: String,
        /// Its name.
        pod: String,
    },
}

impl CommandError {
    /// Whether the reader of the answer has gone.
    pub fn is_closed_pipe(&self) -> bool {
        let error = match self {
            Self::Output(error) | Self::Ask(AskError::Output(error)) => error,
            _ => return false,
        };
        error.kind() == io::ErrorKind::BrokenPipe
    }
}

/// `dnsflow status`.
pub fn status(options: &ControlOptions, output: &mut impl Write) -> Result<(), CommandError> {
    let status: Status = block_on(client::get(&options.control_socket, "/v1/status", &[]))?;
    match options.output {
        OutputFormat::Table => Ok(print::status(&status, output)?),
        format => write_value(&status, format, output),
    }
}

/// `dnsflow cache list`.
pub fn cache_list(options: &FilterOptions, output: &mut impl Write) -> Result<(), CommandError> {
    let control = &options.control;
    let entries = |take: &mut dyn FnMut(EntryView) -> io::Result<()>| {
        list(&control.control_socket, "/v1/cache", options, take)
    };
    match control.output {
        OutputFormat::Table => {
            let mut table = print::table::<CacheRow>(output)?;
            entries(&mut |entry| table.extend(CacheRow::of(&entry)))?;
            Ok(table.end()?)
        }
        OutputFormat::Json => entries(&mut |entry| write_line(&entry, output)),
        OutputFormat::Yaml => entries(&mut |entry| write_document(&entry, output)),
    }
}

/// `dnsflow flows list`.
pub fn flows_list(options: &FilterOptions, output: &mut impl Write) -> Result<(), CommandError> {
    let control = &options.control;
    let rows = |take: &mut dyn FnMut(FlowRow) -> io::Result<()>| {
        let mut each = |entry: EntryView| FlowRow::of(&entry).into_iter().try_for_each(&mut *take);
        list(&control.control_socket, "/v1/cache", options, &mut each)
    };
    match control.output {
        OutputFormat::Table => {
            let mut table = print::table::<FlowRow>(output)?;
            rows(&mut |row| table.extend([row]))?;
            Ok(table.end()?)
        }
        OutputFormat::Json => rows(&mut |row| write_line(&row, output)),
        OutputFormat::Yaml => rows(&mut |row| write_document(&row, output)),
    }
}

/// `dnsflow observe`.
pub fn observe(options: &ObserveOptions, output: &mut impl Write) -> Result<(), CommandError> {
    let control = &options.control;
    let last = match (options.last, options.follow) {
        (Some(last), _) => Some(last),
        (None, true) => Some(0),
        (None, false) => None,
    };
    let mut parameters = vec![("follow", options.follow.to_string())];
    parameters.extend(last.map(|last| ("last", last.to_string())));
    let is_wanted = |event: &Event| {
        let is =
            |wanted: &Option<String>, found: &Option<String>| wanted.is_none() || wanted == found;
        is(&options.namespace, &event.namespace) && is(&options.pod, &event.pod)
    };
    let each = |event: Event| match control.output {
        _ if !is_wanted(&event) => Ok(()),
        OutputFormat::Table => print::event(&event, output),
        OutputFormat::Json => write_line(&event, output),
        OutputFormat::Yaml => write_document(&event, output),
    };
    let asked = client::lines(&control.control_socket, "/v1/events", &parameters, each);
    block_on(asked)
}

/// `dnsflow explain`: the verdict over all ports of the pod.
pub fn explain(options: &ExplainOptions, output: &mut impl Write) -> Result<Verdict, CommandError> {
    let control = &options.control;
    let (namespace, pod) = (&options.pod.namespace, &options.pod.name);
    let parameters = [
        ("namespace", namespace.clone()),
        ("pod", pod.clone()),
        ("target", options.target.clone()),
    ];
    let asked = client::get(&control.control_socket, "/v1/explain", &parameters);
    let explained: Vec<Explanation> = block_on(asked)?;
    // The agent says so of a pod on other networks for each of its ports: one that passes is enough.
    let Some(verdict) = explained.iter().map(|one| one.verdict).min() else {
        return Err(CommandError::NoSuchPod {
            namespace: namespace.clone(),
            pod: pod.clone(),
        });
    };
    match control.output {
        OutputFormat::Table => print::explanations(&explained, &options.target, output)?,
        format => write_value(&explained, format, output)?,
    }
    Ok(verdict)
}

/// Asks for JSON lines, with these filters.
fn list<T: DeserializeOwned>(
    socket: &Path,
    path: &str,
    options: &FilterOptions,
    take: &mut dyn FnMut(T) -> io::Result<()>,
) -> Result<(), CommandError> {
    let text = |key, value: &Option<String>| value.clone().map(|value| (key, value));
    let parameters = [
        text("namespace", &options.namespace),
        text("pod", &options.pod),
        text("name", &options.name),
        options
            .address
            .map(|address| ("address", address.to_string())),
    ];
    let parameters: Vec<_> = parameters.into_iter().flatten().collect();
    block_on(client::lines(socket, path, &parameters, take))
}

fn block_on<T>(asked: impl Future<Output = Result<T, AskError>>) -> Result<T, CommandError> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(CommandError::Runtime)?;
    Ok(runtime.block_on(asked)?)
}

fn write_value(
    value: &impl Serialize,
    format: OutputFormat,
    output: &mut impl Write,
) -> Result<(), CommandError> {
    match format {
        OutputFormat::Yaml => write_document(value, output)?,
        _ => {
            serde_json::to_writer_pretty(&mut *output, value).map_err(io::Error::from)?;
            writeln!(output)?;
        }
    }
    Ok(())
}

fn write_line(value: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer(&mut *output, value)?;
    writeln!(output)?;
    flush_for_people(output)
}

fn write_document(value: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
    let text = serde_saphyr::to_string(value).map_err(io::Error::other)?;
    writeln!(output, "---\n{}", text.trim_end())?;
    flush_for_people(output)
}

/// A line that is followed on a terminal is to be seen at once.
fn flush_for_people(output: &mut impl Write) -> io::Result<()> {
    match io::stdout().is_terminal() {
        true => output.flush(),
        false => Ok(()),
    }
}
