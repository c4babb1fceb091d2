//! The program's own messages, as events of tracing.

use aya::Ebpf;
use aya_log::EbpfLogger;
use log::{Level, Log, Metadata, Record};
use tokio::io::{Interest, unix::AsyncFd};

use super::CaptureError;

/// What the program has to say, which is little.
pub struct ProgramLog {
    logger: AsyncFd<EbpfLogger<ToTracing>>,
}

impl ProgramLog {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        let logger = EbpfLogger::init_with_logger(ebpf, ToTracing)
            .map_err(|_| CaptureError::Object { what: "AYA_LOGS" })?;
        // SAFETY: the logger owns its ring buffer's descriptor, always gives this one, and keeps
        // it open as long as it lives.
        let logger = unsafe { AsyncFd::register_with_interest(logger, Interest::READABLE) };
        Ok(Self {
            logger: logger.map_err(|error| CaptureError::Io {
                operation: "watch the program's log",
                source: error.into(),
            })?,
        })
    }

    /// Forwards messages until the runtime shuts down. May be cancelled.
    pub async fn run(mut self) {
        while let Ok(mut ready) = self.logger.readable_mut().await {
            ready.get_inner_mut().flush();
            ready.clear_ready();
        }
    }
}

/// Passes the records of aya-log, which speaks the `log` crate, to tracing.
struct ToTracing;

impl Log for ToTracing {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let message = record.args();
        match record.level() {
            Level::Error => tracing::error!(target: "dnsflow_ebpf", "{message}"),
            Level::Warn => tracing::warn!(target: "dnsflow_ebpf", "{message}"),
            Level::Info => tracing::info!(target: "dnsflow_ebpf", "{message}"),
            Level::Debug | Level::Trace => tracing::debug!(target: "dnsflow_ebpf", "{message}"),
        }
    }

    fn flush(&self) {}
}
