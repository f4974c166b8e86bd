//! One run a point: planned and predicted first, then run, with the table and the chart rewritten
//! after each.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{bail, ensure, Context, Result};
use serde_json::json;

use super::predict::{foretold_spikes, or_none, predict, Outline};
use super::predict::{NOT_OF_SERVERS, NOT_WITH_A_CACHE};
use super::progress::say;
use super::recorder::{tensorboard_writer, wall_time_s};
use super::{begin, go_on, told, Interrupted, Left, Manner};
use crate::base::Step;
use crate::config::{self, Config, SweepSettings};
use crate::report::sweep::{
    point_folder, read_steps, read_summary, spike_map_png, write_sweep, Outcome, Prediction, Sweep,
    SweepPoint,
};
use crate::report::tensorboard::Writer;
use crate::report::{Claim, ReportError, RunFolder};

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
    let (_claim, mut tensorboard) = plan.claim(&out, resume)?;
    for point in &plan.points {
        say(&format!("{}: {}", point.name, foretold(&point.predicted)));
    }
    write_sweep(&out, &plan.sweep())?;
    plan.draw(&mut tensorboard)?;
    for index in 0..plan.points.len() {
        let done = plan.done_before(index, &out)?;
        let is_new = done.is_none();
        plan.points[index].outcome = match done {
            Some(outcome) => outcome,
            None => plan.run(index, &out)?,
        };
        plan.tell(index);
        write_sweep(&out, &plan.sweep())?;
        if is_new {
            plan.draw(&mut tensorboard)?;
        }
    }
    plan.conclude(&out)
}

