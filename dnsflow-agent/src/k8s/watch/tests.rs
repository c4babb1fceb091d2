use super::*;

/// The EgressFirewall of a namespace has gone, or has changed; `hold_off` makes another one of it.
fn update(namespace: &str, hold_off: Option<bool>) -> FirewallUpdate {
    let id = FirewallId {
        namespace: namespace.into(),
        name: "default".into(),
    };
    let firewall = hold_off.map(|hold_off| Firewall {
        hold_off,
        ..Firewall::default()
    });
    change(id, firewall)
}

fn list() -> FirewallUpdate {
    FirewallUpdate {
        reset: true,
        firewalls: Vec::new(),
    }
}

/// What waits when these have come.
fn queue(updates: &[FirewallUpdate]) -> Vec<FirewallUpdate> {
    let mut waiting = VecDeque::new();
    for update in updates {
        Known::queue(&mut waiting, Input::Firewalls(update.clone()));
    }
    let waiting = waiting.into_iter().filter_map(|update| match update {
        Input::Firewalls(update) => Some(update),
        _ => None,
    });
    waiting.collect()
}

#[test]
fn of_each_firewall_the_newest_state_waits_at_the_place_of_the_first() {
    let came = [
        update("busy", Some(true)),
        update("other", Some(true)),
        update("busy", None),
        update("busy", Some(false)),
    ];
    let waits = [update("busy", Some(false)), update("other", Some(true))];
    assert_eq!(queue(&came), waits);
    let came = [update("a", Some(true)), update("a", None)];
    assert_eq!(queue(&came), [update("a", None)]);
}

#[test]
fn a_list_replaces_what_waits_and_stays_before_what_comes_behind_it() {
    let came = [
        update("gone", Some(true)),
        list(),
        update("a", Some(true)),
        update("a", Some(false)),
    ];
    assert_eq!(queue(&came), [list(), update("a", Some(false))]);
}
