//! The watch of EgressFirewalls against an API server that does exactly what each test says.

mod fake;

use std::time::{Duration, Instant};

use dnsflow_agent::k8s::{ClientOptions, Objects, QUIET_TARGETS, watch};
use dnsflow_core::{Input, values::firewall::Destination};
use fake::{Kubeconfig, Log, PATIENCE, Server, list, status};
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};

/// A firewall that allows one name.
fn firewall(namespace: &str, version: &str, name: &str) -> Value {
    json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
        "metadata": {"namespace": namespace, "name": "default", "resourceVersion": version},
        "spec": {"egress": [{"type": "Allow", "to": {"dnsName": name}}]},
    })
}

/// A watch under way.
struct Watch {
    updates: mpsc::Receiver<Input>,
    kubeconfig: Kubeconfig,
    log: Log,
    task: JoinHandle<()>,
    _logging: tracing::subscriber::DefaultGuard,
}

impl Watch {
    fn start(address: Option<std::net::SocketAddr>) -> Self {
        Self::with_room(address, 16)
    }

    /// The receiver has room for so many updates that it has not taken yet.
    fn with_room(address: Option<std::net::SocketAddr>, room: usize) -> Self {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_env_filter(format!("info,{QUIET_TARGETS}"))
            .with_writer(move || writer.clone())
            .finish();
        let logging = tracing::subscriber::set_default(subscriber);
        let kubeconfig = Kubeconfig::new();
        if let Some(address) = address {
            kubeconfig.write(address);
        }
        let (sender, updates) = mpsc::channel(room);
        let options = ClientOptions {
            kubeconfig: Some(kubeconfig.path().to_owned()),
        };
        Self {
            updates,
            kubeconfig,
            log,
            task: tokio::spawn(watch(options, sender, Objects::default())),
            _logging: logging,
        }
    }

    /// The next update: `reset` where it is a complete list, then each firewall as
    /// `namespace(names)`, or `-namespace` where it went.
    async fn update(&mut self) -> String {
        let input = timeout(PATIENCE, self.updates.recv())
            .await
            .expect("an update in time")
            .expect("an update");
        let Input::Firewalls(update) = input else {
            panic!("not an update of firewalls: {input:?}");
        };
        let mut words: Vec<String> = Vec::new();
        if update.reset {
            words.push("reset".into());
        }
        for (id, firewall) in &update.firewalls {
            assert_eq!(id.name, "default");
            words.push(match firewall {
                Some(firewall) => {
                    let rules = firewall.rules.iter().map(|rule| match &rule.destination {
                        Destination::Name(name) => name.written().into_owned(),
                        other => format!("{other:?}"),
                    });
                    format!("{}({})", id.namespace, rules.collect::<Vec<_>>().join(" "))
                }
                None => format!("-{}", id.namespace),
            });
        }
        words.join(" ")
    }

