//! Flows as text, in the form of `ovs-ofctl dump-flows` (ovs-fields(7), ovs-actions(7)).

use std::fmt::Write as _;

use super::{Action, Addresses, Ends, FlowBody, FlowKey, InstalledFlow, Masked, Match, Tag};

/// A flow that was found in the switch, with its cookie, the packets that it has matched, and its match.
pub fn installed(flow: &InstalledFlow) -> String {
    let InstalledFlow {
        key,
        cookie,
        packets,
        hard_timeout_s: _,
    } = flow;
    let mut text = format!(
        "cookie={:#x}, table={}, n_packets={packets}, priority={}",
        cookie.bits(),
        key.table,
        key.priority
    );
    write_match(&mut text, &key.matches);
    text
}

/// A flow with its cookie, its match and its actions, without counters.
pub fn flow(key: &FlowKey, body: &FlowBody) -> String {
    let mut text = format!(
        "cookie={:#x}, table={}, priority={}",
        body.cookie.bits(),
        key.table,
        key.priority
    );
    write_match(&mut text, &key.matches);
    text.push_str(" actions=");
    if body.actions.is_empty() {
        text.push_str("drop");
    }
    for (index, action) in body.actions.iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        write_action(&mut text, action);
    }
    text
}

// Writing to a `String` cannot fail.

fn write_match(text: &mut String, matches: &Match) {
    let Match {
        metadata,
        registers,
        ends,
        transport,
    } = matches;
    // ovs-ofctl writes these before the protocol.
    let _ = match ends {
        Ends::Untranslated => write!(text, ",ct_state=-dnat"),
        Ends::Established(_) => write!(text, ",ct_state=+est+trk"),
        Ends::Marked { bit } => write!(text, ",pkt_mark={bit:#x}/{bit:#x}"),
        Ends::Addresses(_) | Ends::Tagged { .. } | Ends::AnyTag => Ok(()),
    };
    let protocol = transport.map(|transport| transport.protocol);
    let is_ipv6 = match ends {
        Ends::Addresses(addresses) | Ends::Established(addresses) => {
            Some(addresses.src().is_ipv6())
        }
        Ends::Tagged { is_ipv6, .. } => Some(*is_ipv6),
        Ends::Untranslated | Ends::AnyTag | Ends::Marked { .. } => None,
    };
    let _ = match (protocol, is_ipv6) {
        (_, None) => Ok(()),
        (None, Some(false)) => write!(text, ",ip"),
        (None, Some(true)) => write!(text, ",ipv6"),
        (Some(protocol), Some(false)) => write!(text, ",{}", protocol.name()),
        (Some(protocol), Some(true)) => write!(text, ",{}6", protocol.name()),
    };
    for (register, bits) in registers.iter() {
        let _ = write!(text, ",reg{register}={}", masked(*bits));
    }
    let _ = match ends {
        Ends::Addresses(_) | Ends::Established(_) | Ends::Untranslated => {
            write!(text, ",tun_id=0")
        }
        Ends::Tagged { tag, .. } => write!(text, ",tun_id={:#x}", tag.bits()),
        Ends::AnyTag => write!(text, ",tun_id={0:#x}/{0:#x}", Tag::GUARD),
        Ends::Marked { .. } => Ok(()),
    };
    let _ = write!(text, ",metadata={metadata:#x}");
    let _ = match ends {
        Ends::Addresses(addresses) | Ends::Established(addresses) => match addresses {
            Addresses::V4 { src, dst } => write!(text, ",nw_src={src},nw_dst={dst}"),
            Addresses::V6 { src, dst } => write!(text, ",ipv6_src={src},ipv6_dst={dst}"),
        },
        Ends::Tagged { .. } | Ends::Untranslated | Ends::AnyTag | Ends::Marked { .. } => Ok(()),
    };
    if let Some(port) = transport.and_then(|transport| transport.port) {
        let _ = write!(text, ",tp_dst={port}");
    }
}

fn write_action(text: &mut String, action: &Action) {
    let _ = match action {
        Action::SetRegister { register, bits } => {
            write!(text, "set_field:{}->reg{register}", masked(*bits))
        }
        Action::SetMark(bits) => write!(text, "set_field:{}->pkt_mark", masked(*bits)),
        Action::SetTunnel(key) => write!(text, "set_field:{}->tun_id", hexadecimal(*key)),
        Action::MoveMark { mask } => {
            let (first, count) = (mask.trailing_zeros(), mask.count_ones());
            let (from, to) = (bits(first, count, u32::BITS), bits(0, count, u64::BITS));
            write!(text, "move:NXM_NX_PKT_MARK{from}->NXM_NX_TUN_ID{to}")
        }
        Action::Resubmit { table } => write!(text, "resubmit(,{table})"),
        Action::Copied(bytes) => write!(text, "<{} bytes as in OVN's own flow>", bytes.len()),
        Action::DeleteLearned(sentinel) => write!(
            text,
            "learn(table={},cookie={:#x},delete_learned)",
            sentinel.table,
            sentinel.cookie.bits()
        ),
    };
}

/// So many bits of a field of this width (`mf_format_subfield` in Open vSwitch's lib/meta-flow.c).
fn bits(first: u32, count: u32, width: u32) -> String {
    match count {
        1 => format!("[{first}]"),
        _ if count == width => "[]".to_owned(),
        _ => format!("[{first}..{}]", first + count - 1),
    }
}

fn masked(bits: Masked) -> String {
    match bits.mask() {
        u32::MAX => hexadecimal(bits.value()),
        mask => format!("{}/{mask:#x}", hexadecimal(bits.value())),
    }
}

/// As `%#x` of C writes: zero has no prefix.
fn hexadecimal(value: u32) -> String {
    match value {
        0 => "0".to_owned(),
        _ => format!("{value:#x}"),
    }
}

#[cfg(test)]
mod tests;
