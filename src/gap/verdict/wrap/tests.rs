use crate::base::{
    BlockId, CompletionIndex, EngineIndex, EngineStep, Generation, LogProb, PromptId, RequestId,
    Step,
};
use crate::engine::{Life, Phase, StateBlock};
use crate::gap::pair::{pair, Legs};
use crate::gap::place::shift;
use crate::gap::testing::rollout;
use crate::gap::{verdict, Evidence, Finding, FindingKind};
use crate::ops::pages::StateView;
use crate::rollout::Rollout;

/// A page of 12,288 bytes: 1,536 of convolution state, 8,192 of scan state, the rest unused. Of 22
/// bits, 2^22 / 3,072 = 1,365.3, so that block 1,366 is the first to wrap, by 1,366 * 3,072 - 2^22
/// = 2,048 elements: its state lies in bytes 9,728..17,920, in the null block and in block 1. Block
/// 1,367 lies a page higher, in bytes 22,016..30,208, from where block 1's state ends into block 2.
fn view() -> StateView {
    let f32 = || serde_json::from_str("\"f32\"").unwrap();
    StateView {
        buffer: 0,
        conv_dtype: f32(),
        conv_elements: 384,
        ssm_offset: 1_536,
        ssm_dtype: f32(),
        ssm_elements: 2_048,
        ssm_stride: 3_072,
    }
}

fn judge(records: &[Rollout], state: Option<StateView>, index_bits: Option<u32>) -> Vec<Finding> {
    let pairs = pair(records, Legs::DecodeTrainer).unwrap();
    verdict(&Evidence {
        shift: shift(pairs.bad(0.0), 0.0),
        state,
        index_bits,
        ..Evidence::new(Step::new(1), records, &pairs, 0.0)
    })
}

fn kinds(findings: &[Finding]) -> Vec<FindingKind> {
    findings.iter().map(|finding| finding.kind).collect()
}

/// Four tokens in engine steps 1 to 4, the first one of a prefill row; bad from `bad` on.
fn record(index: u32, block: u32, bad: usize) -> Rollout {
    let decode = [-0.5, -0.125, -0.25, -0.0625];
    let mut trainer = decode;
    // By amounts that no shift explains.
    trainer.iter_mut().zip([4.0, 6.0, 3.0, 8.0]).skip(bad).for_each(|(logp, by)| *logp -= by);
    let mut record = rollout(index, &decode, &trainer);
    state_blocks(&mut record, &[block]);
    record
}

const GOOD: usize = 4;

fn life(record: &mut Rollout) -> &mut Life {
    record.completion.lives.last_mut().unwrap()
}

fn state_blocks(record: &mut Rollout, blocks: &[u32]) {
    let held = |&block: &u32| StateBlock {
        block: BlockId::new(block),
        generation: Generation::new(1),
        previous_owner: None,
    };
    life(record).state_blocks = blocks.iter().map(held).collect();
}

fn attn_blocks(record: &mut Rollout, blocks: &[u32]) {
    life(record).attn_blocks = blocks.iter().map(|&block| BlockId::new(block)).collect();
}

/// Everything happens this many engine steps later.
fn delay(record: &mut Rollout, by: u64) {
    let later = |step: &mut EngineStep| *step = EngineStep::new(step.get() + by);
    later(&mut life(record).engine_step);
    record.completion.tokens.iter_mut().for_each(|token| later(&mut token.engine_step));
}

/// Three good requests up to block 1,365, three bad ones from 1,366 on, and one that holds block 1.
fn overwritten() -> Vec<Rollout> {
    let blocks = [(1_361, GOOD), (1_365, GOOD), (1_363, GOOD), (1_440, 1), (1_366, 1), (1_380, 1)];
    let mut records: Vec<Rollout> =
        (0..).zip(blocks).map(|(index, (block, bad))| record(index, block, bad)).collect();
    records.push(record(6, 1, 2));
    records
}

#[test]
fn the_width_and_who_was_overwritten_are_named() {
    let findings = judge(&overwritten(), Some(view()), None);
    assert_eq!(kinds(&findings), [FindingKind::AddressWrap]);
    let found = &findings[0];
    assert_eq!(
        found.message,
        "block 1366 is the first whose state address wraps, at 2^22 / 3072: the state index is 22 \
         bits wide; 3 requests with a state block there or above are bad, 3 below are good (up to \
         block 1365); block 1 of s1.p0.r6 was overwritten by block 1366 of s1.p0.r4 in engine step \
         1"
    );
    assert_eq!(found.requests, [3, 4, 5, 6].map(|index| RequestId::new(1, 0, index)));
    assert_eq!(found.blocks, [1, 1_366].map(BlockId::new));
    assert_eq!(found.index_bits, Some(22));
    assert_eq!(found.first_bad_position, Some(CompletionIndex::new(1)));
}

