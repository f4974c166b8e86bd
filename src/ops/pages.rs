//! The engine's cache memory: raw byte buffers cut into pages, shared by attention KV and Mamba
//! state of every group. Nothing is ever zeroed after the start; a page keeps its last bytes,
//! whichever kind wrote them.
//!
//! Offsets are u64 bytes. K and V past a row's length are never loaded: a page that comes back
//! from state may hold NaN bits there.

#[cfg(feature = "cuda")]
pub mod cuda;
mod tables;

pub use tables::Tables;

use std::borrow::Cow;
use std::ops::Range;

use half::bf16;
use serde::{Deserialize, Serialize};

use super::array::Device;
use super::slot::state_offset;
use crate::base::BlockId;
use crate::config::Dtype;

/// `group_size` buffers of `num_blocks` pages each. Buffer k is shared by the k-th layer of every
/// group, as vLLM's hybrid KV-cache manager shares them.
#[derive(Debug)]
pub enum Pages {
    /// Words rather than bytes, so that every f32 is aligned.
    Cpu(Vec<Vec<u32>>),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Pages),
}

impl Pages {
    /// Zeros, as `torch.zeros` gives vLLM at start.
    #[must_use]
    pub fn new(device: &Device, buffers: usize, num_blocks: u32, page_bytes: u64) -> Self {
        assert_eq!(page_bytes % 4, 0, "a page of {page_bytes} bytes is not whole words");
        match device {
            Device::Cpu => {
                let words = page_bytes / 4 * u64::from(num_blocks);
                let words =
                    usize::try_from(words).expect("the pool's size was checked against memory");
                Self::Cpu(vec![vec![0; words]; buffers])
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Self::Cuda(cuda::Pages::new(gpu, buffers, num_blocks, page_bytes)),
        }
    }

    /// Whether the device can give that much memory, where [`Self::new`] would fail: asks for it
    /// and gives it back untouched.
    #[must_use]
    pub fn fit(device: &Device, buffers: usize, num_blocks: u32, page_bytes: u64) -> bool {
        match device {
            Device::Cpu => {
                let Ok(words) = usize::try_from(page_bytes / 4 * u64::from(num_blocks)) else {
                    return false;
                };
                let reserve = |_| {
                    let mut buffer: Vec<u32> = Vec::new();
                    buffer.try_reserve_exact(words).map(|()| buffer)
                };
                (0..buffers).map(reserve).collect::<Result<Vec<_>, _>>().is_ok()
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => cuda::Pages::fit(gpu, buffers, num_blocks, page_bytes),
        }
    }

    /// Each buffer's bytes on the host, whoever wrote them last.
    pub fn to_host(&self) -> Vec<Cow<'_, [u8]>> {
        match self {
            Self::Cpu(buffers) => {
                buffers.iter().map(|words| Cow::Borrowed(bytemuck::cast_slice(words))).collect()
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(pages) => pages.to_host().into_iter().map(Cow::Owned).collect(),
        }
    }

    /// Bytes of all buffers.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        match self {
            Self::Cpu(buffers) => buffers.iter().map(|words| words.len() as u64 * 4).sum(),
            #[cfg(feature = "cuda")]
            Self::Cuda(pages) => pages.len_bytes(),
        }
    }

    /// Puts back what [`Self::to_host`] gave: `read` fills each buffer in turn.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn restore<E>(
        &mut self,
        mut read: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        match self {
            Self::Cpu(buffers) => {
                let mut each = buffers.iter_mut().enumerate();
                each.try_for_each(|(i, words)| read(i, bytemuck::cast_slice_mut(words)))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(pages) => pages.restore(read),
        }
    }

    #[cfg(feature = "cuda")]
    pub(super) fn cuda(&self) -> &cuda::Pages {
        match self {
            Self::Cuda(pages) => pages,
            Self::Cpu(_) => panic!("pages of another device"),
        }
    }

