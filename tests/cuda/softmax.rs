//! Log-probabilities, their gradient and sampling on the device against their CPU twins: the same
//! tokens and the same bits.

use std::sync::Arc;

use gapscope::base::{Contract, LogProb, LogprobsMode, Stream, TokenId};
use gapscope::config::Dtype;
use gapscope::ops::array::{Array, Device};
use gapscope::ops::cuda::Floats;
use gapscope::ops::log_softmax::{self, cuda};
use gapscope::ops::sampling::cuda::log_prob_rows;
use gapscope::ops::sampling::{sample_rows, Noises, Sampler};

use crate::sequences::{gpu, random, Report};

/// Below, at and beside lanes and tiles, more tiles than a block takes at once, Jamba's, Qwen's.
const VOCABS: [usize; 11] = [1, 2, 15, 16, 257, 1023, 1024, 1025, 3000, 65_536, 151_936];
const ROWS: [usize; 3] = [1, 3, 33];

/// Rows of several sizes: flat, ordinary, and so peaked that most of a row weighs nothing.
fn logits(rows: usize, vocab: usize) -> Vec<f32> {
    let mut logits = random(rows * vocab, 1, Dtype::F32);
    for (row, logits_v) in logits.chunks_exact_mut(vocab).enumerate() {
        let scale = [1.0, 0.0, 8.0, 60.0][row % 4];
        logits_v.iter_mut().for_each(|x| *x *= scale);
    }
    logits
}

/// Rows with what a broken model gives: NaN of either sign, infinities, nothing but those, zeros of
/// either sign, equals.
fn strange(vocab: usize) -> Vec<f32> {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let mut rows = Vec::new();
    for (all, some) in [
        (None, Some(nan)),
        (None, Some(-nan)),
        (None, Some(inf)),
        (None, Some(-inf)),
        (Some(nan), None),
        (Some(-inf), None),
        (Some(inf), None),
        (Some(0.0), Some(-0.0)),
        (Some(-inf), Some(1.0)),
        (Some(-inf), Some(nan)),
        (Some(3.0), Some(3.0)),
    ] {
        let mut row = all.map_or_else(|| random(vocab, 9, Dtype::F32), |x| vec![x; vocab]);
        if let Some(x) = some {
            row[vocab / 2] = x;
            row[vocab - 1] = x;
        }
        rows.extend(row);
    }
    rows
}

fn targets(rows: usize, vocab: usize) -> Vec<TokenId> {
    let mut stream = Stream::new(2, "cuda test targets", vocab as u64);
    (0..rows).map(|_| TokenId::new(stream.integer(0, vocab as u64 - 1) as u32)).collect()
}

fn contracts() -> Vec<Contract> {
    let of = |change: &dyn Fn(&mut Contract)| {
        let mut contract = Contract::PLAIN;
        change(&mut contract);
        let mut processed = contract;
        processed.logprobs_mode = LogprobsMode::ProcessedLogprobs;
        [contract, processed]
    };
    let without = [of(&|_| ()), of(&|c| c.temperature = 0.7), of(&|c| c.temperature = 0.0)];
    let with = [of(&|c| c.top_k = 3), of(&|c| (c.temperature, c.top_p) = (1.3, 0.9))];
    without.into_iter().chain(with).flatten().collect()
}

fn nats(log_probs: &[LogProb]) -> Vec<f32> {
    log_probs.iter().map(|log_prob| log_prob.get()).collect()
}

/// Token ids as bytes, which a report can compare.
fn bytes(tokens: &[TokenId]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.get().to_le_bytes()).collect()
}

/// Every batch of a vocabulary: logits, one row after another.
fn batches(vocab: usize) -> Vec<Vec<f32>> {
    // Many rows of a large vocabulary would take the CPU minutes to sort.
    let fits = |rows: &usize| rows * vocab <= 500_000;
    let ordinary = ROWS.into_iter().filter(fits).map(|rows| logits(rows, vocab));
    ordinary.chain([strange(vocab)]).collect()
}

