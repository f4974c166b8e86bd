//! Pairing, measures, floor, verdicts: records in, numbers out.
//!
//! d = logp(train side) - logp(infer side) of one sampled token, before any weight update; the gap
//! is |d|, in nats. Everything here is a pure function of the records and of numbers handed in: no
//! file, clock, configuration or policy. Sums are f64 in record order, nothing is clamped, and
//! where nothing was compared a statistic is `None`.

mod alarm;
mod blame;
mod case_file;
mod finding;
mod floor;
mod layers;
mod measures;
mod pair;
mod place;
mod probes;
mod refit;
mod routes;
mod sequences;
pub mod stats;
mod summary;
mod table;
mod tail;
mod tally;
#[cfg(test)]
mod testing;
mod verdict;

pub use alarm::{Alarm, Limit};
pub use blame::{blame_requests, second_opinion, three_way, Blame, Opinion};
pub use case_file::CaseFile;
pub use finding::{token_mismatch, Finding, FindingKind};
pub use floor::{is_spike, worst, WorstToken};
pub use layers::{first_difference, FirstDifference, StreamRow};
pub use measures::{measures, rollout_measures, Gauge};
pub use pair::{pair, Leg, Legs, PairError, PairedToken, Pairs, Sequence};
pub use place::{shift, LagScore, WORST_KEPT};
pub use probes::{Probe, Probes};
pub use refit::{refit, Refit, Row, REFIT_LEAVES};
pub use routes::{LayerRoutes, RouteTally};
pub use summary::{StepGap, Totals};
pub use table::{Metric, Table, HEADLINES};
pub use tail::Floor;
pub use tally::Tally;
pub use verdict::{verdict, Evidence, TensorFingerprint, UnlikeMode, WeightsOf};
