use std::os::unix::fs::PermissionsExt as _;

use dnsflow_common::walk::Ports;
use dnsflow_core::{
    Timestamp,
    ask::{
        attempts::Attempts,
        history::Tried,
        view::{Reason, Verdict},
    },
    engine::{Config, Engine},
    io::report::Report,
    pods::recording,
    values::{connection::Attempt, flow::Protocol, ids::RecordingId, limits::Limit},
};
use tokio::{io::AsyncWriteExt as _, sync::mpsc, task::JoinHandle};

use super::*;
use crate::{
    asking::{
        Levels, ObjectProblem,
        client::{self, AskError},
        event::Event,
        history::{Known, PresentFirewall},
        learn::Line,
        report::NodeReport,
    },
    denied_connections::DenialCounts,
    inquiries::{self, Inquiry},
    k8s::reports::Reports,
    logging::Log,
    metrics::{Observed, Packets},
};

/// A server that asks `inquiries`.
fn server(
    inquiries: &Inquiries,
    inputs: mpsc::Sender<Input>,
    journal: &Arc<Journal>,
    slow: Slow,
) -> Server {
    let log = Log::writing_nowhere();
    let metrics = Metrics::new(
        inquiries.clone(),
        Box::new(Packets::default),
        Arc::clone(journal),
        log.lost_lines(),
        Observed::default(),
        DenialCounts::default(),
        Arc::default(),
    );
    let (inquiries, journal) = (inquiries.clone(), Arc::clone(journal));
    Server::new(inquiries, inputs, journal, metrics.into(), slow, log.view())
}

/// A server at a socket of its own, with an engine that nothing has happened to.
struct Running {
    directory: PathBuf,
    tasks: Vec<JoinHandle<()>>,
    journal: Arc<Journal>,
    inquiries: Inquiries,
    connections: Connections,
    objects: Objects,
}

impl Running {
    async fn start(name: &str) -> Self {
        let (inquiries, asked) = inquiries::channel();
        let journal = Arc::<Journal>::default();
        let directory = std::env::temp_dir().join(format!("dnsflow-{name}-{}", std::process::id()));
        let socket = directory.join("dnsflow.sock");
        let (inputs, given) = mpsc::channel(16);
        let connections = Connections::new();
        let objects = Objects::default();
        let slow = Slow {
            connections: connections.clone(),
            heard: Heard::new(Attempts::new(Ports::DNS)).0,
            queries: None,
            northbound: None,
            objects: objects.clone(),
        };
        let server = server(&inquiries, inputs, &journal, slow);
        let tasks = vec![
            tokio::spawn(hot_thread(asked, given)),
            tokio::spawn(server.serve(socket.clone())),
        ];
        while !socket.exists() {
            tokio::task::yield_now().await;
        }
        Self {
            directory,
            tasks,
            journal,
            inquiries,
            connections,
            objects,
        }
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("dnsflow.sock")
    }

    /// Whether the recording with this number goes on.
    async fn is_recorded(&self, number: u64) -> bool {
        let id = RecordingId(number);
        let asked = move |engine: &Engine, _| engine.view().recorded(id, 0, 0).is_some();
        self.inquiries.ask(asked).await.expect("the engine answers")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        fs::remove_dir_all(&self.directory).expect("the directory is there");
    }
}

async fn hot_thread(mut asked: mpsc::Receiver<Inquiry>, mut given: mpsc::Receiver<Input>) {
    let mut engine = Engine::new(Config::default());
    loop {
        tokio::select! {
            Some(inquiry) = asked.recv() => inquiry(&engine, Timestamp::default()),
            Some(input) = given.recv() => engine.handle(input, Timestamp::default()),
            else => return,
        }
    }
}

