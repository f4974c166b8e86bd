//! AdamW on flat f32 shards: Loshchilov and Hutter 2019, in the form of `torch.optim.AdamW`.
//!
//! The arithmetic of an element is `ops::adamw`'s. Every rank updates its own shard; the only
//! number that ranks share is the gradient's norm.

use super::TrainerError;
use crate::config::TrainerConfig;
use crate::ops::adamw;
pub use crate::ops::adamw::squared_norm;

/// The knobs of an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    pub learning_rate: f64,
    /// Steps of linear warm-up; 0 starts at the full rate.
    pub warmup_steps: u64,
    pub betas: [f64; 2],
    pub eps: f64,
    /// Decoupled: each step takes rate times this share off the weight.
    pub weight_decay: f64,
    /// Gradients are scaled down to this L2 norm over all units; infinity never scales.
    pub max_grad_norm: f64,
}

impl From<&TrainerConfig> for Options {
    fn from(config: &TrainerConfig) -> Self {
        Self {
            learning_rate: config.learning_rate,
            warmup_steps: config.warmup_steps,
            betas: config.betas,
            eps: config.eps,
            weight_decay: config.weight_decay,
            max_grad_norm: config.max_grad_norm,
        }
    }
}

impl Options {
    /// The learning rate of a step, counted from 1: `warmup_steps` equal stairs, the last at the
    /// full rate.
    #[must_use]
    pub fn rate(&self, step: u64) -> f64 {
        assert!(step > 0, "optimizer steps are counted from 1");
        if step >= self.warmup_steps {
            return self.learning_rate;
        }
        self.learning_rate * (step as f64 / self.warmup_steps as f64)
    }

    /// What gradients of this norm are multiplied by; torch's 1e-6 keeps a norm of 0 harmless.
    #[must_use]
    pub fn clip_scale(&self, norm: f64) -> f64 {
        (self.max_grad_norm / (norm + 1e-6)).min(1.0)
    }

    /// What an update's every element is computed with. `step` is counted from 1; `scale` is
    /// [`Self::clip_scale`].
    #[must_use]
    pub fn step(&self, step: u64, scale: f64) -> adamw::Step {
        assert!(scale.is_finite(), "a non-finite gradient must have been refused before");
        let [beta1, beta2] = self.betas;
        let rate = self.rate(step);
        adamw::Step {
            beta1,
            beta2,
            eps: self.eps,
            keep: 1.0 - rate * self.weight_decay,
            stride: rate / (1.0 - beta1.powf(step as f64)),
            correction2: (1.0 - beta2.powf(step as f64)).sqrt(),
            scale,
        }
    }
}

