//! Fingerprints on the device, bit for bit the CPU's (kernels/fingerprint.cu).

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use crate::ops::cuda::{blocks, launch, Kernel, OrFail, THREADS};
use crate::ops::weights::cuda::Bytes;

/// Enough blocks to fill any device; each goes on in strides of the whole grid.
const BLOCKS_MAX: u32 = 2048;

/// The sum over each tensor's words; the tensors lie one after another with these lengths.
#[must_use]
pub fn sums(unit: &Bytes, lens: &[usize]) -> Vec<u64> {
    let gpu = unit.gpu();
    let width = unit.dtype().bytes() as usize;
    let mut sums = gpu.zeros::<u64>(lens.len());
    let mut start = 0;
    for (index, &len) in lens.iter().enumerate().filter(|(_, len)| **len > 0) {
        let tensor = unit.part(start..start + len);
        start += len;
        let (bytes, mut sum) = (tensor.view(), sums.slice_mut(index..=index));
        let halves = (len * width / 2) as u64;
        let grid = blocks(halves.div_ceil(4)).min(BLOCKS_MAX);
        launch!(gpu, Kernel::fingerprint_sum, (grid, 1), THREADS, 0; &bytes, &halves, &mut sum);
    }
    gpu.download(&sums.as_view())
}
