//! vLLM servers as the engine: token ids in; ids and the sampled tokens' log-probabilities out.
//!
//! One request is one rollout, whose answer goes to its own place, so that none is lost or counted
//! twice however often it is tried. Text is never read: ids come back as ids, and the server's
//! account of the prompt is held against what was sent. All sampling parameters are sent, because a
//! server fills in what is absent from the model's `generation_config.json`.

mod answer;
mod client;
mod error;
mod facts;
mod news;
mod request;

use std::future::Future;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use self::client::Client;
pub use self::error::{Problem, ServerError};
pub use self::facts::ServerFacts;
use self::news::News;
use self::request::{Generate, Sampling};
use crate::base::{Contract, LogProb, RequestId, TokenId, WeightVersion};
use crate::config::ServersConfig;
use crate::engine::{dealt_to, Completion, GenerationRequest};

/// How often somebody is asked whether to go on waiting.
const ASKED_EVERY: Duration = Duration::from_millis(50);

/// Whoever waits for answers.
pub trait Waiting {
    /// Asked now and then; true gives up.
    fn gives_up(&self) -> bool;
    /// Told of what makes the waiting long.
    fn hears(&self, news: &str);
}

/// One who only says when to stop.
impl<F: Fn() -> bool> Waiting for F {
    fn gives_up(&self) -> bool {
        self()
    }

    fn hears(&self, _: &str) {}
}

/// True while a server is being started: it is left alone, and no try is lost on it.
pub type Starting = Arc<AtomicBool>;

/// What a client must know of the run.
#[derive(Clone, Debug)]
pub struct Terms {
    pub contract: Contract,
    pub seed: u64,
    /// One a server, in the order of their addresses; empty where the run starts none.
    pub starting: Vec<Starting>,
}

/// Servers that all serve one model.
#[derive(Debug)]
pub struct Servers {
    runtime: Runtime,
    clients: Vec<Arc<Client>>,
    facts: Vec<ServerFacts>,
    news: Arc<News>,
    seed: u64,
    request_seeds: bool,
    weight_version: WeightVersion,
}

impl Servers {
    /// Asks every server what it is, and of what its log-probabilities are.
    ///
    /// # Errors
    /// A server that is not there, serves another model, or whose log-probabilities mean something
    /// else than the contract says; servers unlike each other.
    pub fn open(
        config: &ServersConfig,
        terms: Terms,
        waiting: &dyn Waiting,
    ) -> Result<Self, ServerError> {
        // Answers are read on a thread of their own, whatever who waits for them is busy with.
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(ServerError::Runtime)?;
        let name = config.served_model_name.clone();
        let news = Arc::new(News::default());
        let mut clients = Vec::new();
        for (index, url) in config.url.iter().enumerate() {
            let starting = terms.starting.get(index).cloned().unwrap_or_default();
            clients.push(Client::new(url, config, (starting, Arc::clone(&news)))?);
        }
        let contract = config.check_contract.then_some(terms.contract);
        let of_one = |mut client: Client| {
            let name = name.clone();
            async move {
                let facts = client.identify(name, contract).await?;
                Ok((Arc::new(client), facts))
            }
        };
        let jobs = clients.into_iter().map(of_one);
        let found = runtime.block_on(all(jobs, &news, waiting))?;
        let (clients, facts): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        facts::alike(&facts)?;
        let weight_version = WeightVersion::new(0);
        let request_seeds = config.request_seeds;
        let seed = terms.seed;
        Ok(Self { runtime, clients, facts, news, seed, request_seeds, weight_version })
    }

    /// What the servers are, in the order of their addresses.
    #[must_use]
    pub fn facts(&self) -> &[ServerFacts] {
        &self.facts
    }

    /// That they are what they were when a run began, as far as log-probabilities depend on it.
    ///
    /// # Errors
    /// Names the first server, and what of it has changed.
    pub fn check_unchanged(&self, before: &[ServerFacts]) -> Result<(), ServerError> {
        facts::unchanged(before, &self.facts)
    }

    /// One completion a request, in their order. The requests of a prompt go to one server.
    ///
    /// # Errors
    /// A request that is refused, keeps failing, or is answered by what is no answer to it;
    /// whoever says to stop.
    pub fn generate(
        &self,
        asked: Vec<GenerationRequest>,
        contract: &Contract,
        waiting: &dyn Waiting,
    ) -> Result<Vec<Completion>, ServerError> {
        self.check_lengths(&asked)?;
        let ids: Vec<RequestId> = asked.iter().map(|request| request.id).collect();
        let jobs = asked.into_iter().map(|request| {
            let engine = dealt_to(request.id.prompt_id, self.clients.len());
            let client = Arc::clone(&self.clients[engine.index()]);
            let sampling = Sampling::of(contract, self.seed_of(request.id));
            let (contract, version) = (*contract, self.weight_version);
            async move {
                let (tokens, finish_reason) =
                    client.complete(&Generate { request: &request, sampling }).await?;
                Ok(Completion {
                    id: request.id,
                    engine,
                    prompt: request.prompt,
                    tokens,
                    finish_reason,
                    contract,
                    weight_version: version,
                    engine_fingerprint: None,
                    lives: Vec::new(),
                    preemptions: 0,
                    cached_tokens: 0,
                })
            }
        });
        let done = self.runtime.block_on(all(jobs, &self.news, waiting))?;
        assert!(done.iter().map(|one| one.id).eq(ids), "one answer a request, in their order");
        Ok(done)
    }

