//! Figures from public reports come out of dumps, and what is checked before any number.

use std::path::PathBuf;

use tempfile::TempDir;

use super::dump::{nemo, prime, write, Sides};
use super::{audited, check, outcome, path, value};

/// One record in each format.
fn both(sides: &Sides) -> (TempDir, [PathBuf; 2]) {
    let folder = tempfile::tempdir().expect("a folder");
    let files = [
        write(folder.path(), "train_data_step3.jsonl", &nemo(0, sides)),
        write(folder.path(), "token_exports/step_3/rank_0.jsonl", &prime(3, 0, sides)),
    ];
    (folder, files)
}

/// As a dump holds it: log-probabilities are f32.
fn f32ed(values: &[&str]) -> Vec<f64> {
    values.iter().map(|text| f64::from(text.parse::<f32>().expect("a number"))).collect()
}

fn d(sides: &Sides) -> Vec<f64> {
    std::iter::zip(f32ed(sides.train), f32ed(sides.infer))
        .map(|(train, infer)| train - infer)
        .collect()
}

/// Ninety-nine tokens alike and one with a ratio of 670 (NVIDIA-NeMo/RL#2100).
#[test]
fn one_extreme_token_is_not_averaged_away() {
    let worst = (-7.0 + 670.0_f64.ln()).to_string();
    let mut train = ["-7.0"; 100];
    train[41] = &worst;
    let sides = Sides { infer: &["-7.0"; 100], train: &train };
    let (folder, files) = both(&sides);
    let d = d(&sides)[41];
    for (at, file) in files.iter().enumerate() {
        let out = folder.path().join(at.to_string());
        let (text, audit) = audited(&out, &["--rollouts", path(file)]);
        check(&audit, "gap_detail/ratio_max", d.exp());
        check(&audit, "gap/token_mult_prob_error", (99.0 + d.exp()) / 100.0);
        check(&audit, "gap/logp_abs_diff_mean", d / 100.0);
        check(&audit, "gap/k3_mean", (d.exp() - 1.0 - d) / 100.0);
        check(&audit, "gap_detail/worst_pos", 41.0);
        // The report's own figures, to the digits it gives.
        assert!((value(&audit, "gap_detail/ratio_max").expect("a value") - 670.0).abs() < 1e-3);
        assert!((value(&audit, "gap/token_mult_prob_error").expect("a value") - 7.69).abs() < 1e-4);
        assert!((value(&audit, "gap/logp_abs_diff_mean").expect("a value") - 0.0651).abs() < 5e-5);
        assert!(text.contains("finding   unexplained: 1 of 1 requests"), "{text}");
        assert!(text.contains("line 1), completion index 41, token"), "{text}");
    }
}

/// A mean |d| of 0.012 is a ratio of 3.3 over a hundred tokens (huggingface/trl#4772).
#[test]
fn small_gaps_multiply_over_a_sequence() {
    let sides = Sides { infer: &["-1.0"; 100], train: &["-0.988"; 100] };
    let (folder, [file, _]) = both(&sides);
    let (text, audit) = audited(folder.path(), &["--rollouts", path(&file)]);
    let d = d(&sides)[0];
    check(&audit, "gap/logp_abs_diff_mean", d);
    check(&audit, "gap_detail/seq_log_ratio_max", 100.0 * d);
    check(&audit, "gap_detail/seq_mult_prob_error_max", d.exp());
    assert!(!text.contains("finding"), "{text}");
}

/// The trainer's values one position to the left (modelscope/ms-swift#8427).
#[test]
fn k17_a_shift_is_named_with_its_direction() {
    let infer = ["-0.1", "-2.0", "-0.3", "-1.5"];
    let sides = Sides { infer: &infer, train: &["-2.0", "-0.3", "-1.5", "-0.7"] };
    let (folder, [file, _]) = both(&sides);
    let (text, audit) = audited(folder.path(), &["--rollouts", path(&file)]);
    let mean = d(&sides).iter().map(|d| d.abs()).sum::<f64>() / 4.0;
    check(&audit, "gap_detail/shift_0_abs_diff_mean", mean);
    check(&audit, "gap_detail/shift_1_abs_diff_mean", 0.0);
    check(&audit, "gap_detail/shift_best", 1.0);
    assert!((mean - 1.4).abs() < 1e-7);
    for part in [
        "finding   mask_or_shift: off by one: decode[i+1] against trainer[i]",
        "over 3 pairs",
        "the trainer side's log-probabilities or mask are moved to the left",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }

    // Below the floor a shift is a shift all the same.
    let sides = Sides {
        infer: &["-0.1", "-0.4", "-0.2", "-0.3"],
        train: &["-0.4", "-0.2", "-0.3", "-0.1"],
    };
    let (folder, [file, _]) = both(&sides);
    let (text, _) = audited(folder.path(), &["--rollouts", path(&file)]);
    assert!(text.contains("mask_or_shift: off by one"), "{text}");
}

