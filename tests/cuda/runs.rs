//! Whole runs on the device: in f32 the very tokens and bits of the CPU's, in bf16 no gap at all.

use std::path::Path;

use gapscope::config::{self, Config};
use gapscope::report::parquet::{read_rollouts, read_tokens, RolloutRow, TokenRow};
use gapscope::report::{ReportError, Summary};
use gapscope::run;
use tempfile::TempDir;

use crate::sequences::gpu;

fn config(toml: &str, set: &[&str]) -> Config {
    let set: Vec<String> = set.iter().map(|one| (*one).to_owned()).collect();
    config::parse(toml, "test.toml", &set).expect("a valid config")
}

/// What a run of the device left, in a folder that lives as long as this.
pub struct Left {
    pub summary: Summary,
    parent: TempDir,
}

impl Left {
    /// Of every step's requests.
    pub fn rollouts(&self) -> Vec<RolloutRow> {
        self.rows("rollouts", read_rollouts)
    }

    /// Of every step's sampled tokens.
    pub fn tokens(&self) -> Vec<TokenRow> {
        self.rows("tokens", read_tokens)
    }

    fn rows<T>(&self, kind: &str, read: fn(&Path) -> Result<Vec<T>, ReportError>) -> Vec<T> {
        let file = |step| self.parent.path().join(format!("cuda/{kind}/step-{step:05}.parquet"));
        let of_step = |step| read(&file(step)).expect("a step's rows");
        (1..=self.summary.steps_done).flat_map(of_step).collect()
    }
}

/// A run of the device that is the CPU's, step by step and token by token; none without a device.
pub fn same_on_both(name: &str, toml: &str, set: &[&str]) -> Option<Left> {
    gpu()?;
    let parent = tempfile::tempdir().expect("a temporary folder");
    let folders = ["cpu", "cuda"].map(|device| {
        let folder = parent.path().join(device);
        let device = format!("engine.device={device}");
        let summary = run::run(&config(toml, &[set, &[&device]].concat()), &folder);
        (summary.expect("a run to its end"), folder)
    });
    let [(cpu, left), (cuda, right)] = folders;
    let found = run::compare(&left, &right).expect("two runs");
    eprintln!(
        "{name}: {} tokens on both, {} spike steps, gap at most {:?}",
        cuda.n_tokens,
        cuda.spike_steps.len(),
        cuda.gap_max
    );
    assert_eq!(cpu.n_tokens, cuda.n_tokens, "{name}");
    assert!(!found.differs(), "{name}:\n{found}");
    Some(Left { summary: cuda, parent })
}

/// A run on the device alone; none without one.
pub fn on_device(name: &str, toml: &str, set: &[&str]) -> Option<Left> {
    gpu()?;
    let parent = tempfile::tempdir().expect("a temporary folder");
    let set = [set, &["engine.device=cuda"]].concat();
    let summary = run::run(&config(toml, &set), &parent.path().join("cuda")).expect("a run");
    eprintln!(
        "{name}: {} tokens, frac_bitwise_equal {:?}, gap at most {:?}, floor {:?}",
        summary.n_tokens, summary.frac_bitwise_equal, summary.gap_max, summary.floor
    );
    Some(Left { summary, parent })
}

/// The same, where every token is the same to the last bit on all legs.
pub fn exact(name: &str, toml: &str, set: &[&str]) -> Option<Left> {
    let left = on_device(name, toml, &[set, &["check.legs=[\"prefill\"]"]].concat())?;
    assert_eq!(left.summary.frac_bitwise_equal, Some(1.0), "{name}");
    assert!(left.summary.steps_done > 0 && left.summary.spike_steps.is_empty(), "{name}");
    Some(left)
}

pub const TINY: &str = "name = \"x\"\nsteps = 3\nmodel.preset = \"tiny-jamba\"\n\
    engine.device_memory = \"64MiB\"\n\
    engine.max_num_batched_tokens = 128\nengine.max_num_seqs = 32\nengine.max_model_len = 96\n\
    rollout.prompts_per_step = 4\nrollout.rollouts_per_prompt = 8\nrollout.max_new_tokens = 8\n\
    task.max_operand = 99\ncheck.legs = [\"prefill\"]\n";

/// Kernel by kernel, and decode batches of the captured sizes as graphs, odd ones padded.
const LAUNCHES: [&str; 2] = ["engine.enforce_eager=true", "engine.enforce_eager=false"];

