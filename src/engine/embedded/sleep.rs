//! An engine that rests while others compute on its device (vLLM's sleep mode, verl's
//! `free_cache_engine`). Its weights stay loaded, for the legs that observe, and may be replaced
//! meanwhile.

use super::{Engine, EngineError, Layout};
use crate::engine::captured::Captured;
use crate::ops::array::Device;
use crate::ops::pages::Pages;

impl Engine {
    /// Makes no step until [`Self::wake`]. A pool that is not kept is forgotten with its free
    /// list's order, its owners and its prefix cache, and its memory is given back.
    pub fn sleep(&mut self, keep_pool: bool) {
        assert!(!self.scheduler.has_unfinished(), "an engine sleeps between steps of the loop");
        self.is_asleep = true;
        if !keep_pool {
            self.scheduler.renew_pool();
            // Recordings point into the pages.
            if let Some(loaded) = &mut self.loaded {
                loaded.captured = Captured::default();
            }
            self.pages = Pages::new(&self.device, 0, 0, 0);
        }
    }

    /// Ends the sleep, if there was one. A pool that was not kept is as at the start: zeros.
    ///
    /// # Errors
    /// [`EngineError::PoolTooLarge`] where the pool's memory is not there any more.
    pub fn wake(&mut self) -> Result<(), EngineError> {
        if self.is_asleep && self.pages.len_bytes() == 0 {
            let num_blocks = self.scheduler.pool().num_blocks();
            self.pages = pages(&self.device, self.scheduler.layout(), num_blocks)?;
        }
        self.is_asleep = false;
        Ok(())
    }
}

/// Zeroed pages of so many blocks.
pub(super) fn pages(
    device: &Device,
    layout: &Layout,
    num_blocks: u32,
) -> Result<Pages, EngineError> {
    if !Pages::fit(device, layout.num_buffers, num_blocks, layout.page_bytes) {
        let bytes = layout.block_bytes() * u64::from(num_blocks);
        return Err(EngineError::PoolTooLarge { num_blocks, bytes });
    }
    Ok(Pages::new(device, layout.num_buffers, num_blocks, layout.page_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{BlockId, Contract, RequestId};
    use crate::config::{self, FreeListOrder};
    use crate::engine::{BlockPool, SchedulerSnapshot};
    use crate::model::{Plan, Preset};

    /// Nothing of the pool's past is left, or all of it.
    #[test]
    fn a_dropped_pool_comes_back_as_at_the_start_and_a_kept_one_as_it_was() {
        for keep_pool in [true, false] {
            let mut engine = engine();
            let pages_at_start = bytes(&engine);
            let at_start = engine.snapshot();
            spoil(&mut engine);
            let (pages_before, before) = (bytes(&engine), engine.snapshot());
            assert_ne!(before.pool.free, at_start.pool.free);
            engine.sleep(keep_pool);
            assert_eq!(engine.page_bytes() == 0, !keep_pool);
            engine.wake().expect("the memory is still there");
            let (pages, pool) =
                if keep_pool { (pages_before, before) } else { (pages_at_start, at_start) };
            assert!(bytes(&engine) == pages, "pages that are kept: {keep_pool}");
            let mut found = engine.snapshot().pool;
            // What is counted over the engine's life goes on.
            assert_eq!(std::mem::replace(&mut found.taken, pool.pool.taken), 3);
            assert_eq!(found, pool.pool);
        }
    }

    #[test]
    #[should_panic(expected = "an engine makes no step while it sleeps")]
    fn an_engine_that_sleeps_makes_no_step() {
        let mut engine = engine();
        engine.sleep(true);
        let _ = engine.step(&mut |_| {});
    }

    fn engine() -> Engine {
        let text = "name = \"x\"\nmodel.preset = \"tiny-mamba\"\n\
            engine.num_gpu_blocks_override = 40\n";
        let config = config::parse(text, "test.toml", &[]).expect("a valid config");
        let plan = Plan::new(Preset::TinyMamba.config());
        let num = plan.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
        Engine::new(&Device::Cpu, plan, num, config.engine, Contract::PLAIN, 0).expect("an engine")
    }

    /// What a step of the loop leaves: blocks that were used, and bytes.
    fn spoil(engine: &mut Engine) {
        let mut pool = BlockPool::new(engine.pool().num_blocks(), FreeListOrder::Fifo);
        let (owner, taken) = (RequestId::new(1, 0, 0), [1, 2, 3].map(BlockId::new));
        pool.take(taken.len(), owner).expect("a virgin pool");
        pool.release(taken, owner).expect("its own blocks");
        let pool = pool.snapshot();
        engine.restore(SchedulerSnapshot { pool, ..engine.snapshot() }).expect("a sound pool");
        let fill = |_, bytes: &mut [u8]| {
            bytes.fill(7);
            Ok::<_, std::convert::Infallible>(())
        };
        engine.restore_pages(fill).expect("filled");
    }

    fn bytes(engine: &Engine) -> Vec<Vec<u8>> {
        engine.pages().into_iter().map(std::borrow::Cow::into_owned).collect()
    }
}
