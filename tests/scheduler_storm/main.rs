//! A million engine steps of scheduler, pool and batch against a model that is too simple to be
//! wrong.
//!
//! Every episode draws its own layout, pool, limits and policies, then arrivals, lengths, aborts
//! and tokens. After every plan and every update the queues, the block tables and the free list
//! must be the model's, entry by entry.

mod model;

use gapscope::base::{LogProb, RequestId, Stream, TokenId};
use gapscope::config::{BatchSplit, Dtype, FreeListOrder};
use gapscope::engine::{
    Admission, BlockPool, CacheSpec, GenerationRequest, LayerCache, Layout, Limits,
    PersistentBatch, Phase, SampledToken, Scheduled, Scheduler, StepBatch, StepPlan,
};

use model::Model;

const STEPS: u64 = 1_000_000;
const STEPS_PER_EPISODE: u64 = 2_000;
const EOS: u32 = 0;

#[test]
fn a_million_steps_agree_with_the_model() {
    let mut total = Totals::default();
    for seed in 0.. {
        if total.steps >= STEPS {
            break;
        }
        let _printed_on_failure = Seed(seed);
        let mut storm = Storm::new(seed);
        for _ in 0..STEPS_PER_EPISODE {
            storm.arrive_or_abort(&mut total);
            storm.step(&mut total);
        }
        let deadline = total.steps + 100_000;
        while storm.step(&mut total) {
            assert!(total.steps < deadline, "requests do not finish");
        }
        assert_eq!(storm.model.free.len(), storm.model.num_usable, "a block is lost");
        storm.scheduler.pool().check().unwrap();
    }
    // The alarm rings: everything that the storm is about has happened, often.
    println!("{total:?}");
    assert!(total.finished > 50_000 && total.aborted > 5_000 && total.resumed > 5_000, "{total:?}");
    let [is_prefilling, computed, scheduled] = total.imposters;
    assert_eq!(is_prefilling, 0, "a first chunk ran as decode under is_prefilling");
    assert!(0 < computed && computed < scheduled, "{total:?}");
}

#[derive(Debug, Default)]
struct Totals {
    steps: u64,
    finished: u64,
    aborted: u64,
    resumed: u64,
    /// First chunks that ran as decode, by policy: is_prefilling, computed_tokens,
    /// scheduled_tokens.
    imposters: [u64; 3],
}

/// Prints the failing episode.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the episode with seed {} failed", self.0);
        }
    }
}

/// The scheduler under test, its batch, the model, and the dice.
struct Storm {
    dice: Stream,
    scheduler: Scheduler,
    batch: PersistentBatch,
    policy: BatchSplit,
    model: Model,
    next_id: u32,
    arrivals_per_mille: u64,
    aborts_per_mille: u64,
}

impl Storm {
    fn new(seed: u64) -> Self {
        let mut dice = Stream::new(seed, "scheduler-storm", 0);
        let max_model_len = dice.integer(2, 150) as u32;
        let layout = random_layout(&mut dice, max_model_len);
        let num_blocks = layout.blocks_for(max_model_len) as u32 + 1 + dice.integer(0, 40) as u32;
        let order = [FreeListOrder::Fifo, FreeListOrder::Lifo][dice.integer(0, 1) as usize];
        let enable_chunked_prefill = dice.integer(0, 3) > 0;
        let least = if enable_chunked_prefill { 1 } else { u64::from(max_model_len) };
        let limits = Limits {
            max_num_batched_tokens: (least + dice.integer(0, 80)) as u32,
            max_num_seqs: dice.integer(1, 12) as u32,
            max_model_len,
            enable_chunked_prefill,
        };
        let policies =
            [BatchSplit::IsPrefilling, BatchSplit::ComputedTokens, BatchSplit::ScheduledTokens];
        let policy = policies[dice.integer(0, 2) as usize];
        let model = Model::new(&layout, limits, num_blocks, order);
        Self {
            scheduler: Scheduler::new(limits, layout, BlockPool::new(num_blocks, order)),
            batch: PersistentBatch::new(policy, dice.integer(0, 9) == 0),
            policy,
            model,
            next_id: 0,
            arrivals_per_mille: dice.integer(50, 900),
            aborts_per_mille: dice.integer(0, 30),
            dice,
        }
    }

    fn arrive_or_abort(&mut self, total: &mut Totals) {
        let room = self.scheduler.waiting().len() < 20;
        if room && self.dice.integer(0, 999) < self.arrivals_per_mille {
            let max_model_len = u64::from(self.model.limits.max_model_len);
            let prompt_len = self.dice.integer(1, max_model_len - 1);
            let prompt: Vec<TokenId> =
                (0..prompt_len).map(|_| TokenId::new(self.dice.integer(0, 99) as u32)).collect();
            let asked = GenerationRequest {
                id: RequestId::new(1, self.next_id / 4, self.next_id % 4),
                prompt,
                max_new_tokens: self.dice.integer(1, 40) as u32,
                ignore_eos: self.dice.integer(0, 1) == 1,
                eos_token_ids: vec![TokenId::new(EOS)],
            };
            self.next_id += 1;
            self.model.add(&asked);
            self.scheduler.add(asked.clone()).unwrap();
            assert!(self.scheduler.add(asked).is_err(), "one id twice");
        }
        if self.dice.integer(0, 999) < self.aborts_per_mille && self.next_id > 0 {
            // Ids that are gone are among them.
            let back = self.dice.integer(1, u64::from(self.next_id.min(30))) as u32;
            let id = RequestId::new(1, (self.next_id - back) / 4, (self.next_id - back) % 4);
            let was_alive = self.model.abort(id);
            assert_eq!(self.scheduler.abort(id), was_alive);
            total.aborted += u64::from(was_alive);
        }
    }

