use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
    sync::atomic::{AtomicU32, Ordering},
};

use tokio::{net::UnixListener, task::JoinHandle};

use super::*;
use dnsflow_core::values::{connection::Path, flow::Addresses};

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
fn the_datapath_of_a_bridge_is_found_among_others() {
    let text = "netdev@ovs-netdev: hit:12 missed:3\n  br-ex:\n    br-ex 65534/1: (tap)\n\
                system@ovs-system: hit:1 missed:2\n  br-int:\n    br-int: 65534/2: (internal)\n";
    assert_eq!(
        datapath_of(text, "br-ex").as_deref(),
        Some("netdev@ovs-netdev")
    );
    assert_eq!(
        datapath_of(text, "br-int").as_deref(),
        Some("system@ovs-system")
    );
    assert_eq!(datapath_of(text, "br-none"), None);
    assert_eq!(datapath_of("", "br-int"), None);
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
                    let mut request = [0; 200];
                    let Ok(len @ 1..) = client.read(&mut request).await else {
                        break;
                    };
                    let request = &request[..len];
                    let request: serde_json::Value =
                        serde_json::from_slice(request).expect("a request");
                    if request["method"] == "upcall/show" {
                        assert_eq!(request["params"], serde_json::json!([]));
                    }
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
    vswitchd.revalidation().await.expect("an answer");
}

/// A reply that refuses.
const REFUSED: &str = r#"{"id":0,"error":"\"upcall/show\" is not a valid command\n"}"#;

#[tokio::test]
async fn what_is_refused_is_not_asked_again() {
    let directory = Directory::new();
    let _vswitchd = directory.vswitchd(7, &[&reply(TEXT), REFUSED]);
    let mut vswitchd = Vswitchd::new(&directory.0);
    vswitchd.revalidation().await.expect("an answer");
    let refused = vswitchd.revalidation().await;
    assert!(matches!(refused, Err(VswitchdError::Refused { .. })));
    vswitchd.revalidation().await.expect("an answer");
}

