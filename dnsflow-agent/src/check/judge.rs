//! Turns facts into findings. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    num::NonZeroU32,
};

use dnsflow_core::{
    ovn::{
        acl::{self, AclMatch},
        rows::{Acl, LogicalFlow, RowId},
        template::{AclTemplate, AclTemplateError, first_to_copy},
    },
    policy::rules::NamePattern,
    values::{
        firewall::{Destination, Firewall, Floor, IpVersions, Rule, open_beside},
        name::DnsName,
        resolver::Resolver,
    },
};
use ipnet::IpNet;

use super::{
    Finding,
    facts::{
        Cluster, Facts, Firewalls, Kernel, Northbound, NotAttached, PodInterface, Source,
        Southbound, Vswitch,
    },
};
use crate::{
    asking::print::open_over,
    capture::AttachKind,
    k8s::{
        egress_firewall::SUBDOMAINS_ANNOTATION,
        permissions::{Permission, Purpose},
    },
    node_addresses::{DNS_CACHE_INTERFACE, NodeAddresses},
    open_by::{Decision, OpenByError},
};

/// At most this many names in a finding.
const NAMED_MAX: usize = 5;
/// At most this many rules in a finding.
const RULES_MAX: usize = 20;

/// Every finding, in the order of the agent's own start.
pub fn judge(facts: &Facts) -> Vec<Finding> {
    let Facts {
        kernel,
        vswitch,
        openflow,
        open_by,
        node,
        nb,
        sb,
        source,
        firewalls,
        subdomains,
    } = facts;
    let attach = match &kernel.attach {
        Some(Ok(kind)) => Some(*kind),
        Some(Err(NotAttached::NotTried { tcx: true })) => Some(AttachKind::Tcx),
        _ => None,
    };
    let mut findings = vec![program(kernel)];
    findings.extend(attachment(kernel));
    findings.push(btf(kernel));
    match vswitch {
        Ok(vswitch) => {
            findings.push(interfaces(vswitch));
            findings.push(qdiscs(&vswitch.interfaces, attach));
            findings.push(hooks(&vswitch.interfaces));
            findings.push(offload(vswitch));
        }
        Err(reason) => findings.push(Finding::failed(
            "vswitch",
            format!("Open vSwitch's database cannot be read: {reason}"),
            "start Open vSwitch, mount its directory, or name its database with --ovs-db",
        )),
    }
    findings.push(switch(openflow));
    findings.push(way(open_by));
    findings.push(database(
        "ovn-nb",
        "northbound",
        "--ovn-nb",
        nb.as_ref().err(),
    ));
    findings.push(database(
        "ovn-sb",
        "southbound",
        "--ovn-sb",
        sb.as_ref().err(),
    ));
    if let (Ok(northbound), Ok(southbound)) = (nb, sb) {
        findings.push(templates(&northbound.acls, southbound));
        findings.push(nodes(node, northbound, southbound));
    }
    match source {
        Source::Manifests(dir, files) => findings.push(manifests(dir, files)),
        Source::Cluster(Err(reason)) => findings.push(Finding::failed(
            "kubernetes",
            format!("the API cannot be reached: {reason}"),
            "name a kubeconfig with --kubeconfig, or a directory of manifests with --manifests",
        )),
        Source::Cluster(Ok(cluster)) => {
            findings.extend(kubernetes(cluster, node.as_ref().ok()));
            if let Ok(northbound) = nb {
                findings.push(api_servers(&cluster.url, &northbound.api_servers));
            }
        }
    }
    findings.extend(wider_rules(firewalls, *subdomains));
    findings.extend(wildcards(firewalls));
    findings.extend(denials_alone(firewalls, nb.as_ref().ok()));
    findings.extend(open_versions(firewalls, nb.as_ref().ok()));
    findings
}

fn program(kernel: &Kernel) -> Finding {
    match &kernel.load {
        Ok(()) => Finding::ok(
            "program",
            format!(
                "Linux {} loads the TC program and its ring buffer",
                kernel.release
            ),
        ),
        Err(reason) => Finding::failed(
            "program",
            format!(
                "Linux {} does not load the TC program: {reason}",
                kernel.release
            ),
            "run as root on Linux 5.8 or newer, in a privileged container or with the capabilities \
             of deploy/components/restricted",
        ),
    }
}

