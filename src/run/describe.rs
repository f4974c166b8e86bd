//! What a model and an experiment come to, before anything runs.

use std::fmt::Write;

use anyhow::Result;

use super::memory::MemoryPlan;
use super::predict::{foretold_spikes, predict, Outline, NOT_OF_SERVERS, NOT_WITH_A_CACHE};
use super::{device, parts};
use crate::config::{Arithmetic, Config, Dtype, ServersConfig};
use crate::engine::{self, Layout, Placement};
use crate::model::{ExpertsShape, FeedForwardKind, MixerKind, Numerics, Plan};

/// Index widths that the table of first wrapped blocks shows.
const WIDTHS: [u32; 5] = [16, 22, 24, 31, 32];

/// `model inspect`: layer plan, pages, stride, and where each index width would wrap.
///
/// # Errors
/// A folder without a readable `config.json`.
pub fn describe_model(config: &Config) -> Result<String> {
    let plan = parts::plan(config)?;
    let num = plan.numerics_of(config);
    let layout = engine::layout(&plan, &num, &config.engine)?;
    let mut text = String::new();
    write_layers(&mut text, &plan, &num)?;
    write_layout(&mut text, &layout)?;
    Ok(text)
}

fn write_layers(text: &mut String, plan: &Plan, num: &Numerics) -> Result<()> {
    let (params, bytes) = (plan.num_parameters(), plan.num_parameters() * num.dtype.bytes());
    let dtype = match num.dtype {
        Dtype::F32 => "f32",
        Dtype::Bf16 => "bf16",
    };
    writeln!(text, "parameters        {params} ({bytes} bytes in {dtype})")?;
    writeln!(text, "vocabulary        {}", plan.config.vocab_size)?;
    writeln!(text, "hidden            {}", plan.config.hidden_size)?;
    let of = |kind| plan.layers.iter().filter(|layer| layer.mixer == kind).count();
    let (mamba, attention) = (of(MixerKind::Mamba), of(MixerKind::Attention));
    writeln!(
        text,
        "layers            {} ({mamba} mamba, {attention} attention)",
        plan.layers.len()
    )?;
    for (index, kind) in plan.layers.iter().enumerate() {
        let mixer = if kind.mixer == MixerKind::Mamba { "mamba" } else { "attention" };
        let experts = plan.config.feed_forward.as_ref().and_then(|shape| shape.experts);
        match (kind.feed_forward, experts) {
            (FeedForwardKind::Experts, Some(ExpertsShape { count, per_token, .. })) => {
                writeln!(text, "  {index:<4}{mixer}, {per_token} of {count} experts")?;
            }
            _ => writeln!(text, "  {index:<4}{mixer}")?,
        }
    }
    Ok(())
}

fn write_layout(text: &mut String, layout: &Layout) -> Result<()> {
    let groups = layout.groups.len();
    let (mamba, attention) = (layout.num_mamba_groups, groups - layout.num_mamba_groups);
    writeln!(text, "groups            {groups} ({mamba} mamba, {attention} attention)")?;
    writeln!(text, "raw buffers       {}", layout.num_buffers)?;
    writeln!(text, "page              {} bytes", layout.page_bytes)?;
    if let Some(tokens) = layout.block_tokens {
        writeln!(text, "attention block   {tokens} tokens")?;
    }
    if let Some(tokens) = layout.prefix_block_tokens {
        writeln!(text, "cached block      {tokens} tokens, in every group")?;
    }
    let Some(stride) = layout.state_stride else { return Ok(()) };
    writeln!(text, "state stride      {stride} elements")?;
    writeln!(text, "first wrapped block, by engine.state_index_bits:")?;
    for bits in WIDTHS {
        let first = layout.first_wrapped_block(bits);
        let first = first.map_or("none".to_owned(), |block| block.to_string());
        writeln!(text, "  {bits:<4}{first}")?;
    }
    Ok(())
}

