//! Pods: network namespaces wired as ovn-kubernetes and its CNI plug-in wire them.

use std::{
    fs,
    io::{ErrorKind, Read},
    net::{AddrParseError, IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4},
    path::{Path, PathBuf},
    process::Command,
    str::FromStr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    database::{elements, map, map_value},
    firewall::namespace_port_group,
    lab::{Datapath, Lab, pod_namespace, random_uuid},
    marks,
    netns::{NetNs, replace_files},
    process::{PATIENT, run, wait_until},
    support::is_by_marks,
    topology::{DNS_SERVICE, DNS_SERVICE_V6, GATEWAY, GATEWAY_MAC, GATEWAY_V6, NODE},
    wire::ifindex,
};

/// A pod to be made.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct PodSpec {
    /// Its Kubernetes namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its address, in 10.244.0.0/24.
    pub address: Ipv4Addr,
}

impl PodSpec {
    /// A pod of this namespace, name and address.
    pub fn new(namespace: &str, name: &str, address: Ipv4Addr) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            address,
        }
    }

    /// Its logical switch port, which is also its name for [`Lab::pod`].
    pub fn lsp(&self) -> String {
        format!("{}_{}", self.namespace, self.name)
    }

    /// Its address in a dual-stack cluster, in fd00:10:244:1::/64.
    pub fn address_v6(&self) -> Ipv6Addr {
        let [.., last] = self.address.octets();
        let mut segments = GATEWAY_V6.segments();
        segments[7] = last.into();
        segments.into()
    }

    /// Its Ethernet address: ovn-kubernetes makes it of `0a:58` and the IPv4 address
    /// (`IPAddrToHWAddr` in go-controller/pkg/util/net.go).
    pub fn mac(&self) -> String {
        let [a, b, c, d] = self.address.octets();
        format!("0a:58:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
    }
}

/// The record of a pod, in the lab's directory.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct PodRecord {
    spec: PodSpec,
    host_veth: String,
}

impl PodRecord {
    fn file(lab: &Lab, lsp: &str) -> PathBuf {
        lab.base().join("pods").join(lsp)
    }

    fn read(lab: &Lab, lsp: &str) -> Result<Self> {
        let text = fs::read_to_string(Self::file(lab, lsp))
            .with_context(|| format!("the lab {} has no pod {lsp}", lab.name()))?;
        Ok(serde_json::from_str(&text)?)
    }

    /// The names of the pods of the lab with this directory.
    pub(crate) fn names(base: &Path) -> Result<Vec<String>> {
        let entries = match fs::read_dir(base.join("pods")) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        entries
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect()
    }
}

/// A running pod, or the "internet".
#[derive(Clone, Debug)]
pub struct Pod<'a> {
    lab: &'a Lab,
    name: String,
}

/// The result of an attempt to read a web page.
#[derive(Clone, Debug)]
pub struct Fetch {
    /// The page, or curl's error message.
    pub result: Result<String, String>,
    /// How long it took.
    pub took: Duration,
}

/// How a DNS query and its answer travel. A truncated answer is an error.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Transport {
    /// A datagram each; the answer has at most 512 bytes (RFC 1035, section 4.2.1).
    Udp,
    /// The same with EDNS, for answers of up to 4,096 bytes, in fragments.
    Edns,
    /// A connection.
    Tcp,
}

/// The cluster's DNS service, as pods know it.
pub const DNS: SocketAddr = SocketAddr::new(IpAddr::V4(DNS_SERVICE), 53);

/// The same by its IPv6 address, which it has in a dual-stack cluster.
pub const DNS_V6: SocketAddr = SocketAddr::new(IpAddr::V6(DNS_SERVICE_V6), 53);

impl<'a> Pod<'a> {
    pub(crate) fn new(lab: &'a Lab, name: &str) -> Self {
        let name = if name == "dns" {
            "kube-system_dns"
        } else {
            name
        };
        Self {
            lab,
            name: name.to_owned(),
        }
    }

