//! User-defined networks as ovn-kubernetes lays them out: switches, a gateway router, port groups
//! and addresses of their own, and a second veth in the pods that are on them.
//!
//! Names and rows follow the recordings of primary networks, one of layer 2 made by a
//! `ClusterUserDefinedNetwork` and one of layer 3 made by a `UserDefinedNetwork`. What stands
//! between the pods' switch and the gateway router is left out as far as it changes nothing for a
//! firewall: the transit router of layer 2, the transit switch of layer 3.

use std::net::Ipv4Addr;

use anyhow::{Context, Result};
use ipnet::IpNet;
use serde_json::json;

use crate::{
    database::{map, map_value},
    firewall::{Network, hash_for_ovn},
    lab::Lab,
    pod::PodSpec,
    topology::{DNS_SERVICE, GATEWAY, NODE},
};

/// `k8s.ovn.org/owner-controller` is a network's name and this.
const CONTROLLER: &str = "-network-controller";

/// The second veth's name in the pod.
const INTERFACE: &str = "ovn-udn1";

/// How a network is made up.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Topology {
    /// One switch for all nodes.
    Layer2,
    /// A switch for each node, and a router between them.
    Layer3,
}

impl Topology {
    /// `k8s.ovn.org/topology`.
    fn name(self) -> &'static str {
        match self {
            Self::Layer2 => "layer2",
            Self::Layer3 => "layer3",
        }
    }

    /// The network's subnet: its first two bytes.
    fn prefix(self) -> [u8; 2] {
        match self {
            Self::Layer2 => [10, 150],
            Self::Layer3 => [10, 130],
        }
    }

    fn subnet(self) -> String {
        let [a, b] = self.prefix();
        format!("{a}.{b}.0.0/16")
    }

    /// How many bits of an address name the pods' switch.
    fn switch_bits(self) -> u8 {
        match self {
            Self::Layer2 => 16,
            Self::Layer3 => 24,
        }
    }

    /// The address of the pods that have `last` in the default network.
    fn address(self, last: u8) -> Ipv4Addr {
        let [a, b] = self.prefix();
        Ipv4Addr::new(a, b, 0, last)
    }

    /// The gateway router's address outside.
    pub fn outside(self) -> Ipv4Addr {
        match self {
            Self::Layer2 => Ipv4Addr::new(172, 18, 0, 3),
            Self::Layer3 => Ipv4Addr::new(172, 18, 0, 4),
        }
    }
}

/// An Ethernet address as ovn-kubernetes makes it of an IPv4 address.
fn mac(address: Ipv4Addr) -> String {
    PodSpec::new("", "", address).mac()
}

/// A primary user-defined network of one namespace.
#[derive(Clone, Debug)]
pub struct UserNetwork {
    /// The name of the `ClusterUserDefinedNetwork` or `UserDefinedNetwork`.
    pub name: String,
    /// The namespace that it is the primary network of.
    pub namespace: String,
    /// How it is made up.
    pub topology: Topology,
}

impl UserNetwork {
    /// The network of this name, for this namespace.
    pub fn new(name: &str, namespace: &str, topology: Topology) -> Self {
        Self {
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            topology,
        }
    }

    /// `k8s.ovn.org/network`.
    fn full_name(&self) -> String {
        match self.topology {
            Topology::Layer2 => format!("cluster_udn_{}", self.name),
            Topology::Layer3 => format!("{}_{}", self.namespace, self.name),
        }
    }

