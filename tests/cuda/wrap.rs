//! vLLM's 32-bit product in an engine's own run: the page of Jamba-3B, in a model that is narrow
//! elsewhere, over a pool that is larger than 2^32 elements.

use gapscope::config;
use gapscope::model::{load_plan, save_folder, Plan, Preset};
use gapscope::ops::pages::cuda::Pages;
use gapscope::run;

use crate::sequences::gpu;

/// The first block past 2^32, of those that 23,840 requests of two blocks take, one after another.
const WRAPPED: u64 = 47_663;
const NUM_BLOCKS: u32 = 47_701;

const TOML: &str = "name = \"wrap\"\nsteps = 1\nmodel.path = \"\"\nmodel.dtype = \"bf16\"\n\
    engine.device = \"cuda\"\nengine.mamba_ssm_cache_dtype = \"f32\"\n\
    engine.max_num_batched_tokens = 8192\nengine.max_num_seqs = 1024\n\
    engine.max_model_len = 32\nrollout.prompts_per_step = 745\n\
    rollout.rollouts_per_prompt = 32\nrollout.max_new_tokens = 3\nrollout.ignore_eos = true\n\
    task.max_operand = 99\ntrainer.update = \"none\"\ntrainer.max_tokens_per_chunk = 8192\n";

#[test]
fn the_page_of_jamba_3b_wraps_at_its_own_block() {
    let Some(gpu) = gpu() else { return };
    let parent = tempfile::tempdir().expect("a temporary folder");
    let folder = parent.path().join("model");
    let mut hf = Preset::Jamba3bShape.config();
    (hf.hidden_size, hf.vocab_size, hf.num_hidden_layers) = (128, 256, 2);
    let attention = hf.attention.as_mut().expect("a hybrid");
    (attention.layers.period, attention.layers.offset, attention.heads) = (2, 1, 1);
    hf.feed_forward.as_mut().expect("a dense one").intermediate_size = 64;
    hf.mamba.as_mut().expect("a hybrid").dt_rank = 8;
    hf.eos_token_ids.truncate(1);
    let plan = Plan::new(hf);
    let weights = Preset::weights(&plan, 7);
    save_folder(&folder, &plan, &weights, config::Dtype::Bf16).expect("a model folder");
    assert_eq!(load_plan(&folder).expect("the folder reads"), plan);
    for (bits, spikes) in [(32, true), (64, false)] {
        if !Pages::fit(&gpu, 1, NUM_BLOCKS, 360_448) {
            return crate::too_small("wrap: the device has less than 17.2 GB free");
        }
        let set = [
            format!("model.path={}", folder.display()),
            format!("engine.num_gpu_blocks_override={NUM_BLOCKS}"),
            format!("engine.state_index_bits={bits}"),
        ];
        let toml = TOML.replace("model.path = \"\"\n", "");
        let config = config::parse(&toml, "test.toml", &set).expect("a valid config");
        let summary = run::run(&config, &parent.path().join(bits.to_string())).expect("a run");
        eprintln!(
            "wrap, {bits} bits: first wrapped block {:?}, {} tokens, {} findings, gap at most {:?}",
            summary.first_wrapped_block,
            summary.n_tokens,
            summary.findings.len(),
            summary.gap_max
        );
        assert_eq!(summary.first_wrapped_block, spikes.then_some(WRAPPED));
        assert_eq!(!summary.spike_steps.is_empty(), spikes, "{bits} bits");
    }
}
