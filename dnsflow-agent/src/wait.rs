//! `dnsflow wait`: for the container of a Pod whose init container has done the work. The image has
//! no other program that could wait.

use std::io;

use tokio::{
    runtime, select,
    signal::unix::{SignalKind, signal},
};

/// Returns when SIGTERM or SIGINT comes.
///
/// # Errors
///
/// Where the signals cannot be watched.
pub fn run() -> io::Result<()> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        Ok(())
    })
}
