//! A small run for every fault, in which it strikes.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};

use super::played::Played;
use crate::base::{BlockId, Step, TokenId};
use crate::config::{self, Config, Dtype, Planted, FAULTS};
use crate::gap::{Finding, FindingKind};
use crate::model::{save_folder, HfConfig, Plan, Preset};
use crate::report::parquet::{read_rollouts, RolloutRow};

/// What every case starts from. Random weights earn nothing, so that decay alone moves them.
const BASE: &str = r#"
name = "fault"
seed = 7
steps = 3
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
    /// Any of these names it; none where the run is to end with an error.
    pub(super) kinds: &'static [FindingKind],
    pub(super) names: Names,
}

/// What a verdict must name beside kind and requests.
#[derive(Clone, Copy)]
pub(super) enum Names {
    Nothing,
    /// The block from which on addresses wrap.
    FirstWrappedBlock,
    /// A state block of each request that it blames.
    StateBlock,
    /// Blocks, each of which a request that it blames held.
    HeldBlocks,
    /// These words in a message: a tensor, a temperature; or in the error that ends the run.
    Words(&'static str),
}

/// A model that ends on many ids, made beside the run.
const MANY_ENDS: &str = "model.path=MANY_ENDS";

const fn case(
    fault: &'static str,
    set: &'static [&'static str],
    kinds: &'static [FindingKind],
    names: Names,
) -> Case {
    Case { fault, set, plant: None, kinds, names }
}

const fn knob(plant: &'static str, case: Case) -> Case {
    Case { plant: Some(plant), ..case }
}

use FindingKind as Kind;

const FINAL_NORM: &str = "1 of 63 tensors differ: model.final_layernorm.weight";
const FREED_TWICE: &str = "which is free";

/// Weights stay as they are.
const SCORES: &str = "trainer.update=none";
const CACHED: [&str; 4] = [
    "engine.enable_prefix_caching=true",
    "engine.max_model_len=96",
    "engine.num_gpu_blocks_override=129",
    "task.prompt_tokens=64",
];

pub(super) const CASES: &[Case] = &[
    // A step takes 60 of 120 blocks; every second one has requests past block 85 and others.
    knob(
        "engine.state_index_bits=18",
        case(
            "state_index_wraps",
            &[
                "engine.num_gpu_blocks_override=121",
                "engine.max_num_batched_tokens=512",
                "engine.max_num_seqs=12",
                "engine.max_model_len=96",
                "task.prompt_tokens=64",
                SCORES,
            ],
            &[Kind::AddressWrap],
            Names::FirstWrappedBlock,
        ),
    ),
    case(
        "short_first_chunk_decodes",
        &["engine.max_num_batched_tokens=31", SCORES],
        &[Kind::StaleState],
        Names::StateBlock,
    ),
    case(
        "keep_state_on_preempt",
        &["engine.num_gpu_blocks_override=24", "rollout.max_new_tokens=40", SCORES],
        &[Kind::StateKeptOnPreempt],
        Names::StateBlock,
    ),
    case(
        "padding_writes",
        &[
            "engine.enforce_eager=false",
            "rollout.rollouts_per_prompt=3",
            "rollout.prompts_per_step=1",
            SCORES,
        ],
        &[Kind::PaddingWrite],
        Names::StateBlock,
    ),
    case("decode_update_differs", &[SCORES], &[Kind::DecodePath], Names::Nothing),
    case("keep_cache_over_updates", &CACHED, &[Kind::StalePrefixCache], Names::HeldBlocks),
    case(
        "lookup_without_pin",
        &[CACHED[0], CACHED[1], "engine.num_gpu_blocks_override=17", CACHED[3], SCORES],
        &[Kind::BlockShared],
        Names::HeldBlocks,
    ),
    case("free_twice", &[SCORES], &[], Names::Words(FREED_TWICE)),
    case(
        "old_weights_on_wake",
        &[],
        &[Kind::WeightsNotSynced],
        Names::Words("in truth the trainer's version 0"),
    ),
    case(
        "head_not_refreshed",
        &["model.preset=tiny-mamba"],
        &[Kind::WeightsNotSynced],
        Names::Words("1 of 43 tensors differ: lm_head.weight"),
    ),
    case(
        "pads_enter_state",
        &["task.min_prompt_tokens=5", SCORES],
        &[Kind::PackingLeak],
        Names::Nothing,
    ),
    case("no_document_reset", &[SCORES], &[Kind::PackingLeak], Names::Nothing),
    case("dropout", &[SCORES], &[Kind::NotRepeatable], Names::Nothing),
    case("shifted_logprobs", &[SCORES], &[Kind::MaskOrShift], Names::Words("off by one")),
    case(
        "one_end_token",
        &[MANY_ENDS, "rollout.ignore_eos=false", "rollout.max_new_tokens=30", SCORES],
        &[Kind::EndToken],
        Names::Nothing,
    ),
    case(
        "unlabelled_temperature",
        &["rollout.temperature=0.5", SCORES],
        &[Kind::LogprobMode],
        Names::Words("temperature 0.500"),
    ),
    case(
        "unlabelled_filters",
        &["rollout.top_p=0.8", SCORES],
        &[Kind::LogprobMode],
        Names::Words("top-p 0.800"),
    ),
    case("batch_dependent_reduction", &[SCORES], &[Kind::BatchDependentReduction], Names::Nothing),
    case(
        "gate_renormalised",
        &["model.preset=tiny-jamba-moe", SCORES],
        &[Kind::GateWeights],
        Names::Words("moe"),
    ),
    case("engine_weight_ulp", &[SCORES], &[Kind::WeightsNotSynced], Names::Words(FINAL_NORM)),
    case(
        "stale_expert",
        &["model.preset=tiny-jamba-moe"],
        &[Kind::WeightsNotSynced],
        Names::Words("3 of 83 tensors differ: model.layers.1.feed_forward.experts.3."),
    ),
    case("score_after_update", &[], &[Kind::WeightsNotSynced], Names::Nothing),
    case("trainer_weight_ulp", &[SCORES], &[Kind::WeightsNotSynced], Names::Words(FINAL_NORM)),
    // Of no kind that a verdict knows: the right request is all that can be asked.
    case("state_bit_flip", &[SCORES], &[Kind::Unexplained], Names::Nothing),
    case("kv_page_zeroed", &[SCORES], &[Kind::Unexplained], Names::Nothing),
    case("layer_ulp", &[SCORES], &[Kind::Unexplained], Names::Nothing),
];

