//! AdamW's arithmetic on flat f32 arrays, and the squared norm of a gradient.
//!
//! Elements are computed in f64 and rounded once where they are stored. Order of a squared norm:
//! chunks of [`CHUNK`] elements, each summed ascending in f64, then the chunks ascending.

#[cfg(feature = "cuda")]
pub mod cuda;

use super::array::Array;

/// Elements of a squared norm that are summed one after another.
pub const CHUNK: usize = 4096;

/// One step's numbers, the same for every element.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// What weight decay leaves of a weight.
    pub keep: f64,
    /// The learning rate over the first moment's bias correction.
    pub stride: f64,
    /// Square root of the second moment's bias correction.
    pub correction2: f64,
    /// Gradients are multiplied by it.
    pub scale: f64,
}

/// Weights and the two moments in place, all as long as the gradient.
pub fn update(step: &Step, gradient: &[f32], master: &mut [f32], m: &mut [f32], v: &mut [f32]) {
    assert!(
        [master.len(), m.len(), v.len()] == [gradient.len(); 3],
        "weights, moments and gradient must have one length"
    );
    let Step { beta1, beta2, eps, keep, stride, correction2, scale } = *step;
    let moments = m.iter_mut().zip(v);
    for ((w, (m, v)), &g) in master.iter_mut().zip(moments).zip(gradient) {
        let g = f64::from(g) * scale;
        let new_m = beta1 * f64::from(*m) + (1.0 - beta1) * g;
        let new_v = beta2 * f64::from(*v) + (1.0 - beta2) * g * g;
        let denominator = new_v.sqrt() / correction2 + eps;
        *w = (f64::from(*w) * keep - stride * new_m / denominator) as f32;
        *m = new_m as f32;
        *v = new_v as f32;
    }
}

impl Array {
    /// One step on these weights and the two moments, all as long as the gradient: see [`update`].
    pub fn adamw(&mut self, step: &Step, gradient: &Self, m: &mut Self, v: &mut Self) {
        match self {
            Self::Cpu(master) => update(step, gradient.cpu(), master, m.cpu_mut(), v.cpu_mut()),
            #[cfg(feature = "cuda")]
            Self::Cuda(master) => {
                let gradient = gradient.cuda();
                let (mut m, mut v) = (m.cuda_mut().view_mut(), v.cuda_mut().view_mut());
                let (gpu, mut master) = (gradient.gpu(), master.view_mut());
                cuda::update(gpu, step, &gradient.view(), &mut master, (&mut m, &mut v));
            }
        }
    }

    /// See [`squared_norm`].
    #[must_use]
    pub fn squared_norm(&self) -> f64 {
        match self {
            Self::Cpu(gradient) => squared_norm(gradient),
            #[cfg(feature = "cuda")]
            Self::Cuda(gradient) => cuda::squared_norm(gradient.gpu(), &gradient.view()),
        }
    }
}

/// A gradient's squared L2 norm.
#[must_use]
pub fn squared_norm(gradient: &[f32]) -> f64 {
    let square = |sum, &g: &f32| sum + f64::from(g) * f64::from(g);
    gradient.chunks(CHUNK).fold(0.0, |total, chunk| total + chunk.iter().fold(0.0, square))
}
