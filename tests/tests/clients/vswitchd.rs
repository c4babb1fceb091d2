//! What a real ovs-vswitchd says of its revalidators.

use std::time::Duration;

use dnsflow_agent::vswitchd::Vswitchd;
use dnsflow_tests::{
    lab,
    ovs::{Daemon, Stop},
    process::wait_until,
};

#[test]
fn a_real_vswitchd_says_how_long_it_revalidates_before_and_after_a_restart() {
    let lab = lab!("vswitchd");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let socket = lab.socket("br-int.mgmt");
    let mut vswitchd = Vswitchd::new(socket.parent().expect("a directory"));
    let mut ask = || runtime.block_on(vswitchd.revalidation());
    let first = ask().expect("an answer");
    println!("{first:?}");
    assert!(first.pass >= Duration::from_millis(1), "{first:?}");
    lab.restart(Daemon::Vswitchd, Stop::Terminate)
        .expect("it starts again");
    // The old connection is of no use any more; the datapath comes after the socket.
    wait_until("an answer", Duration::from_secs(20), || Ok(ask().is_ok())).expect("it answers");
}
