//! What agents say as it happens: their lines come as one stream.

use std::{
    collections::BTreeSet,
    io::{self, Write},
    time::{Duration, Instant},
};

use serde::Deserialize as _;
use serde_json::Value;
use tokio::{signal::ctrl_c, sync::mpsc, time::sleep};

use super::{agents::Heard, merge::with_node};
use crate::{
    event::Event,
    exit::Exit,
    learn::{Learned, Line},
    options::{LearnOptions, OutputFormat},
    output::{write_json_line, write_yaml},
    print,
};

/// Prints events in the order in which they come, until all nodes have ended. Names each that ends.
pub(super) async fn events(
    mut heard: mpsc::Receiver<(String, Heard)>,
    format: OutputFormat,
    output: &mut impl Write,
) -> io::Result<Exit> {
    while let Some((node, heard)) = heard.recv().await {
        match heard {
            Heard::Began(_) => {}
            Heard::Line(value) => event(node, value, format, output)?,
            Heard::End(end) => {
                let reason = end.err().unwrap_or_else(|| "it has ended".to_owned());
                eprintln!("node {node}: {reason}");
            }
        }
    }
    // Nobody has ended them: what is to come is missing.
    Ok(Exit::Incomplete)
}

fn event(
    node: String,
    value: Value,
    format: OutputFormat,
    output: &mut impl Write,
) -> io::Result<()> {
    match format {
        OutputFormat::Table => {
            let event = Event::deserialize(value).map_err(io::Error::other)?;
            write!(output, "{node}  ")?;
            print::event(&event, output)?;
        }
        OutputFormat::Json => write_json_line(&with_node(node, value), output)?,
        OutputFormat::Yaml => write_yaml(&with_node(node, value), output)?,
    }
    output.flush()
}

/// Takes in what pods of a namespace ask for on all nodes, until the time is over or somebody interrupts, and
/// prints what one agent would print. `None` where no node has pods of the namespace. A node that goes on for longer
/// than `patience` behind the time is named and not waited for.
pub(super) async fn learn(
    mut heard: mpsc::Receiver<(String, Heard)>,
    options: &LearnOptions,
    patience: Duration,
    output: &mut impl Write,
) -> io::Result<Option<Exit>> {
    let mut learned = Learned {
        namespace: options.namespace.clone(),
        time: options.time,
        ..Learned::default()
    };
    let started = Instant::now();
    let (mut began, mut whole, mut is_cut) = (0, 0, false);
    let mut open = BTreeSet::new();
    // A node is asked for its status before it records.
    let end = sleep(patience + options.time + patience);
    tokio::pin!(end);
    loop {
        let next = tokio::select! {
            next = heard.recv() => next,
            () = &mut end => {
                for node in &open {
                    eprintln!("node {node}: its recording has no end");
                }
                is_cut = true;
                None
            }
            _ = ctrl_c() => {
                learned.time = Duration::from_secs(started.elapsed().as_secs());
                is_cut = true;
                None
            }
        };
        let Some((node, heard)) = next else {
            break;
        };
        match heard {
            Heard::Began(status) => {
                learned.meet(&status);
                began += 1;
                open.insert(node);
            }
            Heard::Line(value) => match Line::deserialize(value) {
                Ok(line) => {
                    whole += usize::from(matches!(line, Line::End { .. }));
                    learned.take(line);
                }
                Err(error) => {
                    eprintln!("node {node}: a line is left out: {error}");
                    is_cut = true;
                }
            },
            Heard::End(end) => {
                open.remove(&node);
                if let Err(reason) = end {
                    eprintln!("node {node}: {reason}");
                    is_cut = true;
                }
            }
        }
    }
    if began == 0 {
        return Ok(None);
    }
    learned.write(options, output)?;
    output.flush()?;
    if learned.heard_nothing() {
        eprintln!("{}", learned.nothing_heard());
    }
    Ok(Some(
        match is_cut || whole < began || learned.heard_nothing() {
            true => Exit::Incomplete,
            false => Exit::Done,
        },
    ))
}
