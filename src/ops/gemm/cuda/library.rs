//! cuBLASLt, held to our own kernel.
//!
//! Its first choice changes the split of K with the number of rows, and the sum's order with it.
//! What does not change is algorithm 66 (Hopper's warp-specialised kernels) with a split of 1: any
//! tile or cluster of it sums as mma.m16n8k16 does, k ascending in one accumulator. That was
//! measured and is not promised, so every configuration is compared with our kernel on random rows
//! before its first use; after one difference the library is not asked again.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut};

use super::problem::{family, unsplit, Addresses, Algorithm, Problem, ALIGNMENT};
use super::{forward_mma, Shape};
use crate::base::Stream;
use crate::config::Arithmetic;
use crate::ops::cuda::{blocks, launch, Gpu, Kernel, OrFail, THREADS};
use crate::ops::round::bf16;

/// The family whose sums are those of mma.m16n8k16.
const FAMILY: i32 = 66;
/// Rows that prove a configuration.
const PROOF_ROWS: u64 = 64;
/// What NVIDIA advises for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The library's handle, its workspace and the plans made so far. One a device and stream.
pub struct Library {
    handle: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
    plans: Mutex<Plans>,
}

// SAFETY: a handle may be used by any thread; the plans' descriptors are behind the mutex.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

#[derive(Default)]
struct Plans {
    /// None where our own kernel is used.
    made: HashMap<(Arithmetic, Shape), Option<Plan>>,
    /// N, K and settings of the configurations that equal our kernel.
    proven: HashSet<(u64, u64, [u64; 8])>,
    /// What differed, if anything did.
    distrust: Option<String>,
}

