//! An RL rollout harness that treats the gap between the rollout engine's logprobs and the
//! trainer's as the thing to measure.
//!
//! The rooms, each importing only those before it:
//! `base → config → ops → model → engine → rollout → trainer → gap → report → run`.

pub mod base;
pub mod config;
pub mod engine;
pub mod gap;
pub mod model;
pub mod ops;
pub mod report;
pub mod rollout;
pub mod run;
pub mod trainer;
