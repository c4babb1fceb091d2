//! OVN's databases and the first tables of its pipelines, found as the agent finds them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dnsflow_core::{
    Input,
    io::input::{FlowQuestion, FlowReply},
    ovn::{
        rows::{
            Changes, Encapsulation, GatewayPort, LoadBalancer, LogicalFlow, NbUpdate, NodeSet,
            Pipeline, RowId, Stage,
        },
        template::AclTemplate,
    },
    policy::{
        pipeline::{Locator, Question},
        rules::ACL_PRIORITY_OFFSET,
    },
};
use dnsflow_ovsdb::{Database, Remotes};
use ipnet::IpNet;
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use super::{PATIENCE, no_rows, reach};
use crate::{
    check::facts::{Northbound, Southbound},
    clock::now,
    openflow,
    ovn_db::{OvnCommand, OvnDb, nb, sb},
};

type Nb = Result<Northbound, String>;
type Sb = Result<Southbound, String>;

/// At most this many inputs of the edge wait.
const INPUTS_MAX: usize = 64;

pub(super) async fn ask(
    nb: &Remotes,
    sb: &Remotes,
    cluster_networks: &[IpNet],
    openflow: Option<openflow::Connection>,
) -> (Nb, Sb) {
    let reached = (reach(nb).await, reach(sb).await);
    let (sender, inputs) = mpsc::channel(INPUTS_MAX);
    let (commands, receiver) = mpsc::channel(INPUTS_MAX);
    let mut questions = Questions {
        inputs,
        commands,
        seen: Seen::default(),
    };
    let edge = OvnDb::new(Some(nb.clone()), Some(sb.clone())).beside(cluster_networks);
    let asked = async {
        let nb = match reached.0 {
            Ok(()) => questions.northbound().await,
            Err(reason) => Err(reason),
        };
        let none = Northbound::default();
        let sb = match reached.1 {
            Ok(()) => {
                questions
                    .southbound(nb.as_ref().unwrap_or(&none), openflow)
                    .await
            }
            Err(reason) => Err(reason),
        };
        (nb, sb)
    };
    tokio::select! {
        asked = asked => asked,
        () = edge.run(sender, receiver) => (Err(no_rows()), Err(no_rows())),
    }
}

struct Questions {
    inputs: mpsc::Receiver<Input>,
    commands: mpsc::Sender<OvnCommand>,
    seen: Seen,
}

/// What the edge has told.
#[derive(Default)]
struct Seen {
    northbound: Option<Northbound>,
    southbound: bool,
    tunnels: BTreeSet<IpAddr>,
    flows: BTreeMap<RowId, LogicalFlow>,
    watched: bool,
    sample: Option<Vec<RowId>>,
    /// Why a database gives no rows, by its name.
    too_large: BTreeMap<&'static str, String>,
}

impl Seen {
    fn add(&mut self, input: Input) {
        match input {
            // The whole; a change is one that comes beside the check.
            Input::Nb(update) if update.reset => self.northbound = Some(northbound(update)),
            Input::Sb(update) => {
                self.southbound = true;
                take(&mut self.flows, update.reset, update.logical_flows);
                let tunnels = rows(update.encapsulations);
                self.tunnels.extend(tunnels.map(|Encapsulation { ip }| ip));
            }
            Input::LargeTables { database, tables } => {
                self.too_large.remove(database);
                if let Some(table) = tables.iter().find(|table| !table.is_left_out) {
                    self.too_large.insert(database, table.to_string());
                }
            }
            Input::LogicalFlowsWatched { .. } => self.watched = true,
            Input::LogicalFlowSample { flows, .. } => self.sample = Some(flows),
            _ => {}
        }
    }
}

fn northbound(update: NbUpdate) -> Northbound {
    let gateways = rows(update.gateway_ports);
    let node_sets = rows(update.node_sets);
    let services = rows(update.load_balancers).filter(LoadBalancer::is_of_api_server);
    let mut acls = BTreeMap::new();
    take(&mut acls, true, update.acls);
    Northbound {
        acls,
        gateways: gateways
            .flat_map(|GatewayPort { addresses }| addresses)
            .collect(),
        node_set: node_sets
            .flat_map(|NodeSet { addresses }| addresses)
            .collect(),
        api_servers: services.flat_map(|service| service.backends).collect(),
    }
}

