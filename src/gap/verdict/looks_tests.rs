//! The rules that go by a second look: each with what makes it speak, and what keeps it silent.

use super::FindingKind::{
    BatchDependentReduction, DecodePath, EndToken, LogprobMode, NotRepeatable, PackingLeak,
    PaddingWrite, PositionOffset, Precision, StateKeptOnPreempt, Unexplained, WeightsNotSynced,
};
use super::*;
use crate::base::{CompletionIndex, EngineStep, Generation, LogProb, Position, TokenId};
use crate::engine::{FinishReason, Phase};
use crate::gap::pair::pair;
use crate::gap::testing::rollout;
use crate::gap::{CaseFile, LayerRoutes};
use crate::model::Part;
use crate::rollout::LegLogProbs;

const DECODE: [f32; 4] = [-0.5, -1.5, -0.25, -2.0];

fn leg(values: &[f32]) -> LegLogProbs {
    values.iter().map(|&logp| Some(LogProb::new(logp))).collect()
}

/// `DECODE` with every token but the first off by so many nats, in no way that a shift explains.
pub(super) fn off(nats: f32) -> [f32; 4] {
    let signs = [0.0, 1.0, -1.0, 1.0];
    std::array::from_fn(|at| DECODE[at] + signs[at] * nats)
}

/// One request: its legs, and what a second look at it says.
#[derive(Clone, Copy)]
pub(super) struct Legs4 {
    pub decode: [f32; 4],
    pub prefill: [f32; 4],
    pub trainer: [f32; 4],
    pub decode_again: [f32; 4],
    pub decode_together: [f32; 4],
    pub trainer_again: [f32; 4],
    pub trainer_alone: [f32; 4],
}

/// All agree.
pub(super) const GOOD: Legs4 = Legs4 {
    decode: DECODE,
    prefill: DECODE,
    trainer: DECODE,
    decode_again: DECODE,
    decode_together: DECODE,
    trainer_again: DECODE,
    trainer_alone: DECODE,
};

impl Legs4 {
    fn record(&self, index: u32) -> Rollout {
        let mut record = rollout(index, &self.decode, &self.trainer);
        record.prefill = Some(leg(&self.prefill));
        record
    }

    fn probe(&self, index: u32) -> Probe {
        Probe {
            request: RequestId::new(1, 0, index),
            decode_again: Some(leg(&self.decode_again)),
            decode_together: Some(leg(&self.decode_together)),
            trainer_again: Some(leg(&self.trainer_again)),
            trainer_alone: Some(leg(&self.trainer_alone)),
            prefill_trainer: None,
            decode_prefill: None,
            routes: None,
        }
    }
}

/// A step's requests, each looked at, and how the trainer packed them.
pub(super) struct Scene {
    pub records: Vec<Rollout>,
    pub probes: Probes,
    pub floor: f64,
}

impl Scene {
    pub(super) fn of(requests: &[Legs4]) -> Self {
        let each = || (0..).zip(requests);
        let records = each().map(|(index, one)| one.record(index)).collect();
        let probed = each().map(|(index, one)| one.probe(index)).collect();
        Self { records, probes: Probes { requests: probed, packs: Vec::new() }, floor: 0.0 }
    }

    fn packed(mut self, packs: &[&[u32]]) -> Self {
        let ids = |pack: &&[u32]| pack.iter().map(|&one| RequestId::new(1, 0, one)).collect();
        self.probes.packs = packs.iter().map(ids).collect();
        self
    }

    /// Without recurrent state.
    fn stateless(mut self) -> Self {
        for record in &mut self.records {
            record.completion.lives.clear();
        }
        self
    }

    /// Prompts of these lengths.
    fn with_prompts(mut self, lens: &[usize]) -> Self {
        for (record, &len) in self.records.iter_mut().zip(lens) {
            record.completion.prompt.resize(len, TokenId::new(1));
        }
        self
    }

