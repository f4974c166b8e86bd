//! From a row of logits to a sampled token and its log-probability under a [`Contract`].
//!
//! The order is vLLM's (`v1/sample/sampler.py`): temperature, min-p, top-k, top-p. Sampling never
//! changes a log-probability: both sides score through
//! [`Sampler::log_prob`].

#[cfg(feature = "cuda")]
pub mod cuda;
mod drawn;

pub use drawn::{Drawn, Noises};

use super::array::Array;
use super::log_softmax::{Normaliser, TILE};
use super::simd::{exp, vectorized, LANES};
use crate::base::{Contract, LogProb, TokenId};

/// A prefix whose mass is within this of top-p has reached it, so that probabilities which add up
/// to top-p exactly do not keep one token more by rounding.
const TOP_P_SLACK: f64 = 1e-6;

/// Divides by the temperature and sets to -inf what the filters remove. Greedy contracts change
/// nothing. At least the most likely token stays. A row with a NaN is not filtered: a sort would
/// put the NaN first or last by its sign, and a filter that removes it would hide it.
pub fn process(logits_v: &mut [f32], contract: &Contract) {
    if contract.is_greedy() {
        return;
    }
    if contract.temperature != 1.0 {
        vectorized(
            #[inline(always)]
            || logits_v.iter_mut().for_each(|x| *x /= contract.temperature),
        );
    }
    if logits_v.iter().any(|x| x.is_nan()) {
        return;
    }
    if contract.min_p > 0.0 {
        keep_min_p(logits_v, contract.min_p);
    }
    if contract.top_k > 0 || contract.top_p < 1.0 {
        keep_top(logits_v, contract.top_k as usize, f64::from(contract.top_p));
    }
}

fn maximum(logits_v: &[f32]) -> f32 {
    logits_v.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x))
}

/// Keeps p >= min_p · (largest p).
fn keep_min_p(logits_v: &mut [f32], min_p: f32) {
    let max = maximum(logits_v);
    vectorized(
        #[inline(always)]
        || {
            for x in logits_v.iter_mut() {
                *x = if exp(*x - max) < min_p { f32::NEG_INFINITY } else { *x };
            }
        },
    );
}

/// Keeps everything at least the k-th largest (k = 0: everything), and of that the smallest set of
/// the likeliest tokens whose mass reaches top-p; equal logits in order of their ids.
fn keep_top(logits_v: &mut [f32], k: usize, top_p: f64) {
    let mut order: Vec<usize> = (0..logits_v.len()).collect();
    order.sort_by(|&a, &b| logits_v[b].total_cmp(&logits_v[a]).then(a.cmp(&b)));
    let mut kept = order.len();
    if k > 0 && k < kept {
        let bound = logits_v[order[k - 1]];
        kept = order.partition_point(|&i| logits_v[i] >= bound).max(1);
    }
    if top_p < 1.0 {
        let max = logits_v[order[0]];
        let mut masses: Vec<f32> = order[..kept].iter().map(|&i| logits_v[i] - max).collect();
        vectorized(
            #[inline(always)]
            || masses.iter_mut().for_each(|x| *x = exp(*x)),
        );
        let enough =
            (top_p - TOP_P_SLACK) * masses.iter().map(|&mass| f64::from(mass)).sum::<f64>();
        let mut before = 0.0;
        let reaches = |&&mass: &&f32| {
            let open = before < enough;
            before += f64::from(mass);
            open
        };
        kept = masses.iter().take_while(reaches).count().max(1);
    }
    for &i in &order[kept..] {
        logits_v[i] = f32::NEG_INFINITY;
    }
}

/// The most likely token, the lowest id among equals. NaN never wins unless all are NaN.
#[must_use]
pub fn argmax(logits_v: &[f32]) -> TokenId {
    let best = logits_v.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, &x)| {
        if x > best.1 {
            (i, x)
        } else {
            best
        }
    });
    TokenId::new(best.0 as u32)
}

/// e^(x - max), what an entry weighs.
#[inline(always)]
fn mass(x: f32, max: f32) -> f64 {
    f64::from(exp(x - max))
}

