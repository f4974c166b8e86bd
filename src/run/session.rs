//! The verbs of the loop: generate, score, compare, update.

mod evaluation;
mod floor;
mod inside;
mod judge;
mod legs;
mod saved;
mod second_look;
mod source;

use std::sync::Arc;

use anyhow::Result;

pub use evaluation::Evaluation;
pub use saved::SessionState;

use self::floor::alarm;
pub(super) use self::judge::Known;
use self::second_look::Looks;
use super::device;
use super::launch::Launched;
use super::parts::{self, Parts};
use crate::base::{BlockId, Contract, LogProb, RequestId, Step, TokenId};
use crate::config::{Config, Fault, Leg, RolloutConfig, Update};
use crate::engine::{Completion, Engine, GenerationRequest, SampledToken, Tell};
use crate::gap::{
    self, CaseFile, Finding, Floor, Legs, Pairs, StepGap, TensorFingerprint, WeightsOf,
};
use crate::model::{combine_fingerprints, Numerics, Plan, HEAD};
use crate::ops::array::Device;
use crate::rollout::{
    advantages, mask_by_end, Attempt, Codec, Draw, LegLogProbs, Problem, Rollout, Source, Task,
};
use crate::trainer::{Experience, Sequence, SequenceScores, Trainer, UpdateReport};

/// What a step compares: decode with trainer first, then what the legs that were asked for allow.
pub(super) fn comparisons(config: &Config) -> impl Iterator<Item = Legs> + '_ {
    let of_legs = [
        (Leg::Prefill, Legs::DecodePrefill),
        (Leg::Prefill, Legs::PrefillTrainer),
        (Leg::Reference, Legs::TrainerReference),
    ];
    let asked = of_legs.into_iter().filter(|(leg, _)| config.check.legs.contains(leg));
    std::iter::once(Legs::DecodeTrainer).chain(asked.map(|(_, legs)| legs))
}

/// Everything a run holds between its steps.
pub struct Session {
    pub config: Config,
    pub plan: Plan,
    pub num: Numerics,
    pub codec: Arc<Codec>,
    pub source: Source,
    pub trainer: Trainer,
    device: Device,
    /// Servers of this run's own.
    launched: Option<Launched>,
    task: Task,
    contract: Contract,
    /// Old log-probabilities of the step's rollouts, for the update.
    old: Vec<Vec<LogProb>>,
    /// The fingerprint of every tensor that the step was scored with, in the plan's order.
    scored_with: Vec<u64>,
    /// Every version of the trainer's weights that scored.
    weights: Vec<WeightsOf>,
    /// Whether the trainer has learned at more than one number of ranks.
    ranks_changed: bool,
    /// An update that a planted fault has made too early.
    early: Option<Vec<UpdateReport>>,
    /// The width of the state index, once a step's records have shown it.
    pub(super) index_bits: Option<u32>,
    /// As it was last measured; never in invariant numerics.
    floor: Option<Floor>,
}

/// What one step's comparison found.
pub struct Comparison {
    pub step: Step,
    pub pairs: Pairs,
    pub gap: StepGap,
    /// Decode against trainer first, then whatever other legs were asked for.
    pub tables: Vec<gap::Table>,
    pub findings: Vec<Finding>,
    pub(super) looks: Looks,
    /// What the findings were drawn from, where it is asked for and there are any.
    pub case: Option<CaseFile>,
}

impl Session {
    /// Opens model and task, builds engine and trainer, hands over the first weights.
    ///
    /// # Errors
    /// Whatever is wrong with the model, the task or the engine's limits.
    pub fn open(config: &Config) -> Result<Self> {
        Self::open_with(config, None, None)
    }

