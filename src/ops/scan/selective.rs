//! A layer's scan on its device.

#[cfg(feature = "cuda")]
use super::cuda;
use super::{RowGradients, Rows, Scan, WeightGradients};
use crate::config::{Arithmetic, Dtype};
use crate::ops::array::{Array, SliceMut};
use crate::ops::spans::Spans;
use crate::ops::state::States;
use crate::ops::weights::Part;

/// See [`Scan`].
#[derive(Clone, Debug)]
pub enum SelectiveScan {
    Cpu(Scan),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Layer),
}

/// What every row brings: the convolution's output c, δ and the gate z `[T, D]`, B and C `[T, N]`;
/// or the gradients by them.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    pub c_td: &'a Array,
    pub dt_td: &'a Array,
    pub b_tn: &'a Array,
    pub c_tn: &'a Array,
    pub z_td: &'a Array,
}

/// The gradients by [`Inputs`].
#[derive(Debug)]
pub struct InputGradients {
    pub c_td: Array,
    pub dt_td: Array,
    pub b_tn: Array,
    pub c_tn: Array,
    pub z_td: Array,
}

/// Where the gradients by the weights are added.
#[derive(Debug)]
pub struct Sums<'a> {
    pub a_log_dn: SliceMut<'a>,
    pub skip_d: SliceMut<'a>,
    pub dt_bias_d: SliceMut<'a>,
}

impl SelectiveScan {
    /// From the checkpoint's `A_log` `[D, N]`, `D` `[D]` and `dt_proj.bias` `[D]`.
    #[must_use]
    pub fn new(
        a_log_dn: Part<'_>,
        skip_d: Part<'_>,
        dt_bias_d: Part<'_>,
        arithmetic: Arithmetic,
    ) -> Self {
        match (a_log_dn, skip_d, dt_bias_d) {
            (Part::Cpu(a_log_dn), Part::Cpu(skip_d), Part::Cpu(dt_bias_d)) => {
                Self::Cpu(Scan::new(a_log_dn, skip_d, dt_bias_d).under(arithmetic))
            }
            #[cfg(feature = "cuda")]
            (a_log_dn, skip_d, dt_bias_d) => {
                Self::Cuda(cuda::Layer::new(a_log_dn, skip_d, dt_bias_d, arithmetic))
            }
        }
    }

    /// Floats of one sequence's state.
    #[must_use]
    pub fn state_len(&self) -> usize {
        match self {
            Self::Cpu(scan) => scan.state_len(),
            #[cfg(feature = "cuda")]
            Self::Cuda(scan) => scan.state_len(),
        }
    }

