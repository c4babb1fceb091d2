//! The OpenFlow client against a real Open vSwitch, without OVN and without traffic.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use dnsflow_agent::openflow::{Connection, Event, LostReason};
use dnsflow_core::{
    io::input::{BatchError, BatchId, CookieCount, FlowQuestion, FlowReply},
    values::flow::{
        Action, Addresses, Cookie, Ends, FlowBody, FlowChange, FlowKey, InstalledFlow, Masked,
        Match, Protocol, Sentinel, Tag, Transport, text,
    },
};
use dnsflow_tests::{
    process::PATIENT,
    root::Root,
    support::{test_root, this_test},
};
use tokio::time::timeout;

/// An Open vSwitch with one bridge, in a directory and network namespaces of its own.
struct Switch {
    root: Root,
    // Dropped in this order: the directory outlives the daemons.
    vswitchd: Option<Daemon>,
    _ovsdb: Daemon,
    dir: Directory,
}

/// A process that is killed when it goes out of scope.
struct Daemon(Child);

impl Daemon {
    fn spawn(command: &mut Command) -> Result<Self> {
        Ok(Self(command.stderr(Stdio::null()).spawn()?))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            eprintln!("cannot stop process {}: {error}", self.0.id());
        }
    }
}

/// A directory that is removed when it goes out of scope.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("cannot remove {}: {error}", self.0.display());
        }
    }
}

impl Switch {
    /// `None`, and the reason on standard output, where there is no switch to run.
    fn start() -> Result<Option<Self>> {
        let Some(root) = test_root(&this_test()) else {
            return Ok(None);
        };
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("dnsflow-openflow-{}-{number}", std::process::id());
        let dir = Directory(std::env::temp_dir().join(name));
        fs::create_dir_all(&dir.0)?;
        let schema = root.path().join("usr/share/openvswitch/vswitch.ovsschema");
        let database = dir.0.join("conf.db");
        run(command(&root, &dir.0, "ovsdb-tool")?
            .arg("create")
            .args([&database, &schema]))?;
        let ovsdb = Daemon::spawn(
            command(&root, &dir.0, "ovsdb-server")?
                .arg(&database)
                .arg(format!(
                    "--remote=punix:{}",
                    dir.0.join("db.sock").display()
                ))
                .arg(format!("--unixctl={}", dir.0.join("db.ctl").display())),
        )?;
        let mut switch = Self {
            root,
            vswitchd: None,
            _ovsdb: ovsdb,
            dir,
        };
        switch.start_vswitchd()?;
        switch.vsctl(&[
            "--retry",
            "add-br",
            "br-int",
            "--",
            "set",
            "bridge",
            "br-int",
            "datapath_type=netdev",
            "fail-mode=secure",
        ])?;
        Ok(Some(switch))
    }

    fn socket(&self) -> PathBuf {
        self.dir.0.join("br-int.mgmt")
    }

    fn tool(&self, program: &str, arguments: &[&str]) -> Result<String> {
        run(command(&self.root, &self.dir.0, program)?.args(arguments))
    }

    fn vsctl(&self, arguments: &[&str]) -> Result<String> {
        let database = format!("--db=unix:{}", self.dir.0.join("db.sock").display());
        let mut all = vec![database.as_str(), "--timeout=20"];
        all.extend(arguments);
        self.tool("ovs-vsctl", &all)
    }

    /// `ovs-ofctl VERB SOCKET ARGUMENTS...`, as anyone else on the host could run it.
    fn ofctl(&self, verb: &str, arguments: &[&str]) -> Result<String> {
        let socket = self.socket().display().to_string();
        let mut all = vec!["--protocols=OpenFlow15", "--timeout=20", verb, &socket];
        all.extend(arguments);
        self.tool("ovs-ofctl", &all)
    }

    /// In a network namespace that ends with it: the userspace datapath makes network devices.
    fn start_vswitchd(&mut self) -> Result<()> {
        let dir = &self.dir.0;
        let inner = command(&self.root, dir, "ovs-vswitchd")?;
        let environment = inner
            .get_envs()
            .filter_map(|(key, value)| Some((key, value?)));
        self.vswitchd = Some(Daemon::spawn(
            Command::new("unshare")
                .arg("--net")
                .arg(inner.get_program())
                .args(inner.get_args())
                .arg(format!("unix:{}", dir.join("db.sock").display()))
                .arg("--disable-system")
                .arg(format!("--unixctl={}", dir.join("vswitchd.ctl").display()))
                .envs(environment),
        )?);
        Ok(())
    }

    fn stop_vswitchd(&mut self) {
        self.vswitchd = None;
    }
}

/// A program of the root, with its run directories in `dir`.
fn command(root: &Root, dir: &Path, program: &str) -> Result<Command> {
    let mut command = root.command(program)?;
    for key in ["OVS_RUNDIR", "OVS_DBDIR", "OVS_LOGDIR", "OVS_SYSCONFDIR"] {
        command.env(key, dir);
    }
    Ok(command)
}

