//! The exact words of every refusal, and the places they name.

use std::path::Path;

use super::{refusal, SMALL};
use crate::config::load;

/// A broken file: lines before a small one that loads, lines after it, or the whole text.
enum Broken {
    Top(&'static str),
    Under(&'static str),
    Whole(&'static str),
}
use Broken::{Top, Under, Whole};

const FILES: &[Broken] = &[
    // Syntax and shape.
    Top("seed = "),
    Top("seed = 1\nseed = 2"),
    Top("seed = 18446744073709551615"),
    Top("engine = 5"),
    Under("[[engine]]\ndevice = \"cpu\""),
    Under("[engine.max_num_seqs]\nx = 1"),
    // Unknown names.
    Top("sed = 1"),
    Top("temperature = 0.5"),
    Under("[engine]\nmax_num_seq = 4"),
    Under("[engine]\nbogus = 4"),
    Under("[bogus]\nkey = 4"),
    Under("[trainr]\nupdate = \"none\""),
    Under("[trainer.warm_start]\nstep = 4"),
    Top("\"engine.device\" = \"cpu\""),
    Under("[engine]\nfree_list = \"filo\""),
    Under("[check]\nlegs = [\"decode\", \"trainr\"]"),
    Whole("name = \"x\"\n[model]\npreset = \"tiny-jambo\""),
    // Missing.
    Whole(""),
    Whole("name = \"x\""),
    Whole("[model]\npreset = \"tiny-jamba\""),
    Under("[task]\nkind = \"jsonl\""),
    Under("[task]\nkind = \"jsonl\"\npath = \"q\"\nreward = \"regex\""),
    Under("[task]\nkind = \"jsonl\"\npath = \"q\"\nreward = \"command\""),
    // Wrong type.
    Whole("name = 3"),
    Whole("name = \"../up\""),
    Top("seed = \"seven\""),
    Top("steps = 1.5"),
    Top("steps = 2001-01-01"),
    Under("[rollout]\nignore_eos = 1"),
    Under("[trainer]\nbetas = [0.9]"),
    Under("[check]\nlegs = \"decode\""),
    // Out of range.
    Top("seed = -1"),
    Top("steps = 0"),
    Under("[engine]\nmax_num_batched_tokens = 0"),
    Under("[engine]\nmax_num_seqs = -3"),
    Under("[engine]\nmax_model_len = 4294967296"),
    Under("[engine]\ngpu_memory_utilization = 0"),
    Under("[engine]\ngpu_memory_utilization = 1.01"),
    Under("[engine]\nstate_index_bits = 7"),
    Under("[engine]\nstate_index_bits = 65"),
    Under("[engine]\nnum_gpu_blocks_override = 1"),
    Under("[engine]\ndevice_memory = \"80GB\""),
    Under("[rollout]\nrollouts_per_prompt = 0"),
    Under("[rollout]\nmax_new_tokens = 0"),
    Under("[rollout]\ntemperature = -0.1"),
    Under("[rollout]\ntemperature = nan"),
    Under("[rollout]\ntop_p = 0.0"),
    Under("[rollout]\ntop_k = -2"),
    Under("[rollout]\nmin_p = 1.5"),
    Under("[trainer]\nranks = 0"),
    Under("[trainer]\nimportance_cap = 0.0"),
    Under("[trainer]\nlearning_rate = inf"),
    Under("[trainer]\nmax_grad_norm = 0"),
    Under("[trainer]\nbetas = [0.9, 1.0]"),
    Under("[check]\nlegs = [\"prefill\", \"prefill\"]"),
    Under("[task]\noperators = \"+/\""),
    Under("[task]\nkind = \"jsonl\"\npath = \"q\"\nreward = \"regex\"\nreward_pattern = \"(\""),
    // Servers.
    Under("[engine]\nkind = \"vllm\""),
    Under("[engine]\nkind = \"vllm\"\nurl = \"https://x:1\""),
    Under("[engine]\nkind = \"vllm\"\nurl = [\"http://x:1\", \"http://x:1\"]"),
    Under("[engine]\nkind = \"vllm\"\nurl = \"http://x:1\""),
    Under("[engine]\nurl = \"http://x:1\""),
    Under("[engine]\nkind = \"vllm\"\nurl = \"http://x\"\nstate_index_bits = 32"),
    Under("[engine]\nkind = \"vllm\"\nurl = \"http://x\"\nmax_num_seqs = 4"),
    Under("[engine]\nkind = \"vllm\"\nurl = \"http://x\"\nargs = \"--max-num-seqs 4\""),
    Under("[engine]\nkind = \"vllm\"\nurl = \"http://x\"\nlaunch.restarts = 4"),
    Under("[engine]\nkind = \"vllm\"\nurl = \"http://x\"\nlaunch.command = \"a 'b\""),
    Under("[engine]\nkind = \"vllm\"\nurl = \"http://x\"\nlaunch.command = \"a {engine.bits}\""),
    Under(
        "[engine]\nkind = \"vllm\"\nurl = \"http://x\"\n\
         launch.command = \"a {engine.num_gpu_blocks_override}\"",
    ),
    Under(
        "[engine]\nkind = \"vllm\"\nurl = \"http://x\"\nlogprobs_mode = \"processed_logprobs\"\n\
         [rollout]\ntemperature = 0.5\n[trainer]\nupdate = \"none\"\n[check]\nlegs = [\"prefill\"]",
    ),
    Under(
        "[engine]\nkind = \"vllm\"\nurl = \"http://x\"\nretry_for_s = 0\n\
         launch.command = \"serve\"\nlaunch.restarts = 1\n[trainer]\nupdate = \"none\"",
    ),
    Under("[engine]\nargs = \"--max-num-sequences 4\""),
    Under("[engine]\nargs = \"--tensor-parallel-size 4\""),
    Under("[engine]\nargs = \"--max-num-seqs\""),
    Under("[engine]\nargs = \"--max-num-seqs --enforce-eager\""),
    Under("[engine]\nargs = \"--max-num-seqs 0\""),
    Under("[engine]\nargs = \"--no-enforce-eager=1\""),
    Under("[engine]\nmax_num_seqs = 8\nargs = \"--max-num-seqs 4\""),
    Under("[engine]\nargs = \"--max-num-seqs 4 --max-num-seqs=5\""),
    // Impossible together.
    Under("path = \"models/x\""),
    Under("[rollout]\nrollouts_per_prompt = 1"),
    Under("[rollout]\nrollouts_per_prompt = 1\n[trainer]\nupdate = \"adamw\""),
    Under("[engine]\nmax_num_batched_tokens = 64"),
    Under("[engine]\nenable_chunked_prefill = false\nmax_model_len = 4096"),
    Under("[rollout]\nmax_new_tokens = 512"),
    Under("[rollout]\nmax_new_tokens = 500\n[task]\nprompt_tokens = 13"),
    Under("[task]\nprompt_tokens = 13\nmin_prompt_tokens = 14"),
    Under("[task]\nmin_prompt_tokens = 14"),
    Under("[engine]\nreplicas = 0"),
    Under("[engine]\nreplicas = 9"),
    Under("[engine]\nkind = \"vllm\"\nurl = \"http://x\"\nreplicas = 2"),
    Under("[trainer]\nupdates_per_step = 3"),
    Under("[trainer]\nupdate = \"none\"\nkl_coef = 0.1"),
    Under("[trainer]\nupdate = \"none\"\nimportance_cap = 2"),
    Under("[trainer]\nupdate = \"none\"\nwarm_start.steps = 5"),
    Under("[trainer]\nupdate = \"none\"\nfaults = [\"score_after_update\"]"),
    Under("[trainer]\nupdate = \"none\"\n[checkpoint]\nsave_final = true"),
    Under("[task]\npath = \"q.jsonl\""),
    Under("[task]\nkind = \"jsonl\"\npath = \"q\"\nexamples = 2"),
    Under("[task]\nkind = \"jsonl\"\npath = \"q\"\nreward_pattern = \"a\""),
    // Sweeps.
    Under("[sweep]\n\"rollout.rollout_per_prompt\" = [8]"),
    Under("[sweep]\n\"rollout.rollouts_per_prompt\" = 8"),
    Under("[sweep]\n\"rollout.rollouts_per_prompt\" = []"),
    Under("[sweep]\n\"rollout.rollouts_per_prompt\" = [8, 0]"),
    Under("[sweep]\n\"engine.free_list\" = [\"fifo\", \"lfio\"]"),
    Under("[sweep]\nstop_after_spike = 2"),
    Under("[sweep]\nstop_after_spikes = 0"),
    Under("[sweep]\npoints = [1]"),
    Under("[[sweep.points]]\n\"engine.max_num_seq\" = 8"),
    Under("[[sweep.points]]\nengine.max_num_seqs = 8\n[[sweep.points]]\nseed = \"x\""),
    Under("[sweep]\nsweep.points = []"),
    Under(
        "[engine]\nkind = \"vllm\"\nurl = \"http://x\"\nlaunch.command = \"a {model.path}\"\n\
         [trainer]\nupdate = \"none\"\n[sweep]\nengine.max_model_len = [128, 256]",
    ),
    Under(
        "[engine]\nkind = \"vllm\"\nurl = \"http://x\"\n[trainer]\nupdate = \"none\"\n\
         [[sweep.points]]\nmodel.dtype = \"bf16\"",
    ),
];

const OVERRIDES: &[&[&str]] = &[
    &["engine.max_num_seqs"],
    &["=3"],
    &["a b=3"],
    &["seed=1", "engine.max_num_seq=3"],
    &["engine.max_num_seqs=many"],
    &["engine.max_num_seqs="],
    &["engine.free_list=filo"],
    &["engine=3"],
    &["rollout.rollouts_per_prompt=1"],
    &["model.path=models/x"],
    &["sweep.\"engine.max_num_seqs\"=[0]"],
];

#[test]
fn broken_files() {
    let mut all = String::new();
    for broken in FILES {
        let text = match broken {
            Top(lines) => format!("{lines}\n{SMALL}"),
            Under(lines) => format!("{SMALL}{lines}\n"),
            Whole(text) => (*text).to_owned(),
        };
        let (Top(lines) | Under(lines) | Whole(lines)) = broken;
        all += &format!("{lines}\n=> {}\n\n", refusal(&text, &[]));
    }
    insta::assert_snapshot!(all);
}

#[test]
fn broken_overrides() {
    let mut all = String::new();
    for overrides in OVERRIDES {
        all += &format!("{}\n=> {}\n\n", overrides.join("\n"), refusal(SMALL, overrides));
    }
    insta::assert_snapshot!(all);
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let error = load(Path::new("no/such.toml"), &[]).expect_err("there is no such file");
    assert!(error.to_string().starts_with("cannot read the experiment file no/such.toml: "));
}

/// Lines and columns are those an editor shows, also after characters of several bytes and after
/// Windows line ends.
#[test]
fn places_count_characters() {
    for (text, place) in [
        ("seed = \"x\"", "exp.toml:1:8: "),
        ("# \u{e9}\u{e9}\n\n  seed = \"x\"", "exp.toml:3:10: "),
        ("name = \"x\"\r\nseed = \"x\"", "exp.toml:2:8: "),
        ("model = { \"\u{e9}\" = 1, preset = 3 }", "exp.toml:1:11: "),
    ] {
        let message = refusal(text, &[]);
        assert!(message.starts_with(place), "{message}");
    }
}
