//! Every family in candle's own tensor operations, f64, over documents packed into one chunk.
//!
//! Written apart from the crate's loops on purpose: no recurrence, no state, no spans. `sees[t, s]`
//! is 1 where row t may look at row s (the same document, not later); convolution, scan and
//! attention are masked sums over all pairs of rows. A state that leaks from one document into the
//! next cannot be wrong in both.
//!
//! Shape letters: T and S rows, H hidden, D channels, K taps, N states, R rank of dt, Q and G query
//! and key/value heads, E head width, V vocabulary.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::ops::{log_softmax, softmax};
use gapscope::base::TokenId;
use gapscope::model::{FeedForwardKind, HfConfig, MixerKind, Plan, RopeShape};
use gapscope::ops::attention::Heads;

pub type Candle = candle_core::Result<Tensor>;

/// f32 numbers as an f64 tensor; nothing is lost.
pub fn tensor(values: &[f32], shape: &[usize]) -> Tensor {
    let wide: Vec<f64> = values.iter().map(|&x| f64::from(x)).collect();
    Tensor::from_vec(wide, shape, &Device::Cpu).expect("values fill the shape")
}

/// Which rows of a chunk belong together.
#[derive(Clone, Debug)]
pub struct Documents {
    /// A row's document and its place in it.
    rows: Vec<(usize, usize)>,
}

impl Documents {
    pub fn new(lens: &[usize]) -> Self {
        let of = |(document, &len): (usize, &usize)| (0..len).map(move |place| (document, place));
        Self { rows: lens.iter().enumerate().flat_map(of).collect() }
    }

    /// `[T, S]`: 1 where the row is in the same document, at one of the `back` places before.
    fn mask(&self, back: impl Fn(usize) -> bool) -> Tensor {
        let t = self.rows.len();
        let entry = |&(document, place): &(usize, usize), &(other, before): &(usize, usize)| {
            f64::from(document == other && before <= place && back(place - before))
        };
        let entries =
            self.rows.iter().flat_map(|row| self.rows.iter().map(move |seen| entry(row, seen)));
        Tensor::from_iter(entries, &Device::Cpu)
            .and_then(|flat| flat.reshape((t, t)))
            .expect("a square")
    }

    fn sees(&self) -> Tensor {
        self.mask(|_| true)
    }

    /// One head's rows x[T, E], each turned by its place: cos · x + sin · (x with its halves
    /// swapped and the new first one negated).
    pub fn turned(&self, x: &Tensor, rope: &RopeShape) -> Candle {
        let width = x.dim(1)?;
        let half = width / 2;
        let angle = |place: usize, e: usize| place as f64 * frequency(rope, width, e % half);
        let table = |of: fn(f64) -> f64| {
            let row = |&(_, place): &(usize, usize)| (0..width).map(move |e| of(angle(place, e)));
            Tensor::from_iter(self.rows.iter().flat_map(row), &Device::Cpu)?.reshape(x.shape())
        };
        let swap = (0..width * width).map(|at| match (at / width, at % width) {
            (from, to) if from == to + half => -1.0,
            (from, to) if to == from + half => 1.0,
            _ => 0.0,
        });
        let swap = Tensor::from_iter(swap, &Device::Cpu)?.reshape((width, width))?;
        let other = x.contiguous()?.matmul(&swap)?;
        (x * table(f64::cos)?)? + (other * table(f64::sin)?)?
    }
}

/// Radians a position of pair `i`: Llama 3.1's stretch divides long waves by the factor, keeps
/// short ones and goes from one to the other in between.
fn frequency(rope: &RopeShape, width: usize, i: usize) -> f64 {
    let plain = (-(2.0 * i as f64 / width as f64) * rope.theta.ln()).exp();
    let Some(stretch) = rope.llama3 else { return plain };
    let wave = 2.0 * std::f64::consts::PI / plain;
    let (context, low, high) =
        (stretch.original_context, stretch.low_freq_factor, stretch.high_freq_factor);
    if wave < context / high {
        plain
    } else if wave > context / low {
        plain / stretch.factor
    } else {
        let smooth = (context / wave - low) / (high - low);
        (1.0 - smooth) * plain / stretch.factor + smooth * plain
    }
}

