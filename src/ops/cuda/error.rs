//! What can be wrong with a device, in words that say what to do.

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::DriverError;

/// A device that is missing, does not suit, or has failed.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error(
        "CUDA needs NVIDIA's driver library (libcuda.so.1), which this machine does not have: \
         install the driver, or set engine.device = \"cpu\""
    )]
    NoDriver,
    #[error(
        "this build needs a driver for CUDA {needed}, and the installed one is for CUDA {found}: \
         update the driver, or set engine.device = \"cpu\""
    )]
    OldDriver { needed: String, found: String },
    #[error(
        "CUDA device {ordinal} was asked for and the driver shows {count}: look at \
         CUDA_VISIBLE_DEVICES, or set engine.device = \"cpu\""
    )]
    NoDevice { ordinal: usize, count: i32 },
    #[error(
        "{name} has compute capability {found}, and the kernels need {needed} at least: use a \
         newer GPU, or set engine.device = \"cpu\""
    )]
    OldDevice { name: String, found: String, needed: String },
    #[error(
        "{asked} bytes of device memory were asked for and {free} are free: lower \
         engine.gpu_memory_utilization or engine.num_gpu_blocks_override, or free the device"
    )]
    OutOfMemory { asked: u64, free: u64 },
    #[error("{what} failed on the device: {source:?}")]
    Call { what: String, source: DriverError },
    #[error(
        "CUDA needs cuBLASLt (libcublasLt.so.13), which the loader does not find: install it, put \
         its folder in LD_LIBRARY_PATH, or set engine.device = \"cpu\""
    )]
    NoLibrary,
    #[error(
        "cuBLASLt cannot be used ({source:?}): free device memory, install libcublasLt of CUDA 13, \
         or set engine.device = \"cpu\""
    )]
    Library { source: CublasError },
    #[error(
        "trainer.ranks over several GPUs needs NCCL (libnccl.so), which the loader does not find: \
         install it, put a folder that has libnccl.so in LD_LIBRARY_PATH (a wheel has only \
         libnccl.so.2: link one to the other), or set trainer.ranks = 1"
    )]
    NoNccl,
    #[error(
        "NCCL failed to {what} ({code}): NCCL_DEBUG=WARN tells why, and trainer.ranks = 1 needs no \
         NCCL"
    )]
    Nccl { what: String, code: String },
    #[error("cuBLASLt failed to {what} on the device: {source:?}")]
    Product { what: String, source: CublasError },
}

impl DeviceError {
    /// Ends the work: unwinds with this error as the payload. No panic hook hears of it, because
    /// whoever catches it tells it.
    pub(in crate::ops) fn unwind(self) -> ! {
        std::panic::resume_unwind(Box::new(self))
    }
}

/// Ends the work where the device fails within an operation: unwinds with a [`DeviceError`].
pub trait OrFail<T> {
    fn or_fail(self, what: &str) -> T;
}

impl<T> OrFail<T> for Result<T, DriverError> {
    fn or_fail(self, what: &str) -> T {
        self.unwrap_or_else(|source| DeviceError::Call { what: what.to_owned(), source }.unwind())
    }
}

impl<T> OrFail<T> for Result<T, CublasError> {
    fn or_fail(self, what: &str) -> T {
        let what = what.to_owned();
        self.unwrap_or_else(|source| DeviceError::Product { what, source }.unwind())
    }
}
