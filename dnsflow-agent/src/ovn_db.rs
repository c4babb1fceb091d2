//! The edge to OVN's northbound and southbound databases: the ACLs of EgressFirewalls, ports, port groups, and the
//! logical flows of the ACLs.
//!
//! It only reads. It never replicates all of `Logical_Flow`, which can have hundreds of thousands of rows: its
//! monitor has a condition on priorities. All clauses of the condition compare the same column by `==`, so
//! ovsdb-server looks a changed row up in a hash table. Measured with 300,000 logical flows (ovsdb-server 3.1 and
//! 3.5, on one of two shared cores): a monitor of up to 4,000 priorities does not measurably change the cost of a
//! transaction on 1,000 other rows. A wanted row arrives 0.1 ms (median) after its transaction was sent. Each change
//! of the condition costs the server about 100 ms once. A single `select` by stage-hint costs it 115 ms every time.

use std::{collections::BTreeSet, sync::Arc};

use dnsflow_core::{
    Input,
    io::input::LOGICAL_FLOW_SAMPLE_MAX,
    ovn::rows::{NbUpdate, Pipeline, SbUpdate, Stage},
};
use dnsflow_ovsdb::{
    Clause, Condition, Connection, Event, OvsdbCounters, Remotes, TableLimits, Uuid,
    session::ServerError,
};
use ipnet::IpNet;
use tokio::{sync::mpsc, task::JoinSet};

use self::balancers::Balancers;
use crate::{
    asking::northbound,
    databases::{Converter, row_id, take_large_tables},
};

mod balancers;
pub mod nb;
pub mod sb;

/// The option that names the southbound database, for messages.
const SB_OPTION: &str = "--ovn-sb";

/// Where the southbound database listens; see [`northbound::SOCKETS`].
pub const SB_SOCKETS: &[&str] = &[
    "/var/run/ovn-ic/ovnsb_db.sock",
    "/var/run/openvswitch/ovnsb_db.sock",
    "/var/run/ovn/ovnsb_db.sock",
];

/// The requests of the core to this edge.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum OvnCommand {
    /// `Command::WatchLogicalFlows`.
    WatchLogicalFlows {
        /// `Logical_Flow.priority` values.
        priorities: BTreeSet<u16>,
    },
    /// `Command::SampleLogicalFlows`. The answer comes once, if necessary after a reconnect. A
    /// second request for the same stage before the answer changes nothing.
    SampleLogicalFlows(Stage),
}

/// The edge.
#[derive(Debug)]
pub struct OvnDb {
    nb: Connection,
    sb: Connection,
}

impl OvnDb {
    /// The edge to the databases at these addresses, or at the usual sockets.
    pub fn new(nb: Option<Remotes>, sb: Option<Remotes>) -> Self {
        let nb = nb.unwrap_or_else(|| Remotes::unix(northbound::SOCKETS));
        let sb = sb.unwrap_or_else(|| Remotes::unix(SB_SOCKETS));
        Self {
            nb: Connection::new(&nb::DATABASE, nb::conditions(), &nb, northbound::OPTION),
            sb: Connection::new(&sb::DATABASE, sb::conditions(), &sb, SB_OPTION),
        }
    }

    /// The same with these counters of both connections.
    pub fn counted_by(
        self,
        northbound: Arc<OvsdbCounters>,
        southbound: Arc<OvsdbCounters>,
    ) -> Self {
        Self {
            nb: self.nb.counted_by(northbound),
            sb: self.sb.counted_by(southbound),
        }
    }

    /// The same beside these networks of the cluster (`--cluster-networks`). With some, it goes on without load balancers
    /// if they are too many: then no address is marked. Without, a name could lead to a Service that nobody knows.
    pub fn beside(self, cluster_networks: &[IpNet]) -> Self {
        let optional = match cluster_networks {
            [] => nb::OF_VARIABLES,
            _ => nb::OF_SERVICES,
        };
        Self {
            nb: self.nb.without_large(optional),
            ..self
        }
    }

    /// The same with other limits of the tables.
    pub fn limited_to(self, limits: TableLimits) -> Self {
        Self {
            nb: self.nb.limited_to(limits),
            sb: self.sb.limited_to(limits),
        }
    }

    /// Sends [`Input::Nb`], [`Input::Sb`], [`Input::LargeTables`] and [`Input::LogicalFlowSample`] until the channel is
    /// closed. Runs two tasks, one for each database; both end with this future.
    pub async fn run(self, inputs: mpsc::Sender<Input>, commands: mpsc::Receiver<OvnCommand>) {
        let mut tasks = JoinSet::new();
        tasks.spawn(run_nb(self.nb, inputs.clone()));
        tasks.spawn(run_sb(self.sb, inputs, commands));
        while tasks.join_next().await.is_some() {}
    }
}

