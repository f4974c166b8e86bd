//! One run a point: planned and predicted first, then run, with the table and the chart rewritten
//! after each.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure, Context, Result};
use serde_json::json;

use super::predict::{foretold_spikes, predict, step_ranges, Outline};
use super::progress::say;
use super::recorder::{tensorboard_writer, wall_time_s};
use super::{run_in, Manner};
use crate::base::Step;
use crate::config::{self, Config, SweepSettings};
use crate::report::sweep::{
    point_folder, read_steps, read_summary, spike_map_png, write_sweep, Outcome, Prediction, Sweep,
    SweepPoint,
};
use crate::report::tensorboard::Writer;
use crate::report::{self, RunFolder};

/// What the sweep's folder keeps of its plan, to know it again.
const PLAN: &str = "plan.json";

/// An experiment file as the command line gave it.
#[derive(Clone, Copy, Debug)]
pub struct SweepFile<'a> {
    pub path: &'a Path,
    /// `KEY=VALUE`, over the file and under the points.
    pub set: &'a [String],
}

/// The points of a sweep, planned.
struct Plan {
    name: String,
    axes: Vec<String>,
    stop_after_spikes: Option<u64>,
    /// A point's own configuration, where it has one.
    configs: Vec<Option<Config>>,
    points: Vec<SweepPoint>,
}

/// `sweep --dry-run`: every point, what it comes to and which steps will spike.
///
/// # Errors
/// A file without a sweep, or one that is wrong in itself; a point that could not run is a row.
pub fn plan_sweep(file: SweepFile) -> Result<String> {
    let plan = Plan::of(file)?;
    let mut text = String::new();
    for point in &plan.points {
        writeln!(text, "{}: {}", point.name, foretold(&point.predicted))?;
    }
    Ok(text)
}

/// Runs every point into `out/points/NAME`. With `resume`, points that are done stay as they are.
///
/// # Errors
/// A file without a sweep, a folder of another one, a full disk; and, after the last point, points
/// that failed.
pub fn sweep(file: SweepFile, out: Option<&Path>, resume: bool) -> Result<String> {
    let mut plan = Plan::of(file)?;
    let out = out.map_or_else(|| Path::new("runs").join(&plan.name), Path::to_owned);
    let mut tensorboard = plan.claim(&out, resume)?;
    for index in 0..plan.points.len() {
        plan.points[index].outcome = plan.outcome(index, &out)?;
        plan.tell(index);
        write_sweep(&out, &plan.sweep())?;
        plan.draw(&mut tensorboard)?;
    }
    plan.conclude(&out)
}

impl Plan {
    fn of(file: SweepFile) -> Result<Self> {
        let base = config::load(file.path, file.set)?;
        let Some(sweep) = &base.sweep else {
            bail!("{} has no [sweep]: run it with `gapscope run`", file.path.display());
        };
        let mut plan = Self {
            name: base.name.clone(),
            axes: sweep.keys(),
            stop_after_spikes: sweep.stop_after_spikes,
            configs: Vec::new(),
            points: Vec::new(),
        };
        for (name, settings) in sweep.settings()? {
            let set = [file.set, &config::overrides(&settings)].concat();
            plan.add(name, settings, config::load(file.path, &set).map_err(anyhow::Error::from));
        }
        Ok(plan)
    }

    /// A point that cannot be is planned all the same: it will be a row with its error.
    fn add(&mut self, name: String, settings: SweepSettings, config: Result<Config>) {
        let predicted = config.as_ref().map_err(|error| format!("{error:#}")).and_then(|config| {
            let outline = Outline::of(config);
            let predicted = outline.and_then(|it| predict(config, &it, self.stop_after_spikes));
            predicted.map_err(|error| format!("{error:#}"))
        });
        let failed = |error| Prediction { error: Some(error), ..Prediction::default() };
        let json = |value| serde_json::to_value(value).expect("TOML values are JSON values");
        self.points.push(SweepPoint {
            name,
            set: settings.into_iter().map(|(key, value)| (key, json(value))).collect(),
            steps: config.as_ref().map_or(0, |config| config.steps),
            predicted: predicted.unwrap_or_else(failed),
            outcome: Outcome::Pending,
        });
        self.configs.push(config.ok());
    }

