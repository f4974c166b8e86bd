//! Trainer and engine against transformers' outputs for the same weights
//! (`tests/fixtures/tiny-jamba`).
//!
//! Tolerances: the f64 forward differs from transformers' f32 logits by 5.5e-6, so 2e-5 is what a
//! correct f32 implementation keeps.

mod common;

use std::collections::BTreeMap;

use common::{assert_close, config, fixture, trainer, Golden};
use gapscope::base::{Noise, Position, RequestId, Stream, TokenId};
use gapscope::engine::{Engine, Feed, FinishReason, GenerationRequest, Phase};
use gapscope::ops::sampling::Sampler;
use gapscope::trainer::{Inspection, Sequence, Trainer};

const TOML: &str = "name = \"fixture\"\nmodel.preset = \"tiny-jamba\"\n";

fn setup() -> (Golden, Trainer, Vec<Sequence>) {
    let (_, trainer) = trainer(&fixture("tiny-jamba"), &config(TOML));
    let golden = Golden::tiny_jamba();
    let sequence = |tokens| Sequence { tokens, prompt_len: 1 };
    let sequences = golden.rows().into_iter().map(sequence).collect();
    (golden, trainer, sequences)
}

#[test]
fn trainer_logits_and_hidden_states() {
    let (golden, trainer, sequences) = setup();
    let seen = trainer.inspect(&sequences).expect("inspect");
    let logits: Vec<f32> = seen.iter().flat_map(|one| one.logits.clone()).collect();
    assert_close("logits", &logits, &golden.f32("logits"), 2e-5);
    for layer in 0..=4 {
        let hidden: Vec<f32> = seen.iter().flat_map(|one| one.hidden[layer].clone()).collect();
        let name = format!("hidden.{layer}");
        assert_close(&name, &hidden, &golden.f32(&name), 2e-5);
    }
}

#[test]
fn trainer_target_logprobs() {
    let (golden, trainer, sequences) = setup();
    let scores = trainer.score(&sequences, &common::PLAIN).expect("score");
    let got: Vec<f32> = scores.iter().flat_map(|s| s.contract.iter().map(|l| l.get())).collect();
    assert_close("target_logprobs", &got, &golden.f32("target_logprobs"), 2e-5);
}

#[test]
fn trainer_greedy_continuation() {
    let (golden, trainer, _) = setup();
    let want = golden.tokens("greedy_ids");
    let mut tokens = want[..11].to_vec();
    while tokens.len() < want.len() {
        let sequence = Sequence { tokens: tokens.clone(), prompt_len: 1 };
        let seen = trainer.inspect(&[sequence]).expect("inspect").remove(0);
        let last = &seen.logits[(tokens.len() - 1) * 256..];
        tokens.push(gapscope::ops::sampling::argmax(last));
    }
    assert_eq!(tokens, want);
}

#[test]
fn trainer_loss_and_every_gradient_norm() {
    let (golden, trainer, sequences) = setup();
    let (loss, norms) = trainer.supervised_grad_norms(&sequences).expect("gradient");
    let want = f64::from(golden.f32("loss")[0]);
    assert!((loss - want).abs() < 1e-5, "loss {loss} against {want}");
    let text = std::fs::read_to_string(fixture("tiny-jamba/grad_norms.json")).expect("fixture");
    let want: BTreeMap<String, f64> = serde_json::from_str(&text).expect("fixture");
    assert_eq!(norms.len(), want.len(), "every parameter has a norm");
    for (name, got) in norms {
        let want = want[&name];
        let error = (got - want).abs();
        assert!(error <= 2e-4 * want + 1e-7, "{name}: {got} against {want}");
    }
}

/// An engine with the fixture's weights.
fn engine(extra: &str) -> Engine {
    let config = config(&format!("{TOML}{extra}"));
    let (plan, trainer) = trainer(&fixture("tiny-jamba"), &config);
    let num = plan.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
    let (contract, seed) = (config.contract(), config.seed);
    let mut engine = Engine::new(plan, num, config.engine, contract, seed).expect("an engine");
    let weights = trainer.hand_over().expect("hand over");
    engine.load(weights.version, weights.units);
    engine
}

