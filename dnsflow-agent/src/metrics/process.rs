//! What the kernel counts of the agent's process, under the names that the Prometheus client libraries use
//! (<https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics>).

use std::fmt;

use procfs::{WithCurrentSystemInfo as _, process::Process};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};

/// The numbers of one scrape.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    cpu_s: f64,
    started_s: f64,
    resident: u64,
    open_fds: usize,
}

/// Reads `/proc/self`. `None` where that cannot be read.
pub(super) fn read() -> Option<Reading> {
    let process = Process::myself().ok()?;
    let stat = process.stat().ok()?;
    let ticks = procfs::ticks_per_second() as f64;
    Some(Reading {
        cpu_s: (stat.utime + stat.stime) as f64 / ticks,
        started_s: procfs::boot_time_secs().ok()? as f64 + stat.starttime as f64 / ticks,
        resident: stat.rss_bytes().get(),
        open_fds: process.fd_count().ok()?,
    })
}

/// The metrics of a reading.
#[derive(Debug)]
pub(super) struct OfProcess(pub(super) Option<Reading>);

impl Collector for OfProcess {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(reading) = self.0 else {
            return Ok(());
        };
        let cpu = ConstCounter::new(reading.cpu_s);
        let help = "Processor time of user and system";
        let of_cpu = encoder.encode_descriptor(
            "process_cpu",
            help,
            Some(&Unit::Seconds),
            cpu.metric_type(),
        )?;
        cpu.encode(of_cpu)?;
        for (name, help, unit, value) in [
            (
                "process_start_time",
                "The start, in seconds since 1970",
                Some(&Unit::Seconds),
                reading.started_s,
            ),
            (
                "process_resident_memory",
                "Resident memory",
                Some(&Unit::Bytes),
                reading.resident as f64,
            ),
            (
                "process_open_fds",
                "Open file descriptors",
                None,
                reading.open_fds as f64,
            ),
        ] {
            let gauge = ConstGauge::new(value);
            let of_name = encoder.encode_descriptor(name, help, unit, gauge.metric_type())?;
            gauge.encode(of_name)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_run_and_has_memory() {
        let reading = read().expect("/proc is there");
        assert!(reading.cpu_s >= 0.0 && reading.resident > 0 && reading.open_fds > 2);
        let now = jiff::Timestamp::now().as_second() as f64;
        // The kernel rounds the time of its boot.
        assert!((now - reading.started_s).abs() < 86_400.0, "{reading:?}");
    }
}
