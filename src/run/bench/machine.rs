//! What this machine can do at most, measured.

use std::fmt;
use std::time::Instant;

use crate::config::{Arithmetic, Dtype};
use crate::ops::array::Device;
use crate::ops::ceilings::{MemoryCopy, Product};
use crate::ops::gemm::{gemm, Into, Packed};
use crate::ops::simd;

/// Rounds of which the best counts, as a floor must.
const ROUNDS: usize = 10;
/// Of large pieces of work, in a round.
const CALLS: usize = 10;

/// What is measured of a machine. A rate that is absent binds nothing.
pub(super) struct Machine {
    name: String,
    dtype: Dtype,
    /// Multiplications and additions a second, of products in the model's dtype.
    pub flops: f64,
    /// Exponentials a second.
    pub exps: Option<f64>,
    /// Bytes read and written a second by a copy in memory that no cache holds.
    pub copy: Option<f64>,
}

impl Machine {
    pub(super) fn measure(device: &Device, dtype: Dtype) -> Self {
        let name = device.name();
        if device.is_host() {
            let (flops, exps) = (cached_product(), Some(exponentials()));
            return Self { name, dtype: Dtype::F32, flops, exps, copy: None };
        }
        // 1 GiB there and 1 GiB back, far beyond any cache.
        let copy = MemoryCopy::new(device, 1 << 28);
        let copy = queued(device, CALLS, || copy.run());
        let product = Product::new(device, [8192, 4096], dtype, Arithmetic::Invariant);
        let rows = product.rows(device, 8192);
        let flops = queued(device, CALLS, || product.run(&rows));
        Self { name, dtype, flops, exps: None, copy: Some(copy) }
    }

    #[cfg(test)]
    pub(super) fn of_rates(flops: f64, exps: Option<f64>, copy: Option<f64>) -> Self {
        Self { name: "test".to_owned(), dtype: Dtype::F32, flops, exps, copy }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let products = match self.dtype {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
        };
        write!(f, "{}: {products} products {}", self.name, flops_text(self.flops))?;
        if let Some(copy) = self.copy {
            write!(f, ", copies {:.0} GB/s read and written", copy / 1e9)?;
        }
        match self.exps {
            Some(exps) => write!(f, ", {:.2} G exp/s", exps / 1e9),
            None => write!(f, ", exponentials not measured and not in the floors"),
        }
    }
}

/// With a unit that suits it.
pub(super) fn flops_text(flops: f64) -> String {
    match flops {
        1e12.. => format!("{:.1} TFLOP/s", flops / 1e12),
        _ => format!("{:.1} GFLOP/s", flops / 1e9),
    }
}

/// Work a second of a device; each of a round's calls queues some and returns how much.
pub(super) fn queued(device: &Device, calls: usize, call: impl Fn() -> u64) -> f64 {
    let round = || {
        device.wait();
        let start = Instant::now();
        let done: u64 = (0..calls).map(|_| call()).sum();
        device.wait();
        done as f64 / start.elapsed().as_secs_f64()
    };
    (0..ROUNDS).map(|_| round()).fold(0.0, f64::max)
}

/// f32 products of all threads together, each over matrices that its cache holds.
fn cached_product() -> f64 {
    const ROWS: usize = 64;
    const SIZE: usize = 64;
    let x = vec![0.5_f32; ROWS * SIZE];
    let packed = Packed::from_matrix(&x, SIZE, SIZE);
    on_every_thread(|y: &mut Vec<f32>| {
        y.resize(ROWS * SIZE, 0.0);
        gemm(&x, &packed, Into::Overwrite, y);
        2 * ROWS * SIZE * SIZE
    })
}

/// Exponentials of all threads together, by a bare loop.
fn exponentials() -> f64 {
    let x = vec![0.5_f32; 4096];
    on_every_thread(|y: &mut Vec<f32>| {
        y.resize(x.len(), 0.0);
        simd::vectorized(
            #[inline(always)]
            || y.iter_mut().zip(&x).for_each(|(y, x)| *y = simd::exp(*x)),
        );
        x.len()
    })
}

/// Work a second of all threads together; a call returns how much it did.
fn on_every_thread(call: impl Fn(&mut Vec<f32>) -> usize + Sync) -> f64 {
    const CALLS: usize = 1000;
    let one_round = |scratch: &mut Vec<f32>| {
        let start = Instant::now();
        let done: usize = (0..CALLS).map(|_| std::hint::black_box(call(scratch))).sum();
        done as f64 / start.elapsed().as_secs_f64()
    };
    let each = rayon::broadcast(|_| {
        let mut scratch = Vec::new();
        (0..ROUNDS).map(|_| one_round(&mut scratch)).fold(0.0, f64::max)
    });
    each.iter().sum()
}
