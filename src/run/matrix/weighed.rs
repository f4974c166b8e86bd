//! A blind verdict held against what is true.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;

use super::super::told;
use super::cases::{Case, Names};
use super::played::Played;
use super::truth::{damage, Damage};
use crate::base::{RequestId, Step};
use crate::config::Config;
use crate::gap::{Finding, FindingKind};

/// What came of a case.
#[derive(Debug)]
pub(super) struct Weighed {
    /// The run without the fault had a spike or a finding.
    pub(super) false_alarm: bool,
    /// The first step that came out another way than without the fault.
    pub(super) touched: Option<Step>,
    /// The first step from there on that something was said of; where nothing was touched, the
    /// first of all.
    pub(super) told: Option<Step>,
    /// The run with the fault ended in the error that the case asks for.
    pub(super) stopped: bool,
    /// Of that step.
    pub(super) found: Vec<FindingKind>,
    /// What is wrong with the verdict, or with the case.
    pub(super) complaint: Option<String>,
    /// All that was said is that the right requests are wrong for no known reason.
    pub(super) is_unexplained: bool,
}

impl Weighed {
    pub(super) fn is_named(&self) -> bool {
        self.complaint.is_none()
    }
}

/// Runs a case with its fault and without, and weighs what another process says of the first.
pub(super) fn weigh(case: &Case, clean: &Config, planted: &Config, out: &Path) -> Result<Weighed> {
    let clean = Played::of(clean, out.join("clean"))?;
    let planted = Played::of(planted, out.join("planted"));
    let mut weighed = Weighed {
        false_alarm: !clean.told.is_empty(),
        touched: None,
        told: None,
        stopped: false,
        found: Vec::new(),
        complaint: None,
        is_unexplained: false,
    };
    let planted = match (planted, case.names) {
        (Err(error), Names::Words(words)) if case.kinds.is_empty() => {
            let error = told(&error);
            weighed.stopped = error.contains(words);
            weighed.complaint = (!error.contains(words)).then_some(error);
            return Ok(weighed);
        }
        (planted, _) => planted?,
    };
    let Some(damage) = damage(&planted.folder, &clean.folder, clean.steps)? else {
        weighed.told = planted.told.first().copied();
        weighed.complaint = Some("the fault touched nothing".to_owned());
        return Ok(weighed);
    };
    weighed.touched = Some(damage.step);
    let Some(&told) = planted.told.iter().find(|&&step| step >= damage.step) else {
        weighed.complaint =
            Some(format!("nothing was said, though step {} was touched", damage.step));
        return Ok(weighed);
    };
    weighed.told = Some(told);
    let mut findings = planted.judged()?;
    findings.retain(|found| found.step == told);
    weighed.found = findings.iter().map(|found| found.kind).collect();
    let false_word = false_word(case, &findings, &damage, told);
    let only_unexplained = findings.iter().all(|found| found.kind == FindingKind::Unexplained);
    weighed.is_unexplained = false_word.is_none()
        && only_unexplained
        && !findings.is_empty()
        && too_few(&findings, &damage).is_none();
    weighed.complaint = match false_word.or_else(|| too_little(case, &findings, &damage, told)) {
        None => case.names.complaint(&findings, &planted, told)?,
        said => said,
    };
    Ok(weighed)
}

/// A culprit that is none, or a request that nothing has touched.
fn false_word(case: &Case, findings: &[Finding], damage: &Damage, told: Step) -> Option<String> {
    let may_be = |found: &&Finding| {
        case.kinds.contains(&found.kind) || found.kind == FindingKind::Unexplained
    };
    if let Some(other) = findings.iter().find(|found| !may_be(found)) {
        return Some(format!("{}: {}", other.kind.name(), other.message));
    }
    // Later steps differ from the twin's for what earlier ones led to: there nobody is innocent.
    if told > damage.step {
        return Some(format!("step {} was touched, and first told of is step {told}", damage.step));
    }
    let mut blamed = blamed(findings).into_iter();
    let innocent = blamed.find(|request| !damage.requests.contains(request))?;
    Some(format!("{innocent} is blamed, which nothing has touched"))
}

fn too_little(case: &Case, findings: &[Finding], damage: &Damage, told: Step) -> Option<String> {
    if findings.is_empty() {
        return Some(format!("the judge found nothing in step {told}"));
    }
    if let Some(other) = findings.iter().find(|found| !case.kinds.contains(&found.kind)) {
        return Some(format!("{}: {}", other.kind.name(), other.message));
    }
    too_few(findings, damage)
}

fn too_few(findings: &[Finding], damage: &Damage) -> Option<String> {
    let all: u64 = findings.iter().map(|found| found.requests_total).sum();
    let touched = damage.requests.len() as u64;
    (all < touched).then(|| format!("{all} requests are blamed, {touched} were touched"))
}

fn blamed(findings: &[Finding]) -> BTreeSet<RequestId> {
    findings.iter().flat_map(|found| found.requests.iter().copied()).collect()
}