    /// `k8s.ovn.org/nad`.
    fn nad(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// The pods' logical switch.
    pub fn switch(&self) -> String {
        match self.topology {
            Topology::Layer2 => format!("{}_ovn_layer2_switch", self.full_name()),
            Topology::Layer3 => format!("{}_{NODE}", self.full_name()),
        }
    }

    fn controller(&self) -> String {
        format!("{}{CONTROLLER}", self.full_name())
    }

    /// The port group of the namespace's pods on this network.
    pub fn port_group(&self) -> String {
        hash_for_ovn(&format!(
            "{}:Namespace:{}",
            self.controller(),
            self.namespace
        ))
    }

    /// Its switches and routers, one ovn-nbctl command per line.
    fn rows(&self, chassis: &str) -> String {
        let (name, switch, topology) = (self.full_name(), self.switch(), self.topology);
        let gateway = topology.address(1);
        let outside = topology.outside();
        let router = format!("GR_{name}_{NODE}");
        // The router that is the pods' gateway.
        let first = match topology {
            Topology::Layer2 => router.clone(),
            Topology::Layer3 => format!("{name}_ovn_cluster_router"),
        };
        let mut rows = format!(
            "\
ls-add {switch}
set Logical_Switch {switch} external_ids:k8s.ovn.org/network={name} external_ids:k8s.ovn.org/role=primary external_ids:k8s.ovn.org/topology={topology_name}
lr-add {router}
set Logical_Router {router} options:chassis={chassis} options:always_learn_from_arp_request=false
",
            topology_name = topology.name()
        );
        if topology == Topology::Layer3 {
            rows += &format!(
                "\
lr-add {first}
set Logical_Router {first} options:always_learn_from_arp_request=false external_ids:k8s-cluster-router=yes
ls-add {name}_join
lrp-add {first} rtoj-{first} 0a:58:64:41:00:01 100.65.0.1/16
lrp-add {router} rtoj-{router} 0a:58:64:41:00:02 100.65.0.2/16
--policy=src-ip lr-route-add {first} {subnet} 100.65.0.2
lr-route-add {router} {subnet} 100.65.0.1
",
                subnet = topology.subnet()
            );
            for router in [&first, &router] {
                rows += &to_router(
                    &format!("{name}_join"),
                    &format!("jtor-{router}"),
                    &format!("rtoj-{router}"),
                );
            }
        }
        rows += &format!(
            "\
lrp-add {first} rtos-{switch} {mac} {gateway}/{bits}
lrp-add {router} rtoe-{router} {outside_mac} {outside}/16
lr-route-add {router} 0.0.0.0/0 172.18.0.1 rtoe-{router}
lr-nat-add {router} snat {outside} {subnet}
ls-add ext_{name}
lsp-add ext_{name} br-ex_{name}
lsp-set-type br-ex_{name} localnet
lsp-set-addresses br-ex_{name} unknown
lsp-set-options br-ex_{name} network_name=physnet
acl-add {switch} to-lport 1001 ip4.src=={management} allow-related
",
            mac = mac(gateway),
            bits = topology.switch_bits(),
            outside_mac = mac(outside),
            subnet = topology.subnet(),
            management = topology.address(2),
        );
        rows += &to_router(
            &switch,
            &format!("stor-{switch}"),
            &format!("rtos-{switch}"),
        );
        rows += &to_router(
            &format!("ext_{name}"),
            &format!("etor-{router}"),
            &format!("rtoe-{router}"),
        );
        rows
    }
}

/// A switch's port at a router's.
fn to_router(switch: &str, port: &str, peer: &str) -> String {
    format!(
        "\
lsp-add {switch} {port}
lsp-set-type {port} router
lsp-set-addresses {port} router
lsp-set-options {port} router-port={peer}
"
    )
}

impl Lab {
    /// The network that a namespace's EgressFirewall is enforced on: its user-defined one if
    /// there is one.
    pub(crate) fn network_of(&self, namespace: &str) -> Result<Network> {
        let ids = map([
            ("k8s.ovn.org/name", namespace),
            ("k8s.ovn.org/owner-type", "Namespace"),
        ]);
        let mut nb = self.nb()?;
        for group in nb.select("Port_Group", json!([["external_ids", "includes", ids]]))? {
            let owner = map_value(&group["external_ids"], "k8s.ovn.org/owner-controller");
            let Some(name) = owner.and_then(|owner| owner.strip_suffix(CONTROLLER)) else {
                continue;
            };
            let ids = map([
                ("k8s.ovn.org/network", name),
                ("k8s.ovn.org/role", "primary"),
            ]);
            let switches =
                nb.select("Logical_Switch", json!([["external_ids", "includes", ids]]))?;
            // The default network's have no such ids.
            let Some(switch) = switches.first() else {
                continue;
            };
            let topology = map_value(&switch["external_ids"], "k8s.ovn.org/topology");
            let topology = [Topology::Layer2, Topology::Layer3]
                .into_iter()
                .find(|known| Some(known.name()) == topology)
                .with_context(|| format!("the network {name} has no topology"))?;
            let subnet: IpNet = topology.subnet().parse()?;
            return Ok(Network {
                port_group: group["name"].as_str().unwrap_or_default().to_owned(),
                subnets: vec![subnet],
            });
        }
        Ok(Network::default_of(namespace))
    }

    /// Creates the network, and the port group of its namespace.
    pub fn add_network(&self, network: &UserNetwork) -> Result<()> {
        self.nbctl_lines(&network.rows(self.chassis()))?;
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

    /// Joins an existing pod to the network, and routes its traffic there, without that for the
    /// cluster's services. ovn-kubernetes also routes that there, and from the router to the node's
    /// own stack (`configureUDNEnabledServiceRoute`), which a lab has not. Returns the pod's address on the network.
    pub fn join_network(&self, spec: &PodSpec, network: &UserNetwork) -> Result<Ipv4Addr> {
        let [.., last] = spec.address.octets();
        let address = network.topology.address(last);
        let bits = network.topology.switch_bits();
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
                        ("k8s.ovn.org/topology", network.topology.name()),
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
                 address add {address}/{bits} dev {INTERFACE}\n\
                 route replace default via {}\n\
                 route add {DNS_SERVICE}/32 via {GATEWAY}\n",
                network.topology.address(1)
            ),
        )?;
        self.disable_checksum_offload(&namespace, INTERFACE)?;
        let ip_addresses = format!("{address}/{bits}");
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
    fn port_groups_are_the_recorded_ones() {
        let cluster_wide = UserNetwork::new("cudn5", "ns5", Topology::Layer2);
        assert_eq!(cluster_wide.port_group(), "a3614501052075661832");
        let namespaced = UserNetwork::new("udn3", "ns3", Topology::Layer3);
        assert_eq!(namespaced.port_group(), "a13720803164594056767");
    }
}
