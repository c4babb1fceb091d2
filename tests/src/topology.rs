//! The logical network, shaped as ovn-kubernetes shapes it in shared gateway mode: node switch,
//! `ovn_cluster_router`, join switch, gateway router with SNAT, external switch, and behind it an
//! "internet" with web servers. Names and rows follow recordings of ovn-kubernetes (August 2026).

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{
    database::{map, set},
    lab::{Cluster, Lab, pod_namespace},
    netns::NetNs,
    pod::{PodSpec, host_veth, sandbox_id},
    web,
};

/// The node's name in OVN; its logical switch has the same.
pub const NODE: &str = "lab-node";

/// The cluster's pod network.
pub const CLUSTER_SUBNET: &str = "10.244.0.0/16";

/// The cluster's pod network of IPv6, where it has one.
pub const CLUSTER_SUBNET_V6: &str = "fd00:10:244::/48";

/// The DNS service's address, as pods know it.
pub const DNS_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);

/// The same service's IPv6 address, where the cluster has both families.
pub const DNS_SERVICE_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 10);

/// The port that the DNS pod really listens on, as OpenShift has it.
pub const DNS_POD_PORT: u16 = 5353;

/// The DNS pod's address.
pub const DNS_POD: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 53);

/// The node switch's router port, the pods' gateway.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);

/// The same port's IPv6 address.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 1);

/// Its Ethernet address.
pub const GATEWAY_MAC: &str = "0a:58:0a:f4:00:01";

/// The management port's logical port: `k8s-` and the node's name.
const MANAGEMENT_LSP: &str = "k8s-lab-node";
/// The management port's Ethernet address.
const MANAGEMENT_MAC: &str = "0a:58:0a:f4:00:02";

/// The web servers of the "internet" are 203.0.113.1 to 203.0.113.8 (TEST-NET-3, RFC 5737).
pub fn web_addresses() -> impl Iterator<Item = Ipv4Addr> {
    (1..=8).map(|last| Ipv4Addr::new(203, 0, 113, last))
}

/// Where the same web servers are in a dual-stack lab: 2001:db8::1 to 2001:db8::8 (RFC 3849).
pub fn web_addresses_v6() -> impl Iterator<Item = Ipv6Addr> {
    (1..=8).map(|last| Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last))
}

/// The pods that every lab starts with.
pub fn pods() -> [PodSpec; 4] {
    [
        PodSpec::new("ns1", "pod1", Ipv4Addr::new(10, 244, 0, 5)),
        PodSpec::new("ns1", "pod2", Ipv4Addr::new(10, 244, 0, 6)),
        PodSpec::new("ns2", "pod1", Ipv4Addr::new(10, 244, 0, 7)),
        PodSpec::new("kube-system", "dns", DNS_POD),
    ]
}

/// One ovn-nbctl command per line.
fn routers_and_switches(chassis: &str) -> String {
    format!(
        "\
lr-add ovn_cluster_router
set Logical_Router ovn_cluster_router options:always_learn_from_arp_request=false external_ids:k8s-cluster-router=yes
lrp-add ovn_cluster_router rtos-{NODE} {GATEWAY_MAC} {GATEWAY}/24
ls-add {NODE}
set Logical_Switch {NODE} other_config:subnet=10.244.0.0/24
lsp-add {NODE} stor-{NODE}
lsp-set-type stor-{NODE} router
lsp-set-addresses stor-{NODE} router
lsp-set-options stor-{NODE} router-port=rtos-{NODE}
lsp-add {NODE} {MANAGEMENT_LSP}
lsp-set-addresses {MANAGEMENT_LSP} {MANAGEMENT_MAC}
ls-add join
lsp-add join jtor-ovn_cluster_router
lsp-set-type jtor-ovn_cluster_router router
lsp-set-addresses jtor-ovn_cluster_router router
lsp-set-options jtor-ovn_cluster_router router-port=rtoj-ovn_cluster_router
lrp-add ovn_cluster_router rtoj-ovn_cluster_router 0a:58:64:40:00:01 100.64.0.1/16
lr-add GR_{NODE}
set Logical_Router GR_{NODE} options:chassis={chassis} options:always_learn_from_arp_request=false options:snat-ct-zone=0
lrp-add GR_{NODE} rtoj-GR_{NODE} 0a:58:64:40:00:02 100.64.0.2/16
lrp-add GR_{NODE} rtoe-GR_{NODE} 0a:58:ac:12:00:02 172.18.0.2/16
lsp-add join jtor-GR_{NODE}
lsp-set-type jtor-GR_{NODE} router
lsp-set-addresses jtor-GR_{NODE} router
lsp-set-options jtor-GR_{NODE} router-port=rtoj-GR_{NODE}
--policy=src-ip lr-route-add ovn_cluster_router 10.244.0.0/24 100.64.0.2
lr-route-add GR_{NODE} 0.0.0.0/0 172.18.0.1 rtoe-GR_{NODE}
lr-route-add GR_{NODE} {CLUSTER_SUBNET} 100.64.0.1
lr-nat-add GR_{NODE} snat 172.18.0.2 {CLUSTER_SUBNET}
ls-add ext_{NODE}
lsp-add ext_{NODE} etor-GR_{NODE}
lsp-set-type etor-GR_{NODE} router
lsp-set-addresses etor-GR_{NODE} router
lsp-set-options etor-GR_{NODE} router-port=rtoe-GR_{NODE}
lsp-add ext_{NODE} br-ex_{NODE}
lsp-set-type br-ex_{NODE} localnet
lsp-set-addresses br-ex_{NODE} unknown
lsp-set-options br-ex_{NODE} network_name=physnet
"
    )
}

