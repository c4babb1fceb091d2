//! Objects of Kubernetes' own kinds without their status and most of their metadata, which nobody reads: annotations and
//! managed fields may be larger than all else.

use std::borrow::Cow;

use k8s_openapi::{
    api::{
        core::v1::{Service, ServiceSpec},
        networking::v1::{ServiceCIDR, ServiceCIDRSpec},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::Resource;
use serde::{Deserialize, Deserializer, de::DeserializeOwned};

/// A kind of objects.
pub(crate) trait Kind: Resource<DynamicType = ()> {
    type Spec: DeserializeOwned;

    fn of(metadata: ObjectMeta, spec: Option<Self::Spec>) -> Self;
}

impl Kind for Service {
    type Spec = ServiceSpec;

    fn of(metadata: ObjectMeta, spec: Option<ServiceSpec>) -> Self {
        Self {
            metadata,
            spec,
            status: None,
        }
    }
}

impl Kind for ServiceCIDR {
    type Spec = ServiceCIDRSpec;

    fn of(metadata: ObjectMeta, spec: Option<ServiceCIDRSpec>) -> Self {
        Self {
            metadata,
            spec,
            status: None,
        }
    }
}

/// An object with its name, its version and its `spec`.
#[derive(Clone, Debug)]
pub(crate) struct Slim<K>(pub(crate) K);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Names {
    name: Option<String>,
    namespace: Option<String>,
    resource_version: Option<String>,
}

#[derive(Deserialize)]
struct Parts<S> {
    metadata: Names,
    spec: Option<S>,
}

impl<'de, K: Kind> Deserialize<'de> for Slim<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Parts { metadata, spec } = Parts::<K::Spec>::deserialize(deserializer)?;
        let metadata = ObjectMeta {
            name: metadata.name,
            namespace: metadata.namespace,
            resource_version: metadata.resource_version,
            ..ObjectMeta::default()
        };
        Ok(Self(K::of(metadata, spec)))
    }
}

impl<K: Kind> Resource for Slim<K> {
    type DynamicType = ();
    type Scope = K::Scope;

    fn kind(dt: &()) -> Cow<'_, str> {
        K::kind(dt)
    }

    fn group(dt: &()) -> Cow<'_, str> {
        K::group(dt)
    }

    fn version(dt: &()) -> Cow<'_, str> {
        K::version(dt)
    }

    fn plural(dt: &()) -> Cow<'_, str> {
        K::plural(dt)
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.meta()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.meta_mut()
    }
}
