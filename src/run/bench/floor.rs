//! The least time that a model's work can take: what its sums take at the rate of a bare product,
//! or what its bytes take at the rate of a bare copy, whichever is more.

use std::fmt;
use std::ops::AddAssign;

use super::machine::Machine;
use crate::engine::{CacheSpec, LayerCache, StepBatch};
use crate::model::{MixerKind, Numerics, Plan, TensorSpec};

/// What a model's forward costs at least, attention's products over its context aside.
pub(super) struct Work {
    /// Multiplications and additions of one token in all layers. Of a mixture of experts, those
    /// that a token visits.
    layers_flop: f64,
    /// What its logits take beside.
    head_flop: f64,
    exponentials: f64,
    /// Of the weights that one token needs, read once an engine step.
    weights_bytes: f64,
    /// Of one request's recurrent state.
    state_bytes: f64,
    /// Of the keys and values of one token.
    kv_bytes: f64,
}

/// Something to do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Load {
    pub tokens: u64,
    /// Tokens of which there are logits.
    pub logits: u64,
    /// What is read and written beside the weights.
    pub bytes: f64,
}

impl AddAssign for Load {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.logits += other.logits;
        self.bytes += other.bytes;
    }
}

impl Work {
    pub(super) fn of(plan: &Plan, num: &Numerics) -> Self {
        let experts = plan.config.feed_forward.as_ref().and_then(|shape| shape.experts);
        let visited = |tensor: &TensorSpec| match experts {
            Some(shape) if tensor.name.contains(".experts.") => {
                tensor.len() * shape.per_token / shape.count
            }
            _ => tensor.len(),
        };
        let layers = plan.units[1..].iter().flat_map(|unit| &unit.tensors).map(visited).sum();
        let layers: usize = layers;
        let head = plan.config.vocab_size * plan.config.hidden_size;
        let mamba = plan.layers.iter().filter(|kind| kind.mixer == MixerKind::Mamba).count();
        let states = plan.config.mamba.as_ref().map_or(0, |shape| shape.d_inner * shape.d_state);
        let (mut state_bytes, mut kv_bytes) = (0, 0);
        for layer in CacheSpec::of_model(&plan.config, num.dtype, num.state_dtype, 1).layers {
            match layer {
                LayerCache::Mamba { conv_elements, conv_dtype, ssm_elements, ssm_dtype } => {
                    state_bytes += conv_elements * conv_dtype.bytes();
                    state_bytes += ssm_elements * ssm_dtype.bytes();
                }
                LayerCache::Attention { kv_heads, head_dim, dtype } => {
                    kv_bytes += 2 * kv_heads * head_dim * dtype.bytes();
                }
            }
        }
        Self {
            layers_flop: 2.0 * layers as f64,
            head_flop: 2.0 * head as f64,
            exponentials: (mamba * states) as f64,
            weights_bytes: (layers + head) as f64 * num.dtype.bytes() as f64,
            state_bytes: state_bytes as f64,
            kv_bytes: kv_bytes as f64,
        }
    }

    /// An engine step. A row stores its state and the keys and values of its tokens, and loads what
    /// was computed before them.
    pub(super) fn of_batch(&self, batch: &StepBatch) -> Load {
        let mut load = Load::default();
        for row in &batch.rows {
            let states = if row.computed_tokens > 0 { 2.0 } else { 1.0 };
            let positions = row.computed_tokens + row.scheduled_tokens;
            load += Load {
                tokens: row.scheduled_tokens.into(),
                logits: row.samples.into(),
                bytes: states * self.state_bytes + f64::from(positions) * self.kv_bytes,
            };
        }
        load
    }

    /// The least seconds that one pass over the model takes.
    pub(super) fn floor_s(&self, load: Load, machine: &Machine) -> f64 {
        let (tokens, logits) = (load.tokens as f64, load.logits as f64);
        let flop = tokens * self.layers_flop + logits * self.head_flop;
        let exps = machine.exps.map_or(0.0, |rate| tokens * self.exponentials / rate);
        let bytes = self.weights_bytes + load.bytes;
        let memory = machine.copy.map_or(0.0, |rate| bytes / rate);
        (flop / machine.flops + exps).max(memory)
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layers, head) = (self.layers_flop / 1e6, self.head_flop / 1e6);
        writeln!(
            f,
            "a token     {layers:.3} MFLOP, {head:.3} for its logits, {:.0} exponentials",
            self.exponentials
        )?;
        let (state, kv) = (2.0 * self.state_bytes / 1e6, self.kv_bytes / 1e3);
        let weights = self.weights_bytes / 1e9;
        writeln!(
            f,
            "a step      {weights:.4} GB of weights; a decoded token {state:.3} MB of state read \
             and written, {kv:.3} KB a token of context"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Dtype;
    use crate::model::Preset;

    /// By hand, from the shape of Jamba-3B: 26 Mamba layers, 2 of attention, 28 dense MLPs.
    #[test]
    fn the_shape_of_jamba_3b_comes_to_what_it_comes_to_by_hand() {
        let plan = Plan::new(Preset::Jamba3bShape.config());
        let work = Work::of(&plan, &plan.numerics(Dtype::Bf16, Dtype::F32));
        let (h, d, v) = (2560.0, 5120.0, 65536.0);
        let mamba = h * 2.0 * d + d * 192.0 + 160.0 * d + d * h;
        let attention = 2.0 * h * h + 2.0 * h * 128.0;
        let matrices = 26.0 * mamba + 2.0 * attention + 28.0 * 3.0 * h * 8192.0;
        let norms_and_biases = work.layers_flop / 2.0 / matrices - 1.0;
        assert!((0.0..0.002).contains(&norms_and_biases), "{norms_and_biases}");
        assert_eq!(work.head_flop, 2.0 * h * v);
        assert_eq!(work.exponentials, 26.0 * 81_920.0);
        assert_eq!(work.state_bytes, 26.0 * (3.0 * d * 2.0 + d * 16.0 * 4.0));
        assert_eq!(work.kv_bytes, 2.0 * 2.0 * 128.0 * 2.0);
        assert_eq!(work.weights_bytes, work.layers_flop + work.head_flop);
    }

    #[test]
    fn a_step_takes_as_long_as_its_sums_or_its_bytes() {
        let work = Work {
            layers_flop: 10.0,
            head_flop: 5.0,
            exponentials: 8.0,
            weights_bytes: 100.0,
            state_bytes: 0.0,
            kv_bytes: 0.0,
        };
        let load = Load { tokens: 3, logits: 2, bytes: 60.0 };
        for (copy, exps, seconds) in [
            (None, None, 20.0),
            (None, Some(4.0), 26.0),
            (Some(16.0), Some(4.0), 26.0),
            (Some(5.0), Some(4.0), 32.0),
        ] {
            let machine = Machine::of_rates(2.0, exps, copy);
            assert_eq!(work.floor_s(load, &machine), seconds, "{copy:?} {exps:?}");
        }
    }
}
