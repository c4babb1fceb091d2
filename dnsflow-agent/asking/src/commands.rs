//! The subcommands that ask a running agent.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    time::{Duration, Instant},
};

use dnsflow_core::ask::view::{EntryView, Explanation, Verdict};
use serde::Serialize;
use tokio::runtime;

use crate::{
    Levels, Status,
    client::{self, AskError},
    event::Event,
    exit::Exit,
    history::{Known, PresentFirewall},
    learn::{Learned, Line},
    manifests::Files,
    northbound,
    options::{
        ControlOptions, ControlSocket, ExplainOptions, FilterOptions, LearnFormat, LearnOptions,
        LogLevelOptions, ObserveOptions, OutputFormat, PruneOptions, ReportOptions, TryOptions,
    },
    output::{write_json, write_json_line, write_yaml},
    page::{Page, PageError},
    print::{self, FlowRow, Row, Table},
    report::NodeReport,
    trial::{Change, Trialled},
    unused::{self, Evidence, Pruning},
};

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
    /// There is no page.
    #[error(transparent)]
    Page(#[from] PageError),
    /// The manifests say nothing.
    #[error("cannot read the manifests: {0}")]
    Manifests(String),
    /// The namespace has no EgressFirewall.
    #[error("namespace {namespace} has no EgressFirewall")]
    NoFirewall {
        /// The namespace.
        namespace: String,
    },
    /// The namespace has no pods here.
    #[error(
        "no pod of {namespace} has an interface on this node: ask the agent of a node with one"
    )]
    NoPods {
        /// The namespace.
        namespace: String,
    },
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

/// `dnsflow status`.
pub fn status(options: &ControlOptions, output: &mut impl Write) -> Result<(), CommandError> {
    let status: Status = block_on(client::get(&options.socket.path, "/v1/status", &[]))?;
    Ok(match options.output.format {
        OutputFormat::Table => print::status(&status, output),
        OutputFormat::Json => write_json(&status, output),
        OutputFormat::Yaml => write_yaml(&status, output),
    }?)
}

/// `dnsflow learn`: whether it has heard all of the time, or was ended before.
pub fn learn(options: &LearnOptions, output: &mut impl Write) -> Result<Exit, CommandError> {
    let LearnOptions {
        namespace,
        time,
        wildcard: _,
        output: format,
        socket: ControlSocket { path },
    } = options;
    let status: Status = block_on(client::get(path, "/v1/status", &[]))?;
    let mut learned = Learned {
        namespace: namespace.clone(),
        time: *time,
        ..Learned::default()
    };
    if !learned.meet(&status) {
        return Err(CommandError::NoPods {
            namespace: namespace.clone(),
        });
    }
    let parameters = [
        ("namespace", namespace.clone()),
        ("for_s", time.as_secs().to_string()),
    ];
    let started = Instant::now();
    let mut is_whole = false;
    let take = |line| {
        is_whole |= matches!(line, Line::End { .. });
        if *format == LearnFormat::Lines {
            write_json_line(&line, output)?;
            output.flush()?;
        }
        learned.take(line);
        Ok(())
    };
    let heard = block_on(async {
        tokio::select! {
            heard = client::lines(path, "/v1/learn", &parameters, take) => heard,
            _ = tokio::signal::ctrl_c() => Ok(()),
        }
    });
    match heard {
        // What was heard until then is worth something.
        Err(CommandError::Ask(AskError::Http(_))) => {}
        heard => heard?,
    }
    if !is_whole {
        learned.time = Duration::from_secs(started.elapsed().as_secs());
    }
    learned.write(options, output)?;
    Ok(if is_whole {
        Exit::Done
    } else {
        Exit::Incomplete
    })
}

/// `dnsflow try`: whether all that is allowed would stay allowed.
pub fn try_firewalls(options: &TryOptions, output: &mut impl Write) -> Result<Exit, CommandError> {
    let TryOptions { file, control } = options;
    let Files {
        firewalls, reasons, ..
    } = Files::read(file).map_err(CommandError::Manifests)?;
    for reason in &reasons {
        eprintln!("{reason}");
    }
    if firewalls.is_empty() {
        return Err(CommandError::Manifests(
            "no EgressFirewall in it".to_owned(),
        ));
    }
    let socket = &control.socket.path;
    let mut exit = Exit::Done;
    for (id, firewall, problems) in firewalls {
        let namespace = [("namespace", id.namespace.clone())];
        let (present, known) = block_on(async {
            let present: PresentFirewall = client::get(socket, "/v1/firewall", &namespace).await?;
            Ok((present, Known::ask(socket, Some(&id.namespace)).await?))
        })?;
        let trialled = Trialled::new(&id, &firewall, &present, &known, problems);
        match control.output.format {
            OutputFormat::Table => print::trialled(&trialled, output),
            OutputFormat::Json => write_json_line(&trialled, output),
            OutputFormat::Yaml => write_yaml(&trialled, output),
        }?;
        if trialled.count(Change::WouldDeny) > 0 {
            exit = Exit::No;
        } else if trialled.is_unwatched() && exit == Exit::Done {
            exit = Exit::Incomplete;
        }
    }
    Ok(exit)
}

