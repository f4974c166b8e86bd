//! Gradients, updates and checkpoints.

use std::collections::BTreeMap;

use gapscope::base::{Contract, LogProb};
use gapscope::config::Dtype;
use gapscope::trainer::{
    Experience, Sequence, Trainer, TrainerError, TrainerSnapshot, UpdateReport,
};

use crate::common::{gradient_by_update, GRADIENT_BY_UPDATE};
use crate::{bits, Model, RANKS};

/// Everything that a loss can have.
const GRPO: &str = "trainer.kl_coef = 0.1\ntrainer.importance_cap = 1.5\n\
    trainer.loss_agg = \"sequence_mean\"\ntrainer.updates_per_step = 2\n\
    trainer.learning_rate = 1e-3\ntrainer.weight_decay = 0.1\n";

fn master(trainer: &Trainer) -> Vec<Vec<u32>> {
    trainer.master().expect("weights").iter().map(|unit| bits(unit)).collect()
}

/// With the old log-probabilities that this trainer gives today.
fn experiences(trainer: &Trainer, sequences: &[Sequence]) -> Vec<Experience> {
    let scores = trainer.score(sequences, &Contract::PLAIN).expect("scores");
    let experience = |(i, (sequence, scores)): (usize, (&Sequence, _))| {
        let old: Vec<LogProb> = gapscope::trainer::SequenceScores::clone(scores).ratio;
        Experience {
            sequence: sequence.clone(),
            advantage: [1.5, -0.5, 2.0, -1.0, 0.25, -0.75, 1.0][i],
            mask: (0..old.len()).map(|at| (at + i) % 5 != 0).collect(),
            d: (0..old.len()).map(|at| 0.1 * (at as f64 - 2.0)).collect(),
            old,
        }
    };
    sequences.iter().zip(&scores).enumerate().map(experience).collect()
}

fn update(trainer: &mut Trainer, sequences: &[Sequence]) -> Vec<UpdateReport> {
    let experiences = experiences(trainer, sequences);
    trainer.update(&experiences, &Contract::PLAIN).expect("an update")
}

/// Each element against the largest of its tensor, and each tensor's norm.
#[test]
fn gradients_before_the_optimizer() {
    for model in Model::all() {
        let sequences = model.sequences(7);
        let gradient = |ranks| {
            let mut trainer = model.trainer(ranks, Dtype::F32, GRADIENT_BY_UPDATE);
            let norms = trainer.supervised_grad_norms(&sequences).expect("norms");
            trainer.warm_step(&sequences).expect("a step");
            let after = trainer.master().expect("weights");
            let units = model.master.iter().zip(&after);
            (norms, units.map(|(one, other)| gradient_by_update(one, other)).collect::<Vec<_>>())
        };
        let ((loss, norms), wanted) = gradient(1);
        for ranks in &RANKS[1..] {
            let ((other_loss, others), found) = gradient(*ranks);
            let case = format!("{}, {ranks} ranks", model.name);
            assert!((loss - other_loss).abs() <= 1e-12 * loss, "{case}: {loss} and {other_loss}");
            for ((name, want), (_, got)) in norms.iter().zip(&others) {
                assert!((got - want).abs() <= 1e-5 * want, "{case}, {name}: {got} for {want}");
            }
            let units = model.plan.units.iter().zip(wanted.iter().zip(&found));
            for (spec, (want, got)) in units {
                let tensors = spec.tensors.iter().zip(spec.parts(want).zip(spec.parts(got)));
                for (tensor, (want, got)) in tensors {
                    let largest = want.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                    let apart = want.iter().zip(got).map(|(a, b)| (a - b).abs());
                    let apart = apart.fold(0.0_f32, f32::max);
                    let name = &tensor.name;
                    assert!(apart <= 1e-5 * largest, "{case}, {name}: {apart} of {largest}");
                }
            }
        }
    }
}