fn run(command: &mut Command) -> Result<String> {
    let output = command.output()?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// A client of the switch, which must not fail.
struct Client {
    connection: Connection,
    last_batch: u64,
}

impl Client {
    async fn connect(switch: &Switch) -> Result<Self> {
        let mut client = Self {
            connection: Connection::new(switch.socket()),
            last_batch: 0,
        };
        client
            .until(|event| matches!(event, Event::Up).then_some(()))
            .await?;
        Ok(client)
    }

    /// The first event that `pick` takes.
    async fn until<T>(&mut self, mut pick: impl FnMut(&Event) -> Option<T>) -> Result<T> {
        let mut seen = Vec::new();
        let search = async {
            loop {
                let event = self.connection.next().await;
                if let Some(found) = pick(&event) {
                    return found;
                }
                seen.push(event);
            }
        };
        let found = timeout(PATIENT, search).await;
        found.with_context(|| format!("the event did not come, only {seen:?}"))
    }

    fn send(&mut self, atomic: bool, changes: Vec<FlowChange>) -> BatchId {
        self.last_batch += 1;
        let batch = BatchId(self.last_batch);
        self.connection.apply(batch, atomic, changes, Vec::new());
        batch
    }

    async fn apply(
        &mut self,
        atomic: bool,
        changes: Vec<FlowChange>,
    ) -> Result<Result<(), BatchError>> {
        let sent = self.send(atomic, changes);
        self.until(|event| match event {
            Event::Applied { batch, result } if *batch == sent => Some(result.clone()),
            _ => None,
        })
        .await
    }

    /// Adds a flow and counts two cookies; every event up to the result.
    async fn apply_and_count(&mut self, batch: u64, last: u8) -> Result<Vec<Event>> {
        let changes = adds(&[key(46, v4(last))]);
        let count = vec![7, 8];
        self.connection.apply(BatchId(batch), false, changes, count);
        let mut seen = Vec::new();
        self.until(|event| {
            seen.push(event.clone());
            matches!(event, Event::Applied { .. }).then_some(())
        })
        .await?;
        Ok(seen)
    }

    async fn dump(&mut self) -> Result<Vec<InstalledFlow>> {
        self.connection.ask(DUMP);
        let mut found = Vec::new();
        self.until(|event| {
            let Event::Reply(FlowReply::Flows { flows, more, .. }) = event else {
                return None;
            };
            found.extend_from_slice(flows);
            (!more).then_some(())
        })
        .await?;
        Ok(found)
    }

    /// Every event up to the answer of a dump, which the switch gives after all that went before.
    async fn events_so_far(&mut self) -> Result<Vec<Event>> {
        self.connection.ask(DUMP);
        let mut seen = Vec::new();
        self.until(|event| {
            let done = matches!(event, Event::Reply(FlowReply::Flows { more: false, .. }));
            if !matches!(event, Event::Reply(FlowReply::Flows { .. })) {
                seen.push(event.clone());
            }
            done.then_some(())
        })
        .await?;
        Ok(seen)
    }
}

const DUMP: FlowQuestion = FlowQuestion::Dump { number: 1 };

fn v4(number: u8) -> Addresses {
    Addresses::V4 {
        src: Ipv4Addr::new(10, 244, 0, 5),
        dst: Ipv4Addr::new(203, 0, 113, number),
    }
}

fn v6(number: u16) -> Addresses {
    Addresses::V6 {
        src: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 5),
        dst: Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, number),
    }
}

/// A flow like those in OVN's `ls_out_acl_eval`.
fn key(table: u8, ends: impl Into<Ends>) -> FlowKey {
    FlowKey {
        table,
        priority: 10_999,
        matches: Match {
            metadata: 3,
            registers: Arc::new(BTreeMap::from([
                (0, Masked::new(0x100, 0x100)),
                (8, Masked::new(0x8000_0000, 0xc000_0000)),
                (14, Masked::new(5, u32::MAX)),
            ])),
            ends: ends.into(),
            transport: None,
        },
    }
}

/// Such a flow to one of very many addresses.
fn numbered(number: u32) -> FlowKey {
    key(
        46,
        Addresses::V4 {
            src: Ipv4Addr::new(10, 244, 0, 5),
            dst: Ipv4Addr::from(0xcb00_0000 + number),
        },
    )
}

fn body(tag: u32) -> FlowBody {
    FlowBody {
        cookie: Cookie::new(tag),
        hard_timeout_s: 300,
        actions: Arc::new([
            Action::SetRegister {
                register: 8,
                bits: Masked::new(1 << 16, 1 << 16),
            },
            Action::Resubmit { table: 47 },
        ]),
    }
}

/// The packets of one IP version with a tag.
fn tagged(is_ipv6: bool) -> Ends {
    Ends::Tagged {
        tag: Tag::new(Tag::SCOPE_MAX, 7),
        is_ipv6,
    }
}