/// x[T, K] · wᵀ, w[N, K], plus the bias where there is one.
pub fn linear(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Candle {
    let product = x.matmul(&w.t()?)?;
    bias.map_or(Ok(product.clone()), |bias| product.broadcast_add(bias))
}

/// Over the last dimension.
pub fn rms_norm(x: &Tensor, w: &Tensor, eps: f32) -> Candle {
    let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(eps))?;
    x.broadcast_div(&mean.sqrt()?)?.broadcast_mul(w)
}

fn silu(x: &Tensor) -> Candle {
    x / (x.neg()?.exp()? + 1.0)?
}

/// Without PyTorch's threshold, which moves nothing by more than 2e-9.
fn softplus(x: &Tensor) -> Candle {
    (x.exp()? + 1.0)?.log()
}

pub fn swiglu(gate: &Tensor, up: &Tensor) -> Candle {
    silu(gate)? * up
}

/// silu(bias + Σ_k w[d, k] · x[t - K + 1 + k]) for x[T, D], w[D, K].
pub fn conv(documents: &Documents, x: &Tensor, w: &Tensor, bias: &Tensor) -> Candle {
    let taps = w.dim(1)?;
    let mut sum = x.zeros_like()?.broadcast_add(bias)?;
    for k in 0..taps {
        let shifted = documents.mask(|back| back == taps - 1 - k).matmul(x)?;
        sum = (sum + shifted.broadcast_mul(&w.narrow(1, k, 1)?.squeeze(1)?)?)?;
    }
    silu(&sum)
}

/// The selective scan and its gate, in the closed form: row s reaches row t with
/// exp(A · Σ Δ of the rows after s). Inputs as `ops::scan` has them; returns y[T, D].
pub fn scan(documents: &Documents, inputs: &[Tensor; 8]) -> Candle {
    let [c, dt, b, c_out, z, a_log, skip, dt_bias] = inputs;
    let sees = documents.sees();
    let delta = softplus(&dt.broadcast_add(dt_bias)?)?;
    let until = sees.matmul(&delta)?;
    // [T, S, D], 0 where nothing is seen, so that no exponent is positive.
    let waited = until.unsqueeze(1)?.broadcast_sub(&until.unsqueeze(0)?)?;
    let waited = waited.broadcast_mul(&sees.unsqueeze(2)?)?;
    let a = a_log.exp()?.neg()?;
    let decay = waited.unsqueeze(3)?.broadcast_mul(&a.unsqueeze(0)?.unsqueeze(0)?)?.exp()?;
    // [S, D, N]
    let driven = (delta * c)?.unsqueeze(2)?.broadcast_mul(&b.unsqueeze(1)?)?;
    let seen = sees.unsqueeze(2)?.unsqueeze(3)?;
    let h = decay.broadcast_mul(&driven.unsqueeze(0)?)?.broadcast_mul(&seen)?.sum(1)?;
    let y = h.broadcast_mul(&c_out.unsqueeze(1)?)?.sum(2)?;
    (y + c.broadcast_mul(skip)?)? * silu(z)?
}

