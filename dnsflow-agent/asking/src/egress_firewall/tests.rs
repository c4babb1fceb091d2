//! The types and the definition are of the same resource.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::LabelSelectorRequirement,
};
use kube::Resource as _;
use serde_json::Value;

use super::*;

/// An EgressFirewall that uses every field of its types.
fn full() -> EgressFirewall {
    let selector = LabelSelector {
        match_labels: Some(BTreeMap::from([("key".into(), "value".into())])),
        match_expressions: Some(vec![LabelSelectorRequirement {
            key: "key".into(),
            operator: "In".into(),
            values: Some(vec!["value".into()]),
        }]),
    };
    let mut firewall = EgressFirewall::new(
        NAME,
        EgressFirewallSpec {
            egress: vec![EgressRule {
                action: "Allow".into(),
                ports: vec![EgressPort {
                    protocol: "TCP".into(),
                    port: 443,
                }],
                to: EgressDestination {
                    cidr_selector: Some("192.0.2.0/24".into()),
                    dns_name: Some("example.com".into()),
                    node_selector: Some(selector),
                },
            }],
        },
    );
    firewall.status = Some(EgressFirewallStatus {
        status: "applied".into(),
        messages: vec!["node: applied".into()],
    });
    firewall
}

/// The paths of the fields of an object; list items share one path.
fn fields_of(value: &Value, path: &str, fields: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                // A map's keys are data.
                let name = if path.ends_with(".matchLabels") {
                    "*"
                } else {
                    name
                };
                fields_of(value, &format!("{path}.{name}"), fields);
            }
        }
        Value::Array(items) => {
            for item in items {
                fields_of(item, path, fields);
            }
        }
        _ => {
            fields.insert(path.to_owned());
        }
    }
}

/// The same of a schema.
fn fields_of_schema(schema: &Value, path: &str, fields: &mut BTreeSet<String>) {
    if let Some(properties) = schema["properties"].as_object() {
        for (name, schema) in properties {
            fields_of_schema(schema, &format!("{path}.{name}"), fields);
        }
    } else if schema["items"].is_object() {
        fields_of_schema(&schema["items"], path, fields);
    } else if schema["additionalProperties"].is_object() {
        fields_of_schema(
            &schema["additionalProperties"],
            &format!("{path}.*"),
            fields,
        );
    } else {
        fields.insert(path.to_owned());
    }
}

#[test]
fn the_definition_has_the_fields_of_the_types_and_no_others() {
    let definition: Value = serde_saphyr::from_str(DEFINITION).expect("YAML");
    let typed: CustomResourceDefinition =
        serde_json::from_value(definition.clone()).expect("a definition");
    let back = serde_json::to_value(&typed).expect("JSON");
    let (mut written, mut known) = (BTreeSet::new(), BTreeSet::new());
    fields_of(&definition, "", &mut written);
    fields_of(&back, "", &mut known);
    assert_eq!(written, known, "a field that the API does not know");
    assert_eq!(typed.spec.group, EgressFirewall::group(&()));
    assert_eq!(typed.spec.names.kind, EgressFirewall::kind(&()));
    assert_eq!(typed.spec.names.plural, EgressFirewall::plural(&()));
    let [version] = &definition["spec"]["versions"].as_array().expect("versions")[..] else {
        panic!("not one version");
    };
    assert_eq!(version["name"], EgressFirewall::version(&()).as_ref());

    let (mut of_schema, mut of_types) = (BTreeSet::new(), BTreeSet::new());
    fields_of_schema(&version["schema"]["openAPIV3Schema"], "", &mut of_schema);
    let object = serde_json::to_value(full()).expect("JSON");
    fields_of(&object, "", &mut of_types);
    assert_eq!(of_schema, of_types);
}
