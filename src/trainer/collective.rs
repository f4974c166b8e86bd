//! What trainer ranks say to one another, and the shared-memory implementation.
//!
//! Every sum runs over the ranks in order, so that a result depends on who they are and not on who
//! came first. A call returns on every rank or, when a rank has left, fails on the others.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};

use super::TrainerError;
use crate::base::Rank;

/// One rank's end of the line. Every rank makes the same calls in the same order.
///
/// # Errors
/// Every call fails with [`TrainerError::RankLeft`] where another rank has dropped its end.
pub trait Collective: Send {
    fn rank(&self) -> Rank;

    fn world_size(&self) -> usize;

    /// `whole[r * n..][..n]` becomes rank r's `shard` of n elements; `whole` has world_size * n.
    fn all_gather(&self, shard: &[f32], whole: &mut [f32]) -> Result<(), TrainerError>;

    /// `shard` becomes this rank's n elements of the sum of all ranks' `whole`, added in f32 in
    /// rank order; `whole` has world_size * n.
    fn reduce_scatter(&self, whole: &[f32], shard: &mut [f32]) -> Result<(), TrainerError>;

    /// The sum of all ranks' values, in rank order.
    fn all_reduce(&self, value: f64) -> Result<f64, TrainerError>;

    /// Returns once every rank has called it.
    fn barrier(&self) -> Result<(), TrainerError>;
}

/// Elements each rank holds of `len`, where the last ranks' ends are padding.
#[must_use]
pub fn shard_len(len: usize, world_size: usize) -> usize {
    len.div_ceil(world_size)
}

/// Ranks that are threads of one process.
#[derive(Debug)]
pub struct SharedMemory {
    rank: Rank,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// What each rank has laid out for the others; written by it alone, between two meetings.
    tables: Vec<RwLock<Table>>,
    meeting: Mutex<Meeting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    elements: Vec<f32>,
    scalar: f64,
}

#[derive(Debug, Default)]
struct Meeting {
    /// Meetings held so far.
    held: u64,
    present: usize,
    left: Option<Rank>,
}

impl SharedMemory {
    /// One end for each of `world_size` ranks, in rank order, to be moved to their threads.
    #[must_use]
    pub fn world(world_size: usize) -> Vec<Self> {
        assert!(world_size > 0, "a world has at least one rank");
        let shared = Arc::new(Shared {
            tables: (0..world_size).map(|_| RwLock::default()).collect(),
            meeting: Mutex::default(),
            changed: Condvar::new(),
        });
        let ranks = 0..u32::try_from(world_size).expect("ranks are threads, far fewer than 2^32");
        ranks.map(|rank| Self { rank: Rank::new(rank), shared: Arc::clone(&shared) }).collect()
    }

    /// Lays this rank's table, and reads every rank's in order once all are laid.
    fn exchange(
        &self,
        lay: impl FnOnce(&mut Table),
        mut read: impl FnMut(usize, &Table),
    ) -> Result<(), TrainerError> {
        lay(&mut self.shared.tables[self.rank.index()].write().expect("a lock is never poisoned"));
        self.barrier()?;
        for (rank, table) in self.shared.tables.iter().enumerate() {
            read(rank, &table.read().expect("a lock is never poisoned"));
        }
        // No rank may lay its next table while another still reads this one.
        self.barrier()
    }

    /// A rank that panics holds this lock only through [`Drop`], where the count is whole.
    fn meeting(&self) -> MutexGuard<'_, Meeting> {
        self.shared.meeting.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Collective for SharedMemory {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.shared.tables.len()
    }

    fn all_gather(&self, shard: &[f32], whole: &mut [f32]) -> Result<(), TrainerError> {
        let n = shard.len();
        assert_eq!(whole.len(), n * self.world_size(), "pad the unit to equal shards");
        self.exchange(
            |mine| replace(&mut mine.elements, shard),
            |rank, table| {
                assert_eq!(table.elements.len(), n, "rank {rank} gathers another length");
                whole[rank * n..][..n].copy_from_slice(&table.elements);
            },
        )
    }

    fn reduce_scatter(&self, whole: &[f32], shard: &mut [f32]) -> Result<(), TrainerError> {
        let n = shard.len();
        assert_eq!(whole.len(), n * self.world_size(), "pad the unit to equal shards");
        let start = self.rank.index() * n;
        self.exchange(
            |mine| replace(&mut mine.elements, whole),
            |rank, table| {
                assert_eq!(table.elements.len(), whole.len(), "rank {rank} reduces another length");
                let theirs = &table.elements[start..][..n];
                if rank == 0 {
                    shard.copy_from_slice(theirs);
                } else {
                    shard.iter_mut().zip(theirs).for_each(|(sum, x)| *sum += x);
                }
            },
        )
    }

    fn all_reduce(&self, value: f64) -> Result<f64, TrainerError> {
        let mut sum = 0.0;
        self.exchange(|mine| mine.scalar = value, |_, table| sum += table.scalar)?;
        Ok(sum)
    }