    fn bytes(&self, buffer: usize, offset: u64, len: u64) -> &[u8] {
        let all: &[u8] = match self {
            Self::Cpu(buffers) => bytemuck::cast_slice(&buffers[buffer]),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => panic!("pages of another device"),
        };
        let end = offset + len;
        assert!(end <= all.len() as u64, "bytes {offset}..{end} of a {}-byte buffer", all.len());
        &all[offset as usize..end as usize]
    }

    fn bytes_mut(&mut self, buffer: usize, offset: u64, len: u64) -> &mut [u8] {
        let all: &mut [u8] = match self {
            Self::Cpu(buffers) => bytemuck::cast_slice_mut(&mut buffers[buffer]),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => panic!("pages of another device"),
        };
        let end = offset + len;
        assert!(end <= all.len() as u64, "bytes {offset}..{end} of a {}-byte buffer", all.len());
        &mut all[offset as usize..end as usize]
    }

    /// Reads consecutive elements, widened to f32.
    pub fn load(&self, buffer: usize, offset: u64, dtype: Dtype, out: &mut [f32]) {
        let bytes = self.bytes(buffer, offset, out.len() as u64 * dtype.bytes());
        match dtype {
            Dtype::F32 => out.copy_from_slice(bytemuck::cast_slice(bytes)),
            Dtype::Bf16 => {
                let values: &[bf16] = bytemuck::cast_slice(bytes);
                out.iter_mut().zip(values).for_each(|(o, v)| *o = v.to_f32());
            }
        }
    }

    /// Writes consecutive elements, rounded to `dtype`.
    pub fn store(&mut self, buffer: usize, offset: u64, dtype: Dtype, values: &[f32]) {
        let bytes = self.bytes_mut(buffer, offset, values.len() as u64 * dtype.bytes());
        match dtype {
            Dtype::F32 => bytes.copy_from_slice(bytemuck::cast_slice(values)),
            Dtype::Bf16 => {
                let out: &mut [bf16] = bytemuck::cast_slice_mut(bytes);
                out.iter_mut().zip(values).for_each(|(o, v)| *o = bf16::from_f32(*v));
            }
        }
    }
}

/// Where one Mamba layer's state lies in its buffer: conv at byte 0 of a page, ssm right after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateView {
    pub buffer: usize,
    pub conv_dtype: Dtype,
    pub conv_elements: u64,
    /// Byte offset of the ssm state within a page.
    pub ssm_offset: u64,
    pub ssm_dtype: Dtype,
    pub ssm_elements: u64,
    /// Elements of `ssm_dtype` from one block's ssm state to the next: the padded page.
    pub ssm_stride: u64,
}

impl StateView {
    /// Bytes from one block's page to the next.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.ssm_stride * self.ssm_dtype.bytes()
    }

    /// The buffer's bytes that hold a block's convolution state.
    #[must_use]
    pub fn conv_bytes(&self, block: BlockId) -> Range<u64> {
        let start = u64::from(block.get()) * self.page_bytes();
        start..start + self.conv_elements * self.conv_dtype.bytes()
    }

    /// The buffer's bytes that hold a block's ssm state, its product slot · stride taken in `bits`.
    #[must_use]
    pub fn ssm_bytes(&self, block: BlockId, bits: u32) -> Range<u64> {
        let elements = state_offset(u64::from(block.get()), self.ssm_stride, bits);
        let start = self.ssm_offset + elements * self.ssm_dtype.bytes();
        start..start + self.ssm_elements * self.ssm_dtype.bytes()
    }

    pub fn load_conv(&self, pages: &Pages, block: BlockId, conv: &mut [f32]) {
        assert_eq!(conv.len() as u64, self.conv_elements, "a whole convolution state");
        pages.load(self.buffer, self.conv_bytes(block).start, self.conv_dtype, conv);
    }

    pub fn store_conv(&self, pages: &mut Pages, block: BlockId, conv: &[f32]) {
        assert_eq!(conv.len() as u64, self.conv_elements, "a whole convolution state");
        pages.store(self.buffer, self.conv_bytes(block).start, self.conv_dtype, conv);
    }

    pub fn load_ssm(&self, pages: &Pages, block: BlockId, bits: u32, ssm: &mut [f32]) {
        assert_eq!(ssm.len() as u64, self.ssm_elements, "a whole ssm state");
        pages.load(self.buffer, self.ssm_bytes(block, bits).start, self.ssm_dtype, ssm);
    }

    pub fn store_ssm(&self, pages: &mut Pages, block: BlockId, bits: u32, ssm: &[f32]) {
        assert_eq!(ssm.len() as u64, self.ssm_elements, "a whole ssm state");
        pages.store(self.buffer, self.ssm_bytes(block, bits).start, self.ssm_dtype, ssm);
    }
}

