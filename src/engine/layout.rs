//! From a model's layers to groups, pages and blocks, by vLLM's rules
//! (`v1/core/kv_cache_utils.py`).
//!
//! All layers draw from one pool of equal pages. Layers of a kind are dealt into groups; a block
//! belongs to one group at a time, and page `b` of raw buffer `k` then holds the cache of that
//! group's `k`-th layer. So the bytes of a block that comes back may be of the other kind. Lengths
//! are in bytes unless a name says otherwise.

use super::EngineError;
use crate::base::{BlockId, GroupId, LayerId};
use crate::config::Dtype;
use crate::model::{AttentionShape, HfConfig, LayerKind, MambaShape, MixerKind};
use crate::ops::pages::{KeyValueView, StateView};
use crate::ops::slot::state_offset;

/// Attention blocks hold a multiple of this many tokens.
const TOKENS_STEP: u64 = 16;

/// What the layers of a model cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheSpec {
    /// In model order.
    pub layers: Vec<LayerCache>,
    pub max_model_len: u32,
}

/// What one layer caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerCache {
    /// One page a request: the convolution's last inputs, then the scan's state.
    Mamba {
        /// (d_conv - 1) · d_inner.
        conv_elements: u64,
        conv_dtype: Dtype,
        /// d_inner · d_state.
        ssm_elements: u64,
        ssm_dtype: Dtype,
    },
    /// K and V of every token.
    Attention { kv_heads: u64, head_dim: u64, dtype: Dtype },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheKind {
    Mamba,
    Attention,
}

/// Layers that share a block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub kind: CacheKind,
    /// The `k`-th one lives in raw buffer `k`.
    pub layers: Vec<LayerId>,
}

/// Where a layer's cache is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerPlace {
    /// Whose block table names the layer's pages.
    pub group: GroupId,
    pub view: CacheView,
}

/// How a layer reads its pages, and of which raw buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheView {
    State(StateView),
    KeyValue(KeyValueView),
}

impl CacheView {
    /// Of a Mamba layer.
    #[must_use]
    pub fn state(&self) -> Option<StateView> {
        match self {
            Self::State(view) => Some(*view),
            Self::KeyValue(_) => None,
        }
    }
}

/// The plan of the cache: plain data, computed once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Mamba groups first: in this order blocks are taken and given back.
    pub groups: Vec<Group>,
    /// By layer id.
    pub layers: Vec<LayerPlace>,
    pub num_mamba_groups: usize,
    /// Raw buffers, each of `num_blocks` pages.
    pub num_buffers: usize,
    pub page_bytes: u64,
    /// Tokens of one attention block; `None` without attention.
    pub block_tokens: Option<u32>,
    /// From one block's scan state to the next, in elements: the padded page. `None` without
    /// Mamba layers.
    pub state_stride: Option<u64>,
    /// Tokens of one block of every group, where full blocks are kept to be found again; `None`
    /// without a prefix cache.
    pub prefix_block_tokens: Option<u32>,
    pub max_model_len: u32,
}

/// From what the number of blocks is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockMemory {
    pub device_memory: u64,
    pub gpu_memory_utilization: f64,
    /// The weights; where a device was measured, all that the engine's fullest step adds beside the
    /// pool.
    pub used_bytes: u64,
    /// That share the device: each plans with an equal part of what they may use.
    pub engines: u32,
    /// Replaces what the memory would give, up or down.
    pub num_gpu_blocks_override: Option<u32>,
}

impl CacheSpec {
    /// Of a model whose weights and activations are `dtype`.
    #[must_use]
    pub fn of_model(config: &HfConfig, dtype: Dtype, ssm_dtype: Dtype, max_model_len: u32) -> Self {
        let mamba = |shape: &MambaShape| LayerCache::Mamba {
            conv_elements: ((shape.d_conv - 1) * shape.d_inner) as u64,
            conv_dtype: dtype,
            ssm_elements: (shape.d_inner * shape.d_state) as u64,
            ssm_dtype,
        };
        let attention = |shape: &AttentionShape| LayerCache::Attention {
            kv_heads: shape.kv_heads as u64,
            head_dim: shape.head_dim as u64,
            dtype,
        };
        let layer = |kind: LayerKind| match kind.mixer {
            MixerKind::Mamba => config.mamba.as_ref().map(mamba),
            MixerKind::Attention => config.attention.as_ref().map(attention),
        };
        let layer = |kind| layer(kind).expect("the config has its layers' shapes");
        Self { layers: config.layers().into_iter().map(layer).collect(), max_model_len }
    }
}

