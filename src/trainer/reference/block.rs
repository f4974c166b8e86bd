//! One decoder layer of the reference, for every family.
//!
//! Shapes: T tokens, H hidden, I intermediate, E experts, D inner (expand * H), N state, R dt rank,
//! K convolution taps, A heads, G key/value heads, C channels of a head.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, D};
use candle_nn::ops::{silu, softmax};

use crate::model::{HfConfig, MixerKind, RopeShape};

/// One decoder layer's view of the weights.
pub(super) struct Block<'a> {
    pub config: &'a HfConfig,
    /// Of the whole model.
    pub weights: &'a BTreeMap<String, Tensor>,
    pub prefix: String,
}

type Candle = candle_core::Result<Tensor>;

impl Block<'_> {
    /// `[T, H]` to `[T, H]`
    pub(super) fn forward(&self, x: &Tensor, mixer: MixerKind) -> Candle {
        let names = self.config.names();
        let normed = self.norm(x, names.input_norm)?;
        let mixed = match mixer {
            MixerKind::Attention => self.attention(&normed, names.attention)?,
            MixerKind::Mamba => self.mamba(&normed, names.mamba)?,
        };
        let x = (x + mixed)?;
        if self.find(names.feed_forward_norm, "weight").is_none() {
            return Ok(x);
        }
        let normed = self.norm(&x, names.feed_forward_norm)?;
        let router = format!("{}.router", names.feed_forward);
        let out = match self.find(&router, "weight") {
            None => self.mlp(&normed, names.feed_forward)?,
            Some(_) => self.experts(&normed, &router, names.feed_forward)?,
        };
        x + out
    }

    fn find(&self, name: &str, what: &str) -> Option<&Tensor> {
        self.weights.get(&format!("{}{name}.{what}", self.prefix))
    }

    fn weight(&self, name: &str) -> &Tensor {
        &self.weights[&format!("{}{name}", self.prefix)]
    }

    fn norm(&self, x: &Tensor, name: &str) -> Candle {
        rms_norm(x, self.weight(&format!("{name}.weight")), self.config.rms_norm_eps)
    }

    /// The norm, or x itself where the layer has no such norm.
    fn maybe_norm(&self, x: Tensor, name: &str) -> Candle {
        self.find(name, "weight").map_or(Ok(x.clone()), |_| self.norm(&x, name))
    }

    /// x W^T, plus the bias where there is one.
    fn linear(&self, x: &Tensor, name: &str) -> Candle {
        let product = x.matmul(&self.weight(&format!("{name}.weight")).t()?)?;
        self.find(name, "bias").map_or(Ok(product.clone()), |bias| product.broadcast_add(bias))
    }

    /// `[T, H]` to `[T, H]`
    fn mlp(&self, x: &Tensor, name: &str) -> Candle {
        let gate = silu(&self.linear(x, &format!("{name}.gate_proj"))?)?;
        let up = self.linear(x, &format!("{name}.up_proj"))?;
        self.linear(&(gate * up)?, &format!("{name}.down_proj"))
    }

    /// Every expert on every token, times the router's probability where the expert is among the
    /// token's largest, and times 0 elsewhere. `[T, H]` to `[T, H]`
    fn experts(&self, x: &Tensor, router: &str, name: &str) -> Candle {
        let shape = self.config.feed_forward.as_ref().and_then(|shape| shape.experts);
        let per_token = shape.expect("a router has a shape").per_token;
        let probabilities = softmax(&self.linear(x, router)?, D::Minus1)?;
        let chosen = (&probabilities * largest(&probabilities, per_token)?)?;
        let mut sum = x.zeros_like()?;
        for expert in 0..chosen.dim(1)? {
            let out = self.mlp(x, &format!("{name}.experts.{expert}"))?;
            sum = (sum + out.broadcast_mul(&chosen.narrow(1, expert, 1)?)?)?;
        }
        Ok(sum)
    }

    /// Grouped-query and causal. `[T, H]` to `[T, H]`
    fn attention(&self, x: &Tensor, name: &str) -> Candle {
        let shape = self.config.attention.as_ref().expect("an attention layer has a shape");
        let (heads, kv_heads, channels) = (shape.heads, shape.kv_heads, shape.head_dim);
        let tokens = x.dim(0)?;
        let at = |part: &str| format!("{name}.{part}");
        // [heads, T, C], normed and turned where the family does so.
        let project = |part: &str, heads: usize| {
            let rows = self.linear(x, &at(&format!("{part}_proj")))?;
            let rows = rows.reshape((tokens, heads, channels))?.transpose(0, 1)?.contiguous()?;
            self.maybe_norm(rows, &at(&format!("{part}_norm")))
        };
        let turn = |x: Tensor| shape.rope.as_ref().map_or(Ok(x.clone()), |rope| turned(&x, rope));
        // Query heads in a row share a key/value head: head a reads a / (heads / kv_heads).
        let share = |x: Tensor| {
            x.unsqueeze(1)?
                .broadcast_as((kv_heads, heads / kv_heads, tokens, channels))?
                .reshape((heads, tokens, channels))
        };
        let q = turn(project("q", heads)?)?;
        let k = share(turn(project("k", kv_heads)?)?)?;
        let v = share(project("v", kv_heads)?)?;
        let scores = (q.matmul(&k.t()?)? / (channels as f64).sqrt())?;
        let weights = softmax(&scores.broadcast_add(&causal_mask(tokens)?)?, D::Minus1)?;
        let mixed = weights.matmul(&v)?.transpose(0, 1)?.reshape((tokens, heads * channels))?;
        self.linear(&mixed, &at("o_proj"))
    }

    /// `[T, H]` to `[T, H]`
    fn mamba(&self, u: &Tensor, name: &str) -> Candle {
        let shape = self.config.mamba.as_ref().expect("a Mamba layer has a shape");
        let (d_inner, d_state, dt_rank) = (shape.d_inner, shape.d_state, shape.dt_rank);
        let at = |part: &str| format!("{name}.{part}");
        let xz = self.linear(u, &at("in_proj"))?;
        let z = xz.narrow(1, d_inner, d_inner)?;
        let c = silu(&self.convolution(&xz.narrow(1, 0, d_inner)?, &at("conv1d"))?)?;
        let projected = self.linear(&c, &at("x_proj"))?;
        let part =
            |start, width, norm| self.maybe_norm(projected.narrow(1, start, width)?, &at(norm));
        let dt = part(0, dt_rank, "dt_layernorm")?;
        let b = part(dt_rank, d_state, "b_layernorm")?;
        let c_out = part(dt_rank + d_state, d_state, "c_layernorm")?;
        let delta = softplus(&self.linear(&dt, &at("dt_proj"))?)?;
        let scanned = scan(self.weight(&at("A_log")), &delta, &b, &c_out, &c)?;
        let y = (scanned + c.broadcast_mul(self.weight(&at("D")))?)?;
        self.linear(&(y * silu(&z)?)?, &at("out_proj"))
    }

    /// Causal and depthwise: tap k sees the token K - 1 - k before. [T, D] to [T, D]
    fn convolution(&self, x: &Tensor, name: &str) -> Candle {
        let weight = self.weight(&format!("{name}.weight")).squeeze(1)?;
        let taps = weight.dim(1)?;
        let (tokens, channels) = x.dims2()?;
        let before = Tensor::zeros((taps - 1, channels), DType::F32, &Device::Cpu)?;
        let padded = Tensor::cat(&[&before, x], 0)?;
        let mut sum = Tensor::zeros((tokens, channels), DType::F32, &Device::Cpu)?;
        for tap in 0..taps {
            let shifted = padded.narrow(0, tap, tokens)?;
            sum = (sum + shifted.broadcast_mul(&weight.narrow(1, tap, 1)?.squeeze(1)?)?)?;
        }
        self.find(name, "bias").map_or(Ok(sum.clone()), |bias| sum.broadcast_add(bias))
    }
}

