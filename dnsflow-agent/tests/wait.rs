//! `dnsflow wait` ends when the kubelet says so, and not before.

use std::{
    process::{Command, Stdio},
    thread::sleep,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

#[test]
fn it_waits_until_the_signal() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_dnsflow"))
        .arg("wait")
        .stdin(Stdio::null())
        .spawn()
        .expect("it starts");
    let status = format!("/proc/{}/status", child.id());
    // SIGINT and SIGTERM are signals 2 and 15: bits 1 and 14 of the mask of those it catches.
    loop {
        assert_eq!(child.try_wait().expect("a status"), None);
        let text = std::fs::read_to_string(&status).expect("it runs");
        let mask = text.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let mask = u64::from_str_radix(mask.expect("a mask").trim(), 16).expect("a number");
        if mask & 0x4002 == 0x4002 {
            break;
        }
        sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_child(&child), Signal::TERM).expect("it runs");
    assert_eq!(child.wait().expect("a status").code(), Some(0));
}