struct Plan {
    problem: Problem,
    algorithm: Algorithm,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plans = self.plans();
        f.debug_struct("Library")
            .field("plans", &plans.made.len())
            .field("proven", &plans.proven.len())
            .field("distrust", &plans.distrust)
            .finish_non_exhaustive()
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: made by `open` and destroyed only here.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl Library {
    /// For products on `stream`. The caller has made sure that the library can be loaded.
    ///
    /// # Errors
    /// The library's status, where it does not start or the workspace does not fit.
    pub fn open(stream: &Arc<CudaStream>) -> Result<Self, CublasError> {
        let no_memory = CublasError(sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED);
        // SAFETY: nothing reads the workspace before the library has written it.
        let workspace = unsafe { stream.alloc(WORKSPACE_BYTES) }.map_err(|_| no_memory)?;
        Ok(Self { handle: result::create_handle()?, workspace, plans: Mutex::default() })
    }

    /// As the library numbers itself: 130100 is 13.1.0.
    #[must_use]
    pub fn version(&self) -> usize {
        // SAFETY: takes nothing and only returns a number.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// What differed from our own kernel, after which the library was not asked again.
    #[must_use]
    pub fn distrust(&self) -> Option<String> {
        self.plans().distrust.clone()
    }

    /// Whether products of N outputs from K are the library's, at this many rows; None before the
    /// first one. For tests and reports.
    #[must_use]
    pub fn plans_to_use(
        &self,
        arithmetic: Arithmetic,
        m: usize,
        n: usize,
        k: usize,
    ) -> Option<bool> {
        let shape = Shape { m: m as u64, n: n as u64, k: k as u64 };
        self.plans().made.get(&(arithmetic, shape)).map(Option::is_some)
    }

    fn plans(&self) -> MutexGuard<'_, Plans> {
        // A panic in between left at most a plan out.
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// y[M, N] = x[M, K] · w[N, K]ᵀ, bare accumulators; false where our own kernel must do it.
    pub(super) fn product(
        &self,
        gpu: &Gpu,
        arithmetic: Arithmetic,
        shape: Shape,
        x_mk: &CudaView<'_, f32>,
        w_nk: &CudaView<'_, u8>,
        y_mn: &mut CudaViewMut<'_, f32>,
    ) -> bool {
        let stream = gpu.stream();
        let starts = [w_nk.device_ptr(stream).0, y_mn.device_ptr(stream).0];
        let rows = [shape.k * 2, shape.n * 4];
        if !starts.into_iter().chain(rows).all(|bytes| bytes.is_multiple_of(ALIGNMENT)) {
            return false;
        }
        stream.context().bind_to_thread().or_fail("bind the device to this thread");
        let mut plans = self.plans();
        if !plans.made.contains_key(&(arithmetic, shape)) {
            let plan = self.plan(gpu, &mut plans, arithmetic, shape, w_nk);
            plans.made.insert((arithmetic, shape), plan);
        }
        let Some(Some(plan)) = plans.made.get(&(arithmetic, shape)) else { return false };
        self.run(gpu, plan, shape, x_mk, w_nk, y_mn);
        true
    }

    fn plan(
        &self,
        gpu: &Gpu,
        plans: &mut Plans,
        arithmetic: Arithmetic,
        shape: Shape,
        w_nk: &CudaView<'_, u8>,
    ) -> Option<Plan> {
        let problem = Problem::new(shape).or_fail("describe a product to cuBLASLt");
        let offers = problem.offers(self.handle, WORKSPACE_BYTES).or_fail("ask cuBLASLt");
        let algorithm = match arithmetic {
            Arithmetic::Fast => offers.into_iter().next()?,
            Arithmetic::Invariant => {
                let trusted = |algorithm: &Algorithm| {
                    problem.admits(self.handle, algorithm, WORKSPACE_BYTES)
                        && self.is_proven(gpu, plans, shape, algorithm, w_nk)
                };
                let ours = offers.into_iter().filter(|offer| family(offer) == Ok(FAMILY));
                ours.filter_map(|offer| unsplit(offer).ok()).find(trusted)?
            }
        };
        Some(Plan { problem, algorithm })
    }

    /// Whether the configuration gives our kernel's bits on random rows and this very weight.
    fn is_proven(
        &self,
        gpu: &Gpu,
        plans: &mut Plans,
        shape: Shape,
        algorithm: &Algorithm,
        w_nk: &CudaView<'_, u8>,
    ) -> bool {
        let Shape { n, k, .. } = shape;
        let configuration = (n, k, algorithm.data);
        if plans.distrust.is_some() || plans.proven.contains(&configuration) {
            return plans.distrust.is_none();
        }
        let shape = Shape { m: PROOF_ROWS, n, k };
        let problem = Problem::new(shape).or_fail("describe a product to cuBLASLt");
        if !problem.admits(self.handle, algorithm, WORKSPACE_BYTES) {
            return false;
        }
        let plan = Plan { problem, algorithm: *algorithm };
        let differing = self.differing(gpu, &plan, shape, w_nk);
        if differing == 0 {
            plans.proven.insert(configuration);
        } else {
            plans.distrust = Some(format!(
                "cuBLASLt {} differs from mma.m16n8k16 in {differing} of {} outputs of a \
                 [{PROOF_ROWS}, {k}] x [{n}, {k}] product: bf16 products are our own kernel's",
                self.version(),
                shape.m * shape.n,
            ));
            // Plans of proven configurations gave the right bits; one difference ends them too.
            plans.made.retain(|(arithmetic, _), _| *arithmetic != Arithmetic::Invariant);
        }
        differing == 0
    }

    /// Outputs in which a plan and our kernel differ, over random rows.
    fn differing(&self, gpu: &Gpu, plan: &Plan, shape: Shape, w_nk: &CudaView<'_, u8>) -> usize {
        let mut stream = Stream::new(0, "rows that prove a product", shape.k);
        let x: Vec<f32> = (0..shape.m * shape.k).map(|_| bf16(stream.normal() as f32)).collect();
        let x = gpu.upload(&x);
        let outputs = (shape.m * shape.n) as usize;
        let (mut theirs, mut ours) = (gpu.uninit::<f32>(outputs), gpu.uninit::<f32>(outputs));
        self.run(gpu, plan, shape, &x.as_view(), w_nk, &mut theirs.as_view_mut());
        forward_mma(gpu, shape, &x.as_view(), w_nk, &mut ours.as_view_mut());
        let (theirs, ours) = (gpu.download(&theirs.as_view()), gpu.download(&ours.as_view()));
        let differs = |(a, b): &(&f32, &f32)| a.to_bits() != b.to_bits();
        // A weight that holds a NaN or an infinity says nothing of the order.
        let both_nan = |(a, b): &(&f32, &f32)| a.is_nan() && b.is_nan();
        theirs.iter().zip(&ours).filter(|pair| differs(pair) && !both_nan(pair)).count()
    }

    fn run(
        &self,
        gpu: &Gpu,
        plan: &Plan,
        shape: Shape,
        x_mk: &CudaView<'_, f32>,
        w_nk: &CudaView<'_, u8>,
        y_mn: &mut CudaViewMut<'_, f32>,
    ) {
        let len = shape.m * shape.k;
        let mut x16 = gpu.uninit::<u16>(len as usize);
        launch!(gpu, Kernel::gemm_to_bf16, (blocks(len), 1), THREADS, 0; x_mk, &len, &mut x16);
        let stream = gpu.stream();
        let at = Addresses {
            x: x16.device_ptr(stream).0,
            w: w_nk.device_ptr(stream).0,
            y: y_mn.device_ptr_mut(stream).0,
            workspace: self.workspace.device_ptr(stream).0,
            workspace_bytes: WORKSPACE_BYTES,
        };
        // SAFETY: the callers' lengths are the shape's, and `product` has checked the alignment.
        let done = unsafe {
            plan.problem.run(self.handle, &plan.algorithm, at, stream.cu_stream().cast())
        };
        done.or_fail("multiply by cuBLASLt");
    }
}
