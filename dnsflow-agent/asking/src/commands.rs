//! The subcommands that ask a running agent.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use dnsflow_core::ask::view::{EntryView, Explanation, Target, Verdict};
use serde::Serialize;
use tokio::{runtime, time::sleep};

use crate::{
    Levels, Status,
    client::{self, AskError},
    event::Event,
    exit::Exit,
    history::{Known, PresentFirewall},
    learn::{Learned, Line, Literal},
    manifests::Files,
    northbound,
    options::{
        ControlOptions, ControlSocket, ExplainOptions, FilterOptions, LearnFormat, LearnOptions,
        LogLevelOptions, ObserveOptions, OutputFormat, ReportOptions, TryOptions, UnusedOptions,
    },
    output::{
        UNWRITTEN, write_json, write_json_line, write_json_list, write_yaml, write_yaml_list,
    },
    page::Page,
    print::{self, FlowRow, Printed, Row, Table},
    report::NodeReport,
    trial::{Change, Trialled},
    unused::{self, Evidence, FirewallUse},
};

/// The wait for the end of a recording behind its time.
const LEARN_MARGIN: Duration = Duration::from_secs(15);

/// `dnsflow status`.
pub fn status(options: &ControlOptions, output: &mut impl Write) -> anyhow::Result<()> {
    let status: Status = block_on(client::get(&options.socket.path, "/v1/status", &[]))?;
    match options.output.format {
        OutputFormat::Table => print::status(&status, output),
        OutputFormat::Json => write_json(&status, output),
        OutputFormat::Yaml => write_yaml(&status, output),
    }
    .context(UNWRITTEN)
}

/// `dnsflow learn`: whether it has heard all of the time, or was ended before.
pub fn learn(options: &LearnOptions, output: &mut impl Write) -> anyhow::Result<Exit> {
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
        bail!(
            "no pod of {namespace} has an interface on this node: ask the agent of a node with one"
        );
    }
    let parameters = [
        ("namespace", namespace.clone()),
        ("for_s", time.as_secs().to_string()),
    ];
    let started = Instant::now();
    let mut end = None;
    let take = |line| {
        if let Line::End { left_out, .. } = line {
            end = Some(left_out);
            return Ok(());
        }
        if *format == LearnFormat::Lines {
            write_json_line(&line, output)?;
            output.flush()?;
        }
        learned.take(line);
        Ok(())
    };
    let heard = block_on(async {
        tokio::select! {
            heard = client::follow(path, "/v1/learn", &parameters, take) => heard,
            // The agent ends the recording, unless it is stuck.
            () = sleep(*time + LEARN_MARGIN) => Ok(()),
            _ = tokio::signal::ctrl_c() => Ok(()),
        }
    });
    match heard {
        // What was heard until then is worth something.
        Err(error) if matches!(error.downcast_ref(), Some(AskError::Http(_))) => {}
        heard => heard?,
    }
    let is_whole = end.is_some();
    if !is_whole {
        let heard = Duration::from_secs(started.elapsed().as_secs());
        if heard > *time {
            eprintln!("the agent has not ended the recording: it may have missed names");
        }
        learned.time = heard.min(*time);
    }
    // What was heard is worth something without them.
    let known = block_on(Known::ask(path, Some(namespace))).unwrap_or_default();
    let last = Line::End {
        left_out: end.unwrap_or_default(),
        by_address: Literal::among(&known.connections, learned.time),
    };
    if *format == LearnFormat::Lines {
        if is_whole {
            write_json_line(&last, output).context(UNWRITTEN)?;
        }
    } else {
        learned.take(last);
        // An EgressFirewall that was applied right before may have come meanwhile.
        if let Ok(status) = block_on(client::get::<Status>(path, "/v1/status", &[])) {
            learned.meet(&status);
        }
        learned.write(options, output).context(UNWRITTEN)?;
        if learned.heard_nothing() {
            eprintln!("{}", learned.nothing_heard());
            return Ok(Exit::Incomplete);
        }
    }
    Ok(match is_whole {
        true => Exit::Done,
        false => Exit::Incomplete,
    })
}

