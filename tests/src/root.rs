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

use crate::process::run;

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
        let Contents { suite, packages } = contents;
        let packages = packages.join(" ");
        Self::unless_complete(path, suite, None, &packages, &say, |apt| {
            apt.download(contents.packages)
        })
    }

    /// The same for another architecture, by Debian's name. Its files are read: its programs do not run here.
    pub fn ensure_for(
        architecture: &str,
        path: &Path,
        contents: Contents<'_>,
        say: impl Fn(&str),
    ) -> Result<Self> {
        let Contents { suite, packages } = contents;
        let wanted = format!("{} for {architecture}", packages.join(" "));
        Self::unless_complete(path, suite, Some(architecture), &wanted, &say, |apt| {
            apt.download(packages)
        })
    }

    /// The root at `path`, with the one package that `metapackage` depends on and nothing else:
    /// of `linux-image-amd64`, the kernel that the release ships today.
    pub fn ensure_dependency(
        path: &Path,
        suite: &str,
        metapackage: &str,
        say: impl Fn(&str),
    ) -> Result<Self> {
        let wanted = format!("what {metapackage} depends on");
        Self::unless_complete(path, suite, None, &wanted, &say, |apt| {
            // By name and version: apt would take a pattern for every kernel it knows.
            let package = apt.only_dependency(metapackage)?;
            say(&format!("it is {package}"));
            apt.get(&["download", &package])
        })
    }

    fn unless_complete(
        path: &Path,
        suite: &str,
        architecture: Option<&str>,
        packages: &str,
        say: &dyn Fn(&str),
        download: impl FnOnce(&Apt) -> Result<()>,
    ) -> Result<Self> {
        let root = Self {
            path: std::path::absolute(path)?.join("root"),
        };
        let wanted = format!("{suite}: {packages}\n");
        let stamp = path.join(STAMP);
        if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
            return Ok(root);
        }
        say(&format!(
            "fetching Debian {suite} packages into {} (nothing is installed): {packages}",
            path.display(),
        ));
        if path.exists() {
            fs::remove_dir_all(path)
                .with_context(|| format!("cannot remove the old {}", path.display()))?;
        }
        let apt = Apt::new(path, suite, architecture)?;
        root.fetch(&apt, download).with_context(|| {
            format!(
                "cannot fetch Debian packages; it takes apt-get, dpkg and Debian's archive keyring, \
                 which other distributions package too; wanted: {packages}"
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

    fn fetch(&self, apt: &Apt, download: impl FnOnce(&Apt) -> Result<()>) -> Result<()> {
        fs::create_dir(&self.path)?;
        apt.get(&["update"])?;
        download(apt)?;
        for entry in fs::read_dir(apt.archives())? {
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
        apt.clean()
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

/// apt with lists, state and cache of its own.
#[derive(Debug)]
struct Apt {
    base: PathBuf,
    /// By Debian's name; `None` for this machine's.
    architecture: Option<String>,
}

impl Apt {
    fn new(base: &Path, suite: &str, architecture: Option<&str>) -> Result<Self> {
        let apt = Self {
            base: std::path::absolute(base)?,
            architecture: architecture.map(str::to_owned),
        };
        for dir in ["lists/partial", "etc/preferences.d"] {
            fs::create_dir_all(apt.base.join(dir))?;
        }
        fs::create_dir_all(apt.archives().join("partial"))?;
        fs::write(apt.base.join("status"), "")?;
        let mut sources = format!("deb [signed-by={KEYRING}] {MIRROR}/debian {suite} main\n");
        if suite != "sid" {
            sources += &format!(
                "deb [signed-by={KEYRING}] {MIRROR}/debian-security {suite}-security main\n"
            );
        }
        fs::write(apt.base.join("etc/sources.list"), sources)?;
        Ok(apt)
    }

    /// Where packages come to lie.
    fn archives(&self) -> PathBuf {
        self.base.join("cache/archives")
    }

    fn command(&self, program: &str) -> Command {
        let file = |name: &str| self.base.join(name).display().to_string();
        let mut command = Command::new(program);
        for (key, value) in [
            ("Dir::State", self.base.display().to_string()),
            ("Dir::State::lists", file("lists")),
            ("Dir::State::status", file("status")),
            ("Dir::Cache", file("cache")),
            ("Dir::Etc::sourcelist", file("etc/sources.list")),
            ("Dir::Etc::sourceparts", "/dev/null".into()),
            ("Dir::Etc::preferencesparts", file("etc/preferences.d")),
            ("APT::Install-Recommends", "false".into()),
            ("APT::Sandbox::User", "root".into()),
            ("Acquire::Retries", "3".into()),
        ] {
            command.arg("-o").arg(format!("{key}={value}"));
        }
        if let Some(architecture) = &self.architecture {
            for key in ["APT::Architecture", "APT::Architectures"] {
                command.arg("-o").arg(format!("{key}={architecture}"));
            }
        }
        // `download` writes to the working directory.
        command.current_dir(self.archives()).stdin(Stdio::null());
        command
    }

    fn download(&self, packages: &[&str]) -> Result<()> {
        let mut install = vec!["--download-only", "install"];
        install.extend(packages);
        self.get(&install)
    }

    fn get(&self, arguments: &[&str]) -> Result<()> {
        let log = self.base.join("apt.log");
        let output = fs::File::options().create(true).append(true).open(&log)?;
        let status = self
            .command("apt-get")
            .args(["--quiet", "--yes"])
            .args(arguments)
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
    }

    /// The one package that `metapackage` depends on, as `NAME=VERSION`.
    fn only_dependency(&self, metapackage: &str) -> Result<String> {
        let cache = |arguments: &[&str]| run(self.command("apt-cache").args(arguments));
        let text = cache(&["depends", "--important", metapackage])?;
        let mut names = text.lines().filter_map(|line| {
            let name = line.trim_start().strip_prefix("Depends: ")?;
            Some(name.trim())
        });
        let (Some(name), None) = (names.next(), names.next()) else {
            bail!("{metapackage} does not depend on exactly one package: {text}");
        };
        let text = cache(&["policy", name])?;
        let version = text
            .lines()
            .find_map(|line| line.trim().strip_prefix("Candidate: "))
            .filter(|version| *version != "(none)")
            .with_context(|| format!("apt knows no version of {name}: {text}"))?;
        Ok(format!("{name}={version}"))
    }

    /// Removes files that are not needed after unpacking.
    fn clean(&self) -> Result<()> {
        fs::remove_dir_all(self.base.join("cache"))?;
        fs::remove_dir_all(self.base.join("lists"))?;
        Ok(())
    }
}
