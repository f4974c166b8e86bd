//! Rounding and rounded sums on the device, bit for bit the CPU's (kernels/round.cu).

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use crate::ops::cuda::{blocks, launch, Floats, Kernel, OrFail, THREADS};

/// x = round(x + y), to x's dtype.
pub fn add_rounded(xs: &mut Floats, ys: &Floats) {
    assert_eq!(xs.len(), ys.len(), "a sum of unequal lengths");
    if xs.is_empty() {
        return;
    }
    let (len, width) = (xs.len() as u64, xs.width().min(ys.width()));
    launch!(xs.gpu(), Kernel::add_rounded, (blocks(len), 1), THREADS, 0;
        &xs.rows(width), &ys.rows(width), &len, &(width as u64));
}
