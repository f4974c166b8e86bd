//! Every lever flips its symptom.

use std::collections::BTreeSet;
use std::path::Path;

use gapscope::base::RequestId;
use gapscope::config::Dtype;
use gapscope::gap::FindingKind::{self, AddressWrap, StaleState};
use gapscope::model::{save_folder, Plan, Preset};

use super::{BEFORE_A_LONGER_ROW, IMPOSTER, ONE_TOKEN_ROWS, WRAP};
use crate::common::play::{experiment, Played};

/// What a run shows.
#[derive(Clone, Copy)]
enum Symptom {
    /// Spikes at these steps, each with one finding of this kind.
    Present(&'static [u64], FindingKind),
    /// No gap, though requests met what makes one: a wrapped block, or a first chunk decoded.
    Silent,
    /// The same, and only because no block was used a second time.
    FirstLap,
    /// No gap, and nothing that could make one.
    Gone,
}
use Symptom::{FirstLap, Gone, Present, Silent};

#[test]
fn every_control_flips_its_symptom() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let attention_only = attention_only(&parent.path().join("attention-only"));
    let rows: [(&str, &[&str], Symptom); 37] = [
        (WRAP, &[], Present(&[2, 4], AddressWrap)),
        (WRAP, &["engine.state_index_bits=64"], Gone),
        // Low blocks come back again and again.
        (WRAP, &["engine.free_list=lifo"], Gone),
        // A step takes half of a pool, and each the same half.
        (WRAP, &["engine.sleep=drop_pool"], Gone),
        (WRAP, &["engine.sleep=keep_pool"], Present(&[2, 4], AddressWrap)),
        // Ids up to 85, the last that 18 bits reach.
        (WRAP, &["engine.num_gpu_blocks_override=86"], Gone),
        (WRAP, &["engine.gpu_memory_utilization=0.6"], Gone),
        // A step takes the whole pool.
        (WRAP, &["rollout.rollouts_per_prompt=8"], Present(&[1, 2, 3, 4], AddressWrap)),
        // The first token comes from the prefill, which had its state at hand.
        (WRAP, &["rollout.max_new_tokens=1"], Silent),
        // Every load wraps as the store did.
        (WRAP, &["engine.force_prefill=true"], Silent),
        // Slots are 64 bits wide in the scan that keeps states at block ends.
        (WRAP, &["engine.enable_prefix_caching=true"], Gone),
        // The other bug's levers.
        (WRAP, &["engine.batch_split=scheduled_tokens"], Present(&[2, 4], AddressWrap)),
        (WRAP, &["engine.enable_chunked_prefill=false"], Present(&[2, 4], AddressWrap)),
        (IMPOSTER, &[], Present(&[3, 4], StaleState)),
        (IMPOSTER, &["engine.batch_split=computed_tokens"], Gone),
        (IMPOSTER, &["engine.batch_split=is_prefilling"], Gone),
        (IMPOSTER, &["engine.force_prefill=true"], Gone),
        (IMPOSTER, &["engine.enable_chunked_prefill=false"], Gone),
        (IMPOSTER, &["engine.max_num_batched_tokens=36"], Gone),
        (IMPOSTER, &["engine.max_num_batched_tokens=38"], Gone),
        // Prompts are shorter than a block: nothing is found, and the bug stays.
        (IMPOSTER, &["engine.enable_prefix_caching=true"], Present(&[3, 4], StaleState)),
        // A first lap reads zeros, the right start: 64 blocks are four steps of 16.
        (IMPOSTER, &["engine.num_gpu_blocks_override=65"], FirstLap),
        (IMPOSTER, &["engine.gpu_memory_utilization=0.9"], FirstLap),
        // Every step reads the zeros of a pool of its own.
        (IMPOSTER, &["engine.sleep=drop_pool"], Silent),
        (IMPOSTER, &["engine.sleep=keep_pool"], Present(&[3, 4], StaleState)),
        // A stack hands out used blocks from the second step on.
        (IMPOSTER, &["engine.free_list=lifo"], Present(&[2, 3, 4], StaleState)),
        // Keys and values are written before they are read. Blocks of 16 tokens, two a request, and
        // two laps of them.
        (IMPOSTER, &[&attention_only, "engine.num_gpu_blocks_override=17"], Silent),
        (ONE_TOKEN_ROWS, &[], Present(&[3, 4], StaleState)),
        (ONE_TOKEN_ROWS, &["engine.batch_split=scheduled_tokens"], Present(&[3, 4], StaleState)),
        (ONE_TOKEN_ROWS, &["engine.batch_split=is_prefilling"], Gone),
        (ONE_TOKEN_ROWS, &["engine.force_prefill=true"], Gone),
        (ONE_TOKEN_ROWS, &["engine.max_num_batched_tokens=5"], Gone),
        (BEFORE_A_LONGER_ROW, &[], Present(&[2], StaleState)),
        (BEFORE_A_LONGER_ROW, &["engine.batch_split=scheduled_tokens"], Present(&[2], StaleState)),
        (BEFORE_A_LONGER_ROW, &["engine.batch_split=is_prefilling"], Gone),
        (BEFORE_A_LONGER_ROW, &["engine.force_prefill=true"], Gone),
        (BEFORE_A_LONGER_ROW, &["engine.max_num_batched_tokens=16"], Gone),
    ];
    for (base, sets, symptom) in rows {
        check(base, sets, symptom);
    }
}

fn check(base: &str, sets: &[&str], symptom: Symptom) {
    let config = experiment(base, sets);
    let what = format!("{} {sets:?}", config.name);
    let played = Played::new(&config);
    let tally = played.tally;
    let causes = known(tally.decoded_first_chunks) + known(tally.wrapped_requests);
    match symptom {
        Present(spikes, kind) => {
            assert_eq!(played.spikes(), spikes, "{what}");
            let kinds: Vec<FindingKind> = played.findings.iter().map(|one| one.kind).collect();
            assert_eq!(kinds, vec![kind; spikes.len()], "{what}");
            // Who is bad is named, and is who met the cause: nobody else on either side.
            let named = played.findings.iter().flat_map(|finding| &finding.requests);
            assert_eq!(named.copied().collect::<BTreeSet<RequestId>>(), played.bad(), "{what}");
            let reached = known(tally.stale_first_chunks) + known(tally.wrapped_requests);
            assert_eq!((tally.bad_requests, played.bad().len() as u64), (reached, reached));
        }
        Silent | FirstLap | Gone => {
            played.assert_exact(&what);
            assert_eq!(causes == 0, matches!(symptom, Gone), "{what}: {tally:?}");
        }
    }
    let is_first_lap = played.laps() <= 1.0;
    assert_eq!(is_first_lap, matches!(symptom, FirstLap), "{what}: {} laps", played.laps());
}

/// Writes a model without Mamba layers and says how to use it.
fn attention_only(folder: &Path) -> String {
    let plan = Plan::new(Preset::TinyLlama.config());
    save_folder(folder, &plan, &Preset::weights(&plan, 7), Dtype::F32).expect("a model folder");
    format!("model.path={:?}", folder.to_str().expect("a UTF-8 path"))
}

fn known(count: Option<u64>) -> u64 {
    count.expect("the embedded engine says")
}