/// `run --dry-run`: the resolved knobs and what they come to.
///
/// # Errors
/// Whatever `run` would refuse of the model's config, the task and the pool. Neither weights nor
/// the run's folder are touched.
pub fn dry_run(config: &Config) -> Result<String> {
    if let Some(servers) = &config.engine.servers {
        return describe_servers(config, servers);
    }
    let outline = Outline::of(config)?;
    let Outline { plan, num, layout, num_blocks, .. } = &outline;
    let mut text = config.to_json();
    writeln!(text)?;
    write_layers(&mut text, plan, num)?;
    write_layout(&mut text, layout)?;
    if config.engine.replicas > 1 {
        let where_they_are = match device::placement(&config.engine) {
            Placement::SharedCpu => "side by side on the CPU, an equal part of device_memory each",
            Placement::SharedGpu => "in turns on one GPU, an equal part of its memory each",
            Placement::OneEach => "on a GPU each",
        };
        writeln!(text, "engines           {}, {where_they_are}", config.engine.replicas)?;
    }
    writeln!(text, "blocks            {num_blocks}{} (block 0 is the null block)", each(config))?;
    if config.engine.enable_prefix_caching {
        writeln!(text, "spike steps       {NOT_WITH_A_CACHE}")?;
        write_memory(&mut text, config, plan, layout, *num_blocks)?;
        return Ok(text);
    }
    let found = predict(config, &outline, None)?;
    let bits = config.engine.state_index_bits;
    let first = found.first_wrapped_block.map_or("none".to_owned(), |block| block.to_string());
    writeln!(text, "first wrapped     {first} (at {bits} bits, in this pool)")?;
    writeln!(
        text,
        "blocks a step     {:.1}{} (by replay of scheduler and pool)",
        found.blocks_per_step,
        most(config)
    )?;
    let (laps, most) = (found.laps, most(config));
    writeln!(text, "laps              {laps:.2} over {} steps{most}", config.steps)?;
    writeln!(text, "spike steps       {}", foretold_spikes(&found))?;
    let floor = match num.arithmetic {
        Arithmetic::Invariant => "exactly 0 (invariant numerics)",
        Arithmetic::Fast => "measured before the first step is compared (fast numerics)",
    };
    writeln!(text, "floor             {floor}")?;
    write_memory(&mut text, config, plan, layout, *num_blocks)?;
    Ok(text)
}

/// Of a number that every engine has.
fn each(config: &Config) -> &'static str {
    if config.engine.replicas > 1 {
        " in each pool"
    } else {
        ""
    }
}

/// Of a number that engines have their own of.
fn most(config: &Config) -> &'static str {
    if config.engine.replicas > 1 {
        ", of the engine that takes most"
    } else {
        ""
    }
}

/// Where completions come from servers, whose pools are their own business.
fn describe_servers(config: &Config, servers: &ServersConfig) -> Result<String> {
    let plan = parts::plan(config)?;
    let mut text = config.to_json();
    writeln!(text)?;
    write_layers(&mut text, &plan, &plan.numerics_of(config))?;
    writeln!(text, "servers           {}", servers.url.join(", "))?;
    if let Some(launch) = &servers.launch {
        writeln!(text, "started by        {}", launch.argv.join(" "))?;
    }
    writeln!(text, "spike steps       {NOT_OF_SERVERS}")?;
    let floor = match config.check.floor {
        Some(nats) => format!("{nats:?} nats (check.floor)"),
        None => "measured before the first step is compared".to_owned(),
    };
    writeln!(text, "floor             {floor}")?;
    for (part, bytes) in MemoryPlan::of(&plan, config, None).lines() {
        writeln!(text, "memory            {part} {bytes} bytes")?;
    }
    Ok(text)
}

fn write_memory(
    text: &mut String,
    config: &Config,
    plan: &Plan,
    layout: &Layout,
    num_blocks: u32,
) -> Result<()> {
    let pool = layout.block_bytes() * u64::from(num_blocks);
    let mut label = "memory";
    for (part, bytes) in MemoryPlan::of(plan, config, Some(pool)).lines() {
        writeln!(text, "{label:<18}{part} {bytes} bytes")?;
        label = "";
    }
    Ok(())
}
