//! Where completions come from: the embedded engines, or servers.

use std::iter::zip;
use std::path::Path;
use std::{fs, io, process};

use anyhow::{ensure, Context, Result};
use rustix::io::Errno;
use rustix::process::{test_kill_process, Pid};

use super::{requests, sequence, Session};
use crate::base::{Contract, RequestId, Step, TokenId};
use crate::config::{Config, Dtype, ServersConfig, Sleep};
use crate::engine::{self, measured_memory, Completion, Engine, Engines, GenerationRequest, Tell};
use crate::gap::Floor;
use crate::model::{save_folder, Numerics, Plan};
use crate::ops::array::Device;
use crate::rollout::http::{ServerError, Servers, Terms, Waiting};
use crate::rollout::{Draw, Rollout, Source};
use crate::run::device;
use crate::run::interrupt::{self, Interrupted};
use crate::run::launch::Launched;
use crate::run::memory::MemoryPlan;
use crate::run::progress::say;
use crate::trainer::WeightSet;

/// Prompts of the first steps of which it is known beforehand that servers have room for them.
const PROMPTS_LOOKED_AT: u64 = 10_000;
/// Prompts from which the floor of servers is measured, one after the other.
const FLOOR_PROMPTS: u32 = 16;
const FLOOR_TOKENS: u32 = 64;
/// The trainer rounds in places of its own: its distance from either of a server's two paths is of
/// the size of theirs from each other, and this is the room for it.
const OTHER_ARITHMETIC: f64 = 2.0;

/// The largest gap, nats, that one model's healthy arithmetic has been seen to reach in any two
/// engines: 7e-6 between vLLM and transformers in f32; 1.56 in a whole bf16 run that torchtitan
/// reports. A server that is further from itself is no measure of what is healthy.
const fn healthy_max(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 1e-3,
        Dtype::Bf16 => 1.0,
    }
}

/// The embedded engines with the trainer's weights. Where the device's memory gives the number of
/// blocks, which is one for all, `measured` is what it gave before.
pub(super) fn embedded(
    config: &Config,
    (plan, num): (&Plan, Numerics),
    (device, free): (&Device, &[Option<u64>]),
    weights: WeightSet,
    measured: Option<u32>,
) -> Result<Engines> {
    let knobs = &config.engine;
    let layout = engine::layout(plan, &num, knobs)?;
    let num_blocks = match measured {
        Some(as_before) if knobs.is_measured() => as_before,
        _ => {
            let sharing = device::engines_on_one(knobs);
            let units = &weights.units;
            layout.num_blocks(&measured_memory(device, plan, &num, knobs, sharing, units)?)?
        }
    };
    if knobs.is_measured() {
        // Only now the pool is known.
        let pool = layout.block_bytes() * u64::from(num_blocks);
        MemoryPlan::of(plan, config, Some(pool)).check(free)?;
    }
    let (contract, seed) = (config.contract(), config.seed);
    let engine = |device: &Device| {
        let (plan, knobs) = (plan.clone(), knobs.clone());
        Engine::with_blocks(device, plan, num, knobs, contract, seed, num_blocks)
    };
    let devices = device::of_engines(device, knobs)?;
    let all = devices.iter().map(engine).collect::<Result<_, _>>()?;
    let mut engines = Engines::new(all, device::placement(knobs));
    engines.load(weights.version, weights.units)?;
    Ok(engines)
}

/// Clients of every server.
pub(super) fn servers(
    config: &Config,
    servers: &ServersConfig,
    launched: Option<&Launched>,
) -> Result<Servers> {
    let starting = launched.map(Launched::starting).unwrap_or_default();
    let terms = Terms { contract: config.contract(), seed: config.seed, starting };
    Servers::open(servers, terms, &Patience(launched))
        .map_err(|error| failed(error, launched, "the start"))
}

/// Waits until Ctrl-C, or until a server is lost that the run has started.
struct Patience<'a>(Option<&'a Launched>);

impl Waiting for Patience<'_> {
    fn gives_up(&self) -> bool {
        interrupt::asked() || self.0.is_some_and(Launched::has_lost_one)
    }

    fn hears(&self, news: &str) {
        say(news);
    }
}

