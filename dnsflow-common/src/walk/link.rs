//! Ethernet and VLAN tags.

use super::Reader;
use crate::Reason;

/// EtherType of IPv4 (IEEE 802 numbers, IANA).
pub(super) const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6 (IEEE 802 numbers, IANA).
pub(super) const ETHERTYPE_IPV6: u16 = 0x86dd;
/// EtherType of a customer VLAN tag (IEEE 802.1Q, table 9-1).
const ETHERTYPE_C_TAG: u16 = 0x8100;
/// EtherType of a service VLAN tag (IEEE 802.1Q, table 9-1; once 802.1ad).
const ETHERTYPE_S_TAG: u16 = 0x88a8;
/// Where the destination stands (IEEE 802.3).
pub const MAC_DST_AT: u32 = 0;
/// Where the source stands (IEEE 802.3).
pub const MAC_SRC_AT: u32 = 6;
/// Destination and source; an EtherType or a tag follows (IEEE 802.3).
const ADDRESSES_LEN: u32 = 12;
/// An EtherType.
const ETHERTYPE_LEN: u32 = 2;
/// The EtherType of a tag, and its control information (IEEE 802.1Q, section 9.3).
const TAG_LEN: u32 = 4;

/// How many VLAN tags a frame may carry within it.
pub const TAGS_MAX: usize = 2;

/// The VLAN tags within a frame, outermost first. One that the kernel keeps outside the frame is
/// not among them.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Tags {
    count: u8,
    tcis: [u16; TAGS_MAX],
}

impl Tags {
    /// Tags with this control information, outermost first; `None` when there are more than
    /// [`TAGS_MAX`].
    pub fn new(tcis: &[u16]) -> Option<Self> {
        let mut all = [0; TAGS_MAX];
        all.get_mut(..tcis.len())?.copy_from_slice(tcis);
        Some(Self {
            count: u8::try_from(tcis.len()).ok()?,
            tcis: all,
        })
    }

    /// Whether there is none.
    #[inline(always)]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The tag control information of each tag: priority, drop eligible, VLAN identifier.
    pub fn tcis(&self) -> &[u16] {
        self.tcis
            .get(..usize::from(self.count))
            .unwrap_or(&self.tcis)
    }
}

/// What is in front of the network layer.
pub(super) struct Link {
    pub(super) ethertype: u16,
    pub(super) tags: Tags,
    /// Where the network layer begins.
    pub(super) l3: u32,
}

/// Reads the Ethernet header and the tags behind it.
#[inline(always)]
pub(super) fn link<R: Reader>(frame: &R) -> Result<Link, Reason> {
    let mut tags = Tags::default();
    let mut l3 = ADDRESSES_LEN + ETHERTYPE_LEN;
    let Some(header) = frame.read::<2>(ADDRESSES_LEN) else {
        return Err(Reason::TruncatedEthernet);
    };
    let mut ethertype = u16::from_be_bytes(header);
    for at in 0..TAGS_MAX {
        if !is_tag(ethertype) {
            break;
        }
        // Its EtherType is read: control information and the next EtherType.
        let Some(tag) = frame.read::<{ TAG_LEN as usize }>(l3) else {
            return Err(Reason::TruncatedVlan);
        };
        tags.tcis[at] = u16::from_be_bytes([tag[0], tag[1]]);
        tags.count += 1;
        ethertype = u16::from_be_bytes([tag[2], tag[3]]);
        l3 += TAG_LEN;
    }
    if is_tag(ethertype) {
        return Err(Reason::TooManyTags);
    }
    Ok(Link {
        ethertype,
        tags,
        l3,
    })
}

#[inline(always)]
fn is_tag(ethertype: u16) -> bool {
    matches!(ethertype, ETHERTYPE_C_TAG | ETHERTYPE_S_TAG)
}
