//! An RL rollout harness that treats the gap between the rollout engine's logprobs and the
//! trainer's as the thing to measure.
//!
//! This page is the map. The house is ten rooms in a row, and a room imports only rooms to its
//! left; `src/main.rs`, the command line, is to the right of them all.
//!
//! `base → config → ops → model → engine → rollout → trainer → gap → report → run`
//!
//! # The loop
//!
//! [`run::run`] is the sentence that the rest spells out, step after step: the [`engine`]
//! **generates** rollouts, which [`rollout`] rewards; the [`trainer`] **scores** every token again,
//! before any weight update; [`gap`] **compares** the two log-probabilities; the trainer
//! **updates** and hands its weights to the engine; [`report`] writes down what happened.
//!
//! Each token has up to four log-probabilities, its *legs*. `decode` is the engine's as it sampled,
//! `prefill` the engine's over the finished sequence, `trainer` the trainer's forward, `reference`
//! an independent forward in candle. Which two disagree says where to look. In invariant numerics
//! a healthy run's gap is exactly 0: decode, prefill and trainer call the same operations with the
//! same roundings, so they agree bit for bit, and one ulp is a finding. In fast numerics rounding
//! follows the shape, and what healthy shapes differ by is measured: the floor.
//!
//! # The rooms
//!
//! * [`base`]: the words everyone uses. Index newtypes, log-probabilities, the contract they are
//!   scored under, randomness by counter. Never a model, an engine or a file.
//! * [`config`]: an experiment file as written to a checked [`config::Config`]. All defaults are
//!   decided here and nowhere else.
//! * [`ops`]: one file an operation, in plain loops over packed rows with its backward beside it.
//!   The only room with `unsafe`, the only one that computes an address. Never a policy.
//! * [`model`]: Hugging Face folders, the layer plan, the blocks; a block's sequence form, step
//!   form and backward side by side. Never a rank, a batch or a cache page.
//! * [`engine`]: a small vLLM V1, and several side by side. The scheduler, pool and batch are pure
//!   bookkeeping; the runner moves tensors. Never text, never the trainer.
//! * [`rollout`]: the record of a rollout and where it comes from, embedded engines or servers
//!   over HTTP; tasks, rewards, advantages; dumps of others. The one process started outside `run`
//!   is the user's own reward command. Never weights.
//! * [`trainer`]: units as FSDP shards them, scoring, the GRPO loss, AdamW; and the candle
//!   [`trainer::reference`], which shares no kernel with the rest. Never the engine.
//! * [`gap`]: pairing, measures, floor, verdicts. Records in, numbers out: never a file, a clock, a
//!   setting or the name of a planted fault.
//! * [`report`]: TensorBoard, Parquet, JSON, one HTML page. Never a decision, never a clock.
//! * [`run`]: the loop, checkpoints, benchmarks, dry runs. It alone reads the clock. Never
//!   mathematics.
//!
//! # Where a new line goes
//!
//! A knob is a line of `config::keys`, with its default and meaning. Arithmetic on rows is an
//! operation in `ops`, with a case table and a gradient check; how operations make a layer is
//! `model`. Which request runs when, and where its state lies, is `engine`. A new source of
//! problems or rewards is `rollout`; whatever changes weights is `trainer`. A number about the two
//! sides is `gap::measures`, and a named culprit is `gap::verdict` with the evidence for it. A
//! file format is `report`. What is left, the order in which these are called, is `run`.
//!
//! A planted fault lives beside what it breaks, is chosen by config and is always compiled. Absent
//! is `None`, never 0; what is not finite is kept and counted. Offsets and file sizes are `u64`.

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
