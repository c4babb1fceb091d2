//! The bridge's connection tracking, from the Open_vSwitch database: its datapath, and the zones.
//!
//! ovn-controller writes the zone of each logical port into the bridge's `external_ids`, as `ct-zone-<port>`
//! (`ct_zones_commit` in OVN's controller/ovn-controller.c and, since 24.09, controller/ct-zone.c; the same in 23.03,
//! 25.03 and 26.03), and reads it from there at its next start. The zones of routers are there as well, as
//! `ct-zone-<datapath>_dnat` and `_snat`. No logical port has such a name, so the core finds nothing for them.

use dnsflow_ovsdb::{Column, Database, Row, Table};

use super::{BlockedConnection, Tracked, Zones};
use crate::databases::Conversion;

/// What is read (`vswitch.ovsschema`).
pub(super) const DATABASE: Database = Database {
    name: "Open_vSwitch",
    tables: &[Table {
        name: BRIDGE,
        columns: &[
            Column::scalar("name"),
            Column::scalar("datapath_type"),
            Column::map("external_ids"),
        ],
        purpose: "the zones of connection tracking",
        remedy: "make the external_ids of the bridges shorter",
        deferred: false,
    }],
};

pub(super) const BRIDGE: &str = "Bridge";

/// The datapath that forwards the bridge's packets and tracks their connections.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Datapath {
    /// The kernel (`system`, and the default).
    Kernel,
    /// ovs-vswitchd itself (`netdev`).
    Userspace,
}

/// The bridge.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Bridge {
    pub(super) datapath: Datapath,
    pub(super) zones: Zones,
}

/// Reads a `Bridge` row; nothing if it is another bridge's.
pub(super) fn bridge(row: &Row, name: &str) -> Conversion<Bridge> {
    if row.text("name")? != name {
        return Ok(None);
    }
    let zones = row.pairs("external_ids")?;
    let zones = zones.iter().filter_map(|(key, zone)| {
        let port = key.strip_prefix("ct-zone-")?;
        Some((zone.parse().ok()?, port.to_owned()))
    });
    Ok(Some(Bridge {
        datapath: match row.text("datapath_type")? {
            "netdev" => Datapath::Userspace,
            _ => Datapath::Kernel,
        },
        // Zone 0 is everybody's.
        zones: zones.filter(|(zone, _)| *zone != 0).collect(),
    }))
}

impl Bridge {
    /// The connections in the zones of logical ports, with their ports.
    pub(super) fn at_ports(&self, connections: Vec<Tracked>) -> Vec<BlockedConnection> {
        let at_port = |tracked: Tracked| {
            let Tracked {
                zone,
                protocol,
                src,
                dst,
            } = tracked;
            Some(BlockedConnection {
                port: self.zones.get(&zone)?.clone(),
                zone,
                protocol,
                src: src.ip(),
                src_port: src.port(),
                dst: dst.ip(),
                dst_port: dst.port(),
            })
        };
        connections.into_iter().filter_map(at_port).collect()
    }
}

#[cfg(test)]
mod tests {
    use dnsflow_core::values::flow::Protocol;
    use dnsflow_ovsdb::Replica;
    use serde_json::json;

    use super::*;

    fn read(name: &str, datapath: &str) -> Option<Bridge> {
        let ids = json!([
            "map",
            [
                ["ct-zone-ns1_pod1", "7"],
                ["ct-zone-GR_node_snat", "4"],
                ["ct-zone-odd", "70000"],
                ["ct-zone-none", "0"],
                ["ovn-nb-cfg", "3"],
            ]
        ]);
        let row = json!({"name": "br-int", "datapath_type": datapath, "external_ids": ids});
        let id = "81d851b7-3bd4-4462-befa-02c878e1854b";
        let mut replica = Replica::new(&DATABASE);
        let update = json!({ "Bridge": { id: { "initial": row } } });
        replica.apply_value(update).expect("a row");
        let (_, row) = replica.rows(BRIDGE).next().expect("one row");
        bridge(&row, name).expect("it is readable")
    }

    #[test]
    fn a_bridge_names_its_datapath_and_the_zones_of_ports() {
        for (datapath, wanted) in [
            ("", Datapath::Kernel),
            ("system", Datapath::Kernel),
            ("netdev", Datapath::Userspace),
        ] {
            let bridge = read("br-int", datapath).expect("it is the bridge");
            assert_eq!(bridge.datapath, wanted, "{datapath}");
            let zones = [(7, "ns1_pod1".to_owned()), (4, "GR_node_snat".to_owned())];
            assert_eq!(bridge.zones, zones.into());
        }
        assert_eq!(read("br-ex", "netdev"), None);
    }

    #[test]
    fn connections_outside_the_zones_of_ports_are_left_out() {
        let bridge = read("br-int", "netdev").expect("it is the bridge");
        let tracked = |zone| Tracked {
            zone,
            protocol: Protocol::Tcp,
            src: "10.244.0.5:40000".parse().expect("an address"),
            dst: "203.0.113.2:443".parse().expect("an address"),
        };
        let found = bridge.at_ports(vec![tracked(0), tracked(7), tracked(64_000)]);
        let ports: Vec<_> = found
            .iter()
            .map(|found| (&*found.port, found.zone))
            .collect();
        assert_eq!(ports, [("ns1_pod1", 7)]);
    }
}
