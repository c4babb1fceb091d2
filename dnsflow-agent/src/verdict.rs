//! `--verdict`: whether addresses are opened on this node by marks, or by flows of their own.
//!
//! A mark works if two things hold. Packets of pods pass TC ingress, where the mark is set. The switch sees the
//! mark. Both hold in the kernel's datapath, and for each interface: an answer counts only if the program on the
//! same hook has seen the question.

use std::{fmt, future, num::NonZeroU32, path::PathBuf, time::Duration};

use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::{
    options::{AgentOptions, Verdict},
    ovsdb::Remotes,
    vswitch_db,
    vswitchd::{self, with_causes},
};

/// How long `--verdict=kernel` waits for Open vSwitch, which may start at the same time as the agent.
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

/// How addresses are opened on this node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// By flows of their own.
    Flows,
    /// By flows of their own, since Open vSwitch does not say whether packets can be marked.
    FlowsForNow,
    /// By marks in these bits.
    Marks(NonZeroU32),
}

impl Way {
    /// The bits of a packet's mark that say its verdict.
    pub fn mark_mask(self) -> Option<NonZeroU32> {
        match self {
            Self::Flows | Self::FlowsForNow => None,
            Self::Marks(mask) => Some(mask),
        }
    }
}

/// Chooses how addresses are opened, and says why. If Open vSwitch does not answer, `--verdict=kernel` is taken at its
/// word after some seconds, and `auto` takes flows at once: [`Switch::takes_marks`] says when it can do better.
///
/// # Errors
///
/// With `--verdict=kernel`, if packets cannot be marked.
pub async fn choose(options: &AgentOptions) -> Result<Way, VerdictError> {
    let found = match (options.verdict, &options.pin_dir) {
        (Verdict::Flows, _) => return Ok(Way::Flows),
        (Verdict::Auto, None) => Ok(Some(Obstacle::NotPinned)),
        (Verdict::Auto, Some(_)) => Switch::of(options).obstacle().await,
        (Verdict::Kernel, _) => patiently(&Switch::of(options)).await,
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
            return Ok(Way::Flows);
        }
        (_, Err(error)) => {
            let error = with_causes(&error);
            info!(
                error,
                "addresses are opened by flows of their own until Open vSwitch answers"
            );
            return Ok(Way::FlowsForNow);
        }
    }
    let mask = options.mark_mask;
    info!(
        mask = format_args!("{mask:#x}"),
        "addresses are opened by marks"
    );
    Ok(Way::Marks(mask))
}

/// Where Open vSwitch is asked.
#[derive(Clone, Debug)]
pub struct Switch {
    openflow_socket: PathBuf,
    database: Remotes,
}

impl Switch {
    /// Where these options say that it is.
    pub fn of(options: &AgentOptions) -> Self {
        let database = options.ovs_db.clone();
        Self {
            openflow_socket: options.openflow_socket.path.clone(),
            database: database.unwrap_or_else(|| Remotes::unix(&[vswitch_db::DEFAULT_SOCKET])),
        }
    }

    /// Waits until Open vSwitch says that packets can be marked. Never ends if they cannot.
    pub async fn takes_marks(self) {
        loop {
            match self.obstacle().await {
                Ok(None) => return,
                Ok(Some(obstacle)) => {
                    info!(reason = %obstacle, "addresses are opened by flows of their own");
                    return future::pending().await;
                }
                Err(_) => sleep(PAUSE).await,
            }
        }
    }

    /// What Open vSwitch has against marks.
    async fn obstacle(&self) -> Result<Option<Obstacle>, Unanswered> {
        if !vswitchd::is_in_kernel(&self.openflow_socket).await? {
            return Ok(Some(Obstacle::NotInKernel));
        }
        let offloads = timeout(PAUSE, vswitch_db::offloads(&self.database)).await;
        let offloads = offloads
            .map_err(|_| Unanswered::Database("no answer".to_owned()))?
            .map_err(Unanswered::Database)?;
        Ok(offloads.then_some(Obstacle::Offloaded))
    }
}

/// Asks Open vSwitch until it answers.
async fn patiently(switch: &Switch) -> Result<Option<Obstacle>, Unanswered> {
    let end = Instant::now() + PATIENCE;
    let mut answer = switch.obstacle().await;
    if let Err(error) = &answer {
        info!(
            socket = %switch.openflow_socket.display(),
            error = with_causes(error),
            "waiting ten seconds for Open vSwitch to say whether packets can be marked"
        );
    }
    while answer.is_err() && Instant::now() < end {
        sleep(PAUSE).await;
        answer = switch.obstacle().await;
    }
    answer
}
