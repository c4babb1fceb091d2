//! The columns of OVN's and Open vSwitch's tables that dnsflow reads, as plain values.
//!
//! Sources: `ovn-nb.ovsschema`, `ovn-sb.ovsschema` and `vswitch.ovsschema`.

use std::{collections::BTreeSet, fmt, net::IpAddr, ops::RangeInclusive, sync::Arc};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// The identity of a database row (`_uuid`).
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct RowId(u128);

impl RowId {
    /// The row with these 128 bits.
    pub const fn new(bits: u128) -> Self {
        Self(bits)
    }

    /// Its 128 bits.
    pub const fn bits(self) -> u128 {
        self.0
    }

    /// The first 32 bits: a logical flow's OpenFlow cookie, and (as eight hex digits) the
    /// `stage-hint` that names an ACL.
    pub const fn prefix(self) -> u32 {
        (self.0 >> Self::BEHIND_PREFIX) as u32
    }

    /// The identities that begin with these 32 bits.
    pub const fn beginning_with(prefix: u32) -> RangeInclusive<Self> {
        let first = (prefix as u128) << Self::BEHIND_PREFIX;
        let last = first | ((1 << Self::BEHIND_PREFIX) - 1);
        RangeInclusive::new(Self(first), Self(last))
    }

    /// The bits behind the prefix.
    const BEHIND_PREFIX: u32 = 96;
}

impl fmt::Display for RowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = self.0;
        write!(
            f,
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            (b >> 96) as u32,
            (b >> 80) as u16,
            (b >> 64) as u16,
            (b >> 48) as u16,
            b & 0xffff_ffff_ffff
        )
    }
}

impl fmt::Debug for RowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An Ethernet address (IEEE 802.3).
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct MacAddress([u8; 6]);

impl MacAddress {
    /// The address with these octets; `None` where all of them are zero, which no interface has.
    pub fn new(octets: [u8; 6]) -> Option<Self> {
        (octets != [0; 6]).then_some(Self(octets))
    }

    /// Parses six hexadecimal octets with colons between them.
    pub fn parse(text: &str) -> Option<Self> {
        let mut octets = [0; 6];
        let mut parts = text.split(':');
        for octet in &mut octets {
            let [high, low] = *parts.next()?.as_bytes() else {
                return None;
            };
            let digit = |byte: u8| char::from(byte).to_digit(16);
            *octet = u8::try_from(digit(high)? << 4 | digit(low)?).ok()?;
        }
        match parts.next() {
            None => Self::new(octets),
            Some(_) => None,
        }
    }

    /// The octets, first one first.
    pub const fn octets(self) -> [u8; 6] {
        self.0
    }
}

/// Changed rows of one table, in one database transaction: the new row, or `None` if the row is
/// gone.
pub type Changes<Row> = Vec<(RowId, Option<Row>)>;

/// A row of the NB `ACL` table whose `k8s.ovn.org/owner-type` is `EgressFirewall`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Acl {
    /// `external_ids:k8s.ovn.org/name`: the namespace of the EgressFirewall.
    pub namespace: Arc<str>,
    /// `external_ids:rule-index`: the rule's place in `spec.egress`.
    pub rule_index: u32,
    /// `priority`.
    pub priority: u16,
    /// `match`, verbatim.
    pub matches: String,
    /// `action`: `allow`, `allow-related`, `drop`, …
    pub action: String,
}

impl Acl {
    /// Whether it lets packets pass: `allow`, `allow-related` and `allow-stateless` do, all other actions do not.
    pub(crate) fn allows(&self) -> bool {
        self.action.starts_with("allow")
    }
}

/// A row of the NB `Logical_Switch` table.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct LogicalSwitch {
    /// `external_ids:k8s.ovn.org/network`: the user-defined network that it belongs to; none on the
    /// cluster's default network (`NetworkExternalID` in ovn-kubernetes' go-controller/pkg/types/const.go).
    pub network: Option<String>,
    /// Whether `external_ids:k8s.ovn.org/role` is `primary`: that network is the primary one of its pods
    /// (`NetworkRoleExternalID` there).
    pub is_primary: bool,
    /// `other_config:subnet` and `other_config:ipv6_prefix`: the networks of its ports.
    pub networks: Vec<IpNet>,
}