/// Flows of every form that there is.
fn all_forms() -> Vec<FlowKey> {
    let mut keys = Vec::new();
    let of_all_packets = [
        Ends::Untranslated,
        Ends::AnyTag,
        Ends::Marked { bit: 1 << 31 },
    ];
    keys.extend(of_all_packets.map(|ends| key(46, ends)));
    let of_connections = [Ends::Established(v4(1)), Ends::Established(v6(1))];
    keys.extend(of_connections.map(|ends| key(46, ends)));
    for ends in [v4(1).into(), v6(1).into(), tagged(false), tagged(true)] {
        keys.push(key(46, ends));
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Sctp] {
            for port in [None, Some(443)] {
                let mut key = key(46, ends);
                key.matches.transport = Some(Transport { protocol, port });
                keys.push(key);
            }
        }
    }
    let mut bare = key(0, v4(2));
    bare.matches.registers = Arc::default();
    keys.push(bare);
    for register in 0..16 {
        for mask in [0x100, u32::MAX] {
            let mut key = key(47, v4(3));
            let registers = BTreeMap::from([(register, Masked::new(0x1ff, mask))]);
            key.matches.registers = registers.into();
            keys.push(key);
        }
    }
    let mut full = key(47, v6(3));
    let registers = (0..16).map(|n| (n, Masked::new(n.into(), u32::MAX)));
    full.matches.registers = Arc::new(registers.collect());
    keys.push(full);
    keys
}

fn adds(keys: &[FlowKey]) -> Vec<FlowChange> {
    let add = |key: &FlowKey| FlowChange::Add(key.clone(), body(1));
    keys.iter().map(add).collect()
}

#[tokio::test]
async fn flows_are_in_the_switch_after_the_result_and_read_back_as_written() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    let keys = all_forms();
    client.apply(false, adds(&keys)).await??;
    let printed = switch.ofctl("dump-flows", &["cookie=0x444e534600000001/-1"])?;
    for in_each in ["cookie=", "hard_timeout=300,"] {
        ensure!(printed.matches(in_each).count() == keys.len(), "{printed}");
    }
    // It leaves out table 0.
    let same = |line: &str| {
        let mut parts: Vec<&str> = line.trim().split(", ").collect();
        let is_counter = |part: &str| {
            let counters = [
                "duration=",
                "n_packets=",
                "n_bytes=",
                "hard_timeout=",
                "idle_age=",
            ];
            counters.iter().any(|counter| part.starts_with(counter)) || part == "table=0"
        };
        parts.retain(|part| !is_counter(part));
        parts.join(", ")
    };
    let lines = printed.lines().filter(|line| line.contains("cookie="));
    let printed: BTreeSet<String> = lines.map(same).collect();
    let flows = keys.iter().map(|key| same(&text::flow(key, &body(1))));
    assert_eq!(flows.collect::<BTreeSet<_>>(), printed);
    switch.ofctl("add-flow", &["table=46,ip,actions=drop"])?;

    let flows = client.dump().await?;
    let found: BTreeSet<FlowKey> = flows.iter().map(|flow| flow.key.clone()).collect();
    assert_eq!(found, keys.into_iter().collect());
    assert_eq!(flows.len(), found.len());
    for flow in flows {
        assert_eq!(flow.cookie, Cookie::new(1));
        assert_eq!(flow.packets, 0);
    }
    assert_eq!(client.connection.counters(), Default::default());
    Ok(())
}

/// They say in text and in bytes the same as `ovs-ofctl`'s.
#[tokio::test]
async fn actions_are_printed_as_ovs_ofctl_prints_them() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    let lists = [
        vec![Action::SetTunnel(0), Action::Resubmit { table: 47 }],
        vec![Action::SetTunnel(Tag::new(1, 2).bits())],
        vec![
            Action::SetTunnel(Tag::new(5, 0).bits()),
            Action::MoveMark { mask: 0xffe0_0000 },
            Action::SetMark(Masked::new(0, 0xffe0_0000)),
        ],
        vec![Action::MoveMark { mask: u32::MAX }],
        vec![Action::MoveMark { mask: 1 << 4 }],
        vec![],
    ];
    let flows = lists.into_iter().zip(1..).map(|(actions, number)| {
        let body = FlowBody {
            actions: actions.into(),
            ..body(u32::from(number))
        };
        (key(46, v4(number)), body)
    });
    let flows: Vec<(FlowKey, FlowBody)> = flows.collect();
    let add = |(key, body): &(FlowKey, FlowBody)| FlowChange::Add(key.clone(), body.clone());
    client
        .apply(false, flows.iter().map(add).collect())
        .await??;
    for (key, body) in &flows {
        let cookie = format!("cookie={:#x}/-1", body.cookie.bits());
        let printed = switch.ofctl("dump-flows", &[&cookie])?;
        let text = text::flow(key, body);
        let (_, actions) = text.split_once(" actions=").context("actions")?;
        ensure!(
            printed.trim_end().ends_with(&format!(" actions={actions}")),
            "{text}: {printed}"
        );
    }
    Ok(())
}

/// Groups of eight namespaces with a flow each: for more than one question.
const SHARDED_GROUPS: u16 = 5_000;

