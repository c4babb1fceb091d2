//! The node: its bridge, and all of its daemons at once.

use std::{thread, time::Duration};

use dnsflow_agent::capture::remove_pins;
use dnsflow_tests::{
    agent::Agent,
    lab,
    ovs::{
        Daemon::{self, NbDb, Northd, OvnController, OvsDb, SbDb, Vswitchd},
        Stop,
    },
    standstill::play,
};

use crate::faults::traffic::{Bound, Flows, Scene};

/// Nothing passes for a while, and nobody remembers.
const ALL_GONE: Bound = Bound {
    answers: 0,
    flows: Flows::AreForgotten,
    breaks: true,
    ..Bound::NOTHING
};

#[test]
fn the_bridge_is_deleted_and_made_anew() {
    play(|| {
        let lab = lab!("faults-bridge", agent);
        let scene = Scene::new(&lab);
        let _agent = scene.start_agent();
        scene.through("br-int deleted, made anew after 1 s", ALL_GONE, || {
            let unplugged = lab.delete_integration_bridge();
            let unplugged = unplugged.expect("it is deleted");
            thread::sleep(Duration::from_secs(1));
            lab.plug_in_again(&unplugged).expect("it is made");
        });
    });
}

/// What comes back after a reboot.
#[derive(Clone, Copy, Debug)]
enum Part {
    Agent,
    Daemon(Daemon),
}

use Part::Agent as TheAgent;

const fn daemon(daemon: Daemon) -> Part {
    Part::Daemon(daemon)
}

/// In these orders all comes back. The databases of Open vSwitch come before what reads them at its start.
const ORDERS: &[&[Part]] = &[
    &[
        TheAgent,
        daemon(OvsDb),
        daemon(Vswitchd),
        daemon(NbDb),
        daemon(SbDb),
        daemon(Northd),
        daemon(OvnController),
    ],
    &[
        daemon(OvsDb),
        daemon(OvnController),
        daemon(Vswitchd),
        TheAgent,
        daemon(SbDb),
        daemon(Northd),
        daemon(NbDb),
    ],
    &[
        daemon(SbDb),
        daemon(NbDb),
        daemon(Northd),
        daemon(OvsDb),
        daemon(Vswitchd),
        daemon(OvnController),
        TheAgent,
    ],
];

#[test]
fn the_node_boots_again() {
    play(|| {
        let lab = lab!("faults-reboot", agent);
        let scene = Scene::new(&lab);
        let mut agent: Option<Agent> = Some(scene.start_agent());
        for (number, order) in ORDERS.iter().enumerate() {
            let what = format!("reboot, order {}", number + 1);
            agent = scene.through(&what, ALL_GONE, || {
                if let Some(agent) = agent.take() {
                    scene.kill(agent);
                }
                for gone in [OvnController, Vswitchd, Northd, OvsDb, NbDb, SbDb] {
                    lab.stop_daemon(gone, Stop::Kill).expect("it ends");
                }
                // The BPF file system is in memory.
                remove_pins(scene.pins()).expect("they go");
                let mut agent = None;
                for part in *order {
                    match part {
                        TheAgent => agent = Some(scene.start_waiting_agent()),
                        Part::Daemon(daemon) => lab.start_daemon(*daemon).expect("it starts"),
                    }
                }
                agent
            });
        }
    });
}
