//! What a step says of itself beside the gap: rollouts, rewards, losses, the pool.

use super::session::{comparisons, Comparison};
use crate::config::{Config, Update};
use crate::engine::{BlockPool, Engines, FinishReason, Statistics};
use crate::gap::{self, stats, Tally};
use crate::report::Scalar;
use crate::rollout::Rollout;
use crate::trainer::{grpo, UpdateReport};

/// One value with its tag and what it means.
pub(super) fn scalar(tag: &str, value: Option<f64>, description: &str) -> Scalar {
    Scalar { tag: tag.to_owned(), value, description: description.to_owned() }
}

fn scalars<const N: usize>(rows: [(&str, Option<f64>, &str); N]) -> Vec<Scalar> {
    rows.map(|(tag, value, description)| scalar(tag, value, description)).into()
}

/// The tags of every row that a run of this configuration will write.
pub(super) fn tags(config: &Config) -> Vec<String> {
    let tables = comparisons(config).map(|legs| {
        let none = gap::pair(&[], legs).expect("no rollout has a length that is wrong");
        gap::measures(&none, 0.0)
    });
    let mut all: Vec<Scalar> = tables
        .flat_map(|table| table.metrics)
        .chain(gap::rollout_measures(&[]))
        .map(|metric| Scalar::from(&metric))
        .chain([floor(0.0)])
        .collect();
    all.extend(rollout(&[]));
    all.extend(reward(&[], config.rollout.rollouts_per_prompt));
    if config.trainer.update == Update::Adamw {
        all.extend(loss(&nothing_learned(config)));
    }
    if config.engine.servers.is_none() {
        let still =
            Statistics { engine_steps: 0, preemptions: 0, scheduled_tokens: 0, blocks_taken: 0 };
        let of = &BlockPool::new(2, config.engine.free_list);
        let engine = Lap { now: still, before: still, pool: of };
        all.extend(of_laps(&vec![engine; config.engine.replicas as usize]));
    }
    all.extend(tally(&Tally::default()));
    all.into_iter().map(|scalar| scalar.tag).collect()
}

/// An update whose numbers nobody reads.
fn nothing_learned(config: &Config) -> UpdateReport {
    let importance = grpo::ImportanceTerms { mean: 0.0, uncapped_max: 0.0, fraction_capped: 0.0 };
    let terms = grpo::Terms {
        counts: grpo::Counts::default(),
        loss: 0.0,
        policy_loss: 0.0,
        kl: None,
        approx_kl: 0.0,
        ratio_mean: 0.0,
        ratio_min: 0.0,
        ratio_max: 0.0,
        clip_fraction_low: 0.0,
        clip_fraction_high: 0.0,
        importance: config.trainer.importance_cap.map(|_| importance),
        advantage_mean: 0.0,
        advantage_std: 0.0,
    };
    UpdateReport { terms, grad_norm: 0.0, learning_rate: 0.0 }
}

/// Every measure of every comparison that was made.
pub(super) fn gap(comparison: &Comparison, rollouts: &[Rollout]) -> Vec<Scalar> {
    let tables = comparison.tables.iter().flat_map(|table| &table.metrics);
    let of_rollouts = gap::rollout_measures(rollouts);
    let scalars = tables.chain(&of_rollouts).map(Scalar::from);
    scalars.chain([floor(comparison.gap.floor)]).collect()
}

/// The floor that a step was held to.
fn floor(nats: f64) -> Scalar {
    let about = "largest |d| that healthy arithmetic explains among so many tokens, nats: 0 in \
                 invariant numerics, measured in fast ones";
    scalar("gap_detail/floor", Some(nats), about)
}

pub(super) fn rollout(rollouts: &[Rollout]) -> Vec<Scalar> {
    let of = |value: fn(&Rollout) -> f64| rollouts.iter().map(value).collect::<Vec<f64>>();
    let lengths = of(|rollout| rollout.completion.tokens.len() as f64);
    let prompts = of(|rollout| rollout.completion.prompt.len() as f64);
    let stopped =
        of(|rollout| f64::from(u8::from(rollout.completion.finish_reason == FinishReason::Stop)));
    scalars([
        ("rollout/requests", Some(rollouts.len() as f64), "completions of this step"),
        ("rollout/length_mean", stats::mean(&lengths), "sampled tokens a completion"),
        ("rollout/length_max", stats::max(&lengths), "sampled tokens of the longest completion"),
        ("rollout/prompt_length_mean", stats::mean(&prompts), "prompt tokens"),
        ("rollout/frac_stopped", stats::mean(&stopped), "completions that ended by an end token"),
    ])
}

pub(super) fn reward(rollouts: &[Rollout], per_prompt: u32) -> Vec<Scalar> {
    let rewards: Vec<f64> = rollouts.iter().map(|rollout| rollout.reward).collect();
    let flat = |group: &[f64]| f64::from(u8::from(group.iter().all(|r| *r == group[0])));
    let flat: Vec<f64> = rewards.chunks(per_prompt as usize).map(flat).collect();
    scalars([
        ("reward/mean", stats::mean(&rewards), "mean reward of the step's completions"),
        ("reward/std", stats::std(&rewards), "population standard deviation of the rewards"),
        ("reward/min", stats::min(&rewards), "smallest reward"),
        ("reward/max", stats::max(&rewards), "largest reward"),
        (
            "reward/frac_flat_groups",
            stats::mean(&flat),
            "prompts whose rollouts all earned the same, so that they teach nothing",
        ),
    ])
}

