//! With the cache and without it the same tokens and log-probabilities, over random prompts that
//! begin alike, budgets, pools that preempt, and families.

use gapscope::base::{RequestId, Stream, TokenId, WeightVersion};
use gapscope::engine::{layout, Completion, Engine, GenerationRequest};
use gapscope::model::{Plan, Preset};
use proptest::prelude::*;

use crate::common::shapes::odd_shapes;
use crate::common::{config, device, random_weights};

#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    /// Which of the tiny shapes; half of them are the preset.
    shape: usize,
    requests: u32,
    budget: u32,
    running: u32,
    /// Blocks beside those that one request of the longest length needs.
    spare: u32,
    state: &'static str,
    lifo: bool,
    chunked: bool,
    force_prefill: bool,
}

const LONGEST: u32 = 160;

fn cases() -> impl Strategy<Value = Case> {
    let limits = (1..12_u32, 1..120_u32, 1..8_u32, 0..40_u32);
    let state = prop::sample::select(vec!["float32", "bfloat16"]);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    let shape = prop_oneof![Just(0), 0..odd_shapes().len()];
    (any::<u64>(), shape, limits, state, flags).prop_map(
        |(seed, shape, (requests, budget, running, spare), state, flags)| {
            let (lifo, chunked, force_prefill) = flags;
            // Without chunks the budget must hold a whole model length.
            let budget = if chunked { budget.max(running) } else { LONGEST };
            Case {
                seed,
                shape,
                requests,
                budget,
                running,
                spare,
                state,
                lifo,
                chunked,
                force_prefill,
            }
        },
    )
}

fn engine(case: &Case, cached: bool) -> Engine {
    let Case { budget, running, state, chunked, force_prefill, .. } = case;
    let free_list = if case.lifo { "lifo" } else { "fifo" };
    let mut config = config(&format!(
        "name = \"prefix-cache\"\n\
         model = {{ preset = \"tiny-jamba\" }}\n\
         [engine]\n\
         max_num_batched_tokens = {budget}\n\
         max_num_seqs = {running}\n\
         max_model_len = {LONGEST}\n\
         mamba_ssm_cache_dtype = \"{state}\"\n\
         free_list = \"{free_list}\"\n\
         enable_chunked_prefill = {chunked}\n\
         force_prefill = {force_prefill}\n\
         enable_prefix_caching = {cached}\n"
    ));
    let plan = Plan::new(odd_shapes().swap_remove(case.shape).1);
    let num = plan.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
    let layout = layout(&plan, &num, &config.engine).expect("a layout");
    let needed = layout.blocks_for(LONGEST) as u32 + 1;
    config.engine.num_gpu_blocks_override = Some(needed + case.spare);
    let (contract, seed) = (config.contract(), config.seed);
    Engine::new(&device(), plan, num, config.engine, contract, seed).expect("an engine")
}

/// Weights of a version.
fn load(engine: &mut Engine, case: &Case, version: u64) {
    let plan = Plan::new(odd_shapes().swap_remove(case.shape).1);
    let seed = 3 + version;
    let master = match case.shape {
        0 => Preset::weights(&plan, seed),
        _ => random_weights(&plan, seed),
    };
    let config = config("name = \"weights\"\nmodel.preset = \"tiny-jamba\"\n");
    let num = plan.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
    let trainer =
        gapscope::trainer::Trainer::new(&device(), plan, num, config.trainer.clone(), &master);
    let trainer = trainer.expect("few threads");
    let units = trainer.hand_over().expect("hand over").units;
    engine.load(WeightVersion::new(version), units).expect("newer weights");
}

/// Prompts of up to 140 tokens: the beginning of one text, then a tail of their own. Three rounds;
/// in the last one the prompts of the first come back.
fn requests(case: &Case, round: u64) -> Vec<GenerationRequest> {
    let last = odd_shapes()[case.shape].1.vocab_size as u64 - 1;
    let mut common = Stream::new(case.seed, "common", 0);
    let text: Vec<TokenId> =
        (0..140).map(|_| TokenId::new(common.integer(3, last) as u32)).collect();
    let mut stream = Stream::new(case.seed, "requests", round % 2);
    let request = |rollout| {
        let shared = stream.integer(0, 139) as usize;
        let tail = stream.integer(1, 140 - shared as u64).min(30);
        let tail: Vec<TokenId> =
            (0..tail).map(|_| TokenId::new(stream.integer(3, last) as u32)).collect();
        GenerationRequest {
            id: RequestId::new(round + 1, 0, rollout),
            prompt: [&text[..shared], &tail].concat(),
            max_new_tokens: stream.integer(1, 20) as u32,
            ignore_eos: true,
            eos_token_ids: Vec::new(),
        }
    };
    (0..case.requests).map(request).collect()
}

/// Rounds under these versions of the weights.
const VERSIONS: [u64; 3] = [1, 1, 2];

