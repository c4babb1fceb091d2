#![allow(clippy::unwrap_used)]

use std::time::Instant;

use dnsflow_core::ovn::rows::{Changes, RowId};
use dnsflow_ovsdb::{
    Replica, Uuid,
    fixtures::{Transcript, VSWITCH},
    session::Session,
};
use serde_json::json;

use super::*;

/// The `iface-id` of an `Interface` row with these external ids, if it counts.
fn counted(ids: &[(&str, &str)]) -> Option<String> {
    let mut replica = Replica::new(&DATABASE);
    let row = json!({Uuid::new(1).to_string(): {"initial": {"external_ids": ["map", ids]}}});
    replica.apply_value(json!({INTERFACE: row})).unwrap();
    let row = replica.row(INTERFACE, Uuid::new(1)).unwrap();
    let found = interface(&row).unwrap();
    found.map(|interface| interface.iface_id)
}

#[test]
fn a_management_port_is_no_pod() {
    assert_eq!(counted(&[("iface-id", "k8s-n2")]), None);
    for ids in [
        &[("iface-id", "ns1_p1"), ("iface-id-ver", "uid")][..],
        &[("iface-id", "ns1_p1"), ("sandbox", "0123")],
    ] {
        assert_eq!(counted(ids).as_deref(), Some("ns1_p1"));
    }
    assert_eq!(counted(&[("sandbox", "0123")]), None);
}

#[test]
fn an_interface_is_a_pods_once_it_says_so() {
    let mut replica = Replica::new(&DATABASE);
    let mut converter = Converter::new(DATABASE.name, Arc::default());
    let id = Uuid::new(1).to_string();
    let ids = |ids: &[(&str, &str)]| json!({"external_ids": ["map", ids]});
    let plugged = ids(&[("iface-id", "ns1_p1")]);
    replica
        .apply_value(json!({INTERFACE: {&id: {"initial": plugged}}}))
        .unwrap();
    assert_eq!(converter.every(&replica, INTERFACE, interface), []);
    // The difference.
    let sandbox = ids(&[("sandbox", "0123")]);
    let changes = replica
        .apply_value(json!({INTERFACE: {&id: {"modify": sandbox}}}))
        .unwrap();
    let changed = converter.changed(&replica, &changes, INTERFACE, interface);
    assert!(matches!(&changed[..], [(_, Some(_))]), "{changed:?}");
}

#[test]
fn the_recorded_life_of_a_pods_interface() {
    let mut session = Session::new(&DATABASE, Conditions::new(), Instant::now());
    let mut transcript = Transcript::new(VSWITCH);
    let mut converter = Converter::new(DATABASE.name, Arc::default());
    assert_eq!(transcript.play(&mut session).unwrap(), [Event::Synced]);
    assert_eq!(
        converter.every(session.replica(), INTERFACE, interface),
        [],
        "br-int is no pod"
    );
    let mut step = || -> Changes<Interface> {
        let events = transcript.play(&mut session).unwrap();
        let [Event::Changed(changes)] = &events[..] else {
            panic!("{events:?}")
        };
        converter.changed(session.replica(), changes, INTERFACE, interface)
    };
    let one = |changes: Changes<Interface>| -> Option<Interface> {
        let [(id, interface)] = <[_; 1]>::try_from(changes).unwrap();
        assert_eq!(id, RowId::new(0x81d851b7_3bd4_4462_befa_02c878e1854b));
        interface
    };

    let added = one(step()).unwrap();
    assert_eq!(
        added,
        Interface {
            name: "0123456789abcde".into(),
            iface_id: "ns1_p1".into(),
            iface_id_ver: Some("78efc81f-9b4e-4d2a-8d63-0f3b1f6a2c11".into()),
            addresses: vec!["10.244.0.3".parse().unwrap()],
            mac: MacAddress::parse("0a:58:0a:f4:00:03"),
            network: None,
            sandbox: Some("0123456789abcdef0123456789abcdef".into()),
            ifindex: None,
            policing_kbps: 0,
        }
    );
    let connected = one(step()).unwrap();
    assert_eq!(connected.ifindex, Some(42));
    assert_eq!(step(), [], "of ovn-installed nothing is read");
    let changed = one(step()).unwrap();
    assert_eq!(changed.iface_id_ver.as_deref(), Some("another"));
    assert_eq!(
        changed.addresses,
        ["10.244.0.3", "fd00:10:244::3"].map(|text| text.parse::<std::net::IpAddr>().unwrap())
    );
    let lost = one(step()).unwrap();
    assert_eq!(lost.ifindex, None);
    assert_eq!(one(step()), None, "without iface-id it is no pod's");
    assert_eq!(one(step()).unwrap().iface_id, "ns1_p2");
    assert_eq!(one(step()), None);
}

#[test]
fn addresses_that_are_none_leave_the_row_out() {
    let mut replica = Replica::new(&DATABASE);
    let rows = |addresses: &str| {
        json!({"Interface": {Uuid::new(1).to_string(): {"initial": {"external_ids":
            ["map", [["iface-id", "p"], ["sandbox", "s"], ["ip_addresses", addresses]]]}}}})
    };
    let counters = Arc::<OvsdbCounters>::default();
    let mut converter = Converter::new(DATABASE.name, counters.clone());
    replica.apply_value(rows("10.0.0.1/24,nonsense")).unwrap();
    assert_eq!(converter.every(&replica, INTERFACE, interface), []);
    assert_eq!(
        counters
            .rows_skipped
            .load(std::sync::atomic::Ordering::Relaxed),
        1
    );
    replica.apply_value(rows("")).unwrap();
    assert_eq!(converter.every(&replica, INTERFACE, interface).len(), 1);
}

#[test]
fn megaflows_are_kept_for_as_long_as_the_database_says_or_usual() {
    for (config, seconds) in [
        (json!([]), 10.5),
        (json!([["max-idle", "30000"]]), 30.5),
        (
            json!([["max-idle", "30000"], ["max-revalidator", "2000"]]),
            32.0,
        ),
        (json!([["max-idle", "1000"]]), 10.5),
        (json!([["max-idle", "often"]]), 10.5),
    ] {
        let mut replica = Replica::new(&DATABASE);
        let columns = json!({"other_config": ["map", config]});
        let row = json!({Uuid::new(1).to_string(): {"initial": columns}});
        replica.apply_value(json!({OPEN_VSWITCH: row})).unwrap();
        let row = replica.row(OPEN_VSWITCH, Uuid::new(1)).unwrap();
        assert_eq!(
            megaflows_idle(&row).unwrap(),
            Some(Duration::from_secs_f64(seconds)),
            "{columns}"
        );
    }
}
