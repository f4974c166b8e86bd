//! Checkpoints, and the folder of a run that goes on from one.

use std::path::Path;

use anyhow::{bail, ensure, Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::compare::config_differences;
use super::launch::Launched;
use super::progress::say;
use super::recorder::{Recorder, RecorderState};
use super::session::{Session, SessionState};
use crate::base::Step;
use crate::config::Config;
use crate::report::sweep::read_summary;
use crate::report::{
    flatten, read_rows, write_checkpoint, Claim, ReportError, RunFolder, SavedCheckpoint,
};

/// Of the layout of [`State`].
const VERSION: u32 = 4;

#[derive(Serialize, Deserialize)]
struct State {
    version: u32,
    /// The last one that is done; 0 after a warm start.
    step: Step,
    /// [`fingerprint`] of the configuration.
    config: u64,
    session: SessionState,
    recorder: RecorderState,
}

/// The key that may be another when a run goes on.
const RANKS: &str = "trainer.ranks";

/// xxh3 of a configuration as it is saved, whatever the trainer's ranks: any number of them goes on
/// from any other's checkpoint.
fn fingerprint(config: &Config) -> u64 {
    let mut config = config.clone();
    config.trainer.ranks = 1;
    xxh3_64(config.to_json().as_bytes())
}

/// Writes the checkpoint of a step that is done and recorded; then the oldest ones go.
pub(super) fn write(
    folder: &RunFolder,
    session: &Session,
    step: Step,
    recorder: RecorderState,
) -> Result<()> {
    let config = fingerprint(&session.config);
    let state = State { version: VERSION, step, config, session: session.snapshot(), recorder };
    write_checkpoint(&folder.checkpoint(step), &state, session.arrays()?)?;
    Ok(folder.keep_checkpoints(session.config.checkpoint.keep as usize)?)
}

/// What a process that has ended has left of a run, in this one's hands.
pub(super) struct Left {
    folder: RunFolder,
    claim: Claim,
    /// `None` where it did not come as far as a checkpoint.
    last: Option<(SavedCheckpoint, State)>,
}

impl Left {
    /// `None` where the run has come to its end.
    ///
    /// # Errors
    /// A folder that another process writes to, a run of another configuration, or checkpoints that
    /// are all torn or gone. Nothing has been changed then.
    pub(super) fn open(folder: RunFolder, config: &Config) -> Result<Option<Self>> {
        let mut claim = Claim::take(&folder.config())?;
        let (found, mine) = (claim.text()?, config.to_json());
        // A start that was cut off has written the beginning of it.
        if !mine.starts_with(&found) {
            check_config(folder.root(), &found, &mine)?;
        }
        if read_summary(&folder.summary()).is_ok_and(|summary| summary.error.is_none()) {
            folder.drop_checkpoints()?;
            return Ok(None);
        }
        let last = latest(&folder, config)?;
        last.iter().try_for_each(|(_, state)| state.recorder.check(&folder))?;
        if found != mine {
            claim.write(&mine)?;
        }
        Ok(Some(Self { folder, claim, last }))
    }

    /// Session and record as they were after the last step that is told, or at the very start.
    ///
    /// # Errors
    /// A model or files that were changed since.
    pub(super) fn resume(
        self,
        config: &Config,
        quiet: bool,
    ) -> Result<(Session, Recorder, Option<Step>)> {
        let held = (self.folder, self.claim);
        let Some((saved, State { step, session: state, recorder, .. })) = self.last else {
            let launched = Launched::start(config, held.0.root())?;
            let session = Session::open_with(config, launched, None)?;
            held.0.clear()?;
            let recorder = Recorder::create(held, &session, quiet)?;
            return Ok((session, recorder, None));
        };
        let launched = Launched::start(config, held.0.root())?;
        let session = Session::reopen(config, launched, state, &saved)?;
        let recorder = Recorder::resume(held, &session, quiet, (step, recorder))?;
        Ok((session, recorder, Some(step)))
    }

    /// The step that it goes on behind.
    pub(super) fn step(&self) -> Option<Step> {
        self.last.as_ref().map(|(_, state)| state.step)
    }
}

/// The latest checkpoint that is whole. One that is torn is told of.
fn latest(folder: &RunFolder, config: &Config) -> Result<Option<(SavedCheckpoint, State)>> {
    let mut torn: Option<ReportError> = None;
    for step in folder.saved_steps()? {
        let read = SavedCheckpoint::read(&folder.checkpoint(step));
        match read.and_then(|saved| Ok((state(&saved, config)?, saved))) {
            Ok((state, saved)) => {
                if let Some(error) = torn {
                    say(&format!("{error}: going on from step {step}, the one before"));
                }
                return Ok(Some((saved, state)));
            }
            Err(error) => torn = torn.or(Some(error)),
        }
    }
    let again = "run the experiment again with another --out";
    if let Some(error) = torn {
        bail!("{error}; there is no earlier one: {again}");
    }
    let (rows, every) = (folder.steps(), config.checkpoint.every);
    let done = match rows.is_file() {
        true => read_rows(&rows)?.map_while(Result::ok).last().map_or(0, |row| row.step.get()),
        false => 0,
    };
    ensure!(
        done <= every,
        "{} has {done} steps, one checkpoint every {every}, and none is left in {}: {again}",
        rows.display(),
        folder.checkpoints().display()
    );
    Ok(None)
}

fn state(saved: &SavedCheckpoint, config: &Config) -> Result<State, ReportError> {
    let state: State = saved.state()?;
    if state.version != VERSION {
        return Err(saved.bad(format!("it is of version {}, this is {VERSION}", state.version)));
    }
    if state.config != fingerprint(config) {
        return Err(saved.bad("it is of another configuration".to_owned()));
    }
    Ok(state)
}

/// # Errors
/// Names the first key that differs and must not.
fn check_config(folder: &Path, found: &str, mine: &str) -> Result<()> {
    let settings = |text| serde_json::from_str::<Value>(text).context("not a configuration");
    let both = settings(found).and_then(|found| Ok([flatten(&found), flatten(&settings(mine)?)]));
    let folder = folder.display();
    let Ok(both) = both else {
        bail!("{folder}/config.json is not what a run writes: pass another --out");
    };
    let mut differences = config_differences(both);
    differences.retain(|(key, _)| key != RANKS);
    let Some((key, [found, mine])) = differences.first() else { return Ok(()) };
    let shown = |value: &Option<Value>| value.as_ref().map_or("absent".into(), Value::to_string);
    bail!(
        "{folder} was run with {key} = {}, and here it is {}: resume a run with its own \
         configuration, or pass another --out",
        shown(found),
        shown(mine)
    )
}
