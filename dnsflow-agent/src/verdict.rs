//! `--verdict`: whether addresses are opened on this node by marks, or by flows of their own.
//!
//! A mark works if two things hold. Packets of pods pass TC ingress, where the mark is set. The switch sees the
//! mark. Both hold in the kernel's datapath, and for each interface: an answer counts only if the program on the
//! same hook has seen the question.

use std::{fmt, num::NonZeroU32, time::Duration};

use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::{
    options::{AgentOptions, Verdict},
    ovsdb::Remotes,
    vswitch_db,
    vswitchd::{self, with_causes},
};

/// How long Open vSwitch is waited for. It may start at the same time as the agent.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two questions.
const PAUSE: Duration = Duration::from_secs(1);

/// Why packets cannot be marked, or should not be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Obstacle {
    /// The bridge is in another datapath than the kernel's.
    NotInKernel,
    /// Open vSwitch may offload flows to hardware.
    Offloaded,
    /// The marks would end with the agent.
    NotPinned,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotInKernel => {
                "the bridge is not in the kernel's datapath, and packets that do not pass TC ingress get no mark"
            }
            Self::Offloaded => {
                "Open vSwitch may offload flows to hardware (other_config:hw-offload), and offloads none that matches \
                 a mark"
            }
            Self::NotPinned => {
                "without --pin-dir the programs go when the agent ends, and with them the access to all addresses \
                 until the pods ask again"
            }
        })
    }
}

/// Why the agent cannot do what `--verdict=kernel` says.
#[derive(Debug, thiserror::Error)]
#[error("--verdict=kernel: {0}; take --verdict=auto or flows")]
pub struct VerdictError(Obstacle);

/// Open vSwitch does not say what is to be known.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    /// ovs-vswitchd does not say which datapath the bridge is in.
    #[error("ovs-vswitchd does not say which datapath the bridge is in")]
    Datapath(#[from] vswitchd::VswitchdError),
    /// The database does not say whether flows are offloaded.
    #[error("the database of Open vSwitch does not say whether flows are offloaded: {0}")]
    Database(String),
}

/// The bits of a packet's mark that say its verdict; `None` if addresses have flows of their own. Says which way it
/// is, and why. If Open vSwitch does not answer, `--verdict=kernel` is taken at its word, and `auto` takes flows.
///
/// # Errors
///
/// With `--verdict=kernel`, if packets cannot be marked.
pub async fn mark_mask(options: &AgentOptions) -> Result<Option<NonZeroU32>, VerdictError> {
    let found = match (options.verdict, &options.pin_dir) {
        (Verdict::Flows, _) => return Ok(None),
        (Verdict::Auto, None) => Ok(Some(Obstacle::NotPinned)),
        (Verdict::Auto | Verdict::Kernel, _) => patiently(options).await,
    };
    match (options.verdict, found) {
        (Verdict::Kernel, Ok(Some(obstacle @ Obstacle::NotInKernel))) => {
            return Err(VerdictError(obstacle));
        }
        (Verdict::Kernel, Err(error)) => {
            let error = with_causes(&error);
            warn!(
                error,
                "--verdict=kernel: it is not known whether packets can be marked"
            );
        }
        (Verdict::Kernel, Ok(_)) | (_, Ok(None)) => {}
        (_, Ok(Some(obstacle))) => {
            info!(reason = %obstacle, "addresses are opened by flows of their own");
            return Ok(None);
        }
        (_, Err(error)) => {
            let error = with_causes(&error);
            info!(error, "addresses are opened by flows of their own");
            return Ok(None);
        }
    }
    let mask = options.mark_mask;
    info!(
        mask = format_args!("{mask:#x}"),
        "addresses are opened by marks"
    );
    Ok(Some(mask))
}

/// Asks Open vSwitch until it answers.
async fn patiently(options: &AgentOptions) -> Result<Option<Obstacle>, Unanswered> {
    let end = Instant::now() + PATIENCE;
    loop {
        match obstacle(options).await {
            Err(_) if Instant::now() < end => sleep(PAUSE).await,
            result => return result,
        }
    }
}

/// What Open vSwitch has against marks.
async fn obstacle(options: &AgentOptions) -> Result<Option<Obstacle>, Unanswered> {
    if !vswitchd::is_in_kernel(&options.openflow_socket.path).await? {
        return Ok(Some(Obstacle::NotInKernel));
    }
    let remotes = options.ovs_db.clone();
    let remotes = remotes.unwrap_or_else(|| Remotes::unix(&[vswitch_db::DEFAULT_SOCKET]));
    let offloads = timeout(PAUSE, vswitch_db::offloads(&remotes)).await;
    let offloads = offloads
        .map_err(|_| Unanswered::Database("no answer".to_owned()))?
        .map_err(Unanswered::Database)?;
    Ok(offloads.then_some(Obstacle::Offloaded))
}
