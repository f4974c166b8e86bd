//! What it takes to gather the trainer's weights from its ranks, and nothing else.

use std::fmt;
use std::time::Instant;

use anyhow::Result;

use crate::run::session::Session;

/// Times it is done; the best counts.
const ROUNDS: usize = 5;

/// Every unit gathered once on every rank, in the compute dtype.
pub(super) struct Gather {
    ranks: u32,
    /// That a rank received from the others.
    received: f64,
    seconds: f64,
}

impl Gather {
    /// `None` where one rank has everything.
    pub(super) fn of(session: &Session) -> Result<Option<Self>> {
        let ranks = session.config.trainer.ranks;
        if ranks == 1 {
            return Ok(None);
        }
        let mut seconds = f64::INFINITY;
        for _ in 0..ROUNDS {
            let start = Instant::now();
            session.trainer.gather_all()?;
            seconds = seconds.min(start.elapsed().as_secs_f64());
        }
        let bytes = session.plan.num_parameters() as f64 * session.num.dtype.bytes() as f64;
        let received = bytes * f64::from(ranks - 1) / f64::from(ranks);
        Ok(Some(Self { ranks, received, seconds }))
    }
}

impl fmt::Display for Gather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (gb, ms) = (self.received / 1e9, self.seconds * 1e3);
        let (ranks, rate) = (self.ranks, gb / self.seconds);
        let how = "all units of a pass, nothing computed";
        write!(f, "gather      {rate:>9.1} GB/s received      ")?;
        write!(f, "{gb:.2} GB a rank of {ranks} in {ms:.1} ms, {how}")
    }
}
