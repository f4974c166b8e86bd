//! Planted faults of the engine and of what is handed over to it: those that are more than a branch
//! beside what they break. Chosen by configuration, always compiled.

use super::{CacheView, EngineError, Layout, StepBatch};
use crate::base::{EngineStep, LayerId};
use crate::config::{Dtype, Fault};
use crate::model::{FeedForwardKind, HfConfig, MixerKind, Plan};
use crate::ops::array::{Array, Device};
use crate::ops::pages::{KeyValueView, Pages, StateView};
use crate::ops::weights::Weights;

/// Refuses a fault that this model or this device has no place for.
pub(super) fn check(faults: &[Fault], plan: &Plan, device: &Device) -> Result<(), EngineError> {
    let has_mixer = |kind| plan.layers.iter().any(|layer| layer.mixer == kind);
    let mamba = (has_mixer(MixerKind::Mamba), "the model has no Mamba layer, and so no state");
    let attention = (has_mixer(MixerKind::Attention), "the model has no attention layer");
    let experts = (layer_with_experts(plan).is_some(), "the model has no layer with experts");
    let tied = (plan.config.tie_word_embeddings, "the model's head is a tensor of its own");
    let host = (device.is_host(), "it reaches pages in the host's memory only");
    for &fault in faults {
        let needs: &[(bool, &'static str)] = match fault {
            Fault::KeepStateOnPreempt => &[mamba],
            // On a GPU rows that share a block are not ordered.
            Fault::PaddingWrites | Fault::DecodeUpdateDiffers | Fault::StateBitFlip => {
                &[mamba, host]
            }
            Fault::KvPageZeroed => &[attention, host],
            Fault::HeadNotRefreshed => &[tied],
            Fault::GateRenormalised | Fault::StaleExpert => &[experts],
            _ => &[],
        };
        if let Some(&(_, missing)) = needs.iter().find(|(is_there, _)| !is_there) {
            return Err(EngineError::FaultWithoutPlace { fault: fault.name(), missing });
        }
    }
    Ok(())
}

/// The first layer with experts: its index.
fn layer_with_experts(plan: &Plan) -> Option<usize> {
    plan.layers.iter().position(|layer| layer.feed_forward == FeedForwardKind::Experts)
}

/// What becomes of weights between the trainer's hand and the engine's.
#[derive(Debug)]
pub(super) struct HandOver {
    faults: Vec<Fault>,
    /// The first weights ever, where a fault holds on to them.
    first: Option<Vec<Weights>>,
}

/// A head that is a copy of the embedding.
pub(super) struct CopiedHead {
    /// The model's plan with the head as a tensor of its own, the root's last.
    pub(super) plan: Plan,
    pub(super) fingerprint: u64,
}

impl HandOver {
    pub(super) fn new(faults: &[Fault]) -> Self {
        Self { faults: faults.to_vec(), first: None }
    }

    fn has(&self, fault: Fault) -> bool {
        self.faults.contains(&fault)
    }

    /// Changes what has just arrived into what will be loaded.
    pub(super) fn receive(&mut self, plan: &Plan, units: &mut Vec<Weights>) {
        if self.has(Fault::EngineWeightUlp) {
            units[0] = units[0].with_ulp(plan.units[0].tensors[0].len());
        }
        let holds_on = [Fault::OldWeightsOnWake, Fault::HeadNotRefreshed, Fault::StaleExpert];
        if !holds_on.iter().any(|&fault| self.has(fault)) {
            return;
        }
        let first = self.first.get_or_insert_with(|| units.clone());
        if self.faults.contains(&Fault::OldWeightsOnWake) {
            units.clone_from(first);
        }
        if self.faults.contains(&Fault::StaleExpert) {
            let layer = layer_with_experts(plan).expect("the configuration was checked");
            let (old, new) = (&first[layer + 1], &mut units[layer + 1]);
            *new = with_last_expert_of(plan, layer, old, new);
        }
    }

    /// Appends the head's copy to the root's tensors, where the engine keeps one.
    pub(super) fn copy_head(&self, plan: &Plan, units: &mut [Weights]) -> Option<CopiedHead> {
        if !self.has(Fault::HeadNotRefreshed) {
            return None;
        }
        let first = &self.first.as_ref().expect("weights have arrived")[0];
        let root = &plan.units[0];
        let embedding = root.tensors[0].len() * first.dtype().bytes() as usize;
        units[0] = units[0].edited(|bytes| bytes.extend(&first.to_bytes()[..embedding]));
        let config = HfConfig { tie_word_embeddings: false, ..plan.config.clone() };
        let fingerprint = root.fingerprints(first)[0];
        Some(CopiedHead { plan: Plan::new(config), fingerprint })
    }
}

/// The new weights of a layer but for its last expert, which is the old one.
fn with_last_expert_of(plan: &Plan, layer: usize, old: &Weights, new: &Weights) -> Weights {
    let spec = &plan.units[layer + 1];
    let shape = plan.config.feed_forward.as_ref().and_then(|shape| shape.experts);
    let last = shape.expect("the layer has experts").count - 1;
    let name = format!(".experts.{last}.");
    let (width, old) = (old.dtype().bytes() as usize, old.to_bytes());
    new.edited(|bytes| {
        let mut start = 0;
        for tensor in &spec.tensors {
            let end = start + tensor.len() * width;
            if tensor.name.contains(&name) {
                bytes[start..end].copy_from_slice(&old[start..end]);
            }
            start = end;
        }
    })
}

/// What happens to one request's pages, once in the engine's life: at the first step from
/// [`Fault::STRIKE_STEP`] on that has decode rows, to the last of these, before it is computed.
#[derive(Debug)]
pub(super) struct Strike {
    flips_bit: bool,
    zeroes_page: bool,
    done: bool,
}

impl Strike {
    pub(super) fn new(faults: &[Fault]) -> Self {
        let has = |fault| faults.contains(&fault);
        let (flips_bit, zeroes_page) = (has(Fault::StateBitFlip), has(Fault::KvPageZeroed));
        Self { flips_bit, zeroes_page, done: !flips_bit && !zeroes_page }
    }

    /// Of an engine that has made so many steps: what was due is done.
    pub(super) fn go_on_after(&mut self, engine_steps: u64) {
        self.done |= engine_steps >= Fault::STRIKE_STEP;
    }

    pub(super) fn before(&mut self, batch: &StepBatch, layout: &Layout, pages: &mut Pages) {
        let due = batch.engine_step >= EngineStep::new(Fault::STRIKE_STEP);
        if self.done || !due || batch.num_decodes == 0 {
            return;
        }
        self.done = true;
        let row = batch.num_decodes - 1;
        let block = |layer: LayerId| batch.blocks(row, layout.layers[layer.index()].group)[0];
        let layers = || (0..).map(LayerId::new).zip(&layout.layers);
        if self.flips_bit {
            let state = layers().find_map(|(layer, place)| Some((layer, place.view.state()?)));
            let (layer, view) = state.expect("the configuration was checked");
            flip_bit(pages, &view, view.ssm_bytes(block(layer), u64::BITS).start);
        }
        if self.zeroes_page {
            let (layer, view) = layers().find_map(key_values).expect("as above");
            for bytes in view.token_bytes(block(layer), 0..view.block_tokens) {
                let zeros = vec![0.0; ((bytes.end - bytes.start) / view.dtype.bytes()) as usize];
                pages.store(view.buffer, bytes.start, view.dtype, &zeros);
            }
        }
    }
}

fn key_values((layer, place): (LayerId, &super::LayerPlace)) -> Option<(LayerId, KeyValueView)> {
    match place.view {
        CacheView::KeyValue(view) => Some((layer, view)),
        CacheView::State(_) => None,
    }
}

/// The lowest bit of the exponent of one element, the same bit in either dtype: its value doubles
/// or halves.
fn flip_bit(pages: &mut Pages, view: &StateView, offset: u64) {
    let mut element = [0.0];
    pages.load(view.buffer, offset, view.ssm_dtype, &mut element);
    element[0] = f32::from_bits(element[0].to_bits() ^ 1 << 23);
    pages.store(view.buffer, offset, view.ssm_dtype, &element);
}

/// Whether [`Fault::LayerUlp`] strikes a row: the first request of each step of the loop. Rows of
/// observers are of no step and are spared.
pub(super) fn is_first_request(batch: &StepBatch, row: usize) -> bool {
    let Some(row) = batch.rows.get(row) else { return false };
    let id = row.request;
    id.step.get() > 0 && id.prompt_id.get() == 0 && id.rollout_idx == 0
}

/// Moves one element of an array to the next value of its dtype, away from zero.
pub(super) fn bump_ulp(x: &mut Array, element: usize, dtype: Dtype) {
    let device = x.device();
    let mut values = x.to_host();
    let ulp = match dtype {
        Dtype::F32 => 1,
        Dtype::Bf16 => 1 << 16,
    };
    values[element] = f32::from_bits(values[element].to_bits() + ulp);
    *x = device.upload(values);
    x.round_to(dtype);
}