/// What ended the waiting: Ctrl-C, or a server that was started here and is no more, with its last
/// words.
fn failed(error: ServerError, launched: Option<&Launched>, at: &str) -> anyhow::Error {
    if matches!(error, ServerError::Stopped) && interrupt::asked() {
        return Interrupted(format!("{at}, of which nothing is kept")).into();
    }
    match launched.and_then(Launched::last_words) {
        Some(words) => anyhow::anyhow!("{words}"),
        None => error.into(),
    }
}

/// Of the folder that new weights are written to, before a process's id.
const NEXT: &str = ".gapscope-next-";

/// Puts new weights in the place of those that the folder holds, whole or not at all. All else in
/// it stays.
fn replace_weights(folder: &Path, plan: &Plan, master: &[Vec<f32>], dtype: Dtype) -> Result<()> {
    const WEIGHTS: &str = "model.safetensors";
    ensure!(
        folder.join(WEIGHTS).is_file(),
        "engine.sync_folder {} holds no {WEIGHTS}: it is to be the model folder that the servers \
         read, such as `gapscope model init` writes",
        folder.display()
    );
    // Inside it, so that both are on one file system; a folder of this process's own.
    let next = folder.join(format!("{NEXT}{}", process::id()));
    let say = || format!("cannot put new weights into {}", folder.display());
    remove_next_of_the_dead(folder).with_context(say)?;
    save_folder(&next, plan, master, dtype)?;
    fs::rename(next.join(WEIGHTS), folder.join(WEIGHTS)).with_context(say)?;
    fs::remove_dir_all(&next).with_context(say)
}

