//! What a scoring needs of the machine's memory, said before any of it is taken.
//!
//! Keeping the logits of every position is how long sequences run out of memory
//! (sgl-project/sglang#31958): 65,536 positions of 248,320 entries are 60.6 GiB, of which one
//! number a position is wanted. Here logits exist for a chunk of rows.

use std::fmt;

use anyhow::{ensure, Result};

use super::{BATCH_SEQUENCES, BATCH_TOKENS};
use crate::config::{Config, Leg};
use crate::engine;
use crate::model::{Plan, TensorSpec, UnitSpec};
use crate::ops::array::Device;

/// An activation, and the copy of it that the next operation makes.
const COPIES: u64 = 2;

/// Scores, scaled, masked, and what a softmax makes of them.
const CANDLE_STAGES: u64 = 6;

/// Upper bounds in bytes, beside the program itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::run) struct Bound {
    pub weights: u64,
    /// The activations of the widest layer over one batch.
    pub layer: u64,
    /// The engine's pool of states, keys and values; 0 for the other legs.
    pub cache: u64,
    pub logits: u64,
}

/// The most that is ever scored at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::run) struct Largest {
    /// Of one batch, every sequence taken to be as long as its longest.
    pub tokens: usize,
    pub sequences: usize,
    /// Tokens of the longest sequence of all.
    pub longest: usize,
}

impl Largest {
    /// Of batches whose longest sequence, of all of them, has so many tokens.
    pub(in crate::run) fn with(longest: usize) -> Self {
        let sequences = (BATCH_TOKENS / longest.max(1)).clamp(1, BATCH_SEQUENCES);
        Self { tokens: longest.max(BATCH_TOKENS), sequences, longest }
    }
}

impl Bound {
    pub(in crate::run) fn of(
        plan: &Plan,
        config: &Config,
        leg: Leg,
        largest: Largest,
    ) -> Result<Self> {
        let Largest { tokens, sequences, longest } = largest;
        let num = plan.numerics_of(config);
        let cache = match leg {
            Leg::Prefill | Leg::Decode => {
                let layout = engine::layout(plan, &num, &config.engine)?;
                let blocks = layout.blocks_for(u32::try_from(longest)?) * sequences as u64;
                (1 + blocks) * layout.block_bytes()
            }
            Leg::Trainer | Leg::Reference => 0,
        };
        let layer = match leg {
            // One sequence at a time.
            Leg::Reference => floats_a_token(plan) * longest as u64 + candle_floats(plan, longest),
            _ => floats_a_token(plan) * tokens as u64,
        };
        let logit_rows = match leg {
            // candle's log-softmax takes the sequence whole: logits, scaled, and the result.
            Leg::Reference => 3 * longest as u64,
            // A row more for what a temperature makes of it.
            _ => rayon::current_num_threads() as u64 * (Device::Cpu.logit_rows() as u64 + 1),
        };
        Ok(Self {
            weights: weight_bytes(plan),
            layer: 4 * layer,
            cache,
            logits: logit_bytes(logit_rows, plan.config.vocab_size as u64),
        })
    }

    fn total(&self) -> u64 {
        [self.weights, self.layer, self.cache, self.logits].into_iter().fold(0, u64::saturating_add)
    }

    /// # Errors
    /// A machine that says it has less available. One that does not say is believed.
    pub(in crate::run) fn check(&self, available: Option<u64>) -> Result<()> {
        let needed = self.total();
        ensure!(
            available.is_none_or(|available| needed <= available),
            "scoring needs up to {self}, and {} bytes are available: shorten the longest sequence, \
             or choose another leg or a smaller model",
            available.unwrap_or(0)
        );
        Ok(())
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { weights, layer, cache, logits } = self;
        write!(
            f,
            "{} bytes of memory ({weights} weights, {layer} one layer's work, {cache} cache, \
             {logits} logits)",
            self.total()
        )
    }
}

/// Logits are f32 whatever the model's dtype.
const fn logit_bytes(rows: u64, vocab: u64) -> u64 {
    4 * rows * vocab
}

