//! The device that an experiment names, and what its failures become.

use anyhow::Result;

use crate::config;
use crate::ops::array::Device;

/// Opens the device of a configuration.
///
/// # Errors
/// A device that is missing or too old, or a build that knows none.
pub(super) fn open(device: config::Device) -> Result<Device> {
    match device {
        config::Device::Cpu => Ok(Device::Cpu),
        #[cfg(feature = "cuda")]
        config::Device::Cuda => Ok(Device::Cuda(crate::ops::cuda::Gpu::open(0)?)),
        #[cfg(not(feature = "cuda"))]
        config::Device::Cuda => anyhow::bail!(
            "engine.device = \"cuda\" needs a build with CUDA: cargo build --release \
             --features cuda, with nvcc at hand; or set engine.device = \"cpu\""
        ),
    }
}

/// Runs `work`; where an operation fails on the device, which ends the work wherever it is, that is
/// the error.
///
/// # Errors
/// Those of `work`, and the device's.
#[cfg(feature = "cuda")]
pub(super) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    use crate::ops::cuda::DeviceError;
    // What was under way is not used again: an error ends the run.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        match payload.downcast::<DeviceError>() {
            Ok(error) => Err((*error).into()),
            Err(other) => std::panic::resume_unwind(other),
        }
    })
}

#[cfg(not(feature = "cuda"))]
pub(super) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    work()
}