#[tokio::test]
async fn a_dump_in_shards_shows_every_flow_once() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    let of_both = |number: u16| [numbered(number.into()), key(46, v6(number))];
    let sentinel = Sentinel {
        table: 46,
        cookie: Cookie::new(2),
    };
    let mut keys: BTreeSet<FlowKey> = (0..10_000).flat_map(of_both).collect();
    let add = |key: &FlowKey, cookie| {
        let body = FlowBody { cookie, ..body(1) };
        FlowChange::Add(key.clone(), body)
    };
    let of_tag = Cookie::of_tag(Tag::new(1, 2), None);
    let tags = keys.iter().map(|key| add(key, of_tag));
    client.apply(false, tags.collect()).await??;
    let others = [
        Ends::Untranslated,
        Ends::AnyTag,
        Ends::Marked { bit: 1 },
        tagged(false),
        tagged(true),
        Ends::Established(v4(1)),
        Ends::Established(v6(1)),
    ];
    // Tags end in another table.
    let others = others.map(|ends| match ends {
        Ends::AnyTag | Ends::Marked { .. } => key(51, ends),
        _ => key(46, ends),
    });
    let of_groups = (1..=SHARDED_GROUPS).map(|number| {
        let (is_ipv6, tag) = (number % 2 == 0, Tag::new(1 + number % 8, number / 8));
        key(46, Ends::Tagged { is_ipv6, tag })
    });
    let of_groups: Vec<FlowKey> = of_groups.collect();
    let further = others.iter().chain(&of_groups);
    let further = further.map(|key| add(key, Cookie::new(2)));
    let of_sentinel = add(&sentinel.key(), Cookie::new(3));
    client
        .apply(false, further.chain([of_sentinel]).collect())
        .await??;
    keys.extend(others);
    keys.extend(of_groups);
    keys.insert(sentinel.key());
    switch.ofctl("add-flow", &["table=46,ip,actions=drop"])?;
    for round in ["at once", "in shards"] {
        let flows = client.dump().await?;
        let found: BTreeSet<FlowKey> = flows.iter().map(|flow| flow.key.clone()).collect();
        assert_eq!(flows.len(), keys.len(), "{round}");
        assert!(found == keys, "{round}");
    }
    Ok(())
}

#[tokio::test]
async fn delete_takes_only_our_flow_and_only_with_its_cookie() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    let (first, second) = (key(46, v4(1)), key(46, v4(2)));
    client
        .apply(true, adds(&[first.clone(), second.clone()]))
        .await??;
    let foreign = "table=46,priority=10999,cookie=0x7,metadata=3,reg0=0x100/0x100,reg8=0x80000000/0xc0000000,\
        reg14=5,ip,tun_id=0,nw_src=10.244.0.5,nw_dst=203.0.113.9,actions=drop";
    switch.ofctl("add-flow", &[foreign])?;

    let wrong = FlowChange::Delete(first.clone(), Some(Cookie::new(2)));
    client.apply(false, vec![wrong]).await??;
    assert_eq!(client.dump().await?.len(), 2);

    let right = FlowChange::Delete(first, Some(Cookie::new(1)));
    client.apply(false, vec![right]).await??;
    let left: Vec<_> = client.dump().await?.into_iter().map(|f| f.key).collect();
    assert_eq!(left, std::slice::from_ref(&second));

    // Without a cookie, whatever cookie of ours it has.
    let any = [second, key(46, v4(9))].map(|key| FlowChange::Delete(key, None));
    client.apply(false, any.into()).await??;
    assert_eq!(client.dump().await?.len(), 0);
    assert!(switch.ofctl("dump-flows", &[])?.contains("cookie=0x7"));
    Ok(())
}

/// A flow that the switch refuses: its action is not one.
fn refused() -> FlowChange {
    let mut body = body(1);
    body.actions = Arc::new([Action::Copied(vec![0x77, 0x77, 0, 8, 0, 0, 0, 0])]);
    FlowChange::Add(key(46, v4(99)), body)
}

#[tokio::test]
async fn a_batch_that_is_not_atomic_keeps_what_the_switch_took() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    let mut changes = adds(&[key(46, v4(1)), key(46, v4(2))]);
    changes.insert(1, refused());
    let result = client.apply(false, changes).await?;
    let text = "OFPET_BAD_ACTION (OFPBAC_BAD_TYPE)".to_owned();
    assert_eq!(result, Err(BatchError::Refused(vec![(1, text)])));
    assert_eq!(client.dump().await?.len(), 2);
    Ok(())
}

#[tokio::test]
async fn an_atomic_batch_with_one_bad_message_changes_nothing() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    client.apply(false, adds(&[key(46, v4(1))])).await??;
    let delete = FlowChange::Delete(key(46, v4(1)), Some(Cookie::new(1)));
    let mut changes = adds(&[key(46, v4(2)), key(46, v4(3))]);
    changes.extend([delete, refused()]);
    let result = client.apply(true, changes).await?;
    let text = "OFPET_BAD_ACTION (OFPBAC_BAD_TYPE)".to_owned();
    assert_eq!(result, Err(BatchError::Refused(vec![(3, text)])));
    let left: Vec<_> = client.dump().await?.into_iter().map(|f| f.key).collect();
    assert_eq!(left, [key(46, v4(1))]);
    Ok(())
}