/// `dnsflow try`: whether all that is allowed would stay allowed.
pub fn try_firewalls(options: &TryOptions, output: &mut impl Write) -> anyhow::Result<Exit> {
    let TryOptions { file, control } = options;
    let Files {
        firewalls, reasons, ..
    } = Files::read(file).map_err(unreadable)?;
    for reason in &reasons {
        eprintln!("{reason}");
    }
    if firewalls.is_empty() {
        return Err(unreadable("no EgressFirewall in it".to_owned()));
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
        }
        .context(UNWRITTEN)?;
        if trialled.count(Change::WouldDeny) > 0 {
            exit = Exit::No;
        } else if trialled.is_unwatched() && exit == Exit::Done {
            exit = Exit::Incomplete;
        }
    }
    Ok(exit)
}

/// `dnsflow unused`: whether OVN's database could be asked, too.
pub fn unused(options: &UnusedOptions, output: &mut impl Write) -> anyhow::Result<Exit> {
    let UnusedOptions {
        namespace,
        ovn_nb,
        control,
    } = options;
    let socket = &control.socket.path;
    let Some(evidence) = block_on(Evidence::ask(socket, namespace))? else {
        bail!("namespace {namespace} has no EgressFirewall");
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
    let found = FirewallUse::new(namespace, &evidence, resolved.as_ref().ok());
    match control.output.format {
        OutputFormat::Table => print::unused(&found, "this node", output),
        OutputFormat::Json => write_json(&found, output),
        OutputFormat::Yaml => write_yaml(&found, output),
    }
    .context(UNWRITTEN)?;
    Ok(match resolved {
        Ok(_) => Exit::Done,
        Err(_) => Exit::Incomplete,
    })
}

/// `dnsflow report`: whether there was room for all.
pub fn report(options: &ReportOptions, output: &mut impl Write) -> anyhow::Result<Exit> {
    let ReportOptions {
        html,
        format: _,
        namespace,
        socket,
    } = options;
    let report = block_on(NodeReport::ask(&socket.path, namespace.as_deref()))?;
    let Some(report) = report else {
        let namespace = namespace.as_deref().unwrap_or_default();
        bail!("namespace {namespace} has no EgressFirewall, and no pod on this node");
    };
    for what in &report.left_out {
        eprintln!("no room for {what}");
    }
    let exit = match report.left_out.is_empty() {
        true => Exit::Done,
        false => Exit::Incomplete,
    };
    match html {
        None => write_json_line(&report, output).context(UNWRITTEN)?,
        Some(file) => Page::new(vec![report], Vec::new()).write(file, output)?,
    }
    Ok(exit)
}

/// `dnsflow log-level`.
pub fn log_level(options: &LogLevelOptions, output: &mut impl Write) -> anyhow::Result<()> {
    let LogLevelOptions { control, level } = options;
    let (socket, path) = (&control.socket.path, "/v1/log-level");
    let levels: Levels = match level {
        None => block_on(client::get(socket, path, &[])),
        Some(level) => block_on(client::put(socket, path, &[("level", level.clone())])),
    }?;
    match control.output.format {
        OutputFormat::Table => print::levels(&levels, output),
        OutputFormat::Json => write_json(&levels, output),
        OutputFormat::Yaml => write_yaml(&levels, output),
    }
    .context(UNWRITTEN)
}

/// `dnsflow cache list`.
pub fn cache_list(options: &FilterOptions, output: &mut impl Write) -> anyhow::Result<()> {
    let rows = (print::CACHE, print::cache_rows);
    list(options, |entry| vec![entry], rows, output)
}

/// `dnsflow flows list`.
pub fn flows_list(options: &FilterOptions, output: &mut impl Write) -> anyhow::Result<()> {
    let rows = (FlowRow::HEADS, |flow: &FlowRow| vec![flow.cells()]);
    let mut printed = Printed::default();
    let flows = |entry| FlowRow::of(&entry, &mut printed);
    list(options, flows, rows, output)
}

/// `dnsflow observe`.
pub fn observe(options: &ObserveOptions, output: &mut impl Write) -> anyhow::Result<()> {
    let ObserveOptions {
        control,
        last,
        since,
        follow,
        namespace,
        pod,
        event,
    } = options;
    let last = match (last, since) {
        (None, None) if *follow => Some(0),
        (last, _) => *last,
    };
    let parameters = [
        Some(("follow", follow.to_string())),
        last.map(|last| ("last", last.to_string())),
        since.map(|since| ("since_ms", since.as_millis().to_string())),
        namespace.clone().map(|namespace| ("namespace", namespace)),
        pod.clone().map(|pod| ("pod", pod)),
        event.map(|kind| ("event", kind.word())),
    ];
    let parameters: Vec<_> = parameters.into_iter().flatten().collect();
    let each = |event: Event| match control.output.format {
        OutputFormat::Table => print::event(&event, output),
        OutputFormat::Json => write_json_line(&event, output),
        OutputFormat::Yaml => write_yaml(&event, output),
    };
    let socket = &control.socket.path;
    match follow {
        true => block_on(client::follow(socket, "/v1/events", &parameters, each)),
        false => block_on(client::lines(socket, "/v1/events", &parameters, each)),
    }
}

/// `dnsflow explain`: the verdict over all ports of the pod.
pub fn explain(options: &ExplainOptions, output: &mut impl Write) -> anyhow::Result<Exit> {
    let control = &options.control;
    let (namespace, pod) = (&options.pod.namespace, &options.pod.name);
    let target = options.whole_target();
    let parameters = [
        ("namespace", namespace.clone()),
        ("pod", pod.clone()),
        ("target", target.clone()),
    ];
    let asked = client::get(&control.socket.path, "/v1/explain", &parameters);
    let explained: Vec<Explanation> = block_on(asked)?;
    let Some(exit) = explained_exit(&explained, &target) else {
        bail!(
            "no pod {namespace}/{pod} has an interface on this node: it may be on another node (ask that node's \
             agent), on the host's network, where no EgressFirewall holds, or have ended; see `dnsflow status`{}",
            kind_hint(namespace, pod)
        );
    };
    match control.output.format {
        OutputFormat::Table => print::explanations(&explained, &target, output),
        OutputFormat::Json => write_json_list(&explained, output),
        OutputFormat::Yaml => write_yaml_list(&explained, output),
    }
    .context(UNWRITTEN)?;
    Ok(exit)
}

/// What to write in place of `KIND/NAME`, as kubectl has it, where NAMESPACE/POD is expected; empty for all else.
pub(crate) fn kind_hint(namespace: &str, name: &str) -> String {
    const KINDS: [&str; 12] = [
        "daemonset",
        "deploy",
        "deployment",
        "ds",
        "job",
        "po",
        "pod",
        "pods",
        "replicaset",
        "rs",
        "statefulset",
        "sts",
    ];
    match KINDS.contains(&namespace) {
        true => format!(
            "; {namespace}/{name} stands for the pod {name} of the namespace {namespace}: write NAMESPACE/POD, and of \
             many pods the name of one"
        ),
        false => String::new(),
    }
}

/// The exit code for the verdicts over all ports of a pod; `None` without one. A pod on several networks has several
/// ports: one by which the connection passes is enough.
pub(crate) fn explained_exit(explained: &[Explanation], target: &str) -> Option<Exit> {
    let verdicts = || explained.iter().map(|one| one.verdict);
    let passes = verdicts().find(|verdict| *verdict == Verdict::Allowed);
    let verdict = passes.or_else(|| Verdict::of_all(verdicts()))?;
    let is_by_name = matches!(target.parse(), Ok(Target::Name(..)));
    Some(Exit::of(verdict, is_by_name))
}

/// Asks for the cache entries that the filters want. `values` are what programs get of an entry, and
/// `rows` what people get of a value, below `heads`.
fn list<V: Serialize>(
    options: &FilterOptions,
    mut values: impl FnMut(EntryView) -> Vec<V>,
    (heads, rows): (&[&str], impl Fn(&V) -> Vec<Row>),
    output: &mut impl Write,
) -> anyhow::Result<()> {
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
    let mut each = |mut take: &mut dyn FnMut(V) -> io::Result<()>| {
        let each = |entry| values(entry).into_iter().try_for_each(&mut take);
        let socket = &control.socket.path;
        block_on(client::lines(socket, "/v1/cache", &parameters, each))
    };
    match control.output.format {
        OutputFormat::Table => {
            let mut table = Table::begin(heads, output).context(UNWRITTEN)?;
            each(&mut |value| table.extend(rows(&value)))?;
            table.end().context(UNWRITTEN)
        }
        OutputFormat::Json => each(&mut |value| write_json_line(&value, output)),
        OutputFormat::Yaml => each(&mut |value| write_yaml(&value, output)),
    }
}

fn unreadable(reason: String) -> anyhow::Error {
    anyhow!("cannot read the manifests: {reason}")
}

fn block_on<T>(asked: impl Future<Output = Result<T, AskError>>) -> anyhow::Result<T> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the runtime")?;
    Ok(runtime.block_on(asked)?)
}
