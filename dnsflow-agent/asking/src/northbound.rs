//! Facts of OVN's northbound database, read once for somebody who asks: the addresses that ovn-kubernetes itself has
//! resolved the names of rules to, and the ports of Services. The agent does not replicate them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use dnsflow_core::{
    ask::view::{Backend, Frontend},
    ovn::hash::{Family, address_set_hashes},
    values::{flow::Protocol, name::DnsName},
};
use dnsflow_ovsdb::{
    Atom, Clause, Column, Condition, Connection, Database, Datum, Function, Remotes, Row, Table,
    session::FIRST_CONTENT_WAIT, value::endpoint,
};
use tokio::time::timeout;

use crate::large_table::large_table;

/// The option that names the northbound database, for messages.
pub const OPTION: &str = "--ovn-nb";

/// Where the northbound database listens: OpenShift, upstream ovn-kubernetes with
/// interconnect, Debian's packages.
pub const SOCKETS: &[&str] = &[
    "/var/run/ovn-ic/ovnnb_db.sock",
    "/var/run/openvswitch/ovnnb_db.sock",
    "/var/run/ovn/ovnnb_db.sock",
];

/// The name of the database (ovn-nb(5)).
pub const NAME: &str = "OVN_Northbound";
const ADDRESS_SET: &str = "Address_Set";
const LOAD_BALANCER: &str = "Load_Balancer";

const SETS: Database = Database {
    name: NAME,
    tables: &[Table {
        name: ADDRESS_SET,
        columns: &[Column::scalar("name"), Column::set("addresses")],
        purpose: "the addresses that ovn-kubernetes has resolved",
        remedy: "ask for fewer names",
        deferred: false,
    }],
};

const SERVICES: Database = Database {
    name: NAME,
    tables: &[Table {
        name: LOAD_BALANCER,
        columns: &[
            Column::scalar("name"),
            Column::scalar("protocol"),
            Column::map("vips"),
            Column::pairs("external_ids", &[OWNER, NETWORK]),
        ],
        purpose: "the ports of Services",
        remedy: "ask for an address of fewer Services",
        deferred: false,
    }],
};

// External ids of ovn-kubernetes (its go-controller/pkg/libovsdb/ops/db_object_types.go and
// go-controller/pkg/types/const.go).
/// Namespace and name of a Service.
pub const OWNER: &str = "k8s.ovn.org/owner";
/// The user-defined network that a row belongs to.
pub const NETWORK: &str = "k8s.ovn.org/network";

/// A database that cannot be connected to for this time is taken for unreachable. A connected one has
/// [`FIRST_CONTENT_WAIT`], as every other reader gives it.
const PATIENCE: Duration = Duration::from_secs(5);

/// The addresses of these names in the northbound database, by the index that comes with the name.
///
/// # Errors
///
/// When the database does not answer in time, or has more sets than are read.
pub async fn of_names(
    nb: Option<Remotes>,
    names: &[(u32, DnsName)],
) -> Result<BTreeMap<u32, BTreeSet<IpAddr>>, String> {
    let mut rules: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for (rule, name) in names {
        for family in [Family::V4, Family::V6] {
            for hash in address_set_hashes(name, family) {
                let set = rules.entry(format!("a{hash}")).or_default();
                set.push(*rule);
            }
        }
    }
    let clauses = rules.keys().map(|set| Clause::equal("name", set.as_str()));
    let mut addresses: BTreeMap<u32, BTreeSet<IpAddr>> = BTreeMap::new();
    for (name, found) in read(nb, clauses.collect()).await? {
        for rule in rules.get(&name).into_iter().flatten() {
            addresses.entry(*rule).or_default().extend(&found);
        }
    }
    Ok(addresses)
}

/// By address, the numbers in the names of the sets that have it.
///
/// # Errors
///
/// When the database does not answer in time, or has more sets than are read.
pub async fn with(
    nb: Option<Remotes>,
    addresses: &[IpAddr],
) -> Result<BTreeMap<IpAddr, BTreeSet<u64>>, String> {
    let clauses = addresses.iter().map(|address| Clause {
        column: "addresses",
        function: Function::Includes,
        value: Datum::scalar(Atom::from(&*address.to_string())),
    });
    let mut sets: BTreeMap<IpAddr, BTreeSet<u64>> = BTreeMap::new();
    for (name, found) in read(nb, clauses.collect()).await? {
        let number = name.strip_prefix('a').and_then(|name| name.parse().ok());
        let Some(number) = number else { continue };
        for address in found.iter().filter(|one| addresses.contains(one)) {
            sets.entry(*address).or_default().insert(number);
        }
    }
    Ok(sets)
}

