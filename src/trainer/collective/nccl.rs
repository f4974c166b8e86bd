//! Ranks with a GPU each.

use super::{Collective, SharedMemory};
use crate::base::Rank;
use crate::config::Dtype;
use crate::ops::array::{Array, Device};
use crate::ops::cuda::Communicator;
use crate::ops::shards::Arriving;
use crate::ops::weights::Weights;
use crate::trainer::TrainerError;

/// Arrays go through NCCL. The ranks, threads of one process, meet in its memory before each
/// collective: NCCL itself would wait for ever for one that does not come. What a GPU does after
/// that has no bound of ours.
#[derive(Debug)]
pub struct Nccl {
    meeting: SharedMemory,
    link: Communicator,
}

impl Nccl {
    /// One end for each of the devices, which are different GPUs, in rank order.
    ///
    /// # Errors
    /// [`TrainerError::NoLink`].
    pub fn world(devices: &[Device]) -> Result<Vec<Self>, TrainerError> {
        let gpu = |device: &Device| match device {
            Device::Cuda(gpu) => std::sync::Arc::clone(gpu),
            Device::Cpu => panic!("NCCL is between GPUs"),
        };
        let gpus: Vec<_> = devices.iter().map(gpu).collect();
        let links = Communicator::world(&gpus).map_err(TrainerError::NoLink)?;
        let ends = SharedMemory::world(devices.len()).into_iter().zip(links);
        Ok(ends.map(|(meeting, link)| Self { meeting, link }).collect())
    }
}

impl Collective for Nccl {
    fn rank(&self) -> Rank {
        self.meeting.rank()
    }

    fn world_size(&self) -> usize {
        self.meeting.world_size()
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn all_gather(&self, shard: &Weights, len: usize) -> Result<Arriving, TrainerError> {
        let call = ("gather", len, shard.dtype());
        self.link.all_gather(shard, len, || self.meeting.meet_for(call))
    }

    fn reduce_scatter(&self, whole: Array) -> Result<Array, TrainerError> {
        let call = ("sum", whole.len(), Dtype::F32);
        self.link.reduce_scatter(whole, || self.meeting.meet_for(call))
    }

    fn all_reduce(&self, numbers: &[f64]) -> Result<Vec<f64>, TrainerError> {
        self.meeting.all_reduce(numbers)
    }
}