/// Weights as they were read or rounded, as a leg holds them, and a unit on its way there.
fn weight_bytes(plan: &Plan) -> u64 {
    let all = plan.num_parameters();
    let unit = plan.units.iter().map(|unit| unit.len() as u64).max().unwrap_or(0);
    (4 + 4) * all + (4 + 4) * unit
}

/// Floats that the widest layer makes of one token: the outputs of each of its matrices.
pub(in crate::run) fn floats_a_token(plan: &Plan) -> u64 {
    let outputs = |tensor: &TensorSpec| match tensor.shape.as_slice() {
        [] | [_] => 0,
        [outer @ .., _] => outer.iter().product::<usize>() as u64,
    };
    let of_layer = |unit: &UnitSpec| unit.tensors.iter().map(outputs).sum::<u64>();
    let widest = plan.units[1..].iter().map(of_layer).max().unwrap_or(0);
    COPIES * (widest + plan.config.hidden_size as u64)
}

/// Floats that candle's layers keep of a sequence beside that: each head's scores of every pair of
/// tokens, and every token's scan state, both in several stages at once.
fn candle_floats(plan: &Plan, tokens: usize) -> u64 {
    let (attention, mamba) = (&plan.config.attention, &plan.config.mamba);
    let pairs = attention.as_ref().map_or(0, |shape| shape.heads * tokens);
    let states = mamba.as_ref().map_or(0, |shape| shape.d_inner * shape.d_state);
    CANDLE_STAGES * (pairs.max(states) as u64) * tokens as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use crate::model::Preset;

    fn bound(leg: Leg, longest: usize) -> Bound {
        let text = "name = \"x\"\nmodel.preset = \"tiny-jamba\"\n";
        let config = config::parse(text, "test.toml", &[]).expect("a valid config");
        let plan = Plan::new(Preset::TinyJamba.config());
        let largest = Largest { tokens: longest, sequences: 1, longest };
        Bound::of(&plan, &config, leg, largest).expect("a bound")
    }

    /// sgl-project/sglang#31958: every position at once, and a chunk of them.
    #[test]
    fn k26_logits_of_a_chunk_of_rows() {
        assert_eq!(logit_bytes(65_536, 248_320), 65_095_598_080);
        assert_eq!(logit_bytes(1_024, 248_320), 1_017_118_720);
    }

    #[test]
    fn k26_logits_do_not_grow_with_the_sequence() {
        for leg in [Leg::Trainer, Leg::Prefill, Leg::Decode] {
            let (short, long) = (bound(leg, 1 << 10), bound(leg, 1 << 20));
            let threads = rayon::current_num_threads() as u64;
            assert_eq!(short.logits, threads * 65 * 256 * 4, "{leg:?}");
            assert_eq!(short.logits, long.logits, "{leg:?}");
            assert!((241_964 * 8..241_964 * 12).contains(&short.weights), "{}", short.weights);
            assert_eq!(long.layer, short.layer << 10);
        }
        assert_eq!(bound(Leg::Reference, 1 << 20).logits, (3 * 256 * 4) << 20);
        assert!(bound(Leg::Reference, 1 << 20).layer >= (4 * 6 * 4) << 40, "pairs of tokens");
        assert_eq!(bound(Leg::Trainer, 1 << 20).cache, 0);
        assert!(bound(Leg::Decode, 1 << 20).cache >= (2 * 32 * 4) << 20, "keys and values");
    }

    #[test]
    fn too_little_memory_is_refused_with_both_numbers() {
        let bound = Bound { weights: 1, layer: 20, cache: 300, logits: 4000 };
        bound.check(Some(4321)).expect("it just fits");
        bound.check(None).expect("a machine that does not say");
        assert_eq!(
            bound.check(Some(4320)).expect_err("one byte short").to_string(),
            "scoring needs up to 4321 bytes of memory (1 weights, 20 one layer's work, 300 cache, \
             4000 logits), and 4320 bytes are available: shorten the longest sequence, or choose \
             another leg or a smaller model"
        );
    }
}
