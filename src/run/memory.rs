//! What a run needs of memory, before any of it is taken: one plan for engine and trainer, which
//! share a device, or its first where the trainer's ranks have several.
//!
//! What grows with rows is counted at its fullest moment, with sequences as long as the experiment
//! allows: an upper bound, which is told and refuses nothing. The rest is exact. What a driver
//! takes for itself is not counted.

mod learning;

use anyhow::{ensure, Result};

use self::learning::Learning;
use super::device;
use super::score::floats_a_token;
use crate::config::{Config, Device, Sleep, Update};
use crate::engine;
use crate::model::{Plan, UnitSpec};
use crate::ops::shards::shard_len;

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
    /// On each GPU but the first, where ranks or engines have one each, and whether an engine does.
    others: Option<(Vec<Part>, bool)>,
    /// Where the host does not compute: what passes through it, not all at once.
    on_host: Option<Vec<(&'static str, u64)>>,
}

impl MemoryPlan {
    /// With pools of so many bytes each; `None` is what the configuration gives, where it does.
    /// Where every engine has a device of its own, this is the first one's, which is the
    /// trainer's too.
    pub(super) fn of(plan: &Plan, config: &Config, pool: Option<u64>) -> Self {
        let sharing = device::ranks_on_one(config);
        Self::sharing(plan, config, pool, sharing)
    }

    /// Where so many of the trainer's ranks share the engine's device: one, or all of them.
    fn sharing(plan: &Plan, config: &Config, pool: Option<u64>, here: u64) -> Self {
        let (engine, trainer) = (&config.engine, &config.trainer);
        let params = plan.num_parameters();
        let on_cpu = engine.device == Device::Cpu;
        let engines = u64::from(device::engines_on_one(engine));
        let trains = trainer.update == Update::Adamw;
        let checkpoints = config.checkpoint.every < config.steps || trainer.warm_start.steps > 0;
        let mut on_host = vec![("on the host, weights as read", 4 * params)];
        if trains && checkpoints {
            let reference =
                if trainer.kl_coef > 0.0 { Widths::of(plan, config).compute } else { 0 };
            on_host.push(("on the host, a checkpoint", (12 + reference) * params));
        }
        let mut parts = of_trainer(plan, config, here);
        parts.extend(of_engines(plan, config, engines));
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
            others: others(plan, config, here),
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
        if let Some((parts, engines)) = &self.others {
            let pool = self.pool.filter(|_| *engines).unwrap_or(0);
            let bytes = fullest(parts, pool, self.drops_pool, true);
            lines.push(("on each other GPU".to_owned(), bytes));
        }
        let on_host = self.on_host.iter().flatten();
        lines.extend(on_host.map(|(what, bytes)| ((*what).to_owned(), *bytes)));
        lines
    }