/// # Errors
/// A `--set` of a key that the sweep sets at its points.
pub(super) fn refuse_swept(set: &[String], axes: &[String]) -> Result<()> {
    let swept = |set: &&String| {
        let key = set.split_once('=').map(|(key, _)| key.trim());
        key.is_some_and(|key| axes.iter().any(|swept| swept == key))
    };
    match set.iter().find(swept) {
        Some(set) => {
            bail!("--set {set}: the sweep sets this key at its points; drop the one or the other")
        }
        None => Ok(()),
    }
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
        refuse_swept(file.set, &plan.axes)?;
        for (name, settings) in sweep.settings()? {
            let set = [file.set, &config::overrides(&settings)].concat();
            plan.add(name, settings, config::load(file.path, &set).map_err(anyhow::Error::from));
        }
        Ok(plan)
    }

    /// A point that cannot be is planned all the same: it will be a row with its error.
    fn add(&mut self, name: String, settings: SweepSettings, config: Result<Config>) {
        let predicted = config.as_ref().map_err(told).and_then(|config| {
            let outline = Outline::of(config);
            let predicted = outline.and_then(|it| predict(config, &it, self.stop_after_spikes));
            predicted.map_err(|error| told(&error))
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
    fn claim(&self, out: &Path, resume: bool) -> Result<(Claim, Writer)> {
        let plan = out.join(PLAN);
        let mine = json!({ "name": self.name, "stop_after_spikes": self.stop_after_spikes });
        let text = format!("{mine:#}\n");
        let mut claim;
        if resume {
            ensure!(
                plan.is_file(),
                "no sweep to resume in {}, run it without --resume: there is no {}",
                out.display(),
                plan.display()
            );
            claim = Claim::take(&plan)?;
            let found = claim.text()?;
            // A start that was cut off has written the beginning of it.
            ensure!(
                text.starts_with(&found),
                "{} holds another sweep: {found}, and this one is {mine}; pass another --out",
                out.display()
            );
        } else {
            // What is hidden was left by a start that was cut off.
            let shown = |file: fs::DirEntry| !file.file_name().as_encoded_bytes().starts_with(b".");
            let used =
                fs::read_dir(out).is_ok_and(|mut files| files.any(|file| file.is_ok_and(shown)));
            ensure!(
                !used,
                "the folder {} is not empty: pass --resume to go on with a sweep, or another --out",
                out.display()
            );
            fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
            claim = Claim::make(&plan)?;
        }
        claim.write(&text)?;
        self.check_points(out)?;
        let tensorboard = out.join("tb");
        fs::create_dir_all(&tensorboard)
            .with_context(|| format!("cannot make {}", tensorboard.display()))?;
        Ok((claim, tensorboard_writer(&tensorboard)?))
    }

    /// No point that is done may be of another configuration.
    fn check_points(&self, out: &Path) -> Result<()> {
        for (point, config) in self.points.iter().zip(&self.configs) {
            let folder = point_folder(out, &point.name);
            let other = |config: &Config| {
                let run = RunFolder::open(&folder).ok()?;
                let found = fs::read(run.config()).ok()?;
                (run.summary().is_file() && found != config.to_json().as_bytes()).then_some(())
            };
            ensure!(
                config.as_ref().and_then(other).is_none(),
                "{} was run with another configuration: pass another --out",
                folder.display()
            );
        }
        Ok(())
    }

    /// What came of a point whose run came to its end before. One that cannot be read back runs
    /// again.
    fn done_before(&self, index: usize, out: &Path) -> Result<Option<Outcome>> {
        let folder = point_folder(out, &self.points[index].name);
        let done = |outcome: &Outcome| match outcome {
            Outcome::Done { summary, .. } => summary.error.is_none(),
            Outcome::Pending | Outcome::Failed(_) => false,
        };
        let done = read_back(&folder).ok().filter(done);
        if done.is_some() {
            // Its process may have been killed before it did so.
            RunFolder::open(&folder)?.drop_checkpoints()?;
        }
        Ok(done)
    }

    fn run(&self, index: usize, out: &Path) -> Result<Outcome> {
        let point = &self.points[index];
        let folder = point_folder(out, &point.name);
        let Some(config) = &self.configs[index] else {
            let error = point.predicted.error.clone();
            return Ok(Outcome::Failed(error.expect("a point without a configuration says why")));
        };
        let tensorboard = out.join("tb").join(&point.name);
        let manner = Manner { stop_after_spikes: self.stop_after_spikes, quiet: true };
        let ran = match left(&folder, &tensorboard, config)? {
            Some(left) => go_on(left, config, manner),
            None => {
                for left in [&folder, &tensorboard] {
                    discard(left)?;
                }
                let free = RunFolder::create_beside(&folder, &tensorboard)?;
                begin(free, config, manner)
            }
        };
        match ran {
            Ok(_) => read_back(&folder),
            Err(error) if error.is::<Interrupted>() => Err(error),
            // What it measured before it failed is in its folder, the error beside it.
            Err(error) => Ok(read_back(&folder).unwrap_or_else(|_| Outcome::Failed(told(&error)))),
        }
    }

    fn tell(&self, index: usize) {
        let (point, of) = (&self.points[index], self.points.len());
        let came = match &point.outcome {
            Outcome::Done { summary, .. } => match &summary.error {
                Some(error) => format!("failed after {} steps: {error}", summary.steps_done),
                None => {
                    let own = summary.spikes_by_engine(", ");
                    let own = own.map_or(String::new(), |own| format!("; {own}"));
                    format!("spike steps {}{own}", or_none(&summary.spike_steps))
                }
            },
            Outcome::Failed(error) => format!("failed: {error}"),
            Outcome::Pending => "not run".to_owned(),
        };
        let foretold = point.prediction().map_or(String::new(), |found| {
            let own = found.spikes_by_engine(", ");
            let own = own.map_or(String::new(), |own| format!("; {own}"));
            format!(" (predicted {}{own})", or_none(&found.spike_steps))
        });
        say(&format!("{}/{of} {}: {came}{foretold}", index + 1, point.name));
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
        let failed = |point: &&SweepPoint| point.error().is_some();
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
        let (name, points, as_predicted) = (&self.name, self.points.len(), as_predicted.count());
        let foretold = self.points.iter().any(|point| point.prediction().is_some());
        let done = match foretold {
            true => format!("{as_predicted} of {points} points with exactly the spikes predicted"),
            false => format!("{points} points done"),
        };
        Ok(format!("{name}: {done}\nreport: {}\n", report.display()))
    }
}

fn read_back(folder: &Path) -> Result<Outcome> {
    let run = RunFolder::open(folder)?;
    let (summary, gaps) = (Box::new(read_summary(&run.summary())?), read_steps(&run.steps())?);
    Ok(Outcome::Done { summary, gaps })
}

/// What an interrupted run of a point has left, if it can go on.
fn left(folder: &Path, tensorboard: &Path, config: &Config) -> Result<Option<Left>> {
    let Ok(folder) = RunFolder::open_beside(folder, tensorboard) else { return Ok(None) };
    match Left::open(folder, config) {
        Err(error) if matches!(error.downcast_ref(), Some(ReportError::InUse { .. })) => Err(error),
        left => Ok(left.ok().flatten()),
    }
}

/// Clears away what cannot go on: its point begins anew.
fn discard(folder: &Path) -> Result<()> {
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
        let runs_all_the_same = [NOT_WITH_A_CACHE, NOT_OF_SERVERS].contains(&error.as_str());
        return if runs_all_the_same { error.clone() } else { format!("cannot run: {error}") };
    }
    let Prediction { num_blocks, blocks_per_step, laps, .. } = predicted;
    let spikes = foretold_spikes(predicted);
    format!(
        "{num_blocks} blocks, {blocks_per_step:.1} taken a step, {laps:.2} laps; spikes {spikes}"
    )
}
