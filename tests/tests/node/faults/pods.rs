//! Pods that go at the wrong moment.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    thread,
    time::Duration,
};

use dnsflow_tests::{agent::Agent, lab, lab::Lab, pod::PodSpec, relay::Relay, topology};

use crate::faults::{
    agent::HELD,
    traffic::{Bound, Scene},
};

/// Shorter than TCP's second SYN.
const FIRST_SYN: Duration = Duration::from_millis(900);

fn flows_of(lab: &Lab, source: Ipv4Addr) -> Vec<String> {
    let source = format!("nw_src={source},");
    let flows = lab.dnsflow_flows().expect("the dump runs");
    let of_pod = flows.into_iter().filter(|flow| flow.contains(&source));
    of_pod.collect()
}

#[test]
fn a_veth_goes_while_an_answer_is_held() {
    let lab = lab!("faults-veth", agent);
    let scene = Scene::new(&lab);
    let relay = Relay::start(lab.socket("br-int.relay"), lab.socket("br-int.mgmt"));
    let relay = relay.expect("a relay");
    let mut options = scene.options();
    options.push("--hold-max=1s".into());
    let options: Vec<_> = options.iter().map(String::as_str).collect();
    let agent = lab.start_agent_behind(&relay, &options);
    let mut agent = agent.expect("the agent is ready");
    let victim = PodSpec::new("ns1", "veth", Ipv4Addr::new(10, 244, 0, 99));
    lab.add_pod(&victim).expect("a pod");
    wired(&lab, &victim);
    // The answers to the other pod wait meanwhile, too.
    let bound = Bound {
        first_packets: 20,
        ..Bound::NOTHING
    };
    scene.through("veth deleted while an answer is held", bound, || {
        let (name, _) = scene.fresh();
        relay.be_silent(true);
        thread::scope(|scope| {
            let asking = scope.spawn(|| lab.pod(&victim.lsp()).resolve(&name));
            // The server answers within milliseconds, and the answer is held for a second.
            thread::sleep(Duration::from_millis(300));
            assert!(!asking.is_finished(), "the answer is held");
            lab.delete_pod(&victim.lsp()).expect("it is deleted");
            relay.be_silent(false);
            let asked = asking.join().expect("no panic");
            asked.expect_err("the pod is gone");
        });
    });
    assert!(!agent.has_ended().expect("it is ours"));
    let left = flows_of(&lab, victim.address);
    assert!(left.is_empty(), "{left:#?}");
}

/// Whether an agent runs while one pod goes and the next one comes with the same interface index.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Meanwhile {
    Agent,
    NoAgent,
}

#[test]
fn the_index_of_an_interface_comes_again() {
    let lab = lab!("faults-index", agent);
    let scene = Scene::new(&lab);
    let mut agent = Some(scene.start_agent());
    for (number, meanwhile) in [(0, Meanwhile::Agent), (1, Meanwhile::NoAgent)] {
        let spec = |pod: u8| {
            let address = Ipv4Addr::new(10, 244, 0, 100 + 2 * number + pod);
            PodSpec::new("ns1", &format!("index{number}{pod}"), address)
        };
        let (first, second) = (spec(0), spec(1));
        lab.add_pod(&first).expect("a pod");
        wired(&lab, &first);
        // The second pod of the first round stays.
        let pods = topology::pods().len() + 1 + usize::from(number);
        lab.wait_attached(pods).expect("the agent sees it");
        let pod = lab.pod(&first.lsp());
        let told = {
            let (name, told) = scene.fresh();
            assert_eq!(pod.resolve(&name).expect("the name is known"), [told]);
            told
        };
        lab.wait_flows("its flows", |_| !flows_of(&lab, first.address).is_empty())
            .expect("they come");
        let index = lab.host_index(&first.lsp()).expect("an index");
        let bound = match meanwhile {
            Meanwhile::Agent => Bound::NOTHING,
            Meanwhile::NoAgent => Bound {
                answers: HELD,
                first_packets: 160,
                ..Bound::NOTHING
            },
        };
        let what = format!("interface index reused, {meanwhile:?} meanwhile");
        let (after, unread) = scene.through(&what, bound, || {
            let running: Option<Agent> = match meanwhile {
                Meanwhile::Agent => agent.take(),
                Meanwhile::NoAgent => {
                    agent
                        .take()
                        .expect("one runs")
                        .kill()
                        .expect("it is killed");
                    None
                }
            };
            // Without an agent, the program goes on to write what it captures, with the interface's index.
            let (name, unread) = scene.fresh();
            pod.resolve(&name).expect("the name is known");
            lab.delete_pod(&first.lsp()).expect("it is deleted");
            lab.add_pod_at(&second, Some(index)).expect("a pod");
            assert_eq!(lab.host_index(&second.lsp()).expect("an index"), index);
            wired(&lab, &second);
            (running.unwrap_or_else(|| scene.spawn_agent()), unread)
        });
        for address in [told, unread] {
            let to = SocketAddrV4::new(address, 80).into();
            let lets_out = lab.lets_out(&second.lsp(), "tcp", to);
            assert!(!lets_out.expect("a trace"), "{what}: {address}");
        }
        assert!(flows_of(&lab, first.address).is_empty(), "{what}");
        assert!(flows_of(&lab, second.address).is_empty(), "{what}");
        let (name, address) = scene.fresh();
        let pod = lab.pod(&second.lsp());
        assert_eq!(pod.resolve(&name).expect("the name is known"), [address]);
        let fetched = pod.fetch(&format!("http://{address}/"), FIRST_SYN);
        fetched
            .expect("curl runs")
            .result
            .expect("the first packet passes");
        agent = Some(after);
    }
}

fn wired(lab: &Lab, spec: &PodSpec) {
    lab.wait_wired(&spec.lsp()).expect("it is wired");
    lab.sync().expect("OVN is in step");
}
