use super::*;
use crate::ovn::rows::MacAddress;

const ROW: RowId = RowId::new(1);
const OTHER_ROW: RowId = RowId::new(2);

fn row(name: &str, pod: &str) -> Interface {
    Interface {
        name: format!("veth-{name}").into(),
        iface_id: name.into(),
        iface_id_ver: Some(pod.into()),
        addresses: vec![[10, 244, 0, 5].into()],
        mac: MacAddress::new([2; 6]),
        network: None,
        sandbox: Some(format!("sandbox-{pod}")),
        ifindex: None,
        policing_kbps: 0,
    }
}

fn change(ports: &mut Ports, rows: Vec<(RowId, Option<Interface>)>) -> Vec<PortChange> {
    let update = InterfaceUpdate {
        reset: false,
        interfaces: rows,
    };
    ports.apply(update, &mut Output::default())
}

#[test]
fn a_recreated_pod_is_another_port_with_the_same_veth_index_free() {
    let mut ports = Ports::default();
    let opened = change(&mut ports, vec![(ROW, Some(row("a", "1")))]);
    assert_eq!(opened, [PortChange::Opened(PortId(0))]);
    assert!(ports.found(ROW, 7));
    assert_eq!(ports.at_veth(7), Some(PortId(0)));
    let changes = vec![(ROW, None), (OTHER_ROW, Some(row("a", "2")))];
    assert_eq!(
        change(&mut ports, changes),
        [
            PortChange::Closed {
                port: PortId(0),
                ifindex: Some(7)
            },
            PortChange::Opened(PortId(1))
        ]
    );
    assert_eq!(
        (ports.at_veth(7), ports.named("a")),
        (None, Some(PortId(1)))
    );
}

#[test]
fn a_veth_that_was_found_before_its_port_is_known() {
    let mut ports = Ports::default();
    change(&mut ports, vec![(ROW, Some(row("a", "1")))]);
    // A second row for the same port: it takes over, and gives back.
    change(&mut ports, vec![(OTHER_ROW, Some(row("a", "2")))]);
    assert!(ports.found(ROW, 7), "of the row that is not in use");
    assert_eq!(ports.at_veth(7), None);
    change(&mut ports, vec![(OTHER_ROW, None)]);
    assert_eq!(ports.at_veth(7), ports.named("a"));
    assert!(!ports.found(OTHER_ROW, 8), "gone");
}

#[test]
fn a_row_that_goes_late_leaves_the_index_to_its_successor() {
    let mut ports = Ports::default();
    let rows = vec![(ROW, Some(row("a", "1"))), (OTHER_ROW, Some(row("b", "2")))];
    change(&mut ports, rows);
    let b = ports.named("b");
    for row in [ROW, OTHER_ROW] {
        assert!(ports.found(row, 7));
    }
    assert_eq!((ports.at_veth(7), ports.with_veth()), (b, 1));
    assert!(ports.found(ROW, 8), "another veth of the same name");
    assert_eq!(ports.at_veth(7), b);
    assert!(ports.found(OTHER_ROW, 8));
    assert_eq!(ports.at_veth(8), b);
    let changes = change(&mut ports, vec![(ROW, None)]);
    let closed = PortChange::Closed {
        port: PortId(0),
        ifindex: None,
    };
    assert_eq!((changes, ports.at_veth(8)), (vec![closed], b));
}

#[test]
fn a_row_that_comes_into_use_late_does_not_take_the_index_of_another() {
    let mut ports = Ports::default();
    let third = RowId::new(3);
    let rows = vec![(ROW, Some(row("a", "1"))), (third, Some(row("b", "3")))];
    change(&mut ports, rows);
    assert!(ports.found(ROW, 7));
    change(&mut ports, vec![(OTHER_ROW, Some(row("a", "2")))]);
    assert!(ports.found(third, 7));
    change(&mut ports, vec![(OTHER_ROW, None)]);
    assert_eq!(ports.at_veth(7), ports.named("b"));
}

#[test]
fn all_ports_of_a_pod_hear_its_answers_and_no_other() {
    let mut ports = Ports::default();
    let rows = [("a", "1"), ("b", "1"), ("c", "2")];
    for (number, (name, pod)) in rows.into_iter().enumerate() {
        let id = RowId::new(number as u128);
        change(&mut ports, vec![(id, Some(row(name, pod)))]);
    }
    let recipients = |ports: &Ports, port| ports.of_pod(PortId(port));
    assert_eq!(recipients(&ports, 0), [PortId(0), PortId(1)]);
    assert_eq!(recipients(&ports, 2), [PortId(2)]);
    // The CNI may write the sandbox later, or another one.
    let moved = Interface {
        sandbox: Some("sandbox-2".into()),
        ..row("b", "1")
    };
    assert_eq!(change(&mut ports, vec![(RowId::new(1), Some(moved))]), []);
    assert_eq!(recipients(&ports, 0), [PortId(0)]);
    assert_eq!(recipients(&ports, 2), [PortId(1), PortId(2)]);
    change(&mut ports, vec![(RowId::new(2), None)]);
    assert_eq!(recipients(&ports, 1), [PortId(1)]);
}

#[test]
fn an_interface_without_sandbox_hears_for_itself() {
    let mut ports = Ports::default();
    for number in 0..2 {
        let row = Interface {
            sandbox: None,
            ..row(&number.to_string(), "1")
        };
        change(&mut ports, vec![(RowId::new(number), Some(row))]);
    }
    assert_eq!(ports.of_pod(PortId(0)), [PortId(0)]);
}

