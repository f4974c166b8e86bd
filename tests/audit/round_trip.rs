//! What is written is what is measured: many records, every figure computed here again from the
//! numbers that were written.

use gapscope::base::Stream;

use super::dump::{nemo, prime, write, Sides};
use super::{audited, check, path};

/// One record's values, as f32 and as text.
struct Written {
    infer: Vec<f32>,
    train: Vec<f32>,
}

fn written(stream: &mut Stream) -> Written {
    let length = 1 + (stream.uniform() * 40.0) as usize;
    let mut infer = || -(8.0 * stream.uniform()) as f32;
    let infer: Vec<f32> = (0..length).map(|_| infer()).collect();
    let train = infer.iter().map(|logp| logp + (0.2 * (stream.uniform() - 0.5)) as f32);
    let train = train.map(|logp| logp.min(0.0)).collect();
    Written { infer, train }
}

#[test]
fn what_is_written_is_what_is_measured() {
    for seed in 0..4 {
        let mut stream = Stream::new(seed, "dump", 0);
        let records: Vec<Written> = (0..50).map(|_| written(&mut stream)).collect();
        let (mut in_nemo, mut in_prime) = (String::new(), String::new());
        for (index, record) in records.iter().enumerate() {
            // As Python prints an f32 that it holds as an f64: exactly.
            let text = |values: &[f32]| -> Vec<String> {
                values.iter().map(|&value| format!("{:?}", f64::from(value))).collect()
            };
            let (infer, train) = (text(&record.infer), text(&record.train));
            let infer: Vec<&str> = infer.iter().map(String::as_str).collect();
            let train: Vec<&str> = train.iter().map(String::as_str).collect();
            let sides = Sides { infer: &infer, train: &train };
            in_nemo += &nemo(index, &sides);
            in_prime += &prime(7, index, &sides);
        }
        for (name, content) in
            [("train_data_step7.jsonl", in_nemo), ("step_7/rank_0.jsonl", in_prime)]
        {
            let folder = tempfile::tempdir().expect("a folder");
            let dump = write(folder.path(), name, &content);
            let (_, audit) = audited(folder.path(), &["--rollouts", path(&dump)]);
            measured(&audit, &records);
        }
    }
}

fn measured(audit: &serde_json::Value, records: &[Written]) {
    let of = |record: &Written| -> Vec<f64> {
        let pairs = std::iter::zip(&record.infer, &record.train);
        pairs.map(|(&infer, &train)| f64::from(train) - f64::from(infer)).collect()
    };
    let d: Vec<f64> = records.iter().flat_map(of).collect();
    let n = d.len() as f64;
    let mean = |term: fn(f64) -> f64| d.iter().map(|&d| term(d)).sum::<f64>() / n;
    let sums = records.iter().map(|record| of(record).iter().sum::<f64>());
    assert_eq!(audit["steps"][0]["step"], 7);
    check(audit, "gap_detail/n_tokens", n);
    check(audit, "gap_detail/n_seqs", records.len() as f64);
    check(audit, "gap/nonfinite", 0.0);
    check(audit, "gap/logp_abs_diff_mean", mean(f64::abs));
    check(audit, "gap/logp_abs_diff_max", d.iter().fold(0.0, |most, d| d.abs().max(most)));
    check(audit, "gap_detail/logp_diff_mean", mean(|d| d));
    check(audit, "gap/k3_mean", mean(|d| d.exp() - 1.0 - d));
    check(audit, "gap/token_mult_prob_error", mean(|d| d.abs().exp()));
    check(audit, "gap_detail/ratio_mean", mean(f64::exp));
    check(audit, "gap_detail/seq_log_ratio_max", sums.fold(f64::NEG_INFINITY, f64::max));
}
