//! The gap of a step's requests against where their state lay.

use serde::{Deserialize, Serialize};

use super::scale::{LogScale, STRIP};
use super::svg::{Anchor, Plot, BOTTOM, HALF, RED};
use super::text::number;
use crate::base::{float, BlockId, EngineIndex, RequestId, Step};

/// The requests of one step and one engine that hold recurrent state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepBlocks {
    pub step: Step,
    /// Whose pool it is, where there are several.
    pub engine: Option<EngineIndex>,
    /// The first block whose state address wraps, if the pool has it.
    pub first_wrapped: Option<BlockId>,
    /// Nats.
    pub floor: f64,
    pub requests: Vec<BlockGap>,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockGap {
    pub request: RequestId,
    /// The highest state block that any of its lives held.
    pub block: BlockId,
    /// Its largest gap, nats; infinite where a log-probability is not finite.
    #[serde(with = "float")]
    pub gap: f64,
    /// Whether a `stale_state` finding lists it.
    pub stale: bool,
}

/// More requests than this are not all drawn: the bad ones are, the others evenly thinned.
const MARKS_MAX: usize = 1500;
const HEIGHT: f64 = 300.0;
/// Where the line of the threshold begins, under title and legend.
const LINE_TOP: f64 = 44.0;

/// What a mark's shape says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Clean,
    Stale,
    /// With a block past the threshold, or in a pool that has none.
    Bad,
    /// Every block of it is below the threshold: another's wrapped store hit it.
    Collateral,
}

pub(super) fn draw(step: &StepBlocks) -> String {
    let shown = thin(step);
    let nonfinite = shown.iter().any(|one| !one.gap.is_finite());
    let gaps = shown.iter().map(|one| one.gap).chain([step.floor]);
    let top = LINE_TOP + STRIP + if nonfinite { STRIP } else { 0.0 };
    let scale = LogScale::new(gaps, top, HEIGHT - BOTTOM);
    let of_engine = step.engine.map_or(String::new(), |engine| format!(", engine {engine}"));
    let title = format!(
        "Step {}{of_engine}: largest gap of each request, nats, by its highest state block",
        step.step
    );
    let mut plot = Plot::new([HALF, HEIGHT], &title, "block", step.range());
    plot.svg.text(0.0, 29.0, Anchor::Start, "quiet", &legend(step, &shown));
    for (y, label) in scale.ticks() {
        plot.grid(y, &label);
    }
    if nonfinite {
        plot.label_left(top - 14.0, "NaN, inf");
    }
    if step.floor > 0.0 {
        plot.dashed(scale.y(step.floor));
    }
    if let Some(first) = step.first_wrapped {
        let x = plot.x(u64::from(first.get()));
        let d = format!("M{x:.1} {LINE_TOP:.1}V{:.1}", HEIGHT - BOTTOM);
        plot.svg.path(&d, "stroke=\"#111\" stroke-width=\"1.5\" stroke-dasharray=\"2 2\"", "");
        let anchor = if x > HALF / 2.0 { Anchor::End } else { Anchor::Start };
        let beside = if anchor == Anchor::End { x - 6.0 } else { x + 6.0 };
        let label = format!("first block whose address wraps: {first}");
        plot.svg.text(beside, LINE_TOP + 9.0, anchor, "", &label);
    }
    for one in &shown {
        let y = if one.gap.is_finite() { scale.y(one.gap) } else { top - 14.0 };
        mark(&mut plot, step, one, y);
    }
    plot.finish()
}

fn mark(plot: &mut Plot, step: &StepBlocks, one: &BlockGap, y: f64) {
    let x = plot.x(u64::from(one.block.get()));
    let label = format!("{}: block {}, {} nats", one.request, one.block, number(one.gap));
    let red = format!("fill=\"{RED}\" fill-opacity=\"0.8\"");
    match step.kind(one) {
        Kind::Clean => plot.svg.circle(x, y, 3.0, "fill=\"#fff\" stroke=\"#111\"", &label),
        Kind::Bad => plot.svg.diamond(x, y, 5.0, &red, &label),
        Kind::Stale => {
            let d = format!("M{x:.1} {:.1}l5 9h-10z", y - 5.0);
            plot.svg.path(&d, &red, &label);
        }
        Kind::Collateral => {
            let style = "fill=\"#ffe3a3\" stroke=\"#111\" stroke-width=\"1.4\"";
            plot.svg.rect([x - 4.0, y - 4.0, 8.0, 8.0], style, &label);
        }
    }
}

