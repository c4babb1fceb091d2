//! What several pods can do together to the node's room for names.

use super::*;
use crate::values::limits::NAMES_PER_ADDRESS_MAX;

const CROWD: u8 = 32;
/// Names of each pod of the crowd: all that a pod may have.
const EACH: usize = 16;

/// Each pod may have eight addresses, and [`CROWD`] pods fill the node.
fn node(rules: &[Rule]) -> Node {
    let mut node = Node::with(rules);
    let limits = node.engine.told.cache.limits_mut();
    limits.addresses_per_port_max = EACH / 2;
    limits.names_per_node_max = usize::from(CROWD) * EACH;
    for pod in 0..CROWD {
        node.add_pod(&member(pod), host(pod));
    }
    node
}

fn rules() -> [Rule; 3] {
    [deny("bad.test"), allow("example.com"), deny_all()]
}

fn member(number: u8) -> String {
    format!("c{number}")
}

/// The last octet of its address. The testing node reads the interface's index out of its hexadecimal digits.
fn host(member: u8) -> u8 {
    0x10 * (1 + member / 10) + member % 10
}

/// A pod is told names below `suffix` until its share is used up: eight addresses with two names each.
fn fill(node: &mut Node, pod: &str, suffix: &str) {
    let addresses: Vec<_> = (0..8).map(|host| [198, 51, 100, host]).collect();
    for name in ["a", "b"] {
        node.answer(pod, &format!("{name}.{suffix}"), &addresses, 600);
    }
}

/// The priorities of the flows from one host to one address.
fn priorities(node: &Node, host: u8, to: [u8; 4]) -> BTreeSet<u16> {
    let ends = (format!("10.244.0.{host}"), Ipv4Addr::from(to).to_string());
    let open = node.open().into_iter();
    open.filter(|(src, dst, _)| (src, dst) == (&ends.0, &ends.1))
        .map(|(.., priority)| priority)
        .collect()
}

/// The neighbour of the crowd is told two names: one is opened, one is closed.
fn neighbour_is_served(node: &mut Node) {
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.answer("p1", "www.bad.test", &[OTHER], 600);
    node.engine.told.cache.check();
    assert_eq!(priorities(node, 5, ADDRESS), [10_999].into());
    assert_eq!(priorities(node, 5, OTHER), [11_000].into());
}

#[test]
fn pods_full_of_denied_names_leave_a_neighbour_its_names() {
    let mut node = node(&rules());
    for pod in 0..CROWD {
        fill(&mut node, &member(pod), "bad.test");
    }
    neighbour_is_served(&mut node);
}

#[test]
fn pods_full_of_addresses_in_use_leave_a_neighbour_its_names() {
    let mut node = node(&rules());
    for pod in 0..CROWD {
        fill(&mut node, &member(pod), "example.com");
    }
    let crowd = node.open().len();
    for (_, packets) in node.switch.values_mut() {
        *packets += 1;
    }
    node.pass(COMPARE_INTERVAL);
    node.reports.clear();
    neighbour_is_served(&mut node);
    assert_eq!(
        node.open().len(),
        crowd + 1,
        "an address with two names has given way"
    );
    let reported = node.limits_reported();
    let names = usize::from(CROWD) * EACH;
    let is_of_crowd = |text: &String| {
        text.starts_with("ns1: NamesOfNode of ns1_c") && text.ends_with(&format!(", {names}"))
    };
    assert!(reported.iter().all(is_of_crowd), "{reported:?}");
    assert_eq!(reported.len(), 1, "{reported:?}");
}

#[test]
fn names_beside_denied_ones_leave_a_neighbour_its_names() {
    let mut node = node(&rules());
    let of_crowd = [198, 51, 100, 1];
    for pod in 0..CROWD {
        node.answer(&member(pod), "bad.test", &[of_crowd], 600);
        for name in 1..EACH {
            let name = format!("n{name}.example.com");
            node.answer(&member(pod), &name, &[of_crowd], 600);
        }
    }
    neighbour_is_served(&mut node);
    for pod in 0..CROWD {
        let open = priorities(&node, host(pod), of_crowd);
        assert!(open.contains(&11_000), "{pod}: the denial stays");
    }
}

#[test]
fn names_that_an_edit_denies_leave_a_neighbour_its_names() {
    let mut node = node(&[deny("bad.test"), allow("test"), allow("example.com")]);
    for pod in 0..CROWD {
        fill(&mut node, &member(pod), "other.test");
    }
    let edited = [deny("test"), allow("example.com"), deny_all()];
    node.set_firewall(&edited);
    node.set_ovn(&edited);
    neighbour_is_served(&mut node);
}

#[test]
fn a_pod_does_not_wear_down_its_own_denials_at_the_limit_of_the_node() {
    let mut node = node(&rules());
    // The share of the denied names is used up.
    for pod in 0..CROWD {
        for host in 0..4 {
            node.answer(&member(pod), "bad.test", &[[198, 51, 100, host]], 600);
        }
    }
    let denied = node.open();
    node.batches();
    for host in 0..100 {
        node.answer(&member(0), "bad.test", &[[203, 0, 113, host]], 600);
    }
    assert_eq!(node.open(), denied);
    assert_eq!(node.batches(), []);
    assert_eq!(node.engine.counters().addresses_refused, 100);
}

