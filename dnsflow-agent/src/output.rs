//! How subcommands print a value for programs.

use std::io::{self, IsTerminal as _, Write};

use serde::Serialize;

/// Prints one value.
pub(crate) fn write_json(value: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *output, value)?;
    writeln!(output)
}

/// Prints one value of a list, in one line.
pub(crate) fn write_json_line(value: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer(&mut *output, value)?;
    writeln!(output)?;
    flush_for_people(output)
}

/// Prints one value, or one of a list, as a document.
pub(crate) fn write_yaml(value: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
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
