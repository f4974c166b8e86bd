//! Records for the tests of this room.

use crate::base::{
    BlockId, Contract, EngineIndex, EngineStep, Generation, LogProb, RequestId, TokenId,
    WeightVersion,
};
use crate::engine::{Completion, FinishReason, Life, Phase, SampledToken, StateBlock};
use crate::rollout::Rollout;

/// Rollout `index` of prompt 0 in step 1, with these `decode` and `trainer` legs and one state
/// block, `index + 1`.
pub fn rollout(index: u32, decode: &[f32], trainer: &[f32]) -> Rollout {
    let tokens = decode.iter().zip(0_u32..).map(|(&logp, at)| SampledToken {
        token: TokenId::new(100 + at),
        logp: LogProb::new(logp),
        engine_step: EngineStep::new(u64::from(at) + 1),
        phase: if at == 0 { Phase::Prefill } else { Phase::Decode },
        scheduled_tokens: if at == 0 { 3 } else { 1 },
        computed_tokens: if at == 0 { 0 } else { 2 + at },
        batch_row: 0,
        batch_rows: 1,
        padding_rows: 0,
    });
    let completion = Completion {
        id: RequestId::new(1, 0, index),
        engine: EngineIndex::default(),
        prompt: vec![TokenId::new(1); 3],
        tokens: tokens.collect(),
        finish_reason: FinishReason::Length,
        contract: Contract::PLAIN,
        weight_version: WeightVersion::new(0),
        engine_fingerprint: Some(7),
        lives: vec![Life {
            engine_step: EngineStep::new(1),
            phase: Phase::Prefill,
            scheduled_tokens: 3,
            sampled_before: 0,
            state_blocks: vec![StateBlock {
                block: BlockId::new(index + 1),
                generation: Generation::new(1),
                previous_owner: None,
            }],
            attn_blocks: Vec::new(),
            cached: Vec::new(),
            taken: Vec::new(),
        }],
        preemptions: 0,
        cached_tokens: 0,
    };
    Rollout {
        completion,
        prompt_text: String::new(),
        completion_text: String::new(),
        reward: 0.0,
        advantage: 0.0,
        loss_mask: vec![true; decode.len()],
        prefill: None,
        trainer: Some(trainer.iter().map(|&logp| Some(LogProb::new(logp))).collect()),
        reference: None,
        trainer_fingerprint: Some(7),
    }
}
