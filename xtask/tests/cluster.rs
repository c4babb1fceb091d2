//! `cargo xtask cluster` on a machine without its programs.

use std::process::{Command, Stdio};

use dnsflow_tests::support::not_run;

#[test]
fn without_its_programs_nothing_is_done() {
    if !rustix::process::geteuid().is_root() {
        not_run("xtask::cluster", "it needs root");
        return;
    }
    for options in [
        &[][..],
        &["--vm", "--gateway", "local", "--runs", "8"],
        &["--chart", "--without-story", "--runs", "0"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
            .arg("cluster")
            .args(options)
            .env_remove("CLUSTER_BIN")
            .stdin(Stdio::null())
            .output()
            .expect("xtask runs");
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(69), "{printed}");
        for part in [
            "not run: a cluster takes $CLUSTER_BIN",
            "kube-apiserver",
            "ovn-central",
            "nothing was done",
        ] {
            assert!(printed.contains(part), "{part}: {printed}");
        }
    }
}
