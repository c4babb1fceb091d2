//! The events of one kind of object: a list, and the watch behind it.
//!
//! It does as `watcher` of kube-runtime does, but for the list, of which each object comes by itself ([`List`]).

use std::time::Duration;

use futures::{
    Stream, StreamExt as _,
    stream::{self, BoxStream},
};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{ListParams, WatchEvent, WatchParams},
    core::Status,
    runtime::{
        utils::Backoff as _,
        watcher::{DefaultBackoff, Event},
    },
};
use serde::de::DeserializeOwned;

use super::list::{self, List};

/// A watch without an event for so long is dead: the server ends each one 290 s after its begin (`WatchParams`).
const IDLE_MAX: Duration = Duration::from_secs(295);

/// Behind a list or an event that cannot be read, a list is asked for after this time: it would mostly be the same, and it
/// may be long.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(30);

/// A failure. The next event is asked for again.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The list has failed, and begins anew.
    #[error(transparent)]
    List(#[from] list::Error),
    /// The watch does not begin, or breaks off.
    #[error(transparent)]
    Watch(#[from] kube::Error),
    /// The API server says so in the watch.
    #[error("{0}")]
    Said(Box<Status>),
    /// There is no version to go on from.
    #[error("an object has no metadata.resourceVersion")]
    NoVersion,
}

impl Error {
    /// The server's status, if the error is the server's.
    pub(super) fn status(&self) -> Option<&Status> {
        match self {
            Self::List(list::Error::Request(kube::Error::Api(status)))
            | Self::Watch(kube::Error::Api(status))
            | Self::Said(status) => Some(status),
            _ => None,
        }
    }

    /// Whether the server has forgotten the events from then on (RFC 9110, section 15.5.11).
    pub(super) fn is_gone(&self) -> bool {
        self.status().is_some_and(|status| status.code == 410)
    }
}

enum State<K> {
    Begin,
    Listing(Box<List<K>>),
    /// The list, or an event, cannot be read.
    Unreadable,
    /// The list is whole, and known up to this version.
    Listed(String),
    Watching(
        String,
        BoxStream<'static, Result<WatchEvent<K>, kube::Error>>,
    ),
}

/// The pauses behind failures: 0.8 s to 30 s, doubled each time, with jitter. An API server that comes back is not met by
/// all nodes at once.
#[derive(Default)]
struct Pauses(DefaultBackoff);

impl Pauses {
    /// The pause behind an event. An event of a list that is not whole makes no later pause short again: a list that
    /// breaks off each time can be long.
    fn behind<K>(&mut self, event: &Result<Event<K>, Error>) -> Option<Duration> {
        let Self(backoff) = self;
        match event {
            Err(_) => backoff.next(),
            Ok(Event::Init | Event::InitApply(_)) => None,
            Ok(Event::InitDone | Event::Apply(_) | Event::Delete(_)) => {
                backoff.reset();
                None
            }
        }
    }
}

/// The events, for ever, with a pause behind each failure.
pub(super) fn events<K>(
    api: Api<K>,
    selection: ListParams,
) -> impl Stream<Item = Result<Event<K>, Error>> + Send
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let begin = (State::Begin, Pauses::default(), None);
    stream::unfold(begin, move |(mut state, mut pauses, pause)| {
        let (api, selection) = (api.clone(), selection.clone());
        async move {
            if let Some(pause) = pause {
                tokio::time::sleep(pause).await;
            }
            loop {
                match step(&api, &selection, state).await {
                    (Some(event), next) => {
                        let pause = pauses.behind(&event);
                        return Some((event, (next, pauses, pause)));
                    }
                    (None, next) => state = next,
                }
            }
        }
    })
}

async fn step<K>(
    api: &Api<K>,
    selection: &ListParams,
    state: State<K>,
) -> (Option<Result<Event<K>, Error>>, State<K>)
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    match state {
        State::Begin => {
            let mut list = Box::new(List::new(api, selection.clone()));
            match list.begin().await {
                Ok(()) => (Some(Ok(Event::Init)), State::Listing(list)),
                Err(error) => (Some(Err(error.into())), State::Begin),
            }
        }
        State::Listing(mut list) => match list.next().await {
            Ok(Some(object)) => (Some(Ok(Event::InitApply(object))), State::Listing(list)),
            Ok(None) => match list.version() {
                Some(version) => (Some(Ok(Event::InitDone)), State::Listed(version.to_owned())),
                None => (Some(Err(Error::NoVersion)), State::Begin),
            },
            Err(error @ (list::Error::Parse(_) | list::Error::TooLarge(..))) => {
                (Some(Err(error.into())), State::Unreadable)
            }
            Err(error) => (Some(Err(error.into())), State::Begin),
        },
        State::Unreadable => {
            tokio::time::sleep(UNREADABLE_PAUSE).await;
            (None, State::Begin)
        }
        State::Listed(version) => {
            let parameters = WatchParams {
                label_selector: selection.label_selector.clone(),
                field_selector: selection.field_selector.clone(),
                ..WatchParams::default()
            };
            match api.watch(&parameters, &version).await {
                Ok(events) => (None, State::Watching(version, events.boxed())),
                Err(error) => failed(error.into(), State::Listed(version)),
            }
        }
        State::Watching(version, mut events) => {
            let event = match tokio::time::timeout(IDLE_MAX, events.next()).await {
                Ok(Some(Ok(event))) => event,
                // The line may have been an event: those behind it do not tell of its object.
                Ok(Some(Err(error @ kube::Error::SerdeError(_)))) => {
                    return (Some(Err(error.into())), State::Unreadable);
                }
                Ok(Some(Err(error))) => {
                    return failed(error.into(), State::Watching(version, events));
                }
                Ok(None) | Err(_) => return (None, State::Listed(version)),
            };
            let (event, version) = match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    let version = object.resource_version();
                    (Some(Ok(Event::Apply(object))), version)
                }
                WatchEvent::Deleted(object) => {
                    let version = object.resource_version();
                    (Some(Ok(Event::Delete(object))), version)
                }
                WatchEvent::Bookmark(bookmark) => (None, Some(bookmark.metadata.resource_version)),
                WatchEvent::Error(status) => {
                    return failed(Error::Said(status), State::Watching(version, events));
                }
            };
            match version.filter(|version| !version.is_empty()) {
                Some(version) => (event, State::Watching(version, events)),
                None => (Some(Err(Error::NoVersion)), State::Begin),
            }
        }
    }
}

/// A failure, with what comes next: a new list, if the server has forgotten events.
fn failed<K>(error: Error, state: State<K>) -> (Option<Result<Event<K>, Error>>, State<K>) {
    let state = match error.is_gone() {
        true => State::Begin,
        false => state,
    };
    (Some(Err(error)), state)
}

#[cfg(test)]
mod tests;
