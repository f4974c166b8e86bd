//! Where a run's completions come from.

use super::http::Servers;
use crate::base::EngineIndex;
use crate::engine::{Engine, Engines, Statistics, Trace, WatchList};

/// Embedded engines, whose every block is known, or servers, of which a record is all there is.
#[derive(Debug)]
pub enum Source {
    Embedded(Engines),
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
    pub fn embedded(&self) -> Option<&Engines> {
        match self {
            Self::Embedded(engines) => Some(engines),
            Self::Servers(_) => None,
        }
    }

    /// The embedded engine of this index.
    #[must_use]
    pub fn engine(&self, index: EngineIndex) -> Option<&Engine> {
        self.embedded().map(|engines| engines.get(index))
    }

    #[must_use]
    pub fn servers(&self) -> Option<&Servers> {
        match self {
            Self::Embedded(_) => None,
            Self::Servers(servers) => Some(servers),
        }
    }

    /// Engines or servers side by side.
    #[must_use]
    pub fn num_engines(&self) -> usize {
        match self {
            Self::Embedded(engines) => engines.iter().len(),
            Self::Servers(servers) => servers.facts().len(),
        }
    }

    /// What each engine has done so far; empty where they do not say.
    #[must_use]
    pub fn statistics(&self) -> Vec<Statistics> {
        let engines = self.embedded().map(Engines::iter);
        engines.into_iter().flatten().map(Engine::statistics).collect()
    }

    /// Looks on, or looks away. Servers are not seen into.
    pub fn watch(&mut self, list: Option<WatchList>) {
        if let Self::Embedded(engines) = self {
            engines.watch(list);
        }
    }

    pub fn take_trace(&mut self) -> Option<Trace> {
        match self {
            Self::Embedded(engines) => engines.take_trace(),
            Self::Servers(_) => None,
        }
    }
}
