//! The `reference` leg: every family's layers in candle's own operations, f32 on the CPU.
//!
//! It shares no kernel with the rest of the crate, and it is written for reading: no cache, no
//! packing, one sequence at a time. Source: transformers' jamba, mamba, llama, qwen2 and qwen3, the
//! paths without kernels.
//!
//! Shapes: T tokens, V vocabulary, H hidden.

mod block;

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::ops::log_softmax;

use self::block::{rms_norm, Block};
use super::TrainerError;
use crate::base::TokenId;
use crate::model::{HfConfig, Plan};

/// Name, as Hugging Face spells it, to shape and values.
pub type Weights = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A model that scores. It holds a copy of its weights in f32.
#[derive(Debug)]
pub struct Reference {
    config: HfConfig,
    weights: BTreeMap<String, Tensor>,
}

/// A loss and, by tensor name, the L2 norm of its gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct LossAndGradNorms {
    /// Mean next-token cross entropy over all sequences' targets, in nats.
    pub loss: f64,
    pub grad_norms: BTreeMap<String, f64>,
}

impl Reference {
    /// # Errors
    /// [`TrainerError::ReferenceWeight`] for a tensor that is missing or has another shape,
    /// [`TrainerError::ReferenceExtraWeight`] for one that has no place.
    pub fn new(plan: &Plan, mut weights: Weights) -> Result<Self, TrainerError> {
        let mut tensors = BTreeMap::new();
        for tensor in plan.units.iter().flat_map(|unit| &unit.tensors) {
            let (name, expected) = (tensor.name.clone(), tensor.shape.clone());
            let refuse = |found: String| TrainerError::ReferenceWeight {
                name: name.clone(),
                expected: expected.clone(),
                found,
            };
            let (shape, values) =
                weights.remove(&name).ok_or_else(|| refuse("no such tensor".into()))?;
            if shape != expected || values.len() != shape.iter().product::<usize>() {
                return Err(refuse(format!("{shape:?} with {} values", values.len())));
            }
            tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?);
        }
        match weights.into_keys().next() {
            Some(name) => Err(TrainerError::ReferenceExtraWeight { name }),
            None => Ok(Self { config: plan.config.clone(), weights: tensors }),
        }
    }

    /// `[T][V]`, before any temperature.
    ///
    /// # Errors
    /// [`TrainerError::OutsideVocabulary`], [`TrainerError::SequenceTooShort`] without tokens.
    pub fn logits(&self, ids: &[TokenId]) -> Result<Vec<Vec<f32>>, TrainerError> {
        let (_, logits) = self.forward(ids)?;
        Ok(logits.to_vec2()?)
    }

    /// `[layers + 1][T][H]`, as transformers reports them: the embedding, then each layer's output;
    /// the last layer's is given after the final norm only.
    ///
    /// # Errors
    /// As [`Self::logits`].
    pub fn hidden_states(&self, ids: &[TokenId]) -> Result<Vec<Vec<Vec<f32>>>, TrainerError> {
        let (hidden, _) = self.forward(ids)?;
        hidden.iter().map(|state| Ok(state.to_vec2()?)).collect()
    }

    /// The log-probability of `ids[t + 1]` after `ids[..=t]`, T - 1 of them, of logits over
    /// `temperature`; 1 gives the model's own.
    ///
    /// # Errors
    /// As [`Self::logits`], and [`TrainerError::SequenceTooShort`] under two tokens.
    pub fn target_logprobs(
        &self,
        ids: &[TokenId],
        temperature: f32,
    ) -> Result<Vec<f32>, TrainerError> {
        assert!(temperature > 0.0, "greedy log-probabilities are those of temperature 1");
        Ok(self.targets(ids, temperature)?.to_vec1()?)
    }

    /// By candle's autograd; the second opinion on a backward.
    ///
    /// # Errors
    /// As [`Self::target_logprobs`].
    pub fn loss_and_grad_norms(
        &self,
        batch: &[Vec<TokenId>],
    ) -> Result<LossAndGradNorms, TrainerError> {
        let variables = self
            .weights
            .iter()
            .map(|(name, tensor)| Ok((name.clone(), Var::from_tensor(tensor)?)))
            .collect::<Result<BTreeMap<_, _>, TrainerError>>()?;
        let weights =
            variables.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
        let tracked = Self { config: self.config.clone(), weights };
        let rows = batch
            .iter()
            .map(|ids| tracked.targets(ids, 1.0))
            .collect::<Result<Vec<_>, TrainerError>>()?;
        let loss = Tensor::cat(&rows, 0)?.mean_all()?.neg()?;
        let gradients = loss.backward()?;
        let grad_norms = variables
            .into_iter()
            .map(|(name, var)| {
                let gradient = gradients.get(&var).expect("every weight takes part in the loss");
                let squares = gradient.to_dtype(DType::F64)?.sqr()?.sum_all()?;
                Ok((name, squares.to_scalar::<f64>()?.sqrt()))
            })
            .collect::<Result<_, TrainerError>>()?;
        Ok(LossAndGradNorms { loss: f64::from(loss.to_scalar::<f32>()?), grad_norms })
    }

    /// `[T - 1]`
    fn targets(&self, ids: &[TokenId], temperature: f32) -> Result<Tensor, TrainerError> {
        let found = ids.len();
        if found < 2 {
            let asked = "a next-token log-probability";
            return Err(TrainerError::SequenceTooShort { asked, needed: 2, found });
        }
        let (_, logits) = self.forward(ids)?;
        let scaled = (logits.narrow(0, 0, found - 1)? / f64::from(temperature))?;
        let next: Vec<u32> = ids[1..].iter().map(|id| id.get()).collect();
        let next = Tensor::from_vec(next, (found - 1, 1), &Device::Cpu)?;
        Ok(log_softmax(&scaled, D::Minus1)?.gather(&next, 1)?.squeeze(1)?)
    }

    /// Hidden states `[layers + 1]` of `[T, H]`, and logits `[T, V]`.
    fn forward(&self, ids: &[TokenId]) -> Result<(Vec<Tensor>, Tensor), TrainerError> {
        if ids.is_empty() {
            let asked = "a forward pass";
            return Err(TrainerError::SequenceTooShort { asked, needed: 1, found: 0 });
        }
        let vocab = self.config.vocab_size;
        if let Some(position) = ids.iter().position(|id| id.index() >= vocab) {
            let id = ids[position].get();
            return Err(TrainerError::OutsideVocabulary { id, position, vocab });
        }
        let ids: Vec<u32> = ids.iter().map(|id| id.get()).collect();
        let ids = Tensor::new(ids, &Device::Cpu)?;
        let names = self.config.names();
        let weight = |name: &str| &self.weights[&format!("{name}.weight")];
        let embedding = weight(names.embedding);
        let mut hidden = vec![embedding.index_select(&ids, 0)?];
        for (layer, kind) in self.config.layers().into_iter().enumerate() {
            let block =
                Block { config: &self.config, weights: &self.weights, prefix: names.layer(layer) };
            hidden.push(block.forward(&hidden[layer], kind.mixer)?);
        }
        let last = hidden.pop().expect("the embedding at least");
        let last = rms_norm(&last, weight(names.final_norm), self.config.rms_norm_eps)?;
        let head = self.weights.get("lm_head.weight").unwrap_or(embedding);
        let logits = last.matmul(&head.t()?)?;
        hidden.push(last);
        Ok((hidden, logits))
    }
}

#[cfg(test)]
mod tests;
