//! Whole runs of the binary, each of a second: what they leave, that engine and trainer agree, and
//! that every way of breaking the agreement shows.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::run::{gapscope, set, Run, SMALL, SUMS};
use gapscope::base::{LogProb, Step};
use gapscope::report::parquet::{RolloutRow, TokenRow};
use serde_json::{json, Value};

const ALL_LEGS: &str = "check.legs=[\"prefill\",\"reference\"]";
const SCORE_ONLY: &str = "trainer.update=none";

/// Both sides' fingerprint of a step's weights: equal, and the same for all its rollouts.
fn weights(rollouts: &[RolloutRow]) -> u64 {
    let both =
        rollouts.iter().flat_map(|row| [Some(row.engine_fingerprint), row.trainer_fingerprint]);
    let found: BTreeSet<Option<u64>> = both.collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found.into_iter().flatten().next().expect("both sides have one")
}

fn weights_by_step(run: &Run) -> Vec<u64> {
    run.rollouts().iter().map(|rollouts| weights(rollouts)).collect()
}

fn spikes(run: &Run) -> Vec<u64> {
    let steps = run.summary()["spike_steps"].clone();
    serde_json::from_value(steps).expect("a list of steps")
}

/// The run's findings of one kind, and no others.
fn findings(run: &Run, kind: &str) -> Vec<Value> {
    let Value::Array(found) = run.summary()["findings"].clone() else { panic!("a list") };
    assert!(found.iter().all(|one| one["kind"] == kind), "{found:#?}");
    found
}

#[test]
fn a_run_leaves_every_file() {
    let run = Run::small(&["checkpoint.save_final=true", "check.greedy_eval_prompts=2"]);
    let steps = ["step-00001", "step-00002", "step-00003"];
    let mut expected: BTreeSet<String> = [
        "checkpoints/final/config.json",
        "checkpoints/final/generation_config.json",
        "checkpoints/final/model.safetensors",
        "config.json",
        "evaluation.json",
        "findings.json",
        "report.html",
        "steps.jsonl",
        "summary.json",
        "tb/events",
        "timing.jsonl",
    ]
    .map(str::to_owned)
    .into();
    for folder in ["rollouts", "tokens"] {
        expected.extend(steps.map(|step| format!("{folder}/{step}.parquet")));
    }
    let files = run.files();
    assert_eq!(files.keys().cloned().collect::<BTreeSet<_>>(), expected);
    assert!(files.values().all(|bytes| !bytes.is_empty()));
    run.assert_clean();

    // What it leaves can be run again, and starts where the first run ended.
    let again = format!("model.path={}", run.root().join("checkpoints/final").display());
    let experiment = std::fs::read_to_string(SMALL).expect("the experiment");
    let parent = tempfile::tempdir().expect("a temporary folder");
    let file = parent.path().join("again.toml");
    std::fs::write(&file, experiment.replace("preset = \"tiny-jamba\"", "")).expect("written");
    let again = Run::of(file.to_str().expect("UTF-8"), &[&again]);
    again.assert_clean();
    assert!(!weights_by_step(&run).contains(&weights_by_step(&again)[0]));
}

#[test]
fn a_run_says_what_it_did() {
    let run = Run::small(&[]);
    run.assert_clean();
    let summary = run.summary();
    assert_eq!(summary["schema"], 1);
    assert_eq!(summary["name"], "small");
    assert_eq!(summary["num_blocks"], 64);
    assert_eq!(summary["state_stride"], 3072);
    assert_eq!(summary["first_wrapped_block"], Value::Null);
    assert_eq!(summary["floor"], 0.0);
    // Each of twelve requests holds a block a Mamba group, three, and one of attention.
    assert_eq!(summary["blocks_per_step"], 48.0);
    assert_eq!(summary["laps"], 3.0 * 48.0 / 63.0);
    assert_eq!(summary["preemptions"], 0);
    let rewards = run.metric("reward/mean");
    assert_eq!(summary["reward_mean_first"], rewards[0]);
    assert_eq!(summary["reward_mean_last"], rewards[2]);
    let of_records = |rollouts: &Vec<RolloutRow>| {
        rollouts.iter().map(|row| row.reward).sum::<f64>() / rollouts.len() as f64
    };
    assert_eq!(rewards, run.rollouts().iter().map(of_records).collect::<Vec<_>>());
    assert!(rewards.iter().any(|&mean| mean > 0.0 && mean < 1.0), "{rewards:?}");
    assert!(summary["wall_s"].as_f64().expect("seconds") > 0.0);

    let expected = format!(
        "small: 3 steps, 216 tokens compared, 0 nonfinite\n\
         gap_max 0  frac_bitwise_equal 1  spikes []\n\
         reward {} -> {}  ({:.1} s)\n\
         0 finding(s)\n\
         report: {}\n",
        rewards[0],
        rewards[2],
        summary["wall_s"].as_f64().expect("seconds"),
        run.folder.report().display()
    );
    assert_eq!(run.stdout, expected);
}

