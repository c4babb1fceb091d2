//! Reads the connections that the datapath tracks.

use anyhow::Result;

use crate::lab::{Datapath, Lab};

impl Lab {
    /// The tracked connections that OVN has blocked, as `dpctl/dump-conntrack` prints them:
    /// `ct_mark.blocked` is bit 0 of the mark (`OVN_CT_BLOCKED_BIT` in OVN's
    /// include/ovn/logical-fields.h).
    pub fn blocked_connections(&self) -> Result<Vec<String>> {
        let dump = self.appctl(&["dpctl/dump-conntrack", self.datapath().dpctl_name()])?;
        let is_blocked = |line: &&str| {
            let mark = line
                .split(',')
                .find_map(|field| field.strip_prefix("mark="));
            mark.and_then(|mark| mark.parse::<u32>().ok())
                .is_some_and(|mark| mark & 1 == 1)
        };
        Ok(dump.lines().filter(is_blocked).map(str::to_owned).collect())
    }
}

impl Datapath {
    /// The datapath's name for `ovs-appctl dpctl/…`: `ovs-` and its type
    /// (`open_dpif_backer` in Open vSwitch's ofproto/ofproto-dpif.c).
    fn dpctl_name(self) -> &'static str {
        match self {
            Self::Netdev => "netdev@ovs-netdev",
            Self::System => "system@ovs-system",
        }
    }
}
