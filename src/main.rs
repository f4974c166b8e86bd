//! The command line. Exit codes: 0 done; 1 the input or environment is at fault, or a difference
//! was to fail; 2 usage; 3 a `--fail-on` held; 130 Ctrl-C.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};

use gapscope::base::Step;
use gapscope::config::{self, Config, Dtype, Leg};
use gapscope::model::{save_gguf, save_preset, Preset};
use gapscope::run::{self, FailOn, Interrupted, ScoreOptions, SweepFile, INTERRUPTED};

#[derive(Parser)]
#[command(version, about, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
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
    },
    /// Log-probabilities of given token ids
    Score(Score),
    /// Measure log-probabilities that others dumped, with both sides' values in the records
    Audit(Audit),
    /// Throughput of generate, score and train
    Bench {
        #[command(flatten)]
        experiment: Experiment,
    },
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
struct Score {
    /// A folder in the Hugging Face layout, or a preset's name
    #[arg(long, value_name = "DIR")]
    model: String,
    /// Lines of {"id":"a","token_ids":[1,2,3],"prompt_len":1}; tokens from prompt_len on, which is
    /// 1 if absent, are scored
    #[arg(long, value_name = "TOKENS.jsonl")]
    input: PathBuf,
    /// Where lines of {"id":"a","logprobs":[-0.5,-0.25]} go [default: standard output]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Whose forward: the trainer's, candle's in f32, or the engine's, which takes a sequence whole
    /// (prefill) or token by token after its prompt (decode)
    #[arg(long, default_value = "trainer", value_parser = LEGS)]
    leg: String,
    /// Of weights and activations; candle's are f32 over weights rounded to it
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
    dtype: String,
    /// Logits are divided by it
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f32,
}

const LEGS: [&str; 4] = ["trainer", "reference", "prefill", "decode"];

impl Score {
    fn run(self) -> Result<String> {
        let config = scoring_config(&self.model, &self.dtype)?;
        let leg = match self.leg.as_str() {
            "reference" => Leg::Reference,
            "prefill" => Leg::Prefill,
            "decode" => Leg::Decode,
            _ => Leg::Trainer,
        };
        let Self { input, output, temperature, .. } = self;
        run::score(&config, &ScoreOptions { input, output, leg, temperature })
    }
}

#[derive(Args)]
struct Experiment {
    /// The experiment file
    #[arg(value_name = "EXP.toml")]
    file: PathBuf,
    /// Override a key, such as engine.state_index_bits=32
    #[arg(long, value_name = "K=V")]
    set: Vec<String>,
}

impl Experiment {
    fn load(&self) -> Result<Config> {
        Ok(config::load(&self.file, &self.set)?)
    }

    fn sweep(&self) -> SweepFile<'_> {
        SweepFile { path: &self.file, set: &self.set }
    }
}

