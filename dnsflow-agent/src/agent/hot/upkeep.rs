//! What the hot thread does now and then: the heartbeat, snapshots, and the counters in the log.

use std::{collections::BTreeMap, io, path::PathBuf, sync::Arc, time::Duration};

use dnsflow_core::{Input, Timestamp, cache::snapshot::Snapshot, engine::Engine};
use tracing::{debug, info, warn};

use crate::{
    agent::saver::Saver,
    capture::{BEAT_INTERVAL, Heartbeat, LeftOut, ProgramCounters, RingShares},
    clock::now,
    logging::LostLines,
    vswitchd::Estimate,
};

/// How often the snapshot is written, when there is something new.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(10);
/// How often the counters are logged.
const COUNTERS_INTERVAL: Duration = Duration::from_secs(60);

/// The parts, each with a deadline of its own.
pub(crate) struct Upkeep {
    pub(crate) pulse: Pulse,
    pub(crate) snapshots: Snapshots,
    pub(crate) accounts: Accounts,
}

impl Upkeep {
    /// When something is due.
    pub(super) fn next_deadline(&self) -> Timestamp {
        let first = self.pulse.at.min(self.accounts.at);
        let snapshot = self.snapshots.deadline();
        snapshot.map_or(first, |at| at.min(first))
    }
}

/// The sign to the programs that this thread is well.
pub(crate) struct Pulse {
    heartbeat: Heartbeat,
    /// How long flows stay without an agent, and frames are captured.
    keep: Duration,
    /// Where answers are held: how long a pass of the revalidators takes.
    estimate: Option<Arc<Estimate>>,
    /// The next beat.
    at: Timestamp,
}

impl Pulse {
    /// Frames are captured for so long without an agent. With an estimate, answers are held.
    pub(crate) fn new(
        heartbeat: Heartbeat,
        keep: Duration,
        estimate: Option<Arc<Estimate>>,
    ) -> Self {
        Self {
            heartbeat,
            keep,
            estimate,
            at: now(),
        }
    }

    /// Says that this thread is well, when it is time to. Returns whether it was.
    pub(super) fn beat(&mut self, engine: &mut Engine, now: Timestamp) -> bool {
        if self.at > now {
            return false;
        }
        self.at = now + BEAT_INTERVAL;
        if let Err(error) = self.heartbeat.capture_until(now + self.keep) {
            warn!(%error, "cannot extend the capture of DNS answers");
        }
        if let Err(error) = self.heartbeat.reads(now) {
            warn!(%error, "cannot extend the pods' shares of captured DNS answers");
        }
        if let Some(estimate) = &self.estimate {
            engine.handle(Input::Revalidation(estimate.time()), now);
            if let Err(error) = self.heartbeat.beat(now) {
                warn!(%error, "cannot extend the holding of DNS answers");
            }
        }
        true
    }

    /// No further answer is held, and none of the later signs says otherwise.
    pub(super) fn stop(&mut self) {
        self.at = Timestamp::from_nanos(u64::MAX);
        if let Err(error) = self.heartbeat.stop() {
            warn!(%error, "cannot stop the holding of DNS answers: some may be lost");
        }
    }
}

/// Snapshots of the cache, on their way to the thread that writes them.
pub(crate) struct Snapshots {
    /// Where they go, if anywhere.
    saver: Option<Saver>,
    /// The one that is being handed over.
    under_way: Option<Snapshot>,
    /// [`Engine::cache_version`] of the last one.
    saved_version: u64,
    /// The next one.
    at: Timestamp,
}

impl Snapshots {
    /// They go into this directory, if any. Starts the thread that writes them.
    ///
    /// # Errors
    ///
    /// If the system gives no thread.
    pub(crate) fn start(dir: Option<PathBuf>) -> io::Result<Self> {
        Ok(Self {
            saver: dir.map(Saver::start).transpose()?,
            under_way: None,
            saved_version: 0,
            at: now() + SNAPSHOT_INTERVAL,
        })
    }

    fn deadline(&self) -> Option<Timestamp> {
        self.saver.is_some().then_some(self.at)
    }

