//! Decode, prefill and trainer agree bit for bit, whatever else runs.
//!
//! Random prompts, budgets, running limits, pool sizes that preempt, chunk splits and batch mates,
//! in every pairing of weight and state dtype, under both logprob modes, over every family.

mod common;

use common::shapes::odd_shapes;
use common::{config, device, random_weights};
use gapscope::base::{RequestId, Stream, TokenId};
use gapscope::config::Config;
use gapscope::engine::{layout, Completion, Engine, GenerationRequest};
use gapscope::model::{Plan, Preset};
use gapscope::trainer::{Sequence, Trainer};
use proptest::prelude::*;

/// What one run of the engine is made of.
#[derive(Debug, Clone)]
struct Case {
    seed: u64,
    /// Which of the tiny shapes; half of them are the preset.
    shape: usize,
    requests: u32,
    budget: u32,
    running: u32,
    /// Blocks beside those that one request of the longest length needs.
    spare: u32,
    weights: &'static str,
    state: &'static str,
    mode: &'static str,
    temperature: f64,
    top_p: f64,
    chunked: bool,
    force_prefill: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let limits = (1..12_u32, 1..40_u32, 1..8_u32, 0..24_u32);
    let dtypes = (
        prop::sample::select(vec!["f32", "bf16"]),
        prop::sample::select(vec!["float32", "bfloat16"]),
    );
    let modes = prop::sample::select(vec!["raw_logprobs", "processed_logprobs"]);
    let temperature = prop::sample::select(vec![0.0, 0.6, 1.0]);
    let top_p = prop::sample::select(vec![1.0, 0.8]);
    let flags = (any::<bool>(), any::<bool>());
    let shape = prop_oneof![Just(0), 0..odd_shapes().len()];
    (any::<u64>(), shape, limits, dtypes, modes, temperature, top_p, flags).prop_map(
        |(
            seed,
            shape,
            (requests, budget, running, spare),
            (weights, state),
            mode,
            temperature,
            top_p,
            flags,
        )| {
            let (chunked, force_prefill) = flags;
            // Without chunks the budget must hold a whole model length.
            let budget = if chunked { budget.max(running) } else { 96 };
            Case {
                seed,
                shape,
                requests,
                budget,
                running,
                spare,
                weights,
                state,
                mode,
                temperature,
                top_p,
                chunked,
                force_prefill,
            }
        },
    )
}

fn config_of(case: &Case) -> Config {
    let Case { budget, running, weights, state, mode, temperature, top_p, .. } = case;
    let Case { chunked, force_prefill, .. } = case;
    config(&format!(
        "name = \"invariance\"\n\
         model = {{ preset = \"tiny-jamba\", dtype = \"{weights}\" }}\n\
         [engine]\n\
         max_num_batched_tokens = {budget}\n\
         max_num_seqs = {running}\n\
         max_model_len = 96\n\
         mamba_ssm_cache_dtype = \"{state}\"\n\
         logprobs_mode = \"{mode}\"\n\
         enable_chunked_prefill = {chunked}\n\
         force_prefill = {force_prefill}\n\
         [rollout]\n\
         temperature = {temperature:?}\n\
         top_p = {top_p:?}\n\
         [trainer]\n\
         max_tokens_per_chunk = 100\n"
    ))
}

struct Pair {
    engine: Engine,
    trainer: Trainer,
    config: Config,
}

fn pair(case: &Case) -> Pair {
    let mut config = config_of(case);
    let plan = Plan::new(odd_shapes().swap_remove(case.shape).1);
    let master = match case.shape {
        0 => Preset::weights(&plan, 3),
        _ => random_weights(&plan, 3),
    };
    let num = plan.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
    let layout = layout(&plan, &num, &config.engine).expect("a layout");
    let needed = layout.blocks_for(config.engine.max_model_len) as u32 + 1;
    config.engine.num_gpu_blocks_override = Some(needed + case.spare);
    let trainer = Trainer::new(&device(), plan.clone(), num, config.trainer.clone(), &master);
    let trainer = trainer.expect("few threads");
    let (contract, seed) = (config.contract(), config.seed);
    let mut engine =
        Engine::new(&device(), plan, num, config.engine.clone(), contract, seed).expect("engine");
    let weights = trainer.hand_over().expect("hand over");
    engine.load(weights.version, weights.units).expect("newer weights");
    Pair { engine, trainer, config }
}

/// Prompts of 1 to 60 tokens, completions of 1 to 20.
fn requests(case: &Case) -> Vec<GenerationRequest> {
    let mut stream = Stream::new(case.seed, "requests", 0);
    let last = odd_shapes()[case.shape].1.vocab_size as u64 - 1;
    let request = |rollout| GenerationRequest {
        id: RequestId::new(1, 0, rollout),
        prompt: (0..stream.integer(1, 60))
            .map(|_| TokenId::new(stream.integer(3, last) as u32))
            .collect(),
        max_new_tokens: stream.integer(1, 20) as u32,
        ignore_eos: true,
        eos_token_ids: Vec::new(),
    };
    (0..case.requests).map(request).collect()
}

fn bits(logps: impl IntoIterator<Item = gapscope::base::LogProb>) -> Vec<u32> {
    logps.into_iter().map(|logp| logp.get().to_bits()).collect()
}

fn sequence(done: &Completion) -> Sequence {
    let tokens = done.prompt.iter().copied().chain(done.token_ids()).collect();
    Sequence { tokens, prompt_len: done.prompt.len() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn three_legs_agree_bit_for_bit(case in cases()) {
        let Pair { mut engine, trainer, config } = pair(&case);
        let completions = engine.generate(requests(&case)).expect("generate");
        let sequences: Vec<Sequence> = completions.iter().map(sequence).collect();
        let scores = trainer.score(&sequences, &config.contract()).expect("score");
        let forced: Vec<_> =
            sequences.iter().map(|s| (s.tokens.as_slice(), s.prompt_len)).collect();
        let prefill = engine.score_prefill(&forced);
        for ((done, scored), prefill) in completions.iter().zip(&scores).zip(prefill) {
            let decode = bits(done.tokens.iter().map(|token| token.logp));
            let trainer = bits(scored.contract.iter().copied());
            prop_assert_eq!(&decode, &trainer, "trainer, {}", done.id);
            prop_assert_eq!(&decode, &bits(prefill), "prefill, {}", done.id);
            prop_assert!(done.tokens.iter().all(|token| token.logp.is_finite()));
        }
    }

    #[test]
    fn a_requests_tokens_do_not_depend_on_what_else_runs(case in cases()) {
        let together = pair(&case).engine.generate(requests(&case)).expect("generate");
        for (request, done) in requests(&case).into_iter().zip(&together) {
            let roomy = Case { budget: 96, running: 1, spare: 33, chunked: true, ..case.clone() };
            let alone = pair(&roomy).engine.generate(vec![request]).expect("generate");
            let what = |done: &Completion| {
                done.tokens.iter().map(|t| (t.token, t.logp.get().to_bits())).collect::<Vec<_>>()
            };
            prop_assert_eq!(what(done), what(&alone[0]));
        }
    }
}

#[test]
fn small_pools_do_preempt() {
    let mut preemptions = 0;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for _ in 0..40 {
        use proptest::strategy::ValueTree;
        let case = cases().new_tree(&mut runner).expect("a case").current();
        let done = pair(&case).engine.generate(requests(&case)).expect("generate");
        preemptions += done.iter().map(|one| one.preemptions).sum::<u32>();
    }
    assert!(preemptions > 0, "the cases above must cover recompute after preemption");
}
