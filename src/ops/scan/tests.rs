mod toy;

use super::*;
use crate::ops::testing::{assert_close, finite_difference, random, weighted, wide};

/// T, D, N: one row, below, at and beyond the lane width.
const CASES: [(usize, usize, usize); 5] =
    [(1, 1, 1), (3, 2, 4), (6, 4, 16), (2, 3, 20), (5, 2, 33)];

/// c, dt, B, C, z, A_log, D, dt bias.
type Inputs<T> = [Vec<T>; 8];

fn inputs((t, d, n): (usize, usize, usize)) -> Inputs<f32> {
    let lens = [t * d, t * d, t * n, t * n, t * d, d * n, d, d];
    let mut seed = 10;
    lens.map(|len| {
        seed += 1;
        random(len, seed)
    })
}

fn rows(x: &Inputs<f32>) -> Rows<'_> {
    Rows { c_td: &x[0], dt_td: &x[1], b_tn: &x[2], c_tn: &x[3], z_td: &x[4] }
}

/// The recurrence as the paper writes it.
fn oracle(x: &Inputs<f64>) -> Vec<f64> {
    let [c, dt, b, c_out, z, a_log, skip, bias] = x;
    let (d, n) = (skip.len(), a_log.len() / skip.len());
    let mut h = vec![0.0; d * n];
    (0..c.len())
        .map(|at| {
            let (t, i) = (at / d, at % d);
            let delta = (dt[at] + bias[i]).exp().ln_1p();
            let mut y = skip[i] * c[at];
            for j in 0..n {
                let a = -a_log[i * n + j].exp();
                let state = &mut h[i * n + j];
                *state = (delta * a).exp() * *state + delta * b[t * n + j] * c[at];
                y += *state * c_out[t * n + j];
            }
            y * z[at] / (1.0 + (-z[at]).exp())
        })
        .collect()
}

#[test]
fn forward_against_f64() {
    for case in CASES {
        let x = inputs(case);
        let scan = Scan::new(&x[5], &x[6], &x[7]);
        let (mut h, mut y) = (vec![0.0; scan.state_len()], vec![0.0; x[0].len()]);
        scan.forward(&mut h, rows(&x), Dtype::F32, Dtype::F32, &mut y);
        assert_close("y", &y, oracle(&x.each_ref().map(|v| wide(v))), 1e-5);
    }
}

#[test]
fn any_split_gives_the_same_bits_in_either_state_dtype() {
    let case @ (t, d, n) = (6, 4, 16);
    let x = inputs(case);
    let scan = Scan::new(&x[5], &x[6], &x[7]);
    for state_dtype in [Dtype::F32, Dtype::Bf16] {
        let (mut end, mut whole) = (vec![0.0; scan.state_len()], vec![0.0; t * d]);
        scan.forward(&mut end, rows(&x), Dtype::F32, state_dtype, &mut whole);
        for cut in 1..t {
            let (mut h, mut y) = (vec![0.0; scan.state_len()], vec![0.0; t * d]);
            for (from, to) in [(0, cut), (cut, t)] {
                let part = Rows {
                    c_td: &x[0][from * d..to * d],
                    dt_td: &x[1][from * d..to * d],
                    b_tn: &x[2][from * n..to * n],
                    c_tn: &x[3][from * n..to * n],
                    z_td: &x[4][from * d..to * d],
                };
                let y = &mut y[from * d..to * d];
                scan.forward(&mut h, part, Dtype::F32, state_dtype, y);
            }
            assert_eq!((&y, &h), (&whole, &end), "{state_dtype:?} cut at {cut}");
        }
    }
}

#[test]
fn a_bf16_state_is_rounded_after_every_row() {
    let case = (6, 4, 16);
    let x = inputs(case);
    let scan = Scan::new(&x[5], &x[6], &x[7]);
    let (mut h, mut y) = (vec![0.0; scan.state_len()], vec![0.0; x[0].len()]);
    scan.forward(&mut h, rows(&x), Dtype::F32, Dtype::Bf16, &mut y);
    assert!(h.iter().all(|v| v.to_bits() & 0xffff == 0));
}

#[test]
fn backward_against_finite_differences() {
    for case in CASES {
        let x = inputs(case);
        let dy = random(x[0].len(), 30);
        let mut d = x.each_ref().map(|v| vec![0.0; v.len()]);
        let [dc, ddt, db, dc_out, dz, da_log, dskip, dbias] = &mut d;
        Scan::new(&x[5], &x[6], &x[7]).backward(
            rows(&x),
            Dtype::F32,
            &dy,
            &mut RowGradients { c_td: dc, dt_td: ddt, b_tn: db, c_tn: dc_out, z_td: dz },
            &mut WeightGradients { a_log_dn: da_log, skip_d: dskip, dt_bias_d: dbias },
        );
        let names = ["c", "dt", "B", "C", "z", "A_log", "D", "dt bias"];
        for (which, name) in names.iter().enumerate() {
            let want = finite_difference(&x[which], |moved| {
                let mut point = x.each_ref().map(|v| wide(v));
                point[which] = moved.to_vec();
                weighted(&dy, &oracle(&point))
            });
            assert_close(name, &d[which], want, 2e-5);
        }
    }
}

#[test]
fn fast_rows_against_f64_and_one_row_is_the_step_itself() {
    for case in CASES.into_iter().chain([(150, 2, 16), (300, 1, 5)]) {
        let x = inputs(case);
        let [invariant, fast] = [Arithmetic::Invariant, Arithmetic::Fast]
            .map(|arithmetic| run(&x, arithmetic, Dtype::F32));
        // 300 rows of a recurrence that forgets.
        assert_close("y", &fast.0, oracle(&x.each_ref().map(|v| wide(v))), 5e-5);
        if case.0 == 1 {
            assert_eq!(fast, invariant, "{case:?}");
        }
        // Past the first tile the decays' product is applied as one.
        if case.0 > 16 {
            assert_ne!(fast, invariant, "{case:?}");
        }
    }
}

#[test]
fn fast_states_are_rounded_once() {
    let x = inputs((6, 4, 16));
    let (y, mut end) = run(&x, Arithmetic::Fast, Dtype::F32);
    slice_to_dtype(&mut end, Dtype::Bf16);
    assert_eq!(run(&x, Arithmetic::Fast, Dtype::Bf16), (y, end));
}

/// y, and the state that is left.
fn run(x: &Inputs<f32>, arithmetic: Arithmetic, state_dtype: Dtype) -> (Vec<f32>, Vec<f32>) {
    let scan = Scan::new(&x[5], &x[6], &x[7]).under(arithmetic);
    let (mut h, mut y) = (vec![0.0; scan.state_len()], vec![0.0; x[0].len()]);
    scan.forward(&mut h, rows(x), Dtype::F32, state_dtype, &mut y);
    (y, h)
}
