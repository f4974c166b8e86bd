//! Rotary positions (Su et al. 2021) as transformers' Llama has them: element i of a head's first
//! half and element i of its second are one pair, turned by position · frequency i.
//!
//! Shape letters: T rows, Q heads, E head width. Angles are products of f32, as in transformers;
//! their sine and cosine are rounded to the compute dtype, a turned pair once more. A row depends
//! on its own position alone, so any chunking gives the same bits. Powers, sines and cosines are
//! taken in f64 and rounded to f32, where the last place, in which C libraries differ, is lost.

#[cfg(feature = "cuda")]
pub mod cuda;

#[cfg(feature = "cuda")]
use std::sync::Arc;

use super::array::Array;
use super::round::to_dtype;
use crate::config::Dtype;

/// Llama 3.1's stretch: low frequencies are divided by `factor`, high ones stay, and those between
/// are blended (transformers `_compute_llama3_parameters`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3 {
    pub factor: f64,
    pub low_freq_factor: f64,
    pub high_freq_factor: f64,
    /// Tokens that the model was trained on before the stretch.
    pub original_context: f64,
}

/// The frequencies of one head width.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Radians a position, `[E / 2]`.
    frequencies: Vec<f32>,
}

/// Cosine and sine of each row's angles, `[T, E / 2]` each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Turns {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rope {
    /// For heads of even width: theta^(-2i / width).
    #[must_use]
    pub fn new(theta: f64, width: usize, llama3: Option<Llama3>) -> Self {
        assert!(width > 0 && width.is_multiple_of(2), "heads of width {width} have no pairs");
        let frequency = |i: usize| {
            let power = theta.powf((2 * i) as f64 / width as f64) as f32;
            let plain = 1.0 / power;
            llama3.map_or(plain, |stretch| stretch.apply(plain))
        };
        Self { frequencies: (0..width / 2).map(frequency).collect() }
    }

    /// Of rows at `positions`.
    #[must_use]
    pub fn turns(&self, positions: impl IntoIterator<Item = usize>, dtype: Dtype) -> Turns {
        let mut turns = Turns::default();
        for position in positions {
            for frequency in &self.frequencies {
                let (sin, cos) = f64::from(frequency * position as f32).sin_cos();
                turns.cos.push(to_dtype(cos as f32, dtype));
                turns.sin.push(to_dtype(sin as f32, dtype));
            }
        }
        turns
    }

    /// x[T, Q, E] in place.
    pub fn forward(&self, turns: &Turns, x: &mut [f32], dtype: Dtype) {
        self.turn(turns, x, |(a, b), (cos, sin)| {
            (to_dtype(a * cos - b * sin, dtype), to_dtype(b * cos + a * sin, dtype))
        });
    }

    /// The gradient by [`Self::forward`]'s output into that by its input, in place: a turn back.
    pub fn backward(&self, turns: &Turns, dx: &mut [f32]) {
        self.turn(turns, dx, |(a, b), (cos, sin)| (a * cos + b * sin, b * cos - a * sin));
    }

    fn turn(
        &self,
        turns: &Turns,
        x: &mut [f32],
        pair: impl Fn((f32, f32), (f32, f32)) -> (f32, f32),
    ) {
        let half = self.frequencies.len();
        let rows = turns.cos.len() / half;
        if rows == 0 {
            return;
        }
        let row = x.len() / rows;
        assert!(x.len() == rows * row && row.is_multiple_of(2 * half), "x is not [{rows}, Q, E]");
        let angles = turns.cos.chunks_exact(half).zip(turns.sin.chunks_exact(half));
        for (x_qe, (cos, sin)) in x.chunks_exact_mut(row).zip(angles) {
            for x_e in x_qe.chunks_exact_mut(2 * half) {
                let (first, second) = x_e.split_at_mut(half);
                for i in 0..half {
                    (first[i], second[i]) = pair((first[i], second[i]), (cos[i], sin[i]));
                }
            }
        }
    }
}