async fn run_nb(mut connection: Connection, inputs: mpsc::Sender<Input>) {
    let mut converter = Converter::new(nb::DATABASE.name, connection.counters());
    let mut balancers = Balancers::default();
    loop {
        let event = tokio::select! {
            event = connection.next() => event,
            () = inputs.closed() => return,
        };
        let large = take_large_tables(&mut connection);
        let update = nb_update(&connection, &event, &mut converter, &mut balancers);
        for input in large.into_iter().chain(update.map(Input::Nb)) {
            if inputs.send(input).await.is_err() {
                return;
            }
        }
    }
}

fn nb_update(
    connection: &Connection,
    event: &Event,
    converter: &mut Converter,
    balancers: &mut Balancers,
) -> Option<NbUpdate> {
    let replica = connection.replica()?;
    match event {
        Event::Synced => {
            converter.reset();
            Some(nb::whole(replica, converter, balancers))
        }
        Event::Changed(changes) => {
            let update = nb::changed(replica, changes, converter, balancers);
            (update != NbUpdate::default()).then_some(update)
        }
        Event::Conditioned | Event::Selected { .. } | Event::TooLarge(_) => None,
    }
}

async fn run_sb(
    connection: Connection,
    inputs: mpsc::Sender<Input>,
    mut commands: mpsc::Receiver<OvnCommand>,
) {
    let mut southbound = Southbound {
        converter: Converter::new(sb::DATABASE.name, connection.counters()),
        connection,
        samples: BTreeSet::new(),
        watched: None,
    };
    loop {
        let news = tokio::select! {
            event = southbound.connection.next() => southbound.event(event),
            Some(command) = commands.recv() => southbound.command(command),
            () = inputs.closed() => return,
        };
        for input in news {
            if inputs.send(input).await.is_err() {
                return;
            }
        }
    }
}

struct Southbound {
    connection: Connection,
    converter: Converter,
    /// Stages whose sample was not answered yet.
    samples: BTreeSet<Stage>,
    /// Priorities whose logical flows are wanted.
    watched: Option<BTreeSet<u16>>,
}

impl Southbound {
    fn command(&mut self, command: OvnCommand) -> Vec<Input> {
        match command {
            OvnCommand::WatchLogicalFlows { priorities } => {
                let clauses = priorities.iter().copied().map(sb::priority_is).collect();
                self.watched = Some(priorities);
                let condition = Condition::AnyOf(clauses);
                if !self.connection.set_condition(sb::LOGICAL_FLOW, condition) {
                    return self.watching();
                }
            }
            OvnCommand::SampleLogicalFlows(stage) => {
                if self.samples.insert(stage) {
                    self.sample(stage);
                }
            }
        }
        Vec::new()
    }

    /// All wanted logical flows have been sent.
    fn watching(&self) -> Vec<Input> {
        let watched = self.watched.iter().cloned();
        watched
            .map(|priorities| Input::LogicalFlowsWatched { priorities })
            .collect()
    }

    fn sample(&mut self, stage: Stage) {
        let clauses: Vec<Clause> = sb::last_of_stage(stage);
        self.connection
            .select(tag(stage), sb::LOGICAL_FLOW, &clauses);
    }

    fn event(&mut self, event: Event) -> Vec<Input> {
        let mut news = Vec::from_iter(take_large_tables(&mut self.connection));
        news.extend(self.rows(event));
        news
    }

    fn rows(&mut self, event: Event) -> Vec<Input> {
        let Some(replica) = self.connection.replica() else {
            return Vec::new();
        };
        match event {
            Event::Synced => {
                self.converter.reset();
                let mut news = vec![Input::Sb(sb::whole(replica, &mut self.converter))];
                for stage in self.samples.clone() {
                    self.sample(stage);
                }
                news.extend(self.watching());
                news
            }
            Event::Changed(changes) => {
                let update = sb::changed(replica, &changes, &mut self.converter);
                let news = (update != SbUpdate::default()).then_some(Input::Sb(update));
                news.into_iter().collect()
            }
            Event::Conditioned => self.watching(),
            Event::Selected { tag, rows } => self.selected(tag, rows),
            Event::TooLarge(_) => Vec::new(),
        }
    }

    fn selected(&mut self, asked: u64, rows: Result<Vec<Uuid>, ServerError>) -> Vec<Input> {
        let mut samples = self.samples.iter();
        let sample = samples.find(|stage| tag(**stage) == asked);
        let Some(stage) = sample.copied() else {
            return Vec::new();
        };
        self.samples.remove(&stage);
        let flows = rows.unwrap_or_else(|error| {
            tracing::warn!(
                database = sb::DATABASE.name,
                table = sb::LOGICAL_FLOW,
                %error,
                "OVN's southbound database refused a select",
            );
            Vec::new()
        });
        let flows = flows.into_iter().map(row_id);
        vec![Input::LogicalFlowSample {
            stage,
            flows: flows.take(LOGICAL_FLOW_SAMPLE_MAX).collect(),
        }]
    }
}

fn tag(stage: Stage) -> u64 {
    match stage {
        Stage::Table(Pipeline::Ingress, table_id) => u64::from(table_id),
        Stage::Table(Pipeline::Egress, table_id) => 1 << 8 | u64::from(table_id),
        Stage::OutPortSecurity => 1 << 9,
    }
}

#[cfg(test)]
mod tests;
