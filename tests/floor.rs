//! Fast numerics: what healthy arithmetic leaves is under a measured floor, and what is not healthy
//! is over it. The floor of invariant numerics is exactly 0.

mod common;

use common::play::{experiment, Played};
use common::{engine, fixture, random_tokens};
use gapscope::engine::{Engine, Feed, Phase};
use gapscope::gap::FindingKind;
use gapscope::model::load_plan;

/// First chunks of one token, as the budget holds three prompts of 12 and one token of the fourth;
/// from step 3 on the fourth request's blocks have been used. States are kept in bf16.
const HALF_STATES: &str = r#"
name = "half-states"
seed = 7
steps = 4
model.path = "configs/models/arithmetic"
trainer.update = "none"

[engine]
num_gpu_blocks_override = 41
max_num_batched_tokens = 37 # 3 x 12 + 1
max_num_seqs = 16
max_model_len = 32
mamba_ssm_cache_dtype = "bf16"
numerics = "fast"

[rollout]
prompts_per_step = 2
rollouts_per_prompt = 2
max_new_tokens = 8
ignore_eos = true

[task]
max_operand = 99
prompt_tokens = 12
"#;

/// A small model that learns, so that the floor is measured more than once.
const LEARNING: &str = r#"
name = "learning"
seed = 5
steps = 3
model.preset = "tiny-jamba"

[engine]
num_gpu_blocks_override = 512
max_num_batched_tokens = 256
max_num_seqs = 64
max_model_len = 64
numerics = "fast"

[rollout]
prompts_per_step = 2
max_new_tokens = 8
ignore_eos = true

[task]
max_operand = 99
"#;

/// Every request's largest gap, and the floor of its step.
fn gaps(played: &Played) -> Vec<(String, f64, f64)> {
    let of_step = |step: &common::play::PlayedStep| {
        let floor = played.session.floor(step.pairs.tokens().count() as u64);
        let gap = |one: &gapscope::gap::Sequence| {
            (one.request.to_string(), one.gap().expect("tokens"), floor)
        };
        step.pairs.sequences.iter().map(gap).collect::<Vec<_>>()
    };
    played.steps.iter().flat_map(of_step).collect()
}

#[test]
fn k08_half_precision_states_leave_a_gap_in_all_requests_and_it_is_within_the_floor() {
    let played = Played::new(&experiment(HALF_STATES, &[]));
    assert!(played.findings.is_empty() && played.spikes().is_empty(), "{:#?}", played.findings);
    let gaps = gaps(&played);
    assert_eq!(gaps.len(), 16);
    for (request, gap, floor) in &gaps {
        assert!(0.0 < *gap && gap <= floor, "{request}: {gap} of {floor}");
    }
    // The floor is one of this arithmetic: nowhere near what a wrong state does.
    assert!(gaps[0].2 < 1.0, "{}", gaps[0].2);
}

#[test]
fn k08_with_k02_on_top_only_the_requests_that_were_hit_are_over_the_floor() {
    let k02 = ["engine.batch_split=scheduled_tokens"];
    let played = Played::new(&experiment(HALF_STATES, &k02));
    let over = gaps(&played).into_iter().filter(|(_, gap, floor)| gap > floor);
    let over: Vec<String> = over.map(|(request, ..)| request).collect();
    assert_eq!(over, ["s3.p1.r1", "s4.p1.r1"]);
    assert_eq!(played.spikes(), [3, 4]);
    for (finding, request) in played.findings.iter().zip(&over) {
        assert_eq!(finding.kind, FindingKind::StaleState);
        assert_eq!(
            finding.requests.iter().map(ToString::to_string).collect::<Vec<_>>(),
            [request.as_str()]
        );
    }
    assert_eq!(played.findings.len(), 2);
}

/// What left the last layer of a prefill that was cut at `cut`.
fn prefill(engine: &Engine, tokens: &[gapscope::base::TokenId], cut: usize) -> Vec<f32> {
    let mut scratch = engine.scratch(1);
    let (first, rest) = tokens.split_at(cut);
    let mut feed = |tokens| {
        let feed = Feed { sequence: 0, phase: Phase::Prefill, tokens };
        scratch.feed(engine.runner(), &[feed], None).into_host()
    };
    if first.is_empty() {
        return feed(rest);
    }
    [feed(first), feed(rest)].concat()
}

