//! The manifests in `deploy/` say what Kubernetes understands, and fit together.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Namespace, ServiceAccount},
    rbac::v1::{ClusterRole, ClusterRoleBinding},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

fn base() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/base")
}

fn documents(file: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    serde_saphyr::from_multiple(&text).with_context(|| file.display().to_string())
}

/// The object, if its type knows all its fields: what the type does not know does not come back.
fn typed<T: DeserializeOwned + Serialize>(value: &Value) -> Result<T> {
    let object: T = serde_json::from_value(value.clone())?;
    let back = serde_json::to_value(&object)?;
    ensure!(
        back == *value,
        "unknown fields: {value} came back as {back}"
    );
    Ok(object)
}

#[derive(Default)]
struct Objects {
    namespaces: Vec<Namespace>,
    accounts: Vec<ServiceAccount>,
    roles: Vec<ClusterRole>,
    bindings: Vec<ClusterRoleBinding>,
    daemon_sets: Vec<DaemonSet>,
}

impl Objects {
    fn add(&mut self, value: &Value) -> Result<()> {
        match (value["apiVersion"].as_str(), value["kind"].as_str()) {
            (Some("v1"), Some("Namespace")) => self.namespaces.push(typed(value)?),
            (Some("v1"), Some("ServiceAccount")) => self.accounts.push(typed(value)?),
            (Some("rbac.authorization.k8s.io/v1"), Some("ClusterRole")) => {
                self.roles.push(typed(value)?);
            }
            (Some("rbac.authorization.k8s.io/v1"), Some("ClusterRoleBinding")) => {
                self.bindings.push(typed(value)?);
            }
            (Some("apps/v1"), Some("DaemonSet")) => self.daemon_sets.push(typed(value)?),
            (version, kind) => bail!("an object of the unknown kind {kind:?} in {version:?}"),
        }
        Ok(())
    }

    fn read() -> Result<Self> {
        let mut objects = Self::default();
        for file in resources()? {
            for document in documents(&base().join(&file))? {
                objects.add(&document).with_context(|| file.clone())?;
            }
        }
        Ok(objects)
    }
}

/// The files that the kustomization names.
fn resources() -> Result<BTreeSet<String>> {
    let kustomization = documents(&base().join("kustomization.yaml"))?;
    ensure!(kustomization.len() == 1 && kustomization[0]["kind"] == "Kustomization");
    let named = kustomization[0]["resources"]
        .as_array()
        .context("resources")?;
    let named = named.iter().map(|name| name.as_str().map(str::to_owned));
    named.collect::<Option<_>>().context("names of files")
}

#[test]
fn the_kustomization_names_every_manifest() -> Result<()> {
    let mut files = BTreeSet::new();
    for entry in base().read_dir()? {
        files.insert(entry?.file_name().to_string_lossy().into_owned());
    }
    files.remove("kustomization.yaml");
    assert_eq!(resources()?, files);
    Ok(())
}

#[test]
fn every_object_is_of_a_known_kind_without_unknown_fields() -> Result<()> {
    let objects = Objects::read()?;
    assert_eq!(objects.namespaces.len(), 1);
    assert_eq!(objects.daemon_sets.len(), 1);
    Ok(())
}

#[test]
fn the_agent_may_read_egress_firewalls_and_nothing_else() -> Result<()> {
    let objects = Objects::read()?;
    let namespace = &objects.namespaces[0].metadata.name;
    let (account, role) = (&objects.accounts[0].metadata, &objects.roles[0]);
    let binding = &objects.bindings[0];
    assert_eq!(
        (
            objects.accounts.len(),
            objects.roles.len(),
            objects.bindings.len()
        ),
        (1, 1, 1)
    );
    assert_eq!(&account.namespace, namespace);
    let subjects = binding.subjects.as_deref().unwrap_or_default();
    assert_eq!(subjects.len(), 1);
    assert_eq!(Some(&subjects[0].name), account.name.as_ref());
    assert_eq!(&subjects[0].namespace, namespace);
    assert_eq!(subjects[0].kind, "ServiceAccount");
    assert_eq!(binding.role_ref.kind, "ClusterRole");
    assert_eq!(Some(&binding.role_ref.name), role.metadata.name.as_ref());
    let rules = serde_json::to_value(&role.rules)?;
    assert_eq!(
        rules,
        serde_json::json!([{
            "apiGroups": ["k8s.ovn.org"],
            "resources": ["egressfirewalls"],
            "verbs": ["get", "list", "watch"],
        }])
    );
    Ok(())
}

#[test]
fn the_daemon_set_fits_together() -> Result<()> {
    let objects = Objects::read()?;
    let daemon_set = &objects.daemon_sets[0];
    assert_eq!(
        daemon_set.metadata.namespace,
        objects.namespaces[0].metadata.name
    );
    let spec = &daemon_set.spec;
    let labels = spec
        .template
        .metadata
        .as_ref()
        .and_then(|meta| meta.labels.as_ref());
    assert_eq!(spec.selector.match_labels.as_ref(), labels);
    let pod = spec.template.spec.as_ref().context("a Pod's spec")?;
    assert_eq!(pod.service_account_name, objects.accounts[0].metadata.name);
    assert_eq!(pod.host_network, Some(true));
    let container = &pod.containers[0];
    assert_eq!(pod.containers.len(), 1);
    let security = container
        .security_context
        .as_ref()
        .context("a security context")?;
    assert_eq!(security.privileged, Some(true));
    // The directories keep their paths, which the options' defaults name.
    let volumes: BTreeMap<&str, &str> = pod
        .volumes
        .iter()
        .flatten()
        .filter_map(|volume| Some((&*volume.name, &*volume.host_path.as_ref()?.path)))
        .collect();
    let mounts: BTreeMap<&str, &str> = container
        .volume_mounts
        .iter()
        .flatten()
        .map(|mount| (&*mount.name, &*mount.mount_path))
        .collect();
    assert_eq!(volumes, mounts);
    let paths: BTreeSet<&str> = mounts.into_values().collect();
    assert_eq!(
        paths,
        BTreeSet::from(["/var/run/openvswitch", "/var/run/ovn-ic"])
    );
    Ok(())
}
