#![allow(clippy::unwrap_used)]

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
    let told: Vec<&String> = connection.told.iter().collect();
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
    for cause in 0..2 * CAUSES_MAX {
        connection.refusals.push(cause.to_string());
        connection.all_failed();
    }
    assert_eq!(connection.told.len(), CAUSES_MAX);
}
