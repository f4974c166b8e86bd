//! The measures of one step, token by token: what each is called and means stands in the table's
//! texts.

use super::pair::{PairedToken, Pairs};
use super::table::{Metric, Table, Values};
use super::{floor, place, sequences, stats};
use crate::rollout::Rollout;

/// Every measure of one comparison. `floor` is the largest |d| that healthy arithmetic explains, in
/// nats.
#[must_use]
pub fn measures(pairs: &Pairs, floor: f64) -> Table {
    let tokens = Tokens::of(pairs);
    let values = [
        counts(pairs, floor),
        differences(&tokens),
        divergences(&tokens),
        ratios(&tokens),
        probabilities(tokens),
        exactness(pairs),
        sequences::values(pairs),
        place::values(pairs, floor),
    ];
    Table::new(pairs.legs, values.concat())
}

/// What the engine said of its own samples, whatever the other legs say: finite values under the
/// loss mask.
#[must_use]
pub fn rollout_measures(rollouts: &[Rollout]) -> Vec<Metric> {
    let logps: Vec<f64> = rollouts
        .iter()
        .flat_map(|rollout| rollout.completion.tokens.iter().zip(&rollout.loss_mask))
        .filter(|(sampled, &counted)| counted && sampled.logp.is_finite())
        .map(|(sampled, _)| f64::from(sampled.logp.get()))
        .collect();
    let row =
        |name, formula, value| Metric { prefix: "rollout".into(), name, formula, alias: "", value };
    vec![
        row("logp_mean", "mean of logp(decode), nats", stats::mean(&logps)),
        row("logp_max", "max of logp(decode), nats", stats::max(&logps)),
    ]
}

/// The compared tokens as columns.
struct Tokens {
    infer: Vec<f64>,
    train: Vec<f64>,
    d: Vec<f64>,
}

impl Tokens {
    fn of(pairs: &Pairs) -> Self {
        let column = |value: fn(&PairedToken) -> f64| pairs.finite().map(value).collect();
        Self {
            infer: column(|token| f64::from(token.infer.get())),
            train: column(|token| f64::from(token.train.get())),
            d: column(PairedToken::d),
        }
    }

    fn mean_of_d(&self, term: impl Fn(f64) -> f64) -> Option<f64> {
        stats::mean_of(self.d.iter().map(|&d| term(d)))
    }
}

fn counts(pairs: &Pairs, floor: f64) -> Values {
    let tokens = |holds: fn(&PairedToken) -> bool| {
        Some(pairs.tokens().filter(|token| holds(token)).count() as f64)
    };
    let n_seqs = pairs.sequences.iter().filter(|sequence| sequence.finite().next().is_some());
    let missing: u64 = pairs.sequences.iter().map(|sequence| sequence.missing).sum();
    let compared = pairs.tokens().next().is_some();
    let spike = compared.then(|| f64::from(u8::from(floor::is_spike(pairs, floor))));
    vec![
        ("n_tokens", tokens(PairedToken::is_finite)),
        ("n_seqs", Some(n_seqs.count() as f64)),
        ("n_missing", Some(missing as f64)),
        ("nonfinite", tokens(|token| !token.is_finite())),
        ("nonfinite_infer", tokens(|token| !token.infer.is_finite())),
        ("nonfinite_train", tokens(|token| !token.train.is_finite())),
        ("spike", spike),
    ]
}

fn differences(tokens: &Tokens) -> Values {
    let mut abs: Vec<f64> = tokens.d.iter().map(|d| d.abs()).collect();
    let low: Vec<f64> = std::iter::zip(&tokens.infer, &abs)
        .filter(|(infer, _)| infer.exp() < 0.01)
        .map(|(_, &abs)| abs)
        .collect();
    // Sums are in record order, so they come before the sort.
    let (mean, std) = (stats::mean(&abs), stats::std(&abs));
    abs.sort_unstable_by(f64::total_cmp);
    let quantile = |q| stats::quantile(&abs, q);
    let share_over = |bound| stats::fraction(&abs, |abs| abs > bound);
    vec![
        ("logp_abs_diff_mean", mean),
        ("logp_abs_diff_std", std),
        ("logp_abs_diff_max", abs.last().copied()),
        ("logp_abs_diff_p50", quantile(0.5)),
        ("logp_abs_diff_p95", quantile(0.95)),
        ("logp_abs_diff_p99", quantile(0.99)),
        ("logp_abs_diff_p999", quantile(0.999)),
        ("logp_diff_mean", stats::mean(&tokens.d)),
        ("lowp_abs_diff_mean", stats::mean(&low)),
        ("frac_abs_gt_1e-6", share_over(1e-6)),
        ("frac_abs_gt_1e-3", share_over(1e-3)),
        ("frac_abs_gt_1e-2", share_over(1e-2)),
        ("frac_abs_gt_0.1", share_over(0.1)),
        ("frac_abs_gt_1", share_over(1.0)),
    ]
}

