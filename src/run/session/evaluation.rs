//! What a trained model can do.

use anyhow::Result;

use super::{requests, sequence, Session};
use crate::base::{Contract, Step};
use crate::engine::Engine;
use crate::gap;
use crate::rollout::Draw;
use crate::trainer::Sequence;

/// What a model can do, greedily.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Evaluation {
    pub prompts: u32,
    pub greedy_reward_mean: Option<f64>,
    pub logits_std: Option<f64>,
}

impl Session {
    /// Greedy rewards of `prompts` problems that training never drew, and the standard deviation of
    /// their logits: how confident the model is. In an engine of its own.
    pub fn evaluate(&self, prompts: u32) -> Result<Evaluation> {
        let contract = Contract { temperature: 0.0, ..Contract::PLAIN };
        let problems = self.task.problems(Draw::Evaluation, Step::new(0), prompts)?;
        let eos = &self.plan.config.eos_token_ids;
        let asked = requests(&self.config.rollout, eos, Step::new(0), &problems, 1);
        let done = match self.source.embedded() {
            Some(engines) => {
                self.evaluation_engine(engines.first(), contract, prompts)?.generate(asked)?
            }
            None => self.complete_by_servers(&contract, asked)?,
        };
        let rollouts = self.rollouts(&problems, done, 1)?;
        let sequences: Vec<Sequence> = rollouts.iter().map(sequence).collect();
        let logits = self.trainer.inspect(&sequences)?.into_iter().flat_map(|one| one.logits);
        let logits: Vec<f64> = logits.map(f64::from).collect();
        let rewards: Vec<f64> = rollouts.iter().map(|rollout| rollout.reward).collect();
        Ok(Evaluation {
            prompts,
            greedy_reward_mean: gap::stats::mean(&rewards),
            logits_std: gap::stats::std(&logits),
        })
    }

    /// With room for every prompt at once, and no more: the run's own pool is still there.
    fn evaluation_engine(&self, own: &Engine, contract: Contract, prompts: u32) -> Result<Engine> {
        let layout = own.layout();
        let room = 1 + u64::from(prompts) * layout.blocks_for(layout.max_model_len);
        let mut engine = Engine::with_blocks(
            &self.device,
            self.plan.clone(),
            self.num,
            self.config.engine.clone(),
            contract,
            self.config.seed,
            u32::try_from(room).unwrap_or(u32::MAX).min(own.pool().num_blocks()),
        )?;
        let weights = self.trainer.hand_over()?;
        engine.load(weights.version, weights.units)?;
        Ok(engine)
    }
}
