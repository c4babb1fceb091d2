use super::*;
use dnsflow_core::{
    ovn::rows::{LogicalFlow, Pipeline},
    values::{
        firewall::{Destination, Firewall, Rule, RuleAction},
        resolver::Resolver,
    },
};

use crate::{
    capture::survey::Link,
    check::{Status, facts::Kernel},
    k8s::{DnsService, permissions},
    open_by::Obstacle,
};

const MASK: NonZeroU32 = NonZeroU32::new(0xffe0_0000).expect("not zero");
const ACL: RowId = RowId::new(0xabcd_0123 << 96);

/// A node on which everything is as it should be.
fn sound() -> Facts {
    let veth = Link {
        ifindex: 7,
        kind: Some("veth".into()),
        in_switch: false,
    };
    let interface = |name: &str| PodInterface {
        name: name.into(),
        port: format!("ns1_{name}"),
        policed: false,
        link: Some(veth.clone()),
        ingress_qdisc: None,
        in_front: Ok(Vec::new()),
    };
    let matches = "(ip4.dst == $a18346816605274050565) && inport == @a1";
    let acl = Acl {
        namespace: "ns1".into(),
        rule_index: 0,
        priority: 10_000,
        matches: matches.into(),
        action: "allow".into(),
    };
    let flow = LogicalFlow {
        pipeline: Pipeline::Egress,
        table_id: 6,
        priority: 11_000,
        matches: format!("reg0[8] == 1 && ({matches})"),
        actions: "next;".into(),
        stage_hint: Some(ACL.prefix()),
    };
    let services = ["kube-system/k8s-app=kube-dns", "openshift-dns/dns-default"];
    let services = services.map(|text| text.parse::<DnsService>().expect(text));
    let permissions = permissions::required(&services);
    let resolver = Resolver {
        address: [10, 96, 0, 10].into(),
        port: 53,
    };
    let mut found = vec![BTreeSet::from([resolver]), BTreeSet::new()].into_iter();
    Facts {
        kernel: Kernel {
            release: "6.12.1".into(),
            btf: true,
            load: Ok(()),
            attach: Some(Ok(AttachKind::Tcx)),
        },
        vswitch: Ok(Vswitch {
            interfaces: vec![interface("a"), interface("b")],
            hw_offload: false,
        }),
        openflow: Ok(()),
        open_by: Ok(Decision::Marks(MASK)),
        node: Ok(NodeAddresses {
            all: addresses(&["172.18.0.2", "192.0.2.2"]),
            ..NodeAddresses::default()
        }),
        nb: Ok(Northbound {
            acls: BTreeMap::from([(ACL, acl)]),
            gateways: addresses(&["172.18.0.2"]),
            node_set: BTreeSet::new(),
            api_servers: addresses(&["172.18.0.9"]),
        }),
        sb: Ok(Southbound {
            flows: vec![flow],
            bases: BTreeMap::from([(Pipeline::Egress, 45)]),
            tunnels: addresses(&["172.18.0.2", "172.18.0.3"]),
        }),
        source: Source::Cluster(Ok(Cluster {
            url: "https://api:6443".into(),
            permissions: permissions
                .into_iter()
                .map(|right| (right, Ok(true)))
                .collect(),
            firewalls: Ok(()),
            dns: services
                .into_iter()
                .map(|service| (service, Ok(found.next().expect("two"))))
                .collect(),
            service_networks: Ok(Some(networks(&["10.96.0.0/16"]))),
            cluster_networks: Vec::new(),
        })),
        firewalls: Firewalls::default(),
        subdomains: true,
    }
}

fn addresses(texts: &[&str]) -> BTreeSet<IpAddr> {
    let addresses = texts.iter().map(|text| text.parse().expect("an address"));
    addresses.collect()
}

fn networks(texts: &[&str]) -> BTreeSet<IpNet> {
    let networks = texts.iter().map(|text| text.parse().expect("a network"));
    networks.collect()
}

/// The findings of a sound node that `change` has changed, without those that are in order.
fn changed(change: impl FnOnce(&mut Facts)) -> Vec<(&'static str, Status, String)> {
    let mut facts = sound();
    change(&mut facts);
    judge(&facts)
        .into_iter()
        .filter(|finding| finding.status != Status::Ok)
        .map(|finding| {
            let line = finding.to_string();
            assert!(!line.contains('\n'), "{line}");
            (finding.check, finding.status, line)
        })
        .collect()
}

