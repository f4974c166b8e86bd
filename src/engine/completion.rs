//! What goes into the engine and what comes out of it.

use serde::{Deserialize, Serialize};

use crate::base::{
    BlockId, Contract, EngineIndex, EngineStep, Generation, LogProb, RequestId, TokenId,
    WeightVersion,
};

/// One completion asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationRequest {
    pub id: RequestId,
    pub prompt: Vec<TokenId>,
    pub max_new_tokens: u32,
    pub ignore_eos: bool,
    /// Tokens that end the completion (and belong to it).
    pub eos_token_ids: Vec<TokenId>,
}

/// Through which kernels the row ran that produced a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    Prefill,
    Decode,
}

impl Phase {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// An end-of-sequence token.
    Stop,
    /// `max_new_tokens` or `max_model_len`.
    Length,
}

impl FinishReason {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// One sampled token and the batch row that produced it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    pub token: TokenId,
    /// Under the completion's contract.
    pub logp: LogProb,
    pub engine_step: EngineStep,
    pub phase: Phase,
    /// Tokens of this request in that engine step.
    pub scheduled_tokens: u32,
    /// Tokens of this request computed before that engine step.
    pub computed_tokens: u32,
    pub batch_row: u32,
    /// Of requests.
    pub batch_rows: u32,
    /// Idle rows with which that engine step's batch was filled up to a captured size.
    pub padding_rows: u32,
}

impl SampledToken {
    /// Of an engine that tells nothing but the token and its log-probability.
    #[must_use]
    pub fn alone(token: TokenId, logp: LogProb) -> Self {
        Self {
            token,
            logp,
            engine_step: EngineStep::new(0),
            phase: Phase::Decode,
            scheduled_tokens: 0,
            computed_tokens: 0,
            batch_row: 0,
            batch_rows: 0,
            padding_rows: 0,
        }
    }
}

/// What a request went through from taking its blocks to giving them back: once, and once more
/// after every preemption, when it computes everything again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// In which its first row ran.
    pub engine_step: EngineStep,
    /// Of its first row. A prefill row starts from zero, or from the state of a cached prefix; a
    /// decode row reads its state blocks whatever they hold.
    pub phase: Phase,
    /// Tokens of its first row.
    pub scheduled_tokens: u32,
    /// Tokens of the completion that earlier lives had sampled.
    pub sampled_before: u32,
    /// One a Mamba group, in group order; with a prefix cache those that its first row stored to.
    pub state_blocks: Vec<StateBlock>,
    /// Group after group, each in the order of the tokens it holds; those found as cached among
    /// them.
    pub attn_blocks: Vec<BlockId>,
    /// The blocks it began with because the prefix cache had them: group after group, each in the
    /// order of their tokens; of a Mamba group the last one alone.
    pub cached: Vec<CachedBlock>,
    /// Every block that it took for itself, in order.
    pub taken: Vec<TakenBlock>,
}

impl Life {
    /// Tokens that it did not have to compute.
    #[must_use]
    pub fn cached_tokens(&self) -> u32 {
        self.cached.iter().map(|cached| cached.tokens).max().unwrap_or(0)
    }
}

/// A full block of the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedBlock {
    pub block: BlockId,
    /// Whose tokens filled it.
    pub filled_by: RequestId,
    /// Of the weights that filled it.
    pub weight_version: WeightVersion,
    /// Of the prefix, from the first one to the end of this block.
    pub tokens: u32,
}

/// A block that a request took from the free list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakenBlock {
    pub block: BlockId,
    /// From which on it was the request's.
    pub engine_step: EngineStep,
}

/// One state block a request held, as it was when the request took it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateBlock {
    pub block: BlockId,
    /// How many times the block had been handed out, this time included.
    pub generation: Generation,
    /// Whose bytes the block still held; `None` on a virgin block.
    pub previous_owner: Option<RequestId>,
}

/// One finished rollout as the engine knows it: ids and numbers, no text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    pub id: RequestId,
    /// That sampled it, and to which all block ids and engine steps below belong.
    #[serde(default)]
    pub engine: EngineIndex,
    pub prompt: Vec<TokenId>,
    pub tokens: Vec<SampledToken>,
    pub finish_reason: FinishReason,
    pub contract: Contract,
    pub weight_version: WeightVersion,
    /// Over the engine's weights in use: `model::combine_fingerprints` of its tensors; `None` where
    /// the engine does not say.
    pub engine_fingerprint: Option<u64>,
    /// In order; the last one was not preempted. Empty where the engine keeps no such record.
    pub lives: Vec<Life>,
    pub preemptions: u32,
    /// Tokens of the last life that the prefix cache spared it.
    pub cached_tokens: u32,
}

impl Completion {
    /// The completion's token ids, without the prompt.
    pub fn token_ids(&self) -> impl ExactSizeIterator<Item = TokenId> + '_ {
        self.tokens.iter().map(|sampled| sampled.token)
    }

    /// Of the last life.
    #[must_use]
    pub fn state_blocks(&self) -> &[StateBlock] {
        self.lives.last().map_or(&[], |life| &life.state_blocks)
    }

    /// Of the last life.
    #[must_use]
    pub fn cached_blocks(&self) -> &[CachedBlock] {
        self.lives.last().map_or(&[], |life| &life.cached)
    }

    /// Of the last life.
    #[must_use]
    pub fn attn_blocks(&self) -> &[BlockId] {
        self.lives.last().map_or(&[], |life| &life.attn_blocks)
    }
}
