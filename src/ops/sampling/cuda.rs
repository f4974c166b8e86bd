//! Sampling on the device, token for token and bit for bit the CPU's (kernels/sampling.cu).
//!
//! Filters sort a row. A contract with any is left to the CPU: its rows are downloaded.

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use cudarc::driver::CudaView;
use rayon::prelude::*;

use super::{Noises, Sampler};
use crate::base::{Contract, LogProb, TokenId};
use crate::config::Dtype;
use crate::ops::cuda::{launch, Floats, Gpu, Kernel, OrFail};
use crate::ops::log_softmax::cuda::{log_probs, rows, tiles};

/// Tiles of one block of threads, and threads of a tile.
const TILES_AT_ONCE: u32 = 8;
const LANES: u32 = crate::ops::simd::LANES as u32;

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

/// Tokens and log-probabilities on their way from a launch.
#[derive(Debug)]
pub struct Picks {
    /// `[R, 2]`: a token, and the bits of its log-probability.
    picks_r2: Floats,
}

impl Picks {
    /// What the last launch has left, once it is done.
    #[must_use]
    pub fn read(&self) -> Vec<(TokenId, LogProb)> {
        let picks = self.picks_r2.to_host();
        let (picks, _) = picks.as_chunks::<2>();
        let pick = |&[token, nats]: &[f32; 2]| (TokenId::new(token.to_bits()), recorded(nats));
        picks.iter().map(pick).collect()
    }
}

/// A token for each row of logits[R, V], the one that its noise picks, and its log-probability: see
/// [`Sampler::sample`]. The contract has no filters.
#[must_use]
pub fn sample_rows(logits_rv: &Floats, vocab: usize, noise: &Noises, contract: &Contract) -> Picks {
    let gpu = logits_rv.gpu();
    assert!(!contract.has_filters(), "filters are the CPU's");
    let rows = rows(logits_rv.len(), vocab, noise.len());
    let picks_r2 = Floats::uninit(gpu, 2 * noise.len(), Dtype::F32);
    if rows == 0 {
        return Picks { picks_r2 };
    }
    let score_temperature = score_temperature(contract);
    let scored = Tiles::new(logits_rv, vocab, rows, score_temperature);
    // Mostly they are one distribution, whose exponentials are taken once.
    let same = contract.is_greedy() || contract.temperature == score_temperature;
    let other = (!same).then(|| Tiles::new(logits_rv, vocab, rows, contract.temperature));
    let drawn = other.as_ref().unwrap_or(&scored);
    launch!(gpu, Kernel::sample_picks, (rows, 1), TILES_AT_ONCE * LANES, 0;
        &logits_rv.view(), &(vocab as u64), &contract.temperature,
        &u32::from(contract.is_greedy()), &noise.numbers().address(gpu), &score_temperature,
        &drawn.bests(), &drawn.doubles(), &scored.bests(), &scored.singles(),
        &picks_r2.rows(2).address());
    Picks { picks_r2 }
}

/// Each tile's largest logit and its mass, of logits[R, V] / temperature.
struct Tiles {
    /// `[R, T, 2]`: a value and the bits of its index.
    bests: Floats,
    singles: Floats,
    /// Each two words.
    doubles: Floats,
}

impl Tiles {
    fn new(logits_rv: &Floats, vocab: usize, rows: u32, temperature: f32) -> Self {
        let (gpu, count) = (logits_rv.gpu(), tiles(vocab));
        let each = rows as usize * count as usize;
        let [bests, singles, doubles] =
            [2, 1, 2].map(|words| Floats::uninit(gpu, words * each, Dtype::F32));
        let tiles = Self { bests, singles, doubles };
        let (grid, threads) = ((rows, count.div_ceil(TILES_AT_ONCE)), TILES_AT_ONCE * LANES);
        let (logits, vocab) = (logits_rv.view(), vocab as u64);
        launch!(gpu, Kernel::sample_bests, grid, threads, 0;
            &logits, &vocab, &temperature, &tiles.bests());
        launch!(gpu, Kernel::sample_masses, grid, threads, 0;
            &logits, &vocab, &temperature, &tiles.bests(), &tiles.singles(), &tiles.doubles());
        tiles
    }

    fn bests(&self) -> u64 {
        self.bests.rows(1).address()
    }

    fn singles(&self) -> u64 {
        self.singles.rows(1).address()
    }

    fn doubles(&self) -> u64 {
        self.doubles.rows(1).address()
    }
}

/// The same under any contract, by the CPU.
#[must_use]
pub fn sample_rows_on_host(
    logits_rv: &Floats,
    vocab: usize,
    noise: &[f64],
    contract: &Contract,
) -> Vec<(TokenId, LogProb)> {
    let logits_rv = logits_rv.to_host();
    let each = logits_rv.par_chunks_exact(vocab).zip(noise);
    let sample =
        |sampler: &mut Sampler, (row, &noise): (&[f32], &f64)| sampler.sample(row, noise, contract);
    each.map_init(Sampler::default, sample).collect()
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