/// h = exp(delta A) h + delta B x, y = h C, a token at a time from h = 0.
/// delta and x [T, D], b and c [T, N], to [T, D]
fn scan(a_log: &Tensor, delta: &Tensor, b: &Tensor, c: &Tensor, x: &Tensor) -> Candle {
    let a = a_log.exp()?.neg()?;
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

/// 1 at the `count` largest of each row, 0 elsewhere; of equals the first. [T, E]
fn largest(probabilities: &Tensor, count: usize) -> Candle {
    let mask = |row: Vec<f32>| {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        let mut mask = vec![0.0_f32; row.len()];
        order[..count].iter().for_each(|&expert| mask[expert] = 1.0);
        mask
    };
    let rows: Vec<Vec<f32>> = probabilities.to_vec2()?.into_iter().map(mask).collect();
    Tensor::new(rows, &Device::Cpu)
}

/// Each half of a head's channels turned against the other. `[A, T, C]`
fn turned(x: &Tensor, rope: &RopeShape) -> Candle {
    let (_, tokens, channels) = x.dims3()?;
    let half = channels / 2;
    let frequency = |i: usize| {
        let plain = rope.theta.powf(-2.0 * i as f64 / channels as f64);
        let Some(stretch) = rope.llama3 else { return plain };
        // How often the original context holds the wavelength, from where all is kept (1) to where
        // all is stretched (0).
        let turns = stretch.original_context * plain / std::f64::consts::TAU;
        let (low, high) = (stretch.low_freq_factor, stretch.high_freq_factor);
        let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        plain * (kept + (1.0 - kept) / stretch.factor)
    };
    let angles = (0..tokens).flat_map(|t| (0..half).map(move |i| t as f64 * frequency(i)));
    let angles = Tensor::from_iter(angles, &Device::Cpu)?.reshape((tokens, half))?;
    let (cos, sin) = (angles.cos()?.to_dtype(DType::F32)?, angles.sin()?.to_dtype(DType::F32)?);
    let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    Tensor::cat(&[first, second], 2)
}

/// x / rms(x) * weight over the last dimension.
pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Candle {
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + f64::from(eps))?.sqrt()?)?.broadcast_mul(weight)
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
mod tests {
    use candle_core::Var;

    use super::*;

    #[test]
    fn softplus_is_right_on_both_sides_of_its_threshold() {
        let xs = [-100.0_f32, -17.0, -5.0, -1e-3, 0.0, 3.0, 20.0, 20.5, 100.0];
        let x = Var::new(&xs[..], &Device::Cpu).expect("a vector");
        let y = softplus(&x).expect("a softplus");
        let gradients = y.sum_all().and_then(|sum| sum.backward()).expect("a backward");
        let slopes: Vec<f32> = gradients.get(&x).expect("a gradient").to_vec1().expect("a vector");
        for ((x, y), slope) in xs.iter().zip(y.to_vec1::<f32>().expect("a vector")).zip(slopes) {
            let wide = f64::from(*x);
            let wanted = if wide > 20.0 { wide } else { wide.exp().ln_1p() };
            let wanted_slope = if wide > 20.0 { 1.0 } else { 1.0 / (1.0 + (-wide).exp()) };
            // exp(-100) is lost beside 1 in f64 too: 1e-16 is what the sum can carry.
            assert!((f64::from(y) - wanted).abs() <= 1e-7 * wanted + 2e-16, "{x}: {y}");
            assert!((f64::from(slope) - wanted_slope).abs() <= 1e-7 * wanted_slope + 2e-16, "{x}");
        }
    }
}
