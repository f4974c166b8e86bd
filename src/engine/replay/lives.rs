//! What a replay knows of every life of every request.

use std::collections::HashMap;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::memory::{Content, Found, LifeId, Stored};
use super::{Cause, Misread, Source};
use crate::base::{BlockId, EngineStep, LayerId, RequestId, TokenId};
use crate::engine::{Phase, Row, StepBatch};

#[derive(Clone, Debug, Default)]
pub struct Lives {
    /// By life id; kept when a life has ended, because its bytes are still there.
    accounts: Vec<Account>,
    /// The lives so far of every request that is not done.
    of_request: HashMap<RequestId, Vec<LifeId>>,
}

/// What is known of one life.
#[derive(Clone, Debug)]
pub struct Account {
    request: RequestId,
    /// Of its tokens so far, while they are of the prompt.
    prompt_hash: u64,
    /// What its state blocks hold.
    pub content: Content,
    /// Through which kernels it stored them.
    pub stored_by: Phase,
    /// Everything that it computes from this engine step on is wrong.
    wrong_since: Option<EngineStep>,
    misreads: Vec<Misread>,
    /// Another decode row would read what it should, or is wrong already, and store what is there.
    at_rest: bool,
    /// When a store at a wrapped address last went to a page of its own.
    hit: Option<EngineStep>,
}

/// A row of the pass under way.
#[derive(Clone, Copy, Debug)]
pub struct Visit {
    pub life: LifeId,
    /// What the row's stores hold, if the life is right.
    content: Content,
}

impl Account {
    /// Whether the loads and stores of a row's state, and its reads of keys and values, may be
    /// passed over.
    pub fn rests(&self, row: &Row) -> bool {
        row.phase == Phase::Decode && self.at_rest
    }

    pub fn is_wrong_before(&self, engine_step: EngineStep) -> bool {
        self.wrong_since.is_some_and(|since| since < engine_step)
    }

    /// What a row of this life stores by now.
    pub fn stores(&self, visit: &Visit) -> Content {
        match self.wrong_since {
            None => visit.content,
            Some(_) => Content::Life(visit.life),
        }
    }
}

impl Lives {
    pub fn account(&self, life: LifeId) -> &Account {
        &self.accounts[life.index()]
    }

    /// The rows of a pass, in row order. Those that begin a life get an account.
    pub fn arrive(
        &mut self,
        batch: &StepBatch,
        prompt_lens: impl Iterator<Item = u32>,
        visits: &mut Vec<Visit>,
    ) {
        visits.clear();
        for ((index, row), prompt_len) in batch.rows.iter().enumerate().zip(prompt_lens) {
            if row.computed_tokens == 0 {
                self.begin(row);
            }
            let lives = &self.of_request[&row.request];
            let life = *lives.last().expect("a life began with its first row");
            let account = &mut self.accounts[life.index()];
            let content = if row.computed_tokens + row.scheduled_tokens <= prompt_len {
                account.prompt_hash = hash_on(account.prompt_hash, batch.row_tokens(index));
                Content::Prompt(account.prompt_hash)
            } else {
                Content::Life(life)
            };
            visits.push(Visit { life, content });
        }
    }

    fn begin(&mut self, row: &Row) {
        let life = LifeId::new(self.accounts.len());
        self.of_request.entry(row.request).or_default().push(life);
        self.accounts.push(Account {
            request: row.request,
            prompt_hash: 0,
            content: Content::Life(life),
            stored_by: row.phase,
            wrong_since: None,
            misreads: Vec::new(),
            at_rest: false,
            hit: None,
        });
    }

    /// The pass is over.
    pub fn depart(&mut self, batch: &StepBatch, visits: &[Visit]) {
        for (row, visit) in batch.rows.iter().zip(visits) {
            let account = &mut self.accounts[visit.life.index()];
            account.content = account.stores(visit);
            account.stored_by = row.phase;
            // A decode row that stored to the end of its prompt, or a prefill row, is followed by
            // one that stores something else, or elsewhere.
            let repeats =
                row.phase == Phase::Decode && account.content == Content::Life(visit.life);
            account.at_rest = repeats && account.hit != Some(batch.engine_step);
        }
    }

    /// A store at a wrapped address went to a page of this request's.
    pub fn wake(&mut self, owner: RequestId, engine_step: EngineStep) {
        if let Some(life) = self.of_request.get(&owner).and_then(|lives| lives.last()) {
            let account = &mut self.accounts[life.index()];
            (account.at_rest, account.hit) = (false, Some(engine_step));
        }
    }

    /// Takes a misread down, once a cause and block.
    pub fn note(
        &mut self,
        life: LifeId,
        engine_step: EngineStep,
        (cause, layer, block): (Cause, LayerId, BlockId),
        found: Found,
    ) {
        let found = match found {
            Found::Zeros => None,
            Found::Stored(Stored { life, block, .. }) => {
                Some(Source { request: self.account(life).request, block })
            }
        };
        let account = &mut self.accounts[life.index()];
        account.wrong_since.get_or_insert(engine_step);
        if !account.misreads.iter().any(|one| (one.cause, one.block) == (cause, block)) {
            account.misreads.push(Misread { cause, engine_step, layer, block, found });
        }
    }

    /// A request is done: since when each of its lives was wrong, and why.
    pub fn leave(&mut self, request: RequestId) -> Vec<(Option<EngineStep>, Vec<Misread>)> {
        let lives = self.of_request.remove(&request).expect("a request that is done had rows");
        let take = |life: LifeId| {
            let account = &mut self.accounts[life.index()];
            (account.wrong_since, std::mem::take(&mut account.misreads))
        };
        lives.into_iter().map(take).collect()
    }
}

/// One token after the other, so that it does not depend on how a prompt is cut into chunks.
fn hash_on(hash: u64, tokens: &[TokenId]) -> u64 {
    tokens.iter().fold(hash, |hash, token| xxh3_64_with_seed(&token.get().to_le_bytes(), hash))
}
