//! What the report room writes, read back by the tools that people use: TensorBoard, polars,
//! DuckDB.
//!
//! `GAPSCOPE_PYTHON` names an interpreter that has the packages of tests/readers/requirements.txt.
//! Where it is unset these tests say so and check nothing; the writers' own tests still run.

#[path = "../common/mod.rs"]
mod common;
mod run;

use std::io::Write;
use std::path::Path;
use std::process::Command;

use gapscope::base::{
    BlockId, Contract, EngineIndex, EngineStep, Generation, LogProb, RequestId, Step, TokenId,
    WeightVersion,
};
use gapscope::engine::{
    CachedBlock, Completion, FinishReason, Life, Phase, SampledToken, StateBlock,
};
use gapscope::gap::{Finding, FindingKind, Legs};
use gapscope::report::parquet::{write_rollouts, write_tokens};
use gapscope::report::sweep::{spike_map_png, Sweep};
use gapscope::report::tensorboard::{FileName, SessionEnd, Writer, GAP_FIRST};
use gapscope::report::{flatten, RunFolder, Scalar};
use gapscope::rollout::Rollout;
use serde_json::{json, Value};

/// The JSON that a script of tests/readers prints; `None` where there is no interpreter.
fn read_with(script: &str, paths: &[&Path]) -> Option<Value> {
    let printed = read_lines_with(script, paths)?;
    assert_eq!(printed.len(), 1, "{script} prints one document");
    printed.into_iter().next()
}

