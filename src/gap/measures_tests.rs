use std::collections::BTreeSet;

use serde_json::Value;

use super::*;
use crate::base::{BlockId, LogProb};
use crate::gap::pair::{pair, Legs};
use crate::gap::table::HEADLINES;
use crate::gap::testing::rollout;

/// f64 sums of a few thousand terms keep more than this, relative.
const RELATIVE: f64 = 1e-9;
/// What the oracle's extended precision leaves where the definition gives 0.
const ABSOLUTE: f64 = 1e-18;

fn table_of(records: &[Rollout]) -> Table {
    measures(&pair(records, Legs::DecodeTrainer).unwrap(), 0.0)
}

#[track_caller]
fn check(table: &Table, name: &str, expected: f64) {
    let found = table.value(name).unwrap_or_else(|| panic!("{name} has no value"));
    let close = found == expected
        || (found - expected).abs() <= RELATIVE * found.abs().max(expected.abs()) + ABSOLUTE;
    assert!(close, "{name}: found {found:e}, expected {expected:e}");
}

/// numpy and scipy over the same seeded records: tests/oracles/gap_metrics.py.
#[test]
fn every_metric_agrees_with_the_oracle() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gap/golden.json");
    let text = std::fs::read_to_string(path).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 8);
    for case in &cases {
        let records: Vec<Rollout> =
            case["records"].as_array().unwrap().iter().zip(0..).map(record_of).collect();
        let pairs = pair(&records, Legs::DecodeTrainer).unwrap();
        let table = measures(&pairs, case["floor"].as_f64().unwrap());
        let expected = case["metrics"].as_object().unwrap();
        let names: BTreeSet<&str> = table.metrics.iter().map(|metric| metric.name).collect();
        assert_eq!(names, expected.keys().map(String::as_str).collect());
        for (name, expected) in expected {
            match (number(expected), table.value(name)) {
                (Some(expected), Some(_)) => check(&table, name, expected),
                (expected, found) => assert_eq!(found, expected, "{} {name}", case["name"]),
            }
        }
    }
}

fn record_of((record, index): (&Value, u32)) -> Rollout {
    let leg = |name: &str| -> Vec<Option<LogProb>> {
        let values = record[name].as_array().unwrap();
        values.iter().map(|value| number(value).map(|nats| LogProb::new(nats as f32))).collect()
    };
    let (decode, trainer) = (leg("decode"), leg("trainer"));
    // The decode leg of a record is never missing; what lacks there lacks on the other side
    // instead.
    let nats = |value: &Option<LogProb>| value.map_or(0.0, LogProb::get);
    let mut rollout = rollout(index, &decode.iter().map(nats).collect::<Vec<_>>(), &[]);
    let both =
        decode.iter().zip(trainer).map(|(decode, trainer)| trainer.filter(|_| decode.is_some()));
    rollout.trainer = Some(both.collect());
    rollout.loss_mask =
        record["mask"].as_array().unwrap().iter().map(|value| value.as_bool().unwrap()).collect();
    match record["slot"].as_u64() {
        Some(slot) => rollout.completion.lives[0].state_blocks[0].block = BlockId::new(slot as u32),
        None => rollout.completion.lives[0].state_blocks.clear(),
    }
    rollout
}

fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.parse().unwrap()),
        value => Some(value.as_f64().unwrap()),
    }
}

/// One bad token in a hundred: nearly invisible in the mean, plain in the rest
/// (NVIDIA-NeMo/RL#2100).
#[test]
fn k07_one_ratio_of_670_in_a_hundred_tokens() {
    let log_ratio = 670.0_f64.ln() as f32;
    let mut trainer = [-8.0; 100];
    trainer[41] += log_ratio;
    let table = table_of(&[rollout(0, &[-8.0; 100], &trainer)]);
    let d = f64::from(trainer[41]) + 8.0;
    check(&table, "ratio_max", d.exp());
    check(&table, "token_mult_prob_error", (99.0 + d.exp()) / 100.0);
    check(&table, "logp_abs_diff_mean", d / 100.0);
    // The figures of the report, to the digits it gives.
    assert!((table.value("ratio_max").unwrap() - 670.0).abs() < 1e-3);
    assert!((table.value("token_mult_prob_error").unwrap() - 7.69).abs() < 1e-4);
    assert!((table.value("logp_abs_diff_mean").unwrap() - 0.0651).abs() < 5e-5);
    for (name, expected) in [
        ("frac_bitwise_equal", 0.99),
        ("first_divergent_pos", 41.0),
        ("worst_pos", 41.0),
        ("worst_token_id", 141.0),
        ("logp_abs_diff_p50", 0.0),
        ("spike", 1.0),
        ("frac_seq_bad_2", 1.0),
    ] {
        check(&table, name, expected);
    }
}

