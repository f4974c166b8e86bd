//! What trainer ranks say to one another. A call returns on every rank or, when a rank has left or
//! does not come, fails on the others.

#[cfg(feature = "cuda")]
mod nccl;
mod shared;

#[cfg(feature = "cuda")]
pub use nccl::Nccl;
pub(super) use shared::ranks;
pub use shared::{SharedMemory, PATIENCE};

use super::TrainerError;
use crate::base::Rank;
use crate::ops::array::Array;
use crate::ops::shards::Arriving;
use crate::ops::weights::Weights;

/// One rank's end of the line. Every rank makes the same calls in the same order. Shards are cut
/// and padded as `ops::shards` has it.
///
/// # Errors
/// Every call fails with [`TrainerError::RankLeft`] where another rank has dropped its end, and
/// with [`TrainerError::RankMissing`] where one does not make the same call within a bound.
pub trait Collective: Send {
    fn rank(&self) -> Rank;

    fn world_size(&self) -> usize;

    /// Whether a gather goes on while its caller computes.
    fn runs_ahead(&self) -> bool {
        false
    }

    /// Starts to join every rank's shard to `len` elements, in the dtype that they have.
    fn all_gather(&self, shard: &Weights, len: usize) -> Result<Arriving, TrainerError>;

    /// This rank's shard of the f32 sum of all ranks' arrays, which are equally long.
    fn reduce_scatter(&self, whole: Array) -> Result<Array, TrainerError>;

    /// The sums of all ranks' numbers, in rank order.
    fn all_reduce(&self, numbers: &[f64]) -> Result<Vec<f64>, TrainerError>;
}