#[test]
fn an_address_wrap_wants_every_piece_of_its_evidence() {
    let check = |why: &str, spoil: fn(&mut Vec<Rollout>)| {
        let mut records = overwritten();
        spoil(&mut records);
        let findings = judge(&records, Some(view()), None);
        assert_eq!(kinds(&findings), [FindingKind::Unexplained], "{why}");
    };
    check("a high block is good", |records| records[4] = record(4, 1_366, GOOD));
    check("two good ones", |records| drop(records.remove(0)));
    check("two bad ones above", |records| drop(records.remove(5)));
    check("one of three good ones was never decoded", |records| {
        records[0] = rollout(0, &[-0.5], &[-0.5]);
        state_blocks(&mut records[0], &[1_361]);
    });
    check("a prefill row's own token is bad", |records| records[4] = record(4, 1_366, 0));
    check("a low block that nothing touches", |records| state_blocks(&mut records[6], &[3]));
    check("only the unused end of its page is touched", |records| {
        state_blocks(&mut records[4], &[1_367]);
    });
    check("it began after the store", |records| delay(&mut records[6], 1));
    check("it was bad before the store", |records| delay(&mut records[4], 3));
    check("only its own store touches it", |records| {
        records.remove(6);
        records[4] = record(4, 1_366, 0);
        state_blocks(&mut records[4], &[1_366, 1]);
    });
    check("a low block's life is not on record", |records| {
        records[6].completion.lives.clear();
    });
    check("a life before the first on record", |records| life(&mut records[6]).sampled_before = 1);
    check("a high block's life is not on record", |records| records[4].completion.lives.clear());
    // What is known of blocks alone speaks against it.
    assert_eq!(kinds(&judge(&overwritten(), None, None)), [FindingKind::Unexplained]);
}

/// With its records changed the step is still one of a wrapped address, and its message also says
/// this.
fn still_wraps(change: fn(&mut Vec<Rollout>), also: &str) {
    let mut records = overwritten();
    change(&mut records);
    let findings = judge(&records, Some(view()), None);
    assert_eq!(kinds(&findings), [FindingKind::AddressWrap], "{also}");
    assert!(findings[0].message.contains(also), "{}", findings[0].message);
    assert_eq!(findings[0].index_bits, Some(22));
}

#[test]
fn what_cannot_show_a_wrap_does_not_speak_against_it() {
    let silent = "1 there or above sampled nothing that could show it";
    still_wraps(
        |records| {
            records.push(rollout(7, &[-0.5], &[-0.5]));
            state_blocks(&mut records[7], &[1_400]);
        },
        silent,
    );
    still_wraps(
        |records| {
            records.push(rollout(7, &[-0.5, -0.001], &[-0.5, -0.001]));
            state_blocks(&mut records[7], &[1_400]);
        },
        silent,
    );
    // A prompt of one token has no prefill row: every row keeps to the whole address.
    still_wraps(
        |records| {
            records.push(record(7, 1_400, GOOD));
            life(&mut records[7]).phase = Phase::Decode;
            records[7].completion.tokens[0].phase = Phase::Decode;
        },
        silent,
    );
}

#[test]
fn an_overwritten_block_is_named_with_the_store_that_hit_it() {
    // A second chunk reads back where the first one was not stored.
    still_wraps(
        |records| {
            records[4] = record(4, 1_366, 0);
            delay(&mut records[4], 1);
            life(&mut records[4]).engine_step = EngineStep::new(1);
        },
        "overwritten by block 1366 of s1.p0.r4 in engine steps 1 to 2",
    );
    // The last of several stores before the bad token.
    still_wraps(
        |records| {
            records.push(record(7, 1_366, 1));
            delay(&mut records[7], 2);
        },
        "overwritten by block 1366 of s1.p0.r7 in engine step 3",
    );
    still_wraps(
        |records| {
            state_blocks(&mut records[6], &[500]);
            attn_blocks(&mut records[6], &[501, 1]);
        },
        "block 1 of s1.p0.r6 was overwritten by block 1366",
    );
    // Keys and values fill their page.
    still_wraps(
        |records| {
            state_blocks(&mut records[4], &[1_367]);
            state_blocks(&mut records[6], &[500]);
            attn_blocks(&mut records[6], &[1]);
        },
        "block 1 of s1.p0.r6 was overwritten by block 1367",
    );
    still_wraps(
        |records| {
            state_blocks(&mut records[4], &[1_367]);
            state_blocks(&mut records[6], &[2]);
        },
        "block 2 of s1.p0.r6 was overwritten by block 1367",
    );
    still_wraps(
        |records| (7..16).for_each(|index| records.push(record(index, 1, 2))),
        "s1.p0.r13 was overwritten by block 1366 of s1.p0.r4 in engine step 1; and 2 more were",
    );
}

