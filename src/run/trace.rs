//! When the engine is watched, and what of it is kept.

use anyhow::Result;

use super::session::Session;
use crate::base::Step;
use crate::config::{TraceConfig, Traced};
use crate::engine::{Trace, WatchList};
use crate::report::{write_trace, RunFolder, TraceOf};

/// Before a step: looks on, or looks away.
pub(super) fn watch(session: &mut Session, step: Step, spikes: u64) {
    let Some(TraceConfig { what, max_bytes }) = session.config.trace else { return };
    let everything = WatchList { request: None, max_bytes };
    session.source.watch(match what {
        Traced::Always => Some(everything),
        Traced::FirstSpike => (spikes == 0).then_some(everything),
        Traced::Request(id) if id.step == step => {
            Some(WatchList { request: Some(id), ..everything })
        }
        Traced::Request(_) => None,
    });
}

/// After a step: what was seen is written down, or forgotten where only a spike was asked for.
pub(super) fn keep(
    folder: &RunFolder,
    session: &Session,
    step: Step,
    (trace, spike): (Option<Trace>, bool),
) -> Result<()> {
    let Some(TraceConfig { what, max_bytes }) = session.config.trace else { return Ok(()) };
    let Some(trace) = trace.filter(|_| what != Traced::FirstSpike || spike) else { return Ok(()) };
    let parts = session.plan.parts();
    let [txt, jsonl] = folder.trace(step)?;
    let of = TraceOf { step, parts: &parts, trace: &trace, max_bytes };
    Ok(write_trace(&txt, &jsonl, &of)?)
}
