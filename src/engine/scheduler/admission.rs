//! Who may come in, and who comes in next.

use super::{Limits, Request, Scheduler};
use crate::base::EngineStep;
use crate::config::Fault;
use crate::engine::{Admission, EngineError, GenerationRequest, StepPlan};

impl Scheduler {
    /// # Errors
    /// A request that could never finish under the limits, or whose id is alive.
    pub(super) fn admissible(&self, asked: &GenerationRequest) -> Result<(), EngineError> {
        let Limits { max_num_batched_tokens: budget, max_model_len, .. } = self.limits;
        let (request, prompt) = (asked.id, asked.prompt.len() as u64);
        if prompt == 0 {
            return Err(EngineError::EmptyPrompt { request });
        }
        if asked.max_new_tokens == 0 {
            return Err(EngineError::NothingToGenerate { request });
        }
        if prompt >= u64::from(max_model_len) {
            return Err(EngineError::PromptTooLong { request, prompt, max_model_len });
        }
        let longest = u64::from(asked.max_new_tokens) + prompt;
        // The last token is sampled and never fed back.
        let tokens = longest.min(u64::from(max_model_len)) as u32 - 1;
        if !self.limits.enable_chunked_prefill && tokens > budget {
            return Err(EngineError::BudgetTooSmall { request, tokens, budget });
        }
        let (needed, usable) = (self.layout.blocks_for(tokens), self.pool.num_usable() as u64);
        if needed > usable {
            return Err(EngineError::TooFewBlocks { request, tokens, needed, usable });
        }
        if self.alive.contains(&request) {
            return Err(EngineError::DuplicateRequest { request });
        }
        Ok(())
    }

    /// Admits from the head of the queue; the first one that does not fit holds back all behind it.
    pub(super) fn schedule_waiting(&mut self, plan: &mut StepPlan, mut budget: u32) {
        while budget > 0 && self.running.len() < self.limits.max_num_seqs as usize {
            let Some(mut request) = self.waiting.pop_front() else { break };
            let admitted = self.admit(&mut request, budget);
            let Some(computed_tokens) = admitted else {
                self.waiting.push_front(request);
                if self.running.is_empty() && self.give_up_kept_states() {
                    continue;
                }
                break;
            };
            budget -= request.computed_tokens() - computed_tokens;
            let is_new = request.preemptions() == 0;
            let admission = if is_new { Admission::New } else { Admission::Resumed };
            self.running.push(request);
            let index = self.running.len() - 1;
            self.remember(index, computed_tokens);
            plan.push(&self.running, index, admission, computed_tokens);
        }
    }

    /// Begins a life of a waiting request if there is room for it; the tokens that it need not
    /// compute.
    fn admit(&mut self, request: &mut Request, budget: u32) -> Option<u32> {
        let hit = self.look_up(request);
        let needed = request.num_tokens() - hit.tokens;
        let is_cut = needed > budget && !self.limits.enable_chunked_prefill;
        if hit.is_pending || is_cut {
            return None;
        }
        let tokens = needed.min(budget).min(self.layout.row_tokens_max(hit.tokens));
        let pins = !self.faults.contains(&Fault::LookupWithoutPin);
        let now = EngineStep::new(self.engine_steps);
        if !request.admit(&hit, tokens, &self.layout, (&mut self.pool, pins), now) {
            return None;
        }
        if !pins && hit.tokens > 0 {
            self.unpinned.push((request.id(), hit.ids().collect()));
        }
        Some(hit.tokens)
    }
}