fn attachment(kernel: &Kernel) -> Option<Finding> {
    Some(match kernel.attach.as_ref()? {
        Ok(AttachKind::Tcx) => Finding::ok("attach", "interfaces take the program by TCX"),
        Ok(AttachKind::Clsact) => Finding::ok(
            "attach",
            "interfaces take the program by clsact, since this kernel has no TCX (Linux 6.6)",
        ),
        Err(NotAttached::NotTried { tcx: true }) => Finding::ok(
            "attach",
            "the kernel has TCX for the program; no interface was tried, since a network namespace \
             for that takes CAP_SYS_ADMIN",
        ),
        Err(NotAttached::NotTried { tcx: false }) => Finding::warning(
            "attach",
            "whether interfaces take the program was not tried: the kernel has no TCX, and clsact is \
             tried in a network namespace, which takes CAP_SYS_ADMIN",
            "run the check in a privileged container, or look into the agent's log",
        ),
        Err(NotAttached::Failed(reason)) => Finding::failed(
            "attach",
            format!("no interface takes the program: {reason}"),
            "use Linux 6.6, or a kernel with CONFIG_NET_CLS_ACT, CONFIG_NET_CLS_BPF and \
             CONFIG_NET_SCH_INGRESS",
        ),
    })
}

fn btf(kernel: &Kernel) -> Finding {
    let text = if kernel.btf {
        "the kernel describes its types (BTF)"
    } else {
        "the kernel does not describe its types (BTF); dnsflow does not need it"
    };
    Finding::ok("btf", text)
}

fn interfaces(vswitch: &Vswitch) -> Finding {
    const CHECK: &str = "interfaces";
    let all = &vswitch.interfaces;
    let strange: Vec<String> = all
        .iter()
        .filter_map(|interface| Some(format!("{} ({})", interface.port, strangeness(interface)?)))
        .collect();
    if all.is_empty() {
        return Finding::warning(
            CHECK,
            "no pod has an interface here yet, so that none could be looked at",
            "run a pod on this node and check again",
        );
    }
    if strange.is_empty() {
        return Finding::ok(
            CHECK,
            format!(
                "all {} interfaces of pods are veths in this network namespace (pods on the \
                 host's network have none, and no egress firewall either)",
                all.len()
            ),
        );
    }
    let text = format!(
        "{} of {} interfaces of pods cannot be watched: {}",
        strange.len(),
        all.len(),
        list(&strange)
    );
    let remedy = "only what passes a veth's TC hook is seen: give those pods a veth, or leave names \
                out of their egress firewalls";
    if strange.len() == all.len() {
        let hidden = all.iter().all(|interface| interface.link.is_none());
        let remedy = if hidden {
            "run in the network namespace of the node (hostNetwork)"
        } else {
            remedy
        };
        return Finding::failed(CHECK, text, remedy);
    }
    Finding::warning(CHECK, text, remedy)
}

/// Why the program cannot see the pod's packets at this interface, if it cannot.
fn strangeness(interface: &PodInterface) -> Option<String> {
    let Some(link) = &interface.link else {
        return Some("not in this network namespace".into());
    };
    if link.in_switch {
        return Some("a port of a switch in hardware".into());
    }
    match link.kind.as_deref() {
        Some("veth") => None,
        Some(kind) => Some(format!("of the kind {kind}")),
        None => Some("a device".into()),
    }
}

fn qdiscs(interfaces: &[PodInterface], attach: Option<AttachKind>) -> Finding {
    const CHECK: &str = "qdiscs";
    let standing = |interface: &&PodInterface| {
        interface.policed || interface.ingress_qdisc.as_deref() == Some("ingress")
    };
    let names: Vec<String> = interfaces
        .iter()
        .filter(standing)
        .map(|interface| interface.port.clone())
        .collect();
    if names.is_empty() {
        return Finding::ok(CHECK, "no qdisc stands in the way");
    }
    let text = format!("ingress policing is on at {}", list(&names));
    match attach {
        Some(AttachKind::Tcx) => Finding::ok(CHECK, format!("{text}, which TCX does not mind")),
        Some(AttachKind::Clsact) | None => Finding::warning(
            CHECK,
            format!("{text}, where its qdisc takes clsact's place"),
            "remove the pods' bandwidth limits (kubernetes.io/egress-bandwidth), or use Linux 6.6 \
             with TCX",
        ),
    }
}

