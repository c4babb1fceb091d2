//! The edge to the local Open_vSwitch database: which interface belongs to which pod, and how long
//! ovs-vswitchd keeps a megaflow.
//!
//! The edge only reads, and only columns that rarely change: statistics, which change all the time,
//! are not replicated.

use std::{sync::Arc, time::Duration};

use dnsflow_core::{
    Input,
    ovn::rows::{Interface, InterfaceUpdate, MacAddress},
    values::limits::MEGAFLOW_IDLE,
};
use dnsflow_ovsdb::{
    CellError, Column, Connection, Database, Event, OvsdbCounters, Remotes, Row, Table,
    session::Conditions,
};
use tokio::sync::mpsc;

use crate::databases::{Conversion, Converter, log_large_tables, take_large_tables};

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
const OPEN_VSWITCH: &str = "Open_vSwitch";
const TABLES: &[Table] = &[
    Table {
        name: INTERFACE,
        columns: &[
            Column::scalar("name"),
            Column::map("external_ids"),
            Column::scalar("ifindex"),
            Column::scalar("ingress_policing_rate"),
        ],
        purpose: "the interfaces of pods",
        remedy: "remove the interfaces that are not in use from Open vSwitch",
        deferred: false,
    },
    SETTINGS,
];

const SETTINGS: Table = Table {
    name: OPEN_VSWITCH,
    columns: &[Column::map("other_config")],
    purpose: "the settings of Open vSwitch",
    remedy: "make its other_config shorter",
    deferred: false,
};

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

    /// The same with these counters of the connection.
    pub fn counted_by(self, counters: Arc<OvsdbCounters>) -> Self {
        Self {
            connection: self.connection.counted_by(counters),
        }
    }

    /// Sends [`Input::MegaflowsIdle`], [`Input::Interfaces`] and [`Input::LargeTables`] until the channel is closed.
    pub async fn run(mut self, inputs: mpsc::Sender<Input>) {
        let mut converter = Converter::new(DATABASE.name, self.connection.counters());
        let mut idle = MEGAFLOW_IDLE;
        loop {
            let event = tokio::select! {
                event = self.connection.next() => event,
                () = inputs.closed() => return,
            };
            if let Some(large) = take_large_tables(&mut self.connection)
                && inputs.send(large).await.is_err()
            {
                return;
            }
            let read = self.megaflows_idle(&mut converter).unwrap_or(idle);
            if read != idle {
                idle = read;
                if inputs.send(Input::MegaflowsIdle(idle)).await.is_err() {
                    return;
                }
            }
            let Some(update) = self.update(&event, &mut converter) else {
                continue;
            };
            if inputs.send(Input::Interfaces(update)).await.is_err() {
                return;
            }
        }
    }

    /// `None` while nothing has been read.
    fn megaflows_idle(&self, converter: &mut Converter) -> Option<Duration> {
        let rows = converter.every(self.connection.replica()?, OPEN_VSWITCH, megaflows_idle);
        rows.into_iter().find_map(|(_, idle)| idle)
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
            Event::Conditioned | Event::Selected { .. } | Event::TooLarge(_) => None,
        }
    }
}

/// Reads an `Interface` row; nothing if the row is not one of a pod, as ovn-kubernetes plugs them in.
pub fn interface(row: &Row) -> Conversion<Interface> {
    let ids = row.pairs("external_ids")?;
    let Some(iface_id) = ids.value("iface-id") else {
        return Ok(None);
    };
    let text = |key: &str| ids.value(key).map(str::to_owned);
    let ifindex = row.optional_integer("ifindex")?;
    let interface = Interface {
        name: row.text("name")?.into(),
        iface_id: iface_id.to_owned(),
        iface_id_ver: text("iface-id-ver"),
        addresses: addresses(ids.value("ip_addresses").unwrap_or_default())?,
        mac: ids.value("attached_mac").map(mac).transpose()?,
        network: text("k8s.ovn.org/network"),
        sandbox: text("sandbox"),
        ifindex: ifindex.filter(|index| *index != 0).and_then(unsigned),
        policing_kbps: unsigned(row.integer("ingress_policing_rate")?).unwrap_or_default(),
    };
    Ok(Some(interface).filter(Interface::is_of_pod))
}

/// Whether Open vSwitch may offload flows to hardware (`other_config:hw-offload`, ovs-vswitchd.conf.db(5)). Asks until
/// there is an answer.
///
/// # Errors
///
/// If the row is not as the schema says.
pub async fn offloads(remotes: &Remotes) -> Result<bool, String> {
    const DATABASE: Database = Database {
        name: "Open_vSwitch",
        tables: &[SETTINGS],
    };
    let mut connection = Connection::new(&DATABASE, Conditions::new(), remotes, OPTION);
    while connection.next().await != Event::Synced {
        log_large_tables(&mut connection);
    }
    let rows = connection
        .replica()
        .into_iter()
        .flat_map(|replica| replica.rows(OPEN_VSWITCH));
    for (_, row) in rows {
        let config = row
            .pairs("other_config")
            .map_err(|error| error.to_string())?;
        if config.value("hw-offload") == Some("true") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// How long a megaflow can exist after its last packet, by an `Open_vSwitch` row
/// (`other_config:max-idle` and `max-revalidator`, in milliseconds, ovs-vswitchd.conf.db(5)). A
/// time shorter than the default does not count.
fn megaflows_idle(row: &Row) -> Conversion<Duration> {
    let config = row.pairs("other_config")?;
    let time = |key: &str, default: u64| {
        let configured = config.value(key).and_then(|text| text.parse().ok());
        Duration::from_millis(configured.unwrap_or(default))
    };
    let idle = time("max-idle", 10_000).saturating_add(time("max-revalidator", 500));
    Ok(Some(idle.max(MEGAFLOW_IDLE)))
}

fn unsigned(value: i64) -> Option<u32> {
    u32::try_from(value).ok()
}

/// Reads an Ethernet address.
fn mac(text: &str) -> Result<MacAddress, CellError> {
    MacAddress::parse(text).ok_or_else(|| {
        CellError::new(
            "external_ids",
            format!("attached_mac: `{text}` is no Ethernet address"),
        )
    })
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
