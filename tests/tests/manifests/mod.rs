//! The objects of `deploy/`, and the rights that they grant: an authorizer that knows nothing else.

// Each test program uses another part of it.
#![allow(dead_code)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use clap::CommandFactory as _;
use dnsflow_agent::options::Cli;
use dnsflow_tests::support::workspace;
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Container, Namespace, PodSpec, ServiceAccount},
    rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

/// What runs the agent, built on the base.
pub(crate) const OVERLAYS: &[&str] =
    &["overlays/kind", "overlays/openshift", RESTRICTED, MONITORED];
/// What the Prometheus Operator scrapes.
pub(crate) const MONITORED: &str = "overlays/monitored";
/// The ConfigMap with the agent's options; kustomize adds a hash to the name.
pub(crate) const OPTIONS: &str = "dnsflow-options";
/// What runs the agent without `privileged`.
pub(crate) const RESTRICTED: &str = "overlays/restricted";
/// A directory of `deploy/`.
pub(crate) fn directory(name: &str) -> PathBuf {
    let workspace = workspace().expect("a workspace");
    workspace.join("deploy").join(name)
}

/// The documents of a YAML file.
pub(crate) fn documents(file: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    serde_saphyr::from_multiple(&text).with_context(|| file.display().to_string())
}

/// What `cargo xtask kind` applies beside `deploy/`, with the addresses and the node filled in.
pub(crate) fn kind_story() -> Result<Vec<Value>> {
    let directory = workspace()?.join("tests/kind");
    let mut objects = Vec::new();
    for file in ["story.yaml", "before.yaml", "after.yaml", "wildcard.yaml"] {
        let text = fs::read_to_string(directory.join(file)).with_context(|| file.to_owned())?;
        let text = text
            .replace("WWW_ADDRESS", "172.18.0.7")
            .replace("REST_ADDRESS", "172.18.0.8")
            .replace("ADDRESS_FAMILY", "IPv4")
            .replace("ANY_ADDRESS", "0.0.0.0/0")
            .replace("OTHER_ADDRESSES", "192.0.2.0/24")
            .replace("POD_IMAGE", "image")
            .replace("NODE", "node");
        let found: Vec<Value> = serde_saphyr::from_multiple(&text).context(file)?;
        objects.extend(found);
    }
    Ok(objects)
}

/// A directory's kustomization.
pub(crate) fn kustomization(directory: &Path) -> Result<Value> {
    let mut found = documents(&directory.join("kustomization.yaml"))?;
    ensure!(found.len() == 1 && found[0]["kind"] == "Kustomization");
    Ok(found.remove(0))
}

/// The objects' files that a directory's kustomization names.
pub(crate) fn resources(directory: &Path) -> Result<BTreeSet<String>> {
    let kustomization = kustomization(directory)?;
    let named = kustomization["resources"].as_array().context("resources")?;
    let named = named.iter().map(|name| name.as_str().map(str::to_owned));
    named.collect::<Option<_>>().context("names of files")
}

/// The files of options that a directory's kustomization names.
pub(crate) fn option_files(directory: &Path) -> Result<BTreeSet<String>> {
    let kustomization = kustomization(directory)?;
    let [generator] = &kustomization["configMapGenerator"]
        .as_array()
        .context("generators")?[..]
    else {
        bail!("not one generator");
    };
    ensure!(generator["name"] == OPTIONS, "{generator}");
    let named = generator["envs"].as_array().context("files")?;
    let named = named.iter().map(|name| name.as_str().map(str::to_owned));
    named.collect::<Option<_>>().context("names of files")
}

/// The variables of a file of options.
fn variables(file: &Path) -> Result<BTreeMap<String, String>> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let variables = lines.map(|line| {
        let (name, value) = line.split_once('=').context("NAME=VALUE")?;
        Ok((name.to_owned(), value.to_owned()))
    });
    variables.collect()
}

