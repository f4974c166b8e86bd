//! What the command line takes.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use gapscope::run::FailOn;

#[derive(Parser)]
#[command(version, about, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Run an experiment: generate, score before any update, compare, update, report
    Run {
        #[command(flatten)]
        experiment: Experiment,
        /// Where the run goes [default: runs/NAME]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Go on with a run that was interrupted or killed, from its last checkpoint
        /// (checkpoint.every steps apart); it ends as if nothing had happened
        #[arg(long)]
        resume: bool,
        /// Print the resolved knobs and what they come to, and stop
        #[arg(long, conflicts_with = "resume")]
        dry_run: bool,
        /// End with exit code 3 if it held at any step: finding, or a metric of steps.jsonl held
        /// against a number, such as 'gap/k3_mean>1e-3'. The run still ends as it would have
        #[arg(long, value_name = "EXPR")]
        fail_on: Vec<FailOn>,
    },
    /// One run a point of the file's [sweep], with a table and a chart rewritten after each
    Sweep {
        #[command(flatten)]
        experiment: Experiment,
        /// Where the sweep goes [default: runs/NAME]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Go on with a sweep that was interrupted or killed: points that are done stay, the one
        /// under way goes on from its last checkpoint
        #[arg(long)]
        resume: bool,
        /// Print every point and the spikes it is predicted to have, and stop
        #[arg(long, conflicts_with = "resume")]
        dry_run: bool,
    },
    /// Settings, first differing step, request and token, and metrics of two runs
    Compare {
        /// A folder that a run has left
        #[arg(value_name = "RUN")]
        left: PathBuf,
        #[arg(value_name = "RUN")]
        right: PathBuf,
        /// End with exit code 1 if a step, metric or token differs; settings alone do not count
        #[arg(long)]
        fail_on_difference: bool,
    },
    /// See a run's spike again with one lever turned at a time: which end it, and what that means
    Bisect {
        /// A folder that a run has left; its table goes there as bisect.json
        run: PathBuf,
        /// A step that spiked [default: the first]
        #[arg(long, value_name = "N")]
        step: Option<u64>,
        /// Turn every lever, also after one has ended the spike that is a culprit by itself
        #[arg(long)]
        all: bool,
        /// Turn the levers in an order drawn from this seed; what they point to is the same
        /// [default: the strongest first]
        #[arg(long, value_name = "SEED")]
        shuffle: Option<u64>,
    },
    /// The life of one request of a run, step by step, and where it went wrong
    Explain {
        /// A folder that a run has left; the story goes there as explain/ID.txt and ID.html
        run: PathBuf,
        /// A step that spiked [default: the first]
        #[arg(long, value_name = "N")]
        step: Option<u64>,
        /// Such as s3.p0.r5 [default: the step's worst]
        #[arg(long, value_name = "ID")]
        request: Option<String>,
    },
    /// Log-probabilities of given token ids
    Score(Score),
    /// Measure log-probabilities that others produced: in their dumps, or by asking their servers
    Audit(Audit),
    /// The faults that can be planted, to see each found and named
    #[command(subcommand)]
    Faults(Faults),
    /// Verdicts on the evidence of steps (check.evidence = true) by nothing but that evidence
    Judge {
        /// Evidence that runs have left: RUN/evidence/step-NNNNN.json
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
    },
    /// Throughput of every verb beside its floor, and where a step's time goes; with a [sweep], of
    /// each of its points
    Bench(Bench),
    /// Look at a model folder, or make one
    #[command(subcommand)]
    Model(Model),
    /// What this machine and this build can run, and what to do about what is missing
    Doctor {
        /// The device that is to be usable: where it is not, the exit code is 1
        #[arg(long, default_value = "cpu", value_parser = ["cpu", "cuda"])]
        device: String,
    },
    /// Every key of an experiment file
    Config {
        /// Print a commented file of all keys with their defaults
        #[arg(long, required = true)]
        defaults: bool,
    },
}

#[derive(Args)]
pub struct Score {
    /// A folder in the Hugging Face layout, or a preset's name
    #[arg(long, value_name = "DIR")]
    pub model: String,
    /// Lines of {"id":"a","token_ids":[1,2,3],"prompt_len":1}; tokens from prompt_len on, which is
    /// 1 if absent, are scored
    #[arg(long, value_name = "TOKENS.jsonl")]
    pub input: PathBuf,
    /// Where lines of {"id":"a","logprobs":[-0.5,-0.25]} go [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Whose forward: the trainer's, candle's in f32, or the engine's, which takes a sequence whole
    /// (prefill) or token by token after its prompt (decode)
    #[arg(long, default_value = "trainer", value_parser = LEGS)]
    pub leg: String,
    /// Of weights and activations; candle's are f32 over weights rounded to it
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
    pub dtype: String,
    /// Logits are divided by it
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    pub temperature: f32,
}