#[tokio::test]
async fn what_only_the_commit_finds_bad_is_reported_too() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    switch.vsctl(&[
        "--",
        "--id=@t",
        "create",
        "Flow_Table",
        "flow_limit=1",
        "overflow_policy=refuse",
        "--",
        "set",
        "bridge",
        "br-int",
        "flow_tables:46=@t",
    ])?;
    let mut client = Client::connect(&switch).await?;
    let result = client
        .apply(true, adds(&[key(46, v4(1)), key(46, v4(2))]))
        .await?;
    let text = "OFPET_FLOW_MOD_FAILED (OFPFMFC_TABLE_FULL)".to_owned();
    assert_eq!(result, Err(BatchError::Refused(vec![(1, text)])));
    assert_eq!(client.dump().await?, []);
    Ok(())
}

#[tokio::test]
async fn changes_take_effect_in_the_order_asked_for() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    let both = [key(46, v4(1)), key(46, v4(2))];
    let delete = |key: &FlowKey| FlowChange::Delete(key.clone(), Some(Cookie::new(1)));
    client.send(true, adds(&both));
    client.send(true, both.iter().map(delete).collect());
    client.send(false, adds(&both[1..]));
    client.send(true, both.iter().map(delete).collect());
    client.send(false, adds(&both[..1]));
    let left: Vec<_> = client.dump().await?.into_iter().map(|f| f.key).collect();
    assert_eq!(left, both[..1]);
    Ok(())
}

#[tokio::test]
async fn cookies_are_found_in_every_table_by_all_their_bits() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    for flow in [
        "table=8,cookie=0xaabbccdd,ip,actions=drop",
        "table=8,cookie=0xaabbccdd,ipv6,actions=drop",
        "table=51,cookie=0xaabbccdd,ip,actions=drop",
        "table=9,cookie=0x1aabbccdd,ip,actions=drop",
        "table=10,cookie=0x11,ip,actions=drop",
        "table=11,cookie=0x12,ip,actions=drop",
        "table=12,cookie=0x13,ip,actions=ct(commit,zone=5,exec(set_field:0x1/0x1->ct_mark)),resubmit(,13)",
    ] {
        switch.ofctl("add-flow", &[flow])?;
    }
    let mut client = Client::connect(&switch).await?;
    client
        .connection
        .ask(FlowQuestion::Find(vec![0xaabb_ccdd, 0x11, 0x13, 0x99]));
    let found = client
        .until(|event| match event {
            Event::Reply(FlowReply::Found(found)) => Some(found.clone()),
            _ => None,
        })
        .await?;
    let places: Vec<_> = found.iter().map(|flow| (flow.cookie, flow.table)).collect();
    assert_eq!(
        places,
        [(0x11, 10), (0x13, 12), (0xaabb_ccdd, 8), (0xaabb_ccdd, 51)]
    );
    // What was copied from one flow does the same in another.
    let mut body = body(1);
    assert!(found[0].actions.is_empty(), "drop");
    body.actions = Arc::new([Action::Copied(found[1].actions.clone())]);
    let add = FlowChange::Add(key(12, v4(1)), body);
    assert_eq!(client.apply(false, vec![add]).await?, Ok(()));
    let flows = switch.ofctl("dump-flows", &["table=12"])?;
    let actions = |flow: &str| flow.split("actions=").nth(1).map(str::to_owned);
    let actions: BTreeSet<_> = flows.lines().filter_map(actions).collect();
    assert_eq!(actions.len(), 1, "{flows}");
    Ok(())
}

#[tokio::test]
async fn flows_go_with_their_sentinel() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    client.connection.monitor_tables(BTreeSet::from([46, 51]));
    let endless = |tag: u32| FlowBody {
        hard_timeout_s: 0,
        ..body(tag)
    };
    let sentinel = Sentinel {
        table: 46,
        cookie: Cookie::new(2),
    };
    let line = FlowBody {
        hard_timeout_s: 1,
        actions: sentinel.actions(),
        ..body(3)
    };
    let add = |key: FlowKey, body| FlowChange::Add(key, body);
    let stay = [(key(46, v4(1)), 4), (key(51, v4(1)), 2)];
    let go = [(key(46, v4(2)), 2), (key(46, v4(3)), 2)];
    let mut changes = vec![add(sentinel.key(), line.clone())];
    for (key, tag) in stay.iter().chain(&go) {
        changes.push(add(key.clone(), endless(*tag)));
    }
    // Written once more: nothing may go because the first of the two does.
    changes.push(add(sentinel.key(), line));
    client.apply(true, changes).await??;
    assert_eq!(client.dump().await?.len(), 5);
    let mut gone = BTreeSet::new();
    while gone.len() < 3 {
        let lost = client.until(|event| match event {
            Event::FlowLost { key, .. } => Some(key.clone()),
            _ => None,
        });
        gone.insert(lost.await?);
    }
    let mut expected: BTreeSet<_> = go.map(|(key, _)| key).into();
    expected.insert(sentinel.key());
    assert_eq!(gone, expected);
    let left: BTreeSet<_> = client
        .dump()
        .await?
        .into_iter()
        .map(|flow| flow.key)
        .collect();
    assert_eq!(left, stay.map(|(key, _)| key).into());
    Ok(())
}

