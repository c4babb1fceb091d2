use std::{io::Write, sync::Arc};

use super::*;

#[test]
fn kvm_takes_the_flag_of_the_processor() {
    for (cpuinfo, has) in [
        ("flags\t\t: fpu vmx sse\n", true),
        ("processor\t: 0\nflags\t\t: fpu svm\n", true),
        // What another line lists is something else.
        ("flags\t\t: fpu sse\nvmx flags\t: vnmi svm\n", false),
        ("flags\t\t: fpu svm_lock vmxoff\n", false),
        ("", false),
    ] {
        assert_eq!(has_virtualization(cpuinfo), has, "{cpuinfo}");
    }
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