const LEGS: [&str; 4] = ["trainer", "reference", "prefill", "decode"];

#[derive(Args)]
pub struct Experiment {
    /// The experiment file
    #[arg(value_name = "EXP.toml")]
    pub file: PathBuf,
    /// Override a key, such as engine.state_index_bits=32
    #[arg(long, value_name = "K=V")]
    pub set: Vec<String>,
}

#[derive(Args)]
pub struct Audit {
    /// Dumps or folders of them: train_data_stepN.jsonl, token_exports, rollout_samples.jsonl,
    /// responses of vLLM, run folders
    #[arg(long, value_name = "FILE", num_args = 1.., required_unless_present = "server")]
    pub rollouts: Vec<PathBuf>,
    /// Sample from vLLM servers instead, as `run` does, and leave a run's folder
    #[arg(
        long,
        value_name = "URL",
        num_args = 1..,
        conflicts_with_all = ["rollouts", "format", "allow_unlike"],
        requires_all = ["prompts", "model"]
    )]
    pub server: Vec<String>,
    /// What to sample from: lines of {"prompt": "..."}
    #[arg(long, value_name = "FILE", requires = "server")]
    pub prompts: Option<PathBuf>,
    /// Override a key, such as rollout.temperature=0.6 or rollout.rollouts_per_prompt=8
    #[arg(long, value_name = "K=V", requires = "server")]
    pub set: Vec<String>,
    /// What wrote them [default: as their keys tell]
    #[arg(long, value_parser = ["nemo-rl", "prime-rl", "vllm", "torchtitan", "native"])]
    pub format: Option<String>,
    /// End with exit code 3 if this holds in a step: finding, or such as 'gap/k3_mean>1e-3'
    #[arg(long, value_name = "EXPR")]
    pub fail_on: Vec<FailOn>,
    /// The largest |d| that is healthy, nats [default: 1; a run's own for run folders; measured
    /// with --server]
    #[arg(long, value_name = "NATS")]
    pub floor: Option<f64>,
    /// Rescore every record by this model: a folder in the Hugging Face layout
    #[arg(long, value_name = "DIR")]
    pub model: Option<String>,
    /// Of the model's weights and activations
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"], requires = "model")]
    pub dtype: String,
    /// Compare sides whose temperature, filters or logprobs mode differ
    #[arg(long)]
    pub allow_unlike: bool,
    /// Where audit.json and steps.jsonl go, or the run of a server [default of a run: runs/audit]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

#[derive(Args)]
pub struct Bench {
    #[command(flatten)]
    pub experiment: Experiment,
    /// Only these points of the sweep
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Time the model's products alone, as engine.numerics has them, instead
    #[arg(long, conflicts_with = "only")]
    pub products: bool,
}

#[derive(Subcommand)]
pub enum Faults {
    /// Every fault: what plants it, what is seen of it, which lever hides it
    List,
    /// Plant each in a small run, with a twin that has none: is it found, and named?
    Run {
        /// Only these
        #[arg(long, value_name = "NAME")]
        only: Vec<String>,
        /// Where the runs and fault_matrix.json go
        #[arg(long, value_name = "DIR", default_value = "runs/faults")]
        out: PathBuf,
    },
    /// Plant one or none at random settings, many times: no verdict may be false
    Swarm {
        #[arg(long, default_value_t = 1)]
        seed: u64,
        #[arg(long, default_value_t = 100)]
        count: u64,
        /// Where the runs go; those that went wrong stay
        #[arg(long, value_name = "DIR", default_value = "runs/swarm")]
        out: PathBuf,
    },
}

#[derive(Subcommand)]
pub enum Model {
    /// Layer plan, pages, stride, and the first block that each index width wraps
    Inspect {
        /// A folder in the Hugging Face layout, or a preset's name
        model: String,
        /// Override a key, such as model.dtype=bf16 or engine.mamba_ssm_cache_dtype=float32
        #[arg(long, value_name = "K=V")]
        set: Vec<String>,
    },
    /// Write a preset with seeded random weights, or a GGUF file, as a Hugging Face folder
    #[command(allow_missing_positional = true)]
    Init {
        /// tiny-jamba, tiny-jamba-moe, tiny-mamba, tiny-llama, small-jamba or jamba-3b-shape
        #[arg(required_unless_present = "from_gguf", conflicts_with = "from_gguf")]
        preset: Option<String>,
        /// The folder to make
        dir: PathBuf,
        /// A Llama in GGUF: its weights dequantised, with its tokenizer
        #[arg(long, value_name = "FILE", conflicts_with = "seed")]
        from_gguf: Option<PathBuf>,
        /// Of the random weights
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Of the file's tensors
        #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
        dtype: String,
    },
}