/// The object, if its type knows all its fields: what the type does not know does not come back.
pub(crate) fn typed<T: DeserializeOwned + Serialize>(value: &Value) -> Result<T> {
    let object: T = serde_json::from_value(value.clone())?;
    let back = serde_json::to_value(&object)?;
    ensure!(
        back == *value,
        "unknown fields: {value} came back as {back}"
    );
    Ok(object)
}

/// The objects of a directory as kustomize builds them, without the hash in the name of the options; `None` where there
/// is no kustomize here.
pub(crate) fn built(directory: &Path) -> Result<Option<Vec<Value>>> {
    let Some(text) = kustomized(directory)? else {
        return Ok(None);
    };
    let (_, rest) = text
        .split_once("  name: dnsflow-options-")
        .context("a ConfigMap with a hash in its name")?;
    let hash = rest.split_whitespace().next().unwrap_or_default();
    let text = text.replace(&format!("{OPTIONS}-{hash}"), OPTIONS);
    Ok(Some(serde_saphyr::from_multiple(&text)?))
}

/// What kustomize builds; `None` where there is no kustomize here.
pub(crate) fn kustomized(directory: &Path) -> Result<Option<String>> {
    let commands = ["kubectl kustomize", "kustomize build"].into_iter();
    let mut outputs = commands.filter_map(|command| {
        let (program, verb) = command.split_once(' ')?;
        Command::new(program).arg(verb).arg(directory).output().ok()
    });
    let Some(output) = outputs.next() else {
        return Ok(None);
    };
    ensure!(
        output.status.success(),
        "{}: {}",
        directory.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(Some(String::from_utf8(output.stdout)?))
}

/// The objects of one directory.
#[derive(Default)]
pub(crate) struct Objects {
    pub(crate) namespaces: Vec<Namespace>,
    pub(crate) accounts: Vec<ServiceAccount>,
    pub(crate) cluster_roles: Vec<ClusterRole>,
    pub(crate) cluster_bindings: Vec<ClusterRoleBinding>,
    pub(crate) roles: Vec<Role>,
    pub(crate) bindings: Vec<RoleBinding>,
    pub(crate) daemon_sets: Vec<DaemonSet>,
    /// Named without kustomize's hash.
    pub(crate) config_maps: Vec<ConfigMap>,
    /// The Prometheus Operator's, whose type is not at hand.
    pub(crate) pod_monitors: Vec<Value>,
    /// The same.
    pub(crate) prometheus_rules: Vec<Value>,
}

impl Objects {
    fn add(&mut self, value: &Value) -> Result<()> {
        const RBAC: Option<&str> = Some("rbac.authorization.k8s.io/v1");
        match (value["apiVersion"].as_str(), value["kind"].as_str()) {
            (Some("v1"), Some("Namespace")) => self.namespaces.push(typed(value)?),
            (Some("v1"), Some("ServiceAccount")) => self.accounts.push(typed(value)?),
            (Some("v1"), Some("ConfigMap")) => self.config_maps.push(typed(value)?),
            (RBAC, Some("ClusterRole")) => self.cluster_roles.push(typed(value)?),
            (RBAC, Some("ClusterRoleBinding")) => self.cluster_bindings.push(typed(value)?),
            (RBAC, Some("Role")) => self.roles.push(typed(value)?),
            (RBAC, Some("RoleBinding")) => self.bindings.push(typed(value)?),
            (Some("apps/v1"), Some("DaemonSet")) => self.daemon_sets.push(typed(value)?),
            (Some("monitoring.coreos.com/v1"), Some("PodMonitor")) => {
                self.pod_monitors.push(value.clone());
            }
            (Some("monitoring.coreos.com/v1"), Some("PrometheusRule")) => {
                self.prometheus_rules.push(value.clone());
            }
            (version, kind) => bail!("an object of the unknown kind {kind:?} in {version:?}"),
        }
        Ok(())
    }

    /// The base, read file by file.
    pub(crate) fn base() -> Result<Self> {
        let base = directory("base");
        let mut objects = Self::default();
        for file in resources(&base)? {
            for document in documents(&base.join(&file))? {
                objects.add(&document).with_context(|| file.clone())?;
            }
        }
        let mut options = ConfigMap::default();
        options.metadata.name = Some(OPTIONS.to_owned());
        for file in option_files(&base)? {
            let data = options.data.get_or_insert_default();
            data.extend(variables(&base.join(file))?);
        }
        objects.config_maps.push(options);
        Ok(objects)
    }

    /// A directory as kustomize builds it; `None` where there is no kustomize here.
    pub(crate) fn built(name: &str) -> Result<Option<Self>> {
        let Some(documents) = built(&directory(name))? else {
            return Ok(None);
        };
        let objects = Self::of(&documents).with_context(|| name.to_owned())?;
        Ok(Some(objects))
    }

    /// These objects.
    pub(crate) fn of(documents: &[Value]) -> Result<Self> {
        let mut objects = Self::default();
        for document in documents {
            objects.add(document)?;
        }
        Ok(objects)
    }

    /// The agent's options, by variable.
    pub(crate) fn options(&self) -> Result<&BTreeMap<String, String>> {
        let [options] = &self.config_maps[..] else {
            bail!("not one ConfigMap");
        };
        ensure!(options.metadata.name.as_deref() == Some(OPTIONS));
        options.data.as_ref().context("options")
    }

    /// The DaemonSet's Pods.
    pub(crate) fn pod(&self) -> Result<&PodSpec> {
        let [daemon_set] = &self.daemon_sets[..] else {
            bail!("not one DaemonSet");
        };
        let pod = daemon_set.spec.template.spec.as_ref();
        pod.context("a Pod's spec")
    }

    /// The only container of a Pod, beside its init containers.
    pub(crate) fn container(&self) -> Result<&Container> {
        let [container] = &self.pod()?.containers[..] else {
            bail!("not one container");
        };
        Ok(container)
    }

    /// Takes away every right to a resource.
    pub(crate) fn revoke(&mut self, resource: &str) {
        let is_other = |rule: &PolicyRule| {
            !rule
                .resources
                .iter()
                .flatten()
                .any(|named| named == resource)
        };
        let of_roles = self.roles.iter_mut().map(|role| &mut role.rules);
        let of_clusters = self.cluster_roles.iter_mut().map(|role| &mut role.rules);
        for rules in of_roles.chain(of_clusters).flatten() {
            rules.retain(is_other);
        }
    }

    /// Every right that these objects give the agent's ServiceAccount.
    ///
    /// # Errors
    ///
    /// Where a binding names a role that is not among the objects, other than OpenShift's
    /// `system:openshift:scc:privileged`, or a rule uses a wildcard.
    pub(crate) fn grants(&self) -> Result<BTreeSet<Grant>> {
        let mut grants = BTreeSet::new();
        for binding in &self.cluster_bindings {
            if self.is_agent(binding.subjects.as_deref()) {
                let rules = self.rules(&binding.role_ref, None)?;
                add_grants(&mut grants, rules, None)?;
            }
        }
        for binding in &self.bindings {
            let namespace = binding.metadata.namespace.as_deref();
            let outside = binding.role_ref.name == "system:openshift:scc:privileged";
            if self.is_agent(binding.subjects.as_deref()) && !outside {
                let rules = self.rules(&binding.role_ref, namespace)?;
                add_grants(&mut grants, rules, namespace)?;
            }
        }
        Ok(grants)
    }

    fn is_agent(&self, subjects: Option<&[Subject]>) -> bool {
        let account = |subject: &Subject| {
            subject.kind == "ServiceAccount"
                && self.accounts.iter().any(|account| {
                    account.metadata.name.as_ref() == Some(&subject.name)
                        && account.metadata.namespace == subject.namespace
                })
        };
        subjects.unwrap_or_default().iter().any(account)
    }

    fn rules(&self, role: &RoleRef, namespace: Option<&str>) -> Result<&[PolicyRule]> {
        let group = role.api_group.as_deref();
        ensure!(group == Some("rbac.authorization.k8s.io"), "{role:?}");
        let name = Some(&role.name);
        let rules = match &*role.kind {
            "ClusterRole" => self
                .cluster_roles
                .iter()
                .find(|role| role.metadata.name.as_ref() == name)
                .map(|role| &role.rules),
            "Role" => self
                .roles
                .iter()
                .find(|role| {
                    role.metadata.name.as_ref() == name
                        && role.metadata.namespace.as_deref() == namespace
                })
                .map(|role| &role.rules),
            other => bail!("a binding to a {other}"),
        };
        let rules = rules.with_context(|| format!("there is no role {}", role.name))?;
        Ok(rules.as_deref().unwrap_or_default())
    }
}

/// What the container starts, with these options written as those of its command line.
pub(crate) fn command_line(
    container: &Container,
    options: &BTreeMap<String, String>,
) -> Result<Vec<String>> {
    ensure!(container.env.is_none(), "options beside the ConfigMap");
    let [from] = container.env_from.as_deref().unwrap_or_default() else {
        bail!("not one source of variables");
    };
    let named = from.config_map_ref.as_ref().map(|named| &*named.name);
    ensure!(named == Some(OPTIONS), "{from:?}");
    let words = container.command.iter().chain(&container.args).flatten();
    let mut words: Vec<String> = words.cloned().collect();
    let name = words.get(1).context("a command")?.clone();
    let program = Cli::command();
    let command = program.find_subcommand(&name).context("a known command")?;
    let mut agent = program.get_subcommands();
    let agent = agent.find(|command| command.get_name() == "agent");
    for (variable, value) in options {
        let reads = |command: &clap::Command| {
            let mut options = command.get_arguments();
            let option = options.find(|option| option.get_env() == Some(variable.as_ref()))?;
            option.get_long().map(str::to_owned)
        };
        // All containers have the agent's environment. Each takes of it what it knows.
        let known = agent.and_then(reads);
        ensure!(known.is_some(), "nobody reads {variable}");
        if let Some(option) = reads(command) {
            words.push(format!("--{option}={value}"));
        }
    }
    Ok(words)
}

/// A right, each part of it one word.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct Grant {
    pub(crate) verb: String,
    pub(crate) group: String,
    pub(crate) resource: String,
    /// `None` for every namespace.
    pub(crate) namespace: Option<String>,
    /// `None` for every name.
    pub(crate) name: Option<String>,
}

