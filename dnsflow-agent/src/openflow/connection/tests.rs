#![allow(clippy::unwrap_used)]

use super::*;

#[tokio::test]
async fn a_missing_socket_is_named_once() {
    let path = std::env::temp_dir().join(format!("dnsflow-missing-{}", std::process::id()));
    let mut connection = Connection::new(&path);
    let Event::Down { reason } = connection.next().await else {
        panic!("no such socket");
    };
    assert!(reason.contains(&*path.to_string_lossy()), "{reason}");
    assert!(reason.contains("--openflow-socket"), "{reason}");
    assert!(reason.contains("No such file"), "{reason}");
    // It keeps trying, and does not repeat itself.
    let silence = timeout(BACKOFF_MIN * 5, connection.next()).await;
    assert!(silence.is_err(), "{silence:?}");
    assert!(connection.counters().disconnects > 1);
}

#[tokio::test]
async fn without_a_connection_a_batch_fails_at_once() {
    let mut connection = Connection::new("/nonexistent");
    connection.apply(BatchId(7), true, Vec::new(), Vec::new());
    let lost = Event::Applied {
        batch: BatchId(7),
        result: Err(BatchError::ConnectionLost),
    };
    assert_eq!(connection.next().await, lost);
}
