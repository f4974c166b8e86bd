//! Random engines that wrap, begin rows as decodes, preempt, or do none of it.

use std::fmt::Write;

use gapscope::base::{LogProb, RequestId, Stream, TokenId};
use gapscope::config::Config;
use gapscope::engine::{
    layout, Completion, Engine, Forecast, GenerationRequest, Layout, Replay, SampledToken,
};
use gapscope::model::{
    AttentionShape, Every, FeedForwardShape, HfConfig, MambaShape, Plan, Preset,
};
use gapscope::trainer::{Sequence, SequenceScores, Trainer};

use super::common::{config, device, random_weights};

const MODEL_LEN: u64 = 64;
const PROMPT_MAX: u64 = 40;
const VOCAB: u64 = 64;

/// What a case is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Prefills are told by their prompts, come in two chunks at most, and nothing is preempted:
    /// what happens can be read from the completions alone.
    Plain,
    /// The older ways of telling prefills from decodes, or every row a prefill.
    Splits,
    /// A pool too small for all that may run, or a budget too small for all that run.
    Pressed,
}

/// One engine, its trainer's answer, and the replay beside it.
pub struct Outcome {
    pub kind: Kind,
    /// Printed where a case fails.
    pub text: String,
    pub hf: HfConfig,
    pub layout: Layout,
    pub bits: u32,
    pub completions: Vec<Completion>,
    pub forecasts: Vec<Forecast>,
    /// By completion and sampled token, whether the trainer's log-probability has other bits.
    pub gaps: Vec<Vec<bool>>,
    pub preemptions: u64,
}

pub fn pick<T: Copy>(stream: &mut Stream, items: &[T]) -> T {
    items[stream.integer(0, items.len() as u64 - 1) as usize]
}

/// Sizes from a list, so that pages differ in padding, groups and buffers.
fn shape(stream: &mut Stream, kind: Kind) -> HfConfig {
    let period = stream.integer(2, 4) as usize;
    let mut heads = pick(stream, &[2, 4]);
    let mut head_dim = pick(stream, &[6, 8, 8]);
    let num_hidden_layers = stream.integer(2, 5) as usize;
    let mut kv_heads = pick(stream, &[1, 2]);
    let offset = stream.integer(0, period as u64 - 1) as usize;
    let mut d_state = pick(stream, &[7, 8, 16]);
    let d_conv = pick(stream, &[2, 3, 4]);
    let mut expand = pick(stream, &[1, 2]);
    if kind == Kind::Pressed {
        // So large a state that the 8th block wraps at 14 bits, and so many heads that a request
        // needs a second attention block at 16 or 32 tokens.
        (heads, head_dim, kv_heads, d_state, expand) = (4, 8, 4, 16, 2);
    }
    let tiny = Preset::TinyJamba.config();
    let hidden_size = heads * head_dim;
    let layers = Every { period, offset };
    let d_inner = expand * hidden_size;
    HfConfig {
        vocab_size: VOCAB as usize,
        hidden_size,
        num_hidden_layers,
        attention: tiny.attention.map(|shape| AttentionShape {
            layers,
            heads,
            kv_heads,
            head_dim,
            ..shape
        }),
        mamba: tiny.mamba.map(|shape| MambaShape { d_inner, d_state, d_conv, dt_rank: 2, ..shape }),
        feed_forward: Some(FeedForwardShape { intermediate_size: 16, experts: None }),
        ..tiny
    }
}

/// The experiment file without its pool, which depends on the layout.
fn limits(stream: &mut Stream, kind: Kind, bits: u32, prompt: Option<u64>) -> (String, u64) {
    let running = stream.integer(2, 8);
    let (chunked, mut budget) = match kind {
        Kind::Plain => (stream.integer(0, 3) > 0, PROMPT_MAX + running + stream.integer(0, 40)),
        Kind::Splits => (true, stream.integer(10, 80)),
        Kind::Pressed => (stream.integer(0, 3) > 0, stream.integer(1, 60)),
    };
    if let (Kind::Splits, Some(prompt)) = (kind, prompt) {
        budget = prompt * stream.integer(1, 3) + 1;
    }
    budget = budget.max(if chunked { running } else { MODEL_LEN });
    let split = match kind {
        Kind::Plain => "is_prefilling",
        Kind::Splits => pick(stream, &["computed_tokens", "scheduled_tokens", "scheduled_tokens"]),
        Kind::Pressed => {
            pick(stream, &["is_prefilling", "is_prefilling", "computed_tokens", "scheduled_tokens"])
        }
    };
    let force = kind != Kind::Plain && stream.integer(0, 9) == 0;
    let (state, free_list) =
        (pick(stream, &["float32", "bfloat16"]), pick(stream, &["fifo", "fifo", "fifo", "lifo"]));
    let mut text = String::from("name = \"wrapped\"\nmodel.preset = \"tiny-jamba\"\n");
    for (key, value) in [
        ("max_num_batched_tokens", budget.to_string()),
        ("max_num_seqs", running.to_string()),
        ("max_model_len", MODEL_LEN.to_string()),
        ("state_index_bits", bits.to_string()),
        ("mamba_ssm_cache_dtype", format!("{state:?}")),
        ("enable_chunked_prefill", chunked.to_string()),
        ("batch_split", format!("{split:?}")),
        ("force_prefill", force.to_string()),
        ("free_list", format!("{free_list:?}")),
    ] {
        writeln!(text, "engine.{key} = {value}").expect("a String takes any text");
    }
    (text, running)
}