#[tokio::test]
async fn renewal_restarts_the_hard_timeout_and_keeps_the_rest() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    client.connection.monitor_tables(BTreeSet::from([46, 51]));
    let short = |tag: u32| FlowBody {
        hard_timeout_s: 2,
        ..body(tag)
    };
    // The same cookie in two tables, and a flow that nobody renews as the clock.
    let renewed = [key(46, v4(1)), key(51, v4(1))];
    let mut changes: Vec<_> = renewed
        .iter()
        .map(|key| FlowChange::Add(key.clone(), short(1)))
        .collect();
    let clock = key(46, v4(2));
    let clock_body = FlowBody {
        hard_timeout_s: 3,
        ..body(2)
    };
    changes.push(FlowChange::Add(clock.clone(), clock_body));
    client.apply(true, changes).await??;

    // Renew faster than once in two seconds until the flow that lives for three is gone.
    let mut lost = Vec::new();
    let started = Instant::now();
    while lost.is_empty() {
        ensure!(started.elapsed() < PATIENT, "no flow has expired");
        client.send(false, vec![FlowChange::Renew(short(1))]);
        let pause = tokio::time::sleep(Duration::from_millis(500));
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => break,
                event = client.connection.next() => match event {
                    Event::Applied { result, .. } => result?,
                    other => lost.push(other),
                },
            }
        }
    }
    let expired = |key: FlowKey, tag| Event::FlowLost {
        key,
        cookie: Cookie::new(tag),
        reason: LostReason::HardTimeout,
    };
    assert_eq!(lost, [expired(clock, 2)]);
    let printed = switch.ofctl("dump-flows", &["cookie=0x444e534600000001/-1"])?;
    for in_each in ["cookie=", "hard_timeout=2,"] {
        ensure!(printed.matches(in_each).count() == 2, "{printed}");
    }

    // Without renewal they go.
    let mut gone = BTreeSet::new();
    for _ in 0..2 {
        gone.insert(
            client
                .until(|event| match event {
                    Event::FlowLost { key, .. } => Some(key.clone()),
                    _ => None,
                })
                .await?,
        );
    }
    assert_eq!(gone, BTreeSet::from(renewed));
    Ok(())
}

#[tokio::test]
async fn renewal_keeps_the_counters() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    let mut key = key(0, v4(1));
    key.matches.metadata = 0;
    key.matches.registers = Arc::default();
    let mut quiet = body(1);
    quiet.actions = Arc::default();
    client
        .apply(false, vec![FlowChange::Add(key, quiet.clone())])
        .await??;
    // An IPv4 packet from 10.244.0.5 to 203.0.113.1, sent through the tables.
    let packet = "0a58cb0071010a580af400050800\
        4500001c00004000401100000af40005cb007101\
        1000003500080000";
    let out = format!("in_port=controller packet={packet} actions=table");
    switch.ofctl("packet-out", &[&out])?;
    let packets = |flows: Vec<InstalledFlow>| flows.first().map(|flow| flow.packets);
    let started = Instant::now();
    while packets(client.dump().await?) != Some(1) {
        ensure!(started.elapsed() < PATIENT, "the packet was never counted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    client
        .apply(false, vec![FlowChange::Renew(quiet)])
        .await??;
    assert_eq!(packets(client.dump().await?), Some(1));
    Ok(())
}

/// What the counts of these cookies say: cookie, flows, packets.
fn counted(batch: u64, counts: &[(u32, u32, u64)]) -> Event {
    let count = |&(cookie, flows, packets)| CookieCount {
        cookie,
        flows,
        packets,
    };
    Event::Reply(FlowReply::Counted {
        batch: Some(BatchId(batch)),
        counts: counts.iter().map(count).collect(),
    })
}

/// The order is what the engine relies on: what happened to the flows before, then their count, then
/// the barrier's reply.
#[tokio::test]
async fn flows_are_counted_behind_the_changes_of_a_batch() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    client.connection.monitor_tables(BTreeSet::from([46]));
    let denies = |port: u8| format!("table=46,cookie=0x7,metadata=3,reg14={port},ip,actions=drop");
    for port in [5, 6] {
        switch.ofctl("add-flow", &[&denies(port)])?;
    }
    // Ethernet and IPv4, UDP from 10.0.0.1 to 10.0.0.2.
    let packet = "505400000005505400000007080045000020000000004011000\
        00a0000010a000002000100020008000000000000";
    let through_it = format!(
        "in_port=LOCAL,packet={packet},\
        actions=load:5->NXM_NX_REG14[],load:3->OXM_OF_METADATA[],resubmit(,46)"
    );
    switch.ofctl("packet-out", &[&through_it])?;
    let applied = |batch: u64| Event::Applied {
        batch: BatchId(batch),
        result: Ok(()),
    };
    let expected = [counted(1, &[(7, 2, 1), (8, 0, 0)]), applied(1)];
    assert_eq!(client.apply_and_count(1, 1).await?, expected);
    // Written anew, as a restarted ovn-controller does.
    client.connection.ask(FlowQuestion::Count(vec![7, 8]));
    assert!(matches!(
        client.events_so_far().await?[..],
        [Event::Reply(FlowReply::Counted { batch: None, .. })]
    ));
    switch.ofctl("del-flows", &["cookie=0x7/-1"])?;
    switch.ofctl("add-flow", &[&denies(5)])?;
    let expected = [
        Event::CountLost { cookie: 7 },
        counted(2, &[(7, 1, 0), (8, 0, 0)]),
        applied(2),
    ];
    assert_eq!(client.apply_and_count(2, 2).await?, expected);
    Ok(())
}

