//! What goes into the engine and what comes out of it.

use serde::Serialize;

use crate::base::{
    BlockId, Contract, EngineStep, Generation, LogProb, RequestId, TokenId, WeightVersion,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
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
#[derive(Clone, Copy, Debug, PartialEq)]
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
    pub batch_rows: u32,
}

/// The row that began a life of a request: its first tokens, or those it computed again after a
/// preemption. A prefill row starts from zero here; a decode row reads its state blocks whatever
/// they hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstChunk {
    pub engine_step: EngineStep,
    pub phase: Phase,
    pub scheduled_tokens: u32,
    /// Tokens of the completion that earlier lives had sampled.
    pub sampled_before: u32,
}

/// One state block a request held, as it was when the request took it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateBlock {
    pub block: BlockId,
    /// How many times the block had been handed out, this time included.
    pub generation: Generation,
    /// Whose bytes the block still held; `None` on a virgin block.
    pub previous_owner: Option<RequestId>,
}

/// One finished rollout as the engine knows it: ids and numbers, no text.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    pub id: RequestId,
    pub prompt: Vec<TokenId>,
    pub tokens: Vec<SampledToken>,
    pub finish_reason: FinishReason,
    pub contract: Contract,
    pub weight_version: WeightVersion,
    /// xxh3 over the engine's weights in use, tensor by tensor in name order.
    pub engine_fingerprint: u64,
    /// One a life, in order.
    pub first_chunks: Vec<FirstChunk>,
    /// One a Mamba group, in group order, of the request's last (not preempted) life.
    pub state_blocks: Vec<StateBlock>,
    pub attn_blocks: Vec<BlockId>,
    pub preemptions: u32,
    pub cached_tokens: u32,
}

impl Completion {
    /// The completion's token ids, without the prompt.
    pub fn token_ids(&self) -> impl ExactSizeIterator<Item = TokenId> + '_ {
        self.tokens.iter().map(|sampled| sampled.token)
    }
}
