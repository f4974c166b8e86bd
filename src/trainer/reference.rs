//! The `reference` leg: Jamba's dense layers in candle's own operations, f32 on the CPU.
//!
//! It shares no kernel with the rest of the crate, and it is written for reading: no cache, no
//! packing, one sequence at a time. Source: `transformers`, `models/jamba/modular_jamba.py`, the
//! path without kernels.
//!
//! Shapes: T tokens, V vocabulary, H hidden, I intermediate, D inner (expand * H), N state,
//! R dt rank, K convolution taps, A heads, G key/value heads, C channels of a head.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::ops::{log_softmax, silu, softmax};

use super::TrainerError;
use crate::base::TokenId;

pub use super::dims::Dims;

/// Name, as Hugging Face spells it, to shape and values.
pub type Weights = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A model that scores. It holds a copy of its weights in f32.
#[derive(Debug)]
pub struct Reference {
    dims: Dims,
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
    pub fn new(dims: Dims, mut weights: Weights) -> Result<Self, TrainerError> {
        let mut tensors = BTreeMap::new();
        for (name, expected) in dims.tensors() {
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
            None => Ok(Self { dims, weights: tensors }),
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
        let tracked = Self { dims: self.dims.clone(), weights };
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
        let vocab = self.dims.vocab;
        if let Some(position) = ids.iter().position(|id| id.index() >= vocab) {
            let id = ids[position].get();
            return Err(TrainerError::OutsideVocabulary { id, position, vocab });
        }
        let ids: Vec<u32> = ids.iter().map(|id| id.get()).collect();
        let ids = Tensor::new(ids, &Device::Cpu)?;
        let embedding = &self.weights["model.embed_tokens.weight"];
        let mut hidden = vec![embedding.index_select(&ids, 0)?];
        for (layer, &attention) in self.dims.attention_layers.iter().enumerate() {
            let block = Block { model: self, prefix: format!("model.layers.{layer}.") };
            hidden.push(block.forward(&hidden[layer], attention)?);
        }
        let last = hidden.pop().expect("the embedding at least");
        let last = rms_norm(&last, &self.weights["model.final_layernorm.weight"], self.dims.eps)?;
        let head = if self.dims.tied { embedding } else { &self.weights["lm_head.weight"] };
        let logits = last.matmul(&head.t()?)?;
        hidden.push(last);
        Ok((hidden, logits))
    }
}

/// One decoder layer's view of the weights.
struct Block<'a> {
    model: &'a Reference,
    prefix: String,
}

type Candle = candle_core::Result<Tensor>;

