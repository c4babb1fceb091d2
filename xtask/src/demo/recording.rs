//! A recording of the demo: as an asciicast (<https://docs.asciinema.org/manual/asciicast/v2/>), and as an animated SVG.

use std::{
    fmt::Write as _,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde_json::json;

/// The terminal's size in characters.
const COLUMNS: usize = 104;
const ROWS: usize = 24;
/// Nobody wants to watch a longer pause.
const PAUSE_MAX: Duration = Duration::from_millis(1500);
/// How long the last screen stays.
const END: Duration = Duration::from_secs(5);
/// The SVG's measures in pixels: of a character, and around the text.
const WIDTH: f64 = 8.0;
const HEIGHT: f64 = 18.0;
const MARGIN: f64 = 12.0;

/// The lines so far, each with the time at which it is shown.
#[derive(Debug)]
pub(super) struct Recording {
    lines: Vec<(Duration, String)>,
    last: Instant,
}

impl Recording {
    /// Begins now.
    pub(super) fn begin() -> Self {
        Self {
            lines: Vec::new(),
            last: Instant::now(),
        }
    }

    /// Takes the lines of a text that is printed now.
    pub(super) fn say(&mut self, text: &str) {
        let pause = self.last.elapsed().min(PAUSE_MAX);
        self.last = Instant::now();
        let at = self.length() + pause;
        let lines = text.split('\n').map(|line| (at, shortened(line)));
        self.lines.extend(lines);
    }

    fn length(&self) -> Duration {
        self.lines.last().map_or(Duration::ZERO, |(at, _)| *at)
    }

    /// Writes `demo.cast` and `demo.svg`.
    pub(super) fn write(&self, directory: &Path) -> Result<()> {
        for (name, text) in [("demo.cast", self.asciicast()), ("demo.svg", self.svg())] {
            let file = directory.join(name);
            fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        }
        Ok(())
    }

    fn asciicast(&self) -> String {
        let head =
            json!({"version": 2, "width": COLUMNS, "height": ROWS, "title": "cargo xtask demo"});
        let mut text = format!("{head}\n");
        for (at, line) in &self.lines {
            let event = json!([at.as_secs_f64(), "o", format!("{line}\r\n")]);
            let _ = writeln!(text, "{event}");
        }
        text
    }

    /// A line is hidden until its time. The lines move up when the screen is full.
    fn svg(&self) -> String {
        let length = (self.length() + END).as_secs_f64();
        let part = |at: Duration| format!("{:.4}", at.as_secs_f64() / length);
        let (mut lines, mut places, mut parts) =
            (String::new(), vec!["0 0".to_owned()], vec!["0".to_owned()]);
        for (row, (at, line)) in self.lines.iter().enumerate() {
            let y = (row + 1) as f64 * HEIGHT;
            let _ = writeln!(
                lines,
                "<text y=\"{y}\" opacity=\"0\"{}>{}<animate attributeName=\"opacity\" values=\"0;1\" \
                 keyTimes=\"0;{}\" calcMode=\"discrete\" dur=\"{length:.1}s\" repeatCount=\"indefinite\"/></text>",
                if line.contains('$') {
                    " class=\"command\""
                } else {
                    ""
                },
                escaped(line),
                part(*at),
            );
            if row >= ROWS {
                places.push(format!("0 {}", -HEIGHT * (row + 1 - ROWS) as f64));
                parts.push(part(*at));
            }
        }
        let (width, height) = (
            COLUMNS as f64 * WIDTH + 2.0 * MARGIN,
            ROWS as f64 * HEIGHT + 2.0 * MARGIN,
        );
        let (places, parts) = (places.join(";"), parts.join(";"));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" xml:space=\"preserve\">\n\
             <title>cargo xtask demo</title>\n\
             <style>text {{ font: 13px monospace; fill: #d0d0d0; white-space: pre }} .command {{ fill: #8ae234 }}</style>\n\
             <rect width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"#1c1c1c\"/>\n\
             <svg x=\"{MARGIN}\" y=\"{MARGIN}\" width=\"{}\" height=\"{}\"><g>\n\
             <animateTransform attributeName=\"transform\" type=\"translate\" values=\"{places}\" keyTimes=\"{parts}\" \
             calcMode=\"discrete\" dur=\"{length:.1}s\" repeatCount=\"indefinite\"/>\n{lines}</g></svg>\n</svg>\n",
            width - 2.0 * MARGIN,
            height - 2.0 * MARGIN + 4.0,
        )
    }
}

/// A line as far as the terminal is wide.
fn shortened(line: &str) -> String {
    if line.chars().count() <= COLUMNS {
        return line.to_owned();
    }
    let kept: String = line.chars().take(COLUMNS - 1).collect();
    kept + "…"
}

/// The text as XML has it.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
