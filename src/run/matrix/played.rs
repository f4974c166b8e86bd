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
    /// With a spike, or with a finding all the same.
    pub(super) told: Vec<Step>,
    pub(super) first_wrapped_block: Option<u64>,
}

impl Played {
    pub(super) fn of(config: &Config, out: PathBuf) -> Result<Self> {
        let manner = Manner { quiet: true, ..Manner::default() };
        let summary = begin(RunFolder::create(&out)?, config, manner)?;
        let folder = RunFolder::open(out)?;
        let is_told =
            |step: &Step| summary.spike_steps.contains(step) || folder.evidence(*step).exists();
        let told = (1..=summary.steps_done).map(Step::new).filter(is_told).collect();
        Ok(Self {
            folder,
            steps: summary.steps_done,
            told,
            first_wrapped_block: summary.first_wrapped_block,
        })
    }

    /// What the other process says of this run's evidence.
    pub(super) fn judged(&self) -> Result<Vec<Finding>> {
        blind::judge(&self.folder, &self.told)
    }
}
