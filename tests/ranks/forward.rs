//! Whatever a forward gives is bit for bit that of one rank.

use gapscope::base::Contract;
use gapscope::config::Dtype;
use gapscope::trainer::{Inspection, Sequence, Trainer};

use crate::{bits, Model, RANKS};

type Rows = Vec<Vec<u32>>;
/// Sequence, index, token and logits.
type Seen = (usize, usize, u32, Vec<u32>);

/// All that a trainer says without changing.
#[derive(Debug, PartialEq)]
struct Said {
    scores: Vec<(Vec<u32>, Vec<u32>)>,
    inspected: Vec<(Rows, Rows, Vec<u32>)>,
    seen: Vec<Vec<Seen>>,
    routes: Vec<gapscope::rollout::Routes>,
    streams: Vec<Vec<Vec<u64>>>,
    handed_over: Vec<Vec<u8>>,
    master: Vec<Vec<u32>>,
    fingerprints: Vec<u64>,
}

fn said(trainer: &Trainer, sequences: &[Sequence]) -> Said {
    let mut contract = Contract::PLAIN;
    contract.temperature = 0.7;
    let logps = |all: &[gapscope::base::LogProb]| all.iter().map(|x| x.get().to_bits()).collect();
    let scores = trainer.score(sequences, &contract).expect("scores");
    let inspected = |one: Inspection| {
        let all = |rows: Vec<Vec<f32>>| rows.iter().map(|row| bits(row)).collect();
        (all(one.hidden), all(one.router_logits), bits(&one.logits))
    };
    let seen = trainer.map_logits(sequences, |seen| {
        (seen.sequence, seen.index, seen.token.get(), bits(seen.logits))
    });
    let set = trainer.hand_over().expect("weights");
    Said {
        scores: scores.iter().map(|one| (logps(&one.contract), logps(&one.ratio))).collect(),
        inspected: {
            trainer.inspect(sequences).expect("a look inside").into_iter().map(inspected).collect()
        },
        seen: seen.expect("logits"),
        routes: trainer.routes(sequences).expect("routes"),
        streams: trainer.streams(sequences).expect("streams"),
        handed_over: set.units.iter().map(|unit| unit.to_bytes()).collect(),
        master: trainer.master().expect("weights").iter().map(|unit| bits(unit)).collect(),
        fingerprints: trainer.fingerprints().expect("fingerprints"),
    }
}

#[test]
fn every_answer_is_bit_equal_at_every_number_of_ranks() {
    for model in Model::all() {
        for (dtype, update) in [(Dtype::F32, "adamw"), (Dtype::F32, "none"), (Dtype::Bf16, "none")]
        {
            let extra = format!("trainer.update = \"{update}\"\n");
            // As many as there are, and fewer than ranks; none at all is no error.
            for count in [7, 2, 0] {
                let sequences = model.sequences(count);
                let [one, rest @ ..] = RANKS.map(|ranks| model.trainer(ranks, dtype, &extra));
                let wanted = said(&one, &sequences);
                for (ranks, trainer) in RANKS[1..].iter().zip(rest) {
                    let case = format!("{}, {dtype:?}, {update}, {count}", model.name);
                    assert!(said(&trainer, &sequences) == wanted, "{case}, {ranks} ranks");
                    let mut packed: Vec<usize> = trainer.packs(&sequences).concat();
                    packed.sort_unstable();
                    assert_eq!(packed, (0..count).collect::<Vec<_>>(), "{case}, {ranks} ranks");
                }
            }
        }
    }
}

/// A planted fault is planted on every rank. In bf16, where the smallest difference is seen.
#[test]
fn a_fault_reaches_every_rank() {
    let model = Model::fixture("tiny-jamba");
    let sequences = model.sequences(7);
    for fault in ["trainer_weight_ulp", "shifted_logprobs", "no_document_reset"] {
        let scored = |faults: &str, ranks| {
            let extra = format!("trainer.update = \"none\"\ntrainer.faults = [{faults}]\n");
            let trainer = model.trainer(ranks, Dtype::Bf16, &extra);
            (trainer.score(&sequences, &Contract::PLAIN).expect("scores"), trainer.fingerprints())
        };
        let (healthy, own) = scored("", 3);
        let (faulty, other) = scored(&format!("\"{fault}\""), 3);
        assert!(healthy != faulty, "{fault}");
        if fault == "shifted_logprobs" {
            assert!(faulty == scored("\"shifted_logprobs\"", 1).0, "on every rank as on one");
        }
        let differ = own.expect("fingerprints") != other.expect("fingerprints");
        assert_eq!(differ, fault == "trainer_weight_ulp", "{fault}");
    }
    let moved = |ranks| {
        let extra = "trainer.update = \"none\"\ntrainer.faults = [\"trainer_weight_ulp\"]\n";
        let trainer = model.trainer(ranks, Dtype::Bf16, extra);
        (
            trainer.score(&sequences, &Contract::PLAIN).expect("scores"),
            trainer.fingerprints().unwrap(),
        )
    };
    assert!(moved(4) == moved(1), "the same element of the same weights");
}
