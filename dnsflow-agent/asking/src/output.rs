//! Standard output, and how subcommands print a value for programs.

use std::{
    fs::{File, OpenOptions},
    io::{self, IsTerminal as _, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use serde::Serialize;

/// Standard output that remembers whether its reader has gone. A reader who has seen enough, as `head`, is no
/// failure.
#[derive(Debug)]
pub struct Stdout {
    stdout: io::Stdout,
    reader_has_gone: bool,
}

impl Stdout {
    /// That of this process.
    pub fn of_this_process() -> Self {
        Self {
            stdout: io::stdout(),
            reader_has_gone: false,
        }
    }

    /// Whether something could not be written because nobody reads it.
    pub fn reader_has_gone(&self) -> bool {
        self.reader_has_gone
    }

    fn note<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| {
            self.reader_has_gone |= error.kind() == io::ErrorKind::BrokenPipe;
        })
    }
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let result = self.stdout.write(bytes);
        self.note(result)
    }

    fn flush(&mut self) -> io::Result<()> {
        let result = self.stdout.flush();
        self.note(result)
    }
}

/// The context of a failure to write an answer.
pub(crate) const UNWRITTEN: &str = "cannot write the answer";

/// A file that was not there, and that only its owner can read: names of pods and of what they ask for are
/// nobody else's.
pub fn new_file(path: &Path) -> io::Result<File> {
    let mut new = OpenOptions::new();
    new.write(true).create_new(true).mode(0o600).open(path)
}

/// Prints one value.
pub fn write_json(value: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *output, value)?;
    writeln!(output)
}

/// Prints one value of a list, in one line.
pub fn write_json_line(value: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer(&mut *output, value)?;
    writeln!(output)?;
    flush_for_people(output)
}

/// Prints one value, or one of a list, as a document.
pub fn write_yaml(value: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
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
