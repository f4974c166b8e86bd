//! One file an operation. The only room with `unsafe`, and the only one that computes an address.

pub mod round;
pub mod simd;
