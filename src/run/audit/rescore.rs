//! A third opinion beside the two that a record holds: the same tokens by a model at hand, through
//! the trainer's forward.
//!
//! Each side is rescored under what its record states. Where that leaves a gap, a temperature or a
//! filter is sought that does not, from the logits of a step's first batch; what is found is then
//! held against every token of the step, beside what was stated.

mod model;
mod row;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::Result;

pub(super) use self::model::Model;
use self::row::{OpinionRow, RefitRow};
pub(super) use self::row::{RescoredRow, SideRow};
use super::routes::RouteRow;
use super::step::{Metrics, Record};
use crate::base::{CompletionIndex, Contract, LogProb, RequestId, TokenId};
use crate::gap::{self, Gauge, Legs, Opinion, Refit, RouteTally, Row, UnlikeMode, REFIT_LEAVES};
use crate::ops::sampling::Sampler;
use crate::rollout::{LegLogProbs, Rollout};
use crate::trainer::Sequence;

/// Rows of logits that a search takes.
const ROWS: usize = 64;
/// Two temperatures are one if they differ by less.
const SAME_TEMPERATURE: f32 = 0.02;

fn tokens(rollout: &Rollout) -> Vec<TokenId> {
    let completion = &rollout.completion;
    completion.prompt.iter().copied().chain(completion.token_ids()).collect()
}

/// One step's.
pub(super) struct Rescored<'a> {
    model: &'a mut Model,
    /// Nats.
    floor: f64,
    /// From the first batch on that has a token to compare.
    sides: Option<[Side; 2]>,
    requests: Vec<Request>,
    /// Of each side, the records' routes against the model's.
    routes: [RouteTally; 2],
}

/// One side of the records against the model.
struct Side {
    /// This side first.
    legs: Legs,
    /// By the step's first record.
    stated: Contract,
    found: Option<Refit>,
    /// Under what each record states, and under what was found.
    under: Vec<Under>,
}

/// The comparison under one contract a record.
struct Under {
    gauge: Gauge,
    removed: u64,
    first_removed: Option<(RequestId, CompletionIndex)>,
}

/// The largest |d| of one record; `None` where nothing was compared.
struct Request {
    id: RequestId,
    between_sides: Option<f64>,
    /// Of each side, under each of [`Side::under`].
    to_model: [Vec<Option<f64>>; 2],
}

impl<'a> Rescored<'a> {
    pub(super) fn new(model: &'a mut Model, floor: f64) -> Self {
        let routes = <[RouteTally; 2]>::default();
        Self { model, floor, sides: None, requests: Vec::new(), routes }
    }

    /// The model's own scores, under what each record states, where it holds the engine's alone.
    pub(super) fn fill_trainer(&self, records: &mut [Record]) -> Result<()> {
        for alike in records.chunk_by_mut(|a, b| a.trainer_contract == b.trainer_contract) {
            let contract = alike[0].trainer_contract;
            let one_sided = |record: &&mut Record| record.rollout.trainer.is_none();
            let mut one_sided: Vec<&mut Record> = alike.iter_mut().filter(one_sided).collect();
            let sequences = one_sided.iter().filter_map(|record| record.sequence());
            let sequences: Vec<Sequence> = sequences.collect();
            let mut scores = self.model.trainer.score(&sequences, &contract)?.into_iter();
            for record in &mut one_sided {
                let scores = record.sequence().and_then(|_| scores.next());
                let scores = scores.map(|one| one.contract).unwrap_or_default();
                // The first token of a text is not predicted.
                let skipped = record.rollout.completion.tokens.len() - scores.len();
                let side = std::iter::repeat_n(None, skipped).chain(scores.into_iter().map(Some));
                record.rollout.trainer = Some(side.collect());
            }
        }
        Ok(())
    }

    /// Adds records, each with the largest |d| between its two sides.
    pub(super) fn add(&mut self, records: &mut [Record], between: &[Option<f64>]) -> Result<()> {
        self.model.meter.add(records.iter().map(|record| record.len() as u64).sum());
        let scored = records.iter().enumerate().filter_map(|(i, one)| Some((i, one.sequence()?)));
        let (scored, sequences): (Vec<usize>, Vec<Sequence>) = scored.unzip();
        self.add_routes(records, &scored, &sequences)?;
        let of_sequences: Vec<&Record> = scored.iter().map(|&i| &records[i]).collect();
        if self.sides.is_none() {
            self.sides = sides(self.model, &of_sequences, &sequences, self.floor)?;
        }
        let Some(sides) = &mut self.sides else { return Ok(()) };
        let contracts: Vec<Vec<Contract>> =
            of_sequences.iter().map(|record| contracts(sides, record)).collect();
        let contracts = Arc::new(contracts);
        let of_sequences = Arc::clone(&contracts);
        let scores = self.model.trainer.map_logits(&sequences, move |seen| {
            log_probs(seen.logits, seen.token, &of_sequences[seen.sequence])
        })?;
        for ((&at, scores), contracts) in scored.iter().zip(&scores).zip(contracts.iter()) {
            let rollout = &mut records[at].rollout;
            let mut column = 0;
            let to_model = sides.each_mut().map(|side| {
                let legs = side.legs;
                let add = |under: &mut Under| {
                    let values = scores.iter().map(|row| row[column]);
                    let gap = under.add(rollout, legs, values, &contracts[column]);
                    column += 1;
                    gap
                };
                side.under.iter_mut().map(add).collect()
            });
            let id = rollout.completion.id;
            self.requests.push(Request { id, between_sides: between[at], to_model });
        }
        Ok(())
    }