impl Block<'_> {
    fn weight(&self, name: &str) -> &Tensor {
        &self.model.weights[&format!("{}{name}", self.prefix)]
    }

    fn norm(&self, x: &Tensor, name: &str) -> Candle {
        rms_norm(x, self.weight(&format!("{name}.weight")), self.model.dims.eps)
    }

    /// x W^T, plus the bias where there is one.
    fn linear(&self, x: &Tensor, name: &str) -> Candle {
        let product = x.matmul(&self.weight(&format!("{name}.weight")).t()?)?;
        match self.model.weights.get(&format!("{}{name}.bias", self.prefix)) {
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }

    /// `[T, H]` to `[T, H]`
    fn forward(&self, x: &Tensor, attention: bool) -> Candle {
        let normed = self.norm(x, "input_layernorm")?;
        let mixed = if attention { self.attention(&normed)? } else { self.mamba(&normed)? };
        let x = (x + mixed)?;
        let normed = self.norm(&x, "pre_ff_layernorm")?;
        let gate = silu(&self.linear(&normed, "feed_forward.gate_proj")?)?;
        let up = self.linear(&normed, "feed_forward.up_proj")?;
        x + self.linear(&(gate * up)?, "feed_forward.down_proj")?
    }

    /// Grouped-query, causal, without positions. [T, H] to [T, H]
    fn attention(&self, x: &Tensor) -> Candle {
        let Dims { heads, kv_heads, hidden, .. } = self.model.dims;
        let (tokens, channels) = (x.dim(0)?, hidden / heads);
        let split = |x: Tensor, heads: usize| x.reshape((tokens, heads, channels))?.transpose(0, 1);
        // Query heads in a row share a key/value head: head a reads a / (heads / kv_heads).
        let share = |x: Tensor| {
            split(x, kv_heads)?
                .unsqueeze(1)?
                .broadcast_as((kv_heads, heads / kv_heads, tokens, channels))?
                .reshape((heads, tokens, channels))
        };
        let q = split(self.linear(x, "self_attn.q_proj")?, heads)?.contiguous()?;
        let k = share(self.linear(x, "self_attn.k_proj")?)?;
        let v = share(self.linear(x, "self_attn.v_proj")?)?;
        let scores = (q.matmul(&k.t()?)? / (channels as f64).sqrt())?;
        let weights = softmax(&scores.broadcast_add(&causal_mask(tokens)?)?, D::Minus1)?;
        let mixed = weights.matmul(&v)?.transpose(0, 1)?.reshape((tokens, hidden))?;
        self.linear(&mixed, "self_attn.o_proj")
    }

    /// `[T, H]` to `[T, H]`
    fn mamba(&self, u: &Tensor) -> Candle {
        let Dims { d_inner, d_state, dt_rank, .. } = self.model.dims;
        let xz = self.linear(u, "mamba.in_proj")?;
        let z = xz.narrow(1, d_inner, d_inner)?;
        let c = silu(&self.convolution(&xz.narrow(1, 0, d_inner)?)?)?;
        let projected = self.linear(&c, "mamba.x_proj")?;
        let part = |start, width, name| self.norm(&projected.narrow(1, start, width)?, name);
        let dt = part(0, dt_rank, "mamba.dt_layernorm")?;
        let b = part(dt_rank, d_state, "mamba.b_layernorm")?;
        let c_out = part(dt_rank + d_state, d_state, "mamba.c_layernorm")?;
        let delta = softplus(&self.linear(&dt, "mamba.dt_proj")?)?;
        let scanned = self.scan(&delta, &b, &c_out, &c)?;
        let y = (scanned + c.broadcast_mul(self.weight("mamba.D"))?)?;
        self.linear(&(y * silu(&z)?)?, "mamba.out_proj")
    }

    /// Causal and depthwise: tap k sees the token K - 1 - k before. [T, D] to [T, D]
    fn convolution(&self, x: &Tensor) -> Candle {
        let taps = self.model.dims.d_conv;
        let (tokens, channels) = x.dims2()?;
        let before = Tensor::zeros((taps - 1, channels), DType::F32, &Device::Cpu)?;
        let padded = Tensor::cat(&[&before, x], 0)?;
        let weight = self.weight("mamba.conv1d.weight").squeeze(1)?;
        let mut sum = Tensor::zeros((tokens, channels), DType::F32, &Device::Cpu)?;
        for tap in 0..taps {
            let shifted = padded.narrow(0, tap, tokens)?;
            sum = (sum + shifted.broadcast_mul(&weight.narrow(1, tap, 1)?.squeeze(1)?)?)?;
        }
        if self.model.dims.conv_bias {
            sum = sum.broadcast_add(self.weight("mamba.conv1d.bias"))?;
        }
        Ok(sum)
    }

    /// h = exp(delta A) h + delta B x, y = h C, a token at a time from h = 0.
    /// delta and x [T, D], b and c [T, N], to [T, D]
    fn scan(&self, delta: &Tensor, b: &Tensor, c: &Tensor, x: &Tensor) -> Candle {
        let a = self.weight("mamba.A_log").exp()?.neg()?;
        let driven = (delta * x)?;
        let mut h = Tensor::zeros(a.shape(), DType::F32, &Device::Cpu)?;
        let mut y = Vec::with_capacity(delta.dim(0)?);
        for t in 0..delta.dim(0)? {
            let column = |x: &Tensor| x.narrow(0, t, 1)?.t();
            let row = |x: &Tensor| x.narrow(0, t, 1);
            let decay = a.broadcast_mul(&column(delta)?)?.exp()?;
            h = ((decay * h)? + column(&driven)?.broadcast_mul(&row(b)?)?)?;
            y.push(h.broadcast_mul(&row(c)?)?.sum(1)?);
        }
        Tensor::stack(&y, 0)
    }
}

/// x / rms(x) * weight over the last dimension.
fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Candle {
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + eps)?.sqrt()?)?.broadcast_mul(weight)
}

/// ln(1 + exp(x)), and x itself above 20. In f64, as candle has no log1p: in f32 the small
/// results, which are the usual ones here, would keep half their digits.
fn softplus(x: &Tensor) -> Candle {
    let wide = x.to_dtype(DType::F64)?;
    // The branch that is not taken must not overflow, or its gradient would be 0 times infinity;
    // the bound lies clear of the threshold, where `minimum` would halve the gradient of a tie.
    let soft = (wide.minimum(40.0)?.exp()? + 1.0)?.log()?;
    wide.gt(20.0)?.where_cond(&wide, &soft)?.to_dtype(DType::F32)
}

/// 0 up to the diagonal, minus infinity above. [T, T]
fn causal_mask(tokens: usize) -> Candle {
    let entry = |(query, key)| if key > query { f32::NEG_INFINITY } else { 0.0 };
    let entries: Vec<f32> =
        (0..tokens).flat_map(|q| (0..tokens).map(move |k| entry((q, k)))).collect();
    Tensor::from_vec(entries, (tokens, tokens), &Device::Cpu)
}

#[cfg(test)]
mod tests;