    pub(crate) fn lab(&self) -> &'a Lab {
        self.lab
    }

    /// Its network namespace.
    pub fn netns(&self) -> NetNs {
        pod_namespace(self.lab.name(), &self.name)
    }

    /// A Debian program, or else one of the host's, in the pod's network, with a resolver that asks
    /// the lab's DNS service.
    pub fn command(&self, program: &str) -> Result<Command> {
        let mut command = self.lab.program(program)?;
        self.enter(&mut command)?;
        Ok(command)
    }

    /// The lab's own program (`dnsflow-lab-helper`) in the pod, without its arguments.
    pub fn helper(&self) -> Result<Command> {
        let mut command = Command::new(self.lab.helper());
        self.enter(&mut command)?;
        Ok(command)
    }

    /// Makes a command run in the pod.
    pub fn enter(&self, command: &mut Command) -> Result<()> {
        let etc = self.lab.base().join("etc");
        self.netns().enter(command)?;
        replace_files(
            command,
            &[
                (etc.join("resolv.conf"), Path::new("/etc/resolv.conf")),
                (etc.join("nsswitch.conf"), Path::new("/etc/nsswitch.conf")),
                // A name service cache of the host would resolve outside the lab.
                (etc.join("empty"), Path::new("/run/nscd")),
            ],
        )
    }

    /// Runs a program in the pod and returns what it prints.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        run(self.command(program)?.args(arguments))
    }

    /// Tries to read a web page with curl, for at most `limit`.
    ///
    /// A lost SYN comes again after a second; a limit below that sees first packets only.
    pub fn fetch(&self, url: &str, limit: Duration) -> Result<Fetch> {
        self.fetch_by("--ipv4", url, limit)
    }

    /// The same over IPv6.
    pub fn fetch_v6(&self, url: &str, limit: Duration) -> Result<Fetch> {
        self.fetch_by("--ipv6", url, limit)
    }

    fn fetch_by(&self, family: &str, url: &str, limit: Duration) -> Result<Fetch> {
        let mut command = self.command("curl")?;
        command
            .args(["--silent", "--show-error", family, "--noproxy", "*"])
            .arg("--max-time")
            .arg(limit.as_secs_f64().to_string())
            .arg(url);
        let start = Instant::now();
        let output = command.output()?;
        let took = start.elapsed();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let result = if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stderr))
        };
        Ok(Fetch { result, took })
    }

    /// Asks the lab's DNS service for the name's IPv4 addresses: one query, one answer.
    pub fn resolve(&self, name: &str) -> Result<Vec<Ipv4Addr>> {
        self.resolve_all("A", &[name])
    }

    /// The same over TCP.
    pub fn resolve_tcp(&self, name: &str) -> Result<Vec<Ipv4Addr>> {
        self.ask(Transport::Tcp, DNS, "A", &[name])
    }

    /// Asks another DNS server, over UDP.
    pub fn resolve_at(&self, server: SocketAddrV4, name: &str) -> Result<Vec<Ipv4Addr>> {
        self.ask(Transport::Udp, server.into(), "A", &[name])
    }

    /// Asks the lab's DNS service for records of this type (`A` or `AAAA`) of each name, one
    /// query after the other, and returns the addresses of all answers.
    pub fn resolve_all<Address>(
        &self,
        kind: &str,
        names: &[impl AsRef<str>],
    ) -> Result<Vec<Address>>
    where
        Address: FromStr<Err = AddrParseError>,
    {
        self.ask(Transport::Udp, DNS, kind, names)
    }

    /// The same by any transport, of any server.
    pub fn ask<Address>(
        &self,
        transport: Transport,
        server: SocketAddr,
        kind: &str,
        names: &[impl AsRef<str>],
    ) -> Result<Vec<Address>>
    where
        Address: FromStr<Err = AddrParseError>,
    {
        let how = match transport {
            Transport::Udp => "resolve",
            Transport::Edns => "resolve-edns",
            Transport::Tcp => "resolve-tcp",
        };
        let mut command = self.helper()?;
        command.args([how, &server.to_string(), kind]);
        command.args(names.iter().map(AsRef::as_ref));
        let answer = run(&mut command)?;
        answer
            .lines()
            .map(|line| line.parse().context("not an address"))
            .collect()
    }
}

