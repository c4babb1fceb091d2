//! What the walk reads, and the ports that it looks for.

/// A frame that can be read piece by piece, wherever its bytes are kept.
pub trait Reader {
    /// The frame's length in bytes.
    fn len(&self) -> u32;

    /// The `N` bytes at `offset`, or `None` where the frame ends before.
    fn read<const N: usize>(&self, offset: u32) -> Option<[u8; N]>;

    /// Whether the frame has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Reader for &[u8] {
    fn len(&self) -> u32 {
        u32::try_from((**self).len()).unwrap_or(u32::MAX)
    }

    fn read<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let offset = usize::try_from(offset).ok()?;
        self.get(offset..)?.first_chunk().copied()
    }
}

/// The ports that DNS servers answer from.
pub trait ServerPorts {
    /// Whether `port` is one of them.
    fn contains(&self, port: u16) -> bool;
}

/// How many ports [`Ports`] holds.
pub const PORTS_MAX: usize = 8;

/// A list of ports that fits into a constant of the BPF programs.
///
/// Unused places are zero, which is no port of a server (RFC 6335, section 6: reserved).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ports([u16; PORTS_MAX]);

impl Ports {
    /// Port 53 (RFC 1035, section 4.2).
    pub const DNS: Self = Self([53, 0, 0, 0, 0, 0, 0, 0]);

    /// These ports; `None` when there are more than [`PORTS_MAX`], none, or a zero among them.
    pub fn new(ports: &[u16]) -> Option<Self> {
        if ports.is_empty() || ports.contains(&0) {
            return None;
        }
        let mut all = [0; PORTS_MAX];
        all.get_mut(..ports.len())?.copy_from_slice(ports);
        Some(Self(all))
    }

    /// All places, the unused ones zero, in native byte order.
    pub const fn as_array(&self) -> &[u16; PORTS_MAX] {
        &self.0
    }

    /// The ports in these places, as [`Ports::as_array`] gave them.
    pub const fn from_array(ports: [u16; PORTS_MAX]) -> Self {
        Self(ports)
    }
}

impl ServerPorts for Ports {
    #[inline(always)]
    fn contains(&self, port: u16) -> bool {
        port != 0 && self.0.contains(&port)
    }
}