    fn judged(&self) -> Vec<Finding> {
        let pairs = pair(&self.records, Legs::DecodeTrainer).unwrap();
        let probes = Some(&self.probes);
        let evidence = Evidence::new(Step::new(1), &self.records, &pairs, self.floor);
        verdict(&Evidence { probes, ..evidence })
    }

    #[track_caller]
    pub(super) fn check(&self, expected: &[FindingKind]) -> Vec<Finding> {
        let found = self.judged();
        let kinds: Vec<FindingKind> = found.iter().map(|finding| finding.kind).collect();
        assert_eq!(kinds, expected, "{found:#?}");
        found
    }
}

#[test]
fn looks_alone_make_no_finding() {
    Scene::of(&[GOOD; 4]).packed(&[&[0, 1, 2, 3]]).check(&[]);
    // A second look that comes out otherwise is nothing where the records agree.
    let noisy = Legs4 { trainer_again: off(0.5), decode_again: off(0.5), ..GOOD };
    Scene::of(&[noisy; 4]).check(&[]);
}

#[test]
fn k16_a_trainer_that_does_not_repeat_itself() {
    let noisy = Legs4 { trainer: off(0.5), trainer_again: off(0.75), ..GOOD };
    let found = Scene::of(&[noisy, noisy, GOOD]).check(&[NotRepeatable]);
    assert_eq!(found[0].requests_total, 2);
    assert!(found[0].message.contains("scored twice differs by up to 2.5e-1 in all 2"));
    // Rate 0: the two passes are one.
    let repeats = Legs4 { trainer: off(0.5), trainer_again: off(0.5), ..GOOD };
    let alone_too = Legs4 { trainer_alone: off(0.5), ..repeats };
    Scene::of(&[alone_too; 3]).check(&[Unexplained]);
    // A spread of a thousandth explains no gap of a half.
    let little = Legs4 { trainer: off(0.5), trainer_again: off(0.501), ..GOOD };
    Scene::of(&[little; 3]).check(&[Unexplained]);
    // Half of those looked at again repeat themselves.
    Scene::of(&[noisy, alone_too, GOOD]).check(&[Unexplained]);
    // The engine does not agree with itself either: two faults, and no single culprit.
    let both = Legs4 { prefill: off(0.25), ..noisy };
    Scene::of(&[both; 3]).check(&[Unexplained]);
}

#[test]
fn k07_a_decode_path_that_repeats_itself_and_differs_from_its_prefill() {
    let bad = Legs4 { decode: off(3.0), decode_again: off(3.0), ..GOOD };
    let found = Scene::of(&[bad, GOOD, bad]).check(&[DecodePath]);
    assert_eq!(found[0].requests_total, 2);
    assert_eq!(found[0].first_bad_position, Some(CompletionIndex::new(1)));
    // Replayed it comes out right: not its arithmetic.
    let state = Legs4 { decode: off(3.0), ..GOOD };
    let found = Scene::of(&[state, GOOD]).check(&[Unexplained]);
    assert!(found[0].message.contains("of 1 looked at again 1: replayed alone in a fresh pool"));
    Scene::of(&[bad, state]).check(&[Unexplained]);
    // The trainer agrees with neither: no single culprit.
    Scene::of(&[Legs4 { trainer: off(1.0), ..bad }]).check(&[Unexplained]);
    // The first bad token was sampled by a prefill row.
    let mut scene = Scene::of(&[bad]);
    scene.records[0].completion.tokens[1].phase = Phase::Prefill;
    scene.check(&[Unexplained]);
}

/// Right alone, wrong in its pack.
const LEAKS: Legs4 = Legs4 { trainer: [-0.5, -1.0, -0.5, -1.875], ..GOOD };

fn leaks() -> Legs4 {
    Legs4 { trainer_again: LEAKS.trainer, ..LEAKS }
}

