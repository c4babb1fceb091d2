//! The daemons of Open vSwitch and OVN: started, stopped and restarted.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal};
use serde_json::json;

use crate::{
    database::map_value,
    lab::{Datapath, Lab},
    process::{self, run},
};

/// A daemon of the lab.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Daemon {
    /// The ovsdb-server of the local Open_vSwitch database.
    OvsDb,
    /// The ovsdb-server of the OVN northbound database.
    NbDb,
    /// The ovsdb-server of the OVN southbound database.
    SbDb,
    /// ovs-vswitchd.
    Vswitchd,
    /// ovn-northd.
    Northd,
    /// ovn-controller.
    OvnController,
}

/// How a daemon is ended before it starts again.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Stop {
    /// SIGTERM, as an orderly restart of its container.
    Terminate,
    /// SIGKILL, as a crash.
    Kill,
}

/// What the CNI plug-in writes into the Interface row of a pod.
const IDS: &[&str] = &[
    "iface-id",
    "iface-id-ver",
    "attached_mac",
    "ip_addresses",
    "sandbox",
    "pod-if-name",
];

/// The pods of a deleted br-int: the names of their interfaces, and the external_ids.
#[derive(Debug)]
pub struct Unplugged(Vec<(String, Vec<(&'static str, String)>)>);

impl Daemon {
    fn program(self) -> &'static str {
        match self {
            Self::OvsDb | Self::NbDb | Self::SbDb => "ovsdb-server",
            Self::Vswitchd => "ovs-vswitchd",
            Self::Northd => "ovn-northd",
            Self::OvnController => "ovn-controller",
        }
    }

    /// Stem of the pid file, the log file and the control socket.
    fn stem(self) -> &'static str {
        match self {
            Self::OvsDb => "ovs-db",
            Self::NbDb => "nb-db",
            Self::SbDb => "sb-db",
            other => other.program(),
        }
    }
}

impl Lab {
    pub(crate) fn create_database(&self, daemon: Daemon) -> Result<()> {
        let schema = match daemon {
            Daemon::NbDb => "usr/share/ovn/ovn-nb.ovsschema",
            Daemon::SbDb => "usr/share/ovn/ovn-sb.ovsschema",
            _ => "usr/share/openvswitch/vswitch.ovsschema",
        };
        let mut command = self.node_command("ovsdb-tool")?;
        command.arg("create").arg(self.database_file(daemon));
        run(command.arg(self.root().path().join(schema)))?;
        Ok(())
    }

    fn database_file(&self, daemon: Daemon) -> PathBuf {
        self.base().join("db").join(daemon.stem())
    }

    fn pidfile(&self, daemon: Daemon) -> PathBuf {
        self.socket(&format!("{}.pid", daemon.stem()))
    }

    /// The process of a daemon that runs.
    pub fn daemon(&self, daemon: Daemon) -> Result<Pid> {
        process::running(&self.pidfile(daemon), self.base())
            .with_context(|| format!("{} does not run", daemon.program()))
    }

    /// Starts a daemon and returns when it is ready.
    pub fn start_daemon(&self, daemon: Daemon) -> Result<()> {
        let mut command = self.node_command(daemon.program())?;
        let database = self.remote("db.sock");
        match daemon {
            Daemon::OvsDb | Daemon::NbDb | Daemon::SbDb => {
                let socket = match daemon {
                    Daemon::NbDb => "ovnnb_db.sock",
                    Daemon::SbDb => "ovnsb_db.sock",
                    _ => "db.sock",
                };
                command
                    .arg(self.database_file(daemon))
                    .arg(format!("--remote=p{}", self.remote(socket)));
            }
            Daemon::Vswitchd => {
                command.arg(database);
                if self.datapath() == Datapath::Netdev {
                    command.arg("--disable-system");
                }
            }
            Daemon::Northd => {
                command
                    .arg(format!("--ovnnb-db={}", self.remote("ovnnb_db.sock")))
                    .arg(format!("--ovnsb-db={}", self.remote("ovnsb_db.sock")));
            }
            Daemon::OvnController => {
                command.arg(database);
            }
        }
        let stem = daemon.stem();
        let log = self.base().join("log").join(format!("{stem}.log"));
        command
            .arg(format!("--pidfile={}", self.pidfile(daemon).display()))
            .arg(format!("--log-file={}", log.display()))
            .args(["-vconsole:off", "--detach"]);
        if daemon.program() == "ovsdb-server" {
            let socket = self.socket(&format!("{stem}.ctl"));
            command.arg(format!("--unixctl={}", socket.display()));
        }
        run(&mut command)?;
        Ok(())
    }

    /// Ends a daemon.
    pub fn stop_daemon(&self, daemon: Daemon, how: Stop) -> Result<()> {
        let signal = match how {
            Stop::Terminate => Signal::TERM,
            Stop::Kill => Signal::KILL,
        };
        process::stop(&self.pidfile(daemon), self.base(), signal)
    }

    /// Ends a daemon and starts it again with the same arguments.
    pub fn restart(&self, daemon: Daemon, how: Stop) -> Result<()> {
        self.stop_daemon(daemon, how)?;
        self.start_daemon(daemon)
    }

    pub(crate) fn configure_switch(&self) -> Result<()> {
        let ids = [
            ("system-id", self.chassis()),
            ("hostname", crate::topology::NODE),
            ("ovn-remote", &self.remote("ovnsb_db.sock")),
            ("ovn-encap-type", "geneve"),
            ("ovn-encap-ip", "127.0.0.1"),
            ("ovn-bridge-datapath-type", self.datapath().ovs_name()),
            ("ovn-bridge-mappings", "physnet:br-ex"),
        ]
        .map(|(key, value)| format!("external_ids:{key}={value}"));
        let mut arguments = vec!["--no-wait", "init", "--", "set", "Open_vSwitch", "."];
        arguments.extend(ids.iter().map(String::as_str));
        self.vsctl(&arguments)?;
        Ok(())
    }

    pub(crate) fn add_bridges(&self) -> Result<()> {
        let datapath = format!("datapath_type={}", self.datapath().ovs_name());
        let external = ["--", "add-br", "br-ex", "--", "set", "Bridge", "br-ex"];
        let mut arguments = external.to_vec();
        arguments.push(&datapath);
        self.vsctl(&arguments)?;
        self.add_integration_bridge()
    }

    fn add_integration_bridge(&self) -> Result<()> {
        let datapath = format!("datapath_type={}", self.datapath().ovs_name());
        // ovn-controller makes one itself where there is none.
        let bridge = ["--may-exist", "add-br", "br-int"];
        let settings = ["--", "set", "Bridge", "br-int", &datapath];
        let mut arguments = [&bridge[..], &settings[..]].concat();
        arguments.push("fail-mode=secure");
        self.vsctl(&arguments)?;
        Ok(())
    }

    /// Deletes br-int with its ports. Returns what plugs the pods in again, for
    /// [`Lab::plug_in_again`].
    pub fn delete_integration_bridge(&self) -> Result<Unplugged> {
        let mut unplugged = Vec::new();
        for row in self.ovs_db()?.select("Interface", json!([]))? {
            let ids = &row["external_ids"];
            if map_value(ids, "sandbox").is_none() {
                continue;
            }
            let name = row["name"].as_str().context("a name")?.to_owned();
            // The rest is OVN's.
            let ids = IDS.iter().filter_map(|&key| {
                let value = map_value(ids, key)?;
                Some((key, value.to_owned()))
            });
            unplugged.push((name, ids.collect()));
        }
        self.vsctl(&["del-br", "br-int"])?;
        Ok(Unplugged(unplugged))
    }

    /// Makes br-int anew, with the management port and the pods that were plugged in.
    pub fn plug_in_again(&self, unplugged: &Unplugged) -> Result<()> {
        self.add_integration_bridge()?;
        self.add_management_port()?;
        for (name, ids) in &unplugged.0 {
            let ids = ids.iter().map(|(key, value)| (*key, value.as_str()));
            let ids: Vec<_> = ids.collect();
            self.add_interface(name, &ids)?;
        }
        Ok(())
    }

    /// The end of a daemon's log, for error messages.
    pub fn log_tail(&self, file: &str) -> String {
        const LINES: usize = 30;
        let text = self.log_text(file);
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }

    /// The lines of a log that have this text.
    pub fn log_lines_with(&self, file: &str, text: &str) -> String {
        let log = self.log_text(file);
        let lines = log.lines().filter(|line| line.contains(text));
        lines.collect::<Vec<_>>().join("\n")
    }

    fn log_text(&self, file: &str) -> String {
        fs::read_to_string(self.base().join("log").join(file)).unwrap_or_default()
    }

    /// The assertion at which ovs-vswitchd has ended, if it has: the userspace datapath of Open vSwitch 3.1 does that under
    /// load (docs/internals/kernels.md).
    pub fn switch_failed_assertion(&self) -> Option<String> {
        let log = self.log_text(SWITCH_LOG);
        let line = log.lines().rfind(|line| line.contains("|EMER|"))?;
        (line.contains("assertion") && self.daemon(Daemon::Vswitchd).is_err())
            .then(|| line.to_owned())
    }

    /// How much ovs-vswitchd has logged so far, in bytes.
    pub fn switch_has_logged(&self) -> usize {
        self.log_text(SWITCH_LOG).len()
    }

    /// For how long a thread of ovs-vswitchd stood still at most, by its own log from this byte on. A thread that works
    /// for a second without a look at its events says so (`log_poll_interval` in Open vSwitch's lib/timeval.c).
    pub fn switch_stood_still(&self, from: usize) -> Duration {
        let text = self.log_text(SWITCH_LOG);
        longest_poll_interval(text.get(from..).unwrap_or(&text))
    }
}

const SWITCH_LOG: &str = "ovs-vswitchd.log";

fn longest_poll_interval(log: &str) -> Duration {
    let millis = log.lines().filter_map(|line| {
        let (_, rest) = line.split_once("Unreasonably long ")?;
        let (millis, _) = rest.split_once("ms poll interval")?;
        millis.parse().ok()
    });
    millis.max().map_or(Duration::ZERO, Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switch_says_for_how_long_it_stood_still() {
        let log = "2026-11-26T03:01:10.055Z|00020|bridge|INFO|added interface br-int\n\
                   2026-11-26T03:01:12.055Z|00025|timeval(revalidator4)|WARN|Unreasonably long 1106ms poll interval \
                   (12ms user, 3ms system)\n";
        assert_eq!(longest_poll_interval(log), Duration::from_millis(1106));
        assert_eq!(longest_poll_interval("all is well"), Duration::ZERO);
    }
}