/// Feeds a row in pieces and returns its logits and hidden states as transformers reports them.
fn fed(engine: &Engine, row: &[TokenId], pieces: &[usize], phase: Phase) -> Inspection {
    let mut scratch = engine.scratch(1);
    let mut seen = Inspection { hidden: vec![Vec::new(); 5], logits: Vec::new() };
    let mut at = 0;
    for (i, len) in pieces.iter().enumerate() {
        // The first piece has no state to go on from, so it is a prefill whatever follows.
        let phase = if i == 0 { Phase::Prefill } else { phase };
        let tokens = &row[at..at + len];
        let mut layer = 0;
        let hidden = &mut seen.hidden;
        let mut observe = |x_th: &[f32]| {
            hidden[layer].extend_from_slice(x_th);
            layer += 1;
        };
        let feeds = [Feed { sequence: 0, phase, tokens }];
        let x_th = scratch.feed(engine.runner(), &feeds, &mut observe);
        seen.hidden[4].extend(engine.runner().norm(&x_th));
        seen.logits.extend(engine.runner().logits(&x_th));
        at += len;
    }
    assert_eq!(at, row.len(), "the pieces are the row");
    seen
}

#[test]
fn engine_prefill_in_random_chunks_and_decode_token_by_token() {
    let (golden, trainer, sequences) = setup();
    let engine = engine("");
    let whole = trainer.inspect(&sequences).expect("inspect");
    let mut stream = Stream::new(1, "chunks", 0);
    let mut splits =
        vec![(vec![24], Phase::Prefill), ([vec![11], vec![1; 13]].concat(), Phase::Decode)];
    splits.push((vec![1; 24], Phase::Decode));
    for _ in 0..20 {
        let (mut left, mut pieces) = (24, Vec::new());
        while left > 0 {
            pieces.push(stream.integer(1, left.min(9)) as usize);
            left -= *pieces.last().expect("just pushed") as u64;
        }
        splits.push((pieces, Phase::Prefill));
    }
    for (pieces, phase) in splits {
        for (index, row) in golden.rows().iter().enumerate() {
            let seen = fed(&engine, row, &pieces, phase);
            // Bit for bit what the trainer computes, which is within 2e-5 of transformers.
            assert_eq!(seen, whole[index], "row {index} in pieces {pieces:?}");
        }
    }
    let decoded = fed(&engine, &golden.rows()[0], &[vec![11], vec![1; 13]].concat(), Phase::Decode);
    assert_close("cached_logits", &decoded.logits, &golden.f32("cached_logits"), 2e-5);
}

#[test]
fn engine_greedy_continuation() {
    let golden = Golden::tiny_jamba();
    let want = golden.tokens("greedy_ids");
    let mut engine = engine("rollout.temperature = 0.0\n");
    let request = request(want[..11].to_vec(), 16, &[]);
    let done = engine.generate(vec![request]).expect("generate").remove(0);
    assert_eq!(done.token_ids().collect::<Vec<_>>(), want[11..]);
}

/// A request that has its own noise at each absolute position, and the tokens that the trainer's
/// logits give under that very noise.
#[test]
fn a_tokens_noise_is_that_of_its_position() {
    let (golden, trainer, _) = setup();
    let mut engine = engine("seed = 5\n");
    let request = request(golden.rows()[0][..11].to_vec(), 8, &[]);
    let id = request.id;
    let done = engine.generate(vec![request]).expect("generate").remove(0);
    let tokens: Vec<TokenId> = done.prompt.iter().copied().chain(done.token_ids()).collect();
    let sequence = Sequence { tokens: tokens.clone(), prompt_len: 1 };
    let logits = trainer.inspect(&[sequence]).expect("inspect").remove(0).logits;
    for position in 11..19 {
        let row = &logits[(position - 1) * 256..][..256];
        let noise = Noise::new(5).uniform(id, Position::new(position as u32));
        let (token, _) = Sampler::default().sample(row, noise, &common::PLAIN);
        assert_eq!(token, tokens[position], "position {position}");
    }
}