    fn add_routes(
        &mut self,
        records: &[Record],
        scored: &[usize],
        sequences: &[Sequence],
    ) -> Result<()> {
        if records.iter().flat_map(|record| &record.routes).all(Option::is_none) {
            return Ok(());
        }
        for (&at, ours) in scored.iter().zip(self.model.trainer.routes(sequences)?) {
            for (side, tally) in records[at].routes.iter().zip(&mut self.routes) {
                side.iter().for_each(|side| tally.add(side, &ours));
            }
        }
        Ok(())
    }

    pub(super) fn routes(&self) -> impl Iterator<Item = RouteRow> + '_ {
        let names = ["engine / rescored", "trainer / rescored"];
        names.into_iter().zip(&self.routes).filter_map(|(name, tally)| RouteRow::new(name, tally))
    }

    pub(super) fn finish(&self) -> Option<Told> {
        let rows = self.sides.as_ref()?.each_ref().map(Side::finish);
        let [engine, trainer] = &rows;
        let unlike = !is_near(&engine.contract, &trainer.contract);
        let mut opinions: BTreeMap<Opinion, Vec<RequestId>> = BTreeMap::new();
        let mut explained = BTreeSet::new();
        for request in &self.requests {
            let to_model = |side: usize| request.to_model[side][usize::from(rows[side].holds)];
            let (Some(between), Some(decode), Some(train)) =
                (request.between_sides, to_model(0), to_model(1))
            else {
                continue;
            };
            // Two distributions differ with nobody at fault if each is the model's own.
            if unlike && decode <= self.floor && train <= self.floor {
                explained.insert(request.id);
            } else {
                let opinion = gap::second_opinion(between, decode, train, self.floor);
                opinions.entry(opinion).or_default().push(request.id);
            }
        }
        let message = format!(
            "by the model's logits the {} side's log-probabilities are {}, the {} side's {}",
            gap::Leg::Decode.name(),
            engine.told(),
            gap::Leg::Trainer.name(),
            trainer.told(),
        );
        let opinions = opinions.into_iter().map(OpinionRow::new).collect();
        let mode = (unlike && !explained.is_empty())
            .then_some(UnlikeMode { message, requests: explained });
        Some(Told { row: RescoredRow { sides: rows.into(), opinions }, mode })
    }
}

/// What a step's rescoring has to say.
pub(super) struct Told {
    pub(super) row: RescoredRow,
    pub(super) mode: Option<UnlikeMode>,
}

impl Side {
    fn finish(&self) -> SideRow {
        let tables: Vec<gap::Table> = self.under.iter().map(|one| one.gauge.table()).collect();
        let mean = |at: usize| tables.get(at)?.value("logp_abs_diff_mean");
        let refit = self.found.zip(mean(0).zip(mean(1))).map(|(found, (before, after))| RefitRow {
            contract: found.contract,
            tokens: found.tokens,
            before,
            after,
            kept_mass: found.kept_mass,
        });
        let holds = refit.as_ref().is_some_and(|refit| {
            refit.after <= REFIT_LEAVES * refit.before
                && self.under[1].removed <= self.under[0].removed
        });
        let contract = match &refit {
            Some(refit) if holds => refit.contract,
            _ => self.stated,
        };
        let Under { removed, first_removed, .. } = self.under[usize::from(holds)];
        let metrics = Metrics(tables[usize::from(holds)].metrics.clone());
        let (legs, stated) = (self.legs, self.stated);
        SideRow { legs, stated, contract, holds, refit, removed, first_removed, metrics }
    }
}

impl Under {
    fn new(legs: Legs, floor: f64) -> Self {
        Self { gauge: Gauge::new(legs, floor), removed: 0, first_removed: None }
    }

    /// Compares a record with the model's `values` of its last tokens; the largest |d|.
    fn add(
        &mut self,
        rollout: &mut Rollout,
        legs: Legs,
        values: impl ExactSizeIterator<Item = LogProb>,
        contract: &Contract,
    ) -> Option<f64> {
        let request = rollout.completion.id;
        let filters = !contract.scores_raw_logits() && contract.has_filters();
        // The first token of a text is not predicted.
        let skipped = rollout.completion.tokens.len() - values.len();
        let mut leg: LegLogProbs = vec![None; skipped];
        for (logp, at) in values.zip(skipped..) {
            let is_removed = filters && logp.get() == f32::NEG_INFINITY;
            leg.push((!is_removed).then_some(logp));
            if is_removed && rollout.loss_mask[at] {
                let index = u32::try_from(at).expect("a completion is shorter than 2^32 tokens");
                self.removed += 1;
                self.first_removed.get_or_insert((request, CompletionIndex::new(index)));
            }
        }
        rollout.reference = Some(leg);
        let pairs = gap::pair(std::slice::from_ref(rollout), legs);
        let sequence = pairs.expect("one value a token").sequences.remove(0);
        self.gauge.add(&sequence);
        sequence.gap()
    }
}

