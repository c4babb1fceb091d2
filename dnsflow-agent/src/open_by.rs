//! `--open-by`: whether addresses are opened on this node by marks, or by flows of their own.
//!
//! A mark works if two things hold. Packets of pods pass TC ingress, where the mark is set. The switch sees the
//! mark. Both hold in the kernel's datapath, and for each interface: an answer counts only if the program on the
//! same hook has seen the question.

use std::{future, num::NonZeroU32, path::PathBuf, time::Duration};

use dnsflow_ovsdb::Remotes;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::{
    causes::with_causes,
    options::{AgentOptions, OpenBy},
    vswitch_db, vswitchd,
};

/// How long an agent with `--open-by=marks` waits for Open vSwitch.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two questions.
const PAUSE: Duration = Duration::from_secs(1);

/// Why packets cannot be marked, or should not be.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Obstacle {
    /// The bridge is in another datapath than the kernel's.
    #[error(
        "the bridge is not in the kernel's datapath: its packets bypass TC ingress and get no mark"
    )]
    NotInKernel,
    /// Open vSwitch may offload flows to hardware.
    #[error(
        "Open vSwitch may offload flows to hardware (other_config:hw-offload), and offloads none that matches \
         a mark"
    )]
    Offloaded,
    /// The marks would end with the agent.
    #[error("without --pin-dir, marks end with the agent; flows stay for --keep-flows")]
    NotPinned,
}

/// Why the agent cannot do what `--open-by=marks` says.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("--open-by=marks: {0}; take --open-by=auto or flows")]
pub struct OpenByError(pub Obstacle);

/// Open vSwitch does not say what is to be known.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    /// ovs-vswitchd does not report the datapath of the bridge.
    #[error("ovs-vswitchd does not report the datapath of the bridge")]
    Datapath(#[from] vswitchd::VswitchdError),
    /// The database does not say whether flows are offloaded.
    #[error("the database of Open vSwitch does not report hardware offload: {0}")]
    Database(String),
}

/// How addresses are opened on this node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OpenedBy {
    /// By flows of their own.
    Flows,
    /// By flows of their own, since Open vSwitch does not say whether packets can be marked.
    FlowsForNow,
    /// By marks in these bits.
    Marks(NonZeroU32),
}

impl OpenedBy {
    /// The bits of a packet's mark that say its group.
    pub fn mark_mask(self) -> Option<NonZeroU32> {
        match self {
            Self::Flows | Self::FlowsForNow => None,
            Self::Marks(mask) => Some(mask),
        }
    }
}

/// An [`OpenedBy`], and why it was chosen.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Decision {
    /// `--open-by=flows`.
    FlowsAsked,
    /// Flows, since marks have this obstacle.
    Flows(Obstacle),
    /// Flows, since Open vSwitch gives no answer, and why.
    FlowsForNow(String),
    /// Marks in these bits.
    Marks(NonZeroU32),
    /// The same because of `--open-by=marks` alone: Open vSwitch gives no answer, and why.
    MarksUnasked(NonZeroU32, String),
}

impl Decision {
    /// Chooses for these options. If Open vSwitch does not answer, `--open-by=marks` is taken at its word after this
    /// time, and `auto` takes flows at once: [`OpenVswitch::takes_marks`] says when it can do better.
    ///
    /// # Errors
    ///
    /// With `--open-by=marks`, if packets cannot be marked.
    pub async fn of(options: &AgentOptions, patience: Duration) -> Result<Self, OpenByError> {
        let mask = options.mark_mask;
        let switch = OpenVswitch::of(options);
        if options.open_by() == OpenBy::Flows {
            return Ok(Self::FlowsAsked);
        }
        if options.open_by() == OpenBy::Marks {
            return match switch.obstacle_within(patience).await {
                Ok(Some(obstacle @ Obstacle::NotInKernel)) => Err(OpenByError(obstacle)),
                Ok(_) => Ok(Self::Marks(mask)),
                Err(error) => Ok(Self::MarksUnasked(mask, with_causes(&error))),
            };
        }
        if options.pin_dir.is_none() {
            return Ok(Self::Flows(Obstacle::NotPinned));
        }
        Ok(match switch.obstacle().await {
            Ok(None) => Self::Marks(mask),
            Ok(Some(obstacle)) => Self::Flows(obstacle),
            Err(error) => Self::FlowsForNow(with_causes(&error)),
        })
    }

    /// How addresses are opened then.
    pub fn opened_by(&self) -> OpenedBy {
        match *self {
            Self::FlowsAsked | Self::Flows(_) => OpenedBy::Flows,
            Self::FlowsForNow(_) => OpenedBy::FlowsForNow,
            Self::Marks(mask) | Self::MarksUnasked(mask, _) => OpenedBy::Marks(mask),
        }
    }
}

/// Chooses how addresses are opened, and says why.
///
/// # Errors
///
/// As [`Decision::of`].
pub async fn choose(options: &AgentOptions) -> Result<OpenedBy, OpenByError> {
    let decision = Decision::of(options, PATIENCE).await?;
    match &decision {
        Decision::FlowsAsked | Decision::Marks(_) => {}
        Decision::Flows(obstacle) => {
            info!(reason = %obstacle, "addresses are opened by flows of their own");
        }
        Decision::FlowsForNow(error) => {
            info!(
                error,
                "addresses are opened by flows of their own until Open vSwitch answers"
            );
        }
        Decision::MarksUnasked(_, error) => {
            warn!(
                error,
                "--open-by=marks: cannot find out whether this node supports marks"
            );
        }
    }
    let opened_by = decision.opened_by();
    if let Some(mask) = opened_by.mark_mask() {
        info!(
            mask = format_args!("{mask:#x}"),
            "addresses are opened by marks"
        );
    }
    Ok(opened_by)
}

/// Where Open vSwitch is asked.
#[derive(Clone, Debug)]
pub struct OpenVswitch {
    openflow_socket: PathBuf,
    database: Remotes,
}

impl OpenVswitch {
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

    /// The same, asked again for this time if there is no answer: Open vSwitch may start at the same time as the agent.
    async fn obstacle_within(&self, patience: Duration) -> Result<Option<Obstacle>, Unanswered> {
        let end = Instant::now() + patience;
        let mut answer = self.obstacle().await;
        if let Err(error) = &answer
            && !patience.is_zero()
        {
            info!(
                socket = %self.openflow_socket.display(),
                error = with_causes(error),
                ?patience,
                "waiting for Open vSwitch, to find out whether this node supports marks"
            );
        }
        while answer.is_err() && Instant::now() < end {
            sleep(PAUSE).await;
            answer = self.obstacle().await;
        }
        answer
    }
}