fn hooks(interfaces: &[PodInterface]) -> Finding {
    const CHECK: &str = "hooks";
    let unknown = interfaces
        .iter()
        .find_map(|interface| interface.in_front.as_ref().err());
    if let Some(reason) = unknown {
        return Finding::warning(
            CHECK,
            format!("the kernel does not list the TC programs on the interfaces of pods: {reason}"),
            "run with CAP_NET_ADMIN",
        );
    }
    let behind = interfaces.iter().filter_map(|interface| {
        let others = interface.in_front.as_ref().ok()?;
        let others = (!others.is_empty()).then(|| others.join(", "))?;
        Some(format!("{} ({others})", interface.port))
    });
    let behind: Vec<String> = behind.collect();
    if behind.is_empty() {
        return Finding::ok(CHECK, "no program of others is known in front of dnsflow's");
    }
    Finding::warning(
        CHECK,
        format!(
            "programs of others are in front of dnsflow's, and may keep packets from them: {}",
            list(&behind)
        ),
        "have them attach behind the first program (`bpftool net` lists all); the agent takes the first place again \
         once in five minutes at most",
    )
}

fn offload(vswitch: &Vswitch) -> Finding {
    const CHECK: &str = "offload";
    if vswitch.hw_offload {
        Finding::warning(
            CHECK,
            "Open vSwitch may offload flows to hardware (hw-offload), whose packets pass no TC hook",
            "where answers are not seen, `ovs-vsctl remove Open_vSwitch . other_config hw-offload`",
        )
    } else {
        Finding::ok(CHECK, "flows are not offloaded to hardware")
    }
}

fn switch(openflow: &Result<(), String>) -> Finding {
    match openflow {
        Ok(()) => Finding::ok("openflow", "the bridge speaks OpenFlow 1.5"),
        Err(reason) => Finding::failed(
            "openflow",
            reason,
            "start Open vSwitch, mount its directory, or name the socket with --openflow-socket",
        ),
    }
}

fn way(open_by: &Result<Decision, OpenByError>) -> Finding {
    const CHECK: &str = "open-by";
    let by_flows = "addresses are opened by flows of their own";
    let by_marks =
        |mask: NonZeroU32| format!("addresses are opened by marks in the bits {mask:#x}");
    let remedy = "start Open vSwitch and check again";
    match open_by {
        Ok(Decision::FlowsAsked) => Finding::ok(CHECK, format!("{by_flows} (--open-by=flows)")),
        Ok(Decision::Flows(obstacle)) => Finding::ok(CHECK, format!("{by_flows}: {obstacle}")),
        Ok(Decision::FlowsForNow(reason)) => Finding::warning(
            CHECK,
            format!("{by_flows} until Open vSwitch answers: {reason}"),
            remedy,
        ),
        Ok(Decision::Marks(mask)) => Finding::ok(CHECK, by_marks(*mask)),
        Ok(Decision::MarksUnasked(mask, reason)) => Finding::warning(
            CHECK,
            format!(
                "{}, and whether packets can be marked is not known: {reason}",
                by_marks(*mask)
            ),
            remedy,
        ),
        Err(OpenByError(obstacle)) => Finding::failed(
            CHECK,
            format!("--open-by=marks: {obstacle}"),
            "take --open-by=auto or flows",
        ),
    }
}

fn database(check: &'static str, name: &str, option: &str, trouble: Option<&String>) -> Finding {
    match trouble {
        None => Finding::ok(check, format!("OVN's {name} database answers")),
        Some(reason) => Finding::failed(
            check,
            format!("OVN's {name} database cannot be read: {reason}"),
            format!("start OVN, mount its directory, or name the database with {option}"),
        ),
    }
}

