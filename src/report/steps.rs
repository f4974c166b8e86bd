//! Steps in words.

use crate::base::{EngineIndex, Step};

/// Rising steps as runs, `12` and `24-26`, with something between them; nothing of none.
#[must_use]
pub fn step_ranges(steps: &[Step], separator: &str) -> String {
    let runs = steps.chunk_by(|a, b| a.get() + 1 == b.get());
    windows(runs.map(|run| (run[0], run[run.len() - 1])), separator)
}

/// As [`step_ranges`], of runs by their first and last step.
pub(super) fn windows(windows: impl IntoIterator<Item = (Step, Step)>, separator: &str) -> String {
    let text = |(first, last)| match first == last {
        true => format!("{first}"),
        false => format!("{first}-{last}"),
    };
    windows.into_iter().map(text).collect::<Vec<_>>().join(separator)
}

/// `engine 0: 12, 24; engine 1: none` with `, ` between steps; nothing of no engine.
pub(super) fn of_engines<'a>(
    each: impl Iterator<Item = (EngineIndex, &'a [Step])>,
    separator: &str,
) -> Option<String> {
    let one = |(engine, steps): (EngineIndex, &[Step])| {
        let steps = step_ranges(steps, separator);
        format!("engine {engine}: {}", if steps.is_empty() { "none" } else { &steps })
    };
    let all: Vec<String> = each.map(one).collect();
    (!all.is_empty()).then(|| all.join("; "))
}
