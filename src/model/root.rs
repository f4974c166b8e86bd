//! The root unit: token embedding, final norm and output head.
//!
//! Shape letters: T rows, H hidden, V vocabulary. Rounding points: the final norm (twice, as
//! RMSNorm has it). Embeddings are the weights themselves; logits are f32 sums and never rounded.

use super::unit::{TensorSpec, UnitSpec};
use super::{HfConfig, Numerics};
use crate::base::TokenId;
use crate::config::Dtype;
use crate::ops::array::{Array, Device, SliceMut};
use crate::ops::embedding::{Embedding, Tokens};
use crate::ops::gemm::{Into, Projection};
use crate::ops::weights::{Purpose, Weights};

/// The output head, by the same name in every family.
pub const HEAD: &str = "lm_head.weight";

/// The weights, the head packed.
#[derive(Clone, Debug)]
pub struct Root {
    embedding: Embedding,
    final_norm_h: Array,
    head: Projection,
    tied: bool,
}

/// Gradient by the root's tensors, parts of one flat array.
struct Gradients<'a> {
    embed: SliceMut<'a>,
    final_norm: SliceMut<'a>,
    /// `None` where the head is the embedding.
    head: Option<SliceMut<'a>>,
}

impl<'a> Gradients<'a> {
    fn take(spec: &'a UnitSpec, flat: &'a mut Array) -> Self {
        let mut parts = spec.gradients_of(flat);
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
    /// From the unit's weights, laid out for their purpose.
    #[must_use]
    pub fn load(config: &HfConfig, spec: &UnitSpec, weights: &Weights, purpose: Purpose) -> Self {
        let mut parts = spec.tensors_of(weights);
        let embed = parts.next().expect("the root has an embedding");
        let final_norm_h = parts.next().expect("the root has a norm").to_array();
        let head = parts.next().unwrap_or(embed);
        Self {
            embedding: Embedding::new(embed),
            final_norm_h,
            head: Projection::new(head, head.none(), config.hidden_size, purpose),
            tied: config.tie_word_embeddings,
        }
    }

    #[must_use]
    pub fn device(&self) -> Device {
        self.final_norm_h.device()
    }

    /// H.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.final_norm_h.len()
    }

    /// Entries of the vocabulary.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.head.outputs()
    }

    /// x[T, H].
    #[must_use]
    pub fn embed(&self, num: &Numerics, tokens: &Tokens) -> Array {
        self.embedding.forward(self.hidden(), tokens, num.residual_dtype)
    }

    /// The rows after the final norm, `[T, H]`.
    #[must_use]
    pub fn norm(&self, num: &Numerics, x_th: &Array) -> Array {
        x_th.rms_norm(&self.final_norm_h, num.eps, num.dtype)
    }

    /// Logits `[T, V]` of rows that have left the last block.
    #[must_use]
    pub fn logits(&self, num: &Numerics, x_th: &Array) -> Array {
        self.head.forward(&self.norm(num, x_th), Dtype::F32)
    }

    /// From dlogits[T, V]: adds to `grads`, returns the gradient by x[T, H].
    #[must_use]
    pub fn backward_head(
        &self,
        num: &Numerics,
        spec: &UnitSpec,
        x_th: &Array,
        dlogits_tv: &Array,
        grads: &mut Array,
    ) -> Array {
        let grads = Gradients::take(spec, grads);
        let u_th = self.norm(num, x_th);
        let dhead = grads.head.unwrap_or(grads.embed);
        let mut du_th = u_th.zeros_like();
        let (own, into) = ((dhead, SliceMut::none()), (Into::Overwrite, &mut du_th));
        self.head.backward(dlogits_tv, &u_th, num.dtype, own, into);
        let mut dx_th = x_th.zeros_like();
        let norm = &self.final_norm_h;
        x_th.rms_norm_backward(norm, num.eps, &du_th, &mut dx_th, grads.final_norm);
        dx_th
    }

    /// Adds the gradient by the embedding rows of `tokens`, rows ascending.
    pub fn backward_embed(
        &self,
        spec: &UnitSpec,
        tokens: &[TokenId],
        dx_th: &Array,
        grads: &mut Array,
    ) {
        let grads = Gradients::take(spec, grads);
        debug_assert_eq!(grads.head.is_none(), self.tied);
        self.embedding.backward(self.hidden(), tokens, dx_th, grads.embed);
    }
}