/// A mean |d| of 0.012 is a ratio of 3.3 over a sequence of a hundred tokens
/// (huggingface/trl#4772).
#[test]
fn small_gaps_multiply_over_a_sequence() {
    let table = table_of(&[rollout(0, &[-1.0; 100], &[-0.988; 100])]);
    let d = f64::from(-0.988_f32) + 1.0;
    check(&table, "logp_abs_diff_mean", d);
    check(&table, "seq_log_ratio_max", 100.0 * d);
    check(&table, "seq_geo_ratio_max", d.exp());
    check(&table, "seq_mult_prob_error_max", d.exp());
    let ratio = table.value("seq_log_ratio_max").unwrap().exp();
    assert!((ratio - 3.32).abs() < 1e-3, "{ratio}");
}

/// The trainer's values one position to the left (modelscope/ms-swift#8427).
#[test]
fn k17_a_shift_scores_zero_at_its_lag() {
    let table = table_of(&[rollout(0, &[-0.1, -2.0, -0.3, -1.5], &[-2.0, -0.3, -1.5, -0.7])]);
    assert!((table.value("shift_0_abs_diff_mean").unwrap() - 1.4).abs() < 1e-7);
    check(&table, "shift_1_abs_diff_mean", 0.0);
    check(&table, "shift_best", 1.0);
    // Of the bad token at the end nothing is left after a move, which is no improvement.
    let table = table_of(&[rollout(0, &[-0.5; 4], &[-0.5, -0.5, -0.5, -9.0])]);
    check(&table, "shift_1_abs_diff_mean", 0.0);
    check(&table, "shift_best", 0.0);
}

/// Temperature 0.5 on the trainer's side only, logits 2, 1, 0 (huggingface/trl#4159).
#[test]
fn k19_tempered_against_raw_logprobs() {
    let raw = |logit: f64| logit - (2.0_f64.exp() + 1.0_f64.exp() + 1.0).ln();
    let tempered = |logit: f64| 2.0 * logit - (4.0_f64.exp() + 2.0_f64.exp() + 1.0).ln();
    for (logit, d) in [(2.0, 0.264_674), (0.0, -1.735_326)] {
        let (infer, train) = (raw(logit) as f32, tempered(logit) as f32);
        let table = table_of(&[rollout(0, &[infer], &[train])]);
        let exact = f64::from(train) - f64::from(infer);
        check(&table, "logp_diff_mean", exact);
        check(&table, "ratio_mean", exact.exp());
        assert!((exact - d).abs() < 1e-6, "{exact}");
    }
}

/// The engine renormalised over a kept mass of 0.8 (huggingface/trl#6789).
#[test]
fn k20_a_kept_mass_is_a_constant_ratio() {
    let kept = |p: f64| (p / 0.8).ln() as f32;
    let full = |p: f64| p.ln() as f32;
    let table = table_of(&[rollout(0, &[kept(0.5), kept(0.3)], &[full(0.5), full(0.3)])]);
    for (name, expected) in [
        ("logp_diff_mean", 0.8_f64.ln()),
        ("ratio_min", 0.8),
        ("ratio_max", 0.8),
        ("seq_geo_ratio_min", 0.8),
    ] {
        // Two roundings to f32 of values below 1.
        assert!((table.value(name).unwrap() - expected).abs() < 1e-7, "{name}");
    }
}

/// Values that are none: counted by side, and kept out of every mean (vllm-project/vllm#10234).
#[test]
fn k22_non_finite_values_are_counted_and_enter_nothing() {
    let decode = [-0.5, f32::NAN, f32::NEG_INFINITY, -1.0, -0.25];
    let table = table_of(&[rollout(0, &decode, &[-0.5, -0.7, f32::NAN, -1.125, -0.25])]);
    for (name, expected) in [
        ("n_tokens", 3.0),
        ("nonfinite", 2.0),
        ("nonfinite_infer", 2.0),
        ("nonfinite_train", 1.0),
        ("logp_abs_diff_mean", 0.125 / 3.0),
        ("logp_abs_diff_max", 0.125),
        ("worst_pos", 1.0),
        ("first_divergent_pos", 1.0),
        ("frac_bitwise_equal", 2.0 / 3.0),
        ("spike", 1.0),
    ] {
        check(&table, name, expected);
    }
}

/// No token, no finite token, no trainer leg: every statistic is "no data", and only the counts are
/// numbers.
#[test]
fn nothing_compared_is_no_data() {
    let mut unscored = rollout(0, &[-1.0, -2.0], &[]);
    unscored.trainer = None;
    let mut masked = rollout(0, &[-1.0], &[-2.0]);
    masked.loss_mask[0] = false;
    for (records, numbers) in [
        (vec![], vec![]),
        (vec![rollout(0, &[], &[])], vec![]),
        (vec![unscored], vec![("n_missing", 2.0)]),
        (vec![masked], vec![]),
        (
            vec![rollout(0, &[f32::NAN; 2], &[-1.0, f32::INFINITY])],
            vec![
                ("nonfinite", 2.0),
                ("nonfinite_infer", 2.0),
                ("nonfinite_train", 1.0),
                ("spike", 1.0),
                ("first_divergent_pos", 0.0),
                ("worst_prompt_id", 0.0),
                ("worst_rollout_idx", 0.0),
                ("worst_slot", 1.0),
                ("worst_pos", 0.0),
                ("worst_token_id", 100.0),
            ],
        ),
    ] {
        let counts =
            ["n_tokens", "n_seqs", "n_missing", "nonfinite", "nonfinite_infer", "nonfinite_train"];
        for metric in &table_of(&records).metrics {
            let named = numbers.iter().find(|(name, _)| *name == metric.name);
            let zero = counts.contains(&metric.name).then_some(0.0);
            assert_eq!(metric.value, named.map(|&(_, value)| value).or(zero), "{}", metric.name);
        }
    }
}

