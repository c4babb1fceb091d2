use std::{
    fs,
    sync::Arc,
    sync::atomic::{AtomicU32, Ordering},
};

use tokio::{net::UnixListener, task::JoinHandle};

use super::*;

/// As Open vSwitch 3.1, 3.5 and 4.0 print it, with two datapaths.
const TEXT: &str = "netdev@ovs-netdev:\n  \
    flows         : (current 10025) (avg 10012) (max 10026) (limit 200000)\n  \
    dump duration : 36ms\n  \
    ufid enabled : true\n\n  \
    5: (keys 10030)\n\
    system@ovs-system:\n  \
    flows         : (current 3) (avg 2) (max 7) (limit 10000)\n  \
    dump duration : 41ms\n  \
    ufid enabled : true\n\n  \
    12: (keys 2)\n  \
    13: (keys 1)\n";

fn of(flows: u64, pass_ms: u64) -> Revalidation {
    Revalidation {
        flows,
        pass: Duration::from_millis(pass_ms),
    }
}

#[test]
fn the_most_of_all_datapaths_counts() {
    assert_eq!(Revalidation::parse(TEXT), Some(of(10_025, 41)));
}

#[test]
fn what_says_nothing_is_not_read() {
    let without = |key| {
        let lines = TEXT.lines().filter(|line| !line.contains(key));
        lines.collect::<Vec<_>>().join("\n")
    };
    for text in [
        String::new(),
        without("flows "),
        without("dump duration"),
        TEXT.replace("(current ", "(now "),
        TEXT.replace("41ms", "41 ms"),
        TEXT.replace("36ms", "99999999999999999999999ms"),
    ] {
        assert_eq!(Revalidation::parse(&text), None, "{text}");
    }
}

#[test]
fn more_to_revalidate_takes_longer_to_settle() {
    let ms = Duration::from_millis;
    assert_eq!(settle(of(0, 1)), PASS_BEGIN);
    assert_eq!(settle(of(25, 17)), ms(17));
    assert_eq!(
        settle(of(10_000, 4)),
        PASS_BEGIN + ms(30),
        "a pass between changes"
    );
    assert_eq!(settle(of(10_000, 94)), ms(94));
    assert!(settle(of(u64::MAX, u64::MAX)) > ms(1000));
}

/// A directory that goes with the test.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dnsflow-vswitchd-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).expect("a directory");
        Self(path)
    }

    /// A vswitchd with this process id, which gives each connection one of these answers after
    /// the other, then hangs up.
    fn vswitchd(&self, pid: u32, answers: &[&str]) -> JoinHandle<()> {
        fs::write(self.0.join("ovs-vswitchd.pid"), format!("{pid}\n")).expect("a file");
        let socket = self.0.join(format!("ovs-vswitchd.{pid}.ctl"));
        let listener = UnixListener::bind(socket).expect("a socket");
        let answers: Vec<String> = answers.iter().map(|answer| (*answer).to_owned()).collect();
        tokio::spawn(async move {
            loop {
                let (mut client, _) = listener.accept().await.expect("a client");
                for answer in &answers {
                    let mut request = [0; 100];
                    let Ok(len @ 1..) = client.read(&mut request).await else {
                        break;
                    };
                    let request = &request[..len];
                    let request: serde_json::Value =
                        serde_json::from_slice(request).expect("a request");
                    assert_eq!(request["method"], "upcall/show");
                    assert_eq!(request["params"], serde_json::json!([]));
                    // In two pieces.
                    let (first, second) = answer.split_at(answer.len() / 2);
                    client.write_all(first.as_bytes()).await.expect("sent");
                    tokio::task::yield_now().await;
                    client.write_all(second.as_bytes()).await.expect("sent");
                }
            }
        })
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).expect("removed");
    }
}

fn reply(text: &str) -> String {
    serde_json::json!({"id": 0, "result": text, "error": null}).to_string()
}

