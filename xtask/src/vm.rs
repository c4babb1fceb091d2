//! Debian's stock kernels in a virtual machine, for `test --vm`, `demo --vm` and `cluster --vm`.
//!
//! The machine boots over this machine's own root file system, which it can read and not write, so
//! that what was built outside runs inside; virtme-ng brings the init and qemu the hardware. What
//! is written inside lands in the machine's memory, except for one directory below `target/`, through
//! which output and results come back. Nothing is installed, and no module of this kernel is touched.

mod guest;
mod tools;

use std::{
    fs::{self, File},
    io::{ErrorKind, Read},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread::sleep,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use dnsflow_tests::{
    root::Root,
    support::{OPEN_BY_VARIABLE, root_directory, workspace},
};
use rustix::process::Pid;

pub(crate) use self::guest::Job;
use self::tools::Tools;
use crate::interrupt;

/// Enough for two labs beside each other, with room to spare.
const MEMORY: &str = "3G";
const CPUS: &str = "2";
/// How long booting and stopping may take beside the jobs: some 15 s of emulation.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// A kernel that boots with KVM does so in two or three seconds. One that takes longer than emulation does is of no use.
const KVM_LIMIT: Duration = Duration::from_secs(15);
/// What the script of the attempt says.
const BOOTED: &str = "dnsflow-booted";
const POLL: Duration = Duration::from_millis(200);
const CONSOLE_LINES: usize = 30;

/// A kernel that clusters run, by the Debian release that ships it.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Kernel {
    /// Debian 11's: no TCX
    #[value(name = "5.10")]
    V5_10,
    /// Debian 12's: no TCX
    #[value(name = "6.1")]
    V6_1,
    /// Debian 13's
    #[value(name = "6.12")]
    V6_12,
}

impl Kernel {
    /// The kernel's series.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::V5_10 => "5.10",
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        }
    }

    fn suite(self) -> &'static str {
        match self {
            Self::V5_10 => "bullseye",
            Self::V6_1 => "bookworm",
            Self::V6_12 => "trixie",
        }
    }
}

/// How agents open addresses.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum OpenBy {
    /// A flow for each address
    Flows,
    /// A mark for each address, and flows that match the marks
    #[value(alias = "kernel")]
    Marks,
}

impl OpenBy {
    /// The environment variable that tells the labs' agents.
    pub(crate) fn environment(self) -> (&'static str, String) {
        let value = match self {
            Self::Flows => "flows",
            Self::Marks => "marks",
        };
        (OPEN_BY_VARIABLE, value.to_owned())
    }
}

/// What comes out of the machine.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event<'a> {
    /// A line that a job has printed, or the boot before the first one.
    Line(&'a str),
    /// A job has ended, with this exit status.
    Ended(&'a Job, &'a str),
}

/// A virtual machine that can be started.
#[derive(Debug)]
pub(crate) struct Machine {
    kernel: Kernel,
    image: PathBuf,
    has_kvm: bool,
    tools: Tools,
    /// Where output and results come back.
    results: PathBuf,
    equipment: Equipment,
}

/// What a machine has beside two processors and the files of `target/`.
#[derive(Debug)]
pub(crate) struct Equipment {
    /// As qemu reads it.
    pub(crate) memory: &'static str,
    /// Directories to be seen in their own place, and whether they can be written.
    pub(crate) shares: Vec<(PathBuf, bool)>,
    pub(crate) network: Option<Network>,
}

impl Default for Equipment {
    fn default() -> Self {
        Self {
            memory: MEMORY,
            shares: Vec::new(),
            network: None,
        }
    }
}

/// A network device of a machine.
#[derive(Debug)]
pub(crate) struct Network {
    /// The network namespace in which qemu runs.
    pub(crate) namespace: PathBuf,
    /// The tap device in that namespace.
    pub(crate) tap: String,
}

impl Network {
    fn qemu_options(&self) -> String {
        format!(
            " -netdev tap,id=uplink,ifname={},script=no,downscript=no,vhost=off \
             -device virtio-net-pci,netdev=uplink,romfile=",
            self.tap
        )
    }
}

impl Machine {
    /// Fetches qemu, virtme-ng and the kernel, unless they are there.
    pub(crate) fn prepare(kernel: Kernel, say: &dyn Fn(&str)) -> Result<Self> {
        let tools = Tools::ensure(say)?;
        interrupt::check()?;
        let name = format!("vm-kernel-{}", kernel.name());
        let root = Root::ensure_dependency(
            &root_directory(&name)?,
            kernel.suite(),
            "linux-image-amd64",
            say,
        )?;
        interrupt::check()?;
        let image = the_only_kernel(&root.path().join("boot"))?;
        let results = tools.directory().join(kernel.name());
        let kvm = kvm(&tools, &image)?;
        let acceleration = match &kvm {
            Ok(()) => "with KVM".to_owned(),
            Err(why) => format!("by emulation, which is slow ({why})"),
        };
        say(&format!("Linux {} runs {acceleration}", kernel.name()));
        Ok(Self {
            kernel,
            image,
            has_kvm: kvm.is_ok(),
            tools,
            results,
            equipment: Equipment::default(),
        })
    }

    /// The machine with this equipment.
    pub(crate) fn equipped(self, equipment: Equipment) -> Self {
        Self { equipment, ..self }
    }

    /// A file that jobs may write, and that is read here after the run.
    pub(crate) fn result(&self, name: &str) -> PathBuf {
        self.results.join(name)
    }