/// Time is in `timing.jsonl`, TensorBoard and `wall_s`, and nowhere else.
#[test]
fn a_run_repeated_is_equal_byte_for_byte() {
    let assignments = [
        ALL_LEGS,
        "checkpoint.save_final=true",
        "check.greedy_eval_prompts=4",
        "trainer.warm_start.steps=2",
        "engine.faults=[\"engine_weight_ulp\"]",
    ];
    let [first, second] = [(); 2].map(|()| {
        let run = Run::small(&assignments);
        assert!(!spikes(&run).is_empty(), "findings and worst tokens are compared too");
        let mut summary = run.summary();
        summary["wall_s"].take();
        let mut files = run.files();
        files.retain(|name, _| name != "timing.jsonl" && name != "tb/events");
        // The page shows the summary's seconds.
        let page = files.remove("report.html").expect("a report");
        let page = String::from_utf8(page).expect("UTF-8");
        let seconds = run.summary()["wall_s"].as_f64().expect("seconds");
        let shown = format!("{seconds:.1} s");
        files.insert("report.html".to_owned(), page.replace(&shown, "").into_bytes());
        files.insert("summary.json".to_owned(), summary.to_string().into_bytes());
        files
    });
    assert_eq!(first.keys().collect::<Vec<_>>(), second.keys().collect::<Vec<_>>());
    for (name, bytes) in &first {
        assert!(bytes == &second[name], "{name} differs");
    }
}

/// Other seeds are other runs: equality above is not for want of change.
#[test]
fn a_seed_changes_the_run() {
    let [first, second] = ["seed=3", "seed=4"].map(|seed| Run::small(&[seed]));
    assert_ne!(first.files()["steps.jsonl"], second.files()["steps.jsonl"]);
    assert_ne!(weights_by_step(&first)[0], weights_by_step(&second)[0]);
}

/// Prefill and reference add their own columns and tags and change nothing else, spike or not.
#[test]
fn observing_changes_nothing() {
    for fault in ["engine.faults=[]", "engine.faults=[\"engine_weight_ulp\"]"] {
        let [without, with] = ["check.legs=[]", ALL_LEGS].map(|legs| Run::small(&[legs, fault]));
        let of = |run: &Run| {
            let mut files = run.files();
            files.retain(|name, _| name.starts_with("rollouts/"));
            files
        };
        let (plain, observed): (BTreeMap<_, _>, BTreeMap<_, _>) = (of(&without), of(&with));
        assert_eq!(plain.len(), 3);
        assert!(plain == observed, "{fault}: rollouts differ");

        let bare = |row: TokenRow| TokenRow { logp_prefill: None, logp_reference: None, ..row };
        let tokens: Vec<_> = with.tokens();
        assert!(tokens
            .iter()
            .all(|row| row.logp_prefill.is_some() && row.logp_reference.is_some()));
        assert_eq!(
            tokens.into_iter().map(bare).collect::<Vec<_>>(),
            without.tokens().into_iter().map(bare).collect::<Vec<_>>()
        );
        for (plain, observed) in without.steps().iter().zip(with.steps()) {
            let plain = plain.as_object().expect("a row");
            for (tag, value) in plain {
                assert_eq!(*value, observed[tag], "{fault}: {tag}");
            }
            assert!(observed.as_object().expect("a row").len() > plain.len());
        }
    }
}

