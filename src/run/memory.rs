//! What a run needs of memory, before any of it is taken: one plan for engine and trainer, which
//! share a device.
//!
//! What grows with rows is counted at its fullest moment, with sequences as long as the experiment
//! allows: an upper bound, which is told and refuses nothing. The rest is exact. What a driver
//! takes for itself is not counted.

use anyhow::{ensure, Result};

use super::device::engines_on_one;
use super::score::floats_a_token;
use crate::config::{Config, Device, Sleep, TaskConfig, Update};
use crate::engine;
use crate::model::Plan;
use crate::ops::array::{CPU_LOGIT_ROWS, GPU_LOGIT_ROWS};

/// When a part is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Always,
    Generating,
    /// While scoring or updating: never together with generating.
    Learning,
}

/// Arrays that come and go together.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    what: &'static str,
    when: When,
    /// An upper bound where `grows`.
    bytes: u64,
    /// With the rows that are computed together.
    grows: bool,
}

/// The parts of a run, where engine and trainer compute and on the host beside a device.
#[derive(Clone, Debug)]
pub(super) struct MemoryPlan {
    parts: Vec<Part>,
    /// Of all engines on the device; `None` where its memory will decide it.
    pool: Option<u64>,
    /// Engines on the device.
    engines: u64,
    drops_pool: bool,
    /// Where the host does not compute: what passes through it, not all at once.
    on_host: Option<Vec<(&'static str, u64)>>,
}

impl MemoryPlan {
    /// With pools of so many bytes each; `None` is what the configuration gives, where it does.
    /// Where every engine has a device of its own, this is the first one's, which is the
    /// trainer's too.
    pub(super) fn of(plan: &Plan, config: &Config, pool: Option<u64>) -> Self {
        let (engine, trainer) = (&config.engine, &config.trainer);
        let params = plan.num_parameters();
        let on_cpu = engine.device == Device::Cpu;
        let engines = u64::from(engines_on_one(engine));
        // On a GPU they share the weights and take turns.
        let at_once = if on_cpu { engines } else { 1 };
        let width = Widths::of(plan, config).compute;
        let trains = trainer.update == Update::Adamw;
        let mut parts = Vec::new();
        let mut add = |what, when, bytes| parts.push(Part { what, when, bytes, grows: false });
        if trains {
            add("master weights", When::Always, 4 * params);
            add("optimizer", When::Always, 8 * params);
        }
        match (trains, on_cpu) {
            // Servers hold theirs themselves.
            _ if engine.servers.is_some() && trains => {}
            _ if engine.servers.is_some() => {
                add("trainer weights", When::Always, width * params);
            }
            (false, false) => add("weights, shared", When::Always, width * params),
            (false, true) => {
                add("trainer weights", When::Always, width * params);
                // Packed, which is a copy.
                add("engine weights", When::Always, at_once * width * params);
            }
            (true, _) => add("engine weights", When::Always, at_once * width * params),
        }
        if trains && trainer.kl_coef > 0.0 {
            add("reference weights", When::Always, width * params);
        }
        let budget = u64::from(engine.max_num_batched_tokens);
        if engine.servers.is_none() {
            parts.push(Part {
                what: "engine's activations",
                when: When::Generating,
                bytes: product(&[at_once, width, floats_a_token(plan), budget]),
                grows: true,
            });
        }
        parts.extend(Learning::of(plan, config).parts(plan));
        let checkpoints = config.checkpoint.every < config.steps || trainer.warm_start.steps > 0;
        let mut on_host = vec![("on the host, weights as read", 4 * params)];
        if trains && checkpoints {
            on_host.push(("on the host, a checkpoint", 12 * params));
        }
        Self {
            parts,
            pool: match &engine.servers {
                // Theirs is their own.
                Some(_) => Some(0),
                None => pool
                    .or_else(|| configured_pool(plan, config))
                    .map(|each| each.saturating_mul(engines)),
            },
            engines,
            drops_pool: engine.sleep == Sleep::DropPool,
            on_host: (!on_cpu).then_some(on_host),
        }
    }