#[test]
fn scoring_runs_of_every_family() {
    for (preset, launches) in ["tiny-jamba", "tiny-mamba", "tiny-llama"]
        .into_iter()
        .flat_map(|p| LAUNCHES.map(|l| (p, l)))
    {
        let model = format!("model.preset={preset}");
        let name = format!("{preset}, {launches}");
        same_on_both(&name, TINY, &[&model, launches, "trainer.update=none"]);
    }
    for folder in ["tiny-jamba-moe", "tiny-qwen2", "tiny-qwen3"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(folder);
        let toml = TINY.replace("model.preset = \"tiny-jamba\"\n", "");
        let model = format!("model.path={}", path.display());
        same_on_both(folder, &toml, &[&model, "trainer.update=none"]);
    }
}

#[test]
fn processed_logprobs_and_filters() {
    let set = [
        "trainer.update=none",
        "rollout.temperature=0.7",
        "engine.logprobs_mode=processed_logprobs",
    ];
    same_on_both("temperature 0.7", TINY, &set);
    same_on_both(
        "top_p 0.8",
        TINY,
        &[&set[..], &["rollout.top_p=0.8", "rollout.top_k=40"]].concat(),
    );
}

#[test]
fn training_runs() {
    let warm = ["trainer.warm_start.steps=6", "trainer.warm_start.batch=8"];
    for (preset, launches) in ["tiny-jamba", "tiny-mamba", "tiny-llama"]
        .into_iter()
        .flat_map(|p| LAUNCHES.map(|l| (p, l)))
    {
        let model = format!("model.preset={preset}");
        let own = [&*model, launches, "trainer.kl_coef=0.01", "check.greedy_eval_prompts=8"];
        let name = format!("training {preset}, {launches}");
        same_on_both(&name, TINY, &[&warm[..], &own].concat());
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-jamba-moe");
    let toml = TINY.replace("model.preset = \"tiny-jamba\"\n", "");
    let model = format!("model.path={}", path.display());
    same_on_both("training tiny-jamba-moe", &toml, &[&warm[..], &[&model]].concat());
}

#[test]
fn both_bugs_come_out_as_on_the_cpu() {
    let read = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("experiments").join(name);
        std::fs::read_to_string(path).expect("an experiment")
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/models/arithmetic");
    let model = format!("model.path={}", folder.display());
    let often = &["steps=2", "rollout.rollouts_per_prompt=128"][..];
    for (name, toml, set, spikes) in [
        ("imposter", "imposter_request.toml", &[model.as_str()][..], 3),
        ("index wrap", "index_wrap.toml", &["steps=24"], 2),
        ("index wrap, 128", "index_wrap.toml", often, 2),
    ] {
        let Some(left) = same_on_both(name, &read(toml), set) else { return };
        assert_eq!(left.summary.spike_steps.len(), spikes, "{name}");
    }
}

#[test]
fn bf16_is_exact_at_any_batch_size() {
    for (dtype, state) in [("f32", "f32"), ("f32", "bf16"), ("bf16", "f32"), ("bf16", "bf16")] {
        let dtypes =
            [format!("model.dtype={dtype}"), format!("engine.mamba_ssm_cache_dtype={state}")];
        for (seqs, budget, launches) in [("1", "96"), ("3", "100"), ("64", "128"), ("1024", "8192")]
            .into_iter()
            .flat_map(|(seqs, budget)| LAUNCHES.map(|launches| (seqs, budget, launches)))
        {
            let sizes = [
                format!("engine.max_num_seqs={seqs}"),
                format!("engine.max_num_batched_tokens={budget}"),
            ];
            let set: Vec<&str> = dtypes.iter().chain(&sizes).map(String::as_str).collect();
            let rollouts =
                if seqs == "1024" { "rollout.rollouts_per_prompt=256" } else { "steps=2" };
            let set = [&set[..], &[rollouts, launches, "trainer.update=none"]].concat();
            let sizes = format!("{seqs} sequences, budget {budget}, {launches}");
            exact(&format!("{dtype}, state {state}, {sizes}"), TINY, &set);
        }
        let set: Vec<&str> = dtypes.iter().map(String::as_str).collect();
        // A pool that holds a few requests at a time, which need another block on their way.
        let tight = [
            "engine.num_gpu_blocks_override=24",
            "engine.max_model_len=192",
            "rollout.max_new_tokens=120",
            "rollout.ignore_eos=true",
            "trainer.update=none",
        ];
        let train = ["trainer.warm_start.steps=3", "trainer.warm_start.batch=8"];
        for launches in LAUNCHES {
            let name = format!("{dtype}, state {state}, a tight pool, {launches}");
            let tight = [&set[..], &tight, &[launches]].concat();
            let Some(left) = exact(&name, TINY, &tight) else { return };
            assert!(left.summary.preemptions > Some(0), "{name}: no preemption");
            let train = [&set[..], &train, &[launches]].concat();
            exact(&format!("{dtype}, state {state}, training, {launches}"), TINY, &train);
        }
    }
}
