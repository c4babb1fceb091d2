//! qemu and virtme-ng, with what they run: from Debian packages unpacked below `target/`, and from
//! PyPI, in a directory of its own there.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::{
    root::{Contents, Root},
    support::root_directory,
};

use crate::ebpf;

/// qemu; what virtme-ng calls (busybox for its initramfs, modprobe and depmod, file to learn the
/// kernel's version); and the Python that runs it, with pip to fetch it.
const PACKAGES: Contents<'_> = Contents {
    suite: "bookworm",
    packages: &[
        "qemu-system-x86",
        "busybox-static",
        "kmod",
        "file",
        "python3-pip",
    ],
};
const VIRTME_NG_VERSION: &str = "1.42";
const VIRTME_NG: [&str; 2] = ["vng", "virtme-run"];

/// Everything that a virtual machine takes but the kernel.
#[derive(Debug)]
pub(super) struct Tools {
    root: Root,
    directory: PathBuf,
}

impl Tools {
    /// Fetches the missing tools.
    pub(super) fn ensure(say: &dyn Fn(&str)) -> Result<Self> {
        let root = Root::ensure(&root_directory("vm-tools")?, PACKAGES, say)?;
        let tools = Self {
            root,
            directory: root_directory("")?.with_file_name("vm"),
        };
        fs::create_dir_all(tools.bin())?;
        tools.write_scripts()?;
        tools.fetch_virtme_ng(say)?;
        Ok(tools)
    }

    /// The directory below `target/` for everything about virtual machines.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// A modprobe that runs inside, too.
    pub(super) fn modprobe(&self) -> PathBuf {
        self.bin().join("modprobe")
    }

    /// `vng`, which finds everything that it calls, in this network namespace if there is one.
    pub(super) fn virtme_ng(&self, namespace: Option<&Path>) -> Result<Command> {
        let program = self.bin().join("vng");
        let mut command = match namespace {
            Some(namespace) => {
                let mut command = Command::new("nsenter");
                command
                    .arg(format!("--net={}", namespace.display()))
                    .arg(program);
                command
            }
            None => Command::new(program),
        };
        command
            .env("PATH", ebpf::path_with(&self.bin())?)
            // Its cache and its settings.
            .env("HOME", &self.directory)
            .env_remove("XDG_CACHE_HOME")
            .env_remove("XDG_CONFIG_HOME");
        Ok(command)
    }

    fn bin(&self) -> PathBuf {
        self.directory.join("bin")
    }

    fn packages(&self) -> PathBuf {
        self.directory.join("virtme-ng")
    }

    /// The command line that runs a program of the root under its own loader, as `name`.
    fn loaded(&self, name: &str, program: &Path) -> Result<String> {
        Ok(format!(
            "'{}' --library-path '{}' --argv0 {name} '{}'",
            self.root.loader()?.display(),
            self.root.library_path(),
            program.display()
        ))
    }

    fn python(&self) -> Result<String> {
        Ok(format!(
            "env PYTHONHOME='{}' PYTHONPATH='{}' {}",
            self.root.path().join("usr").display(),
            self.packages().display(),
            self.loaded("python3", &self.root.find("python3")?)?
        ))
    }

    fn write_scripts(&self) -> Result<()> {
        let share = self.root.path().join("usr/share");
        let libraries = self.root.path().join("usr/lib");
        let qemu = self.root.find("qemu-system-x86_64")?;
        let qemu = format!(
            // Accelerators are modules of qemu's.
            "env QEMU_MODULE_DIR='{}' {} -L '{}' -L '{}'",
            libraries.join("x86_64-linux-gnu/qemu").display(),
            self.loaded("qemu-system-x86_64", &qemu)?,
            share.join("qemu").display(),
            share.join("seabios").display(),
        );
        let kmod = self.root.find("kmod")?;
        let file = format!(
            "{} -m '{}'",
            self.loaded("file", &self.root.find("file")?)?,
            libraries.join("file/magic.mgc").display()
        );
        let mut scripts = vec![
            ("qemu-system-x86_64", qemu),
            ("modprobe", self.loaded("modprobe", &kmod)?),
            ("depmod", self.loaded("depmod", &kmod)?),
            ("file", file),
        ];
        for name in VIRTME_NG {
            let program = self.packages().join("bin").join(name);
            scripts.push((name, format!("{} '{}'", self.python()?, program.display())));
        }
        for (name, line) in scripts {
            ebpf::script(&self.bin().join(name), &format!("exec {line} \"$@\""))?;
        }
        // virtme-ng copies it into its initramfs, where a script would not do.
        fs::copy(self.root.find("busybox")?, self.bin().join("busybox"))?;
        Ok(())
    }

    fn fetch_virtme_ng(&self, say: &dyn Fn(&str)) -> Result<()> {
        let stamp = self.packages().join(".complete");
        let wanted = format!("{VIRTME_NG_VERSION}\n");
        if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
            return Ok(());
        }
        say(&format!(
            "fetching virtme-ng {VIRTME_NG_VERSION} from PyPI into {}",
            self.packages().display()
        ));
        if self.packages().exists() {
            fs::remove_dir_all(self.packages())?;
        }
        let line = format!("exec {} -m pip \"$@\"", self.python()?);
        let status = Command::new("sh")
            .args(["-c", &line, "pip", "install", "--quiet"])
            .args(["--no-cache-dir", "--root-user-action=ignore", "--target"])
            .arg(self.packages())
            .arg(format!("virtme-ng=={VIRTME_NG_VERSION}"))
            .stdin(Stdio::null())
            .status()
            .context("cannot run pip")?;
        ensure!(status.success(), "pip cannot fetch virtme-ng: {status}");
        fs::write(&stamp, wanted)?;
        Ok(())
    }
}
