//! Launches recorded once and played again on other numbers: a CUDA graph. What changes from play
//! to play is what a [`Sheet`](super::sheet::Sheet) carries and what the pages hold; every address
//! stays.

use super::array::Device;

/// One forward pass of a fixed shape. Never on the CPU, where there is nothing to record.
#[derive(Debug)]
pub struct Recording {
    #[cfg(feature = "cuda")]
    graph: super::cuda::Graph,
}

/// The memory that the recordings of one model share: they are never played at the same time.
#[derive(Clone, Debug, Default)]
pub struct Kept(#[cfg(feature = "cuda")] std::sync::Arc<super::cuda::Kept>);

impl Device {
    /// Whether [`Self::record`] can.
    #[must_use]
    pub fn records(&self) -> bool {
        !self.is_host()
    }

    /// Runs `work` with arrays of its own in kept memory: once to learn what it needs, of which
    /// `read` gives the result, and once more only recorded. Returns the result, what every play of
    /// the recording fills, and the recording. `work` must do the same launches both times, wait
    /// for nothing and bring no numbers from the host but those of a sheet.
    pub fn record<T, R>(
        &self,
        kept: &Kept,
        work: impl FnMut() -> T,
        read: impl FnOnce(&T) -> R,
    ) -> (R, T, Recording) {
        #[cfg(not(feature = "cuda"))]
        let _ = (kept, work, read);
        match self {
            Self::Cpu => panic!("the CPU's work is not recorded"),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => {
                let (first, filled, graph) = gpu.record(&kept.0, work, read);
                (first, filled, Recording { graph })
            }
        }
    }
}

impl Recording {
    /// Enqueues it.
    pub fn play(&self) {
        #[cfg(feature = "cuda")]
        self.graph.play();
    }
}
