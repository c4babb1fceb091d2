//! `cargo xtask`: everything that a person or CI does with this workspace.

fn main() {}
