//! The table of measures: a row a metric, each with its formula and the names others log it under.
//!
//! Formulas use d = logp(train) - logp(infer) and rho = exp(d), over the finite tokens under the
//! loss mask. A value may be infinite (rho overflows near d = 710) and is then kept as such; it is
//! never NaN.

use super::pair::Legs;

/// What stands under `gap/`; everything else stands under `gap_detail/`, so that the first page
/// stays readable.
pub const HEADLINES: [&str; 8] = [
    "logp_abs_diff_max",
    "logp_abs_diff_mean",
    "logp_abs_diff_p999",
    "k3_mean",
    "token_mult_prob_error",
    "nonfinite",
    "frac_bitwise_equal",
    "spike",
];

/// One row: a number, what it is, and what other projects call it.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// What stands before the name in a tag.
    pub prefix: String,
    pub name: &'static str,
    pub formula: &'static str,
    /// Empty where nobody else logs it.
    pub alias: &'static str,
    /// `None` is "no data" or "undefined".
    pub value: Option<f64>,
}

impl Metric {
    #[must_use]
    pub fn tag(&self) -> String {
        format!("{}/{}", self.prefix, self.name)
    }

    /// The formula, and the alias where there is one.
    #[must_use]
    pub fn description(&self) -> String {
        match self.alias {
            "" => self.formula.to_owned(),
            alias => format!("{}. Also known as: {alias}", self.formula),
        }
    }
}

/// The measures of one comparison: always all of them, in one order.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    pub legs: Legs,
    pub metrics: Vec<Metric>,
}

/// Values by name, in the order of [`TEXTS`].
pub(super) type Values = Vec<(&'static str, Option<f64>)>;

impl Table {
    /// What a report writes: tag, value, description.
    pub fn rows(&self) -> impl Iterator<Item = (String, Option<f64>, String)> + '_ {
        self.metrics.iter().map(|metric| (metric.tag(), metric.value, metric.description()))
    }

    /// The value of the metric of that name; `None` also where the metric has none.
    ///
    /// # Panics
    /// If no metric has that name.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<f64> {
        let metric = self.metrics.iter().find(|metric| metric.name == name);
        metric.unwrap_or_else(|| panic!("no metric is called {name:?}")).value
    }

    pub(super) fn new(legs: Legs, values: Values) -> Self {
        assert_eq!(values.len(), TEXTS.len(), "every metric has one text");
        let metrics = std::iter::zip(values, TEXTS).map(|((name, value), text)| {
            let (text_name, formula, alias) = *text;
            assert_eq!(name, text_name, "values and texts are in one order");
            // Undefined is no value.
            let value = value.filter(|value| !value.is_nan());
            Metric { prefix: prefix(legs, name), name, formula, alias, value }
        });
        Self { legs, metrics: metrics.collect() }
    }
}

/// The plain rooms are for the gap itself; other comparisons are details of it.
fn prefix(legs: Legs, name: &str) -> String {
    match legs {
        Legs::DecodeTrainer if HEADLINES.contains(&name) => "gap".to_owned(),
        Legs::DecodeTrainer => "gap_detail".to_owned(),
        legs => format!("gap_detail/{}", legs.name()),
    }
}

