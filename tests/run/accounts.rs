//! Numbers of a run that can be worked out again from its records.

use serde_json::json;

use crate::common::run::Run;
use crate::SCORE_ONLY;

const SUMS: &str = "tests/fixtures/sums.toml";

/// Of records with a gap: a clean run's weights are all exp(0).
#[test]
fn importance_weights_are_exp_d_up_to_the_cap() {
    let fault = "engine.faults=[\"engine_weight_ulp\"]";
    for cap in [0.9999999, 2.0] {
        let set = format!("trainer.importance_cap={cap}");
        let run = Run::small(&[fault, &set, "steps=1", "trainer.updates_per_step=1"]);
        let weights: Vec<f64> = run
            .tokens()
            .iter()
            .map(|row| {
                let nats = |logp: Option<gapscope::base::LogProb>| {
                    f64::from(logp.expect("a logprob").get())
                };
                (nats(row.logp_trainer) - nats(row.logp_decode)).exp()
            })
            .collect();
        let mean = weights.iter().map(|w| w.min(cap)).sum::<f64>() / weights.len() as f64;
        let found = run.metric("loss/importance_mean")[0];
        // Means of f64 in another order; the weights themselves differ from 1 by about 1e-7.
        assert!((found - mean).abs() < 1e-14, "{found} against {mean}");
        let capped = weights.iter().filter(|&&w| w > cap).count() as f64 / weights.len() as f64;
        assert_eq!(run.metric("loss/importance_fraction_capped")[0], capped);
        assert!(weights.iter().any(|&w| w != 1.0), "the fault gives a gap");
    }
}

#[test]
fn advantages_are_scaled_or_only_centred() {
    for (scaled, setting) in
        [(true, "trainer.scale_advantages=true"), (false, "trainer.scale_advantages=false")]
    {
        let run = Run::small(&[setting]);
        let mut different = 0;
        for group in run.rollouts().iter().flat_map(|step| step.chunks(4)) {
            let rewards: Vec<f64> = group.iter().map(|row| row.reward).collect();
            let mean = rewards.iter().sum::<f64>() / 4.0;
            let variance = rewards.iter().map(|r| (r - mean) * (r - mean)).sum::<f64>() / 3.0;
            let divisor = if scaled && variance > 0.0 { variance.sqrt() + 1e-6 } else { 1.0 };
            for (row, reward) in group.iter().zip(&rewards) {
                let want = (reward - mean) / divisor;
                assert!((row.advantage - want).abs() < 1e-12, "{} {want}", row.advantage);
            }
            different += usize::from(variance > 0.0);
        }
        assert!(different > 0, "some group has unequal rewards");
    }
}

#[test]
fn the_pools_numbers_are_those_of_the_step() {
    let run = Run::small(&["steps=4", SCORE_ONLY]);
    let summary = run.summary();
    let sum = |tag: &str| run.metric(tag).iter().sum::<f64>();
    assert_eq!(json!(sum("pool/engine_steps")), json!(summary["engine_steps"].as_f64()));
    let blocks = summary["blocks_per_step"].as_f64().expect("a number") * 4.0;
    assert_eq!(sum("pool/blocks_taken"), blocks);
    assert!(run.metric("pool/engine_steps").iter().all(|&steps| steps > 0.0));
}

/// Nobody asked for legs; a spike's sequences get them all the same, and nobody else does.
#[test]
fn a_spikes_sequences_are_scored_by_every_leg() {
    let run = Run::of(
        SUMS,
        &[
            "engine.num_gpu_blocks_override=80",
            "engine.max_num_batched_tokens=16",
            "engine.batch_split=scheduled_tokens",
            "steps=3",
            SCORE_ONLY,
        ],
    );
    let (suspects, others): (Vec<_>, Vec<_>) =
        run.tokens().into_iter().partition(|row| row.request.to_string() == "s3.p0.r3");
    assert!(!suspects.is_empty());
    for row in suspects {
        assert_eq!(row.logp_prefill, row.logp_trainer, "the engine's own prefill is right");
        let (reference, trainer) = (row.logp_reference.expect("scored"), row.logp_trainer);
        assert!((reference.get() - trainer.expect("scored").get()).abs() < 1e-4);
    }
    assert!(others.iter().all(|row| row.logp_prefill.is_none() && row.logp_reference.is_none()));
}
