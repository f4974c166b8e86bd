//! `gapscope explain`: the life of one request, and where it went wrong.
//!
//! The run is replayed with the engine watched, so that it needs no trace of its own.

mod legs;
mod past;
mod story;

use std::cell::Cell;
use std::path::Path;

use anyhow::{bail, ensure, Result};

use super::device;
use super::progress::say;
use super::replay::{config_of, replay, spike};
use super::session::Session;
use crate::base::{CompletionIndex, LogProb, Position, RequestId, Step};
use crate::config::Config;
use crate::engine::WatchList;
use crate::gap::{pair, Legs};
use crate::report::parquet::{read_tokens, TokenRow};
use crate::report::sweep::read_steps;
use crate::report::{step_ranges, write_story, RunFolder, Story};
use crate::rollout::Rollout;
use legs::Streams;
use past::Past;
use story::{tell, Life};

/// Memory that the watched request's trace may take.
const TRACE_BYTES_MAX: u64 = 1 << 30;

/// Tells the life of a request: by default the worst one of the step, by default the first step
/// that spiked. Leaves the story under `explain/` in the run's folder, as text and as a page.
///
/// # Errors
/// A folder that is no run, a step without a spike where no request is named, a request that the
/// run never had, a run that does not come out again as it was recorded, or Ctrl-C.
pub fn explain(run: &Path, step: Option<Step>, request: Option<&str>) -> Result<String> {
    let folder = RunFolder::open(run)?;
    let config = config_of(&folder)?;
    let (request, recorded) = choose(&folder, &config, step, request)?;
    say(&format!("{}: step {} again, with an eye on {request}", config.name, request.step));
    let story = device::guarded(|| again(&folder, &config, request, &recorded))?;
    let [txt, html] = folder.explanation(request)?;
    write_story(&txt, &html, &story)?;
    Ok(format!("{}\n{}\n{}\n", story.text(), txt.display(), html.display()))
}

/// Which request, and what the run has recorded of its step.
fn choose(
    folder: &RunFolder,
    config: &Config,
    step: Option<Step>,
    request: Option<&str>,
) -> Result<(RequestId, Vec<TokenRow>)> {
    let Some(request) = request else {
        let step = spike(folder, step, "explain; name a request to see its life all the same")?;
        let recorded = read_tokens(&folder.tokens(step))?;
        return Ok((worst(&recorded)?, recorded));
    };
    let request: RequestId = request.parse()?;
    if let Some(step) = step.filter(|step| *step != request.step) {
        bail!("request {request} is of step {}, and --step asks for step {step}", request.step);
    }
    let steps: Vec<Step> = read_steps(&folder.steps())?.iter().map(|row| row.step).collect();
    let nearest = nearest(&steps, config, request)?;
    ensure!(
        nearest == request,
        "{} has no request {request}: the nearest is {nearest}, and its steps are {}",
        folder.root().display(),
        step_ranges(&steps, ", ")
    );
    Ok((request, read_tokens(&folder.tokens(request.step))?))
}

/// Of all requests of the run.
fn nearest(steps: &[Step], config: &Config, request: RequestId) -> Result<RequestId> {
    let far = |step: &&Step| step.get().abs_diff(request.step.get());
    let Some(step) = steps.iter().min_by_key(far) else { bail!("the run has no step yet") };
    let rollout = &config.rollout;
    let prompt = request.prompt_id.get().min(rollout.prompts_per_step - 1);
    let rollout_idx = request.rollout_idx.min(rollout.rollouts_per_prompt - 1);
    Ok(RequestId::new(step.get(), prompt, rollout_idx))
}

