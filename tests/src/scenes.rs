//! The scenes that the lab and a cluster both play.
//!
//! A firewall allows a namespace one name and denies everything else; another namespace is denied
//! everything. Each stage has its own names, addresses and pods.

use std::time::Duration;

use anyhow::{Result, bail};

use crate::{pod::Fetch, process::PATIENT};

/// Longer than that second.
pub const BLOCKED: Duration = Duration::from_secs(2);

/// Who asks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Actor {
    /// A pod behind the firewall.
    Pod,
    /// Another pod of its namespace, which has asked for nothing yet.
    Neighbour,
    /// A pod of the other namespace.
    Stranger,
}

/// What for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Goal {
    /// The name that the firewall allows.
    Name,
    /// A sub-domain of it, which leads to another address than the controller knows.
    Subdomain,
    /// The address of the sub-domain, without asking for its name.
    SubdomainAddress,
    /// An address that no answer has named.
    NeverResolved,
    /// A name that no rule mentions.
    NameWithoutRule,
}

/// One attempt.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    /// Who asks.
    pub actor: Actor,
    /// What for.
    pub goal: Goal,
    /// Whether it must be reached.
    pub reached: bool,
    /// What that shows.
    pub shows: &'static str,
}

const fn scene(actor: Actor, goal: Goal, reached: bool, shows: &'static str) -> Scene {
    Scene {
        actor,
        goal,
        reached,
        shows,
    }
}

/// Before dnsflow is there.
pub const WITHOUT_DNSFLOW: &[Scene] = &[scene(
    Actor::Pod,
    Goal::Subdomain,
    false,
    "without dnsflow a sub-domain is blocked, although the rule allows it",
)];

/// With dnsflow, in this order.
pub const WITH_DNSFLOW: &[Scene] = &[
    scene(
        Actor::Pod,
        Goal::Subdomain,
        true,
        "a sub-domain of what the rule names is reached",
    ),
    scene(Actor::Pod, Goal::Name, true, "so is the name itself"),
    scene(
        Actor::Pod,
        Goal::NeverResolved,
        false,
        "an address that no answer has named stays blocked",
    ),
    scene(
        Actor::Pod,
        Goal::NameWithoutRule,
        false,
        "a name without a rule stays blocked",
    ),
    scene(
        Actor::Neighbour,
        Goal::SubdomainAddress,
        false,
        "the address stays blocked for a pod that was not told it",
    ),
    scene(
        Actor::Stranger,
        Goal::Subdomain,
        false,
        "another namespace is not concerned",
    ),
];

/// While no agent runs, and after it has started again.
pub const STILL_OPEN: &[Scene] = &[scene(
    Actor::Pod,
    Goal::SubdomainAddress,
    true,
    "what was open stays open",
)];

/// Where scenes are played.
pub trait Stage {
    /// One attempt to read the web page.
    fn fetch(&self, actor: Actor, goal: Goal, limit: Duration) -> Result<Fetch>;
}

/// Plays one scene; returns what was seen, as a text for people.
///
/// # Errors
///
/// If the result is not the scene's: a blocked connection must time out, not fail in another way.
pub fn play(stage: &impl Stage, scene: &Scene) -> Result<String> {
    let Scene {
        actor,
        goal,
        reached,
        shows,
    } = *scene;
    let limit = if reached { PATIENT } else { BLOCKED };
    let attempt = format!("{actor:?} tries {goal:?}");
    match (stage.fetch(actor, goal, limit)?.result, reached) {
        (Ok(page), true) => Ok(format!("{attempt}: {page}")),
        (Err(error), false) if error.contains("timed out") => Ok(format!("{attempt}: {error}")),
        (Ok(page), false) => bail!("{shows}: but {attempt}, and reaches: {page}"),
        (Err(error), _) => bail!("{shows}: but {attempt}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Says(Result<&'static str, &'static str>);

    impl Stage for Says {
        fn fetch(&self, _: Actor, _: Goal, took: Duration) -> Result<Fetch> {
            let result = self.0.map(str::to_owned).map_err(str::to_owned);
            Ok(Fetch { result, took })
        }
    }

    #[test]
    fn only_a_timeout_counts_as_blocked() {
        let played = |says, scene| play(&Says(says), scene).is_ok();
        let (open, blocked) = (&WITH_DNSFLOW[0], &WITHOUT_DNSFLOW[0]);
        let timeout = Err("curl: (28) Connection timed out after 2001 milliseconds");
        assert!(played(Ok("page"), open));
        assert!(!played(timeout, open));
        assert!(played(timeout, blocked));
        assert!(!played(Ok("page"), blocked));
        assert!(!played(Err("curl: (6) Could not resolve host"), blocked));
    }
}