/// A row of the NB `Logical_Router_Port` table, of a gateway router towards the outside: its name begins
/// with `rtoe-` (`GWRouterToExtSwitchPrefix` in ovn-kubernetes' go-controller/pkg/types/const.go).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct GatewayPort {
    /// The addresses in `networks`: with ovn-kubernetes, those of the node.
    pub addresses: BTreeSet<IpAddr>,
}

/// A row of the NB `Load_Balancer` table.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct LoadBalancer {
    /// If it is for a Service (`external_ids:k8s.ovn.org/kind`), `external_ids:k8s.ovn.org/owner`: namespace and name of
    /// the Service.
    pub service: Option<String>,
    /// `external_ids:k8s.ovn.org/network`: as with [`LogicalSwitch`].
    pub network: Option<String>,
    /// The addresses in the keys of `vips`.
    pub addresses: BTreeSet<IpAddr>,
    /// The addresses in the values of `vips`, sorted, each once. Most are those of pods.
    pub backends: Box<[IpAddr]>,
}

impl LoadBalancer {
    /// Whether it leads to the API server: it is for the Service `kubernetes`, whose endpoints are the API servers
    /// themselves (Kubernetes, `pkg/controlplane/controller/kubernetesservice`). On a user-defined network it leads to
    /// the same ones.
    pub fn is_of_api_server(&self) -> bool {
        self.service.as_deref() == Some("default/kubernetes") && self.network.is_none()
    }
}

/// A row of the NB `Chassis_Template_Var` table. The keys of the `vips` of a load balancer may name its variables in
/// place of addresses (ovn-nb(5), `options:template` of `Load_Balancer`).
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct TemplateVariables {
    /// The addresses without a port in the values of `variables`.
    pub addresses: BTreeSet<IpAddr>,
}

/// A row, or a table, that tells which addresses load balancers have in front, and that cannot be read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct UnreadFronts;

/// A row of the NB `Address_Set` table that has the addresses of all nodes: ovn-kubernetes makes it for EgressIP,
/// EgressService and RouteAdvertisements.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NodeSet {
    /// `addresses`: those of all interfaces of the nodes.
    pub addresses: BTreeSet<IpAddr>,
}

/// A row of the SB `Encap` table.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Encapsulation {
    /// `ip`: where a node takes the packets of the others.
    pub ip: IpAddr,
}

/// A row of the SB `Datapath_Binding` table.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Datapath {
    /// `tunnel_key`, the OpenFlow `metadata`.
    pub tunnel_key: u32,
}

/// A row of the SB `Port_Binding` table with an empty `type` (a VIF).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortBinding {
    /// `logical_port`, the Interface's `iface-id`.
    pub logical_port: String,
    /// `datapath`.
    pub datapath: RowId,
    /// `tunnel_key`, reg14 of packets from this port.
    pub tunnel_key: u32,
    /// `external_ids:namespace`, which ovn-kubernetes writes for pods.
    pub namespace: Option<String>,
}

/// A row of the SB `Port_Group` table: `<datapath tunnel key>_<NB name>`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortGroup {
    /// The port group's name in the NB database: `name` behind its first underscore.
    pub name: String,
    /// `ports`: logical port names.
    pub ports: BTreeSet<String>,
}

/// The two halves of a logical datapath's pipeline (`Logical_Flow.pipeline`).
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Pipeline {
    /// `ingress`
    Ingress,
    /// `egress`
    Egress,
}

/// A stage of a pipeline.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Stage {
    /// The one with this `Logical_Flow.table_id`.
    Table(Pipeline, u8),
    /// The one in which a logical switch looks at the port security of packets that leave it
    /// (`external_ids:stage-name` is `ls_out_check_port_sec`). Its logical flows pass every packet on, or out of the
    /// switch, and no stage behind it leads back (OVN's northd/northd.h and `build_lswitch_port_sec_op` in
    /// northd/northd.c).
    OutPortSecurity,
}

/// A row of the SB `Logical_Flow` table.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LogicalFlow {
    /// `pipeline`.
    pub pipeline: Pipeline,
    /// `table_id` within the pipeline.
    pub table_id: u8,
    /// `priority`.
    pub priority: u16,
    /// `match`, verbatim.
    pub matches: String,
    /// `actions`, verbatim.
    pub actions: String,
    /// `external_ids:stage-hint`: the first 32 bits of the ACL's row id.
    pub stage_hint: Option<u32>,
}

