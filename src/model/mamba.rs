//! The Mamba-1 mixer, with Jamba's norms of dt, B and C where the shape has them (transformers
//! `MambaMixer`, `JambaMambaMixer`).
//!
//! Shape letters: T rows, H hidden, D inner channels, N states, R the rank of dt. Rounding points,
//! the same in every leg: each projection's output; the convolution after its silu; dt, B and C
//! after their norms, if any (twice, as RMSNorm has it); y after gate and skip. Δ, exp, state and
//! Σ h·C stay f32; the state is rounded to its cache dtype after every row, or in fast arithmetic
//! after a pass's last one.
//!
//! There is one form. A decode is a sequence of one row that starts from the cached state; on a
//! CPU the step of the scan is the scan.

use super::unit::TensorSpec;
use super::{HfConfig, MambaShape, Numerics, Spans};
use crate::ops::array::{Array, Device, SliceMut};
use crate::ops::conv::Convolution;
use crate::ops::gemm::{Into, Joined, Projection};
use crate::ops::scan::{InputGradients, Inputs, SelectiveScan, Sums};
use crate::ops::state::States;
use crate::ops::weights::{Part, Purpose};

/// The weights of one mixer, packed.
#[derive(Clone, Debug)]
pub struct Mamba {
    /// To x and z.
    in_proj: Joined<2>,
    conv: Convolution,
    /// To dt, B and C.
    x_proj: Joined<3>,
    dt_proj: Projection,
    /// Of dt, B and C.
    norms: Option<[Array; 3]>,
    scan: SelectiveScan,
    out_proj: Projection,
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
    x_td: Array,
    z_td: Array,
    conv_td: Array,
    /// dt, B and C before their norms, where they have any.
    raw: Option<[Array; 3]>,
    dt_tr: Array,
    b_tn: Array,
    c_tn: Array,
    dt_td: Array,
    y_td: Array,
}

/// Gradients by the weights, in the order of [`tensors`].
struct Gradients<'a> {
    in_proj: SliceMut<'a>,
    in_bias: SliceMut<'a>,
    conv_w: SliceMut<'a>,
    conv_bias: SliceMut<'a>,
    x_proj: SliceMut<'a>,
    /// Of dt, B and C.
    norms: [SliceMut<'a>; 3],
    dt_proj: SliceMut<'a>,
    scan: Sums<'a>,
    out_proj: SliceMut<'a>,
    out_bias: SliceMut<'a>,
}