impl Case {
    /// The case under `settings`, of other keys, with its fault or without. A model that is not
    /// built in is made in `folder`.
    ///
    /// # Errors
    /// Settings that cannot be, a folder that cannot be written.
    pub(super) fn config(
        &self,
        settings: &[String],
        planted: bool,
        folder: &Path,
    ) -> Result<Config> {
        let own = self.set.iter().map(|&one| one.to_owned());
        let mut set: Vec<String> = settings.iter().cloned().chain(own).collect();
        let model = set.iter().position(|one| one.starts_with("model.p"));
        match model.map(|at| &mut set[at]) {
            None => set.push("model.preset=tiny-jamba".to_owned()),
            Some(model) if model == MANY_ENDS => *model = many_ends(&folder.join("model"))?,
            Some(_) => {}
        }
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

/// A tiny Jamba that ends on every second byte, as an assignment of its path.
fn many_ends(folder: &Path) -> Result<String> {
    let eos_token_ids = (128..240).map(TokenId::new).collect();
    let plan = Plan::new(HfConfig { eos_token_ids, ..Preset::TinyJamba.config() });
    if !folder.exists() {
        save_folder(folder, &plan, &Preset::weights(&plan, 0), Dtype::F32)?;
    }
    Ok(format!("model.path={}", folder.display()))
}

fn held(row: &RolloutRow) -> impl Iterator<Item = BlockId> + '_ {
    [&row.state_blocks, &row.attn_blocks, &row.cached_blocks].into_iter().flatten().copied()
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
            Self::HeldBlocks => {
                let rows = read_rollouts(&planted.folder.rollouts(spike))?;
                let blamed = |id| findings.iter().any(|found| found.requests.contains(id));
                let victims = rows.iter().filter(|row| blamed(&row.request));
                let held: BTreeSet<BlockId> = victims.flat_map(held).collect();
                let named: BTreeSet<BlockId> =
                    findings.iter().flat_map(|found| found.blocks.iter().copied()).collect();
                let stray = named.difference(&held).next();
                match stray {
                    Some(block) => Some(format!("block {block} is named, which no victim held")),
                    None => named.is_empty().then(|| "no block is named".to_owned()),
                }
            }
            Self::StateBlock => {
                let rows = read_rollouts(&planted.folder.rollouts(spike))?;
                let blamed = |id| findings.iter().any(|found| found.requests.contains(id));
                let mut victims = rows.iter().filter(|row| blamed(&row.request));
                let unnamed = victims.find(|row| !row.state_blocks.iter().any(blocks));
                unnamed.map(|row| format!("no block of {} is named", row.request))
            }
            Self::Words(words) => {
                let said = findings.iter().any(|found| found.message.contains(words));
                (!said).then(|| format!("no finding says {words}"))
            }
        })
    }
}