/// A new sandbox id: 64 hex digits, as container runtimes make them.
pub(crate) fn sandbox_id() -> Result<String> {
    let mut bytes = [0; 32];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The host side of a pod's veth: the first 15 characters of the sandbox id (`setupInterface` in
/// ovn-kubernetes' go-controller/pkg/cni/helper_linux.go).
pub(crate) fn host_veth(sandbox: &str) -> String {
    sandbox.chars().take(15).collect()
}

impl Lab {
    /// Creates a pod: port and port group membership as ovn-kubernetes' controller writes them,
    /// then the veth and the Interface row as its CNI plug-in does. Returns when the Interface
    /// row is written (see [`Lab::wait_wired`]): the moment that the veth appeared.
    pub fn add_pod(&self, spec: &PodSpec) -> Result<Instant> {
        self.add_pod_at(spec, None)
    }

    /// The same with this interface index for the host side of the veth, which must be free.
    pub fn add_pod_at(&self, spec: &PodSpec, index: Option<u32>) -> Result<Instant> {
        let (lsp, mac, uid) = (spec.lsp(), spec.mac(), random_uuid()?);
        self.add_logical_port(spec, &uid)?;

        let sandbox = sandbox_id()?;
        let host = host_veth(&sandbox);
        let record = PodRecord {
            spec: spec.clone(),
            host_veth: host.clone(),
        };
        fs::write(
            PodRecord::file(self, &lsp),
            serde_json::to_string_pretty(&record)?,
        )?;
        let namespace = self.pod(&lsp).netns();
        namespace.delete()?;
        NetNs::create(namespace.name())?;
        let appeared = Instant::now();
        self.add_veth_at(&namespace, &host, "eth0", index)?;
        let mut batch = format!(
            "link set lo up\n\
             link set eth0 address {mac} up\n\
             address add {}/24 dev eth0\n\
             route add default via {GATEWAY}\n",
            spec.address
        );
        let mut addresses = format!("{}/24", spec.address);
        if self.cluster().dual_stack {
            let address = spec.address_v6();
            batch += &format!(
                "address add {address}/64 dev eth0 nodad\n\
                 route add ::/0 via {GATEWAY_V6}\n"
            );
            addresses += &format!(",{address}/64");
        }
        self.ip_batch(&namespace, &batch)?;
        self.disable_checksum_offload(&namespace, "eth0")?;
        let ids = [
            ("iface-id", lsp.as_str()),
            ("iface-id-ver", &uid),
            ("attached_mac", &mac),
            ("ip_addresses", &addresses),
            ("sandbox", &sandbox),
            ("pod-if-name", "eth0"),
        ];
        self.add_interface(&host, &ids)?;
        Ok(appeared)
    }

    /// The rows of the local database that plug a veth into br-int.
    pub(crate) fn add_interface(&self, host: &str, ids: &[(&str, &str)]) -> Result<()> {
        self.ovs_db()?.transact(&[
            json!({
                "op": "insert", "table": "Interface", "uuid-name": "interface",
                "row": {"name": host, "external_ids": map(ids.iter().copied())},
            }),
            json!({
                "op": "insert", "table": "Port", "uuid-name": "port",
                "row": {"name": host, "interfaces": ["named-uuid", "interface"]},
            }),
            json!({
                "op": "mutate", "table": "Bridge", "where": [["name", "==", "br-int"]],
                "mutations": [["ports", "insert", ["named-uuid", "port"]]],
            }),
        ])?;
        Ok(())
    }

    fn add_logical_port(&self, spec: &PodSpec, uid: &str) -> Result<()> {
        let group = namespace_port_group(&spec.namespace);
        let mut addresses = format!("{} {}", spec.mac(), spec.address);
        if self.cluster().dual_stack {
            addresses += &format!(" {}", spec.address_v6());
        }
        let mut nb = self.nb()?;
        let mut operations = vec![
            json!({
                "op": "insert", "table": "Logical_Switch_Port", "uuid-name": "port",
                "row": {
                    "name": spec.lsp(),
                    "addresses": addresses,
                    "port_security": addresses,
                    "external_ids": map([("namespace", spec.namespace.as_str()), ("pod", "true")]),
                    "options": map([("iface-id-ver", uid), ("requested-chassis", self.chassis())]),
                },
            }),
            json!({
                "op": "mutate", "table": "Logical_Switch", "where": [["name", "==", NODE]],
                "mutations": [["ports", "insert", ["named-uuid", "port"]]],
            }),
        ];
        let known = nb.select("Port_Group", json!([["name", "==", group]]))?;
        operations.push(if known.is_empty() {
            json!({
                "op": "insert", "table": "Port_Group",
                "row": {
                    "name": group,
                    "ports": ["named-uuid", "port"],
                    "external_ids": map([
                        ("k8s.ovn.org/id", format!("default-network-controller:Namespace:{}", spec.namespace).as_str()),
                        ("k8s.ovn.org/name", &spec.namespace),
                        ("k8s.ovn.org/owner-controller", "default-network-controller"),
                        ("k8s.ovn.org/owner-type", "Namespace"),
                    ]),
                },
            })
        } else {
            json!({
                "op": "mutate", "table": "Port_Group", "where": [["name", "==", group]],
                "mutations": [["ports", "insert", ["named-uuid", "port"]]],
            })
        });
        nb.transact(&operations)?;
        Ok(())
    }

    /// Deletes a pod: the CNI plug-in's part, then the controller's.
    pub fn delete_pod(&self, lsp: &str) -> Result<()> {
        let record = PodRecord::read(self, lsp)?;
        let mut ovs = self.ovs_db()?;
        let mut ports = Vec::new();
        for first in ovs.select("Interface", json!([["name", "==", record.host_veth]]))? {
            // One on each network.
            let sandbox = map_value(&first["external_ids"], "sandbox").unwrap_or_default();
            let of_pod = json!([["external_ids", "includes", map([("sandbox", sandbox)])]]);
            for interface in ovs.select("Interface", of_pod)? {
                let ids = &interface["external_ids"];
                ports.extend(map_value(ids, "iface-id").map(str::to_owned));
                for port in ovs.select("Port", json!([["name", "==", interface["name"]]]))? {
                    ovs.transact(&[json!({
                        "op": "mutate", "table": "Bridge", "where": [["name", "==", "br-int"]],
                        "mutations": [["ports", "delete", port["_uuid"]]],
                    })])?;
                }
            }
        }
        // Before the namespace, whose end takes the veth along at a moment of its own.
        run(self
            .node_command("ip")?
            .args(["link", "delete", &record.host_veth]))?;
        self.pod(lsp).netns().delete()?;
        fs::remove_file(PodRecord::file(self, lsp))?;
        self.delete_logical_ports(&ports)
    }

    fn delete_logical_ports(&self, ports: &[String]) -> Result<()> {
        let mut nb = self.nb()?;
        for port in ports {
            for row in nb.select("Logical_Switch_Port", json!([["name", "==", port]]))? {
                let leave = |table: &str| {
                    json!({
                        "op": "mutate", "table": table,
                        "where": [["ports", "includes", row["_uuid"]]],
                        "mutations": [["ports", "delete", row["_uuid"]]],
                    })
                };
                nb.transact(&[leave("Logical_Switch"), leave("Port_Group")])?;
            }
        }
        Ok(())
    }

    /// Waits until ovn-controller has installed the pod's flows (`ovn-installed` in the Interface
    /// row). The CNI plug-in waits for the same before the pod's containers start.
    pub fn wait_wired(&self, lsp: &str) -> Result<Duration> {
        let name = PodRecord::read(self, lsp)?.host_veth;
        let mut ovs = self.ovs_db()?;
        wait_until(
            &format!("ovn-installed on the interface of {lsp}"),
            PATIENT,
            || {
                let rows = ovs.select("Interface", json!([["name", "==", name]]))?;
                Ok(rows
                    .iter()
                    .any(|row| map_value(&row["external_ids"], "ovn-installed").is_some()))
            },
        )
    }

    /// The number that br-int gives to the pod's interface.
    pub fn openflow_port(&self, lsp: &str) -> Result<u32> {
        let name = self.host_veth(lsp)?;
        let rows = self
            .ovs_db()?
            .select("Interface", json!([["name", "==", name]]))?;
        rows.first()
            .and_then(|row| u32::try_from(elements(&row["ofport"]).first()?.as_i64()?).ok())
            .context("the pod's interface has no OpenFlow port")
    }

    /// The host side of the pod's veth.
    pub fn host_veth(&self, lsp: &str) -> Result<String> {
        Ok(PodRecord::read(self, lsp)?.host_veth)
    }

    /// Traces the first packet of a TCP connection from the pod: returns the output of
    /// `ofproto/trace`.
    pub fn trace(&self, lsp: &str, to: SocketAddrV4) -> Result<String> {
        self.trace_packet(lsp, "tcp", to.into())
    }

    /// Whether the switch would let the first packet of this protocol (`tcp`, `udp` or `sctp`)
    /// from the pod out to the "internet".
    pub fn lets_out(&self, lsp: &str, protocol: &str, to: SocketAddr) -> Result<bool> {
        let trace = self.trace_packet(lsp, protocol, to)?;
        // There is one such line for each time that the packet comes back from conntrack; the last
        // one counts. A dropped packet may have been committed to conntrack before.
        let actions = trace
            .lines()
            .rev()
            .find_map(|line| line.strip_prefix("Datapath actions: "))
            .with_context(|| format!("a trace without actions:\n{trace}"))?;
        let is_port = |action: &str| action.parse::<u32>().is_ok();
        let out = actions.split(',').any(is_port);
        ensure!(
            out || !actions.contains("userspace"),
            "the gateway does not know its next hop yet:\n{trace}"
        );
        Ok(out)
    }

    fn trace_packet(&self, lsp: &str, protocol: &str, to: SocketAddr) -> Result<String> {
        let port = self.openflow_port(lsp)?;
        let spec = PodRecord::read(self, lsp)?.spec;
        let network = match to.ip() {
            IpAddr::V4(to) => format!("{protocol},nw_src={},nw_dst={to}", spec.address),
            IpAddr::V6(to) => {
                format!("{protocol}6,ipv6_src={},ipv6_dst={to}", spec.address_v6())
            }
        };
        let mark = match is_by_marks() {
            true => {
                let veth = self.host_veth(lsp)?;
                let ifindex = self.node().run(|| Ok(ifindex(&veth)))?;
                marks::of_packet(&marks::read(&self.pins()?)?, ifindex, to.ip())
            }
            false => None,
        };
        let mark = mark.map_or_else(String::new, |mark| format!("pkt_mark={mark:#x},"));
        let flow = format!(
            "{mark}in_port={port},dl_src={},dl_dst={GATEWAY_MAC},{network},nw_ttl=64,{protocol}_src=40000,{protocol}_dst={}",
            spec.mac(),
            to.port()
        );
        self.appctl(&["ofproto/trace", "br-int", &flow])
    }

    /// A veth between the node and a namespace, where it is `eth0`.
    pub(crate) fn add_veth(&self, namespace: &NetNs, host: &str) -> Result<()> {
        self.add_veth_named(namespace, host, "eth0")
    }

    /// A veth between the node and a namespace.
    pub(crate) fn add_veth_named(&self, namespace: &NetNs, host: &str, name: &str) -> Result<()> {
        self.add_veth_at(namespace, host, name, None)
    }

    fn add_veth_at(
        &self,
        namespace: &NetNs,
        host: &str,
        name: &str,
        index: Option<u32>,
    ) -> Result<()> {
        let index = index.map_or_else(String::new, |index| format!("index {index} "));
        self.ip_batch(
            &self.node(),
            &format!(
                "link add {host} {index}type veth peer name {name} netns {namespace}\nlink set {host} up\n"
            ),
        )
    }

    /// The pods, by the interface index of the host sides of their veths.
    pub(crate) fn pods_at_interfaces(&self) -> Result<Vec<(u32, PodSpec)>> {
        let names = PodRecord::names(self.base())?;
        let pods = names.iter().map(|lsp| {
            let PodRecord { spec, host_veth } = PodRecord::read(self, lsp)?;
            Ok((self.node().run(|| Ok(ifindex(&host_veth)))?, spec))
        });
        pods.collect()
    }

    /// The interface index of the host side of the pod's veth.
    pub fn host_index(&self, lsp: &str) -> Result<u32> {
        let name = self.host_veth(lsp)?;
        let mut command = self.node_command("ip")?;
        let line = run(command.args(["-oneline", "link", "show", "dev", &name]))?;
        let (index, _) = line.split_once(':').context("no interface")?;
        Ok(index.parse()?)
    }

    /// The userspace datapath does not finish checksums that a veth has left to hardware. With the
    /// kernel's, offloads stay on, as in a cluster.
    pub(crate) fn disable_checksum_offload(&self, namespace: &NetNs, name: &str) -> Result<()> {
        if self.datapath() == Datapath::System {
            return Ok(());
        }
        let mut command = self.root().command("ethtool")?;
        command.args(["-K", name, "tx", "off"]);
        namespace.enter(&mut command)?;
        run(&mut command)?;
        Ok(())
    }

    pub(crate) fn write_resolver_files(&self) -> Result<()> {
        let etc = self.base().join("etc");
        fs::create_dir(etc.join("empty"))?;
        fs::write(etc.join("nsswitch.conf"), "hosts: dns\n")?;
        self.name_server(DNS_SERVICE.into())
    }

    /// Makes this the DNS server of programs that start in pods from now on.
    pub fn name_server(&self, address: IpAddr) -> Result<()> {
        let text = format!("nameserver {address}\noptions timeout:2 attempts:5\n");
        fs::write(self.base().join("etc/resolv.conf"), text)?;
        Ok(())
    }
}