/// The commands that make the topology dual-stack, one ovn-nbctl command per line.
fn ipv6() -> String {
    format!(
        "\
add Logical_Router_Port rtos-{NODE} networks \"{GATEWAY_V6}/64\"
add Logical_Router_Port rtoj-ovn_cluster_router networks \"fd98::1/64\"
add Logical_Router_Port rtoj-GR_{NODE} networks \"fd98::2/64\"
add Logical_Router_Port rtoe-GR_{NODE} networks \"fd00:172:18::2/64\"
--policy=src-ip lr-route-add ovn_cluster_router fd00:10:244:1::/64 fd98::2
lr-route-add GR_{NODE} ::/0 fd00:172:18::1 rtoe-GR_{NODE}
lr-route-add GR_{NODE} {CLUSTER_SUBNET_V6} fd98::1
lr-nat-add GR_{NODE} snat fd00:172:18::2 {CLUSTER_SUBNET_V6}
"
    )
}

/// Fills the NB database, pods aside.
pub(crate) fn build(lab: &Lab) -> Result<()> {
    let mut commands = routers_and_switches(lab.chassis());
    if lab.cluster().dual_stack {
        commands += &ipv6();
    }
    lab.nbctl_lines(&commands)?;
    lab.nb()?
        .transact(&services_and_acls(lab.has_tiers(), lab.cluster()))
        .context("cannot write the DNS service and the node's ACL")?;
    Ok(())
}

fn services_and_acls(has_tiers: bool, cluster: Cluster) -> Vec<Value> {
    let mut vips = vec![(
        format!("{DNS_SERVICE}:53"),
        format!("{DNS_POD}:{DNS_POD_PORT}"),
    )];
    if cluster.dual_stack {
        let pod = PodSpec::new("kube-system", "dns", DNS_POD).address_v6();
        vips.push((
            format!("[{DNS_SERVICE_V6}]:53"),
            format!("[{pod}]:{DNS_POD_PORT}"),
        ));
    }
    let load_balancer = |protocol: &str| {
        json!({
            "op": "insert", "table": "Load_Balancer", "uuid-name": protocol,
            "row": {
                "name": format!("Service_kube-system/dns-default_{}_cluster", protocol.to_uppercase()),
                "protocol": protocol,
                "vips": map(vips.iter().map(|(vip, backend)| (vip, backend))),
                "options": map([
                    ("event", "false"),
                    ("hairpin_snat_ip", "169.254.0.5 fd69::5"),
                    ("neighbor_responder", "none"),
                    ("reject", "true"),
                    ("skip_snat", "false"),
                ]),
                "external_ids": map([
                    ("k8s.ovn.org/kind", "Service"),
                    ("k8s.ovn.org/owner", "kube-system/dns-default"),
                ]),
            },
        })
    };
    vec![
        load_balancer("udp"),
        load_balancer("tcp"),
        json!({
            "op": "insert", "table": "Load_Balancer_Group", "uuid-name": "group",
            "row": {
                "name": "clusterLBGroup",
                "load_balancer": set([["named-uuid", "udp"], ["named-uuid", "tcp"]]),
            },
        }),
        json!({"op": "insert", "table": "ACL", "uuid-name": "acl", "row": node_acl(has_tiers)}),
        json!({
            "op": "update", "table": "Logical_Switch", "where": [["name", "==", NODE]],
            "row": {
                "load_balancer_group": ["named-uuid", "group"],
                "acls": ["named-uuid", "acl"],
            },
        }),
        json!({
            "op": "insert", "table": "Meter_Band", "uuid-name": "band",
            "row": {"action": "drop", "rate": 20},
        }),
        json!({
            "op": "insert", "table": "Meter",
            "row": {"name": "acl-logging", "unit": "pktps", "fair": true, "bands": ["named-uuid", "band"]},
        }),
    ]
}

