//! One run of a case.

use std::path::PathBuf;

use anyhow::Result;

use super::super::{begin, Manner};
use super::blind;
use crate::base::Step;
use crate::config::Config;
use crate::gap::Finding;
use crate::report::RunFolder;

/// A run, and what it left.
pub(super) struct Played {
    pub(super) folder: RunFolder,
    pub(super) steps: u64,
    pub(super) spikes: Vec<Step>,
    pub(super) first_wrapped_block: Option<u64>,
}

impl Played {
    pub(super) fn of(config: &Config, out: PathBuf) -> Result<Self> {
        let manner = Manner { quiet: true, ..Manner::default() };
        let summary = begin(|| Ok(RunFolder::create(&out)?), config, manner)?;
        Ok(Self {
            folder: RunFolder::open(out)?,
            steps: summary.steps_done,
            spikes: summary.spike_steps,
            first_wrapped_block: summary.first_wrapped_block,
        })
    }

    /// What the other process says of this run's evidence.
    pub(super) fn judged(&self) -> Result<Vec<Finding>> {
        blind::judge(&self.folder, &self.spikes)
    }
}