#[test]
fn ten_steps_stay_together_and_the_same_ranks_give_the_same_bits() {
    for model in ["tiny-jamba", "tiny-jamba-moe"].map(Model::fixture) {
        let sequences = model.sequences(7);
        let run = |ranks| {
            let mut trainer = model.trainer(ranks, Dtype::F32, "trainer.warmup_steps = 3\n");
            let losses = (0..10).map(|_| trainer.warm_step(&sequences).expect("a step"));
            (losses.collect::<Vec<f64>>(), master(&trainer))
        };
        let (wanted, _) = run(1);
        assert!(wanted[9] < wanted[0] - 0.1, "it learns: {wanted:?}");
        for ranks in RANKS {
            let (losses, weights) = run(ranks);
            for (loss, want) in losses.iter().zip(&wanted) {
                assert!((loss - want).abs() <= 1e-4, "{ranks} ranks: {losses:?}, {wanted:?}");
            }
            assert!(run(ranks) == (losses, weights), "{}, {ranks} ranks twice", model.name);
        }
    }
}

/// Terms, clipping and the norm are those of all sequences, not of a rank's.
#[test]
fn a_grpo_step_sees_every_sequence() {
    let model = Model::fixture("tiny-jamba");
    let sequences = model.sequences(7);
    let step = |ranks| {
        let mut trainer = model.trainer(ranks, Dtype::F32, GRPO);
        trainer.freeze_reference().expect("a reference");
        let first = update(&mut trainer, &sequences);
        (first, update(&mut trainer, &sequences), trainer.version())
    };
    let wanted = step(1);
    assert_eq!((wanted.0.len(), wanted.2.get()), (2, 4));
    let near = |case: &str, found: &UpdateReport, wanted: &UpdateReport| {
        let (mut found, terms) = (found.clone(), &wanted.terms);
        let close = |name: &str, found: f64, want: f64| {
            let bound = 2e-5 * want.abs().max(1.0);
            assert!((found - want).abs() <= bound, "{case}, {name}: {found} for {want}");
            want
        };
        let mine = &mut found.terms;
        mine.loss = close("loss", mine.loss, terms.loss);
        mine.policy_loss = close("policy_loss", mine.policy_loss, terms.policy_loss);
        mine.kl = Some(close("kl", mine.kl.expect("a kl"), terms.kl.expect("a kl")));
        mine.approx_kl = close("approx_kl", mine.approx_kl, terms.approx_kl);
        mine.ratio_mean = close("ratio_mean", mine.ratio_mean, terms.ratio_mean);
        mine.ratio_min = close("ratio_min", mine.ratio_min, terms.ratio_min);
        mine.ratio_max = close("ratio_max", mine.ratio_max, terms.ratio_max);
        let importance = mine.importance.as_mut().expect("a cap");
        let due = terms.importance.as_ref().expect("a cap");
        importance.mean = close("importance", importance.mean, due.mean);
        importance.uncapped_max = close("largest", importance.uncapped_max, due.uncapped_max);
        mine.advantage_mean = close("advantages", mine.advantage_mean, terms.advantage_mean);
        mine.advantage_std = close("their spread", mine.advantage_std, terms.advantage_std);
        found.grad_norm = close("norm", found.grad_norm, wanted.grad_norm);
        // Counts, fractions and the rate are the same numbers.
        assert_eq!(&found, wanted, "{case}");
    };
    for ranks in RANKS {
        let found = step(ranks);
        assert_eq!(found.2, wanted.2);
        let both = found.0.iter().chain(&found.1).zip(wanted.0.iter().chain(&wanted.1));
        both.for_each(|(found, wanted)| near(&format!("{ranks} ranks"), found, wanted));
        let again = step(ranks);
        assert!(again == found, "{ranks} ranks twice");
    }
}