/// Sum of one tile's masses: [`LANES`] lanes, folded in halves, as `simd::sum_by` has them in f32.
fn tile_mass(tile: &[f32], max: f32) -> f64 {
    vectorized(
        #[inline(always)]
        || {
            let mut lanes = [0.0; LANES];
            for chunk in tile.chunks(LANES) {
                lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane += mass(x, max));
            }
            let mut width = LANES / 2;
            while width > 0 {
                for lane in 0..width {
                    lanes[lane] += lanes[lane + width];
                }
                width /= 2;
            }
            lanes[0]
        },
    )
}

/// The token at `noise` in [0, 1) of the cumulative distribution of processed logits, ids
/// ascending: first the tile of the vocabulary, then the token within it, in f64 sums of one order.
/// With a NaN among them it is the last token that has any mass.
#[must_use]
pub fn draw(processed_v: &[f32], noise: f64) -> TokenId {
    assert!((0.0..1.0).contains(&noise), "noise of {noise} is not in [0, 1)");
    let max = maximum(processed_v);
    let tiles = || processed_v.chunks(TILE).map(|tile| tile_mass(tile, max));
    let target = noise * tiles().fold(0.0, |sum, tile| sum + tile);
    if target.is_nan() {
        let last = processed_v.iter().rposition(|&x| mass(x, max) > 0.0);
        // No mass at all (NaN or -inf everywhere) is the caller's finding, not a crash.
        return last.map_or_else(|| argmax(processed_v), |i| TokenId::new(i as u32));
    }
    let (mut sum, mut start) = (0.0, 0);
    for tile in tiles() {
        // The last of these sums is the total, which is more than the target.
        if sum + tile > target {
            break;
        }
        sum += tile;
        start += TILE;
    }
    let mut last = start;
    for (i, &x) in processed_v.iter().enumerate().skip(start).take(TILE) {
        let p = mass(x, max);
        if p > 0.0 {
            last = i;
            sum += p;
            if sum > target {
                break;
            }
        }
    }
    TokenId::new(last as u32)
}

/// Scores and draws with one scratch row, so that nothing is allocated a token.
#[derive(Clone, Debug, Default)]
pub struct Sampler {
    processed_v: Vec<f32>,
}

impl Sampler {
    /// log p(token) under the contract; -inf where a filter removed the token.
    #[must_use]
    pub fn log_prob(&mut self, logits_v: &[f32], token: TokenId, contract: &Contract) -> LogProb {
        let row = if contract.scores_raw_logits() {
            logits_v
        } else {
            self.load(logits_v, contract);
            &self.processed_v
        };
        let nats = Normaliser::of(row).log_prob(row[token.index()]);
        // Sign and payload of a NaN depend on the tile that made it; a record must not.
        LogProb::new(if nats.is_nan() { f32::NAN } else { nats })
    }

    /// The token that `noise` picks, and its log-probability under the contract.
    #[must_use]
    pub fn sample(
        &mut self,
        logits_v: &[f32],
        noise: f64,
        contract: &Contract,
    ) -> (TokenId, LogProb) {
        let token = if contract.is_greedy() {
            argmax(logits_v)
        } else {
            self.load(logits_v, contract);
            draw(&self.processed_v, noise)
        };
        (token, self.log_prob(logits_v, token, contract))
    }

    fn load(&mut self, logits_v: &[f32], contract: &Contract) {
        self.processed_v.clear();
        self.processed_v.extend_from_slice(logits_v);
        process(&mut self.processed_v, contract);
    }
}

/// A token for each row of logits[R, V], the one that its noise picks, and its log-probability.
#[must_use]
pub fn sample_rows(logits_rv: &Array, vocab: usize, noise: &Noises, contract: &Contract) -> Drawn {
    assert_eq!(logits_rv.len(), noise.len() * vocab, "one number a row of logits");
    match logits_rv {
        Array::Cpu(logits_rv) => {
            let mut sampler = Sampler::default();
            let each = logits_rv.chunks_exact(vocab).zip(noise.iter());
            Drawn::Done(each.map(|(row, &noise)| sampler.sample(row, noise, contract)).collect())
        }
        #[cfg(feature = "cuda")]
        Array::Cuda(logits_rv) if contract.has_filters() => {
            Drawn::Done(cuda::sample_rows_on_host(logits_rv, vocab, noise, contract))
        }
        #[cfg(feature = "cuda")]
        Array::Cuda(logits_rv) => Drawn::Cuda(cuda::sample_rows(logits_rv, vocab, noise, contract)),
    }
}