/// Where one attention layer's keys and values lie: a page is `[2, block_tokens, G·E]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValueView {
    pub buffer: usize,
    pub dtype: Dtype,
    pub block_tokens: u32,
    /// Floats of one token's key (or value): heads times width.
    pub row: usize,
}

impl KeyValueView {
    fn half(&self) -> u64 {
        u64::from(self.block_tokens) * self.row as u64 * self.dtype.bytes()
    }

    /// The buffer's bytes that hold the keys of some of a block's tokens, and those
    /// that hold their values. A page is full: two halves are `page_bytes`.
    #[must_use]
    pub fn token_bytes(&self, block: BlockId, tokens: Range<u32>) -> [Range<u64>; 2] {
        assert!(tokens.end <= self.block_tokens, "{tokens:?} of {} tokens", self.block_tokens);
        let row = self.row as u64 * self.dtype.bytes();
        let page = u64::from(block.get()) * 2 * self.half();
        [page, page + self.half()]
            .map(|at| at + u64::from(tokens.start) * row..at + u64::from(tokens.end) * row)
    }

    /// Writes keys and values `[T, G·E]` at positions from `start`.
    pub fn store(
        &self,
        pages: &mut Pages,
        table: &[BlockId],
        start: usize,
        keys: &[f32],
        values: &[f32],
    ) {
        assert_eq!(keys.len(), values.len(), "keys and values differ");
        let rows = keys.chunks_exact(self.row).zip(values.chunks_exact(self.row));
        for (t, (k, v)) in rows.enumerate() {
            let position = start + t;
            let block = table[position / self.block_tokens as usize];
            let token = (position % self.block_tokens as usize) as u32;
            let [key, value] = self.token_bytes(block, token..token + 1);
            pages.store(self.buffer, key.start, self.dtype, k);
            pages.store(self.buffer, value.start, self.dtype, v);
        }
    }