/// KL estimators over samples of the infer side (Schulman, "Approximating KL Divergence"), and the
/// k3 form of the Jensen-Shannon divergence.
fn divergences(tokens: &Tokens) -> Values {
    let k3: Vec<f64> = tokens.d.iter().map(|&d| d.exp_m1() - d).collect();
    vec![
        ("k1", tokens.mean_of_d(|d| 0.0 - d)),
        ("k2", tokens.mean_of_d(|d| d * d / 2.0)),
        ("k3_mean", stats::mean(&k3)),
        ("k3_max", stats::max(&k3)),
        ("k3_rev_mean", tokens.mean_of_d(|d| (-d).exp_m1() + d)),
        ("js_mean", tokens.mean_of_d(js)),
    ]
}

/// Half the sum of k3(a) and k3(b), where a and b are both log-probabilities less m, the log of
/// their mean probability.
///
/// exp(a) + exp(b) = 2 by the choice of m, so the exponentials cancel against the two ones and what
/// is left is -(a + b) / 2. With c = (logp(train) + logp(infer)) / 2 one has m = c + ln cosh(d /
/// 2), hence the result ln cosh(d / 2): a function of d alone. It grows like |d| / 2, unlike a true
/// divergence of that kind, which ln 2 bounds.
fn js(d: f64) -> f64 {
    let half = d.abs() / 2.0;
    if half < 1.0 {
        // cosh x - 1 = 2 sinh^2(x / 2) keeps the digits of small gaps.
        (2.0 * (half / 2.0).sinh().powi(2)).ln_1p()
    } else {
        half + (-2.0 * half).exp().ln_1p() - std::f64::consts::LN_2
    }
}

fn ratios(tokens: &Tokens) -> Values {
    let doubled: Vec<f64> = tokens.d.iter().map(|d| 2.0 * d).collect();
    let (least, most) = (stats::min(&tokens.d), stats::max(&tokens.d));
    let outside = |d: f64| d < 0.5_f64.ln() || d > 2.0_f64.ln();
    vec![
        ("token_mult_prob_error", tokens.mean_of_d(|d| d.abs().exp())),
        ("ratio_mean", tokens.mean_of_d(f64::exp)),
        ("ratio_min", least.map(f64::exp)),
        ("ratio_max", most.map(f64::exp)),
        ("log_ratio_min", least),
        ("log_ratio_max", most),
        ("frac_ratio_out_0.5_2", stats::fraction(&tokens.d, outside)),
        ("ess_token", stats::effective_share(&tokens.d)),
        ("chi2_token", stats::log_mean_exp(&doubled).map(f64::exp_m1)),
    ]
}

fn probabilities(tokens: Tokens) -> Values {
    let Tokens { infer, train, .. } = tokens;
    let logp_pearson = stats::pearson(&infer, &train);
    let confident_wrong = std::iter::zip(&infer, &train)
        .filter(|(&infer, &train)| is_confident_wrong(infer, train))
        .count();
    let confident_wrong = (!infer.is_empty()).then_some(confident_wrong as f64);
    let exp = |logps: Vec<f64>| logps.into_iter().map(f64::exp).collect::<Vec<_>>();
    let (infer, train) = (exp(infer), exp(train));
    let abs: Vec<f64> =
        infer.iter().zip(&train).map(|(infer, train)| (train - infer).abs()).collect();
    vec![
        ("prob_abs_diff_mean", stats::mean(&abs)),
        ("prob_abs_diff_std", stats::std(&abs)),
        ("prob_abs_diff_max", stats::max(&abs)),
        ("prob_pearson", stats::pearson(&infer, &train)),
        ("logp_pearson", logp_pearson),
        ("confident_wrong", confident_wrong),
    ]
}

/// Of log-probabilities in nats: the infer side was sure, the train side would hardly sample it.
pub(super) fn is_confident_wrong(infer: f64, train: f64) -> bool {
    infer > -0.1 && train < -5.0
}

fn exactness(pairs: &Pairs) -> Values {
    let equal: Vec<f64> =
        pairs.finite().map(|token| f64::from(u8::from(token.is_bitwise_equal()))).collect();
    let ulps: Vec<f64> = pairs
        .finite()
        .map(|token| f64::from(stats::ulp_distance(token.infer.get(), token.train.get())))
        .collect();
    vec![("frac_bitwise_equal", stats::mean(&equal)), ("max_ulp_f32", stats::max(&ulps))]
}

#[cfg(test)]
#[path = "measures_tests.rs"]
mod tests;
