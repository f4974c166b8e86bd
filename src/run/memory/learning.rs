//! What scoring and updates work on, of the ranks that share a device.

use super::{product, Part, When, Widths};
use crate::config::{Config, Device, TaskConfig, Update};
use crate::model::Plan;
use crate::ops::array::{CPU_LOGIT_ROWS, GPU_LOGIT_ROWS};
use crate::ops::shards::shard_len;
use crate::run::score::floats_a_token;

/// Sizes of a step's work.
pub(super) struct Learning {
    trains: bool,
    on_cpu: bool,
    widths: Widths,
    /// In all, and on this device.
    ranks: u64,
    here: u64,
    /// Chunks at once, of all ranks here.
    chunks: u64,
    /// Of one chunk.
    chunk_tokens: u64,
    /// Scored together, here.
    step_tokens: u64,
    /// Learned from together, here.
    update_tokens: u64,
}

impl Learning {
    pub(super) fn of(plan: &Plan, config: &Config, here: u64) -> Self {
        let (rollout, trainer) = (&config.rollout, &config.trainer);
        let longest = u64::from(config.engine.max_model_len);
        let sequence = match &config.task {
            TaskConfig::Arithmetic { prompt_tokens: Some(prompt), .. } => {
                longest.min(u64::from(*prompt) + u64::from(rollout.max_new_tokens))
            }
            _ => longest,
        };
        let sequences =
            product(&[rollout.prompts_per_step.into(), rollout.rollouts_per_prompt.into()]);
        let of_update = sequences.div_ceil(u64::from(trainer.updates_per_step));
        let warm = if trainer.warm_start.steps > 0 { trainer.warm_start.batch } else { 0 };
        let ranks = u64::from(trainer.ranks);
        // Dealt evenly; of all ranks, all of them.
        let dealt = |sequences: u64| sequences.min(sequences.div_ceil(ranks) * here);
        let step_tokens = product(&[dealt(sequences), sequence]);
        let chunk_tokens = u64::from(trainer.max_tokens_per_chunk).max(sequence);
        let on_cpu = config.engine.device == Device::Cpu;
        let at_once = if on_cpu { rayon::current_num_threads() as u64 } else { here };
        Self {
            trains: trainer.update == Update::Adamw,
            on_cpu,
            widths: Widths::of(plan, config),
            ranks,
            here,
            chunks: at_once.min(step_tokens.div_ceil(chunk_tokens).max(here)),
            chunk_tokens: chunk_tokens.min(step_tokens),
            step_tokens,
            update_tokens: product(&[dealt(of_update.max(warm.into())), sequence]),
        }
    }

    pub(super) fn parts(&self, plan: &Plan) -> Vec<Part> {
        let Self { trains, on_cpu, here, chunks, chunk_tokens, step_tokens, .. } = *self;
        let Widths { compute, residual } = self.widths;
        let (h, v) = (plan.config.hidden_size as u64, plan.config.vocab_size as u64);
        let mut parts = Vec::new();
        let mut add =
            |what, bytes, grows| parts.push(Part { what, when: When::Learning, bytes, grows });
        let units = || plan.units.iter().map(|unit| unit.len() as u64);
        let root = plan.units[0].len() as u64;
        let largest = units().skip(1).max().unwrap_or(0);
        add("a layer and the root", compute * self.gathered(root, largest), false);
        // Each row has beside it what the layer adds to it; in an update, its f32 gradient.
        let scored = product(&[residual + compute, step_tokens]);
        let updated = product(&[residual + 4, self.update_tokens]);
        let rows = if trains { scored.max(updated) } else { scored };
        add("rows between layers", product(&[h, rows]), true);
        let width = compute + if trains { 4 } else { 0 };
        let of_layer = product(&[floats_a_token(plan), chunk_tokens, chunks]);
        add("a layer's activations", product(&[width, of_layer]), true);
        let logit_rows = if on_cpu { CPU_LOGIT_ROWS } else { GPU_LOGIT_ROWS } as u64;
        let stages = if trains { 2 } else { 1 };
        add("logits", product(&[4, stages, v, logit_rows, chunks]), true);
        if trains {
            let layers = plan.layers.len() as u64;
            let kept = product(&[residual, h, layers, self.update_tokens]);
            add("layers' inputs, kept", kept, true);
            let shard = |len: u64| shard_len(len as usize, self.ranks as usize) as u64;
            let shards = units().map(shard).sum::<u64>();
            // What several ranks sum is there whole before each has its shard.
            let whole = if self.ranks > 1 { root + largest } else { 0 };
            add("gradient", 4 * here * (shards + whole), false);
            let waves = chunks.min(8 * here);
            add("chunks' gradients", product(&[4, root.max(largest), waves]), false);
        }
        parts
    }

    /// Elements of gathered units: a layer's and the root's, one of each a rank.
    fn gathered(&self, root: u64, largest: u64) -> u64 {
        // A unit that changes, or that lies in shards, is copied; on a CPU it is packed, for a
        // backward both ways.
        let copies = u64::from(self.trains || self.ranks > 1);
        let packed = u64::from(self.on_cpu) * if self.trains { 2 } else { 1 };
        // While it is joined, the shards of it are there too; to another GPU it is on its way while
        // the one before is in use.
        let joined = if self.ranks > 1 { root.max(largest).div_ceil(self.ranks) } else { 0 };
        let ahead = if self.ranks > self.here { largest } else { 0 };
        self.here * ((copies + packed) * (root + largest) + joined + ahead)
    }
}
