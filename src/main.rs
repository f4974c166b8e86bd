//! The command line. Exit codes: 0 done; 1 the input or environment is at fault, or a difference
//! was to fail; 2 usage; 3 a `--fail-on` held; 130 Ctrl-C.

mod args;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use gapscope::base::Step;
use gapscope::config::{self, Config, Dtype, Leg};
use gapscope::model::{save_gguf, save_preset, Preset};
use gapscope::run::{self, FailOn, Interrupted, ScoreOptions, SweepFile, INTERRUPTED};

use args::{Audit, Bench, Cli, Command, Experiment, Faults, Model, Score};

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
        Command::Bisect { run, step, all, shuffle } => {
            run::listen_for_ctrl_c()?;
            run::bisect(&run, run::BisectOptions { step: step.map(Step::new), all, shuffle })?
        }
        Command::Explain { run, step, request } => {
            run::listen_for_ctrl_c()?;
            run::explain(&run, step.map(Step::new), request.as_deref())?
        }
        Command::Score(score) => score.run()?,
        Command::Judge { files } => run::judge(&files)?,
        Command::Faults(asked) => return faults(asked),
        Command::Bench(asked) => bench(&asked)?,
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

/// What is left to say when the points of a sweep have been shown one by one.
fn bench(Bench { experiment, only, products }: &Bench) -> Result<String> {
    if *products {
        return run::bench_products(&experiment.load()?);
    }
    let shown = |text: &str| show(text).context("cannot write to standard output");
    run::bench(experiment.sweep(), only, shown)?;
    Ok(String::new())
}

fn faults(asked: Faults) -> Result<Done> {
    run::listen_for_ctrl_c()?;
    let (text, all_right) = match asked {
        Faults::List => (run::list_faults(), true),
        Faults::Run { only, out } => run::fault_matrix(&out, &only)?,
        Faults::Swarm { seed, count, out } => run::swarm(&out, seed, count)?,
    };
    let code = if all_right { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    Ok(Done { code, ..text.into() })
}

fn audit(asked: &Audit) -> Result<Done> {
    if let Some(prompts) = &asked.prompts {
        return run_once(&server_config(asked, prompts)?, asked.out.clone(), false, &asked.fail_on);
    }
    let Audit { rollouts, format, fail_on, floor, model, dtype, allow_unlike, out, .. } = asked;
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

/// One step over every prompt of a file, four rollouts each.
fn server_config(asked: &Audit, prompts: &Path) -> Result<Config> {
    let text = std::fs::read_to_string(prompts)
        .with_context(|| format!("--prompts {}", prompts.display()))?;
    let count = text.lines().filter(|line| !line.trim().is_empty()).count();
    let url: toml::Value = asked.server.clone().into();
    let path: toml::Value = prompts.display().to_string().into();
    let mut set = vec![
        "name=audit".to_owned(),
        "steps=1".to_owned(),
        "trainer.update=none".to_owned(),
        format!("model.dtype={}", asked.dtype),
        "engine.kind=vllm".to_owned(),
        format!("engine.url={url}"),
        // How long a sequence may be is the server's to say.
        format!("engine.max_model_len={}", u32::MAX),
        format!("rollout.prompts_per_step={}", count.max(1)),
        "rollout.rollouts_per_prompt=4".to_owned(),
        "rollout.max_new_tokens=64".to_owned(),
        "task.kind=jsonl".to_owned(),
        "task.reward=none".to_owned(),
        format!("task.path={path}"),
    ];
    set.extend(asked.floor.map(|nats| format!("check.floor={nats:?}")));
    set.extend(asked.set.iter().cloned());
    model_config(asked.model.as_deref().unwrap_or_default(), &set)
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

impl Experiment {
    fn load(&self) -> Result<Config> {
        Ok(config::load(&self.file, &self.set)?)
    }

    fn sweep(&self) -> SweepFile<'_> {
        SweepFile { path: &self.file, set: &self.set }
    }
}