impl Record {
    /// What there is to rescore; nothing without a token that others stand before.
    fn sequence(&self) -> Option<Sequence> {
        let tokens = tokens(&self.rollout);
        let prompt_len = self.rollout.completion.prompt.len().max(1);
        (prompt_len < tokens.len()).then_some(Sequence { tokens, prompt_len })
    }

    /// This side's contract.
    fn contract(&self, legs: Legs) -> Contract {
        match legs {
            Legs::DecodeReference => self.rollout.completion.contract,
            _ => self.trainer_contract,
        }
    }

    fn value(&self, legs: Legs, at: usize) -> LogProb {
        let trainer = || self.rollout.trainer.as_ref().and_then(|values| values[at]);
        match legs {
            Legs::DecodeReference => self.rollout.completion.tokens[at].logp,
            _ => trainer().unwrap_or(LogProb::new(f32::NAN)),
        }
    }
}

/// Both sides, once there is a token to compare, with what the logits tell of them.
fn sides(
    model: &Model,
    records: &[&Record],
    sequences: &[Sequence],
    floor: f64,
) -> Result<Option<[Side; 2]>> {
    let Some(first) = records.first() else { return Ok(None) };
    let legs = [Legs::DecodeReference, Legs::TrainerReference];
    let is_like_first =
        |record: &Record| legs.iter().all(|&legs| record.contract(legs) == first.contract(legs));
    // Completion indices that are counted, with their place among the predictions.
    let counted = |(i, record): (usize, &&Record)| {
        let skipped = usize::from(record.rollout.completion.prompt.is_empty());
        let mask = record.rollout.loss_mask.iter().enumerate().skip(skipped);
        let mask = mask.filter(|&(_, &counted)| counted && is_like_first(record));
        mask.map(|(at, _)| (i, at - skipped, at)).collect::<Vec<_>>()
    };
    let all: Vec<(usize, usize, usize)> = records.iter().enumerate().flat_map(counted).collect();
    if all.is_empty() {
        return Ok(None);
    }
    let apart = all.len().div_ceil(ROWS);
    let chosen: BTreeMap<(usize, usize), usize> =
        all.into_iter().step_by(apart).map(|(i, index, at)| ((i, index), at)).collect();
    let seen = model.trainer.map_logits(sequences, move |seen| {
        let at = *chosen.get(&(seen.sequence, seen.index))?;
        Some((seen.sequence, at, seen.token, seen.logits.to_vec()))
    })?;
    let seen: Vec<_> = seen.into_iter().flatten().flatten().collect();
    Ok(Some(legs.map(|legs| {
        let value = |i: usize, at| records[i].value(legs, at);
        let rows = seen.iter().map(|&(i, at, token, ref logits)| Row {
            logits,
            token,
            logp: value(i, at),
        });
        let stated = first.contract(legs);
        let found = gap::refit(&rows.collect::<Vec<_>>(), &stated);
        let under = (0..1 + usize::from(found.is_some())).map(|_| Under::new(legs, floor));
        Side { legs, stated, found, under: under.collect() }
    })))
}

/// Of each side, what a record states, and what was found in its place.
fn contracts(sides: &[Side; 2], record: &Record) -> Vec<Contract> {
    let of_side = |side: &Side| {
        let stated = record.contract(side.legs);
        let found = side.found.map(|found| match stated == side.stated {
            true => found.contract,
            false => stated,
        });
        [Some(stated), found].into_iter().flatten().collect::<Vec<_>>()
    };
    sides.iter().flat_map(of_side).collect()
}

/// Under each contract; like ones are computed once.
fn log_probs(logits: &[f32], token: TokenId, contracts: &[Contract]) -> Vec<LogProb> {
    let mut sampler = Sampler::default();
    let mut found: Vec<LogProb> = Vec::with_capacity(contracts.len());
    for (i, contract) in contracts.iter().enumerate() {
        let before = contracts[..i].iter().position(|before| before.is_like(contract));
        found.push(match before {
            Some(before) => found[before],
            None => sampler.log_prob(logits, token, contract),
        });
    }
    found
}

/// Whether two contracts are one, to what a search can tell.
fn is_near(a: &Contract, b: &Contract) -> bool {
    let near = (a.temperature / b.temperature).ln().abs() < SAME_TEMPERATURE;
    a.is_like(b) || (near && a.is_like(&Contract { temperature: a.temperature, ..*b }))
}
