//! A log-probability, so that no bare float is mistaken for one.

use serde::{Deserialize, Serialize};

use super::JsonFloat;

/// The natural logarithm of one token's probability, in nats. Missing is `Option::None`, never 0.
///
/// Non-finite values are kept as they are: they are the signal, counted where records are compared.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(into = "JsonFloat", from = "JsonFloat")]
pub struct LogProb(f32);

impl LogProb {
    #[must_use]
    pub const fn new(nats: f32) -> Self {
        Self(nats)
    }

    /// Nats.
    #[must_use]
    pub const fn get(self) -> f32 {
        self.0
    }

    #[must_use]
    pub fn is_finite(self) -> bool {
        self.0.is_finite()
    }
}

impl From<LogProb> for JsonFloat {
    fn from(logp: LogProb) -> Self {
        Self(f64::from(logp.get()))
    }
}

impl From<JsonFloat> for LogProb {
    fn from(float: JsonFloat) -> Self {
        Self::new(float.0 as f32)
    }
}