/// Null and a sentinel are no values (vllm-project/vllm#10234).
#[test]
fn k22_what_is_no_value_is_counted_by_kind_and_enters_no_mean() {
    let sides = Sides {
        infer: &["-0.5", "null", "-9999", "-1.0", "-0.25"],
        train: &["-0.5", "-0.7", "-12.0", "-1.1", "-0.25"],
    };
    let (folder, files) = both(&sides);
    for (at, file) in files.iter().enumerate() {
        let out = folder.path().join(at.to_string());
        let (text, audit) = audited(&out, &["--rollouts", path(file)]);
        let gap = f64::from(1.1_f32) - 1.0;
        check(&audit, "gap_detail/n_tokens", 3.0);
        check(&audit, "gap/logp_abs_diff_mean", gap / 3.0);
        check(&audit, "gap/logp_abs_diff_max", gap);
        check(&audit, "gap/nonfinite", 2.0);
        assert!((gap / 3.0 - 0.033_333_333).abs() < 1e-8);
        assert!(text.contains("excluded  infer: 1 null, 1 sentinel\n"), "{text}");
        assert!(!text.contains("excluded  train"), "{text}");
        let infer = &audit["steps"][0]["checks"]["infer"];
        assert_eq!((infer["null"].as_u64(), infer["sentinel"].as_u64()), (Some(1), Some(1)));
    }
}

/// Python's json writes them bare.
#[test]
fn k23_bare_non_finite_numbers_are_read() {
    let sides = Sides {
        infer: &["NaN", "-1.0", "Infinity", "-0.5", "-3e39"],
        train: &["-0.5", "-Infinity", "-0.5", "-0.75", "-1.0"],
    };
    let (folder, [file, _]) = both(&sides);
    let (text, audit) = audited(folder.path(), &["--rollouts", path(&file)]);
    check(&audit, "gap_detail/n_tokens", 1.0);
    check(&audit, "gap/logp_abs_diff_mean", 0.25);
    check(&audit, "gap_detail/nonfinite_infer", 3.0);
    assert!(text.contains("excluded  infer: 1 NaN, 1 inf, 1 sentinel\n"), "{text}");
    assert!(text.contains("excluded  train: 1 -inf\n"), "{text}");
}

#[test]
fn k22_all_excluded_is_no_data() {
    let sides = Sides { infer: &["null", "NaN"], train: &["-1.0", "-2.0"] };
    let (folder, [file, _]) = both(&sides);
    let (text, audit) = audited(folder.path(), &["--rollouts", path(&file)]);
    assert!(text.contains("\n  no data\n"), "{text}");
    for tag in ["gap/logp_abs_diff_mean", "gap/logp_abs_diff_max", "gap/k3_mean"] {
        assert_eq!(value(&audit, tag), None, "{tag}");
        assert!(audit["steps"][0]["metrics"][tag].is_null(), "{tag}");
    }
    let condition = ["--rollouts", path(&file), "--fail-on", "gap/logp_abs_diff_mean>=0"];
    let (code, _, error) = outcome(&condition);
    let said = "--fail-on 'gap/logp_abs_diff_mean>=0.0': no data at 1 of 1 place(s)\n";
    assert_eq!((code, error.as_str()), (Some(0), said));
}

