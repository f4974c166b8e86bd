//! For each point with a spike one bad request, beside the same request where it has no gap: the
//! two texts side by side are what makes a spike understood.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::super::parquet::{read_rollouts, read_tokens, RolloutRow, TokenRow};
use super::super::{ReportError, RunFolder};
use super::{point_folder, StepGapRow, Sweep, SweepPoint};
use crate::base::{LogProb, RequestId, Step};

/// More points with a spike than this have no victim shown.
pub(super) const SHOWN_MAX: usize = 12;
/// So many of a point's worst steps are looked at for its most telling victim.
const STEPS_MAX: usize = 8;

/// A request with a gap over the floor.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Victim {
    /// Its token of the largest gap; the infinite one where a log-probability is not finite.
    pub gap: f64,
    pub worst: TokenRow,
    /// Counted from 1, which completion token that is, and the first over the floor.
    pub worst_at: usize,
    pub first_at: usize,
    pub record: RolloutRow,
    /// The same request at another point, and that point's place in the sweep.
    pub twin: Option<(usize, RolloutRow)>,
}

/// A point's place in the sweep, and its victim or why it could not be read.
pub(super) type Found = (usize, Result<Victim, ReportError>);

/// In the order of the points; unreadable records keep nothing else from being shown.
pub(super) fn find(folder: &Path, sweep: &Sweep) -> Vec<Found> {
    let mut records = Records { folder, sweep, read: HashMap::new() };
    let spiked = sweep.points.iter().enumerate().filter(|(_, point)| !worst(point).is_empty());
    spiked
        .take(SHOWN_MAX)
        .filter_map(|(i, _)| records.most_telling(i).transpose().map(|victim| (i, victim)))
        .collect()
}

/// Some spike steps, those of the largest gaps first and the earlier ones on a tie.
fn worst(point: &SweepPoint) -> Vec<Step> {
    let size = |row: &StepGapRow| match (row.nonfinite, row.gap_max) {
        (0, gap) => gap.unwrap_or(0.0),
        _ => f64::INFINITY,
    };
    let mut spikes: Vec<&StepGapRow> = point.gaps().iter().filter(|row| row.spike).collect();
    spikes.sort_by(|a, b| size(b).total_cmp(&size(a)));
    spikes.iter().take(STEPS_MAX).map(|row| row.step).collect()
}

/// One request of a step with what its tokens say.
struct Request {
    record: RolloutRow,
    tokens: Vec<TokenRow>,
    /// The largest of its tokens' gaps; `None` where nothing was compared.
    gap: Option<f64>,
}

/// Steps of points, each read once.
struct Records<'a> {
    folder: &'a Path,
    sweep: &'a Sweep<'a>,
    read: HashMap<(usize, Step), BTreeMap<RequestId, Request>>,
}

