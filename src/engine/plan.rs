//! The seam between scheduler and batch: one step's shares of the token budget.

use super::Request;
use crate::base::{EngineStep, RequestId};

/// One step: who computes how many tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepPlan {
    pub engine_step: EngineStep,
    /// In schedule order: the running ones, then the admitted ones.
    pub scheduled: Vec<Scheduled>,
    /// Last running first.
    pub preempted: Vec<RequestId>,
}

/// One request's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduled {
    pub request: RequestId,
    pub admission: Admission,
    /// Before this step.
    pub computed_tokens: u32,
    /// In this step, at least 1.
    pub scheduled_tokens: u32,
    /// Whether these tokens reach the request's last one, so that a token is sampled. A chunk that
    /// does not, samples nothing.
    pub samples: bool,
    /// Its place among the running requests while the plan is in flight.
    pub(super) running_index: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Was running before this step.
    Running,
    New,
    /// Was preempted in an earlier step.
    Resumed,
}

impl StepPlan {
    #[must_use]
    pub fn num_tokens(&self) -> u32 {
        self.scheduled.iter().map(|scheduled| scheduled.scheduled_tokens).sum()
    }

    /// Enters a running request that has just advanced from `computed_tokens`.
    pub(super) fn push(
        &mut self,
        running: &[Request],
        index: usize,
        admission: Admission,
        computed: u32,
    ) {
        let request = &running[index];
        self.scheduled.push(Scheduled {
            request: request.id(),
            admission,
            computed_tokens: computed,
            scheduled_tokens: request.computed_tokens() - computed,
            samples: request.computed_tokens() == request.num_tokens(),
            running_index: index,
        });
    }
}
