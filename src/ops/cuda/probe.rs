//! What a machine has for CUDA, without opening a device for work.
//!
//! A library is loaded when it is first called, and a call without it would be a panic: each
//! question asks first whether it is there, and of the driver whether it is new enough to know all
//! that is called.

use cudarc::driver::{result, sys, CudaContext, DriverError};
use cudarc::{cublaslt, nccl};

use super::DeviceError;

/// The CUDA version that the bindings are of, as the driver counts: 1000 · major + 10 · minor.
const CUDA_VERSION: i32 = 13_000;

/// A device as the driver lists it.
#[derive(Debug)]
pub struct DeviceInfo {
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Bytes free and in all; the error where the device takes no work, since only a device that
    /// is open says.
    pub memory: Result<(u64, u64), DeviceError>,
}

/// The newest CUDA that the driver is for, such as "13.0".
///
/// # Errors
/// No driver, and one that is too old.
pub fn driver_version() -> Result<String, DeviceError> {
    // SAFETY: loading the driver library runs its initialisers, which is what opening it means.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: writes one integer; allowed before initialisation.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(call("asking for the driver's version"))?;
    let dotted = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
    if version < CUDA_VERSION {
        let (needed, found) = (dotted(CUDA_VERSION), dotted(version));
        return Err(DeviceError::OldDriver { needed, found });
    }
    Ok(dotted(version))
}

/// The devices that the driver shows, in its order; none is no error.
///
/// # Errors
/// A driver that is missing, too old, or refuses.
pub fn devices() -> Result<Vec<DeviceInfo>, DeviceError> {
    let devices = (0..device_count()?).map(device).collect::<Result<_, _>>();
    devices.map_err(call("asking what the devices are"))
}

/// As [`devices`], counted; afterwards the driver is started.
pub(super) fn device_count() -> Result<i32, DeviceError> {
    driver_version()?;
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(0),
        started => started.map_err(call("starting the driver"))?,
    }
    result::device::get_count().map_err(call("counting the devices"))
}

fn device(ordinal: i32) -> Result<DeviceInfo, DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let device = result::device::get(ordinal)?;
    // SAFETY: the driver has just given the device.
    let attribute = |which| unsafe { result::device::get_attribute(device, which) };
    let memory = CudaContext::new(ordinal.unsigned_abs() as usize)
        .and_then(|context| context.mem_get_info())
        .map(|(free, total)| (free as u64, total as u64))
        .map_err(call("opening it"));
    Ok(DeviceInfo {
        name: result::device::get_name(device)?,
        capability: (attribute(MAJOR)?, attribute(MINOR)?),
        memory,
    })
}

/// Whether cuBLASLt can be loaded.
#[must_use]
pub(super) fn has_cublaslt() -> bool {
    // SAFETY: loading a library runs its initialisers, which is what opening it means.
    unsafe { cublaslt::sys::is_culib_present() }
}

/// cuBLASLt's version, such as "13.1.0"; None where it cannot be loaded.
#[must_use]
pub fn cublaslt_version() -> Option<String> {
    // SAFETY: the library is there, and the call returns a number.
    has_cublaslt().then(|| three_parts(unsafe { cublaslt::sys::cublasLtGetVersion() }))
}

/// NCCL's version, such as "2.28.3"; None where it cannot be loaded.
#[must_use]
pub fn nccl_version() -> Option<String> {
    let mut version = 0;
    // SAFETY: as for cuBLASLt; where the library is there, it writes one integer.
    let asked = unsafe {
        nccl::sys::is_culib_present().then(|| nccl::sys::ncclGetVersion(&raw mut version))?
    };
    let answered = asked == nccl::sys::ncclResult_t::ncclSuccess;
    answered.then(|| three_parts(version.unsigned_abs() as usize))
}

/// Of 10,000 · major + 100 · minor + patch.
fn three_parts(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

pub(super) fn call(what: &str) -> impl FnOnce(DriverError) -> DeviceError + '_ {
    move |source| DeviceError::Call { what: what.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(three_parts(130_100), "13.1.0");
        assert_eq!(three_parts(22_803), "2.28.3");
    }
}
