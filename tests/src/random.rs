//! Random numbers of tests: the same for the same seed.

use std::{
    env::VarError,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};

/// The environment variable that gives the seed, which is printed otherwise.
pub const SEED_VARIABLE: &str = "DNSFLOW_SEED";
/// The environment variable by which proptest takes a seed.
pub const PROPERTY_SEED_VARIABLE: &str = "PROPTEST_RNG_SEED";

/// Numbers that are random enough: SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From the seed of [`SEED_VARIABLE`], or of the clock; prints which.
    pub fn from_environment() -> Result<Self> {
        let seed = match std::env::var(SEED_VARIABLE) {
            Ok(seed) => seed.parse().context(SEED_VARIABLE)?,
            Err(VarError::NotPresent) => SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
            Err(error) => return Err(error).context(SEED_VARIABLE),
        };
        println!("{SEED_VARIABLE}={seed}");
        Ok(Self(seed))
    }

    /// From this seed.
    pub fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    /// From 0 to `end`, without `end`, which is at least 1.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % end as u64) as usize
    }

    /// True once in `of` times.
    pub fn one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    /// One of these, of which there is at least one.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}