#[test]
fn k14_what_a_neighbour_leaves_spares_the_first_of_a_pack() {
    let bad = leaks();
    let all = [GOOD, bad, bad, GOOD, bad, bad];
    let packs: [&[u32]; 2] = [&[0, 1, 2], &[3, 4, 5]];
    let found = Scene::of(&all).packed(&packs).with_prompts(&[3, 5, 3, 5, 3, 3]);
    let found = found.check(&[PackingLeak]);
    assert!(found[0].message.contains("all 2 that are the first of their pack are good, 4 of the"));
    // A first one is bad too, and those that padding would spare.
    let all = [bad, bad, bad, GOOD, bad, bad];
    let scene = Scene::of(&all).packed(&packs);
    scene.check(&[BatchDependentReduction]);
    // Wrong alone as well.
    let worse = Legs4 { trainer_alone: off(2.0), ..bad };
    Scene::of(&[GOOD, worse, worse, worse]).packed(&[&[0, 1, 2, 3]]).check(&[Unexplained]);
    // Nobody says how they were packed.
    Scene::of(&[GOOD, bad, bad, bad]).check(&[Unexplained]);
}

#[test]
fn k13_padding_spares_the_longest_of_a_pack() {
    let bad = leaks();
    let scene = Scene::of(&[bad, GOOD, bad, bad]).packed(&[&[0, 1, 2, 3]]);
    let found = scene.with_prompts(&[3, 6, 4, 5]).check(&[PackingLeak]);
    assert!(found[0].message.contains("all 1 that are the longest of theirs are good, 3 of the 3"));
    // Equal lengths have no padding, and the first one is bad as well.
    let scene = Scene::of(&[bad, GOOD, bad, bad]).packed(&[&[0, 1, 2, 3]]);
    scene.check(&[BatchDependentReduction]);
}

#[test]
fn k15_moved_positions_matter_to_models_that_have_them() {
    let bad = leaks();
    let packs: [&[u32]; 1] = [&[0, 1, 2, 3]];
    let scene = |bad| Scene::of(&[bad, GOOD, bad, bad]).packed(&packs).with_prompts(&[3, 6, 4, 5]);
    scene(bad).stateless().check(&[PositionOffset]);
    // Learned positions: every token of a padded row is off, and none of the longest row.
    let mut learned = GOOD;
    learned.trainer = [-0.75, -1.25, -0.5, -1.75];
    learned.trainer_again = learned.trainer;
    let found = scene(learned).stateless().check(&[PositionOffset]);
    assert_eq!(found[0].requests, [0, 2, 3].map(|index| RequestId::new(1, 0, index)));
    assert_eq!(found[0].first_bad_position, Some(CompletionIndex::new(0)));
    // What rotary positions round differently.
    let mut rotary = GOOD;
    rotary.trainer[1] += 5e-6;
    rotary.trainer_again = rotary.trainer;
    scene(rotary).stateless().check(&[Unexplained]);
    let mut within = scene(rotary).stateless();
    within.floor = 1e-5;
    within.check(&[]);
}

#[test]
fn k24_an_order_of_sums_that_follows_the_batch_spares_nobody() {
    let bad = leaks();
    let packs: [&[u32]; 2] = [&[0, 1], &[2, 3]];
    let found = Scene::of(&[bad; 4]).packed(&packs).check(&[BatchDependentReduction]);
    assert!(found[0].message.contains("100.00 %") || found[0].message.contains("75.00 %"));
    // Not repeatable is another matter.
    let noisy = Legs4 { trainer_again: off(0.75), ..bad };
    Scene::of(&[noisy; 4]).packed(&packs).check(&[NotRepeatable]);
    // Of the engine: alone it is right, side by side it is not, in a pool that nobody used.
    let engine = Legs4 { decode: off(0.125), decode_together: off(0.125), ..GOOD };
    Scene::of(&[engine, engine, GOOD]).check(&[BatchDependentReduction]);
    let state = Legs4 { decode: off(0.125), ..GOOD };
    Scene::of(&[engine, state]).check(&[Unexplained]);
}

