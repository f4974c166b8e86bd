//! `gapscope bench`: tokens a second of generate, score and train, beside the floor.
//!
//! The floor is arithmetic alone: a token's multiplications and additions at the rate of one
//! cache-resident matrix product, its exponentials at the rate of a bare loop, both measured on
//! this machine with every thread busy. Memory, batching and everything else cost extra.

use std::fmt::Write;
use std::time::Instant;

use anyhow::{ensure, Result};

use super::session::Session;
use crate::base::Step;
use crate::config::{Config, Device, Update};
use crate::model::{MixerKind, Plan};
use crate::ops::gemm::{gemm, Into, Packed};
use crate::ops::simd;

/// Steps that are timed, after one that is not; the median counts.
const TIMED_STEPS: u64 = 5;
/// A backward is two forwards, after the forward itself and the one that it recomputes.
const FORWARDS_A_TRAINED_TOKEN: f64 = 4.0;

/// Times the loop's own verbs on an experiment.
///
/// # Errors
/// As the run itself.
pub fn bench(config: &Config) -> Result<String> {
    ensure!(
        config.engine.device == Device::Cpu,
        "bench holds its rates against the CPU's floor: set engine.device = \"cpu\""
    );
    let mut session = Session::open(config)?;
    let mut rates: [Vec<f64>; 3] = Default::default();
    for step in (1..=TIMED_STEPS + 1).map(Step::new) {
        let timed = one_step(&mut session, step)?;
        if step.get() > 1 {
            rates.iter_mut().zip(timed).for_each(|(rates, rate)| rates.push(rate));
        }
    }
    let [generate, score, train] = rates.map(median);
    let (work, machine) = (Work::of(&session.plan), Machine::measure());
    let floor = work.tokens_per_s(&machine);
    let mut text = String::new();
    writeln!(text, "a token   {:.3} MFLOP, {} exponentials", work.mflop, work.exponentials)?;
    let (threads, gflops, gexps) = (machine.threads, machine.flops / 1e9, machine.exps / 1e9);
    writeln!(text, "machine   {threads} thread(s), {gflops:.1} GFLOP/s, {gexps:.2} G exp/s")?;
    let mut row = |name: &str, rate: f64, floor: f64, of: &str| {
        let share = 100.0 * rate / floor;
        writeln!(text, "{name:<10}{rate:>8.0} {of}/s, {share:.0}% of the floor's {floor:.0}")
    };
    row("generate", generate, floor, "sampled tokens")?;
    row("score", score, floor, "tokens")?;
    if config.trainer.update == Update::Adamw {
        row("train", train, floor / FORWARDS_A_TRAINED_TOKEN, "tokens")?;
    }
    Ok(text)
}

/// Tokens a second of the three verbs.
fn one_step(session: &mut Session, step: Step) -> Result<[f64; 3]> {
    let mut start = Instant::now();
    let mut lap = || {
        let seconds = start.elapsed().as_secs_f64();
        start = Instant::now();
        seconds
    };
    let mut rollouts = session.generate(step)?;
    let generate_s = lap();
    session.score(&mut rollouts)?;
    let score_s = lap();
    session.update(&rollouts)?;
    let train_s = lap();
    let sampled: usize = rollouts.iter().map(|r| r.completion.tokens.len()).sum();
    let prompts: usize = rollouts.iter().map(|r| r.completion.prompt.len()).sum();
    let all = (sampled + prompts) as f64;
    Ok([sampled as f64 / generate_s, all / score_s, all / train_s])
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// What one token's forward costs at least, attention's context aside.
struct Work {
    mflop: f64,
    exponentials: usize,
}

impl Work {
    fn of(plan: &Plan) -> Self {
        let embedding = plan.units[0].tensors[0].len() as u64;
        let lookups = if plan.config.tie_word_embeddings { 0 } else { embedding };
        let mamba = plan.layers.iter().filter(|kind| kind.mixer == MixerKind::Mamba).count();
        let states = plan.config.mamba.as_ref().map_or(0, |shape| shape.d_inner * shape.d_state);
        Self {
            mflop: 2.0 * (plan.num_parameters() - lookups) as f64 / 1e6,
            exponentials: mamba * states,
        }
    }

    fn tokens_per_s(&self, machine: &Machine) -> f64 {
        1.0 / (self.mflop * 1e6 / machine.flops + self.exponentials as f64 / machine.exps)
    }
}

/// What all threads of this machine do together.
struct Machine {
    threads: usize,
    /// f32 multiplications and additions a second.
    flops: f64,
    /// Exponentials a second.
    exps: f64,
}

impl Machine {
    fn measure() -> Self {
        const ROWS: usize = 64;
        const SIZE: usize = 64;
        let x = vec![0.5_f32; ROWS * SIZE];
        let packed = Packed::from_matrix(&x, SIZE, SIZE);
        let flops = rate(|y: &mut Vec<f32>| {
            y.resize(ROWS * SIZE, 0.0);
            gemm(&x, &packed, Into::Overwrite, y);
            2 * ROWS * SIZE * SIZE
        });
        let exps = rate(|y: &mut Vec<f32>| {
            y.resize(x.len(), 0.0);
            simd::vectorized(
                #[inline(always)]
                || y.iter_mut().zip(&x).for_each(|(y, x)| *y = simd::exp(*x)),
            );
            x.len()
        });
        Self { threads: rayon::current_num_threads(), flops, exps }
    }
}

/// Work a second of all threads together, the best of several rounds, as a floor must be; a call
/// returns how much it did.
fn rate(call: impl Fn(&mut Vec<f32>) -> usize + Sync) -> f64 {
    const ROUNDS: usize = 10;
    const CALLS: usize = 1000;
    let one_round = |scratch: &mut Vec<f32>| {
        let start = Instant::now();
        let done: usize = (0..CALLS).map(|_| std::hint::black_box(call(scratch))).sum();
        done as f64 / start.elapsed().as_secs_f64()
    };
    let each = rayon::broadcast(|_| {
        let mut scratch = Vec::new();
        (0..ROUNDS).map(|_| one_round(&mut scratch)).fold(0.0, f64::max)
    });
    each.iter().sum()
}