    /// Whether prompt and completion have room in the servers' contexts.
    ///
    /// # Errors
    /// The first request that has not.
    pub fn check_lengths(&self, asked: &[GenerationRequest]) -> Result<(), ServerError> {
        // The servers are alike.
        let ServerFacts { url, max_model_len: Some(max), .. } = &self.facts[0] else {
            return Ok(());
        };
        let lengths = |request: &GenerationRequest| {
            (request.prompt.len() as u64, u64::from(request.max_new_tokens))
        };
        let too_long = asked.iter().find(|request| {
            let (prompt, new) = lengths(request);
            prompt + new > u64::from(*max)
        });
        let Some(request) = too_long else { return Ok(()) };
        let (prompt, new) = lengths(request);
        let (url, max) = (url.clone(), *max);
        Err(ServerError::TooLong { url, request: request.id, prompt, new, max })
    }

    /// Log-probabilities of each sequence's tokens from its prompt's end on, by one prefill over
    /// all of them: `prompt_logprobs`, which are raw in every mode. Each goes where its group was
    /// sampled. Absent is the last one of a sequence that fills a server's whole context, unless
    /// the server is known to record raw log-probabilities.
    ///
    /// # Errors
    /// As [`Self::generate`].
    pub fn score_prefill(
        &self,
        sequences: Vec<(RequestId, Vec<TokenId>, usize)>,
        waiting: &dyn Waiting,
    ) -> Result<Vec<Vec<Option<LogProb>>>, ServerError> {
        let jobs = sequences.into_iter().map(|(id, tokens, prompt_len)| {
            let engine = dealt_to(id.prompt_id, self.clients.len());
            let client = Arc::clone(&self.clients[engine.index()]);
            async move { client.score(id, &tokens, prompt_len).await }
        });
        self.runtime.block_on(all(jobs, &self.news, waiting))
    }

    /// Has every server read its model folder again and forget its prefix cache.
    ///
    /// # Errors
    /// A server without the endpoints, or one that fails.
    pub fn reload(
        &mut self,
        version: WeightVersion,
        waiting: &dyn Waiting,
    ) -> Result<(), ServerError> {
        let jobs = self.clients.iter().map(|client| {
            let client = Arc::clone(client);
            async move { client.reload().await }
        });
        self.runtime.block_on(all(jobs, &self.news, waiting))?;
        self.weight_version = version;
        Ok(())
    }

    fn seed_of(&self, id: RequestId) -> Option<i64> {
        let drawn = || xxh3_64_with_seed(id.to_string().as_bytes(), self.seed);
        // 63 bits: a seed is a signed number there, and a negative one is odd to read.
        self.request_seeds.then(|| (drawn() >> 1) as i64)
    }
}

/// Awaits all, in their order; the first failure ends the others, and so does giving up.
async fn all<T, F>(
    jobs: impl Iterator<Item = F>,
    news: &News,
    waiting: &dyn Waiting,
) -> Result<Vec<T>, ServerError>
where
    T: Send + 'static,
    F: Future<Output = Result<T, ServerError>> + Send + 'static,
{
    let mut running = JoinSet::new();
    for (index, job) in jobs.enumerate() {
        running.spawn(async move { (index, job.await) });
    }
    let mut done: Vec<Option<T>> = (0..running.len()).map(|_| None).collect();
    let mut ticks = tokio::time::interval(ASKED_EVERY);
    loop {
        tokio::select! {
            joined = running.join_next() => {
                let Some(joined) = joined else { break };
                let (index, result) = joined.map_err(|error| match error.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    Err(error) => ServerError::Runtime(io::Error::other(error)),
                })?;
                let place = &mut done[index];
                assert!(place.is_none(), "an answer has one place, and comes there once");
                *place = Some(result?);
            }
            _ = ticks.tick() => {
                news.tell(waiting);
                if waiting.gives_up() {
                    return Err(ServerError::Stopped);
                }
            }
        }
    }
    Ok(done.into_iter().map(|one| one.expect("every job has ended")).collect())
}
