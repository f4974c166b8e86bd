//! The rows K01 to K29 of public reports: each has a test that is named after it, and the catalogue
//! of faults has those that can be planted or dumped. Here are the tests of what a trainer does to
//! a batch, seen at the trainer alone.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use common::{config, device, engine, random_tokens, random_weights, PLAIN};
use gapscope::base::TokenId;
use gapscope::config::FAULTS;
use gapscope::model::{Plan, Preset};
use gapscope::trainer::{Sequence, Trainer};
use regex::Regex;

/// Every Rust file below a folder.
fn sources(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(fs::read_to_string(&path).expect("UTF-8"));
        }
    }
}

fn numbers(rows: impl IntoIterator<Item = u32>) -> BTreeSet<String> {
    rows.into_iter().map(|row| format!("{row:02}")).collect()
}

/// The rows that tests of these sources are named after; one name may hold several.
fn rows_tested(sources: &[String]) -> BTreeSet<String> {
    let test = Regex::new(r"#\[test\]\n\s*fn ((?:k\d\d_)+)").expect("a pattern");
    let names =
        sources.iter().flat_map(|text| test.captures_iter(text)).map(|found| found.extract());
    let rows = names.flat_map(|(_, [rows])| rows.split_terminator('_'));
    rows.map(|row| row.trim_start_matches('k').to_owned()).collect()
}

#[test]
fn every_row_has_a_test_of_its_name() {
    let (mut all, root) = (Vec::new(), Path::new(env!("CARGO_MANIFEST_DIR")));
    sources(&root.join("src"), &mut all);
    sources(&root.join("tests"), &mut all);
    assert_eq!(rows_tested(&all), numbers(1..=29));
    // No name but a test's counts.
    let samples = ["#[test]\n    fn k07_k31_a() {}\n", "fn k32_b() {}\n"].map(str::to_owned);
    assert_eq!(rows_tested(&samples), numbers([7, 31]));
}

/// From K26 on the reports are of memory and of files, where there is no gap to plant.
#[test]
fn the_catalogue_has_every_row_that_makes_a_gap() {
    let rows = FAULTS.iter().filter_map(|entry| entry.row.strip_prefix('K'));
    assert_eq!(rows.map(str::to_owned).collect::<BTreeSet<_>>(), numbers(1..=25));
}

fn plan() -> Plan {
    Plan::new(Preset::TinyJamba.config())
}

/// With planted faults, as in `trainer.faults`.
fn trainer(faults: &str) -> Trainer {
    let config = config(&format!(
        "name = \"rows\"\nmodel.preset = \"tiny-jamba\"\n\
         trainer.max_tokens_per_chunk = 256\ntrainer.faults = [{faults}]\n"
    ));
    let num = plan().numerics_of(&config);
    Trainer::new(&device(), plan(), num, config.trainer, &random_weights(&plan(), 1))
        .expect("few threads")
}

fn document(len: usize, seed: u64) -> Sequence {
    Sequence { tokens: random_tokens(&plan().config, len, seed), prompt_len: 1 }
}

/// The log-probabilities of each document's tokens from the second on.
fn scored(trainer: &Trainer, documents: &[Sequence]) -> Vec<Vec<f32>> {
    let scores = trainer.score(documents, &PLAIN).expect("score");
    let of = |one: &gapscope::trainer::SequenceScores| {
        one.contract.iter().map(|logp| logp.get()).collect()
    };
    scores.iter().map(of).collect()
}

/// PrimeIntellect-ai/prime-rl#3000: the last token of one document changes.
#[test]
fn k14_without_a_reset_the_next_document_moves_and_less_and_less() {
    let (first_len, second_len) = (13, 81);
    let before = [document(first_len, 1), document(second_len, 2)];
    let mut after = before.clone();
    let last = after[0].tokens.last_mut().expect("a token");
    *last = TokenId::new((last.get() + 101) % 256);
    for (faults, moves) in [("", false), ("\"no_document_reset\"", true)] {
        let trainer = trainer(faults);
        let (old, new) = (scored(&trainer, &before), scored(&trainer, &after));
        let kept = first_len - 2;
        assert_eq!(old[0][..kept], new[0][..kept], "{faults}");
        assert_ne!(old[0][kept..], new[0][kept..], "{faults}");
        assert_eq!(old[1] != new[1], moves, "{faults}");
        let moved: Vec<f32> = old[1].iter().zip(&new[1]).map(|(a, b)| (a - b).abs()).collect();
        let of = |part: &[f32]| part.iter().sum::<f32>();
        let (early, late) = (of(&moved[..20]), of(&moved[60..]));
        assert_eq!(moved[0] > 0.0 && early > 2.0 * late, moves, "{faults}: {early}, {late}");
    }
}

/// huggingface/trl#3234: dropout at a rate of 0.1 while scoring.
#[test]
fn k16_with_dropout_two_passes_differ_and_without_they_are_one() {
    let batch = [document(20, 1), document(30, 2)];
    let noisy = trainer("\"dropout\"");
    assert_ne!(scored(&noisy, &batch), scored(&noisy, &batch));
    let clean = trainer("");
    assert_eq!(scored(&clean, &batch), scored(&clean, &batch));
    let engine = engine("tiny-jamba", "engine.max_model_len = 64\n");
    let forced: Vec<_> = batch.iter().map(|one| (&one.tokens[..], 1)).collect();
    assert_eq!(engine.score_prefill(&forced), engine.score_prefill(&forced));
}

/// verl-project/verl#6280: the same batch again has the same bits, another batch has others.
#[test]
fn k24_a_reduction_that_follows_the_batch_repeats_itself() {
    let eight: Vec<Sequence> = (1..=8).map(|seed| document(20, seed)).collect();
    for (faults, differs) in [("", false), ("\"batch_dependent_reduction\"", true)] {
        let trainer = trainer(faults);
        let alone = scored(&trainer, &eight[..1]);
        assert_eq!(scored(&trainer, &eight[..1]), alone, "{faults}");
        let together = scored(&trainer, &eight);
        assert_eq!(scored(&trainer, &eight), together, "{faults}");
        assert_eq!(together[0] != alone[0], differs, "{faults}");
    }
}