/// That there is exactly this finding, with these words in it.
#[track_caller]
fn one(change: impl FnOnce(&mut Facts), check: &str, status: Status, words: &[&str]) {
    let findings = changed(change);
    let [(found, found_status, line)] = &findings[..] else {
        panic!("{findings:#?}");
    };
    assert_eq!((*found, *found_status), (check, status), "{line}");
    for word in words {
        assert!(line.contains(word), "`{word}` is not in `{line}`");
    }
}

fn vswitch(facts: &mut Facts) -> &mut Vswitch {
    facts.vswitch.as_mut().expect("a switch")
}

fn cluster(facts: &mut Facts) -> &mut Cluster {
    match &mut facts.source {
        Source::Cluster(Ok(cluster)) => cluster,
        other => panic!("{other:?}"),
    }
}

fn deny(facts: &mut Facts, which: impl Fn(&Permission) -> bool) {
    for (permission, allowed) in &mut cluster(facts).permissions {
        *allowed = Ok(!which(permission));
    }
}

#[test]
fn a_sound_node_has_nothing_to_cure() {
    assert_eq!(changed(|_| ()), []);
    let findings = judge(&sound());
    assert!(findings.iter().all(|finding| finding.remedy.is_none()));
    let names: BTreeSet<&str> = findings.iter().map(|finding| finding.check).collect();
    assert_eq!(names.len(), findings.len(), "one line each");
}

#[test]
fn a_kernel_that_refuses_is_a_failure() {
    use Status::Failed;
    let no_load = |facts: &mut Facts| {
        facts.kernel.load = Err("no BPF ring buffer".into());
        facts.kernel.attach = None;
    };
    one(
        no_load,
        "program",
        Failed,
        &["6.12.1", "no BPF ring buffer", "privileged"],
    );
    let no_attach = |facts: &mut Facts| {
        facts.kernel.attach = Some(Err(NotAttached::Failed("no clsact".into())));
    };
    one(
        no_attach,
        "attach",
        Failed,
        &["no clsact", "CONFIG_NET_CLS_ACT"],
    );
}

#[test]
fn tcx_needs_no_trial() {
    let policed = |tcx| {
        move |facts: &mut Facts| {
            facts.kernel.attach = Some(Err(NotAttached::NotTried { tcx }));
            vswitch(facts).interfaces[1].policed = tcx;
        }
    };
    assert_eq!(changed(policed(true)), []);
    one(
        policed(false),
        "attach",
        Status::Warning,
        &["CAP_SYS_ADMIN", "privileged"],
    );
}

#[test]
fn what_is_not_needed_is_not_complained_about() {
    let old = |facts: &mut Facts| {
        facts.kernel.btf = false;
        facts.kernel.attach = Some(Ok(AttachKind::Clsact));
    };
    assert_eq!(changed(old), []);
}

#[test]
fn ingress_policing_matters_to_clsact_only() {
    let policed = |facts: &mut Facts| vswitch(facts).interfaces[1].policed = true;
    assert_eq!(changed(policed), []);
    for standing in [true, false] {
        let change = |facts: &mut Facts| {
            facts.kernel.attach = Some(Ok(AttachKind::Clsact));
            if standing {
                vswitch(facts).interfaces[1].ingress_qdisc = Some("ingress".into());
            } else {
                vswitch(facts).interfaces[1].policed = true;
            }
        };
        one(
            change,
            "qdiscs",
            Status::Warning,
            &["ns1_b", "egress-bandwidth", "TCX"],
        );
    }
    let ours = |facts: &mut Facts| {
        facts.kernel.attach = Some(Ok(AttachKind::Clsact));
        vswitch(facts).interfaces[1].ingress_qdisc = Some("clsact".into());
    };
    assert_eq!(changed(ours), []);
}

#[test]
fn programs_in_front_are_named() {
    let in_front = |facts: &mut Facts| {
        let programs = ["program 7 at ingress", "program 8 at egress"];
        vswitch(facts).interfaces[1].in_front = Ok(programs.map(str::to_owned).into());
    };
    one(
        in_front,
        "hooks",
        Status::Warning,
        &[
            "ns1_b (program 7 at ingress, program 8 at egress)",
            "bpftool",
        ],
    );
    let unknown = |facts: &mut Facts| {
        vswitch(facts).interfaces[1].in_front = Err("no permission".into());
    };
    one(
        unknown,
        "hooks",
        Status::Warning,
        &["no permission", "CAP_NET_ADMIN"],
    );
}

