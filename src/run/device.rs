//! The device that an experiment names, and what its failures become.

use anyhow::Result;

use crate::config::{self, EngineConfig};
use crate::engine::Placement;
use crate::ops::array::Device;

/// Opens the device of a configuration.
///
/// # Errors
/// A device that is missing or too old, or a build that knows none.
pub(super) fn open(device: config::Device) -> Result<Device> {
    open_at(device, 0)
}

#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
fn open_at(device: config::Device, ordinal: u32) -> Result<Device> {
    match device {
        config::Device::Cpu => Ok(Device::Cpu),
        #[cfg(feature = "cuda")]
        config::Device::Cuda => Ok(Device::Cuda(crate::ops::cuda::Gpu::open(ordinal as usize)?)),
        #[cfg(not(feature = "cuda"))]
        config::Device::Cuda => anyhow::bail!(
            "engine.device = \"cuda\" needs a build with CUDA: cargo build --release \
             --features cuda, with nvcc at hand; or set engine.device = \"cpu\""
        ),
    }
}

/// Where a configuration's engines compute; a driver that does not answer is asked again, and says
/// why, where the device is opened.
pub(super) fn placement(config: &EngineConfig) -> Placement {
    match config.device {
        config::Device::Cpu => Placement::SharedCpu,
        config::Device::Cuda if has_one_each(config.replicas) => Placement::OneEach,
        config::Device::Cuda => Placement::SharedGpu,
    }
}

#[cfg(feature = "cuda")]
fn has_one_each(engines: u32) -> bool {
    let devices = || crate::ops::cuda::devices().map_or(usize::MAX, |devices| devices.len());
    engines == 1 || devices() >= engines as usize
}

#[cfg(not(feature = "cuda"))]
fn has_one_each(_: u32) -> bool {
    true
}

/// Engines that share a device.
pub(super) fn engines_on_one(config: &EngineConfig) -> u32 {
    match placement(config) {
        Placement::OneEach => 1,
        Placement::SharedCpu | Placement::SharedGpu => config.replicas,
    }
}

/// Each engine's device, beside a trainer on the first.
///
/// # Errors
/// As [`open`].
pub(super) fn of_engines(first: &Device, config: &EngineConfig) -> Result<Vec<Device>> {
    let placement = placement(config);
    let device = |index: u32| match (placement, index) {
        (Placement::OneEach, 1..) => open_at(config.device, index),
        _ => Ok(first.clone()),
    };
    (0..config.replicas).map(device).collect()
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