impl Layout {
    /// # Errors
    /// A model without caches, layers of one kind that differ in size, or a state that its page
    /// cannot align.
    pub fn new(spec: &CacheSpec) -> Result<Self, EngineError> {
        let mamba = the_one_size(spec, CacheKind::Mamba)?;
        let attention = the_one_size(spec, CacheKind::Attention)?;
        let (page_bytes, block_tokens) = match (mamba, attention) {
            (None, None) => return Err(EngineError::NoLayers),
            (Some(mamba), None) => (mamba.unpadded_bytes(), None),
            (None, Some(token)) => (TOKENS_STEP * token.unpadded_bytes(), Some(TOKENS_STEP as u32)),
            (Some(mamba), Some(token)) => {
                let step_bytes = TOKENS_STEP * token.unpadded_bytes();
                let steps = mamba.unpadded_bytes().div_ceil(step_bytes);
                (steps * step_bytes, Some((steps * TOKENS_STEP) as u32))
            }
        };
        check_alignment(mamba, page_bytes)?;
        let (groups, num_buffers) = deal_into_groups(&spec.layers);
        let stride = |layer: LayerCache| match layer {
            LayerCache::Mamba { ssm_dtype, .. } => Some(page_bytes / ssm_dtype.bytes()),
            LayerCache::Attention { .. } => None,
        };
        Ok(Self {
            layers: places(&groups, spec, page_bytes, block_tokens),
            num_mamba_groups: groups.iter().filter(|group| group.kind == CacheKind::Mamba).count(),
            groups,
            num_buffers,
            page_bytes,
            block_tokens,
            state_stride: mamba.and_then(stride),
            prefix_block_tokens: None,
            max_model_len: spec.max_model_len,
        })
    }

    /// The same pages with a prefix cache, as vLLM's `mamba_cache_mode = "all"`: a Mamba group then
    /// has a block every so many tokens too, for the state after the last of them. Without
    /// attention these are as many as an attention block has elsewhere.
    #[must_use]
    pub fn with_prefix_cache(self) -> Self {
        Self { prefix_block_tokens: self.block_tokens.or(Some(TOKENS_STEP as u32)), ..self }
    }

    /// The most tokens of a row that begins behind `computed` tokens: where states are kept at
    /// block ends, a row ends at one, because a prefill row stores its last state alone.
    #[must_use]
    pub fn row_tokens_max(&self, computed: u32) -> u32 {
        match self.prefix_block_tokens {
            Some(block) if self.num_mamba_groups > 0 => block - computed % block,
            _ => u32::MAX,
        }
    }

    /// Blocks of one attention group that hold `tokens` tokens.
    #[must_use]
    pub fn attention_blocks(&self, tokens: u32) -> u32 {
        self.block_tokens.map_or(0, |per_block| tokens.div_ceil(per_block))
    }

    /// Blocks that a request holds once `tokens` tokens are computed: one a Mamba group for its
    /// whole life, or with a prefix cache one every so many tokens, and each attention group's
    /// share.
    #[must_use]
    pub fn blocks_for(&self, tokens: u32) -> u64 {
        let attention_groups = (self.groups.len() - self.num_mamba_groups) as u64;
        let states = self.prefix_block_tokens.map_or(1, |block| tokens.div_ceil(block));
        self.num_mamba_groups as u64 * u64::from(states)
            + attention_groups * u64::from(self.attention_blocks(tokens))
    }

    /// The first block whose state lies past the reach of a `bits`-bit index: slot · stride ≥
    /// 2^bits. `None` without recurrent state, or where no block id is that high.
    #[must_use]
    pub fn first_wrapped_block(&self, bits: u32) -> Option<BlockId> {
        let stride = self.state_stride?;
        let first = (1_u128 << bits).div_ceil(u128::from(stride));
        let block = u32::try_from(first).ok()?;
        let reaches = |slot: u64| state_offset(slot, stride, bits) == slot * stride;
        let slot = u64::from(block);
        assert!(reaches(slot - 1) && !reaches(slot), "block {block} is not where {bits} bits end");
        Some(BlockId::new(block))
    }

    /// Bytes that one block takes over all raw buffers.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.page_bytes * self.num_buffers as u64
    }

    /// How many blocks the pool has, the null block included: the override, or what fits beside the
    /// weights.
    ///
    /// # Errors
    /// Fewer blocks than one request of `max_model_len` tokens and the null block need.
    pub fn num_blocks(&self, memory: &BlockMemory) -> Result<u32, EngineError> {
        let max_model_len = self.max_model_len;
        let needed = self.blocks_for(max_model_len) + 1;
        if let Some(found) = memory.num_gpu_blocks_override {
            let enough = u64::from(found) >= needed;
            let error = EngineError::OverrideTooSmall { found, needed, max_model_len };
            return if enough { Ok(found) } else { Err(error) };
        }
        let &BlockMemory { device_memory, used_bytes, engines, .. } = memory;
        let utilization = memory.gpu_memory_utilization;
        let usable = (device_memory as f64 * utilization) as u64 / u64::from(engines);
        let found = usable.saturating_sub(used_bytes) / self.block_bytes();
        if found < needed {
            let bytes_needed = u64::from(engines) * (used_bytes + needed * self.block_bytes());
            return Err(EngineError::MemoryTooSmall {
                device_memory,
                utilization,
                engines,
                used_bytes,
                found,
                needed,
                max_model_len,
                device_memory_needed: (bytes_needed as f64 / utilization).ceil() as u64,
            });
        }
        // Block ids are 32 bits wide; memory for more of them is left unused.
        Ok(u32::try_from(found).unwrap_or(u32::MAX))
    }
}

