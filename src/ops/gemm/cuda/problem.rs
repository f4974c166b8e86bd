//! One product as cuBLASLt describes it, and the algorithms that it offers for it.

use std::ffi::c_void;
use std::mem::size_of;
use std::ptr::null_mut;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::sys::CUdeviceptr;

use super::{Form, Product, Shape};
use crate::config::Dtype;
use crate::ops::gemm::Into;

/// Bytes that every pointer given to the library is a multiple of.
pub(in crate::ops) const ALIGNMENT: u64 = 16;
/// Answers asked of the heuristic; it never gives more.
const ANSWERS: usize = 8;
/// `CUBLAS_OP_N` and `CUBLAS_OP_T`, which are of cuBLAS's bindings and not of cuBLASLt's.
const AS_IT_IS: i32 = 0;
const TRANSPOSED: i32 = 1;

use sys::cublasLtMatmulAlgoConfigAttributes_t as Config;

/// `out (+)= left · right` of bf16 matrices, to f32 or bf16, each as the library sees it: columns
/// first, so that a matrix whose rows lie one after another is its transpose.
#[derive(Debug)]
pub(super) struct Problem {
    description: sys::cublasLtMatmulDesc_t,
    left: sys::cublasLtMatrixLayout_t,
    right: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
}

/// A matrix whose columns lie one after another.
struct Matrix {
    rows: u64,
    columns: u64,
    /// Elements from one column to the next.
    pitch: u64,
    /// Whether its transpose is what is multiplied.
    turned: bool,
}

impl Matrix {
    const fn new(rows: u64, columns: u64, pitch: u64) -> Self {
        Self { rows, columns, pitch, turned: false }
    }

    const fn turned(self) -> Self {
        Self { turned: true, ..self }
    }

    fn layout(&self, dtype: sys::cudaDataType) -> Result<sys::cublasLtMatrixLayout_t, CublasError> {
        result::create_matrix_layout(dtype, self.rows, self.columns, self.pitch as i64)
    }
}

impl Product {
    /// Left, right and out. In the library's order w is [K, N], x is [K, M] and y is [N, M].
    const fn matrices(self) -> [Matrix; 3] {
        let Self { form, shape: Shape { m, n, k }, pitch, .. } = self;
        let (w, x, y) = (Matrix::new(k, n, k), Matrix::new(k, m, pitch), Matrix::new(n, m, n));
        match form {
            Form::Forward => [w.turned(), x, y],
            Form::InputGradient => [w, y, x],
            Form::WeightGradient => [x, y.turned(), w],
        }
    }

    /// Whether the library takes matrices at these addresses.
    pub(super) fn is_aligned(self, at: &Addresses) -> bool {
        let [left, right, out] = self.matrices();
        let pitches = [left.pitch * 2, right.pitch * 2, out.pitch * self.dtype.bytes()];
        let starts = [at.left, at.right, at.out];
        starts.into_iter().chain(pitches).all(|bytes| bytes.is_multiple_of(ALIGNMENT))
    }
}

/// Device addresses of a product's three matrices, and of memory that the library may write to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub left: CUdeviceptr,
    pub right: CUdeviceptr,
    pub out: CUdeviceptr,
    pub workspace: CUdeviceptr,
    pub workspace_bytes: usize,
}

/// An algorithm with all of its settings.
pub(super) type Algorithm = sys::cublasLtMatmulAlgo_t;

impl Problem {
    pub fn new(product: Product) -> Result<Self, CublasError> {
        use sys::cudaDataType::{CUDA_R_16BF, CUDA_R_32F};
        let [left, right, out] = product.matrices();
        let mut problem =
            Self { description: null_mut(), left: null_mut(), right: null_mut(), out: null_mut() };
        problem.description =
            result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F)?;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        for (attribute, turned) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, left.turned),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, right.turned),
        ] {
            let operation = if turned { TRANSPOSED } else { AS_IT_IS };
            // SAFETY: the description was just made, and the attribute is a 32-bit number.
            unsafe {
                result::set_matmul_desc_attribute(
                    problem.description,
                    attribute,
                    (&raw const operation).cast(),
                    size_of::<i32>(),
                )?;
            }
        }
        problem.left = left.layout(CUDA_R_16BF)?;
        problem.right = right.layout(CUDA_R_16BF)?;
        problem.out = out.layout(match product.dtype {
            Dtype::F32 => CUDA_R_32F,
            Dtype::Bf16 => CUDA_R_16BF,
        })?;
        Ok(problem)
    }

    /// What the heuristic offers, best first, within so much workspace.
    pub fn offers(
        &self,
        handle: sys::cublasLtHandle_t,
        workspace_bytes: usize,
    ) -> Result<Vec<Algorithm>, CublasError> {
        let preference = Preference::new(workspace_bytes)?;
        // SAFETY: plain numbers, for which zeros are a value.
        let mut answers: [sys::cublasLtMatmulHeuristicResult_t; ANSWERS] =
            unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: every handle is alive, and there is room for as many answers as are asked for.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.description,
                self.left,
                self.right,
                self.out,
                self.out,
                preference.0,
                ANSWERS as i32,
                answers.as_mut_ptr(),
                &mut count,
            )
        };
        // No answer at all is one more reason for our own kernel.
        if status == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        status.result()?;
        let answers = &answers[..count.max(0) as usize];
        let fine = sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS;
        Ok(answers.iter().filter(|answer| answer.state == fine).map(|answer| answer.algo).collect())
    }

    /// Whether the library runs this algorithm here within so much workspace.
    pub fn admits(
        &self,
        handle: sys::cublasLtHandle_t,
        algorithm: &Algorithm,
        workspace_bytes: usize,
    ) -> bool {
        // SAFETY: plain numbers, for which zeros are a value.
        let mut answer: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: every handle is alive; the call writes one answer.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                handle,
                self.description,
                self.left,
                self.right,
                self.out,
                self.out,
                algorithm,
                &mut answer,
            )
        };
        status.result().is_ok() && answer.workspaceSize <= workspace_bytes
    }

    /// Enqueues the product.
    ///
    /// # Safety
    /// The addresses hold matrices of this problem's shape, aligned, in the stream's context.
    pub unsafe fn run(
        &self,
        handle: sys::cublasLtHandle_t,
        algorithm: &Algorithm,
        at: Addresses,
        into: Into,
        stream: sys::cudaStream_t,
    ) -> Result<(), CublasError> {
        let (one, kept) = (1.0_f32, if into == Into::Add { 1.0_f32 } else { 0.0 });
        let pointer = |address: CUdeviceptr| address as *mut c_void;
        // SAFETY: the caller's promise; the scalars are read before the call returns.
        unsafe {
            result::matmul(
                handle,
                self.description,
                (&raw const one).cast(),
                (&raw const kept).cast(),
                pointer(at.left),
                self.left,
                pointer(at.right),
                self.right,
                pointer(at.out),
                self.out,
                pointer(at.out),
                self.out,
                algorithm,
                pointer(at.workspace),
                at.workspace_bytes,
                stream,
            )
        }
    }
}

