//! The part inside the machine: a script that sees this machine's files, and its jobs.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Result, ensure};
use dnsflow_tests::support::root_directory;

/// Waits until the machine runs for some time. Open vSwitch 3.1 counts the processors anew when its last count is
/// older than ten seconds, and takes the boot for the time of the first one (`count_cpu_cores` in its
/// lib/ovs-thread.c): with a datapath made before, no packet reaches ovs-vswitchd.
const AGED: &str =
    "while read -r uptime _ < /proc/uptime && [ ${uptime%.*} -lt 12 ]; do sleep 0.5; done\n";

/// As many open files as systemd allows (systemd-system.conf(5)): the kernel's own limit is 1,024.
const FILES: &str = "ulimit -n 524288\n";

/// Control groups of version 2 that may limit memory, as systemd makes them.
const CONTROL_GROUPS: &str = "mountpoint --quiet /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup\n\
     echo +memory > /sys/fs/cgroup/cgroup.subtree_control\n";

/// What the jobs print.
pub(super) const OUTPUT: &str = "output.log";
/// Begins the line of the output behind a job. Its exit status follows.
pub(super) const JOB_ENDED: &str = "== ended with status ";
/// A line for each job that has ended: its exit status and its name.
pub(super) const ENDS: &str = "ends";

/// A program to run inside.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// What it is called.
    pub(crate) name: String,
    /// The program, as it lies outside.
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    pub(crate) environment: Vec<(&'static str, String)>,
    pub(crate) directory: PathBuf,
    /// Where its standard output goes, if not where the standard error goes.
    pub(crate) stdout: Option<PathBuf>,
    /// After which it is ended, and the next one's turn comes.
    pub(crate) limit: Duration,
}

/// How the inside is set up.
#[derive(Debug)]
pub(super) struct Guest {
    /// Directories to be seen in their own place, and whether they can be written.
    shares: Vec<(PathBuf, bool)>,
    results: PathBuf,
    modprobe: PathBuf,
    /// The variables that every job has. Those of its own count for more.
    environment: Vec<(String, String)>,
}

impl Guest {
    pub(super) fn new(more: &[(PathBuf, bool)], results: &Path, modprobe: PathBuf) -> Result<Self> {
        // virtme-ng mounts the root file system without a cache, so that each start of a program
        // reads it and its libraries anew: five times slower. These hold all that the labs run.
        let roots = root_directory("")?;
        let target = roots.with_file_name("").canonicalize()?;
        let roots = roots.canonicalize()?;
        let mut shares = vec![(target.clone(), false)];
        if !roots.starts_with(&target) {
            shares.push((roots, false));
        }
        for (directory, writable) in more {
            shares.push((directory.canonicalize()?, *writable));
        }
        // The last, because it lies in one of the others.
        let results = results.canonicalize()?;
        shares.push((results.clone(), true));
        for (directory, _) in &shares {
            let text = directory.to_string_lossy();
            ensure!(
                !text.contains([',', '\'', '"', '\\', '$', ' ']),
                "a virtual machine cannot be shown {text}: qemu and virtme-ng would not take its \
                 name; clone to a directory with a plain one"
            );
        }
        Ok(Self {
            shares,
            results,
            modprobe,
            environment: of_dnsflow(env::vars_os()),
        })
    }

    /// The devices by which the directories are seen.
    pub(super) fn qemu_options(&self) -> String {
        let mut options = Vec::new();
        for (index, (directory, writable)) in self.shares.iter().enumerate() {
            let access = if *writable { "" } else { ",readonly=on" };
            options.push(format!(
                "-virtfs local,path={},mount_tag=share{index},security_model=none,multidevs=remap\
                 {access}",
                directory.display()
            ));
        }
        options.join(" ")
    }

