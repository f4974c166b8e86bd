//! Every backward against candle's autograd on the same inputs, in f64.
//!
//! The oracle (`common/dense.rs`) is built from candle's own tensor operations over a packed chunk,
//! so it checks two things at once that finite differences of one sequence cannot: that gradients
//! of whole blocks compose, and that no state crosses from one document to the next.
//!
//! The tolerance of every comparison is relative to the largest element of the compared tensor,
//! because an element is a sum of terms of about that size. An operation's sum has up to a few
//! hundred roundings of 2^-24, of which a random walk keeps the root: 20 of them, or 1.2e-6, is the
//! worst that is seen.

#[path = "../common/mod.rs"]
mod common;

mod blocks;
mod ops;

use candle_core::{Tensor, Var};
use common::dense::{flat, tensor, Candle};
use gapscope::base::Stream;
use gapscope::config::Dtype;
use gapscope::ops::weights::Weights;

/// Four times the worst of the header.
const TOLERANCE: f64 = 5e-6;

/// `len` standard normal numbers.
fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut stream = Stream::new(seed, "autograd", len as u64);
    (0..len).map(|_| stream.normal() as f32).collect()
}

/// A unit's weights on the device of the tests.
fn opened(flat: &[f32]) -> Weights {
    Weights::of_master(&common::device().upload(flat.to_vec()), Dtype::F32)
}

/// Compares all elements; what is exactly 0 in theory may be a rounding of f64 in the oracle.
fn check(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    let largest = want.iter().fold(1e-8, |max: f64, x| max.max(x.abs()));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        let bound = tolerance * largest;
        assert!(error <= bound, "{what}[{i}]: {got:e} against {want:e}, bound {bound:e}");
    }
}

/// A named input: values and shape.
type Input<'a> = (&'a str, &'a [f32], &'a [usize]);

/// By candle: the output of `op`, and the gradient of Σ dy · output by each input.
fn by_candle(
    inputs: &[Input<'_>],
    dy: &[f32],
    op: impl Fn(&[Tensor]) -> Candle,
) -> (Vec<f64>, Vec<Vec<f64>>) {
    let vars: Vec<Var> = inputs
        .iter()
        .map(|(_, values, shape)| Var::from_tensor(&tensor(values, shape)).expect("a variable"))
        .collect();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = op(&tensors).expect("an output");
    let loss = (tensor(dy, y.dims()) * &y).and_then(|one| one.sum_all()).expect("a loss");
    let store = loss.backward().expect("a backward");
    let gradient = |var: &Var| flat(store.get(var.as_tensor()).expect("every input takes part"));
    (flat(&y), vars.iter().map(gradient).collect())
}

/// Checks an operation: its output, and its gradients in the order of `inputs`.
fn check_op(
    case: &str,
    inputs: &[Input<'_>],
    dy: &[f32],
    (y, gradients): (&[f32], &[&[f32]]),
    op: impl Fn(&[Tensor]) -> Candle,
) {
    let (want_y, want) = by_candle(inputs, dy, op);
    check(&format!("{case}: y"), y, &want_y, TOLERANCE);
    assert_eq!(gradients.len(), want.len(), "{case}: one gradient an input");
    for ((name, ..), (got, want)) in inputs.iter().zip(gradients.iter().zip(&want)) {
        check(&format!("{case}: d{name}"), got, want, TOLERANCE);
    }
}
