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
    /// Between two steps, when a checkpoint is written.
    Saving,
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
    /// On each GPU but the first, in the driver's order, where ranks or engines have one each.
    others: Vec<OtherGpu>,
    /// Where the host does not compute: what passes through it, not all at once.
    on_host: Option<Vec<(&'static str, u64)>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct OtherGpu {
    parts: Vec<Part>,
    has_pool: bool,
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
        let engine = &config.engine;
        let on_cpu = engine.device == Device::Cpu;
        let engines = u64::from(device::engines_on_one(engine));
        let mut parts = of_trainer(plan, config, here);
        parts.extend(of_engines(plan, config, engines));
        let apart = |users: u32, sharing: u64| if sharing == 1 { users } else { 1 };
        let others = others(
            plan,
            config,
            (apart(config.trainer.ranks, here), apart(engine.replicas, engines)),
        );
        let mut on_host = vec![("on the host, weights as read", 4 * plan.num_parameters())];
        let checkpoint = copied_for_a_checkpoint(plan, config);
        if on_cpu {
            let (what, when) = ("a checkpoint, copied", When::Saving);
            parts.extend(checkpoint.map(|bytes| Part { what, when, bytes, grows: false }));
        } else {
            on_host.extend(checkpoint.map(|bytes| ("on the host, a checkpoint", bytes)));
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
            others,
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
        if let Some(first) = self.others.first() {
            // The last ones may have a rank or an engine less.
            let alike = self.others.iter().all(|other| other == first);
            let what = if alike { "on each other GPU" } else { "on the fullest other GPU" };
            lines.push((what.to_owned(), self.fullest_of(first, true)));
        }
        let on_host = self.on_host.iter().flatten();
        lines.extend(on_host.map(|(what, bytes)| ((*what).to_owned(), *bytes)));
        lines
    }

    fn fullest(&self, pool: Option<u64>, grown: bool) -> u64 {
        fullest(&self.parts, pool.unwrap_or(0), self.drops_pool, grown)
    }

    fn fullest_of(&self, other: &OtherGpu, grown: bool) -> u64 {
        let pool = self.pool.filter(|_| other.has_pool).unwrap_or(0);
        fullest(&other.parts, pool, self.drops_pool, grown)
    }

    /// Of each device's `free` bytes, in their order, those of the host's own left out.
    ///
    /// # Errors
    /// A device with less than is needed there, or a machine with less memory available. One that
    /// does not say is believed.
    pub(super) fn check(&self, free: &[Option<u64>]) -> Result<()> {
        let Some(on_host) = &self.on_host else {
            // The host takes a page of the pool when it is first written to.
            return enough("this machine", self.fullest(None, false), available_bytes());
        };
        let free = |ordinal: usize| free.get(ordinal).copied().flatten();
        enough("the device", self.fullest(self.pool, false), free(0))?;
        for (ordinal, other) in (1..).zip(&self.others) {
            enough(&format!("GPU {ordinal}"), self.fullest_of(other, false), free(ordinal))?;
        }
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
    let saving = sum(When::Saving).saturating_add(if drops_pool { 0 } else { pool });
    sum(When::Always).saturating_add(generating.max(learning).max(saving))
}

/// What each GPU but the first holds, where there are several.
fn others(plan: &Plan, config: &Config, (ranks, engines): (u32, u32)) -> Vec<OtherGpu> {
    let of_one = |ordinal: u32| {
        let (has_rank, has_pool) = (ordinal < ranks, ordinal < engines);
        let mut parts = if has_rank { of_trainer(plan, config, 1) } else { Vec::new() };
        if has_pool {
            parts.extend(of_engines(plan, config, 1));
        }
        OtherGpu { parts, has_pool }
    };
    (1..ranks.max(engines)).map(of_one).collect()
}

/// Bytes beside the trainer's own when a checkpoint is written: from a device all that updates
/// read, and on the host what comes from other threads, or is rounded.
fn copied_for_a_checkpoint(plan: &Plan, config: &Config) -> Option<u64> {
    let trainer = &config.trainer;
    let is_written = config.checkpoint.every < config.steps || trainer.warm_start.steps > 0;
    if trainer.update == Update::None || !is_written {
        return None;
    }
    let is_here = config.engine.device == Device::Cpu && trainer.ranks == 1;
    let trained = if is_here { 0 } else { 12 };
    let frozen = if trainer.kl_coef > 0.0 { config.model.dtype.bytes() } else { 0 };
    let shard = |unit: &UnitSpec| shard_len(unit.len(), trainer.ranks as usize) as u64;
    let elements = product(&[trainer.ranks.into(), plan.units.iter().map(shard).sum()]);
    Some((trained + frozen) * elements).filter(|bytes| *bytes > 0)
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
mod tests;
