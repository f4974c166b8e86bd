//! Faults, or none, at random settings: every verdict is right, or says that it does not know.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::cases::{Case, CASES};
use super::weighed::{weigh, Weighed};
use crate::base::Stream;
use crate::config::Config;
use crate::run::interrupt;
use crate::run::progress::say;

/// One run in so many has no fault planted.
const CLEAN_EVERY: u64 = 4;
/// Settings that cannot be are drawn again, so often.
const DRAWS_MAX: u64 = 100;

/// How many runs came out which way.
#[derive(Debug, Default)]
struct Tally {
    /// Without a fault, and silent.
    clean: u64,
    /// With one that these settings hide: nothing came out another way, and nothing was said.
    hidden: u64,
    named: u64,
    /// The right requests without the culprit's name.
    unexplained: u64,
    /// Seeds whose verdict is false, or missing.
    wrong: Vec<u64>,
}

/// Judges `count` runs at settings drawn from `seed` and the seeds after it; leaves the folders of
/// those that went wrong in `out`. The second is whether none did.
///
/// # Errors
/// A folder that cannot be written, Ctrl-C.
pub fn swarm(out: &Path, seed: u64, count: u64) -> Result<(String, bool)> {
    let mut tally = Tally::default();
    for seed in seed..seed + count {
        let folder = out.join(format!("seed-{seed}"));
        let (case, weighed) = one(seed, &folder)?;
        match outcome(case, &weighed) {
            Ok(count) => {
                *count(&mut tally) += 1;
                fs::remove_dir_all(&folder)
                    .with_context(|| format!("cannot remove {}", folder.display()))?;
            }
            Err(why) => {
                let fault = case.map_or("no fault", |case| case.fault);
                let again = format!("gapscope faults swarm --seed {seed} --count 1");
                say(&format!("seed {seed}, {fault}: {why}; again: {again}"));
                tally.wrong.push(seed);
            }
        }
        interrupt::check(|| format!("seed {seed}"))?;
    }
    let Tally { clean, hidden, named, unexplained, wrong } = &tally;
    let text = format!(
        "{count} runs: {clean} without a fault and silent, {hidden} whose settings hide the fault, \
         {named} named, {unexplained} unexplained with the right requests, {} wrong\n",
        wrong.len()
    );
    Ok((text, wrong.is_empty()))
}

fn outcome(case: Option<&Case>, weighed: &Weighed) -> Result<fn(&mut Tally) -> &mut u64, String> {
    if weighed.false_alarm {
        return Err("an alarm without a fault".to_owned());
    }
    let is_still = weighed.touched.is_none() && weighed.told.is_none();
    match (case, weighed) {
        (None, _) if is_still => Ok(|tally| &mut tally.clean),
        (None, _) => Err("two runs without a fault differ".to_owned()),
        (_, Weighed { touched: None, told: Some(step), .. }) => {
            Err(format!("something is said of step {step}, and nothing was touched"))
        }
        (_, Weighed { is_unexplained: true, .. }) => Ok(|tally| &mut tally.unexplained),
        (_, weighed) if weighed.is_named() => Ok(|tally| &mut tally.named),
        (_, Weighed { touched: None, .. }) => Ok(|tally| &mut tally.hidden),
        (_, Weighed { complaint, .. }) => Err(complaint.clone().unwrap_or_default()),
    }
}

/// The fault, if any, and what came of it.
fn one(seed: u64, folder: &Path) -> Result<(Option<&'static Case>, Weighed)> {
    let mut stream = Stream::new(seed, "swarm", 0);
    let case = &CASES[stream.integer(0, CASES.len() as u64 - 1) as usize];
    let planted = stream.integer(1, CLEAN_EVERY) > 1;
    for _ in 0..DRAWS_MAX {
        let settings = settings(&mut stream, case);
        let configs = [false, planted].map(|planted| case.config(&settings, planted, folder));
        let [Ok(clean), Ok(other)] = configs else { continue };
        if let Some(weighed) = runnable(case, &clean, &other, folder)? {
            return Ok((planted.then_some(case), weighed));
        }
    }
    anyhow::bail!("seed {seed}: of {DRAWS_MAX} settings none can be run");
}

/// `None` where the engine refuses the settings: a pool too small for a prompt, say.
fn runnable(case: &Case, clean: &Config, other: &Config, out: &Path) -> Result<Option<Weighed>> {
    let refused =
        |error: &anyhow::Error| error.chain().any(|cause| cause.is::<crate::engine::EngineError>());
    match weigh(case, clean, other, out) {
        Ok(weighed) => Ok(Some(weighed)),
        Err(error) if refused(&error) => {
            if out.exists() {
                fs::remove_dir_all(out)
                    .with_context(|| format!("cannot remove {}", out.display()))?;
            }
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Random settings, but for those that the case needs as they are.
fn settings(stream: &mut Stream, case: &Case) -> Vec<String> {
    let mut pick =
        |values: &[&str]| values[stream.integer(0, values.len() as u64 - 1) as usize].to_owned();
    let drawn = [
        ("rollout.prompts_per_step", pick(&["1", "2", "3", "4"])),
        ("rollout.rollouts_per_prompt", pick(&["2", "3", "4", "6"])),
        ("rollout.max_new_tokens", pick(&["4", "6", "8", "12"])),
        ("rollout.temperature", pick(&["1.0", "1.0", "0.7"])),
        ("task.prompt_tokens", pick(&["8", "10", "13", "20"])),
        ("engine.max_num_seqs", pick(&["4", "7", "11", "16"])),
        ("engine.max_num_batched_tokens", pick(&["21", "31", "47", "64", "128"])),
        ("engine.num_gpu_blocks_override", pick(&["49", "65", "97", "161"])),
        ("engine.free_list", pick(&["\"fifo\"", "\"fifo\"", "\"lifo\""])),
        ("engine.enforce_eager", pick(&["true", "false"])),
        ("model.dtype", pick(&["\"f32\"", "\"f32\"", "\"bf16\""])),
        ("trainer.max_tokens_per_chunk", pick(&["32", "64", "256"])),
        ("trainer.update", pick(&["\"adamw\"", "\"none\""])),
        ("seed", pick(&["1", "2", "3", "4", "5", "6", "7", "8", "9"])),
        ("engine.replicas", pick(&["1", "1", "1", "2", "3"])),
    ];
    let is_own = |key: &str| case.set.iter().any(|own| own.split('=').next() == Some(key));
    let free = drawn.into_iter().filter(|(key, _)| !is_own(key));
    free.map(|(key, value)| format!("{key}={value}")).collect()
}
