//! Matrix products on the device (kernels/gemm.cu, kernels/gemm_mma.cu).
//!
//! With f32 weights, and for every gradient, bit for bit the CPU's. With bf16 weights the forward
//! product runs on tensor cores: one f32 accumulator of mma.m16n8k16 an output, k ascending, which
//! the CPU's sums differ from in their last bits. The library may take our kernel's place where it
//! gives the same bits; see [`Library`]. In every case an output's bits depend on its row of x and
//! its row of w alone.

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

mod library;
mod linear;
mod problem;

pub use library::Library;
pub use linear::Linear;
pub(in crate::ops) use problem::ALIGNMENT;

use cudarc::driver::{CudaView, CudaViewMut, DevicePtr};

use super::Into;
use crate::config::{Arithmetic, Dtype};
use crate::ops::cuda::{blocks, dtype_code, launch, Gpu, Kernel, OrFail, THREADS};

/// Outputs along each side of a block of threads.
const SIDE: u64 = 64;
/// Threads of a block of the bf16 product.
const MMA_THREADS: u32 = 128;

/// A weight `[N, K]` as the unit holds it: little-endian elements of `dtype`.
#[derive(Debug)]
pub struct Weight<'a> {
    pub bytes_nk: CudaView<'a, u8>,
    pub dtype: Dtype,
    pub outputs: usize,
    pub inner: usize,
}

/// Rows M, outputs N and inner K of a forward product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    m: u64,
    n: u64,
    k: u64,
}

impl Weight<'_> {
    /// The shape of a product with `x_len` floats of input and `y_len` of output.
    fn shape(&self, x_len: usize, y_len: usize) -> Shape {
        let (n, k) = (self.outputs, self.inner);
        assert!(n > 0 && k > 0, "a product of an empty matrix");
        let m = x_len / k;
        assert_eq!(x_len, m * k, "x is not [{m}, {k}]");
        assert_eq!(y_len, m * n, "y is not [{m}, {n}]");
        let bytes = (n * k) as u64 * self.dtype.bytes();
        assert_eq!(self.bytes_nk.len() as u64, bytes, "the weight is not [{n}, {k}]");
        Shape { m: m as u64, n: n as u64, k: k as u64 }
    }
}

/// Blocks for `rows` x `columns` outputs.
fn grid(rows: u64, columns: u64) -> (u32, u32) {
    let blocks = (columns.div_ceil(SIDE), rows.div_ceil(SIDE));
    assert!(blocks.1 <= 65_535, "a product of {rows} rows is beyond a grid's height");
    (blocks.0 as u32, blocks.1 as u32)
}

/// y[M, N] = round(x[M, K] · Wᵀ + bias). Where the weight is bf16, x must hold bf16 values,
/// and fast arithmetic takes the library's first choice, whose order changes with M. f32 has one
/// kernel.
pub fn forward(
    gpu: &Gpu,
    x_mk: &CudaView<'_, f32>,
    weight: &Weight<'_>,
    bias_n: Option<&CudaView<'_, f32>>,
    arithmetic: Arithmetic,
    dtype: Dtype,
    y_mn: &mut CudaViewMut<'_, f32>,
) {
    let shape = weight.shape(x_mk.len(), y_mn.len());
    if shape.m == 0 {
        return;
    }
    match weight.dtype {
        Dtype::F32 => {
            launch!(gpu, Kernel::gemm_forward_f32, grid(shape.m, shape.n), THREADS, 0;
                x_mk, &weight.bytes_nk, &shape.m, &shape.n, &shape.k, &mut *y_mn);
        }
        Dtype::Bf16 => {
            if !gpu.library().product(gpu, arithmetic, shape, x_mk, &weight.bytes_nk, y_mn) {
                forward_mma(gpu, shape, x_mk, &weight.bytes_nk, y_mn);
            }
        }
    }
    if bias_n.is_some() || dtype == Dtype::Bf16 {
        finish(gpu, bias_n, dtype, shape, y_mn);
    }
}

/// The definition of the bf16 product, as bare accumulators. Any shape, any alignment.
fn forward_mma(
    gpu: &Gpu,
    shape: Shape,
    x_mk: &CudaView<'_, f32>,
    w_nk: &CudaView<'_, u8>,
    y_mn: &mut CudaViewMut<'_, f32>,
) {
    launch!(gpu, Kernel::gemm_forward_mma, grid(shape.m, shape.n), MMA_THREADS, 0;
        x_mk, w_nk, &shape.m, &shape.n, &shape.k, y_mn);
}