    /// Whether one is being handed over.
    pub(super) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Waits until another part can be handed over. May be cancelled.
    pub(super) async fn takes_part(&self) {
        if let Some(saver) = &self.saver {
            saver.ready().await;
        }
    }

    /// Begins to hand over a snapshot to be written, when it is time to, if there is something new and no other one is
    /// under way.
    pub(super) fn offer(&mut self, engine: &Engine, now: Timestamp) {
        if self.at > now {
            return;
        }
        self.at = now + SNAPSHOT_INTERVAL;
        let version = engine.cache_version();
        if let Some(saver) = &self.saver
            && self.under_way.is_none()
            && version != self.saved_version
            && saver.begin()
        {
            self.under_way = Some(Snapshot::begin(now));
            self.saved_version = version;
        }
    }

    /// Hands over the next part.
    pub(super) fn hand_over(&mut self, engine: &Engine) {
        if let (Some(saver), Some(snapshot)) = (&self.saver, self.under_way.as_mut())
            && !saver.go_on(|| engine.next_part(snapshot))
        {
            self.under_way = None;
        }
    }

    /// Writes the last one.
    pub(super) fn end(&mut self, engine: &Engine) {
        if let Some(saver) = self.saver.take() {
            let mut last = Snapshot::begin(now());
            saver.end(|| engine.next_part(&mut last));
        }
    }
}

/// The counters, as the log has them.
pub(crate) struct Accounts {
    counters: Arc<ProgramCounters>,
    shares: RingShares,
    lost_lines: LostLines,
    /// What each interface had lost of its own when the counters were last logged.
    over_share: BTreeMap<u32, LeftOut>,
    /// When they are logged again.
    at: Timestamp,
}

impl Accounts {
    /// Those of the programs and of the log; nothing is logged yet.
    pub(crate) fn new(
        counters: Arc<ProgramCounters>,
        shares: RingShares,
        lost_lines: LostLines,
    ) -> Self {
        Self {
            counters,
            shares,
            lost_lines,
            over_share: BTreeMap::new(),
            at: now() + COUNTERS_INTERVAL,
        }
    }

    /// Whether it is time to log them; if so, they are due again later.
    pub(super) fn are_due(&mut self, now: Timestamp) -> bool {
        let are_due = self.at <= now;
        if are_due {
            self.at = now + COUNTERS_INTERVAL;
        }
        are_due
    }

    /// Logs them.
    pub(super) fn tell(&mut self, engine: &Engine) {
        self.lost_lines.report();
        debug!(counters = ?engine.counters(), flows = engine.flow_count(), "decided");
        let held: Vec<_> = engine.hold_events().iter().collect();
        let revalidation_wait: Vec<_> = engine.revalidation_waits().iter().collect();
        let revalidation: Vec<_> = engine.revalidation_events().iter().collect();
        debug!(?held, ?revalidation_wait, ?revalidation, "held");
        match self.counters.read() {
            Ok(counters) => {
                let seen: Vec<_> = counters
                    .into_iter()
                    .filter(|(_, count)| *count > 0)
                    .collect();
                debug!(?seen, "packets");
            }
            Err(error) => warn!(%error, "cannot read the program's counters"),
        }
        self.report_over_share(engine);
    }

    /// Names the pods that have begun to lose packets of their own.
    fn report_over_share(&mut self, engine: &Engine) {
        let left_out = match self.shares.left_out() {
            Ok(left_out) => left_out,
            Err(error) => {
                warn!(%error, "cannot read the shares of the pods");
                return;
            }
        };
        for (ifindex, LeftOut { packets, attempts }) in &left_out {
            let before = self.over_share.get(ifindex).copied().unwrap_or_default();
            let port = engine.port_at(*ifindex).unwrap_or("unknown");
            if before.packets == 0 && *packets > 0 {
                warn!(
                    port,
                    packets,
                    "a pod exceeds its share of DNS packets: the excess opens nothing; other pods are not affected"
                );
            }
            if before.attempts == 0 && *attempts > 0 {
                info!(
                    port,
                    attempts,
                    "a pod exceeds its share of connection attempts: some denied connections are not reported; other \
                     pods are not affected"
                );
            }
        }
        self.over_share = left_out;
    }
}
