//! The device that an experiment names, and what its failures become.

use anyhow::Result;

use crate::config::{self, Config, EngineConfig};
use crate::engine::Placement;
use crate::model::{Numerics, Plan};
use crate::ops::array::Device;
use crate::trainer::Trainer;

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
fn has_one_each(users: u32) -> bool {
    let devices = || crate::ops::cuda::devices().map_or(usize::MAX, |devices| devices.len());
    users == 1 || devices() >= users as usize
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

/// Bytes free on each device that a run computes on, in the driver's order, `first` first; `None`
/// of one that does not say.
pub(super) fn free_memory(first: &Device, config: &Config) -> Vec<Option<u64>> {
    let is_alone = config.trainer.ranks == 1 && config.engine.replicas == 1;
    let others = match config.engine.device {
        config::Device::Cuda if !is_alone => free_on_others(),
        _ => Vec::new(),
    };
    std::iter::once(first.free_memory()).chain(others).collect()
}

#[cfg(feature = "cuda")]
fn free_on_others() -> Vec<Option<u64>> {
    let others = crate::ops::cuda::devices().unwrap_or_default().into_iter().skip(1);
    others.map(|other| other.memory.ok().map(|(free, _)| free)).collect()
}

#[cfg(not(feature = "cuda"))]
fn free_on_others() -> Vec<Option<u64>> {
    Vec::new()
}

/// How many of the trainer's ranks compute on the first engine's device: all on a CPU, and where
/// there are fewer GPUs than ranks.
pub(super) fn ranks_on_one(config: &Config) -> u64 {
    let ranks = config.trainer.ranks;
    let is_apart = config.engine.device == config::Device::Cuda && has_one_each(ranks);
    if is_apart {
        1
    } else {
        ranks.into()
    }
}

/// A trainer whose ranks have a GPU each where there are as many, rank r the driver's device r, and
/// share `first` otherwise.
///
/// # Errors
/// A GPU that does not open, and ranks that cannot be connected.
pub(super) fn trainer(
    first: &Device,
    (plan, num): (&Plan, Numerics),
    config: &Config,
    master: &[Vec<f32>],
) -> Result<Trainer> {
    let (plan, trainer) = (plan.clone(), config.trainer.clone());
    #[cfg(feature = "cuda")]
    if ranks_on_one(config) < u64::from(trainer.ranks) {
        let mut gpus = vec![first.clone()];
        for ordinal in 1..trainer.ranks {
            gpus.push(open_at(config.engine.device, ordinal)?);
        }
        return Ok(Trainer::over_gpus(&gpus, plan, num, trainer, master)?);
    }
    Ok(Trainer::new(first, plan, num, trainer, master)?)
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