fn templates(acls: &BTreeMap<RowId, Acl>, southbound: &Southbound) -> Finding {
    const CHECK: &str = "acl-template";
    let mut understood = 0;
    let mut waiting = 0;
    let mut placeless = false;
    let mut reasons: BTreeSet<String> = BTreeSet::new();
    for (id, row) in acls {
        match acl::parse(&row.matches) {
            Ok(AclMatch::Name(_)) => {}
            Ok(AclMatch::Nodes(_) | AclMatch::Network(_) | AclMatch::Other) => continue,
            Err(error) => {
                reasons.insert(format!("the match of an ACL of {}: {error}", row.namespace));
                continue;
            }
        }
        let flows = southbound.flows.iter();
        let mut flows = flows
            .filter(|flow| flow.stage_hint == Some(id.prefix()))
            .peekable();
        if flows.peek().is_none() {
            waiting += 1;
            continue;
        }
        match flows.map(template).collect::<Result<Vec<_>, _>>() {
            Ok(templates) => {
                understood += 1;
                let based =
                    |template: &AclTemplate| southbound.bases.contains_key(&template.pipeline);
                placeless |= !templates.iter().all(based);
            }
            Err(error) => {
                reasons.insert(format!("a logical flow of {}: {error}", row.namespace));
            }
        }
    }
    if !reasons.is_empty() {
        let reasons: Vec<String> = reasons.into_iter().collect();
        let text = format!("not understood: {}", list(&reasons));
        let remedy =
            "report this OVN's `ovn-sbctl lflow-list` to the project: those rules are refused";
        return if understood == 0 {
            Finding::failed(CHECK, text, remedy)
        } else {
            Finding::warning(CHECK, text, remedy)
        };
    }
    if understood == 0 && waiting == 0 {
        return Finding::warning(
            CHECK,
            "OVN has no ACL for a dnsName yet, so that none could be read",
            "run a pod of a namespace whose EgressFirewall names a dnsName here, and check again",
        );
    }
    if understood == 0 {
        // OVN makes the logical flows of an ACL where its namespace has a pod.
        return Finding::ok(
            CHECK,
            "OVN has ACLs for dnsNames, and no pod on this node is behind one of them yet: no logical flow was read",
        );
    }
    if placeless {
        return Finding::warning(
            CHECK,
            "the ACLs of dnsNames are understood, but no OpenFlow table could be found for them",
            "see whether ovn-controller runs on this node",
        );
    }
    Finding::ok(
        CHECK,
        format!("the ACLs of {understood} dnsNames and the place of their flows are understood"),
    )
}

fn nodes(
    own: &Result<NodeAddresses, String>,
    northbound: &Northbound,
    southbound: &Southbound,
) -> Finding {
    const CHECK: &str = "nodes";
    let Northbound {
        gateways, node_set, ..
    } = northbound;
    let of_all = southbound.tunnels.union(node_set);
    let known: BTreeSet<IpAddr> = of_all.chain(gateways).copied().collect();
    let remedy = "name the networks of the nodes with --deny-answers";
    if known.is_empty() {
        return Finding::warning(
            CHECK,
            "DNS answers may open addresses of nodes: OVN's databases have none",
            remedy,
        );
    }
    let known = texts(&known);
    match (own, node_set.is_empty()) {
        (Err(reason), _) => Finding::warning(
            CHECK,
            format!(
                "DNS answers open no address of {}, and may open others of this node: {reason}",
                list(&known)
            ),
            remedy,
        ),
        (Ok(own), is_by_tunnel) => {
            let whence = match is_by_tunnel {
                true => "OVN's tunnels and gateway routers",
                false => "OVN's tunnels, gateway routers and address set of nodes",
            };
            let of_plugins = own.of_plugins.iter();
            let of_plugins =
                of_plugins.map(|(interface, address)| format!("{address} ({interface})"));
            let of_plugins: Vec<String> = of_plugins.collect();
            let others = match of_plugins.is_empty() {
                true => String::new(),
                false => format!(
                    "; they may open those of bridges and veths, which --deny-answers can name: {}",
                    list(&of_plugins)
                ),
            };
            let own = own.all.len();
            Finding::ok(
                CHECK,
                format!(
                    "DNS answers open no address of {} ({whence}), nor the {own} of this node's interfaces{others}",
                    list(&known)
                ),
            )
        }
    }
}

