//! Bad inputs as the binary meets them: exit code 1, one message that says what to do, and nothing
//! half-made. Beside these, `tests/cli` has experiment files, overrides and folders, `tests/score`
//! and `tests/audit` lines and dumps, `tests/model_folder` and `tests/gguf` weights, and
//! `tests/disk_full` disks.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::fixture;
use common::run::{gapscope, read_json, Run, SMALL};
use serde_json::{json, Value};
use tempfile::TempDir;

fn path(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// What every experiment here begins with.
const EXPERIMENT: &str = "name = \"bad\"\nsteps = 2\nengine.num_gpu_blocks_override = 64\n\
    engine.max_model_len = 64\nrollout.prompts_per_step = 3\nrollout.rollouts_per_prompt = 4\n\
    rollout.max_new_tokens = 4\ntrainer.update = \"none\"\n";
const TINY: &str = "model.preset = \"tiny-jamba\"\n";

/// The experiment with these lines ends with exit code 1 and this at the end of standard error,
/// `{}` in it being the folder. Returns whether there is anything of a run.
fn refused(folder: &TempDir, lines: &str, message: &str) -> bool {
    let (file, out) = (folder.path().join("bad.toml"), folder.path().join("run"));
    fs::write(&file, format!("{EXPERIMENT}{lines}")).expect("written");
    let mut command = gapscope();
    let output = command.args(["run", path(&file), "--out", path(&out)]).output();
    let output = output.expect("the binary starts");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    let message = message.replace("{}", path(folder.path()));
    assert!(stderr.ends_with(&format!("error: {message}\n")), "{stderr}, not {message}");
    assert_eq!(output.status.code(), Some(1), "{lines}");
    assert_eq!(output.stdout, b"", "{lines}");
    out.exists()
}

/// A copy of a fixture's folder, with a file more or another one changed.
fn model(name: &str, change: impl FnOnce(&Path)) -> (TempDir, String) {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let folder = parent.path().join("model");
    fs::create_dir(&folder).expect("a folder");
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(fixture(name).join(file), folder.join(file)).expect("copied");
    }
    change(&folder);
    let line = format!("model.path = {:?}\n", path(&folder));
    (parent, line)
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut json = read_json(path);
    change(&mut json);
    fs::write(path, json.to_string()).expect("written");
}

#[test]
fn a_tokenizer_of_another_model() {
    let (parent, model) = model("tiny-llama", |folder| {
        let file = folder.join("tokenizer.json");
        fs::copy(fixture("words/tokenizer.json"), &file).expect("copied");
        edit(&file, |json| json["model"]["vocab"]["is"] = 300.into());
    });
    let message = "{}/model/tokenizer.json: token id 300 (\"is\") is outside the model's \
        vocabulary of 256; the tokenizer belongs to another model";
    assert!(!refused(&parent, &model, message));
}

#[test]
fn a_rope_type_that_this_build_lacks() {
    let (parent, model) = model("tiny-llama", |folder| {
        edit(&folder.join("config.json"), |json| {
            json["rope_parameters"]["rope_type"] = "longrope".into();
        });
    });
    let message = "{}/model/config.json: rope_parameters.rope_type: is \"longrope\"; this build \
        knows \"default\" and \"llama3\"";
    assert!(!refused(&parent, &model, message));
}

/// Each with a stack of 64 MiB, in an address space that has room for a few dozen.
#[test]
#[cfg(target_os = "linux")]
fn more_threads_than_the_machine_starts() {
    for (lines, says) in [
        (
            "trainer.ranks = 1024\n",
            [
                "trainer.ranks = 1024 is as many threads, and the machine starts none for rank ",
                "; lower trainer.ranks, or allow more processes and memory (ulimit -u and -v, a \
              container's pids limit)\n",
            ],
        ),
        (
            "rollout.prompts_per_step = 512\nengine.replicas = 512\n",
            [
                "engine.replicas = 512 is as many threads, and the machine starts none for engine ",
                "; lower engine.replicas, or allow more processes and memory (ulimit -u and -v, a \
              container's pids limit)\n",
            ],
        ),
    ] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (file, out) = (folder.path().join("many.toml"), folder.path().join("run"));
        let experiment = EXPERIMENT.replace("rollout.prompts_per_step = 3\n", "");
        fs::write(&file, format!("{experiment}{TINY}{lines}")).expect("written");
        let mut shell = Command::new("sh");
        shell.args(["-c", "ulimit -v 4194304; exec \"$0\" run \"$1\" --out \"$2\""]);
        shell.arg(gapscope().get_program()).args([&file, &out]);
        shell.env("RUST_MIN_STACK", (64 << 20).to_string()).env("RAYON_NUM_THREADS", "2");
        let output = shell.output().expect("a shell");
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        let [begins, ends] = says;
        assert!(stderr.contains(&format!("error: {begins}")) && stderr.ends_with(ends), "{stderr}");
        assert_eq!(output.status.code(), Some(1), "{lines}");
    }
}