/// [`forward`] by our own kernel alone, without bias or rounding: what the library is held to.
pub fn forward_defined(
    gpu: &Gpu,
    x_mk: &CudaView<'_, f32>,
    weight: &Weight<'_>,
    y_mn: &mut CudaViewMut<'_, f32>,
) {
    assert_eq!(weight.dtype, Dtype::Bf16, "the f32 product has one kernel");
    let shape = weight.shape(x_mk.len(), y_mn.len());
    if shape.m > 0 {
        forward_mma(gpu, shape, x_mk, &weight.bytes_nk, y_mn);
    }
}

/// What follows a finished sum: the bias, then rounding.
fn finish(
    gpu: &Gpu,
    bias_n: Option<&CudaView<'_, f32>>,
    dtype: Dtype,
    shape: Shape,
    y_mn: &mut CudaViewMut<'_, f32>,
) {
    let bias: u64 = bias_n.map_or(0, |bias_n| {
        assert_eq!(bias_n.len() as u64, shape.n, "the bias is not [{}]", shape.n);
        bias_n.device_ptr(gpu.stream()).0
    });
    let len = shape.m * shape.n;
    launch!(gpu, Kernel::gemm_finish, (blocks(len), 1), THREADS, 0;
        &bias, &dtype_code(dtype), &len, &shape.n, y_mn);
}

/// `dx[M, K] (+)= dy[M, N] · W`, in f32 for either dtype of the weight.
pub fn input_gradient(
    gpu: &Gpu,
    dy_mn: &CudaView<'_, f32>,
    weight: &Weight<'_>,
    into: Into,
    dx_mk: &mut CudaViewMut<'_, f32>,
) {
    let shape = weight.shape(dx_mk.len(), dy_mn.len());
    if shape.m == 0 {
        return;
    }
    let kernel = match weight.dtype {
        Dtype::F32 => Kernel::gemm_input_gradient_f32,
        Dtype::Bf16 => Kernel::gemm_input_gradient_bf16,
    };
    launch!(gpu, kernel, grid(shape.m, shape.k), THREADS, 0;
        dy_mn, &weight.bytes_nk, &shape.m, &shape.n, &shape.k, &u32::from(into == Into::Add),
        dx_mk);
}

/// dW[N, K] += dyᵀ · x for y = x · Wᵀ; rows ascend.
pub fn weight_gradient(
    gpu: &Gpu,
    dy_mn: &CudaView<'_, f32>,
    x_mk: &CudaView<'_, f32>,
    outputs: usize,
    dw_nk: &mut CudaViewMut<'_, f32>,
) {
    let (m, inner) = (dy_mn.len() / outputs, dw_nk.len() / outputs);
    assert_eq!(dy_mn.len(), m * outputs, "dy is not [{m}, {outputs}]");
    assert_eq!(dw_nk.len(), inner * outputs, "dw is not [{outputs}, {inner}]");
    assert_eq!(x_mk.len(), m * inner, "x is not [{m}, {inner}]");
    if m == 0 {
        return;
    }
    let (m, n, k) = (m as u64, outputs as u64, inner as u64);
    launch!(gpu, Kernel::gemm_weight_gradient, grid(n, k), THREADS, 0;
        dy_mn, x_mk, &m, &n, &k, dw_nk);
}

/// `dbias[N]` += the rows' sum, rows ascending; nothing where there is no bias.
pub fn bias_gradient(gpu: &Gpu, dy_mn: &CudaView<'_, f32>, dbias_n: &mut CudaViewMut<'_, f32>) {
    if dbias_n.is_empty() || dy_mn.is_empty() {
        return;
    }
    let (m, n) = ((dy_mn.len() / dbias_n.len()) as u64, dbias_n.len() as u64);
    assert_eq!(dy_mn.len() as u64, m * n, "dy is not [{m}, {n}]");
    launch!(gpu, Kernel::gemm_bias_gradient, (blocks(n), 1), THREADS, 0; dy_mn, &m, &n, dbias_n);
}