/// The frontends of these Services, by namespace and name, without those that gateway routers alone have.
///
/// # Errors
///
/// When the database does not answer in time, or has more load balancers than are read.
pub async fn frontends(
    nb: Option<Remotes>,
    services: &BTreeSet<String>,
) -> Result<Vec<Frontend>, String> {
    let owners = services.iter();
    let clauses = owners.map(|owner| Clause::includes_pair("external_ids", OWNER, owner));
    let rows = rows(nb, &SERVICES, LOAD_BALANCER, clauses.collect(), |row| {
        Some(frontends_of(row).collect::<Vec<_>>())
    });
    Ok(rows.await?.concat())
}

/// Whether gateway routers alone have the load balancer of this name: only outside of the cluster is a Service at its
/// addresses (`_node_router_` in ovn-kubernetes' go-controller/pkg/ovn/controller/services/lb_config.go).
pub fn is_of_gateway_router(name: &str) -> bool {
    name.contains("_node_router_")
}

/// The frontends of a load balancer (ovn-nb(5), `Load_Balancer`).
fn frontends_of(row: &Row) -> impl Iterator<Item = Frontend> {
    let name = row.text("name").unwrap_or_default();
    let pairs = |column| row.pairs(column).ok();
    let ids = pairs("external_ids");
    let id = |key| ids.and_then(|ids| ids.value(key)).map(str::to_owned);
    let (service, network) = (id(OWNER).unwrap_or_default(), id(NETWORK));
    // Without one, it is TCP.
    let protocol = row.text("protocol").ok().and_then(Protocol::of_name);
    let protocol = protocol.unwrap_or(Protocol::Tcp);
    let vips = pairs("vips").filter(|_| !is_of_gateway_router(name));
    let vips = vips.into_iter().flat_map(|vips| vips.iter());
    vips.filter_map(move |(vip, backends)| {
        // A template stands for the addresses of each node.
        let (address, port) = endpoint(vip)?;
        let backends = backends.split(',').map(str::trim);
        let backends = backends.filter(|text| !text.is_empty()).map(|text| {
            let (address, port) = endpoint(text)?;
            Some(Backend { address, port })
        });
        Some(Frontend {
            service: service.clone(),
            network: network.clone(),
            address,
            protocol,
            port,
            backends: backends.collect(),
        })
    })
}

/// The sets for which one of the clauses holds: name and addresses.
async fn read(
    nb: Option<Remotes>,
    clauses: Vec<Clause>,
) -> Result<Vec<(String, Vec<IpAddr>)>, String> {
    let sets = rows(nb, &SETS, ADDRESS_SET, clauses, |row| {
        let (name, texts) = (row.text("name").ok()?, row.texts("addresses").ok()?);
        let addresses = texts.iter().filter_map(|text| text.parse().ok());
        Some((name.to_owned(), addresses.collect()))
    });
    sets.await
}

/// The rows of a table for which one of the clauses holds, each read by a function.
async fn rows<T>(
    nb: Option<Remotes>,
    database: &'static Database,
    table: &'static str,
    clauses: Vec<Clause>,
    of_row: impl Fn(&Row) -> Option<T>,
) -> Result<Vec<T>, String> {
    let nb = nb.unwrap_or_else(|| Remotes::unix(SOCKETS));
    let conditions = [(table, Condition::AnyOf(clauses))].into();
    let mut connection = Connection::new(database, conditions, &nb, OPTION);
    let mut waited = PATIENCE;
    let mut is_read = is_synced(&mut connection, PATIENCE).await?;
    if !is_read && connection.replica().is_some() {
        is_read = is_synced(&mut connection, FIRST_CONTENT_WAIT - PATIENCE).await?;
        waited = FIRST_CONTENT_WAIT;
    }
    if !is_read {
        return Err(format!(
            "OVN's northbound database does not answer within {} s; name it with {OPTION}",
            waited.as_secs()
        ));
    }
    let rows = connection.replica().into_iter();
    let rows = rows.flat_map(|replica| replica.rows(table));
    Ok(rows.filter_map(|(_, row)| of_row(&row)).collect())
}

/// Whether the first content is there within this time.
///
/// # Errors
///
/// When there are more sets than are read.
async fn is_synced(connection: &mut Connection, within: Duration) -> Result<bool, String> {
    match timeout(within, connection.synced()).await {
        Ok(Ok(())) => Ok(true),
        Ok(Err(large)) => Err(large_table(NAME, &large).to_string()),
        Err(_) => Ok(false),
    }
}

#[cfg(test)]
mod tests;
