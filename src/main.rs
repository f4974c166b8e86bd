//! The command line. Exit codes: 0 done, 1 the input or environment is at fault, 2 usage.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

use gapscope::config::{self, Config};
use gapscope::model::{save_preset, Preset};
use gapscope::run::{self, SweepFile};

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
        /// Print the resolved knobs and what they come to, and stop
        #[arg(long)]
        dry_run: bool,
    },
    /// One run a point of the file's [sweep], with a table and a chart rewritten after each
    Sweep {
        #[command(flatten)]
        experiment: Experiment,
        /// Where the sweep goes [default: runs/NAME]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Go on with a sweep that was interrupted: points that are done stay
        #[arg(long)]
        resume: bool,
        /// Print every point and the spikes it is predicted to have, and stop
        #[arg(long, conflicts_with = "resume")]
        dry_run: bool,
    },
    /// Throughput of generate, score and train
    Bench {
        #[command(flatten)]
        experiment: Experiment,
    },
    /// Look at a model folder, or make one
    #[command(subcommand)]
    Model(Model),
    /// Every key of an experiment file
    Config {
        /// Print a commented file of all keys with their defaults
        #[arg(long, required = true)]
        defaults: bool,
    },
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
    /// Write a preset with seeded random weights as a Hugging Face folder
    Init {
        /// tiny-jamba or jamba-3b-shape
        preset: String,
        /// The folder to make
        dir: PathBuf,
        /// Of the random weights
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Of the file's tensors
        #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
        dtype: String,
    },
}

fn main() -> ExitCode {
    let shown = execute(Cli::parse().command).and_then(|text| Ok(show(&text)?));
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Where nobody reads it, the exit code still says so.
            let _ = writeln!(io::stderr(), "error: {}", message(&error));
            ExitCode::FAILURE
        }
    }
}

/// Prints what a command has to say. A reader that has read enough, as `head` does, is no error.
fn show(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

/// The error and its causes, without those that the message before them quotes already.
fn message(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |text, cause| {
        let cause = cause.to_string();
        match text.is_empty() {
            true => cause,
            false if text.contains(&cause) => text,
            false => format!("{text}: {cause}"),
        }
    })
}

/// Does what was asked and returns what there is to say about it.
fn execute(command: Command) -> Result<String> {
    Ok(match command {
        Command::Run { experiment, dry_run: true, .. } => run::dry_run(&experiment.load()?)?,
        Command::Run { experiment, out, dry_run: false } => {
            let config = experiment.load()?;
            if config.sweep.is_some() {
                let note = "note: [sweep] is for `gapscope sweep`: this runs the file's own point";
                let _ = writeln!(io::stderr(), "{note}");
            }
            let out = out.unwrap_or_else(|| PathBuf::from("runs").join(&config.name));
            let summary = run::run(&config, &out)?;
            format!("{summary}\nreport: {}\n", out.join("report.html").display())
        }
        Command::Sweep { experiment, dry_run: true, .. } => run::plan_sweep(experiment.sweep())?,
        Command::Sweep { experiment, out, resume, .. } => {
            run::sweep(experiment.sweep(), out.as_deref(), resume)?
        }
        Command::Bench { experiment } => run::bench(&experiment.load()?)?,
        Command::Model(Model::Inspect { model, set }) => {
            run::describe_model(&model_config(&model, &set)?)?
        }
        Command::Model(Model::Init { preset, dir, seed, dtype }) => {
            let set = [format!("model.dtype={dtype}")];
            let config = model_config(&preset, &set)?;
            save_preset(&dir, Preset::from_name(&preset)?, seed, config.model.dtype)?;
            format!("{}\n", dir.display())
        }
        Command::Config { defaults: _ } => config::defaults_text(),
    })
}

/// The configuration of a file that names a model and nothing else.
fn model_config(model: &str, set: &[String]) -> Result<Config> {
    let key = if Preset::from_name(model).is_ok() { "preset" } else { "path" };
    let mut source = toml::Table::new();
    source.insert(key.to_owned(), model.into());
    let text = format!("name = \"model\"\nmodel = {}\n", toml::Value::Table(source));
    Ok(config::parse(&text, "model", set)?)
}
