//! `gapscope bisect`: a spike seen again with one lever turned at a time.

mod levers;

use std::path::Path;

use anyhow::{ensure, Result};
use serde::Serialize;

use super::progress::say;
use super::replay::{config_of, replay, spike};
use super::{device, told};
use crate::base::float::optional::serialize as option_float;
use crate::base::Step;
use crate::config::Config;
use crate::gap::StepGap;
use crate::report::{step_ranges, write_json, RunFolder};
use levers::{levers, Lever};

/// Where the table goes, in the run's folder.
const FILE: &str = "bisect.json";
/// A gap that is this much smaller has not gone, but was rounding for the most part.
const SHRUNK: f64 = 0.01;

/// What became of the spike.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "effect", rename_all = "snake_case")]
enum Effect {
    /// No step up to it spikes.
    Gone,
    /// Other steps do.
    Moved {
        spike_steps: Vec<Step>,
    },
    /// A hundredth of it is left at most.
    Smaller,
    Same,
    CannotRun {
        error: String,
    },
}

/// One lever's row.
#[derive(Debug, Serialize)]
struct Row {
    change: String,
    #[serde(flatten)]
    effect: Effect,
    /// Largest |d| up to the spike's step, nats.
    #[serde(serialize_with = "option_float")]
    gap_max: Option<f64>,
    points_to: &'static str,
    /// Whether that is a culprit by itself.
    decides: bool,
}

/// All of it.
#[derive(Debug, Serialize)]
struct Table {
    step: Step,
    rows: Vec<Row>,
    /// What the levers that end the gap have to say.
    points_to: Vec<&'static str>,
}

/// Replays a run up to a spike, by default its first, with one lever after another, until one that
/// is a culprit by itself has ended it, or with `all` of them. Leaves `bisect.json` in the run's
/// folder.
///
/// # Errors
/// A folder that is no run, a run or step without a spike, one that does not spike again as it was,
/// or Ctrl-C.
pub fn bisect(run: &Path, step: Option<Step>, all: bool) -> Result<String> {
    let folder = RunFolder::open(run)?;
    let config = config_of(&folder)?;
    let step = spike(&folder, step, "bisect")?;
    say(&format!("{}: step {step} again, as it was", config.name));
    let (as_it_was, num_blocks) = device::guarded(|| gaps(&config, step))?;
    ensure!(
        as_it_was.last().is_some_and(|gap| gap.spike),
        "step {step} does not spike again with the run's own configuration: its model or its task \
         have changed since, or it was made by another version"
    );
    let mut rows = Vec::new();
    for lever in levers(&config, num_blocks) {
        let row = try_lever(&lever, step, &as_it_was)?;
        say(&line(&row));
        let enough = !all && lever.decides && row.effect == Effect::Gone;
        rows.push(row);
        if enough {
            break;
        }
    }
    let table = Table { step, points_to: conclusion(&rows), rows };
    let out = folder.root().join(FILE);
    write_json(&out, &table)?;
    Ok(format!("{}\n{}\n", told_conclusion(&table), out.display()))
}

/// Every step's gap up to `until`, and the size of the pool.
fn gaps(config: &Config, until: Step) -> Result<(Vec<StepGap>, u32)> {
    let (mut gaps, mut num_blocks) = (Vec::new(), 0);
    replay(
        config,
        until,
        |_, _| {},
        |session, comparison, rollouts| {
            gaps.push(comparison.gap);
            num_blocks = session.engine.pool().num_blocks();
            Ok(rollouts)
        },
    )?;
    Ok((gaps, num_blocks))
}

fn try_lever(lever: &Lever, step: Step, as_it_was: &[StepGap]) -> Result<Row> {
    let (effect, gap_max) = match device::guarded(|| gaps(&lever.config, step)) {
        Ok((gaps, _)) => (effect(&gaps, as_it_was), largest(&gaps)),
        Err(error) if error.is::<super::Interrupted>() => return Err(error),
        Err(error) => (Effect::CannotRun { error: told(&error) }, None),
    };
    let Lever { change, points_to, decides, .. } = lever;
    Ok(Row { change: change.clone(), effect, gap_max, points_to, decides: *decides })
}

fn effect(gaps: &[StepGap], as_it_was: &[StepGap]) -> Effect {
    let spikes = |gaps: &[StepGap]| -> Vec<Step> {
        gaps.iter().filter(|gap| gap.spike).map(|gap| gap.step).collect()
    };
    let (now, before) = (spikes(gaps), spikes(as_it_was));
    let is_smaller = |(now, before)| now <= before * SHRUNK;
    if now.is_empty() {
        Effect::Gone
    } else if largest(gaps).zip(largest(as_it_was)).is_some_and(is_smaller) {
        Effect::Smaller
    } else if now == before {
        Effect::Same
    } else {
        Effect::Moved { spike_steps: now }
    }
}

fn largest(gaps: &[StepGap]) -> Option<f64> {
    gaps.iter().filter_map(|gap| gap.gap_max).reduce(f64::max)
}

/// What the levers that ended the gap point to; one that is a culprit by itself says it all.
fn conclusion(rows: &[Row]) -> Vec<&'static str> {
    let ended = |row: &&Row| matches!(row.effect, Effect::Gone | Effect::Smaller);
    let ended: Vec<&Row> = rows.iter().filter(ended).collect();
    match ended.iter().find(|row| row.decides) {
        Some(row) => vec![row.points_to],
        None => ended.iter().map(|row| row.points_to).collect(),
    }
}

fn line(row: &Row) -> String {
    let what = match &row.effect {
        Effect::Gone => "gone".to_owned(),
        Effect::Moved { spike_steps } => format!("moved to {}", step_ranges(spike_steps, ", ")),
        Effect::Smaller => "a hundredth of it at most".to_owned(),
        Effect::Same => "the same".to_owned(),
        Effect::CannotRun { error } => format!("cannot run: {error}"),
    };
    format!("{:<56} {what}", row.change)
}

fn told_conclusion(table: &Table) -> String {
    match table.points_to.as_slice() {
        [] => format!(
            "step {}: no lever of the engine ends it: look at the trainer's forward, and at how \
             tokens and weights are handed over",
            table.step
        ),
        all => format!("step {}: points to {}", table.step, all.join("; and to ")),
    }
}
