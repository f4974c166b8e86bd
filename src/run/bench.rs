//! `gapscope bench`: tokens a second of generate, score and train, beside the floor.

use std::fmt::Write;
use std::time::Instant;

use anyhow::Result;

use super::session::Session;
use crate::base::Step;
use crate::config::{Config, Update};
use crate::model::{MixerKind, Plan};

/// Steps that are timed, after one that is not.
const TIMED_STEPS: u64 = 5;

/// Times the loop's own verbs on an experiment; the median step of five counts.
///
/// # Errors
/// As the run itself.
pub fn bench(config: &Config) -> Result<String> {
    let mut session = Session::open(config)?;
    let mut rows: [Vec<f64>; 3] = Default::default();
    for step in (1..=TIMED_STEPS + 1).map(Step::new) {
        let mut times = [0.0; 3];
        let start = Instant::now();
        let mut rollouts = session.generate(step)?;
        times[0] = start.elapsed().as_secs_f64();
        let start = Instant::now();
        session.score(&mut rollouts)?;
        times[1] = start.elapsed().as_secs_f64();
        let start = Instant::now();
        session.update(&rollouts)?;
        times[2] = start.elapsed().as_secs_f64();
        let sampled: usize = rollouts.iter().map(|r| r.completion.tokens.len()).sum();
        let prompts: usize = rollouts.iter().map(|r| r.completion.prompt.len()).sum();
        if step.get() > 1 {
            let tokens = [sampled, sampled + prompts, sampled + prompts];
            for ((row, time), tokens) in rows.iter_mut().zip(times).zip(tokens) {
                row.push(tokens as f64 / time);
            }
        }
    }
    let median = |row: &mut Vec<f64>| {
        row.sort_by(f64::total_cmp);
        row[row.len() / 2]
    };
    let mut text = String::new();
    let work = Work::of(&session.plan);
    let threads = rayon::current_num_threads();
    writeln!(
        text,
        "{threads} thread(s); {:.3} MFLOP and {} exponentials a token",
        work.mflop, work.exponentials
    )?;
    let [generate, score, train] = &mut rows;
    writeln!(text, "generate  {:>10.0} sampled tokens/s", median(generate))?;
    let rate = median(score);
    writeln!(text, "score     {rate:>10.0} tokens/s = {:.1} GFLOP/s", rate * work.mflop / 1e3)?;
    if config.trainer.update == Update::Adamw {
        let rate = median(train);
        // Backward is twice the forward, and recomputes it.
        writeln!(
            text,
            "train     {rate:>10.0} tokens/s = {:.1} GFLOP/s",
            4.0 * rate * work.mflop / 1e3
        )?;
    }
    Ok(text)
}

/// What one token costs at least, attention's context aside.
struct Work {
    mflop: f64,
    exponentials: u64,
}

impl Work {
    fn of(plan: &Plan) -> Self {
        let embedding = plan.units[0].tensors[0].len() as u64;
        let untied = if plan.config.tie_word_embeddings { 0 } else { embedding };
        let mamba = plan.layers.iter().filter(|&&kind| kind == MixerKind::Mamba).count();
        let states = plan.config.d_inner() * plan.config.mamba_d_state;
        Self {
            mflop: 2.0 * (plan.num_parameters() - untied) as f64 / 1e6,
            exponentials: (mamba * states) as u64,
        }
    }
}
