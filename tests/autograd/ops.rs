//! Operation by operation.

use candle_core::D;
use candle_nn::ops::log_softmax;
use gapscope::base::Position;
use gapscope::config::Dtype;
use gapscope::model::{Plan, Preset, Root, Span};
use gapscope::ops::array::Array;
use gapscope::ops::attention::{self, Heads};
use gapscope::ops::conv::Conv;
use gapscope::ops::embedding::Tokens;
use gapscope::ops::gemm::{weight_gradient, Into, Linear};
use gapscope::ops::log_softmax::{backward as log_softmax_backward, Normaliser};
use gapscope::ops::scan::{RowGradients, Rows, Scan, WeightGradients};
use gapscope::ops::{rms_norm, swiglu};

use crate::common::dense::{self, Documents};
use crate::common::{device, tokens};
use crate::{check, check_op, opened, random, Input, TOLERANCE};

const EPS: f32 = 1e-5;

/// Lengths of documents in one chunk: alone, a single token, a single token between others.
const PACKED: [&[usize]; 5] = [&[1], &[7], &[1, 1, 1], &[5, 1, 9], &[3, 2, 1, 4]];

fn spans(lens: &[usize]) -> Vec<Span> {
    let mut start = 0;
    let span = |&len: &usize| {
        start += len;
        Span { start: start - len, len, position: Position::new(0) }
    };
    lens.iter().map(span).collect()
}

#[test]
fn gemm() {
    for (m, n, k) in [(1, 1, 1), (1, 17, 5), (9, 3, 33), (13, 31, 7), (5, 16, 16), (70, 9, 65)] {
        let (x, w, dy) = (random(m * k, 1), random(n * k, 2), random(m * n, 3));
        let linear = Linear::new(&w, &[], k, true);
        let (mut dx, mut dw) = (vec![0.0; m * k], vec![0.0; n * k]);
        linear.input_gradient(&dy, Into::Overwrite, &mut dx);
        weight_gradient(&dy, &x, n, &mut dw);
        let inputs: [Input; 2] = [("x", &x, &[m, k]), ("w", &w, &[n, k])];
        let ours = (linear.forward(&x, Dtype::F32), [dx.as_slice(), &dw]);
        check_op(&format!("gemm {m} {n} {k}"), &inputs, &dy, (&ours.0, &ours.1), |v| {
            dense::linear(&v[0], &v[1], None)
        });
    }
}

#[test]
fn rms_norms() {
    // Not H = 1, whose gradient is what is left of two terms that cancel.
    for (t, h) in [(1, 2), (1, 5), (3, 16), (7, 37), (11, 64)] {
        let (x, w, dy) = (random(t * h, 4), random(h, 5), random(t * h, 6));
        let (mut y, mut dx, mut dw) = (vec![0.0; t * h], vec![0.0; t * h], vec![0.0; h]);
        rms_norm::forward(&x, &w, EPS, Dtype::F32, &mut y);
        rms_norm::backward(&x, &w, EPS, &dy, &mut dx, &mut dw);
        let inputs: [Input; 2] = [("x", &x, &[t, h]), ("w", &w, &[h])];
        check_op(&format!("rms_norm {t} {h}"), &inputs, &dy, (&y, &[&dx, &dw]), |v| {
            dense::rms_norm(&v[0], &v[1], EPS)
        });
    }
}

#[test]
fn convolutions_start_anew_at_each_document() {
    for lens in PACKED {
        for (d, taps) in [(1, 4), (3, 4), (17, 4), (5, 2), (4, 1)] {
            let t: usize = lens.iter().sum();
            let (x, w, bias) = (random(t * d, 7), random(d * taps, 8), random(d, 9));
            let dy = random(t * d, 10);
            let conv = Conv::new(&w, &bias);
            let (mut y, mut dx) = (vec![0.0; t * d], vec![0.0; t * d]);
            let (mut dw, mut dbias) = (vec![0.0; d * taps], vec![0.0; d]);
            for rows in spans(lens).iter().map(|span| span.floats(d)) {
                let mut state = vec![0.0; conv.state_len()];
                conv.forward(&mut state, &x[rows.clone()], Dtype::F32, &mut y[rows.clone()]);
                let (x, dy) = (&x[rows.clone()], &dy[rows.clone()]);
                conv.backward(x, dy, &mut dx[rows], &mut dw, &mut dbias);
            }
            let inputs: [Input; 3] =
                [("x", &x, &[t, d]), ("w", &w, &[d, taps]), ("bias", &bias, &[d])];
            let documents = Documents::new(lens);
            let ours: (&[f32], &[&[f32]]) = (&y, &[&dx, &dw, &dbias]);
            check_op(&format!("conv {lens:?} {d} {taps}"), &inputs, &dy, ours, |v| {
                dense::conv(&documents, &v[0], &v[1], &v[2])
            });
        }
    }
}