fn api_servers(url: &str, known: &BTreeSet<IpAddr>) -> Finding {
    const CHECK: &str = "api-server";
    if known.is_empty() {
        return Finding::warning(
            CHECK,
            format!(
                "DNS answers may open the addresses of API servers: OVN has no load balancer of the Service \
                 default/kubernetes; the agent itself asks {url}"
            ),
            "name them with --deny-answers",
        );
    }
    Finding::ok(
        CHECK,
        format!(
            "DNS answers open no address of {} (OVN's load balancers of the Service default/kubernetes)",
            list(&texts(known))
        ),
    )
}

/// The rules by name that stand for more names than with ovn-kubernetes alone.
fn wider_rules(firewalls: &Firewalls, by_option: bool) -> Option<Finding> {
    let is_wider = |firewall: &Firewall, name: &DnsName| {
        NamePattern::of(name, firewall, by_option) == NamePattern::Subdomains
    };
    let rules = rules(firewalls, |firewall, _, rule| match &rule.destination {
        Destination::Name(name) if is_wider(firewall, name) => Some(name),
        _ => None,
    });
    let count = rules.len();
    (count > 0).then(|| Finding {
        remedy: Some(format!(
            "--subdomains=false, or the annotation {SUBDOMAINS_ANNOTATION}: \"false\", keeps the exact names"
        )),
        ..Finding::ok(
            "subdomains",
            format!(
                "{} by dnsName{}, also for all sub-domains, and with ovn-kubernetes alone for the exact name: {}",
                counted(count),
                among(firewalls),
                list_of(&rules, RULES_MAX)
            ),
        )
    })
}

/// The rules with a wildcard, whose depth people know otherwise from other products.
fn wildcards(firewalls: &Firewalls) -> Option<Finding> {
    let rules = rules(firewalls, |_, _, rule| match &rule.destination {
        Destination::Name(name) if name.is_wildcard() => Some(name),
        _ => None,
    });
    let count = rules.len();
    (count > 0).then(|| Finding {
        remedy: Some(format!(
            "for names at any depth, write the name without `*.` in an EgressFirewall with sub-domains (--subdomains, \
             or the annotation {SUBDOMAINS_ANNOTATION}: \"true\")"
        )),
        ..Finding::ok(
            "wildcards",
            format!(
                "{} by wildcard{}, for names with exactly one more label, as with ovn-kubernetes alone: {}",
                counted(count),
                among(firewalls),
                list_of(&rules, RULES_MAX)
            ),
        )
    })
}

/// The rules that deny by name where no rule behind them denies all addresses.
fn denials_alone(firewalls: &Firewalls, northbound: Option<&Northbound>) -> Option<Finding> {
    let versions = northbound.and_then(Northbound::ip_versions);
    let floors = firewalls.read.iter();
    let floors = floors.map(|(namespace, firewall)| (namespace, Floor::of(&firewall.rules)));
    let floors: BTreeMap<&String, Floor> = floors.collect();
    let mut open = IpVersions::default();
    let rules = rules(firewalls, |_, (namespace, index), rule| {
        let name = rule.denied_name()?;
        let behind = floors.get(namespace)?.open_behind(index, versions);
        open.v4 |= behind.v4;
        open.v6 |= behind.v6;
        (!behind.is_empty()).then_some(name)
    });
    let count = rules.len();
    (count > 0).then(|| {
        Finding::warning(
            "deny-by-name",
            format!(
                "{} of denial by dnsName{}, without a Deny of all addresses behind: without an agent, addresses that \
                 ovn-kubernetes does not know are open: {}",
                counted(count),
                among(firewalls),
                list_of(&rules, RULES_MAX)
            ),
            format!("add a Deny of cidrSelector {open} as the last rule"),
        )
    })
}

/// In a cluster of both IP versions, the EgressFirewalls that deny the rest over one of them alone.
fn open_versions(firewalls: &Firewalls, northbound: Option<&Northbound>) -> Vec<Finding> {
    let both = IpVersions { v4: true, v6: true };
    if northbound.and_then(Northbound::ip_versions) != Some(both) {
        return Vec::new();
    }
    let over = [true, false].into_iter().filter_map(|is_v6| {
        let read = firewalls.read.iter();
        let open = read.filter(|(_, firewall)| {
            let IpVersions { v4, v6 } = open_beside(&firewall.rules);
            if is_v6 { v6 } else { v4 }
        });
        let namespaces: Vec<String> = open.map(|(namespace, _)| namespace.clone()).collect();
        let (text, remedy) = open_over(is_v6);
        let text = format!("{text}{}: {}", among(firewalls), list(&namespaces));
        (!namespaces.is_empty()).then(|| Finding::warning("ip-versions", text, remedy))
    });
    over.collect()
}

