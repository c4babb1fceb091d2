//! Whether the machine itself stood still: then nothing can be said of a time, and a scene is played once more.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::support::{run_again, this_test};

/// How long the watcher sleeps each time.
const NAP: Duration = Duration::from_millis(10);
/// From this delay on, the machine stood still. A thread that needs no more than microseconds of a processor gets one
/// within some milliseconds, however many others are busy. An agent for which time stands still for 600 ms lets a sign
/// of life grow too old (0.8 s, one each 0.2 s), and answers pass that should have been held.
const STANDSTILL: Duration = Duration::from_millis(300);

/// A thread that measures by how much it wakes up too late. Dropping it ends the thread.
#[derive(Debug)]
pub struct Watcher {
    stop: Arc<AtomicBool>,
    longest_us: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Starts to watch.
    pub fn start() -> Self {
        let stop = Arc::<AtomicBool>::default();
        let longest_us = Arc::<AtomicU64>::default();
        let (stopped, longest) = (Arc::clone(&stop), Arc::clone(&longest_us));
        let thread = thread::spawn(move || {
            while !stopped.load(Relaxed) {
                let start = Instant::now();
                thread::sleep(NAP);
                let late = start.elapsed().saturating_sub(NAP);
                longest.fetch_max(late.as_micros().try_into().unwrap_or(u64::MAX), Relaxed);
            }
        });
        Self {
            stop,
            longest_us,
            thread: Some(thread),
        }
    }

    /// The longest delay so far.
    pub fn longest(&self) -> Duration {
        Duration::from_micros(self.longest_us.load(Relaxed))
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // It does nothing that panics.
            let _ended = thread.join();
        }
    }
}

/// Why a test fails without a fault that anybody names.
struct Unexplained {
    why: String,
    /// For how long the switch stood still, by its own account.
    switch_stood: Duration,
}

/// Fails the test, unless [`play`] finds that the machine stood still. Only for what has no other explanation: what the
/// product's own account names is a fault, whatever the machine did.
pub fn unexplained(why: String) -> ! {
    unexplained_beside(Duration::ZERO, why)
}

/// The same where a thread of the switch stood still for so long, by its own account
/// ([`Lab::switch_stood_still`](crate::lab::Lab::switch_stood_still)).
pub fn unexplained_beside(switch_stood: Duration, why: String) -> ! {
    panic_any(Unexplained { why, switch_stood })
}

/// Runs a test whose claim needs a machine that goes on. If the test ends by [`unexplained`] and the machine stood still
/// meanwhile, it says so and runs once more.
///
/// # Panics
///
/// If the test fails otherwise.
pub fn play(test: impl Fn()) {
    let say = |stood| run_again(&this_test(), stood);
    play_watched(Watcher::start, Watcher::longest, say, test);
}

/// Runs a test once or twice, with this watcher, its longest delay, and how a second run is announced.
fn play_watched<W>(
    watch: impl Fn() -> W,
    longest: impl Fn(&W) -> Duration,
    say: impl Fn(Duration),
    test: impl Fn(),
) {
    let try_once = || match catch_unwind(AssertUnwindSafe(&test)) {
        Ok(()) => Ok(()),
        Err(panic) => match panic.downcast::<Unexplained>() {
            Ok(unexplained) => Err(*unexplained),
            Err(panic) => resume_unwind(panic),
        },
    };
    let watcher = watch();
    let Err(Unexplained { why, switch_stood }) = try_once() else {
        return;
    };
    let stood = longest(&watcher).max(switch_stood);
    assert!(
        stood >= STANDSTILL,
        "{why}\nthe machine stood still for {stood:?} at most"
    );
    println!("{why}");
    say(stood);
    try_once().unwrap_or_else(|Unexplained { why, .. }| panic!("{why}"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// What a run of the test does.
    #[derive(Clone, Copy)]
    enum Run {
        Well,
        Unexplained,
        Named,
    }

    /// How often a test is run that does this, and whether it passes.
    fn played(runs: &[Run], stood: Duration) -> (usize, bool) {
        let times = Cell::new(0);
        let test = || {
            let run = runs[times.get()];
            times.set(times.get() + 1);
            match run {
                Run::Well => {}
                Run::Unexplained => unexplained("nobody knows".into()),
                Run::Named => panic!("a fault"),
            }
        };
        let played = || play_watched(|| (), |()| stood, |_| (), test);
        let passed = catch_unwind(AssertUnwindSafe(played)).is_ok();
        (times.get(), passed)
    }

    #[test]
    fn a_test_is_run_again_once_and_only_for_a_machine_that_stood_still() {
        use Run::{Named, Unexplained, Well};
        let goes_on = Duration::from_millis(20);
        assert_eq!(played(&[Well], STANDSTILL), (1, true));
        assert_eq!(played(&[Unexplained, Well], STANDSTILL), (2, true));
        assert_eq!(played(&[Unexplained, Well], goes_on), (1, false));
        assert_eq!(played(&[Named, Well], STANDSTILL), (1, false));
        assert_eq!(played(&[Unexplained, Unexplained], STANDSTILL), (2, false));
    }

    #[test]
    fn a_watcher_sees_delays() {
        let watcher = Watcher::start();
        thread::sleep(5 * NAP);
        assert!(watcher.longest() > Duration::ZERO);
    }
}