/// What processes that were killed have left of a hand-over: the weights of a whole model each.
fn remove_next_of_the_dead(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let id = name.to_str().and_then(|name| name.strip_prefix(NEXT)?.parse().ok());
        let is_of_the_dead = id.and_then(Pid::from_raw).is_some_and(|process| {
            // A process that may not be asked after lives.
            test_kill_process(process) == Err(Errno::SRCH)
        });
        if is_of_the_dead {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

impl Session {
    /// The embedded engines.
    ///
    /// # Panics
    /// On a run of servers, which whatever looks into an engine refuses first.
    #[must_use]
    pub fn engines(&self) -> &Engines {
        self.source.embedded().expect("runs of servers are refused by what looks into an engine")
    }

    /// The first embedded engine, for what is the same of all.
    ///
    /// # Panics
    /// As [`Self::engines`].
    #[must_use]
    pub fn engine(&self) -> &Engine {
        self.engines().first()
    }

    /// One completion a request, in their order.
    pub(super) fn complete(
        &mut self,
        step: Step,
        asked: Vec<GenerationRequest>,
        tell: Tell<'_>,
    ) -> Result<Vec<Completion>> {
        match &mut self.source {
            Source::Embedded(engines) => {
                engines.iter_mut().try_for_each(Engine::wake)?;
                let completions = engines.generate_told(asked, tell)?;
                let keep_pool = match self.config.engine.sleep {
                    Sleep::Off => return Ok(completions),
                    Sleep::KeepPool => true,
                    Sleep::DropPool => false,
                };
                engines.iter_mut().for_each(|engine| engine.sleep(keep_pool));
                Ok(completions)
            }
            Source::Servers(_) => {
                let contract = self.contract;
                self.complete_by_servers(&contract, asked).with_context(|| format!("step {step}"))
            }
        }
    }

    pub(super) fn complete_by_servers(
        &self,
        contract: &Contract,
        asked: Vec<GenerationRequest>,
    ) -> Result<Vec<Completion>> {
        self.ask(|servers, waiting| servers.generate(asked, contract, waiting))
    }

    /// The prefill leg; without one where the contract is of no raw logits, as the servers' is.
    pub(super) fn score_prefill_by_servers(
        &self,
        rollouts: &mut [Rollout],
        which: &[usize],
    ) -> Result<()> {
        if !self.contract.scores_raw_logits() {
            return Ok(());
        }
        let sequences = which.iter().map(|&index| {
            let whole = sequence(&rollouts[index]);
            (rollouts[index].completion.id, whole.tokens, whole.prompt_len)
        });
        let sequences: Vec<_> = sequences.collect();
        let scores = self.ask(|servers, waiting| servers.score_prefill(sequences, waiting))?;
        for (&index, scores) in zip(which, scores) {
            rollouts[index].prefill = Some(scores);
        }
        Ok(())
    }

    /// That servers have room for prompts and completions, before any of them is asked.
    pub(super) fn check_lengths(&self) -> Result<()> {
        let Some(servers) = self.source.servers() else { return Ok(()) };
        let rollout = &self.config.rollout;
        let n = rollout.prompts_per_step;
        let steps = self.config.steps.min(PROMPTS_LOOKED_AT.div_ceil(n.into()));
        for step in (1..=steps).map(Step::new) {
            let problems = self.task.problems(Draw::Rollouts, step, n)?;
            servers.check_lengths(&requests(rollout, &[], step, &problems, 1))?;
        }
        Ok(())
    }

    fn ask<T>(
        &self,
        work: impl FnOnce(&Servers, &dyn Waiting) -> Result<T, ServerError>,
    ) -> Result<T> {
        let servers = self.source.servers().expect("only servers are asked");
        let launched = self.launched.as_ref();
        work(servers, &Patience(launched)).map_err(|error| failed(error, launched, "a step"))
    }

    /// Gives the engines the trainer's weights as they are now.
    pub(in crate::run) fn hand_over(&mut self) -> Result<()> {
        match &mut self.source {
            Source::Embedded(engines) => {
                engines.iter_mut().for_each(Engine::drop_weights);
                let weights = self.trainer.hand_over()?;
                engines.load(weights.version, weights.units)?;
            }
            Source::Servers(servers) => {
                let folder = self.config.engine.servers.as_ref();
                let folder = folder.and_then(|all| all.sync_folder.as_ref());
                let folder = folder.expect("who updates the weights of servers has a folder");
                let (plan, dtype) = (&self.plan, self.config.model.dtype);
                replace_weights(Path::new(folder), plan, &self.trainer.master()?, dtype)?;
                let (launched, version) = (self.launched.as_ref(), self.trainer.version());
                servers
                    .reload(version, &Patience(launched))
                    .map_err(|error| failed(error, launched, "a hand-over of weights"))?;
            }
        }
        Ok(())
    }

    /// What a server's two paths differ by: sequences sampled one at a time, each then as one
    /// prefill, at temperature 1 without filters, so that neither a full pool nor another mode has
    /// a part in it.
    pub(super) fn floor_of_servers(&self, step: Step) -> Result<Floor> {
        let rollout = &self.config.rollout;
        let problems = self.task.problems(Draw::Evaluation, Step::new(1), FLOOR_PROMPTS)?;
        let mut gaps = Vec::new();
        for (prompt_id, problem) in (0..).zip(problems) {
            let id = RequestId::new(0, prompt_id, 0);
            let request = GenerationRequest {
                id,
                prompt: problem.prompt,
                max_new_tokens: rollout.max_new_tokens.min(FLOOR_TOKENS),
                ignore_eos: true,
                eos_token_ids: Vec::new(),
            };
            let done = self.complete_by_servers(&Contract::PLAIN, vec![request])?.remove(0);
            let ids: Vec<TokenId> = done.prompt.iter().copied().chain(done.token_ids()).collect();
            let whole = vec![(id, ids, done.prompt.len())];
            let prefill =
                self.ask(|servers, waiting| servers.score_prefill(whole, waiting))?.remove(0);
            gaps.extend(zip(&done.tokens, prefill).filter_map(|(sampled, prefill)| {
                Some((f64::from(sampled.logp.get()) - f64::from(prefill?.get())).abs())
            }));
        }
        let largest = gaps.iter().copied().fold(0.0, f64::max);
        gaps.iter_mut().for_each(|gap| *gap *= OTHER_ARITHMETIC);
        let (measured, most) = (Floor::measured(&gaps), healthy_max(self.config.model.dtype));
        let found = measured.of(gaps.len() as u64);
        if found > most {
            say(&format!(
                "step {step}: the server's decode and its own prefill differ by up to \
                 {largest:.2e} nats even in requests that ran alone, which would make the floor \
                 {found:.2e}; it is held at {most:e}"
            ));
        }
        Ok(measured.at_most(most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_dead_processes_have_left_goes() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        // Linux has no process beyond 2^22.
        let (dead, living) = (4_194_305, process::id());
        let names = [format!("{NEXT}{dead}"), format!("{NEXT}{living}"), format!("{NEXT}x")];
        for name in &names {
            fs::create_dir(folder.path().join(name)).expect("a folder");
            fs::write(folder.path().join(name).join("model.safetensors"), "").expect("a file");
        }
        remove_next_of_the_dead(folder.path()).expect("removed");
        let left = names.map(|name| folder.path().join(name).exists());
        assert_eq!(left, [false, true, true]);
    }
}
