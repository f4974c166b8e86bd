//! One open device: its context, its stream and its kernels.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{
    result, sys, CudaContext, CudaFunction, CudaSlice, CudaStream, CudaView, DeviceRepr,
    DriverError,
};
use cudarc::nvrtc::Ptx;

use super::kernels::{Kernel, FILES};
use super::{DeviceError, OrFail};
use crate::ops::gemm::cuda::Library;

/// The CUDA version that the bindings are of, as the driver counts: 1000 · major + 10 · minor.
const CUDA_VERSION: i32 = 13_000;
/// Asynchronous copies and bf16 tensor cores came with it.
const MIN_CAPABILITY: (i32, i32) = (8, 0);
/// What kernels with dynamic shared memory may take beside it as static shared memory.
const STATIC_SHARED_BYTES: u64 = 1024;

/// A device and the one stream on which all its work is queued.
pub struct Gpu {
    stream: Arc<CudaStream>,
    functions: Vec<CudaFunction>,
    dynamic_shared_bytes: u64,
    library: Library,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("ordinal", &self.stream.context().ordinal()).finish()
    }
}

impl Gpu {
    /// Opens device `ordinal` and loads every kernel.
    ///
    /// # Errors
    /// What is missing or too old, and what the driver refuses.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, DeviceError> {
        check_driver()?;
        let count = CudaContext::device_count().unwrap_or(0);
        if i32::try_from(ordinal).is_ok_and(|ordinal| ordinal >= count) {
            return Err(DeviceError::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(call("opening the device"))?;
        let found = context.compute_capability().map_err(call("asking for its capability"))?;
        if found < MIN_CAPABILITY {
            let name = context.name().unwrap_or_default();
            let dotted = |(major, minor): (i32, i32)| format!("{major}.{minor}");
            let (found, needed) = (dotted(found), dotted(MIN_CAPABILITY));
            return Err(DeviceError::OldDevice { name, found, needed });
        }
        // SAFETY: one stream orders all work on this context, so no event is needed between uses.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(call("making a stream"))?;
        keep_freed_memory(&context)?;
        let optin = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let shared = context.attribute(optin).map_err(call("asking for its shared memory"))?;
        let functions = load(&context)?;
        let dynamic_shared_bytes = (shared as u64).saturating_sub(STATIC_SHARED_BYTES);
        // SAFETY: loading a library runs its initialisers, which is what opening it means.
        if !unsafe { cudarc::cublaslt::sys::is_culib_present() } {
            return Err(DeviceError::NoLibrary);
        }
        let library = Library::open(&stream).map_err(|source| DeviceError::Library { source })?;
        Ok(Arc::new(Self { stream, functions, dynamic_shared_bytes, library }))
    }

    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    #[must_use]
    pub fn function(&self, kernel: Kernel) -> &CudaFunction {
        &self.functions[kernel as usize]
    }

    /// cuBLASLt, for the bf16 products.
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// Memory whose contents are whatever was there: the caller writes before anyone reads.
    #[must_use]
    pub fn uninit<T: DeviceRepr>(&self, len: usize) -> CudaSlice<T> {
        // SAFETY: a `DeviceRepr` is plain numbers, any bits of which are a value.
        unsafe { self.stream.alloc(len) }.or_fail(&format!("allocating {len} elements"))
    }

    /// The host's values on the device.
    #[must_use]
    pub fn upload<T: DeviceRepr>(&self, host: &[T]) -> CudaSlice<T> {
        if host.is_empty() {
            return self.uninit(0);
        }
        self.stream.clone_htod(host).or_fail("a copy to the device")
    }

    /// The device's values on the host, once everything queued before is done.
    #[must_use]
    pub fn download<T: DeviceRepr + Clone + Default>(&self, view: &CudaView<'_, T>) -> Vec<T> {
        let host = self.stream.clone_dtoh(view).or_fail("a copy from the device");
        self.stream.synchronize().or_fail("waiting for the device");
        host
    }

    /// Bytes free and in all.
    #[must_use]
    pub fn memory(&self) -> (u64, u64) {
        let (free, total) = self.stream.context().mem_get_info().or_fail("asking for memory");
        (free as u64, total as u64)
    }

    /// Dynamic shared memory that a block may ask for, with [`Self::allow_shared`].
    #[must_use]
    pub fn dynamic_shared_bytes(&self) -> u64 {
        self.dynamic_shared_bytes
    }

    /// Lets a kernel's blocks take that much dynamic shared memory.
    pub fn allow_shared(&self, kernel: Kernel, bytes: u32) {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(bytes).expect("shared memory is far below 2^31 bytes");
        self.function(kernel).set_attribute(attribute, bytes).or_fail("raising shared memory");
    }
}

fn call(what: &str) -> impl FnOnce(DriverError) -> DeviceError + '_ {
    move |source| DeviceError::Call { what: what.to_owned(), source }
}

/// Whether there is a driver, and one that is new enough. The library is loaded when it is first
/// called, and a call without one would be a panic.
fn check_driver() -> Result<(), DeviceError> {
    // SAFETY: loading the driver library runs its initialisers, which is what opening it means.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: writes one integer; allowed before initialisation.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(call("asking for the driver's version"))?;
    if version < CUDA_VERSION {
        let dotted = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
        let (needed, found) = (dotted(CUDA_VERSION), dotted(version));
        return Err(DeviceError::OldDriver { needed, found });
    }
    result::init().map_err(call("starting the driver"))
}

/// Freed memory stays with the device's pool, so that a step which allocates what the last one
/// freed asks nobody.
fn keep_freed_memory(context: &CudaContext) -> Result<(), DeviceError> {
    let mut threshold = u64::MAX;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the device is open, and the attribute's value is one u64, which outlives the call.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())
            .map_err(call("asking for its memory pool"))?;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast())
            .map_err(call("setting its memory pool"))
    }
}

/// Every kernel, in the order of [`Kernel`]: one that is missing is seen here, not at its launch.
fn load(context: &Arc<CudaContext>) -> Result<Vec<CudaFunction>, DeviceError> {
    let mut functions = Vec::new();
    for (binary, names) in FILES {
        let module = context
            .load_module(Ptx::from_binary(binary.to_vec()))
            .map_err(call("loading kernels"))?;
        for name in *names {
            functions.push(module.load_function(name).map_err(call(name))?);
        }
    }
    Ok(functions)
}
