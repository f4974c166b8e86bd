use super::*;
use crate::base::{CompletionIndex, EngineStep, Generation, LogProb};
use crate::engine::{Life, Phase, StateBlock};
use crate::gap::pair::{pair, Legs};
use crate::gap::place::shift;
use crate::gap::testing::rollout;

fn judge(records: &[Rollout], floor: f64, tensors: &[TensorFingerprint]) -> Vec<Finding> {
    let pairs = pair(records, Legs::DecodeTrainer).unwrap();
    verdict(&Evidence {
        shift: shift(pairs.bad(floor), floor),
        tensors,
        ..Evidence::new(Step::new(1), records, &pairs, floor)
    })
}

/// The kinds found, and the one finding if there is just one.
fn kinds(findings: &[Finding]) -> Vec<FindingKind> {
    findings.iter().map(|finding| finding.kind).collect()
}

fn clean(index: u32) -> Rollout {
    rollout(index, &[-0.5, -1.5, -0.25, -2.0], &[-0.5, -1.5, -0.25, -2.0])
}

/// Off from the second token on, by amounts that no shift explains.
fn broken(index: u32) -> Rollout {
    rollout(index, &[-0.5, -0.125, -0.25, -0.0625], &[-0.5, -6.5, -3.25, -8.0])
}

#[test]
fn a_clean_step_has_no_finding_and_every_spike_has_one() {
    assert_eq!(judge(&[], 0.0, &[]), []);
    assert_eq!(judge(&[clean(0), clean(1)], 0.0, &[]), []);
    let mut unscored = clean(0);
    unscored.trainer = None;
    assert_eq!(judge(&[unscored], 0.0, &[]), []);

    let one_ulp = f32::from_bits((-0.5_f32).to_bits() + 1);
    for (trainer, floor) in [(one_ulp, 0.0), (f32::NAN, 10.0), (-20.0, 10.0)] {
        let records = [clean(0), rollout(1, &[-0.5], &[trainer])];
        let findings = judge(&records, floor, &[]);
        assert_eq!(kinds(&findings), [FindingKind::Unexplained], "{trainer}");
        assert_eq!(findings[0].requests, [records[1].completion.id]);
        assert_eq!(findings[0].first_bad_position, Some(CompletionIndex::new(0)));
        assert_eq!(findings[0].blocks, [BlockId::new(2)]);
    }
    assert_eq!(judge(&[rollout(1, &[-0.5], &[one_ulp])], 1e-6, &[]), []);
}

#[test]
fn an_unexplained_gap_says_what_the_three_legs_say() {
    let mut record = broken(0);
    record.prefill = record.trainer.clone();
    let findings = judge(&[record, clean(1)], 0.0, &[]);
    assert_eq!(kinds(&findings), [FindingKind::Unexplained]);
    let message = &findings[0].message;
    assert!(message.starts_with("1 of 2 requests have a gap over the floor of 0.0"), "{message}");
    assert!(message.contains("worst token is 103 at completion index 3 of request s1.p0.r0"));
    assert!(message.contains("decode -0.0625, trainer -8"), "{message}");
    assert!(message.contains("three-way check of 1: rollout engine disagrees with itself"));
}

#[test]
fn different_weights_are_named_with_both_fingerprints() {
    let mut records = [broken(0), broken(1), clean(2)];
    for record in &mut records {
        record.completion.engine_fingerprint = Some(0xabc);
    }
    let tensor = |name: &str, engine| TensorFingerprint { name: name.into(), engine, trainer: 1 };
    let tensors = [tensor("embed_tokens.weight", 1), tensor("lm_head.weight", 2)];
    let findings = judge(&records, 0.0, &tensors);
    assert_eq!(kinds(&findings), [FindingKind::WeightsNotSynced]);
    assert_eq!(findings[0].requests_total, 2);
    let message = &findings[0].message;
    for part in ["0000000000000abc", "0000000000000007", "1 of 2 tensors differ: lm_head.weight"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!message.contains("embed_tokens"));

    // Unknown is not different.
    for record in &mut records {
        record.trainer_fingerprint = None;
    }
    assert_eq!(kinds(&judge(&records, 0.0, &tensors)), [FindingKind::Unexplained]);
}

/// The trainer's values stand one position to the left of the rollout's (modelscope/ms-swift#8427),
/// and to the right.
#[test]
fn weights_of_one_engine_are_told_of_it() {
    let stale = |index, engine| {
        let mut record = broken(index);
        record.completion.engine_fingerprint = Some(0xabc);
        record.completion.engine = EngineIndex::new(engine);
        record
    };
    let findings = judge(&[stale(0, 1), stale(1, 1), clean(2)], 0.0, &[]);
    assert_eq!(kinds(&findings), [FindingKind::WeightsNotSynced]);
    assert_eq!(findings[0].engine, Some(EngineIndex::new(1)));
    let starts = "engine 1: the engine sampled with weights 0000000000000abc";
    assert!(findings[0].message.starts_with(starts), "{}", findings[0].message);

    let findings = judge(&[stale(0, 1), stale(1, 0), clean(2)], 0.0, &[]);
    assert_eq!(kinds(&findings), [FindingKind::WeightsNotSynced]);
    assert_eq!(findings[0].engine, None, "it is both engines'");
    assert!(findings[0].message.starts_with("the engine sampled"), "{}", findings[0].message);
}

