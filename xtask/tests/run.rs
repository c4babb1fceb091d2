//! `xtask/run` on machines that lack something, played by programs that write down what they are
//! asked.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    process::{Command, Output},
};

use dnsflow_tests::support::workspace;

/// What the script takes from any Debian.
const FROM_HERE: &[&str] = &["sh", "dirname", "mktemp", "rm", "sed"];

/// A directory of programs: the machine's `PATH`.
struct Machine(PathBuf);

impl Machine {
    fn new(test: &str) -> Self {
        let name = format!("dnsflow-run-{test}-{}", std::process::id());
        let machine = Self(std::env::temp_dir().join(name));
        fs::create_dir(&machine.0).expect("a directory");
        for program in FROM_HERE {
            let file = ["/usr/bin", "/bin"].map(|dir| PathBuf::from(dir).join(program));
            let file = file.iter().find(|file| file.exists()).expect(program);
            std::os::unix::fs::symlink(file, machine.0.join(program)).expect("a link");
        }
        machine
    }

    fn with(self, program: &str, script: &str) -> Self {
        let file = self.0.join(program);
        fs::write(&file, format!("#!/bin/sh\n{script}\n")).expect("a file");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("a program");
        self
    }

    fn with_cargo(self, version: &str) -> Self {
        let script = format!(
            "if [ \"$1\" = --version ]; then echo 'cargo {version} (f2d3ce0bd 2026-03-21)'; else echo \"cargo $*\"; fi"
        );
        self.with("cargo", &script)
    }

    fn with_root(self) -> Self {
        self.with("id", "echo 0")
    }

    /// apt, which brings the C compiler.
    fn with_apt(self) -> Self {
        let cc = self.0.join("cc").display().to_string();
        self.with(
            "apt-get",
            &format!("echo \"apt-get $*\"\ncase $1 in install) echo '#!/bin/sh' >{cc}; /bin/chmod +x {cc} ;; esac"),
        )
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let script = workspace().expect("a workspace").join("xtask/run");
        let mut command = Command::new(script);
        command.args(arguments).env_clear().env("PATH", &self.0);
        // Its certificates are not what is tested here.
        command.env("SSL_CERT_FILE", "/dev/null");
        command.current_dir("/").output().expect("it runs")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("cannot remove {}: {error}", self.0.display());
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn where_all_is_there_it_goes_on_to_cargo() {
    let machine = Machine::new("all").with("cc", ":").with_cargo("1.95.0");
    let output = machine.run(&["test", "--ovn", "sid"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "cargo xtask test --ovn sid\n");
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn a_missing_compiler_comes_by_apt() {
    let machine = Machine::new("apt").with_cargo("1.100.0").with_root();
    let output = machine.with_apt().run(&["demo"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "cargo xtask demo\n");
    let said = text(&output.stderr);
    for part in [
        "missing: gcc libc6-dev",
        "apt-get update",
        "install --quiet --yes --no-install-recommends gcc libc6-dev",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn a_compiler_without_a_c_library_is_none() {
    let machine = Machine::new("libc").with_cargo("1.95.0").with_root();
    let output = machine.with("cc", "exit 1").with_apt().run(&["demo"]);
    assert!(text(&output.stderr).contains("missing: gcc libc6-dev"));
}

#[test]
fn what_cannot_be_installed_is_named() {
    let nobody = Machine::new("nobody")
        .with_cargo("1.95.0")
        .with("id", "echo 1000");
    let without_apt = Machine::new("no-apt").with_cargo("1.95.0").with_root();
    let without_cargo = Machine::new("no-cargo").with("cc", ":").with_root();
    let old = Machine::new("old").with("cc", ":").with_cargo("1.63.0");
    for (machine, says) in [
        (nobody.with_apt(), "as root: apt-get install gcc libc6-dev"),
        (without_apt, "there is no apt-get"),
        (
            without_cargo,
            "missing: cargo; get Rust 1.95 or newer from https://rustup.rs",
        ),
        (
            old,
            "cargo 1.63.0 is too old; with rustup: rustup update stable",
        ),
    ] {
        let output = machine.run(&["demo"]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(69), "{said}");
        assert!(said.contains(says), "{says}: {said}");
        assert_eq!(text(&output.stdout), "");
    }
}
