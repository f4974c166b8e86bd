//! What a device's memory leaves for the block pool, by a pass of the fullest batch.

use super::{block_memory, layout, BlockMemory, EngineError, Feed, Layout, Phase, Runner, Scratch};
use crate::base::{Contract, TokenId};
use crate::config::EngineConfig;
use crate::model::{Model, Numerics, Plan};
use crate::ops::array::Device;
use crate::ops::weights::Weights;

/// As [`block_memory`], but where the device's own memory is to be planned with, a model of these
/// weights computes `max_num_batched_tokens` tokens and the fullest moment counts. As in vLLM's
/// `determine_available_memory`, what others held before, such as the trainer, is not the engine's
/// and is not counted: it must fit beside the pool, as must what scoring, training and evaluation
/// take later. `gpu_memory_utilization` leaves them their room.
///
/// # Errors
/// As [`Layout::new`].
pub fn measured_memory(
    device: &Device,
    plan: &Plan,
    num: &Numerics,
    config: &EngineConfig,
    engines: u32,
    units: &[Weights],
) -> Result<BlockMemory, EngineError> {
    let planned = block_memory(plan, num, config, engines);
    if !config.is_measured() {
        return Ok(planned);
    }
    let layout = layout(plan, num, config)?;
    // They lie there already, and the model shares them.
    let units_bytes = plan.num_parameters() * num.dtype.bytes();
    let mut scratch_bytes = 0;
    let used = device.fullest(|| {
        let model = Model::load(plan, num, units);
        let runner = Runner::new(*num, &layout, model, u64::BITS);
        scratch_bytes = fullest_batch(device, &layout, &runner, config);
    });
    Ok(match used {
        None => planned,
        Some(used) => BlockMemory {
            device_memory: used.total,
            used_bytes: (units_bytes + used.added).saturating_sub(scratch_bytes),
            ..planned
        },
    })
}

/// Prefills of as many tokens as one engine step takes, and the logits that are sampled from at
/// once. Returns the bytes of the pages that it went through.
fn fullest_batch(device: &Device, layout: &Layout, runner: &Runner, config: &EngineConfig) -> u64 {
    let (budget, len) = (config.max_num_batched_tokens, config.max_model_len);
    let tokens = vec![TokenId::new(0); budget as usize];
    let sequences: Vec<&[TokenId]> =
        tokens.chunks(len as usize).take(config.max_num_seqs as usize).collect();
    let mut scratch = Scratch::new(device, layout, sequences.len());
    let feed = |(sequence, &tokens)| Feed { sequence, phase: Phase::Prefill, tokens };
    let feeds: Vec<Feed<'_>> = sequences.iter().enumerate().map(feed).collect();
    let x_th = scratch.feed(runner, &feeds, None);
    let rows = (x_th.len() / runner.hidden()).min(device.logit_rows());
    let _ = runner.log_probs(&Contract::PLAIN, &x_th, 0, &tokens[..rows]);
    scratch.page_bytes()
}
