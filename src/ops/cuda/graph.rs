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
    /// Nobody else uses the device meanwhile.
    pub fn record<T, R>(
        &self,
        kept: &Arc<Kept>,
        mut work: impl FnMut() -> T,
        read: impl FnOnce(&T) -> R,
    ) -> (R, T, Graph) {
        let keeping = Keeping::begin(self, kept);
        // What it is kept in serves the recording.
        let first = read(&work());
        let capture = Capture::begin(self);
        let filled = work();
        let graph = capture.end();
        drop(keeping);
        (first, filled, Graph { graph, _kept: Arc::clone(kept) })
    }
}

/// Arrays come from kept memory until this is dropped, also by an error.
struct Keeping<'a>(&'a Gpu);

impl<'a> Keeping<'a> {
    fn begin(gpu: &'a Gpu, kept: &Arc<Kept>) -> Self {
        gpu.keep(Some(Arc::clone(kept)));
        Self(gpu)
    }
}

impl Drop for Keeping<'_> {
    fn drop(&mut self) {
        self.0.keep(None);
    }
}

/// Launches are recorded, and not run, until this is ended or, by an error, dropped.
struct Capture<'a> {
    gpu: &'a Gpu,
    is_open: bool,
}

impl<'a> Capture<'a> {
    fn begin(gpu: &'a Gpu) -> Self {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        gpu.stream().begin_capture(mode).or_fail("beginning to record");
        Self { gpu, is_open: true }
    }

    fn end(mut self) -> CudaGraph {
        self.is_open = false;
        let graph = self.gpu.stream().end_capture(sys::CUgraphInstantiate_flags(0));
        graph.or_fail("recording").expect("a forward pass has launches")
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // The error that ended it is on its way already.
            let _ = self.gpu.stream().end_capture(sys::CUgraphInstantiate_flags(0));
        }
    }
}