#[test]
fn all_four_legs_agree() {
    let run = Run::small(&[ALL_LEGS]);
    run.assert_clean();
    let nats = |leg: Option<LogProb>| f64::from(leg.expect("every leg was asked for").get());
    let mut differ = 0;
    for row in run.tokens() {
        assert_eq!(row.logp_prefill, row.logp_decode);
        let (trainer, reference) = (nats(row.logp_trainer), nats(row.logp_reference));
        assert!((trainer - reference).abs() <= 1e-4, "{}: {trainer} {reference}", row.request);
        differ += u32::from(trainer != reference);
    }
    assert!(differ > 0, "the reference is another program and rounds otherwise");
    let largest = run.metric("gap_detail/trainer_reference/logp_abs_diff_max");
    assert!(largest.iter().all(|&gap| gap > 0.0 && gap <= 1e-4), "{largest:?}");
}

#[test]
fn every_sampling_agrees_under_both_logprob_modes() {
    for mode in ["raw_logprobs", "processed_logprobs"] {
        for sampling in [
            &["rollout.temperature=0"][..],
            &["rollout.temperature=0.6"],
            &["rollout.temperature=1"],
            &["rollout.top_p=0.8"],
            &["rollout.temperature=0.6", "rollout.top_p=0.8", "rollout.top_k=20"],
            &["rollout.min_p=0.3"],
        ] {
            let mode = format!("engine.logprobs_mode={mode}");
            let run = Run::small(&[sampling, &[&mode]].concat());
            run.assert_clean();
        }
    }
}

#[test]
fn every_dtype_agrees() {
    for (weights, state) in [("bf16", "f32"), ("bf16", "bf16"), ("f32", "bf16")] {
        let weights = format!("model.dtype={weights}");
        let state = format!("engine.mamba_ssm_cache_dtype={state}");
        Run::small(&[&weights, &state]).assert_clean();
    }
}

/// Small budgets cut prompts, a small pool preempts, and nothing shows of either.
#[test]
fn every_schedule_agrees() {
    for (assignments, preempts) in [
        (&["engine.max_num_batched_tokens=16", "engine.batch_split=computed_tokens"][..], false),
        (&["engine.force_prefill=true"], false),
        (&["engine.enable_chunked_prefill=false"], false),
        (&["engine.max_num_seqs=1", "engine.max_num_batched_tokens=3"], false),
        (&["engine.num_gpu_blocks_override=10", "rollout.max_new_tokens=48"], true),
    ] {
        let run = Run::small(assignments);
        run.assert_clean();
        let preemptions = run.summary()["preemptions"].as_u64().expect("a count");
        assert_eq!(preemptions > 0, preempts, "{assignments:?}");
    }
}

#[test]
fn a_request_does_not_depend_on_its_schedule() {
    let of = |assignments: &[&str]| {
        let tokens = |row: &RolloutRow| (row.request, row.completion_token_ids.clone());
        let rollouts = Run::small(assignments).rollouts();
        rollouts.iter().flatten().map(tokens).collect::<Vec<_>>()
    };
    let plain = of(&[]);
    assert_eq!(plain.len(), 36);
    for other in [
        &["engine.max_num_batched_tokens=16"][..],
        &["engine.max_num_seqs=2"],
        &["engine.free_list=lifo"],
        &["engine.force_prefill=true"],
    ] {
        assert_eq!(of(other), plain, "{other:?}");
    }
}

#[test]
fn weights_stay_without_updates() {
    for still in [SCORE_ONLY, "trainer.learning_rate=0"] {
        let run = Run::small(&[still]);
        run.assert_clean();
        let weights = weights_by_step(&run);
        assert_eq!(BTreeSet::from_iter(&weights).len(), 1, "{still}: {weights:x?}");
    }
}

#[test]
fn updates_change_the_weights_of_both_sides() {
    let run = Run::small(&["steps=5"]);
    run.assert_clean();
    let weights = weights_by_step(&run);
    assert_eq!(BTreeSet::from_iter(&weights).len(), 5, "{weights:x?}");
    let versions: Vec<_> =
        run.rollouts().iter().map(|rollouts| rollouts[0].weight_version.get()).collect();
    assert_eq!(versions, [0, 1, 2, 3, 4]);
    // The first step's weights are those of a run that never updates.
    assert_eq!(weights[0], weights_by_step(&Run::small(&[SCORE_ONLY]))[0]);
}