#[test]
fn pods_without_veth_are_named() {
    use Status::{Failed, Warning};
    let representor = |facts: &mut Facts| {
        let link = vswitch(facts).interfaces[0].link.as_mut().expect("a link");
        (link.kind, link.in_switch) = (None, true);
    };
    one(
        representor,
        "interfaces",
        Warning,
        &["1 of 2", "ns1_a", "hardware"],
    );
    let tap = |facts: &mut Facts| {
        let link = vswitch(facts).interfaces[0].link.as_mut().expect("a link");
        link.kind = Some("tun".into());
    };
    one(tap, "interfaces", Warning, &["ns1_a (of the kind tun)"]);
    let device = |facts: &mut Facts| {
        let link = vswitch(facts).interfaces[0].link.as_mut().expect("a link");
        link.kind = None;
    };
    one(device, "interfaces", Warning, &["ns1_a (a device)"]);
    let elsewhere = |facts: &mut Facts| {
        for interface in &mut vswitch(facts).interfaces {
            interface.link = None;
        }
    };
    one(elsewhere, "interfaces", Failed, &["2 of 2", "hostNetwork"]);
    let none = |facts: &mut Facts| vswitch(facts).interfaces.clear();
    one(none, "interfaces", Warning, &["run a pod"]);
    let offload = |facts: &mut Facts| vswitch(facts).hw_offload = true;
    one(offload, "offload", Warning, &["hw-offload"]);
}

#[test]
fn how_addresses_are_opened_is_said_with_the_reason() {
    use Status::{Failed, Ok as Fine, Warning};
    let reason = || "/x/vswitchd.pid is missing".to_owned();
    for (open_by, status, text) in [
        (
            Ok(Decision::Marks(MASK)),
            Fine,
            "addresses are opened by marks in the bits 0xffe00000",
        ),
        (
            Ok(Decision::FlowsAsked),
            Fine,
            "addresses are opened by flows of their own (--open-by=flows)",
        ),
        (
            Ok(Decision::Flows(Obstacle::NotPinned)),
            Fine,
            "by flows of their own: without --pin-dir, marks end with the agent; flows stay for --keep-flows",
        ),
        (
            Ok(Decision::FlowsForNow(reason())),
            Warning,
            "by flows of their own until Open vSwitch answers: /x/vswitchd.pid is missing; start Open vSwitch",
        ),
        (
            Ok(Decision::MarksUnasked(MASK, reason())),
            Warning,
            "whether packets can be marked is not known: /x/vswitchd.pid is missing; start Open vSwitch",
        ),
        (
            Err(OpenByError(Obstacle::NotInKernel)),
            Failed,
            "--open-by=marks: the bridge is not in the kernel's datapath",
        ),
    ] {
        let facts = Facts { open_by, ..sound() };
        let findings = judge(&facts);
        let finding = findings.iter().find(|finding| finding.check == "open-by");
        let finding = finding.expect("it is asked");
        let line = finding.to_string();
        assert_eq!(finding.status, status, "{line}");
        assert!(line.contains(text), "`{text}` is not in `{line}`");
    }
}

#[test]
fn what_does_not_answer_is_named_with_its_option() {
    use Status::Failed;
    let reason = || "unix:/x: No such file".to_owned();
    one(
        |facts| facts.vswitch = Err(reason()),
        "vswitch",
        Failed,
        &["/x", "--ovs-db"],
    );
    one(
        |facts| facts.openflow = Err(reason()),
        "openflow",
        Failed,
        &["/x", "--openflow-socket"],
    );
    one(
        |facts| facts.nb = Err(reason()),
        "ovn-nb",
        Failed,
        &["/x", "--ovn-nb"],
    );
    one(
        |facts| facts.sb = Err(reason()),
        "ovn-sb",
        Failed,
        &["/x", "--ovn-sb"],
    );
}

