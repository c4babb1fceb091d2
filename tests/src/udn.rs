//! A user-defined network as ovn-kubernetes lays it out: a switch, a gateway router, port groups
//! and addresses of its own, and a second veth in the pods that are on it.
//!
//! Names and rows follow the recording of a primary network of layer 2, with the switch directly
//! at the gateway router: the transit router between them changes nothing for a firewall.

use std::net::Ipv4Addr;

use anyhow::{Context, Result};
use serde_json::json;

use crate::{
    database::{map, map_value},
    firewall::{Network, hash_for_ovn},
    lab::Lab,
    pod::PodSpec,
    topology::{DNS_SERVICE, GATEWAY, NODE},
};

/// The network's subnet.
const SUBNET: &str = "10.150.0.0/16";
/// The pods' gateway in it, and its Ethernet address.
const NETWORK_GATEWAY: &str = "10.150.0.1";
const NETWORK_GATEWAY_MAC: &str = "0a:58:0a:96:00:01";
/// The gateway router's address outside.
const OUTSIDE: &str = "172.18.0.3";
/// The second veth's name in the pod.
const INTERFACE: &str = "ovn-udn1";

/// A primary user-defined network of one namespace.
#[derive(Clone, Debug)]
pub struct UserNetwork {
    /// `ClusterUserDefinedNetwork` name.
    pub name: String,
    /// The namespace that it is the primary network of.
    pub namespace: String,
}

impl UserNetwork {
    /// The network of this name, for this namespace.
    pub fn new(name: &str, namespace: &str) -> Self {
        Self {
            name: name.to_owned(),
            namespace: namespace.to_owned(),
        }
    }

    /// `k8s.ovn.org/network`.
    fn full_name(&self) -> String {
        format!("cluster_udn_{}", self.name)
    }

    /// `k8s.ovn.org/nad`.
    fn nad(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    fn switch(&self) -> String {
        format!("{}_ovn_layer2_switch", self.full_name())
    }

    fn controller(&self) -> String {
        format!("{}-network-controller", self.full_name())
    }

    /// The port group of the namespace's pods on this network.
    pub fn port_group(&self) -> String {
        hash_for_ovn(&format!(
            "{}:Namespace:{}",
            self.controller(),
            self.namespace
        ))
    }
}

impl Lab {
    /// The network that a namespace's EgressFirewall is enforced on: its user-defined one if
    /// there is one.
    pub(crate) fn network_of(&self, namespace: &str) -> Result<Network> {
        let ids = map([
            ("k8s.ovn.org/name", namespace),
            ("k8s.ovn.org/owner-type", "Namespace"),
        ]);
        let groups = self
            .nb()?
            .select("Port_Group", json!([["external_ids", "includes", ids]]))?;
        let own = groups.iter().find(|group| {
            let owner = map_value(&group["external_ids"], "k8s.ovn.org/owner-controller");
            owner != Some("default-network-controller")
        });
        let Some(own) = own else {
            return Ok(Network::default_of(namespace));
        };
        Ok(Network {
            port_group: own["name"].as_str().unwrap_or_default().to_owned(),
            subnets: vec![SUBNET.parse()?],
        })
    }

    /// Creates the network, and the port group of its namespace.
    pub fn add_network(&self, network: &UserNetwork) -> Result<()> {
        let (name, switch, router) = (
            network.full_name(),
            network.switch(),
            format!("GR_{}_{NODE}", network.full_name()),
        );
        let chassis = self.chassis();
        self.nbctl_lines(&format!(
            "\
ls-add {switch}
lsp-add {switch} stor-{switch}
lsp-set-type stor-{switch} router
lsp-set-addresses stor-{switch} router
lsp-set-options stor-{switch} router-port=rtos-{switch}
lr-add {router}
set Logical_Router {router} options:chassis={chassis} options:always_learn_from_arp_request=false
lrp-add {router} rtos-{switch} {NETWORK_GATEWAY_MAC} {NETWORK_GATEWAY}/16
lrp-add {router} rtoe-{router} 0a:58:ac:12:00:03 {OUTSIDE}/16
lr-route-add {router} 0.0.0.0/0 172.18.0.1 rtoe-{router}
lr-nat-add {router} snat {OUTSIDE} {SUBNET}
ls-add ext_{name}
lsp-add ext_{name} etor-{router}
lsp-set-type etor-{router} router
lsp-set-addresses etor-{router} router
lsp-set-options etor-{router} router-port=rtoe-{router}
lsp-add ext_{name} br-ex_{name}
lsp-set-type br-ex_{name} localnet
lsp-set-addresses br-ex_{name} unknown
lsp-set-options br-ex_{name} network_name=physnet
acl-add {switch} to-lport 1001 ip4.src==10.150.0.2 allow-related
"
        ))?;
        let namespace = &network.namespace;
        let controller = network.controller();
        self.nb()?.transact(&[json!({
            "op": "insert", "table": "Port_Group",
            "row": {
                "name": network.port_group(),
                "external_ids": map([
                    ("k8s.ovn.org/id", format!("{controller}:Namespace:{namespace}").as_str()),
                    ("k8s.ovn.org/name", namespace),
                    ("k8s.ovn.org/owner-controller", &controller),
                    ("k8s.ovn.org/owner-type", "Namespace"),
                ]),
            },
        })])?;
        Ok(())
    }

