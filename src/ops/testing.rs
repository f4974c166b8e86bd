//! What the operations' tests share: seeded inputs, comparison, finite differences.

use crate::base::Stream;

/// `len` standard normal numbers.
pub fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut stream = Stream::new(seed, "op test", len as u64);
    (0..len).map(|_| stream.normal() as f32).collect()
}

/// Widened, for the f64 oracles.
pub fn wide(xs: &[f32]) -> Vec<f64> {
    xs.iter().map(|&x| f64::from(x)).collect()
}

/// Every element within `tolerance · max(1, |want|)`.
pub fn assert_close(what: &str, got: &[f32], want: impl IntoIterator<Item = f64>, tolerance: f64) {
    let want: Vec<f64> = want.into_iter().collect();
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= tolerance * want.abs().max(1.0), "{what}[{i}]: {got} against {want}");
    }
}

/// Gradient of `loss` at `x` by central differences in f64, whose own error is near 1e-9.
pub fn finite_difference(x: &[f32], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut point = wide(x);
    (0..x.len())
        .map(|i| {
            let (centre, h) = (point[i], 1e-5);
            point[i] = centre + h;
            let above = loss(&point);
            point[i] = centre - h;
            let below = loss(&point);
            point[i] = centre;
            (above - below) / (2.0 * h)
        })
        .collect()
}

/// Σ weight · value: a scalar whose gradient by `value` is `weight`.
pub fn weighted(weights: &[f32], values: &[f64]) -> f64 {
    assert_eq!(weights.len(), values.len());
    weights.iter().zip(values).map(|(&w, v)| f64::from(w) * v).sum()
}