#[test]
fn templates_are_read_before_the_agent_needs_them() {
    use Status::{Failed, Warning};
    fn southbound(facts: &mut Facts) -> &mut Southbound {
        facts.sb.as_mut().expect("a database")
    }
    let none = |facts: &mut Facts| facts.nb.as_mut().expect("a database").acls.clear();
    one(none, "acl-template", Warning, &["no ACL for a dnsName"]);
    let early = |facts: &mut Facts| southbound(facts).flows.clear();
    assert_eq!(
        changed(early),
        [],
        "a node may have no pod of such a namespace"
    );
    let strange = |facts: &mut Facts| southbound(facts).flows[0].actions = "dance;".into();
    one(strange, "acl-template", Failed, &["dance", "lflow-list"]);
    let partly = |facts: &mut Facts| {
        let acls = &mut facts.nb.as_mut().expect("a database").acls;
        let acl = acls[&ACL].clone();
        let strange = acl.matches.replace("inport", "outport");
        acls.insert(
            RowId::new(5 << 96),
            Acl {
                matches: strange,
                ..acl
            },
        );
    };
    one(
        partly,
        "acl-template",
        Warning,
        &["an ACL of ns1", "outport"],
    );
    let other = |facts: &mut Facts| {
        let acls = &mut facts.nb.as_mut().expect("a database").acls;
        acls.get_mut(&ACL).expect("an ACL").matches = "(ip4.dst == 0.0.0.0/0)".into();
    };
    one(other, "acl-template", Warning, &["no ACL for a dnsName"]);
    let placeless = |facts: &mut Facts| southbound(facts).bases.clear();
    one(placeless, "acl-template", Warning, &["ovn-controller"]);
}

#[test]
fn rights_are_judged_by_what_they_are_for() {
    use Status::{Failed, Warning};
    one(
        |facts| deny(facts, |right| right.purpose == Purpose::Events),
        "rbac",
        Warning,
        &["create events.events.k8s.io", "deploy/base/rbac.yaml"],
    );
    one(
        |facts| {
            deny(facts, |right| {
                right.verb == "watch" && right.purpose == Purpose::Firewalls
            })
        },
        "rbac",
        Failed,
        &["watch egressfirewalls.k8s.ovn.org"],
    );
    // One cluster has its DNS in one of the usual places.
    one(
        |facts| {
            deny(facts, |right| {
                right.namespace.as_deref() == Some("openshift-dns")
            })
        },
        "rbac",
        Warning,
        &["list services openshift-dns/dns-default"],
    );
    one(
        |facts| deny(facts, |right| right.purpose == Purpose::Resolvers),
        "rbac",
        Failed,
        &["list services in kube-system", "--dns-service"],
    );
    let mute = |facts: &mut Facts| {
        cluster(facts).permissions[0].1 = Err("500".into());
    };
    one(mute, "rbac", Warning, &["500"]);
}

#[test]
fn the_networks_of_services_come_from_the_api_server_or_from_an_option() {
    use Status::Warning;
    let found = |found| move |facts: &mut Facts| cluster(facts).service_networks = found;
    let words = ["no ServiceCIDR", "--cluster-networks"];
    one(found(Ok(None)), "services", Warning, &words);
    one(found(Ok(Some(networks(&[])))), "services", Warning, &words);
    one(found(Err("403".into())), "services", Warning, &["403"]);
    one(
        |facts| deny(facts, |right| right.purpose == Purpose::ServiceNetworks),
        "rbac",
        Warning,
        &["list servicecidrs.networking.k8s.io"],
    );
    let by_option = changed(|facts| {
        found(Ok(None))(facts);
        cluster(facts).cluster_networks = networks(&["10.96.0.0/16"]).into_iter().collect();
    });
    assert_eq!(by_option, []);
    let by_routes = |facts: &mut Facts| {
        found(Ok(None))(facts);
        let node = facts.node.as_mut().expect("known");
        node.service_networks = networks(&["10.96.0.0/16"]);
    };
    assert_eq!(
        sound_text(by_routes, "services"),
        "DNS answers open no address of 10.96.0.0/16 (ovn-kubernetes' routes on this node)"
    );
}

/// The text of the finding about this, which is in order.
fn sound_text(change: impl FnOnce(&mut Facts), check: &str) -> String {
    let mut facts = sound();
    change(&mut facts);
    let findings = judge(&facts).into_iter();
    let mut findings = findings.filter(|finding| finding.check == check);
    let finding = findings.next().expect(check);
    assert_eq!(finding.status, Status::Ok, "{finding}");
    finding.text
}

