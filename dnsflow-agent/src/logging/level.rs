//! What is logged, which people can change while the agent runs.

use std::sync::{Arc, Mutex, PoisonError};

use tracing_subscriber::{EnvFilter, Registry, reload};

use crate::{asking::Levels, k8s::QUIET_TARGETS};

/// Words for levels (`tracing::metadata::LevelFilter`).
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
/// The longest text of directives, in bytes: each event is compared with each directive once.
const TEXT_MAX: usize = 1024;

/// What is logged.
#[derive(Clone, Debug)]
pub struct LogLevel {
    handle: reload::Handle<EnvFilter, Registry>,
    levels: Arc<Mutex<Levels>>,
}

/// Why directives are refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum LevelError {
    /// Too long.
    #[error("longer than {TEXT_MAX} bytes")]
    TooLong,
    /// Neither a level nor a target with one.
    #[error(
        "`{0}` is neither a level ({levels}) nor TARGET=LEVEL, as dnsflow_agent=debug",
        levels = LEVELS.join(", ")
    )]
    NotUnderstood(String),
    /// The log has ended.
    #[error("the log has ended")]
    Ended,
}

impl LogLevel {
    /// The layer that lets pass what `filter` does, until somebody changes that.
    pub(super) fn of(filter: EnvFilter) -> (reload::Layer<EnvFilter, Registry>, Self) {
        let level = filter.to_string();
        let (layer, handle) = reload::Layer::new(filter);
        let levels = Levels {
            started_with: level.clone(),
            level,
        };
        let level = Self {
            handle,
            levels: Arc::new(Mutex::new(levels)),
        };
        (layer, level)
    }

    /// What is logged.
    pub fn levels(&self) -> Levels {
        let levels = self.levels.lock();
        levels.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Logs from now on what `text` says.
    pub fn set(&self, text: &str) -> Result<Levels, LevelError> {
        let directives = directives(text)?;
        let filter = EnvFilter::builder().parse(&directives);
        let filter = filter.map_err(|_| LevelError::NotUnderstood(directives.clone()))?;
        let mut levels = self.levels.lock().unwrap_or_else(PoisonError::into_inner);
        self.handle.reload(filter).map_err(|_| LevelError::Ended)?;
        levels.level = directives;
        Ok(levels.clone())
    }
}

/// The directives that `text` stands for. A level alone is that of all targets but those that are quiet
/// by default. `EnvFilter` itself takes a misspelt level for the name of a target.
fn directives(text: &str) -> Result<String, LevelError> {
    let text = text.trim();
    if text.len() > TEXT_MAX {
        return Err(LevelError::TooLong);
    }
    if LEVELS.contains(&text) {
        return Ok(format!("{text},{QUIET_TARGETS}"));
    }
    let is_target = |target: &str| {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"_:-.".contains(&byte);
        !target.is_empty() && target.bytes().all(is_part)
    };
    for directive in text.split(',') {
        let is_understood = match directive.split_once('=') {
            Some((target, level)) => is_target(target) && LEVELS.contains(&level),
            None => LEVELS.contains(&directive),
        };
        if !is_understood {
            return Err(LevelError::NotUnderstood(directive.to_owned()));
        }
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[test]
    fn a_level_can_be_changed_and_nonsense_is_refused() {
        let (layer, level) = LogLevel::of(EnvFilter::new("info"));
        let subscriber = tracing_subscriber::registry().with(layer);
        let _default = tracing::subscriber::set_default(subscriber);
        assert!(!tracing::enabled!(tracing::Level::DEBUG));
        let levels = level.set("debug").expect("a level");
        assert_eq!(levels.level, format!("debug,{QUIET_TARGETS}"));
        assert_eq!(levels.started_with, "info");
        assert!(tracing::enabled!(tracing::Level::DEBUG));
        assert!(!tracing::enabled!(target: "kube_client", tracing::Level::ERROR));

        for nonsense in [
            "",
            "debgu",
            "info,debgu",
            "a=loud",
            "[span]=info",
            "a b=info",
            "info,",
        ] {
            let refused = level.set(nonsense);
            assert!(
                matches!(refused, Err(LevelError::NotUnderstood(_))),
                "{nonsense}"
            );
        }
        assert_eq!(level.set(&"info,".repeat(300)), Err(LevelError::TooLong));
        assert_eq!(level.levels(), levels, "what is refused changes nothing");

        let some = "warn,dnsflow_agent::agent=trace";
        assert_eq!(level.set(some).expect("directives").level, some);
        assert!(!tracing::enabled!(tracing::Level::INFO));
        assert!(tracing::enabled!(target: "dnsflow_agent::agent", tracing::Level::TRACE));
    }
}