    /// Every part and its bytes, the fullest moment last.
    pub(super) fn lines(&self) -> Vec<(String, u64)> {
        let pools = match self.engines {
            1 => "block pool".to_owned(),
            engines => format!("{engines} block pools, an equal part of the memory each"),
        };
        let pool = self.pool.map(|bytes| (pools, bytes));
        let mut lines: Vec<_> = pool.into_iter().collect();
        let told = |part: &Part| {
            let what = if part.grows { format!("{}, up to", part.what) } else { part.what.into() };
            (what, part.bytes)
        };
        lines.extend(self.parts.iter().map(told));
        lines.push(("at the fullest moment".to_owned(), self.fullest(self.pool, true)));
        let on_host = self.on_host.iter().flatten();
        lines.extend(on_host.map(|(what, bytes)| ((*what).to_owned(), *bytes)));
        lines
    }

    /// With what grows, or without.
    fn fullest(&self, pool: Option<u64>, grown: bool) -> u64 {
        let pool = pool.unwrap_or(0);
        let sum = |when| {
            let is_of = |part: &&Part| part.when == when && (grown || !part.grows);
            let parts = self.parts.iter().filter(is_of);
            parts.map(|part| part.bytes).fold(0, u64::saturating_add)
        };
        let generating = sum(When::Generating).saturating_add(pool);
        let learning = sum(When::Learning).saturating_add(if self.drops_pool { 0 } else { pool });
        sum(When::Always).saturating_add(generating.max(learning))
    }

    /// # Errors
    /// A device with less than `free` bytes, or a machine with less memory available. One that does
    /// not say is believed.
    pub(super) fn check(&self, free: Option<u64>) -> Result<()> {
        let Some(on_host) = &self.on_host else {
            // The host takes a page of the pool when it is first written to.
            return enough("this machine", self.fullest(None, false), available_bytes());
        };
        enough("the device", self.fullest(self.pool, false), free)?;
        let most = on_host.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        enough("this machine", most, available_bytes())
    }
}

fn enough(whose: &str, needed: u64, available: Option<u64>) -> Result<()> {
    ensure!(
        available.is_none_or(|available| needed <= available),
        "the run needs {needed} bytes of {whose}'s memory before a row is computed, and {} are \
         available: --dry-run lists what takes how much; choose a smaller model, trainer.update = \
         \"none\", a smaller pool or engine.sleep = \"drop_pool\"",
        available.unwrap_or(0)
    );
    Ok(())
}

/// Bytes of an element, which a CPU widens to f32 in every array.
#[derive(Clone, Copy)]
struct Widths {
    /// Weights and activations.
    compute: u64,
    /// Rows between layers.
    residual: u64,
}

impl Widths {
    fn of(plan: &Plan, config: &Config) -> Self {
        let num = plan.numerics_of(config);
        match config.engine.device {
            Device::Cpu => Self { compute: 4, residual: 4 },
            Device::Cuda => {
                Self { compute: num.dtype.bytes(), residual: num.residual_dtype.bytes() }
            }
        }
    }
}

/// What scoring and updates work on.
struct Learning {
    trains: bool,
    on_cpu: bool,
    widths: Widths,
    /// Chunks at once.
    chunks: u64,
    /// Of one chunk.
    chunk_tokens: u64,
    /// Scored together.
    step_tokens: u64,
    /// Learned from together.
    update_tokens: u64,
}

impl Learning {
    fn of(plan: &Plan, config: &Config) -> Self {
        let (rollout, trainer) = (&config.rollout, &config.trainer);
        let longest = u64::from(config.engine.max_model_len);
        let sequence = match &config.task {
            TaskConfig::Arithmetic { prompt_tokens: Some(prompt), .. } => {
                longest.min(u64::from(*prompt) + u64::from(rollout.max_new_tokens))
            }
            _ => longest,
        };
        let sequences =
            product(&[rollout.prompts_per_step.into(), rollout.rollouts_per_prompt.into()]);
        let of_update = sequences.div_ceil(u64::from(trainer.updates_per_step));
        let warm = if trainer.warm_start.steps > 0 { trainer.warm_start.batch } else { 0 };
        let step_tokens = product(&[sequences, sequence]);
        let chunk_tokens = u64::from(trainer.max_tokens_per_chunk).max(sequence);
        let on_cpu = config.engine.device == Device::Cpu;
        let at_once = if on_cpu { rayon::current_num_threads() as u64 } else { 1 };
        Self {
            trains: trainer.update == Update::Adamw,
            on_cpu,
            widths: Widths::of(plan, config),
            chunks: at_once.min(step_tokens.div_ceil(chunk_tokens)),
            chunk_tokens: chunk_tokens.min(step_tokens),
            step_tokens,
            update_tokens: product(&[of_update.max(warm.into()), sequence]),
        }
    }