/// c, dt, B, C, z, A_log, D, dt bias. The biases lie on both sides of softplus' threshold of 20.
fn scan_inputs(t: usize, d: usize, n: usize) -> [Vec<f32>; 8] {
    let lens = [t * d, t * d, t * n, t * n, t * d, d * n, d, d];
    let mut seed = 20;
    let mut all = lens.map(|len| {
        seed += 1;
        random(len, seed)
    });
    for (i, bias) in all[7].iter_mut().enumerate() {
        *bias += [-6.0, 0.0, 21.0][i % 3];
    }
    all
}

#[test]
fn scans_start_anew_at_each_document() {
    for lens in PACKED {
        for (d, n) in [(1, 1), (3, 16), (5, 8), (2, 17), (3, 33)] {
            let t: usize = lens.iter().sum();
            let x = scan_inputs(t, d, n);
            let dy = random(t * d, 30);
            let scan = Scan::new(&x[5], &x[6], &x[7]);
            let mut y = vec![0.0; t * d];
            let mut grads = x.each_ref().map(|v| vec![0.0; v.len()]);
            for span in spans(lens) {
                let (wide, narrow) = (span.floats(d), span.floats(n));
                let rows = Rows {
                    c_td: &x[0][wide.clone()],
                    dt_td: &x[1][wide.clone()],
                    b_tn: &x[2][narrow.clone()],
                    c_tn: &x[3][narrow.clone()],
                    z_td: &x[4][wide.clone()],
                };
                let mut state = vec![0.0; scan.state_len()];
                scan.forward(&mut state, rows, Dtype::F32, Dtype::F32, &mut y[wide.clone()]);
                let [c, dt, b, c_out, z, a_log_dn, skip_d, dt_bias_d] = &mut grads;
                let mut drows = RowGradients {
                    c_td: &mut c[wide.clone()],
                    dt_td: &mut dt[wide.clone()],
                    b_tn: &mut b[narrow.clone()],
                    c_tn: &mut c_out[narrow],
                    z_td: &mut z[wide.clone()],
                };
                let mut weights = WeightGradients { a_log_dn, skip_d, dt_bias_d };
                scan.backward(rows, Dtype::F32, &dy[wide], &mut drows, &mut weights);
            }
            let names = ["c", "dt", "B", "C", "z", "A_log", "D", "dt_bias"];
            let shapes: [&[usize]; 8] =
                [&[t, d], &[t, d], &[t, n], &[t, n], &[t, d], &[d, n], &[d], &[d]];
            let inputs: Vec<_> = (0..8).map(|i| (names[i], x[i].as_slice(), shapes[i])).collect();
            let ours: Vec<&[f32]> = grads.iter().map(Vec::as_slice).collect();
            let documents = Documents::new(lens);
            check_op(&format!("scan {lens:?} {d} {n}"), &inputs, &dy, (&y, &ours), |v| {
                dense::scan(&documents, v.try_into().expect("eight inputs"))
            });
        }
    }
}

#[test]
fn swiglus() {
    for len in [1, 15, 16, 101] {
        let (gate, up, dy) = (random(len, 40), random(len, 41), random(len, 42));
        let mut y = gate.clone();
        swiglu::forward(&mut y, &up, Dtype::F32);
        let (mut dgate, mut dup) = (vec![0.0; len], vec![0.0; len]);
        swiglu::backward(&gate, &up, &dy, &mut dgate, &mut dup);
        let inputs: [Input; 2] = [("gate", &gate, &[len]), ("up", &up, &[len])];
        check_op(&format!("swiglu {len}"), &inputs, &dy, (&y, &[&dgate, &dup]), |v| {
            dense::swiglu(&v[0], &v[1])
        });
    }
}

#[test]
fn attention_sees_its_own_document_with_grouped_heads() {
    for lens in PACKED {
        for (query, key_value, width) in [(1, 1, 1), (4, 2, 16), (6, 1, 8), (3, 3, 5), (6, 3, 20)] {
            let heads = Heads { query, key_value, width };
            let (wide, narrow) = (heads.query_row(), heads.key_value_row());
            let t: usize = lens.iter().sum();
            let (q, k, v) = (random(t * wide, 50), random(t * narrow, 51), random(t * narrow, 52));
            let dout = random(t * wide, 53);
            let (mut out, mut dq) = (vec![0.0; q.len()], vec![0.0; q.len()]);
            let (mut dk, mut dv) = (vec![0.0; k.len()], vec![0.0; k.len()]);
            for span in spans(lens) {
                let (a, b) = (span.floats(wide), span.floats(narrow));
                let (q, k, v) = (&q[a.clone()], &k[b.clone()], &v[b.clone()]);
                attention::forward(heads, q, k, v, Dtype::F32, &mut out[a.clone()]);
                let mut gradients = attention::Gradients {
                    q: &mut dq[a.clone()],
                    k: &mut dk[b.clone()],
                    v: &mut dv[b],
                };
                attention::backward(heads, q, k, v, &dout[a], &mut gradients);
            }
            let inputs: [Input; 3] =
                [("q", &q, &[t, wide]), ("k", &k, &[t, narrow]), ("v", &v, &[t, narrow])];
            let documents = Documents::new(lens);
            let case = format!("attention {lens:?} {heads:?}");
            check_op(&case, &inputs, &dout, (&out, &[&dq, &dk, &dv]), |v| {
                dense::attention(&documents, heads, &v[0], &v[1], &v[2])
            });
        }
    }
}

