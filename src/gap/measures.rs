//! The measures of one step, token by token: what each is called and means stands in the table's
//! texts.

use rayon::prelude::*;

use super::floor::WorstToken;
use super::pair::{Legs, Pairs, Sequence};
use super::place::{LagScore, Places};
use super::sequences::Sequences;
use super::stats::{self, Values as Column};
use super::table::{Metric, Table, Values};
use crate::rollout::Rollout;

/// Every measure of one comparison. `floor` is the largest |d| that healthy arithmetic explains, in
/// nats.
#[must_use]
pub fn measures(pairs: &Pairs, floor: f64) -> Table {
    let mut gauge = Gauge::new(pairs.legs, floor);
    pairs.sequences.iter().for_each(|sequence| gauge.add(sequence));
    gauge.table()
}

/// Measures a step whose sequences come one at a time: of a compared token it keeps both
/// log-probabilities, 8 bytes, because quantiles and deviations need all of them.
#[derive(Clone, Debug)]
pub struct Gauge {
    legs: Legs,
    floor: f64,
    counts: Counts,
    tokens: Tokens,
    sequences: Sequences,
    places: Places,
}

impl Gauge {
    /// Of no sequence yet. `floor` is the largest |d| that healthy arithmetic explains, nats.
    #[must_use]
    pub fn new(legs: Legs, floor: f64) -> Self {
        assert!(floor >= 0.0 && floor.is_finite(), "a floor of {floor} nats is no floor");
        Self {
            legs,
            floor,
            counts: Counts::default(),
            tokens: Tokens::default(),
            sequences: Sequences::default(),
            places: Places::default(),
        }
    }

    pub fn add(&mut self, sequence: &Sequence) {
        self.counts.add(sequence, self.floor);
        self.tokens.add(sequence);
        self.sequences.add(sequence);
        self.places.add(sequence, self.floor);
    }

    #[must_use]
    pub fn table(&self) -> Table {
        let Self { legs, floor, counts, tokens, sequences, places } = self;
        let groups: [&(dyn Fn() -> Values + Sync); 11] = [
            &|| counts.values(sequences.len()),
            &|| differences(tokens),
            &|| quantiles(tokens),
            &|| shares(tokens),
            &|| divergences(tokens),
            &|| ratios(tokens),
            &|| probabilities(tokens),
            &|| agreement(tokens),
            &|| counts.exactness(),
            &|| sequences.values(),
            &|| places.values(*floor),
        ];
        // Each measure adds up in record order, whatever runs beside it.
        let values: Vec<Values> =
            groups.par_iter().with_max_len(1).map(|values| values()).collect();
        Table::new(*legs, values.concat())
    }

    /// As [`super::shift`], of every sequence and with no floor: a shift explains what is under one
    /// too.
    #[must_use]
    pub fn shift(&self) -> Option<LagScore> {
        self.places.lags.shift(0.0)
    }

    /// As [`super::shift`], of the sequences over the floor.
    #[must_use]
    pub fn shift_of_bad(&self) -> Option<LagScore> {
        self.places.lags_of_bad.shift(self.floor)
    }

    /// As [`super::worst`], at most [`super::WORST_KEPT`].
    #[must_use]
    pub fn worst(&self) -> &[WorstToken] {
        &self.places.worst
    }
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

#[derive(Clone, Debug, Default)]
struct Counts {
    finite: u64,
    nonfinite: u64,
    nonfinite_infer: u64,
    nonfinite_train: u64,
    missing: u64,
    spike: bool,
    bitwise_equal: u64,
    ulps_max: Option<u32>,
}

impl Counts {
    fn add(&mut self, sequence: &Sequence, floor: f64) {
        self.missing += sequence.missing;
        self.spike |= sequence.is_bad(floor);
        for token in &sequence.tokens {
            self.nonfinite_infer += u64::from(!token.infer.is_finite());
            self.nonfinite_train += u64::from(!token.train.is_finite());
            if token.is_finite() {
                let ulps = stats::ulp_distance(token.infer.get(), token.train.get());
                self.ulps_max = self.ulps_max.max(Some(ulps));
                self.finite += 1;
                self.bitwise_equal += u64::from(token.is_bitwise_equal());
            } else {
                self.nonfinite += 1;
            }
        }
    }

    fn values(&self, n_seqs: usize) -> Values {
        let count = |n: u64| Some(n as f64);
        let compared = self.finite + self.nonfinite > 0;
        vec![
            ("n_tokens", count(self.finite)),
            ("n_seqs", Some(n_seqs as f64)),
            ("n_missing", count(self.missing)),
            ("nonfinite", count(self.nonfinite)),
            ("nonfinite_infer", count(self.nonfinite_infer)),
            ("nonfinite_train", count(self.nonfinite_train)),
            ("spike", compared.then_some(f64::from(u8::from(self.spike)))),
        ]
    }

