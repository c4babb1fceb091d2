//! An API server with EgressFirewalls, and the agent's ServiceAccount with the rights of
//! `deploy/`.

use std::path::PathBuf;

use anyhow::Result;
use dnsflow_agent::k8s::{
    ClientOptions,
    egress_firewall::{DEFINITION, EgressFirewall},
};
use dnsflow_tests::support::not_run;
use k8s_openapi::{
    api::{
        authorization::v1::{
            ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
        },
        core::v1::Service,
        events::v1::Event,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, Config, Resource,
    api::{DynamicObject, ListParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    discovery::ApiResource,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::time::{Duration, sleep, timeout};

use crate::{
    PATIENCE,
    core::{AGENT, Core},
    manifests::{Grant, Objects},
    server::{ApiServer, Programs, kubeconfig},
};

/// Which API server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// Upstream's for custom resources; the tests' own server answers for everything else.
    CustomResources,
    /// A whole one.
    Whole,
}

/// A server that knows EgressFirewalls.
pub(crate) struct Cluster {
    pub(crate) server: ApiServer,
    pub(crate) admin: Client,
    /// Beside a server for custom resources.
    pub(crate) core: Option<Core>,
    name: String,
}

impl Cluster {
    /// With the rights that `deploy/base` grants; `None` after saying why there is none.
    pub(crate) async fn start(kind: Kind, test: &str) -> Option<Self> {
        let objects = Objects::base().expect("the manifests");
        Self::start_with(kind, test, &objects).await
    }

    /// With the rights that these objects grant.
    pub(crate) async fn start_with(kind: Kind, test: &str, objects: &Objects) -> Option<Self> {
        let name = format!("{test}-{kind:?}").to_lowercase();
        let programs = tokio::task::spawn_blocking(move || match kind {
            Kind::CustomResources => Programs::custom_resources(),
            Kind::Whole => Programs::whole(),
        });
        let programs = programs
            .await
            .expect("no panic")
            .inspect_err(|why| not_run(&name, format!("{why:#}")))
            .ok()?;
        let core = match kind {
            Kind::CustomResources => {
                Some(Core::start(objects.grants().expect("the manifests")).await)
            }
            Kind::Whole => None,
        };
        let address = core.as_ref().map(|core| core.address);
        // On the test's own thread: the processes end with the thread that started them.
        let server = tokio::task::block_in_place(|| ApiServer::start(&programs, &name, address));
        let server = server.expect("the server starts");
        let of_admin = server.kubeconfig("admin", server.port);
        let admin = client(of_admin.expect("it is written")).await;
        define(&admin).await;
        let cluster = Self {
            server,
            admin,
            core,
            name,
        };
        match &cluster.core {
            Some(core) => core.pass_on(cluster.agent().await),
            None => cluster.apply(objects).await,
        }
        Some(cluster)
    }

    /// The agent's ServiceAccount and its rights.
    async fn apply(&self, objects: &Objects) {
        for object in &objects.namespaces {
            self.create_all(Api::all(self.admin.clone()), object).await;
        }
        for object in &objects.cluster_roles {
            self.create_all(Api::all(self.admin.clone()), object).await;
        }
        for object in &objects.cluster_bindings {
            self.create_all(Api::all(self.admin.clone()), object).await;
        }
        for object in &objects.accounts {
            self.create_in(&object.metadata.namespace, object).await;
        }
        for object in &objects.roles {
            self.create_in(&object.metadata.namespace, object).await;
        }
        for object in &objects.bindings {
            self.create_in(&object.metadata.namespace, object).await;
        }
        for object in &objects.daemon_sets {
            self.create_in(&object.metadata.namespace, object).await;
        }
        // Taken up a moment later, each by itself.
        let reviews = Api::<SelfSubjectAccessReview>::all(self.agent().await);
        let applied = async {
            for grant in objects.grants().expect("the manifests") {
                let review = review(grant);
                loop {
                    // Everybody may ask, once the server has made its own roles.
                    let answer = reviews.create(&PostParams::default(), &review).await;
                    let status = answer.ok().and_then(|answer| answer.status);
                    if status.is_some_and(|status| status.allowed) {
                        break;
                    }
                    sleep(Duration::from_millis(20)).await;
                }
            }
        };
        let applied = timeout(PATIENCE, applied).await;
        applied.expect("the rights are taken up");
    }

    async fn create_all<T>(&self, api: Api<T>, object: &T)
    where
        T: Resource + Clone + std::fmt::Debug + DeserializeOwned + Serialize,
    {
        let created = api.create(&PostParams::default(), object).await;
        created.expect("it is stored");
    }

    async fn create_in<T>(&self, namespace: &Option<String>, object: &T)
    where
        T: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned
            + Serialize,
    {
        let namespace = namespace.as_deref().expect("a namespace");
        let api = Api::namespaced(self.admin.clone(), namespace);
        self.create_all(api, object).await;
    }

    pub(crate) fn firewalls(&self, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.admin.clone(), namespace, &resource())
    }

    /// Creates one as written; the server's answer.
    pub(crate) async fn create(
        &self,
        namespace: &str,
        egress: Value,
    ) -> Result<DynamicObject, kube::Error> {
        let object = serde_json::from_value(firewall(namespace, egress)).expect("an object");
        self.firewalls(namespace)
            .create(&PostParams::default(), &object)
            .await
    }

    /// Has this Service.
    pub(crate) async fn add_service(&self, service: Value) {
        let service: Service = serde_json::from_value(service).expect("a Service");
        match &self.core {
            Some(core) => core.add_service(service),
            None => {
                self.create_in(&service.metadata.namespace, &service).await;
            }
        }
    }

    /// The Events of a namespace.
    pub(crate) async fn events(&self, namespace: &str) -> Vec<Event> {
        match &self.core {
            Some(core) => core.events(),
            None => {
                let events = Api::<Event>::namespaced(self.admin.clone(), namespace);
                let found = events.list(&ListParams::default()).await;
                found.expect("a list").items
            }
        }
    }

    /// The agent's way to the EgressFirewalls.
    pub(crate) async fn agent(&self) -> Client {
        let kubeconfig = self.server.kubeconfig("agent", self.server.port);
        client(kubeconfig.expect("it is written")).await
    }

    /// The agent's way to everything.
    pub(crate) fn agent_options(&self) -> ClientOptions {
        let path = match &self.core {
            None => self.server.kubeconfig("agent", self.server.port),
            Some(core) => {
                let address = format!("http://{}", core.address);
                let user = json!({"token": AGENT});
                let text = kubeconfig(&address, json!({}), user).to_string();
                self.server.write("agent-core.kubeconfig", &text)
            }
        };
        ClientOptions {
            kubeconfig: Some(path.expect("it is written")),
        }
    }

    /// Nothing that was asked for was refused, and something was asked for at all. A whole server
    /// does not say; there, what is refused does not work.
    pub(crate) fn assert_all_allowed(&self) {
        let Some(core) = &self.core else { return };
        let asked = core.asked();
        assert!(!asked.is_empty(), "{}: nothing was judged", self.name);
        let denied: Vec<&Grant> = asked
            .iter()
            .filter_map(|(grant, allowed)| (!allowed).then_some(grant))
            .collect();
        assert!(denied.is_empty(), "{}: {denied:?}", self.name);
    }
}

/// The question whether one has this right oneself.
fn review(grant: Grant) -> SelfSubjectAccessReview {
    SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                verb: Some(grant.verb),
                group: Some(grant.group),
                resource: Some(grant.resource),
                namespace: grant.namespace,
                name: grant.name,
                ..ResourceAttributes::default()
            }),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    }
}

