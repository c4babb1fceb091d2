//! The manifest of kubectl's plugin for krew, its package manager.

use serde_json::{Value, json};

use super::settings::Settings;

/// A program for download: architecture, file and SHA-256.
pub(super) type Download = (&'static str, String, String);

/// The manifest (krew's "Writing Krew plugin manifests"). It is JSON, which is YAML as well.
pub(super) fn manifest(settings: &Settings, version: &str, downloads: &[Download]) -> Value {
    let platform = |(architecture, file, sha256): &Download| {
        json!({
            "selector": {"matchLabels": {"os": "linux", "arch": architecture}},
            "uri": settings.download(version, file),
            "sha256": sha256,
            "files": [{"from": "dnsflow", "to": "."}, {"from": "LICENSE", "to": "."}],
            // krew links it as kubectl-dnsflow, by which name it is the plugin.
            "bin": "dnsflow",
        })
    };
    json!({
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "dnsflow"},
        "spec": {
            "version": format!("v{version}"),
            "homepage": settings.homepage,
            "shortDescription": "Explain and learn egress rules by DNS name",
            "description": "Asks the dnsflow agents of all nodes why a pod is blocked, which names pods ask for, and \
                            what an edited EgressFirewall would change. dnsflow opens the addresses of EgressFirewalls \
                            by DNS name on OVN-Kubernetes.\n",
            "platforms": downloads.iter().map(platform).collect::<Vec<_>>(),
        },
    })
}