#[test]
fn k08_a_split_prefill_is_the_whole_one_where_numerics_are_invariant() {
    let plan = load_plan(&fixture("tiny-jamba")).expect("a fixture");
    let tokens = random_tokens(&plan.config, 32, 1);
    for (numerics, state, cuts, equal) in [
        ("invariant", "f32", &[1, 16, 27][..], true),
        ("invariant", "bf16", &[1, 16, 27], true),
        // A cut within a tile, and one where a bf16 state is rounded.
        ("fast", "f32", &[1, 27], false),
        ("fast", "bf16", &[1, 16, 27], false),
    ] {
        let extra =
            format!("engine.numerics = \"{numerics}\"\nengine.mamba_ssm_cache_dtype = \"{state}\"");
        let engine = engine("tiny-jamba", &extra);
        let whole = prefill(&engine, &tokens, 0);
        for &cut in cuts {
            let same = prefill(&engine, &tokens, cut) == whole;
            assert_eq!(same, equal, "{numerics}, {state} states, cut at {cut}");
        }
    }
}

#[test]
fn healthy_steps_of_any_size_are_silent() {
    for (rollouts, dtype) in [(8, "bf16"), (32, "f32"), (64, "bf16")] {
        let case = format!("{rollouts} rollouts, {dtype}");
        let sets =
            [format!("rollout.rollouts_per_prompt={rollouts}"), format!("model.dtype={dtype}")];
        let played = Played::new(&experiment(LEARNING, &sets.each_ref().map(String::as_str)));
        assert!(played.spikes().is_empty(), "{case}: {:#?}", played.findings);
        assert!(played.findings.is_empty(), "{case}");
        let most = played.totals.gap_max.expect("tokens were compared");
        let floor = played.session.floor(2 * rollouts * 8);
        assert!(0.0 < most && most <= floor && floor < 50.0 * most, "{case}: {most} of {floor}");
        assert!(floor < played.session.floor(16 * 2 * rollouts * 8), "{case}");
    }
}

#[test]
fn invariant_numerics_have_no_floor() {
    let played = Played::new(&experiment(LEARNING, &["engine.numerics=invariant"]));
    played.assert_exact("invariant");
    assert_eq!((played.session.floor(1), played.session.floor(u64::MAX)), (0.0, 0.0));
}

/// One weight of the trainer's is off by one unit in its last place: over a floor of 0, and no
/// alarm to anybody who looks at means. In fast numerics it is nothing that arithmetic does not do.
#[test]
fn thresholds_say_which_steps_are_spikes() {
    let (exact, fast) = ("engine.numerics=invariant", "engine.numerics=fast");
    for (numerics, thresholds, dtype, spikes, kind) in [
        (exact, "floor", "f32", 3, Some(FindingKind::WeightsNotSynced)),
        (exact, "exact", "f32", 3, Some(FindingKind::WeightsNotSynced)),
        (exact, "nemo_rl", "f32", 0, None),
        (exact, "prime_rl", "f32", 0, None),
        (exact, "slime", "f32", 0, None),
        (exact, "miles", "f32", 0, None),
        (fast, "floor", "bf16", 0, None),
        (fast, "exact", "bf16", 3, Some(FindingKind::Precision)),
        (fast, "slime", "bf16", 0, None),
    ] {
        let case = format!("{numerics}, {thresholds}, {dtype}");
        let thresholds = format!("check.thresholds={thresholds}");
        let dtype = format!("model.dtype={dtype}");
        let fault = match numerics == exact {
            true => "trainer.faults=[\"trainer_weight_ulp\"]",
            false => "trainer.faults=[]",
        };
        let sets = [numerics, &thresholds, &dtype, fault, "rollout.rollouts_per_prompt=4"];
        let played = Played::new(&experiment(LEARNING, &sets));
        assert!(played.totals.gap_max > Some(0.0), "{case}");
        assert_eq!(played.spikes().len(), spikes, "{case}");
        assert_eq!(played.findings.len(), spikes, "{case}");
        let named = |finding: &gapscope::gap::Finding| Some(finding.kind) == kind;
        assert!(played.findings.iter().all(named), "{case}: {:#?}", played.findings);
    }
}
