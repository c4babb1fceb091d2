//! The log of the agent, on standard error.
//!
//! No thread of the agent ever waits for the reader of the log: a thread of the log's own writes, a
//! line at a time. What finds its queue full is lost and counted. The last lines are kept for
//! `dnsflow bundle`.

mod last;
mod level;

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use tracing::warn;
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt as _, util::SubscriberInitExt as _};

pub use last::LastLines;
pub use level::{LevelError, LogLevel};

use crate::{k8s::QUIET_TARGETS, options::LogFormat};

/// Lines that wait for a slow reader. At 300 bytes a line, which is usual, they take 1.2 MB.
const LINES_MAX: usize = 4096;

/// The running log. Dropping it writes what still waits, for one second at most.
#[derive(Debug)]
pub struct Log {
    lost: LostLines,
    last: LastLines,
    level: LogLevel,
    /// Held for its Drop.
    _writing: WorkerGuard,
}

impl Log {
    /// Logs to standard error what `RUST_LOG` asks for; by default, what people should know.
    ///
    /// # Panics
    ///
    /// Where this process has a log already, or the system gives it no thread.
    pub fn start(format: LogFormat) -> Self {
        let filter = EnvFilter::try_from_default_env()
            .unwrap_or_else(|_| EnvFilter::new(format!("info,{QUIET_TARGETS}")));
        let (filter, level) = LogLevel::of(filter);
        let registry = tracing_subscriber::registry().with(filter);
        let (writer, log) = Self::writing_to(io::stderr(), LINES_MAX, level);
        match format {
            LogFormat::Text => registry.with(fmt::layer().with_writer(writer)).init(),
            LogFormat::Json => registry
                .with(fmt::layer().json().with_writer(writer))
                .init(),
        }
        log
    }

    /// Lines of a log that nobody writes.
    #[cfg(test)]
    pub(crate) fn nothing_lost() -> LostLines {
        Self::writing_nowhere().lost_lines()
    }

    /// A log that nobody writes.
    #[cfg(test)]
    pub(crate) fn writing_nowhere() -> Self {
        let (_, level) = LogLevel::of(EnvFilter::new("info"));
        Self::writing_to(io::sink(), 1, level).1
    }

    /// What to write lines to, none of which waits for `output`.
    fn writing_to(
        output: impl Write + Send + 'static,
        lines_max: usize,
        level: LogLevel,
    ) -> (NonBlocking, Self) {
        let failed = Arc::default();
        let last = LastLines::default();
        let output = LogOutput {
            output,
            failed: Arc::clone(&failed),
            last: last.clone(),
        };
        let (writer, guard) = NonBlockingBuilder::default()
            .lossy(true)
            .buffered_lines_limit(lines_max)
            .thread_name("log")
            .finish(output);
        let lost = LostLines {
            no_room: writer.error_counter(),
            failed,
            reported: Arc::default(),
        };
        let log = Self {
            lost,
            last,
            level,
            _writing: guard,
        };
        (writer, log)
    }

    /// How many lines were lost, for the one who reports it.
    pub fn lost_lines(&self) -> LostLines {
        self.lost.clone()
    }

    /// What people can ask of the log.
    pub fn view(&self) -> LogView {
        LogView {
            last: self.last.clone(),
            level: self.level.clone(),
        }
    }
}

/// What people can ask of the log while it runs.
#[derive(Clone, Debug)]
pub struct LogView {
    /// The last lines.
    pub last: LastLines,
    /// What is logged.
    pub level: LogLevel,
}

/// Counts the lines that are in no log.
#[derive(Clone, Debug)]
pub struct LostLines {
    no_room: ErrorCounter,
    failed: Arc<AtomicUsize>,
    /// What [`LostLines::report`] last logged.
    reported: Arc<AtomicUsize>,
}

impl LostLines {
    /// Lines lost since the start.
    pub fn count(&self) -> usize {
        let no_room = self.no_room.dropped_lines();
        no_room.saturating_add(self.failed.load(Relaxed))
    }

    /// Logs the number, if it has grown since the last call.
    pub fn report(&self) {
        let lost = self.count();
        if self.reported.swap(lost, Relaxed) != lost {
            warn!(
                lost,
                "log lines were lost: the reader of standard error is too slow"
            );
        }
    }
}

/// A writer that keeps the last lines, and counts failures: nobody is there to be told of them.
struct LogOutput<W> {
    output: W,
    failed: Arc<AtomicUsize>,
    last: LastLines,
}

impl<W: Write> Write for LogOutput<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.write_all(line)?;
        Ok(line.len())
    }

    fn write_all(&mut self, line: &[u8]) -> io::Result<()> {
        self.last.keep(line);
        if self.output.write_all(line).is_err() {
            self.failed.fetch_add(1, Relaxed);
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

#[cfg(test)]
mod tests;