impl Drop for Problem {
    fn drop(&mut self) {
        for layout in
            [self.left, self.right, self.out].into_iter().filter(|layout| !layout.is_null())
        {
            // SAFETY: made by `new` and destroyed only here. A failure would leak some bytes.
            let _ = unsafe { result::destroy_matrix_layout(layout) };
        }
        if !self.description.is_null() {
            // SAFETY: as above.
            let _ = unsafe { result::destroy_matmul_desc(self.description) };
        }
    }
}

/// What the heuristic is told beside the problem.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(workspace_bytes: usize) -> Result<Self, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self(result::create_matmul_pref()?);
        let workspace = workspace_bytes as u64;
        let alignment = ALIGNMENT as u32;
        let aligned: (*const c_void, usize) = ((&raw const alignment).cast(), size_of::<u32>());
        for (attribute, (value, bytes)) in [
            (
                Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                ((&raw const workspace).cast(), size_of::<u64>()),
            ),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned),
        ] {
            // SAFETY: the preference is alive, and each value has its attribute's size.
            unsafe { result::set_matmul_pref_attribute(preference.0, attribute, value, bytes)? };
        }
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by `new` and destroyed only here.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

/// The family of kernels that an algorithm belongs to.
pub(super) fn family(algorithm: &Algorithm) -> Result<i32, CublasError> {
    let (mut id, mut written) = (0_i32, 0);
    // SAFETY: the attribute is a 32-bit number, and so is where it goes.
    let status = unsafe {
        sys::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            Config::CUBLASLT_ALGO_CONFIG_ID,
            (&raw mut id).cast(),
            size_of::<i32>(),
            &mut written,
        )
    };
    status.result().map(|()| id)
}

/// The same algorithm with all of K in one accumulator.
pub(super) fn unsplit(algorithm: Algorithm) -> Result<Algorithm, CublasError> {
    let one = set(algorithm, Config::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 1_u32)?;
    set(one, Config::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 0_u32)
}

/// Tiles of features x rows for few rows, which leave no multiprocessor idle, as the library
/// numbers them: 64x8, 64x16, 64x24, 32x64, 64x32, 64x64, 64x88, 96x64, 112x64, 128x16, 128x64,
/// 160x64.
const NARROW: [u32; 12] = [10, 312, 313, 12, 13, 15, 319, 27, 164, 394, 18, 193];
/// And for many: 64x64, 64x128, 80x128, 112x128, 128x128, 128x160, 128x192, 168x128, 176x128,
/// 256x128, 320x128.
const WIDE: [u32; 11] = [15, 17, 135, 165, 20, 29, 32, 197, 201, 24, 248];
/// Groups of thread blocks that share what they load: alone, 2x1, 4x1, 1x2, 4x2.
const CLUSTERS: [u16; 5] = [2, 3, 4, 5, 7];

/// The same algorithm by other tiles and clusters. Whether the library knows them, and what they
/// give, is the caller's to find out.
pub(super) fn tiles(like: &Algorithm, rows: u64) -> Vec<Algorithm> {
    let ids: &[u32] = if rows <= 256 { &NARROW } else { &WIDE };
    let one = |(&tile, cluster)| {
        let tiled = set(*like, Config::CUBLASLT_ALGO_CONFIG_TILE_ID, tile)?;
        set(tiled, Config::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, cluster)
    };
    let all = ids.iter().flat_map(|tile| CLUSTERS.map(|cluster| (tile, cluster)));
    all.filter_map(|each| one(each).ok()).collect()
}

/// The algorithm with one setting changed, a number of the width that the setting has.
fn set<T: Copy>(
    mut algorithm: Algorithm,
    attribute: Config,
    value: T,
) -> Result<Algorithm, CublasError> {
    // SAFETY: the library refuses a value of another width than its own.
    let status = unsafe {
        sys::cublasLtMatmulAlgoConfigSetAttribute(
            &mut algorithm,
            attribute,
            (&raw const value).cast(),
            size_of::<T>(),
        )
    };
    status.result().map(|()| algorithm)
}
