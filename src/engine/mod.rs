//! The embedded engine: a faithful small vLLM V1.

mod completion;

pub use completion::{
    Completion, FinishReason, GenerationRequest, Phase, SampledToken, StateBlock,
};
