//! The Mamba-1 mixer, with Jamba's norms of dt, B and C where the shape has them (transformers
//! `MambaMixer`, `JambaMambaMixer`).
//!
//! Shape letters: T rows, H hidden, D inner channels, N states, R the rank of dt. Rounding points,
//! the same in every leg: each projection's output; the convolution after its silu; dt, B and C
//! after their norms, if any (twice, as RMSNorm has it); y after gate and skip. Δ, exp, state and
//! Σ h·C stay f32; the state is rounded to its cache dtype after every row.
//!
//! There is one form. A decode is a sequence of one row that starts from the cached state; on a
//! CPU the step of the scan is the scan.

use super::unit::TensorSpec;
use super::{HfConfig, MambaShape, Numerics, Span};
use crate::ops::conv::Conv;
use crate::ops::gemm::{bias_gradient, weight_gradient, Into, Linear};
use crate::ops::rms_norm;
use crate::ops::scan::{RowGradients, Rows, Scan, WeightGradients};

/// The recurrent state of one sequence in one layer, f32 in memory whatever the cache holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MambaState {
    /// `[d_conv - 1, D]`: the last columns before the convolution, oldest first.
    pub conv: Vec<f32>,
    /// `[D, N]`.
    pub ssm: Vec<f32>,
}

/// The weights of one mixer, packed.
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba {
    in_x: Linear,
    in_z: Linear,
    conv: Conv,
    x_dt: Linear,
    x_b: Linear,
    x_c: Linear,
    dt_proj: Linear,
    /// Of dt, B and C.
    norms: Option<[Vec<f32>; 3]>,
    scan: Scan,
    out_proj: Linear,
    shape: MambaShape,
}

/// The tensors in flat order; a bias that the config switches off has no elements.
pub(super) fn tensors(config: &HfConfig, prefix: &str) -> Vec<TensorSpec> {
    let (h, shape) = (config.hidden_size, config.mamba());
    let &MambaShape { d_inner: d, d_state: n, dt_rank: r, d_conv: k, .. } = shape;
    let prefix = format!("{prefix}{}.", config.names().mamba);
    let mut list = vec![TensorSpec::new(&prefix, "in_proj.weight", &[2 * d, h])];
    let mut push = |name, shape: &[usize]| list.push(TensorSpec::new(&prefix, name, shape));
    if shape.proj_bias {
        push("in_proj.bias", &[2 * d]);
    }
    push("conv1d.weight", &[d, 1, k]);
    if shape.conv_bias {
        push("conv1d.bias", &[d]);
    }
    push("x_proj.weight", &[r + 2 * n, d]);
    if shape.dt_b_c_norms {
        push("dt_layernorm.weight", &[r]);
        push("b_layernorm.weight", &[n]);
        push("c_layernorm.weight", &[n]);
    }
    push("dt_proj.weight", &[d, r]);
    push("dt_proj.bias", &[d]);
    push("A_log", &[d, n]);
    push("D", &[d]);
    push("out_proj.weight", &[h, d]);
    if shape.proj_bias {
        push("out_proj.bias", &[h]);
    }
    list
}

/// What the forward computes on the way; the backward needs all of it.
pub(super) struct Activations {
    x_td: Vec<f32>,
    z_td: Vec<f32>,
    conv_td: Vec<f32>,
    /// dt, B and C before their norms; empty where they have none.
    raw: [Vec<f32>; 3],
    dt_tr: Vec<f32>,
    b_tn: Vec<f32>,
    c_tn: Vec<f32>,
    dt_td: Vec<f32>,
    y_td: Vec<f32>,
}

/// Gradients by the weights, flat slices in the order of [`tensors`].
struct Gradients<'a> {
    in_proj: &'a mut [f32],
    in_bias: &'a mut [f32],
    conv_w: &'a mut [f32],
    conv_bias: &'a mut [f32],
    x_proj: &'a mut [f32],
    /// Of dt, B and C.
    norms: [&'a mut [f32]; 3],
    dt_proj: &'a mut [f32],
    scan: WeightGradients<'a>,
    out_proj: &'a mut [f32],
    out_bias: &'a mut [f32],
}

impl<'a> Gradients<'a> {
    fn take(shape: &MambaShape, parts: &mut impl Iterator<Item = &'a mut [f32]>) -> Self {
        let mut next = |present: bool| match present {
            true => parts.next().expect("the unit's tensors are in this order"),
            false => &mut [],
        };
        Self {
            in_proj: next(true),
            in_bias: next(shape.proj_bias),
            conv_w: next(true),
            conv_bias: next(shape.conv_bias),
            x_proj: next(true),
            norms: [(); 3].map(|()| next(shape.dt_b_c_norms)),
            dt_proj: next(true),
            scan: {
                let (dt_bias_d, a_log_dn, skip_d) = (next(true), next(true), next(true));
                WeightGradients { a_log_dn, skip_d, dt_bias_d }
            },
            out_proj: next(true),
            out_bias: next(shape.proj_bias),
        }
    }
}