/// Grouped heads, causal: q[T, Q·E], k and v[T, G·E] to [T, Q·E].
pub fn attention(
    documents: &Documents,
    heads: Heads,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Candle {
    let barred = ((documents.sees() - 1.0)? * 1e30)?;
    let column = |x: &Tensor, head: usize| x.narrow(1, head * heads.width, heads.width);
    let one = |head: usize| {
        let shared = head * heads.key_value / heads.query;
        let scores = column(q, head)?.matmul(&column(k, shared)?.t()?)?;
        let scores = ((scores / (heads.width as f64).sqrt())? + &barred)?;
        softmax(&scores, D::Minus1)?.matmul(&column(v, shared)?.contiguous()?)
    };
    let outs = (0..heads.query).map(one).collect::<candle_core::Result<Vec<_>>>()?;
    Tensor::cat(&outs, 1)
}

/// A whole model over one chunk, its weights variables.
pub struct Dense {
    config: HfConfig,
    documents: Documents,
    weights: BTreeMap<String, Var>,
}

impl Dense {
    pub fn new(plan: &Plan, units: &[Vec<f32>], lens: &[usize]) -> Self {
        let mut weights = BTreeMap::new();
        for (spec, flat) in plan.units.iter().zip(units) {
            for (one, values) in spec.tensors.iter().zip(spec.parts(flat)) {
                let var = Var::from_tensor(&tensor(values, &one.shape)).expect("a variable");
                weights.insert(one.name.clone(), var);
            }
        }
        Self { config: plan.config.clone(), documents: Documents::new(lens), weights }
    }

    pub fn weight(&self, name: &str) -> &Var {
        &self.weights[name]
    }

    fn find(&self, name: &str) -> Option<&Tensor> {
        self.weights.get(name).map(|var| var.as_tensor())
    }

    fn linear(&self, x: &Tensor, name: &str) -> Candle {
        linear(x, self.weight(&format!("{name}.weight")), self.find(&format!("{name}.bias")))
    }

    /// x itself where there is no such norm.
    fn norm(&self, x: &Tensor, name: &str) -> Candle {
        match self.find(&format!("{name}.weight")) {
            Some(w) => rms_norm(x, w, self.config.rms_norm_eps),
            None => Ok(x.clone()),
        }
    }

    /// x[T, H] through one layer.
    pub fn block(&self, layer: usize, x: &Tensor) -> Candle {
        let (names, kind) = (self.config.names(), self.config.layers()[layer]);
        let name = |rest: &str| format!("{}{rest}", names.layer(layer));
        let u = self.norm(x, &name(names.input_norm))?;
        let mixed = match kind.mixer {
            MixerKind::Attention => self.attention(&u, &name(names.attention))?,
            MixerKind::Mamba => self.mamba(&u, &name(names.mamba))?,
        };
        let x = (x + mixed)?;
        let u = self.norm(&x, &name(names.feed_forward_norm))?;
        match kind.feed_forward {
            FeedForwardKind::None => Ok(x),
            FeedForwardKind::Dense => x + self.mlp(&u, &name(names.feed_forward))?,
            FeedForwardKind::Experts => x + self.experts(&u, &name(names.feed_forward))?,
        }
    }

    fn mlp(&self, u: &Tensor, name: &str) -> Candle {
        let gate = self.linear(u, &format!("{name}.gate_proj"))?;
        let up = self.linear(u, &format!("{name}.up_proj"))?;
        self.linear(&swiglu(&gate, &up)?, &format!("{name}.down_proj"))
    }

    /// Every expert on every row, weighted by the router's probability or 0.
    fn experts(&self, u: &Tensor, name: &str) -> Candle {
        let shape = self.config.feed_forward.as_ref().and_then(|shape| shape.experts);
        let shape = shape.expect("a router has a shape");
        let p = softmax(&self.linear(u, &format!("{name}.router"))?, D::Minus1)?;
        let rows: Vec<Vec<f64>> = p.to_vec2()?;
        let mut sum = u.zeros_like()?;
        for expert in 0..shape.count {
            // Chosen where fewer than that many are larger.
            let chosen = |row: &Vec<f64>| {
                let larger = row.iter().filter(|p| **p > row[expert]).count();
                f64::from(larger < shape.per_token)
            };
            let mask = Tensor::from_iter(rows.iter().map(chosen), &Device::Cpu)?.unsqueeze(1)?;
            let out = self.mlp(u, &format!("{name}.experts.{expert}"))?;
            sum = (sum + out.broadcast_mul(&(p.narrow(1, expert, 1)? * mask)?)?)?;
        }
        Ok(sum)
    }

    fn attention(&self, u: &Tensor, name: &str) -> Candle {
        let shape = self.config.attention.as_ref().expect("a shape");
        let heads = Heads { query: shape.heads, key_value: shape.kv_heads, width: shape.head_dim };
        // Head by head: its norm, then its turn.
        let project = |part: &str, count: usize| {
            let all = self.linear(u, &format!("{name}.{part}_proj"))?;
            let head = |head: usize| {
                let one = all.narrow(1, head * heads.width, heads.width)?;
                let one = self.norm(&one, &format!("{name}.{part}_norm"))?;
                shape.rope.map_or(Ok(one.clone()), |rope| self.documents.turned(&one, &rope))
            };
            Tensor::cat(&(0..count).map(head).collect::<candle_core::Result<Vec<_>>>()?, 1)
        };
        let (q, k) = (project("q", heads.query)?, project("k", heads.key_value)?);
        let v = self.linear(u, &format!("{name}.v_proj"))?;
        self.linear(&attention(&self.documents, heads, &q, &k, &v)?, &format!("{name}.o_proj"))
    }

    fn mamba(&self, u: &Tensor, name: &str) -> Candle {
        let shape = self.config.mamba.as_ref().expect("a shape");
        let (d, n, r) = (shape.d_inner, shape.d_state, shape.dt_rank);
        let at = |rest: &str| self.weight(&format!("{name}.{rest}")).as_tensor().clone();
        let xz = self.linear(u, &format!("{name}.in_proj"))?;
        let none = Tensor::zeros(d, DType::F64, &Device::Cpu)?;
        let bias = self.find(&format!("{name}.conv1d.bias")).unwrap_or(&none);
        let taps = at("conv1d.weight").squeeze(1)?;
        let c = conv(&self.documents, &xz.narrow(1, 0, d)?, &taps, bias)?;
        let projected = self.linear(&c, &format!("{name}.x_proj"))?;
        let part = |from, len, norm: &str| {
            self.norm(&projected.narrow(1, from, len)?, &format!("{name}.{norm}_layernorm"))
        };
        let dt = part(0, r, "dt")?.matmul(&at("dt_proj.weight").t()?)?;
        let (b, c_out) = (part(r, n, "b")?, part(r + n, n, "c")?);
        let z = xz.narrow(1, d, d)?;
        let inputs = [c, dt, b, c_out, z, at("A_log"), at("D"), at("dt_proj.bias")];
        self.linear(&scan(&self.documents, &inputs)?, &format!("{name}.out_proj"))
    }

    /// `[T, V]`, over `temperature`, of the chunk's tokens.
    pub fn log_probs(&self, tokens: &[TokenId], temperature: f32) -> Candle {
        let ids: Vec<u32> = tokens.iter().map(|token| token.get()).collect();
        let names = self.config.names();
        let embedding = self.weight(&format!("{}.weight", names.embedding));
        let mut x = embedding.index_select(&Tensor::new(ids, &Device::Cpu)?, 0)?;
        for layer in 0..self.config.num_hidden_layers {
            x = self.block(layer, &x)?;
        }
        let u = self.norm(&x, names.final_norm)?;
        let head = self.weights.get("lm_head.weight").unwrap_or(embedding);
        log_softmax(&(linear(&u, head, None)? / f64::from(temperature))?, D::Minus1)
    }

    /// Each weight's gradient by `loss`, by name, as flat f64.
    pub fn gradients(&self, loss: &Tensor) -> BTreeMap<String, Vec<f64>> {
        let store = loss.backward().expect("a backward");
        let one = |(name, var): (&String, &Var)| {
            let gradient = store.get(var.as_tensor())?;
            Some((name.clone(), flat(gradient)))
        };
        self.weights.iter().filter_map(one).collect()
    }
}

/// A tensor's elements in row-major order.
pub fn flat(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().and_then(|one| one.to_vec1()).expect("f64 elements")
}
