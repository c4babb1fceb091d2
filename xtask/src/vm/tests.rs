use std::{io::Write, sync::Arc};

use super::*;

#[test]
fn a_machine_boots_if_its_script_runs_in_time() {
    let log = std::env::temp_dir().join(format!("dnsflow-boots-{}", std::process::id()));
    let boots = |script: &str| {
        let mut command = Command::new("sh");
        let limit = Duration::from_millis(300);
        boots(command.args(["-c", script]), &log, limit).expect("sh runs")
    };
    assert!(boots(&format!("echo booting; echo {BOOTED}")));
    // The end of a machine that has booted is not waited for.
    assert!(boots(&format!("echo {BOOTED}; sleep 20")));
    assert!(!boots("echo booting; sleep 20"));
    assert!(!boots("exit 1"));
    fs::remove_file(log).expect("removed");
}

#[test]
fn lines_are_followed_to_the_last() {
    let path = std::env::temp_dir().join(format!("dnsflow-follow-{}", std::process::id()));
    let ended = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let (path, ended) = (path.clone(), Arc::clone(&ended));
        move || {
            let mut file = File::create(path).expect("a file");
            file.write_all(b"one\ntw").expect("written");
            sleep(POLL);
            file.write_all(b"o\r\nthree").expect("written");
            ended.store(true, Ordering::Release);
        }
    });
    let mut lines = Vec::new();
    follow(&path, &ended, &mut |line| lines.push(line.to_owned())).expect("it can be read");
    writer.join().expect("it wrote");
    fs::remove_file(&path).expect("removed");
    assert_eq!(lines, ["one", "two", "three"]);
}
