//! NCCL between the GPUs of one machine: a thread a GPU, collectives on a stream beside the one
//! that computes.
//!
//! NCCL adds up in an order that follows from its algorithm, protocol and topology: all three are
//! the same in every run on one machine, because the first two are pinned before it starts.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use cudarc::driver::{CudaEvent, CudaStream};
use cudarc::nccl::result::NcclError;
use cudarc::nccl::safe::{Comm, Id, ReduceOp};

use super::probe::call;
use super::{nccl_version, DeviceError, Floats, Gpu, OrFail};
use crate::ops::array::Array;
use crate::ops::shards::{shard_len, Arriving};
use crate::ops::weights::cuda::Bytes;
use crate::ops::weights::Weights;

/// What is set where the environment does not say otherwise. NVLink multicast adds up inside the
/// switch, and is not there on every machine.
const PINNED: [(&str, &str); 3] =
    [("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple"), ("NCCL_NVLS_ENABLE", "0")];

/// Names that [`Communicator::world`] has set in this process.
static PINNED_HERE: Mutex<Vec<&str>> = Mutex::new(Vec::new());

/// Variables of NCCL's that this process has set for itself, which no other program is to inherit.
#[must_use]
pub fn pinned_here() -> Vec<&'static str> {
    PINNED_HERE.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// One GPU's end of a ring.
pub struct Communicator {
    comm: Comm,
    gpu: Arc<Gpu>,
    count: usize,
    /// Where collectives run.
    stream: Arc<CudaStream>,
}

// SAFETY: NCCL's handle is used by one thread at a time, whichever it is: it has one owner, and is
// not `Sync`.
unsafe impl Send for Communicator {}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}

impl Communicator {
    /// One end a GPU, in order. The GPUs are all different.
    ///
    /// # Errors
    /// NCCL that is missing or refuses.
    pub fn world(gpus: &[Arc<Gpu>]) -> Result<Vec<Self>, DeviceError> {
        if nccl_version().is_none() {
            return Err(DeviceError::NoNccl);
        }
        for (name, value) in PINNED.iter().filter(|(name, _)| std::env::var_os(name).is_none()) {
            std::env::set_var(name, value);
            PINNED_HERE.lock().unwrap_or_else(PoisonError::into_inner).push(name);
        }
        let id = Id::new().map_err(|source| refused("begin", &source))?;
        // What can fail on one GPU alone fails before the others wait for it.
        let streams = gpus.iter().map(|gpu| stream(gpu)).collect::<Result<Vec<_>, _>>()?;
        // Each call returns once all have been made.
        thread::scope(|scope| {
            let count = gpus.len();
            let mut threads = Vec::with_capacity(count);
            for (rank, (gpu, stream)) in gpus.iter().zip(streams).enumerate() {
                threads.push(scope.spawn(move || Self::connect(gpu, stream, (rank, count), id)));
            }
            let ends = threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload))
            });
            ends.collect()
        })
    }

    fn connect(
        gpu: &Arc<Gpu>,
        stream: Arc<CudaStream>,
        (rank, count): (usize, usize),
        id: Id,
    ) -> Result<Self, DeviceError> {
        gpu.stream().context().bind_to_thread().map_err(call("taking the device"))?;
        let comm = Comm::from_rank(Arc::clone(&stream), rank, count, id)
            .map_err(|source| refused("connect the GPUs", &source))?;
        Ok(Self { comm, gpu: Arc::clone(gpu), count, stream })
    }

    /// Starts to join every rank's shard, in rank order, to `len` elements. `meet` is called once
    /// nothing can fail on this rank alone any more, and returns when all ranks have called it.
    ///
    /// # Errors
    /// Those of `meet`.
    pub fn all_gather<E>(
        &self,
        shard: &Weights,
        len: usize,
        meet: impl FnOnce() -> Result<(), E>,
    ) -> Result<Arriving, E> {
        let shard = shard.whole().bytes();
        assert_eq!(shard.len(), shard_len(len, self.count), "shards of another array");
        let mut whole = self.gpu.uninit::<u8>(shard.view().len() * self.count);
        // Until then the shard may not be written, nor the memory free.
        self.stream.join(self.gpu.stream()).or_fail("waiting for a shard");
        meet()?;
        self.comm.all_gather(&shard.view(), &mut whole).or_fail("gather a unit");
        let done = self.stream.record_event(None).or_fail("marking a gather");
        let whole = Bytes::new(&self.gpu, whole, shard.dtype()).part(0..len);
        let way = Way { done, gpu: Arc::clone(&self.gpu), _shard: shard };
        Ok(Arriving::by(way, Weights::Cuda(whole)))
    }

    /// This rank's shard, padded, of the f32 sum of all ranks' arrays. `meet` as for
    /// [`Self::all_gather`].
    ///
    /// # Errors
    /// Those of `meet`.
    pub fn reduce_scatter<E>(
        &self,
        whole: Array,
        meet: impl FnOnce() -> Result<(), E>,
    ) -> Result<Array, E> {
        let n = shard_len(whole.len(), self.count);
        let whole = whole.padded(n * self.count);
        let mut shard = self.gpu.uninit::<f32>(n);
        self.stream.join(self.gpu.stream()).or_fail("waiting for a gradient");
        meet()?;
        let sum = self.comm.reduce_scatter(&whole.cuda().view(), &mut shard, &ReduceOp::Sum);
        sum.or_fail("sum a gradient");
        self.gpu.stream().join(&self.stream).or_fail("waiting for a sum");
        Ok(Array::Cuda(Floats::new(&self.gpu, shard)))
    }
}

fn stream(gpu: &Gpu) -> Result<Arc<CudaStream>, DeviceError> {
    let context = gpu.stream().context();
    context.bind_to_thread().map_err(call("taking the device"))?;
    context.new_stream().map_err(call("making a stream"))
}

fn refused(what: &str, source: &NcclError) -> DeviceError {
    DeviceError::Nccl { what: what.to_owned(), code: format!("{:?}", source.0) }
}

impl<T> OrFail<T> for Result<T, NcclError> {
    fn or_fail(self, what: &str) -> T {
        self.unwrap_or_else(|source| refused(what, &source).unwind())
    }
}

/// A gather that is under way on the other stream.
#[derive(Debug)]
pub struct Way {
    done: CudaEvent,
    gpu: Arc<Gpu>,
    /// What is read meanwhile.
    _shard: Bytes,
}

/// The device computes on, and frees memory, only behind the gather.
impl Drop for Way {
    fn drop(&mut self) {
        // A device that refuses this refuses all that comes after it, and says so there.
        let _ = self.gpu.stream().wait(&self.done);
    }
}