#[test]
fn any_of_several_end_tokens_ends_a_completion() {
    let golden = Golden::tiny_jamba();
    let want = golden.tokens("greedy_ids");
    let mut engine = engine("rollout.temperature = 0.0\n");
    // Neither is sampled before the third token is.
    let ends = [TokenId::new(2), want[13]];
    let request = request(want[..11].to_vec(), 16, &ends);
    let done = engine.generate(vec![request]).expect("generate").remove(0);
    assert_eq!(done.token_ids().collect::<Vec<_>>(), want[11..=13]);
    assert_eq!(done.finish_reason, FinishReason::Stop);
}

fn request(prompt: Vec<TokenId>, max_new_tokens: u32, ends: &[TokenId]) -> GenerationRequest {
    GenerationRequest {
        id: RequestId::new(1, 0, 0),
        prompt,
        max_new_tokens,
        ignore_eos: ends.is_empty(),
        eos_token_ids: ends.to_vec(),
    }
}

/// 17 bits wrap from block 43 on. The twelfth sequence of a scratch pool holds blocks 56 to 60,
/// which wrap to blocks that nobody uses: a prefill in chunks reads its state back at the address
/// where it put it, and looks right; a decode reads the right slot, where nothing is.
#[test]
fn a_narrow_index_spares_a_prefill_in_chunks_and_loses_the_decode() {
    let (_, trainer, sequences) = setup();
    let narrow = engine("engine = { state_index_bits = 17, max_model_len = 96 }\n");
    let whole = trainer.inspect(&sequences[..1]).expect("inspect").remove(0);
    let row = &sequences[0].tokens;
    let mut scratch = narrow.scratch(12);
    let mut feed = |phase, tokens| {
        let feeds = [Feed { sequence: 11, phase, tokens }];
        let x_th = scratch.feed(narrow.runner(), &feeds, &mut |_| {});
        narrow.runner().logits(&x_th)
    };
    let chunked = [&row[..7], &row[7..20]].map(|tokens| feed(Phase::Prefill, tokens)).concat();
    assert_eq!(chunked, whole.logits[..20 * 256]);
    let decoded = feed(Phase::Decode, &row[20..21]);
    assert_ne!(decoded, whole.logits[20 * 256..21 * 256]);
}

/// With 6 blocks a sequence, 17 bits send the ninth sequence's stores into the second's state of
/// the very layer that stores. Prefills store before decodes load, as in vLLM's mixer: the decode
/// of the same batch already reads what was written over its state.
#[test]
fn a_decode_reads_what_a_prefill_of_its_batch_has_stored() {
    let (_, trainer, sequences) = setup();
    let narrow = engine("engine = { state_index_bits = 17, max_model_len = 144 }\n");
    assert_eq!(narrow.layout().blocks_for(144), 6);
    let whole = trainer.inspect(&sequences[..1]).expect("inspect").remove(0);
    let [victim, writer] = [&sequences[0].tokens, &sequences[1].tokens];
    for (other, spoiled) in [(7, false), (8, true)] {
        let mut scratch = narrow.scratch(9);
        let mut feed = |feeds: &[Feed<'_>]| {
            let x_th = scratch.feed(narrow.runner(), feeds, &mut |_| {});
            narrow.runner().logits(&x_th)
        };
        feed(&[Feed { sequence: 1, phase: Phase::Prefill, tokens: &victim[..10] }]);
        let logits = feed(&[
            Feed { sequence: 1, phase: Phase::Decode, tokens: &victim[10..11] },
            Feed { sequence: other, phase: Phase::Prefill, tokens: &writer[..12] },
        ]);
        let right = logits[..256] == whole.logits[10 * 256..11 * 256];
        assert_eq!(right, !spoiled, "beside sequence {other}");
    }
}