#[derive(Args)]
struct Audit {
    /// Dumps or folders of them: train_data_stepN.jsonl, token_exports, run folders
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    rollouts: Vec<PathBuf>,
    /// What wrote them [default: as their keys tell]
    #[arg(long, value_parser = ["nemo-rl", "prime-rl", "native"])]
    format: Option<String>,
    /// End with exit code 3 if this holds in a step: finding, or such as 'gap/k3_mean>1e-3'
    #[arg(long, value_name = "EXPR")]
    fail_on: Vec<FailOn>,
    /// The largest |d| that is healthy, nats [default: 1; a run's own for run folders]
    #[arg(long, value_name = "NATS")]
    floor: Option<f64>,
    /// Rescore every record by this model: a folder in the Hugging Face layout
    #[arg(long, value_name = "DIR")]
    model: Option<String>,
    /// Of the model's weights and activations
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"], requires = "model")]
    dtype: String,
    /// Compare sides whose temperature, filters or logprobs mode differ
    #[arg(long)]
    allow_unlike: bool,
    /// Where audit.json and steps.jsonl go
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Model {
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
        /// tiny-jamba, tiny-mamba, tiny-llama, small-jamba or jamba-3b-shape
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

/// What a command that did its work has to say.
#[derive(Default)]
struct Done {
    text: String,
    /// For standard error, after the text.
    notes: Vec<String>,
    code: ExitCode,
}

impl From<String> for Done {
    fn from(text: String) -> Self {
        Self { text, ..Self::default() }
    }
}

fn main() -> ExitCode {
    let shown = execute(Cli::parse().command).and_then(|done| {
        show(&done.text).context("cannot write to standard output")?;
        done.notes.iter().for_each(|note| say(note));
        Ok(done.code)
    });
    shown.unwrap_or_else(|error| {
        say(&format!("error: {}", message(&error)));
        match error.is::<Interrupted>() {
            true => ExitCode::from(INTERRUPTED),
            false => ExitCode::FAILURE,
        }
    })
}

/// Where nobody reads it, the exit code still says so.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Prints what a command has to say. A reader that has read enough, as `head` does, is no error.
fn show(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

/// The error, and what to do where that is the same for every file.
fn message(error: &anyhow::Error) -> String {
    let text = run::told(error);
    let kind = error.chain().find_map(|cause| Some(cause.downcast_ref::<io::Error>()?.kind()));
    match kind {
        Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
            format!("{text}; make room there, or write to another disk")
        }
        _ => text,
    }
}

/// Does what was asked and returns what there is to say about it.
fn execute(command: Command) -> Result<Done> {
    let text = match command {
        Command::Audit(asked) => return audit(&asked),
        Command::Run { experiment, dry_run: true, fail_on, .. } => {
            let config = experiment.load()?;
            check_known(&fail_on, &config)?;
            run::dry_run(&config)?
        }
        Command::Run { experiment, out, resume, fail_on, .. } => {
            return run_once(&experiment.load()?, out, resume, &fail_on);
        }
        Command::Sweep { experiment, dry_run: true, .. } => run::plan_sweep(experiment.sweep())?,
        Command::Sweep { experiment, out, resume, .. } => {
            run::listen_for_ctrl_c()?;
            run::sweep(experiment.sweep(), out.as_deref(), resume)?
        }
        Command::Compare { left, right, fail_on_difference } => {
            let found = run::compare(&left, &right)?;
            let failed = fail_on_difference && found.differs();
            let code = if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS };
            return Ok(Done { code, ..found.to_string().into() });
        }
        Command::Bisect { run, step, all } => {
            run::listen_for_ctrl_c()?;
            run::bisect(&run, step.map(Step::new), all)?
        }
        Command::Score(score) => score.run()?,
        Command::Bench { experiment } => run::bench(&experiment.load()?)?,
        Command::Model(Model::Inspect { model, set }) => {
            run::describe_model(&model_config(&model, &set)?)?
        }
        Command::Model(Model::Init { preset, dir, from_gguf, seed, dtype }) => {
            let dtype = if dtype == "bf16" { Dtype::Bf16 } else { Dtype::F32 };
            match (preset, from_gguf) {
                (_, Some(file)) => save_gguf(&dir, &file, dtype)?,
                (Some(name), None) => save_preset(&dir, Preset::from_name(&name)?, seed, dtype)?,
                (None, None) => unreachable!("clap asks for one of the two"),
            }
            format!("{}\n", dir.display())
        }
        Command::Doctor { device } => {
            let asked = if device == "cuda" { config::Device::Cuda } else { config::Device::Cpu };
            let run::Checkup { text, usable } = run::doctor(asked);
            let code = if usable { ExitCode::SUCCESS } else { ExitCode::FAILURE };
            return Ok(Done { code, ..text.into() });
        }
        Command::Config { defaults: _ } => config::defaults_text(),
    };
    Ok(text.into())
}

fn audit(asked: &Audit) -> Result<Done> {
    let Audit { rollouts, format, fail_on, floor, model, dtype, allow_unlike, out } = asked;
    let model = model.as_ref().map(|model| scoring_config(model, dtype)).transpose()?;
    let audited = run::audit(&run::Audit {
        rollouts,
        format: format.as_deref(),
        fail_on,
        floor: *floor,
        allow_unlike: *allow_unlike,
        model: model.as_ref(),
        out: out.as_deref(),
    })?;
    let code = if audited.watch.held() { ExitCode::from(3) } else { ExitCode::SUCCESS };
    Ok(Done { text: audited.text, notes: audited.watch.lines(), code })
}

fn run_once(
    config: &Config,
    out: Option<PathBuf>,
    resume: bool,
    fail_on: &[FailOn],
) -> Result<Done> {
    check_known(fail_on, config)?;
    if config.sweep.is_some() {
        say("note: [sweep] is for `gapscope sweep`: this runs the file's own point");
    }
    let out = out.unwrap_or_else(|| PathBuf::from("runs").join(&config.name));
    run::listen_for_ctrl_c()?;
    let came = match resume {
        true => run::resume(config, &out)?.map(|summary| summary.to_string()),
        false => Some(run::run(config, &out)?.to_string()),
    };
    let came = came.unwrap_or_else(|| format!("{} has come to its end before", config.name));
    let watch = run::watch(fail_on, &out)?;
    Ok(Done {
        text: format!("{came}\nreport: {}\n", out.join("report.html").display()),
        notes: watch.lines(),
        code: if watch.held() { ExitCode::from(3) } else { ExitCode::SUCCESS },
    })
}

fn check_known(fail_on: &[FailOn], config: &Config) -> Result<()> {
    let tags = run::metric_tags(config);
    Ok(fail_on.iter().try_for_each(|expression| expression.check_known(&tags))?)
}

/// Of a model that scores and never learns.
fn scoring_config(model: &str, dtype: &str) -> Result<Config> {
    model_config(model, &[format!("model.dtype={dtype}"), "trainer.update=none".to_owned()])
}

/// The configuration of a file that names a model and nothing else.
fn model_config(model: &str, set: &[String]) -> Result<Config> {
    let key = if Preset::from_name(model).is_ok() { "preset" } else { "path" };
    let mut source = toml::Table::new();
    source.insert(key.to_owned(), model.into());
    let text = format!("name = \"model\"\nmodel = {}\n", toml::Value::Table(source));
    Ok(config::parse(&text, "model", set)?)
}
