//! Numbers that stand for something of the engine.

/// The engine's number of a port. A number is never used again for another port.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PortId(pub u32);

/// The engine's number of a pod's sandbox, which all ports of the pod share, or of a port without one. A number is never
/// used again for another sandbox.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SandboxId(pub u32);

/// The number of a recording, which whoever asks for it chooses.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct RecordingId(pub u64);