    fn fullest(&self, pool: Option<u64>, grown: bool) -> u64 {
        fullest(&self.parts, pool.unwrap_or(0), self.drops_pool, grown)
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

/// The most bytes at one time, with what grows, or without.
fn fullest(parts: &[Part], pool: u64, drops_pool: bool, grown: bool) -> u64 {
    let sum = |when| {
        let is_of = |part: &&Part| part.when == when && (grown || !part.grows);
        parts.iter().filter(is_of).map(|part| part.bytes).fold(0, u64::saturating_add)
    };
    let generating = sum(When::Generating).saturating_add(pool);
    let learning = sum(When::Learning).saturating_add(if drops_pool { 0 } else { pool });
    sum(When::Always).saturating_add(generating.max(learning))
}

/// What each GPU but the first holds, and whether a pool is among it, where there are several.
fn others(plan: &Plan, config: &Config, here: u64) -> Option<(Vec<Part>, bool)> {
    let (ranks, engine) = (here < u64::from(config.trainer.ranks), &config.engine);
    let engines = engine.replicas > 1 && device::engines_on_one(engine) == 1;
    let mut parts = if ranks { of_trainer(plan, config, 1) } else { Vec::new() };
    if engines {
        parts.extend(of_engines(plan, config, 1));
    }
    (ranks || engines).then_some((parts, engines))
}

/// Of so many ranks, together.
fn of_trainer(plan: &Plan, config: &Config, here: u64) -> Vec<Part> {
    let trainer = &config.trainer;
    let ranks = trainer.ranks as usize;
    let width = Widths::of(plan, config).compute;
    let shard = |unit: &UnitSpec| shard_len(unit.len(), ranks) as u64;
    let elements = product(&[here, plan.units.iter().map(shard).sum()]);
    let mut parts = Vec::new();
    let mut add = |what, bytes| {
        parts.push(Part { what, when: When::Always, bytes, grows: false });
    };
    let trains = trainer.update == Update::Adamw;
    if trains {
        add("master weights", 4 * elements);
        add("optimizer", 8 * elements);
    } else if !shares_weights(config) {
        add("trainer weights", width * elements);
    }
    if trains && trainer.kl_coef > 0.0 {
        add("reference weights", width * elements);
    }
    parts.extend(Learning::of(plan, config, here).parts(plan));
    parts
}

/// Of so many engines, together.
fn of_engines(plan: &Plan, config: &Config, engines: u64) -> Vec<Part> {
    // Servers hold theirs themselves.
    if config.engine.servers.is_some() {
        return Vec::new();
    }
    // On a GPU they share the weights and take turns.
    let at_once = if config.engine.device == Device::Cpu { engines } else { 1 };
    let width = Widths::of(plan, config).compute;
    let what = if shares_weights(config) { "weights, shared" } else { "engine weights" };
    let bytes = at_once * width * plan.num_parameters();
    let budget = u64::from(config.engine.max_num_batched_tokens);
    let activations = Part {
        what: "engine's activations",
        when: When::Generating,
        bytes: product(&[at_once, width, floats_a_token(plan), budget]),
        grows: true,
    };
    vec![Part { what, when: When::Always, bytes, grows: false }, activations]
}

/// Whether engine and trainer have one copy: a CPU packs the engine's, and what is sharded over
/// ranks or changes is gathered into another.
fn shares_weights(config: &Config) -> bool {
    let (engine, trainer) = (&config.engine, &config.trainer);
    let on_cpu = engine.device == Device::Cpu;
    let is_whole = trainer.update == Update::None && trainer.ranks == 1;
    engine.servers.is_none() && !on_cpu && is_whole
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

/// As the configuration alone gives it; a pool that cannot be is refused where it is made.
fn configured_pool(plan: &Plan, config: &Config) -> Option<u64> {
    let engine = &config.engine;
    if engine.is_measured() {
        return None;
    }
    let num = plan.numerics_of(config);
    let layout = engine::layout(plan, &num, engine).ok()?;
    let memory = engine::block_memory(plan, &num, engine, device::engines_on_one(engine));
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
        shared_by(1, preset, sets)
    }

    fn shared_by(here: u32, preset: Preset, sets: &[&str]) -> MemoryPlan {
        let plan = Plan::new(preset.config());
        MemoryPlan::sharing(&plan, &config_of(sets), Some(0), here.into())
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

    /// A rank a GPU has half of what stays and of what a step keeps; the engine is on the first.
    /// Two on one GPU have all of it there, and each its own gathered units.
    #[test]
    fn ranks_have_their_shards_and_their_share_of_a_step() {
        let sets = ["engine.device=cuda", "model.dtype=bf16", "rollout.prompts_per_step=16"];
        let two = [&sets[..], &["trainer.ranks=2"]].concat();
        let one = plan_of(Preset::Jamba3bShape, &sets);
        let apart = shared_by(1, Preset::Jamba3bShape, &two);
        let together = shared_by(2, Preset::Jamba3bShape, &two);
        for what in ["master weights", "optimizer", "layers' inputs, kept", "rows between layers"] {
            let whole = part(&one, what).expect(what);
            assert_eq!(part(&together, what), Some(whole), "{what}");
            assert_eq!(part(&apart, what), Some(whole / 2), "{what}");
        }
        assert_eq!(part(&apart, "engine weights"), part(&one, "engine weights"));
        assert!(one.others.is_none() && together.others.is_none());
        let (others, _) = apart.others.as_ref().expect("a GPU");
        let others: u64 = others.iter().map(|part| part.bytes).sum();
        let engine = part(&apart, "engine weights").expect("an engine");
        let here = apart.fullest(Some(0), true);
        assert_eq!(here, others + engine, "what the engine works on, it works on at another time");
        let gathered = |plan| part(plan, "a layer and the root").expect("gathered");
        assert!(gathered(&together) > 2 * gathered(&one));
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