    fn parts(&self, plan: &Plan) -> Vec<Part> {
        let Self { trains, on_cpu, chunks, chunk_tokens, step_tokens, update_tokens, .. } = *self;
        let Widths { compute, residual } = self.widths;
        let (h, v) = (plan.config.hidden_size as u64, plan.config.vocab_size as u64);
        let mut parts = Vec::new();
        let mut add =
            |what, bytes, grows| parts.push(Part { what, when: When::Learning, bytes, grows });
        let root = plan.units[0].len() as u64;
        let largest = plan.units[1..].iter().map(|unit| unit.len() as u64).max().unwrap_or(0);
        // A gathered unit is packed on a CPU, for a backward both ways.
        let copies = u64::from(trains) + u64::from(on_cpu) * if trains { 2 } else { 1 };
        add("a layer and the root", copies * compute * (root + largest), false);
        // Each row has beside it what the layer adds to it; in an update, its f32 gradient.
        let scored = product(&[residual + compute, step_tokens]);
        let updated = product(&[residual + 4, update_tokens]);
        let rows = if trains { scored.max(updated) } else { scored };
        add("rows between layers", product(&[h, rows]), true);
        let width = compute + if trains { 4 } else { 0 };
        let of_layer = product(&[floats_a_token(plan), chunk_tokens, chunks]);
        add("a layer's activations", product(&[width, of_layer]), true);
        let logit_rows = if on_cpu { CPU_LOGIT_ROWS } else { GPU_LOGIT_ROWS } as u64;
        let stages = if trains { 2 } else { 1 };
        add("logits", product(&[4, stages, v, logit_rows, chunks]), true);
        if trains {
            let layers = plan.layers.len() as u64;
            add("layers' inputs, kept", product(&[residual, h, layers, update_tokens]), true);
            add("gradient", 4 * plan.num_parameters(), false);
            add("chunks' gradients", product(&[4, root.max(largest), chunks.min(8)]), false);
        }
        parts
    }
}

/// As the configuration alone gives it; a pool that cannot be is refused where it is made.
fn configured_pool(plan: &Plan, config: &Config) -> Option<u64> {
    if config.engine.is_measured() {
        return None;
    }
    let num = plan.numerics_of(config);
    let layout = engine::layout(plan, &num, &config.engine).ok()?;
    let memory = engine::block_memory(plan, &num, &config.engine, engines_on_one(&config.engine));
    Some(product(&[layout.block_bytes(), layout.num_blocks(&memory).ok()?.into()]))
}

fn product(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |product, factor| product.saturating_mul(*factor))
}