/// log p of each row's target under the contract, from logits[R, V].
#[must_use]
pub fn log_prob_rows(
    logits_rv: &Array,
    vocab: usize,
    targets: &[TokenId],
    contract: &Contract,
) -> Vec<LogProb> {
    assert_eq!(logits_rv.len(), targets.len() * vocab, "one target a row of logits");
    match logits_rv {
        Array::Cpu(logits_rv) => {
            let mut sampler = Sampler::default();
            let each = logits_rv.chunks_exact(vocab).zip(targets);
            each.map(|(row, &token)| sampler.log_prob(row, token, contract)).collect()
        }
        #[cfg(feature = "cuda")]
        Array::Cuda(logits_rv) => {
            cuda::log_prob_rows(logits_rv.gpu(), &logits_rv.view(), vocab, targets, contract)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{LogprobsMode, Stream};

    const FOUR: [f32; 4] = [0.5, 0.3, 0.15, 0.05];

    fn logits(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    fn contract(change: impl FnOnce(&mut Contract)) -> Contract {
        let mut contract = Contract::PLAIN;
        change(&mut contract);
        contract
    }

    #[test]
    fn filters_keep_what_they_say() {
        let cases: [(&str, Contract, &[usize]); 11] = [
            ("none", Contract::PLAIN, &[0, 1, 2, 3]),
            ("top_p reached exactly", contract(|c| c.top_p = 0.8), &[0, 1]),
            ("top_p between", contract(|c| c.top_p = 0.81), &[0, 1, 2]),
            ("top_p tiny", contract(|c| c.top_p = 1e-9), &[0]),
            ("top_k 1", contract(|c| c.top_k = 1), &[0]),
            ("top_k 3", contract(|c| c.top_k = 3), &[0, 1, 2]),
            ("top_k beyond", contract(|c| c.top_k = 9), &[0, 1, 2, 3]),
            ("min_p", contract(|c| c.min_p = 0.29), &[0, 1, 2]),
            // The mass of top_p is of what top_k left: 0.5 / 0.8 < 0.7.
            ("top_k, then top_p", contract(|c| (c.top_k, c.top_p) = (2, 0.7)), &[0, 1]),
            // Of what min-p leaves, 0.8, the first has 0.625; of everything it has 0.5.
            ("min_p, then top_p", contract(|c| (c.min_p, c.top_p) = (0.5, 0.6)), &[0]),
            // At T = 1/2 probabilities are squared: 0.09 / 0.25 < 0.5 < 0.3 / 0.5.
            ("T, then min_p", contract(|c| (c.temperature, c.min_p) = (0.5, 0.5)), &[0]),
        ];
        for (name, contract, want) in cases {
            let mut row = logits(&FOUR);
            process(&mut row, &contract);
            let kept: Vec<usize> = (0..4).filter(|&i| row[i].is_finite()).collect();
            assert_eq!(kept, want, "{name}");
        }
    }

    #[test]
    fn equal_logits_go_by_id_in_top_p_and_stay_together_in_top_k() {
        let mut row = vec![1.0; 4];
        process(&mut row, &contract(|c| c.top_p = 0.5));
        assert_eq!(row, [1.0, 1.0, f32::NEG_INFINITY, f32::NEG_INFINITY]);
        let mut row = vec![1.0; 4];
        process(&mut row, &contract(|c| c.top_k = 2));
        assert_eq!(row, [1.0; 4]);
    }

    #[test]
    fn log_probs_mean_what_the_contract_says() {
        // Logits 2, 1, 0: raw and at T = 0.5 (trl#4159); top-p 0.8 of FOUR renormalises by 0.8.
        let three = [2.0, 1.0, 0.0];
        let cold = contract(|c| c.temperature = 0.5);
        let processed = |mut c: Contract| {
            c.logprobs_mode = LogprobsMode::ProcessedLogprobs;
            c
        };
        let four = logits(&FOUR);
        for (name, row, token, contract, want) in [
            ("raw ignores T", &three[..], 0, cold, -0.407_606),
            ("processed", &three, 0, processed(cold), -0.142_932),
            ("processed, third", &three, 2, processed(cold), -4.142_932),
            ("greedy is raw", &three, 0, processed(contract(|c| c.temperature = 0.0)), -0.407_606),
            ("top-p", &four, 1, processed(contract(|c| c.top_p = 0.8)), 0.375_f32.ln()),
            ("removed", &four, 3, processed(contract(|c| c.top_p = 0.8)), f32::NEG_INFINITY),
        ] {
            let got = Sampler::default().log_prob(row, TokenId::new(token), &contract).get();
            assert!((got - want).abs() < 1e-6 || got == want, "{name}: {got} against {want}");
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        let mut stream = Stream::new(11, "draws", 0);
        let (row, mut sampler) = (logits(&FOUR), Sampler::default());
        let mut counts = [0_u32; 4];
        let n = 40_000;
        for _ in 0..n {
            let (token, logp) = sampler.sample(&row, stream.uniform(), &Contract::PLAIN);
            counts[token.index()] += 1;
            assert!((logp.get() - FOUR[token.index()].ln()).abs() < 1e-6);
        }
        for (count, p) in counts.iter().zip(FOUR) {
            let sigma = (f64::from(p) * f64::from(1.0 - p) / f64::from(n)).sqrt();
            let share = f64::from(*count) / f64::from(n);
            assert!((share - f64::from(p)).abs() < 5.0 * sigma, "{counts:?}");
        }
        assert_eq!(draw(&row, 0.0), TokenId::new(0));
        assert_eq!(draw(&row, 1.0 - 1e-16), TokenId::new(3));
        assert_eq!(draw(&[f32::NEG_INFINITY, 0.0], 0.0), TokenId::new(1));
    }

    /// Every token of equal mass has its own interval, over tiles and their remainders.
    #[test]
    fn a_draw_finds_the_token_whose_interval_holds_the_noise() {
        for vocab in [1, 17, 1023, 1024, 1025, 3000] {
            let row = vec![0.5; vocab];
            for token in 0..vocab {
                let middle = (token as f64 + 0.5) / vocab as f64;
                assert_eq!(draw(&row, middle).index(), token, "of {vocab}");
            }
        }
        // Nothing outside the second tile weighs anything.
        let mut row = vec![f32::NEG_INFINITY; 3000];
        (row[1500], row[1501]) = (1.0, 1.0);
        for (noise, want) in [(0.0, 1500), (0.49, 1500), (0.5, 1501), (0.99, 1501)] {
            assert_eq!(draw(&row, noise).index(), want, "{noise}");
        }
    }

    #[test]
    fn no_filter_hides_a_nan() {
        // Hardware makes NaN with either sign: inf - inf has its sign set on x86.
        for nan in [f32::NAN, -f32::NAN] {
            for filter in [
                contract(|c| c.top_p = 0.5),
                contract(|c| c.top_k = 2),
                contract(|c| c.min_p = 0.9),
                contract(|c| c.temperature = 0.5),
            ] {
                let filter = Contract { logprobs_mode: LogprobsMode::ProcessedLogprobs, ..filter };
                let row = [1.0, nan, 0.5, -3.0, f32::NEG_INFINITY];
                let (token, logp) = Sampler::default().sample(&row, 0.3, &filter);
                assert_eq!(token, TokenId::new(3), "{filter:?}");
                assert!(logp.get().is_nan(), "{filter:?}: {logp:?}");
            }
        }
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, f32::NAN]), TokenId::new(1));
        assert_eq!(argmax(&[f32::NAN, f32::NAN]), TokenId::new(0));
    }
}
