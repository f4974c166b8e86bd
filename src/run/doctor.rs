//! `gapscope doctor`: what this machine and this build can run, and what to do about the rest.

use std::fmt::Display;

use super::device;
use super::told;
use crate::config::Device;
use crate::ops::simd;

/// What was found.
#[derive(Debug)]
pub struct Checkup {
    pub text: String,
    /// Whether the device that was asked for can be used.
    pub usable: bool,
}

/// Looks at the build, the CPU, the driver with its GPUs, and the libraries. Nothing that is
/// missing is an error: it is a line that says what to do.
#[must_use]
pub fn doctor(asked: Device) -> Checkup {
    let mut sheet = Sheet::default();
    let with = if cfg!(feature = "cuda") { "with" } else { "without" };
    let (version, arch) = (env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    sheet.line("build", format!("gapscope {version} for {arch}, {with} CUDA"));
    let threads = rayon::current_num_threads();
    let vectors = simd::vector_unit();
    sheet.line("CPU", format!("{threads} thread(s) (RAYON_NUM_THREADS sets them), {vectors}"));
    cuda(&mut sheet);
    sheet.line("device cpu", "ready");
    let opened = device::guarded(|| device::open(Device::Cuda));
    match &opened {
        Ok(_) => sheet.line("device cuda", "ready"),
        Err(error) => sheet.line("device cuda", told(error)),
    }
    Checkup { text: sheet.0, usable: asked == Device::Cpu || opened.is_ok() }
}

/// Lines of a label and what was found.
#[derive(Default)]
struct Sheet(String);

impl Sheet {
    fn line(&mut self, label: &str, found: impl Display) {
        self.0 += &format!("{label:<12}  {found}\n");
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: &mut Sheet) {}

#[cfg(feature = "cuda")]
fn cuda(sheet: &mut Sheet) {
    use crate::ops::cuda;

    let kernels = cuda::ARCHITECTURES;
    sheet.line("kernels", format!("for compute capability {kernels}, and as PTX for newer GPUs"));
    match cuda::driver_version() {
        Ok(version) => {
            let number = kernel_module().map_or_else(String::new, |number| format!("{number}, "));
            sheet.line("driver", format!("{number}for CUDA {version}"));
            gpus(sheet);
        }
        Err(error) => sheet.line("driver", error),
    }
    let lost = "not found: install libcublasLt.so.13 (it is in the PyPI package nvidia-cublas), \
                and put its folder in LD_LIBRARY_PATH";
    sheet.line("cuBLASLt", cuda::cublaslt_version().as_deref().unwrap_or(lost));
    let lost = "not found, which one GPU does without: install it (it is in the PyPI package \
                nvidia-nccl-cu13), link libnccl.so to libnccl.so.2 where that lies, and put the \
                folder in LD_LIBRARY_PATH";
    sheet.line("NCCL", cuda::nccl_version().as_deref().unwrap_or(lost));
}

#[cfg(feature = "cuda")]
fn gpus(sheet: &mut Sheet) {
    use crate::ops::cuda::{self, DeviceInfo};

    let devices = match cuda::devices() {
        Ok(devices) if devices.is_empty() => return sheet.line("GPU", "the driver shows none"),
        Ok(devices) => devices,
        Err(error) => return sheet.line("GPU", error),
    };
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    for (ordinal, DeviceInfo { name, capability: (major, minor), memory }) in
        devices.into_iter().enumerate()
    {
        let memory = match memory {
            Ok((free, total)) => format!("{:.1} of {:.1} GiB free", gib(free), gib(total)),
            Err(error) => error.to_string(),
        };
        let found = format!("{name}, compute capability {major}.{minor}, {memory}");
        sheet.line(&format!("GPU {ordinal}"), found);
    }
}

/// The driver's own number, such as "580.159.04", where the kernel shows it: the first word with a
/// digit at its head.
#[cfg(feature = "cuda")]
fn kernel_module() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let number = |word: &&str| word.starts_with(|first: char| first.is_ascii_digit());
    text.lines().next()?.split_whitespace().find(number).map(str::to_owned)
}
