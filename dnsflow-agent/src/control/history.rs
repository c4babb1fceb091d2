//! `/v1/history` and `/v1/firewall`.

use std::{collections::VecDeque, sync::Arc};

use dnsflow_core::{
    ask::{history::Place, view::RulesView},
    values::firewall::{Firewall, Rule},
};
use futures::{StreamExt as _, stream};
use hyper::{Response, body::Bytes};

use super::{Body, Parameters, Refusal, Server, json, line, lines};
use crate::{
    asking::history::{Line, PresentFirewall},
    clock::now,
    k8s::convert,
};

/// Places of the history that are read at once.
const PLACES_AT_ONCE: usize = 64;
/// Rules that one question to the hot thread is for.
const RULES_PER_INQUIRY: usize = 64;

impl Server {
    pub(super) fn history(
        self: &Arc<Self>,
        mut parameters: Parameters,
    ) -> Result<Response<Body>, Refusal> {
        let namespace = parameters.optional("namespace");
        parameters.end()?;
        let listing = Listing {
            server: Arc::clone(self),
            places: self.slow.connections.places(namespace.as_deref()).into(),
            is_over: false,
        };
        let parts = stream::unfold(listing, |mut listing| async move {
            let lines: Vec<Bytes> = listing.next()?.iter().map(line).collect();
            Some((stream::iter(lines), listing))
        });
        Ok(lines(parts.flatten().map(Ok)))
    }

    pub(super) async fn firewall(
        &self,
        mut parameters: Parameters,
    ) -> Result<Response<Body>, Refusal> {
        let namespace = parameters.required("namespace")?;
        parameters.end()?;
        let mut read: Option<RulesView> = None;
        let mut rules: Vec<Rule> = Vec::new();
        let subdomains = loop {
            let from = rules.len();
            let of = namespace.clone();
            let asked = self.inquiries.ask(move |engine, _| {
                let view = engine.view();
                (view.rules(&of, from, RULES_PER_INQUIRY), view.subdomains())
            });
            let (part, subdomains) = asked.await.ok_or(Refusal::Stuck)?;
            let is_same = |known: &RulesView, part: &RulesView| {
                (known.came_at, known.count) == (part.came_at, part.count)
            };
            read = match (read.take(), part) {
                (Some(known), Some(part)) if is_same(&known, &part) => {
                    rules.extend_from_slice(&part.part.rules);
                    Some(known)
                }
                // It has changed meanwhile: from the beginning.
                (Some(_), Some(_)) => {
                    rules.clear();
                    None
                }
                (_, part) => {
                    let first = part.as_ref().map(|part| part.part.rules.to_vec());
                    rules = first.unwrap_or_default();
                    part
                }
            };
            let is_whole = |read: &RulesView| rules.len() == read.count;
            if read.as_ref().is_none_or(is_whole) && (from == 0 || read.is_some()) {
                break subdomains;
            }
        };
        let came_s = read
            .as_ref()
            .map(|read| now().since(read.came_at).as_secs());
        let enforces_former = read.as_ref().is_some_and(|read| read.enforces_former);
        let whole = read.map(|read| Firewall {
            rules: rules.into(),
            ..read.part
        });
        Ok(json(&PresentFirewall {
            resource: whole.map(|whole| convert::resource(&namespace, &whole)),
            subdomains,
            came_s: came_s.unwrap_or_default(),
            enforces_former,
        }))
    }
}

/// Places that are still to be listed.
struct Listing {
    server: Arc<Server>,
    places: VecDeque<Place>,
    /// Whether the end was told.
    is_over: bool,
}

impl Listing {
    /// The next lines; `None` after the last one.
    fn next(&mut self) -> Option<Vec<Line>> {
        if self.is_over {
            return None;
        }
        let count = self.places.len().min(PLACES_AT_ONCE);
        let part: Vec<Place> = self.places.drain(..count).collect();
        let mut lines: Vec<Line> = {
            let seen = self.server.slow.connections.of(&part).into_iter();
            seen.map(Line::Connection).collect()
        };
        if self.places.is_empty() {
            self.is_over = true;
            let (known, forgotten) = self.server.slow.connections.extent();
            lines.push(Line::End {
                known_s: known.as_secs(),
                forgotten,
            });
        }
        Some(lines)
    }
}