    /// Boots, runs the jobs one after the other, and stops. `each` is given what comes of them as it comes. Returns
    /// the names of the jobs that failed.
    pub(crate) fn run(&self, jobs: &[Job], mut each: impl FnMut(Event<'_>)) -> Result<Vec<String>> {
        match fs::remove_dir_all(&self.results) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            _ => fs::create_dir_all(&self.results)?,
        }
        let Equipment {
            memory,
            shares,
            network,
        } = &self.equipment;
        let guest = guest::Guest::new(shares, &self.results, self.tools.modprobe())?;
        let script = self.result("guest.sh");
        fs::write(&script, guest.script(jobs))?;
        let console = File::create(self.result("console.log"))?;
        let network_options = network.as_ref().map(Network::qemu_options);
        let options = guest.qemu_options() + &network_options.unwrap_or_default();
        let namespace = network.as_ref().map(|network| &*network.namespace);
        let mut command = self.tools.virtme_ng(namespace)?;
        // Without a terminal it says nothing unless it is verbose.
        command.arg("--verbose");
        if !self.has_kvm {
            command.arg("--disable-kvm");
        }
        command
            .arg("--run")
            .arg(&self.image)
            .args(["--cpus", CPUS, "--memory", memory, "--user", "root"])
            .arg(format!("--qemu-opts={options}"))
            .arg("--")
            .arg(format!("bash {}", script.display()))
            .current_dir(workspace()?)
            .stdin(Stdio::null())
            .stdout(console.try_clone()?)
            .stderr(console);
        let limit = jobs.iter().map(|job| job.limit).sum::<Duration>() + BOOT_LIMIT;

        let child = interrupt::spawn(&mut command)?;
        let group = Pid::from_child(&child);
        let ended = AtomicBool::new(false);
        let status = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let status = interrupt::wait_at_most(child, limit);
                ended.store(true, Ordering::Release);
                status
            });
            let mut running = jobs.iter();
            let mut event = |line: &str| match line.strip_prefix(guest::JOB_ENDED) {
                Some(status) => {
                    if let Some(job) = running.next() {
                        each(Event::Ended(job, status));
                    }
                }
                None => each(Event::Line(line)),
            };
            follow(&self.result(guest::OUTPUT), &ended, &mut event)?;
            waiter
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        // virtme-ng may have failed and left qemu running.
        interrupt::kill_rest(group)?;
        let status = status?;
        if status.is_none() {
            bail!(
                "the machine did not stop within {limit:?}; the end of its console:\n{}",
                self.console()
            );
        }
        let ends = fs::read_to_string(self.result(guest::ENDS)).unwrap_or_default();
        let ends: Vec<_> = ends
            .lines()
            .filter_map(|line| line.split_once(' '))
            .collect();
        ensure!(
            ends.len() == jobs.len(),
            "the machine stopped before its work was done; the end of its console:\n{}",
            self.console()
        );
        Ok(ends
            .into_iter()
            .filter(|(status, _)| *status != "0")
            .map(|(status, job)| match status {
                // timeout(1)
                "124" | "137" => format!("{job} (it took too long)"),
                _ => job.to_owned(),
            })
            .collect())
    }

    /// The kernel's series.
    pub(crate) fn kernel(&self) -> Kernel {
        self.kernel
    }

    fn console(&self) -> String {
        let text = fs::read(self.result("console.log")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(CONSOLE_LINES)..].join("\n")
    }
}

/// Hands out the lines that are appended to a file, which may not exist yet, until `ended` is set.
fn follow(path: &Path, ended: &AtomicBool, each: &mut impl FnMut(&str)) -> Result<()> {
    let mut file = None;
    let mut pending = Vec::new();
    loop {
        // Asked first: what was written before the end is read after it.
        let last = ended.load(Ordering::Acquire);
        if file.is_none() {
            file = match File::open(path) {
                Ok(file) => Some(file),
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => return Err(error.into()),
            };
        }
        if let Some(file) = &mut file {
            file.read_to_end(&mut pending)?;
        }
        while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            each(String::from_utf8_lossy(&line).trim_end());
        }
        if last {
            if !pending.is_empty() {
                each(&String::from_utf8_lossy(&pending));
            }
            return Ok(());
        }
        sleep(POLL);
    }
}

fn the_only_kernel(boot: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(boot).with_context(|| format!("cannot read {}", boot.display()))?;
    let mut found = None;
    for entry in entries {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("vmlinuz-") {
            ensure!(found.is_none(), "{} holds more than one", boot.display());
            found = Some(entry.path());
        }
    }
    found.with_context(|| format!("{} holds no kernel", boot.display()))
}

/// Whether the kernel boots with KVM here, or why not. A machine that is itself virtual may have the device and hang a
/// kernel that is started on it: only the attempt decides.
fn kvm(tools: &Tools, image: &Path) -> Result<std::result::Result<(), String>> {
    if !Path::new("/dev/kvm").exists() {
        return Ok(Err("there is no /dev/kvm".to_owned()));
    }
    let mut command = tools.virtme_ng(None)?;
    command
        .args(["--verbose", "--run"])
        .arg(image)
        .args(["--cpus", "1", "--memory", "512M", "--user", "root", "--"])
        .arg(format!("echo {BOOTED}"));
    let booted = boots(&mut command, &tools.directory().join("kvm.log"), KVM_LIMIT)?;
    let why = || format!("the kernel does not boot with KVM within {KVM_LIMIT:?}");
    Ok(booted.then_some(()).ok_or_else(why))
}

/// Whether a machine that this command starts gets to its script within `limit`. It is ended in any case.
fn boots(command: &mut Command, log: &Path, limit: Duration) -> Result<bool> {
    let output = File::create(log)?;
    command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output);
    let child = interrupt::spawn(command)?;
    let group = Pid::from_child(&child);
    interrupt::wait_at_most(child, limit)?;
    interrupt::kill_rest(group)?;
    let text = fs::read(log)?;
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().any(|line| line.trim_end() == BOOTED))
}

#[cfg(test)]
mod tests;
