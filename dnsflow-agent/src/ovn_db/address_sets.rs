//! The addresses that ovn-kubernetes itself has resolved the names of rules to, read once for somebody who
//! asks. The agent does not replicate them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use dnsflow_core::{
    name::DnsName,
    ovn::hash::{Family, address_set_hashes},
};
use tokio::time::timeout;

use super::{NB_OPTION, NB_SOCKETS};
use crate::ovsdb::{Clause, Column, Condition, Connection, Database, Event, Remotes, Table};

const ADDRESS_SET: &str = "Address_Set";

const DATABASE: Database = Database {
    name: "OVN_Northbound",
    tables: &[Table {
        name: ADDRESS_SET,
        columns: &[Column::scalar("name"), Column::set("addresses")],
        deferred: false,
    }],
};

/// A database that has not answered after this time is taken for unreachable.
const PATIENCE: Duration = Duration::from_secs(5);

/// The addresses of these names in the northbound database, by the index that comes with the name.
///
/// # Errors
///
/// When the database does not answer in time.
pub(crate) async fn of_names(
    nb: Option<Remotes>,
    names: &[(u32, DnsName)],
) -> Result<BTreeMap<u32, BTreeSet<IpAddr>>, String> {
    let nb = nb.unwrap_or_else(|| Remotes::unix(NB_SOCKETS));
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
    let condition = Condition::AnyOf(clauses.collect());
    let conditions = [(ADDRESS_SET, condition)].into();
    let mut connection = Connection::new(&DATABASE, conditions, &nb, NB_OPTION);
    let synced = async { while connection.next().await != Event::Synced {} };
    if timeout(PATIENCE, synced).await.is_err() {
        return Err(format!(
            "OVN's northbound database does not answer within {} s; name it with {NB_OPTION}",
            PATIENCE.as_secs()
        ));
    }
    let mut addresses: BTreeMap<u32, BTreeSet<IpAddr>> = BTreeMap::new();
    let rows = connection.replica().into_iter();
    for (_, row) in rows.flat_map(|replica| replica.rows(ADDRESS_SET)) {
        let (Ok(name), Ok(texts)) = (row.text("name"), row.texts("addresses")) else {
            continue;
        };
        let found: Vec<IpAddr> = texts.iter().filter_map(|text| text.parse().ok()).collect();
        for rule in rules.get(name).into_iter().flatten() {
            addresses.entry(*rule).or_default().extend(&found);
        }
    }
    Ok(addresses)
}