    fn sweep(&self) -> Sweep<'_> {
        Sweep { name: &self.name, axes: &self.axes, points: &self.points }
    }

    /// Takes the folder for this sweep, or finds it again.
    fn claim(&self, out: &Path, resume: bool) -> Result<Writer> {
        let plan = out.join(PLAN);
        let mine = json!({ "name": self.name, "stop_after_spikes": self.stop_after_spikes });
        if resume {
            let text = fs::read_to_string(&plan)
                .with_context(|| format!("no sweep to resume: cannot read {}", plan.display()))?;
            let found: serde_json::Value = serde_json::from_str(&text)
                .with_context(|| format!("{} is not a sweep's plan", plan.display()))?;
            ensure!(
                found == mine,
                "{} holds another sweep: {found}, and this one is {mine}; pass another --out",
                out.display()
            );
        } else {
            let used = fs::read_dir(out).is_ok_and(|mut files| files.next().is_some());
            ensure!(
                !used,
                "the folder {} is not empty: pass --resume to go on with a sweep, or another --out",
                out.display()
            );
            fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
            report::write_json(&plan, &mine)?;
        }
        let tensorboard = out.join("tb");
        fs::create_dir_all(&tensorboard)
            .with_context(|| format!("cannot make {}", tensorboard.display()))?;
        tensorboard_writer(&tensorboard)
    }

    /// What came of a point: as its folder says if it was done before, or else by running it.
    fn outcome(&self, index: usize, out: &Path) -> Result<Outcome> {
        let point = &self.points[index];
        let folder = point_folder(out, &point.name);
        let Some(config) = &self.configs[index] else {
            let error = point.predicted.error.clone();
            return Ok(Outcome::Failed(error.expect("a point without a configuration says why")));
        };
        if let Some(done) = done_before(&folder, config)? {
            return Ok(done);
        }
        let tensorboard = out.join("tb").join(&point.name);
        for left in [&folder, &tensorboard] {
            discard(left)?;
        }
        let make = || Ok(RunFolder::create_beside(&folder, &tensorboard)?);
        let manner = Manner { stop_after_spikes: self.stop_after_spikes, quiet: true };
        match run_in(make, config, manner) {
            Ok(_) => read_back(&folder),
            Err(error) => Ok(Outcome::Failed(format!("{error:#}"))),
        }
    }

    fn tell(&self, index: usize) {
        let (point, of) = (&self.points[index], self.points.len());
        let came = match &point.outcome {
            Outcome::Done { summary, .. } => {
                format!("spike steps {}", step_ranges(&summary.spike_steps))
            }
            Outcome::Failed(error) => format!("failed: {error}"),
            Outcome::Pending => "not run".to_owned(),
        };
        let foretold = step_ranges(&point.predicted.spike_steps);
        say(&format!("{}/{of} {}: {came} (predicted {foretold})", index + 1, point.name));
    }

    fn draw(&self, tensorboard: &mut Writer) -> Result<()> {
        let done = |point: &&SweepPoint| point.outcome != Outcome::Pending;
        let points_done = Step::new(self.points.iter().filter(done).count() as u64);
        let about = "A row a point, a column a step: darker is a larger gap, white with a dot is \
             exactly 0, grey stripes did not run, a frame is a predicted spike";
        let image = spike_map_png(&self.sweep());
        tensorboard.image(points_done, wall_time_s(), "sweep/spike_map", about, &image)?;
        Ok(tensorboard.flush()?)
    }

    fn conclude(&self, out: &Path) -> Result<String> {
        let failed = |point: &&SweepPoint| matches!(point.outcome, Outcome::Failed(_));
        let failures: Vec<&str> =
            self.points.iter().filter(failed).map(|point| point.name.as_str()).collect();
        let report = out.join("report.html");
        ensure!(
            failures.is_empty(),
            "{} of {} points failed: {}; what came of each is in {}",
            failures.len(),
            self.points.len(),
            failures.join(", "),
            out.join("sweep.csv").display()
        );
        let as_predicted = self.points.iter().filter(|point| point.as_predicted() == Some(true));
        let (points, as_predicted) = (self.points.len(), as_predicted.count());
        Ok(format!(
            "{}: {points} points, {as_predicted} of them with exactly the spikes predicted\n\
             report: {}\n",
            self.name,
            report.display()
        ))
    }
}

/// A point's run that came to its end, of the same configuration.
fn done_before(folder: &Path, config: &Config) -> Result<Option<Outcome>> {
    let Ok(run) = RunFolder::open(folder) else { return Ok(None) };
    let text = fs::read_to_string(run.config())?;
    ensure!(
        text == config.to_json() || !run.summary().is_file(),
        "{} was run with another configuration: pass another --out",
        folder.display()
    );
    match read_summary(&run.summary()) {
        Ok(summary) if summary.error.is_none() => read_back(folder).map(Some),
        _ => Ok(None),
    }
}

fn read_back(folder: &Path) -> Result<Outcome> {
    let run = RunFolder::open(folder)?;
    let (summary, gaps) = (Box::new(read_summary(&run.summary())?), read_steps(&run.steps())?);
    Ok(Outcome::Done { summary, gaps })
}

/// What an interrupted run of a point has left: it begins anew.
fn discard(folder: &PathBuf) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot clear {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// A prediction in a line.
fn foretold(predicted: &Prediction) -> String {
    if let Some(error) = &predicted.error {
        return format!("cannot run: {error}");
    }
    let Prediction { num_blocks, blocks_per_step, laps, .. } = predicted;
    let spikes = foretold_spikes(predicted);
    format!(
        "{num_blocks} blocks, {blocks_per_step:.1} taken a step, {laps:.2} laps; spikes {spikes}"
    )
}