    /// Puts a pod that exists on the network too, and sends there what is not for the cluster's
    /// services. Returns its address on the network.
    pub fn join_network(&self, spec: &PodSpec, network: &UserNetwork) -> Result<Ipv4Addr> {
        let [.., last] = spec.address.octets();
        let address = Ipv4Addr::new(10, 150, 0, last);
        let own = PodSpec {
            address,
            ..spec.clone()
        };
        let (mac, nad, name) = (own.mac(), network.nad(), network.full_name());
        let port = format!("{}.{}_{}", network.namespace, network.name, spec.lsp());
        let first = self.host_veth(&spec.lsp())?;
        let rows = self
            .ovs_db()?
            .select("Interface", json!([["name", "==", first]]))?;
        let ids = &rows.first().context("the pod has no interface")?["external_ids"];
        let id = |key: &str| map_value(ids, key).context("an interface without ids");
        let (uid, sandbox) = (id("iface-id-ver")?, id("sandbox")?);

        let addresses = format!("{mac} {address}");
        let to = |table: &str, name: &str| {
            json!({
                "op": "mutate", "table": table, "where": [["name", "==", name]],
                "mutations": [["ports", "insert", ["named-uuid", "port"]]],
            })
        };
        self.nb()?.transact(&[
            json!({
                "op": "insert", "table": "Logical_Switch_Port", "uuid-name": "port",
                "row": {
                    "name": port,
                    "addresses": addresses,
                    "port_security": addresses,
                    "external_ids": map([
                        ("k8s.ovn.org/nad", nad.as_str()),
                        ("k8s.ovn.org/network", &name),
                        ("k8s.ovn.org/topology", "layer2"),
                        ("namespace", &spec.namespace),
                        ("pod", "true"),
                    ]),
                    "options": map([("iface-id-ver", uid), ("requested-chassis", self.chassis())]),
                },
            }),
            to("Logical_Switch", &network.switch()),
            to("Port_Group", &network.port_group()),
        ])?;

        let host = format!("{}_1", &sandbox[..13]);
        let namespace = self.pod(&spec.lsp()).netns();
        self.add_veth_named(&namespace, &host, INTERFACE)?;
        self.ip_batch(
            &namespace,
            &format!(
                "link set {INTERFACE} address {mac} up\n\
                 address add {address}/16 dev {INTERFACE}\n\
                 route replace default via {NETWORK_GATEWAY}\n\
                 route add {DNS_SERVICE}/32 via {GATEWAY}\n"
            ),
        )?;
        self.disable_checksum_offload(&namespace, INTERFACE)?;
        let ip_addresses = format!("{address}/16");
        self.add_interface(
            &host,
            &[
                ("iface-id", port.as_str()),
                ("iface-id-ver", uid),
                ("attached_mac", &mac),
                ("ip_addresses", &ip_addresses),
                ("sandbox", sandbox),
                ("pod-if-name", INTERFACE),
                ("k8s.ovn.org/nad", &nad),
                ("k8s.ovn.org/network", &name),
            ],
        )?;
        self.sync()?;
        Ok(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_group_is_the_recorded_one() {
        let network = UserNetwork::new("cudn5", "ns5");
        assert_eq!(network.port_group(), "a3614501052075661832");
    }
}