impl Llama3 {
    /// In f32, as transformers has it.
    fn apply(&self, frequency: f32) -> f32 {
        let wavelength = std::f64::consts::TAU / f64::from(frequency);
        let (low, high) = (
            self.original_context / self.low_freq_factor,
            self.original_context / self.high_freq_factor,
        );
        let stretched = f64::from(frequency) / self.factor;
        if wavelength < high {
            frequency
        } else if wavelength > low {
            stretched as f32
        } else {
            let keep = (self.original_context / wavelength - self.low_freq_factor)
                / (self.high_freq_factor - self.low_freq_factor);
            ((1.0 - keep) * stretched + keep * f64::from(frequency)) as f32
        }
    }
}

impl Array {
    /// q or k `[T, Q, E]` turned in place.
    pub fn rope(&mut self, rope: &Rope, turns: &Turns, dtype: Dtype) {
        match self {
            Self::Cpu(x) => rope.forward(turns, x, dtype),
            #[cfg(feature = "cuda")]
            Self::Cuda(x) => {
                let gpu = Arc::clone(x.gpu());
                let turns = cuda::Turns::upload(&gpu, turns, 2 * rope.frequencies.len());
                assert_eq!(x.dtype(), dtype, "rows are turned in their own dtype");
                cuda::forward(&turns, x);
            }
        }
    }

    /// The gradient by [`Self::rope`]'s output into that by its input, in place.
    pub fn rope_backward(&mut self, rope: &Rope, turns: &Turns) {
        match self {
            Self::Cpu(dx) => rope.backward(turns, dx),
            #[cfg(feature = "cuda")]
            Self::Cuda(dx) => {
                let gpu = Arc::clone(dx.gpu());
                let turns = cuda::Turns::upload(&gpu, turns, 2 * rope.frequencies.len());
                cuda::backward(&gpu, &turns, &mut dx.view_mut());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, finite_difference, random, weighted, wide};

    /// First position, rows, heads, width.
    const CASES: [(usize, usize, usize, usize); 4] =
        [(0, 1, 1, 2), (0, 5, 2, 8), (7, 4, 3, 16), (300, 3, 1, 32)];
    const THETA: f64 = 500_000.0;

    fn oracle(first: usize, rows: usize, width: usize, x: &[f64]) -> Vec<f64> {
        let row = x.len() / rows;
        (0..x.len())
            .map(|at| {
                let (t, e) = (at / row, at % row % width);
                let i = e % (width / 2);
                let angle = (first + t) as f64 * THETA.powf(-2.0 * i as f64 / width as f64);
                let other = if e < width / 2 { -x[at + width / 2] } else { x[at - width / 2] };
                x[at] * angle.cos() + other * angle.sin()
            })
            .collect()
    }

    #[test]
    fn forward_against_f64_and_split_anywhere() {
        for (first, rows, heads, width) in CASES {
            let rope = Rope::new(THETA, width, None);
            let x = random(rows * heads * width, 1);
            let mut y = x.clone();
            rope.forward(&rope.turns(first..first + rows, Dtype::F32), &mut y, Dtype::F32);
            // An angle of up to 300 in f32 is off by 300 · 2^-23.
            assert_close("y", &y, oracle(first, rows, width, &wide(&x)), 1e-4);
            for row in 0..rows {
                let floats = row * heads * width..(row + 1) * heads * width;
                let mut one = x[floats.clone()].to_vec();
                rope.forward(&rope.turns([first + row], Dtype::F32), &mut one, Dtype::F32);
                assert_eq!(one, y[floats], "row {row}");
            }
        }
    }

    #[test]
    fn backward_against_finite_differences() {
        for (first, rows, heads, width) in CASES {
            let rope = Rope::new(THETA, width, None);
            let (x, dy) = (random(rows * heads * width, 2), random(rows * heads * width, 3));
            let mut dx = dy.clone();
            rope.backward(&rope.turns(first..first + rows, Dtype::F32), &mut dx);
            let by_x = finite_difference(&x, |x| weighted(&dy, &oracle(first, rows, width, x)));
            assert_close("dx", &dx, by_x, 1e-4);
        }
    }
}
