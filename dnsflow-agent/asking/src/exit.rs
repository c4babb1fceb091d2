//! The exit codes of `dnsflow`. Scripts rely on them: a code keeps its meaning.

use std::process::ExitCode;

use dnsflow_core::ask::view::Verdict;

/// How a subcommand has ended. The command line's parser has a code of its own for a wrong one, 2.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Exit {
    /// It has done what it should; where it answers a question, the answer is yes.
    Done = 0,
    /// It could not do what it should.
    Failed = 1,
    /// The answer is no: a connection is blocked or would be, or the agent could not work.
    No = 3,
    /// The answer is not whole: a part of it is missing, and is named; or it depends on a fact that is not known.
    Incomplete = 4,
    /// Another agent runs on this node.
    Another = 5,
}

/// What the help says of them.
pub const HELP: &str = "\
Exit codes:
  0  done; where the command answers a question: yes
  1  the command could not do its work
  2  wrong command line
  3  the answer is no: blocked (explain), would be denied (try), something has failed (check)
  4  the answer is not whole: a part is missing, and is named; depends, or not known (explain)
  5  another agent runs on this node (agent)";

impl Exit {
    /// The code for a verdict of `explain`. A name that the pod has not asked for yet opens when it asks; an address does
    /// not.
    pub(crate) fn of(verdict: Verdict, is_by_name: bool) -> Self {
        match verdict {
            Verdict::Allowed => Self::Done,
            Verdict::NotYet if is_by_name => Self::Done,
            Verdict::NotYet | Verdict::Blocked => Self::No,
            Verdict::Depends | Verdict::NotKnown => Self::Incomplete,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_each_code() {
        let all = [
            Exit::Done,
            Exit::Failed,
            Exit::No,
            Exit::Incomplete,
            Exit::Another,
        ];
        for exit in all {
            let line = format!("\n  {}  ", exit as u8);
            assert!(HELP.contains(&line), "{exit:?}");
        }
    }
}
