//! The daemons of Open vSwitch and OVN: restarted, killed, away.

use std::{thread, time::Duration};

use dnsflow_tests::{
    lab,
    lab::Datapath,
    ovs::{
        Daemon::{self, NbDb, Northd, OvnController, OvsDb, SbDb, Vswitchd},
        Stop,
    },
    standstill::play,
};

use crate::faults::traffic::{Bound, Flows, Scene};

/// How long a daemon is away.
const AWAY: Duration = Duration::from_secs(1);

/// Answers that the pod may lose although the twin loses none at that time. Where forwarding stops for a moment, the two
/// do not ask in the same microsecond.
const FEW: usize = 4;

/// What the absence of this daemon may cost.
fn bound(daemon: Daemon, datapath: Datapath) -> Bound {
    let flows = match daemon {
        // It takes the flows away when it starts, also those by which a question gets to the DNS server.
        OvnController | Vswitchd => Flows::ComeBack,
        _ => Flows::Stay,
    };
    match (daemon, datapath) {
        // Nothing forwards packets, and connections are tracked by what has gone. ovs-vswitchd forwards nothing either
        // as long as it has no database: its main thread, which also reads packets, is busy connecting.
        (Vswitchd | OvsDb, Datapath::Netdev) => Bound {
            answers: FEW,
            flows,
            breaks: true,
            ..Bound::NOTHING
        },
        (Vswitchd | OvnController, _) => Bound {
            answers: FEW,
            flows,
            ..Bound::NOTHING
        },
        _ => Bound::NOTHING,
    }
}

/// Ends each daemon in both ways.
fn each_comes_back(scene: &Scene<'_>, daemons: &[Daemon]) {
    let _agent = scene.start_agent();
    for &daemon in daemons {
        for how in [Stop::Terminate, Stop::Kill] {
            let bound = bound(daemon, scene.lab.datapath());
            scene.through(&format!("{daemon:?}, {how:?}, 1 s"), bound, || {
                scene.lab.stop_daemon(daemon, how).expect("it ends");
                thread::sleep(AWAY);
                scene.lab.start_daemon(daemon).expect("it starts");
            });
        }
    }
}

#[test]
fn the_databases_and_northd_come_back() {
    play(|| {
        let lab = lab!("faults-databases", agent);
        each_comes_back(&Scene::new(&lab), &[OvsDb, NbDb, SbDb, Northd]);
    });
}

#[test]
fn the_switch_and_its_controller_come_back() {
    play(|| {
        let lab = lab!("faults-switch", agent);
        each_comes_back(&Scene::new(&lab), &[OvnController, Vswitchd]);
    });
}

/// An agent that starts without a database opens nothing new, closes nothing, and goes on when the database is there.
#[test]
fn a_database_that_is_not_there_at_the_start_is_waited_for() {
    play(|| {
        let lab = lab!("faults-start", agent);
        let scene = Scene::new(&lab);
        let mut agent = Some(scene.start_agent());
        for daemon in [OvsDb, NbDb, SbDb, Vswitchd] {
            let bound = bound(daemon, lab.datapath());
            let what = format!("{daemon:?} away when the agent starts");
            agent = Some(scene.through(&what, bound, || {
                scene.end(agent.take().expect("one runs"));
                lab.stop_daemon(daemon, Stop::Kill).expect("it ends");
                let agent = scene.start_waiting_agent();
                lab.start_daemon(daemon).expect("it starts");
                agent
            }));
        }
    });
}
