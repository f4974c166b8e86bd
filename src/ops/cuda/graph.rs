//! Recording and playing launches.

// A graph may be moved between threads, which its raw handles do not say.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{sys, CudaGraph};

use super::memory::Kept;
use super::{Gpu, OrFail};

/// Launches at fixed addresses.
pub struct Graph {
    graph: CudaGraph,
    /// Where the addresses point.
    _kept: Arc<Kept>,
}

// SAFETY: it has one owner, and is played through a shared reference only on the one stream whose
// work its device's owner orders.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}

impl Graph {
    /// Enqueues every launch.
    pub fn play(&self) {
        self.graph.launch().or_fail("playing a recording");
    }
}

impl Gpu {
    /// See `Device::record`: `work` runs twice, and its launches are enqueued the first time only.
    pub fn record<T, R>(
        &self,
        kept: &Arc<Kept>,
        mut work: impl FnMut() -> T,
        read: impl FnOnce(&T) -> R,
    ) -> (R, T, Graph) {
        self.keep(Some(Arc::clone(kept)));
        // What it is kept in serves the recording.
        let first = read(&work());
        let stream = self.stream();
        // Other threads of the process may allocate meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).or_fail("beginning to record");
        let filled = work();
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).or_fail("recording");
        self.keep(None);
        let graph = graph.expect("a forward pass has launches");
        (first, filled, Graph { graph, _kept: Arc::clone(kept) })
    }
}