#[test]
fn k21_runs_of_zeros_and_positive_values_are_flagged() {
    let sides = Sides {
        infer: &["-0.5", "0.25", "0.0", "0.0", "0.0"],
        train: &["-0.5", "-0.5", "-0.25", "-0.5", "0.0"],
    };
    let (folder, [file, _]) = both(&sides);
    let (text, _) = audited(folder.path(), &["--rollouts", path(&file)]);
    for part in [
        "warning   infer: 1 log-probability above 0, kept in the means\n",
        "warning   infer: 3 tokens in runs of exactly 0.0 at the end of 1 record; 0.0 is \
         probability 1, not a missing value\n",
        "note      1 record without temperature and mode: taken to be alike\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("warning   train"), "{text}");
}

/// Temperature on the trainer's side only, logits 2, 1, 0 (huggingface/trl#4159).
#[test]
fn k19_unlike_modes_are_refused_unless_told() {
    let sides = Sides { infer: &["-0.407606"], train: &["-0.142932"] };
    let (folder, [file, _]) = both(&sides);
    let text = std::fs::read_to_string(&file).expect("the dump");
    for (modes, expected) in [
        (
            "\"inference_logprobs_mode\": \"raw_logprobs\", \"trainer_temperature\": 0.5",
            Some(
                "the two sides' log-probabilities are of unlike distributions: inference raw \
                 (before temperature), trainer after temperature 0.5; recompute one side, or pass \
                 --allow-unlike to compare them as they are",
            ),
        ),
        (
            "\"inference_temperature\": 0.5, \"trainer_temperature\": -1",
            Some(
                "trainer_temperature is -1, not a temperature (a finite number from 0 on; 0 is \
                 greedy)",
            ),
        ),
        (
            "\"inference_logprobs_mode\": \"logits\"",
            Some(
                "inference_logprobs_mode is \"logits\"; raw_logprobs and processed_logprobs are \
                 known",
            ),
        ),
        (
            "\"inference_top_p\": 0.8, \"inference_top_k\": 5, \"trainer_top_p\": 1",
            Some(
                "the two sides' log-probabilities are of unlike distributions: inference after \
                 temperature 1, top-p 0.8, top-k 5, trainer raw (before temperature); recompute \
                 one side, or pass --allow-unlike to compare them as they are",
            ),
        ),
        (
            "\"trainer_top_p\": 0",
            Some("trainer_top_p is 0, not a share over 0 and up to 1; 1 keeps everything"),
        ),
        ("\"inference_temperature\": 0.5, \"trainer_temperature\": 0.5", None),
        ("\"inference_temperature\": 0, \"trainer_temperature\": 0", None),
        ("\"inference_logprobs_mode\": \"raw_logprobs\", \"trainer_temperature\": 1", None),
    ] {
        let dump =
            write(folder.path(), "modes.jsonl", &text.replacen('{', &format!("{{{modes}, "), 1));
        let (code, _, error) = outcome(&["--rollouts", path(&dump)]);
        match expected {
            Some(expected) => {
                let expected = format!("error: {}, line 1: {expected}\n", path(&dump));
                assert_eq!((code, error), (Some(1), expected));
            }
            None => assert_eq!((code, error.as_str()), (Some(0), ""), "{modes}"),
        }
    }
}

#[test]
fn k19_unlike_modes_are_compared_if_told() {
    let sides = Sides { infer: &["-0.407606"], train: &["-0.142932"] };
    let (folder, [file, _]) = both(&sides);
    let text = std::fs::read_to_string(&file).expect("the dump");
    let unlike = "\"inference_logprobs_mode\": \"raw_logprobs\", \"trainer_temperature\": 0.5, ";
    let dump = write(folder.path(), "told.jsonl", &text.replacen('{', &format!("{{{unlike}"), 1));
    let args = ["--rollouts", path(&dump), "--allow-unlike", "--floor", "0.1"];
    let (text, audit) = audited(folder.path(), &args);
    for part in [
        "note      1 record of unlike temperature, filters or mode: as asked\n",
        "note      whether a temperature or filter of one side explains it cannot be told from the \
         sampled tokens' log-probabilities alone; --model DIR tries it on all logits\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    check(&audit, "gap_detail/logp_diff_mean", d(&sides)[0]);
    assert!((d(&sides)[0] - 0.264_674).abs() < 1e-6);
    check(&audit, "gap_detail/ratio_mean", d(&sides)[0].exp());
}