/// Name, formula, alias.
const TEXTS: &[(&str, &str, &str)] = &[
    ("n_tokens", "tokens under the loss mask with both logprobs finite", ""),
    ("n_seqs", "sequences with at least one such token", ""),
    ("n_missing", "tokens under the loss mask for which a leg has no logprob", ""),
    ("nonfinite", "tokens with a non-finite logprob on either side; in no other statistic", ""),
    (
        "nonfinite_infer",
        "tokens with a non-finite logprob on the infer side",
        "torchtitan loss/generator_logprob_nan_frac (a share there)",
    ),
    ("nonfinite_train", "tokens with a non-finite logprob on the train side", ""),
    (
        "spike",
        "1 if the step is an alarm by check.thresholds (max |d| > floor, where nothing else is \
         asked for) or a logprob is non-finite, else 0",
        "",
    ),
    (
        "logp_abs_diff_mean",
        "mean |d|",
        "TRL sampling/sampling_logp_difference/mean, SkyRL \
         policy/rollout_train_logprobs_abs_diff_mean, slime \
         train/train_rollout_logprob_abs_diff",
    ),
    (
        "logp_abs_diff_std",
        "population standard deviation of |d|",
        "SkyRL policy/rollout_train_logprobs_abs_diff_std",
    ),
    (
        "logp_abs_diff_max",
        "max |d|",
        "TRL sampling/sampling_logp_difference/max, torchtitan bit_wise/logprob_diff/max",
    ),
    ("logp_abs_diff_p50", "median of |d|", ""),
    ("logp_abs_diff_p95", "0.95 quantile of |d|, linear between order statistics", ""),
    ("logp_abs_diff_p99", "0.99 quantile of |d|, linear between order statistics", ""),
    ("logp_abs_diff_p999", "0.999 quantile of |d|, linear between order statistics", ""),
    (
        "logp_diff_mean",
        "mean d; above 0 the train side finds the samples likelier",
        "torchtitan bit_wise/logprob_diff/mean",
    ),
    ("lowp_abs_diff_mean", "mean |d| of tokens with p(infer) < 0.01", ""),
    (
        "frac_abs_gt_1e-6",
        "share of tokens with |d| > 1e-6",
        "torchtitan bit_wise/ratio_tokens_different/mean",
    ),
    ("frac_abs_gt_1e-3", "share of tokens with |d| > 1e-3", ""),
    ("frac_abs_gt_1e-2", "share of tokens with |d| > 1e-2", ""),
    ("frac_abs_gt_0.1", "share of tokens with |d| > 0.1", ""),
    ("frac_abs_gt_1", "share of tokens with |d| > 1", ""),
    ("k1", "mean(-d), estimates KL(infer || train)", "verl rollout_corr/kl, OpenRLHF vllm_kl"),
    ("k2", "mean(d^2 / 2)", "AReaL compute_logp/kl_div_taylor"),
    (
        "k3_mean",
        "mean(rho - 1 - d), estimates KL(infer || train)",
        "verl rollout_corr/k3_kl, prime-rl mismatch_kl, NeMo-RL gen_kl_error",
    ),
    ("k3_max", "max(rho - 1 - d)", "prime-rl mismatch_kl/all/max"),
    ("k3_rev_mean", "mean(exp(-d) - 1 + d)", "NeMo-RL policy_kl_error"),
    (
        "js_mean",
        "mean(k3(a) + k3(b)) / 2 with k3(x) = exp(x) - 1 - x, a = logp(train) - m, b = \
         logp(infer) - m, m = ln((p(train) + p(infer)) / 2)",
        "NeMo-RL js_divergence_error",
    ),
    ("token_mult_prob_error", "mean exp|d|", "NeMo-RL token_mult_prob_error"),
    (
        "ratio_mean",
        "mean rho, not clipped",
        "NeMo-RL sampling_importance_ratio, TRL sampling/importance_sampling_ratio/mean \
         (clipped there)",
    ),
    ("ratio_min", "min rho", "TRL sampling/importance_sampling_ratio/min (clipped there)"),
    ("ratio_max", "max rho", "TRL sampling/importance_sampling_ratio/max (clipped there)"),
    ("log_ratio_min", "min d", ""),
    ("log_ratio_max", "max d; finite where max rho overflows", ""),
    ("frac_ratio_out_0.5_2", "share of tokens with rho outside [0.5, 2]", "IcePop band"),
    (
        "ess_token",
        "(sum rho)^2 / (n sum rho^2) over tokens",
        "verl rollout_corr/rollout_is_eff_sample_size",
    ),
    ("chi2_token", "mean(rho^2) - 1", "verl rollout_corr/chi2_token (clamped there)"),
    ("prob_abs_diff_mean", "mean |p(train) - p(infer)|", "verl training/rollout_probs_diff_mean"),
    (
        "prob_abs_diff_std",
        "population standard deviation of |p(train) - p(infer)|",
        "verl training/rollout_probs_diff_std",
    ),
    ("prob_abs_diff_max", "max |p(train) - p(infer)|", "verl training/rollout_probs_diff_max"),
    (
        "prob_pearson",
        "Pearson of p(infer) and p(train)",
        "verl training/rollout_actor_probs_pearson_corr",
    ),
    ("logp_pearson", "Pearson of logp(infer) and logp(train)", ""),
    ("confident_wrong", "tokens with logp(infer) > -0.1 and logp(train) < -5", ""),
    ("frac_bitwise_equal", "share of tokens whose two logprobs have the same f32 bits", ""),
    ("max_ulp_f32", "largest distance of the two logprobs, in f32 values", ""),
    ("seq_log_ratio_mean", "mean over sequences of sum d", ""),
    ("seq_log_ratio_std", "population standard deviation over sequences of sum d", ""),
    ("seq_log_ratio_min", "min over sequences of sum d", ""),
    ("seq_log_ratio_max", "max over sequences of sum d", "ROLL sequence ratio, in logs"),
    ("seq_geo_ratio_min", "min over sequences of exp(mean d)", "ROLL and slime geometric ratio"),
    ("seq_geo_ratio_max", "max over sequences of exp(mean d)", "ROLL and slime geometric ratio"),
    (
        "frac_ratio_out_0.999_1.002",
        "share of sequences with exp(mean d) outside [0.999, 1.002]",
        "MIS band",
    ),
    ("ess_seq", "(sum w)^2 / (n sum w^2) over sequences, w = exp(sum d)", ""),
    (
        "log_e_rho2_seq",
        "ln(mean over sequences of exp(2 sum d))",
        "stands for verl rollout_corr/chi2_seq, which collapses",
    ),
    ("log_e_rho2_seq_reliable", "1 if ess_seq * n_seqs >= 5, else 0", ""),
    (
        "seq_mult_prob_error_mean",
        "mean over sequences of mean exp|d|",
        "NeMo-RL mean_seq_mult_prob_error",
    ),
    (
        "seq_mult_prob_error_max",
        "max over sequences of mean exp|d|",
        "NeMo-RL max_seq_mult_prob_error",
    ),
    ("frac_seq_bad_1.05", "share of sequences with mean exp|d| > 1.05", "NeMo-RL's limit"),
    ("frac_seq_bad_2", "share of sequences with mean exp|d| > 2", ""),
    ("ppl_infer", "mean over sequences of exp(-mean logp(infer))", "verl rollout_corr/rollout_ppl"),
    (
        "ppl_train",
        "mean over sequences of exp(-mean logp(train))",
        "verl rollout_corr/training_ppl",
    ),
    ("log_ppl_diff_mean", "mean over sequences of mean(-d)", "verl rollout_corr/log_ppl_diff"),
    (
        "log_ppl_diff_abs_mean",
        "mean over sequences of |mean(-d)|",
        "verl rollout_corr/log_ppl_abs_diff",
    ),
    ("log_ppl_diff_max", "max over sequences of mean(-d)", "verl rollout_corr/log_ppl_diff_max"),
    ("log_ppl_diff_min", "min over sequences of mean(-d)", "verl rollout_corr/log_ppl_diff_min"),
    ("ppl_ratio", "mean over sequences of exp(mean(-d))", "verl rollout_corr/ppl_ratio"),
    (
        "slot_corr",
        "Spearman of each sequence's max |d| (infinite if a logprob is non-finite) with its \
         first state block's id",
        "",
    ),
    (
        "slot_change_point",
        "lowest id above the split by first state block that best separates the ranks of max |d|",
        "",
    ),
    (
        "slot_frac_bad_above",
        "share of the sequences at or above slot_change_point with max |d| > floor",
        "",
    ),
    ("first_divergent_pos", "lowest completion index with |d| > floor or a non-finite logprob", ""),
    ("shift_-2_abs_diff_mean", "mean |logp(infer)[i - 2] - logp(train)[i]|", ""),
    ("shift_-1_abs_diff_mean", "mean |logp(infer)[i - 1] - logp(train)[i]|", ""),
    ("shift_0_abs_diff_mean", "mean |logp(infer)[i] - logp(train)[i]|", ""),
    ("shift_1_abs_diff_mean", "mean |logp(infer)[i + 1] - logp(train)[i]|", ""),
    ("shift_2_abs_diff_mean", "mean |logp(infer)[i + 2] - logp(train)[i]|", ""),
    (
        "shift_best",
        "shift of least mean |d| among 0 and those that improve on the same tokens unshifted; \
         the shorter on a tie",
        "",
    ),
    (
        "worst_prompt_id",
        "prompt of the token with the largest |d|; a non-finite one comes first",
        "",
    ),
    ("worst_rollout_idx", "rollout of the token with the largest |d|", ""),
    ("worst_slot", "first state block of the token with the largest |d|", ""),
    ("worst_pos", "completion index of the token with the largest |d|", ""),
    ("worst_token_id", "id of the token with the largest |d|", ""),
];
