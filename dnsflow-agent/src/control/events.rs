//! `/v1/events`.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use futures::{StreamExt as _, stream};
use hyper::{Response, body::Bytes};
use tokio::time::sleep;

use super::{Body, FOLLOW_INTERVAL, Parameters, Refusal, Server, line, lines};
use crate::{
    asking::event::{Event, Kind},
    journal::Journal,
};

/// Which events are wanted: all for which each field that is given holds.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct Wanted {
    namespace: Option<String>,
    pod: Option<String>,
    event: Option<String>,
}

impl Wanted {
    fn is(&self, event: &Event) -> bool {
        let is =
            |wanted: &Option<String>, found: &Option<String>| wanted.is_none() || wanted == found;
        is(&self.namespace, &event.namespace)
            && is(&self.pod, &event.pod)
            && self.event.as_ref().is_none_or(|word| *word == event.event)
    }
}

impl Server {
    pub(super) fn events(&self, mut parameters: Parameters) -> Result<Response<Body>, Refusal> {
        let wanted = Wanted {
            namespace: parameters.optional("namespace"),
            pod: parameters.optional("pod"),
            event: parameters.parsed("event")?.map(Kind::word),
        };
        let since_ms = parameters.parsed("since_ms")?;
        let last: Option<usize> = parameters.parsed("last")?;
        let follow = parameters.parsed("follow")?.unwrap_or(false);
        parameters.end()?;
        let from = since_ms.map_or(0, |since_ms| {
            self.journal.first_within(Duration::from_millis(since_ms))
        });
        let mut reading = Reading {
            journal: Arc::clone(&self.journal),
            from,
            wanted,
            follow,
            is_first: true,
        };
        let last = last.map(|count| reading.last(count)).unwrap_or_default();
        let last: Vec<Bytes> = last.iter().map(line).collect();
        let parts = stream::unfold(reading, |mut reading| async move {
            let events = reading.next().await?;
            let lines: Vec<Bytes> = events.iter().map(line).collect();
            Some((stream::iter(lines), reading))
        });
        Ok(lines(stream::iter(last).chain(parts.flatten()).map(Ok)))
    }
}

/// Events that are still to be listed.
struct Reading {
    journal: Arc<Journal>,
    /// The number of the next report.
    from: u64,
    wanted: Wanted,
    /// Whether those to come are wanted, too.
    follow: bool,
    /// Whether nothing was read: what the journal had dropped before is not missed.
    is_first: bool,
}

impl Reading {
    /// At most so many of the wanted events, the latest, with all others up to now skipped.
    fn last(&mut self, count: usize) -> VecDeque<Event> {
        let mut last = VecDeque::new();
        let end = self.journal.next();
        if count == 0 || self.wanted == Wanted::default() {
            // Each read keeps the hot thread out for a moment.
            self.from = self.from.max(end.saturating_sub(count as u64));
        }
        while self.from < end
            && let Some(events) = self.read()
        {
            for event in events {
                last.push_back(event);
                if last.len() > count {
                    last.pop_front();
                }
            }
        }
        last
    }

    /// Some wanted events, none of them late by more than [`FOLLOW_INTERVAL`]; `None` at the end.
    async fn next(&mut self) -> Option<Vec<Event>> {
        loop {
            match self.read() {
                Some(events) if events.is_empty() => {}
                Some(events) => return Some(events),
                None if self.follow => sleep(FOLLOW_INTERVAL).await,
                None => return None,
            }
        }
    }

    /// The wanted ones of the next events; `None` at the end of the journal.
    fn read(&mut self) -> Option<Vec<Event>> {
        let unread = self.journal.read(self.from);
        let is_end = unread.next == self.from;
        self.from = unread.next;
        let mut events = unread.events;
        events.retain(|event| self.wanted.is(event));
        if unread.missed > 0 && !self.is_first {
            let missed = Event {
                event: Kind::EventsMissed.word(),
                text: format!("{} events came too fast for this client", unread.missed),
                ..Event::default()
            };
            events.insert(0, missed);
        }
        self.is_first = false;
        (!is_end).then_some(events)
    }
}
