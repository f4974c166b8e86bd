//! What is left of a step's rescoring.

use serde::Serialize;

use super::super::step::Metrics;
use crate::base::{CompletionIndex, Contract, RequestId};
use crate::gap::{Finding, Legs, Opinion};

#[derive(Serialize)]
pub(in crate::run::audit) struct RescoredRow {
    pub(in crate::run::audit) sides: Vec<SideRow>,
    pub(in crate::run::audit) opinions: Vec<OpinionRow>,
}

/// One side of the records against the model.
#[derive(Serialize)]
pub(in crate::run::audit) struct SideRow {
    pub(in crate::run::audit) legs: Legs,
    /// By the step's first record.
    pub(in crate::run::audit) stated: Contract,
    /// Under which the side is compared with the model.
    pub(in crate::run::audit) contract: Contract,
    /// Whether that was found from the logits, and not stated.
    #[serde(rename = "found")]
    pub(in crate::run::audit) holds: bool,
    pub(in crate::run::audit) refit: Option<RefitRow>,
    /// Tokens that the filters do not keep; they have no log-probability and are not compared.
    pub(in crate::run::audit) removed: u64,
    pub(in crate::run::audit) first_removed: Option<(RequestId, CompletionIndex)>,
    pub(in crate::run::audit) metrics: Metrics,
}

/// What a search found, held against every token of the step.
#[derive(Serialize)]
pub(in crate::run::audit) struct RefitRow {
    pub(in crate::run::audit) contract: Contract,
    /// Tokens whose logits it was found from.
    pub(in crate::run::audit) tokens: usize,
    /// Mean |d| of the step's tokens as stated and as found, nats.
    pub(in crate::run::audit) before: f64,
    pub(in crate::run::audit) after: f64,
    /// Of the tokens it was found from.
    pub(in crate::run::audit) kept_mass: Option<f64>,
}

#[derive(Serialize)]
pub(in crate::run::audit) struct OpinionRow {
    pub(in crate::run::audit) opinion: Opinion,
    pub(in crate::run::audit) requests_total: u64,
    /// At most [`Finding::LISTED_MAX`].
    pub(in crate::run::audit) requests: Vec<RequestId>,
}

impl SideRow {
    pub(super) fn told(&self) -> String {
        let how = if self.holds { "found" } else { "stated" };
        format!("{:.3} ({how})", self.contract)
    }
}

impl OpinionRow {
    pub(super) fn new((opinion, mut requests): (Opinion, Vec<RequestId>)) -> Self {
        let requests_total = requests.len() as u64;
        requests.truncate(Finding::LISTED_MAX);
        Self { opinion, requests_total, requests }
    }
}