/// High blocks for two tokens, then low ones: bad in the first life alone.
#[test]
fn a_resumed_request_is_judged_life_by_life() {
    let resumed = |bad: [f32; 4], blocks: [u32; 2]| {
        let decode = [-0.5, -0.125, -0.25, -0.0625];
        let mut trainer = decode;
        trainer.iter_mut().zip(bad).for_each(|(logp, by)| *logp -= by);
        let mut record = rollout(7, &decode, &trainer);
        record.completion.tokens[2].phase = Phase::Prefill;
        let mut second = life(&mut record).clone();
        (second.engine_step, second.sampled_before) = (EngineStep::new(3), 2);
        state_blocks(&mut record, &[blocks[0]]);
        record.completion.lives.push(second);
        state_blocks(&mut record, &[blocks[1]]);
        record
    };
    for (bad, blocks, expected) in [
        ([0.0, 6.0, 0.0, 0.0], [1_400, 900], FindingKind::AddressWrap),
        ([0.0, 0.0, 0.0, 6.0], [900, 1_400], FindingKind::AddressWrap),
        ([0.0, 6.0, 0.0, 8.0], [1_400, 1_401], FindingKind::AddressWrap),
        ([0.0, 6.0, 0.0, 8.0], [1_400, 900], FindingKind::Unexplained),
        ([0.0, 6.0, 0.0, 0.0], [900, 1_400], FindingKind::Unexplained),
        ([0.0, 6.0, 0.0, 0.0], [1_400, 1_401], FindingKind::Unexplained),
        ([0.0, 6.0, 3.0, 8.0], [1_400, 1_401], FindingKind::Unexplained),
    ] {
        let mut records = overwritten();
        records.push(resumed(bad, blocks));
        let findings = judge(&records, Some(view()), None);
        assert_eq!(kinds(&findings), [expected], "{bad:?} {blocks:?}");
    }
}

#[test]
fn both_bugs_in_one_step_are_both_named() {
    let mut records = overwritten();
    let mut stale = record(7, 500, 0);
    life(&mut stale).phase = Phase::Decode;
    life(&mut stale).state_blocks[0].previous_owner = Some(RequestId::new(0, 1, 2));
    records.push(stale);
    for state in [Some(view()), None] {
        if state.is_none() {
            records.remove(6);
        }
        let findings = judge(&records, state, None);
        assert_eq!(kinds(&findings), [FindingKind::StaleState, FindingKind::AddressWrap]);
        assert_eq!(findings[0].requests, [RequestId::new(1, 0, 7)]);
        assert!(!findings[1].requests.contains(&RequestId::new(1, 0, 7)));
    }
}

#[test]
fn widths_that_fit_as_well_are_named_until_one_is_known() {
    let mut records = overwritten();
    for (record, block) in records.iter_mut().zip([100, 341, 200]) {
        state_blocks(record, &[block]);
    }
    records.remove(6);
    let findings = judge(&records, Some(view()), None);
    assert_eq!(kinds(&findings), [FindingKind::AddressWrap]);
    assert_eq!(findings[0].blocks, [342, 683, 1_366].map(BlockId::new));
    assert_eq!(findings[0].index_bits, None);
    let message = &findings[0].message;
    assert!(message.contains("22 bits wide, or 20 (block 342, which nothing here rules out), or"));
    let findings = judge(&records, Some(view()), Some(22));
    assert_eq!(findings[0].blocks, [BlockId::new(1_366)]);
    assert_eq!(findings[0].index_bits, Some(22));
}

