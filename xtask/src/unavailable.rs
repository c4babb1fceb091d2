//! What this machine cannot do, for lack of a program or a daemon: not a failure of what was to be
//! shown, and told apart from one by its exit status.

/// Something is missing; nothing was done.
#[derive(Debug, thiserror::Error)]
#[error("cannot be done here, nothing was done: {0}")]
pub(crate) struct Unavailable(pub(crate) String);

impl Unavailable {
    /// `EX_UNAVAILABLE` of sysexits.h.
    pub(crate) const EXIT_CODE: u8 = 69;
}
