//! Control groups: processes with a limit of their memory.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::process::{PATIENT, wait_until};

/// A control group that limits memory. Dropping it waits until its processes have ended, and removes it.
#[derive(Debug)]
pub struct Group {
    dir: PathBuf,
    limit: &'static str,
    usage: &'static str,
    /// The most that was in use, where the kernel says it.
    peak: &'static str,
}

impl Group {
    /// Version 1 or version 2 of control groups, or why there is neither.
    pub fn make(name: &str) -> Result<Self, String> {
        let version1 = Path::new("/sys/fs/cgroup/memory");
        let version2 = Path::new("/sys/fs/cgroup");
        let (parent, limit, usage, peak) = if version1.join("memory.limit_in_bytes").exists() {
            (
                version1,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "memory.max_usage_in_bytes",
            )
        } else {
            (version2, "memory.max", "memory.current", "memory.peak")
        };
        let dir = parent.join(name);
        // A run that was cut off leaves its group, without a process.
        let _absent = fs::remove_dir(&dir);
        match fs::create_dir(&dir) {
            Ok(()) => {}
            Err(error) => return Err(format!("no control group {}: {error}", dir.display())),
        }
        let group = Self {
            dir,
            limit,
            usage,
            peak,
        };
        match group.dir.join(limit).exists() {
            true => Ok(group),
            false => Err("no control group limits memory".into()),
        }
    }

    /// The command, run within the group.
    pub fn run(&self, command: Command) -> Command {
        const ENTER: &str = r#"echo $$ >"$1/cgroup.procs" && shift && exec "$@""#;
        let mut inside = Command::new("sh");
        inside.args(["-c", ENTER, "sh"]).arg(&self.dir);
        around(inside, command)
    }

    /// Leaves so much memory. What does not fit must not go to a swap file, where there is one.
    pub fn set_limit(&self, bytes: u64) -> std::io::Result<()> {
        fs::write(self.dir.join(self.limit), bytes.to_string())?;
        let swap = self.dir.join("memory.swap.max");
        match swap.exists() {
            true => fs::write(swap, "0"),
            false => Ok(()),
        }
    }

    /// The most that was in use, with caches, if the kernel says it (version 2: since 5.19).
    pub fn peak_bytes(&self) -> Option<u64> {
        let text = fs::read_to_string(self.dir.join(self.peak)).ok()?;
        text.trim().parse().ok()
    }

    /// Leaves no memory beside what is in use.
    pub fn be_full(&self) {
        let usage = fs::read_to_string(self.dir.join(self.usage)).expect("a number");
        // Version 1 refuses a limit below what is in use, and frees caches when it is tried.
        let _refused = fs::write(self.dir.join(self.limit), "65536");
        let usage_now = fs::read_to_string(self.dir.join(self.usage)).expect("a number");
        println!(
            "{} bytes in use, {} without caches",
            usage.trim(),
            usage_now.trim()
        );
        // In version 2, it may have been killed by now.
        let _ended = fs::write(self.dir.join(self.limit), usage_now.trim());
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let removed = wait_until("the control group to be empty", PATIENT, || {
            Ok(fs::remove_dir(&self.dir).is_ok())
        });
        if let Err(error) = removed {
            eprintln!("{error}");
        }
    }
}

/// The outer command, which executes the inner one with its arguments and its namespace.
pub fn around(mut outer: Command, inner: Command) -> Command {
    outer.arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        outer.env(name, value.unwrap_or_default());
    }
    outer
}
