use super::super::super::parquet::{write_rollouts, write_tokens};
use super::super::testing::{done, row};
use super::*;
use crate::base::{Contract, EngineIndex, EngineStep, TokenId, WeightVersion};
use crate::engine::{Completion, FinishReason, Phase, SampledToken};
use crate::rollout::Rollout;

/// A request of step 2 whose second token the trainer scores `gap` nats lower than the engine.
fn rollout(idx: u32, gap: f32, text: &str) -> Rollout {
    let sampled = |token| SampledToken {
        token: TokenId::new(token),
        logp: LogProb::new(-1.0),
        engine_step: EngineStep::new(1),
        phase: Phase::Decode,
        scheduled_tokens: 1,
        computed_tokens: 9,
        batch_row: 0,
        batch_rows: 1,
        padding_rows: 0,
    };
    Rollout {
        completion: Completion {
            id: RequestId::new(2, 0, idx),
            engine: EngineIndex::default(),
            prompt: vec![TokenId::new(idx)],
            tokens: vec![sampled(5), sampled(6), sampled(7)],
            finish_reason: FinishReason::Length,
            contract: Contract::PLAIN,
            weight_version: WeightVersion::new(0),
            engine_fingerprint: Some(1),
            lives: Vec::new(),
            preemptions: 0,
            cached_tokens: 0,
        },
        prompt_text: "1+1=".to_owned(),
        completion_text: text.to_owned(),
        reward: 0.0,
        advantage: 0.0,
        loss_mask: vec![true, true, false],
        prefill: None,
        trainer: Some([-1.0, -1.0 - gap, -9.0].map(|nats| Some(LogProb::new(nats))).into()),
        reference: None,
        trainer_fingerprint: None,
    }
}

/// A point whose step 2 has these rollouts on disk.
fn point(folder: &Path, name: &str, rollouts: &[Rollout]) -> SweepPoint {
    let run = RunFolder::create(point_folder(folder, name)).unwrap();
    run.claim("{}").unwrap();
    write_rollouts(&run.rollouts(Step::new(2)), rollouts, "embedded").unwrap();
    write_tokens(&run.tokens(Step::new(2)), rollouts).unwrap();
    let trainer = |rollout: &Rollout| rollout.trainer.clone().unwrap()[1].unwrap();
    let spike = rollouts.iter().any(|rollout| trainer(rollout).get() != -1.0);
    done(name, 2, &[row(1, Some(0.0), false, 0), row(2, Some(1.0), spike, 0)])
}

/// Place of the point, request's index, its gap, its text, and its twin's place and text.
type Shown = (usize, u32, f64, String, Option<(usize, String)>);

fn found(points: &[&[Rollout]]) -> Vec<Shown> {
    let folder = tempfile::tempdir().unwrap();
    let points: Vec<SweepPoint> = std::iter::zip('a'.., points)
        .map(|(name, rollouts)| point(folder.path(), &name.to_string(), rollouts))
        .collect();
    find(folder.path(), &Sweep { name: "x", axes: &[], points: &points })
        .into_iter()
        .map(|(at, victim)| {
            let victim = victim.unwrap();
            assert_eq!((victim.first_at, victim.worst_at), (2, 2));
            let twin = victim.twin.map(|(other, twin)| (other, twin.completion_text));
            let record = victim.record;
            (at, record.request.rollout_idx, victim.gap, record.completion_text, twin)
        })
        .collect()
}

#[test]
fn the_worst_request_with_a_twin_is_shown() {
    let clean = || rollout(0, 0.0, "right");
    let text = str::to_owned;
    let with = |change: fn(&mut Rollout)| {
        let mut other = clean();
        change(&mut other);
        other
    };
    for (others, twin) in [
        (&[clean()][..], Some((1, text("right")))),
        // It has the gap too, or is another request.
        (&[rollout(0, 2.0, "wrong")], None),
        (&[rollout(7, 0.0, "right")], None),
        (&[with(|other| other.completion.prompt[0] = TokenId::new(9))], None),
        (&[with(|other| other.completion.engine_fingerprint = Some(9))], None),
        (&[with(|other| other.completion.contract.temperature = 0.5)], None),
        (&[], None),
    ] {
        let shown = found(&[&[rollout(0, 0.5, "wrong")], others]);
        assert_eq!(shown[0], (0, 0, 0.5, text("wrong"), twin));
    }
    // The worst of those with a twin goes before a worse one without.
    let bad = [rollout(0, 0.5, "wrong"), rollout(1, f32::NAN, "worst"), rollout(2, 0.25, "bad")];
    let shown = found(&[&bad, &[rollout(2, 0.0, "good")], &[clean(), rollout(2, 0.0, "good")]]);
    assert_eq!(shown, [(0, 0, 0.5, text("wrong"), Some((2, text("right"))))]);
    let shown = found(&[&bad]);
    assert_eq!(shown, [(0, 1, f64::INFINITY, text("worst"), None)]);
    assert!(found(&[&[clean()]]).is_empty());
}

#[test]
fn records_that_are_gone_keep_nothing_else_from_being_shown() {
    let folder = tempfile::tempdir().unwrap();
    let spiked = |name| point(folder.path(), name, &[rollout(0, 0.5, "wrong")]);
    let points = [spiked("a"), spiked("b"), point(folder.path(), "c", &[rollout(0, 0.0, "right")])];
    let gone = point_folder(folder.path(), "a").join("tokens/step-00002.parquet");
    std::fs::remove_file(&gone).unwrap();
    let found = find(folder.path(), &Sweep { name: "x", axes: &[], points: &points });
    let error = found[0].1.as_ref().unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot read {}: ", gone.display())), "{error}");
    assert_eq!(found[1].1.as_ref().unwrap().twin.as_ref().unwrap().0, 2);
}

/// Of two spike steps the one is shown whose victim said something else from the start, not the one
/// with the larger gap.
#[test]
fn the_text_that_leaves_its_twin_first_tells_the_most() {
    let folder = tempfile::tempdir().unwrap();
    let save = |name: &str, steps: [(u64, f32, u32); 2]| {
        let run = RunFolder::create(point_folder(folder.path(), name)).unwrap();
        run.claim("{}").unwrap();
        let mut rows = Vec::new();
        for (step, gap, first_token) in steps {
            let mut rollout = rollout(0, gap, "text");
            rollout.completion.id = RequestId::new(step, 0, 0);
            rollout.completion.tokens[0].token = TokenId::new(first_token);
            write_rollouts(&run.rollouts(Step::new(step)), &[rollout.clone()], "embedded").unwrap();
            write_tokens(&run.tokens(Step::new(step)), &[rollout]).unwrap();
            rows.push(row(step, Some(f64::from(gap)), gap > 0.0, 0));
        }
        done(name, 3, &rows)
    };
    let points = [save("a", [(2, 9.0, 5), (3, 0.5, 4)]), save("b", [(2, 0.0, 5), (3, 0.0, 5)])];
    let found = find(folder.path(), &Sweep { name: "x", axes: &[], points: &points });
    let [(0, Ok(victim))] = &found[..] else { panic!("one victim: {found:?}") };
    assert_eq!((victim.record.request, victim.gap), (RequestId::new(3, 0, 0), 0.5));
}
