//! Counter-based randomness: a draw is a function of (seed, domain, key, counter), never of what
//! was drawn before.
//!
//! The generator is ChaCha8 as `rand_chacha` implements it, whose output for a key, stream and word
//! position is documented as stable. Floats are made here, because `rand`'s distributions may
//! change between releases.

use rand_chacha::rand_core::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Position, RequestId};

/// 32-bit words a position owns in its request's stream; a draw may not use more.
const WORDS_PER_POSITION: u128 = 16;

/// What a stream is for. Two uses never share numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
enum Domain {
    Sampling = 1,
    Named = 2,
}

fn key(seed: u64, domain: Domain, salt: u64) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..16].copy_from_slice(&(domain as u64).to_le_bytes());
    bytes[16..24].copy_from_slice(&salt.to_le_bytes());
    bytes
}

/// The upper 53 bits as a number in [0, 1).
fn unit(word: u64) -> f64 {
    (word >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
}

/// The sampling noise of a run: one number in [0, 1) a (request, position).
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    seed: u64,
}

impl Noise {
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The same for a request and position whatever else runs, in any order, after any preemption.
    #[must_use]
    pub fn uniform(&self, request: RequestId, position: Position) -> f64 {
        let mut rng = ChaCha8Rng::from_seed(key(self.seed, Domain::Sampling, request.step.get()));
        rng.set_stream(u64::from(request.prompt_id.get()) << 32 | u64::from(request.rollout_idx));
        rng.set_word_pos(u128::from(position.get()) * WORDS_PER_POSITION);
        unit(rng.next_u64())
    }
}

/// A sequence of numbers for one named purpose: seeded weights, tasks, shuffles.
#[derive(Clone, Debug)]
pub struct Stream {
    rng: ChaCha8Rng,
}

impl Stream {
    /// `purpose` is spelled out ("weights", "arithmetic"), `index` tells uses of one purpose apart.
    #[must_use]
    pub fn new(seed: u64, purpose: &str, index: u64) -> Self {
        let salt = xxhash_rust::xxh3::xxh3_64(purpose.as_bytes());
        let mut rng = ChaCha8Rng::from_seed(key(seed, Domain::Named, salt));
        rng.set_stream(index);
        Self { rng }
    }

    pub fn next_u64(&mut self) -> u64 {
        self.rng.next_u64()
    }

    /// In [0, 1).
    pub fn uniform(&mut self) -> f64 {
        unit(self.rng.next_u64())
    }

    /// In [low, high], every value equally likely to within 2^-64 · (high - low + 1).
    pub fn integer(&mut self, low: u64, high: u64) -> u64 {
        assert!(low <= high, "empty range {low}..={high}");
        let span = u128::from(high - low) + 1;
        low + ((u128::from(self.rng.next_u64()) * span) >> 64) as u64
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        // 1 - u lies in (0, 1], so that the logarithm is finite.
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Fisher and Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.integer(0, last as u64);
            items.swap(last, other as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_depends_on_each_coordinate_and_on_nothing_else() {
        let draw = |seed, step, prompt, rollout, position| {
            Noise::new(seed).uniform(RequestId::new(step, prompt, rollout), Position::new(position))
        };
        let base = draw(7, 1, 2, 3, 4);
        assert_eq!(base, draw(7, 1, 2, 3, 4));
        let others = [
            draw(8, 1, 2, 3, 4),
            draw(7, 2, 2, 3, 4),
            draw(7, 1, 3, 3, 4),
            draw(7, 1, 2, 4, 4),
            draw(7, 1, 2, 3, 5),
        ];
        assert!(others.iter().all(|&other| other != base), "{others:?}");
    }

    #[test]
    fn uniform_and_normal_have_their_moments() {
        let mut stream = Stream::new(1, "moments", 0);
        let n = 200_000;
        let (mut mean, mut normal_mean, mut normal_square) = (0.0, 0.0, 0.0);
        for _ in 0..n {
            let u = stream.uniform();
            assert!((0.0..1.0).contains(&u));
            mean += u / f64::from(n);
            let z = stream.normal();
            normal_mean += z / f64::from(n);
            normal_square += z * z / f64::from(n);
        }
        // Standard errors at n = 2e5 are 6.5e-4, 2.2e-3 and 3.2e-3; the bounds are five of each.
        assert!((mean - 0.5).abs() < 3.3e-3, "{mean}");
        assert!(normal_mean.abs() < 1.2e-2, "{normal_mean}");
        assert!((normal_square - 1.0).abs() < 1.6e-2, "{normal_square}");
    }

    #[test]
    fn integer_covers_its_range() {
        let mut stream = Stream::new(3, "range", 0);
        let mut seen = [0_u32; 5];
        for _ in 0..1000 {
            seen[(stream.integer(10, 14) - 10) as usize] += 1;
        }
        assert!(seen.iter().all(|&count| count > 120), "{seen:?}");
        assert_eq!(stream.integer(u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn shuffle_keeps_every_item() {
        let mut items: Vec<u32> = (0..100).collect();
        Stream::new(5, "shuffle", 0).shuffle(&mut items);
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
    }
}
