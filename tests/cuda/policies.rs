//! Whole runs under the engine's policies that change what a kernel is given: states that come from
//! a cached prefix, batches that are filled up, fast arithmetic.

use std::path::Path;

use gapscope::gap::FindingKind;

use crate::runs::{exact, on_device, same_on_both, Left, TINY};

/// Prompts of a hundred tokens, which the rollouts of a prompt share.
const CACHED: [&str; 5] = [
    "engine.enable_prefix_caching=true",
    "engine.max_model_len=160",
    "task.prompt_tokens=100",
    "rollout.ignore_eos=true",
    "check.legs=[\"prefill\"]",
];

fn assert_hits(name: &str, left: &Left) {
    let cached: u32 = left.rollouts().iter().filter_map(|row| row.cached_tokens).sum();
    assert!(cached > 0, "{name}: no prefix was found");
}

#[test]
fn cached_prefixes() {
    for preset in ["tiny-jamba", "tiny-mamba", "tiny-llama"] {
        let model = format!("model.preset={preset}");
        let scored = [&CACHED[..], &[&model, "trainer.update=none"]].concat();
        let name = format!("cached prefixes, {preset}");
        let Some(left) = same_on_both(&name, TINY, &scored) else { return };
        assert_hits(&name, &left);
        for state in ["f32", "bf16"] {
            let state = format!("engine.mamba_ssm_cache_dtype={state}");
            let set = [&scored[..], &["model.dtype=bf16", &state]].concat();
            let name = format!("{name}, bf16, {state}");
            let Some(left) = exact(&name, TINY, &set) else { return };
            assert_hits(&name, &left);
        }
    }
    // Blocks are taken from the cache again, and what is preempted finds its own.
    let tight = [
        "engine.num_gpu_blocks_override=60",
        "engine.max_model_len=192",
        "rollout.max_new_tokens=80",
        "trainer.update=none",
    ];
    let name = "cached prefixes in a tight pool";
    let Some(left) = same_on_both(name, TINY, &[&CACHED[..], &tight].concat()) else { return };
    assert_hits(name, &left);
    assert!(left.summary.preemptions > Some(0), "{name}: no preemption");
    let trained = [&CACHED[..], &["trainer.learning_rate=1e-2"]].concat();
    let Some(left) = same_on_both("cached prefixes, training", TINY, &trained) else { return };
    assert!(left.summary.spike_steps.is_empty(), "what older weights computed is found");
}

#[test]
fn a_cache_kept_over_an_update_comes_out_as_on_the_cpu() {
    let set = [
        &CACHED[..],
        &[
            "trainer.learning_rate=1e-2",
            "trainer.weight_decay=0.5",
            "engine.faults=[\"keep_cache_over_updates\"]",
        ],
    ];
    let Some(left) = same_on_both("a kept cache", TINY, &set.concat()) else { return };
    assert_eq!(left.summary.spike_steps.len(), 2, "all steps after the first");
}

#[test]
fn padded_batches() {
    for preset in ["tiny-jamba", "tiny-mamba", "tiny-llama"] {
        let model = format!("model.preset={preset}");
        let set = [
            &model,
            "engine.enforce_eager=false",
            "rollout.rollouts_per_prompt=3",
            "trainer.update=none",
        ];
        let name = format!("padded batches, {preset}");
        let Some(left) = same_on_both(&name, TINY, &set) else { return };
        let padded = left.tokens().iter().filter(|row| row.padding_rows > Some(0)).count();
        assert!(padded > 0 && left.summary.spike_steps.is_empty(), "{name}: {padded} tokens");
        for state in ["f32", "bf16"] {
            let state = format!("engine.mamba_ssm_cache_dtype={state}");
            exact(
                &format!("{name}, bf16, {state}"),
                TINY,
                &[&set[..], &["model.dtype=bf16", &state]].concat(),
            );
        }
    }
}

/// In f32 the device has one order in both arithmetics; in bf16 the library's is another one for
/// every number of rows, and a state that is kept in bf16 is rounded more often by decode rows.
#[test]
fn fast_arithmetic_stays_below_its_floor() {
    for (dtype, state, exact) in [
        ("f32", "f32", true),
        ("f32", "bf16", false),
        ("bf16", "f32", false),
        ("bf16", "bf16", false),
    ] {
        let dtypes =
            [format!("model.dtype={dtype}"), format!("engine.mamba_ssm_cache_dtype={state}")];
        for update in ["none", "adamw"] {
            let set = [
                "engine.numerics=fast",
                "rollout.ignore_eos=true",
                &dtypes[0],
                &dtypes[1],
                &format!("trainer.update={update}"),
            ];
            let name = format!("fast, {dtype}, state {state}, update {update}");
            let Some(left) = on_device(&name, TINY, &set) else { return };
            let found = &left.summary;
            assert!(found.spike_steps.is_empty() && found.findings.is_empty(), "{name}");
            assert_eq!(found.nonfinite, 0, "{name}");
            if exact {
                assert_eq!(found.frac_bitwise_equal, Some(1.0), "{name}");
            }
        }
    }
}

#[test]
fn a_stale_state_is_over_the_floor() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let toml = std::fs::read_to_string(root.join("experiments/imposter_request.toml"));
    let model = format!("model.path={}", root.join("configs/models/arithmetic").display());
    let set =
        [&model, "engine.numerics=fast", "model.dtype=bf16", "engine.mamba_ssm_cache_dtype=bf16"];
    let Some(left) = on_device("fast, a stale state", &toml.expect("an experiment"), &set) else {
        return;
    };
    let found = &left.summary.findings;
    assert!(found.iter().any(|one| one.kind == FindingKind::StaleState), "{found:#?}");
}
