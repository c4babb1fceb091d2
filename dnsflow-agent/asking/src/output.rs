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

/// The version of the objects that are printed for programs (`docs/asking.md`). It changes if a key is
/// removed or changes its meaning.
pub const FORMAT_VERSION: u32 = 1;
/// The key of the version in each object.
pub const FORMAT_VERSION_KEY: &str = "format_version";

/// An object with the version of its format.
#[derive(Serialize)]
struct Versioned<'a, T> {
    /// [`FORMAT_VERSION_KEY`].
    format_version: u32,
    #[serde(flatten)]
    value: &'a T,
}

impl<'a, T> Versioned<'a, T> {
    fn new(value: &'a T) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            value,
        }
    }
}

/// Prints one object.
pub fn write_json(value: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *output, &Versioned::new(value))?;
    writeln!(output)
}

/// Prints objects as one list.
pub fn write_json_list(values: &[impl Serialize], output: &mut impl Write) -> io::Result<()> {
    let values: Vec<_> = values.iter().map(Versioned::new).collect();
    serde_json::to_writer_pretty(&mut *output, &values)?;
    writeln!(output)
}

/// The same in YAML.
pub fn write_yaml_list(values: &[impl Serialize], output: &mut impl Write) -> io::Result<()> {
    let values: Vec<_> = values.iter().map(Versioned::new).collect();
    write_document(&values, output)
}

/// Prints one object of a list, in one line.
pub fn write_json_line(value: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer(&mut *output, &Versioned::new(value))?;
    writeln!(output)?;
    flush_for_people(output)
}

/// Prints one object, or one of a list, as a document.
pub fn write_yaml(value: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
    write_document(&Versioned::new(value), output)
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn printed(write: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut output = Vec::new();
        write(&mut output).expect("memory has room");
        String::from_utf8(output).expect("text")
    }

    #[test]
    fn each_object_has_the_version_of_its_format() {
        let value = json!({"a": 1});
        let read = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
        let versioned = json!({FORMAT_VERSION_KEY: FORMAT_VERSION, "a": 1});
        let text = printed(|output| write_json(&value, output));
        assert_eq!(read(&text), versioned);
        let text = printed(|output| write_json_line(&value, output));
        assert_eq!(text, "{\"format_version\":1,\"a\":1}\n");
        let list = [value.clone(), value.clone()];
        let text = printed(|output| write_json_list(&list, output));
        assert_eq!(read(&text), json!([versioned, versioned]));
        let text = printed(|output| write_yaml(&value, output));
        assert_eq!(text, "---\nformat_version: 1\na: 1\n");
    }
}