#[tokio::test]
async fn what_is_no_answer_is_named() {
    for (answer, expected) in [
        (REFUSED.to_owned(), "Refused"),
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

/// A megaflow that drops.
const DROPS: &str = "recirc_id(0),in_port(p1),eth(),eth_type(0x0800),\
    ipv4(src=10.244.0.5,dst=203.0.113.2,frag=no), packets:0, bytes:0, used:never, actions:drop\n";

/// Megaflows drop on these paths, and on no other one.
fn found_on(dropping: Vec<Path>) -> Looked {
    Looked {
        dropping,
        unknown: Vec::new(),
    }
}

const DATAPATHS: &str = "netdev@ovs-netdev: hit:1 missed:2\n  br-int:\n    p1 1/2: (system)\n";

fn path(to: u8) -> Path {
    Path {
        interface: "p1".into(),
        addresses: Addresses::V4 {
            src: Ipv4Addr::new(10, 244, 0, 5),
            dst: Ipv4Addr::new(203, 0, 113, to),
        },
    }
}

#[tokio::test]
async fn a_look_tells_the_paths_on_which_a_megaflow_drops() {
    let directory = Directory::new();
    let vswitchd = directory.vswitchd(7, &[&reply(DATAPATHS), &reply(DROPS), &reply("")]);
    let (looks, looks_to_do) = mpsc::channel(1);
    let (inputs, mut found) = mpsc::channel(1);
    let socket = directory.0.join("br-int.mgmt");
    let watching = tokio::spawn(async move {
        watch(&socket, &Estimate::default(), looks_to_do, inputs).await;
    });
    let mut look = async || {
        let asked = looks.send(vec![path(1), path(2)]).await;
        asked.expect("somebody looks");
        let input = timeout(Duration::from_secs(60), found.recv()).await;
        let Some(Input::Dropping(looked)) = input.expect("in time") else {
            panic!("another input");
        };
        looked
    };
    assert_eq!(look().await, found_on(vec![path(2)]));
    assert_eq!(look().await, found_on(vec![]));
    vswitchd.abort();
    let unknown = Looked::unknown(vec![path(1), path(2)]);
    assert_eq!(look().await, unknown, "it is gone");
    watching.abort();
}

/// The longest answer in the tests with [`Datapath`].
const ANSWER_MAX: usize = 1000;

/// A vswitchd whose datapath answers each filter: `None` refuses it, and `too_much()` exceeds the longest answer.
struct Datapath {
    _directory: Directory,
    watcher: Watcher,
    filters: mpsc::UnboundedReceiver<String>,
    vswitchd: JoinHandle<()>,
}

impl Datapath {
    fn new(answer: impl Fn(&str) -> Option<String> + Send + 'static) -> Self {
        let directory = Directory::new();
        fs::write(directory.0.join("ovs-vswitchd.pid"), "7\n").expect("a file");
        let socket = directory.0.join("ovs-vswitchd.7.ctl");
        let listener = UnixListener::bind(socket).expect("a socket");
        let (asked, filters) = mpsc::unbounded_channel();
        let vswitchd = tokio::spawn(async move {
            loop {
                let (mut client, _) = listener.accept().await.expect("a client");
                let mut request = [0; 200];
                while let Ok(len @ 1..) = client.read(&mut request).await {
                    let request: serde_json::Value =
                        serde_json::from_slice(&request[..len]).expect("a request");
                    let text = match request["params"][2].as_str() {
                        None => Some(DATAPATHS.to_owned()),
                        Some(filter) => {
                            asked.send(filter.to_owned()).expect("it is read");
                            answer(filter)
                        }
                    };
                    let text = text.map_or_else(|| REFUSED.to_owned(), |text| reply(&text));
                    // The agent reads no more than it takes.
                    let _ = client.write_all(text.as_bytes()).await;
                }
            }
        });
        let mut watcher = Watcher::new(&directory.0, "br-int");
        watcher.vswitchd.answer_max_bytes = ANSWER_MAX;
        watcher.look_max = Duration::MAX;
        Self {
            _directory: directory,
            watcher,
            filters,
            vswitchd,
        }
    }

    /// The filters that it was asked for since the last call.
    fn filters(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.filters.try_recv().ok()).collect()
    }
}

impl Drop for Datapath {
    fn drop(&mut self) {
        self.vswitchd.abort();
    }
}

fn too_much() -> Option<String> {
    Some(" ".repeat(ANSWER_MAX))
}

fn path_at(interface: &str, to: u8) -> Path {
    Path {
        interface: interface.into(),
        ..path(to)
    }
}

/// One pod has more megaflows than an answer has room for. Another one waits in the same looks.
#[tokio::test]
async fn a_pod_with_too_many_megaflows_is_not_looked_at_and_the_others_are() {
    let mut datapath = Datapath::new(|filter| match filter.contains("in_port=p2") {
        true => Some(DROPS.replace("p1", "p2")),
        false => too_much(),
    });
    let paths = [path(1), path_at("p2", 2), path_at("p2", 3)];
    for _ in 0..2 {
        let mut looked = datapath.watcher.look(paths.to_vec()).await;
        looked.unknown.sort();
        let expected = Looked {
            dropping: vec![path_at("p2", 2)],
            unknown: vec![path(1)],
        };
        assert_eq!(looked, expected);
    }
    let expected = [
        "filter=ip",
        "filter=ip,in_port=p1,nw_dst=203.0.113.1",
        "filter=ip,in_port=p2",
        "filter=ip,in_port=p2",
    ];
    assert_eq!(
        datapath.filters(),
        expected,
        "what is too long is asked for once"
    );
}

/// One pod has too many megaflows, and another one is gone.
#[tokio::test]
async fn of_a_pod_that_is_gone_alone_nothing_is_known() {
    let mut datapath = Datapath::new(|filter| {
        if filter.contains("in_port=gone") {
            None
        } else if filter.contains("in_port=p3") {
            Some(DROPS.replace("p1", "p3"))
        } else {
            too_much()
        }
    });
    let paths = [path_at("gone", 2), path(1), path_at("p3", 2)];
    let expected = Looked {
        dropping: vec![path_at("p3", 2)],
        unknown: vec![path_at("gone", 2), path(1)],
    };
    assert_eq!(datapath.watcher.look(paths.to_vec()).await, expected);
}

/// One pod has too many megaflows, and dumps take longer than a look has time for. Some paths of each look are unknown, and
/// they are of other pods each time.
#[tokio::test]
async fn a_look_at_one_pod_after_the_other_ends_in_time_and_goes_on_behind() {
    let mut datapath = Datapath::new(|filter| match filter.split_once("in_port=") {
        None => too_much(),
        Some((_, port)) => Some(DROPS.replace("p1", &port[..2])),
    });
    let pods = ["p1", "p2", "p3"];
    let paths = pods.map(|pod| path_at(pod, 2));
    datapath.watcher.look_max = Duration::ZERO;
    for pod in ["p1", "p2", "p3", "p1"] {
        let mut looked = datapath.watcher.look(paths.to_vec()).await;
        looked.unknown.sort();
        let (dropping, unknown) = paths
            .iter()
            .cloned()
            .partition(|path| *path.interface == *pod);
        assert_eq!(looked, Looked { dropping, unknown });
    }
    datapath.watcher.look_max = Duration::MAX;
    let looked = datapath.watcher.look(paths.to_vec()).await;
    assert_eq!(looked.unknown, [], "there is time for all");
    assert_eq!(looked.dropping.len(), paths.len());
}

/// Pods have addresses of both IP versions.
#[tokio::test]
async fn one_dump_of_each_ip_version_serves_all_pods() {
    let mut datapath = Datapath::new(|_| Some(String::new()));
    let v6_at = |interface: &str| Path {
        interface: interface.into(),
        addresses: Addresses::V6 {
            src: Ipv6Addr::LOCALHOST,
            dst: Ipv6Addr::UNSPECIFIED,
        },
    };
    let of_pod = |pod: &str| [path_at(pod, 1), path_at(pod, 2), v6_at(pod)];
    let paths = [of_pod("p1"), of_pod("p2")].concat();
    assert_eq!(datapath.watcher.look(paths).await, Looked::default());
    assert_eq!(datapath.filters(), ["filter=ip", "filter=ipv6,ipv6_dst=::"]);
}

#[tokio::test]
async fn whoever_wants_it_gets_the_latest() {
    let directory = Directory::new();
    let estimate = Arc::new(Estimate::default());
    assert_eq!(estimate.time(), passes::UNKNOWN);
    let vswitchd = directory.vswitchd(7, &[&reply(TEXT)]);
    let watched = Arc::clone(&estimate);
    let socket = directory.0.join("br-int.mgmt");
    let (_looks, looks_to_do) = mpsc::channel(1);
    let (inputs, _found) = mpsc::channel(1);
    let watching = tokio::spawn(async move { watch(&socket, &watched, looks_to_do, inputs).await });
    let mut known = Passes::default();
    known.note(of(10_025, 41), false, Timestamp::default());
    for expected in [known.estimate(), passes::UNKNOWN] {
        let known = async {
            while estimate.time() != expected {
                sleep(Duration::from_millis(1)).await;
            }
        };
        let in_time = timeout(Duration::from_secs(60), known).await;
        in_time.expect("it is told");
        // Without a vswitchd, the default holds again.
        vswitchd.abort();
    }
    watching.abort();
}