    /// As [`Self::open`], with servers that were started for it; where the device's memory gives
    /// the number of blocks, they are as many as they were, whatever it would give today.
    pub(super) fn open_with(
        config: &Config,
        launched: Option<Launched>,
        measured: Option<u32>,
    ) -> Result<Self> {
        let device = device::open(config.engine.device)?;
        let free = device::free_memory(&device, config);
        let Parts { plan, master, num, codec } = parts::load(config, &free)?;
        let task = Task::new(&config.task, config.seed, Arc::clone(&codec))?;
        let contract = config.contract();
        let trainer = device::trainer(&device, (&plan, num), config, &master)?;
        // The trainer has its own.
        drop(master);
        let weights = trainer.hand_over()?;
        let source = match &config.engine.servers {
            None => {
                let model = (&plan, num);
                let engines = source::embedded(config, model, (&device, &free), weights, measured)?;
                Source::Embedded(engines)
            }
            Some(servers) => Source::Servers(source::servers(config, servers, launched.as_ref())?),
        };
        let session = Self {
            config: config.clone(),
            plan,
            num,
            codec,
            source,
            trainer,
            device,
            launched,
            task,
            contract,
            old: Vec::new(),
            scored_with: Vec::new(),
            weights: Vec::new(),
            ranks_changed: false,
            early: None,
            index_bits: None,
            floor: None,
        };
        session.check_lengths()?;
        Ok(session)
    }

    /// Supervised steps on the task's own answers; `report` sees each step's loss in nats. Then the
    /// engine has the trainer's weights, the KL's reference is frozen and the loop's optimizer
    /// starts afresh.
    pub fn warm_start(&mut self, mut report: impl FnMut(Step, f64) -> Result<()>) -> Result<()> {
        for step in (1..=self.config.trainer.warm_start.steps).map(Step::new) {
            let batch = self.config.trainer.warm_start.batch;
            let problems = self.task.problems(Draw::WarmStart, step, batch)?;
            let sequence = |problem: &Problem| -> Result<Sequence> {
                let tokens = [problem.prompt.clone(), self.task.target(problem)?].concat();
                Ok(Sequence { tokens, prompt_len: problem.prompt.len() })
            };
            let sequences = problems.iter().map(sequence).collect::<Result<Vec<_>>>()?;
            let loss = self.trainer.warm_step(&sequences)?;
            report(step, loss)?;
        }
        let was_warmed = self.config.trainer.warm_start.steps > 0;
        if was_warmed {
            self.trainer.end_warm_start()?;
        }
        // Servers that learn have had whatever lay in their folder until now.
        let learn = self.config.trainer.update != Update::None;
        if was_warmed || learn && self.source.servers().is_some() {
            self.hand_over()?;
        }
        if self.config.trainer.kl_coef > 0.0 {
            self.trainer.freeze_reference()?;
        }
        Ok(())
    }

    /// N rollouts of each of the step's prompts, with their rewards and advantages. The engine is
    /// awake for no longer, where it sleeps at all.
    pub fn generate(&mut self, step: Step) -> Result<Vec<Rollout>> {
        self.generate_told(step, &mut |_, _| {})
    }

    /// The same, and `tell` hears how far each step of the embedded engines has come.
    pub(super) fn generate_told(&mut self, step: Step, tell: Tell<'_>) -> Result<Vec<Rollout>> {
        let n = self.config.rollout.prompts_per_step;
        let problems = self.task.problems(Draw::Rollouts, step, n)?;
        let per_prompt = self.config.rollout.rollouts_per_prompt;
        let eos = &self.plan.config.eos_token_ids;
        let asked = requests(&self.config.rollout, eos, step, &problems, per_prompt);
        let completions = self.complete(step, asked, tell)?;
        self.rollouts(&problems, completions, per_prompt)
    }

    fn rollouts(
        &self,
        problems: &[Problem],
        completions: Vec<Completion>,
        each: u32,
    ) -> Result<Vec<Rollout>> {
        let problem = |done: &Completion| &problems[done.id.prompt_id.index()];
        let tokens: Vec<Vec<_>> =
            completions.iter().map(|done| done.token_ids().collect()).collect();
        let attempts: Vec<Attempt> = completions
            .iter()
            .zip(&tokens)
            .map(|(done, completion)| Attempt { problem: problem(done), completion })
            .collect();
        let rewards = self.task.rewards(&attempts)?;
        let scale = self.config.trainer.scale_advantages;
        let advantages = rewards.chunks(each as usize).flat_map(|group| advantages(group, scale));
        let earned = rewards.iter().zip(advantages).zip(&tokens);
        let rollout =
            |(completion, ((&reward, advantage), tokens)): (Completion, ((&f64, f64), &Vec<_>))| {
                Rollout {
                    prompt_text: problem(&completion).text.clone(),
                    completion_text: self.codec.decode(tokens),
                    reward,
                    advantage,
                    loss_mask: self.loss_mask(tokens),
                    prefill: None,
                    trainer: None,
                    reference: None,
                    trainer_fingerprint: None,
                    completion,
                }
            };
        Ok(completions.into_iter().zip(earned).map(rollout).collect())
    }

