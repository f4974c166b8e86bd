//! Device memory that comes from the driver, or from what a recording keeps for its replays.

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
#[derive(Default)]
pub struct Kept {
    free: Mutex<Vec<CudaSlice<u8>>>,
}

/// A block may be this many times as long as what is asked for.
const SLACK: usize = 2;

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
            home.free().push(slice);
        }
    }
}

impl Kept {
    fn free(&self) -> MutexGuard<'_, Vec<CudaSlice<u8>>> {
        // A panic in between left at most a block out.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The shortest free block that is long enough and not much too long, or a new one.
    fn take(&self, gpu: &Gpu, bytes: usize) -> CudaSlice<u8> {
        let mut free = self.free();
        let fits = |len: usize| (bytes..=SLACK * bytes.max(256)).contains(&len);
        let fitting = (0..free.len()).filter(|&i| fits(free[i].len()));
        match fitting.min_by_key(|&i| free[i].len()) {
            Some(best) => free.swap_remove(best),
            None => gpu.uninit(bytes),
        }
    }
}