#[test]
fn every_term_of_the_loss_trains_without_a_gap() {
    for (assignments, tag) in [
        (&["trainer.kl_coef=0.1"][..], "loss/kl"),
        (&["trainer.importance_cap=2"], "loss/importance_mean"),
        (&["trainer.updates_per_step=2"], "loss/grad_norm"),
        (&["trainer.loss_agg=sequence_mean"], "loss/policy"),
        (&["trainer.scale_advantages=false"], "loss/policy"),
    ] {
        let run = Run::small(assignments);
        run.assert_clean();
        assert_eq!(BTreeSet::from_iter(weights_by_step(&run)).len(), 3, "{assignments:?}");
        let values = run.metric(tag);
        assert!(values.iter().all(|value| value.is_finite()), "{tag}: {values:?}");
        let norms = run.metric("loss/grad_norm");
        assert!(norms.iter().any(|&norm| norm > 0.0), "{assignments:?}: {norms:?}");
    }
    // From the second step on the weights are no longer the frozen ones.
    let kl = Run::small(&["trainer.kl_coef=0.1", "trainer.learning_rate=1e-2"]).metric("loss/kl");
    assert!(kl[0] == 0.0 && kl[1] > 0.0 && kl[2] > 0.0, "{kl:?}");
    // Engine and trainer agree, so that every weight is exactly 1.
    let weight = Run::small(&["trainer.importance_cap=2"]).metric("loss/importance_mean");
    assert_eq!(weight, [1.0; 3]);
}

#[test]
fn a_warm_start_runs_and_earns_rewards_in_range() {
    let warm = ["trainer.warm_start.steps=20", "trainer.warm_start.batch=16"];
    let run = Run::of(SUMS, &[&warm[..], &["trainer.warm_start.learning_rate=3e-3"]].concat());
    run.assert_clean();
    let rewards = run.metric("reward/mean");
    assert!(rewards.iter().all(|reward| (0.0..=1.0).contains(reward)), "{rewards:?}");
    assert_ne!(weights_by_step(&run)[0], weights_by_step(&Run::of(SUMS, &[]))[0]);
    // The engine was handed the warmed weights, not the first ones.
    assert_eq!(run.rollouts()[0][0].weight_version.get(), 20);
}

#[test]
fn one_ulp_on_either_side_is_a_gap_and_names_its_tensor() {
    for fault in
        ["engine.faults=[\"engine_weight_ulp\"]", "trainer.faults=[\"trainer_weight_ulp\"]"]
    {
        for dtype in ["model.dtype=f32", "model.dtype=bf16"] {
            let run = Run::small(&[fault, dtype, SCORE_ONLY]);
            let gaps = run.metric("gap/logp_abs_diff_max");
            assert!(gaps.iter().all(|&gap| gap > 0.0), "{fault} {dtype}: {gaps:?}");
            assert_eq!(spikes(&run), [1, 2, 3], "{fault} {dtype}");
            let found = findings(&run, "weights_not_synced");
            assert_eq!(found.len(), 3);
            for finding in found {
                let message = finding["message"].as_str().expect("a message");
                let expected = "; 1 of 63 tensors differ: model.final_layernorm.weight";
                assert!(message.ends_with(expected), "{message}");
            }
        }
    }
}

/// The engine sampled before the update, the trainer scores after it: the gap is the update itself,
/// from the first step on.
#[test]
fn scoring_after_the_update_is_a_gap_at_once() {
    let run = Run::small(&["trainer.faults=[\"score_after_update\"]"]);
    let gaps = run.metric("gap/logp_abs_diff_max");
    assert!(gaps.iter().all(|&gap| gap > 1e-6), "{gaps:?}");
    assert_eq!(spikes(&run), [1, 2, 3]);
    assert_eq!(findings(&run, "weights_not_synced").len(), 3);
    // Each step's rollouts came from the weights that the step before was scored with.
    let sides: Vec<_> = run
        .rollouts()
        .iter()
        .map(|rows| (rows[0].engine_fingerprint, rows[0].trainer_fingerprint.expect("scored")))
        .collect();
    assert!(sides.iter().all(|(engine, trainer)| engine != trainer), "{sides:x?}");
    assert!(sides.windows(2).all(|pair| pair[1].0 == pair[0].1), "{sides:x?}");
}

