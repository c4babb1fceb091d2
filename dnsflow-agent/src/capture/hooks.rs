//! The programs at an interface's TC hooks, in the order in which they run. A program in front of another one can keep
//! packets from it.

use std::{fmt, io};

use aya::programs::TcAttachType;

use super::{program::AttachKind, qdisc, tcx};

/// So many programs at a hook are named: there can be thousands of filters.
const NAMED_MAX: usize = 5;

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

/// The first programs of a hook, for people, and the number of the others.
pub(super) fn texts(programs: &[AtHook]) -> Vec<String> {
    let named = programs.iter().take(NAMED_MAX).map(ToString::to_string);
    let further = programs.len().saturating_sub(NAMED_MAX);
    let further = (further > 0).then(|| format!("{further} more"));
    named.chain(further).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_programs_are_named_and_the_others_counted() {
        let programs = |count: u32| {
            let programs = (1..=count).map(|id| AtHook {
                hook: TcAttachType::Egress,
                program: Some(id),
                name: (id == 2).then(|| "theirs".to_owned()),
                kind: None,
            });
            texts(&programs.collect::<Vec<_>>())
        };
        assert_eq!(
            programs(2),
            ["program 1 at egress", "program 2 (theirs) at egress"]
        );
        assert_eq!(programs(5).len(), 5);
        let [.., fifth, further] = &programs(3000)[..] else {
            panic!("some are named");
        };
        assert_eq!((&**fifth, &**further), ("program 5 at egress", "2995 more"));
    }
}