/// From a little under the first block that wraps to several wraps over it; small where no block
/// does.
fn num_blocks(stream: &mut Stream, kind: Kind, layout: &Layout, bits: u32, running: u64) -> u64 {
    let first = layout.first_wrapped_block(bits).map_or(u64::MAX, |first| first.get().into());
    let blocks = match first {
        0..=250 => first * stream.integer(80, 250) / 100,
        _ => stream.integer(20, 150),
    };
    let one = layout.blocks_for(layout.max_model_len);
    let enough = if kind == Kind::Plain { running * one } else { one };
    let pressed = one + stream.integer(0, 2 * one);
    let presses = kind == Kind::Pressed && stream.integer(0, 2) > 0;
    1 + if presses { pressed } else { blocks.max(enough) }
}

/// The requests of one turn of the loop: rollouts of a prompt have it in common.
fn requests(
    stream: &mut Stream,
    kind: Kind,
    step: u64,
    prompt: Option<u64>,
) -> Vec<GenerationRequest> {
    let most = if kind == Kind::Pressed { MODEL_LEN - PROMPT_MAX } else { 12 };
    let (prompts, each) = (stream.integer(2, 4), stream.integer(2, 8));
    let mut requests = Vec::new();
    for prompt_id in 0..prompts as u32 {
        let len = prompt.unwrap_or_else(|| stream.integer(1, PROMPT_MAX));
        let prompt: Vec<TokenId> =
            (0..len).map(|_| TokenId::new(stream.integer(3, VOCAB - 1) as u32)).collect();
        for rollout in 0..each as u32 {
            requests.push(GenerationRequest {
                id: RequestId::new(step, prompt_id, rollout),
                prompt: prompt.clone(),
                max_new_tokens: stream.integer(1, most) as u32,
                ignore_eos: true,
                eos_token_ids: Vec::new(),
            });
        }
    }
    requests
}

/// An engine with seeded random weights, and the trainer that they come from.
pub fn pair(hf: &HfConfig, config: &Config, seed: u64) -> (Engine, Trainer) {
    let plan = Plan::new(hf.clone());
    let master = random_weights(&plan, seed);
    let num = plan.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
    let trainer = Trainer::new(&device(), plan.clone(), num, config.trainer.clone(), &master);
    let trainer = trainer.expect("few threads");
    let engine =
        Engine::new(&device(), plan, num, config.engine.clone(), config.contract(), config.seed);
    let mut engine = engine.expect("an engine");
    let weights = trainer.hand_over().expect("weights");
    engine.load(weights.version, weights.units).expect("newer weights");
    (engine, trainer)
}

/// By completion and sampled token, whether the trainer's log-probability has other bits.
pub fn gaps(trainer: &Trainer, config: &Config, done: &[Completion]) -> Vec<Vec<bool>> {
    let sequence = |done: &Completion| Sequence {
        tokens: done.prompt.iter().copied().chain(done.token_ids()).collect(),
        prompt_len: done.prompt.len(),
    };
    let sequences: Vec<Sequence> = done.iter().map(sequence).collect();
    let scores = trainer.score(&sequences, &config.contract()).expect("scores");
    let differ = |(sampled, scored): (&SampledToken, &LogProb)| {
        sampled.logp.get().to_bits() != scored.get().to_bits()
    };
    let of = |(done, scores): (&Completion, &SequenceScores)| {
        done.tokens.iter().zip(&scores.contract).map(differ).collect()
    };
    done.iter().zip(&scores).map(of).collect()
}

/// The sampled token with the first gap.
pub fn first_gap(gaps: &[bool]) -> Option<u32> {
    gaps.iter().position(|gap| *gap).map(|place| place as u32)
}

pub fn run(seed: u64, kind: Kind) -> Outcome {
    let mut stream = Stream::new(seed, "wrapped", 0);
    let hf = shape(&mut stream, kind);
    let most = pick(&mut stream, &[14, 14, 15, 24]);
    let bits = stream.integer(14, most) as u32;
    // Prompts of one length, or of any.
    let prompt = (stream.integer(0, 1) == 0).then(|| stream.integer(2, PROMPT_MAX));
    let (text, running) = limits(&mut stream, kind, bits, prompt);
    let plan = Plan::new(hf.clone());
    let sizes = config(&text);
    let num = plan.numerics(sizes.model.dtype, sizes.engine.mamba_ssm_cache_dtype);
    let layout = layout(&plan, &num, &sizes.engine).expect("a layout");
    let num_blocks = num_blocks(&mut stream, kind, &layout, bits, running);
    let text = format!("{text}engine.num_gpu_blocks_override = {num_blocks}\n");
    let config = config(&text);

    let (mut engine, trainer) = pair(&hf, &config, seed);
    let mut replay = Replay::new(layout.clone(), num_blocks as u32, &config.engine);
    let (mut completions, mut forecasts) = (Vec::new(), Vec::new());
    for step in 1..=stream.integer(2, 5) {
        let requests = requests(&mut stream, kind, step, prompt);
        forecasts.extend(replay.generate(requests.clone()).expect("requests that fit"));
        completions.extend(engine.generate(requests).expect("requests that fit"));
    }
    assert_eq!(replay.statistics(), engine.statistics(), "{seed}: {text}");
    let gaps = gaps(&trainer, &config, &completions);
    let preemptions = engine.statistics().preemptions;
    let text = format!("case {seed}\n{text}{hf:?}");
    Outcome { kind, text, hf, layout, bits, completions, forecasts, gaps, preemptions }
}