/// The request with the largest |d| between engine and trainer; one that is not finite is largest.
fn worst(recorded: &[TokenRow]) -> Result<RequestId> {
    let gap = |row: &TokenRow| -> Option<f64> {
        let (decode, trainer) = (row.logp_decode?.get(), row.logp_trainer?.get());
        let d = f64::from(trainer) - f64::from(decode);
        row.loss_mask.then(|| if d.is_finite() { d.abs() } else { f64::INFINITY })
    };
    let gaps = recorded.iter().filter_map(|row| Some((row.request, gap(row)?)));
    match gaps.reduce(|worst, next| if next.1 > worst.1 { next } else { worst }) {
        Some((request, _)) => Ok(request),
        None => bail!("the step has no token that was compared"),
    }
}

fn again(
    folder: &RunFolder,
    config: &Config,
    request: RequestId,
    recorded: &[TokenRow],
) -> Result<Story> {
    let (mut told, mut past) = (None, Past::default());
    let index_bits = Cell::new(None);
    let before = |session: &mut Session, step: Step| {
        let list = WatchList { request: Some(request), max_bytes: TRACE_BYTES_MAX };
        index_bits.set(session.index_bits);
        session.source.watch((step == request.step).then_some(list));
    };
    replay(config, request.step, before, |session, comparison, mut rollouts| {
        let Some(trace) = session.source.take_trace() else {
            past.keep(session, &rollouts);
            return Ok(rollouts);
        };
        as_recorded(folder, &rollouts, recorded)?;
        let found = rollouts.iter().position(|rollout| rollout.completion.id == request);
        let Some(index) = found else { bail!("step {} has no request {request}", request.step) };
        session.score_all_legs(&mut rollouts, &[index])?;
        let streams = Streams::of(session, &rollouts[index], &trace)?;
        let floor = session.floor(comparison.pairs.tokens().count() as u64);
        let bad = [Legs::DecodeTrainer, Legs::PrefillTrainer]
            .map(|legs| first_bad(&rollouts[index], legs, floor));
        let parted = streams.parted(session, bad);
        told = Some(tell(&Life {
            folder,
            session,
            comparison: &comparison,
            rollouts: &rollouts,
            index,
            trace: &trace,
            past: &past,
            parted: &parted,
            index_bits: index_bits.get(),
        })?);
        Ok(rollouts)
    })?;
    Ok(told.expect("the replay has come to the request's step"))
}

/// The first token that two legs do not agree on, by its place in prompt and completion.
fn first_bad(rollout: &Rollout, legs: Legs, floor: f64) -> Option<Position> {
    let pairs = pair(std::slice::from_ref(rollout), legs).ok()?;
    let index = pairs.sequences[0].first_bad(floor)?;
    Some(Position::new((rollout.completion.prompt.len() + index.index()) as u32))
}

/// A replay that is another run explains nothing.
fn as_recorded(folder: &RunFolder, rollouts: &[Rollout], recorded: &[TokenRow]) -> Result<()> {
    let tokens = rollouts.iter().flat_map(|rollout| {
        let trainer = rollout.trainer.iter().flatten();
        let both = rollout.completion.tokens.iter().zip(trainer);
        both.zip(0..).map(|((sampled, trainer), index)| {
            (rollout.completion.id, index, sampled.token, Some(sampled.logp), *trainer)
        })
    });
    let bits = |logp: Option<LogProb>| logp.map(|logp| logp.get().to_bits());
    let mut recorded = recorded.iter();
    for (request, index, token, decode, trainer) in tokens {
        let same = recorded.next().is_some_and(|row| {
            (row.request, row.token_id) == (request, token)
                && bits(row.logp_decode) == bits(decode)
                && bits(row.logp_trainer) == bits(trainer)
        });
        ensure!(
            same,
            "{}: request {request} does not come out again as it was recorded, from its completion \
             index {} on: config.json, the model or the task has changed since, or another version \
             made the run",
            folder.root().display(),
            CompletionIndex::new(index)
        );
    }
    ensure!(
        recorded.next().is_none(),
        "{}: the step has more tokens on record than come out again: config.json, the model or the \
         task has changed since",
        folder.root().display()
    );
    Ok(())
}
