//! The one clock of the agent, read at its edges only, and an alarm by it.

use std::{
    future::pending,
    io,
    os::fd::{AsFd as _, OwnedFd},
    time::Duration,
};

use dnsflow_core::Timestamp;
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};
use tokio::io::{Interest, unix::AsyncFd};

/// The time now, by the clock that the kernel stamps records with.
pub fn now() -> Timestamp {
    let since_boot = Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default();
    Timestamp::default() + since_boot
}

/// An alarm that goes off within microseconds of its time (timerfd_create(2)); tokio's timers know
/// whole milliseconds.
#[derive(Debug)]
pub struct Alarm {
    timer: AsyncFd<OwnedFd>,
    set: Option<Timestamp>,
}

impl Alarm {
    /// One that is not set. To be called within the runtime that waits for it.
    ///
    /// # Errors
    ///
    /// Where the kernel refuses.
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        // SAFETY: an `OwnedFd` is one descriptor that stays open as long as it lives.
        let timer = unsafe { AsyncFd::register_with_interest(timer, Interest::READABLE) };
        Ok(Self {
            timer: timer.map_err(io::Error::from)?,
            set: None,
        })
    }

    /// Waits until `at`; for ever where that is `None`. May be cancelled.
    pub async fn wait(&mut self, at: Option<Timestamp>) {
        let Some(at) = at else {
            return pending().await;
        };
        if at <= now() {
            return;
        }
        if self.set != Some(at) {
            self.set = self.arm(at).ok().map(|()| at);
        }
        while now() < at {
            match self.set.map(|_| self.timer.readable()) {
                // It may have gone off for an earlier setting.
                Some(ready) => match ready.await {
                    Ok(mut ready) => ready.clear_ready(),
                    Err(_) => self.set = None,
                },
                // Later than it should be, but not never.
                None => tokio::time::sleep(at.since(now())).await,
            }
        }
        self.set = None;
    }

    /// Sets the timer, which also makes it forget that it went off.
    fn arm(&self, at: Timestamp) -> io::Result<()> {
        let since_boot = Duration::from_nanos(at.as_nanos());
        let value = Timespec::try_from(since_boot).map_err(io::Error::other)?;
        let setting = Itimerspec {
            it_interval: Timespec::default(),
            it_value: value,
        };
        timerfd_settime(self.timer.as_fd(), TimerfdTimerFlags::ABSTIME, &setting)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_alarm_goes_off_at_its_time_and_can_be_set_anew() {
        let mut alarm = Alarm::new().expect("a timer");
        alarm.wait(Some(Timestamp::default())).await;
        for pause in [5, 1, 3].map(Duration::from_millis) {
            let (at, later) = (now() + pause, now() + Duration::from_secs(60));
            // Given up, as the losing branch of a `select!` is.
            tokio::select! {
                biased;
                () = alarm.wait(Some(later)) => panic!("too early"),
                () = std::future::ready(()) => {}
            }
            alarm.wait(Some(at)).await;
            assert!(now() >= at);
        }
        let never = tokio::time::timeout(Duration::from_millis(20), alarm.wait(None));
        assert!(never.await.is_err());
    }
}
