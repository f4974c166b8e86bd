//! Folders as a crash, a disk or a careless hand may leave them.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::common::records::{assert_same, assert_same_records, records};
use crate::common::run::{gapscope, read_json, SUMS};
use crate::{kill, refusal, wait_until, Case, STALE, SWEEP, TRAINING, TWO_ENGINES};

/// A run's end, and what one that was killed behind its second checkpoint has left.
struct Pair {
    parent: TempDir,
    whole: PathBuf,
    killed: PathBuf,
}

impl Pair {
    fn of(case: &Case<'_>) -> Self {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let [whole, killed] = ["whole", "killed"].map(|name| parent.path().join(name));
        case.succeed(&whole, &[]);
        let mut child = case.start(&killed, &[]);
        wait_until(&mut child, || killed.join("rollouts/step-00008.parquet").exists());
        kill(child);
        assert!(!killed.join("summary.json").exists(), "it did not come to its end");
        Self { parent, whole, killed }
    }

    /// Another copy of what was left.
    fn copy(&self, name: &str) -> PathBuf {
        let copy = self.parent.path().join(name.replace(' ', "-"));
        copy_folder(&self.killed, &copy);
        copy
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        let to = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            copy_folder(&path, &to);
        } else {
            fs::copy(&path, &to).expect("a file");
        }
    }
}

/// The checkpoints of a folder, the latest first.
fn checkpoints(run: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(run.join("checkpoints")).expect("a folder");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "safetensors"));
    paths.sort_by(|a, b| b.cmp(a));
    paths
}

fn write(path: PathBuf, bytes: impl AsRef<[u8]>) {
    fs::write(path, bytes).expect("written");
}

fn cut(path: &Path, by: impl Fn(usize) -> usize) {
    let bytes = fs::read(path).expect("a file");
    fs::write(path, &bytes[..by(bytes.len())]).expect("written");
}

#[test]
fn what_can_go_on_ends_in_the_same_bytes() {
    let pair = Pair::of(&STALE);
    let check = |what: &str, says: &str, spoil: &dyn Fn(&Path)| {
        let run = pair.copy(what);
        spoil(&run);
        let said = STALE.succeed(&run, &["--resume"]);
        assert!(said.contains(says), "{what}: {said}");
        assert_same_records(&run, &pair.whole);
    };
    let append = |path: PathBuf, bytes: &[u8]| {
        write(path.clone(), [&fs::read(path).expect("a file"), bytes].concat());
    };
    check("as it was", "sums: resuming after step ", &|_| {});
    check("a torn checkpoint", "cannot be used: it is torn", &|run| {
        cut(&checkpoints(run)[0], |len| len - 1);
    });
    check("an empty checkpoint", "going on from step ", &|run| cut(&checkpoints(run)[0], |_| 0));
    check("a half-written checkpoint", "", &|run| {
        write(run.join("checkpoints/.step-00030.safetensors.tmp"), "half");
    });
    check("torn rows", "", &|run| {
        append(run.join("steps.jsonl"), b"{\"step\":9");
        append(run.join("timing.jsonl"), b"{");
    });
    check("a torn event", "", &|run| {
        let file = fs::read_dir(run.join("tb")).expect("a folder").next().expect("a file");
        append(file.expect("an entry").path(), b"half");
    });
    check("later steps and an end", "", &|run| {
        write(run.join("rollouts/step-00031.parquet"), "");
        write(run.join("tokens/.step-00009.parquet.tmp"), "half");
        for file in ["summary.json", "findings.json", "report.html", ".summary.json.tmp"] {
            write(run.join(file), "{");
        }
    });
    check("a start that was cut off", "sums: no checkpoint yet, starting anew", &|run| {
        fs::remove_dir_all(run).expect("removed");
        fs::create_dir(run).expect("made");
        let config = fs::read_to_string(pair.killed.join("config.json")).expect("a file");
        write(run.join("config.json"), &config[..config.len() / 2]);
    });
    check("steps before the first checkpoint", "starting anew", &|run| {
        fs::remove_dir_all(run.join("checkpoints")).expect("removed");
        let rows = fs::read_to_string(run.join("steps.jsonl")).expect("a file");
        let first: Vec<&str> = rows.split_inclusive('\n').take(2).collect();
        write(run.join("steps.jsonl"), first.concat() + "{\"st");
    });
}

