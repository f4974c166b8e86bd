//! Measures of whole sequences: sums, geometric means, perplexities.

use super::pair::{PairedToken, Sequence};
use super::stats;
use super::table::Values;

/// A row a sequence, not a token: every sequence with a compared token counts once.
#[derive(Clone, Debug, Default)]
pub(super) struct Sequences {
    /// The sum of d.
    sums: Vec<f64>,
    /// The mean of d.
    means: Vec<f64>,
    /// The mean of each side's logp.
    infer: Vec<f64>,
    train: Vec<f64>,
    /// The mean of exp|d|.
    errors: Vec<f64>,
}

impl Sequences {
    pub(super) fn add(&mut self, sequence: &Sequence) {
        let n = sequence.finite().count() as f64;
        if n == 0.0 {
            return;
        }
        let sum = |value: fn(&PairedToken) -> f64| sequence.finite().map(value).sum::<f64>();
        let d = sum(PairedToken::d);
        self.sums.push(d);
        self.means.push(d / n);
        self.infer.push(sum(|token| f64::from(token.infer.get())) / n);
        self.train.push(sum(|token| f64::from(token.train.get())) / n);
        self.errors.push(sum(|token| token.d().abs().exp()) / n);
    }

    pub(super) fn len(&self) -> usize {
        self.sums.len()
    }

    pub(super) fn values(&self) -> Values {
        let Self { sums, means, infer, train, errors } = self;
        [products(sums, means), errors_of(errors), perplexities(means, infer, train)].concat()
    }
}

/// `sums` holds the sum of d of each sequence, `means` its mean.
fn products(sums: &[f64], means: &[f64]) -> Values {
    let doubled = sums.iter().map(|sum| 2.0 * sum);
    let ess = stats::effective_share(sums.iter().copied());
    let reliable = ess.map(|share| f64::from(u8::from(share * sums.len() as f64 >= 5.0)));
    let outside = |mean: f64| mean < 0.999_f64.ln() || mean > 1.002_f64.ln();
    vec![
        ("seq_log_ratio_mean", stats::mean(sums)),
        ("seq_log_ratio_std", stats::std(sums)),
        ("seq_log_ratio_min", stats::min(sums)),
        ("seq_log_ratio_max", stats::max(sums)),
        ("seq_geo_ratio_min", stats::min(means).map(f64::exp)),
        ("seq_geo_ratio_max", stats::max(means).map(f64::exp)),
        ("frac_ratio_out_0.999_1.002", stats::fraction(means.iter().copied(), outside)),
        ("ess_seq", ess),
        ("log_e_rho2_seq", stats::log_mean_exp(doubled)),
        ("log_e_rho2_seq_reliable", reliable),
    ]
}

/// `errors` holds mean exp|d| of each sequence.
fn errors_of(errors: &[f64]) -> Values {
    let share_over = |bound| stats::fraction(errors.iter().copied(), |error| error > bound);
    vec![
        ("seq_mult_prob_error_mean", stats::mean(errors)),
        ("seq_mult_prob_error_max", stats::max(errors)),
        ("frac_seq_bad_1.05", share_over(1.05)),
        ("frac_seq_bad_2", share_over(2.0)),
    ]
}

/// `means`, `infer` and `train` hold the mean of d and of each side's logp of each sequence.
fn perplexities(means: &[f64], infer: &[f64], train: &[f64]) -> Values {
    let each = |values: &[f64], term: fn(f64) -> f64| -> Vec<f64> {
        values.iter().map(|&value| term(value)).collect()
    };
    let diffs = each(means, |mean| -mean);
    vec![
        ("ppl_infer", stats::mean(&each(infer, |mean| (-mean).exp()))),
        ("ppl_train", stats::mean(&each(train, |mean| (-mean).exp()))),
        ("log_ppl_diff_mean", stats::mean(&diffs)),
        ("log_ppl_diff_abs_mean", stats::mean(&each(&diffs, f64::abs))),
        ("log_ppl_diff_max", stats::max(&diffs)),
        ("log_ppl_diff_min", stats::min(&diffs)),
        ("ppl_ratio", stats::mean(&each(&diffs, f64::exp))),
    ]
}
