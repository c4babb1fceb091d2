//! `cargo xtask build-ebpf`.

/// Builds the BPF object.
pub(crate) fn build(say: &dyn Fn(&str)) -> anyhow::Result<()> {
    say("there is no BPF object to build yet");
    Ok(())
}