    /// False when no request is alive.
    fn step(&mut self, total: &mut Totals) -> bool {
        let expected = self.model.schedule();
        let Some(plan) = self.scheduler.schedule() else {
            assert!(expected.0.is_empty() && expected.1.is_empty(), "the scheduler is idle");
            return false;
        };
        assert_eq!(shares(&plan), expected.0);
        assert_eq!(plan.preempted, expected.1);
        assert!(plan.num_tokens() <= self.model.limits.max_num_batched_tokens, "over budget");
        self.model.compare(&self.scheduler);
        let sampled = self.run_batch(&plan, total);
        let finished = self.scheduler.update(&plan, &sampled).unwrap();
        let done: Vec<RequestId> = finished.iter().map(|finished| finished.request.id()).collect();
        assert_eq!(done, self.model.update(&plan, &sampled));
        self.model.compare(&self.scheduler);
        total.steps += 1;
        total.finished += done.len() as u64;
        let resumed = |&&(.., admission): &&Share| admission == Admission::Resumed;
        total.resumed += expected.0.iter().filter(resumed).count() as u64;
        true
    }

    /// Builds the rows, checks them, and draws a token for each that samples; in the plan's order.
    fn run_batch(&mut self, plan: &StepPlan, total: &mut Totals) -> Vec<Option<SampledToken>> {
        let batch = self.batch.build(plan, &self.scheduler);
        let mut sampled = vec![None; plan.scheduled.len()];
        let mut seen = vec![false; plan.scheduled.len()];
        for (index, row) in batch.rows.iter().enumerate() {
            assert!(!std::mem::replace(&mut seen[row.plan_index], true), "two rows of one request");
            let request = self.model.running(row.request);
            let start = row.computed_tokens as usize;
            let tokens = &request.tokens[start..start + row.scheduled_tokens as usize];
            assert_eq!(batch.row_tokens(index), tokens);
            let is_decode = row.phase == Phase::Decode;
            assert_eq!(is_decode, index < batch.num_decodes, "decodes come first");
            assert!(!is_decode || row.scheduled_tokens == 1, "a decode of several tokens");
            if is_decode && !row.has_initial_state() {
                total.imposters[self.policy as usize] += 1;
            }
            if row.samples {
                let token = TokenId::new(self.dice.integer(0, 99) as u32);
                sampled[row.plan_index] = Some(batch.sampled(index, token, LogProb::new(-1.0)));
            }
        }
        check_rows_match_plan(&batch, plan);
        sampled
    }
}

fn check_rows_match_plan(batch: &StepBatch, plan: &StepPlan) {
    assert_eq!(batch.rows.len(), plan.scheduled.len());
    for row in &batch.rows {
        let scheduled = plan.scheduled[row.plan_index];
        assert_eq!(row.request, scheduled.request);
        assert_eq!(row.computed_tokens, scheduled.computed_tokens);
        assert_eq!(row.scheduled_tokens, scheduled.scheduled_tokens);
    }
}

/// Hybrids of both majorities, attention only, Mamba only; attention blocks of 16 or 32 tokens.
fn random_layout(dice: &mut Stream, max_model_len: u32) -> Layout {
    let mamba = LayerCache::Mamba {
        conv_elements: 3,
        conv_dtype: Dtype::F32,
        ssm_elements: dice.integer(1, 2) * 16 * 8,
        ssm_dtype: Dtype::F32,
    };
    let attention = LayerCache::Attention { kv_heads: 1, head_dim: 4, dtype: Dtype::F32 };
    let layers = match dice.integer(0, 5) {
        0 => vec![attention; 2],
        1 => vec![mamba; 2],
        2 => vec![mamba, attention, attention, attention],
        _ => vec![mamba, attention, mamba, mamba],
    };
    Layout::new(&CacheSpec { layers, max_model_len }).unwrap()
}

/// (request, computed before, scheduled, samples, admission)
type Share = (RequestId, usize, usize, bool, Admission);

fn shares(plan: &StepPlan) -> Vec<Share> {
    let share = |s: &Scheduled| {
        let (computed, scheduled) = (s.computed_tokens as usize, s.scheduled_tokens as usize);
        (s.request, computed, scheduled, s.samples, s.admission)
    };
    plan.scheduled.iter().map(share).collect()
}
