//! What the agent adds to the time that a pod waits for its DNS answer.
//!
//! Rounds without the agent and with it, in turns; in each, names that the rule is for (fresh ones:
//! each answer opens an address) and names that no rule mentions, with one question open at a time and
//! with a hundred.

use std::thread;

use anyhow::{Context, Result};

use crate::bench::{
    distribution::{Distribution, rounded},
    loader::Asker,
    report::Measured,
    stage::{Mode, RULED, SHARE_PORTION, SHARE_TIME, Stage, matching, unrelated},
};

const MANY: usize = 100;
/// A round resolves more names than a pod may by default.
const ROOM: [&str; 2] = ["--max-addresses-per-pod=16384", "--max-flow-changes=65536"];

/// The round trips of one side, in microseconds.
#[derive(Debug, Default)]
struct Side {
    matching: Vec<f64>,
    matching_many: Vec<f64>,
    unrelated: Vec<f64>,
}

impl Side {
    /// Returns how many names of a rule it has resolved.
    fn round(&mut self, stage: &Stage<'_>) -> Result<u32> {
        let one = stage.scale(1000, 50);
        let portions = stage.scale(4, 1);
        let many = stage.scale(SHARE_PORTION, 200);
        let mut asker = Asker::new(stage.lab, RULED)?;
        // The first packets of a socket make connection tracking entries.
        asker.ask_all(stage.fresh(20).map(unrelated), 1)?;
        let mut ask = |count, name: fn(u32) -> String, in_flight| -> Result<Vec<f64>> {
            let took = asker.ask_all(stage.fresh(count).map(name), in_flight)?;
            Ok(took.iter().map(|took| took.as_secs_f64() * 1e6).collect())
        };
        self.unrelated.extend(ask(one, unrelated, 1)?);
        self.matching.extend(ask(one, matching, 1)?);
        for _ in 0..portions {
            // Faster than the pod's share of the ring buffer allows for long.
            self.matching_many.extend(ask(many, matching, MANY)?);
            thread::sleep(SHARE_TIME);
        }
        Ok(one + portions * many)
    }
}

/// The rows `hold_added_us` and `unrelated_added_pct`.
pub(crate) fn measure(stage: &Stage<'_>) -> Result<Measured> {
    let rounds = stage.scale(3, 1);
    let (mut without, mut with) = (Side::default(), Side::default());
    for _ in 0..rounds {
        stage.clear()?;
        without.round(stage)?;
        stage.clear()?;
        let agent = stage.agent(Mode::Hold, &ROOM)?;
        let resolved = with.round(stage)?;
        stage.end(agent, Mode::Hold, resolved)?;
    }
    let of = |samples| Distribution::of(samples).context("answers");
    let (one, one_with) = (of(without.matching)?, of(with.matching)?);
    let (many, many_with) = (of(without.matching_many)?, of(with.matching_many)?);
    let (other, other_with) = (of(without.unrelated)?, of(with.unrelated)?);

    let percent = (other_with.median() / other.median() - 1.0) * 100.0;
    let measured = Measured::default()
        .field("unrelated_added_pct", rounded(percent))?
        .field("details.round_trip_us.unrelated_without", other.latency())?
        .field("details.round_trip_us.unrelated", other_with.latency())?
        .field("details.round_trip_us.matching_without", one.latency())?
        .field("details.round_trip_us.matching", one_with.latency())?
        .field("details.round_trip_us.matching_100_without", many.latency())?
        .field("details.round_trip_us.matching_100", many_with.latency())?
        .line(
            "DNS round trip, unrelated name",
            format!("{percent:+.1} % at p50 ({:.0} µs without)", other.median()),
            "≤ +5 % at p50",
            percent <= 5.0,
        );
    let (figure, target) = ("DNS round trip, matching name", "≤ +200 µs at p50");
    let (added, added_many) = (one_with.above(&one), many_with.above(&many));
    let measured = measured
        .field("hold_added_us", added)?
        .field("hold_added_us.in_flight_100", added_many)?
        .line(
            figure,
            format!(
                "{:+.0} µs at p50, {:+.0} µs with 100 in flight",
                added.p50, added_many.p50
            ),
            target,
            added.p50 <= 200.0 && added_many.p50 <= 200.0,
        );
    Ok(measured.panel(
        "DNS round trip",
        [
            ("unrelated, no agent", other),
            ("unrelated, dnsflow", other_with),
            ("matching, no agent", one),
            ("matching, dnsflow", one_with),
        ],
    ))
}
