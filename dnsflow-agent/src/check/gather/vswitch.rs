//! The node's Open_vSwitch database and the interfaces that it names.

use std::path::Path;

use dnsflow_ovsdb::{
    CellError, Column, Connection, Database, Remotes, Row, Table, session::Conditions,
};
use tokio::time::timeout;

use super::{PATIENCE, no_rows, reach};
use crate::{
    asking::large_table::large_table,
    capture::survey,
    check::facts::{PodInterface, Vswitch},
    vswitch_db::{OPTION, offloads},
};

const INTERFACE: &str = "Interface";

/// What is read (`vswitch.ovsschema`).
const DATABASE: Database = Database {
    name: "Open_vSwitch",
    tables: &[Table {
        name: INTERFACE,
        columns: &[
            Column::scalar("name"),
            Column::map("external_ids"),
            Column::scalar("ingress_policing_rate"),
            Column::scalar("ingress_policing_kpkts_rate"),
        ],
        purpose: "the interfaces of pods",
        remedy: "remove the interfaces that are not in use from Open vSwitch",
        deferred: false,
    }],
};

/// What the database says.
pub(super) async fn ask(remotes: &Remotes, pins: Option<&Path>) -> Result<Vswitch, String> {
    reach(remotes).await?;
    let mut connection = Connection::new(&DATABASE, Conditions::new(), remotes, OPTION);
    let synced = timeout(PATIENCE, connection.synced()).await;
    let synced = synced.map_err(|_| no_rows())?;
    synced.map_err(|large| large_table(DATABASE.name, &large).to_string())?;
    let replica = connection.replica().ok_or_else(no_rows)?;
    let links = survey::links().map_err(|error| format!("cannot list interfaces: {error}"))?;
    let mut vswitch = Vswitch::default();
    for (_, row) in replica.rows(INTERFACE) {
        let found = interface(&row).map_err(|error| error.to_string())?;
        let Some(mut interface) = found else {
            continue;
        };
        interface.link = links.get(&interface.name).cloned();
        if let Some(link) = &interface.link {
            // Without a qdisc, the kernel returns an error.
            interface.ingress_qdisc = survey::ingress_qdisc(link.ifindex).ok().flatten();
            let in_front = survey::in_front(link.ifindex, pins);
            interface.in_front = in_front.map_err(|error| error.to_string());
        }
        vswitch.interfaces.push(interface);
    }
    let offloads = timeout(PATIENCE, offloads(remotes)).await;
    vswitch.hw_offload = offloads.map_err(|_| no_rows())??;
    Ok(vswitch)
}

/// The interface of a pod; nothing if the row is not a pod's.
fn interface(row: &Row) -> Result<Option<PodInterface>, CellError> {
    let ids = row.pairs("external_ids")?;
    let Some(port) = ids.value("iface-id") else {
        return Ok(None);
    };
    // As in the agent (`Interface::is_of_pod`).
    let of_pod = ["iface-id-ver", "sandbox"].map(|key| ids.value(key).is_some());
    if of_pod == [false, false] {
        return Ok(None);
    }
    let policed = row.integer::<i64>("ingress_policing_rate")? > 0
        || row.integer::<i64>("ingress_policing_kpkts_rate")? > 0;
    Ok(Some(PodInterface {
        name: row.text("name")?.to_owned(),
        port: port.to_owned(),
        policed,
        link: None,
        ingress_qdisc: None,
        in_front: Ok(Vec::new()),
    }))
}