/// A state index of 19 bits ends at block 171 of stride 3,072. Sixteen requests of four blocks take
/// 64 a step, in order: the third step is the first to get there.
#[test]
fn a_narrow_state_index_wraps_where_the_pool_reaches_it() {
    let pool = ["engine.num_gpu_blocks_override=200", "rollout.prompts_per_step=4", SCORE_ONLY];
    let with = |more: &[&str]| Run::small(&[&pool[..], &["steps=4"], more].concat());
    let wrapped = with(&["engine.state_index_bits=19"]);
    assert_eq!(wrapped.summary()["first_wrapped_block"], 171);
    assert_eq!(wrapped.summary()["first_spike_step"], 3);
    let first = &wrapped.summary()["findings"][0];
    assert_eq!((&first["kind"], &first["step"]), (&json!("address_wrap"), &json!(3)));
    let high = |row: &RolloutRow| row.state_blocks.iter().any(|block| block.get() >= 171);
    let named: BTreeSet<String> =
        serde_json::from_value(first["requests"].clone()).expect("request ids");
    let rows = wrapped.rollouts();
    let reached = rows[2].iter().filter(|row| high(row)).map(|row| row.request.to_string());
    assert_eq!(named, reached.collect());

    with(&["engine.state_index_bits=64"]).assert_clean();
    // A stack hands out the same low blocks again and again.
    with(&["engine.state_index_bits=19", "engine.free_list=lifo"]).assert_clean();
}

/// Sixteen tokens hold three prompts of five and leave one: the fourth request begins with a chunk
/// of one token, runs as a decode row and reads what its block's last owner left.
#[test]
fn a_first_chunk_of_one_token_reads_stale_state_under_the_old_split() {
    let pool = ["engine.num_gpu_blocks_override=80", "engine.max_num_batched_tokens=16"];
    let with = |more: &[&str]| Run::of(SUMS, &[&pool[..], &["steps=4", SCORE_ONLY], more].concat());
    let old = with(&["engine.batch_split=scheduled_tokens"]);
    // The pool starts zeroed, and a first lap reads zeros, which is what a new request needs. Of 79
    // blocks 48 go a step, and the fourth request of the second step still has new ones.
    assert_eq!(spikes(&old), [3, 4]);
    for finding in old.summary()["findings"].as_array().expect("a list") {
        let step = Step::new(finding["step"].as_u64().expect("a step"));
        assert_eq!(finding["requests"], json!([format!("s{step}.p0.r3")]));
    }
    with(&["engine.batch_split=is_prefilling"]).assert_clean();
    with(&["engine.batch_split=computed_tokens"]).assert_clean();
    with(&["engine.batch_split=scheduled_tokens", "engine.max_num_batched_tokens=64"])
        .assert_clean();
}

/// Steps before a failure are kept, and the failed run says how far it came.
#[test]
fn what_was_reported_before_an_error_stays() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let root = parent.path().join("run");
    let obstacle = root.join("tokens/step-00002.parquet");
    std::fs::create_dir_all(&obstacle).expect("a folder where a file must go");
    let output = gapscope().args(["run", SMALL, "--out"]).arg(&root).output().expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    let last = stderr.lines().last().expect("an error");
    let expected = format!("error: cannot write {}: Is a directory", obstacle.display());
    assert!(last.starts_with(&expected), "{last}");
    let summary = common::run::read_json(&root.join("summary.json"));
    assert_eq!((&summary["steps_done"], &summary["n_tokens"]), (&json!(1), &json!(72)));
    assert!(root.join("tokens/step-00001.parquet").is_file());
    assert!(root.join("report.html").is_file());
}

/// Weights that overflow give no finite logprob: a spike, counted as such, then an error.
#[test]
fn weights_that_overflow_are_a_spike_of_nonfinite_tokens() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let root = parent.path().join("run");
    let mut command = gapscope();
    command.args(["run", SMALL, "--out"]).arg(&root).args(set(&["trainer.learning_rate=1e30"]));
    let output = command.output().expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    let expected = "error: the new log-probability of token 0 in sequence 0 of its chunk is NaN: \
        the loss needs finite numbers; look for the step's non-finite tokens in its record";
    assert_eq!(stderr.lines().last(), Some(expected));
    let summary = common::run::read_json(&root.join("summary.json"));
    assert_eq!(summary["spike_steps"], json!([2]));
    assert_eq!((&summary["n_tokens"], &summary["nonfinite"]), (&json!(72), &json!(72)));
}
