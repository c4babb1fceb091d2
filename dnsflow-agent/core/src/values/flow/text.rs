//! Flows as text, in the form of `ovs-ofctl dump-flows` (ovs-fields(7), ovs-actions(7)).

use std::fmt::Write as _;

use super::{Action, Addresses, Ends, FlowBody, FlowKey, InstalledFlow, Masked, Match};

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
    let protocol = transport.map(|transport| transport.protocol);
    let (protocol, version) = match (protocol, ends.src().is_ipv6()) {
        (None, false) => ("ip", ""),
        (None, true) => ("ipv6", ""),
        (Some(protocol), false) => (protocol.name(), ""),
        (Some(protocol), true) => (protocol.name(), "6"),
    };
    // ovs-ofctl writes these before the protocol.
    if let Ends::Group {
        mark,
        is_untranslated,
        ..
    } = ends
    {
        let state = if *is_untranslated {
            ",ct_state=-dnat"
        } else {
            ""
        };
        let _ = write!(text, ",pkt_mark={}{state}", masked(*mark));
    }
    let _ = write!(text, ",{protocol}{version}");
    for (register, bits) in registers.iter() {
        let _ = write!(text, ",reg{register}={}", masked(*bits));
    }
    let _ = write!(text, ",metadata={metadata:#x}");
    let _ = match ends {
        Ends::Addresses(Addresses::V4 { src, dst }) => write!(text, ",nw_src={src},nw_dst={dst}"),
        Ends::Addresses(Addresses::V6 { src, dst }) => {
            write!(text, ",ipv6_src={src},ipv6_dst={dst}")
        }
        Ends::Group { src, .. } => {
            let field = if src.is_ipv6() { "ipv6_src" } else { "nw_src" };
            write!(text, ",{field}={src}")
        }
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