fn play(case: &Case, cached: bool) -> Vec<Completion> {
    let mut engine = engine(case, cached);
    let mut done = Vec::new();
    for (round, version) in (0..).zip(VERSIONS) {
        if engine.version() != Some(WeightVersion::new(version)) {
            load(&mut engine, case, version);
        }
        done.extend(engine.generate(requests(case, round)).expect("generate"));
        let pool = engine.pool();
        pool.check().expect("a sound pool");
        assert_eq!(pool.free_blocks().len(), pool.num_usable(), "every block is given back");
    }
    done
}

fn sampled(done: &Completion) -> Vec<(TokenId, u32)> {
    done.tokens.iter().map(|one| (one.token, one.logp.get().to_bits())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_cached_prefix_is_what_a_cold_prefill_computes(case in cases()) {
        for (with, without) in play(&case, true).iter().zip(&play(&case, false)) {
            prop_assert_eq!(sampled(with), sampled(without), "{}", with.id);
            prop_assert_eq!(without.cached_tokens, 0);
            prop_assert!((with.cached_tokens as usize) < with.prompt.len() + with.tokens.len());
            for found in with.lives.iter().flat_map(|life| &life.cached) {
                prop_assert_eq!(found.weight_version, with.weight_version);
            }
        }
    }
}

/// The cases above must cover all of it.
#[test]
fn hits_preemptions_and_both_together_do_happen() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let [mut hits, mut preempted, mut both, mut by_others] = [0; 4];
    for _ in 0..40 {
        let case = cases().new_tree(&mut runner).expect("a case").current();
        for done in play(&case, true) {
            let found = || done.lives.iter().flat_map(|life| &life.cached);
            hits += u32::from(found().next().is_some());
            by_others += u32::from(found().any(|one| one.filled_by != done.id));
            preempted += u32::from(done.preemptions > 0);
            both += u32::from(done.preemptions > 0 && done.cached_tokens > 0);
        }
    }
    let counts = [hits, preempted, both, by_others];
    assert!(counts.iter().all(|&count| count > 10), "{counts:?}");
}

/// N rollouts of a prompt: the first one computes what all of them begin with. tiny-jamba has three
/// Mamba groups and one of attention, in blocks of 48 tokens.
#[test]
fn rollouts_of_a_prompt_share_it() {
    let case = Case {
        seed: 7,
        shape: 0,
        requests: 0,
        budget: 512,
        running: 8,
        spare: 60,
        state: "float32",
        lifo: false,
        chunked: true,
        force_prefill: false,
    };
    let mut engine = engine(&case, true);
    load(&mut engine, &case, 1);
    let prompt: Vec<TokenId> = (0..100).map(|i| TokenId::new(3 + i)).collect();
    let ask = |step, rollout_idx| GenerationRequest {
        id: RequestId::new(step, 0, rollout_idx),
        prompt: prompt.clone(),
        max_new_tokens: 4,
        ignore_eos: true,
        eos_token_ids: Vec::new(),
    };
    let done = engine.generate((0..4).map(|n| ask(1, n)).collect()).expect("generate");
    let cached: Vec<u32> = done.iter().map(|one| one.cached_tokens).collect();
    assert_eq!(cached, [0, 96, 96, 96]);
    // Blocks 1 and 2 of attention were shared, and one state of three: the tail is each one's own.
    for one in &done[1..] {
        assert_eq!(one.attn_blocks()[..2], done[0].attn_blocks()[..2]);
        assert_ne!(one.attn_blocks()[2], done[0].attn_blocks()[2]);
        assert_eq!(one.lives[0].cached.len(), 3 + 2);
        assert!(one.lives[0].cached.iter().all(|found| found.filled_by == done[0].id));
    }
    // They are found in the next step too, free as they are, until the weights change.
    let again = engine.generate(vec![ask(2, 0)]).expect("generate");
    assert_eq!(again[0].cached_tokens, 96);
    load(&mut engine, &case, 2);
    let after = engine.generate(vec![ask(3, 0)]).expect("generate");
    assert_eq!(after[0].cached_tokens, 0);
}

/// At least one token is computed, as in vLLM: of a prompt of two whole blocks one is found.
#[test]
fn the_last_token_is_always_computed() {
    let case = Case {
        seed: 7,
        shape: 0,
        requests: 0,
        budget: 512,
        running: 1,
        spare: 60,
        state: "float32",
        lifo: false,
        chunked: true,
        force_prefill: false,
    };
    let mut engine = engine(&case, true);
    load(&mut engine, &case, 1);
    for (step, (len, expected)) in (1..).zip([(97, 0), (96, 48), (97, 96), (48, 0), (49, 48)]) {
        let asked = GenerationRequest {
            id: RequestId::new(step, 0, 0),
            prompt: (0..len).map(|i| TokenId::new(3 + i)).collect(),
            max_new_tokens: 1,
            ignore_eos: true,
            eos_token_ids: Vec::new(),
        };
        let done = engine.generate(vec![asked]).expect("generate");
        assert_eq!(done[0].cached_tokens, expected, "a prompt of {len}");
    }
}