    fn barrier(&self) -> Result<(), TrainerError> {
        let mut meeting = self.meeting();
        if let Some(rank) = meeting.left {
            return Err(TrainerError::RankLeft { rank });
        }
        let held = meeting.held;
        meeting.present += 1;
        if meeting.present == self.world_size() {
            meeting.present = 0;
            meeting.held += 1;
            self.shared.changed.notify_all();
        }
        while meeting.held == held {
            if let Some(rank) = meeting.left {
                return Err(TrainerError::RankLeft { rank });
            }
            let woken = self.shared.changed.wait(meeting);
            meeting = woken.unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        Ok(())
    }
}

/// A rank that goes, by error, panic or its work's end, must not leave the others waiting for ever.
impl Drop for SharedMemory {
    fn drop(&mut self) {
        self.meeting().left.get_or_insert(self.rank);
        self.shared.changed.notify_all();
    }
}

fn replace(table: &mut Vec<f32>, with: &[f32]) {
    table.clear();
    table.extend_from_slice(with);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Stream;

    /// What every rank's thread returns, in rank order.
    fn on_every_rank<T: Send>(
        world_size: usize,
        body: impl Fn(&SharedMemory) -> T + Sync,
    ) -> Vec<T> {
        std::thread::scope(|scope| {
            let body = &body;
            let threads: Vec<_> = SharedMemory::world(world_size)
                .into_iter()
                .map(|end| scope.spawn(move || body(&end)))
                .collect();
            threads.into_iter().map(|t| t.join().expect("a rank that does not panic")).collect()
        })
    }

    fn numbers(round: u64, rank: usize, n: usize) -> Vec<f32> {
        let mut stream = Stream::new(round, "collective", rank as u64);
        // Far apart in size, so that another order of the sum has other bits.
        (0..n).map(|_| (stream.normal() * 10_f64.powf(4.0 * stream.uniform())) as f32).collect()
    }

    #[test]
    fn every_rank_gets_the_sum_in_rank_order() {
        for world in [1, 2, 3, 4] {
            let results = on_every_rank(world, |end| {
                let rank = end.rank().index();
                let mut out = Vec::new();
                for round in 0..50 {
                    let n = 1 + round as usize % 7;
                    let mut shard = vec![f32::NAN; n];
                    end.reduce_scatter(&numbers(round, rank, n * world), &mut shard)?;
                    let mut whole = vec![f32::NAN; n * world];
                    end.all_gather(&shard, &mut whole)?;
                    let scalar = f64::from(numbers(round, rank, 1)[0]).exp_m1();
                    out.push((whole, end.all_reduce(scalar)?));
                }
                Ok::<_, TrainerError>(out)
            });
            for round in 0..50_u64 {
                let n = 1 + round as usize % 7;
                let mut sum = numbers(round, 0, n * world);
                let mut scalar = 0.0;
                for rank in 0..world {
                    scalar += f64::from(numbers(round, rank, 1)[0]).exp_m1();
                    if rank > 0 {
                        let theirs = numbers(round, rank, n * world);
                        sum.iter_mut().zip(theirs).for_each(|(a, b)| *a += b);
                    }
                }
                for result in &results {
                    let found = &result.as_ref().expect("no rank left early")[round as usize];
                    assert_eq!(found, &(sum.clone(), scalar), "world {world}, round {round}");
                }
            }
        }
    }

    #[test]
    fn a_barrier_holds_back_until_all_have_come() {
        use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
        for world in [1, 2, 3, 4] {
            let arrived = AtomicUsize::new(0);
            on_every_rank(world, |end| {
                for round in 1..=200 {
                    arrived.fetch_add(1, SeqCst);
                    end.barrier().expect("no rank left early");
                    assert!(arrived.load(SeqCst) >= round * world);
                    end.barrier().expect("no rank left early");
                    assert!(arrived.load(SeqCst) <= round * world + world);
                }
            });
        }
    }

    #[test]
    fn a_rank_that_leaves_fails_the_others() {
        for world in [2, 3, 4] {
            let results = on_every_rank(world, |end| {
                end.all_reduce(1.0)?;
                if end.rank() == Rank::new(1) {
                    return Ok(());
                }
                end.barrier()
            });
            for (rank, result) in results.into_iter().enumerate() {
                match result {
                    Ok(()) => assert_eq!(rank, 1),
                    Err(TrainerError::RankLeft { rank: left }) => assert_eq!(left, Rank::new(1)),
                    Err(other) => panic!("{other}"),
                }
            }
        }
    }

    #[test]
    fn uneven_units_are_padded() {
        for (len, world, each) in [(0, 3, 0), (1, 4, 1), (8, 4, 2), (9, 4, 3)] {
            assert_eq!(shard_len(len, world), each);
            assert!(each * world >= len);
        }
        let [end] = <[_; 1]>::try_from(SharedMemory::world(1)).expect("one rank");
        let uneven = std::panic::catch_unwind(|| end.all_gather(&[1.0, 2.0], &mut [0.0; 3]));
        assert!(uneven.is_err());
    }
}