/// What a step generates and scores does not depend on how many ranks its weights lie on; what it
/// learns differs by the order of a sum.
#[test]
fn any_number_of_ranks_goes_on_from_any_others_checkpoint() {
    for (before, after) in [(1, 3), (2, 1)] {
        let ranks = |count: i32| format!("trainer.ranks={count}");
        let [before, after] = [ranks(before), ranks(after)];
        let case = Case { set: &[TRAINING.set, &[&before]].concat(), ..TRAINING };
        let pair = Pair::of(&case);
        let run = pair.copy(&after);
        let other = Case { set: &[TRAINING.set, &[&after]].concat(), ..TRAINING };
        let seeded = Case { set: &[other.set, &["seed=9"]].concat(), ..TRAINING };
        let refused = refusal(&seeded.run(&run, &["--resume"]));
        assert!(refused.contains("was run with seed = 3, and here it is 9"), "{refused}");

        let said = other.succeed(&run, &["--resume"]);
        let step = said.lines().find_map(|line| line.strip_prefix("small: resuming after step "));
        let step: u32 = step.expect("a checkpoint").parse().expect("a step");
        for step in 1..=(step + 1).min(16) {
            let file = format!("tokens/step-{step:05}.parquet");
            let [one, two] = [&run, &pair.whole].map(|run| fs::read(run.join(&file)).expect("it"));
            assert!(one == two, "{before} to {after}: {file}");
        }
        assert_eq!(read_json(&run.join("summary.json"))["steps_done"], 16);
        let now = &read_json(&run.join("config.json"))["trainer"]["ranks"];
        assert_eq!(format!("trainer.ranks={now}"), after);
    }
}

#[test]
fn what_cannot_is_refused_and_left_as_it_is() {
    let pair = Pair::of(&STALE);
    let check = |what: &str, args: &[&str], says: &str, spoil: &dyn Fn(&Path)| {
        let run = pair.copy(what);
        spoil(&run);
        let before = run.is_dir().then(|| records(&run));
        let said = refusal(&STALE.run(&run, args));
        assert!(said.contains(says), "{what}: {said}");
        match before {
            Some(before) => assert_same(&records(&run), &before),
            None => assert!(!run.exists(), "{what}"),
        }
    };
    let resume: &[&str] = &["--resume"];
    check("no folder", resume, "no run to resume, start it without --resume: ", &|run| {
        fs::remove_dir_all(run).expect("removed");
    });
    let says = "already holds a run (steps.jsonl): pass --resume to go on with it, or";
    check("without resume", &[], says, &|_| {});
    let other = ["--resume", "--set", "seed=9", "--set", "steps=41"];
    let says = "was run with seed = 3, and here it is 9: resume a run with its own configuration";
    check("another configuration", &other, says, &|_| {});
    check("no configuration", resume, "config.json is not what a run writes", &|run| {
        write(run.join("config.json"), "[");
    });
    check("all torn", resume, "there is no earlier one: run the experiment again", &|run| {
        checkpoints(run).iter().for_each(|path| cut(path, |len| len / 2));
    });
    check("none left", resume, "steps, one checkpoint every 3, and none is left in", &|run| {
        fs::remove_dir_all(run.join("checkpoints")).expect("removed");
    });
    check("rows gone", resume, "steps.jsonl holds 10 bytes, and the checkpoint was made", &|run| {
        cut(&run.join("steps.jsonl"), |_| 10);
    });
    check("another run's checkpoint", resume, "it is of another configuration", &|run| {
        let other = pair.parent.path().join("other");
        let case = Case { set: &[STALE.set, &["seed=9"]].concat(), ..STALE };
        let mut child = case.start(&other, &[]);
        wait_until(&mut child, || other.join("rollouts/step-00008.parquet").exists());
        kill(child);
        let foreign = checkpoints(&other);
        for (mine, theirs) in checkpoints(run).iter().zip(&foreign) {
            fs::copy(theirs, mine).expect("a file");
        }
    });
}