fn task(file: &Path) -> String {
    let file = path(file);
    format!("{TINY}task.kind = \"jsonl\"\ntask.path = {file:?}\ntask.reward = \"exact\"\n")
}

/// A task of one problem.
fn problem(folder: &Path, prompt: &str) -> String {
    let file = folder.join("problems.jsonl");
    fs::write(&file, format!("{}\n", json!({"prompt": prompt, "answer": "1"}))).expect("written");
    task(&file)
}

#[test]
fn a_prompt_longer_than_the_model() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let task = problem(folder.path(), &"x".repeat(64));
    // With its BOS token.
    let message = "request s1.p0.r0 has a prompt of 65 tokens, but engine.max_model_len = 64 \
        leaves room for 63 and one new token: shorten the prompt or raise max_model_len to at \
        least 66";
    refused(&folder, &task, message);
}

#[test]
fn a_folder_for_a_task_file() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let message = "{}: it is not a regular file; task.path must name a readable JSON Lines file";
    assert!(!refused(&folder, &task(folder.path()), message));
}

/// A run whose rewards a shell script gives ends in its first step, with nothing sampled counted.
#[test]
fn reward_commands() {
    let silent = "; its standard error is empty";
    for (script, timeout_s, failure) in [
        (
            "echo no model >&2; exit 7",
            60,
            "exit status: 7; its standard error ends\nno model".to_owned(),
        ),
        ("kill -SEGV $$", 60, format!("signal: 11 (SIGSEGV){silent}")),
        (
            "sleep 600",
            1,
            format!(
                "not done after 1 s with 12 completions, killed; raise task.reward_timeout_s or \
                 lower the work{silent}"
            ),
        ),
        (
            "yes 1",
            60,
            format!(
                "printed more than 4864 bytes for 12 completions, killed; it must print one \
                 number a line{silent}"
            ),
        ),
        (
            "sed 's/.*/great answer/'",
            60,
            format!("line 1 of its output is \"great answer\", not a finite number{silent}"),
        ),
        (
            "head -c 3 /dev/zero",
            60,
            format!("line 1 of its output is \"\\0\\0\\0\", not a finite number{silent}"),
        ),
    ] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let task = problem(folder.path(), "1+1=").replace("\"exact\"", "\"command\"");
        let command = format!(
            "task.reward_command = [\"sh\", \"-c\", {script:?}]\n\
             task.reward_timeout_s = {timeout_s}.0\n"
        );
        let message = format!("reward command \"sh\": {failure}");
        assert!(refused(&folder, &(task + &command), &message), "the run says that it failed");
        let summary = read_json(&folder.path().join("run/summary.json"));
        assert_eq!(summary["error"], message);
        assert_eq!(summary["steps_done"], 0);
    }
}

/// A library that is preloaded; `None`, and a word about it, where there is no C compiler.
fn preloaded(folder: &Path, defines: &[&str]) -> Option<PathBuf> {
    let library = folder.join("clock.so");
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-o", path(&library)]).args(defines);
    match command.arg(fixture("clock_set_back.c")).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(library)
        }
        Err(error) => {
            // Not eprintln, which the harness keeps to itself.
            writeln!(std::io::stderr(), "cc: {error}: no clock is set back").expect("stderr");
            None
        }
    }
}

/// All but time, which is in `timing.jsonl`, TensorBoard and `wall_s`.
fn timeless(run: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for name in ["config.json", "steps.jsonl", "findings.json"] {
        all.insert(name.to_owned(), fs::read(run.join(name)).expect("a file"));
    }
    let mut summary = read_json(&run.join("summary.json"));
    summary["wall_s"].take();
    all.insert("summary.json".to_owned(), summary.to_string().into_bytes());
    all
}

/// Nobody's clock decides anything: a run is the same, and its durations are not negative.
#[test]
#[cfg(target_os = "linux")]
fn a_clock_that_is_set_back() {
    let plain = Run::small(&[]);
    for defines in [&[][..], &["-DBEFORE_1970"]] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let Some(library) = preloaded(folder.path(), defines) else { return };
        let out = folder.path().join("run");
        let mut command = gapscope();
        command.args(["run", SMALL, "--out", path(&out)]).env("LD_PRELOAD", &library);
        command.assert().success();
        assert_eq!(timeless(&out), timeless(plain.root()), "{defines:?}");
        let timing = fs::read_to_string(out.join("timing.jsonl")).expect("a file");
        for line in timing.lines() {
            let row: BTreeMap<String, f64> = serde_json::from_str(line).expect("numbers");
            assert!(row.values().all(|seconds| *seconds >= 0.0), "{line}");
        }
        // It was this clock that the run looked at: the name of the event file has its seconds.
        let events = fs::read_dir(out.join("tb")).expect("a folder").next().expect("a file");
        let name = events.expect("an entry").file_name().into_string().expect("UTF-8");
        let seconds: u64 = name.split('.').nth(3).and_then(|s| s.parse().ok()).expect("seconds");
        assert_eq!(seconds == 0, !defines.is_empty(), "{name}");
    }
}
