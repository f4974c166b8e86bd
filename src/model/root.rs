//! The root unit: token embedding, final norm and output head.
//!
//! Shape letters: T rows, H hidden, V vocabulary. Rounding points: the final norm (twice, as
//! RMSNorm has it). Embeddings are the weights themselves; logits are f32 sums and never rounded.

use super::unit::{TensorSpec, UnitSpec};
use super::{HfConfig, Numerics};
use crate::base::TokenId;
use crate::config::Dtype;
use crate::ops::gemm::{weight_gradient, Into, Linear};
use crate::ops::rms_norm;

/// The output head, by the same name in every family.
pub(super) const HEAD: &str = "lm_head.weight";

/// The weights, the head packed.
#[derive(Clone, Debug, PartialEq)]
pub struct Root {
    embed_vh: Vec<f32>,
    final_norm_h: Vec<f32>,
    head: Linear,
    tied: bool,
}

/// Gradient by the root's tensors, slices of one flat array.
struct Gradients<'a> {
    embed: &'a mut [f32],
    final_norm: &'a mut [f32],
    /// `None` where the head is the embedding.
    head: Option<&'a mut [f32]>,
}

impl<'a> Gradients<'a> {
    fn take(spec: &'a UnitSpec, flat: &'a mut [f32]) -> Self {
        let mut parts = spec.parts_mut(flat);
        let mut next = || parts.next();
        let embed = next().expect("the root has an embedding");
        Self { embed, final_norm: next().expect("the root has a norm"), head: next() }
    }
}

pub(super) fn unit(config: &HfConfig) -> UnitSpec {
    let (v, h, names) = (config.vocab_size, config.hidden_size, config.names());
    let mut tensors = vec![
        TensorSpec::new(names.embedding, ".weight", &[v, h]),
        TensorSpec::new(names.final_norm, ".weight", &[h]),
    ];
    if !config.tie_word_embeddings {
        tensors.push(TensorSpec::new(HEAD, "", &[v, h]));
    }
    UnitSpec { name: "root".into(), tensors }
}

impl Root {
    /// From the unit's flat weights; `trains` also packs what the backward needs.
    #[must_use]
    pub fn load(config: &HfConfig, spec: &UnitSpec, flat: &[f32], trains: bool) -> Self {
        let mut parts = spec.parts(flat);
        let embed = parts.next().expect("the root has an embedding");
        let final_norm_h = parts.next().expect("the root has a norm").to_vec();
        let head = parts.next().unwrap_or(embed);
        Self {
            embed_vh: embed.to_vec(),
            final_norm_h,
            head: Linear::new(head, &[], config.hidden_size, trains),
            tied: config.tie_word_embeddings,
        }
    }

    fn hidden(&self) -> usize {
        self.final_norm_h.len()
    }

    /// Entries of the vocabulary.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.head.outputs()
    }

    /// x[T, H].
    #[must_use]
    pub fn embed(&self, tokens: impl IntoIterator<Item = TokenId>) -> Vec<f32> {
        let h = self.hidden();
        let row = |token: TokenId| &self.embed_vh[token.index() * h..][..h];
        tokens.into_iter().flat_map(row).copied().collect()
    }

    /// The rows after the final norm, `[T, H]`.
    #[must_use]
    pub fn norm(&self, num: &Numerics, x_th: &[f32]) -> Vec<f32> {
        let mut u_th = vec![0.0; x_th.len()];
        rms_norm::forward(x_th, &self.final_norm_h, num.eps, num.dtype, &mut u_th);
        u_th
    }

    /// Logits `[T, V]` of rows that have left the last block.
    #[must_use]
    pub fn logits(&self, num: &Numerics, x_th: &[f32]) -> Vec<f32> {
        self.head.forward(&self.norm(num, x_th), Dtype::F32)
    }

    /// From dlogits[T, V]: adds to `grads`, returns the gradient by x[T, H].
    #[must_use]
    pub fn backward_head(
        &self,
        num: &Numerics,
        spec: &UnitSpec,
        x_th: &[f32],
        dlogits_tv: &[f32],
        grads: &mut [f32],
    ) -> Vec<f32> {
        let grads = Gradients::take(spec, grads);
        let u_th = self.norm(num, x_th);
        let dhead = grads.head.unwrap_or(grads.embed);
        weight_gradient(dlogits_tv, &u_th, self.vocab(), dhead);
        let mut du_th = vec![0.0; u_th.len()];
        self.head.input_gradient(dlogits_tv, Into::Overwrite, &mut du_th);
        let mut dx_th = vec![0.0; x_th.len()];
        let norm = &self.final_norm_h;
        rms_norm::backward(x_th, norm, num.eps, &du_th, &mut dx_th, grads.final_norm);
        dx_th
    }

    /// Adds the gradient by the embedding rows of `tokens`, rows ascending.
    pub fn backward_embed(
        &self,
        spec: &UnitSpec,
        tokens: impl IntoIterator<Item = TokenId>,
        dx_th: &[f32],
        grads: &mut [f32],
    ) {
        let h = self.hidden();
        let grads = Gradients::take(spec, grads);
        debug_assert_eq!(grads.head.is_none(), self.tied);
        for (token, dx_h) in tokens.into_iter().zip(dx_th.chunks_exact(h)) {
            let row = &mut grads.embed[token.index() * h..][..h];
            row.iter_mut().zip(dx_h).for_each(|(sum, d)| *sum += d);
        }
    }
}
