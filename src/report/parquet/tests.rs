use std::fs;

use super::table::Table;
use super::*;
use crate::base::{
    BlockId, Contract, EngineIndex, EngineStep, Generation, LogProb, LogprobsMode, Position,
    RequestId, TokenId, WeightVersion,
};
use crate::engine::{CachedBlock, Completion, FinishReason, Life, Phase, SampledToken, StateBlock};
use crate::rollout::Rollout;

/// NaN with bits of its own, which must come back.
const NAN: f32 = f32::from_bits(0x7fc0_1234);

fn sampled(token: u32, logp: f32) -> SampledToken {
    SampledToken {
        token: TokenId::new(token),
        logp: LogProb::new(logp),
        engine_step: EngineStep::new(u64::MAX),
        phase: Phase::Decode,
        scheduled_tokens: 1,
        computed_tokens: 9,
        batch_row: 2,
        batch_rows: 32,
        padding_rows: 8,
    }
}

fn rollout(idx: u32) -> Rollout {
    let state = |block, previous_owner| StateBlock {
        block: BlockId::new(block),
        generation: Generation::new(block + 1),
        previous_owner,
    };
    Rollout {
        completion: Completion {
            id: RequestId::new(12, 3, idx),
            engine: EngineIndex::new(2),
            prompt: vec![TokenId::new(u32::MAX), TokenId::new(1)],
            tokens: vec![sampled(5, -0.5), sampled(6, NAN)],
            finish_reason: FinishReason::Length,
            contract: Contract {
                logprobs_mode: LogprobsMode::ProcessedLogprobs,
                temperature: 0.6,
                ..Contract::PLAIN
            },
            weight_version: WeightVersion::new(11),
            engine_fingerprint: Some(u64::MAX),
            lives: vec![Life {
                engine_step: EngineStep::new(1),
                phase: Phase::Prefill,
                scheduled_tokens: 2,
                sampled_before: 0,
                state_blocks: vec![state(7, Some(RequestId::new(11, 0, 1))), state(8, None)],
                attn_blocks: vec![],
                cached: vec![CachedBlock {
                    block: BlockId::new(4),
                    filled_by: RequestId::new(11, 0, 1),
                    weight_version: WeightVersion::new(10),
                    tokens: 16,
                }],
                taken: vec![],
            }],
            preemptions: 1,
            cached_tokens: 16,
        },
        prompt_text: "1+1=\0<&\u{202e}".to_owned(),
        completion_text: "2\n".to_owned(),
        reward: f64::NEG_INFINITY,
        advantage: -0.25,
        loss_mask: vec![true, false],
        prefill: None,
        trainer: Some(vec![Some(LogProb::new(f32::NEG_INFINITY)), None]),
        reference: None,
        trainer_fingerprint: None,
    }
}

/// The second has no completion, and is of an engine that says nothing of its blocks.
fn rollouts() -> Vec<Rollout> {
    let mut empty = rollout(1);
    empty.completion.tokens.clear();
    empty.completion.lives.clear();
    empty.loss_mask.clear();
    empty.trainer = Some(vec![]);
    empty.trainer_fingerprint = Some(1);
    vec![rollout(0), empty, rollout(2)]
}

#[test]
fn rollouts_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step-00012.parquet");
    write_rollouts(&path, &rollouts(), "embedded").unwrap();
    let rows = read_rollouts(&path).unwrap();
    assert_eq!(rows.len(), 3);
    let expect = RolloutRow {
        request: RequestId::new(12, 3, 0),
        prompt_token_ids: vec![TokenId::new(u32::MAX), TokenId::new(1)],
        completion_token_ids: vec![TokenId::new(5), TokenId::new(6)],
        prompt_text: "1+1=\0<&\u{202e}".to_owned(),
        completion_text: "2\n".to_owned(),
        reward: f64::NEG_INFINITY,
        advantage: -0.25,
        finish_reason: "length".to_owned(),
        logprobs_mode: "processed_logprobs".to_owned(),
        temperature: 0.6,
        top_p: 1.0,
        top_k: 0,
        engine: "embedded".to_owned(),
        engine_index: EngineIndex::new(2),
        weight_version: WeightVersion::new(11),
        engine_fingerprint: Some(u64::MAX),
        trainer_fingerprint: None,
        state_blocks: vec![BlockId::new(7), BlockId::new(8)],
        state_block_generations: vec![Generation::new(8), Generation::new(9)],
        state_block_previous_owners: vec![Some(RequestId::new(11, 0, 1)), None],
        attn_blocks: vec![],
        preemptions: Some(1),
        cached_tokens: Some(16),
        cached_blocks: vec![BlockId::new(4)],
        cached_block_tokens: vec![16],
        cached_block_filled_by: vec![RequestId::new(11, 0, 1)],
        cached_block_weight_versions: vec![WeightVersion::new(10)],
    };
    assert_eq!(rows[0], expect);
    assert_eq!((rows[1].completion_token_ids.len(), rows[1].trainer_fingerprint), (0, Some(1)));
    assert_eq!(rows[2], RolloutRow { request: RequestId::new(12, 3, 2), ..expect });
}

