//! The edge to the local Open_vSwitch database: which interface belongs to which pod.
//!
//! It only reads, and only one table: columns that the CNI or ovs-vswitchd writes once,
//! besides `external_ids`; statistics, which change all the time, are not asked for.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::{
    core::{
        Input,
        ovn::rows::{Interface, InterfaceUpdate},
    },
    ovsdb::{
        Column, Connection, Counters, Database, Event, Remotes, Row, Table,
        convert::{Conversion, Converter},
        session::Conditions,
        value::CellError,
    },
};

/// The option that names the database, for messages.
pub const OPTION: &str = "--ovs-db";
/// Where ovsdb-server listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/var/run/openvswitch/db.sock";

/// What is read (`vswitch.ovsschema`).
pub const DATABASE: Database = Database {
    name: "Open_vSwitch",
    tables: TABLES,
};

const INTERFACE: &str = "Interface";
const TABLES: &[Table] = &[Table {
    name: INTERFACE,
    columns: &[
        Column::scalar("name"),
        Column::map("external_ids"),
        Column::scalar("ofport"),
        Column::scalar("ifindex"),
        Column::scalar("ingress_policing_rate"),
    ],
    deferred: false,
}];

/// The highest number of an ordinary port (ovs-vswitchd.conf.db(5), `ofport_request`).
const OFPORT_MAX: i64 = 0xfeff;

/// The edge.
#[derive(Debug)]
pub struct VswitchDb {
    connection: Connection,
}

impl VswitchDb {
    /// The edge to the database at `remotes`, or at [`DEFAULT_SOCKET`].
    pub fn new(remotes: Option<Remotes>) -> Self {
        let remotes = remotes.unwrap_or_else(|| Remotes::unix(&[DEFAULT_SOCKET]));
        Self {
            connection: Connection::new(&DATABASE, Conditions::new(), &remotes, OPTION),
        }
    }

    /// The connection's counters.
    pub fn counters(&self) -> Arc<Counters> {
        self.connection.counters()
    }

    /// Sends [`Input::Interfaces`] until nobody receives them any more.
    pub async fn run(mut self, inputs: mpsc::Sender<Input<'static>>) {
        let mut converter = Converter::new(DATABASE.name, self.counters());
        loop {
            let event = tokio::select! {
                event = self.connection.next() => event,
                () = inputs.closed() => return,
            };
            let Some(update) = self.update(&event, &mut converter) else {
                continue;
            };
            if inputs.send(Input::Interfaces(update)).await.is_err() {
                return;
            }
        }
    }

    fn update(&self, event: &Event, converter: &mut Converter) -> Option<InterfaceUpdate> {
        let replica = self.connection.replica()?;
        match event {
            Event::Synced => {
                converter.reset();
                Some(InterfaceUpdate {
                    reset: true,
                    interfaces: converter.every(replica, INTERFACE, interface),
                })
            }
            Event::Changed(changes) => {
                let interfaces = converter.changed(replica, changes, INTERFACE, interface);
                (!interfaces.is_empty()).then_some(InterfaceUpdate {
                    reset: false,
                    interfaces,
                })
            }
            Event::Conditioned | Event::Selected { .. } => None,
        }
    }
}

/// Reads an `Interface` row; nothing where it has no `iface-id`.
pub fn interface(row: &Row) -> Conversion<Interface> {
    let ids = row.pairs("external_ids")?;
    let Some(iface_id) = ids.value("iface-id") else {
        return Ok(None);
    };
    let text = |key: &str| ids.value(key).map(str::to_owned);
    let ofport = row.optional_integer("ofport")?;
    let ifindex = row.optional_integer("ifindex")?;
    Ok(Some(Interface {
        name: row.text("name")?.to_owned(),
        iface_id: iface_id.to_owned(),
        iface_id_ver: text("iface-id-ver"),
        addresses: addresses(ids.value("ip_addresses").unwrap_or_default())?,
        mac: text("attached_mac"),
        sandbox: text("sandbox"),
        // -1 when ovs-vswitchd could not add the port (ovs-vswitchd.conf.db(5)).
        ofport: ofport
            .filter(|port| (1..=OFPORT_MAX).contains(port))
            .and_then(unsigned),
        ifindex: ifindex.filter(|index| *index != 0).and_then(unsigned),
        policing_kbps: unsigned(row.integer("ingress_policing_rate")?).unwrap_or_default(),
        external_ids: ids
            .iter()
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect(),
    }))
}

fn unsigned(value: i64) -> Option<u32> {
    u32::try_from(value).ok()
}

/// Reads addresses with or without prefix lengths, separated by commas.
fn addresses(text: &str) -> Result<Vec<std::net::IpAddr>, CellError> {
    let parts = text.split([',', ' ']).filter(|part| !part.is_empty());
    let addresses = parts.map(|part| {
        let address = part.split_once('/').map_or(part, |(address, _)| address);
        address.parse().map_err(|_| {
            CellError::new(
                "external_ids",
                format!("ip_addresses: `{part}` is no address"),
            )
        })
    });
    addresses.collect()
}

#[cfg(test)]
mod tests;
