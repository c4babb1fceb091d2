//! Tests that measure the machine itself. `cargo xtask test` runs nothing else beside one of them.

mod first_query;
mod hostile;