impl Records<'_> {
    /// Of each step's victim the one whose text leaves its twin's first; the one with the larger
    /// gap on a tie.
    fn most_telling(&mut self, at: usize) -> Result<Option<Victim>, ReportError> {
        let mut best: Option<Victim> = None;
        for step in worst(&self.sweep.points[at]) {
            let Some(victim) = self.victim(at, step)? else { continue };
            let order = |best: &Victim| {
                let larger = best.gap.total_cmp(&victim.gap);
                victim.alike().cmp(&best.alike()).then(larger)
            };
            if best.as_ref().is_none_or(|best| order(best).is_lt()) {
                best = Some(victim);
            }
        }
        Ok(best)
    }

    /// The worst request that another point ran cleanly; without one the worst.
    fn victim(&mut self, at: usize, step: Step) -> Result<Option<Victim>, ReportError> {
        let floor = floor(&self.sweep.points[at]);
        let over = |(id, request): (&RequestId, &Request)| {
            request.gap.filter(|gap| *gap > floor).map(|gap| (gap, *id))
        };
        let mut bad: Vec<(f64, RequestId)> = self.step(at, step)?.iter().filter_map(over).collect();
        bad.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut twin = None;
        for other in (0..self.sweep.points.len()).filter(|&other| other != at) {
            // A point whose records cannot be read has no twin to offer.
            if !self.ran(other, step) || self.step(other, step).is_err() {
                continue;
            }
            let rank = bad.iter().position(|(_, id)| self.is_twin(at, other, step, *id));
            // The worst request wins; of several points with it the first.
            if rank.is_some_and(|rank| twin.is_none_or(|(best, _)| rank < best)) {
                twin = rank.map(|rank| (rank, other));
            }
            if rank == Some(0) {
                break;
            }
        }
        let Some(&(gap, id)) = bad.get(twin.map_or(0, |(rank, _)| rank)) else { return Ok(None) };
        let twin = twin.map(|(_, other)| (other, self.read[&(other, step)][&id].record.clone()));
        Ok(Some(self.read[&(at, step)][&id].as_victim(gap, floor, twin)))
    }

    fn ran(&self, point: usize, step: Step) -> bool {
        let gaps = self.sweep.points[point].gaps();
        gaps.binary_search_by_key(&step, |row| row.step).is_ok()
    }

    fn is_twin(&self, at: usize, other: usize, step: Step, id: RequestId) -> bool {
        let victim = &self.read[&(at, step)][&id];
        let floor = floor(&self.sweep.points[other]);
        self.read[&(other, step)].get(&id).is_some_and(|twin| {
            twin.gap.is_some_and(|gap| gap <= floor) && is_same(&twin.record, &victim.record)
        })
    }

    fn step(
        &mut self,
        point: usize,
        step: Step,
    ) -> Result<&BTreeMap<RequestId, Request>, ReportError> {
        if !self.read.contains_key(&(point, step)) {
            let run = RunFolder::open(point_folder(self.folder, &self.sweep.points[point].name))?;
            self.read.insert((point, step), read(&run, step)?);
        }
        Ok(&self.read[&(point, step)])
    }
}

fn read(run: &RunFolder, step: Step) -> Result<BTreeMap<RequestId, Request>, ReportError> {
    let records = read_rollouts(&run.rollouts(step))?;
    let request =
        |record: RolloutRow| (record.request, Request { record, tokens: Vec::new(), gap: None });
    let mut requests: BTreeMap<_, _> = records.into_iter().map(request).collect();
    for token in read_tokens(&run.tokens(step))? {
        // Both files are of one step; a token without its request has nobody to speak of.
        let Some(request) = requests.get_mut(&token.request) else { continue };
        request.gap = request.gap.into_iter().chain(gap(&token)).reduce(f64::max);
        request.tokens.push(token);
    }
    Ok(requests)
}

impl Victim {
    /// Completion tokens before the twin says something else; no twin is worth the least.
    fn alike(&self) -> usize {
        let Some((_, twin)) = &self.twin else { return usize::MAX };
        let both = self.record.completion_token_ids.iter().zip(&twin.completion_token_ids);
        both.take_while(|(a, b)| a == b).count()
    }
}

impl Request {
    fn as_victim(&self, worst: f64, floor: f64, twin: Option<(usize, RolloutRow)>) -> Victim {
        let first = |over: &dyn Fn(f64) -> bool| {
            let at = self.tokens.iter().position(|token| gap(token).is_some_and(over));
            at.expect("its gap is that of a token, and over the floor")
        };
        let worst_at = first(&|gap| gap == worst);
        Victim {
            gap: worst,
            worst: self.tokens[worst_at].clone(),
            worst_at: worst_at + 1,
            first_at: first(&|gap| gap > floor) + 1,
            record: self.record.clone(),
            twin,
        }
    }
}

/// Whether a healthy engine has to give both the same completion: same prompt, weights and filters.
fn is_same(a: &RolloutRow, b: &RolloutRow) -> bool {
    a.prompt_token_ids == b.prompt_token_ids
        && a.engine_fingerprint == b.engine_fingerprint
        && (a.temperature, a.top_p, a.top_k) == (b.temperature, b.top_p, b.top_k)
}

fn floor(point: &SweepPoint) -> f64 {
    point.summary().and_then(|summary| summary.floor).unwrap_or(0.0)
}

/// |d| of a token that counts; infinite where a side is not finite, absent where one is.
fn gap(token: &TokenRow) -> Option<f64> {
    let sides = [token.logp_decode?, token.logp_trainer?];
    let [decode, trainer] = sides.map(|logp| f64::from(logp.get()));
    let finite = sides.into_iter().all(LogProb::is_finite);
    token.loss_mask.then_some(if finite { (trainer - decode).abs() } else { f64::INFINITY })
}

#[cfg(test)]
mod tests;
