//! The lab's DNS server: unbound in the DNS pod, with the records that a test gives it and
//! nothing else to ask.

use std::{fs, path::Path};

use anyhow::Result;
use rustix::process::Signal;

use crate::{
    lab::Lab,
    process::{spawn_detached, stop, wait_listening},
    topology::DNS_POD_PORT,
};

/// The DNS server's records until [`Lab::serve_dns`] sets others.
pub const DEFAULT_RECORDS: &[&str] = &[
    "example.com. 30 IN A 203.0.113.1",
    "www.example.com. 30 IN A 203.0.113.2",
    "www.example.net. 30 IN A 203.0.113.3",
];

impl Lab {
    /// Makes the DNS server know exactly these records, in zone file notation; every other name
    /// does not exist. Returns when it listens.
    pub fn serve_dns(&self, records: &[&str]) -> Result<()> {
        let zone = self.base().join("etc/unbound.zone");
        fs::write(&zone, root_zone(records))?;
        // The zone for every name keeps it from asking anyone.
        self.start_unbound(&format!(
            "\
    # By default it knows that these do not exist.
    local-zone: \"test.\" nodefault
auth-zone:
    name: \".\"
    zonefile: \"{}\"
    for-upstream: yes
    for-downstream: yes
    fallback-enabled: no
",
            zone.display()
        ))
    }

    /// Makes the DNS server ask another server, on this port of the DNS pod's loopback, for every
    /// name, and report each answer by dnstap to this socket. The socket must have a listener
    /// already.
    pub fn serve_dns_tapped(&self, upstream: u16, tap: &Path) -> Result<()> {
        self.start_unbound(&format!(
            "    do-not-query-localhost: no
forward-zone:
    name: \".\"
    forward-addr: 127.0.0.1@{upstream}
dnstap:
    dnstap-enable: yes
    dnstap-socket-path: \"{}\"
    dnstap-log-client-response-messages: yes
",
            tap.display()
        ))
    }

    /// Stops the DNS pod's server, so that another one can use the port.
    pub fn stop_dns(&self) -> Result<()> {
        stop_dns(self)
    }

    /// Starts unbound with the common configuration and `rest` behind it.
    fn start_unbound(&self, rest: &str) -> Result<()> {
        let file = self.base().join("etc/unbound.conf");
        fs::write(
            &file,
            format!("{}{rest}", configuration(self.cluster().dual_stack)),
        )?;
        stop_dns(self)?;
        let mut command = self.pod("dns").command("unbound")?;
        command.arg("-d").arg("-c").arg(&file);
        let log = self.base().join("log/unbound.log");
        let pid = spawn_detached(&mut command, &log, &self.socket(UNBOUND))?;
        wait_listening(pid, "udp", DNS_POD_PORT)
    }
}

/// The pid files of the servers that the DNS pod may run.
const UNBOUND: &str = "unbound.pid";
const LIAR: &str = "liar-dns.pid";

/// Stops whatever DNS server runs in the DNS pod.
pub(crate) fn stop_dns(lab: &Lab) -> Result<()> {
    for pidfile in [UNBOUND, LIAR] {
        stop(&lab.socket(pidfile), lab.base(), Signal::TERM)?;
    }
    Ok(())
}

/// The records as one zone for every name, so that the server follows CNAMEs from any name to any
/// other.
fn root_zone(records: &[&str]) -> String {
    let mut zone = String::from(
        ". 3600 IN SOA dns.test. hostmaster.test. 1 3600 600 86400 60\n\
         . 3600 IN NS dns.test.\n",
    );
    for record in records {
        zone += &format!("{record}\n");
    }
    zone
}

/// unbound.conf(5): the `server` clause. The clauses behind it name the servers to ask.
fn configuration(dual_stack: bool) -> String {
    let (do_ip6, interface_v6) = if dual_stack {
        ("yes", format!("interface: ::0@{DNS_POD_PORT}"))
    } else {
        ("no", String::new())
    };
    format!(
        "\
server:
    interface: 0.0.0.0@{DNS_POD_PORT}
    {interface_v6}
    access-control: 0.0.0.0/0 allow
    access-control: ::/0 allow
    do-ip6: {do_ip6}
    # As large as a client wants.
    max-udp-size: 4096
    chroot: \"\"
    username: \"\"
    directory: \"\"
    pidfile: \"\"
    use-syslog: no
    module-config: \"iterator\"
"
    )
}
