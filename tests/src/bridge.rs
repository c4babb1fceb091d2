//! A lab without OVN: one bridge of Open vSwitch with hand-written flows.
//!
//! All pods are in one network, the web servers' namespace is their gateway, and no service stands
//! in front of the DNS pod. Table 44 decides what leaves a pod, table 45 sends it on.

use anyhow::Result;

use crate::{
    dns::DEFAULT_RECORDS,
    lab::{Lab, LabOptions},
    netns::NetNs,
    ovs::Daemon,
    topology::{self, CLUSTER_SUBNET, GATEWAY, GATEWAY_MAC},
};

/// The agent's `--static-flow` for this bridge.
pub const STATIC_FLOW: &str =
    "table=44,priority=10000,reg0=0x100/0x100,actions=set_field:0/0x100->reg0,resubmit(,45)";

impl Lab {
    /// Brings a lab of Open vSwitch alone up, with the same pods as one with OVN.
    pub fn up_without_ovn(options: LabOptions) -> Result<Self> {
        let lab = Self::create(options, false)?;
        NetNs::create(lab.node().name())?;
        lab.ip_batch(&lab.node(), "link set lo up\n")?;
        lab.create_database(Daemon::OvsDb)?;
        lab.start_daemon(Daemon::OvsDb)?;
        lab.vsctl(&["--no-wait", "init"])?;
        lab.start_daemon(Daemon::Vswitchd)?;
        lab.add_bridge()?;
        lab.write_resolver_files()?;
        let gateway =
            format!("link set eth0 address {GATEWAY_MAC} up\naddress add {GATEWAY}/24 dev eth0\n");
        lab.add_web_servers("br-int", &gateway)?;
        for pod in topology::pods() {
            lab.add_pod(&pod)?;
        }
        lab.serve_dns(DEFAULT_RECORDS)?;
        Ok(lab)
    }

    fn add_bridge(&self) -> Result<()> {
        let datapath = format!("datapath_type={}", self.datapath().ovs_name());
        self.vsctl(&[
            "add-br",
            "br-int",
            "--",
            "set",
            "Bridge",
            "br-int",
            "fail-mode=secure",
            &datapath,
        ])?;
        let to_pods =
            format!("table=44,priority=1,ip,nw_dst={CLUSTER_SUBNET},actions=resubmit(,45)");
        for flow in [
            "table=0,priority=0,actions=NORMAL",
            "table=44,priority=0,actions=drop",
            &to_pods,
            "table=45,priority=0,actions=NORMAL",
        ] {
            self.ofctl(&["add-flow", "br-int", flow])?;
        }
        Ok(())
    }

    /// Sends the packets of this pod through table 44.
    pub fn guard(&self, lsp: &str) -> Result<()> {
        let port = self.openflow_port(lsp)?;
        let flow = format!(
            "table=0,priority=1,ip,in_port={port},actions=set_field:0x100/0x100->reg0,resubmit(,44)"
        );
        self.ofctl(&["add-flow", "br-int", &flow])?;
        Ok(())
    }
}
