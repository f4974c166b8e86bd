//! `--resume`: whatever ended a run, going on ends in the same bytes as if nothing had happened.

#[path = "../common/mod.rs"]
mod common;
mod kills;
mod states;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use common::run::{set, SMALL, SUMS};

/// An experiment and what is set over it.
struct Case<'a> {
    args: [&'a str; 2],
    set: &'a [&'a str],
}

/// Each step has requests that begin as decode rows and read what the step before left in their
/// blocks; a step takes 48 of the pool's 63.
const STALE: Case<'_> = Case {
    args: ["run", SUMS],
    set: &[
        "steps=40",
        "checkpoint.every=3",
        "trainer.update=none",
        "engine.batch_split=scheduled_tokens",
        "engine.max_num_batched_tokens=16",
    ],
};

/// Weights, moments and the frozen reference change what comes.
const TRAINING: Case<'_> = Case {
    args: ["run", SMALL],
    set: &[
        "steps=16",
        "checkpoint.every=2",
        "checkpoint.save_final=true",
        "check.greedy_eval_prompts=4",
        "trainer.warm_start.steps=8",
        "trainer.warm_start.batch=8",
        "trainer.kl_coef=0.1",
        "trainer.warmup_steps=20",
        "trainer.learning_rate=1e-3",
        "engine.free_list=lifo",
    ],
};

/// Learns, so that the floor is measured in some steps and goes on in others.
const FAST: Case<'_> = Case {
    args: ["run", SMALL],
    set: &[
        "steps=24",
        "checkpoint.every=2",
        "trainer.learning_rate=1e-2",
        "engine.numerics=fast",
        "model.dtype=bf16",
    ],
};

/// 17 bits reach block 42 of 64; the index's width is learnt in one step and told in later ones.
const WRAPPED: Case<'_> = Case {
    args: ["run", SUMS],
    set: &[
        "steps=30",
        "checkpoint.every=4",
        "checkpoint.keep=1",
        "trainer.update=none",
        "engine.state_index_bits=17",
        "engine.num_gpu_blocks_override=65",
    ],
};

/// All prompts begin with a block of filler, which is found in every later step; the stale kind is
/// kept over updates too. Random weights earn nothing: what changes them is their decay.
const CACHED: Case<'_> = Case {
    args: ["run", SUMS],
    set: &[
        "steps=16",
        "checkpoint.every=3",
        "trainer.update=adamw",
        "trainer.learning_rate=1e-2",
        "trainer.weight_decay=0.5",
        "engine.enable_prefix_caching=true",
        "engine.faults=[\"keep_cache_over_updates\"]",
        "engine.max_model_len=96",
        "task.prompt_tokens=64",
    ],
};

/// No checkpoint holds the pool's bytes, which no step leaves to the next: what short first chunks
/// and a prefix cache find is of the step itself.
const ASLEEP: Case<'_> = Case {
    args: ["run", SUMS],
    set: &[
        "steps=24",
        "checkpoint.every=3",
        "trainer.update=adamw",
        "trainer.learning_rate=1e-2",
        "trainer.weight_decay=0.5",
        "engine.sleep=drop_pool",
        "engine.enable_prefix_caching=true",
        "engine.batch_split=scheduled_tokens",
        "engine.max_num_batched_tokens=16",
        "engine.max_model_len=96",
        "task.prompt_tokens=64",
    ],
};

/// Of two engines, each of which reads what its own step before left.
const TWO_ENGINES: Case<'_> = Case {
    args: ["run", SUMS],
    set: &[
        "steps=30",
        "checkpoint.every=3",
        "trainer.update=adamw",
        "trainer.learning_rate=1e-2",
        "trainer.weight_decay=0.5",
        "engine.replicas=2",
        "engine.num_gpu_blocks_override=40",
        "engine.batch_split=scheduled_tokens",
        "engine.max_num_batched_tokens=16",
    ],
};

const SWEEP: Case<'_> = Case {
    args: ["sweep", "tests/fixtures/sweep.toml"],
    set: &["steps=24", "checkpoint.every=2", "sweep.stop_after_spikes=9"],
};

impl Case<'_> {
    fn command(&self, out: &Path, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapscope"));
        command.current_dir(env!("CARGO_MANIFEST_DIR")).args(self.args).args(set(self.set));
        command.args(more).arg("--out").arg(out);
        command
    }

    fn start(&self, out: &Path, more: &[&str]) -> Child {
        let mut command = self.command(out, more);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary starts")
    }

    /// To its end.
    fn run(&self, out: &Path, more: &[&str]) -> Output {
        self.command(out, more).output().expect("the binary starts")
    }

    /// To its end, with the exit code of success; returns what it said on standard error.
    fn succeed(&self, out: &Path, more: &[&str]) -> String {
        let output = self.run(out, more);
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        // One point of the sweep cannot be.
        let expected = if self.args[0] == "sweep" { 1 } else { 0 };
        assert_eq!(output.status.code(), Some(expected), "{stderr}");
        stderr
    }
}

/// Looks at what a child leaves until it is there, or the child is gone.
fn wait_until(child: &mut Child, there: impl Fn() -> bool) {
    while !there() && child.try_wait().expect("a child").is_none() {
        thread::sleep(Duration::from_micros(200));
    }
}

fn kill(mut child: Child) {
    child.kill().expect("a child of this process");
    child.wait().expect("a child of this process");
}

/// The last line on standard error.
fn refusal(output: &Output) -> String {
    let stderr = String::from_utf8(output.stderr.clone()).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    stderr.lines().last().expect("an error").to_owned()
}