#[test]
fn nodes_and_api_servers_are_named_with_the_place_that_they_were_found_at() {
    use Status::Warning;
    fn nb(facts: &mut Facts) -> &mut Northbound {
        facts.nb.as_mut().expect("a database")
    }
    assert_eq!(
        sound_text(|_| {}, "nodes"),
        "DNS answers open no address of 172.18.0.2, 172.18.0.3 (OVN's tunnels and gateway routers), nor the 2 of \
         this node's interfaces"
    );
    let set = |facts: &mut Facts| nb(facts).node_set = addresses(&["192.0.2.3"]);
    let text = sound_text(set, "nodes");
    assert!(text.contains("192.0.2.3 (") && text.contains("address set of nodes"));
    let nothing = |facts: &mut Facts| {
        nb(facts).gateways.clear();
        facts.sb.as_mut().expect("a database").tunnels.clear();
    };
    one(nothing, "nodes", Warning, &["may open", "--deny-answers"]);
    let mute = |facts: &mut Facts| facts.node = Err("EPERM".into());
    one(mute, "nodes", Warning, &["172.18.0.3", "EPERM"]);
    assert_eq!(
        sound_text(|_| {}, "api-server"),
        "DNS answers open no address of 172.18.0.9 (OVN's load balancers of the Service default/kubernetes)"
    );
    let nowhere = |facts: &mut Facts| nb(facts).api_servers.clear();
    let words = ["https://api:6443", "--deny-answers"];
    one(nowhere, "api-server", Warning, &words);
}

#[test]
fn the_cache_of_the_node_is_named_beside_the_dns_of_the_cluster() {
    assert_eq!(sound_text(|_| {}, "dns"), "pods ask 10.96.0.10:53");
    let cache = |facts: &mut Facts| {
        let cache = "169.254.20.10:53".parse().expect("a server");
        facts.node.as_mut().expect("known").dns_cache = [cache].into();
    };
    assert_eq!(
        sound_text(cache, "dns"),
        "pods ask 10.96.0.10:53, and the cache of this node at 169.254.20.10:53 (interface nodelocaldns)"
    );
}

#[test]
fn a_cluster_without_dns_or_firewalls_is_no_place_to_work() {
    use Status::Failed;
    let no_dns = |facts: &mut Facts| {
        for (_, found) in &mut cluster(facts).dns {
            *found = Ok(BTreeSet::new());
        }
    };
    one(
        no_dns,
        "dns",
        Failed,
        &["kube-system/k8s-app=kube-dns", "--dns-service"],
    );
    let refused = |facts: &mut Facts| {
        for (_, found) in &mut cluster(facts).dns {
            *found = Err("refused".into());
        }
    };
    one(
        refused,
        "dns",
        Failed,
        &["openshift-dns/dns-default: refused"],
    );
    one(
        |facts| cluster(facts).firewalls = Err("404".into()),
        "kubernetes",
        Failed,
        &["404", "ovn-kubernetes"],
    );
    one(
        |facts| facts.source = Source::Cluster(Err("no kubeconfig".into())),
        "kubernetes",
        Failed,
        &["no kubeconfig", "--kubeconfig"],
    );
}

/// The rules of ns1: an action, and a name or a network, for each.
fn with_rules(rules: &[(RuleAction, &str)]) -> impl FnOnce(&mut Facts) {
    let rule = |(action, to): &(RuleAction, &str)| Rule {
        action: *action,
        destination: match to.parse() {
            Ok(network) => Destination::Cidr(network),
            Err(_) => Destination::Name(to.parse().expect("a name")),
        },
        ports: Vec::new(),
    };
    let firewall = Firewall {
        rules: rules.iter().map(rule).collect(),
        ..Firewall::default()
    };
    |facts| {
        facts.firewalls.read.insert("ns1".into(), firewall);
    }
}

#[test]
fn rules_that_stand_for_more_names_than_before_are_listed() {
    use RuleAction::{Allow, Deny};
    let few = [
        (Allow, "example.com"),
        (Allow, "*.example.net"),
        (Deny, "0.0.0.0/0"),
    ];
    assert_eq!(
        sound_text(with_rules(&few), "subdomains"),
        "1 rule by dnsName, also for all sub-domains, and with ovn-kubernetes alone for the exact name: ns1 rule 0 \
         (example.com)"
    );
    let many = vec![(Allow, "example.com"); RULES_MAX + 2];
    let text = sound_text(with_rules(&many), "subdomains");
    assert!(
        text.ends_with("ns1 rule 19 (example.com) and 2 more"),
        "{text}"
    );
    let cut = |facts: &mut Facts| {
        with_rules(&few)(facts);
        facts.firewalls.are_more = true;
    };
    assert!(sound_text(cut, "subdomains").contains("of the first 1 EgressFirewalls"));
    let none = |change: &dyn Fn(&mut Facts)| {
        let mut facts = sound();
        with_rules(&few)(&mut facts);
        change(&mut facts);
        let findings = judge(&facts).into_iter();
        findings.filter(|one| one.check == "subdomains").count() == 0
    };
    assert!(none(&|facts| facts.subdomains = false));
    let annotate = |facts: &mut Facts| {
        let firewall = facts.firewalls.read.get_mut("ns1").expect("there");
        firewall.subdomains = Some(false);
    };
    assert!(none(&annotate));
}