/// Of a step's last minibatch: the furthest that its weights have moved.
pub(super) fn loss(report: &UpdateReport) -> Vec<Scalar> {
    let terms = &report.terms;
    let mut rows = scalars([
        ("loss/total", Some(terms.loss), "policy loss + kl_coef * KL, last minibatch"),
        (
            "loss/policy",
            Some(terms.policy_loss),
            "-min(ratio A, clip(ratio) A), importance-weighted. Also known as: verl actor/pg_loss",
        ),
        (
            "loss/kl",
            terms.kl,
            "k3 to the frozen start weights. Also known as: verl actor/kl_loss, TRL kl",
        ),
        ("loss/approx_kl", Some(terms.approx_kl), "mean of r - 1 - ln r, new against old"),
        ("loss/ratio_mean", Some(terms.ratio_mean), "mean exp(new - old)"),
        ("loss/ratio_min", Some(terms.ratio_min), "min exp(new - old)"),
        ("loss/ratio_max", Some(terms.ratio_max), "max exp(new - old)"),
        (
            "loss/clip_fraction_low",
            Some(terms.clip_fraction_low),
            "tokens held at 1 - clip_ratio_low. Also known as: TRL clip_ratio/low_mean",
        ),
        (
            "loss/clip_fraction_high",
            Some(terms.clip_fraction_high),
            "tokens held at 1 + clip_ratio_high. Also known as: TRL clip_ratio/high_mean",
        ),
        ("loss/advantage_mean", Some(terms.advantage_mean), "over sequences"),
        ("loss/advantage_std", Some(terms.advantage_std), "over sequences"),
        (
            "loss/grad_norm",
            Some(report.grad_norm),
            "L2 norm before clipping. Also known as: verl actor/grad_norm",
        ),
        ("loss/learning_rate", Some(report.learning_rate), "of the step's last update"),
    ]);
    if let Some(weights) = &terms.importance {
        rows.extend(scalars([
            (
                "loss/importance_mean",
                Some(weights.mean),
                "mean truncated importance weight. Also known as: verl \
                 rollout_corr/rollout_is_mean",
            ),
            (
                "loss/importance_uncapped_max",
                Some(weights.uncapped_max),
                "max exp(d) before the cap",
            ),
            (
                "loss/importance_fraction_capped",
                Some(weights.fraction_capped),
                "tokens over the cap",
            ),
        ]));
    }
    rows
}

/// Whose first rows ran how, and who had a gap.
pub(super) fn tally(tally: &Tally) -> Vec<Scalar> {
    let count = |n: u64| Some(n as f64);
    scalars([
        (
            "pool/decoded_first_chunks",
            tally.decoded_first_chunks.and_then(count),
            "lives that began with a decode row, which reads its state blocks unconditionally",
        ),
        (
            "pool/stale_first_chunks",
            tally.stale_first_chunks.and_then(count),
            "those of them with a state block that another request had held",
        ),
        (
            "pool/wrapped_requests",
            tally.wrapped_requests.and_then(count),
            "requests with a state block whose index leaves engine.state_index_bits",
        ),
        ("pool/bad_requests", count(tally.bad_requests), "requests with a gap over the floor"),
    ])
}

/// What the engines did since `before`: all of them, and each by itself where there are several.
pub(super) fn pools(engines: &Engines, before: &[Statistics]) -> Vec<Scalar> {
    let laps = engines.iter().zip(before).map(|(engine, &before)| Lap {
        now: engine.statistics(),
        before,
        pool: engine.pool(),
    });
    of_laps(&laps.collect::<Vec<_>>())
}

/// What an engine did in a step.
#[derive(Clone, Copy)]
struct Lap<'a> {
    now: Statistics,
    before: Statistics,
    pool: &'a BlockPool,
}

fn of_laps(engines: &[Lap<'_>]) -> Vec<Scalar> {
    let mut all = under("pool", engines);
    if engines.len() > 1 {
        let each = engines.iter().enumerate();
        all.extend(each.flat_map(|(index, engine)| {
            under(&format!("pool/engine_{index}"), std::slice::from_ref(engine))
        }));
    }
    all
}

fn under(group: &str, engines: &[Lap<'_>]) -> Vec<Scalar> {
    let since = |count: fn(&Statistics) -> u64| {
        let of = |engine: &Lap<'_>| (count(&engine.now) - count(&engine.before)) as f64;
        (!engines.is_empty()).then(|| engines.iter().map(of).sum())
    };
    let laps = |engine: &Lap<'_>| engine.now.blocks_taken as f64 / engine.pool.num_usable() as f64;
    let free = |engine: &Lap<'_>| engine.pool.free_blocks().len() as f64;
    let rows = [
        ("blocks_taken", since(|done| done.blocks_taken), "blocks handed out in this step"),
        (
            "laps",
            engines.iter().map(laps).reduce(f64::max),
            "times the pool has been gone through, since the start; the furthest of several",
        ),
        (
            "preemptions",
            since(|done| done.preemptions),
            "requests that lost their blocks and were recomputed, in this step",
        ),
        (
            "engine_steps",
            since(|done| done.engine_steps),
            "forward passes of the engines in this step",
        ),
        (
            "free_blocks",
            engines.iter().map(free).reduce(f64::min),
            "blocks in the free list after the step; the fewest of several",
        ),
    ];
    let tagged =
        |(name, value, about): (&str, _, _)| scalar(&format!("{group}/{name}"), value, about);
    rows.map(tagged).into()
}
