//! Fingerprints of tensors, and weights that go over the host and come back.

use std::sync::Arc;

use gapscope::ops::array::Device;
use gapscope::ops::weights::Weights;

use super::{little_endian, LENGTHS};
use crate::sequences::{gpu, random, DTYPES};

/// Tensors one after another, so that some begin in the middle of a word; the last one is of more
/// words than the grid has threads.
#[test]
fn fingerprints_are_the_cpus() {
    let Some(gpu) = gpu() else { return };
    let lens: Vec<usize> = LENGTHS.into_iter().chain([1, 2, 3, 2_500_003]).collect();
    for dtype in DTYPES {
        let bytes = little_endian(&random(lens.iter().sum(), 13, dtype), dtype);
        let host = Weights::open(&bytes, dtype, &Device::Cpu);
        let device = Weights::open(&bytes, dtype, &Device::Cuda(Arc::clone(&gpu)));
        assert_eq!(device.fingerprints(&lens), host.fingerprints(&lens), "{dtype:?}");
        for element in [0, 1, 256, host.len() - 1] {
            let (host, device) = (host.with_ulp(element), device.with_ulp(element));
            assert_eq!(device.to_bytes(), host.to_bytes(), "{dtype:?}, element {element}");
            assert_eq!(device.fingerprints(&lens), host.fingerprints(&lens), "{dtype:?}");
        }
    }
}