    /// Reads the keys and values of positions 0..len, `[len, G·E]` each, a block at a time.
    pub fn gather(&self, pages: &Pages, table: &[BlockId], keys: &mut [f32], values: &mut [f32]) {
        assert_eq!(keys.len(), values.len(), "keys and values differ");
        let held = table.len() * self.block_tokens as usize * self.row;
        assert!(keys.len() <= held, "{} floats of keys in {} blocks", keys.len(), table.len());
        let block = self.block_tokens as usize * self.row;
        let parts = keys.chunks_mut(block).zip(values.chunks_mut(block));
        for ((k, v), &block) in parts.zip(table) {
            let [key, value] = self.token_bytes(block, 0..(k.len() / self.row) as u32);
            pages.load(self.buffer, key.start, self.dtype, k);
            pages.load(self.buffer, value.start, self.dtype, v);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::random;

    /// The tiny Jamba's page: conv 3 x 128, ssm 128 x 16, f32; 48 tokens of 2 x 32 f32.
    fn tiny() -> (Pages, StateView, KeyValueView) {
        let state = StateView {
            buffer: 0,
            conv_dtype: Dtype::F32,
            conv_elements: 384,
            ssm_offset: 1536,
            ssm_dtype: Dtype::F32,
            ssm_elements: 2048,
            ssm_stride: 3072,
        };
        let kv = KeyValueView { buffer: 0, dtype: Dtype::F32, block_tokens: 48, row: 32 };
        (Pages::new(&Device::Cpu, 1, 8, 12_288), state, kv)
    }

    #[test]
    fn states_come_back_and_do_not_touch_their_neighbours() {
        let (mut pages, view, _) = tiny();
        let (conv, ssm) = (random(384, 1), random(2048, 2));
        view.store_conv(&mut pages, BlockId::new(3), &conv);
        view.store_ssm(&mut pages, BlockId::new(3), 64, &ssm);
        let (mut conv_back, mut ssm_back) = (vec![0.0; 384], vec![0.0; 2048]);
        view.load_conv(&pages, BlockId::new(3), &mut conv_back);
        view.load_ssm(&pages, BlockId::new(3), 64, &mut ssm_back);
        assert_eq!((conv_back, ssm_back), (conv, ssm));
        for other in [2, 4] {
            let mut page = vec![1.0; 3072];
            pages.load(0, view.conv_bytes(BlockId::new(other)).start, Dtype::F32, &mut page);
            assert!(page.iter().all(|&v| v == 0.0), "block {other}");
        }
    }

    #[test]
    fn a_narrow_product_wraps_to_a_low_page_and_only_for_the_ssm_state() {
        // 14 bits: 16,384 / 3,072 = 5.33, so block 6 is the first to wrap, to element 2,048.
        let (mut pages, view, _) = tiny();
        let ssm = random(2048, 3);
        view.store_ssm(&mut pages, BlockId::new(6), 14, &ssm);
        let mut at_wrap = vec![0.0; 2048];
        pages.load(0, 1536 + 2048 * 4, Dtype::F32, &mut at_wrap);
        assert_eq!(at_wrap, ssm);
        let mut own = vec![1.0; 2048];
        view.load_ssm(&pages, BlockId::new(6), 64, &mut own);
        assert!(own.iter().all(|&v| v == 0.0), "the right slot stays as it was");
        view.load_ssm(&pages, BlockId::new(6), 14, &mut own);
        assert_eq!(own, ssm, "the same wrapped address reads it back");
    }

    #[test]
    fn keys_and_values_cross_blocks_in_any_order() {
        let (mut pages, _, kv) = tiny();
        let table = [BlockId::new(5), BlockId::new(2)];
        let (k, v) = (random(60 * 32, 4), random(60 * 32, 5));
        kv.store(&mut pages, &table, 0, &k[..50 * 32], &v[..50 * 32]);
        kv.store(&mut pages, &table, 50, &k[50 * 32..], &v[50 * 32..]);
        let (mut k_back, mut v_back) = (vec![0.0; 60 * 32], vec![0.0; 60 * 32]);
        kv.gather(&pages, &table, &mut k_back, &mut v_back);
        assert_eq!((k_back, v_back), (k, v));
    }

    #[test]
    fn bf16_pages_hold_two_bytes_an_element() {
        let mut pages = Pages::new(&Device::Cpu, 1, 2, 64);
        pages.store(0, 64, Dtype::Bf16, &[1.0, 1.003_906_3, -2.5]);
        let mut back = [0.0; 3];
        pages.load(0, 64, Dtype::Bf16, &mut back);
        assert_eq!(back, [1.0, 1.0, -2.5]);
    }

    #[test]
    #[should_panic(expected = "of a 128-byte buffer")]
    fn an_address_past_the_buffer_is_loud() {
        Pages::new(&Device::Cpu, 1, 2, 64).load(0, 100, Dtype::F32, &mut [0.0; 8]);
    }
}