#[test]
fn k17_a_shift_is_named_with_its_direction() {
    let (rollout_side, trainer_side) = ([-0.1, -2.0, -0.3, -1.5], [-2.0, -0.3, -1.5, -0.7]);
    for (decode, trainer, lag, side) in [
        (rollout_side, trainer_side, "decode[i+1] against trainer[i]", "left"),
        (trainer_side, rollout_side, "decode[i-1] against trainer[i]", "right"),
    ] {
        let findings = judge(&[rollout(0, &decode, &trainer)], 0.0, &[]);
        assert_eq!(kinds(&findings), [FindingKind::MaskOrShift]);
        let message = &findings[0].message;
        assert!(message.starts_with(&format!("off by one: {lag} differs by 0e0")), "{message}");
        assert!(message.contains("over 3 pairs"), "{message}");
        assert!(message.ends_with(&format!("moved to the {side}")), "{message}");
    }
}

#[test]
fn a_gap_at_an_edge_is_no_shift() {
    // Moving the legs drops the one bad token, which explains nothing.
    for trainer in [[-0.5, -0.5, -0.5, -9.0], [-9.0, -0.5, -0.5, -0.5]] {
        let findings = judge(&[rollout(0, &[-0.5; 4], &trainer)], 0.0, &[]);
        assert_eq!(kinds(&findings), [FindingKind::Unexplained], "{trainer:?}");
    }
}

fn with_stale_first_chunk(index: u32) -> Rollout {
    let mut record = broken(index);
    let (engine_step, phase) = (EngineStep::new(1), Phase::Decode);
    let held = StateBlock {
        block: BlockId::new(9),
        generation: Generation::new(2),
        previous_owner: Some(RequestId::new(0, 4, 2)),
    };
    record.completion.lives = vec![Life {
        engine_step,
        phase,
        scheduled_tokens: 1,
        sampled_before: 0,
        state_blocks: vec![held],
        attn_blocks: Vec::new(),
        cached: Vec::new(),
        taken: Vec::new(),
    }];
    record
}

#[test]
fn a_first_chunk_that_read_a_used_block_is_named() {
    let findings = judge(&[clean(0), with_stale_first_chunk(1)], 0.0, &[]);
    assert_eq!(kinds(&findings), [FindingKind::StaleState]);
    assert_eq!(
        findings[0].message,
        "request s1.p0.r1: its first chunk, 1 scheduled with 0 computed tokens, ran as a decode \
         row in engine step 1 and read block 9 left by s0.p4.r2"
    );
    assert_eq!(findings[0].blocks, [BlockId::new(9)]);
}

/// The second one, resumed after a preemption, is off the most.
#[test]
fn the_worst_stale_request_is_told_and_the_others_are_counted() {
    let mut worst = with_stale_first_chunk(1);
    worst.trainer.as_mut().unwrap()[3] = Some(LogProb::new(-9.0));
    worst.completion.tokens[1].phase = Phase::Prefill;
    let life = &mut worst.completion.lives[0];
    let first = Life { phase: Phase::Prefill, ..life.clone() };
    (life.engine_step, life.sampled_before) = (EngineStep::new(7), 1);
    life.state_blocks.push(StateBlock { block: BlockId::new(4), ..life.state_blocks[0] });
    let virgin = StateBlock { previous_owner: None, ..life.state_blocks[0] };
    life.state_blocks.push(StateBlock { block: BlockId::new(5), ..virgin });
    worst.completion.lives.insert(0, first);
    let mut records = vec![with_stale_first_chunk(0), worst];
    for (others, ending) in [(1, "1 other request"), (2, "2 other requests")] {
        let findings = judge(&records, 0.0, &[]);
        assert_eq!(kinds(&findings), [FindingKind::StaleState]);
        assert_eq!(
            findings[0].message,
            format!(
                "request s1.p0.r1, resumed after preemption: its first chunk, 1 scheduled with 0 \
                 computed tokens, ran as a decode row in engine step 7 and read block 9 left by \
                 s0.p4.r2, block 4 left by s0.p4.r2; {ending} began the same way"
            )
        );
        assert_eq!(findings[0].requests_total, others + 1);
        assert_eq!(findings[0].blocks, [4, 9].map(BlockId::new));
        records.push(with_stale_first_chunk(2));
    }
}

/// What a stale life sampled stays bad when a later life is clean.
#[test]
fn an_earlier_life_can_be_the_stale_one() {
    let mut record = with_stale_first_chunk(0);
    record.trainer.as_mut().unwrap()[3] = Some(record.completion.tokens[3].logp);
    let first = record.completion.lives[0].clone();
    let second = Life { phase: Phase::Prefill, sampled_before: 3, ..first };
    record.completion.lives.push(second);
    assert_eq!(kinds(&judge(&[record.clone()], 0.0, &[])), [FindingKind::StaleState]);
    // Were the later life bad too, something else would be at work.
    record.completion.lives[1].sampled_before = 2;
    assert_eq!(kinds(&judge(&[record], 0.0, &[])), [FindingKind::Unexplained]);
}