/// The changes of one transaction in the NB database.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NbUpdate {
    /// The first update of a connection: rows that it does not name no longer exist.
    pub reset: bool,
    /// ACLs of EgressFirewalls.
    pub acls: Changes<Acl>,
    /// Logical switches.
    pub switches: Changes<LogicalSwitch>,
    /// Ports of gateway routers towards the outside.
    pub gateway_ports: Changes<GatewayPort>,
    /// Load balancers.
    pub load_balancers: Changes<LoadBalancer>,
    /// The variables of load balancers.
    pub template_variables: Changes<TemplateVariables>,
    /// Those of both that cannot be read.
    pub unread_fronts: Changes<UnreadFronts>,
    /// Address sets of nodes.
    pub node_sets: Changes<NodeSet>,
}

/// The changes of one transaction in the SB database.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct SbUpdate {
    /// The first update of a connection: rows that it does not name no longer exist.
    pub reset: bool,
    /// Every datapath.
    pub datapaths: Changes<Datapath>,
    /// Ports with an empty type.
    pub port_bindings: Changes<PortBinding>,
    /// Port groups.
    pub port_groups: Changes<PortGroup>,
    /// Logical flows with one of the priorities asked for by `Command::WatchLogicalFlows`.
    pub logical_flows: Changes<LogicalFlow>,
    /// Where the nodes take the packets of the others.
    pub encapsulations: Changes<Encapsulation>,
}

/// An `Interface` row of the local Open_vSwitch database that carries an `iface-id`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Interface {
    /// `name`: the host side of the veth.
    pub name: Arc<str>,
    /// `external_ids:iface-id`: the logical port.
    pub iface_id: String,
    /// `external_ids:iface-id-ver`: the pod's UID.
    pub iface_id_ver: Option<String>,
    /// `external_ids:ip_addresses`, without the prefix lengths.
    pub addresses: Vec<IpAddr>,
    /// `external_ids:attached_mac`.
    pub mac: Option<MacAddress>,
    /// `external_ids:k8s.ovn.org/network`: the user-defined network that it is on, as ovn-kubernetes
    /// names it in its databases; none on the cluster's default network.
    pub network: Option<String>,
    /// `external_ids:sandbox`.
    pub sandbox: Option<String>,
    /// `ifindex`, once ovs-vswitchd has reported it.
    pub ifindex: Option<u32>,
    /// `ingress_policing_rate`, in kbit/s; zero where there is no limit.
    pub policing_kbps: u32,
}

impl Interface {
    /// Whether the interface is a pod's: ovn-kubernetes' CNI plug-in writes `iface-id-ver` or
    /// `sandbox` beside the `iface-id` of a pod, and of a virtual machine's pod (`ConfigureOVS` in
    /// go-controller/pkg/cni/helper_linux.go). Management ports and the patch ports of the hybrid
    /// overlay have only an `iface-id`.
    pub fn is_of_pod(&self) -> bool {
        self.iface_id_ver.is_some() || self.sandbox.is_some()
    }
}

/// The changes of one transaction in the local Open_vSwitch database.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct InterfaceUpdate {
    /// The first update of a connection: rows that it does not name no longer exist.
    pub reset: bool,
    /// Interfaces that carry an `iface-id`.
    pub interfaces: Changes<Interface>,
}

/// Namespace and name of the pod of a logical port: ovn-kubernetes joins both with `_`, which neither can
/// have in it, behind a prefix for a user-defined network (`GetLogicalPortName` in
/// go-controller/pkg/util/util.go).
pub fn pod_of_port(port: &str) -> (&str, &str) {
    let (rest, pod) = port.rsplit_once('_').unwrap_or(("", port));
    let namespace = rest
        .rsplit_once('_')
        .map_or(rest, |(_, namespace)| namespace);
    (namespace, pod)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ethernet_addresses_are_read_or_refused() {
        let read = |text| MacAddress::parse(text).map(MacAddress::octets);
        assert_eq!(
            read("0a:58:0A:f4:00:03"),
            Some([0x0a, 0x58, 0x0a, 0xf4, 0, 3])
        );
        for text in [
            "",
            "0a:58:0a:f4:00",
            "0a:58:0a:f4:00:03:04",
            "0a-58-0a-f4-00-03",
            "a:58:0a:f4:00:03",
            "+a:58:0a:f4:00:03",
            "0a:58:0a:f4:00:0g",
            "00:00:00:00:00:00",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