    /// y[T, D]; each span's state advances, rounded to `state_dtype` as [`Scan::forward`] has it.
    #[must_use]
    pub fn forward(
        &self,
        states: &mut States,
        spans: &Spans,
        inputs: Inputs<'_>,
        dtype: Dtype,
        state_dtype: Dtype,
    ) -> Array {
        assert_eq!(spans.len(), states.len(), "one state a sequence");
        match self {
            Self::Cpu(scan) => {
                let mut y_td = vec![0.0; inputs.z_td.len()];
                for (span, state) in spans.iter().zip(states.cpu_mut()) {
                    let out = &mut y_td[span.floats(scan.channels())];
                    let rows = inputs.rows(scan, span.start..span.start + span.len);
                    scan.forward(&mut state.ssm, rows, dtype, state_dtype, out);
                }
                Array::Cpu(y_td)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(scan) => {
                let inputs = inputs.on_device();
                assert_eq!(inputs.c_td.dtype(), dtype, "rows are scanned in their own dtype");
                let (weights, spans) = (scan.weights(), spans.cuda());
                let y_td = cuda::forward(&weights, inputs, spans, states.cuda(), state_dtype);
                Array::Cuda(y_td)
            }
        }
    }

    /// For sequences from their start: the gradients by the inputs; the weights' are added to
    /// `sums`, spans in order.
    #[must_use]
    pub fn backward(
        &self,
        spans: &Spans,
        inputs: Inputs<'_>,
        state_dtype: Dtype,
        dy_td: &Array,
        sums: &mut Sums<'_>,
    ) -> InputGradients {
        let mut grads = inputs.zeros_like();
        match self {
            Self::Cpu(scan) => {
                let mut sums = WeightGradients {
                    a_log_dn: sums.a_log_dn.cpu(),
                    skip_d: sums.skip_d.cpu(),
                    dt_bias_d: sums.dt_bias_d.cpu(),
                };
                for span in spans.iter() {
                    let (wide, narrow) = (span.floats(scan.channels()), span.floats(scan.states()));
                    let mut drows = RowGradients {
                        c_td: &mut grads.c_td.cpu_mut()[wide.clone()],
                        dt_td: &mut grads.dt_td.cpu_mut()[wide.clone()],
                        b_tn: &mut grads.b_tn.cpu_mut()[narrow.clone()],
                        c_tn: &mut grads.c_tn.cpu_mut()[narrow],
                        z_td: &mut grads.z_td.cpu_mut()[wide.clone()],
                    };
                    let rows = inputs.rows(scan, span.start..span.start + span.len);
                    scan.backward(rows, state_dtype, &dy_td.cpu()[wide], &mut drows, &mut sums);
                }
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(scan) => {
                let mut sums = cuda::WeightGradients {
                    a_log_dn: sums.a_log_dn.cuda().slice_mut(..),
                    skip_d: sums.skip_d.cuda().slice_mut(..),
                    dt_bias_d: sums.dt_bias_d.cuda().slice_mut(..),
                };
                let mut drows = grads.device_rows();
                let (weights, spans) = (scan.weights(), spans.cuda());
                let (dy_td, outputs) = (dy_td.cuda().view(), (&mut drows, &mut sums));
                cuda::backward(&weights, inputs.on_device(), spans, state_dtype, &dy_td, outputs);
            }
        }
        grads
    }
}

#[cfg(feature = "cuda")]
impl InputGradients {
    fn device_rows(&mut self) -> cuda::RowGradients<'_> {
        cuda::RowGradients {
            c_td: self.c_td.cuda_mut().view_mut(),
            dt_td: self.dt_td.cuda_mut().view_mut(),
            b_tn: self.b_tn.cuda_mut().view_mut(),
            c_tn: self.c_tn.cuda_mut().view_mut(),
            z_td: self.z_td.cuda_mut().view_mut(),
        }
    }
}

impl<'a> Inputs<'a> {
    #[cfg(feature = "cuda")]
    fn each(&self) -> [&'a Array; 5] {
        [self.c_td, self.dt_td, self.b_tn, self.c_tn, self.z_td]
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> cuda::Inputs<'a> {
        let [c_td, dt_td, b_tn, c_tn, z_td] = self.each().map(Array::cuda);
        cuda::Inputs { c_td, dt_td, b_tn, c_tn, z_td }
    }

    fn rows(&self, scan: &Scan, rows: std::ops::Range<usize>) -> Rows<'a> {
        let floats = |width: usize| rows.start * width..rows.end * width;
        let (wide, narrow) = (floats(scan.channels()), floats(scan.states()));
        Rows {
            c_td: &self.c_td.cpu()[wide.clone()],
            dt_td: &self.dt_td.cpu()[wide.clone()],
            b_tn: &self.b_tn.cpu()[narrow.clone()],
            c_tn: &self.c_tn.cpu()[narrow],
            z_td: &self.z_td.cpu()[wide],
        }
    }

    fn zeros_like(&self) -> InputGradients {
        InputGradients {
            c_td: self.c_td.zeros_like(),
            dt_td: self.dt_td.zeros_like(),
            b_tn: self.b_tn.zeros_like(),
            c_tn: self.c_tn.zeros_like(),
            z_td: self.z_td.zeros_like(),
        }
    }
}
