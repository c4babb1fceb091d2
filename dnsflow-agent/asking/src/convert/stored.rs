//! An EgressFirewall as an item of a list and of a watch.

use k8s_openapi::{NamespaceResourceScope, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde::de::{Deserialize, DeserializeSeed as _, Deserializer};

use super::{Converted, ObjectReader};
use crate::{
    egress_firewall::EgressFirewall,
    lenient::{Any, Seen},
};

/// An EgressFirewall as the API server stores it, whatever it looks like.
///
/// One strange object in a list would otherwise make the whole list unreadable.
#[derive(Clone, Debug)]
pub struct Stored {
    metadata: ObjectMeta,
    /// What it says.
    pub converted: Converted,
}

impl<'de> Deserialize<'de> for Stored {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let object = Any(ObjectReader).deserialize(deserializer)?;
        let text = |part: &Seen| part.text().map(str::to_owned);
        let metadata = &object.metadata;
        Ok(Self {
            metadata: ObjectMeta {
                name: text(&metadata.name),
                namespace: text(&metadata.namespace),
                uid: text(&metadata.uid),
                resource_version: text(&metadata.resource_version),
                ..ObjectMeta::default()
            },
            converted: object.convert(),
        })
    }
}

impl kube::Resource for Stored {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind(dt: &()) -> std::borrow::Cow<'_, str> {
        EgressFirewall::kind(dt)
    }

    fn group(dt: &()) -> std::borrow::Cow<'_, str> {
        EgressFirewall::group(dt)
    }

    fn version(dt: &()) -> std::borrow::Cow<'_, str> {
        EgressFirewall::version(dt)
    }

    fn plural(dt: &()) -> std::borrow::Cow<'_, str> {
        EgressFirewall::plural(dt)
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