    /// The script.
    pub(super) fn script(&self, jobs: &[Job]) -> String {
        let mut script = String::from("#!/bin/bash\nset -e\n");
        for (index, (directory, writable)) in self.shares.iter().enumerate() {
            let access = if *writable { "rw" } else { "ro,cache=loose" };
            line(
                &mut script,
                &[
                    "mount -t 9p -o",
                    &format!("trans=virtio,version=9p2000.L,msize=512000,{access}"),
                    &format!("share{index}"),
                    &quoted(directory),
                ],
            );
        }
        let output = quoted(self.results.join(OUTPUT));
        line(&mut script, &["exec >", &output, "2>&1"]);
        script += "uname -srv\n";
        // The kernel then loads what it is asked for by itself, as anywhere.
        let modprobe = quoted(&self.modprobe);
        line(
            &mut script,
            &["echo", &modprobe, "> /proc/sys/kernel/modprobe"],
        );
        line(&mut script, &[&modprobe, "openvswitch"]);
        script += AGED;
        script += FILES;
        script += CONTROL_GROUPS;
        script += "set +e\n";
        let ends = quoted(self.results.join(ENDS));
        for job in jobs {
            let name = quoted(&job.name);
            line(&mut script, &["cd", &quoted(&job.directory)]);
            let mut words = vec!["env".to_owned()];
            let shared = self.environment.iter();
            let shared = shared.map(|(variable, value)| (variable.as_str(), value));
            let own = job.environment.iter();
            let own = own.map(|(variable, value)| (*variable, value));
            for (variable, value) in shared.chain(own) {
                words.push(quoted(format!("{variable}={value}")));
            }
            words.push(format!("timeout --kill-after=10 {}", job.limit.as_secs()));
            words.push(quoted(&job.program));
            words.extend(job.arguments.iter().map(quoted));
            words.extend(job.stdout.iter().map(|file| format!("> {}", quoted(file))));
            line(&mut script, &[&words.join(" ")]);
            line(&mut script, &["status=$?"]);
            line(
                &mut script,
                &["printf '%s%s\\n'", &quoted(JOB_ENDED), "$status"],
            );
            line(&mut script, &["echo $status", &name, ">>", &ends]);
        }
        script
    }
}

/// The variables by which a test takes other numbers than usual, and whatever else a program of dnsflow would see
/// outside.
fn of_dnsflow(variables: impl Iterator<Item = (OsString, OsString)>) -> Vec<(String, String)> {
    let texts = variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    texts
        .filter(|(name, _)| name.starts_with("DNSFLOW_"))
        .collect()
}

fn line(script: &mut String, words: &[&str]) {
    *script += &words.join(" ");
    script.push('\n');
}

/// A word for the shell that stands for itself.
fn quoted(word: impl AsRef<std::ffi::OsStr>) -> String {
    let word = word.as_ref().to_string_lossy();
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the part of the script that belongs to the jobs, in this machine's shell.
    #[test]
    fn jobs_end_with_their_status_and_their_words_reach_them_as_they_are() {
        let results = std::env::temp_dir().join(format!("dnsflow-guest-{}", std::process::id()));
        std::fs::create_dir(&results).expect("a directory");
        let job = |name: &str, command: &str| Job {
            name: name.to_owned(),
            program: "/bin/sh".into(),
            arguments: vec!["-c".to_owned(), command.to_owned()],
            environment: vec![("DNSFLOW_WORD", "it's $HOME".to_owned())],
            directory: "/".into(),
            stdout: Some(results.join(name)),
            limit: Duration::from_secs(1),
        };
        let outside = [
            ("DNSFLOW_NUMBER", "7"),
            ("DNSFLOW_WORD", "another"),
            ("OTHER", "8"),
        ];
        let outside = outside
            .map(|(name, value)| (name.into(), value.into()))
            .into_iter();
        let guest = Guest {
            shares: Vec::new(),
            results: results.clone(),
            modprobe: "/bin/true".into(),
            environment: of_dnsflow(outside),
        };
        let jobs = [
            job("words", "printf %s \"$DNSFLOW_WORD $DNSFLOW_NUMBER$OTHER\""),
            job("it's broken", "exit 3"),
            job("hangs", "sleep 60"),
        ];
        let script = guest.script(&jobs);
        // What is before would change this machine.
        let (_, jobs) = script.split_once("set +e\n").expect("the jobs");
        let status = std::process::Command::new("bash")
            .args(["-c", jobs])
            .stdout(std::process::Stdio::null())
            .status()
            .expect("bash runs");
        assert!(status.success());
        let read = |name: &str| std::fs::read_to_string(results.join(name)).expect("a file");
        assert_eq!(read(ENDS), "0 words\n3 it's broken\n124 hangs\n");
        assert_eq!(read("words"), "it's $HOME 7");
        std::fs::remove_dir_all(&results).expect("removed");
    }
}