impl<'a> Gradients<'a> {
    fn take(shape: &MambaShape, parts: &mut impl Iterator<Item = SliceMut<'a>>) -> Self {
        let mut next = |present: bool| match present {
            true => parts.next().expect("the unit's tensors are in this order"),
            false => SliceMut::none(),
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
                Sums { a_log_dn, skip_d, dt_bias_d }
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
        parts: &mut impl Iterator<Item = Part<'a>>,
        purpose: Purpose,
    ) -> Self {
        let (h, shape) = (config.hidden_size, config.mamba().clone());
        let MambaShape { d_inner: d, d_state: n, dt_rank: r, .. } = shape;
        let mut next = || parts.next().expect("the unit's tensors are in this order");
        let in_proj = next();
        let none = in_proj.none();
        let in_bias = if shape.proj_bias { next() } else { none };
        let (in_x, in_z) = in_proj.split_at(d * h);
        let (bias_x, bias_z) = in_bias.split_at(in_bias.len() / 2);
        let conv_w = next();
        let conv_bias = if shape.conv_bias { next() } else { none };
        let x_proj = next();
        let (x_dt, x_bc) = x_proj.split_at(r * d);
        let (x_b, x_c) = x_bc.split_at(n * d);
        let norms = shape.dt_b_c_norms.then(|| [(); 3].map(|()| next().to_array()));
        let (dt_proj, dt_bias, a_log, skip) = (next(), next(), next(), next());
        let out_proj = next();
        let out_bias = if shape.proj_bias { next() } else { none };
        Self {
            in_proj: Joined::new([(in_x, bias_x), (in_z, bias_z)], h, purpose),
            conv: Convolution::new(conv_w, conv_bias, d),
            x_proj: Joined::new([x_dt, x_b, x_c].map(|w| (w, w.none())), d, purpose),
            dt_proj: Projection::new(dt_proj, none, r, purpose),
            norms,
            scan: SelectiveScan::new(a_log, skip, dt_bias, purpose.arithmetic),
            out_proj: Projection::new(out_proj, out_bias, d, purpose),
            shape,
        }
    }

    /// The states before `count` sequences.
    #[must_use]
    pub fn fresh_states(&self, device: &Device, count: usize) -> States {
        States::fresh(device, count, self.conv.state_len(), self.scan.state_len())
    }

    /// out[T, H] from the normed rows u[T, H]; each span's state advances.
    pub(super) fn forward(
        &self,
        num: &Numerics,
        u_th: &Array,
        spans: &Spans,
        states: &mut States,
    ) -> Array {
        self.output(num, &self.activations(num, u_th, spans, states))
    }

    /// out[T, H].
    pub(super) fn output(&self, num: &Numerics, acts: &Activations) -> Array {
        self.out_proj.forward(&acts.y_td, num.dtype)
    }

    /// Everything up to the output projection; each span's state advances.
    pub(super) fn activations(
        &self,
        num: &Numerics,
        u_th: &Array,
        spans: &Spans,
        states: &mut States,
    ) -> Activations {
        let [x_td, z_td] = self.in_proj.forward(u_th, num.dtype);
        let conv_td = self.conv.forward(states, spans, &x_td, num.dtype);
        let selected = self.x_proj.forward(&conv_td, num.dtype);
        let (raw, [dt_tr, b_tn, c_tn]) = match &self.norms {
            None => (None, selected),
            Some(norms) => {
                let normed = Array::rms_norm_three(&selected, norms, num.eps, num.dtype);
                (Some(selected), normed)
            }
        };
        let dt_td = self.dt_proj.forward(&dt_tr, num.dtype);
        let inputs =
            Inputs { c_td: &conv_td, dt_td: &dt_td, b_tn: &b_tn, c_tn: &c_tn, z_td: &z_td };
        let y_td = self.scan.forward(states, spans, inputs, num.dtype, num.state_dtype);
        Activations { x_td, z_td, conv_td, raw, dt_tr, b_tn, c_tn, dt_td, y_td }
    }

    /// For sequences that started from nothing: adds the weights' gradients to `parts`, returns
    /// the gradient by u[T, H].
    pub(super) fn backward<'a>(
        &self,
        num: &Numerics,
        u_th: &Array,
        spans: &Spans,
        acts: &Activations,
        dout_th: &Array,
        parts: &mut impl Iterator<Item = SliceMut<'a>>,
    ) -> Array {
        let mut grads = Gradients::take(&self.shape, parts);
        let mut dy_td = acts.y_td.zeros_like();
        let (own, into) = ((grads.out_proj.reborrow(), grads.out_bias.reborrow()), Into::Overwrite);
        self.out_proj.backward(dout_th, &acts.y_td, num.dtype, own, (into, &mut dy_td));

        let d = self.scan.backward(spans, acts.inputs(), num.state_dtype, &dy_td, &mut grads.scan);
        let InputGradients { c_td: mut dconv_td, dt_td: ddt_td, b_tn, c_tn, z_td: dz_td } = d;
        let mut ddt_tr = acts.dt_tr.zeros_like();
        let own = (grads.dt_proj.reborrow(), SliceMut::none());
        self.dt_proj.backward(&ddt_td, &acts.dt_tr, num.dtype, own, (into, &mut ddt_tr));
        let dselected = self.backward_norms(num, acts, [ddt_tr, b_tn, c_tn], &mut grads);
        let mut rest = grads.x_proj;
        for (linear, dy) in self.x_proj.each().iter().zip(&dselected) {
            let (dproj, after) = rest.split_at(linear.outputs() * linear.inner());
            rest = after;
            let (own, into) = ((dproj, SliceMut::none()), (Into::Add, &mut dconv_td));
            linear.backward(dy, &acts.conv_td, num.dtype, own, into);
        }
        let dx_td = self.conv.backward(spans, &acts.x_td, &dconv_td, grads.conv_w, grads.conv_bias);
        let in_proj = (grads.in_proj, grads.in_bias);
        self.backward_in_proj(num, u_th, [&dx_td, &dz_td], in_proj)
    }

    /// Through the norms of dt, B and C, if any.
    fn backward_norms(
        &self,
        num: &Numerics,
        acts: &Activations,
        dselected: [Array; 3],
        grads: &mut Gradients<'_>,
    ) -> [Array; 3] {
        let (Some(norms), Some(raw)) = (&self.norms, &acts.raw) else { return dselected };
        let mut norm = |i: usize| {
            let (dy, dnorm) = (&dselected[i], grads.norms[i].reborrow());
            let mut draw = raw[i].zeros_like();
            raw[i].rms_norm_backward(&norms[i], num.eps, dy, &mut draw, dnorm);
            draw
        };
        [norm(0), norm(1), norm(2)]
    }

    /// Through in_proj; returns du[T, H].
    fn backward_in_proj(
        &self,
        num: &Numerics,
        u_th: &Array,
        [dx_td, dz_td]: [&Array; 2],
        (dw, dbias): (SliceMut<'_>, SliceMut<'_>),
    ) -> Array {
        let [in_x, in_z] = self.in_proj.each();
        let (dw_x, dw_z) = dw.split_at(in_x.outputs() * in_x.inner());
        let half = dbias.len() / 2;
        let (dbias_x, dbias_z) = dbias.split_at(half);
        let mut du_th = u_th.zeros_like();
        let (overwrite, add) = (Into::Overwrite, Into::Add);
        in_x.backward(dx_td, u_th, num.dtype, (dw_x, dbias_x), (overwrite, &mut du_th));
        in_z.backward(dz_td, u_th, num.dtype, (dw_z, dbias_z), (add, &mut du_th));
        du_th
    }
}

impl Activations {
    fn inputs(&self) -> Inputs<'_> {
        Inputs {
            c_td: &self.conv_td,
            dt_td: &self.dt_td,
            b_tn: &self.b_tn,
            c_tn: &self.c_tn,
            z_td: &self.z_td,
        }
    }
}