/// Only what is drawn, each with its number.
fn legend(step: &StepBlocks, shown: &[BlockGap]) -> String {
    let bad = match step.first_wrapped {
        Some(_) => "\u{25c6} gap, a block past the threshold",
        None => "\u{25c6} gap",
    };
    let mut parts = Vec::new();
    if shown.len() < step.requests.len() {
        parts.push(format!("{} of {} requests", shown.len(), step.requests.len()));
    }
    for (kind, name) in [
        (Kind::Bad, bad),
        (Kind::Collateral, "\u{25a1} gap, every block below it: written over"),
        (Kind::Stale, "\u{25b2} gap, read a used block"),
        (Kind::Clean, "\u{25cb} no gap"),
    ] {
        match step.requests.iter().filter(|one| step.kind(one) == kind).count() {
            0 => {}
            n => parts.push(format!("{name} ({n})")),
        }
    }
    parts.join("   ")
}

fn thin(step: &StepBlocks) -> Vec<BlockGap> {
    let clean = |one: &&BlockGap| step.kind(one) == Kind::Clean;
    let bad = step.requests.iter().filter(|one| !clean(one)).take(MARKS_MAX);
    let mut shown: Vec<BlockGap> = bad.copied().collect();
    let room = MARKS_MAX - shown.len();
    let count = step.requests.iter().filter(clean).count();
    let every = count.div_ceil(room.max(1)).max(1);
    // The bad ones last: they lie on top.
    let kept = step.requests.iter().filter(clean).step_by(every).take(room);
    shown.splice(0..0, kept.copied());
    shown
}

impl StepBlocks {
    /// The blocks that the requests had, with the threshold and a margin: the part of the pool in
    /// which something is to be seen.
    fn range(&self) -> [u64; 2] {
        let blocks = self.requests.iter().map(|one| one.block).chain(self.first_wrapped);
        let blocks = blocks.map(|block| u64::from(block.get()));
        let low = blocks.clone().min().unwrap_or(0);
        let high = blocks.max().unwrap_or(0);
        let margin = (high - low) / 40 + 1;
        [low.saturating_sub(margin), high + margin]
    }

    fn kind(&self, one: &BlockGap) -> Kind {
        if one.gap <= self.floor {
            Kind::Clean
        } else if one.stale {
            Kind::Stale
        } else if self.first_wrapped.is_some_and(|first| one.block < first) {
            Kind::Collateral
        } else {
            Kind::Bad
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(block: u32, gap: f64) -> BlockGap {
        BlockGap {
            request: RequestId::new(12, 0, block),
            block: BlockId::new(block),
            gap,
            stale: false,
        }
    }

    fn step(first_wrapped: Option<u32>, requests: Vec<BlockGap>) -> StepBlocks {
        let first_wrapped = first_wrapped.map(BlockId::new);
        StepBlocks { step: Step::new(12), engine: None, first_wrapped, floor: 0.0, requests }
    }

    #[test]
    fn marks_tell_victims_apart() {
        let stale = BlockGap { stale: true, ..request(3, 1.0) };
        let requests = vec![request(9, 0.0), stale, request(1365, 2.0), request(1366, 3.0)];
        let with = step(Some(1366), requests.clone());
        let kinds: Vec<Kind> = with.requests.iter().map(|one| with.kind(one)).collect();
        assert_eq!(kinds, [Kind::Clean, Kind::Stale, Kind::Collateral, Kind::Bad]);
        let svg = draw(&with);
        for expect in [
            "first block whose address wraps: 1366",
            "s12.p0.r1365: block 1365, 2 nats",
            "every block below it: written over (1)",
            "\u{25cb} no gap (1)",
        ] {
            assert!(svg.contains(expect), "{expect}\n{svg}");
        }
        let without = step(None, requests);
        assert_eq!(without.kind(&without.requests[2]), Kind::Bad);
        assert!(!draw(&without).contains("wraps"));
    }

    #[test]
    fn many_requests_are_thinned_and_no_victim_is_lost() {
        let mut requests: Vec<_> = (0..10_000).map(|block| request(block, 0.0)).collect();
        requests[77].gap = f64::INFINITY;
        requests[78].gap = f64::NAN;
        let many = step(None, requests);
        let shown = thin(&many);
        assert!(shown.len() <= MARKS_MAX, "{}", shown.len());
        assert_eq!(shown.iter().filter(|one| !one.gap.is_finite()).count(), 2);
        let svg = draw(&many);
        assert!(svg.contains("of 10000 requests") && svg.contains("NaN, inf"));
        let bad = step(None, (0..2000).map(|block| request(block, 1.0)).collect());
        assert_eq!(thin(&bad).len(), MARKS_MAX);
        assert!(draw(&step(Some(9000), vec![request(0, 0.0)])).contains("</svg>"));
    }
}
