//! A start knows by the ages of flows and ports whose a flow is.

use super::{
    super::{
        edits::{config, node},
        starts::is_open_at_all,
    },
    *,
};

/// A pod goes while no agent runs, and another one comes at its address, with its tunnel key. The kernel gives the new
/// veth the index of the former one: a veth that is moved between network namespaces keeps its index where that is free
/// (`__dev_change_net_namespace` in Linux net/core/dev.c). The flows of the group are older than the new port.
#[test]
fn a_pod_takes_over_no_mark_of_flows_that_are_older_than_its_port() {
    let new = ("ns1_q1", "uid-q1");
    let row = RowId::new((1 << 64) | 0x105);
    assert_eq!(ifindex_of(row), ifindex_of(RowId::new(0x105)));
    let rules = [allow("example.com"), deny_all()];
    for way in WAYS {
        let mut before = node(way, &rules);
        before.answer("p1", "www.example.com", &[ADDRESS], 600);
        before.pass(Duration::from_secs(30));
        let saved = before.engine.saved(before.now);
        before.now = before.now + Duration::from_secs(30);
        let mut node = started_with(&mut before, saved, config(way));
        read_rules(&mut node, &rules);
        node.pods = [(new.0.to_owned(), row)].into();
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces: vec![(row, Some(interface(new.0, 5, new.1)))],
        }));
        let sb = SbUpdate {
            port_bindings: vec![(row, Some(port_binding(new.0, 5)))],
            ..southbound(&node, &rules)
        };
        node.give(Input::Sb(sb));
        node.pass(Duration::from_secs(30));
        assert!(!is_open_at_all(&node, ADDRESS), "{way:?}");
    }
}