/// The rules for which `wanted` returns a name, for people.
fn rules(
    firewalls: &Firewalls,
    mut wanted: impl for<'a> FnMut(&Firewall, (&String, u32), &'a Rule) -> Option<&'a DnsName>,
) -> Vec<String> {
    let mut found = Vec::new();
    for (namespace, firewall) in &firewalls.read {
        for (index, rule) in (0..).zip(firewall.rules.iter()) {
            if let Some(name) = wanted(firewall, (namespace, index), rule) {
                found.push(format!("{namespace} rule {index} ({})", name.written()));
            }
        }
    }
    found
}

fn counted(rules: usize) -> String {
    format!("{rules} rule{}", if rules == 1 { "" } else { "s" })
}

fn among(firewalls: &Firewalls) -> String {
    match firewalls.are_more {
        true => format!(" of the first {} EgressFirewalls", firewalls.read.len()),
        false => String::new(),
    }
}

fn texts(addresses: &BTreeSet<IpAddr>) -> Vec<String> {
    addresses.iter().map(IpAddr::to_string).collect()
}

fn manifests(dir: &str, files: &Result<usize, String>) -> Finding {
    const CHECK: &str = "manifests";
    match files {
        Ok(0) => Finding::warning(
            CHECK,
            format!("{dir} holds no manifest"),
            "write EgressFirewalls into files *.yaml, *.yml or *.json there",
        ),
        Ok(files) => Finding::ok(CHECK, format!("{dir} holds {files} files of manifests")),
        Err(reason) => Finding::failed(
            CHECK,
            format!("cannot read {dir}: {reason}"),
            "name a directory with --manifests",
        ),
    }
}

fn kubernetes(cluster: &Cluster, node: Option<&NodeAddresses>) -> Vec<Finding> {
    let Cluster {
        url,
        permissions,
        firewalls,
        dns,
        service_networks,
        cluster_networks,
    } = cluster;
    let mut findings = vec![match firewalls {
        Ok(()) => Finding::ok("kubernetes", format!("{url} has EgressFirewalls")),
        Err(reason) => Finding::failed(
            "kubernetes",
            format!("EgressFirewalls cannot be read: {reason}"),
            "name another cluster with --kubeconfig, or install ovn-kubernetes with its egress \
             firewall",
        ),
    }];
    findings.push(rights(permissions));
    let found: BTreeSet<_> = dns
        .iter()
        .filter_map(|(_, found)| found.as_ref().ok())
        .flatten()
        .collect();
    let reasons: Vec<String> = dns
        .iter()
        .filter_map(|(service, found)| Some(format!("{service}: {}", found.as_ref().err()?)))
        .collect();
    let asked: Vec<String> = dns.iter().map(|(service, _)| service.to_string()).collect();
    findings.push(if found.is_empty() {
        let why = if reasons.is_empty() { &asked } else { &reasons };
        Finding::failed(
            "dns",
            format!("no Service of the cluster's DNS is found: {}", list(why)),
            "name it with --dns-service, as NAMESPACE/SERVICE or NAMESPACE/LABEL=VALUE",
        )
    } else {
        let found: Vec<String> = found.into_iter().map(Resolver::to_string).collect();
        let cache = node.into_iter().flat_map(|node| &node.dns_cache);
        let cache: Vec<String> = cache.map(Resolver::to_string).collect();
        let cache = match cache.is_empty() {
            true => String::new(),
            false => format!(
                ", and the cache of this node at {} (interface {DNS_CACHE_INTERFACE})",
                list(&cache)
            ),
        };
        Finding::ok("dns", format!("pods ask {}{cache}", list(&found)))
    });
    let by_routes: Vec<IpNet> = node
        .into_iter()
        .flat_map(|node| node.service_networks.iter().copied())
        .collect();
    findings.push(networks_of_services(
        service_networks,
        cluster_networks,
        &by_routes,
    ));
    findings
}

