//! A pod's second network, over which the node's kernel routes by itself.
//!
//! Open vSwitch's userspace datapath takes packets by a socket, for which any hook at the veth makes the kernel clone
//! them (`throughput.rs`). The kernel's datapath has no such socket, but needs a module that this kernel may lack, and
//! an emulated machine takes long for each instruction of the programs. Here the node's kernel routes between a veth
//! of a pod and one of the "internet". The packets pass the programs in the same place as with the kernel's datapath.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddrV4},
    num::NonZeroU32,
    process::Command,
    time::Duration,
};

use anyhow::{Result, bail, ensure};
use dnsflow_agent::{
    capture::{self, Capture, EntryTimes, Reading},
    clock::now,
};
use dnsflow_common::{
    key::ClassKey,
    question::{Depth, NameHash},
    walk::Version,
};
use dnsflow_core::{
    Input,
    io::input::{NameSetId, SourceAddresses},
    ovn::rows::RowId,
    values::name::DomainName,
};
use dnsflow_tests::{netns::NetNs, process::run};
use tokio::runtime::{Builder, Runtime};

use crate::bench::stage::{FREE, Stage};

/// The host's side of the pod's veth, and of the other one.
pub(super) const TO_POD: &str = "routed0";
const OUT: &str = "routed1";
/// The pods' side of both.
pub(super) const INSIDE: &str = "eth9";
const POD: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 2);
pub(super) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(10, 201, 0, 2);
/// `--mark-mask`, by default.
pub(super) const MARK_MASK: NonZeroU32 = NonZeroU32::new(0xffe0_0000).unwrap();
/// A mark of it.
pub(super) const MARK: u32 = 1 << MARK_MASK.get().trailing_zeros();
/// How long an entry lasts that the program makes: longer than a round takes.
const ENTRY_TIMES: EntryTimes = EntryTimes {
    least: 600,
    most: 600,
    more: 0,
};
/// Longer than a row takes.
const LONG: Duration = Duration::from_secs(3600);

/// The programs of this process, at the pod's veth.
pub(super) struct Attached {
    pub(super) capture: Capture,
    runtime: Runtime,
    ifindex: u32,
}

impl Attached {
    /// To be called in the node's namespace.
    pub(super) fn attach(marks: bool) -> Result<Self> {
        const ROW: RowId = RowId::new(1);
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let options = capture::Options {
            mark_mask: marks.then_some(MARK_MASK),
            entry_times: ENTRY_TIMES,
            ..capture::Options::default()
        };
        let mut capture = {
            let _runtime = runtime.enter();
            capture::load(&options, runtime.handle())?
        };
        let sources = SourceAddresses {
            mac: None,
            ips: vec![POD.into()],
        };
        let attachments = &mut capture.attacher.attachments;
        let mut told = vec![attachments.attach(ROW, TO_POD.into(), sources, now())];
        while attachments.has_work() {
            told.extend(attachments.work(now()));
        }
        let Some(&Input::Attached { ifindex, .. }) = told.last() else {
            bail!("the programs are not attached: {told:?}");
        };
        capture.heartbeat.capture_until(now() + LONG)?;
        Ok(Self {
            capture,
            runtime,
            ifindex,
        })
    }

    /// Gives all work to the program on ingress that packets to an address can be: they get a mark, and attempts to
    /// connect are told of.
    pub(super) fn mark(&mut self, address: Ipv4Addr) -> Result<()> {
        let entries = &mut self.capture.entries;
        entries.set(self.ifindex, address.into(), MARK, now() + LONG)?;
        self.capture.watched.set(self.ifindex, true);
        Ok(())
    }

    /// Lets the program on egress open the addresses of names one label below a base, told by a server.
    pub(super) fn open_below(&mut self, base: &str, server: SocketAddrV4) -> Result<()> {
        let capture = &mut self.capture;
        let errors = (capture.resolvers).set(&[(IpAddr::V4(*server.ip()), server.port())]);
        ensure!(errors.is_empty(), "the server is not trusted: {errors:?}");
        let base: DomainName = base.parse()?;
        let name_set = NameSetId(1);
        capture.names.set_names(name_set, [&base]);
        capture.names.set_name_set(self.ifindex, Some(name_set));
        let hash = NameHash::of(base.wire());
        let class = ClassKey::new(self.ifindex, hash, Depth::Child, Version::V4);
        capture.classes.set(0, class, base.wire(), MARK)?;
        let entries = &mut capture.entries;
        entries.share(self.ifindex, true)?;
        let mut reading = Reading::default();
        while !reading.is_over() {
            entries.read(&mut reading)?;
        }
        entries.tell_room()?;
        Ok(())
    }

    /// Takes the programs away. To be called in the node's namespace.
    pub(super) fn detach(self) {
        let Self {
            capture, runtime, ..
        } = self;
        drop(capture);
        drop(runtime);
    }
}

/// The two veths beside the lab's.
pub(super) struct Wires<'a> {
    pub(super) stage: &'a Stage<'a>,
    pub(super) node: NetNs,
}

impl<'a> Wires<'a> {
    pub(super) fn lay(stage: &'a Stage<'a>) -> Result<Self> {
        let wires = Self {
            stage,
            node: stage.lab.node(),
        };
        let (pod, internet) = wires.ends();
        for (host, inside, net) in [(TO_POD, &pod, "10.200.0"), (OUT, &internet, "10.201.0")] {
            wires.ip(
                &wires.node,
                &[
                    &format!("link add {host} type veth peer name {INSIDE} netns {inside}"),
                    &format!("address add {net}.1/24 dev {host}"),
                    &format!("link set {host} up"),
                ],
            )?;
            wires.ip(
                inside,
                &[
                    &format!("address add {net}.2/24 dev {INSIDE}"),
                    &format!("link set {INSIDE} up"),
                    &format!("route add 10.200.0.0/15 via {net}.1"),
                ],
            )?;
        }
        // In the namespace of the thread that writes.
        let forward = || Ok(fs::write("/proc/sys/net/ipv4/ip_forward", "1")?);
        wires.node.run(forward)?;
        Ok(wires)
    }

    pub(super) fn ends(&self) -> (NetNs, NetNs) {
        let lab = self.stage.lab;
        (lab.pod(FREE).netns(), lab.pod("inet").netns())
    }

    pub(super) fn run_in(&self, namespace: &NetNs, mut command: Command) -> Result<()> {
        namespace.enter(&mut command)?;
        run(&mut command)?;
        Ok(())
    }

    pub(super) fn ip(&self, namespace: &NetNs, commands: &[&str]) -> Result<()> {
        for command in commands {
            let mut ip = self.stage.lab.node_command("ip")?;
            ip.args(command.split(' '));
            self.run_in(namespace, ip)?;
        }
        Ok(())
    }

    pub(super) fn remove(self) -> Result<()> {
        self.ip(
            &self.node,
            &[TO_POD, OUT]
                .map(|host| format!("link delete {host}"))
                .each_ref()
                .map(String::as_str),
        )
    }
}