#[test]
fn one_token_has_no_correlation_and_no_spread() {
    let table = table_of(&[rollout(0, &[-1.0], &[-1.5])]);
    for name in ["prob_pearson", "logp_pearson", "slot_corr", "slot_change_point"] {
        assert_eq!(table.value(name), None, "{name}");
    }
    for (name, expected) in [
        ("logp_abs_diff_std", 0.0),
        ("logp_abs_diff_p999", 0.5),
        ("k1", 0.5),
        ("k2", 0.125),
        ("k3_mean", (-0.5_f64).exp() - 0.5),
        ("k3_rev_mean", 0.5_f64.exp() - 1.5),
        ("js_mean", 0.25_f64.cosh().ln()),
        ("ess_token", 1.0),
        ("chi2_token", (-1.0_f64).exp() - 1.0),
        ("ppl_infer", 1.0_f64.exp()),
        ("log_e_rho2_seq_reliable", 0.0),
    ] {
        check(&table, name, expected);
    }
}

#[test]
fn a_huge_ratio_overflows_openly_and_its_logarithm_stays() {
    let table = table_of(&[rollout(0, &[-900.0, -100.0], &[-100.0, -900.0])]);
    for name in ["ratio_max", "token_mult_prob_error", "k3_mean", "k3_rev_mean", "chi2_token"] {
        assert_eq!(table.value(name), Some(f64::INFINITY), "{name}");
    }
    for (name, expected) in [
        ("log_ratio_max", 800.0),
        ("log_ratio_min", -800.0),
        ("ratio_min", 0.0),
        ("ess_token", 0.5),
        ("js_mean", 400.0 - 2.0_f64.ln()),
        ("seq_log_ratio_mean", 0.0),
        ("logp_pearson", -1.0),
    ] {
        check(&table, name, expected);
    }
    assert!(table.metrics.iter().all(|metric| metric.value.is_none_or(|value| !value.is_nan())));
}

#[test]
fn eight_tags_stand_under_gap_and_each_row_is_described() {
    let pairs = pair(&[rollout(0, &[-1.0], &[-1.0])], Legs::DecodeTrainer).unwrap();
    let rows: Vec<_> = measures(&pairs, 0.0).rows().collect();
    let tags: BTreeSet<&str> = rows.iter().map(|(tag, ..)| tag.as_str()).collect();
    assert_eq!(tags.len(), rows.len());
    let plain: BTreeSet<&str> = tags.iter().filter_map(|tag| tag.strip_prefix("gap/")).collect();
    assert_eq!(plain, BTreeSet::from(HEADLINES));
    assert!(rows.iter().all(|(.., description)| !description.is_empty()));
    let k3 = rows.iter().find(|(tag, ..)| tag == "gap/k3_mean").unwrap();
    assert!(k3.2.contains("rho - 1 - d") && k3.2.contains("NeMo-RL gen_kl_error"), "{}", k3.2);

    let pairs = Pairs { legs: Legs::DecodePrefill, ..pairs };
    let mut rows = measures(&pairs, 0.0).rows().map(|(tag, ..)| tag).collect::<Vec<_>>();
    assert_eq!(rows.len(), tags.len());
    rows.retain(|tag| !tag.starts_with("gap_detail/decode_prefill/"));
    assert_eq!(rows, [""; 0]);
}

#[test]
fn confident_and_wrong() {
    let decode = [-0.05, -0.05, -0.2, -0.05];
    let table = table_of(&[rollout(0, &decode, &[-5.5, -4.5, -9.0, -30.0])]);
    check(&table, "confident_wrong", 2.0);
}

#[test]
fn the_engine_speaks_for_itself() {
    let mut record = rollout(0, &[-1.0, f32::NAN, -3.0, -0.5], &[]);
    record.loss_mask[3] = false;
    let rows = rollout_measures(&[record]);
    let found: Vec<_> = rows.iter().map(|metric| (metric.tag(), metric.value)).collect();
    let expected =
        [("rollout/logp_mean".to_owned(), Some(-2.0)), ("rollout/logp_max".into(), Some(-1.0))];
    assert_eq!(found, expected);
    assert!(rollout_measures(&[]).iter().all(|metric| metric.value.is_none()));
}