    fn exactness(&self) -> Values {
        let equal = (self.finite > 0).then(|| self.bitwise_equal as f64 / self.finite as f64);
        vec![("frac_bitwise_equal", equal), ("max_ulp_f32", self.ulps_max.map(f64::from))]
    }
}

/// Both sides of the compared tokens, in record order.
#[derive(Clone, Debug, Default)]
struct Tokens {
    infer: Vec<f32>,
    train: Vec<f32>,
}

impl Tokens {
    fn add(&mut self, sequence: &Sequence) {
        self.infer.extend(sequence.finite().map(|token| token.infer.get()));
        self.train.extend(sequence.finite().map(|token| token.train.get()));
    }

    fn infer(&self) -> impl Column + '_ {
        self.infer.iter().map(|&nats| f64::from(nats))
    }

    fn train(&self) -> impl Column + '_ {
        self.train.iter().map(|&nats| f64::from(nats))
    }

    fn both(&self) -> impl ExactSizeIterator<Item = (f64, f64)> + Clone + '_ {
        self.infer().zip(self.train())
    }

    fn d(&self) -> impl Column + '_ {
        self.both().map(|(infer, train)| train - infer)
    }

    fn mean_of_d(&self, term: impl Fn(f64) -> f64 + Clone) -> Option<f64> {
        stats::mean_of(self.d().map(term))
    }
}

fn differences(tokens: &Tokens) -> Values {
    let [mean, deviation, most] = stats::spread_of(tokens.d().map(f64::abs));
    vec![
        ("logp_abs_diff_mean", mean),
        ("logp_abs_diff_std", deviation),
        ("logp_abs_diff_max", most),
    ]
}

fn quantiles(tokens: &Tokens) -> Values {
    let abs = tokens.d().map(f64::abs);
    let [p50, p95, p99, p999] = stats::quantiles_of(abs, [0.5, 0.95, 0.99, 0.999]);
    vec![
        ("logp_abs_diff_p50", p50),
        ("logp_abs_diff_p95", p95),
        ("logp_abs_diff_p99", p99),
        ("logp_abs_diff_p999", p999),
    ]
}

fn shares(tokens: &Tokens) -> Values {
    let low = tokens.both().filter(|(infer, _)| infer.exp() < 0.01);
    let low =
        low.fold((0.0, 0.0), |(sum, n), (infer, train)| (sum + (train - infer).abs(), n + 1.0));
    let share_over = |bound| stats::fraction(tokens.d().map(f64::abs), |abs| abs > bound);
    vec![
        ("logp_diff_mean", stats::mean_of(tokens.d())),
        ("lowp_abs_diff_mean", (low.1 > 0.0).then(|| low.0 / low.1)),
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
    let k3 = || tokens.d().map(|d| d.exp_m1() - d);
    vec![
        ("k1", tokens.mean_of_d(|d| 0.0 - d)),
        ("k2", tokens.mean_of_d(|d| d * d / 2.0)),
        ("k3_mean", stats::mean_of(k3())),
        ("k3_max", k3().reduce(f64::max)),
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
    let (least, most) = (tokens.d().reduce(f64::min), tokens.d().reduce(f64::max));
    let outside = |d: f64| d < 0.5_f64.ln() || d > 2.0_f64.ln();
    vec![
        ("token_mult_prob_error", tokens.mean_of_d(|d| d.abs().exp())),
        ("ratio_mean", tokens.mean_of_d(f64::exp)),
        ("ratio_min", least.map(f64::exp)),
        ("ratio_max", most.map(f64::exp)),
        ("log_ratio_min", least),
        ("log_ratio_max", most),
        ("frac_ratio_out_0.5_2", stats::fraction(tokens.d(), outside)),
        ("ess_token", stats::effective_share(tokens.d())),
        ("chi2_token", stats::log_mean_exp(tokens.d().map(|d| 2.0 * d)).map(f64::exp_m1)),
    ]
}

fn probabilities(tokens: &Tokens) -> Values {
    let abs = tokens.both().map(|(infer, train)| (train.exp() - infer.exp()).abs());
    let [mean, deviation, most] = stats::spread_of(abs);
    vec![
        ("prob_abs_diff_mean", mean),
        ("prob_abs_diff_std", deviation),
        ("prob_abs_diff_max", most),
    ]
}

fn agreement(tokens: &Tokens) -> Values {
    let wrong = tokens.both().filter(|&(infer, train)| is_confident_wrong(infer, train)).count();
    let (infer, train) = (tokens.infer().map(f64::exp), tokens.train().map(f64::exp));
    vec![
        ("prob_pearson", stats::pearson(infer, train)),
        ("logp_pearson", stats::pearson(tokens.infer(), tokens.train())),
        ("confident_wrong", (tokens.d().len() > 0).then_some(wrong as f64)),
    ]
}

/// Of log-probabilities in nats: the infer side was sure, the train side would hardly sample it.
pub(super) fn is_confident_wrong(infer: f64, train: f64) -> bool {
    infer > -0.1 && train < -5.0
}

#[cfg(test)]
#[path = "measures_tests.rs"]
mod tests;
