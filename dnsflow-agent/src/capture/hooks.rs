//! The programs at an interface's TC hooks, in the order in which they run. A program in front of another one can keep
//! packets from it.

use std::{fmt, io};

use aya::programs::TcAttachType;

use super::{program::AttachKind, qdisc, tcx};

/// A program at a hook, or a filter of another kind than `bpf`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct AtHook {
    hook: TcAttachType,
    /// The id of the program.
    pub(super) program: Option<u32>,
    /// The name of a filter's program. Names of TCX programs take CAP_SYS_ADMIN.
    pub(super) name: Option<String>,
    /// The kind of a filter.
    kind: Option<String>,
}

impl fmt::Display for AtHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.program, &self.kind) {
            (Some(program), _) => write!(f, "program {program}")?,
            (None, kind) => write!(f, "filter of the kind {}", kind.as_deref().unwrap_or("?"))?,
        }
        if let Some(name) = &self.name {
            write!(f, " ({name})")?;
        }
        match self.hook {
            TcAttachType::Ingress => f.write_str(" at ingress"),
            TcAttachType::Egress => f.write_str(" at egress"),
            TcAttachType::Custom(_) => Ok(()),
        }
    }
}

/// The programs of this kind at a hook, in their order.
///
/// # Errors
///
/// If the interface is gone, or the kernel refuses.
pub(super) fn programs(
    ifindex: u32,
    hook: TcAttachType,
    kind: AttachKind,
) -> io::Result<Vec<AtHook>> {
    match kind {
        AttachKind::Tcx => {
            let ids = tcx::programs(ifindex, hook)?.into_iter();
            let programs = ids.map(|id| AtHook {
                hook,
                program: Some(id),
                name: None,
                kind: None,
            });
            Ok(programs.collect())
        }
        AttachKind::Clsact => {
            let filters = qdisc::filters(ifindex, hook)?.into_iter();
            let filters = filters.map(|filter| AtHook {
                hook,
                program: filter.program,
                name: filter.name,
                kind: Some(filter.kind),
            });
            Ok(filters.collect())
        }
    }
}

/// What runs before the agent's own program. `None` if that one is not there.
pub(super) fn in_front(
    mut programs: Vec<AtHook>,
    is_own: impl Fn(&AtHook) -> bool,
) -> Option<Vec<AtHook>> {
    let own = programs.iter().position(is_own)?;
    programs.truncate(own);
    Some(programs)
}
