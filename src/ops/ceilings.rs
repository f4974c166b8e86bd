//! What a device can do at most: work of a known size, for whoever has a clock. A call queues its
//! work; [`Device::wait`] returns when all of it is done.

use super::array::{Array, Device};
use super::gemm::Projection;
use super::weights::{Purpose, Weights};
use crate::config::{Arithmetic, Dtype};

/// A copy from one part of the device's memory to another.
#[derive(Debug)]
pub struct MemoryCopy(Array);

/// y[M, N] = x[M, K] · Wᵀ, by the product that the layers run on.
#[derive(Debug)]
pub struct Product {
    w_nk: Projection,
    dtype: Dtype,
}

impl MemoryCopy {
    /// Of so many f32. Caches should not hold them.
    #[must_use]
    pub fn new(device: &Device, floats: usize) -> Self {
        Self(device.zeros(floats))
    }

    /// Copies once; returns the bytes read and the bytes written together.
    #[must_use]
    pub fn run(&self) -> u64 {
        drop(self.0.clone());
        2 * self.0.len() as u64 * Dtype::F32.bytes()
    }
}

impl Product {
    /// By a weight `[N, K]` of numbers between -1/2 and 1/2.
    #[must_use]
    pub fn new(device: &Device, [n, k]: [usize; 2], dtype: Dtype, arithmetic: Arithmetic) -> Self {
        let weights = Weights::of_master(&device.upload(spread(n * k)), dtype);
        let (whole, purpose) = (weights.whole(), Purpose { arithmetic, trains: false });
        Self { w_nk: Projection::new(whole, whole.none(), k, purpose), dtype }
    }

    /// Rows `[M, K]` of such numbers to multiply.
    #[must_use]
    pub fn rows(&self, device: &Device, m: usize) -> Array {
        let mut x_mk = device.upload(spread(m * self.w_nk.inner()));
        x_mk.round_to(self.dtype);
        x_mk
    }

    /// Multiplies once; returns the multiplications and additions.
    #[must_use]
    pub fn run(&self, x_mk: &Array) -> u64 {
        drop(self.w_nk.forward(x_mk, self.dtype));
        2 * x_mk.len() as u64 * self.w_nk.outputs() as u64
    }
}

/// The fractions of multiples of the golden ratio, which spread evenly.
fn spread(len: usize) -> Vec<f32> {
    const RATIO: f64 = 0.618_033_988_749_895;
    (0..len).map(|i| ((i as f64 * RATIO).fract() - 0.5) as f32).collect()
}

impl Device {
    /// What its maker calls it.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Cpu => format!("CPU, {} thread(s)", self.parallelism()),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.name(),
        }
    }

    /// Returns when everything that was queued is done.
    pub fn wait(&self) {
        match self {
            Self::Cpu => {}
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => {
                use super::cuda::OrFail;
                gpu.stream().synchronize().or_fail("waiting for the device");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_as_large_as_it_says() {
        assert_eq!(MemoryCopy::new(&Device::Cpu, 1000).run(), 8000);
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let product = Product::new(&Device::Cpu, [20, 7], dtype, Arithmetic::Invariant);
            assert_eq!(product.run(&product.rows(&Device::Cpu, 3)), 2 * 3 * 20 * 7);
        }
    }
}
