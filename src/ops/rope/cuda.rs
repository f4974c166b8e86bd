//! Rotary positions on the device, bit for bit the CPU's (kernels/rope.cu). Angles are turned into
//! cosines and sines on the host, in f64, and uploaded for every call.

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use cudarc::driver::{CudaSlice, CudaViewMut};

use super::Turns as HostTurns;
use crate::ops::cuda::{blocks, launch, Floats, Gpu, Kernel, OrFail, THREADS};

/// Cosine and sine of each row's angles, `[T, E / 2]` each.
#[derive(Debug)]
pub struct Turns {
    cos: CudaSlice<f32>,
    sin: CudaSlice<f32>,
    half: u32,
}

impl Turns {
    /// For heads of `width` floats.
    #[must_use]
    pub fn upload(gpu: &Gpu, turns: &HostTurns, width: usize) -> Self {
        assert_eq!(turns.cos.len() % (width / 2), 0, "turns are not [T, {width} / 2]");
        let [cos, sin] = [&turns.cos, &turns.sin].map(|values| gpu.upload(values));
        Self { cos, sin, half: (width / 2) as u32 }
    }

    /// Pairs and heads of x[T, Q, E], `len` floats; None where there are no rows.
    fn shape(&self, len: usize) -> Option<(u64, u32)> {
        let half = self.half as usize;
        let rows = self.cos.len() / half;
        if rows == 0 {
            assert_eq!(len, 0, "x has rows and there are no turns");
            return None;
        }
        let heads = len / (rows * 2 * half);
        assert_eq!(len, rows * heads * 2 * half, "x is not [{rows}, Q, E]");
        (len > 0).then_some(((len / 2) as u64, heads as u32))
    }
}

/// x[T, Q, E] in place, rounded to its dtype.
pub fn forward(turns: &Turns, x: &mut Floats) {
    let Some((pairs, heads)) = turns.shape(x.len()) else { return };
    let rows = x.rows(heads as usize * 2 * turns.half as usize);
    launch!(x.gpu(), Kernel::rope_forward, (blocks(pairs), 1), THREADS, 0;
        &rows, &turns.cos, &turns.sin, &pairs, &heads, &turns.half);
}

/// The gradient by [`forward`]'s output into that by its input, in place.
pub fn backward(gpu: &Gpu, turns: &Turns, dx: &mut CudaViewMut<'_, f32>) {
    let Some((pairs, heads)) = turns.shape(dx.len()) else { return };
    launch!(gpu, Kernel::rope_backward, (blocks(pairs), 1), THREADS, 0;
        dx, &turns.cos, &turns.sin, &pairs, &heads, &turns.half);
}