/// No blocks are not the same as blocks that nobody tells of.
#[test]
fn what_an_engine_does_not_say_is_null() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step-00012.parquet");
    write_rollouts(&path, &rollouts(), "vllm").unwrap();
    let table = Table::open(&path).unwrap();
    let lists = |column| {
        let mut lists: Vec<Option<Vec<Option<u32>>>> = vec![None; 3];
        table.list(column, &mut lists, |row, list| *row = list).unwrap();
        lists.into_iter().map(|list| list.map(|list| list.len())).collect::<Vec<_>>()
    };
    assert_eq!(lists("completion_token_ids"), [Some(2), Some(0), Some(2)]);
    assert_eq!(lists("attn_blocks"), [Some(0), None, Some(0)]);
    for (column, len) in [
        ("state_blocks", 2),
        ("state_block_generations", 2),
        ("cached_blocks", 1),
        ("cached_block_tokens", 1),
    ] {
        assert_eq!(lists(column), [Some(len), None, Some(len)], "{column}");
    }
}

#[test]
fn tokens_read_back_with_what_is_absent_and_what_is_not_finite() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step-00012.parquet");
    write_tokens(&path, &rollouts()).unwrap();
    let rows = read_tokens(&path).unwrap();
    assert_eq!(rows.len(), 4);
    let expect = TokenRow {
        request: RequestId::new(12, 3, 0),
        position: Position::new(2),
        token_id: TokenId::new(5),
        loss_mask: true,
        logp_decode: Some(LogProb::new(-0.5)),
        logp_prefill: None,
        logp_trainer: Some(LogProb::new(f32::NEG_INFINITY)),
        logp_reference: None,
        engine_step: Some(EngineStep::new(u64::MAX)),
        phase: Some("decode".to_owned()),
        scheduled_tokens: Some(1),
        computed_tokens: Some(9),
        batch_row: Some(2),
        batch_rows: Some(32),
        padding_rows: Some(8),
    };
    assert_eq!(rows[0], expect);
    assert_eq!(rows[1].logp_decode.unwrap().get().to_bits(), NAN.to_bits());
    assert_eq!((rows[1].position, rows[1].logp_trainer), (Position::new(3), None));
    assert_eq!(rows[2], TokenRow { request: RequestId::new(12, 3, 2), ..expect });
}

#[test]
fn many_pages_read_back() {
    let mut long = rollout(0);
    long.completion.tokens = (0..70_000_u32).map(|i| sampled(i, -(i as f32))).collect();
    long.loss_mask = vec![true; 70_000];
    long.trainer = Some((0..70_000).map(|i| (i % 3 > 0).then(|| LogProb::new(0.5))).collect());
    let folder = tempfile::tempdir().unwrap();
    let (rollouts, tokens) = (folder.path().join("r.parquet"), folder.path().join("t.parquet"));
    write_rollouts(&rollouts, &[rollout(1), long.clone(), rollout(2)], "embedded").unwrap();
    write_tokens(&tokens, std::slice::from_ref(&long)).unwrap();
    let rows = read_rollouts(&rollouts).unwrap();
    assert!(rows[1].completion_token_ids.iter().copied().eq(long.completion.token_ids()));
    assert_eq!(rows[2].completion_token_ids.len(), 2);
    let rows = read_tokens(&tokens).unwrap();
    assert_eq!(rows.len(), 70_000);
    for (i, row) in rows.iter().enumerate() {
        assert_eq!(row.token_id.index(), i);
        assert_eq!(row.logp_trainer.is_some(), i % 3 > 0);
    }
}

#[test]
fn the_same_rows_give_the_same_bytes_and_no_row_is_a_file_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for (name, rollouts) in [("full", rollouts()), ("none", vec![])] {
        let bytes = [1, 2].map(|_| {
            write_rollouts(&path(name), &rollouts, "embedded").unwrap();
            let first = fs::read(path(name)).unwrap();
            write_tokens(&path(name), &rollouts).unwrap();
            [first, fs::read(path(name)).unwrap()]
        });
        assert_eq!(bytes[0], bytes[1]);
        assert!(!bytes[0][0].is_empty());
    }
    assert_eq!(read_tokens(&path("none")).unwrap(), []);
}

#[test]
fn files_that_cannot_be_read_are_named_with_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step-00001.parquet");
    let error = || read_tokens(&path).unwrap_err().to_string();
    assert!(error().starts_with(&format!("cannot read {}: No such file", path.display())));
    write_rollouts(&path, &rollouts(), "embedded").unwrap();
    assert_eq!(error(), format!("{}: column position: is missing", path.display()));
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let expect = format!("{}: cannot read as Parquet: ", path.display());
    assert!(error().starts_with(&expect), "{}", error());
}

#[test]
fn a_folder_that_is_not_there_is_named_with_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens/step-00001.parquet");
    let error = write_tokens(&path, &rollouts()).unwrap_err().to_string();
    let expect = format!("cannot write {}: No such file or directory", path.display());
    assert!(error.starts_with(&expect), "{error}");
}
