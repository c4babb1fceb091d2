#![allow(clippy::unwrap_used)]

use std::{collections::BTreeSet, path::PathBuf};

use tokio::net::UnixListener;

use super::*;
use crate::ovsdb::schema::{Column, Table};

static DATABASE: Database = Database {
    name: "D",
    tables: &[Table {
        name: "T",
        columns: &[Column::scalar("name")],
        deferred: false,
    }],
};

#[test]
fn delays_double_up_to_their_limit_and_vary() {
    let mut backoff = Backoff::default();
    let mut nominal = BACKOFF_MIN;
    for _ in 0..10 {
        let delay = backoff.step();
        assert!(
            delay >= BACKOFF_MIN.max(nominal / 2) && delay <= nominal,
            "{delay:?}"
        );
        nominal = (nominal * 2).min(BACKOFF_MAX);
    }
    let delays: BTreeSet<Duration> = (0..20).map(|_| backoff.step()).collect();
    assert!(delays.len() > 1);
}

fn connection(remotes: &str) -> Connection {
    Connection::new(
        &DATABASE,
        Conditions::new(),
        &remotes.parse().unwrap(),
        "--db",
    )
}

#[tokio::test]
async fn every_address_is_tried_and_each_cause_is_told_once() {
    let mut connection = connection("unix:/nonexistent/a,unix:/nonexistent/b");
    for _ in 0..9 {
        connection.attempt().await;
    }
    assert_eq!(connection.counters().failures.load(Relaxed), 6);
    let told: Vec<&String> = connection.causes.reported();
    assert_eq!(
        told,
        [
            "unix:/nonexistent/a: No such file or directory (os error 2); \
          unix:/nonexistent/b: No such file or directory (os error 2)"
        ]
    );
}

#[tokio::test]
async fn the_number_of_causes_told_is_limited() {
    let mut connection = connection("unix:/nonexistent/a");
    for cause in 0..32 {
        connection.refusals.push(cause.to_string());
        connection.all_failed();
    }
    assert_eq!(connection.causes.reported().len(), 16);
}

/// A server that answers the monitor request, or does not, and closes after a while.
struct FakeServer {
    path: PathBuf,
    task: tokio::task::JoinHandle<()>,
}

impl FakeServer {
    fn start(test: &str, answer: &'static str, life: Duration) -> Self {
        let name = format!("ovsdb-fake-{}-{test}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        let task = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 4096];
                assert_ne!(stream.read(&mut request).await.unwrap(), 0);
                stream.write_all(answer.as_bytes()).await.unwrap();
                tokio::time::sleep(life).await;
            }
        });
        Self { path, task }
    }

    fn connection(&self) -> Connection {
        connection(&format!("unix:{}", self.path.display()))
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.task.abort();
        std::fs::remove_file(&self.path).unwrap();
    }
}

const EMPTY: &str = r#"{"id":0,"result":{},"error":null}"#;

#[tokio::test(start_paused = true)]
async fn a_lost_connection_is_made_again() {
    let server = FakeServer::start("lost", EMPTY, Duration::from_secs(1));
    let mut connection = server.connection();
    assert!(connection.causes.is_news("an earlier cause".into()));
    assert_eq!(connection.next().await, Event::Synced);
    assert!(!connection.causes.end(), "told again after a success");
    assert!(connection.replica().is_some());
    let backoff = connection.backoff.next;
    assert_eq!(connection.next().await, Event::Synced);
    assert!(
        connection.backoff.next > backoff,
        "a short life is no success"
    );
    let counters = connection.counters();
    assert_eq!(
        (
            counters.synced.load(Relaxed),
            counters.failures.load(Relaxed)
        ),
        (2, 1)
    );
}

#[tokio::test(start_paused = true)]
async fn after_a_long_life_the_next_attempt_comes_soon() {
    let server = FakeServer::start("long", EMPTY, BACKOFF_MAX + Duration::from_secs(1));
    let mut connection = server.connection();
    connection.backoff.next = BACKOFF_MAX;
    assert_eq!(connection.next().await, Event::Synced);
    assert_eq!(connection.next().await, Event::Synced);
    assert_eq!(connection.backoff.next, 2 * BACKOFF_MIN);
}

#[tokio::test(start_paused = true)]
async fn a_silent_server_is_given_up() {
    let server = FakeServer::start("silent", "", Duration::from_secs(1000));
    let mut connection = server.connection();
    let nothing = timeout(Duration::from_secs(62), connection.next()).await;
    assert!(nothing.is_err());
    let told: Vec<&String> = connection.causes.reported();
    assert!(
        matches!(&told[..], [cause] if cause.ends_with("database D: no answer for 60 s")),
        "{told:?}"
    );
}
