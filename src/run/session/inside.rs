//! Where in the model the forwards of a spike's worst requests part, each in a place of its own.

use std::iter::zip;

use anyhow::Result;

use super::{sequence, Session};
use crate::base::Position;
use crate::config::Arithmetic;
use crate::engine::Engine;
use crate::gap::{first_difference, LayerRoutes, Probe, RouteTally, StreamRow};
use crate::model::{Part, PartKind};
use crate::rollout::{LegLogProbs, Rollout, Routes};
use crate::run::streams;
use crate::trainer::Sequence;

impl Session {
    /// Adds to the probes of the `worst` requests. In fast numerics streams differ from the first
    /// layer on for no reason but rounding, and nothing is said of them.
    pub(super) fn look_inside(
        &self,
        rollouts: &[Rollout],
        worst: &[usize],
        probes: &mut [Probe],
    ) -> Result<()> {
        let Some(engines) = self.source.embedded() else { return Ok(()) };
        if self.config.engine.numerics != Arithmetic::Invariant {
            return Ok(());
        }
        let parts = self.plan.parts();
        for &index in worst {
            let (rollout, whole) = (&rollouts[index], sequence(&rollouts[index]));
            let engine = engines.get(rollout.completion.engine);
            let mut all = probes.iter_mut();
            let probe = all.find(|probe| probe.request == rollout.completion.id);
            let probe = probe.expect("the worst requests are probed");
            let prefill = streams::prefill(engine, &whole);
            let decode = streams::forced_decode(engine, &whole);
            let trainer = streams::trainer(&self.trainer, &whole)?;
            let bad = |leg: &Option<LegLogProbs>| {
                let index = first_unlike(rollout.prefill.as_ref()?, leg.as_ref()?)?;
                Some(Position::new((whole.prompt_len + index) as u32))
            };
            probe.decode_prefill =
                first_difference(&parts, &decode, &prefill, bad(&probe.decode_again));
            probe.prefill_trainer =
                first_difference(&parts, &prefill, &trainer, bad(&probe.trainer_alone));
            if let Some(first) = probe.prefill_trainer {
                probe.routes = self.routes(engine, &whole, first.part, &prefill, &trainer)?;
            }
        }
        Ok(())
    }

    /// How engine and trainer choose experts in one part, of the tokens whose streams before it are
    /// the same; `None` of a part without experts.
    fn routes(
        &self,
        engine: &Engine,
        whole: &Sequence,
        part: Part,
        prefill: &[StreamRow],
        trainer: &[StreamRow],
    ) -> Result<Option<LayerRoutes>> {
        let PartKind::Moe = part.kind else { return Ok(None) };
        let parts = self.plan.parts();
        let at = parts.iter().position(|one| *one == part).expect("a part of the model");
        let nth = parts[..at].iter().filter(|one| one.kind == PartKind::Moe).count();
        let layer = part.layer.expect("experts are a layer's");
        let engine = streams::prefill_routes(engine, whole, (at, layer));
        let theirs = streams::trainer_routes(&self.trainer, whole, nth)?;
        let same: Vec<bool> = zip(prefill, trainer)
            .map(|(one, other)| one.parts[..at] == other.parts[..at])
            .collect();
        let of_same = |routes: Routes| -> Routes {
            zip(routes, &same).filter(|(_, same)| **same).map(|(token, _)| token).collect()
        };
        let mut tally = RouteTally::default();
        tally.add(&of_same(engine), &of_same(theirs));
        Ok(tally.layers.first().copied())
    }
}

/// The first completion index at which two legs do not have the same bits.
fn first_unlike(one: &LegLogProbs, other: &LegLogProbs) -> Option<usize> {
    let bits = |leg: &LegLogProbs| -> Vec<Option<u32>> {
        leg.iter().map(|logp| logp.map(|logp| logp.get().to_bits())).collect()
    };
    zip(bits(one), bits(other)).position(|(one, other)| one != other)
}