fn networks_of_services(
    found: &Result<Option<BTreeSet<IpNet>>, String>,
    by_option: &[IpNet],
    by_routes: &[IpNet],
) -> Finding {
    const CHECK: &str = "services";
    let by_api: Vec<IpNet> = found.iter().flatten().flatten().copied().collect();
    let sources = [
        (&by_api[..], "ServiceCIDRs"),
        (by_option, "--cluster-networks"),
        (by_routes, "ovn-kubernetes' routes on this node"),
    ];
    let sources = sources.into_iter().filter(|(all, _)| !all.is_empty());
    let (networks, whence): (Vec<_>, Vec<_>) = sources.unzip();
    let networks: BTreeSet<&IpNet> = networks.into_iter().flatten().collect();
    if networks.is_empty() {
        let why = match found {
            Ok(_) => "the API server has no ServiceCIDR, and this node no route to them",
            Err(reason) => reason,
        };
        return Finding::warning(
            CHECK,
            format!("DNS answers may open addresses that no Service has yet: {why}"),
            "name the networks of Services with --cluster-networks",
        );
    }
    let networks: Vec<String> = networks.into_iter().map(IpNet::to_string).collect();
    Finding::ok(
        CHECK,
        format!(
            "DNS answers open no address of {} ({})",
            list(&networks),
            whence.join(", ")
        ),
    )
}

fn rights(permissions: &[(Permission, Result<bool, String>)]) -> Finding {
    const CHECK: &str = "rbac";
    let unknown: BTreeSet<&String> = permissions
        .iter()
        .filter_map(|(_, allowed)| allowed.as_ref().err())
        .collect();
    if let Some(reason) = unknown.first() {
        return Finding::warning(
            CHECK,
            format!("the API server does not say what is allowed: {reason}"),
            "see what the API server's log says about selfsubjectaccessreviews",
        );
    }
    let missing: Vec<&Permission> = permissions
        .iter()
        .filter_map(|(permission, allowed)| (*allowed == Ok(false)).then_some(permission))
        .collect();
    if missing.is_empty() {
        return Finding::ok(
            CHECK,
            format!(
                "all {} rights that the agent uses are granted",
                permissions.len()
            ),
        );
    }
    let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let text = format!("not allowed: {}", list(&names));
    let remedy = "grant them as deploy/base/rbac.yaml does, or change --dns-service";
    // One of several DNS Services is enough.
    let resolvers = |right: &Permission| right.purpose == Purpose::Resolvers;
    let blind = permissions
        .iter()
        .filter(|(permission, _)| resolvers(permission))
        .all(|(permission, _)| missing.contains(&permission));
    let needed = |right: &&Permission| match right.purpose {
        Purpose::Firewalls => true,
        Purpose::Resolvers => blind,
        Purpose::ServiceNetworks | Purpose::Events => false,
    };
    if missing.iter().copied().any(|right| needed(&right)) {
        Finding::failed(CHECK, text, remedy)
    } else {
        Finding::warning(CHECK, text, remedy)
    }
}

/// The first names, and the number of the others.
fn list(names: &[String]) -> String {
    list_of(names, NAMED_MAX)
}

/// The same, with so many names at most.
fn list_of(names: &[String], max: usize) -> String {
    let mut text = names
        .iter()
        .take(max)
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ");
    if names.len() > max {
        text += &format!(" and {} more", names.len() - max);
    }
    text
}

/// Reads a logical flow as the agent does. Of the actions that the agent would copy from OVN's own
/// flows, only `log` and `ct_commit` are accepted: for others, it is unknown whether there will be
/// a flow to copy from.
fn template(flow: &LogicalFlow) -> Result<AclTemplate, AclTemplateError> {
    let template = AclTemplate::parse(flow)?;
    let unknown = first_to_copy(&flow.actions).filter(|action| {
        !["log(", "ct_commit "]
            .iter()
            .any(|known| action.starts_with(known))
    });
    match unknown {
        None => Ok(template),
        Some(action) => Err(AclTemplateError::NoCopy(action.to_owned())),
    }
}

#[cfg(test)]
mod tests;