impl LayerCache {
    fn kind(&self) -> CacheKind {
        match self {
            Self::Mamba { .. } => CacheKind::Mamba,
            Self::Attention { .. } => CacheKind::Attention,
        }
    }

    /// Of one request's state, or of one token's K and V.
    fn unpadded_bytes(&self) -> u64 {
        match *self {
            Self::Mamba { conv_elements, conv_dtype, ssm_elements, ssm_dtype } => {
                conv_elements * conv_dtype.bytes() + ssm_elements * ssm_dtype.bytes()
            }
            Self::Attention { kv_heads, head_dim, dtype } => {
                2 * kv_heads * head_dim * dtype.bytes()
            }
        }
    }

    fn view(&self, buffer: usize, page_bytes: u64, block_tokens: Option<u32>) -> CacheView {
        match *self {
            Self::Mamba { conv_elements, conv_dtype, ssm_elements, ssm_dtype } => {
                CacheView::State(StateView {
                    buffer,
                    conv_dtype,
                    conv_elements,
                    ssm_offset: conv_elements * conv_dtype.bytes(),
                    ssm_dtype,
                    ssm_elements,
                    ssm_stride: page_bytes / ssm_dtype.bytes(),
                })
            }
            Self::Attention { kv_heads, head_dim, dtype } => CacheView::KeyValue(KeyValueView {
                buffer,
                dtype,
                block_tokens: block_tokens.expect("a model with attention has token blocks"),
                row: (kv_heads * head_dim) as usize,
            }),
        }
    }
}

fn of_kind(layers: &[LayerCache], kind: CacheKind) -> Vec<LayerId> {
    let ids = (0..layers.len()).filter(|&layer| layers[layer].kind() == kind);
    ids.map(|layer| LayerId::new(layer as u16)).collect()
}

/// What every layer of a kind caches, if there is one.
fn the_one_size(spec: &CacheSpec, kind: CacheKind) -> Result<Option<LayerCache>, EngineError> {
    let layers = of_kind(&spec.layers, kind);
    let Some(&first) = layers.first() else { return Ok(None) };
    let size = spec.layers[first.index()];
    match layers.into_iter().find(|layer| spec.layers[layer.index()] != size) {
        Some(other) => Err(EngineError::UnequalPages { first, other }),
        None => Ok(Some(size)),
    }
}

/// Pages are whole words, and the scan's state begins at a whole element.
fn check_alignment(mamba: Option<LayerCache>, page_bytes: u64) -> Result<(), EngineError> {
    let Some(LayerCache::Mamba { conv_elements, conv_dtype, ssm_dtype, .. }) = mamba else {
        return Ok(());
    };
    let (ssm_offset, element_bytes) = (conv_elements * conv_dtype.bytes(), ssm_dtype.bytes());
    if ssm_offset.is_multiple_of(element_bytes) && page_bytes.is_multiple_of(4) {
        Ok(())
    } else {
        Err(EngineError::StateNotAligned { ssm_offset, page_bytes, element_bytes })
    }
}

/// The groups, and how many layers the largest may have. A kind of L layers makes n = ceil(L /
/// size) groups, of which group i has layers i, i + n, i + 2n, …; the size is the smaller of the
/// two counts, or the larger if they are close.
fn deal_into_groups(layers: &[LayerCache]) -> (Vec<Group>, usize) {
    let kinds = [CacheKind::Mamba, CacheKind::Attention].map(|kind| (kind, of_kind(layers, kind)));
    let counts = || kinds.iter().map(|(_, ids)| ids.len()).filter(|&count| count > 0);
    let (min, max) = (counts().min().unwrap_or(0), counts().max().unwrap_or(0));
    let size = if 4 * max < 5 * min { max } else { min };
    let mut groups = Vec::new();
    for (kind, ids) in kinds {
        let num_groups = ids.len().div_ceil(size);
        groups.extend((0..num_groups).map(|first| {
            let layers = ids.iter().copied().skip(first).step_by(num_groups).collect();
            Group { kind, layers }
        }));
    }
    (groups, size)
}

fn places(
    groups: &[Group],
    spec: &CacheSpec,
    page_bytes: u64,
    block_tokens: Option<u32>,
) -> Vec<LayerPlace> {
    let mut places = vec![None; spec.layers.len()];
    for (group, members) in groups.iter().enumerate() {
        for (buffer, layer) in members.layers.iter().enumerate() {
            let view = spec.layers[layer.index()].view(buffer, page_bytes, block_tokens);
            let place = LayerPlace { group: GroupId::new(group as u16), view };
            let earlier = places[layer.index()].replace(place);
            assert_eq!(earlier, None, "layer {layer} is in two groups");
        }
    }
    places.into_iter().map(|place| place.expect("every layer is in a group")).collect()
}

#[cfg(test)]
mod tests;