impl Grant {
    /// Whether this right covers a request.
    pub(crate) fn allows(&self, request: &Self) -> bool {
        self.verb == request.verb
            && self.group == request.group
            && self.resource == request.resource
            && (self.namespace.is_none() || self.namespace == request.namespace)
            && (self.name.is_none() || self.name == request.name)
    }
}

fn add_grants(
    grants: &mut BTreeSet<Grant>,
    rules: &[PolicyRule],
    namespace: Option<&str>,
) -> Result<()> {
    for rule in rules {
        ensure!(rule.non_resource_urls.is_none(), "{rule:?}");
        let groups = rule.api_groups.as_deref().unwrap_or_default();
        let resources = rule.resources.as_deref().unwrap_or_default();
        let names = match rule.resource_names.as_deref() {
            None | Some([]) => vec![None],
            Some(names) => names.iter().cloned().map(Some).collect(),
        };
        for (verb, group, resource, name) in rule.verbs.iter().flat_map(|verb| {
            let names = &names;
            groups.iter().flat_map(move |group| {
                resources.iter().flat_map(move |resource| {
                    names.iter().map(move |name| (verb, group, resource, name))
                })
            })
        }) {
            ensure!(
                ![verb, group, resource].into_iter().any(|word| word == "*"),
                "a wildcard: {rule:?}"
            );
            grants.insert(Grant {
                verb: verb.clone(),
                group: group.clone(),
                resource: resource.clone(),
                namespace: namespace.map(str::to_owned),
                name: name.clone(),
            });
        }
    }
    Ok(())
}
