//! The operations on a GPU against their CPU halves, case table by case table.
//!
//! Where there is no device the tests say so and pass, unless GAPSCOPE_REQUIRE_CUDA is set.
#![cfg(feature = "cuda")]

mod attention;
mod conv;
mod elementwise;
mod gemm;
mod nccl;
mod pages;
mod policies;
mod rms_norm;
mod runs;
mod scan;
mod sequences;
mod softmax;
mod wrap;

use std::sync::{Arc, OnceLock};

use gapscope::ops::cuda::Gpu;

/// A test that the device is too small for.
pub fn too_small(why: &str) {
    let required = std::env::var_os("GAPSCOPE_REQUIRE_CUDA").is_some();
    assert!(!required, "GAPSCOPE_REQUIRE_CUDA is set: {why}");
    eprintln!("not run: {why}");
}

/// Device 0, opened once for all tests.
pub fn gpu() -> Option<Arc<Gpu>> {
    static GPU: OnceLock<Option<Arc<Gpu>>> = OnceLock::new();
    let open = || match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            let required = std::env::var_os("GAPSCOPE_REQUIRE_CUDA").is_some();
            assert!(!required, "GAPSCOPE_REQUIRE_CUDA is set: {error}");
            eprintln!("not run on a device: {error}");
            None
        }
    };
    GPU.get_or_init(open).clone()
}
