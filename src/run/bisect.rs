//! `gapscope bisect`: a spike seen again with one lever turned at a time.

mod levers;

use std::path::Path;

use anyhow::{ensure, Result};
use serde::Serialize;

use super::progress::say;
use super::replay::{config_of, replay, spike};
use super::{device, told};
use crate::base::float::optional::serialize as option_float;
use crate::base::{Step, Stream};
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
    /// Its place among the levers, 0 the strongest.
    #[serde(skip)]
    rank: usize,
}

impl Row {
    fn ended(&self) -> bool {
        matches!(self.effect, Effect::Gone | Effect::Smaller)
    }

    /// Whether it has ended the whole of the gap and is a culprit by itself.
    fn settles(&self) -> bool {
        self.decides && self.effect == Effect::Gone
    }
}

/// All of it.
#[derive(Debug, Serialize)]
struct Table {
    step: Step,
    /// Of the run up to the step: once as it was, and once a row.
    replays: usize,
    rows: Vec<Row>,
    /// What the levers that end the gap have to say: one culprit, or places that narrow it down.
    points_to: Vec<&'static str>,
    /// Whether it is a culprit.
    decided: bool,
}

/// How a run is bisected.
#[derive(Clone, Copy, Debug, Default)]
pub struct BisectOptions {
    /// The spike; `None` is the run's first.
    pub step: Option<Step>,
    /// Turns every lever, also when the evidence is enough.
    pub all: bool,
    /// Turns the levers in an order drawn from this seed; `None` is the strongest first. What they
    /// point to is the same in any order, after more replays or fewer.
    pub shuffle: Option<u64>,
}

/// Replays a run up to a spike with one lever after another, until one that is a culprit by itself
/// has ended it and no stronger one is left to turn. Leaves `bisect.json` in the run's folder.
///
/// # Errors
/// A folder that is no run, a run or step without a spike, one that does not spike again as it was,
/// or Ctrl-C.
pub fn bisect(run: &Path, options: BisectOptions) -> Result<String> {
    let folder = RunFolder::open(run)?;
    let config = config_of(&folder)?;
    let step = spike(&folder, options.step, "bisect")?;
    say(&format!("{}: step {step} again, as it was", config.name));
    let as_it_was = device::guarded(|| Seen::of(&config, step))?;
    ensure!(
        as_it_was.gaps.last().is_some_and(|gap| gap.spike),
        "step {step} does not spike again with the run's own configuration: its model or its task \
         have changed since, or it was made by another version"
    );
    let mut order: Vec<(usize, Lever)> =
        levers(&config, &as_it_was).into_iter().enumerate().collect();
    if let Some(seed) = options.shuffle {
        Stream::new(seed, "levers", 0).shuffle(&mut order);
    }
    let rows = search(order, options.all, |rank, lever| {
        let row = try_lever(lever, rank, step, &as_it_was.gaps)?;
        say(&line(&row));
        Ok(row)
    })?;
    let (points_to, decided) = conclusion(&rows);
    let table = Table { step, replays: 1 + rows.len(), rows, points_to, decided };
    let out = folder.root().join(FILE);
    write_json(&out, &table)?;
    Ok(format!("{}\n{} replays: {}\n", told_conclusion(&table), table.replays, out.display()))
}

/// What a replay showed.
struct Seen {
    /// Of every step.
    gaps: Vec<StepGap>,
    num_blocks: u32,
    preemptions: u64,
}

impl Seen {
    fn of(config: &Config, until: Step) -> Result<Self> {
        let mut seen = Self { gaps: Vec::new(), num_blocks: 0, preemptions: 0 };
        replay(
            config,
            until,
            |_, _| {},
            |session, comparison, rollouts| {
                seen.gaps.push(comparison.gap);
                seen.num_blocks = session.engine().pool().num_blocks();
                let done = session.source.statistics();
                seen.preemptions = done.iter().map(|engine| engine.preemptions).sum();
                Ok(rollouts)
            },
        )?;
        Ok(seen)
    }
}

/// Turns levers in this order, as long as there is one that is worth it.
fn search(
    mut left: Vec<(usize, Lever)>,
    all: bool,
    mut turn: impl FnMut(usize, Lever) -> Result<Row>,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    while let Some(at) = next(&rows, &left, all) {
        let (rank, lever) = left.remove(at);
        rows.push(turn(rank, lever)?);
    }
    Ok(rows)
}

