//! Packed sequences do not know of one another (prime-rl#3000: convolution and scan ran over the
//! whole packed row, so that packed rows of a hybrid model scored differently from single ones).

mod common;

use common::{
    config, device, gradient_by_update, random_tokens, random_weights, GRADIENT_BY_UPDATE, PLAIN,
};
use gapscope::base::TokenId;
use gapscope::model::{Plan, Preset};
use gapscope::trainer::{Sequence, Trainer};

/// Lengths of two documents that share a chunk, and where the second starts scoring.
const LENS: [usize; 2] = [13, 9];

fn plan() -> Plan {
    Plan::new(Preset::TinyJamba.config())
}

fn trainer(dtype: &str, chunk: usize) -> Trainer {
    let config = config(&format!(
        "name = \"packing\"\nmodel = {{ preset = \"tiny-jamba\", dtype = \"{dtype}\" }}\n\
         {GRADIENT_BY_UPDATE}trainer.max_tokens_per_chunk = {chunk}\n"
    ));
    let num = plan().numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
    Trainer::new(&device(), plan(), num, config.trainer, &random_weights(&plan(), 1))
        .expect("few threads")
}

fn document(len: usize, seed: u64, prompt_len: usize) -> Sequence {
    Sequence { tokens: random_tokens(&plan().config, len, seed), prompt_len }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Every hidden state, logit and log-probability of a document, and its first row that differs.
struct Seen {
    rows: Vec<Vec<u32>>,
    logps: Vec<u32>,
}

impl Seen {
    fn first_difference(&self, other: &Self) -> Option<usize> {
        self.rows.iter().zip(&other.rows).position(|(a, b)| a != b)
    }
}

fn seen(trainer: &Trainer, documents: &[Sequence]) -> Vec<Seen> {
    let scores = trainer.score(documents, &PLAIN).expect("score");
    let inside = trainer.inspect(documents).expect("inspect");
    let of = |((one, scores), document): ((_, _), &Sequence)| {
        let one: &gapscope::trainer::Inspection = one;
        let scores: &gapscope::trainer::SequenceScores = scores;
        let t = document.tokens.len();
        let row = |at: usize| {
            let of = |all: &Vec<f32>| bits(&all[at * all.len() / t..(at + 1) * all.len() / t]);
            one.hidden.iter().chain([&one.logits]).flat_map(of).collect()
        };
        let logps = scores.contract.iter().map(|logp| logp.get().to_bits()).collect();
        Seen { rows: (0..t).map(row).collect(), logps }
    };
    inside.iter().zip(&scores).zip(documents).map(of).collect()
}

#[test]
fn k14_one_changed_token_moves_nothing_of_the_other_document() {
    for dtype in ["f32", "bf16"] {
        let trainer = trainer(dtype, 64);
        for (changed, other) in [(0, 1), (1, 0)] {
            let start = [document(LENS[0], 1, 1), document(LENS[1], 2, 1)];
            let before = seen(&trainer, &start);
            for at in 0..LENS[changed] {
                let mut moved = start.clone();
                let token = &mut moved[changed].tokens[at];
                *token = TokenId::new((token.get() + 101) % 256);
                let after = seen(&trainer, &moved);
                let case = format!("{dtype}, token {at} of document {changed}");
                assert_eq!(after[other].first_difference(&before[other]), None, "{case}");
                assert_eq!(after[other].logps, before[other].logps, "{case}");
                // The change itself is seen, and from its own row on.
                assert_eq!(after[changed].first_difference(&before[changed]), Some(at), "{case}");
            }
        }
    }
}

/// With no loss on the changed document, the whole gradient is the other's contribution.
#[test]
fn one_changed_token_moves_nothing_of_the_other_documents_gradient() {
    let gradient = |documents: &[Sequence]| {
        let mut trainer = trainer("f32", 64);
        trainer.warm_step(documents).expect("a step");
        trainer.master().expect("master")
    };
    for (changed, other) in [(0, 1), (1, 0)] {
        let mut start = [document(LENS[0], 3, 1), document(LENS[1], 4, 1)];
        start[changed].prompt_len = LENS[changed];
        let before = gradient(&start);
        for at in 0..LENS[changed] {
            let mut moved = start.clone();
            let token = &mut moved[changed].tokens[at];
            *token = TokenId::new((token.get() + 101) % 256);
            let after = gradient(&moved);
            let same = before.iter().zip(&after).all(|(a, b)| bits(a) == bits(b));
            assert!(same, "token {at} of document {changed}");
        }
        start[other].tokens[5] = TokenId::new(0);
        assert_ne!(gradient(&start), before, "the other document's own token counts");
    }
}

/// Lengths that fill a chunk exactly, leave room, and pass every chunk size below.
fn many() -> Vec<Sequence> {
    let lens = [7, 1, 24, 3, 11, 2, 19, 5, 40, 8, 16, 9, 30, 6];
    lens.iter().enumerate().map(|(i, &len)| document(len, i as u64, 1 + i % 2)).map(whole).collect()
}

/// A prompt is no longer than its sequence.
fn whole(mut sequence: Sequence) -> Sequence {
    sequence.prompt_len = sequence.prompt_len.min(sequence.tokens.len());
    sequence
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads")
}

const CHUNKS: [usize; 6] = [1, 7, 24, 64, 100, 10_000];

#[test]
fn scores_have_the_same_bits_in_any_packing_order_and_thread_count() {
    let sequences = many();
    let reversed: Vec<Sequence> = sequences.iter().rev().cloned().collect();
    for dtype in ["f32", "bf16"] {
        let want = trainer(dtype, 1).score(&sequences, &PLAIN).expect("score");
        for chunk in CHUNKS {
            let trainer = trainer(dtype, chunk);
            assert_eq!(
                trainer.score(&sequences, &PLAIN).expect("score"),
                want,
                "chunks of {chunk}"
            );
            let mut backwards = trainer.score(&reversed, &PLAIN).expect("score");
            backwards.reverse();
            assert_eq!(backwards, want, "reversed, chunks of {chunk}");
            for threads in [1, 3] {
                // A trainer is one thread's own, so it is made inside the pool.
                let score = || self::trainer(dtype, chunk).score(&sequences, &PLAIN);
                let got = pool(threads).install(score).expect("score");
                assert_eq!(got, want, "{threads} threads, chunks of {chunk}");
            }
        }
    }
}

/// The sums over rows are cut at chunks, so packing moves roundings and nothing else: a gradient
/// is a sum of about 200 rows' terms, and 1e-5 of its largest element is 168 roundings.
#[test]
fn gradients_are_the_same_in_any_packing_and_bit_equal_for_any_thread_count() {
    let sequences = many();
    let start = random_weights(&plan(), 1);
    let step = |chunk: usize, threads: usize| {
        pool(threads).install(|| {
            let mut trainer = trainer("f32", chunk);
            trainer.warm_step(&sequences).expect("a step");
            trainer.master().expect("master")
        })
    };
    let want = step(1, 1);
    for chunk in CHUNKS {
        let got = step(chunk, 2);
        assert_eq!(got, step(chunk, 5), "chunks of {chunk}, whatever the threads");
        for (spec, ((start, got), want)) in
            plan().units.iter().zip(start.iter().zip(&got).zip(&want))
        {
            let parts = spec.parts(start).zip(spec.parts(got)).zip(spec.parts(want));
            for (tensor, ((start, got), want)) in spec.tensors.iter().zip(parts) {
                let (got, want) = (gradient_by_update(start, got), gradient_by_update(start, want));
                let largest = want.iter().fold(0.0_f32, |max, g| max.max(g.abs()));
                for (got, want) in got.iter().zip(&want) {
                    let error = (got - want).abs();
                    assert!(error <= 1e-5 * largest, "{}, chunks of {chunk}: {error}", tensor.name);
                }
            }
        }
    }
}
