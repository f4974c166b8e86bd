//! Planted faults: what each breaks, what is seen of it, and which lever hides it.
//!
//! A row id such as K03 names a public report of a gap between rollout and trainer. Some reports
//! are planted by name, some are what an ordinary knob does, some live in one operation and some
//! only in what others dumped; [`FAULTS`] has them all.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A fault that a configuration plants by name. Each lives beside what it breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// A preempted request gives up its attention blocks alone; its first row after it resumes
    /// starts from the state that it left.
    KeepStateOnPreempt,
    /// The padding rows of a captured batch size have no block of their own: they write their state
    /// to the first live row's.
    PaddingWrites,
    /// A decode row whose token's id is a multiple of [`Fault::DECODE_EVERY`] starts from a
    /// convolution window of zeros. It goes by nothing but the token, as a kernel's wrong
    /// arithmetic goes by nothing but its input: the same tokens decoded again anywhere are wrong
    /// again.
    DecodeUpdateDiffers,
    /// Blocks of the prefix cache stay valid when the weights change.
    KeepCacheOverUpdates,
    /// A block found in the prefix cache is held only from the end of the step on: until then
    /// another request may be given it.
    LookupWithoutPin,
    /// A request that is done gives its blocks back a second time.
    FreeTwice,
    /// The engine keeps the weights of its first hand-over and reports the versions of later ones.
    OldWeightsOnWake,
    /// A tied head is a copy that the engine makes at the first hand-over and never again.
    HeadNotRefreshed,
    /// The engine divides a token's expert weights by their sum.
    GateRenormalised,
    /// The engine keeps the first hand-over's weights of the last expert of the first layer that
    /// has experts.
    StaleExpert,
    /// Once, at the first engine step from [`Fault::STRIKE_STEP`] on with decode rows: one bit of
    /// the last decode row's ssm state in the first Mamba layer.
    StateBitFlip,
    /// At the same moment as [`Self::StateBitFlip`]: the last decode row's first block in the first
    /// attention layer becomes zeros.
    KvPageZeroed,
    /// Every decode row of a step's first request leaves the middle layer with its first element
    /// one unit in the last place higher.
    LayerUlp,
    /// The engine's first weight of the final norm is moved by one unit in the last place.
    EngineWeightUlp,
    /// The trainer recomputes logprobs after its update instead of before.
    ScoreAfterUpdate,
    /// The trainer's first weight of the final norm is moved by one unit in the last place.
    TrainerWeightUlp,
    /// Scoring fills sequences up in front to the longest of their pack, and Mamba layers take the
    /// padding for tokens.
    PadsEnterState,
    /// Scoring's Mamba layers take a whole pack for one sequence.
    NoDocumentReset,
    /// Scoring counts a sequence's positions from where its padding would begin.
    PositionOffset,
    /// Scoring drops a tenth of the embedded values, others in every pass.
    Dropout,
    /// The trainer's log-probabilities stand one place to the left.
    ShiftedLogprobs,
    /// The trainer's side knows the first of the model's end ids alone, and masks completions that
    /// do not end in it.
    OneEndToken,
    /// Scoring sums a softmax's normaliser in as many parts as there are sequences in its pack.
    BatchDependentReduction,
    /// The engine records log-probabilities after temperature, whatever its mode says.
    UnlabelledTemperature,
    /// The engine records log-probabilities over what the filters keep, whatever its mode says.
    UnlabelledFilters,
}

impl Fault {
    /// See [`Self::DecodeUpdateDiffers`]. About half of all completions of eight tokens from a few
    /// hundred have such a token before their last.
    pub const DECODE_EVERY: u32 = 11;
    /// See [`Self::StateBitFlip`]. Counted over the engine's life.
    pub const STRIKE_STEP: u64 = 4;

    /// As in a configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        let own = |entry: &&FaultEntry| entry.planted == Planted::Fault(self);
        FAULTS.iter().find(own).expect("every fault is in the table").name
    }
}

/// Who is at fault, so that a verdict can be held against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Engine,
    Trainer,
    /// What goes from one to the other: weights, tokens, meanings of numbers.
    HandOver,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Engine => "engine",
            Self::Trainer => "trainer",
            Self::HandOver => "hand-over",
        })
    }
}

/// How a fault comes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// By its name in `trainer.faults` where the trainer is at fault, else in `engine.faults`.
    Fault(Fault),
    /// By a key of ordinary meaning and a value of it.
    Knob(&'static str, &'static str),
    /// In a variant of one operation, which only a test has.
    Operation,
    /// In records that others wrote: `gapscope audit` finds it.
    Dump,
}

