//! One open device: its context, its stream and its kernels.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{
    result, sys, CudaContext, CudaFunction, CudaSlice, CudaStream, CudaView, DevicePtr, DeviceRepr,
    DriverError, ValidAsZeroBits,
};
use cudarc::nvrtc::Ptx;
use sys::CUmemPool_attribute as Attribute;

use super::kernels::{Kernel, FILES};
use super::memory::{Kept, Memory};
use super::probe::{self, call};
use super::{DeviceError, OrFail, ARCHITECTURES};
use crate::ops::array::MemoryUse;
use crate::ops::gemm::cuda::Library;

/// Asynchronous copies and bf16 tensor cores came with it.
const MIN_CAPABILITY: (i32, i32) = (8, 0);
/// What kernels with dynamic shared memory may take beside it as static shared memory.
const STATIC_SHARED_BYTES: u64 = 1024;

/// A device and the one stream on which all its work is queued.
pub struct Gpu {
    stream: Arc<CudaStream>,
    functions: Vec<CudaFunction>,
    dynamic_shared_bytes: u64,
    /// What each function's blocks may take of it so far.
    allowed_shared: Mutex<Vec<i32>>,
    multiprocessors: u32,
    library: Library,
    /// Where arrays come from while launches are recorded.
    kept: Mutex<Option<Arc<Kept>>>,
    /// Other devices that have been asked whether they can reach this one's memory.
    reached_by: Mutex<BTreeSet<usize>>,
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
        let count = probe::device_count()?;
        if !i32::try_from(ordinal).is_ok_and(|ordinal| ordinal < count) {
            return Err(DeviceError::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(call("opening the device"))?;
        let found = context.compute_capability().map_err(call("asking for its capability"))?;
        let needed = lowest_compiled().max(MIN_CAPABILITY);
        if found < needed {
            let name = context.name().unwrap_or_default();
            let dotted = |(major, minor): (i32, i32)| format!("{major}.{minor}");
            let (found, needed) = (dotted(found), dotted(needed));
            return Err(DeviceError::OldDevice { name, found, needed });
        }
        // SAFETY: one stream orders all work, and what runs beside it, NCCL and copies between
        // GPUs, records and awaits events of its own.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(call("making a stream"))?;
        keep_freed_memory(&context)?;
        let optin = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let shared = context.attribute(optin).map_err(call("asking for its shared memory"))?;
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let count = context.attribute(count).map_err(call("asking for its multiprocessors"))?;
        let multiprocessors = count.max(1) as u32;
        let functions = load(&context)?;
        let dynamic_shared_bytes = (shared as u64).saturating_sub(STATIC_SHARED_BYTES);
        if !probe::has_cublaslt() {
            return Err(DeviceError::NoLibrary);
        }
        let library = Library::open(&stream).map_err(|source| DeviceError::Library { source })?;
        let (kept, allowed_shared) = (Mutex::default(), Mutex::new(vec![0; functions.len()]));
        Ok(Arc::new(Self {
            stream,
            functions,
            dynamic_shared_bytes,
            allowed_shared,
            multiprocessors,
            library,
            kept,
            reached_by: Mutex::default(),
        }))
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
        // The driver refuses an allocation of no bytes, so that no elements take the room of one.
        // SAFETY: a `DeviceRepr` is plain numbers, any bits of which are a value.
        let array = match unsafe { self.stream.alloc::<T>(len.max(1)) } {
            Ok(array) => array,
            Err(error) => self.no_room(len as u64, size_of::<T>(), error).unwind(),
        };
        if len > 0 {
            return array;
        }
        // SAFETY: the allocation is this stream's, and longer than nothing.
        unsafe { self.stream.upgrade_device_ptr(array.leak(), 0) }
    }

    fn no_room(&self, len: u64, width: usize, source: DriverError) -> DeviceError {
        match source.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                DeviceError::OutOfMemory { asked: len * width as u64, free: self.memory().0 }
            }
            _ => DeviceError::Call { what: format!("allocating {len} elements"), source },
        }
    }

    #[must_use]
    pub fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> CudaSlice<T> {
        let mut array = self.uninit(len);
        if len > 0 {
            self.stream.memset_zeros(&mut array).or_fail("zeroing an array");
        }
        array
    }

    /// Bytes for an array, whose contents are whatever was there.
    pub(super) fn memory_for(&self, bytes: u64) -> Memory {
        let bytes = usize::try_from(bytes).expect("device memory is addressed in 64 bits");
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some(kept) => Memory::from_kept(self, kept, bytes),
            None => Memory::of(self.uninit(bytes)),
        }
    }

    /// From now on arrays come from `kept`, or from the driver again.
    pub(super) fn keep(&self, kept: Option<Arc<Kept>>) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = kept;
    }

    /// Overwrites an array, which others may point into, from its beginning.
    pub(in crate::ops) fn copy_to(&self, host: &[u32], array: &CudaSlice<u32>) {
        assert_eq!(host.len(), array.len(), "an array of another length");
        if host.is_empty() {
            return;
        }
        self.stream.context().bind_to_thread().or_fail("taking the device to this thread");
        let to = array.device_ptr(&self.stream).0;
        // SAFETY: the lengths are equal. Pageable memory is read before the call returns, and the
        // stream orders the copy behind every launch that read the old numbers.
        unsafe { result::memcpy_htod_async(to, host, self.stream.cu_stream()) }
            .or_fail("a copy to the device");
    }

    /// The host's values on the device; they may be dropped at once.
    #[must_use]
    pub fn upload<T: DeviceRepr>(&self, host: &[T]) -> CudaSlice<T> {
        let mut array = self.uninit(host.len());
        if !host.is_empty() {
            self.stream.memcpy_htod(host, &mut array).or_fail("a copy to the device");
        }
        array
    }

    /// The device's values on the host, once everything queued before is done.
    #[must_use]
    pub fn download<T: DeviceRepr + Clone + Default>(&self, view: &CudaView<'_, T>) -> Vec<T> {
        let mut host = vec![T::default(); view.len()];
        if !host.is_empty() {
            self.stream.memcpy_dtoh(view, &mut host).or_fail("a copy from the device");
            self.stream.synchronize().or_fail("waiting for the device");
        }
        host
    }

    /// What its maker calls it.
    #[must_use]
    pub fn name(&self) -> String {
        self.stream.context().name().or_fail("asking for its name")
    }

    /// Bytes free and in all.
    #[must_use]
    pub fn memory(&self) -> (u64, u64) {
        let (free, total) = self.stream.context().mem_get_info().or_fail("asking for memory");
        (free as u64, total as u64)
    }

    /// Gives freed memory back to the device, so that it counts as free.
    pub fn trim(&self) {
        self.stream.synchronize().or_fail("waiting for the device");
        let pool = self.pool().or_fail("asking for its memory pool");
        // SAFETY: the pool is the open device's own; bytes in use are not trimmed.
        unsafe { result::mem_pool::trim_to(pool, 0) }.or_fail("trimming its memory pool");
    }

    /// Forgets how full the memory has been; what is taken now, by anybody.
    #[must_use]
    pub fn watch_memory(&self) -> u64 {
        self.trim();
        let pool = self.pool().or_fail("asking for its memory pool");
        let (free, total) = self.memory();
        set_pool(pool, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0).or_fail("watching its memory");
        total - free
    }

    /// What has been added since [`Self::watch_memory`], which gave `before`, at the fullest
    /// moment.
    #[must_use]
    pub fn memory_use(&self, before: u64) -> MemoryUse {
        self.stream.synchronize().or_fail("waiting for the device");
        let pool = self.pool().or_fail("asking for its memory pool");
        let (free, total) = self.memory();
        let of_pool = |attribute| get_pool(pool, attribute).or_fail("asking for its memory");
        // The pool holds freed memory, which is nobody's; what is not the pool's is others'.
        let reserved = of_pool(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        let most = of_pool(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH);
        let fullest = (total - free).saturating_sub(reserved) + most;
        MemoryUse { total, added: fullest.saturating_sub(before) }
    }

    /// Lets another device reach this one's memory where the two are connected: what it copies from
    /// here then does not go through the host.
    pub(in crate::ops) fn open_to(&self, other: &Self) {
        let ordinal = other.stream.context().ordinal();
        let mut reached_by = self.reached_by.lock().unwrap_or_else(PoisonError::into_inner);
        if !reached_by.insert(ordinal) {
            return;
        }
        let (here, there) = (self.stream.context().cu_device(), other.stream.context().cu_device());
        let mut connected = 0;
        // SAFETY: both devices are open, and the answer outlives the call.
        unsafe { sys::cuDeviceCanAccessPeer(&raw mut connected, there, here) }
            .result()
            .or_fail("asking whether two GPUs are connected");
        if connected == 0 {
            return;
        }
        let id = i32::try_from(ordinal).expect("devices are counted in an i32");
        let access = sys::CUmemAccessDesc {
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id,
            },
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let pool = self.pool().or_fail("asking for its memory pool");
        // SAFETY: the pool is the open device's own, and the description outlives the call.
        unsafe { sys::cuMemPoolSetAccess(pool, &raw const access, 1) }
            .result()
            .or_fail("letting another GPU reach this one's memory");
    }

    fn pool(&self) -> Result<sys::CUmemoryPool, DriverError> {
        // SAFETY: the device is open.
        unsafe { result::device::get_default_mem_pool(self.stream.context().cu_device()) }
    }

    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Dynamic shared memory that a block may ask for, with [`Self::allow_shared`].
    #[must_use]
    pub fn dynamic_shared_bytes(&self) -> u64 {
        self.dynamic_shared_bytes
    }

    /// Lets a kernel's blocks take that much dynamic shared memory, from now on: what is allowed
    /// only grows, because another thread may launch the same kernel meanwhile.
    pub fn allow_shared(&self, kernel: Kernel, bytes: u32) {
        let bytes = i32::try_from(bytes).expect("shared memory is far below 2^31 bytes");
        // A panic in between left a number too low, which is set once more.
        let mut allowed = self.allowed_shared.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes <= allowed[kernel as usize] {
            return;
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        self.stream.context().bind_to_thread().or_fail("taking the device to this thread");
        self.function(kernel).set_attribute(attribute, bytes).or_fail("raising shared memory");
        allowed[kernel as usize] = bytes;
    }
}

/// The lowest of [`ARCHITECTURES`]; newer devices compile its PTX.
fn lowest_compiled() -> (i32, i32) {
    let numbers = ARCHITECTURES.split(',').filter_map(|one| one.trim().parse::<i32>().ok());
    numbers.min().map_or(MIN_CAPABILITY, |lowest| (lowest / 10, lowest % 10))
}

/// Freed memory stays with the device's pool, so that a step which allocates what the last one
/// freed asks nobody.
fn keep_freed_memory(context: &CudaContext) -> Result<(), DeviceError> {
    // SAFETY: the device is open.
    let pool = unsafe { result::device::get_default_mem_pool(context.cu_device()) };
    let pool = pool.map_err(call("asking for its memory pool"))?;
    set_pool(pool, Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)
        .map_err(call("setting its memory pool"))
}

fn set_pool(pool: sys::CUmemoryPool, which: Attribute, mut value: u64) -> Result<(), DriverError> {
    // SAFETY: the attributes asked for are one u64 each, which outlives the call.
    unsafe { result::mem_pool::set_attribute(pool, which, (&raw mut value).cast()) }
}

fn get_pool(pool: sys::CUmemoryPool, which: Attribute) -> Result<u64, DriverError> {
    let mut value = 0_u64;
    // SAFETY: as above.
    unsafe { result::mem_pool::get_attribute(pool, which, (&raw mut value).cast()) }?;
    Ok(value)
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
