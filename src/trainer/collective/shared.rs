//! Ranks that are threads of one process: those that share a device, and the meeting of those that
//! have a GPU each.
//!
//! Each lays what it has on the table; once all have, each takes what it needs. Every sum runs over
//! the ranks in order, so that a result depends on who they are and not on who came first.

use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Collective;
use crate::base::Rank;
use crate::config::Dtype;
use crate::ops::array::Array;
use crate::ops::shards::Arriving;
use crate::ops::weights::Weights;
use crate::trainer::TrainerError;

/// How long a rank waits for the others: far longer than any layer of a chunk takes.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// One of several threads, or the only one.
#[derive(Debug)]
pub struct SharedMemory {
    rank: Rank,
    world_size: usize,
    patience: Duration,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    meeting: Mutex<Meeting>,
    changed: Condvar,
}

/// The meeting that is coming together, and what the last one left to be taken.
#[derive(Debug)]
struct Meeting {
    /// Meetings held so far.
    held: u64,
    /// `None` for a rank that is not here yet.
    laid: Vec<Option<Laid>>,
    told: Option<Arc<Vec<Laid>>>,
    /// Ranks that have not taken it.
    takers: usize,
    broken: Option<Broken>,
}

/// What a rank lays for the others; on a device, a reference to its memory.
#[derive(Debug)]
enum Laid {
    Nothing,
    /// Of what is done elsewhere: its name, elements and their dtype.
    Call((&'static str, usize, Dtype)),
    Shard(Weights),
    Gradient(Array),
    Numbers(Vec<f64>),
}

/// Why there will be no more meetings.
#[derive(Clone, Debug)]
enum Broken {
    Left(Rank),
    Missing(Vec<Rank>),
}

impl SharedMemory {
    /// One end for each of `world_size` ranks, in rank order, to be moved to their threads.
    #[must_use]
    pub fn world(world_size: usize) -> Vec<Self> {
        Self::patient_world(world_size, PATIENCE)
    }

    /// The same, where a rank waits so long for the others.
    #[must_use]
    pub fn patient_world(world_size: usize, patience: Duration) -> Vec<Self> {
        assert!(world_size > 0, "a world has at least one rank");
        let laid = (0..world_size).map(|_| None).collect();
        let meeting = Meeting { held: 0, laid, told: None, takers: 0, broken: None };
        let shared = Arc::new(Shared { meeting: Mutex::new(meeting), changed: Condvar::new() });
        let end = |rank| Self { rank, world_size, patience, shared: Arc::clone(&shared) };
        ranks(world_size).map(end).collect()
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// As every call of a [`Collective`].
    pub fn barrier(&self) -> Result<(), TrainerError> {
        self.meet(Laid::Nothing).map(|_| ())
    }

    /// The same before a call that is made elsewhere: its name, elements and their dtype.
    ///
    /// # Errors
    /// As every call of a [`Collective`].
    pub fn meet_for(&self, mine: (&'static str, usize, Dtype)) -> Result<(), TrainerError> {
        let told = self.meet(Laid::Call(mine))?;
        let same = |laid: &Laid| matches!(laid, Laid::Call(theirs) if *theirs == mine);
        assert!(told.iter().all(same), "every rank makes the same calls: {told:?}");
        Ok(())
    }

    /// What every rank has laid, in rank order.
    fn meet(&self, mine: Laid) -> Result<Arc<Vec<Laid>>, TrainerError> {
        let mut meeting = self.meeting();
        if let Some(broken) = &meeting.broken {
            return Err(self.error(broken.clone()));
        }
        let (held, own) = (meeting.held, self.rank.index());
        assert!(meeting.laid[own].replace(mine).is_none(), "a rank is at one meeting at a time");
        if meeting.laid.iter().all(Option::is_some) {
            meeting.hold();
            self.shared.changed.notify_all();
        }
        let comes = |meeting: &mut Meeting| meeting.held == held && meeting.broken.is_none();
        let waited = self.shared.changed.wait_timeout_while(meeting, self.patience, comes);
        let (mut meeting, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if meeting.held > held {
            return Ok(meeting.take());
        }
        if meeting.broken.is_none() {
            meeting.broken = Some(Broken::Missing(meeting.missing()));
            self.shared.changed.notify_all();
        }
        meeting.laid[own] = None;
        Err(self.error(meeting.broken.clone().expect("it is broken, or it was held")))
    }

    fn error(&self, broken: Broken) -> TrainerError {
        match broken {
            Broken::Left(rank) => TrainerError::RankLeft { rank },
            Broken::Missing(ranks) => TrainerError::missing(&ranks, self.patience),
        }
    }

    /// A rank that panics holds this lock only through [`Drop`], where all is whole.
    fn meeting(&self) -> MutexGuard<'_, Meeting> {
        self.shared.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// So many, in order.
pub(in crate::trainer) fn ranks(world_size: usize) -> impl Iterator<Item = Rank> {
    let count = u32::try_from(world_size).expect("ranks are threads, far fewer than 2^32");
    (0..count).map(Rank::new)
}

impl Meeting {
    fn hold(&mut self) {
        assert_eq!(self.takers, 0, "the last meeting was left before this one");
        let laid = self.laid.iter_mut().map(|laid| laid.take().expect("all are here"));
        self.told = Some(Arc::new(laid.collect()));
        self.takers = self.laid.len();
        self.held += 1;
    }

    /// The last to take it leaves nothing behind.
    fn take(&mut self) -> Arc<Vec<Laid>> {
        self.takers -= 1;
        let told = if self.takers == 0 { mem::take(&mut self.told) } else { self.told.clone() };
        told.expect("it is there until everyone has taken it")
    }

    fn missing(&self) -> Vec<Rank> {
        let both = ranks(self.laid.len()).zip(&self.laid);
        both.filter_map(|(rank, laid)| laid.is_none().then_some(rank)).collect()
    }
}

impl Collective for SharedMemory {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_gather(&self, shard: &Weights, len: usize) -> Result<Arriving, TrainerError> {
        if self.world_size == 1 {
            assert_eq!(shard.len(), len, "the only shard is all of it");
            return Ok(Arriving::here(shard.clone()));
        }
        let told = self.meet(Laid::Shard(shard.clone()))?;
        let shards = told.iter().map(|laid| match laid {
            Laid::Shard(shard) => shard,
            other => panic!("a rank gathers while another has laid {other:?}"),
        });
        Ok(Arriving::here(Weights::join(&shards.collect::<Vec<_>>(), len)))
    }

    fn reduce_scatter(&self, whole: Array) -> Result<Array, TrainerError> {
        if self.world_size == 1 {
            return Ok(whole);
        }
        let told = self.meet(Laid::Gradient(whole))?;
        let wholes = told.iter().map(|laid| match laid {
            Laid::Gradient(whole) => whole,
            other => panic!("a rank sums a gradient while another has laid {other:?}"),
        });
        Ok(Array::shard_of_sum(&wholes.collect::<Vec<_>>(), self.rank.index()))
    }

    fn all_reduce(&self, numbers: &[f64]) -> Result<Vec<f64>, TrainerError> {
        let told = self.meet(Laid::Numbers(numbers.to_vec()))?;
        let mut sums = vec![0.0; numbers.len()];
        for laid in told.iter() {
            let Laid::Numbers(theirs) = laid else {
                panic!("a rank sums numbers while another has laid {laid:?}")
            };
            assert_eq!(theirs.len(), sums.len(), "sums of unequal lengths");
            sums.iter_mut().zip(theirs).for_each(|(sum, x)| *sum += x);
        }
        Ok(sums)
    }
}

/// A rank that goes, by error, panic or its work's end, must not leave the others waiting for ever.
impl Drop for SharedMemory {
    fn drop(&mut self) {
        self.meeting().broken.get_or_insert(Broken::Left(self.rank));
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
