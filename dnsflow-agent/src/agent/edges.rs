//! The edges that may take their time, on a thread of their own.
//!
//! Each owns its connections, and runs as long as the agent does.

use std::{
    any::Any,
    collections::BTreeSet,
    future::{self, Future},
    io,
    pin::Pin,
    sync::Arc,
};

use dnsflow_core::{Input, io::input::FlowQuestion, values::connection::Path};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};

use super::AgentError;
use crate::{
    api::{self, Health},
    capture::{Aside, PendingQueries},
    conntrack::{self, Conntrack},
    control::{Server, Slow},
    denied_connections::{self, Heard, Listeners, Readings},
    inquiries::Inquiries,
    journal::Journal,
    k8s::{self, Objects, events::Notices},
    logging::LogView,
    manifests,
    metrics::{DatabaseCounters, Metrics},
    node_addresses,
    one_agent::{Answering, Claim},
    open_by::OpenVswitch,
    openflow,
    options::AgentOptions,
    ovn_db::{OvnCommand, OvnDb},
    vswitch_db::VswitchDb,
    vswitchd::{self, Estimate},
};

/// Where an edge hands in what it has found.
type Inputs = mpsc::Sender<Input>;

/// What the edges are made of.
pub(super) struct Outside {
    pub(super) claim: io::Result<Option<Answering>>,
    /// Open vSwitch, if it has not said yet whether packets can be marked.
    pub(super) awaited: Option<OpenVswitch>,
    pub(super) ends: Ends,
    /// Where answers are held.
    pub(super) estimate: Option<Arc<Estimate>>,
    pub(super) databases: DatabaseCounters,
    pub(super) notices: Notices,
    pub(super) denials: Denials,
    pub(super) asking: Asking,
    pub(super) health: Arc<Health>,
}

/// The edges' ends of the channels.
pub(super) struct Ends {
    pub(super) inputs: Inputs,
    pub(super) found: Inputs,
    pub(super) edits: Inputs,
    pub(super) questions: mpsc::Receiver<FlowQuestion>,
    pub(super) conntrack_requests: mpsc::Receiver<conntrack::Request>,
    pub(super) looks: mpsc::Receiver<Vec<Path>>,
    pub(super) ovn_commands: mpsc::Receiver<OvnCommand>,
}

/// What the edge of denied connections is made of.
pub(super) struct Denials {
    pub(super) aside: Aside,
    pub(super) heard: (Heard, Readings),
    pub(super) listeners: Listeners,
}

/// What people's questions are answered from.
pub(super) struct Asking {
    pub(super) inquiries: Inquiries,
    pub(super) journal: Arc<Journal>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) queries: Arc<PendingQueries>,
    pub(super) log: LogView,
}

/// Runs the edges, until `stopped` is dropped or one of them ends.
pub(super) async fn run(
    options: AgentOptions,
    outside: Outside,
    stopped: oneshot::Receiver<()>,
) -> Result<(), AgentError> {
    let Outside {
        claim,
        awaited,
        ends,
        estimate,
        databases,
        notices,
        denials,
        asking,
        health,
    } = outside;
    let (inputs, edits) = (ends.inputs.clone(), ends.edits.clone());
    let metrics = Arc::clone(&asking.metrics);
    let mut edges = Edges::default();
    edges.start("who asks for this agent", Claim::answer(claim));
    edges.start_node(&options, ends, estimate, databases);
    let objects = Objects::default();
    edges.start_cluster(&options, (inputs.clone(), edits), notices, objects.clone());
    edges.start_people(&options, inputs, denials, asking, objects);
    if let Some(address) = options.listen {
        edges.start("HTTP clients", api::serve(address, health, metrics));
    }
    let marks_are_possible = async {
        match awaited {
            Some(switch) => switch.takes_marks().await,
            None => future::pending().await,
        }
    };
    tokio::select! {
        // Dropped, not sent.
        _ = stopped => Ok(()),
        () = marks_are_possible => Err(AgentError::MarksArePossible),
        ended = edges.first_end() => ended,
    }
}

/// The edges that run.
#[derive(Default)]
struct Edges {
    /// Each ends with its name.
    tasks: JoinSet<&'static str>,
    /// Ends of channels for which no edge runs. They stay open: to the hot thread, they are edges that are busy.
    unread: Vec<Box<dyn Any + Send>>,
}

impl Edges {
    fn start(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(task);
        self.tasks.spawn(async move {
            task.await;
            name
        });
    }

    fn leave_unread(&mut self, end: impl Send + 'static) {
        self.unread.push(Box::new(end));
    }

