//! Where engine and trainer compute.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    Cpu,
    /// A CUDA device, which needs a build with the feature `cuda`.
    Cuda,
}

/// What engines plan with on the CPU unless they are told: enough for a laptop's experiments.
pub const CPU_MEMORY: u64 = 256 << 20;
