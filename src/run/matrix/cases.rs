//! A small run for every fault, in which it strikes.

use anyhow::{Context, Result};

use super::played::Played;
use crate::base::{BlockId, Step};
use crate::config::{self, Config, Planted, FAULTS};
use crate::gap::{Finding, FindingKind};
use crate::report::parquet::read_rollouts;

/// What every case starts from. Random weights earn nothing, so that decay alone moves them.
const BASE: &str = r#"
name = "fault"
seed = 7
steps = 3
model.preset = "tiny-jamba"
check.evidence = true

[engine]
num_gpu_blocks_override = 97
max_num_batched_tokens = 64
max_num_seqs = 16
max_model_len = 64

[rollout]
prompts_per_step = 3
rollouts_per_prompt = 4
max_new_tokens = 8
ignore_eos = true

[task]
kind = "arithmetic"
max_operand = 99
prompt_tokens = 10

[trainer]
learning_rate = 1e-2
weight_decay = 0.1
"#;

/// One fault, where it shows.
pub(super) struct Case {
    /// In the catalogue.
    pub(super) fault: &'static str,
    /// Beside [`BASE`], with the fault and without.
    pub(super) set: &'static [&'static str],
    /// For a fault that an ordinary key plants: the value here, where the catalogue's is not it.
    plant: Option<&'static str>,
    /// Any of these names it.
    pub(super) kinds: &'static [FindingKind],
    pub(super) names: Names,
}

/// What a verdict must name beside kind and requests.
#[derive(Clone, Copy)]
pub(super) enum Names {
    Nothing,
    /// The block from which on addresses wrap.
    FirstWrappedBlock,
    /// The state blocks of each request that it blames.
    StateBlocks,
    /// These words in its message: a tensor, a temperature.
    Words(&'static str),
}

const fn case(
    fault: &'static str,
    set: &'static [&'static str],
    kinds: &'static [FindingKind],
    names: Names,
) -> Case {
    Case { fault, set, plant: None, kinds, names }
}

use FindingKind as Kind;

pub(super) const CASES: &[Case] = &[
    Case {
        plant: Some("engine.state_index_bits=17"),
        ..case(
            "state_index_wraps",
            &["engine.num_gpu_blocks_override=65", "steps=4", "trainer.update=none"],
            &[Kind::AddressWrap],
            Names::FirstWrappedBlock,
        )
    },
    case(
        "short_first_chunk_decodes",
        &["engine.max_num_batched_tokens=31", "trainer.update=none"],
        &[Kind::StaleState],
        Names::StateBlocks,
    ),
    case(
        "keep_state_on_preempt",
        &["engine.num_gpu_blocks_override=24", "rollout.max_new_tokens=40", "trainer.update=none"],
        &[Kind::StateKeptOnPreempt],
        Names::StateBlocks,
    ),
    case(
        "padding_writes",
        &["engine.enforce_eager=false", "engine.max_num_seqs=11", "trainer.update=none"],
        &[Kind::PaddingWrite],
        Names::StateBlocks,
    ),
    case("decode_update_differs", &["trainer.update=none"], &[Kind::DecodePath], Names::Nothing),
    case("old_weights_on_wake", &[], &[Kind::WeightsNotSynced], Names::Words("embed_tokens")),
    case(
        "head_not_refreshed",
        &["model.preset=tiny-mamba"],
        &[Kind::WeightsNotSynced],
        Names::Words("lm_head.weight"),
    ),
    case("engine_weight_ulp", &[], &[Kind::WeightsNotSynced], Names::Words("norm")),
    case("trainer_weight_ulp", &[], &[Kind::WeightsNotSynced], Names::Words("norm")),
    case("score_after_update", &[], &[Kind::WeightsNotSynced], Names::Nothing),
    case("state_bit_flip", &["trainer.update=none"], &[Kind::Unexplained], Names::Nothing),
    case("kv_page_zeroed", &["trainer.update=none"], &[Kind::Unexplained], Names::Nothing),
    case("layer_ulp", &["trainer.update=none"], &[Kind::Unexplained], Names::Nothing),
];

impl Case {
    pub(super) fn config(&self, planted: bool) -> Result<Config> {
        self.config_with(&[], planted)
    }

    /// With these assignments too, of other keys.
    pub(super) fn config_with(&self, settings: &[String], planted: bool) -> Result<Config> {
        let own = self.set.iter().map(|&one| one.to_owned());
        let mut set: Vec<String> = settings.iter().cloned().chain(own).collect();
        if planted {
            let entry = FAULTS.iter().find(|entry| entry.name == self.fault);
            let entry = entry.with_context(|| format!("{} is not in the catalogue", self.fault))?;
            let assignment = match (self.plant, entry.planted) {
                (Some(own), _) => own.to_owned(),
                (None, Planted::Knob(key, value)) => format!("{key}={value}"),
                (None, _) => entry.how().replace(" = ", "="),
            };
            set.push(assignment);
        }
        Ok(config::parse(BASE, "the case", &set)?)
    }
}

impl Names {
    /// What the findings of a step do not name.
    pub(super) fn complaint(
        self,
        findings: &[Finding],
        planted: &Played,
        spike: Step,
    ) -> Result<Option<String>> {
        let blocks = |block: &BlockId| findings.iter().any(|found| found.blocks.contains(block));
        Ok(match self {
            Self::Nothing => None,
            Self::FirstWrappedBlock => {
                let first =
                    planted.first_wrapped_block.context("the pool reaches no such block")?;
                let first = BlockId::new(u32::try_from(first)?);
                (!blocks(&first)).then(|| format!("block {first} is not named"))
            }
            Self::StateBlocks => {
                let rows = read_rollouts(&planted.folder.rollouts(spike))?;
                let blamed = |id| findings.iter().any(|found| found.requests.contains(id));
                let held = rows
                    .iter()
                    .filter(|row| blamed(&row.request))
                    .flat_map(|row| row.state_blocks.iter().copied());
                let missing = held.filter(|block| !blocks(block)).next();
                missing.map(|block| format!("block {block} of a victim is not named"))
            }
            Self::Words(words) => {
                let said = findings.iter().any(|found| found.message.contains(words));
                (!said).then(|| format!("no finding says {words}"))
            }
        })
    }
}