#[tokio::test]
async fn a_vswitchd_is_asked_again_over_the_same_connection() {
    let directory = Directory::new();
    let fewer = TEXT.replace("41ms", "7ms");
    let _vswitchd = directory.vswitchd(7, &[&reply(TEXT), &reply(&fewer)]);
    let mut vswitchd = Vswitchd::new(&directory.0);
    let first = vswitchd.revalidation().await.expect("an answer");
    let second = vswitchd.revalidation().await.expect("an answer");
    assert_eq!((first, second), (of(10_025, 41), of(10_025, 36)));
}

#[tokio::test]
async fn a_vswitchd_that_started_again_is_found() {
    let directory = Directory::new();
    let first = directory.vswitchd(7, &[&reply(TEXT)]);
    let mut vswitchd = Vswitchd::new(&directory.0);
    vswitchd.revalidation().await.expect("an answer");
    first.abort();
    let _second = directory.vswitchd(8, &[&reply(TEXT)]);
    vswitchd.revalidation().await.expect_err("it hung up");
    vswitchd.revalidation().await.expect("an answer");
}

#[tokio::test]
async fn what_is_no_answer_is_named() {
    let refused = r#"{"id":0,"error":"\"upcall/show\" is not a valid command\n"}"#;
    for (answer, expected) in [
        (refused.to_owned(), "Refused"),
        ("[]".to_owned(), "Framing"),
        (r#"{"result": 7}"#.to_owned(), "Json"),
        (reply("flows: many"), "Unreadable"),
    ] {
        let directory = Directory::new();
        let _vswitchd = directory.vswitchd(7, &[&answer]);
        let error = Vswitchd::new(&directory.0).revalidation().await;
        let error = format!("{:?}", error.expect_err("no answer"));
        assert!(error.starts_with(expected), "{error}");
    }
}

#[tokio::test]
async fn where_there_is_no_vswitchd_the_files_are_named() {
    let directory = Directory::new();
    let mut vswitchd = Vswitchd::new(&directory.0);
    let mut said = async || {
        let error = vswitchd.revalidation().await.expect_err("no vswitchd");
        with_causes(&error)
    };
    assert!(said().await.contains("ovs-vswitchd.pid: "));
    fs::write(directory.0.join("ovs-vswitchd.pid"), "none").expect("a file");
    assert!(
        said()
            .await
            .ends_with("ovs-vswitchd.pid holds no process id")
    );
    fs::write(directory.0.join("ovs-vswitchd.pid"), "9\n").expect("a file");
    assert!(said().await.contains("ovs-vswitchd.9.ctl: "));
}

#[test]
fn the_most_of_the_last_answers_counts() {
    let mut answers = Answers::default();
    assert_eq!(answers.add(of(100, 41)), of(100, 41));
    for _ in 1..ANSWERS {
        assert_eq!(answers.add(of(200, 1)), of(200, 41));
    }
    assert_eq!(answers.add(of(50, 2)), of(200, 2));
}

#[tokio::test]
async fn whoever_wants_it_gets_the_latest() {
    let directory = Directory::new();
    let settle_time = Arc::new(Settle::default());
    assert_eq!(settle_time.time(), SETTLE_UNKNOWN);
    let _vswitchd = directory.vswitchd(7, &[&reply(TEXT)]);
    let watched = Arc::clone(&settle_time);
    let socket = directory.0.join("br-int.mgmt");
    let watching = tokio::spawn(async move { watch(&socket, &watched).await });
    // After the answer, the vswitchd hangs up: then the default holds again.
    for expected in [settle(of(10_025, 41)), SETTLE_UNKNOWN] {
        let known = async {
            while settle_time.time() != expected {
                sleep(Duration::from_millis(1)).await;
            }
        };
        let in_time = timeout(Duration::from_secs(60), known).await;
        in_time.expect("it is told");
    }
    watching.abort();
}
