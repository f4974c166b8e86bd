//! The fixture in bf16: read as bf16 from its folder, the legs agree bit for bit, and all of them
//! lie as far from an f32 forward of the same weights as bf16's roundings explain, and no farther.

mod common;

use common::{config, device, fixture, Golden};
use gapscope::base::{RequestId, Stream, TokenId};
use gapscope::config::{Config, Dtype};
use gapscope::engine::{Completion, Engine, GenerationRequest};
use gapscope::model::{load_master, save_folder, Plan};
use gapscope::trainer::{Inspection, Sequence, Trainer};

/// The fixture, converted and read back.
fn model() -> (Plan, Vec<Vec<f32>>) {
    let (plan, units) = load_master(&fixture("tiny-jamba")).expect("the fixture");
    let parent = tempfile::tempdir().expect("a folder");
    let folder = parent.path().join("bf16");
    save_folder(&folder, &plan, &units, Dtype::Bf16).expect("saved");
    load_master(&folder).expect("loaded")
}

fn settings(dtype: &str, state: &str) -> Config {
    config(&format!(
        "name = \"bf16\"\nmodel = {{ preset = \"tiny-jamba\", dtype = \"{dtype}\" }}\n\
         [engine]\nmamba_ssm_cache_dtype = \"{state}\"\nmax_num_batched_tokens = 13\n\
         max_num_seqs = 3\nmax_model_len = 96\nnum_gpu_blocks_override = 20\n"
    ))
}

fn trainer(config: &Config) -> Trainer {
    let (plan, units) = model();
    let num = plan.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
    Trainer::new(&device(), plan, num, config.trainer.clone(), &units).expect("few threads")
}

fn inspect(dtype: &str, state: &str) -> Vec<Inspection> {
    let sequence = |tokens| Sequence { tokens, prompt_len: 1 };
    let sequences: Vec<_> = Golden::tiny_jamba().rows().into_iter().map(sequence).collect();
    trainer(&settings(dtype, state)).inspect(&sequences).expect("inspect")
}

fn rms(values: impl Iterator<Item = f64>) -> f64 {
    let (n, sum) = values.fold((0, 0.0), |(n, sum), x| (n + 1, sum + x * x));
    (sum / f64::from(n)).sqrt()
}

/// Root mean square of the difference over that of the f32 values.
fn distance(found: &[f32], want: &[f32]) -> f64 {
    assert_eq!(found.len(), want.len());
    let wide = |xs: &[f32]| xs.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let (found, want) = (wide(found), wide(want));
    rms(found.iter().zip(&want).map(|(a, b)| a - b)) / rms(want.into_iter())
}

/// How far transformers 5.24's own bf16 forward of these weights (eager, the farther of the two
/// rows) lies from its f32 forward of them: after each layer, then on the logits. It rounds where
/// we round and in more places (Δ, the gate, the product with D), so this is what bf16 explains.
const TRANSFORMERS: [f64; 6] = [0.0, 0.0065, 0.0098, 0.0119, 0.0138, 0.0142];

#[test]
fn no_farther_from_f32_than_transformers() {
    let want = inspect("f32", "float32");
    for state in ["float32", "bfloat16"] {
        for (found, want) in inspect("bf16", state).iter().zip(&want) {
            let layers = found.hidden.iter().chain([&found.logits]);
            let wanted = want.hidden.iter().chain([&want.logits]);
            for (layer, (found, want)) in layers.zip(wanted).enumerate() {
                let (far, bound) = (distance(found, want), TRANSFORMERS[layer]);
                assert!(far <= bound, "layer {layer}, {state} state: {far}");
                assert!(far >= bound / 2.0, "layer {layer}, {state} state: {far}, is it rounded?");
            }
            let rounded = |hidden: &Vec<f32>| hidden.iter().all(|x| x.to_bits() & 0xffff == 0);
            assert!(found.hidden.iter().all(rounded), "hidden states are bf16 numbers");
        }
    }
}

fn generate(config: &Config, engine: &mut Engine) -> Vec<Completion> {
    let mut stream = Stream::new(config.seed, "bf16", 0);
    let request = |rollout| GenerationRequest {
        id: RequestId::new(1, 0, rollout),
        prompt: (0..stream.integer(1, 40))
            .map(|_| TokenId::new(stream.integer(3, 255) as u32))
            .collect(),
        max_new_tokens: 24,
        ignore_eos: true,
        eos_token_ids: Vec::new(),
    };
    engine.generate((0..8).map(request).collect()).expect("generate")
}

#[test]
fn decode_prefill_and_trainer_agree_bit_for_bit() {
    for state in ["float32", "bfloat16"] {
        let config = settings("bf16", state);
        let trainer = trainer(&config);
        let num = model().0.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
        let (contract, seed) = (config.contract(), config.seed);
        let mut engine =
            Engine::new(&device(), model().0, num, config.engine.clone(), contract, seed)
                .expect("an engine");
        let weights = trainer.hand_over().expect("hand over");
        engine.load(weights.version, weights.units).expect("newer weights");
        let done = generate(&config, &mut engine);
        let sequence = |one: &Completion| Sequence {
            tokens: one.prompt.iter().copied().chain(one.token_ids()).collect(),
            prompt_len: one.prompt.len(),
        };
        let sequences: Vec<Sequence> = done.iter().map(sequence).collect();
        let scores = trainer.score(&sequences, &contract).expect("score");
        let forced: Vec<_> =
            sequences.iter().map(|one| (one.tokens.as_slice(), one.prompt_len)).collect();
        for ((done, scores), prefill) in done.iter().zip(scores).zip(engine.score_prefill(&forced))
        {
            let decode: Vec<u32> = done.tokens.iter().map(|t| t.logp.get().to_bits()).collect();
            let bits = |all: Vec<gapscope::base::LogProb>| {
                all.into_iter().map(|logp| logp.get().to_bits()).collect::<Vec<_>>()
            };
            assert_eq!(decode, bits(scores.contract), "trainer, {state} state, {}", done.id);
            assert_eq!(decode, bits(prefill), "prefill, {state} state, {}", done.id);
        }
    }
}