/// The ACL for the management port's traffic, which makes the switch stateful.
fn node_acl(has_tiers: bool) -> Value {
    let mut acl = json!({
        "action": "allow-related",
        "direction": "to-lport",
        "match": "ip4.src==10.244.0.2",
        "meter": "acl-logging",
        "priority": 1001,
        "external_ids": map([
            ("ip", "10.244.0.2"),
            ("k8s.ovn.org/id", &format!("default-network-controller:NetpolNode:{NODE}:10.244.0.2")),
            ("k8s.ovn.org/name", NODE),
            ("k8s.ovn.org/owner-controller", "default-network-controller"),
            ("k8s.ovn.org/owner-type", "NetpolNode"),
        ]),
    });
    if has_tiers {
        acl["tier"] = json!(2);
    }
    acl
}

impl Lab {
    /// Makes the node's switch stateless: removes the allow-related ACL and the load balancers, and
    /// with them the DNS service. Returns when OVN has followed.
    pub fn make_stateless(&self) -> Result<()> {
        self.nb()?.transact(&[json!({
            "op": "update", "table": "Logical_Switch", "where": [["name", "==", NODE]],
            "row": {"acls": ["set", []], "load_balancer_group": ["set", []]},
        })])?;
        self.sync()
    }

    /// Gives the node's switch its allow-related ACL and its load balancers again; returns when
    /// OVN is in step.
    pub fn make_stateful(&self) -> Result<()> {
        let mut nb = self.nb()?;
        let groups = nb.select("Load_Balancer_Group", json!([]))?;
        let groups = set(groups.iter().map(|row| &row["_uuid"]));
        nb.transact(&[
            json!({"op": "insert", "table": "ACL", "uuid-name": "acl", "row": node_acl(self.has_tiers())}),
            json!({
                "op": "update", "table": "Logical_Switch", "where": [["name", "==", NODE]],
                "row": {"acls": ["named-uuid", "acl"], "load_balancer_group": groups},
            }),
        ])?;
        self.sync()
    }

    /// The management port: an interface with an `iface-id` that is no pod's (`create` of
    /// `managementPortOVS` in ovn-kubernetes' go-controller/pkg/node/managementport/port_linux.go).
    pub(crate) fn add_management_port(&self) -> Result<()> {
        let port = "ovn-k8s-mp0";
        let iface_id = format!("external_ids:iface-id={MANAGEMENT_LSP}");
        let mac = format!("mac=\"{MANAGEMENT_MAC}\"");
        self.vsctl(&[
            "add-port",
            "br-int",
            port,
            "--",
            "set",
            "Interface",
            port,
            "type=internal",
            &mac,
            &iface_id,
        ])?;
        Ok(())
    }

    /// The "internet": a namespace behind br-ex with a web server on every address.
    pub(crate) fn add_internet(&self) -> Result<()> {
        let namespace = pod_namespace(self.name(), "inet");
        namespace.delete()?;
        NetNs::create(namespace.name())?;
        let host = host_veth(&sandbox_id()?);
        self.add_veth(&namespace, &host)?;
        let mut batch = String::from(
            "link set lo up\n\
             link set eth0 address 0a:58:ac:12:00:01 up\n\
             address add 172.18.0.1/16 dev eth0\n\
             route add default via 172.18.0.2\n",
        );
        if self.cluster().dual_stack {
            batch += "address add fd00:172:18::1/64 dev eth0 nodad\n\
                      route add ::/0 via fd00:172:18::2\n";
            for address in web_addresses_v6() {
                batch += &format!("address add {address}/128 dev lo\n");
            }
        }
        for address in web_addresses() {
            batch += &format!("address add {address}/32 dev lo\n");
        }
        self.ip_batch(&namespace, &batch)?;
        self.disable_checksum_offload(&namespace, "eth0")?;
        self.vsctl(&["add-port", "br-ex", &host])?;
        web::start(self)
    }
}
