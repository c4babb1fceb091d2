//! The last lines of the log, in memory.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

/// The last lines that were logged, whether or not somebody has read them.
#[derive(Clone, Debug, Default)]
pub struct LastLines(Arc<Mutex<VecDeque<u8>>>);

impl LastLines {
    /// Bytes that are kept: some thousand lines.
    pub const BYTES_MAX: usize = 512 * 1024;

    /// Keeps a line, and drops the oldest ones for it.
    pub(super) fn keep(&self, line: &[u8]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(line);
        let excess = kept.len().saturating_sub(Self::BYTES_MAX);
        if excess > 0 {
            let end = kept.iter().skip(excess - 1).position(|byte| *byte == b'\n');
            let dropped = end.map_or(kept.len(), |end| excess + end);
            kept.drain(..dropped);
        }
    }

    /// The lines, the oldest first.
    pub fn read(&self) -> Vec<u8> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().copied().collect()
    }
}
