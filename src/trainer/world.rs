//! The ranks' threads: one works on the caller's, several have one each.

use std::any::Any;
use std::cell::Cell;
use std::ops::ControlFlow;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::collective::ranks;
use super::worker::Worker;
use super::TrainerError;
use crate::base::Rank;

/// All ranks of a trainer.
pub(super) enum World {
    One(Box<Worker>),
    Several(Threads),
}

pub(super) struct Threads {
    threads: Vec<Thread>,
    /// How long after the first rank the others may come to an end of the same work.
    patience: Duration,
    /// Whether a rank may never come to an end.
    lost: Cell<bool>,
}

struct Thread {
    /// Taken at the end, which ends the thread.
    jobs: Option<Sender<Job>>,
    handle: Option<JoinHandle<()>>,
}

type Job = Box<dyn FnOnce(&mut Worker) -> ControlFlow<()> + Send>;

impl World {
    /// Of workers in rank order.
    ///
    /// # Errors
    /// [`TrainerError::NoThread`].
    pub(super) fn new(mut workers: Vec<Worker>, patience: Duration) -> Result<Self, TrainerError> {
        if workers.len() == 1 {
            return Ok(Self::One(Box::new(workers.remove(0))));
        }
        let threads = workers.into_iter().map(Thread::start).collect::<Result<_, _>>()?;
        Ok(Self::Several(Threads { threads, patience, lost: Cell::new(false) }))
    }

    pub(super) fn size(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Several(ranks) => ranks.threads.len(),
        }
    }

    /// What `work` gives on each rank, in rank order.
    ///
    /// # Errors
    /// That of the rank that is the cause; of several, the first.
    pub(super) fn each<T: Send + 'static>(
        &self,
        work: impl Fn(&Worker) -> Result<T, TrainerError> + Send + Sync + 'static,
    ) -> Result<Vec<T>, TrainerError> {
        match self {
            Self::One(worker) => Ok(vec![work(worker)?]),
            Self::Several(ranks) => ranks.run(move |worker| work(worker)),
        }
    }

    /// The same where it changes the rank.
    pub(super) fn each_mut<T: Send + 'static>(
        &mut self,
        work: impl Fn(&mut Worker) -> Result<T, TrainerError> + Send + Sync + 'static,
    ) -> Result<Vec<T>, TrainerError> {
        match self {
            Self::One(worker) => Ok(vec![work(worker)?]),
            Self::Several(ranks) => ranks.run(work),
        }
    }
}

impl Thread {
    fn start(mut worker: Worker) -> Result<Self, TrainerError> {
        let (jobs, received) = mpsc::channel::<Job>();
        let (rank, ranks) = (worker.units.rank(), worker.units.world_size());
        let name = format!("trainer-rank-{rank}");
        let serve = move || {
            for job in received {
                if job(&mut worker).is_break() {
                    break;
                }
            }
        };
        let handle = thread::Builder::new().name(name).spawn(serve);
        let handle = handle.map_err(|source| TrainerError::NoThread { rank, ranks, source })?;
        Ok(Self { jobs: Some(jobs), handle: Some(handle) })
    }
}

impl Threads {
    fn run<T: Send + 'static>(
        &self,
        work: impl Fn(&mut Worker) -> Result<T, TrainerError> + Send + Sync + 'static,
    ) -> Result<Vec<T>, TrainerError> {
        let (work, (done, results)) = (Arc::new(work), mpsc::channel());
        for (rank, thread) in ranks(self.threads.len()).zip(&self.threads) {
            let (work, done) = (Arc::clone(&work), done.clone());
            let job: Job = Box::new(move |worker| {
                let result = catch_unwind(AssertUnwindSafe(|| work(worker)));
                let flow = match &result {
                    Ok(_) => ControlFlow::Continue(()),
                    Err(_) => ControlFlow::Break(()),
                };
                let result = result.unwrap_or_else(|payload| Err(failure(rank, payload)));
                // Nobody listens any more where another rank has not come to its end in time.
                let _ = done.send((rank, result));
                flow
            });
            // A thread that has ended drops it, and with it its end of `done`.
            let _ = thread.jobs.as_ref().expect("it is there until the end").send(job);
        }
        drop(done);
        self.collect(&results)
    }

    fn collect<T>(
        &self,
        results: &Receiver<(Rank, Result<T, TrainerError>)>,
    ) -> Result<Vec<T>, TrainerError> {
        let mut of_ranks: Vec<Option<Result<T, TrainerError>>> =
            self.threads.iter().map(|_| None).collect();
        let mut next = results.recv().map_err(|_| RecvTimeoutError::Disconnected);
        let end = loop {
            match next {
                Ok((rank, result)) => of_ranks[rank.index()] = Some(result),
                Err(end) => break end,
            }
            next = results.recv_timeout(self.patience);
        };
        let silent: Vec<Rank> = ranks(of_ranks.len())
            .zip(&of_ranks)
            .filter_map(|(rank, result)| result.is_none().then_some(rank))
            .collect();
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for result in of_ranks.into_iter().flatten() {
            match result {
                Ok(one) => good.push(one),
                Err(error) => bad.push(error),
            }
        }
        if end == RecvTimeoutError::Timeout && !silent.is_empty() {
            self.lost.set(true);
        }
        let cause = bad.iter().position(|error| !error.is_of_another());
        if let Some(cause) = cause {
            return Err(bad.swap_remove(cause));
        }
        match silent.first() {
            None => {}
            Some(_) if end == RecvTimeoutError::Timeout => {
                return Err(TrainerError::missing(&silent, self.patience));
            }
            Some(&rank) => return Err(TrainerError::RankLeft { rank }),
        }
        match bad.into_iter().next() {
            Some(error) => Err(error),
            None => Ok(good),
        }
    }
}

/// What a rank's panic says; a device that fails within an operation unwinds too.
fn failure(rank: Rank, payload: Box<dyn Any + Send>) -> TrainerError {
    #[cfg(feature = "cuda")]
    let payload = match payload.downcast::<crate::ops::cuda::DeviceError>() {
        Ok(source) => return TrainerError::Device { rank, source: *source },
        Err(payload) => payload,
    };
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    let message = text.unwrap_or_else(|| "it panicked without a word".to_owned());
    TrainerError::RankFailed { rank, message }
}

/// Ends the threads, and waits for them but where one may never end.
impl Drop for Threads {
    fn drop(&mut self) {
        self.threads.iter_mut().for_each(|thread| drop(thread.jobs.take()));
        if self.lost.get() {
            return;
        }
        for thread in &mut self.threads {
            let handle = thread.handle.take().expect("it is there until the end");
            // A rank's panic was told where it happened.
            let _ = handle.join();
        }
    }
}