#[test]
fn attaching_is_over_once_it_was_tried_everywhere() {
    let mut ports = Ports::default();
    let mut out = Output::at(Timestamp::default() + NOT_ATTACHED_FOR);
    assert!(ports.are_tried());
    change(&mut ports, vec![(ROW, Some(row("a", "1")))]);
    assert!(!ports.are_tried());
    ports.not_attached(ROW, "no such device".into(), Timestamp::default());
    assert!(ports.are_tried());
    assert!(ports.deadline().is_some());
    ports.not_attached(OTHER_ROW, "gone".into(), Timestamp::default());
    ports.timeout(&mut out);
    assert_eq!(out.reports.len(), 1);
}

#[test]
fn an_interface_without_the_programs_is_reported_once_it_lasts() {
    let mut ports = Ports::default();
    change(&mut ports, vec![(ROW, Some(row("a", "1")))]);
    let reported = |ports: &mut Ports, at: Timestamp| {
        let mut out = Output::at(at);
        ports.timeout(&mut out);
        let reasons = out.reports.into_iter().map(|report| match report {
            Report::NotAttached {
                port,
                reason,
                pod_uid,
                ..
            } => format!("{port} {}: {reason}", pod_uid.unwrap_or_default()),
            other => panic!("{other:?}"),
        });
        reasons.collect::<Vec<_>>()
    };
    let start = Timestamp::default();
    let later = start + NOT_ATTACHED_FOR;
    ports.not_attached(ROW, "no such device".into(), start);
    assert_eq!(ports.deadline(), Some((later, Why::Attachment)));
    assert!(reported(&mut ports, start).is_empty());
    // The time counts from the first failure, and the last reason is told.
    ports.not_attached(ROW, "no clsact".into(), later);
    assert_eq!(reported(&mut ports, later), ["a 1: no clsact"]);
    ports.not_attached(ROW, "another".into(), later);
    assert!(reported(&mut ports, later + NOT_ATTACHED_FOR).is_empty());
    assert_eq!(ports.deadline(), None);

    ports.attached(ROW);
    ports.not_attached(ROW, "gone".into(), later);
    assert_eq!(
        reported(&mut ports, later + NOT_ATTACHED_FOR),
        ["a 1: gone"]
    );
    ports.attached(ROW);
    ports.not_attached(ROW, "a moment".into(), later);
    ports.attached(ROW);
    assert_eq!(ports.deadline(), None);
    ports.not_attached(ROW, "the pod goes".into(), later);
    change(&mut ports, vec![(ROW, None)]);
    assert_eq!(ports.deadline(), None);
    assert!(reported(&mut ports, later + NOT_ATTACHED_FOR).is_empty());
}

/// What was commanded and reported of sources.
fn trusted(out: &mut Output) -> (Vec<(RowId, usize)>, Vec<Report>) {
    let commands = std::mem::take(&mut out.commands);
    let sources = commands.into_iter().filter_map(|command| match command {
        Command::Attachment(
            AttachCommand::Attach {
                interface, sources, ..
            }
            | AttachCommand::TrustSources { interface, sources },
        ) => Some((interface, sources.ips.len())),
        _ => None,
    });
    (sources.collect(), std::mem::take(&mut out.reports))
}

fn apply(ports: &mut Ports, id: RowId, row: Interface, out: &mut Output) {
    let interfaces = vec![(id, Some(row))];
    let update = InterfaceUpdate {
        reset: false,
        interfaces,
    };
    ports.apply(update, out);
}

#[test]
fn questions_count_from_the_addresses_of_the_row() {
    let (mut ports, mut out) = (Ports::default(), Output::default());
    apply(&mut ports, ROW, row("a", "1"), &mut out);
    assert_eq!(trusted(&mut out), (vec![(ROW, 1)], vec![]));
    apply(&mut ports, ROW, row("a", "1"), &mut out);
    assert_eq!(trusted(&mut out), (vec![], vec![]), "nothing new");
    let dual = Interface {
        addresses: vec![[10, 244, 0, 5].into(), [0xfd; 16].into()],
        ..row("a", "1")
    };
    apply(&mut ports, ROW, dual, &mut out);
    assert_eq!(trusted(&mut out), (vec![(ROW, 2)], vec![]));
    let not_trusted = Report::PortNotTrusted {
        port: "a".into(),
        reason: NotTrusted::NoAddresses,
    };
    for (lacking, commands) in [
        (
            Interface {
                mac: None,
                ..row("a", "1")
            },
            vec![(ROW, 0)],
        ),
        (
            Interface {
                addresses: Vec::new(),
                ..row("a", "1")
            },
            vec![],
        ),
    ] {
        let reports = match commands.is_empty() {
            true => vec![],
            false => vec![not_trusted.clone()],
        };
        apply(&mut ports, ROW, lacking, &mut out);
        assert_eq!(trusted(&mut out), (commands, reports), "told once");
    }
}

#[test]
fn on_a_secondary_network_nothing_counts() {
    let (mut ports, mut out) = (Ports::default(), Output::default());
    let on = |network: &str| Interface {
        network: Some(network.into()),
        ..row(network, "1")
    };
    apply(&mut ports, ROW, on("blue"), &mut out);
    apply(&mut ports, OTHER_ROW, on("red"), &mut out);
    // Nobody knows yet: nothing counts, and nothing is said.
    assert_eq!(trusted(&mut out), (vec![(ROW, 0), (OTHER_ROW, 0)], vec![]));
    ports.learn_primary_networks(BTreeSet::from(["blue".into()]), &mut out);
    let secondary = |network: &str| Report::PortNotTrusted {
        port: network.into(),
        reason: NotTrusted::SecondaryNetwork(network.into()),
    };
    assert_eq!(trusted(&mut out), (vec![(ROW, 1)], vec![secondary("red")]));
    ports.learn_primary_networks(BTreeSet::new(), &mut out);
    assert_eq!(trusted(&mut out), (vec![(ROW, 0)], vec![secondary("blue")]));
}
