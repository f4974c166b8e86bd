//! One file an operation. The only room with `unsafe`, and the only one that computes an address.
//!
//! Every operation works on one chunk of packed rows: on the CPU on one thread, callers running
//! chunks in parallel, on a GPU in a launch or a few. A row's bits depend on nothing but the row
//! itself (see each file's header for its order), which is what makes decode, prefill and trainer
//! agree; in fast arithmetic, which a layer is loaded for, products and scans follow the shape.

pub mod adamw;
pub mod array;
pub mod attention;
pub mod ceilings;
pub mod conv;
// Launches are raw calls, and so is opening a device.
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
pub mod cuda;
pub mod embedding;
pub mod extremes;
pub mod fingerprint;
pub mod gemm;
pub mod log_softmax;
pub mod pages;
pub mod recording;
pub mod rms_norm;
pub mod rope;
pub mod round;
pub mod routing;
pub mod sampling;
pub mod scan;
pub mod shards;
pub mod sheet;
// The vector units that this CPU has are known only at run time, and calling code compiled for them
// is what the language calls unsafe.
#[allow(unsafe_code)]
pub mod simd;
pub mod slot;
pub mod spans;
pub mod state;
pub mod swiglu;
#[cfg(test)]
pub mod testing;
pub mod weights;