/// As [`read_with`], of a script that prints several documents.
fn read_lines_with(script: &str, paths: &[&Path]) -> Option<Vec<Value>> {
    let Some(python) = std::env::var_os("GAPSCOPE_PYTHON") else {
        // Not eprintln, which the harness keeps to itself.
        let mut stderr = std::io::stderr();
        writeln!(stderr, "GAPSCOPE_PYTHON is not set: {script} checks nothing").unwrap();
        return None;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/readers").join(script);
    let output = Command::new(&python).arg(script).args(paths).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", python.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let documents = serde_json::Deserializer::from_slice(&output.stdout).into_iter();
    Some(documents.map(Result::unwrap).collect())
}

const NAME: FileName<'_> = FileName { seconds: 1_700_000_000, host: "host", pid: 42, n: 0 };

fn scalar(tag: &str, value: Option<f64>) -> Scalar {
    Scalar { tag: tag.to_owned(), value, description: "max |d|, *nats*".to_owned() }
}

fn finding() -> Finding {
    Finding {
        kind: FindingKind::AddressWrap,
        leg: Legs::DecodeTrainer,
        step: Step::new(3),
        engine: None,
        requests: vec![],
        requests_total: 0,
        blocks: vec![],
        first_bad_position: None,
        index_bits: None,
        message: "<b>block</b> 1366 \u{e9}".to_owned(),
    }
}

#[test]
fn tensorboard_reads_back_every_tag_step_and_value() {
    let parent = tempfile::tempdir().unwrap();
    let folder = RunFolder::create(parent.path().join("run")).unwrap();
    let mut writer = Writer::create(&folder.tensorboard(), &NAME, 100.5).unwrap();
    let settings = flatten(&json!({"name": "x", "engine": {"bits": 22, "force": false},
        "legs": ["decode", "trainer"], "temperature": 0.6, "override": null}));
    writer.layout(100.5, GAP_FIRST).unwrap();
    writer.session_start(100.5, "x", &settings, &["gap/logp_abs_diff_max"]).unwrap();
    let gaps = [Some(0.0), None, Some(0.1), Some(f64::NAN), Some(f64::INFINITY)];
    for (i, gap) in gaps.into_iter().enumerate() {
        let (step, wall_time_s) = (Step::new(i as u64 + 1), 101.25 + i as f64);
        let scalars = [scalar("gap/logp_abs_diff_max", gap), scalar("reward/mean", Some(0.5))];
        writer.scalars(step, wall_time_s, &scalars).unwrap();
        writer.flush().unwrap();
    }
    writer.histogram(Step::new(1), 1.0, "gap_detail/d", "d", &[0.0, 0.0, f64::NAN]).unwrap();
    writer.histogram(Step::new(2), 2.0, "gap_detail/d", "d", &[]).unwrap();
    let values: Vec<f64> = (0..=30).map(f64::from).collect();
    writer.histogram(Step::new(3), 3.0, "gap_detail/d", "d", &values).unwrap();
    writer.findings(Step::new(3), 3.0, &[finding(), finding()]).unwrap();
    let image = spike_map_png(&Sweep { name: "x", axes: &[], points: &[] });
    writer.image(Step::new(3), 3.0, "sweep/spike_map", "a row a point", &image).unwrap();
    writer.session_end(109.0, SessionEnd::Success).unwrap();
    writer.flush().unwrap();

    let Some(found) = read_with("read_tensorboard.py", &[&folder.tensorboard()]) else { return };
    let f32_of_a_tenth = f64::from(0.1_f32);
    assert_eq!(
        found["scalars"],
        json!({
            "gap/logp_abs_diff_max": [[1, 101.25, 0.0], [3, 103.25, f32_of_a_tenth],
                [4, 104.25, "NaN"], [5, 105.25, "inf"]],
            "reward/mean": [[1, 101.25, 0.5], [2, 102.25, 0.5], [3, 103.25, 0.5], [4, 104.25, 0.5],
                [5, 105.25, 0.5]],
        })
    );
    let buckets: Vec<_> = (0..30).map(|i| json!([f64::from(i), f64::from(i) + 1.0, 1.0])).collect();
    let mut full = buckets;
    full[29][2] = json!(2.0);
    let line = "- **address_wrap** at step 3: <b>block</b> 1366 \u{e9}";
    assert_eq!(
        found["tensors"],
        json!({
            "gap_detail/d": [[1, 1.0, [[0.0, 0.0, 2.0]]], [2, 2.0, []], [3, 3.0, full]],
            "findings": [[3, 3.0, format!("{line}\n{line}")]],
            "sweep/spike_map": [[3, 3.0, ["12", "20", hex(&image.png)]]],
        })
    );
    assert_eq!(found["files"][0][0], json!(["file_version", 0]));
    check_metadata(&found);
    check_hparams(&found["hparams"]);
    check_layout(&found["layout"]);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Data classes: 1 is scalar, 2 is tensor, 3 is blob; the fast reader shows a tag only under its
/// class.
fn check_metadata(found: &Value) {
    assert_eq!(
        found["plugins"],
        json!({
            "gap/logp_abs_diff_max": ["scalars", 1], "reward/mean": ["scalars", 1],
            "gap_detail/d": ["histograms", 2], "findings": ["text", 2],
            "sweep/spike_map": ["images", 3],
            "custom_scalars__config__": ["custom_scalars", 2],
            "_hparams_/experiment": ["hparams", 2], "_hparams_/session_start_info": ["hparams", 2],
            "_hparams_/session_end_info": ["hparams", 2],
        })
    );
    assert_eq!(
        found["descriptions"]["gap/logp_abs_diff_max"],
        json!(["gap/logp_abs_diff_max", "max |d|, *nats*"])
    );
}

fn check_hparams(hparams: &Value) {
    assert_eq!(
        hparams["session_start"],
        json!({
            "hparams": {"name": "x", "engine.bits": 22.0, "engine.force": false,
                "legs": "[\"decode\",\"trainer\"]", "temperature": 0.6},
            "start_time_secs": 100.5,
        })
    );
    assert_eq!(hparams["session_end"], json!({"status": "STATUS_SUCCESS", "end_time_secs": 109.0}));
    let experiment = &hparams["experiment"];
    assert_eq!(experiment["name"], "x");
    assert_eq!(experiment["metric_infos"], json!([{"name": {"tag": "gap/logp_abs_diff_max"}}]));
    assert_eq!(
        experiment["hparam_infos"],
        json!([
            {"name": "engine.bits", "type": "DATA_TYPE_FLOAT64"},
            {"name": "engine.force", "type": "DATA_TYPE_BOOL"},
            {"name": "legs", "type": "DATA_TYPE_STRING"},
            {"name": "name", "type": "DATA_TYPE_STRING"},
            {"name": "temperature", "type": "DATA_TYPE_FLOAT64"},
        ])
    );
}

fn check_layout(layout: &Value) {
    let titles = |list: &Value| -> Vec<String> {
        let items = list.as_array().unwrap().iter();
        items.map(|item| item["title"].as_str().unwrap().to_owned()).collect()
    };
    let categories = &layout["category"];
    assert_eq!(titles(categories), GAP_FIRST.iter().map(|c| c.title).collect::<Vec<_>>());
    assert!(categories[0].get("closed").is_none(), "the gap is open");
    let charts = &categories[0]["chart"];
    assert_eq!(titles(charts), GAP_FIRST[0].charts.iter().map(|c| c.title).collect::<Vec<_>>());
    assert_eq!(charts[0]["multiline"]["tag"], json!(["gap/logp_abs_diff_(mean|p999|max)$"]));
}

/// Steps 0 to 150, then a resume at 100 that goes on to 200: each step once, and from 100 on the
/// second session's. (tensorflow/tensorboard#3732 is the curve that runs back on itself.)
#[test]
fn k27_tensorboard_reads_each_step_of_a_resumed_run_once() {
    let folder = tempfile::tempdir().unwrap();
    let session = |writer: &mut Writer, steps: std::ops::RangeInclusive<u64>, value: f64| {
        for step in steps {
            let scalars = [scalar("gap/logp_abs_diff_max", Some(value))];
            writer.scalars(Step::new(step), 1.0, &scalars).unwrap();
        }
        writer.flush().unwrap();
    };
    session(&mut Writer::create(folder.path(), &NAME, 1.0).unwrap(), 0..=150, 1.0);
    let mut second = Writer::resume(folder.path(), &NAME, 2.0, Step::new(100)).unwrap();
    session(&mut second, 100..=200, 2.0);

    let Some(found) = read_with("read_tensorboard.py", &[folder.path()]) else { return };
    let expect: Vec<_> =
        (0..=200).map(|step| json!([step, 1.0, if step < 100 { 1.0 } else { 2.0 }])).collect();
    assert_eq!(found["scalars"]["gap/logp_abs_diff_max"], json!(expect));
    assert_eq!(found["files"][1][0], json!(["file_version", 0]));
    assert_eq!(found["files"][1][1], json!(["session_log", 100]));
}

fn sampled(token: u32, logp: f32, phase: Phase) -> SampledToken {
    SampledToken {
        token: TokenId::new(token),
        logp: LogProb::new(logp),
        engine_step: EngineStep::new(u64::MAX),
        phase,
        scheduled_tokens: 3,
        computed_tokens: 0,
        batch_row: 2,
        batch_rows: 32,
        padding_rows: 8,
    }
}

fn rollout() -> Rollout {
    Rollout {
        completion: Completion {
            id: RequestId::new(12, 3, 7),
            engine: EngineIndex::new(2),
            prompt: [256, 1, u32::MAX].map(TokenId::new).to_vec(),
            tokens: vec![
                sampled(5, -0.1, Phase::Prefill),
                sampled(6, f32::NAN, Phase::Decode),
                sampled(7, f32::NEG_INFINITY, Phase::Decode),
            ],
            finish_reason: FinishReason::Stop,
            contract: Contract { temperature: 0.5, top_k: 40, ..Contract::PLAIN },
            weight_version: WeightVersion::new(11),
            engine_fingerprint: Some(u64::MAX),
            lives: vec![Life {
                engine_step: EngineStep::new(1),
                phase: Phase::Prefill,
                scheduled_tokens: 2,
                sampled_before: 0,
                state_blocks: vec![
                    StateBlock {
                        block: BlockId::new(1366),
                        generation: Generation::new(2),
                        previous_owner: Some(RequestId::new(11, 0, 1)),
                    },
                    StateBlock {
                        block: BlockId::new(9),
                        generation: Generation::new(1),
                        previous_owner: None,
                    },
                ],
                attn_blocks: vec![BlockId::new(4)],
                cached: vec![CachedBlock {
                    block: BlockId::new(4),
                    filled_by: RequestId::new(11, 0, 1),
                    weight_version: WeightVersion::new(10),
                    tokens: 16,
                }],
                taken: vec![],
            }],
            preemptions: 1,
            cached_tokens: 16,
        },
        prompt_text: "1+1=\0\u{e9}".to_owned(),
        completion_text: "2\n".to_owned(),
        reward: 1.0,
        advantage: -0.25,
        loss_mask: vec![true, true, false],
        prefill: None,
        trainer: Some(vec![Some(LogProb::new(-0.25)), None, Some(LogProb::new(0.0))]),
        reference: None,
        trainer_fingerprint: None,
    }
}

/// Columns of the rollouts: name, type in polars, type in DuckDB, value in the one row.
fn rollout_columns() -> Vec<(&'static str, &'static str, &'static str, Value)> {
    let (list, duck_list) = ("List(UInt32)", "UINTEGER[]");
    vec![
        ("request_id", "String", "VARCHAR", json!("s12.p3.r7")),
        ("step", "UInt64", "UBIGINT", json!(12)),
        ("prompt_id", "UInt32", "UINTEGER", json!(3)),
        ("rollout_idx", "UInt32", "UINTEGER", json!(7)),
        ("prompt_token_ids", list, duck_list, json!([256, 1, u32::MAX])),
        ("completion_token_ids", list, duck_list, json!([5, 6, 7])),
        ("prompt_text", "String", "VARCHAR", json!("1+1=\0\u{e9}")),
        ("completion_text", "String", "VARCHAR", json!("2\n")),
        ("reward", "Float64", "DOUBLE", json!(1.0)),
        ("advantage", "Float64", "DOUBLE", json!(-0.25)),
        ("finish_reason", "String", "VARCHAR", json!("stop")),
        ("logprobs_mode", "String", "VARCHAR", json!("raw_logprobs")),
        ("temperature", "Float32", "FLOAT", json!(0.5)),
        ("top_p", "Float32", "FLOAT", json!(1.0)),
        ("top_k", "UInt32", "UINTEGER", json!(40)),
        ("engine", "String", "VARCHAR", json!("embedded")),
        ("engine_index", "UInt32", "UINTEGER", json!(2)),
        ("weight_version", "UInt64", "UBIGINT", json!(11)),
        ("engine_fingerprint", "UInt64", "UBIGINT", json!(u64::MAX)),
        ("trainer_fingerprint", "UInt64", "UBIGINT", json!(null)),
        ("state_blocks", list, duck_list, json!([1366, 9])),
        ("state_block_generations", list, duck_list, json!([2, 1])),
        ("state_block_previous_owners", "List(String)", "VARCHAR[]", json!(["s11.p0.r1", null])),
        ("attn_blocks", list, duck_list, json!([4])),
        ("preemptions", "UInt32", "UINTEGER", json!(1)),
        ("cached_tokens", "UInt32", "UINTEGER", json!(16)),
        ("cached_blocks", list, duck_list, json!([4])),
        ("cached_block_tokens", list, duck_list, json!([16])),
        ("cached_block_filled_by", "List(String)", "VARCHAR[]", json!(["s11.p0.r1"])),
        ("cached_block_weight_versions", "List(UInt64)", "UBIGINT[]", json!([10])),
    ]
}

/// Columns of the tokens: name, type in polars, type in DuckDB, values in the three rows.
fn token_columns() -> Vec<(&'static str, &'static str, &'static str, [Value; 3])> {
    let all = |value: Value| [value.clone(), value.clone(), value];
    let absent = || all(json!(null));
    let tenth = f64::from(-0.1_f32);
    vec![
        ("request_id", "String", "VARCHAR", all(json!("s12.p3.r7"))),
        ("position", "UInt32", "UINTEGER", [json!(3), json!(4), json!(5)]),
        ("token_id", "UInt32", "UINTEGER", [json!(5), json!(6), json!(7)]),
        ("loss_mask", "Boolean", "BOOLEAN", [json!(true), json!(true), json!(false)]),
        ("logp_decode", "Float32", "FLOAT", [json!(tenth), json!("NaN"), json!("-inf")]),
        ("logp_prefill", "Float32", "FLOAT", absent()),
        ("logp_trainer", "Float32", "FLOAT", [json!(-0.25), json!(null), json!(0.0)]),
        ("logp_reference", "Float32", "FLOAT", absent()),
        ("engine_step", "UInt64", "UBIGINT", all(json!(u64::MAX))),
        ("phase", "String", "VARCHAR", [json!("prefill"), json!("decode"), json!("decode")]),
        ("scheduled_tokens", "UInt32", "UINTEGER", all(json!(3))),
        ("computed_tokens", "UInt32", "UINTEGER", all(json!(0))),
        ("batch_row", "UInt32", "UINTEGER", all(json!(2))),
        ("batch_rows", "UInt32", "UINTEGER", all(json!(32))),
        ("padding_rows", "UInt32", "UINTEGER", all(json!(8))),
    ]
}

#[test]
fn polars_and_duckdb_read_both_files() {
    let parent = tempfile::tempdir().unwrap();
    let folder = RunFolder::create(parent.path().join("run")).unwrap();
    let (rollouts, tokens) = (folder.rollouts(Step::new(12)), folder.tokens(Step::new(12)));
    write_rollouts(&rollouts, &[rollout()], "embedded").unwrap();
    write_tokens(&tokens, &[rollout()]).unwrap();
    let Some(found) = read_with("read_parquet.py", &[&rollouts, &tokens]) else { return };

    let columns = rollout_columns();
    let row: Vec<_> = columns.iter().map(|column| &column.3).collect();
    let token_columns = token_columns();
    let token_rows =
        [0, 1, 2].map(|i| token_columns.iter().map(|column| &column.3[i]).collect::<Vec<_>>());
    let check = |reader: &str, types: Vec<[&str; 2]>, token_types: Vec<[&str; 2]>| {
        let expect = json!([
            {"schema": types, "rows": [row]},
            {"schema": token_types, "rows": token_rows},
        ]);
        assert_eq!(found[reader], expect, "{reader}");
    };
    check(
        "polars",
        columns.iter().map(|column| [column.0, column.1]).collect(),
        token_columns.iter().map(|column| [column.0, column.1]).collect(),
    );
    check(
        "duckdb",
        columns.iter().map(|column| [column.0, column.2]).collect(),
        token_columns.iter().map(|column| [column.0, column.2]).collect(),
    );
}
