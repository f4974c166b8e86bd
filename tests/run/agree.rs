//! Engine and trainer agree on every bit, whatever is sampled, scheduled or trained.

use std::collections::BTreeSet;

use gapscope::base::LogProb;
use gapscope::report::parquet::{RolloutRow, TokenRow};

use crate::common::run::{Run, SUMS};
use crate::{weights_by_step, ALL_LEGS, SCORE_ONLY};

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
        let (plain, observed) = (of(&without), of(&with));
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