/// The L2 norm over all units, from each unit's name and squared norm (summed over ranks), in the
/// order given.
///
/// # Errors
/// [`TrainerError::NonFiniteGradient`] names the first unit with an infinity or NaN. Squares of
/// finite f32 numbers cannot overflow f64.
pub fn global_norm<'a>(
    units: impl IntoIterator<Item = (&'a str, f64)>,
) -> Result<f64, TrainerError> {
    let mut total = 0.0;
    for (unit, squares) in units {
        if !squares.is_finite() {
            return Err(TrainerError::NonFiniteGradient { unit: unit.to_owned(), squares });
        }
        total += squares;
    }
    Ok(total.sqrt())
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Goldens {
        cases: Vec<Case>,
    }

    #[derive(Deserialize)]
    struct CaseOptions {
        learning_rate: f64,
        betas: [f64; 2],
        eps: f64,
        weight_decay: f64,
        max_grad_norm: Option<f64>,
        warmup_steps: u64,
    }

    type Units = Vec<Vec<f64>>;

    #[derive(Deserialize)]
    struct Case {
        name: String,
        options: CaseOptions,
        start: Units,
        gradients: Vec<Units>,
        norms: Vec<f64>,
        rates: Vec<f64>,
        master: Units,
        m: Units,
        v: Units,
    }

    fn to_f32(units: &Units) -> Vec<Vec<f32>> {
        units.iter().map(|unit| unit.iter().map(|&x| x as f32).collect()).collect()
    }

    fn zeros(units: &Units) -> Vec<Vec<f32>> {
        units.iter().map(|unit| vec![0.0; unit.len()]).collect()
    }

    fn check(found: &[Vec<f32>], wanted: &Units, bound: impl Fn(f64) -> f64, what: &str) {
        for (found, &wanted) in found.iter().flatten().zip(wanted.iter().flatten()) {
            let difference = (f64::from(*found) - wanted).abs();
            assert!(difference <= bound(wanted), "{what}: {found} for {wanted}");
        }
    }

    #[test]
    fn twenty_steps_equal_torch() {
        let text = include_str!("../../tests/fixtures/adamw/goldens.json");
        let goldens: Goldens = serde_json::from_str(text).expect("the goldens read");
        assert_eq!(goldens.cases.len(), 5);
        for case in goldens.cases {
            let given = &case.options;
            let options = Options {
                learning_rate: given.learning_rate,
                warmup_steps: given.warmup_steps,
                betas: given.betas,
                eps: given.eps,
                weight_decay: given.weight_decay,
                max_grad_norm: given.max_grad_norm.unwrap_or(f64::INFINITY),
            };
            let (mut master, mut m, mut v) =
                (to_f32(&case.start), zeros(&case.start), zeros(&case.start));
            for (step, gradients) in (1_u64..).zip(&case.gradients) {
                let gradients = to_f32(gradients);
                let norm = global_norm(gradients.iter().map(|g| ("unit", squared_norm(g))))
                    .expect("finite gradients");
                let index = step as usize - 1;
                assert!((norm - case.norms[index]).abs() <= 1e-12 * norm, "{}", case.name);
                assert!((options.rate(step) - case.rates[index]).abs() <= 1e-15, "{}", case.name);
                let scale = options.clip_scale(norm);
                for (unit, gradient) in gradients.iter().enumerate() {
                    let (master, m, v) = (&mut master[unit], &mut m[unit], &mut v[unit]);
                    adamw::update(&options.step(step, scale), gradient, master, m, v);
                }
            }
            // Each of 20 stores rounds by half an ulp, 2^-25 of a number below 1; the moments'
            // own roundings move a step (at most 3e-2) by parts in 1e6 of an ulp of the weight.
            let half_ulp = f64::from(2.0_f32.powi(-25));
            let steps = case.gradients.len() as f64;
            check(&master, &case.master, |w| 1.5 * steps * half_ulp * w.abs().max(1.0), &case.name);
            // Moments stay below 1 and forget, so their roundings add up to fewer than 20.
            check(&m, &case.m, |_| steps * half_ulp, &case.name);
            check(&v, &case.v, |v| steps * 2.0 * half_ulp * v, &case.name);
        }
    }

    #[test]
    fn a_non_finite_gradient_names_its_unit() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let units = [("embed", vec![1.0, f32::MAX]), ("layer 3", vec![0.5, bad, 1.0])];
            let error = global_norm(units.iter().map(|(unit, g)| (*unit, squared_norm(g))))
                .expect_err("a non-finite gradient");
            assert!(
                matches!(&error, TrainerError::NonFiniteGradient { unit, .. } if unit == "layer 3"),
                "{error}"
            );
        }
        let largest = global_norm([("embed", squared_norm(&[f32::MAX; 4]))]).expect("finite");
        assert_eq!(largest, 2.0 * f64::from(f32::MAX));
    }

    #[test]
    fn a_gradient_of_zero_only_decays() {
        let options = Options {
            learning_rate: 0.5,
            warmup_steps: 0,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.25,
            max_grad_norm: 1.0,
        };
        let (mut master, mut m, mut v) = ([2.0, -4.0], [0.0; 2], [0.0; 2]);
        let norm = global_norm([("all", squared_norm(&[0.0; 2]))]).expect("finite");
        let step = options.step(1, options.clip_scale(norm));
        adamw::update(&step, &[0.0; 2], &mut master, &mut m, &mut v);
        assert_eq!((master, m, v), ([1.75, -3.5], [0.0; 2], [0.0; 2]));
    }
}
