//! Samples, and what is said of them.

use std::time::Duration;

use serde::Serialize;

/// Samples of one figure, in the unit that the figure's name says. Never empty.
#[derive(Clone, Debug)]
pub(crate) struct Distribution {
    ascending: Vec<f64>,
}

/// What is said of a latency.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Latency {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub(crate) max: f64,
    pub(crate) n: usize,
}

impl Distribution {
    /// `None` where there is nothing to say anything of.
    pub(crate) fn of(mut samples: Vec<f64>) -> Option<Self> {
        samples.retain(|sample| sample.is_finite());
        samples.sort_by(f64::total_cmp);
        (!samples.is_empty()).then_some(Self { ascending: samples })
    }

    /// Durations as microseconds.
    pub(crate) fn micros(samples: &[Duration]) -> Option<Self> {
        let micros = |sample: &Duration| sample.as_secs_f64() * 1e6;
        Self::of(samples.iter().map(micros).collect())
    }

    /// The smallest sample that at least this part of all are not above (nearest rank).
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let rank = (part * self.ascending.len() as f64).ceil() as usize;
        self.ascending[rank.clamp(1, self.ascending.len()) - 1]
    }

    /// The median.
    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Its samples, ascending.
    pub(crate) fn ascending(&self) -> &[f64] {
        &self.ascending
    }

    /// What is said of it.
    pub(crate) fn latency(&self) -> Latency {
        Latency {
            p50: rounded(self.quantile(0.5)),
            p90: rounded(self.quantile(0.9)),
            p99: rounded(self.quantile(0.99)),
            max: rounded(self.quantile(1.0)),
            n: self.ascending.len(),
        }
    }

    /// By how much each quantile lies above that of another distribution. This is no distribution
    /// of differences: the samples are not of the same requests.
    pub(crate) fn above(&self, other: &Self) -> Latency {
        let (this, other) = (self.latency(), other.latency());
        Latency {
            p50: rounded(this.p50 - other.p50),
            p90: rounded(this.p90 - other.p90),
            p99: rounded(this.p99 - other.p99),
            max: rounded(this.max - other.max),
            n: this.n.min(other.n),
        }
    }
}

/// To three digits behind the point: more is noise.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}
