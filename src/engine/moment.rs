//! How far an engine step has come, for whoever has a clock.

use super::StepBatch;

/// The moments of one engine step, in order. Between the first two and between the last two lies
/// the host's own work; between `Built` and `Sampled` the forward, with the launches that it takes.
#[derive(Clone, Copy, Debug)]
pub enum Moment<'a> {
    /// Nothing is done yet.
    Begun,
    /// The step is scheduled and its rows are built.
    Built(&'a StepBatch),
    /// The tokens of all rows are on the host.
    Sampled,
    /// They are with their requests, and the blocks of those that ended are given back.
    Updated,
}