#[test]
fn targets_log_probs() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (vocab, logits) in
        VOCABS.into_iter().flat_map(|v| batches(v).into_iter().map(move |l| (v, l)))
    {
        let targets = targets(logits.len() / vocab, vocab);
        let device = gpu.upload(&logits);
        for contract in contracts() {
            let mut sampler = Sampler::default();
            let rows = logits.chunks_exact(vocab).zip(&targets);
            let want: Vec<LogProb> =
                rows.map(|(row, &token)| sampler.log_prob(row, token, &contract)).collect();
            let got = log_prob_rows(&gpu, &device.as_view(), vocab, &targets, &contract);
            let what = || format!("{} of {vocab}, {contract:?}", targets.len());
            report.same(what, &nats(&got), &nats(&want));
        }
    }
    report.finish("log_prob_rows");
}

#[test]
fn samples() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (vocab, logits) in
        VOCABS.into_iter().flat_map(|v| batches(v).into_iter().map(move |l| (v, l)))
    {
        let count = logits.len() / vocab;
        let device = Array::Cuda(Floats::upload(&gpu, &logits));
        let mut stream = Stream::new(3, "cuda test noise", vocab as u64);
        for contract in contracts() {
            let mut noise: Vec<f64> = (0..count).map(|_| stream.uniform()).collect();
            noise[0] = 0.0;
            noise[count / 2] = 1.0 - f64::EPSILON / 2.0;
            let mut sampler = Sampler::default();
            let rows = logits.chunks_exact(vocab).zip(&noise);
            let (tokens, log_probs): (Vec<TokenId>, Vec<LogProb>) =
                rows.map(|(row, &noise)| sampler.sample(row, noise, &contract)).unzip();
            let noise = Noises::new(&Device::Cuda(Arc::clone(&gpu)), noise);
            let got = sample_rows(&device, vocab, &noise, &contract).read();
            let (got_tokens, got_log_probs): (Vec<TokenId>, Vec<LogProb>) = got.into_iter().unzip();
            let what = || format!("{count} of {vocab}, {contract:?}");
            report.same_bytes(what, &bytes(&got_tokens), &bytes(&tokens));
            report.same(what, &nats(&got_log_probs), &nats(&log_probs));
        }
    }
    report.finish("sample_rows");
}

#[test]
fn gradients() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (vocab, logits) in
        VOCABS.into_iter().flat_map(|v| batches(v).into_iter().map(move |l| (v, l)))
    {
        let count = logits.len() / vocab;
        let (targets, upstream) = (targets(count, vocab), random(count, 4, Dtype::F32));
        for temperature in [1.0, 0.7] {
            let mut want = vec![0.0; logits.len()];
            let rows = logits.chunks_exact(vocab).zip(want.chunks_exact_mut(vocab));
            for ((row, to), (target, up)) in rows.zip(targets.iter().zip(&upstream)) {
                let scaled: Vec<f32> = row.iter().map(|x| x / temperature).collect();
                log_softmax::backward(&scaled, target.index(), up / temperature, to);
            }
            let mut got = gpu.upload(&vec![f32::NAN; logits.len()]);
            let device = gpu.upload(&logits);
            let (logits, mut to) = (device.as_view(), got.as_view_mut());
            cuda::backward(&gpu, &logits, vocab, &targets, &upstream, temperature, &mut to);
            let what = || format!("{count} of {vocab} at {temperature}");
            report.same(what, &gpu.download(&got.as_view()), &want);
        }
    }
    report.finish("log_softmax backward");
}

/// The same rows twice, alone and together: a row's bits are its own.
#[test]
fn a_row_does_not_depend_on_its_batch() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let (rows, vocab) = (40, 65_536);
    let logits = logits(rows, vocab);
    let targets = targets(rows, vocab);
    let device = gpu.upload(&logits);
    let together = cuda::log_probs(&gpu, &device.as_view(), vocab, &targets, 0.9);
    for row in 0..rows {
        let alone = device.slice(row * vocab..(row + 1) * vocab);
        let got = cuda::log_probs(&gpu, &alone, vocab, &targets[row..=row], 0.9);
        report.same(|| format!("row {row}"), &got, &together[row..=row]);
    }
    report.finish("log_softmax rows alone");
}
