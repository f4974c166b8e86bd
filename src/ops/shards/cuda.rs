//! Shards on one device, side by side.

use crate::ops::cuda::OrFail;
use crate::ops::weights::cuda::Bytes;

/// Copies of all, one after another.
#[must_use]
pub fn joined(parts: &[Bytes]) -> Bytes {
    let (gpu, dtype) = (parts[0].gpu(), parts[0].dtype());
    let mut whole = gpu.uninit::<u8>(parts.iter().map(|part| part.view().len()).sum());
    let mut start = 0;
    for part in parts.iter().filter(|part| !part.is_empty()) {
        assert_eq!(part.dtype(), dtype, "shards of two dtypes");
        let from = part.view();
        let mut to = whole.slice_mut(start..start + from.len());
        gpu.stream().memcpy_dtod(&from, &mut to).or_fail("a copy on the device");
        start += from.len();
    }
    Bytes::new(gpu, whole, dtype)
}
