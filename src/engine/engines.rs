//! Engines that generate side by side: one model, each with a block pool and a scheduler of its
//! own. Noise is drawn by request, so that what is sampled does not depend on how many there are.

use std::io;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::{Completion, Engine, EngineError, GenerationRequest, Moment, Trace, WatchList};
use crate::base::{EngineIndex, PromptId, WeightVersion};
use crate::ops::weights::Weights;

/// Which of so many engines a prompt's requests go to, in every step: groups stay whole.
#[must_use]
pub fn dealt_to(prompt: PromptId, engines: usize) -> EngineIndex {
    assert!(engines > 0, "there is an engine to deal to");
    EngineIndex::new((prompt.index() % engines) as u32)
}

/// One part an engine, each in the order of the requests.
#[must_use]
pub fn deal(requests: Vec<GenerationRequest>, engines: usize) -> Vec<Vec<GenerationRequest>> {
    let mut parts: Vec<Vec<GenerationRequest>> = vec![Vec::new(); engines];
    for request in requests {
        parts[dealt_to(request.id.prompt_id, engines).index()].push(request);
    }
    parts
}

/// Hears how far each engine step has come, and of which engine.
pub type Tell<'a> = &'a mut (dyn FnMut(EngineIndex, Moment<'_>) + Send);

/// Where engines compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// On the cores of one machine, at the same time.
    SharedCpu,
    /// On one GPU, one after another.
    SharedGpu,
    /// Each on a GPU of its own, at the same time. The first one's is the trainer's.
    OneEach,
}

/// One engine or several, alike but for their pools.
#[derive(Debug)]
pub struct Engines {
    all: Vec<Engine>,
    placement: Placement,
}

impl Engines {
    /// In the order of their indices.
    #[must_use]
    pub fn new(all: Vec<Engine>, placement: Placement) -> Self {
        assert!(!all.is_empty(), "there is an engine");
        Self { all, placement }
    }

    /// In the order of their indices.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Engine> + Clone {
        self.all.iter()
    }

    /// As [`Self::iter`].
    pub fn iter_mut(&mut self) -> impl ExactSizeIterator<Item = &mut Engine> {
        self.all.iter_mut()
    }

    #[must_use]
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// For what is the same of all: the layout, the number of blocks, the model.
    #[must_use]
    pub fn first(&self) -> &Engine {
        &self.all[0]
    }

    #[must_use]
    pub fn get(&self, index: EngineIndex) -> &Engine {
        &self.all[index.index()]
    }

    /// Runs requests to their ends, each on the engine that its prompt is dealt to; completions
    /// come back in the order of the requests.
    ///
    /// # Errors
    /// As [`Engine::generate`], of the first engine that has one.
    pub fn generate_told(
        &mut self,
        requests: Vec<GenerationRequest>,
        tell: Tell<'_>,
    ) -> Result<Vec<Completion>, EngineError> {
        if let [only] = &mut self.all[..] {
            let index = EngineIndex::default();
            return only.generate_told(requests, &mut |moment| tell(index, moment));
        }
        let engines = self.all.len();
        let order: Vec<EngineIndex> =
            requests.iter().map(|request| dealt_to(request.id.prompt_id, engines)).collect();
        let tell = Mutex::new(tell);
        let jobs = self.all.iter_mut().zip(deal(requests, engines)).zip(0..);
        let jobs = jobs.map(|((engine, part), index)| {
            let (index, tell) = (EngineIndex::new(index), &tell);
            move || {
                let mut done = engine.generate_told(part, &mut |moment| {
                    tell.lock().unwrap_or_else(PoisonError::into_inner)(index, moment);
                })?;
                done.iter_mut().for_each(|completion| completion.engine = index);
                Ok(done)
            }
        });
        let done = match self.placement {
            Placement::SharedGpu => jobs.map(|job| job()).collect(),
            Placement::SharedCpu | Placement::OneEach => side_by_side(jobs.collect())?,
        };
        let done: Vec<Vec<Completion>> = done.into_iter().collect::<Result<_, EngineError>>()?;
        let mut done: Vec<_> = done.into_iter().map(Vec::into_iter).collect();
        let in_order = order.iter().map(|index| done[index.index()].next());
        Ok(in_order.map(|one| one.expect("one completion a request")).collect())
    }

    /// Hands weights that lie where the trainer computes to every engine.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn load(&mut self, version: WeightVersion, units: Vec<Weights>) -> Result<(), EngineError> {
        for engine in &mut self.all {
            let own = units.iter().map(|unit| unit.on(engine.device())).collect();
            engine.load(version, own)?;
        }
        Ok(())
    }

    /// Looks on from the next step on, or no more. What a trace may hold is for all of them.
    pub fn watch(&mut self, list: Option<WatchList>) {
        let engines = self.all.len() as u64;
        let share = list.map(|list| WatchList { max_bytes: list.max_bytes / engines, ..list });
        self.all.iter_mut().for_each(|engine| engine.watch(share));
    }

    /// What was seen since [`Self::watch`] or the last call of this, in the order of engine steps;
    /// `None` where nobody looks.
    pub fn take_trace(&mut self) -> Option<Trace> {
        let traces = self.all.iter_mut().zip(0..).map(|(engine, index)| {
            let mut trace = engine.take_trace()?;
            trace.steps.iter_mut().for_each(|step| step.engine = EngineIndex::new(index));
            Some(trace)
        });
        Some(Trace::merged(traces.collect::<Option<_>>()?))
    }
}

/// Each on a thread of its own: the operations within share one pool of threads, and a job that
/// waited for another there could be kept from going on.
///
/// # Errors
/// More threads than the machine starts; those that run come to their ends.
fn side_by_side<T: Send>(jobs: Vec<impl FnOnce() -> T + Send>) -> Result<Vec<T>, EngineError> {
    let engines = jobs.len();
    thread::scope(|scope| {
        let start = |(job, index)| {
            let no_thread = |error: io::Error| EngineError::NoThread {
                engine: EngineIndex::new(index),
                engines,
                reason: error.to_string(),
            };
            thread::Builder::new().spawn_scoped(scope, job).map_err(no_thread)
        };
        let running = jobs.into_iter().zip(0..).map(start).collect::<Result<Vec<_>, _>>()?;
        let ended = running.into_iter().map(|thread| thread.join());
        Ok(ended.map(|end| end.unwrap_or_else(|panic| resume_unwind(panic))).collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{RequestId, TokenId};

    #[test]
    fn groups_stay_whole_and_go_round() {
        let request = |prompt, rollout| GenerationRequest {
            id: RequestId::new(3, prompt, rollout),
            prompt: vec![TokenId::new(1)],
            max_new_tokens: 1,
            ignore_eos: true,
            eos_token_ids: Vec::new(),
        };
        let asked: Vec<_> = (0..5).flat_map(|p| (0..2).map(move |r| request(p, r))).collect();
        for (engines, expected) in [
            (1, vec![vec![0, 0, 1, 1, 2, 2, 3, 3, 4, 4]]),
            (2, vec![vec![0, 0, 2, 2, 4, 4], vec![1, 1, 3, 3]]),
            (3, vec![vec![0, 0, 3, 3], vec![1, 1, 4, 4], vec![2, 2]]),
        ] {
            let parts = deal(asked.clone(), engines);
            let prompts = |part: &Vec<GenerationRequest>| -> Vec<u32> {
                part.iter().map(|request| request.id.prompt_id.get()).collect()
            };
            assert_eq!(parts.iter().map(prompts).collect::<Vec<_>>(), expected);
        }
    }
}