#[tokio::test]
async fn only_what_others_do_to_our_flows_is_reported() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    client.connection.monitor_tables(BTreeSet::from([46]));
    let keys: Vec<_> = (1..=4).map(|n| key(46, v4(n))).collect();
    let elsewhere = key(47, v4(1));
    client.apply(true, adds(&keys)).await??;
    client.apply(false, adds(&[elsewhere])).await??;
    client
        .apply(false, vec![FlowChange::Renew(body(1))])
        .await??;
    let own = FlowChange::Delete(keys[0].clone(), Some(Cookie::new(1)));
    client.apply(false, vec![own]).await??;
    assert_eq!(client.events_so_far().await?, []);

    let text = |number: u8, rest: &str| {
        format!(
            "table=46,metadata=3,reg0=0x100/0x100,reg8=0x80000000/0xc0000000,reg14=5,ip,tun_id=0,\
            nw_src=10.244.0.5,nw_dst=203.0.113.{number}{rest}"
        )
    };
    switch.ofctl("del-flows", &[&text(2, "")])?;
    switch.ofctl(
        "add-flow",
        &[&text(3, ",priority=10999,cookie=0x77,actions=drop")],
    )?;
    switch.ofctl("mod-flows", &[&text(4, ",actions=drop")])?;
    // Not ours, and of no shape of ours; and of a table that is not monitored.
    switch.ofctl("add-flow", &["table=46,ip,actions=drop"])?;
    switch.ofctl("del-flows", &["table=46,ip,nw_dst=203.0.113.77"])?;
    switch.ofctl("del-flows", &["table=47"])?;
    let lost = |at: usize, reason| Event::FlowLost {
        key: keys[at].clone(),
        cookie: Cookie::new(1),
        reason,
    };
    let foreign = Event::ForeignFlow {
        key: keys[2].clone(),
        cookie: 0x77,
    };
    assert_eq!(
        client.events_so_far().await?,
        [
            lost(1, LostReason::Deleted),
            foreign,
            lost(3, LostReason::Modified)
        ]
    );

    // Another set of tables replaces the first.
    client.connection.monitor_tables(BTreeSet::from([47]));
    client.apply(false, adds(&[key(47, v4(9))])).await??;
    switch.ofctl("del-flows", &["table=46"])?;
    switch.ofctl("del-flows", &["table=47"])?;
    let lost = Event::FlowLost {
        key: key(47, v4(9)),
        cookie: Cookie::new(1),
        reason: LostReason::Deleted,
    };
    assert_eq!(client.events_so_far().await?, [lost]);
    Ok(())
}

#[tokio::test]
async fn a_slow_reader_is_told_of_the_gap() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    client.connection.monitor_tables(BTreeSet::from([46]));
    client.events_so_far().await?;
    // More updates than the socket's buffers and the switch's limit hold, unread.
    let flows: String = (0..20_000u32)
        .map(|n| {
            let dst = Ipv4Addr::from(0xcb00_0000 + n);
            format!(
                "table=46,cookie=0x444e534600000001,ip,nw_src=10.244.0.5,nw_dst={dst},actions=drop\n"
            )
        })
        .collect();
    let file = switch.dir.0.join("flows");
    fs::write(&file, flows)?;
    switch.ofctl("add-flows", &[&file.display().to_string()])?;
    switch.ofctl("del-flows", &["table=46"])?;
    client
        .until(|event| matches!(event, Event::MonitorGap).then_some(()))
        .await?;
    // From here on it is complete again.
    client.apply(false, adds(&[key(46, v4(1))])).await??;
    switch.ofctl("del-flows", &["table=46"])?;
    let lost = client
        .until(|event| match event {
            Event::FlowLost { key, .. } => Some(key.clone()),
            _ => None,
        })
        .await?;
    assert_eq!(lost, key(46, v4(1)));
    Ok(())
}

#[tokio::test]
async fn packets_for_the_controller_do_not_come_to_us() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    let packet = format!("{:0<120}", "0a58cb0071010a580af400050800");
    let out = format!("in_port=controller packet={packet} actions=controller");
    switch.ofctl("packet-out", &[&out])?;
    assert_eq!(client.events_so_far().await?, []);
    assert_eq!(client.connection.counters().unexpected_messages, 0);
    Ok(())
}