#[test]
fn where_all_are_bad_only_an_earlier_step_tells_the_width() {
    let all_bad = &overwritten()[3..];
    // Of one token, which its prefill row sampled.
    let mut silent = rollout(0, &[-0.5], &[-0.5]);
    state_blocks(&mut silent, &[1_366]);
    for (records, known, expected) in [
        (all_bad, None, FindingKind::Unexplained),
        (all_bad, Some(22), FindingKind::AddressWrap),
        (&all_bad[..1], Some(22), FindingKind::AddressWrap),
        (&[silent, overwritten()[6].clone()], Some(22), FindingKind::AddressWrap),
        (&all_bad[3..], Some(22), FindingKind::Unexplained),
        (all_bad, Some(23), FindingKind::Unexplained),
        (&overwritten(), Some(21), FindingKind::Unexplained),
    ] {
        let findings = judge(records, Some(view()), known);
        assert_eq!(kinds(&findings), [expected], "{} {known:?}", records.len());
    }
}

/// The records of another step like this one, of engine 1 and with numbers of their own.
fn on_another_engine(records: Vec<Rollout>) -> impl Iterator<Item = Rollout> {
    records.into_iter().map(|mut record| {
        record.completion.engine = EngineIndex::new(1);
        record.completion.id.prompt_id = PromptId::new(1);
        record
    })
}

#[test]
fn each_engine_is_told_of_by_itself() {
    let first = overwritten();
    let both: Vec<Rollout> =
        first.iter().cloned().chain(on_another_engine(overwritten())).collect();
    let findings = judge(&both, Some(view()), None);
    assert_eq!(kinds(&findings), [FindingKind::AddressWrap; 2]);
    let alone = &judge(&first, Some(view()), None)[0];
    assert_eq!((alone.engine, alone.message.contains("engine 0")), (None, false));
    for (found, engine) in findings.iter().zip(0..) {
        assert_eq!(found.engine, Some(EngineIndex::new(engine)));
        let id = |index| RequestId::new(1, engine, index);
        assert_eq!(found.requests, [3, 4, 5, 6].map(id));
        let by = format!("block 1 of {} was overwritten by block 1366 of {}", id(6), id(4));
        let starts = format!("engine {engine}: block 1366 is the first whose state address wraps");
        assert!(found.message.starts_with(&starts), "{}", found.message);
        assert!(found.message.contains(&by), "{}", found.message);
    }
}

#[test]
fn a_store_of_another_engine_overwrites_nothing() {
    let mut records = overwritten();
    let victim = records.remove(6);
    records.extend(on_another_engine(vec![victim]));
    let findings = judge(&records, Some(view()), None);
    assert_eq!(kinds(&findings), [FindingKind::AddressWrap, FindingKind::Unexplained]);
    assert_eq!(findings[1].engine, Some(EngineIndex::new(1)));
    assert_eq!(findings[1].requests, [RequestId::new(1, 1, 6)]);
}

/// Where all of an engine are bad, another one's records show the width.
#[test]
fn one_engine_shows_the_width_for_all() {
    for all_bad_first in [false, true] {
        let (told, all_bad) = (overwritten(), overwritten().split_off(3));
        let records: Vec<Rollout> = match all_bad_first {
            false => told.into_iter().chain(on_another_engine(all_bad)).collect(),
            true => all_bad.into_iter().chain(on_another_engine(told)).collect(),
        };
        let findings = judge(&records, Some(view()), None);
        assert_eq!(kinds(&findings), [FindingKind::AddressWrap; 2], "{all_bad_first}");
        let engines = findings.iter().map(|found| found.engine.map(EngineIndex::get));
        assert_eq!(engines.collect::<Vec<_>>(), [Some(0), Some(1)]);
        assert!(findings.iter().all(|found| found.index_bits == Some(22)));
    }
}

/// An engine whose prefill disagrees with the trainer has no wrapped state to thank for it.
#[test]
fn only_decoded_tokens_can_show_a_wrap() {
    let mut records = overwritten();
    for record in &mut records {
        record.prefill = Some(record.decode());
        record.reference = Some(vec![Some(LogProb::new(-1.0)); 4]);
    }
    for state in [Some(view()), None] {
        for legs in [Legs::DecodeTrainer, Legs::PrefillTrainer] {
            let records = if state.is_some() { &records[..] } else { &records[..6] };
            let pairs = pair(records, legs).unwrap();
            let (step, floor, index_bits) = (Step::new(1), 0.0, None);
            let evidence = Evidence {
                shift: shift(pairs.bad(floor), floor),
                state,
                index_bits,
                ..Evidence::new(step, records, &pairs, floor)
            };
            let named = kinds(&verdict(&evidence)) == [FindingKind::AddressWrap];
            assert_eq!(named, legs == Legs::DecodeTrainer, "{}", legs.name());
        }
    }
}
