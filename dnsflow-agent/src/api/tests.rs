use http_body_util::BodyExt as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use dnsflow_common::reason::Reason;
use dnsflow_core::engine::{Config, Engine};

use super::*;
use crate::{
    denied_connections::DenialCounts,
    inquiries,
    journal::Journal,
    logging::Log,
    metrics::{Observed, Packets},
};

/// A healthy agent with an engine that nothing has happened to.
fn served() -> Served {
    let health = Health::default();
    health.turn(now());
    let (inquiries, mut asked) = inquiries::channel();
    tokio::spawn(async move {
        let engine = Engine::new(Config::default());
        while let Some(inquiry) = asked.recv().await {
            inquiry(&engine, now());
        }
    });
    let journal = Arc::<Journal>::default();
    let packets = Box::new(|| Packets {
        to_pods: vec![(Reason::Captured, 7)],
        from_pods: Vec::new(),
        lost: Vec::new(),
    });
    let lost = Log::nothing_lost();
    let metrics = Metrics::new(
        inquiries,
        packets,
        journal,
        lost,
        Observed::default(),
        DenialCounts::default(),
        Arc::default(),
    );
    Served {
        health: Arc::new(health),
        metrics: Arc::new(metrics),
    }
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::default() + Duration::from_secs(1_000_000 + seconds)
}

async fn answer(health: &Health, path: &str, now: Timestamp) -> (u16, String) {
    let response = respond(&Method::GET, path, health, now);
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.expect("a body");
    let text = String::from_utf8(body.to_bytes().to_vec()).expect("text");
    (status, text.trim_end().to_owned())
}

#[tokio::test]
async fn ready_means_connected_synced_and_moving() {
    let health = Health::default();
    health.turn(at(0));
    let mut expected = vec!["no connection to the switch"];
    assert_eq!(answer(&health, "/livez", at(0)).await, (200, "ok".into()));
    for step in 0..3 {
        let (status, text) = answer(&health, "/readyz", at(0)).await;
        assert_eq!((status, Some(&*text)), (503, expected.pop()));
        match step {
            0 => {
                health.connected(true);
                expected.push("not every source was read yet");
            }
            1 => {
                health.synced();
                expected.push("no DNS server is trusted; see --dns-service");
            }
            _ => health.trusting(true),
        }
    }
    assert_eq!(
        answer(&health, "/readyz", at(180)).await,
        (200, "ok".into())
    );
    for path in ["/livez", "/readyz"] {
        let stuck = (503, "the hot thread is stuck".into());
        assert_eq!(answer(&health, path, at(181)).await, stuck);
    }
    health.turn(at(181));
    // The switch goes, and comes back.
    health.connected(false);
    assert_eq!(answer(&health, "/readyz", at(181)).await.0, 503);
    assert_eq!(answer(&health, "/livez", at(181)).await.0, 200);
    health.connected(true);
    assert_eq!(answer(&health, "/readyz", at(181)).await.0, 200);
}

#[tokio::test]
async fn a_database_that_is_not_read_any_more_is_a_reason_with_its_remedy() {
    let health = Health::default();
    health.turn(at(0));
    health.connected(true);
    let table = LargeTable {
        database: "D",
        table: "T",
        limit: "2 rows".into(),
        purpose: "tests",
        remedy: "remove rows",
        is_left_out: false,
    };
    // Before everything was read, and afterwards.
    for _ in 0..2 {
        health.too_large(&table);
        assert_eq!(
            answer(&health, "/readyz", at(0)).await,
            (503, table.to_string())
        );
        assert_eq!(answer(&health, "/livez", at(0)).await.0, 200);
        health.synced();
        health.trusting(true);
        health.read_again("D", "T");
        assert_eq!(answer(&health, "/readyz", at(0)).await.0, 200);
    }
}

#[tokio::test]
async fn nothing_else_is_there() {
    let health = Health::default();
    assert_eq!(answer(&health, "/", at(0)).await.0, 404);
    let post = respond(&Method::POST, "/livez", &health, at(0));
    assert_eq!(post.status(), 405);
}

#[tokio::test]
async fn it_answers_over_a_socket_and_survives_garbage() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let served = served();
    let task = tokio::spawn(async move { accept(listener, &served).await });
    for (request, expected) in [
        ("GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", "HTTP/1.1 200"),
        (
            "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-type: application/openmetrics-text; version=1.0.0",
        ),
        ("nonsense\r\n\r\n", "HTTP/1.1 400"),
        ("GET /readyz HTTP/1.0\r\n\r\n", "HTTP/1.0 503"),
    ] {
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        stream
            .write_all(request.as_bytes())
            .await
            .expect("it is read");
        let mut response = String::new();
        stream
            .read_to_string(&mut response)
            .await
            .expect("an end of the connection");
        assert!(response.starts_with(expected), "{response}");
    }
    task.abort();
}

/// What a probe of the kubelet reads.
async fn probe(address: SocketAddr) -> String {
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    let request = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n";
    stream.write_all(request).await.expect("it is read");
    let mut response = String::new();
    let read = stream.read_to_string(&mut response).await;
    read.map_or_else(|error| error.to_string(), |_| response)
}

#[tokio::test]
async fn a_thousand_silent_connections_keep_no_probe_from_its_answer() {
    let files = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: files.maximum,
        ..files
    };
    setrlimit(Resource::Nofile, most).expect("up to the maximum");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let served = served();
    let task = tokio::spawn(async move { accept(listener, &served).await });
    let mut silent = Vec::new();
    for number in 0..1000 {
        silent.push(TcpStream::connect(address).await.expect("a connection"));
        if number % 50 == 0 {
            let response = probe(address).await;
            assert!(response.starts_with("HTTP/1.1 200"), "{number}: {response}");
        }
    }
    let response = probe(address).await;
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    // All but the last ones were closed.
    let mut closed = 0;
    for stream in &mut silent[..1000 - CONNECTIONS_MAX] {
        let end = stream.read(&mut [0]).await;
        closed += usize::from(end.is_ok_and(|len| len == 0));
    }
    assert_eq!(closed, 1000 - CONNECTIONS_MAX);
    task.abort();
}

#[tokio::test]
async fn a_scrape_has_every_kind_of_metric() {
    let response = scrape(&served().metrics).await;
    let body = response.into_body().collect().await.expect("a body");
    let text = String::from_utf8(body.to_bytes().to_vec()).expect("text");
    for line in [
        "dnsflow_ready 0",
        "dnsflow_answers_total{result=\"opening\"} 0",
        "dnsflow_packets_to_pods_total{reason=\"captured\"} 7",
        "dnsflow_activation_seconds_count 0",
        "# EOF",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
}
