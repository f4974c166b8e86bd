//! Matrix products on the device (kernels/gemm.cu, kernels/gemm_mma.cu).
//!
//! With f32 weights bit for bit the CPU's. With bf16 weights the forward product runs on tensor
//! cores: one f32 accumulator of mma.m16n8k16 an output, k ascending, which the CPU's sums differ
//! from in their last bits. The library may take our kernel's place where it gives the same bits;
//! see [`Library`]. In every case an output's bits depend on its row of x and its row of w alone.
//!
//! Gradients with bf16 weights are of bf16 matrices too, summed in f32 in an order that the library
//! chooses for the shape, or in ours where it refuses the addresses: the same calls have the same
//! bits, and nothing else is promised.

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

mod library;
mod linear;
mod problem;
mod timing;

pub use library::Library;
pub use linear::Linear;
pub(in crate::ops) use problem::ALIGNMENT;

use cudarc::driver::{CudaView, CudaViewMut, DevicePtr, DevicePtrMut};

use super::Into;
use crate::config::{Arithmetic, Dtype};
use crate::ops::cuda::{blocks, launch, Floats, Gpu, Kernel, OrFail, RowsArgument, THREADS};

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

/// Which of a projection's products, from x[M, K], w[N, K] and y[M, N].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Form {
    /// y = x · wᵀ.
    Forward,
    /// dx = dy · w.
    InputGradient,
    /// dw = dyᵀ · x.
    WeightGradient,
}

/// A product of bf16 matrices: elements from one row of x to the next, dtype of what comes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Product {
    form: Form,
    shape: Shape,
    pitch: u64,
    dtype: Dtype,
}

impl Product {
    fn forward(shape: Shape, pitch: u64, dtype: Dtype) -> Self {
        Self { form: Form::Forward, shape, pitch, dtype }
    }

    /// The same at a number of rows that stands for those about as many: tiles suit a range.
    fn rounded(self) -> Self {
        let step = match self.shape.m {
            0..=32 => 8,
            33..=256 => 32,
            257..=1024 => 128,
            _ => 1024,
        };
        Self { shape: Shape { m: self.shape.m.next_multiple_of(step), ..self.shape }, ..self }
    }
}

