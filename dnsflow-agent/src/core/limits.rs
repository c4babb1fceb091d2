//! Limits and periods of the core, each with its reason.

use std::time::Duration;

/// Addresses remembered for one port, whether a rule matches or not. A pod that resolves more
/// than this has its earliest-expiring address forgotten.
pub const ADDRESSES_PER_PORT_MAX: usize = 4096;
/// Names remembered for one address of a port.
pub const NAMES_PER_ADDRESS_MAX: usize = 64;

/// An address stays for at least this long after an answer, however short its TTL: clients use
/// an address for longer than they may.
pub const MIN_TTL: Duration = Duration::from_secs(60);
/// An address that is not in use goes after this long without a new answer.
pub const MAX_TTL: Duration = Duration::from_secs(3600);
/// After its TTL, an address stays until it has seen no packet for this long.
pub const IDLE_GRACE: Duration = Duration::from_secs(60);

/// The switch removes a flow that the agent has not renewed for this long.
pub const HARD_TIMEOUT: Duration = Duration::from_secs(300);
/// The agent renews its flows this often.
pub const RENEW_INTERVAL: Duration = Duration::from_secs(100);
/// The switch is compared with what it should hold this often; counters come along.
pub const COMPARE_INTERVAL: Duration = Duration::from_secs(10);
/// After a flow has vanished, others of the same wipe are waited for this long.
pub const RESTORE_DELAY: Duration = Duration::from_millis(20);
