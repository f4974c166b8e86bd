use serde::Deserialize;

use super::*;
use crate::base::Stream;

#[derive(Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

type Rows = Vec<Vec<f64>>;

#[derive(Deserialize)]
struct Case {
    name: String,
    rewards: Vec<f64>,
    group: usize,
    scale_advantages: bool,
    options: CaseOptions,
    advantages: Vec<f64>,
    mask: Vec<Vec<bool>>,
    new: Rows,
    old: Rows,
    reference: Option<Rows>,
    rollout: Option<Rows>,
    expected: Expected,
}

#[derive(Deserialize)]
struct CaseOptions {
    clip_low: f64,
    clip_high: f64,
    kl_coef: f64,
    importance_cap: Option<f64>,
    aggregation: String,
}

#[derive(Deserialize)]
struct Expected {
    loss: f64,
    policy_loss: f64,
    kl: Option<f64>,
    approx_kl: f64,
    ratio_mean: f64,
    ratio_min: f64,
    ratio_max: f64,
    clip_fraction_low: f64,
    clip_fraction_high: f64,
    importance: Option<ExpectedImportance>,
    advantage_mean: f64,
    advantage_std: f64,
    gradient: Rows,
}

#[derive(Deserialize)]
struct ExpectedImportance {
    mean: f64,
    uncapped_max: f64,
    fraction_capped: f64,
}

/// Sequences laid end to end with a gap of `gap` unused tokens before each.
struct Flat {
    spans: Vec<Range<usize>>,
    advantages: Vec<f64>,
    mask: Vec<bool>,
    new: Vec<f64>,
    old: Vec<f64>,
    reference: Option<Vec<f64>>,
    rollout: Option<Vec<f64>>,
}

fn lay<T: Copy>(rows: &[Vec<T>], gap: usize, filler: T) -> Vec<T> {
    rows.iter().flat_map(|row| vec![filler; gap].into_iter().chain(row.iter().copied())).collect()
}

impl Flat {
    fn new(case: &Case, gap: usize) -> Self {
        Self::of(case, 0..case.new.len(), gap)
    }

    fn of(case: &Case, rows: Range<usize>, gap: usize) -> Self {
        let mut end = 0;
        let spans = case.new[rows.clone()].iter().map(|row| {
            let start = end + gap;
            end = start + row.len();
            start..end
        });
        let fill = |rows_: &Rows| lay(&rows_[rows.clone()], gap, f64::NAN);
        Self {
            spans: spans.collect(),
            advantages: case.advantages[rows.clone()].to_vec(),
            mask: lay(&case.mask[rows.clone()], gap, true),
            new: fill(&case.new),
            old: fill(&case.old),
            reference: case.reference.as_ref().map(fill),
            rollout: case.rollout.as_ref().map(fill),
        }
    }

    fn chunk(&self) -> Chunk<'_> {
        Chunk {
            spans: &self.spans,
            advantages: &self.advantages,
            mask: &self.mask,
            new: &self.new,
            old: &self.old,
            reference: self.reference.as_deref(),
            rollout: self.rollout.as_deref(),
        }
    }
}

fn goldens() -> Vec<Case> {
    let text = include_str!("../../../tests/fixtures/grpo/goldens.json");
    let goldens: Goldens = serde_json::from_str(text).expect("the goldens read");
    assert_eq!(goldens.cases.len(), 15);
    goldens.cases
}

fn options(case: &Case) -> Options {
    Options {
        clip_low: case.options.clip_low,
        clip_high: case.options.clip_high,
        kl_coef: case.options.kl_coef,
        importance_cap: case.options.importance_cap,
        aggregation: match case.options.aggregation.as_str() {
            "token_mean" => LossAggregation::TokenMean,
            "sequence_mean" => LossAggregation::SequenceMean,
            other => panic!("no aggregation {other}"),
        },
    }
}

fn counts(case: &Case) -> Counts {
    let mut counts = Counts::default();
    case.mask.iter().for_each(|mask| counts.add(mask));
    counts
}

/// The loss of a whole case in one chunk.
fn whole(case: &Case, flat: &Flat) -> (Vec<f64>, Terms) {
    let mut loss = Loss::new(options(case), counts(case)).expect("tokens");
    let gradient = loss.add(&flat.chunk()).expect("finite inputs");
    (gradient, loss.finish())
}

/// torch and this crate both work in f64; 1e-9 leaves room for another exp and order of sums.
fn near(found: f64, wanted: f64, what: &str) {
    assert!((found - wanted).abs() <= 1e-9 * wanted.abs().max(1.0), "{what}: {found} for {wanted}");
}