async fn refusal(socket: &Path, path: &str, parameters: &[(&str, String)]) -> String {
    match client::get::<serde_json::Value>(socket, path, parameters).await {
        Err(AskError::Refused(text)) => text,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_question_is_answered_and_only_root_can_ask() {
    let running = Running::start("answers").await;
    let socket = running.socket();
    let mode = |path: &Path| {
        fs::metadata(path)
            .expect("it is there")
            .permissions()
            .mode()
    };
    assert_eq!(mode(&socket) & 0o777, 0o600);
    assert_eq!(mode(&running.directory) & 0o777, 0o700);
    let status: Status = client::get(&socket, "/v1/status", &[])
        .await
        .expect("an answer");
    assert!(!status.node.is_ready);
    let pod = [
        ("namespace", "ns1".to_owned()),
        ("pod", "a b&c".to_owned()),
        ("target", "example.com:443".to_owned()),
    ];
    let explained: Vec<Explanation> = client::get(&socket, "/v1/explain", &pod)
        .await
        .expect("an answer");
    assert_eq!(explained, []);
    let mut entries = 0;
    let count = |_: EntryView| {
        entries += 1;
        Ok(())
    };
    client::lines(&socket, "/v1/cache", &[], count)
        .await
        .expect("an answer");
    assert_eq!(entries, 0);
}

#[tokio::test]
async fn the_status_has_objects_that_are_not_usable() {
    let running = Running::start("objects").await;
    let mut reports = Reports::new(running.objects.clone());
    let reasons = vec!["spec.egress is not a list; write a list of rules".to_owned()];
    reports.tell("ns1/default", false, reasons.clone());
    let status = client::get::<Status>(&running.socket(), "/v1/status", &[]).await;
    let problem = ObjectProblem {
        object: "ns1/default".to_owned(),
        is_in_force: false,
        reasons,
    };
    assert_eq!(status.expect("an answer").object_problems, [problem]);
}

#[tokio::test]
async fn a_list_that_the_hot_thread_does_not_complete_breaks_off() {
    let (inquiries, asked) = inquiries::channel();
    drop(asked);
    let slow = Slow {
        connections: Connections::new(),
        heard: Heard::new(Attempts::new(Ports::DNS)).0,
        queries: None,
        northbound: None,
        objects: Objects::default(),
    };
    let server = server(&inquiries, mpsc::channel(1).0, &Arc::default(), slow);
    let mut listing = Listing {
        server: Arc::new(server),
        filter: Filter::default(),
        ports: ["ns1_pod1".to_owned()].into(),
        addresses: VecDeque::new(),
    };
    assert_eq!(listing.next().await, Err(Unanswered));
    let parts = stream::iter([Ok(Bytes::from("{}\n")), Err(Unanswered)]);
    assert!(lines(parts).into_body().collect().await.is_err());
}

#[tokio::test]
async fn a_wrong_question_gets_a_reason() {
    let running = Running::start("refusals").await;
    let socket = running.socket();
    let one = |key, value: &str| [(key, value.to_owned())];
    let refused = refusal(&socket, "/v2", &[]).await;
    assert!(refused.contains("/v1/status"), "{refused}");
    let refused = refusal(&socket, "/v1/explain", &one("pod", "p")).await;
    assert_eq!(refused, "`namespace` is missing");
    let refused = refusal(&socket, "/v1/cache", &one("adress", "::1")).await;
    assert_eq!(refused, "there is no parameter `adress`");
    let refused = refusal(&socket, "/v1/cache", &one("address", "1.2.3")).await;
    assert!(refused.starts_with("`address`: "), "{refused}");
    let twice = [("name", "a".to_owned()), ("name", "b".to_owned())];
    assert_eq!(
        refusal(&socket, "/v1/cache", &twice).await,
        "`name` is given twice"
    );
}

#[tokio::test]
async fn what_a_bundle_needs_is_there() {
    let running = Running::start("bundle").await;
    let socket = running.socket();
    let metrics = client::text(&socket, "/v1/metrics", usize::MAX).await;
    let (metrics, is_cut) = metrics.expect("an answer");
    assert!(!is_cut);
    let metrics = String::from_utf8(metrics).expect("text");
    assert!(metrics.ends_with("# EOF\n"), "{metrics}");
    // Cut where a line ends.
    let (start, is_cut) = client::text(&socket, "/v1/metrics", 1000)
        .await
        .expect("an answer");
    assert!(is_cut && start.len() <= 1000 && start.ends_with(b"\n"));
    assert!(metrics.as_bytes().starts_with(&start));
    let options: AgentCommand = client::get(&socket, "/v1/options", &[])
        .await
        .expect("an answer");
    assert_eq!(options.arguments, std::env::args().collect::<Vec<_>>());
    let (log, _) = client::text(&socket, "/v1/log", 10)
        .await
        .expect("an answer");
    assert!(log.is_empty());
}

#[tokio::test]
async fn a_recording_ends_with_its_client_and_there_are_only_so_many() {
    let running = Running::start("learn").await;
    let socket = running.socket();
    let wanted = |for_s: &str| [("namespace", "ns1".to_owned()), ("for_s", for_s.to_owned())];
    let refused = refusal(&socket, "/v1/learn", &wanted("3601")).await;
    assert_eq!(refused, "`for_s`: not between 1 and 3600");
    let refused = refusal(&socket, "/v1/learn", &wanted("0")).await;
    assert_eq!(refused, "`for_s`: not between 1 and 3600");
    let parameters = wanted("60");
    let begin = || client::lines(&socket, "/v1/learn", &parameters, |_: Line| Ok(()));
    {
        let waiting: Vec<_> = (0..recording::RECORDINGS_MAX).map(|_| begin()).collect();
        let mut all = futures::future::join_all(waiting);
        let parameters = wanted("1");
        let more = async {
            for number in 0..recording::RECORDINGS_MAX as u64 {
                while !running.is_recorded(number).await {
                    sleep(Duration::from_millis(1)).await;
                }
            }
            client::lines(&socket, "/v1/learn", &parameters, |_: Line| Ok(())).await
        };
        let refused = tokio::select! {
            ended = &mut all => panic!("{ended:?}"),
            refused = more => refused,
        };
        let refused = refused.expect_err("there is no room").to_string();
        assert_eq!(refused, "the agent says: 4 recordings go on already");
    }
    // The clients have gone.
    let mut lines = Vec::new();
    let take = |line: Line| {
        lines.push(line);
        Ok(())
    };
    let answered = client::lines(&socket, "/v1/learn", &wanted("1"), take).await;
    answered.expect("there is room again");
    assert_eq!(
        lines,
        [Line::End {
            left_out: 0,
            by_address: Vec::new()
        }]
    );
}

#[tokio::test]
async fn only_the_log_level_can_be_changed() {
    let running = Running::start("put").await;
    let socket = running.socket();
    let levels: Levels = client::get(&socket, "/v1/log-level", &[])
        .await
        .expect("an answer");
    assert_eq!(levels.level, "info");
    let level = |text: &str| [("level", text.to_owned())];
    let put = async |path: &str, parameters: &[(&str, String)]| {
        let answer = client::put::<Levels>(&socket, path, parameters).await;
        answer.map_err(|error| error.to_string())
    };
    let refused = put("/v1/log-level", &level("loud"))
        .await
        .expect_err("no level");
    assert!(
        refused.contains("`loud` is neither a level (off, error"),
        "{refused}"
    );
    let refused = put("/v1/status", &[]).await.expect_err("it is only read");
    assert_eq!(refused, "the agent says: GET only");
    // There is no log here whose level could change.
    let refused = put("/v1/log-level", &level("warn"))
        .await
        .expect_err("no log");
    assert_eq!(refused, "the agent says: the log has ended");
}

#[tokio::test]
async fn events_are_followed() {
    let running = Running::start("events").await;
    let socket = running.socket();
    running.journal.note(Report::Restored { flows: 1 });
    let (sender, mut events) = mpsc::unbounded_channel();
    let follow = [("follow", "true".to_owned())];
    let each = |event: Event| sender.send(event).map_err(io::Error::other);
    let following = client::lines(&socket, "/v1/events", &follow, each);
    let expected = async {
        assert_eq!(events.recv().await.expect("an event").text, "1 flows");
        running.journal.note(Report::Restored { flows: 2 });
        assert_eq!(events.recv().await.expect("an event").text, "2 flows");
    };
    tokio::select! {
        ended = following => panic!("{ended:?}"),
        () = expected => {}
    }
}

#[tokio::test]
async fn events_are_filtered_before_they_are_cut() {
    let running = Running::start("filter").await;
    let socket = running.socket();
    let limit = |pod: &str| Report::LimitReached {
        namespace: "ns1".into(),
        port: format!("ns1_{pod}"),
        limit: Limit::AddressesOfPod,
        max: 1,
    };
    // More than is read at once.
    for count in 0..100 {
        running.journal.note(limit(&format!("pod{count}")));
        running.journal.note(Report::Restored { flows: count });
    }
    let ask = async |parameters: &[(&str, &str)]| {
        let parameters = parameters.iter();
        let parameters: Vec<_> = parameters
            .map(|(key, value)| (*key, (*value).to_owned()))
            .collect();
        let mut pods = Vec::new();
        let take = |event: Event| {
            pods.push(event.pod.unwrap_or(event.event));
            Ok(())
        };
        let asked = client::lines(&socket, "/v1/events", &parameters, take).await;
        asked.map(|()| pods).map_err(|error| error.to_string())
    };
    let limits = ("event", "limit_reached");
    assert_eq!(
        ask(&[limits, ("last", "2")]).await,
        Ok(vec!["pod98".to_owned(), "pod99".to_owned()])
    );
    assert_eq!(ask(&[limits, ("last", "0")]).await, Ok(Vec::new()));
    assert_eq!(
        ask(&[("pod", "pod7"), ("namespace", "ns1")]).await,
        Ok(vec!["pod7".to_owned()])
    );
    let all = ask(&[("since_ms", "3600000")]).await;
    assert_eq!(all.map(|all| all.len()), Ok(200));
    let refused = ask(&[("event", "blocked")]).await.expect_err("no kind");
    let kinds = "the agent says: `event`: no kind of event; there are opened, would_open, denied, ";
    assert!(refused.starts_with(kinds), "{refused}");
}

#[tokio::test]
async fn clients_beyond_the_limit_are_told_so() {
    let running = Running::start("limit").await;
    let socket = running.socket();
    let mut waiting = Vec::new();
    for _ in 0..CLIENTS_MAX {
        let mut client = UnixStream::connect(&socket).await.expect("there is room");
        client.write_all(b"GET /v1").await.expect("the agent reads");
        waiting.push(client);
    }
    assert_eq!(
        refusal(&socket, "/v1/status", &[]).await,
        "too many clients"
    );
    waiting.clear();
    let answered = async {
        loop {
            if client::get::<Status>(&socket, "/v1/status", &[])
                .await
                .is_ok()
            {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(REQUEST_LIMIT, answered)
        .await
        .expect("who has gone makes room");
}

#[tokio::test]
async fn what_an_ended_agent_has_left_is_replaced_and_nothing_else() {
    let running = Running::start("leftover").await;
    let socket = running.socket();
    let in_use = listen_at(&socket).expect_err("an agent answers");
    assert_eq!(in_use.kind(), io::ErrorKind::AddrInUse);
    let leftover = running.directory.join("leftover.sock");
    drop(listen_at(&leftover).expect("nothing is there"));
    assert!(leftover.exists());
    drop(listen_at(&leftover).expect("nobody answers"));
    let file = running.directory.join("file");
    fs::write(&file, "precious").expect("there is room");
    let refused = listen_at(&file).expect_err("it is no socket");
    assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fs::read(&file).expect("it is there"), b"precious");
    let asked = client::get::<Status>(&leftover, "/v1/status", &[]).await;
    assert!(matches!(asked, Err(AskError::Connect { .. })), "{asked:?}");
}

#[tokio::test]
async fn there_is_no_report_on_a_namespace_that_nobody_knows() {
    let running = Running::start("report").await;
    let socket = running.socket();
    let of_all = NodeReport::ask(&socket, None).await.expect("an answer");
    assert!(of_all.is_some());
    let of_none = NodeReport::ask(&socket, Some("nope")).await;
    assert_eq!(of_none.expect("an answer"), None);
}

#[tokio::test]
async fn the_history_of_a_namespace_comes_with_its_extent() {
    let running = Running::start("history").await;
    let socket = running.socket();
    let present: PresentFirewall =
        client::get(&socket, "/v1/firewall", &[("namespace", "ns1".to_owned())])
            .await
            .expect("an answer");
    assert_eq!((present.resource, present.subdomains), (None, true));
    let refused = refusal(&socket, "/v1/firewall", &[]).await;
    assert_eq!(refused, "`namespace` is missing");
    for (namespace, port) in (0..70).map(|port| ("ns1", port)).chain([("ns2", 1)]) {
        running.connections.note(Tried {
            namespace: namespace.to_owned(),
            port: format!("{namespace}_pod1"),
            attempt: Attempt {
                ifindex: 7,
                protocol: Protocol::Udp,
                address: [203, 0, 113, 1].into(),
                port: port + if namespace == "ns1" { 0 } else { 1000 },
                at: Timestamp::default(),
            },
            names: vec!["a.test".parse().expect("a name")],
            verdict: Verdict::Blocked,
            reason: Reason::WrongPort,
            rule: Some(1),
            is_refused: false,
            is_node: false,
        });
    }
    let known = Known::ask(&socket, Some("ns1")).await.expect("an answer");
    assert_eq!(known.connections.len(), 70);
    assert_eq!(known.forgotten, 0);
    let one = &known.connections[69];
    assert_eq!(
        (&*one.pod, one.port, &*one.names),
        ("pod1", 69, &["a.test".to_owned()][..])
    );
    let all = Known::ask(&socket, None).await.expect("an answer");
    assert_eq!(all.connections.len(), 71);
}
