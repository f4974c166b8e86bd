//! Device memory that comes from the driver, or from what a recording keeps for its replays.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaSlice;

use super::Gpu;

/// Bytes of one array.
pub struct Memory {
    /// Taken out when it goes back home.
    slice: Option<CudaSlice<u8>>,
    home: Option<Arc<Kept>>,
}

/// Memory at fixed addresses, for launches that are recorded: what one launch has done with serves
/// the next one, and nothing goes back to the driver while a recording that names it is alive. One
/// stream orders all work, so that a block is free on the device once it is on the host.
///
/// Blocks are as long as powers of two, and serve their own length alone: work that is done a
/// second time finds as many of each as it needs, and asks the driver for none.
#[derive(Default)]
pub struct Kept {
    free: Mutex<HashMap<usize, Vec<CudaSlice<u8>>>>,
}

/// The shortest block.
const SHORTEST: usize = 512;

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("bytes", &self.slice().len()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").field("free", &self.free().len()).finish()
    }
}

impl Memory {
    pub(super) fn of(slice: CudaSlice<u8>) -> Self {
        Self { slice: Some(slice), home: None }
    }

    pub(super) fn from_kept(gpu: &Gpu, home: &Arc<Kept>, bytes: usize) -> Self {
        Self { slice: Some(home.take(gpu, bytes)), home: Some(Arc::clone(home)) }
    }

    #[must_use]
    pub fn slice(&self) -> &CudaSlice<u8> {
        self.slice.as_ref().expect("it is here until it is dropped")
    }

    pub fn slice_mut(&mut self) -> &mut CudaSlice<u8> {
        self.slice.as_mut().expect("it is here until it is dropped")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let (Some(home), Some(slice)) = (&self.home, self.slice.take()) {
            home.free().entry(slice.len()).or_default().push(slice);
        }
    }
}

impl Kept {
    fn free(&self) -> MutexGuard<'_, HashMap<usize, Vec<CudaSlice<u8>>>> {
        // A panic in between left at most a block out.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, gpu: &Gpu, bytes: usize) -> CudaSlice<u8> {
        let len = bytes.max(SHORTEST).next_power_of_two();
        let free = self.free().get_mut(&len).and_then(Vec::pop);
        free.unwrap_or_else(|| gpu.uninit(len))
    }
}
