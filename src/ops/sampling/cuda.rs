//! Sampling on the device, token for token and bit for bit the CPU's (kernels/sampling.cu).
//!
//! Filters sort a row. A contract with any is left to the CPU: its rows are downloaded.

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use cudarc::driver::CudaView;
use rayon::prelude::*;

use super::Sampler;
use crate::base::{Contract, LogProb, TokenId};
use crate::ops::cuda::{launch, Gpu, Kernel, OrFail};
use crate::ops::log_softmax::cuda::{log_probs, rows, tiles, THREADS};

/// What scores are divided by before the softmax.
fn score_temperature(contract: &Contract) -> f32 {
    if contract.scores_raw_logits() {
        1.0
    } else {
        contract.temperature
    }
}

/// Sign and payload of a NaN depend on the device that made it; a record must not.
fn recorded(nats: f32) -> LogProb {
    LogProb::new(if nats.is_nan() { f32::NAN } else { nats })
}

/// A token for each row of logits[R, V], the one that its noise in [0, 1) picks, and its
/// log-probability: see [`Sampler::sample`]. One download.
#[must_use]
pub fn sample_rows(
    gpu: &Gpu,
    logits_rv: &CudaView<'_, f32>,
    vocab: usize,
    noise: &[f64],
    contract: &Contract,
) -> Vec<(TokenId, LogProb)> {
    let rows = rows(logits_rv.len(), vocab, noise.len());
    let outside = noise.iter().find(|noise| !(0.0..1.0).contains(*noise));
    assert!(outside.is_none(), "noise of {outside:?} is not in [0, 1)");
    if rows == 0 {
        return Vec::new();
    }
    if contract.has_filters() {
        let logits_rv = gpu.download(logits_rv);
        let each = logits_rv.par_chunks_exact(vocab).zip(noise);
        let sample = |sampler: &mut Sampler, (row, &noise): (&[f32], &f64)| {
            sampler.sample(row, noise, contract)
        };
        return each.map_init(Sampler::default, sample).collect();
    }
    let noise_r = gpu.upload(noise);
    let mut picks_r2 = gpu.uninit::<u32>(2 * noise.len());
    launch!(gpu, Kernel::sample_rows, (rows, 1), THREADS, 8 * tiles(vocab);
        logits_rv, &(vocab as u64), &contract.temperature, &u32::from(contract.is_greedy()),
        &noise_r, &score_temperature(contract), &mut picks_r2);
    let picks_r2 = gpu.download(&picks_r2.as_view());
    let (picks, _) = picks_r2.as_chunks::<2>();
    picks
        .iter()
        .map(|&[token, nats]| (TokenId::new(token), recorded(f32::from_bits(nats))))
        .collect()
}

/// log p of each row's target under the contract, from logits[R, V]: see [`Sampler::log_prob`]. One
/// download.
#[must_use]
pub fn log_prob_rows(
    gpu: &Gpu,
    logits_rv: &CudaView<'_, f32>,
    vocab: usize,
    targets: &[TokenId],
    contract: &Contract,
) -> Vec<LogProb> {
    if contract.scores_raw_logits() || !contract.has_filters() {
        let temperature = score_temperature(contract);
        let nats = log_probs(gpu, logits_rv, vocab, targets, temperature);
        return nats.into_iter().map(recorded).collect();
    }
    rows(logits_rv.len(), vocab, targets.len());
    let logits_rv = gpu.download(logits_rv);
    let each = logits_rv.par_chunks_exact(vocab).zip(targets);
    let score = |sampler: &mut Sampler, (row, &token): (&[f32], &TokenId)| {
        sampler.log_prob(row, token, contract)
    };
    each.map_init(Sampler::default, score).collect()
}
