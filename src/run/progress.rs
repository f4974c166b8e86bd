//! What a person watching sees: a bar on a terminal, plain lines elsewhere. All on stderr.

use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};

use super::session::Evaluation;
use crate::base::{EngineIndex, Step};
use crate::report::html::StepPoint;

pub(super) struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
    quiet: bool,
}

impl Progress {
    /// `done` of `steps` are over. Where there is no bar, `quiet` says nothing at all.
    pub(super) fn new(steps: u64, done: Step, quiet: bool) -> Self {
        let bar = bar(steps);
        if let Some(bar) = &bar {
            bar.set_position(done.get());
        }
        Self { bar, steps, quiet }
    }

    fn line(&self, text: String, advance: bool) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(text);
                bar.inc(u64::from(advance));
            }
            None if self.quiet => {}
            None => say(&text),
        }
    }

    pub(super) fn warm_start(&self, step: Step, loss: f64) {
        if self.bar.is_some() || step.get().is_multiple_of(10) || step.get() == 1 {
            self.line(format!("warm start {step}: loss {loss:.4}"), false);
        }
    }

    /// `engines` are those that spiked, where there are several.
    pub(super) fn step(
        &self,
        step: Step,
        point: &StepPoint,
        engines: &[EngineIndex],
        findings: usize,
    ) {
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.3e}"));
        let reward = point.reward_mean.map_or("-".to_owned(), |v| format!("{v:.3}"));
        let gap = match point.gap.gap_max {
            Some(0.0) => "0".to_owned(),
            other => number(other),
        };
        let engines: Vec<String> = engines.iter().map(EngineIndex::to_string).collect();
        let whose = match &engines[..] {
            [] => String::new(),
            [one] => format!(" of engine {one}"),
            several => format!(" of engines {}", several.join(", ")),
        };
        let spike = match point.gap.spike {
            true => format!("  SPIKE{whose}, {findings} finding(s)"),
            false => String::new(),
        };
        let (at, of) = (step.get(), self.steps);
        self.line(format!("step {at}/{of}  reward {reward}  gap max {gap}{spike}"), true);
    }

    pub(super) fn evaluation(&self, found: &Evaluation) {
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.3}"));
        let (reward, std) = (number(found.greedy_reward_mean), number(found.logits_std));
        let text =
            format!("greedy reward {reward} on {} problems, logits std {std}", found.prompts);
        match &self.bar {
            Some(bar) => bar.println(text),
            None if self.quiet => {}
            None => say(&text),
        }
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }
}

/// Where there is a terminal.
fn bar(len: u64) -> Option<ProgressBar> {
    std::io::stderr().is_terminal().then(|| {
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} [{elapsed}<{eta}] {msg}");
        ProgressBar::new(len).with_style(style.expect("the template is well formed"))
    })
}

/// A line on stderr. That nobody reads it any more is no reason to end a run.
pub(super) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// How far a long work has come: a bar on a terminal, a line each tenth elsewhere.
pub(super) struct Meter {
    bar: Option<ProgressBar>,
    what: &'static str,
    done: u64,
    total: u64,
}

/// Work of so few parts is over before a line could be read.
const SHORT: u64 = 100_000;

impl Meter {
    pub(super) fn new(what: &'static str, total: u64) -> Self {
        Self { bar: bar(total).map(|bar| bar.with_message(what)), what, done: 0, total }
    }

    pub(super) fn add(&mut self, parts: u64) {
        let tenth = |done: u64| u128::from(done) * 10 / u128::from(self.total.max(1));
        let (before, after) = (tenth(self.done), tenth(self.done + parts));
        self.done += parts;
        match &self.bar {
            Some(bar) => bar.inc(parts),
            None if self.total >= SHORT && after > before => {
                say(&format!("{} of {} {}", self.done, self.total, self.what));
            }
            None => {}
        }
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