/// One row of the catalogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultEntry {
    /// For faults that are planted by name, this name.
    pub name: &'static str,
    pub side: Side,
    /// Of the report; empty where there is none.
    pub row: &'static str,
    pub planted: Planted,
    pub breaks: &'static str,
    pub symptom: &'static str,
    /// The lever with which the symptom goes away.
    pub hidden_by: &'static str,
}

impl FaultEntry {
    /// What plants it.
    #[must_use]
    pub fn how(&self) -> String {
        match (self.planted, self.side) {
            (Planted::Fault(_), Side::Trainer) => format!("trainer.faults = [\"{}\"]", self.name),
            (Planted::Fault(_), _) => format!("engine.faults = [\"{}\"]", self.name),
            (Planted::Knob(key, value), _) => format!("{key} = {value}"),
            (Planted::Operation, _) => "a test of one operation".to_owned(),
            (Planted::Dump, _) => "a dump, for gapscope audit".to_owned(),
        }
    }

    const fn is_named_in(&self, trainer: bool) -> bool {
        matches!(self.planted, Planted::Fault(_)) && matches!(self.side, Side::Trainer) == trainer
    }
}

const fn count(trainer: bool) -> usize {
    let (mut found, mut at) = (0, 0);
    while at < FAULTS.len() {
        found += FAULTS[at].is_named_in(trainer) as usize;
        at += 1;
    }
    found
}

const fn names<const N: usize>(trainer: bool) -> [&'static str; N] {
    let (mut all, mut found, mut at) = ([""; N], 0, 0);
    while at < FAULTS.len() {
        if FAULTS[at].is_named_in(trainer) {
            all[found] = FAULTS[at].name;
            found += 1;
        }
        at += 1;
    }
    all
}

/// What `engine.faults` takes.
pub(super) const ENGINE_FAULTS: &[&str] = &names::<{ count(false) }>(false);
/// What `trainer.faults` takes.
pub(super) const TRAINER_FAULTS: &[&str] = &names::<{ count(true) }>(true);

macro_rules! catalogue {
    ($($row:literal $name:literal $side:ident, $planted:expr,
        $breaks:literal, $symptom:literal, $hidden_by:literal;)*) => {
        /// Every fault, by row, then those without one.
        pub const FAULTS: &[FaultEntry] = &[$(FaultEntry {
            name: $name,
            side: Side::$side,
            row: $row,
            planted: $planted,
            breaks: $breaks,
            symptom: $symptom,
            hidden_by: $hidden_by,
        }),*];
    };
}

use Planted::{Dump, Knob, Operation};