    /// Every sampled token counts.
    fn loss_mask(&self, completion: &[TokenId]) -> Vec<bool> {
        if self.config.trainer.faults.contains(&Fault::OneEndToken) {
            let known = self.plan.config.eos_token_ids.iter().take(1);
            return mask_by_end(completion, &known.copied().collect::<Vec<_>>());
        }
        vec![true; completion.len()]
    }

    /// Every log-probability again by the trainer's forward, before any weight update.
    pub fn score(&mut self, rollouts: &mut [Rollout]) -> Result<()> {
        self.score_once(rollouts)?;
        if self.config.trainer.faults.contains(&Fault::ScoreAfterUpdate) {
            self.early = Some(self.learn(rollouts)?);
            self.score_once(rollouts)?;
        }
        Ok(())
    }

    fn score_once(&mut self, rollouts: &mut [Rollout]) -> Result<()> {
        let sequences: Vec<Sequence> = rollouts.iter().map(sequence).collect();
        let scores = self.trainer.score(&sequences, &self.contract)?;
        self.scored_with = self.trainer.fingerprints()?;
        let fingerprint = combine_fingerprints(&self.scored_with);
        self.note_weights(WeightsOf { version: self.trainer.version(), fingerprint });
        self.old.clear();
        for (rollout, SequenceScores { contract, ratio }) in rollouts.iter_mut().zip(scores) {
            rollout.trainer = Some(leg(contract));
            rollout.trainer_fingerprint = Some(fingerprint);
            self.old.push(ratio);
        }
        Ok(())
    }

    /// Measures and verdicts. A spike's sequences are scored by the other legs too; what observes
    /// has a pool of its own.
    pub fn compare(&mut self, step: Step, rollouts: &mut [Rollout]) -> Result<Comparison> {
        self.refresh_floor(step)?;
        let (pairs, alarm) = (gap::pair(rollouts, Legs::DecodeTrainer)?, alarm(&self.config));
        let floor = self.floor(pairs.tokens().count() as u64);
        let table = alarm.judge(gap::measures(&pairs, floor));
        let spike = table.value("spike") == Some(1.0);
        let gap = StepGap { spike, ..StepGap::of(step, &pairs, floor) };
        let is_suspect = |&i: &usize| spike && pairs.sequences[i].is_bad(floor);
        let suspects: Vec<usize> = (0..rollouts.len()).filter(is_suspect).collect();
        let everyone: Vec<usize> = (0..rollouts.len()).collect();
        let asked = |leg| self.config.check.legs.contains(&leg);
        let who = |leg| if asked(leg) { &everyone } else { &suspects };
        self.score_prefill(rollouts, who(Leg::Prefill))?;
        self.score_reference(rollouts, who(Leg::Reference))?;
        let mut tables = vec![table];
        for legs in comparisons(&self.config).skip(1) {
            tables.push(alarm.judge(gap::measures(&gap::pair(rollouts, legs)?, floor)));
        }
        let looks = self.second_look(rollouts, &pairs, &suspects)?;
        let known = Known { spike, index_bits: self.index_bits, looks: &looks, layers: None };
        let (mut findings, case) = self.judge(step, rollouts, &pairs, &known);
        if spike && findings.is_empty() {
            findings.extend(alarm.within_floor(&tables[0], &pairs, &gap));
        }
        assert!(!spike || !findings.is_empty(), "a spike has a finding");
        self.index_bits = self.index_bits.or(findings.iter().find_map(|found| found.index_bits));
        Ok(Comparison { step, pairs, gap, tables, findings, looks, case })
    }

    /// The lowest block of the pool whose state index leaves `engine.state_index_bits`.
    #[must_use]
    pub fn first_wrapped_block(&self) -> Option<BlockId> {
        let bits = self.config.engine.scan_index_bits();
        let engine = self.source.embedded()?.first();
        let first = engine.layout().first_wrapped_block(bits)?;
        (first.get() < engine.pool().num_blocks()).then_some(first)
    }