/// Whatever is not finite, on whichever rank: nothing has changed anywhere, and all go on.
#[test]
fn what_is_not_finite_changes_no_rank() {
    let model = Model::fixture("tiny-jamba");
    let sequences = model.sequences(7);
    for ranks in RANKS {
        for bad in [0, 4, 6] {
            let mut trainer = model.trainer(ranks, Dtype::F32, GRPO);
            trainer.freeze_reference().expect("a reference");
            let before = (master(&trainer), trainer.snapshot());
            let good = experiences(&trainer, &sequences);
            let check = |trainer: &mut Trainer, spoilt: &[Experience], wanted: &str| {
                let error = trainer.update(spoilt, &Contract::PLAIN).expect_err("refused");
                assert!(error.to_string().contains(wanted), "{ranks} ranks, {bad}: {error}");
                let changes = u64::from(bad > 3);
                assert_eq!(trainer.version().get() - before.1.version.get(), changes);
                if changes == 0 {
                    assert!(master(trainer) == before.0, "{ranks} ranks, {bad}: {error}");
                }
            };
            let mut spoilt = good.clone();
            spoilt[bad].d[2] = f64::NAN;
            check(&mut trainer, &spoilt, "rollout log-probability of token 2");
            if bad < 4 {
                let mut spoilt = good.clone();
                // Finite, and too large for the gradient, which is f32.
                spoilt[bad].advantage = 1e300;
                check(&mut trainer, &spoilt, "the gradient of");
                let mut other = model.trainer(ranks, Dtype::F32, GRPO);
                other.freeze_reference().expect("a reference");
                let mine = trainer.update(&good, &Contract::PLAIN).expect("an update");
                assert_eq!(mine, other.update(&good, &Contract::PLAIN).expect("an update"));
                assert!(master(&trainer) == master(&other), "{ranks} ranks go on");
            }
        }
    }
}

type Arrays = BTreeMap<String, Vec<u8>>;

fn saved(trainer: &Trainer) -> (TrainerSnapshot, Arrays) {
    let arrays = trainer.arrays().expect("arrays").into_iter();
    (trainer.snapshot(), arrays.map(|(name, _, bytes)| (name, bytes.into_owned())).collect())
}

fn restored(
    model: &Model,
    ranks: usize,
    (snapshot, arrays): &(TrainerSnapshot, Arrays),
) -> Trainer {
    let mut trainer = model.trainer(ranks, Dtype::F32, GRPO);
    trainer.freeze_reference().expect("a reference");
    let mut read = 0;
    let copy = |name: &str, bytes: &mut [u8]| {
        let from = &arrays[name];
        assert_eq!(bytes.len(), from.len(), "{name}");
        bytes.copy_from_slice(from);
        read += 1;
        Ok::<_, TrainerError>(())
    };
    trainer.restore(*snapshot, copy).expect("it fits");
    assert_eq!(read, arrays.len(), "every array is read once");
    trainer
}

#[test]
fn saved_at_some_ranks_and_loaded_at_others() {
    for model in ["tiny-jamba", "tiny-jamba-moe"].map(Model::fixture) {
        let sequences = model.sequences(7);
        for before in RANKS {
            let mut trainer = model.trainer(before, Dtype::F32, GRPO);
            trainer.freeze_reference().expect("a reference");
            update(&mut trainer, &sequences);
            let checkpoint = saved(&trainer);
            let scores = trainer.score(&sequences, &Contract::PLAIN).expect("scores");
            let mut reports = BTreeMap::new();
            for after in RANKS {
                let case = format!("{}, {before} ranks and then {after}", model.name);
                let mut other = restored(&model, after, &checkpoint);
                assert!(master(&other) == master(&trainer), "{case}");
                let found = other.score(&sequences, &Contract::PLAIN).expect("scores");
                assert!(found == scores, "{case}");
                if after == before {
                    // The moments, the frozen reference and the counts are back as well.
                    assert!(saved(&restored(&model, after, &checkpoint)) == checkpoint, "{case}");
                }
                let report = update(&mut other, &sequences);
                reports.insert(after, (report[1].grad_norm, report[1].learning_rate));
            }
            let (norm, rate) = reports[&before];
            for (after, (other, same)) in reports {
                assert!((norm - other).abs() <= 1e-4 * norm, "{before}, {after}: {norm}, {other}");
                assert_eq!(rate, same);
            }
        }
    }
}
