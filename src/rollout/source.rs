//! Where a run's completions come from.

use super::http::Servers;
use crate::engine::{Engine, Statistics, Trace, WatchList};

/// The embedded engine, whose every block is known, or servers, of which a record is all there is.
#[derive(Debug)]
pub enum Source {
    Embedded(Box<Engine>),
    Servers(Servers),
}

impl Source {
    /// As records call it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Embedded(_) => "embedded",
            Self::Servers(_) => "vllm",
        }
    }

    #[must_use]
    pub fn embedded(&self) -> Option<&Engine> {
        match self {
            Self::Embedded(engine) => Some(engine),
            Self::Servers(_) => None,
        }
    }

    #[must_use]
    pub fn servers(&self) -> Option<&Servers> {
        match self {
            Self::Embedded(_) => None,
            Self::Servers(servers) => Some(servers),
        }
    }

    /// What the engine has done so far, where it says.
    #[must_use]
    pub fn statistics(&self) -> Option<Statistics> {
        self.embedded().map(Engine::statistics)
    }

    /// Looks on, or looks away. Servers are not seen into.
    pub fn watch(&mut self, list: Option<WatchList>) {
        if let Self::Embedded(engine) = self {
            engine.watch(list);
        }
    }

    pub fn take_trace(&mut self) -> Option<Trace> {
        match self {
            Self::Embedded(engine) => engine.take_trace(),
            Self::Servers(_) => None,
        }
    }
}
