//! The parts of a model in the order in which the residual stream runs through them, and digests of
//! the stream between them: two forwards that agree bit for bit have equal ones.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{FeedForwardKind, LayerKind, MixerKind, Plan};
use crate::base::LayerId;

/// What writes the residual stream, or at last reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    /// `None` of the embedding and the head.
    pub layer: Option<LayerId>,
    pub kind: PartKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartKind {
    Embedding,
    Mamba,
    Attention,
    Mlp,
    Moe,
    /// Final norm, output head and log-softmax.
    Head,
}

impl PartKind {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Mamba => "mamba",
            Self::Attention => "attention",
            Self::Mlp => "mlp",
            Self::Moe => "moe",
            Self::Head => "head",
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "layer {layer} ({})", self.kind.name()),
            None => write!(f, "the {}", self.kind.name()),
        }
    }
}

impl Plan {
    /// Every part that writes the stream: the embedding, then each layer's mixer and, where it has
    /// one, its feed-forward. The head, which only reads it, is not among them.
    #[must_use]
    pub fn parts(&self) -> Vec<Part> {
        let of_layer = |(layer, kind): (u16, &LayerKind)| {
            let mixer = match kind.mixer {
                MixerKind::Mamba => PartKind::Mamba,
                MixerKind::Attention => PartKind::Attention,
            };
            let feed_forward = match kind.feed_forward {
                FeedForwardKind::None => None,
                FeedForwardKind::Dense => Some(PartKind::Mlp),
                FeedForwardKind::Experts => Some(PartKind::Moe),
            };
            let part = move |kind| Part { layer: Some(LayerId::new(layer)), kind };
            std::iter::once(mixer).chain(feed_forward).map(part)
        };
        let embedding = Part { layer: None, kind: PartKind::Embedding };
        std::iter::once(embedding).chain((0..).zip(&self.layers).flat_map(of_layer)).collect()
    }
}

impl Part {
    pub const HEAD: Self = Self { layer: None, kind: PartKind::Head };
}

/// xxh3 of each row of x[T, width], by its f32 bytes.
pub fn row_digests(width: usize, x: &[f32]) -> impl ExactSizeIterator<Item = u64> + '_ {
    x.chunks_exact(width).map(|row| xxhash_rust::xxh3::xxh3_64(bytemuck::cast_slice(row)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Preset;

    #[test]
    fn parts_are_the_layers_in_order() {
        for (preset, first, count) in [
            (Preset::TinyJamba, "the embedding, layer 0 (mamba), layer 0 (mlp)", 9),
            (Preset::TinyMamba, "the embedding, layer 0 (mamba), layer 1 (mamba)", 5),
        ] {
            let plan = Plan::new(preset.config());
            let parts: Vec<String> = plan.parts().iter().map(Part::to_string).collect();
            assert_eq!(parts[..3].join(", "), first);
            assert_eq!(parts.len(), count, "{parts:?}");
        }
    }

    #[test]
    fn one_bit_of_one_row_changes_its_digest_alone() {
        let mut x = vec![1.0_f32; 12];
        let before: Vec<u64> = row_digests(4, &x).collect();
        x[5] = f32::from_bits(x[5].to_bits() + 1);
        let after: Vec<u64> = row_digests(4, &x).collect();
        assert_eq!((before[0], before[2]), (after[0], after[2]));
        assert_ne!(before[1], after[1]);
    }
}
