//! Debian packages unpacked into a directory, and their programs run from there.
//!
//! apt resolves and downloads the packages with lists, state and cache of its own, and
//! `dpkg --extract` unpacks them: no maintainer script runs, no service starts, nothing is
//! installed. The programs run under the unpacked root's own dynamic loader and libraries, so
//! that another Debian release's programs run without chroot or mounts.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

/// A directory that holds unpacked Debian packages.
#[derive(Clone, Debug)]
pub struct Root {
    path: PathBuf,
}

/// Which packages of which Debian release a [`Root`] holds.
#[derive(Clone, Copy, Debug)]
pub struct Contents<'a> {
    /// The release's code name: `bookworm`, `trixie`, `sid`.
    pub suite: &'a str,
    /// Package names; their dependencies come along, recommendations do not.
    pub packages: &'a [&'a str],
}

const STAMP: &str = ".complete";
const MIRROR: &str = "http://deb.debian.org";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

impl Root {
    /// The root at `path`, which is downloaded and unpacked unless it already holds `contents`.
    /// `say` is told what is about to happen.
    pub fn ensure(path: &Path, contents: Contents<'_>, say: impl Fn(&str)) -> Result<Self> {
        let root = Self {
            path: std::path::absolute(path)?.join("root"),
        };
        let wanted = format!("{}: {}\n", contents.suite, contents.packages.join(" "));
        let stamp = path.join(STAMP);
        if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
            return Ok(root);
        }
        say(&format!(
            "fetching Debian {} packages into {} (nothing is installed): {}",
            contents.suite,
            path.display(),
            contents.packages.join(" ")
        ));
        if path.exists() {
            fs::remove_dir_all(path)
                .with_context(|| format!("cannot remove the old {}", path.display()))?;
        }
        root.fetch(path, contents).with_context(|| {
            format!(
                "cannot fetch Debian packages; it takes apt-get, dpkg and Debian's archive keyring, \
                 which other distributions package too; wanted: {}",
                contents.packages.join(" ")
            )
        })?;
        fs::write(&stamp, wanted)?;
        Ok(root)
    }

    /// The root that was unpacked at `path` before.
    pub fn existing(path: &Path) -> Result<Self> {
        let root = Self {
            path: std::path::absolute(path)?.join("root"),
        };
        root.loader()
            .with_context(|| format!("no unpacked Debian packages at {}", path.display()))?;
        Ok(root)
    }

    fn fetch(&self, base: &Path, contents: Contents<'_>) -> Result<()> {
        let base = std::path::absolute(base)?;
        for dir in [
            "lists/partial",
            "cache/archives/partial",
            "etc/preferences.d",
            "root",
        ] {
            fs::create_dir_all(base.join(dir))?;
        }
        fs::write(base.join("status"), "")?;
        let mut sources = format!(
            "deb [signed-by={KEYRING}] {MIRROR}/debian {} main\n",
            contents.suite
        );
        if contents.suite != "sid" {
            sources += &format!(
                "deb [signed-by={KEYRING}] {MIRROR}/debian-security {}-security main\n",
                contents.suite
            );
        }
        fs::write(base.join("etc/sources.list"), sources)?;
        let log = base.join("apt.log");
        let apt = |arguments: &[&str]| -> Result<()> {
            let mut command = Command::new("apt-get");
            for (key, value) in [
                ("Dir::State", base.display().to_string()),
                (
                    "Dir::State::lists",
                    base.join("lists").display().to_string(),
                ),
                (
                    "Dir::State::status",
                    base.join("status").display().to_string(),
                ),
                ("Dir::Cache", base.join("cache").display().to_string()),
                (
                    "Dir::Etc::sourcelist",
                    base.join("etc/sources.list").display().to_string(),
                ),
                ("Dir::Etc::sourceparts", "/dev/null".into()),
                (
                    "Dir::Etc::preferencesparts",
                    base.join("etc/preferences.d").display().to_string(),
                ),
                ("APT::Install-Recommends", "false".into()),
                ("APT::Sandbox::User", "root".into()),
                ("Acquire::Retries", "3".into()),
            ] {
                command.arg("-o").arg(format!("{key}={value}"));
            }
            let output = fs::File::options().create(true).append(true).open(&log)?;
            let status = command
                .args(["--quiet", "--yes"])
                .args(arguments)
                .stdin(Stdio::null())
                .stdout(output.try_clone()?)
                .stderr(output)
                .status()
                .context("cannot run apt-get")?;
            ensure!(
                status.success(),
                "apt-get {} failed; see {}",
                arguments.join(" "),
                log.display()
            );
            Ok(())
        };
        apt(&["update"])?;
        let mut install = vec!["--download-only", "install"];
        install.extend(contents.packages);
        apt(&install)?;
        for entry in fs::read_dir(base.join("cache/archives"))? {
            let package = entry?.path();
            if package.extension().is_none_or(|ending| ending != "deb") {
                continue;
            }
            let status = Command::new("dpkg")
                .arg("--extract")
                .arg(&package)
                .arg(&self.path)
                .status()
                .context("cannot run dpkg")?;
            ensure!(status.success(), "cannot unpack {}", package.display());
        }
        fs::remove_dir_all(base.join("cache"))?;
        fs::remove_dir_all(base.join("lists"))?;
        Ok(())
    }

    /// The directory that stands for `/`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A command that runs `program`, found in the root's usual directories, under the root's
    /// own loader and libraries.
    pub fn command(&self, program: &str) -> Result<Command> {
        let file = self.find(program)?;
        let mut command = Command::new(self.loader()?);
        command
            .arg("--library-path")
            .arg(self.library_path())
            .arg(file);
        Ok(command)
    }

    /// The file of `program` in the root's usual directories.
    pub fn find(&self, program: &str) -> Result<PathBuf> {
        // ovs-vswitchd lies in a directory of its own, to which Debian's alternatives point.
        for dir in [
            "usr/sbin",
            "usr/bin",
            "sbin",
            "bin",
            "usr/lib/openvswitch-switch",
        ] {
            let mut file = self.path.join(dir).join(program);
            // A link to an absolute path is meant from inside the root.
            if let Ok(to) = file.read_link()
                && let Ok(inside) = to.strip_prefix("/")
            {
                file = self.path.join(inside);
            }
            if file.is_file() {
                return Ok(file);
            }
        }
        bail!("{} holds no program `{program}`", self.path.display())
    }

    /// The dynamic loader of the root.
    pub fn loader(&self) -> Result<PathBuf> {
        for dir in [
            "lib64",
            "usr/lib64",
            "lib/x86_64-linux-gnu",
            "usr/lib/x86_64-linux-gnu",
        ] {
            let file = self.path.join(dir).join("ld-linux-x86-64.so.2");
            // A link to an absolute path would lead out of the root.
            if file.is_file() && !file.read_link().is_ok_and(|to| to.is_absolute()) {
                return Ok(file);
            }
        }
        bail!("{} holds no dynamic loader", self.path.display())
    }

    /// The directories that hold the root's libraries, as `LD_LIBRARY_PATH` writes them.
    pub fn library_path(&self) -> String {
        ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"]
            .map(|dir| self.path.join(dir).display().to_string())
            .join(":")
    }
}