#[test]
fn rules_with_a_wildcard_are_listed_with_their_depth() {
    use RuleAction::{Allow, Deny};
    let rules = [
        (Allow, "example.com"),
        (Allow, "*.example.net"),
        (Deny, "0.0.0.0/0"),
    ];
    assert_eq!(
        sound_text(with_rules(&rules), "wildcards"),
        "1 rule by wildcard, for names with exactly one more label, as with ovn-kubernetes alone: ns1 rule 1 \
         (*.example.net)"
    );
    let mut facts = sound();
    with_rules(&rules[..1])(&mut facts);
    assert!(judge(&facts).iter().all(|one| one.check != "wildcards"));
}

#[test]
fn a_deny_by_name_without_a_deny_of_all_addresses_behind_is_told() {
    use RuleAction::{Allow, Deny};
    let alone = with_rules(&[(Deny, "bad.example"), (Allow, "example.com")]);
    let words = ["ns1 rule 0 (bad.example)", "without an agent", "0.0.0.0/0"];
    one(alone, "deny-by-name", Status::Warning, &words);
    let of_other = with_rules(&[(Deny, "bad.example"), (Deny, "::/0")]);
    one(of_other, "deny-by-name", Status::Warning, &words);
    let backed = with_rules(&[(Deny, "bad.example"), (Deny, "0.0.0.0/0")]);
    assert_eq!(changed(backed), []);
}

#[test]
fn an_ip_version_that_the_rules_leave_open_is_told() {
    use RuleAction::{Allow, Deny};
    let in_cluster = |is_dual: bool, rules: &'static [(RuleAction, &'static str)]| {
        move |facts: &mut Facts| {
            with_rules(rules)(facts);
            if is_dual && let Ok(northbound) = &mut facts.nb {
                let acl = northbound.acls.get_mut(&ACL).expect("it is there");
                acl.matches =
                    "(ip4.dst == $a18346816605274050565 || ip6.dst == $a1) && inport == @a1".into();
            }
        }
    };
    let warned = |is_dual, rules| {
        let findings = changed(in_cluster(is_dual, rules)).into_iter();
        let mut lines = findings.filter(|(check, ..)| *check == "ip-versions");
        let line = lines.next().map(|(.., line)| line);
        assert_eq!(lines.next(), None);
        line
    };
    let v4_alone = &[(Allow, "example.com"), (Deny, "0.0.0.0/0")];
    let line = warned(true, v4_alone).expect("a warning");
    assert!(
        line.contains("over IPv6 it passes: ns1; add a Deny of cidrSelector ::/0"),
        "{line}"
    );
    let line = warned(true, &[(Deny, "::/0")]).expect("a warning");
    assert!(
        line.contains("over IPv4 it passes: ns1; add a Deny of cidrSelector 0.0.0.0/0"),
        "{line}"
    );
    // The cluster has no other version, or the rules say what becomes of it.
    assert_eq!(warned(false, v4_alone), None);
    assert_eq!(warned(true, &[(Deny, "0.0.0.0/0"), (Deny, "::/0")]), None);
    assert_eq!(warned(true, &[(Allow, "::/0"), (Deny, "0.0.0.0/0")]), None);
    assert_eq!(warned(true, &[(Allow, "example.com")]), None);
}

#[test]
fn manifests_take_the_place_of_the_cluster() {
    use Status::{Failed, Warning};
    let source = |files: Result<usize, String>| {
        move |facts: &mut Facts| facts.source = Source::Manifests("/m".into(), files)
    };
    assert_eq!(changed(source(Ok(2))), []);
    one(source(Ok(0)), "manifests", Warning, &["/m", "*.yaml"]);
    one(
        source(Err("gone".into())),
        "manifests",
        Failed,
        &["/m", "gone", "--manifests"],
    );
}

#[test]
fn long_lists_are_cut() {
    let names: Vec<String> = (0..7).map(|number| number.to_string()).collect();
    assert_eq!(list(&names), "0, 1, 2, 3, 4 and 2 more");
    assert_eq!(list(&names[..5]), "0, 1, 2, 3, 4");
}
