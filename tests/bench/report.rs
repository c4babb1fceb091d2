//! What was measured: as a table for people, as JSON for programs.

use std::fs;

use anyhow::{Context, Result};
use dnsflow_tests::lab::Lab;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{distribution::Distribution, stage::OpenBy};

/// One line of the table.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    figure: &'static str,
    value: String,
    target: &'static str,
    reached: bool,
}

/// Distributions that are shown in one picture.
#[derive(Clone, Debug)]
pub(crate) struct Panel {
    pub(crate) title: &'static str,
    /// In microseconds.
    pub(crate) curves: Vec<(&'static str, Distribution)>,
}

/// What a row has to say.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    fields: Vec<(&'static str, Value)>,
    lines: Vec<Line>,
    panels: Vec<Panel>,
}

impl Measured {
    /// Adds a value for JSON. A dot leads into an object.
    pub(crate) fn field(mut self, path: &'static str, value: impl Serialize) -> Result<Self> {
        self.fields.push((path, serde_json::to_value(value)?));
        Ok(self)
    }

    /// Adds a line of the table; `reached` says whether the target is.
    pub(crate) fn line(
        mut self,
        figure: &'static str,
        value: impl Into<String>,
        target: &'static str,
        reached: bool,
    ) -> Self {
        self.lines.push(Line {
            figure,
            value: value.into(),
            target,
            reached,
        });
        self
    }

    /// Adds a picture.
    pub(crate) fn panel(
        mut self,
        title: &'static str,
        curves: impl IntoIterator<Item = (&'static str, Distribution)>,
    ) -> Self {
        let curves = curves.into_iter().collect();
        self.panels.push(Panel { title, curves });
        self
    }

    /// The lines, for whoever waits.
    pub(crate) fn told(&self) -> Vec<String> {
        let line = |line: &Line| format!("{}: {} ({})", line.figure, line.value, line.target);
        self.lines.iter().map(line).collect()
    }
}

/// Everything that was measured.
#[derive(Debug)]
pub(crate) struct Report {
    fields: Map<String, Value>,
    lines: Vec<(OpenBy, Line)>,
    panels: Vec<Panel>,
}

impl Report {
    /// Nothing yet, but on which machine.
    pub(crate) fn new(lab: &Lab, short: bool) -> Result<Self> {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
        let first = |text: String| text.lines().next().unwrap_or_default().to_owned();
        let machine = json!({
            "kernel": kernel.trim(),
            "cpus": std::thread::available_parallelism()?.get(),
            "open_vswitch": first(lab.vsctl(&["--version"])?),
            "ovn": first(lab.nbctl(&["--version"])?),
            "datapath": format!("{:?}", lab.datapath()).to_lowercase(),
            "optimized": !cfg!(debug_assertions),
            "short": short,
        });
        let mut fields = Map::new();
        fields.insert("machine".to_owned(), machine);
        Ok(Self {
            fields,
            lines: Vec::new(),
            panels: Vec::new(),
        })
    }

    /// Takes over what a row has to say of an agent that opens addresses in this way. Fields of
    /// [`OpenBy::Marks`] are in the object `marks`.
    pub(crate) fn add(&mut self, measured: Measured, open_by: OpenBy) {
        for (path, value) in measured.fields {
            let path = match open_by {
                OpenBy::Flows => path.to_owned(),
                OpenBy::Marks => format!("marks.{path}"),
            };
            let mut object = &mut self.fields;
            let mut parts = path.split('.').peekable();
            while let Some(part) = parts.next() {
                if parts.peek().is_none() {
                    object.insert(part.to_owned(), value.clone());
                    break;
                }
                let inner = object.entry(part).or_insert_with(|| json!({}));
                let Value::Object(inner) = inner else { break };
                object = inner;
            }
        }
        let lines = measured.lines.into_iter();
        self.lines.extend(lines.map(|line| (open_by, line)));
        // The pictures are of the way that is there on every datapath.
        if open_by == OpenBy::Flows {
            self.panels.extend(measured.panels);
        }
    }

    /// The JSON object.
    pub(crate) fn json(&self) -> Result<String> {
        let text = serde_json::to_string_pretty(&self.fields).context("it is JSON")?;
        Ok(text + "\n")
    }

    /// What is shown in pictures.
    pub(crate) fn panels(&self) -> &[Panel] {
        &self.panels
    }

    /// The machine, and the table in Markdown with a column for each way to open addresses. A value that misses its
    /// target is bold.
    pub(crate) fn markdown(&self) -> String {
        let mut rows: Vec<(&str, &str, [String; 2])> = Vec::new();
        for (open_by, line) in &self.lines {
            let value = match line.reached {
                true => line.value.clone(),
                false => format!("**{}**", line.value),
            };
            let column = match open_by {
                OpenBy::Flows => 0,
                OpenBy::Marks => 1,
            };
            match rows.iter_mut().find(|(figure, ..)| *figure == line.figure) {
                Some((.., values)) => values[column] = value,
                None => {
                    let mut values = [const { String::new() }; 2];
                    values[column] = value;
                    rows.push((line.figure, line.target, values));
                }
            }
        }
        let machine = |key: &str| self.fields["machine"][key].to_string().replace('"', "");
        let mut text = format!(
            "Linux {}, {} processors, {}, {}.\n\n",
            // Without what a distribution adds.
            machine("kernel").split('-').next().unwrap_or_default(),
            machine("cpus"),
            machine("open_vswitch"),
            machine("ovn")
        );
        text += "| figure | with flows | by marks | to reach |\n|---|---|---|---|\n";
        for (figure, target, [flows, marks]) in rows {
            text += &format!("| {figure} | {flows} | {marks} | {target} |\n");
        }
        text
    }

    /// The table.
    pub(crate) fn table(&self) -> String {
        let head = ["figure", "measured", "target", ""];
        let mark = |line: &Line| match line.reached {
            true => "reached",
            false => "MISSED",
        };
        let mut rows = vec![head.map(str::to_owned)];
        rows.extend(self.lines.iter().map(|(open_by, line)| {
            [
                format!("{}{}", line.figure, open_by.told()),
                line.value.clone(),
                line.target.to_owned(),
                mark(line).to_owned(),
            ]
        }));
        let width = |column: usize| {
            let widths = rows.iter().map(|row| row[column].chars().count());
            widths.max().unwrap_or(0)
        };
        let widths = [0, 1, 2, 3].map(width);
        let mut table = String::new();
        for row in &rows {
            let cells: Vec<_> = row
                .iter()
                .zip(widths)
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            table += cells.join("  ").trim_end();
            table.push('\n');
        }
        table
    }
}
