//! Numbers that the engine gives.

/// The engine's number of a port. A number is never used again for another port.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PortId(pub u32);