#[test]
fn k08_two_halves_within_the_floor_are_precision() {
    let mut halves = GOOD;
    halves.prefill = off(0.075);
    halves.trainer = off(0.15);
    (halves.trainer_again, halves.trainer_alone) = (halves.trainer, halves.trainer);
    let mut scene = Scene::of(&[halves, GOOD]);
    scene.check(&[Unexplained]);
    scene.floor = 0.1;
    scene.check(&[Precision]);
    scene.floor = 0.2;
    scene.check(&[]);
    scene.floor = 0.05;
    scene.check(&[Unexplained]);
}

#[test]
fn k03_a_state_kept_through_a_preemption() {
    let preempted = |generation, bad: [f32; 4]| {
        let mut record = Legs4 { decode: bad, decode_again: bad, ..GOOD }.record(0);
        let mut life = record.completion.lives[0].clone();
        (life.sampled_before, life.engine_step) = (1, EngineStep::new(5));
        life.state_blocks[0].generation = Generation::new(generation);
        record.completion.lives.push(life);
        record.completion.preemptions = 1;
        Scene { records: vec![record], ..Scene::of(&[]) }
    };
    let found = preempted(1, off(1.0)).check(&[StateKeptOnPreempt]);
    assert_eq!(found[0].blocks, [BlockId::new(1)]);
    assert!(found[0].message.contains("its life from engine step 5 on"), "{}", found[0].message);
    // Handed out anew.
    preempted(2, off(1.0)).check(&[Unexplained]);
    // What was sampled before the preemption is bad too.
    let mut early = off(1.0);
    early[0] = -4.0;
    preempted(1, early).check(&[Unexplained]);
}

/// Three requests in rows 0 to 2 of batches of four; the first of them is bad from its third token.
#[test]
fn k05_padding_rows_hit_whoever_is_in_the_first_row() {
    let scene_of = |decode: [f32; 2], spoil: fn(&mut Vec<Rollout>)| {
        let mut bad = GOOD;
        (bad.decode[2], bad.decode[3]) = (decode[0], decode[1]);
        let mut scene = Scene::of(&[bad, GOOD, GOOD]);
        for (row, record) in (0..).zip(&mut scene.records) {
            for token in &mut record.completion.tokens[1..] {
                (token.batch_row, token.batch_rows, token.padding_rows) = (row, 3, 1);
            }
        }
        spoil(&mut scene.records);
        scene
    };
    let scene = |spoil| scene_of([-3.0, -4.0], spoil);
    let found = scene(|_| {}).check(&[PaddingWrite]);
    assert_eq!(found[0].requests, [RequestId::new(1, 0, 0)]);
    assert_eq!(found[0].blocks, [BlockId::new(1)]);
    assert!(found[0].message.contains("2 requests in other rows of such batches are good"));
    // Bad before any padding, or in another row, or another one came through unharmed.
    scene(|all| all[0].completion.tokens[1].padding_rows = 0).check(&[Unexplained]);
    scene(|all| all[0].completion.tokens[1].batch_row = 1).check(&[Unexplained]);
    scene(|all| all[1].completion.tokens[1].batch_row = 0).check(&[Unexplained]);
    // The token after the padding is good, or what is bad may be rounding.
    scene_of([GOOD.decode[2], -4.0], |_| {}).check(&[Unexplained]);
    scene_of([GOOD.decode[2] - 1e-3, GOOD.decode[3]], |_| {}).check(&[Unexplained]);
}

#[test]
fn k18_an_end_on_one_side_only() {
    let scene = |masked: &[bool]| {
        let mut scene = Scene::of(&vec![GOOD; masked.len()]);
        for (record, &masked) in scene.records.iter_mut().zip(masked) {
            record.completion.finish_reason = FinishReason::Stop;
            record.loss_mask = vec![!masked; 4];
        }
        scene
    };
    let found = scene(&[true, true]).check(&[EndToken]);
    assert!(found[0].message.contains("token 103 ended 2 completions"), "{}", found[0].message);
    // Known to the other side: it counts some that end so.
    scene(&[true, false]).check(&[]);
    scene(&[false, false]).check(&[]);
    // Cut off, which may well be masked.
    let mut cut = scene(&[true, true]);
    for record in &mut cut.records {
        record.completion.finish_reason = FinishReason::Length;
    }
    cut.check(&[]);
}

