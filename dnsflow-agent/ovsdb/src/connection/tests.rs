#![allow(clippy::unwrap_used)]

use std::{collections::BTreeSet, path::PathBuf};

use tokio::net::UnixListener;

use super::*;
use crate::{
    schema::{Column, Table},
    uuid::Uuid,
};

static DATABASE: Database = Database {
    name: "D",
    tables: &[table("T"), table("U")],
};

const NAME: &[Column] = &[Column::scalar("name")];

const fn table(name: &'static str) -> Table {
    Table {
        name,
        columns: NAME,
        purpose: "tests",
        remedy: "remove rows",
        deferred: false,
    }
}

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
    let told: Vec<&String> = connection.causes.iter().collect();
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
    assert_eq!(connection.causes.len(), 16);
}

/// A server that answers the monitor request, or does not, and closes after a while.
struct FakeServer {
    path: PathBuf,
    task: tokio::task::JoinHandle<()>,
}

impl FakeServer {
    fn start(test: &str, answer: &'static str, life: Duration) -> Self {
        Self::answering(test, move |_| answer.to_owned(), life)
    }

    /// Answers each connection by its number.
    fn answering(
        test: &str,
        answer: impl Fn(usize) -> String + Send + 'static,
        life: Duration,
    ) -> Self {
        let name = format!("ovsdb-fake-{}-{test}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        let task = tokio::spawn(async move {
            let mut number = 0;
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 4096];
                assert_ne!(stream.read(&mut request).await.unwrap(), 0);
                // Whoever has read too much is gone.
                let _ = stream.write_all(answer(number).as_bytes()).await;
                number += 1;
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
    connection.causes.insert("an earlier cause".into());
    assert_eq!(connection.next().await, Event::Synced);
    assert!(connection.causes.is_empty(), "told again after a success");
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
    let told: Vec<&String> = connection.causes.iter().collect();
    assert!(
        matches!(&told[..], [cause] if cause.ends_with("database D: no answer for 60 s")),
        "{told:?}"
    );
}

/// The first content: so many rows of one table.
fn content(table: &str, rows: usize) -> String {
    let rows = (0..rows).map(|row| {
        let id = Uuid::new(row as u128);
        format!(r#""{id}":{{"initial":{{}}}}"#)
    });
    let rows = rows.collect::<Vec<_>>().join(",");
    format!(r#"{{"id":0,"result":{{"{table}":{{{rows}}}}},"error":null}}"#)
}

const TWO_ROWS: TableLimits = TableLimits {
    rows: 2,
    bytes: 1000,
};

/// The tables that are too large, with what they have more of, and whether the connection goes on without them.
fn large_tables(connection: &mut Connection) -> Option<Vec<(&'static str, String, bool)>> {
    let tables = connection.take_large_tables()?.iter();
    let told = tables.map(|large| (large.table.name, large.limit.to_string(), large.is_left_out));
    Some(told.collect())
}

#[tokio::test(start_paused = true)]
async fn a_database_with_a_table_that_is_too_large_is_read_again_after_a_while() {
    // Twice too large, then no more.
    let server = FakeServer::answering(
        "large",
        |number| content("T", 3 - number / 2),
        Duration::ZERO,
    );
    let mut connection = server.connection().limited_to(TWO_ROWS);
    let began = tokio::time::Instant::now();
    assert!(matches!(connection.next().await, Event::TooLarge(_)));
    assert!(connection.replica().is_none());
    assert_eq!(
        large_tables(&mut connection),
        Some(vec![("T", "2 rows of interest".to_owned(), false)])
    );
    assert!(matches!(connection.next().await, Event::TooLarge(_)));
    assert_eq!(large_tables(&mut connection), None, "no news");
    assert!(began.elapsed() >= TOO_LARGE_WAIT);
    assert_eq!(connection.next().await, Event::Synced);
    assert_eq!(large_tables(&mut connection), Some(vec![]));
    assert_eq!(connection.causes, BTreeSet::new(), "it is no other trouble");
    assert_eq!(connection.counters().failures.load(Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn a_table_that_is_left_out_is_told_before_the_content() {
    let server = FakeServer::answering("without", |_| content("T", 3), Duration::from_secs(1000));
    let connection = server.connection().limited_to(TWO_ROWS);
    let mut connection = connection.without_large(&["T"]);
    assert!(matches!(connection.next().await, Event::TooLarge(_)));
    assert_eq!(
        large_tables(&mut connection),
        Some(vec![("T", "2 rows of interest".to_owned(), true)])
    );
    assert_eq!(connection.next().await, Event::Synced);
    assert_eq!(large_tables(&mut connection), None);
    assert_eq!(connection.counters().failures.load(Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_for_the_first_content_is_told_of_a_table_that_is_too_large() {
    let server = FakeServer::answering("first", |_| content("T", 3), Duration::ZERO);
    let mut connection = server.connection().limited_to(TWO_ROWS);
    let error = connection.synced().await.unwrap_err();
    assert_eq!(error.table.name, "T");
}

#[tokio::test(start_paused = true)]
async fn a_table_counts_as_too_large_until_everything_has_been_read_without_it() {
    let contents = [("T", 3), ("U", 3), ("U", 2)];
    let answer = move |number: usize| {
        let (table, rows) = contents[number];
        content(table, rows)
    };
    let server = FakeServer::answering("until", answer, Duration::ZERO);
    let connection = server.connection().limited_to(TWO_ROWS);
    let mut connection = connection.without_large(&["T"]);
    let mut told = Vec::new();
    for _ in 0..4 {
        connection.next().await;
        if let Some(tables) = connection.take_large_tables() {
            let tables = tables.iter();
            told.push(
                tables
                    .map(|large| (large.table.name, large.is_left_out))
                    .collect::<Vec<_>>(),
            );
        }
    }
    assert_eq!(
        told,
        [vec![("T", true)], vec![("T", true), ("U", false)], vec![]]
    );
}