#[test]
fn stale_state_wants_every_piece_of_its_evidence() {
    let check = |spoil: fn(&mut Rollout)| {
        let mut record = with_stale_first_chunk(0);
        spoil(&mut record);
        assert_eq!(kinds(&judge(&[record], 0.0, &[])), [FindingKind::Unexplained]);
    };
    check(|record| record.completion.lives.clear());
    check(|record| record.completion.lives[0].phase = Phase::Prefill);
    check(|record| record.completion.lives[0].state_blocks[0].previous_owner = None);
    // The gap is older than the life that the chunk began.
    check(|record| record.completion.lives[0].sampled_before = 4);
    // The blocks on record are those of a later life.
    check(|record| {
        let mut life = record.completion.lives[0].clone();
        life.state_blocks[0].generation = Generation::new(3);
        record.completion.lives.push(Life { phase: Phase::Prefill, ..life });
    });
}

/// Requests that hold these state blocks, in this order.
fn holding(good: &[u32], bad: &[u32]) -> Vec<Rollout> {
    let blocks = good.iter().map(|&block| (block, true)).chain(bad.iter().map(|&b| (b, false)));
    let one = |(index, (block, is_good))| {
        let mut record = if is_good { clean(index) } else { broken(index) };
        record.completion.lives[0].state_blocks[0].block = BlockId::new(block);
        record
    };
    (0..).zip(blocks).map(one).collect()
}

#[test]
fn one_block_id_that_parts_good_from_bad_is_named() {
    for (good, bad, parted) in [
        (&[2, 3, 1][..], &[6, 5, 7][..], true),
        (&[2, 4, 1], &[6, 5, 7], true),
        (&[2, 3], &[6, 5, 7], false),
        (&[2, 3, 1], &[6, 5], false),
        (&[2, 5, 1], &[6, 5, 7], false),
        (&[2, 9, 1], &[6, 5, 7], false),
        (&[2, 3, 1], &[6, 5, 7, 1], false),
    ] {
        let findings = judge(&holding(good, bad), 0.0, &[]);
        let expected = if parted { FindingKind::AddressWrap } else { FindingKind::Unexplained };
        assert_eq!(kinds(&findings), [expected], "{good:?} {bad:?}");
        if parted {
            assert_eq!(findings[0].blocks, [BlockId::new(5)]);
            assert_eq!(findings[0].requests_total, 3);
            let some = format!("some id in {}..=5 on", good[1] + 1);
            assert!(findings[0].message.contains(&some), "{}", findings[0].message);
        }
    }
}

#[test]
fn the_first_bad_position_is_the_lowest_of_all_requests() {
    let bad_at = |index, at: usize| {
        let mut record = clean(index);
        record.trainer.as_mut().unwrap()[at] = Some(LogProb::new(-9.0));
        record
    };
    let findings = judge(&[bad_at(0, 2), bad_at(1, 1), bad_at(2, 3)], 0.0, &[]);
    assert_eq!(kinds(&findings), [FindingKind::Unexplained]);
    assert_eq!(findings[0].first_bad_position, Some(CompletionIndex::new(1)));
}

#[test]
fn explained_requests_leave_the_rest_unexplained() {
    let findings = judge(&[with_stale_first_chunk(0), broken(1), clean(2)], 0.0, &[]);
    assert_eq!(kinds(&findings), [FindingKind::StaleState, FindingKind::Unexplained]);
    let requests: Vec<_> = findings.iter().map(|finding| finding.requests.clone()).collect();
    assert_eq!(requests, [[RequestId::new(1, 0, 0)], [RequestId::new(1, 0, 1)]]);
}

#[test]
fn long_lists_are_cut_and_counted() {
    let records: Vec<Rollout> = (0..100).map(broken).collect();
    let findings = judge(&records, 0.0, &[]);
    assert_eq!(kinds(&findings), [FindingKind::Unexplained]);
    assert_eq!(findings[0].requests.len(), Finding::LISTED_MAX);
    assert_eq!(findings[0].requests_total, 100);
    let text = serde_json::to_string(&findings).unwrap();
    assert_eq!(serde_json::from_str::<Vec<Finding>>(&text).unwrap(), findings);
}

#[test]
fn rules_speak_only_of_legs_that_can_show_them() {
    let mut record = with_stale_first_chunk(0);
    record.completion.engine_fingerprint = Some(1);
    record.reference = Some(vec![Some(LogProb::new(-1.0)); 4]);
    let records = [record];
    let pairs = pair(&records, Legs::TrainerReference).unwrap();
    let evidence = Evidence {
        shift: shift(pairs.bad(0.0), 0.0),
        ..Evidence::new(Step::new(1), &records, &pairs, 0.0)
    };
    assert_eq!(kinds(&verdict(&evidence)), [FindingKind::Unexplained]);
}