pub(crate) fn resource() -> ApiResource {
    ApiResource::erase::<EgressFirewall>(&())
}

pub(crate) fn firewall(namespace: &str, egress: Value) -> Value {
    json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
        "metadata": {"name": "default", "namespace": namespace},
        "spec": {"egress": egress},
    })
}

pub(crate) async fn client(kubeconfig: PathBuf) -> Client {
    let file = Kubeconfig::read_from(kubeconfig).expect("a kubeconfig");
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .expect("a configuration");
    Client::try_from(config).expect("a client")
}

/// Defines the EgressFirewall as `dnsflow crd` prints it.
async fn define(admin: &Client) {
    let definition: Value = serde_saphyr::from_str(DEFINITION).expect("YAML");
    let definition: CustomResourceDefinition =
        serde_json::from_value(definition).expect("a definition");
    let definitions = Api::<CustomResourceDefinition>::all(admin.clone());
    let created = async {
        // It listens before it is ready for writes.
        while let Err(error) = definitions
            .create(&PostParams::default(), &definition)
            .await
        {
            if matches!(&error, kube::Error::Api(status) if status.code == 409) {
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
        let firewalls = Api::<DynamicObject>::all_with(admin.clone(), &resource());
        while firewalls.list(&ListParams::default()).await.is_err() {
            sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(PATIENCE, created)
        .await
        .expect("the definition is taken");
}