/// The rows that are there.
fn rows<Row>(changes: Changes<Row>) -> impl Iterator<Item = Row> {
    changes.into_iter().filter_map(|(_, row)| row)
}

fn take<Row>(rows: &mut BTreeMap<RowId, Row>, reset: bool, changes: Vec<(RowId, Option<Row>)>) {
    if reset {
        rows.clear();
    }
    for (id, row) in changes {
        match row {
            Some(row) => drop(rows.insert(id, row)),
            None => drop(rows.remove(&id)),
        }
    }
}

impl Questions {
    /// Reads on until `done`, which takes rows of this database.
    async fn until(
        &mut self,
        database: &Database,
        done: impl Fn(&Seen) -> bool,
    ) -> Result<(), String> {
        let read = async {
            while !done(&self.seen) {
                if let Some(reason) = self.seen.too_large.get(database.name) {
                    return Err(reason.clone());
                }
                let input = self.inputs.recv().await.ok_or_else(no_rows)?;
                self.seen.add(input);
            }
            Ok(())
        };
        timeout(PATIENCE, read)
            .await
            .unwrap_or_else(|_| Err(no_rows()))
    }

    async fn tell(&self, command: OvnCommand) -> Result<(), String> {
        self.commands.send(command).await.map_err(|_| no_rows())
    }

    async fn northbound(&mut self) -> Nb {
        self.until(&nb::DATABASE, |seen| seen.northbound.is_some())
            .await?;
        Ok(self.seen.northbound.take().unwrap_or_default())
    }

    async fn southbound(
        &mut self,
        northbound: &Northbound,
        openflow: Option<openflow::Connection>,
    ) -> Sb {
        self.until(&sb::DATABASE, |seen| seen.southbound).await?;
        let acls = northbound.acls.values();
        let priorities = acls
            .map(|acl| acl.priority.saturating_add(ACL_PRIORITY_OFFSET))
            .collect();
        self.tell(OvnCommand::WatchLogicalFlows { priorities })
            .await?;
        self.until(&sb::DATABASE, |seen| seen.watched).await?;
        let mut southbound = Southbound {
            flows: self.seen.flows.values().cloned().collect(),
            bases: BTreeMap::new(),
            tunnels: self.seen.tunnels.clone(),
        };
        let Some(mut connection) = openflow else {
            return Ok(southbound);
        };
        let stages: BTreeSet<(Pipeline, u8)> = southbound
            .flows
            .iter()
            .filter_map(|flow| AclTemplate::parse(flow).ok())
            .map(|template| (template.pipeline, template.table_id))
            .collect();
        for (pipeline, table_id) in stages {
            let located = self.base(Stage::Table(pipeline, table_id), &mut connection);
            // ovn-controller may be late; the first table is then unknown.
            if let Ok(Ok(base)) = timeout(PATIENCE, located).await {
                southbound.bases.insert(pipeline, base);
            }
        }
        Ok(southbound)
    }

    async fn base(
        &mut self,
        stage: Stage,
        connection: &mut openflow::Connection,
    ) -> Result<u8, String> {
        let mut locator = Locator::default();
        let mut question = locator.locate(stage);
        loop {
            match question.take() {
                Some(Question::Sample(stage)) => {
                    self.seen.sample = None;
                    self.tell(OvnCommand::SampleLogicalFlows(stage)).await?;
                    self.until(&sb::DATABASE, |seen| seen.sample.is_some())
                        .await?;
                    let sample = self.seen.sample.take().unwrap_or_default();
                    question = locator.sampled(stage, &sample, now());
                }
                Some(Question::Cookies(cookies)) => {
                    connection.ask(FlowQuestion::Find(cookies));
                    let event = connection.next().await;
                    if let openflow::Event::Reply(FlowReply::Found(found)) = event {
                        let found = found.iter().map(|flow| (flow.cookie, flow.table));
                        locator.found(found, now());
                    } else {
                        return Err("the switch did not say where the cookies are".into());
                    }
                }
                None => {
                    if let Some(base) = locator.base() {
                        return Ok(base);
                    }
                    let deadline = locator.deadline().ok_or("nothing to ask")?;
                    sleep(deadline.since(now())).await;
                    question = locator.retry(stage, now());
                }
            }
        }
    }
}
