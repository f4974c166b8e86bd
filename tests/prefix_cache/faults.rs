//! Planted in the cache and in the pool: who is wrong, from where on, and who is blamed.

use gapscope::base::{RequestId, Step, TokenId, WeightVersion};
use gapscope::engine::{Engine, GenerationRequest};
use gapscope::gap::{self, Finding, FindingKind, Legs, Pairs};
use gapscope::model::Preset;
use gapscope::rollout::Rollout;
use gapscope::trainer::Trainer;

use crate::common::{config, device, engine, fixture, trainer, FIXTURE_TOML};

/// Weights of a version; those of `seed` 0 are the fixture's own.
fn load(engine: &mut Engine, name: &str, version: u64, seed: u64) {
    let config = config(FIXTURE_TOML);
    let (plan, own) = trainer(&fixture(name), &config);
    let num = plan.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
    let other = || {
        let master = Preset::weights(&plan, seed);
        Trainer::new(&device(), plan.clone(), num, config.trainer.clone(), &master)
            .expect("few threads")
    };
    let weights = if seed == 0 { own } else { other() }.hand_over().expect("hand over");
    engine.load(WeightVersion::new(version), weights.units).expect("newer weights");
}

fn ask(step: u64, rollout_idx: u32, prompt: Vec<TokenId>) -> GenerationRequest {
    GenerationRequest {
        id: RequestId::new(step, 0, rollout_idx),
        prompt,
        max_new_tokens: 4,
        ignore_eos: true,
        eos_token_ids: Vec::new(),
    }
}

/// So many tokens, of which texts with another `first` have none in common.
fn text(first: u32, len: u32) -> Vec<TokenId> {
    (0..len).map(|i| TokenId::new(3 + first + i % 40)).collect()
}

/// One step of the loop, scored by one forced prefill in a pool of its own.
struct Played {
    rollouts: Vec<Rollout>,
    pairs: Pairs,
    findings: Vec<Finding>,
}

impl Played {
    fn new(engine: &mut Engine, step: u64, requests: Vec<GenerationRequest>) -> Self {
        let done = engine.generate(requests).expect("requests that can run");
        engine.pool().check().expect("a sound pool");
        let sequences: Vec<Vec<TokenId>> = done
            .iter()
            .map(|one| one.prompt.iter().copied().chain(one.token_ids()).collect())
            .collect();
        let forced: Vec<_> =
            sequences.iter().zip(&done).map(|(all, one)| (&all[..], one.prompt.len())).collect();
        let scores = engine.score_prefill(&forced);
        let rollout = |(completion, scores): (gapscope::engine::Completion, Vec<_>)| Rollout {
            loss_mask: vec![true; completion.tokens.len()],
            prompt_text: String::new(),
            completion_text: String::new(),
            reward: 0.0,
            advantage: 0.0,
            prefill: None,
            trainer: Some(scores.into_iter().map(Some).collect()),
            reference: None,
            trainer_fingerprint: completion.engine_fingerprint,
            completion,
        };
        let rollouts: Vec<Rollout> = done.into_iter().zip(scores).map(rollout).collect();
        let pairs = gap::pair(&rollouts, Legs::DecodeTrainer).expect("legs that pair");
        let findings = gap::verdict(&gap::Evidence {
            shift: gap::shift(pairs.bad(0.0), 0.0),
            state: engine.layout().layers.iter().find_map(|place| place.view.state()),
            ..gap::Evidence::new(Step::new(step), &rollouts, &pairs, 0.0)
        });
        Self { rollouts, pairs, findings }
    }

    fn kinds(&self) -> Vec<FindingKind> {
        self.findings.iter().map(|finding| finding.kind).collect()
    }

    /// The first bad token of each request.
    fn first_bad(&self) -> Vec<Option<u32>> {
        self.pairs.sequences.iter().map(|one| one.first_bad(0.0).map(|at| at.get())).collect()
    }
}