catalogue! {
    "K01" "state_index_wraps" Engine, Knob("engine.state_index_bits", "32"),
        "The product slot x stride of the prefill scan's state wraps.",
        "Requests in state blocks from 2^bits / stride on have a gap, others none.",
        "engine.state_index_bits = 64";
    "K02" "short_first_chunk_decodes" Engine, Knob("engine.batch_split", "\"scheduled_tokens\""),
        "A first chunk of one token runs as a decode row.",
        "Requests that began with one token read what a previous owner left in their block.",
        "engine.batch_split = \"is_prefilling\"";
    "K03" "keep_state_on_preempt" Engine, Planted::Fault(Fault::KeepStateOnPreempt),
        "A preempted request keeps its state block and starts again from what is in it.",
        "Requests with preemptions have a gap, from the first token after one on.",
        "engine.num_gpu_blocks_override, high enough that nobody is preempted";
    "K04" "decay_from_chunk_start" Engine, Operation,
        "The decay of a sequence that begins inside a kernel's chunk is summed from the chunk's.",
        "Second and later sequences of a batch that resume from a state are wrong.",
        "one sequence a batch";
    "K05" "padding_writes" Engine, Planted::Fault(Fault::PaddingWrites),
        "Padding rows of a captured batch size write their state to a live request's block.",
        "Only the owner of the first row's block has a gap, from steps with padding rows on.",
        "engine.enforce_eager = true";
    "K06" "first_column_after_drafts" Engine, Operation,
        "A step without drafts reads the state after the first accepted token, not the last.",
        "Sequences go wrong after a step that accepted two or more tokens.",
        "no draft tokens";
    "K07" "decode_update_differs" Engine, Planted::Fault(Fault::DecodeUpdateDiffers),
        "The one-token update disagrees with the engine's own prefill for one token id in eleven.",
        "decode differs from prefill after such a token, prefill equals trainer.",
        "engine.force_prefill = true";
    "K08" "fast_numerics" Engine, Knob("engine.numerics", "\"fast\""),
        "Prefill and decode round differently, as they may.",
        "A small gap over all requests, within the measured floor.",
        "engine.numerics = \"invariant\"";
    "K09" "keep_cache_over_updates" Engine, Planted::Fault(Fault::KeepCacheOverUpdates),
        "Blocks that older weights filled are found in the prefix cache after an update.",
        "Requests behind a cached prefix have a gap from the first token after it, others none.",
        "engine.enable_prefix_caching = false";
    "K10" "lookup_without_pin" Engine, Planted::Fault(Fault::LookupWithoutPin),
        "A block found in the prefix cache is handed to another request in the same step.",
        "Whoever found it has a gap; the block has two owners.",
        "engine.enable_prefix_caching = false, or blocks enough";
    "K10" "free_twice" Engine, Planted::Fault(Fault::FreeTwice),
        "A request gives its blocks back twice.",
        "The run ends with an error that names the block.",
        "none";
    "K11" "old_weights_on_wake" HandOver, Planted::Fault(Fault::OldWeightsOnWake),
        "The engine wakes with its first weights and reports the version of the latest.",
        "No gap until the first update; then every request, and fingerprints differ.",
        "trainer.update = \"none\"";
    "K12" "head_not_refreshed" HandOver, Planted::Fault(Fault::HeadNotRefreshed),
        "A tied head is a copy that updates do not reach.",
        "Every request from the first update on; the fingerprint of lm_head.weight alone differs.",
        "trainer.update = \"none\"";
    "K13" "pads_enter_state" Trainer, Planted::Fault(Fault::PadsEnterState),
        "Padding in front of a sequence feeds convolution and scan.",
        "A gap in all but the longest sequences of a pack; none where one is scored alone.",
        "trainer.max_tokens_per_chunk = 1";
    "K14" "no_document_reset" Trainer, Planted::Fault(Fault::NoDocumentReset),
        "Convolution and scan run on from one packed sequence into the next.",
        "A gap in all but the first sequences of a pack; none where the trainer scores one alone.",
        "trainer.max_tokens_per_chunk = 1";
    "K15" "position_offset" Trainer, Planted::Fault(Fault::PositionOffset),
        "Positions are counted from where the padding begins.",
        "Rotary models are off by less than 1e-5, models without positions not at all.",
        "trainer.max_tokens_per_chunk = 1";
    "K16" "dropout" Trainer, Planted::Fault(Fault::Dropout),
        "Dropout is on while the trainer scores.",
        "Every request has a gap, and the same batch scored twice has two answers.",
        "none of the engine's knobs";
    "K17" "shifted_logprobs" Trainer, Planted::Fault(Fault::ShiftedLogprobs),
        "The trainer's log-probabilities stand one place to the left.",
        "Large gaps at any load; none at a lag of one.",
        "none of the engine's knobs";
    "K17" "off_by_one" Trainer, Dump,
        "Mask and trainer's log-probabilities stand one place to the left.",
        "Large gaps at any load; none at a lag of one.",
        "none of the engine's knobs";
    "K18" "one_end_token" Trainer, Planted::Fault(Fault::OneEndToken),
        "The trainer's side knows one of several end ids and masks the rest as cut off.",
        "No gap; completions that the engine ended count for nothing.",
        "rollout.ignore_eos = true";
    "K19" "unlabelled_temperature" HandOver, Planted::Fault(Fault::UnlabelledTemperature),
        "The engine's log-probabilities are after temperature and said to be raw.",
        "A gap whose sign follows the token's rank; a refit finds the temperature.",
        "rollout.temperature = 1";
    "K19" "temperature_on_one_side" HandOver, Dump,
        "The engine's log-probabilities are from before temperature, the trainer's from after.",
        "A gap whose sign follows the token's rank; a refit finds the temperature.",
        "rollout.temperature = 1";
    "K20" "unlabelled_filters" HandOver, Planted::Fault(Fault::UnlabelledFilters),
        "The engine's log-probabilities are over the kept tokens and said to be raw.",
        "All kept tokens of a place differ by the log of the kept mass.",
        "rollout.top_p = 1, top_k = 0, min_p = 0";
    "K20" "filters_on_one_side" HandOver, Dump,
        "The engine renormalises over the kept tokens, the trainer over all.",
        "All kept tokens of a place differ by the log of the kept mass.",
        "rollout.top_p = 1, top_k = 0, min_p = 0";
    "K21" "tokens_told_as_text" HandOver, Dump,
        "Text was tokenised again: the two sides' ids differ.",
        "The first differing id is named and no gap is computed.",
        "token ids from end to end";
    "K22" "no_value_told_as_a_number" HandOver, Dump,
        "A sentinel, a null or a NaN stands for a log-probability.",
        "Each is counted by its kind and enters no mean.",
        "finite log-probabilities";
    "K23" "bare_infinity" HandOver, Dump,
        "A model's config or a dump holds a bare Infinity or NaN, which JSON has no word for.",
        "It is read, or named with line and field.",
        "files of strict JSON";
    "K24" "batch_dependent_reduction" Trainer, Planted::Fault(Fault::BatchDependentReduction),
        "The order in which the trainer sums a normaliser follows the size of its pack.",
        "Gaps of a few last places; the same batch again has none, one sequence alone has none.",
        "trainer.max_tokens_per_chunk = 1";
    "K25" "gate_renormalised" Engine, Planted::Fault(Fault::GateRenormalised),
        "The weights of a token's experts are divided by their sum; the experts are the same.",
        "Every request of a model with experts, from the first layer with experts on.",
        "a model without experts";
    "" "engine_weight_ulp" HandOver, Planted::Fault(Fault::EngineWeightUlp),
        "The engine's first weight of the final norm is one unit in the last place off.",
        "The smallest gap that there is, and one tensor's fingerprint differs.",
        "none";
    "" "stale_expert" HandOver, Planted::Fault(Fault::StaleExpert),
        "One expert of the engine keeps its first weights.",
        "A gap from the first update on, for tokens that go to it; its tensors differ.",
        "trainer.update = \"none\"";
    "" "state_bit_flip" Engine, Planted::Fault(Fault::StateBitFlip),
        "One bit of one request's recurrent state flips, once.",
        "One request has a gap, from one token on.",
        "engine.force_prefill = true";
    "" "kv_page_zeroed" Engine, Planted::Fault(Fault::KvPageZeroed),
        "One attention page of one request becomes zeros, once.",
        "One request has a gap, from one token on.",
        "engine.force_prefill = true";
    "" "layer_ulp" Engine, Planted::Fault(Fault::LayerUlp),
        "One layer's output for one request is one unit in the last place off.",
        "The smallest gap that there is, of one request.",
        "engine.force_prefill = true";
    "" "score_after_update" Trainer, Planted::Fault(Fault::ScoreAfterUpdate),
        "The trainer scores after its update.",
        "Every request has a gap in steps whose update moved the weights.",
        "trainer.update = \"none\"";
    "" "trainer_weight_ulp" Trainer, Planted::Fault(Fault::TrainerWeightUlp),
        "The trainer's first weight of the final norm is one unit in the last place off.",
        "The smallest gap that there is, and one tensor's fingerprint differs.",
        "none";
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, KEYS};
    use super::*;

    #[test]
    fn names_in_the_table_are_the_names_in_files() {
        for entry in FAULTS {
            if let Planted::Fault(fault) = entry.planted {
                assert_eq!(serde_json::to_value(fault).unwrap(), entry.name);
                assert_eq!(fault.name(), entry.name);
            }
            let same = FAULTS.iter().filter(|other| other.name == entry.name);
            assert_eq!(same.count(), 1, "{}", entry.name);
        }
    }

    #[test]
    fn keys_take_every_fault_of_their_side_and_no_other() {
        for entry in FAULTS {
            let takes = |key: &str| {
                let key = KEYS.iter().find(|one| one.name == key).expect("a key");
                matches!(key.kind, Kind::SomeOf(names) if names.contains(&entry.name))
            };
            let is_fault = matches!(entry.planted, Planted::Fault(_));
            let is_trainer = entry.side == Side::Trainer;
            assert_eq!(takes("trainer.faults"), is_fault && is_trainer, "{}", entry.name);
            assert_eq!(takes("engine.faults"), is_fault && !is_trainer, "{}", entry.name);
            if let Planted::Knob(key, _) = entry.planted {
                assert!(KEYS.iter().any(|one| one.name == key), "{key}");
            }
        }
    }

    #[test]
    fn rows_come_in_order_and_the_rest_after_them() {
        let rows: Vec<&str> = FAULTS.iter().map(|entry| entry.row).collect();
        let with_row = rows.iter().take_while(|row| !row.is_empty()).count();
        assert!(rows[..with_row].is_sorted(), "{rows:?}");
        assert!(rows[with_row..].iter().all(|row| row.is_empty()), "{rows:?}");
    }
}
