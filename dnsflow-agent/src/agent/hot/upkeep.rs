//! What the hot thread does now and then: the heartbeat, the journal, and the counters in the log.

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use dnsflow_core::{Input, Timestamp, cache::journal::Saved, engine::Engine};
use tracing::{debug, info, warn};

use crate::{
    capture::{BEAT_INTERVAL, Heartbeat, LeftOut, ProgramCounters, RingShares},
    clock::now,
    logging::LostLines,
    state::{self, Journal, StateError},
    vswitchd::Estimate,
};

/// How often it is told that the journal cannot be written.
const TOLD_INTERVAL: Duration = Duration::from_secs(60);
/// How often the counters are logged.
const COUNTERS_INTERVAL: Duration = Duration::from_secs(60);

/// The parts, each with a deadline of its own.
pub(crate) struct Upkeep {
    pub(crate) pulse: Pulse,
    pub(crate) recorder: Recorder,
    pub(crate) accounts: Accounts,
}

impl Upkeep {
    /// When something is due.
    pub(super) fn next_deadline(&self) -> Timestamp {
        let first = self.pulse.at.min(self.accounts.at);
        let recorder = self.recorder.deadline();
        recorder.map_or(first, |at| at.min(first))
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

/// The journal of what pods were told, for the next agent.
#[derive(Default)]
pub(crate) struct Recorder {
    /// `None` without a directory for it, or if the directory cannot be used.
    journal: Option<Journal>,
    /// Whether there is to be one.
    is_wanted: bool,
    /// A failure is told again then.
    told_until: Timestamp,
}

impl Recorder {
    /// They go into the journal in this directory, if any. The engine takes over what an earlier agent has left there.
    pub(crate) fn open(dir: Option<&Path>, engine: &mut Engine) -> Self {
        // The time that is left for a name counts from one time on.
        let now = now();
        let Some(dir) = dir else {
            engine.begin_journal(now);
            return Self::default();
        };
        let journal = state::open(dir, now).map(|(journal, saved, refusal)| {
            if let Some(error) = refusal {
                warn!(%error, "this start knows no names of an earlier agent");
            }
            match saved.filter(|saved| *saved != Saved::default()) {
                Some(saved) => engine.load(saved, now),
                None => engine.begin_journal(now),
            }
            journal
        });
        Self {
            journal: journal
                .inspect_err(|error| {
                    warn!(%error, "cannot use the journal: the next agent will know no names of this one");
                    engine.begin_journal(now);
                })
                .ok(),
            is_wanted: true,
            told_until: Timestamp::default(),
        }
    }

    /// When a new file is due.
    fn deadline(&self) -> Option<Timestamp> {
        self.journal.as_ref()?.deadline()
    }

    /// Writes the records of a turn, before anything follows from them.
    pub(super) fn write(&mut self, engine: &mut Engine, now: Timestamp) {
        let records = engine.take_records();
        if !self.is_wanted || records.is_empty() {
            return;
        }
        let Some(journal) = &mut self.journal else {
            engine.records_lost(records.len());
            return;
        };
        let appended = journal.append(&records, now);
        let begun = appended.and_then(|()| journal.begin_if_due(now));
        engine.records_lost(journal.take_lost());
        self.tell(begun, now);
    }

    /// Begins a new file, if one is due because records are missing in the old one.
    pub(super) fn try_again(&mut self, now: Timestamp) {
        if let Some(journal) = &mut self.journal {
            let begun = journal.begin_if_due(now);
            self.tell(begun, now);
        }
    }

    /// Whether a new file is being written.
    pub(super) fn is_rewriting(&self) -> bool {
        self.journal.as_ref().is_some_and(Journal::is_rewriting)
    }

    /// Writes a further part of a new file.
    pub(super) fn go_on(&mut self, engine: &mut Engine) {
        if let Some(journal) = &mut self.journal {
            let now = now();
            let written = journal.go_on(|parts| engine.next_part(parts), now);
            engine.records_lost(journal.take_lost());
            self.tell(written, now);
        }
    }

    fn tell(&mut self, result: Result<(), StateError>, now: Timestamp) {
        if let Err(error) = result
            && self.told_until <= now
        {
            self.told_until = now + TOLD_INTERVAL;
            warn!(%error, "cannot write the journal: until it can be written, a restart closes what is open");
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
