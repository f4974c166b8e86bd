//! The residual stream between the parts of a model.

use super::Numerics;
use crate::ops::array::Array;

/// x[T, H], and what the last part has left to be added to it: the sum and the norm that follows it
/// are one pass over memory.
#[derive(Clone, Debug)]
pub struct Residual {
    x_th: Array,
    delta_th: Option<Array>,
}

impl Residual {
    #[must_use]
    pub fn new(x_th: Array) -> Self {
        Self { x_th, delta_th: None }
    }

    /// x = round(x + y), by the time that anybody looks.
    pub(super) fn add(&mut self, num: &Numerics, y_th: Array) {
        self.settle(num);
        self.delta_th = Some(y_th);
    }

    /// The rows as they are now, normed.
    pub(super) fn norm(&mut self, num: &Numerics, w_h: &Array) -> Array {
        match self.delta_th.take() {
            None => self.x_th.rms_norm(w_h, num.eps, num.dtype),
            Some(y) => self.x_th.add_and_norm(&y, num.residual_dtype, w_h, num.eps, num.dtype),
        }
    }

    /// The stream with all that was added.
    pub fn settle(&mut self, num: &Numerics) -> &mut Array {
        if let Some(y_th) = self.delta_th.take() {
            self.x_th.add_rounded(&y_th, num.residual_dtype);
        }
        &mut self.x_th
    }

    /// The same where nothing waits to be added.
    #[must_use]
    pub fn settled(&self) -> &Array {
        assert!(self.delta_th.is_none(), "a sum is waiting");
        &self.x_th
    }

    #[must_use]
    pub fn into_settled(mut self, num: &Numerics) -> Array {
        self.settle(num);
        self.x_th
    }
}