#[tokio::test]
async fn the_connection_comes_back_with_the_switch_and_monitors_again() -> Result<()> {
    let Some(mut switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    client.connection.monitor_tables(BTreeSet::from([46]));
    client.apply(false, adds(&[key(46, v4(1))])).await??;
    switch.stop_vswitchd();
    let batch = client.send(false, adds(&[key(46, v4(2))]));
    let lost = Event::Applied {
        batch,
        result: Err(BatchError::ConnectionLost),
    };
    let mut down = None;
    let mut results = 0;
    client
        .until(|event| {
            results += usize::from(*event == lost);
            if let Event::Down { reason } = event {
                down = Some(reason.clone());
            }
            down.is_some().then_some(())
        })
        .await?;
    assert_eq!(results, 1);
    let reason = down.unwrap_or_default();
    for part in ["br-int.mgmt", "--openflow-socket"] {
        assert!(reason.contains(part), "{reason}");
    }
    let result = client.apply(false, adds(&[key(46, v4(2))])).await?;
    assert_eq!(result, Err(BatchError::ConnectionLost));

    switch.start_vswitchd()?;
    client
        .until(|event| matches!(event, Event::Up).then_some(()))
        .await?;
    assert_eq!(client.dump().await?, []);
    client.apply(false, adds(&[key(46, v4(1))])).await??;
    switch.ofctl("del-flows", &["table=46"])?;
    client
        .until(|event| matches!(event, Event::FlowLost { .. }).then_some(()))
        .await?;
    Ok(())
}

#[tokio::test]
async fn a_bridge_without_openflow_1_5_is_named() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    switch.vsctl(&["set", "bridge", "br-int", "protocols=OpenFlow13"])?;
    let mut connection = Connection::new(switch.socket());
    match timeout(PATIENT, connection.next()).await? {
        Event::Down { reason } => {
            assert!(reason.contains("does not speak OpenFlow 1.5"), "{reason}");
            Ok(())
        }
        other => bail!("{other:?}"),
    }
}

/// Numbers for people, not a check: `cargo test -p dnsflow-tests --test openflow -- --ignored
/// --nocapture`.
#[tokio::test]
#[ignore = "a measurement"]
async fn measure() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    let flow = |n| FlowChange::Add(numbered(n), body(1));
    for port in 0..30 {
        let denies = format!("table=46,cookie=0x7,metadata=3,reg14={port},ip,actions=drop");
        switch.ofctl("add-flow", &[&denies])?;
    }
    let mut times = [Vec::new(), Vec::new()];
    for n in 0..10_000 {
        let count = if n % 2 == 0 { vec![] } else { vec![7] };
        let times = &mut times[count.len()];
        let start = Instant::now();
        let changes = vec![flow(n)];
        client
            .connection
            .apply(BatchId(n.into()), false, changes, count);
        client
            .until(|event| matches!(event, Event::Applied { .. }).then_some(()))
            .await?;
        times.push(start.elapsed());
    }
    for (count, times) in times.iter_mut().enumerate() {
        times.sort();
        let at = |percent: usize| times[times.len() * percent / 100];
        println!(
            "one flow_mod and barrier, {count} cookies of 30 flows counted between: p50 {:?}, p99 {:?}",
            at(50),
            at(99)
        );
    }
    for atomic in [true, false] {
        switch.ofctl("del-flows", &[])?;
        let changes: Vec<_> = (0..10_000).map(flow).collect();
        let start = Instant::now();
        client.apply(atomic, changes).await??;
        println!("10,000 flows, atomic {atomic}: {:?}", start.elapsed());
    }
    let start = Instant::now();
    assert_eq!(client.dump().await?.len(), 10_000);
    println!("dump of 10,000 flows: {:?}", start.elapsed());
    let start = Instant::now();
    client
        .apply(false, vec![FlowChange::Renew(body(1))])
        .await??;
    println!("renewal of 10,000 flows: {:?}", start.elapsed());
    Ok(())
}

/// How long one flow takes while another connection dumps 200,000: at once, and in shards.
#[tokio::test]
#[ignore = "a measurement"]
async fn measure_dumps() -> Result<()> {
    let Some(switch) = Switch::start()? else {
        return Ok(());
    };
    let mut client = Client::connect(&switch).await?;
    // As the agent writes them: the sentinel flow has the timeout.
    let body = FlowBody {
        hard_timeout_s: 0,
        ..body(1)
    };
    let flow = |n| FlowChange::Add(numbered(n), body.clone());
    const FLOWS: u32 = 200_000;
    client.apply(true, (0..FLOWS).map(flow).collect()).await??;
    let mut dumper = Client::connect(&switch).await?;
    for round in ["at once", "in shards", "in shards"] {
        let done = AtomicBool::new(false);
        let dump = async {
            let start = Instant::now();
            let found = dumper.dump().await?.len();
            done.store(true, Ordering::Relaxed);
            ensure!(found >= FLOWS as usize, "{found} flows");
            Ok(start.elapsed())
        };
        let write = async {
            let mut times = Vec::new();
            while !done.load(Ordering::Relaxed) {
                let start = Instant::now();
                client.apply(false, vec![flow(FLOWS)]).await??;
                times.push(start.elapsed());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            anyhow::Ok(times)
        };
        let (took, times) = tokio::join!(dump, write);
        let (took, mut times) = (took?, times?);
        times.sort();
        println!(
            "{FLOWS} flows {round}: {took:?}; meanwhile {} flows, p50 {:?}, at most {:?}",
            times.len(),
            times[times.len() / 2],
            times[times.len() - 1]
        );
        let delete = FlowChange::Delete(numbered(FLOWS), Some(body.cookie));
        client.apply(false, vec![delete]).await??;
    }
    Ok(())
}