/// Weights are updated once. Prompts never seen before have no gap, those seen before have one from
/// the first token after the cached prefix on; with the salt, or without an update, there is none.
#[test]
fn k09_a_cache_kept_over_an_update_is_named() {
    let cached = "engine.enable_prefix_caching = true\nengine.max_model_len = 160\n";
    let planted = format!("{cached}engine.faults = [\"keep_cache_over_updates\"]\n");
    for (settings, seed, is_bad) in
        [(&planted[..], 5, true), (cached, 5, false), (&planted[..], 0, false)]
    {
        let mut engine = engine("tiny-jamba", settings);
        load(&mut engine, "tiny-jamba", 3, 0);
        let before = Played::new(&mut engine, 1, vec![ask(1, 0, text(0, 100))]);
        assert_eq!(before.findings, []);
        load(&mut engine, "tiny-jamba", 4, seed);
        let prompts = [text(0, 100), text(50, 100), text(0, 60)];
        let asked = (0..).zip(prompts).map(|(rollout, prompt)| ask(2, rollout, prompt)).collect();
        let after = Played::new(&mut engine, 2, asked);
        let found: Vec<u32> =
            after.rollouts.iter().map(|one| one.completion.cached_tokens).collect();
        assert_eq!(found, if settings == cached { [0, 0, 48] } else { [96, 0, 48] });
        if !is_bad {
            assert_eq!((after.first_bad(), after.findings), (vec![None; 3], vec![]), "{settings}");
            continue;
        }
        assert_eq!(after.first_bad(), [Some(0), None, Some(0)]);
        assert_eq!(after.kinds(), [FindingKind::StalePrefixCache]);
        let finding = &after.findings[0];
        assert_eq!(finding.requests, [RequestId::new(2, 0, 0), RequestId::new(2, 0, 2)]);
        let message = &finding.message;
        assert!(message.contains("by s1.p0.r0 under version 3"), "{message}");
        assert!(message.contains("sampled with version 4"), "{message}");
        for cached in after.rollouts[0].completion.cached_blocks() {
            assert!(finding.blocks.contains(&cached.block), "{finding:?}");
            assert_eq!(cached.filled_by, RequestId::new(1, 0, 0));
        }
    }
}

/// A pool of four blocks, the null block among them. A finds block 1, which nobody holds; B takes
/// it in the same step. Pinned when it is found, it is not there for B to take.
#[test]
fn k10_a_block_found_and_not_pinned_has_two_owners() {
    let settings = "engine.enable_prefix_caching = true\nengine.max_model_len = 48\n\
        engine.max_num_seqs = 8\nengine.num_gpu_blocks_override = 4\n";
    for (planted, expected) in [("", None), ("engine.faults = [\"lookup_without_pin\"]\n", Some(0))]
    {
        let mut engine = engine("tiny-llama", &format!("{settings}{planted}"));
        assert_eq!(engine.layout().prefix_block_tokens, Some(16));
        let first = Played::new(&mut engine, 1, vec![ask(1, 0, text(0, 20))]);
        assert_eq!(first.findings, []);
        let [a, b] = [ask(2, 0, text(0, 20)), ask(2, 1, text(50, 20))];
        let played = Played::new(&mut engine, 2, vec![a.clone(), b.clone()]);
        let [of_a, of_b] = [&played.rollouts[0].completion, &played.rollouts[1].completion];
        assert_eq!(of_a.cached_tokens, 16);
        let shared = of_a.cached_blocks()[0].block;
        assert_eq!(played.first_bad(), [expected, None]);
        if expected.is_none() {
            assert_eq!(played.findings, []);
            continue;
        }
        assert!(of_b.attn_blocks().contains(&shared));
        assert_eq!(played.kinds(), [FindingKind::BlockShared]);
        let finding = &played.findings[0];
        assert_eq!((&finding.blocks[..], &finding.requests[..]), (&[shared][..], &[a.id][..]));
        let message = format!(
            "block {shared} has two owners at once: request {} found it as cached, filled by \
             s1.p0.r0, request {} took it in engine step {}",
            a.id, b.id, of_b.lives[0].engine_step
        );
        assert_eq!(finding.message, message);
    }
}

/// Not a silent second owner.
#[test]
fn k10_a_block_given_back_twice_is_an_error_that_names_it() {
    for cached in [false, true] {
        let settings =
            format!("engine.faults = [\"free_twice\"]\nengine.enable_prefix_caching = {cached}\n");
        let mut engine = engine("tiny-jamba", &settings);
        let error = engine.generate(vec![ask(1, 0, text(0, 20))]).expect_err("a refusal");
        let expected = "request s1.p0.r0 frees block 1, which is free already: s1.p0.r0 freed it \
            last; a block that is freed twice would soon have two owners";
        assert_eq!(error.to_string(), expected);
    }
}