/// `dnsflow prune`: whether OVN's database could be asked, too.
pub fn prune(options: &PruneOptions, output: &mut impl Write) -> Result<Exit, CommandError> {
    let PruneOptions {
        namespace,
        ovn_nb,
        control,
    } = options;
    let socket = &control.socket.path;
    let Some(evidence) = block_on(Evidence::ask(socket, namespace))? else {
        return Err(CommandError::NoFirewall {
            namespace: namespace.clone(),
        });
    };
    let names = unused::names_of(&evidence.firewall);
    let resolved = block_on(async {
        Ok(match names[..] {
            [] => Ok(BTreeMap::new()),
            _ => northbound::of_names(ovn_nb.clone(), &names).await,
        })
    })?;
    if let Err(error) = &resolved {
        eprintln!("what ovn-kubernetes alone would have denied is missing: {error}");
    }
    let pruning = Pruning::new(namespace, &evidence, resolved.as_ref().ok());
    match control.output.format {
        OutputFormat::Table => print::pruning(&pruning, "this node", output),
        OutputFormat::Json => write_json(&pruning, output),
        OutputFormat::Yaml => write_yaml(&pruning, output),
    }?;
    Ok(match resolved {
        Ok(_) => Exit::Done,
        Err(_) => Exit::Incomplete,
    })
}

/// `dnsflow report`: whether there was room for all.
pub fn report(options: &ReportOptions, output: &mut impl Write) -> Result<Exit, CommandError> {
    let ReportOptions {
        html,
        format: _,
        namespace,
        socket,
    } = options;
    let report = block_on(NodeReport::ask(&socket.path, namespace.as_deref()))?;
    for what in &report.left_out {
        eprintln!("no room for {what}");
    }
    let exit = match report.left_out.is_empty() {
        true => Exit::Done,
        false => Exit::Incomplete,
    };
    match html {
        None => write_json_line(&report, output)?,
        Some(file) => Page::new(vec![report], Vec::new()).write(file, output)?,
    }
    Ok(exit)
}

/// `dnsflow log-level`.
pub fn log_level(options: &LogLevelOptions, output: &mut impl Write) -> Result<(), CommandError> {
    let LogLevelOptions { control, level } = options;
    let (socket, path) = (&control.socket.path, "/v1/log-level");
    let levels: Levels = match level {
        None => block_on(client::get(socket, path, &[])),
        Some(level) => block_on(client::put(socket, path, &[("level", level.clone())])),
    }?;
    Ok(match control.output.format {
        OutputFormat::Table => print::levels(&levels, output),
        OutputFormat::Json => write_json(&levels, output),
        OutputFormat::Yaml => write_yaml(&levels, output),
    }?)
}

/// `dnsflow cache list`.
pub fn cache_list(options: &FilterOptions, output: &mut impl Write) -> Result<(), CommandError> {
    let rows = (print::CACHE, print::cache_rows);
    list(options, |entry| vec![entry], rows, output)
}

/// `dnsflow flows list`.
pub fn flows_list(options: &FilterOptions, output: &mut impl Write) -> Result<(), CommandError> {
    let rows = (FlowRow::HEADS, |flow: &FlowRow| vec![flow.cells()]);
    list(options, |entry| FlowRow::of(&entry), rows, output)
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
        let kind = options.event.as_ref();
        is(&options.namespace, &event.namespace)
            && is(&options.pod, &event.pod)
            && kind.is_none_or(|kind| *kind == event.event)
    };
    let each = |event: Event| match control.output.format {
        _ if !is_wanted(&event) => Ok(()),
        OutputFormat::Table => print::event(&event, output),
        OutputFormat::Json => write_json_line(&event, output),
        OutputFormat::Yaml => write_yaml(&event, output),
    };
    let asked = client::lines(&control.socket.path, "/v1/events", &parameters, each);
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
    let asked = client::get(&control.socket.path, "/v1/explain", &parameters);
    let explained: Vec<Explanation> = block_on(asked)?;
    // The agent says so of a pod on other networks for each of its ports: one that passes is enough.
    let Some(verdict) = explained.iter().map(|one| one.verdict).min() else {
        return Err(CommandError::NoSuchPod {
            namespace: namespace.clone(),
            pod: pod.clone(),
        });
    };
    match control.output.format {
        OutputFormat::Table => print::explanations(&explained, &options.target, output),
        OutputFormat::Json => write_json(&explained, output),
        OutputFormat::Yaml => write_yaml(&explained, output),
    }?;
    Ok(verdict)
}

/// Asks for the cache entries that the filters want. `values` are what programs get of an entry, and
/// `rows` what people get of a value, below `heads`.
fn list<V: Serialize>(
    options: &FilterOptions,
    values: impl Fn(EntryView) -> Vec<V>,
    (heads, rows): (&[&str], impl Fn(&V) -> Vec<Row>),
    output: &mut impl Write,
) -> Result<(), CommandError> {
    let FilterOptions {
        control,
        namespace,
        pod,
        name,
        address,
    } = options;
    let text = |key, value: &Option<String>| value.clone().map(|value| (key, value));
    let parameters = [
        text("namespace", namespace),
        text("pod", pod),
        text("name", name),
        address.map(|address| ("address", address.to_string())),
    ];
    let parameters: Vec<_> = parameters.into_iter().flatten().collect();
    let each = |mut take: &mut dyn FnMut(V) -> io::Result<()>| {
        let each = |entry| values(entry).into_iter().try_for_each(&mut take);
        let socket = &control.socket.path;
        block_on(client::lines(socket, "/v1/cache", &parameters, each))
    };
    match control.output.format {
        OutputFormat::Table => {
            let mut table = Table::begin(heads, output)?;
            each(&mut |value| table.extend(rows(&value)))?;
            Ok(table.end()?)
        }
        OutputFormat::Json => each(&mut |value| write_json_line(&value, output)),
        OutputFormat::Yaml => each(&mut |value| write_yaml(&value, output)),
    }
}

fn block_on<T>(asked: impl Future<Output = Result<T, AskError>>) -> Result<T, CommandError> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(CommandError::Runtime)?;
    Ok(runtime.block_on(asked)?)
}