/// The head's way: logits over T, the gradient by log p(target) over T once more.
#[test]
fn log_softmax_at_a_temperature() {
    for vocab in [1, 3, 256, 1023, 1025, 2600] {
        for temperature in [1.0_f32, 0.7, 0.1, 3.0] {
            let logits = random(vocab, 60);
            let over: Vec<f32> = logits.iter().map(|x| x / temperature).collect();
            let (target, upstream) = (vocab / 2, [-0.37_f32]);
            let mut dlogits = vec![0.0; vocab];
            log_softmax_backward(&over, target, upstream[0] / temperature, &mut dlogits);
            let y = [Normaliser::of(&over).log_prob(over[target])];
            let case = format!("log_softmax {vocab} at {temperature}");
            let inputs: [Input; 1] = [("logits", &logits, &[1, vocab])];
            check_op(&case, &inputs, &upstream, (&y, &[&dlogits]), |v| {
                let all = log_softmax(&(&v[0] / f64::from(temperature))?, D::Minus1)?;
                all.narrow(1, target, 1)
            });
        }
    }
}

/// Embedding, final norm and head as one unit, untied and tied: a tied weight has both roles' sum.
#[test]
fn the_root() {
    for tied in [false, true] {
        let mut config = Preset::TinyJamba.config();
        (config.tie_word_embeddings, config.vocab_size, config.hidden_size) = (tied, 37, 20);
        let plan = Plan::new(config);
        let (spec, num) = (&plan.units[0], plan.numerics(Dtype::F32, Dtype::F32));
        let (v, h) = (37, 20);
        // A token that comes twice, whose rows of the gradient are summed.
        let ids = tokens([5, 36, 0, 5, 17]);
        let flat = random(spec.len(), 70);
        let root = Root::load(&plan.config, spec, &opened(&flat), num.purpose(true));
        let x = root.embed(&num, &Tokens::new(&device(), ids.to_vec()));
        let y = root.logits(&num, &x);
        let dy = random(y.len(), 71);
        let mut grads = device().zeros(flat.len());
        let dx = root.backward_head(&num, spec, &x, &device().upload(dy.clone()), &mut grads);
        root.backward_embed(spec, &ids, &dx, &mut grads);
        let [y, grads] = [y, grads].map(Array::into_host);

        let parts: Vec<&[f32]> = spec.parts(&flat).collect();
        let shapes: [&[usize]; 3] = [&[v, h], &[h], &[v, h]];
        let inputs: Vec<_> = spec
            .tensors
            .iter()
            .zip(parts.iter().zip(shapes))
            .map(|(tensor, (part, shape))| (tensor.name.as_str(), *part, shape))
            .collect();
        let ours: Vec<&[f32]> = spec.parts(&grads).collect();
        check_op(&format!("root, tied {tied}"), &inputs, &dy, (&y, &ours), |w| {
            let ids: Vec<u32> = ids.iter().map(|id| id.get()).collect();
            let x = w[0].index_select(&candle_core::Tensor::new(ids, w[0].device())?, 0)?;
            let head = w.get(2).unwrap_or(&w[0]);
            dense::linear(&dense::rms_norm(&x, &w[1], num.eps)?, head, None)
        });
    }
}

/// The alarm rings: a state that goes on into the next document is far outside the tolerance.
#[test]
fn a_document_that_starts_from_the_last_ones_state_is_seen() {
    let (d, n, lens) = (3, 16, [5, 4]);
    let x = scan_inputs(9, d, n);
    let scan = Scan::new(&x[5], &x[6], &x[7]);
    let rows = Rows { c_td: &x[0], dt_td: &x[1], b_tn: &x[2], c_tn: &x[3], z_td: &x[4] };
    let mut y = vec![0.0; 9 * d];
    scan.forward(&mut vec![0.0; scan.state_len()], rows, Dtype::F32, Dtype::F32, &mut y);
    let shapes: [&[usize]; 8] = [&[9, d], &[9, d], &[9, n], &[9, n], &[9, d], &[d, n], &[d], &[d]];
    let inputs: Vec<_> = x.iter().zip(shapes).map(|(v, s)| dense::tensor(v, s)).collect();
    let inputs: [candle_core::Tensor; 8] = inputs.try_into().expect("eight");
    let one = dense::scan(&Documents::new(&[9]), &inputs).expect("one document");
    check("one document", &y, &dense::flat(&one), TOLERANCE);
    let two = dense::flat(&dense::scan(&Documents::new(&lens), &inputs).expect("two documents"));
    let worst = y.iter().zip(&two).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
    assert!(worst > 1e-2, "the leak moves y by {worst}");
}
