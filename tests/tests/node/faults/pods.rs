//! Pods that go at the wrong moment.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    thread,
    time::Duration,
};

use dnsflow_tests::{
    agent::Agent,
    lab,
    lab::Lab,
    pod::PodSpec,
    process::wait_until,
    relay::Relay,
    standstill::{play, unexplained},
    topology,
};

use crate::faults::traffic::{Bound, Scene};

/// So long answers wait for a silent switch.
const HOLD_MAX: Duration = Duration::from_secs(1);
/// How often a pod goes, until one had an answer that was held.
const TRIES: u64 = 5;

fn flows_of(lab: &Lab, source: Ipv4Addr) -> Vec<String> {
    let source = format!("nw_src={source},");
    let flows = lab.dnsflow_flows().expect("the dump runs");
    let of_pod = flows.into_iter().filter(|flow| flow.contains(&source));
    of_pod.collect()
}

#[test]
fn a_veth_goes_while_an_answer_is_held() {
    play(|| {
        let lab = lab!("faults-veth", agent);
        let scene = Scene::new(&lab);
        let relay = Relay::start(lab.socket("br-int.relay"), lab.socket("br-int.mgmt"));
        let relay = relay.expect("a relay");
        let mut options = scene.options();
        options.push(format!("--hold-max={}ms", HOLD_MAX.as_millis()));
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        let agent = lab.start_agent_behind(&relay, &options);
        let mut agent = agent.expect("the agent is ready");
        let victim = PodSpec::new("ns1", "veth", Ipv4Addr::new(10, 244, 0, 99));
        let bound = Bound {
            of_gone: TRIES,
            ..Bound::NOTHING
        };
        // The answers to the other pod wait meanwhile, too.
        scene.through("veth deleted while an answer is held", bound, || {
            // On a busy machine, the answer may come later than the end of the veth, or go back before.
            let lost = (0..TRIES).any(|_| loses_its_veth(&scene, &relay, &victim));
            if !lost {
                unexplained("no answer was held when its veth went".into());
            }
        });
        assert!(!agent.has_ended().expect("it is ours"));
        let left = flows_of(&lab, victim.address);
        assert!(left.is_empty(), "{left:#?}");
    });
}

/// Deletes a pod that has asked, while the switch is silent. Whether the agent had its answer and could not put it back.
fn loses_its_veth(scene: &Scene<'_>, relay: &Relay, victim: &PodSpec) -> bool {
    let lab = scene.lab;
    lab.add_pod(victim).expect("a pod");
    wired(lab, victim);
    lab.wait_attached(topology::pods().len() + 1)
        .expect("the agent sees it");
    let (name, _) = scene.fresh();
    relay.be_silent(true);
    thread::scope(|scope| {
        let asking = scope.spawn(|| lab.pod(&victim.lsp()).resolve(&name));
        thread::sleep(HOLD_MAX / 3);
        lab.delete_pod(&victim.lsp()).expect("it is deleted");
        relay.be_silent(false);
        // It got its answer before, or the pod is gone.
        let _asked = asking.join().expect("no panic");
    });
    let lost = || Ok(lab.account()?.lost > 0);
    wait_until("the lost answer to be counted", 2 * HOLD_MAX, lost).is_ok()
}

/// Whether an agent runs while one pod goes and the next one comes with the same interface index.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Meanwhile {
    Agent,
    NoAgent,
}

#[test]
fn the_index_of_an_interface_comes_again() {
    play(|| {
        let lab = lab!("faults-index", agent);
        let scene = Scene::new(&lab);
        let mut agent = scene.start_agent();
        for (number, meanwhile) in [(0, Meanwhile::Agent), (1, Meanwhile::NoAgent)] {
            agent = index_comes_again(&scene, agent, number, meanwhile);
        }
    });
}

fn index_comes_again(scene: &Scene<'_>, agent: Agent, number: u8, meanwhile: Meanwhile) -> Agent {
    let lab = scene.lab;
    let spec = |pod: u8| {
        let address = Ipv4Addr::new(10, 244, 0, 100 + 2 * number + pod);
        PodSpec::new("ns1", &format!("index{number}{pod}"), address)
    };
    let (first, second) = (spec(0), spec(1));
    lab.add_pod(&first).expect("a pod");
    wired(lab, &first);
    // The second pod of the first round stays.
    let pods = topology::pods().len() + 1 + usize::from(number);
    lab.wait_attached(pods).expect("the agent sees it");
    let pod = lab.pod(&first.lsp());
    let (name, told) = scene.fresh();
    assert_eq!(pod.resolve(&name).expect("the name is known"), [told]);
    lab.wait_flows("its flows", |_| !flows_of(lab, first.address).is_empty())
        .expect("they come");
    let index = lab.host_index(&first.lsp()).expect("an index");
    let what = format!("interface index reused, {meanwhile:?} meanwhile");
    let (agent, unread) = scene.through(&what, Bound::NOTHING, || {
        let running = match meanwhile {
            Meanwhile::Agent => Some(agent),
            Meanwhile::NoAgent => {
                scene.kill(agent);
                None
            }
        };
        // Without an agent, the program goes on to write what it captures, with the interface's index.
        let (name, unread) = scene.fresh();
        pod.resolve(&name).expect("the name is known");
        lab.delete_pod(&first.lsp()).expect("it is deleted");
        lab.add_pod_at(&second, Some(index)).expect("a pod");
        assert_eq!(lab.host_index(&second.lsp()).expect("an index"), index);
        wired(lab, &second);
        (running.unwrap_or_else(|| scene.spawn_agent()), unread)
    });
    for address in [told, unread] {
        let to = SocketAddrV4::new(address, 80).into();
        let lets_out = lab.lets_out(&second.lsp(), "tcp", to);
        assert!(!lets_out.expect("a trace"), "{what}: {address}");
    }
    assert!(flows_of(lab, first.address).is_empty(), "{what}");
    assert!(flows_of(lab, second.address).is_empty(), "{what}");
    lab.wait_attached(topology::pods().len() + 1 + usize::from(number))
        .expect("the agent sees it");
    scene.first_packet_passes(&second.lsp());
    agent
}

fn wired(lab: &Lab, spec: &PodSpec) {
    lab.wait_wired(&spec.lsp()).expect("it is wired");
    lab.sync().expect("OVN is in step");
}
