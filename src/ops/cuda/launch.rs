//! One line a launch.

/// Threads of a block where each works on one element.
pub(crate) const THREADS: u32 = 256;

/// Blocks of [`THREADS`] that cover so many threads, one at least: a grid is never empty.
pub(crate) fn blocks(threads: u64) -> u32 {
    let blocks = threads.div_ceil(u64::from(THREADS)).max(1);
    // A grid's width, 2^31 - 1 blocks, covers 2 TiB of f32.
    assert!(blocks < 1 << 31, "{threads} threads make no grid");
    blocks as u32
}

/// `launch!(gpu, Kernel::name, (grid x, grid y), threads, shared bytes; arguments…)` on the
/// device's stream. Arguments are references to views, slices or plain numbers, in the kernel's
/// order.
macro_rules! launch {
    ($gpu:expr, $kernel:expr, $grid:expr, $threads:expr, $shared:expr; $($arg:expr),* $(,)?) => {{
        use cudarc::driver::PushKernelArg;
        let (x, y): (u32, u32) = $grid;
        let config = cudarc::driver::LaunchConfig {
            grid_dim: (x, y, 1),
            block_dim: ($threads, 1, 1),
            shared_mem_bytes: $shared,
        };
        let kernel = $kernel;
        // SAFETY: every wrapper asserts that its arrays have the lengths which its kernel reads and
        // writes, in its own words, before it launches.
        unsafe { $gpu.stream().launch_builder($gpu.function(kernel))$(.arg($arg))*.launch(config) }
            .or_fail(&format!("{kernel:?}"));
    }};
}

pub(crate) use launch;