/// A run that only scores keeps no weights of its own.
#[test]
fn weights_that_were_changed_since_are_refused() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let model = parent.path().join("model");
    let make = |seed: &str| {
        gapscope()
            .args(["model", "init", "tiny-jamba"])
            .arg(&model)
            .args(["--seed", seed])
            .unwrap();
    };
    make("1");
    let text = fs::read_to_string(SUMS).expect("the experiment");
    let file = parent.path().join("sums.toml");
    write(file.clone(), text.replace("preset = \"tiny-jamba\"", &format!("path = {model:?}")));
    let case = Case { args: ["run", file.to_str().expect("UTF-8")], ..STALE };
    let pair = Pair::of(&case);
    fs::remove_dir_all(&model).expect("removed");
    make("2");
    let said = refusal(&case.run(&pair.killed, &["--resume"]));
    assert!(said.contains("the model's weights are not those that the run had"), "{said}");
    fs::remove_dir_all(&model).expect("removed");
    make("1");
    case.succeed(&pair.killed, &["--resume"]);
    assert_same_records(&pair.killed, &pair.whole);
}

#[test]
fn a_run_that_has_ended_is_left_as_it_is() {
    let pair = Pair::of(&STALE);
    let output = STALE.run(&pair.whole, &["--resume", "--fail-on", "finding"]);
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(said.starts_with("sums has come to its end before\nreport: "), "{said}");
    assert_eq!(output.status.code(), Some(3), "its findings count as ever");
    STALE.succeed(&pair.killed, &["--resume"]);
    assert_same_records(&pair.killed, &pair.whole);
}

/// The pool's bytes matter, and a run whose checkpoints lack them says so.
#[test]
fn a_pool_too_large_to_keep_is_not_exact() {
    let case = Case { set: &[STALE.set, &["checkpoint.pool_bytes_max=1KiB"]].concat(), ..STALE };
    let pair = Pair::of(&case);
    case.succeed(&pair.killed, &["--resume"]);
    let exact = |run: &Path| read_json(&run.join("summary.json"))["resume_exact"].clone();
    assert_eq!([exact(&pair.whole), exact(&pair.killed)], [false, false]);
    let rows = |run: &Path| fs::read_to_string(run.join("steps.jsonl")).expect("a file");
    assert_ne!(rows(&pair.whole), rows(&pair.killed), "stale reads find other bytes");

    let other = Pair::of(&STALE);
    assert_eq!(exact(&other.whole), true);
}

/// A checkpoint has the bytes of each engine's pool under its name, and they matter.
#[test]
fn every_engines_pool_is_kept() {
    let pair = Pair::of(&TWO_ENGINES);
    let latest = fs::read(&checkpoints(&pair.killed)[0]).expect("a checkpoint");
    let pools = |bytes: &[u8], engine: u32| {
        let name = format!("\"pool.{engine}.");
        bytes.windows(name.len()).filter(|part| *part == name.as_bytes()).count()
    };
    assert_eq!(pools(&latest, 0), pools(&latest, 1));
    assert!(pools(&latest, 0) > 0 && pools(&latest, 2) == 0);
    TWO_ENGINES.succeed(&pair.killed, &["--resume"]);
    assert_same_records(&pair.killed, &pair.whole);

    let case = Case {
        set: &[TWO_ENGINES.set, &["checkpoint.pool_bytes_max=1KiB"]].concat(),
        ..TWO_ENGINES
    };
    let pair = Pair::of(&case);
    case.succeed(&pair.killed, &["--resume"]);
    let rows = |run: &Path| fs::read_to_string(run.join("steps.jsonl")).expect("a file");
    assert_ne!(rows(&pair.whole), rows(&pair.killed), "stale reads find other bytes");
}

#[test]
fn a_folder_has_one_process() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    for (case, begun) in [(STALE, "steps.jsonl"), (SWEEP, "plan.json")] {
        let long = [case.set, &["steps=100000", "engine.state_index_bits=64"]].concat();
        let set: Vec<&str> =
            if case.args[0] == "run" { long } else { [case.set, &["steps=2000"]].concat() };
        let case = Case { set: &set, ..case };
        let out = parent.path().join(case.args[0]);
        let mut first = case.start(&out, &[]);
        wait_until(&mut first, || out.join(begun).exists());
        let said = refusal(&case.run(&out, &["--resume"]));
        assert!(said.contains("is in use: another process writes there"), "{said}");
        assert_eq!(first.try_wait().expect("a child"), None, "the first one goes on");
        kill(first);
    }
}
