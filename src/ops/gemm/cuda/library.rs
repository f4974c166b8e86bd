//! cuBLASLt, held to our own kernel.
//!
//! Its first choice changes the split of K with the number of rows, and the sum's order with it.
//! What does not change is algorithm 66 (Hopper's warp-specialised kernels) with a split of 1: any
//! tile or cluster of it sums as mma.m16n8k16 does, k ascending in one accumulator. That was
//! measured and is not promised, so every configuration is compared with our kernel on random rows
//! before its first use; after one difference the library is not asked again. Since they all have
//! the same bits, the one that is used is the fastest of those that the library offers, timed once
//! for a range of row counts.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::{CudaSlice, CudaStream, CudaView, DevicePtr};

use super::super::Into;
use super::problem::{family, tiles, unsplit, Addresses, Algorithm, Problem};
use super::{forward_mma, timing, Product, Shape};
use crate::base::Stream;
use crate::config::{Arithmetic, Dtype};
use crate::ops::cuda::{blocks, launch, Floats, Gpu, Kernel, OrFail, RowsArgument, THREADS};

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
    made: HashMap<(Arithmetic, Product), Option<Plan>>,
    /// Proven configurations, fastest first, of a product of about so many rows.
    ranked: HashMap<Product, Vec<Algorithm>>,
    /// Random rows by K, on the host: what is kept on the device would keep the device.
    rows: HashMap<u64, Vec<f32>>,
    /// N, K and settings of the configurations that equal our kernel.
    proven: HashSet<(u64, u64, Dtype, [u64; 8])>,
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

    /// Whether products of N outputs from K to f32 are the library's, at this many rows; None
    /// before the first one. For tests and reports.
    #[must_use]
    pub fn plans_to_use(
        &self,
        arithmetic: Arithmetic,
        m: usize,
        n: usize,
        k: usize,
    ) -> Option<bool> {
        let shape = Shape { m: m as u64, n: n as u64, k: k as u64 };
        let product = Product::forward(shape, shape.k, Dtype::F32);
        self.plans().made.get(&(arithmetic, product)).map(Option::is_some)
    }

    fn plans(&self) -> MutexGuard<'_, Plans> {
        // A panic in between left at most a plan out.
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// y[M, N] = x[M, K] · w[N, K]ᵀ; false where our own kernel must do it.
    pub(super) fn product(
        &self,
        gpu: &Arc<Gpu>,
        arithmetic: Arithmetic,
        product: Product,
        x_mk: &RowsArgument,
        w_nk: &CudaView<'_, u8>,
        y_mn: &RowsArgument,
    ) -> bool {
        let at = self.addresses(gpu, x_mk, w_nk, y_mn);
        if !product.is_aligned(&at) {
            return false;
        }
        gpu.stream().context().bind_to_thread().or_fail("bind the device to this thread");
        let mut plans = self.plans();
        if !plans.made.contains_key(&(arithmetic, product)) {
            let plan = self.plan(gpu, &mut plans, arithmetic, product, (w_nk, at));
            plans.made.insert((arithmetic, product), plan);
        }
        let Some(Some(plan)) = plans.made.get(&(arithmetic, product)) else { return false };
        self.run(gpu, plan, at);
        true
    }

    /// The product of a gradient, of bf16 matrices into f32: the library's first choice, whose
    /// order is its own. False where our own kernel must do it.
    pub(super) fn gradient(
        &self,
        gpu: &Arc<Gpu>,
        product: Product,
        into: Into,
        [left, right, out]: [u64; 3],
    ) -> bool {
        let at = self.with_workspace(gpu, [left, right, out]);
        if !product.is_aligned(&at) {
            return false;
        }
        gpu.stream().context().bind_to_thread().or_fail("bind the device to this thread");
        let (mut plans, key) = (self.plans(), (Arithmetic::Fast, product));
        let plan = plans.made.entry(key).or_insert_with(|| self.first_choice(product));
        let Some(plan) = plan else { return false };
        self.run_problem(gpu, &plan.problem, &plan.algorithm, at, into);
        true
    }

    fn first_choice(&self, product: Product) -> Option<Plan> {
        let problem = Problem::new(product).or_fail("describe a product to cuBLASLt");
        let offers = problem.offers(self.handle, WORKSPACE_BYTES).or_fail("ask cuBLASLt");
        Some(Plan { algorithm: offers.into_iter().next()?, problem })
    }

    fn plan(
        &self,
        gpu: &Arc<Gpu>,
        plans: &mut Plans,
        arithmetic: Arithmetic,
        product: Product,
        (w_nk, at): (&CudaView<'_, u8>, Addresses),
    ) -> Option<Plan> {
        if arithmetic == Arithmetic::Fast {
            return self.first_choice(product);
        }
        let problem = Problem::new(product).or_fail("describe a product to cuBLASLt");
        let admits =
            |algorithm: &Algorithm| problem.admits(self.handle, algorithm, WORKSPACE_BYTES);
        let offers = || problem.offers(self.handle, WORKSPACE_BYTES).or_fail("ask cuBLASLt");
        let about = product.rounded();
        let known = plans.ranked.get(&about).and_then(|ranked| ranked.iter().find(|a| admits(a)));
        if let Some(&algorithm) = known {
            return plans.distrust.is_none().then_some(Plan { problem, algorithm });
        }
        let ours = offers().into_iter().filter(|offer| family(offer) == Ok(FAMILY));
        let mut candidates: Vec<Algorithm> = ours.filter_map(|offer| unsplit(offer).ok()).collect();
        // The library offers eight at most, and others are often faster.
        let more = candidates.first().map_or_else(Vec::new, |like| tiles(like, product.shape.m));
        candidates.extend(more);
        let mut trusted: Vec<Algorithm> = Vec::new();
        for candidate in candidates {
            let is_new = trusted.iter().all(|known| known.data != candidate.data);
            let is_one = is_new && admits(&candidate);
            if is_one && self.is_proven(gpu, plans, product, &candidate, w_nk) {
                trusted.push(candidate);
            }
        }
        if plans.distrust.is_some() {
            return None;
        }
        let run = |algorithm: &Algorithm| {
            self.run_problem(gpu, &problem, algorithm, at, Into::Overwrite);
        };
        let ranked = timing::rank(gpu, trusted, run);
        let &algorithm = ranked.first()?;
        plans.ranked.insert(about, ranked);
        Some(Plan { problem, algorithm })
    }

    /// Whether the configuration gives our kernel's bits on random rows and this very weight.
    fn is_proven(
        &self,
        gpu: &Arc<Gpu>,
        plans: &mut Plans,
        product: Product,
        algorithm: &Algorithm,
        w_nk: &CudaView<'_, u8>,
    ) -> bool {
        let Shape { n, k, .. } = product.shape;
        let configuration = (n, k, product.dtype, algorithm.data);
        if plans.distrust.is_some() || plans.proven.contains(&configuration) {
            return plans.distrust.is_none();
        }
        let shape = Shape { m: PROOF_ROWS, n, k };
        let proof = Product::forward(shape, k, product.dtype);
        let problem = Problem::new(proof).or_fail("describe a product to cuBLASLt");
        if !problem.admits(self.handle, algorithm, WORKSPACE_BYTES) {
            return false;
        }
        let rows = plans.rows.entry(k).or_insert_with(|| random_rows(k));
        let x_mk = Floats::upload(gpu, rows).rounded_to(Dtype::Bf16);
        let plan = Plan { problem, algorithm: *algorithm };
        let differing = self.differing(gpu, &plan, proof, &x_mk, w_nk);
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
    fn differing(
        &self,
        gpu: &Arc<Gpu>,
        plan: &Plan,
        product: Product,
        x_mk: &Floats,
        w_nk: &CudaView<'_, u8>,
    ) -> u32 {
        let Product { shape, dtype, .. } = product;
        let (n, k) = (shape.n as usize, shape.k as usize);
        let len = shape.m * shape.n;
        let [theirs, ours] = [(); 2].map(|()| Floats::uninit(gpu, len as usize, dtype));
        self.run(gpu, plan, self.addresses(gpu, &x_mk.rows(k), w_nk, &theirs.rows(n)));
        forward_mma(gpu, shape, &x_mk.rows(k), w_nk, &ours.rows(n));
        let mut count = gpu.zeros::<u32>(1);
        // A weight that holds a NaN or an infinity says nothing of the order.
        launch!(gpu, Kernel::gemm_count_differing, (blocks(len), 1), THREADS, 0;
            &theirs.rows(n), &ours.rows(n), &len, &mut count);
        gpu.download(&count.as_view())[0]
    }

    fn addresses(
        &self,
        gpu: &Gpu,
        x_mk: &RowsArgument,
        w_nk: &CudaView<'_, u8>,
        y_mn: &RowsArgument,
    ) -> Addresses {
        let w = w_nk.device_ptr(gpu.stream()).0;
        self.with_workspace(gpu, [w, x_mk.address(), y_mn.address()])
    }

    fn with_workspace(&self, gpu: &Gpu, [left, right, out]: [u64; 3]) -> Addresses {
        let workspace = self.workspace.device_ptr(gpu.stream()).0;
        Addresses { left, right, out, workspace, workspace_bytes: WORKSPACE_BYTES }
    }

    fn run(&self, gpu: &Gpu, plan: &Plan, at: Addresses) {
        self.run_problem(gpu, &plan.problem, &plan.algorithm, at, Into::Overwrite);
    }

    fn run_problem(
        &self,
        gpu: &Gpu,
        problem: &Problem,
        algorithm: &Algorithm,
        at: Addresses,
        into: Into,
    ) {
        let stream = gpu.stream().cu_stream().cast();
        // SAFETY: the callers' lengths are the shape's, and they have checked the alignment.
        let done = unsafe { problem.run(self.handle, algorithm, at, into, stream) };
        done.or_fail("multiply by cuBLASLt");
    }
}

/// Rows that prove a configuration.
fn random_rows(k: u64) -> Vec<f32> {
    let mut stream = Stream::new(0, "rows that prove a product", k);
    (0..PROOF_ROWS * k).map(|_| stream.normal() as f32).collect()
}
