//! What the programs cost: instructions that the verifier looks at, time per packet.

use dnsflow_agent::capture::{EGRESS, INGRESS, Options};

use crate::load;

#[test]
fn the_verifier_has_room_left() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    for name in [INGRESS, EGRESS] {
        let info = program
            .program(name)
            .info()
            .expect("the kernel describes it");
        println!(
            "{name}: {} instructions, {} bytes of machine code, the verifier walked {} instructions",
            info.size_translated().unwrap_or(0) / 8,
            info.size_jitted(),
            info.verified_instruction_count().unwrap_or(0),
        );
    }
}