impl Weight<'_> {
    /// The shape of a product with `x_len` elements of input.
    fn shape(&self, x_len: usize) -> Shape {
        let (n, k) = (self.outputs, self.inner);
        assert!(n > 0 && k > 0, "a product of an empty matrix");
        let m = x_len / k;
        assert_eq!(x_len, m * k, "x is not [{m}, {k}]");
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

/// y[M, N] = round(x[M, K] · Wᵀ + bias). x and the weight are of one dtype. For bf16 fast
/// arithmetic takes the library's first choice, whose order changes with M. f32 has one kernel.
#[must_use]
pub fn forward(
    x_mk: &Floats,
    weight: &Weight<'_>,
    bias_n: Option<&CudaView<'_, f32>>,
    arithmetic: Arithmetic,
    dtype: Dtype,
) -> Floats {
    let (gpu, shape) = (x_mk.gpu(), weight.shape(x_mk.len()));
    assert_eq!(x_mk.dtype(), weight.dtype, "x and the weight are of one dtype");
    let Some(bias_n) = bias_n else { return product(x_mk, weight, shape, arithmetic, dtype) };
    // A bias is added to the sum before it is rounded.
    assert_eq!(bias_n.len() as u64, shape.n, "the bias is not [{}]", shape.n);
    let sums_mn = product(x_mk, weight, shape, arithmetic, Dtype::F32);
    let y_mn = Floats::uninit(gpu, sums_mn.len(), dtype);
    if shape.m > 0 {
        let (len, out) = (shape.m * shape.n, y_mn.rows(weight.outputs));
        launch!(gpu, Kernel::gemm_add_bias, (blocks(len), 1), THREADS, 0;
            &sums_mn.view(), bias_n, &len, &shape.n, &out);
    }
    y_mn
}

fn product(
    x_mk: &Floats,
    weight: &Weight<'_>,
    shape: Shape,
    arithmetic: Arithmetic,
    dtype: Dtype,
) -> Floats {
    let gpu = x_mk.gpu();
    let mut y_mn = Floats::uninit(gpu, (shape.m * shape.n) as usize, dtype);
    if shape.m == 0 {
        return y_mn;
    }
    let x = x_mk.rows(weight.inner);
    if weight.dtype == Dtype::F32 {
        assert_eq!(dtype, Dtype::F32, "a product of f32 is f32");
        launch!(gpu, Kernel::gemm_forward_f32, grid(shape.m, shape.n), THREADS, 0;
            &x, &weight.bytes_nk, &shape.m, &shape.n, &shape.k, &mut y_mn.view_mut());
        return y_mn;
    }
    let y = y_mn.rows(weight.outputs);
    let product = Product::forward(shape, x.pitch(), dtype);
    if !gpu.library().product(gpu, arithmetic, product, &x, &weight.bytes_nk, &y) {
        forward_mma(gpu, shape, &x, &weight.bytes_nk, &y);
    }
    y_mn
}

/// The definition of the bf16 product. Any shape, any alignment.
fn forward_mma(
    gpu: &Gpu,
    shape: Shape,
    x_mk: &RowsArgument,
    w_nk: &CudaView<'_, u8>,
    y_mn: &RowsArgument,
) {
    launch!(gpu, Kernel::gemm_forward_mma, grid(shape.m, shape.n), MMA_THREADS, 0;
        x_mk, w_nk, &shape.m, &shape.n, &shape.k, y_mn);
}

/// [`forward`] by our own kernel alone, without a bias: what the library is held to.
#[must_use]
pub fn forward_defined(x_mk: &Floats, weight: &Weight<'_>, dtype: Dtype) -> Floats {
    assert_eq!(weight.dtype, Dtype::Bf16, "the f32 product has one kernel");
    assert_eq!(x_mk.dtype(), Dtype::Bf16, "x and the weight are of one dtype");
    let (gpu, shape) = (x_mk.gpu(), weight.shape(x_mk.len()));
    let y_mn = Floats::uninit(gpu, (shape.m * shape.n) as usize, dtype);
    if shape.m > 0 {
        let (x, y) = (x_mk.rows(weight.inner), y_mn.rows(weight.outputs));
        forward_mma(gpu, shape, &x, &weight.bytes_nk, &y);
    }
    y_mn
}

/// `dx[M, K] (+)= dy[M, N] · W`. dy, dense, and the weight are of one dtype; dx is f32.
pub fn input_gradient(dy_mn: &Floats, weight: &Weight<'_>, into: Into, dx_mk: &mut Floats) {
    let (gpu, shape) = (dy_mn.gpu(), weight.shape(dx_mk.len()));
    assert_eq!(dy_mn.len() as u64, shape.m * shape.n, "dy is not [{}, {}]", shape.m, shape.n);
    assert_eq!(dy_mn.dtype(), weight.dtype, "dy and the weight are of one dtype");
    if shape.m == 0 {
        return;
    }
    let mut dx_mk = dx_mk.view_mut();
    let kernel = match weight.dtype {
        Dtype::F32 => Kernel::gemm_input_gradient_f32,
        Dtype::Bf16 => {
            let form = Form::InputGradient;
            let product = Product { form, shape, pitch: shape.k, dtype: Dtype::F32 };
            let w = weight.bytes_nk.device_ptr(gpu.stream()).0;
            let at = [w, dy_mn.rows(weight.outputs).address(), address(gpu, &mut dx_mk)];
            if gpu.library().gradient(gpu, product, into, at) {
                return;
            }
            Kernel::gemm_input_gradient_bf16
        }
    };
    let adds = u32::from(into == Into::Add);
    launch!(gpu, kernel, grid(shape.m, shape.k), THREADS, 0;
        &dy_mn.widened().view(), &weight.bytes_nk, &shape.m, &shape.n, &shape.k, &adds, &mut dx_mk);
}

/// dW[N, K] += dyᵀ · x for y = x · Wᵀ. dy and x, dense, are of one dtype; f32 rows ascend.
pub fn weight_gradient(
    dy_mn: &Floats,
    x_mk: &Floats,
    outputs: usize,
    dw_nk: &mut CudaViewMut<'_, f32>,
) {
    let (gpu, m, inner) = (dy_mn.gpu(), dy_mn.len() / outputs, dw_nk.len() / outputs);
    assert_eq!(dy_mn.len(), m * outputs, "dy is not [{m}, {outputs}]");
    assert_eq!(dw_nk.len(), inner * outputs, "dw is not [{outputs}, {inner}]");
    assert_eq!(x_mk.len(), m * inner, "x is not [{m}, {inner}]");
    assert_eq!(dy_mn.dtype(), x_mk.dtype(), "dy and x are of one dtype");
    if m == 0 {
        return;
    }
    let shape = Shape { m: m as u64, n: outputs as u64, k: inner as u64 };
    if dy_mn.dtype() == Dtype::Bf16 {
        let form = Form::WeightGradient;
        let product = Product { form, shape, pitch: shape.k, dtype: Dtype::F32 };
        let at = [x_mk.rows(inner).address(), dy_mn.rows(outputs).address(), address(gpu, dw_nk)];
        if gpu.library().gradient(gpu, product, Into::Add, at) {
            return;
        }
    }
    launch!(gpu, Kernel::gemm_weight_gradient, grid(shape.n, shape.k), THREADS, 0;
        &dy_mn.widened().view(), &x_mk.widened().view(), &shape.m, &shape.n, &shape.k, dw_nk);
}

fn address(gpu: &Gpu, view: &mut CudaViewMut<'_, f32>) -> u64 {
    view.device_ptr_mut(gpu.stream()).0
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