/// Linux's own estimate of what can be taken without swapping.
pub(super) fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use crate::model::Preset;

    fn config_of(sets: &[&str]) -> Config {
        let text = "name = \"x\"\nmodel.preset = \"tiny-jamba\"\n";
        let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
        config::parse(text, "test.toml", &sets).expect("a valid config")
    }

    fn plan_of(preset: Preset, sets: &[&str]) -> MemoryPlan {
        MemoryPlan::of(&Plan::new(preset.config()), &config_of(sets), Some(0))
    }

    fn part(plan: &MemoryPlan, what: &str) -> Option<u64> {
        plan.parts.iter().find_map(|part| (part.what == what).then_some(part.bytes))
    }

    /// Bytes a parameter of what is there all the time.
    fn always(sets: &[&str]) -> u64 {
        let plan = plan_of(Preset::TinyJamba, sets);
        let parts = plan.parts.iter().filter(|part| part.when == When::Always);
        let bytes: u64 = parts.map(|part| part.bytes).sum();
        assert_eq!(bytes % 241_964, 0);
        bytes / 241_964
    }

    #[test]
    fn bytes_a_parameter() {
        let (none, kl) = ("trainer.update=none", "trainer.kl_coef=0.1");
        let (cuda, bf16) = ("engine.device=cuda", "model.dtype=bf16");
        // Master, two moments, and the engine's.
        assert_eq!(always(&[]), 4 + 8 + 4);
        assert_eq!(always(&[bf16]), 4 + 8 + 4);
        assert_eq!(always(&[kl]), 4 + 8 + 4 + 4);
        assert_eq!(always(&[none]), 4 + 4);
        assert_eq!(always(&[cuda, bf16]), 4 + 8 + 2);
        assert_eq!(always(&[cuda, bf16, kl]), 4 + 8 + 2 + 2);
        // One copy for both.
        assert_eq!(always(&[cuda, bf16, none]), 2);
        assert_eq!(always(&[cuda, none]), 4);
    }

    #[test]
    fn engines_on_one_device_have_a_pool_each() {
        let (three, plan) = (["engine.replicas=3"], Plan::new(Preset::TinyJamba.config()));
        let pool = |sets: &[&str], each| MemoryPlan::of(&plan, &config_of(sets), each).pool;
        assert_eq!(always(&three), 4 + 8 + 3 * 4);
        assert_eq!(pool(&three, Some(1000)), Some(3000));
        // Not as much again for each: the same memory for all of them.
        let [one, all] = [&[][..], &three].map(|sets| pool(sets, None).expect("configured"));
        assert!(all <= one && one - all < one / 50, "{all} of {one}");
    }

    /// 64 prompts x 8 rollouts x (128 + 128) tokens of a model of 3 billion parameters.
    #[test]
    fn what_a_step_keeps_for_its_backward() {
        let sets = [
            "engine.device=cuda",
            "model.dtype=bf16",
            "rollout.prompts_per_step=64",
            "rollout.rollouts_per_prompt=8",
            "engine.max_model_len=256",
        ];
        let plan = plan_of(Preset::Jamba3bShape, &sets);
        let rows = 2_560 * 64 * 8 * 256;
        assert_eq!(part(&plan, "layers' inputs, kept"), Some(28 * 2 * rows));
        assert_eq!(part(&plan, "rows between layers"), Some((2 + 4) * rows));
        let none = plan_of(Preset::Jamba3bShape, &[&sets[..], &["trainer.update=none"]].concat());
        assert_eq!(part(&none, "layers' inputs, kept"), None);
        assert_eq!(part(&none, "rows between layers"), Some((2 + 2) * rows));
        assert_eq!(part(&none, "gradient"), None);
    }

    #[test]
    fn a_dropped_pool_and_learning_are_never_there_together() {
        let fullest =
            |sets: &[&str], pool| plan_of(Preset::TinyJamba, sets).fullest(Some(pool), true);
        let huge = 1 << 40;
        let dropped = ["engine.sleep=drop_pool"];
        assert_eq!(fullest(&[], huge) - fullest(&[], 0), huge);
        assert!(fullest(&dropped, huge) < fullest(&[], huge));
        assert_eq!(fullest(&dropped, 0), fullest(&[], 0));
    }

    #[test]
    fn too_little_memory_is_refused_with_both_numbers() {
        let plan = plan_of(Preset::TinyJamba, &[]);
        plan.check(None).expect("some megabytes are there");
        enough("the device", 8, Some(8)).expect("it just fits");
        enough("the device", 8, None).expect("a device that does not say");
        let message = enough("the device", 9, Some(8)).expect_err("one byte short").to_string();
        let expected =
            "the run needs 9 bytes of the device's memory before a row is computed, and \
            8 are available: ";
        assert!(message.starts_with(expected), "{message}");
    }
}
