//! What a decode row finds where a wrapped state should be, shown by the numbers themselves.

use gapscope::base::{RequestId, TokenId};
use gapscope::engine::{layout, Completion, GenerationRequest, Replay};
use gapscope::model::{AttentionShape, Every, HfConfig, MambaShape, Plan, Preset};

use super::case::{first_gap, gaps, pair};
use super::common;

/// Two Mamba groups and an attention group in pages of 8192 bytes; with 14 bits block 8 is the
/// first to wrap.
fn three_layers() -> HfConfig {
    let tiny = Preset::TinyJamba.config();
    HfConfig {
        hidden_size: 32,
        num_hidden_layers: 3,
        attention: tiny.attention.map(|shape| AttentionShape {
            layers: Every { period: 3, offset: 1 },
            kv_heads: 4,
            head_dim: 8,
            ..shape
        }),
        mamba: tiny.mamba.map(|shape| MambaShape { d_inner: 64, ..shape }),
        ..tiny
    }
}

/// One request at a time, five a lap: blocks 1 2 | 3, 4 5 | 6, 7 8 | 9, 10 11 | 12, 13 14 | 15.
/// All have one prompt on the first and the third lap, and one each on the second.
#[test]
fn the_first_lap_reads_zeros_and_a_later_one_what_was_left_there() {
    let hf = three_layers();
    let config = common::config(
        "name = \"laps\"\nmodel.preset = \"tiny-jamba\"\nengine.max_num_seqs = 1\n\
         engine.max_model_len = 32\nengine.num_gpu_blocks_override = 16\n\
         engine.state_index_bits = 14\nrollout.temperature = 0.0\n",
    );
    let (mut engine, trainer) = pair(&hf, &config, 5);
    let plan = Plan::new(hf);
    let num = plan.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
    let layout = layout(&plan, &num, &config.engine).expect("a layout");
    let mut replay = Replay::new(layout, 16, &config.engine);
    let request = |lap: u64, rollout: u32| GenerationRequest {
        id: RequestId::new(lap, 0, rollout),
        prompt: (0..5)
            .map(|i| TokenId::new(if lap == 2 { 40 * rollout + i } else { 7 + i }))
            .collect(),
        max_new_tokens: 4,
        ignore_eos: true,
        eos_token_ids: Vec::new(),
    };
    let mut lap = |lap| {
        let requests: Vec<_> = (0..5).map(|rollout| request(lap, rollout)).collect();
        let done = engine.generate(requests.clone()).expect("requests that fit");
        let firsts = gaps(&trainer, &config, &done).into_iter().map(|gaps| first_gap(&gaps));
        assert_eq!(firsts.collect::<Vec<_>>(), [None, None, Some(1), Some(1), Some(1)]);
        let foreseen = replay.generate(requests).expect("requests that fit");
        let found = foreseen.iter().flat_map(|one| one.misreads.iter().map(|one| one.found));
        let found: Vec<_> = found.map(|found| found.map(|one| one.request)).collect();
        let logps = |done: &Completion| -> Vec<u32> {
            done.tokens.iter().map(|one| one.logp.get().to_bits()).collect()
        };
        (found, done.iter().map(logps).collect::<Vec<_>>())
    };
    let (found, first) = lap(1);
    assert_eq!(found, [None; 5], "both groups of two requests, one of a third");
    // Zeros are the same zeros for everyone who loses both groups' states.
    assert_eq!(first[3], first[4]);
    assert_ne!(first[2], first[3]);
    lap(2);
    let (found, third) = lap(3);
    let left_by = |rollout| Some(RequestId::new(2, 0, rollout));
    assert_eq!(found, [2, 3, 3, 4, 4].map(left_by));
    // What was left there is another's, and each time someone else's.
    for victim in 2..5 {
        assert_eq!(first[victim][0], third[victim][0], "the prefill's token is right");
        assert_ne!(first[victim][1], third[victim][1]);
    }
    assert_ne!(third[3][1], third[4][1]);
}
