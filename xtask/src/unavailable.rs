//! Something that this machine cannot do, because a program or a daemon is missing. The exit status
//! differs from that of a failure.

/// Something is missing; nothing was done.
#[derive(Debug, thiserror::Error)]
#[error("not run: {0}; nothing was done")]
pub(crate) struct Unavailable(pub(crate) String);

impl Unavailable {
    /// `EX_UNAVAILABLE` of sysexits.h.
    pub(crate) const EXIT_CODE: u8 = 69;
}