    /// Waits for the first one that ends, and says so.
    async fn first_end(&mut self) -> Result<(), AgentError> {
        match self.tasks.join_next().await {
            Some(Ok(name)) => Err(AgentError::EdgeStopped(name)),
            Some(Err(panic)) if panic.is_panic() => std::panic::resume_unwind(panic.into_panic()),
            Some(Err(_)) | None => Ok(()),
        }
    }

    /// Open vSwitch, connection tracking and the databases.
    fn start_node(
        &mut self,
        options: &AgentOptions,
        ends: Ends,
        estimate: Option<Arc<Estimate>>,
        databases: DatabaseCounters,
    ) {
        let Ends {
            inputs,
            found,
            edits: _,
            questions,
            conntrack_requests,
            looks,
            ovn_commands,
        } = ends;
        let socket = options.openflow_socket.path.clone();
        match estimate {
            Some(estimate) => {
                let (socket, inputs) = (socket.clone(), inputs.clone());
                let watch = async move { vswitchd::watch(&socket, &estimate, looks, inputs).await };
                self.start("ovs-vswitchd's datapath", watch);
            }
            None => self.leave_unread(looks),
        }
        let conntrack = Conntrack::new(options.ovs_db.clone(), socket.clone());
        let serving = conntrack.run(conntrack_requests, inputs.clone());
        self.start("connection tracking", serving);
        let asking = openflow::questions::ask(socket, questions, found);
        self.start("the switch, for questions", asking);
        let vswitch = VswitchDb::new(options.ovs_db.clone()).counted_by(databases.vswitch);
        self.start("Open vSwitch's database", vswitch.run(inputs.clone()));
        let ovn = OvnDb::new(options.ovn_nb.clone(), options.ovn_sb.clone())
            .counted_by(databases.northbound, databases.southbound)
            .beside(&options.cluster_networks);
        self.start("OVN's databases", ovn.run(inputs, ovn_commands));
    }

    /// The EgressFirewalls: in the cluster, with its DNS Services and Events, or in manifests.
    fn start_cluster(
        &mut self,
        options: &AgentOptions,
        (inputs, edits): (Inputs, Inputs),
        notices: Notices,
        objects: Objects,
    ) {
        let (service_networks, of_routes) = watch::channel(BTreeSet::new());
        let addresses = node_addresses::watch(inputs.clone(), service_networks);
        self.start("the addresses of this node", addresses);
        let (sender, resolvers) = mpsc::channel(1);
        let telling = node_addresses::tell_resolvers(resolvers, inputs.clone());
        let (networks_sender, networks) = mpsc::channel(1);
        let told = inputs;
        let telling_networks = node_addresses::tell_service_networks(networks, of_routes, told);
        if let Some(dir) = options.manifests.clone() {
            self.leave_unread(networks_sender);
            self.start("the networks of Services", telling_networks);
            let watch = async move {
                // There is no cluster whose DNS Services could be asked for.
                if sender.send(BTreeSet::new()).await.is_ok() {
                    manifests::watch_manifests(dir, edits, objects).await;
                }
            };
            self.leave_unread(notices);
            return self.start("the manifests", both(watch, telling));
        }
        let client = k8s::ClientOptions {
            kubeconfig: options.kubeconfig.clone(),
        };
        let events = k8s::events::post(client.clone(), notices, k8s::events::SPREAD);
        self.start("Kubernetes Events", events);
        let services = options.dns_service.clone();
        let watch = k8s::watch_dns_services(client.clone(), services, sender);
        self.start("the cluster's DNS Services", both(watch, telling));
        let watch = k8s::watch_service_cidrs(client.clone(), networks_sender);
        self.start("the networks of Services", both(watch, telling_networks));
        self.start("Kubernetes", k8s::watch(client, edits, objects));
    }

    /// Denied connections, and the control socket.
    fn start_people(
        &mut self,
        options: &AgentOptions,
        inputs: Inputs,
        denials: Denials,
        asking: Asking,
        objects: Objects,
    ) {
        let Denials {
            aside,
            heard,
            listeners,
        } = denials;
        let Asking {
            inquiries,
            journal,
            metrics,
            queries,
            log,
        } = asking;
        let slow = Slow {
            connections: listeners.connections.clone(),
            heard: heard.0.clone(),
            queries: Some(queries),
            northbound: options.ovn_nb.clone(),
            objects,
        };
        let watch = denied_connections::watch(aside, heard, inquiries.clone(), listeners);
        self.start("denied connections", watch);
        let server = Server::new(inquiries, inputs, journal, metrics, slow, log);
        let serving = server.serve(options.control_socket.path.clone());
        self.start("the control socket", serving);
    }
}

/// An edge, and what tells the core of it.
async fn both(edge: impl Future<Output = ()>, telling: impl Future<Output = ()>) {
    tokio::join!(edge, telling);
}