    /// Of the first engine with other weights than the trainer's, if there is one. Empty where the
    /// engines do not say.
    fn tensor_fingerprints(&self) -> Vec<TensorFingerprint> {
        let Some(engines) = self.source.embedded() else { return Vec::new() };
        let differs = |engine: &&Engine| {
            engine.head_fingerprint().is_some() || engine.fingerprints() != self.scored_with
        };
        let engine = engines.iter().find(differs).unwrap_or(engines.first());
        let names = self.plan.units.iter().flat_map(|unit| &unit.tensors);
        let both = engine.fingerprints().iter().zip(&self.scored_with);
        let one = |(spec, (&engine, &trainer)): (&crate::model::TensorSpec, (&u64, &u64))| {
            TensorFingerprint { name: spec.name.clone(), engine, trainer }
        };
        let head = engine.head_fingerprint().map(|engine| TensorFingerprint {
            name: HEAD.to_owned(),
            engine,
            trainer: self.scored_with[0],
        });
        names.zip(both).map(one).chain(head).collect()
    }

    /// Learns from the step's rollouts and hands the new weights to the engine. Empty where the
    /// experiment only scores.
    pub fn update(&mut self, rollouts: &[Rollout]) -> Result<Vec<UpdateReport>> {
        let reports = self.learn(rollouts)?;
        if self.config.trainer.update != Update::None {
            self.hand_over()?;
        }
        Ok(reports)
    }

    /// The first half of [`Self::update`]: the trainer's weights change, the engine's do not.
    /// Empty where the experiment only scores.
    pub(super) fn learn(&mut self, rollouts: &[Rollout]) -> Result<Vec<UpdateReport>> {
        if self.config.trainer.update == Update::None {
            return Ok(Vec::new());
        }
        if let Some(early) = self.early.take() {
            return Ok(early);
        }
        let experience = |(rollout, old): (&Rollout, &Vec<LogProb>)| Experience {
            sequence: sequence(rollout),
            advantage: rollout.advantage,
            mask: rollout.loss_mask.clone(),
            old: old.clone(),
            d: log_importance(rollout),
        };
        let experiences: Vec<_> = rollouts.iter().zip(&self.old).map(experience).collect();
        Ok(self.trainer.update(&experiences, &self.contract)?)
    }
}

/// `each` requests a problem, in the order of the problems.
pub(super) fn requests(
    rollout: &RolloutConfig,
    eos_token_ids: &[TokenId],
    step: Step,
    problems: &[Problem],
    each: u32,
) -> Vec<GenerationRequest> {
    let of_prompt = |(prompt_id, problem): (u32, &Problem)| {
        let request = |rollout_idx| GenerationRequest {
            id: RequestId::new(step.get(), prompt_id, rollout_idx),
            prompt: problem.prompt.clone(),
            max_new_tokens: rollout.max_new_tokens,
            ignore_eos: rollout.ignore_eos,
            eos_token_ids: eos_token_ids.to_vec(),
        };
        (0..each).map(request).collect::<Vec<_>>()
    };
    (0..).zip(problems).flat_map(of_prompt).collect()
}

pub(super) fn sequence(rollout: &Rollout) -> Sequence {
    let done = &rollout.completion;
    let tokens = done.prompt.iter().copied().chain(done.token_ids()).collect();
    Sequence { tokens, prompt_len: done.prompt.len() }
}

/// Trainer minus engine, a token; NaN where the trainer has no score.
fn log_importance(rollout: &Rollout) -> Vec<f64> {
    let trainer = rollout.trainer.as_deref().expect("rollouts are scored before an update");
    let d = |(sampled, trainer): (&SampledToken, &Option<LogProb>)| {
        trainer.map_or(f64::NAN, |logp| f64::from(logp.get()) - f64::from(sampled.logp.get()))
    };
    rollout.completion.tokens.iter().zip(trainer).map(d).collect()
}

fn leg(scores: impl IntoIterator<Item = LogProb>) -> LegLogProbs {
    scores.into_iter().map(Some).collect()
}
