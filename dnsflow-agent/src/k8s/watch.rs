//! Watches EgressFirewalls in all namespaces.
//!
//! The watch must never send a list to the core before the list is complete. It must never remove a
//! firewall because the API server is away or an object cannot be read: a firewall is gone only if
//! a complete list does not have it, or after a delete event.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use dnsflow_core::{
    Input,
    values::firewall::{Firewall, FirewallId, FirewallUpdate},
};
use kube::{Api, Client, runtime::watcher::Event};
use tokio::sync::mpsc;

use super::{
    client::ClientOptions,
    convert::{Converted, Reading, Stored},
    follow::{Follower, Subject, follow},
    reports::{Objects, Reports},
};

/// Watches EgressFirewalls and sends each change, until the receiver of `inputs` is gone.
///
/// The first update, and each one after a list was made anew (410 Gone), is a complete list with
/// [`FirewallUpdate::reset`]. Errors are logged once per cause and retried for ever. `objects` has what is not usable.
pub async fn watch(options: ClientOptions, inputs: mpsc::Sender<Input>, objects: Objects) {
    let known = Known {
        reports: Reports::new(objects),
        ..Known::default()
    };
    follow(&options, known, inputs).await;
}

/// The firewalls that were last sent to the core, and a list that is not complete yet.
#[derive(Debug, Default)]
struct Known {
    firewalls: BTreeMap<FirewallId, Firewall>,
    list: Option<List>,
    reports: Reports,
}

#[derive(Debug, Default)]
struct List {
    firewalls: BTreeMap<FirewallId, Firewall>,
    objects: BTreeSet<String>,
}

impl Follower for Known {
    type Object = Stored;
    type Update = Input;

    fn subject(&self) -> Subject {
        Subject {
            what: "EgressFirewalls".into(),
            missing: "has no resource EgressFirewall (k8s.ovn.org/v1): is ovn-kubernetes \
                      installed there, with its egress firewall enabled?"
                .into(),
            permission: "get, list and watch of egressfirewalls in k8s.ovn.org".into(),
        }
    }

    fn api(&self, client: Client) -> Api<Stored> {
        Api::all(client)
    }

    fn handle(&mut self, event: Event<Stored>) -> Option<Input> {
        self.update(event).map(Input::Firewalls)
    }

    /// Of each EgressFirewall, the newest state is sent, at the place of the one that has waited: who changes one again
    /// and again delays those of others by one update. A list has all of them.
    fn queue(waiting: &mut VecDeque<Input>, update: Input) {
        let Some(id) = changed(&update).cloned() else {
            waiting.clear();
            waiting.push_back(update);
            return;
        };
        match waiting.iter_mut().find(|one| changed(one) == Some(&id)) {
            Some(known) => *known = update,
            None => waiting.push_back(update),
        }
    }
}

/// The EgressFirewall that has changed; `None` for a list.
fn changed(update: &Input) -> Option<&FirewallId> {
    match update {
        Input::Firewalls(update) if !update.reset => update.firewalls.first().map(|(id, _)| id),
        _ => None,
    }
}

impl Known {
    /// The update for the core that an event brings, if any.
    fn update(&mut self, event: Event<Stored>) -> Option<FirewallUpdate> {
        match event {
            Event::Init => {
                self.list = Some(List::default());
                None
            }
            Event::InitApply(stored) => {
                let (object, firewall) = self.read(stored);
                let list = self.list.get_or_insert_default();
                list.objects.insert(object);
                list.firewalls.extend(firewall);
                None
            }
            Event::InitDone => {
                let list = self.list.take()?;
                self.reports.retain(|object| list.objects.contains(object));
                self.firewalls = list.firewalls;
                Some(FirewallUpdate {
                    reset: true,
                    firewalls: self
                        .firewalls
                        .iter()
                        .map(|(id, firewall)| (id.clone(), Some(firewall.clone())))
                        .collect(),
                })
            }
            Event::Apply(stored) => {
                let (_, firewall) = self.read(stored);
                let (id, firewall) = firewall?;
                // Most events change the status alone.
                if self.firewalls.get(&id) == Some(&firewall) {
                    return None;
                }
                self.firewalls.insert(id.clone(), firewall.clone());
                Some(change(id, Some(firewall)))
            }
            Event::Delete(stored) => {
                let Converted {
                    object, reading, ..
                } = stored.converted;
                self.reports.forget(&object);
                match reading {
                    Reading::Firewall(id, _) | Reading::Unreadable(id) => {
                        self.firewalls.remove(&id)?;
                        Some(change(id, None))
                    }
                    Reading::Ignored => None,
                }
            }
        }
    }

    /// Reads an object: its name for people, and its firewall.
    fn read(&mut self, stored: Stored) -> (String, Option<(FirewallId, Firewall)>) {
        let Converted {
            object,
            reading,
            mut reasons,
        } = stored.converted;
        let firewall = match reading {
            Reading::Firewall(id, firewall) => Some((id, firewall)),
            Reading::Unreadable(id) => {
                let kept = self.firewalls.get(&id).cloned();
                if kept.is_some() {
                    reasons.push("the last valid version stays in force".into());
                }
                kept.map(|firewall| (id, firewall))
            }
            Reading::Ignored => None,
        };
        self.reports.tell(&object, firewall.is_some(), reasons);
        let firewall = firewall.map(|(id, mut firewall)| {
            // All copies share the rules, also behind a list that is made anew.
            let known = self.firewalls.get(&id);
            if let Some(known) = known.filter(|known| known.rules == firewall.rules) {
                firewall.rules = Arc::clone(&known.rules);
            }
            (id, firewall)
        });
        (object, firewall)
    }
}

fn change(id: FirewallId, firewall: Option<Firewall>) -> FirewallUpdate {
    FirewallUpdate {
        reset: false,
        firewalls: vec![(id, firewall)],
    }
}

#[cfg(test)]
mod tests;
