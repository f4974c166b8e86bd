//! A small engine for the host-side tests: two Mamba groups, one attention group of 16-token
//! blocks.

use super::{
    BlockPool, CacheSpec, Finished, GenerationRequest, LayerCache, Layout, Limits, Phase,
    SampledToken, Scheduler, StepPlan,
};
use crate::base::{BlockId, LogProb, RequestId, TokenId};
use crate::config::{Dtype, FreeListOrder};

pub const LIMITS: Limits = Limits {
    max_num_batched_tokens: 64,
    max_num_seqs: 8,
    max_model_len: 96,
    enable_chunked_prefill: true,
};

/// Ends a completion that does not ignore it.
pub const EOS: u32 = 2;

pub fn layout() -> Layout {
    let (conv_elements, conv_dtype, ssm_elements) = (3, Dtype::F32, 16);
    let ssm_dtype = Dtype::F32;
    let mamba = LayerCache::Mamba { conv_elements, conv_dtype, ssm_elements, ssm_dtype };
    let attention = LayerCache::Attention { kv_heads: 1, head_dim: 4, dtype: Dtype::F32 };
    let layers = vec![mamba, attention, mamba];
    Layout::new(&CacheSpec { layers, max_model_len: LIMITS.max_model_len }).unwrap()
}

pub fn scheduler(limits: Limits, num_blocks: u32) -> Scheduler {
    Scheduler::new(limits, layout(), BlockPool::new(num_blocks, FreeListOrder::Fifo))
}

pub const fn id(rollout: u32) -> RequestId {
    RequestId::new(1, 0, rollout)
}

/// Rollout `rollout` with a prompt of `prompt` tokens, numbered from 100 · rollout.
pub fn request(rollout: u32, prompt: u32, max_new_tokens: u32) -> GenerationRequest {
    GenerationRequest {
        id: id(rollout),
        prompt: (0..prompt).map(|i| TokenId::new(100 * rollout + i)).collect(),
        max_new_tokens,
        ignore_eos: false,
        eos_token_ids: vec![TokenId::new(EOS)],
    }
}

/// A forward pass that samples `token` wherever the plan samples.
pub fn update(scheduler: &mut Scheduler, plan: &StepPlan, token: u32) -> Vec<Finished> {
    let sampled = plan.scheduled.iter().map(|scheduled| {
        scheduled.samples.then_some(SampledToken {
            token: TokenId::new(token),
            logp: LogProb::new(-1.0),
            engine_step: plan.engine_step,
            phase: Phase::Decode,
            scheduled_tokens: scheduled.scheduled_tokens,
            computed_tokens: scheduled.computed_tokens,
            batch_row: 0,
            batch_rows: 1,
            padding_rows: 0,
        })
    });
    let sampled: Vec<_> = sampled.collect();
    scheduler.update(plan, &sampled).expect("every request holds its blocks")
}

/// One step that samples token 9: what each request was given, as (rollout, computed before,
/// scheduled).
pub fn step(scheduler: &mut Scheduler) -> Vec<(u32, u32, u32)> {
    let plan = scheduler.schedule().expect("a request is alive");
    update(scheduler, &plan, 9);
    shares(&plan)
}

pub fn shares(plan: &StepPlan) -> Vec<(u32, u32, u32)> {
    let share =
        |s: &super::Scheduled| (s.request.rollout_idx, s.computed_tokens, s.scheduled_tokens);
    plan.scheduled.iter().map(share).collect()
}

pub fn numbers(blocks: impl IntoIterator<Item = BlockId>) -> Vec<u32> {
    blocks.into_iter().map(BlockId::get).collect()
}
