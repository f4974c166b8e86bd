//! Measures of whole sequences: sums, geometric means, perplexities.

use super::pair::{PairedToken, Pairs, Sequence};
use super::stats;
use super::table::Values;

/// Weighted by sequence, not by token: every sequence with a compared token counts once.
pub(super) fn values(pairs: &Pairs) -> Values {
    let column = |value: fn(&Sequence) -> Option<f64>| -> Vec<f64> {
        pairs.sequences.iter().filter_map(value).collect()
    };
    let sums = column(|sequence| sequence.finite().map(PairedToken::d).reduce(|sum, d| sum + d));
    let means = column(|sequence| mean_of(sequence, PairedToken::d));
    let infer = column(|sequence| mean_of(sequence, |token| f64::from(token.infer.get())));
    let train = column(|sequence| mean_of(sequence, |token| f64::from(token.train.get())));
    let errors = column(|sequence| mean_of(sequence, |token| token.d().abs().exp()));
    [products(&sums, &means), errors_of(&errors), perplexities(&means, &infer, &train)].concat()
}

fn mean_of(sequence: &Sequence, value: impl Fn(&PairedToken) -> f64) -> Option<f64> {
    stats::mean(&sequence.finite().map(value).collect::<Vec<_>>())
}

/// `sums` holds the sum of d of each sequence, `means` its mean.
fn products(sums: &[f64], means: &[f64]) -> Values {
    let doubled: Vec<f64> = sums.iter().map(|sum| 2.0 * sum).collect();
    let ess = stats::effective_share(sums);
    let reliable = ess.map(|share| f64::from(u8::from(share * sums.len() as f64 >= 5.0)));
    let outside = |mean: f64| mean < 0.999_f64.ln() || mean > 1.002_f64.ln();
    vec![
        ("seq_log_ratio_mean", stats::mean(sums)),
        ("seq_log_ratio_std", stats::std(sums)),
        ("seq_log_ratio_min", stats::min(sums)),
        ("seq_log_ratio_max", stats::max(sums)),
        ("seq_geo_ratio_min", stats::min(means).map(f64::exp)),
        ("seq_geo_ratio_max", stats::max(means).map(f64::exp)),
        ("frac_ratio_out_0.999_1.002", stats::fraction(means, outside)),
        ("ess_seq", ess),
        ("log_e_rho2_seq", stats::log_mean_exp(&doubled)),
        ("log_e_rho2_seq_reliable", reliable),
    ]
}

/// `errors` holds mean exp|d| of each sequence.
fn errors_of(errors: &[f64]) -> Values {
    vec![
        ("seq_mult_prob_error_mean", stats::mean(errors)),
        ("seq_mult_prob_error_max", stats::max(errors)),
        ("frac_seq_bad_1.05", stats::fraction(errors, |error| error > 1.05)),
        ("frac_seq_bad_2", stats::fraction(errors, |error| error > 2.0)),
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