#[test]
fn values_and_gradients_equal_torch() {
    for case in goldens() {
        let name = &case.name;
        let flat = Flat::new(&case, 2);
        let (gradient, terms) = whole(&case, &flat);
        let wanted = &case.expected;
        for (what, found, wanted) in [
            ("loss", terms.loss, wanted.loss),
            ("policy_loss", terms.policy_loss, wanted.policy_loss),
            ("approx_kl", terms.approx_kl, wanted.approx_kl),
            ("ratio_mean", terms.ratio_mean, wanted.ratio_mean),
            ("ratio_min", terms.ratio_min, wanted.ratio_min),
            ("ratio_max", terms.ratio_max, wanted.ratio_max),
            ("clip_fraction_low", terms.clip_fraction_low, wanted.clip_fraction_low),
            ("clip_fraction_high", terms.clip_fraction_high, wanted.clip_fraction_high),
            ("advantage_mean", terms.advantage_mean, wanted.advantage_mean),
            ("advantage_std", terms.advantage_std, wanted.advantage_std),
        ] {
            near(found, wanted, &format!("{name}: {what}"));
        }
        assert_eq!(terms.kl.is_some(), wanted.kl.is_some(), "{name}");
        near(terms.kl.unwrap_or(0.0), wanted.kl.unwrap_or(0.0), name);
        assert_eq!(terms.importance.is_some(), wanted.importance.is_some(), "{name}");
        if let (Some(found), Some(wanted)) = (terms.importance, &wanted.importance) {
            near(found.mean, wanted.mean, name);
            near(found.uncapped_max, wanted.uncapped_max, name);
            near(found.fraction_capped, wanted.fraction_capped, name);
        }
        for (index, (found, wanted)) in
            gradient.iter().zip(lay(&wanted.gradient, 2, 0.0)).enumerate()
        {
            near(*found, wanted, &format!("{name}: gradient {index}"));
        }
    }
}

#[test]
fn advantages_equal_torch() {
    for case in goldens() {
        let groups = case.rewards.chunks(case.group);
        let found: Vec<f64> = groups
            .flat_map(|group| crate::rollout::advantages(group, case.scale_advantages))
            .collect();
        assert_eq!(found.len(), case.advantages.len());
        for (found, wanted) in found.into_iter().zip(case.advantages) {
            near(found, wanted, &case.name);
        }
    }
}

#[test]
fn packing_into_chunks_changes_no_bit() {
    for case in goldens() {
        let (gradient, terms) = whole(&case, &Flat::new(&case, 0));
        let mut stream = Stream::new(11, "packing", 0);
        for _ in 0..10 {
            let mut loss = Loss::new(options(&case), counts(&case)).expect("tokens");
            let (mut start, mut pieces) = (0, Vec::new());
            while start < case.new.len() {
                let end = stream.integer(start as u64 + 1, case.new.len() as u64) as usize;
                let flat = Flat::of(&case, start..end, 0);
                pieces.extend(loss.add(&flat.chunk()).expect("finite inputs"));
                start = end;
            }
            assert_eq!((&pieces, &loss.finish()), (&gradient, &terms), "{}", case.name);
        }
    }
}

#[test]
fn gradients_equal_central_differences() {
    let step = 1e-6;
    for case in goldens() {
        let flat = Flat::new(&case, 0);
        let (gradient, _) = whole(&case, &flat);
        for (index, slope) in gradient.iter().enumerate() {
            let moved = |by: f64| {
                let mut moved = Flat::new(&case, 0);
                moved.new[index] += by;
                whole(&case, &moved).1.loss
            };
            // On policy nothing is near a clip bound; elsewhere the seeds keep every ratio farther
            // than `step` from one, so that the loss is smooth between both ends.
            let difference = (moved(step) - moved(-step)) / (2.0 * step);
            // Rounding leaves 1e-16 / step, curvature step squared.
            assert!((slope - difference).abs() <= 1e-9, "{}: {slope}, {difference}", case.name);
        }
    }
}

/// One sequence of one token, on the default clip bounds.
fn single(new: f64, old: f64, advantage: f64) -> Result<(f64, Terms), TrainerError> {
    let options = Options {
        clip_low: 0.2,
        clip_high: 0.2,
        kl_coef: 0.0,
        importance_cap: None,
        aggregation: LossAggregation::TokenMean,
    };
    let span = 0..1;
    let chunk = Chunk {
        spans: std::slice::from_ref(&span),
        advantages: &[advantage],
        mask: &[true],
        new: &[new],
        old: &[old],
        reference: None,
        rollout: Some(&[f64::NAN]),
    };
    let mut loss = Loss::new(options, Counts { tokens: 1, sequences: 1 })?;
    let gradient = loss.add(&chunk)?;
    Ok((gradient[0], loss.finish()))
}

#[test]
fn an_overflowing_ratio_is_kept() {
    let (gradient, terms) = single(-0.1, -1000.0, 0.0).expect("finite inputs");
    assert_eq!((gradient, terms.loss, terms.ratio_max), (0.0, 0.0, f64::INFINITY));
    let (gradient, terms) = single(-0.1, -1000.0, 1.0).expect("finite inputs");
    assert_eq!((gradient, terms.loss, terms.clip_fraction_high), (0.0, -1.2, 1.0));
    let (gradient, terms) = single(-0.1, -1000.0, -1.0).expect("finite inputs");
    assert_eq!((gradient, terms.loss), (f64::INFINITY, f64::INFINITY));
}

#[test]
fn what_is_not_defined_is_refused() {
    let error = single(f64::NAN, -1.0, 1.0).expect_err("a NaN");
    assert_eq!(
        error.to_string(),
        "the new log-probability of token 0 in sequence 0 of its chunk is NaN: the loss needs \
         finite numbers; look for the step's non-finite tokens in its record"
    );
    assert!(single(-1.0, f64::NEG_INFINITY, 1.0).is_err());
    assert!(single(-1.0, -1.0, f64::INFINITY).is_err());

    let mut counts = Counts::default();
    counts.add(&[false; 3]);
    counts.add(&[]);
    let options = options(&goldens()[0]);
    let error = Loss::new(options, counts).expect_err("no tokens");
    assert!(matches!(error, TrainerError::NoTokens), "{error}");
}
