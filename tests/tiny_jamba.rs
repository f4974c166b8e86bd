//! What only an engine over a hybrid's pages can get wrong, on `tests/fixtures/tiny-jamba`: noise,
//! end tokens, narrow indices and the order of stores and loads.

mod common;

use common::{config, engine, fixture, trainer, Golden, FIXTURE_TOML};
use gapscope::base::{Noise, Position, RequestId, TokenId};
use gapscope::engine::{Feed, FinishReason, GenerationRequest, Phase};
use gapscope::ops::sampling::Sampler;
use gapscope::trainer::{Sequence, Trainer};

fn setup() -> (Golden, Trainer, Vec<Sequence>) {
    let (_, trainer) = trainer(&fixture("tiny-jamba"), &config(FIXTURE_TOML));
    let golden = Golden::tiny_jamba();
    let sequence = |tokens| Sequence { tokens, prompt_len: 1 };
    let sequences = golden.rows().into_iter().map(sequence).collect();
    (golden, trainer, sequences)
}

/// A request that has its own noise at each absolute position, and the tokens that the trainer's
/// logits give under that very noise.
#[test]
fn a_tokens_noise_is_that_of_its_position() {
    let (golden, trainer, _) = setup();
    let mut engine = engine("tiny-jamba", "seed = 5\n");
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
    let mut engine = engine("tiny-jamba", "rollout.temperature = 0.0\n");
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
    let narrow = engine("tiny-jamba", "engine = { state_index_bits = 17, max_model_len = 96 }\n");
    let whole = trainer.inspect(&sequences[..1]).expect("inspect").remove(0);
    let row = &sequences[0].tokens;
    let mut scratch = narrow.scratch(12);
    let mut feed = |phase, tokens| {
        let feeds = [Feed { sequence: 11, phase, tokens }];
        let x_th = scratch.feed(narrow.runner(), &feeds, None);
        narrow.runner().logits(&x_th).into_host()
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
    let narrow = engine("tiny-jamba", "engine = { state_index_bits = 17, max_model_len = 144 }\n");
    assert_eq!(narrow.layout().blocks_for(144), 6);
    let whole = trainer.inspect(&sequences[..1]).expect("inspect").remove(0);
    let [victim, writer] = [&sequences[0].tokens, &sequences[1].tokens];
    for (other, spoiled) in [(7, false), (8, true)] {
        let mut scratch = narrow.scratch(9);
        let mut feed = |feeds: &[Feed<'_>]| {
            let x_th = scratch.feed(narrow.runner(), feeds, None);
            narrow.runner().logits(&x_th).into_host()
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
