use k8s_openapi::api::core::v1::Service;
use kube::{Client, Config};
use tokio::time::Instant;

use super::*;

fn event(text: &str) -> Result<WatchEvent<Service>, kube::Error> {
    serde_json::from_str(text).map_err(kube::Error::SerdeError)
}

#[tokio::test(start_paused = true)]
async fn pauses_grow_until_a_list_is_whole() {
    let mut pauses = Pauses::default();
    let mut behind = |event| pauses.behind::<Service>(&event);
    let mut longest = Duration::ZERO;
    for _ in 0..4 {
        assert_eq!(behind(Ok(Event::Init)), None);
        assert_eq!(behind(Ok(Event::InitApply(Service::default()))), None);
        let pause = behind(Err(Error::NoVersion)).expect("a pause");
        assert!(pause > longest, "{pause:?} behind {longest:?}");
        longest = pause;
    }
    for event in [
        Event::InitDone,
        Event::Apply(Service::default()),
        Event::Delete(Service::default()),
    ] {
        assert_eq!(behind(Ok(event)), None);
        let pause = behind(Err(Error::NoVersion)).expect("a pause");
        assert!(pause * 2 < longest, "{pause:?} behind {longest:?}");
    }
}

/// A proxy between agent and API server can write a page of HTML into a watch.
#[tokio::test(start_paused = true)]
async fn behind_a_line_that_cannot_be_read_no_event_counts_before_another_list() {
    let change = |version: &str| {
        let object = format!(r#"{{"metadata":{{"name":"a","resourceVersion":"{version}"}}}}"#);
        event(&format!(r#"{{"type":"MODIFIED","object":{object}}}"#))
    };
    let lines = [change("8"), event("<html>"), change("10")];
    let client = Client::try_from(Config::new("http://127.0.0.1".parse().expect("a URL")));
    let api = Api::all(client.expect("a client"));
    let mut state = State::Watching("7".into(), stream::iter(lines).boxed());
    let mut versions = Vec::new();
    let mut failures = 0;
    let begin = Instant::now();
    while matches!(state, State::Watching(..) | State::Unreadable) {
        let (event, next) = step(&api, &ListParams::default(), state).await;
        match event {
            Some(Ok(Event::Apply(object))) => versions.extend(object.resource_version()),
            Some(Err(_)) => failures += 1,
            other => assert!(other.is_none(), "{other:?}"),
        }
        state = next;
    }
    assert!(matches!(state, State::Begin));
    assert_eq!((versions, failures), (vec!["8".to_owned()], 1));
    assert!(begin.elapsed() >= UNREADABLE_PAUSE);
}
