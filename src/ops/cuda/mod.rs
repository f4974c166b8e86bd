//! The device side that all operations share: the open device, its kernels, how they are launched.
//!
//! Each operation's launches lie in its own `cuda` module, its kernels in `kernels/`. One stream
//! orders everything; an operation that fails on the device unwinds with a [`DeviceError`], because
//! nothing that was queued behind it can be trusted.

mod error;
mod floats;
mod gpu;
mod graph;
mod kernels;
mod launch;
mod memory;
mod nccl;
mod probe;
mod spans;

pub use error::{DeviceError, OrFail};
pub(in crate::ops) use floats::RowsArgument;
pub use floats::{Floats, FloatsMut};
pub use gpu::Gpu;
pub use graph::Graph;
pub use kernels::Kernel;
pub(crate) use launch::{blocks, launch, THREADS};
pub use memory::{Kept, Memory};
pub use nccl::{pinned_here, Communicator, Way};
pub use probe::{cublaslt_version, devices, driver_version, nccl_version, DeviceInfo};
pub use spans::Spans;

use crate::config::Dtype;

/// The compute capabilities that this build has machine code for, such as "80,90".
pub const ARCHITECTURES: &str = env!("GAPSCOPE_CUDA_ARCHS");

/// As `kernels/numeric.cuh` knows a dtype.
#[must_use]
pub fn dtype_code(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
    }
}
