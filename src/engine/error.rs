//! What the engine refuses: every value that was asked for, what was found, what to do.

use crate::base::{BlockId, EngineIndex, LayerId, RequestId, WeightVersion};

/// Errors of layouts, requests and restored pools.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EngineError {
    #[error(
        "the model has no layer with a cache: an engine needs at least one Mamba or attention layer"
    )]
    NoLayers,
    #[error(
        "layers {first} and {other} are of one kind but differ in cache size: the layers of a \
         kind share one page size"
    )]
    UnequalPages { first: LayerId, other: LayerId },
    #[error(
        "the scan's state starts at byte {ssm_offset} of a page of {page_bytes} bytes, but it \
         must start at a whole element of {element_bytes} bytes and the page must be whole 4-byte \
         words: set model.dtype and engine.mamba_ssm_cache_dtype to \"f32\""
    )]
    StateNotAligned { ssm_offset: u64, page_bytes: u64, element_bytes: u64 },
    #[error(
        "engine.num_gpu_blocks_override is {found}, but one request of engine.max_model_len = \
         {max_model_len} tokens needs {needed} blocks, the null block included: raise the \
         override to at least {needed} or lower max_model_len"
    )]
    OverrideTooSmall { found: u32, needed: u64, max_model_len: u32 },
    #[error(
        "engine.device_memory = {device_memory} bytes at gpu_memory_utilization = {utilization} \
         leaves {}{found} blocks after {used_bytes} bytes of weights, but one request of \
         engine.max_model_len = {max_model_len} tokens needs {needed}, the null block included: \
         raise device_memory to at least {device_memory_needed}, raise gpu_memory_utilization, or \
         lower max_model_len",
        of_each(*engines)
    )]
    MemoryTooSmall {
        device_memory: u64,
        utilization: f64,
        engines: u32,
        used_bytes: u64,
        found: u64,
        needed: u64,
        max_model_len: u32,
        device_memory_needed: u64,
    },
    #[error(
        "the pool of {num_blocks} blocks takes {bytes} bytes, which this machine does not give: \
         lower engine.num_gpu_blocks_override, engine.device_memory or \
         engine.gpu_memory_utilization"
    )]
    PoolTooLarge { num_blocks: u32, bytes: u64 },
    #[error(
        "engine.replicas = {engines} is as many threads, and the machine starts none for engine \
         {engine}: {reason}; lower engine.replicas, or allow more processes and memory (ulimit \
         -u and -v, a container's pids limit)"
    )]
    NoThread { engine: EngineIndex, engines: usize, reason: String },
    #[error("engine.faults has \"{fault}\", which has no place here: {missing}; leave it out")]
    FaultWithoutPlace { fault: &'static str, missing: &'static str },
    #[error(
        "weights of version {found} were handed over to an engine that has version {has}: hand \
         over newer ones, each version once"
    )]
    WeightsNotNewer { found: WeightVersion, has: WeightVersion },
    #[error("request {request} has an empty prompt: give it at least one token")]
    EmptyPrompt { request: RequestId },
    #[error("request {request} asks for 0 new tokens: raise rollout.max_new_tokens to at least 1")]
    NothingToGenerate { request: RequestId },
    #[error(
        "request {request} has a prompt of {prompt} tokens, but engine.max_model_len = \
         {max_model_len} leaves room for {} and one new token: shorten the prompt or raise \
         max_model_len to at least {}",
        max_model_len - 1, prompt + 1
    )]
    PromptTooLong { request: RequestId, prompt: u64, max_model_len: u32 },
    #[error(
        "request {request} may have to compute {tokens} tokens at once, but \
         engine.max_num_batched_tokens is {budget} and chunked prefill is off: raise the budget \
         to at least {tokens} or set enable_chunked_prefill = true"
    )]
    BudgetTooSmall { request: RequestId, tokens: u32, budget: u32 },
    #[error(
        "request {request} of up to {tokens} computed tokens needs {needed} blocks, but the pool \
         has {usable}: raise engine.num_gpu_blocks_override to at least {}, or \
         engine.device_memory, or shorten the request",
        needed + 1
    )]
    TooFewBlocks { request: RequestId, tokens: u32, needed: u64, usable: u64 },
    #[error("request {request} is already in the engine: ids are unique while a request is alive")]
    DuplicateRequest { request: RequestId },
    #[error(
        "the saved pool has {found} blocks and the engine {expected}: resume with the \
         configuration that saved it"
    )]
    PoolSize { found: u64, expected: u64 },
    #[error("block {block} is in the free list of a pool that has blocks 1 to {last}")]
    BlockUnknown { block: BlockId, last: u32 },
    #[error("block {block} is in the free list twice")]
    BlockFreeTwice { block: BlockId },
    #[error("block {block} is in the free list while request {owner} owns it")]
    BlockFreeAndOwned { block: BlockId, owner: RequestId },
    #[error(
        "request {holder} frees block {block}, which is free already: {}; a block that is freed \
         twice would soon have two owners",
        last_of(.last)
    )]
    BlockFreedTwice { block: BlockId, holder: RequestId, last: Option<RequestId> },
    #[error(
        "request {holder} frees block {block}, which {owner} owns: only its holders may free a \
         block, or it would soon have two owners"
    )]
    BlockOfAnother { block: BlockId, holder: RequestId, owner: RequestId },
    #[error("block {block} is lost: nobody owns it and it is not in the free list")]
    BlockLost { block: BlockId },
}

fn last_of(last: &Option<RequestId>) -> String {
    match last {
        Some(request) => format!("{request} freed it last"),
        None => "nobody has ever held it".to_owned(),
    }
}

fn of_each(engines: u32) -> String {
    match engines {
        1 => String::new(),
        _ => format!("each of {engines} engines "),
    }
}