impl Mamba {
    /// Takes the mixer's tensors, in the order of [`tensors`].
    pub(super) fn load<'a>(
        config: &HfConfig,
        parts: &mut impl Iterator<Item = &'a [f32]>,
        trains: bool,
    ) -> Self {
        let (h, shape) = (config.hidden_size, config.mamba().clone());
        let MambaShape { d_inner: d, d_state: n, dt_rank: r, .. } = shape;
        let mut next = |present: bool| match present {
            true => parts.next().expect("the unit's tensors are in this order"),
            false => &[],
        };
        let (in_proj, in_bias) = (next(true), next(shape.proj_bias));
        let (in_x, in_z) = in_proj.split_at(d * h);
        let (bias_x, bias_z) = in_bias.split_at(in_bias.len() / 2);
        let (conv_w, conv_bias) = (next(true), next(shape.conv_bias));
        let no_bias = vec![0.0; d];
        let x_proj = next(true);
        let (x_dt, x_bc) = x_proj.split_at(r * d);
        let (x_b, x_c) = x_bc.split_at(n * d);
        let norms = shape.dt_b_c_norms.then(|| [(); 3].map(|()| next(true).to_vec()));
        let (dt_proj, dt_bias, a_log, skip) = (next(true), next(true), next(true), next(true));
        let (out_proj, out_bias) = (next(true), next(shape.proj_bias));
        Self {
            in_x: Linear::new(in_x, bias_x, h, trains),
            in_z: Linear::new(in_z, bias_z, h, trains),
            conv: Conv::new(conv_w, if conv_bias.is_empty() { &no_bias } else { conv_bias }),
            x_dt: Linear::new(x_dt, &[], d, trains),
            x_b: Linear::new(x_b, &[], d, trains),
            x_c: Linear::new(x_c, &[], d, trains),
            dt_proj: Linear::new(dt_proj, &[], r, trains),
            norms,
            scan: Scan::new(a_log, skip, dt_bias),
            out_proj: Linear::new(out_proj, out_bias, d, trains),
            shape,
        }
    }

    /// The state before a sequence.
    #[must_use]
    pub fn empty_state(&self) -> MambaState {
        MambaState { conv: vec![0.0; self.conv.state_len()], ssm: vec![0.0; self.scan.state_len()] }
    }

    /// out[T, H] from the normed rows u[T, H]; each span's state advances.
    pub(super) fn forward(
        &self,
        num: &Numerics,
        u_th: &[f32],
        spans: &[Span],
        states: &mut [MambaState],
    ) -> Vec<f32> {
        self.output(num, &self.activations(num, u_th, spans, states))
    }

    /// out[T, H].
    pub(super) fn output(&self, num: &Numerics, acts: &Activations) -> Vec<f32> {
        self.out_proj.forward(&acts.y_td, num.dtype)
    }

    /// Everything up to the output projection; each span's state advances.
    pub(super) fn activations(
        &self,
        num: &Numerics,
        u_th: &[f32],
        spans: &[Span],
        states: &mut [MambaState],
    ) -> Activations {
        assert_eq!(spans.len(), states.len(), "one state a sequence");
        let x_td = self.in_x.forward(u_th, num.dtype);
        let z_td = self.in_z.forward(u_th, num.dtype);
        let mut conv_td = vec![0.0; x_td.len()];
        let d = self.in_x.outputs();
        for (span, state) in spans.iter().zip(states.iter_mut()) {
            let rows = span.floats(d);
            let out = &mut conv_td[rows.clone()];
            self.conv.forward(&mut state.conv, &x_td[rows], num.dtype, out);
        }
        let mut selected =
            [&self.x_dt, &self.x_b, &self.x_c].map(|linear| linear.forward(&conv_td, num.dtype));
        let mut raw = [const { Vec::new() }; 3];
        for ((x, raw), w) in selected.iter_mut().zip(&mut raw).zip(self.norms.iter().flatten()) {
            let mut normed = vec![0.0; x.len()];
            rms_norm::forward(x, w, num.eps, num.dtype, &mut normed);
            *raw = std::mem::replace(x, normed);
        }
        let [dt_tr, b_tn, c_tn] = selected;
        let dt_td = self.dt_proj.forward(&dt_tr, num.dtype);
        let y_td = vec![0.0; x_td.len()];
        let mut acts = Activations { x_td, z_td, conv_td, raw, dt_tr, b_tn, c_tn, dt_td, y_td };
        let mut y_td = std::mem::take(&mut acts.y_td);
        for (span, state) in spans.iter().zip(states.iter_mut()) {
            let out = &mut y_td[span.floats(d)];
            let rows = acts.rows(*span, d, self.shape.d_state);
            self.scan.forward(&mut state.ssm, rows, num.dtype, num.state_dtype, out);
        }
        acts.y_td = y_td;
        acts
    }

    /// For sequences that started from nothing: adds the weights' gradients to `parts`, returns
    /// the gradient by u[T, H].
    pub(super) fn backward<'a>(
        &self,
        num: &Numerics,
        u_th: &[f32],
        spans: &[Span],
        acts: &Activations,
        dout_th: &[f32],
        parts: &mut impl Iterator<Item = &'a mut [f32]>,
    ) -> Vec<f32> {
        let mut grads = Gradients::take(&self.shape, parts);
        let (d, n) = (self.shape.d_inner, self.shape.d_state);
        let mut dy_td = vec![0.0; acts.y_td.len()];
        self.out_proj.input_gradient(dout_th, Into::Overwrite, &mut dy_td);
        weight_gradient(dout_th, &acts.y_td, self.out_proj.outputs(), grads.out_proj);
        bias_gradient(dout_th, grads.out_bias);

        let like = |v: &[f32]| vec![0.0; v.len()];
        let (mut dconv_td, mut ddt_td, mut dz_td) =
            (like(&acts.conv_td), like(&acts.dt_td), like(&acts.z_td));
        let (mut db_tn, mut dc_tn) = (like(&acts.b_tn), like(&acts.c_tn));
        for span in spans {
            let (wide, narrow) = (span.floats(d), span.floats(n));
            let mut drows = RowGradients {
                c_td: &mut dconv_td[wide.clone()],
                dt_td: &mut ddt_td[wide.clone()],
                b_tn: &mut db_tn[narrow.clone()],
                c_tn: &mut dc_tn[narrow],
                z_td: &mut dz_td[wide.clone()],
            };
            let rows = acts.rows(*span, d, n);
            self.scan.backward(rows, num.state_dtype, &dy_td[wide], &mut drows, &mut grads.scan);
        }
        let mut ddt_tr = like(&acts.dt_tr);
        self.dt_proj.input_gradient(&ddt_td, Into::Overwrite, &mut ddt_tr);
        weight_gradient(&ddt_td, &acts.dt_tr, d, grads.dt_proj);
        self.backward_x_proj(num, acts, [ddt_tr, db_tn, dc_tn], &mut dconv_td, &mut grads);
        self.backward_in_proj(u_th, spans, acts, &dconv_td, &dz_td, &mut grads)
    }

    /// Through the three norms, if any, and x_proj; adds to `dconv_td`.
    fn backward_x_proj(
        &self,
        num: &Numerics,
        acts: &Activations,
        mut dselected: [Vec<f32>; 3],
        dconv_td: &mut [f32],
        grads: &mut Gradients<'_>,
    ) {
        let norms = self.norms.iter().flatten().zip(&acts.raw).zip(&mut grads.norms);
        for (dy, ((w, raw), dnorm)) in dselected.iter_mut().zip(norms) {
            let mut draw = vec![0.0; raw.len()];
            rms_norm::backward(raw, w, num.eps, dy, &mut draw, dnorm);
            *dy = draw;
        }
        let mut rest = &mut *grads.x_proj;
        for (linear, dy) in [&self.x_dt, &self.x_b, &self.x_c].into_iter().zip(&dselected) {
            let own = linear.outputs() * linear.inner();
            let (dproj, after) = std::mem::take(&mut rest).split_at_mut(own);
            rest = after;
            linear.input_gradient(dy, Into::Add, dconv_td);
            weight_gradient(dy, &acts.conv_td, linear.outputs(), dproj);
        }
    }

    /// Through the convolution and in_proj; returns du[T, H].
    fn backward_in_proj(
        &self,
        u_th: &[f32],
        spans: &[Span],
        acts: &Activations,
        dconv_td: &[f32],
        dz_td: &[f32],
        grads: &mut Gradients<'_>,
    ) -> Vec<f32> {
        let (d, h) = (self.in_x.outputs(), self.in_x.inner());
        let mut dx_td = vec![0.0; acts.x_td.len()];
        // The gradient by an absent bias is computed and dropped: it is D sums.
        let mut no_bias = vec![0.0; d];
        let absent = grads.conv_bias.is_empty();
        let dbias = if absent { no_bias.as_mut_slice() } else { &mut *grads.conv_bias };
        for span in spans {
            let rows = span.floats(d);
            let (x, dy) = (&acts.x_td[rows.clone()], &dconv_td[rows.clone()]);
            self.conv.backward(x, dy, &mut dx_td[rows], grads.conv_w, dbias);
        }
        let (dw_x, dw_z) = grads.in_proj.split_at_mut(d * h);
        weight_gradient(&dx_td, u_th, d, dw_x);
        weight_gradient(dz_td, u_th, d, dw_z);
        let (dbias_x, dbias_z) = grads.in_bias.split_at_mut(grads.in_bias.len() / 2);
        bias_gradient(&dx_td, dbias_x);
        bias_gradient(dz_td, dbias_z);
        let mut du_th = vec![0.0; u_th.len()];
        self.in_x.input_gradient(&dx_td, Into::Overwrite, &mut du_th);
        self.in_z.input_gradient(dz_td, Into::Add, &mut du_th);
        du_th
    }
}

impl Activations {
    fn rows(&self, span: Span, d: usize, n: usize) -> Rows<'_> {
        let (wide, narrow) = (span.floats(d), span.floats(n));
        Rows {
            c_td: &self.conv_td[wide.clone()],
            dt_td: &self.dt_td[wide.clone()],
            b_tn: &self.b_tn[narrow.clone()],
            c_tn: &self.c_tn[narrow],
            z_td: &self.z_td[wide],
        }
    }
}