/// The next lever that is worth a replay. Where one has settled it, only a stronger one could have
/// more to say; where one has narrowed it down, those that may settle it come before others that
/// can only narrow it down as well.
fn next(rows: &[Row], left: &[(usize, Lever)], all: bool) -> Option<usize> {
    let settled = rows.iter().filter(|row| row.settles() && !all).map(|row| row.rank).min();
    let narrowed = rows.iter().any(|row| row.ended() && !row.decides && !all);
    let is_stronger = |(rank, _): &(usize, Lever)| settled.is_none_or(|settled| *rank < settled);
    let may_settle = |one: &(usize, Lever)| is_stronger(one) && (one.1.decides || !narrowed);
    left.iter().position(may_settle).or_else(|| left.iter().position(is_stronger))
}

fn try_lever(lever: Lever, rank: usize, step: Step, as_it_was: &[StepGap]) -> Result<Row> {
    let (effect, gap_max) = match device::guarded(|| Seen::of(&lever.config, step)) {
        Ok(seen) => (effect(&seen.gaps, as_it_was), largest(&seen.gaps)),
        Err(error) if error.is::<super::Interrupted>() => return Err(error),
        Err(error) => (Effect::CannotRun { error: told(&error) }, None),
    };
    let Lever { change, points_to, decides, .. } = lever;
    Ok(Row { change, effect, gap_max, points_to, decides, rank })
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

/// What the levers that ended the gap point to, in whatever order they were turned, and whether
/// that is a culprit. The strongest of those that settle it says it all; else the strongest that
/// decides and left rounding; else everything that ended it, the strongest first.
fn conclusion(rows: &[Row]) -> (Vec<&'static str>, bool) {
    let mut ended: Vec<&Row> = rows.iter().filter(|row| row.ended()).collect();
    ended.sort_by_key(|row| (!row.settles(), !row.decides, row.rank));
    match ended.first() {
        Some(row) if row.decides => (vec![row.points_to], true),
        _ => (ended.iter().map(|row| row.points_to).collect(), false),
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

fn told_conclusion(Table { step, points_to, decided, .. }: &Table) -> String {
    match points_to.as_slice() {
        [] => format!(
            "step {step}: no lever ends it: look at the trainer's forward, and at how tokens and \
             weights are handed over"
        ),
        [culprit] if *decided => format!("step {step}: points to {culprit}"),
        places => format!(
            "step {step}: no lever decides it; it has to do with {}",
            places.join(", and with ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranked() -> Vec<(usize, Lever)> {
        let text = "name = \"x\"\nmodel.preset = \"tiny-jamba\"\nrollout.temperature = 0.5\n\
            [engine]\nstate_index_bits = 32\nbatch_split = \"scheduled_tokens\"\n\
            enforce_eager = false\nenable_prefix_caching = true\nnumerics = \"fast\"\n";
        let config = crate::config::parse(text, "test.toml", &[]).expect("a valid config");
        let seen = Seen { gaps: Vec::new(), num_blocks: 100, preemptions: 1 };
        levers(&config, &seen).into_iter().enumerate().collect()
    }

    /// Rows of a search where each lever has the effect of its rank.
    fn rows(order: Vec<(usize, Lever)>, all: bool, effects: &[Effect]) -> Vec<Row> {
        let turn = |rank: usize, lever: Lever| {
            let (effect, Lever { change, points_to, decides, .. }) = (effects[rank].clone(), lever);
            Ok(Row { change, effect, gap_max: None, points_to, decides, rank })
        };
        search(order, all, turn).expect("no lever fails")
    }

    #[test]
    fn those_that_decide_are_stronger_than_those_that_narrow_down() {
        let decide: Vec<bool> = ranked().iter().map(|(_, lever)| lever.decides).collect();
        assert_eq!(decide, [vec![true; 10], vec![false; 5]].concat());
    }

    #[test]
    fn no_order_changes_what_is_pointed_to_and_none_takes_more_replays_than_all() {
        for seed in 0..500 {
            let mut stream = Stream::new(seed, "effects", 0);
            let mut effect = |_| match stream.integer(0, 9) {
                0 => Effect::Gone,
                1 => Effect::Smaller,
                _ => Effect::Same,
            };
            let mut order = ranked();
            let effects: Vec<Effect> = (0..order.len()).map(&mut effect).collect();
            stream.shuffle(&mut order);
            let all = rows(ranked(), true, &effects);
            assert_eq!(all.len(), effects.len());
            let (usual, drawn) = (rows(ranked(), false, &effects), rows(order, false, &effects));
            assert!(usual.len() <= drawn.len() && drawn.len() <= all.len(), "{seed}: {effects:?}");
            for rows in [&usual, &drawn] {
                assert_eq!(conclusion(rows), conclusion(&all), "{seed}: {effects:?}");
            }
        }
    }
}