#[test]
fn k11_weights_that_did_not_arrive_are_named_by_version() {
    let bad = Legs4 { trainer: off(1.0), trainer_again: off(1.0), trainer_alone: off(1.0), ..GOOD };
    let scene = Scene::of(&[bad, bad]);
    let judged = |records: &[Rollout]| {
        let pairs = pair(records, Legs::DecodeTrainer).unwrap();
        let of =
            |version, fingerprint| WeightsOf { version: WeightVersion::new(version), fingerprint };
        let weights = [of(0, 5), of(3, 7)];
        let evidence = Evidence::new(Step::new(3), records, &pairs, 0.0);
        verdict(&Evidence { weights: &weights, ..evidence })
    };
    let mut records = scene.records;
    for record in &mut records {
        record.completion.engine_fingerprint = Some(5);
        record.completion.weight_version = WeightVersion::new(3);
    }
    let found = judged(&records);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].kind, WeightsNotSynced);
    let message = &found[0].message;
    assert!(message.contains("in truth the trainer's version 0"), "{message}");
    assert!(message.contains("(version 3); its worst"), "{message}");
    // One request's engine does not agree with itself: weights alone do not explain it.
    records[1].prefill = Some(leg(&off(2.0)));
    let kinds: Vec<FindingKind> = judged(&records).iter().map(|one| one.kind).collect();
    assert_eq!(kinds, [WeightsNotSynced, Unexplained]);
}

#[test]
fn k19_another_contract_explains_those_it_was_found_for() {
    let bad = Legs4 { decode: off(1.0), ..GOOD };
    let scene = Scene::of(&[bad, bad]);
    let pairs = pair(&scene.records, Legs::DecodeTrainer).unwrap();
    let requests = [scene.records[0].completion.id].into();
    let mode = UnlikeMode { message: "after temperature 0.5".into(), requests };
    let evidence = Evidence::new(Step::new(1), &scene.records, &pairs, 0.0);
    let found = verdict(&Evidence { mode: Some(&mode), ..evidence });
    let kinds: Vec<FindingKind> = found.iter().map(|one| one.kind).collect();
    assert_eq!(kinds, [LogprobMode, Unexplained]);
}

/// What is written and read back is judged alike.
#[test]
fn a_case_file_is_judged_as_the_evidence_was() {
    let bad = Legs4 { decode: off(f32::NAN), decode_again: off(f32::NAN), ..GOOD };
    let mut scene = Scene::of(&[bad, GOOD, leaks()]).packed(&[&[0, 1, 2]]);
    let first = FirstDifference { position: Position::new(2), part: Part::HEAD };
    scene.probes.requests[0].decode_prefill = Some(first);
    scene.probes.requests[2].routes = Some(LayerRoutes::default());
    let pairs = pair(&scene.records, Legs::DecodeTrainer).unwrap();
    let evidence = Evidence::new(Step::new(1), &scene.records, &pairs, 0.0);
    let evidence = Evidence { probes: Some(&scene.probes), ..evidence };
    let text = serde_json::to_string(&CaseFile::of(&evidence)).unwrap();
    let read: CaseFile = serde_json::from_str(&text).unwrap();
    let found = read.judge().unwrap();
    assert!(!found.is_empty());
    assert_eq!(serde_json::to_string(&read).unwrap(), text);
    assert_eq!(found, verdict(&evidence));
    assert!(serde_json::from_str::<CaseFile>(&text.replacen("{", "{\"fault\":1,", 1)).is_err());
}