#[test]
fn the_denials_of_pods_that_have_most_give_way_and_that_is_said() {
    let mut node = node(&rules());
    for pod in 0..CROWD / 4 {
        fill(&mut node, &member(pod), "bad.test");
    }
    let denied = node.open().len();
    let names = node.engine.told.cache.name_count();
    node.reports.clear();
    node.answer("p1", "bad.test", &[OTHER], 600);
    node.answer("p1", "bad.test", &[ADDRESS], 600);
    node.engine.told.cache.check();
    assert_eq!(node.engine.told.cache.name_count(), names);
    assert_eq!(node.engine.counters().addresses_evicted, 2);
    // Each address of the crowd has two denied names, and one of them suffices.
    assert_eq!(node.open().len(), denied + 2);
    for host in 0..=255 {
        node.answer("p1", "bad.test", &[[192, 0, 2, host]], 600);
    }
    node.engine.told.cache.check();
    assert_eq!(node.engine.told.cache.name_count(), names);
    let reported = node.limits_reported();
    let share = names;
    let is_said = |pod: u8| {
        let text = format!("ns1: DeniedNamesOfNode of ns1_c{pod}, {share}");
        reported.contains(&text)
    };
    assert!((0..CROWD / 4).all(is_said), "{reported:?}");
}

#[test]
fn once_denied_names_are_shared_out_further_ones_change_nothing_in_the_switch() {
    let mut node = node(&rules());
    let round = |node: &mut Node, round: u8| {
        // With this pod, the shares cannot be alike: some pods have one more than others.
        let pods = (0..CROWD).map(member).chain(["p1".to_owned()]);
        for pod in pods {
            for host in 0..8 {
                let name = format!("n{host}.r{round}.bad.test");
                let to = [198, 51, 100, 8 * round + host];
                node.answer(&pod, &name, &[to], 600);
            }
        }
    };
    for number in 0..4 {
        round(&mut node, number);
    }
    node.batches();
    for number in 4..16 {
        round(&mut node, number);
    }
    assert_eq!(node.batches(), []);
    node.engine.told.cache.check();
}

#[test]
fn an_address_without_room_for_a_denied_name_keeps_the_names_that_it_has() {
    let mut node = node(&rules());
    let limits = node.engine.told.cache.limits_mut();
    limits.addresses_per_port_max = 64;
    limits.names_per_node_max = 4 * usize::from(CROWD);
    let of_crowd = [198, 51, 100, 1];
    for pod in 0..CROWD {
        node.answer(&member(pod), "bad.test", &[of_crowd], 600);
        node.answer(&member(pod), "example.com", &[of_crowd], 600);
    }
    for name in 0..NAMES_PER_ADDRESS_MAX {
        node.answer("p1", &format!("n{name}.example.com"), &[ADDRESS], 600);
    }
    let port = node.engine.ports.named("ns1_p1").expect("it is there");
    let names = |node: &Node| {
        let entry = node.engine.told.cache.entry(port, ADDRESS.into());
        entry.map(|entry| entry.names.len())
    };
    assert_eq!(names(&node), Some(NAMES_PER_ADDRESS_MAX));
    // Each pod of the crowd has one denied name, and none of them has more than this one would have.
    node.answer("p1", "bad.test", &[ADDRESS], 600);
    node.engine.told.cache.check();
    assert_eq!(names(&node), Some(NAMES_PER_ADDRESS_MAX));
    assert_eq!(priorities(&node, 5, ADDRESS), [10_999].into());
    // With room, it takes the place of one of them, which is counted.
    let limits = node.engine.told.cache.limits_mut();
    limits.names_per_node_max = 1024;
    let dropped = node.engine.counters().names_dropped;
    node.answer("p1", "bad.test", &[ADDRESS], 600);
    node.engine.told.cache.check();
    assert_eq!(names(&node), Some(NAMES_PER_ADDRESS_MAX));
    assert_eq!(node.engine.counters().names_dropped, dropped + 1);
    assert_eq!(priorities(&node, 5, ADDRESS), [10_999, 11_000].into());
}

#[test]
fn denied_names_of_all_pods_have_so_many_flows() {
    const PORTS: usize = 2;
    let of_ports = Rule {
        ports: tcp(PORTS),
        ..deny("bad.test")
    };
    let mut node = node(&[of_ports]);
    let limits = node.engine.told.cache.limits_mut();
    (limits.addresses_per_port_max, limits.names_per_node_max) = (512, 64);
    // A quarter of the names: each address has one flow.
    let most = 16;
    for round in 0..4 {
        for pod in 0..CROWD {
            let told = [198, 51, round, pod];
            node.answer(&member(pod), "bad.test", &[told], 60);
            assert!(node.own() <= most, "{round} {pod}");
        }
    }
    assert_eq!((node.own(), node.of_rules().count()), (most, PORTS));
    let changes: usize = node.batches().iter().map(|(_, all)| all.len()).sum();
    assert_eq!(
        changes,
        most + PORTS,
        "pods that have as many take nothing from each other"
    );
}