    /// That nothing was sent. The server's next request or the next update, awaited before or
    /// after, gives this its meaning.
    fn no_update(&mut self) {
        if let Ok(input) = self.updates.try_recv() {
            panic!("an update: {input:?}");
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn start() -> (Server, Watch) {
    let server = Server::start("127.0.0.1:0").await;
    let watch = Watch::start(Some(server.address));
    (server, watch)
}

#[tokio::test]
async fn a_list_is_told_once_and_whole_then_each_change() {
    let (mut server, mut watch) = start().await;
    let mut page = list("", &[firewall("ns1", "5", "one.example")]);
    page["metadata"]["continue"] = json!("more");
    server.list().await.json(200, page).await;
    let second = server.list().await;
    assert!(second.target.contains("continue=more"), "{}", second.target);
    watch.no_update();
    second
        .items("10", &[firewall("ns2", "6", "two.example")])
        .await;
    assert_eq!(
        watch.update().await,
        "reset ns1(one.example) ns2(two.example)"
    );

    let mut events = server.watch("10").await.events().await;
    events
        .send("ADDED", firewall("ns3", "11", "three.example"))
        .await;
    assert_eq!(watch.update().await, "ns3(three.example)");
    events
        .send("MODIFIED", firewall("ns1", "12", "uno.example"))
        .await;
    assert_eq!(watch.update().await, "ns1(uno.example)");
    // ovn-kubernetes writes the status; nothing changes for the core.
    let mut status_only = firewall("ns1", "13", "uno.example");
    status_only["status"] = json!({"status": "EgressFirewall Rules applied", "messages": ["z: y"]});
    events.send("MODIFIED", status_only).await;
    events
        .send("DELETED", firewall("ns2", "14", "two.example"))
        .await;
    assert_eq!(watch.update().await, "-ns2");
    // The watch goes on where it was, and from where a bookmark says.
    let bookmark = json!({"kind": "EgressFirewall", "apiVersion": "k8s.ovn.org/v1",
        "metadata": {"resourceVersion": "500"}});
    events.send("BOOKMARK", bookmark).await;
    events.end().await;
    let mut events = server.watch("500").await.events().await;
    events
        .send("DELETED", firewall("ns9", "501", "never.known"))
        .await;
    events
        .send("DELETED", firewall("ns3", "502", "three.example"))
        .await;
    assert_eq!(watch.update().await, "-ns3");
    assert_eq!(watch.log.take(), "");
}

/// The receiver takes nothing for a while.
#[tokio::test]
async fn events_are_read_on_and_the_newest_state_of_each_firewall_waits_for_the_receiver() {
    let mut server = Server::start("127.0.0.1:0").await;
    let mut watch = Watch::with_room(Some(server.address), 1);
    server.list().await.items("10", &[]).await;
    let mut events = server.watch("10").await.events().await;
    for version in 11..31 {
        let busy = firewall("busy", &version.to_string(), &format!("n{version}.example"));
        events.send("MODIFIED", busy).await;
    }
    let other = firewall("other", "31", "other.example");
    events.send("ADDED", other).await;
    let last = firewall("busy", "32", "last.example");
    events.send("MODIFIED", last).await;
    events.end().await;
    // All were read.
    server.watch("32").await;
    for expected in ["reset", "busy(last.example)", "other(other.example)"] {
        assert_eq!(watch.update().await, expected);
    }
    watch.no_update();
}

#[tokio::test]
async fn what_ovn_kubernetes_could_not_apply_is_told() {
    let (mut server, mut watch) = start().await;
    let one = firewall("ns1", "5", "one.example");
    server
        .list()
        .await
        .items("10", std::slice::from_ref(&one))
        .await;
    assert_eq!(watch.update().await, "reset ns1(one.example)");
    let mut events = server.watch("10").await.events().await;
    let mut refused = one;
    let messages = json!([
        "n1: EgressFirewall Rules applied",
        "n2: EgressFirewall Rules not correctly applied: why"
    ]);
    refused["status"] = json!({"messages": messages});
    refused["metadata"]["resourceVersion"] = json!("11");
    events.send("MODIFIED", refused).await;
    let input = timeout(PATIENCE, watch.updates.recv()).await;
    let Some(Input::Firewalls(update)) = input.expect("an update in time") else {
        panic!("no update of firewalls");
    };
    let [(_, Some(firewall))] = &update.firewalls[..] else {
        panic!("{update:?}");
    };
    assert_eq!(firewall.refusal.as_deref(), Some("why"));
}

#[tokio::test]
async fn objects_of_a_list_are_read_as_they_come() {
    let (mut server, mut watch) = start().await;
    let mut strange = firewall("ns1", "5", "one.example");
    strange["metadata"]["annotations"] = json!({"a": "[],{}\"\\,é"});
    let mut large = firewall("ns2", "6", "two.example");
    large["metadata"]["managedFields"] =
        json!(vec![json!({"fieldsV1": {"f:a": [[], {}]}}); 20_000]);
    let items = [strange, large, firewall("ns3", "7", "three.example")];
    let half = server.list().await.half(list("10", &items)).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    watch.no_update();
    half.rest().await;
    assert_eq!(
        watch.update().await,
        "reset ns1(one.example) ns2(two.example) ns3(three.example)"
    );
    server.watch("10").await;
    assert_eq!(watch.log.take(), "");
}

#[tokio::test]
async fn a_list_that_breaks_off_tells_nothing() {
    let (mut server, mut watch) = start().await;
    let mut page = list("", &[firewall("ns1", "5", "one.example")]);
    page["metadata"]["continue"] = json!("more");
    let mut again = server.list().await;
    // The pauses without their jitter. The second one is twice as long.
    for pause_ms in [800, 1600] {
        again.json(200, page.clone()).await;
        let rest = server.list().await;
        let begin = Instant::now();
        rest.status(500).await;
        again = server.list().await;
        assert!(begin.elapsed() >= Duration::from_millis(pause_ms));
    }
    assert!(!again.target.contains("continue"), "{}", again.target);
    watch.no_update();
    again
        .items("10", &[firewall("ns2", "6", "two.example")])
        .await;
    assert_eq!(watch.update().await, "reset ns2(two.example)");
}

#[tokio::test]
async fn events_that_are_gone_are_made_up_for_by_a_new_list() {
    let (mut server, mut watch) = start().await;
    let both = [
        firewall("ns1", "5", "one.example"),
        firewall("ns2", "6", "two.example"),
    ];
    server.list().await.items("10", &both).await;
    assert_eq!(
        watch.update().await,
        "reset ns1(one.example) ns2(two.example)"
    );
    // As an event ...
    let mut events = server.watch("10").await.events().await;
    events.send("ERROR", status(410)).await;
    let list = server.list().await;
    watch.no_update();
    list.items("90", &[firewall("ns2", "80", "dos.example")])
        .await;
    assert_eq!(watch.update().await, "reset ns2(dos.example)");
    // ... and as the answer to the request.
    server.watch("90").await.status(410).await;
    let list = server.list().await;
    watch.no_update();
    list.items("99", &[]).await;
    assert_eq!(watch.update().await, "reset");
    server.watch("99").await;
    assert_eq!(watch.log.take(), "");
}

#[tokio::test]
async fn a_connection_cut_in_mid_event_loses_nothing() {
    let (mut server, mut watch) = start().await;
    server
        .list()
        .await
        .items("10", &[firewall("ns1", "5", "one.example")])
        .await;
    assert_eq!(watch.update().await, "reset ns1(one.example)");
    let mut events = server.watch("10").await.events().await;
    events
        .send("ADDED", firewall("ns2", "11", "two.example"))
        .await;
    assert_eq!(watch.update().await, "ns2(two.example)");
    let event = json!({"type": "DELETED", "object": firewall("ns1", "12", "one.example")});
    let event = event.to_string();
    events.raw(&event[..event.len() / 2]).await;
    drop(events);
    let mut events = server.watch("11").await.events().await;
    watch.no_update();
    events.raw(&format!("{event}\n")).await;
    assert_eq!(watch.update().await, "-ns1");
}

#[tokio::test]
async fn a_server_that_is_busy_or_slow_is_given_its_time() {
    let (mut server, mut watch) = start().await;
    server.list().await.status(429).await;
    let request = server.list().await;
    let log = watch.log.take();
    assert_eq!(log.matches("the error 429").count(), 1, "{log}");
    let one = [firewall("ns1", "5", "one.example")];
    let half = request.half(list("10", &one)).await;
    // Longer than the first pauses between attempts.
    tokio::time::sleep(Duration::from_secs(3)).await;
    watch.no_update();
    server.no_request();
    half.rest().await;
    assert_eq!(watch.update().await, "reset ns1(one.example)");

    // Busy with a watch, and slow in the midst of an event.
    server.watch("10").await.status(429).await;
    let mut events = server.watch("10").await.events().await;
    let event = json!({"type": "ADDED", "object": firewall("ns2", "11", "two.example")});
    let event = format!("{event}\n");
    let (first, rest) = event.split_at(event.len() / 2);
    events.raw(first).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    watch.no_update();
    server.no_request();
    events.raw(rest).await;
    assert_eq!(watch.update().await, "ns2(two.example)");
}

#[tokio::test]
async fn a_server_that_says_nothing_is_told_of_long_before_the_client_gives_up() {
    let (mut server, mut watch) = start().await;
    let request = server.list().await;
    let told = async {
        let mut log = String::new();
        while !log.contains("has not answered within 5 s") {
            tokio::time::sleep(Duration::from_millis(100)).await;
            log += &watch.log.take();
        }
    };
    // The client itself gives up after 30 s.
    timeout(Duration::from_secs(20), told)
        .await
        .expect("it is told");
    let one = [firewall("ns1", "5", "one.example")];
    request.items("10", &one).await;
    assert_eq!(watch.update().await, "reset ns1(one.example)");
    let log = watch.log.take();
    assert!(log.contains("answers again"), "{log}");
}

#[tokio::test]
async fn trouble_is_told_once_per_cause_and_takes_nothing_away() {
    let (mut server, mut watch) = start().await;
    server.list().await.status(404).await;
    server.list().await.status(404).await;
    let third = server.list().await;
    let log = watch.log.take();
    assert_eq!(
        log.matches("has no resource EgressFirewall").count(),
        1,
        "{log}"
    );
    assert!(log.contains(&format!("http://{}", server.address)), "{log}");
    assert!(log.contains("--kubeconfig"), "{log}");
    third.status(500).await;
    let fourth = server.list().await;
    let log = watch.log.take();
    assert_eq!(log.matches("the test says 500").count(), 1, "{log}");
    watch.no_update();
    fourth
        .items("10", &[firewall("ns1", "5", "one.example")])
        .await;
    assert_eq!(watch.update().await, "reset ns1(one.example)");
    assert!(watch.log.take().contains("answers again"));
    server.watch("10").await.status(403).await;
    server.watch("10").await;
    let log = watch.log.take();
    assert_eq!(log.matches("does not let dnsflow read").count(), 1, "{log}");
    watch.no_update();
}

#[tokio::test]
async fn one_strange_object_spoils_no_other() {
    let (mut server, mut watch) = start().await;
    let strange = |version: &str| {
        json!({"metadata": {"namespace": "odd", "name": "default", "resourceVersion": version},
            "spec": {"egress": "everything"}})
    };
    let items = [
        json!(null),
        json!({"metadata": 5}),
        strange("4"),
        firewall("ns1", "5", "one.example"),
        json!({"metadata": {"namespace": "ns2", "name": "other"}, "spec": {"egress": []}}),
    ];
    server.list().await.items("10", &items).await;
    assert_eq!(watch.update().await, "reset ns1(one.example)");
    let log = watch.log.take();
    assert!(log.contains(r#"object="odd/default""#), "{log}");
    assert!(log.contains(r#"object="ns2/other""#), "{log}");

    let mut events = server.watch("10").await.events().await;
    events
        .send("MODIFIED", firewall("odd", "11", "odd.example"))
        .await;
    assert_eq!(watch.update().await, "odd(odd.example)");
    assert!(
        watch
            .log
            .take()
            .contains("can use the EgressFirewall again")
    );
    // What was read once stays in force when the object becomes unreadable, ...
    events.send("MODIFIED", strange("12")).await;
    events.send("MODIFIED", strange("13")).await;
    events
        .send("ADDED", firewall("ns3", "14", "three.example"))
        .await;
    assert_eq!(watch.update().await, "ns3(three.example)");
    let log = watch.log.take();
    assert_eq!(log.matches("stays in force").count(), 1, "{log}");
    // ... also in a new list, ...
    events.send("ERROR", status(410)).await;
    server.list().await.items("20", &[strange("13")]).await;
    assert_eq!(watch.update().await, "reset odd(odd.example)");
    // ... until it is deleted.
    let mut events = server.watch("20").await.events().await;
    events.send("DELETED", strange("21")).await;
    assert_eq!(watch.update().await, "-odd");
}

#[tokio::test]
async fn a_server_that_is_away_is_waited_for() {
    let server = Server::start("127.0.0.1:0").await;
    let address = server.address;
    drop(server);
    tokio::task::yield_now().await;
    let mut watch = Watch::start(Some(address));
    let mut log = String::new();
    while !log.contains("cannot read EgressFirewalls") {
        tokio::time::sleep(Duration::from_millis(20)).await;
        log += &watch.log.take();
    }
    assert!(log.contains(&address.to_string()), "{log}");
    assert!(
        log.contains("--kubeconfig") && log.contains("refused"),
        "{log}"
    );
    let mut server = Server::start(&address.to_string()).await;
    server
        .list()
        .await
        .items("10", &[firewall("ns1", "5", "one.example")])
        .await;
    assert_eq!(watch.update().await, "reset ns1(one.example)");
    // Away again: what is known stays.
    let events = server.watch("10").await.events().await;
    drop((events, server));
    let mut log = String::new();
    while !log.contains("cannot read EgressFirewalls") {
        tokio::time::sleep(Duration::from_millis(20)).await;
        log += &watch.log.take();
    }
    watch.no_update();
}

#[tokio::test]
async fn the_kubeconfig_is_waited_for_and_read_again_when_it_is_refused() {
    let mut first = Server::start("127.0.0.1:0").await;
    let mut second = Server::start("127.0.0.1:0").await;
    let mut watch = Watch::start(None);
    let mut log = String::new();
    while !log.contains("cannot use --kubeconfig") {
        tokio::time::sleep(Duration::from_millis(20)).await;
        log += &watch.log.take();
    }
    watch.kubeconfig.write(first.address);
    let request = first.list().await;
    watch.kubeconfig.write(second.address);
    request.status(401).await;
    second.list().await.items("10", &[]).await;
    assert_eq!(watch.update().await, "reset");
}

/// The receiver takes nothing for longer than the pause before credentials are read again. If that pause is still ahead
/// then, it is behind the edits.
#[tokio::test]
async fn edits_do_not_wait_until_refused_credentials_are_read_again() {
    const PAUSE: Duration = Duration::from_secs(5);
    let mut server = Server::start("127.0.0.1:0").await;
    let mut watch = Watch::with_room(Some(server.address), 1);
    server.list().await.items("10", &[]).await;
    let mut events = server.watch("10").await.events().await;
    events
        .send("ADDED", firewall("ns1", "11", "one.example"))
        .await;
    events.end().await;
    server.watch("11").await.status(401).await;
    tokio::time::sleep(PAUSE + PAUSE / 5).await;
    let begin = Instant::now();
    assert_eq!(watch.update().await, "reset");
    assert_eq!(watch.update().await, "ns1(one.example)");
    server.list().await;
    assert!(begin.elapsed() >= PAUSE);
}

#[tokio::test]
async fn a_server_that_closes_each_watch_is_not_asked_without_a_pause() {
    let (mut server, mut watch) = start().await;
    let begin = Instant::now();
    server.list().await.items("10", &[]).await;
    assert_eq!(watch.update().await, "reset");
    for _ in 0..19 {
        server.watch("10").await.events().await.end().await;
    }
    let twenty = begin.elapsed();
    server.watch("10").await.events().await.end().await;
    let next = begin.elapsed() - twenty;
    assert!(
        next > twenty,
        "20 requests in {twenty:?}, the next after {next:?}"
    );
}

#[tokio::test]
async fn the_watch_ends_when_nobody_listens() {
    let (mut server, mut watch) = start().await;
    server.list().await.items("10", &[]).await;
    assert_eq!(watch.update().await, "reset");
    let _open = server.watch("10").await.events().await;
    watch.updates.close();
    timeout(PATIENCE, &mut watch.task)
        .await
        .expect("an end")
        .expect("no panic");
}
