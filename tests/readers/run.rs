//! The files of a whole run.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use gapscope::report::parquet::TokenRow;
use serde_json::{json, Value};

use crate::common::run::{set, Run, SMALL};
use crate::{check_layout, read_lines_with, read_with};

/// A tag's values as TensorBoard holds them, f32, with absent steps left out.
fn by_tag(steps: &[Value]) -> BTreeMap<String, Vec<(u64, f64)>> {
    let mut tags: BTreeMap<String, Vec<(u64, f64)>> = BTreeMap::new();
    for row in steps {
        let step = row["step"].as_u64().expect("a step");
        for (tag, value) in row.as_object().expect("a row").iter().filter(|(tag, _)| *tag != "step")
        {
            let points = tags.entry(tag.clone()).or_default();
            if !value.is_null() {
                let value = value.as_f64().unwrap_or_else(|| panic!("{tag} is finite here"));
                points.push((step, f64::from(value as f32)));
            }
        }
    }
    tags.retain(|_, points| !points.is_empty());
    tags
}

/// What `steps.jsonl` has, TensorBoard gives back: every tag, step and value, and beside them the
/// seconds alone.
#[test]
fn tensorboard_reads_back_a_run() {
    let run = Run::small(&[
        "check.legs=[\"prefill\",\"reference\"]",
        "engine.faults=[\"engine_weight_ulp\"]",
        "trainer.warm_start.steps=4",
        "trainer.kl_coef=0.1",
        "trainer.importance_cap=2",
    ]);
    let Some(found) = read_with("read_tensorboard.py", &[&run.folder.tensorboard()]) else {
        return;
    };
    let points = |tag: &str| -> Vec<(u64, f64)> {
        let points = found["scalars"][tag].as_array().unwrap_or_else(|| panic!("no tag {tag}"));
        points
            .iter()
            .map(|point| (point[0].as_u64().unwrap(), point[2].as_f64().unwrap()))
            .collect()
    };
    let expected = by_tag(&run.steps());
    assert!(expected.len() > 60, "{} tags", expected.len());
    for (tag, wanted) in &expected {
        assert_eq!(points(tag), *wanted, "{tag}");
        let description = found["descriptions"][tag][1].as_str().unwrap();
        assert!(!description.is_empty(), "{tag} is not described");
    }
    let tags: BTreeSet<&str> =
        found["scalars"].as_object().unwrap().keys().map(String::as_str).collect();
    let extra: Vec<&str> = tags
        .into_iter()
        .filter(|tag| !expected.contains_key(*tag) && !tag.starts_with("perf/"))
        .collect();
    assert_eq!(extra, ["warm_start/loss"]);
    assert_eq!(points("warm_start/loss").iter().map(|p| p.0).collect::<Vec<_>>(), [1, 2, 3, 4]);
    let headlines = expected.keys().filter(|tag| tag.starts_with("gap/")).count();
    assert_eq!(headlines, 8, "the first page stays readable");

    let of_each_step = |tag: &str| found["tensors"][tag].as_array().expect(tag).len();
    assert_eq!((of_each_step("gap_detail/d"), of_each_step("findings")), (3, 3));
    check_layout(&found["layout"]);
    let hparams = &found["hparams"]["session_start"]["hparams"];
    assert_eq!(hparams["engine.faults"], "[\"engine_weight_ulp\"]");
    assert_eq!((&hparams["seed"], &hparams["trainer.kl_coef"]), (&json!(3.0), &json!(0.1)));
    assert_eq!(found["hparams"]["session_end"]["status"], "STATUS_SUCCESS");
}

/// A run that was killed and resumed reads as one that was not: each step once, the warm start's
/// points too, which are counted apart.
#[test]
fn tensorboard_reads_each_step_of_a_killed_run_once() {
    for warm in [0, 9] {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("run");
        let warm_start = format!("trainer.warm_start.steps={warm}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapscope"));
        command.current_dir(env!("CARGO_MANIFEST_DIR")).args(["run", SMALL]);
        command.args(set(&["steps=12", "checkpoint.every=3", &warm_start]));
        command.arg("--out").arg(&root);
        let mut killed = command.spawn().unwrap();
        while !root.join("rollouts/step-00005.parquet").exists() {
            assert_eq!(killed.try_wait().unwrap(), None, "it ended before its fifth step");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        killed.kill().unwrap();
        killed.wait().unwrap();
        assert!(command.arg("--resume").status().unwrap().success());

        let Some(found) = read_with("read_tensorboard.py", &[&root.join("tb")]) else { return };
        assert_eq!(found["files"].as_array().unwrap().len(), 2);
        let steps = |tag: &str| -> Vec<u64> {
            let points = found["scalars"][tag].as_array().map_or(&[][..], Vec::as_slice);
            points.iter().map(|point| point[0].as_u64().unwrap()).collect()
        };
        assert_eq!(steps("gap/logp_abs_diff_max"), (1..=12).collect::<Vec<_>>());
        assert_eq!(steps("perf/score_s"), (1..=12).collect::<Vec<_>>());
        assert_eq!(steps("warm_start/loss"), (1..=warm).collect::<Vec<_>>());
    }
}

/// The three lines of polars find the tokens that the records hold.
#[test]
fn three_lines_of_polars_find_the_worst_tokens() {
    let run = Run::small(&["engine.faults=[\"engine_weight_ulp\"]"]);
    let Some(found) = read_lines_with("worst_tokens.py", &[run.root()]) else { return };
    let gap = |row: &TokenRow| {
        let (decode, trainer) = (row.logp_decode.unwrap().get(), row.logp_trainer.unwrap().get());
        (trainer - decode).abs()
    };
    let tokens = run.tokens();
    let mut gaps: Vec<f32> = tokens.iter().map(gap).collect();
    gaps.sort_by(|a, b| b.total_cmp(a));
    assert!(gaps[0] > gaps[9], "ten equal gaps would not show an order");
    assert_eq!(run.summary()["gap_max"], f64::from(gaps[0]));
    assert_eq!(found.len(), 10);
    for (row, expected) in found.iter().zip(gaps) {
        let same = |token: &&TokenRow| {
            row["request_id"] == token.request.to_string()
                && row["position"] == u64::from(token.position.get())
        };
        let token = tokens.iter().find(same).expect("the token is one of the run");
        assert_eq!(row["token_id"], u64::from(token.token_id.get()));
        assert_eq!((gap(token), row["gap"].as_f64().unwrap() as f32), (expected, expected));
    }
}
