//! Where the prefix cache meets the queues.

use super::{Request, Scheduler};
use crate::base::{EngineStep, WeightVersion};
use crate::config::Fault;
use crate::engine::{Hit, Origin, PrefixHash};

impl Scheduler {
    /// New weights: from here on nothing is found that older ones computed. Only when idle.
    pub fn new_weights(&mut self, version: WeightVersion) {
        assert!(!self.has_unfinished(), "{} requests are alive", self.alive.len());
        self.weight_version = version;
    }

    /// Where every prefix begins.
    fn root(&self) -> PrefixHash {
        let kept = self.faults.contains(&Fault::KeepCacheOverUpdates);
        PrefixHash::root(if kept { WeightVersion::default() } else { self.weight_version })
    }

    /// What the prefix cache has of a waiting request.
    pub(super) fn look_up(&self, request: &mut Request) -> Hit {
        let Some(block) = self.layout.prefix_block_tokens else { return Hit::default() };
        if request.keeps_state() {
            return Hit::default();
        }
        let now = EngineStep::new(self.engine_steps);
        let hashes = request.findable(self.root(), block);
        Hit::longest(self.pool.cache(), hashes, &self.layout, now)
    }

    /// The blocks that a running request fills in this step can be found from here on. As in vLLM
    /// a state that is not stored yet makes whoever needs it wait for the next step.
    pub(super) fn remember(&mut self, index: usize, before: u32) {
        let Some(block) = self.layout.prefix_block_tokens else { return };
        let root = self.root();
        let request = &mut self.running[index];
        let origin = Origin {
            filled_by: request.id(),
            weight_version: self.weight_version,
            engine_step: EngineStep::new(self.engine_steps),
        };
        request.remember(before, block, root, &origin, &mut self.pool);
    }
}
