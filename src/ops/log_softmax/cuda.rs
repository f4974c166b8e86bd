//! Log-probabilities and their gradient on the device, bit for bit the CPU's
//! (kernels/log_softmax.cu).

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};

use super::TILE;
use crate::base::TokenId;
use crate::ops::cuda::{launch, Gpu, Kernel, OrFail};

/// Threads of a block, which works on one row: 16 for each of 32 tiles at a time.
pub(in crate::ops) const THREADS: u32 = 512;

/// Tiles of a row.
pub(in crate::ops) fn tiles(vocab: usize) -> u32 {
    vocab.div_ceil(TILE) as u32
}

/// Rows of logits[R, V].
pub(in crate::ops) fn rows(len: usize, vocab: usize, named: usize) -> u32 {
    assert!(vocab > 0, "a softmax over no entries");
    assert_eq!(len, named * vocab, "logits are not [{named}, {vocab}]");
    u32::try_from(named).expect("rows are counted in 32 bits")
}

/// A target outside the vocabulary would be read from another row.
fn upload(gpu: &Gpu, targets: &[TokenId], vocab: usize) -> CudaSlice<u32> {
    let outside = targets.iter().find(|target| target.index() >= vocab);
    assert!(outside.is_none(), "target {outside:?} of a vocabulary of {vocab}");
    gpu.upload(&targets.iter().map(|target| target.get()).collect::<Vec<_>>())
}

/// log p of each row's target, in nats, where log p is of logits[R, V] / `temperature`. One
/// download.
#[must_use]
pub fn log_probs(
    gpu: &Gpu,
    logits_rv: &CudaView<'_, f32>,
    vocab: usize,
    targets: &[TokenId],
    temperature: f32,
) -> Vec<f32> {
    let rows = rows(logits_rv.len(), vocab, targets.len());
    if rows == 0 {
        return Vec::new();
    }
    let targets_r = upload(gpu, targets, vocab);
    let mut log_probs_r = gpu.uninit::<f32>(targets.len());
    launch!(gpu, Kernel::log_softmax_forward, (rows, 1), THREADS, 4 * tiles(vocab);
        logits_rv, &(vocab as u64), &temperature, &targets_r, &mut log_probs_r);
    gpu.download(&log_probs_r.as_view())
}

/// dlogits[R, V], overwritten: the gradient by logits[R, V] from `upstream`, that by each row's
/// log p(target), where log p is of logits / `temperature`.
pub fn backward(
    gpu: &Gpu,
    logits_rv: &CudaView<'_, f32>,
    vocab: usize,
    targets: &[TokenId],
    upstream: &[f32],
    temperature: f32,
    dlogits_rv: &mut CudaViewMut<'_, f32>,
) {
    let rows = rows(logits_rv.len(), vocab, targets.len());
    assert_eq!(targets.len(), upstream.len(), "one gradient a target");
    assert_eq!(logits_rv.len(), dlogits_rv.len(), "logits and gradient differ");
    if rows == 0 {
        return;
    }
    let targets_r = upload(gpu, targets, vocab);
    // By the logits themselves: the division's own gradient.
    let scaled: Vec<f32> = upstream.iter().map(|up| up / temperature).collect();
    let upstream_r = gpu.upload(&scaled);
    launch!(gpu, Kernel::log_softmax_backward, (rows, 1), THREADS, 4 * tiles(vocab);
        logits_rv, &(vocab as u64), &temperature, &targets_r, &upstream_r, dlogits_rv);
}
