//! A dump beside a model at hand: ids and lengths first, then who agrees with whom, and of what
//! distribution each side is.

use std::path::{Path, PathBuf};

use gapscope::config::Dtype;
use gapscope::model::{load_plan, save_folder, HfConfig, Plan};
use serde_json::{json, Value};
use tempfile::TempDir;

use super::common::run::{gapscope, Run};
use super::common::{fixture, Golden};
use super::dump::write;
use super::{audited, outcome, path};

/// A model of as many tokens as there are `logits`, and these whatever it reads.
fn known_logits(folder: &TempDir, logits: &[f64]) -> PathBuf {
    let config = load_plan(&fixture("tiny-llama")).expect("the fixture").config;
    let plan = Plan::new(HfConfig {
        vocab_size: logits.len(),
        tie_word_embeddings: false,
        bos_token_id: None,
        pad_token_id: None,
        eos_token_ids: Vec::new(),
        ..config
    });
    let hidden = plan.config.hidden_size;
    // Every layer adds nothing to a row of ones, whose norm is 1 / sqrt(1 + epsilon) all through.
    let share = (1.0 + f64::from(plan.config.rms_norm_eps)).sqrt() / hidden as f64;
    let mut units: Vec<Vec<f32>> = plan.units.iter().map(|unit| vec![0.0; unit.len()]).collect();
    let head = units[0].len() - hidden * logits.len();
    units[0][..head].fill(1.0);
    for (row, logit) in units[0][head..].chunks_exact_mut(hidden).zip(logits) {
        row.fill((logit * share) as f32);
    }
    let model = folder.path().join("model");
    save_folder(&model, &plan, &units, Dtype::F32).expect("saved");
    model
}

/// A prime-rl record of one prompt token 0 and these completion tokens; `more` are further keys.
fn record(index: usize, tokens: &[u32], infer: &[f64], train: &[f64], more: &str) -> String {
    let with = |first: Value, rest: Vec<Value>| -> Value { [vec![first], rest].concat().into() };
    let all = |values: &[f64]| with(json!(0.0), values.iter().map(|&v| logp(v)).collect());
    let mut record = json!({
        "schema_version": 1, "step": 3, "rank": 0, "export_sequence_idx": index,
        "token_ids": with(json!(0), tokens.iter().map(|&id| json!(id)).collect()),
        "loss_mask": with(json!(false), vec![json!(true); tokens.len()]),
        "inference_logprobs": all(infer),
        "trainer_logprobs": all(train),
    });
    let more: Value = serde_json::from_str(&format!("{{{more}}}")).expect("keys and values");
    let record_keys = record.as_object_mut().expect("an object");
    record_keys.extend(more.as_object().expect("an object").clone());
    format!("{record}\n")
}

fn logp(value: f64) -> Value {
    if value.is_nan() {
        Value::Null
    } else {
        json!(value)
    }
}

/// log p of each token under logits / `temperature`, over the `kept` likeliest.
fn log_softmax(logits: &[f64], temperature: f64, kept: usize) -> Vec<f64> {
    let scaled: Vec<f64> = logits.iter().map(|x| x / temperature).collect();
    let mut sorted = scaled.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let total: f64 = sorted[..kept].iter().map(|x| x.exp()).sum();
    scaled.iter().map(|x| x - total.ln()).collect()
}

fn of_tokens(all: &[f64], tokens: &[u32]) -> Vec<f64> {
    tokens.iter().map(|&token| all[token as usize]).collect()
}

/// The audit of records by a model of known logits: text and the step's `rescored`.
fn by_known(logits: &[f64], records: &str, args: &[&str]) -> (String, Value) {
    let folder = tempfile::tempdir().expect("a folder");
    let model = known_logits(&folder, logits);
    let dump = write(folder.path(), "step_3/rank_0.jsonl", records);
    let all = [&["--rollouts", path(&dump), "--model", path(&model)], args].concat();
    let (text, audit) = audited(folder.path(), &all);
    (text, audit["steps"][0].clone())
}

fn close(what: &str, found: &Value, expected: f64, tolerance: f64) {
    let number = found.as_f64().unwrap_or_else(|| panic!("{what} has no data"));
    assert!((number - expected).abs() <= tolerance, "{what}: {number}, not {expected}");
}

/// Logits 2, 1, 0 and a trainer that divides them by 0.5 (huggingface/trl#4159).
#[test]
fn k19_a_temperature_on_one_side_is_found_from_the_models_logits() {
    let logits = [2.0, 1.0, 0.0];
    let tokens = [0, 1, 2, 0, 2];
    let (raw, cold) = (log_softmax(&logits, 1.0, 3), log_softmax(&logits, 0.5, 3));
    assert!((raw[0] - -0.407_606).abs() < 1e-6 && (cold[0] - -0.142_932).abs() < 1e-6);
    assert!((raw[2] - -2.407_606).abs() < 1e-6 && (cold[2] - -4.142_932).abs() < 1e-6);
    let line = record(0, &tokens, &of_tokens(&raw, &tokens), &of_tokens(&cold, &tokens), "");
    let (text, step) = by_known(&logits, &line, &["--floor", "0.1"]);
    let [engine, trainer] = [0, 1].map(|side| &step["rescored"]["sides"][side]);
    assert_eq!((&engine["found"], &engine["refit"]), (&json!(false), &Value::Null));
    assert_eq!(trainer["found"], true);
    close("T", &trainer["refit"]["contract"]["temperature"], 0.5, 0.01);
    let differences = tokens.map(|token| (cold[token as usize] - raw[token as usize]).abs());
    let mean = differences.iter().sum::<f64>() / 5.0;
    close("before", &trainer["refit"]["before"], mean, 1e-5);
    close("after", &trainer["refit"]["after"], 0.0, 1e-4);
    let (d, ratio) = (cold[0] - raw[0], (cold[0] - raw[0]).exp());
    assert!((d - 0.264_674).abs() < 1e-6 && (ratio - 1.303_007).abs() < 1e-6);
    assert_eq!(step["findings"][0]["kind"], "logprob_mode");
    for part in [
        "finding   logprob_mode: by the model's logits the decode side's log-probabilities are raw \
         (before temperature) (stated), the trainer side's after temperature 0.500 (found)\n",
        "refit     trainer: stated raw (before temperature), mean |d| ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // No finding is left to explain, and no side is called wrong.
    assert_eq!(step["findings"].as_array().expect("findings").len(), 1);
    assert_eq!(step["rescored"]["opinions"], json!([]));
}

/// Where both sides say the same and mean it, there is nothing to find; greedy divides by nothing.
#[test]
fn k19_what_is_stated_is_believed_where_it_holds() {
    let logits = [2.0, 1.0, 0.0];
    let tokens = [0, 1, 2, 0, 2];
    for (temperature, keys) in [
        (1.0, ""),
        (0.5, "\"inference_temperature\": 0.5, \"trainer_temperature\": 0.5"),
        (1.0, "\"inference_temperature\": 0, \"trainer_temperature\": 0"),
    ] {
        let logps = of_tokens(&log_softmax(&logits, temperature, 3), &tokens);
        let (text, step) = by_known(&logits, &record(0, &tokens, &logps, &logps, keys), &[]);
        for side in step["rescored"]["sides"].as_array().expect("sides") {
            assert_eq!((&side["found"], &side["refit"]), (&json!(false), &Value::Null), "{keys}");
        }
        assert!(text.contains("opinion   1 record: both sides and the model agree\n"), "{text}");
        assert!(!text.contains("finding"), "{text}");
    }
}

/// Probabilities 0.5, 0.3, 0.15, 0.05 and top-p 0.8 (huggingface/trl#6789).
#[test]
fn k20_a_kept_mass_is_found_and_a_removed_token_is_reported() {
    let logits = [0.5_f64, 0.3, 0.15, 0.05].map(f64::ln);
    let tokens = [0, 1, 0, 1, 1];
    let (whole, cut) = (log_softmax(&logits, 1.0, 4), log_softmax(&logits, 1.0, 2));
    for token in [0, 1] {
        let d = whole[token] - cut[token];
        assert!((d - -0.223_144).abs() < 1e-6 && (d.exp() - 0.8).abs() < 1e-9);
    }
    let (cut_logps, logps) = (of_tokens(&cut, &tokens), of_tokens(&whole, &tokens));
    let args = ["--floor", "0.1"];
    let (text, step) = by_known(&logits, &record(0, &tokens, &cut_logps, &logps, ""), &args);
    let [engine, trainer] = [0, 1].map(|side| &step["rescored"]["sides"][side]);
    assert_eq!((&engine["found"], &trainer["found"]), (&json!(true), &json!(false)));
    close("mass", &engine["refit"]["kept_mass"], 0.8, 1e-5);
    close("before", &engine["refit"]["before"], 0.223_144, 1e-5);
    assert!(text.contains("fits; it keeps a mass of 0.8000, ln -0.2231\n"), "{text}");
    assert_eq!(step["findings"][0]["kind"], "logprob_mode");

    // The filter is stated, and the fourth token is none that it keeps.
    let (tokens, keys) = ([0, 1, 0, 3, 1], "\"inference_top_p\": 0.8, \"trainer_top_p\": 0.8");
    let mut logps = of_tokens(&cut, &tokens);
    logps[3] = whole[3];
    let (text, step) = by_known(&logits, &record(0, &tokens, &logps, &logps, keys), &[]);
    let engine = &step["rescored"]["sides"][0];
    assert_eq!((&engine["removed"], &engine["found"]), (&json!(1), &json!(false)));
    let metric = |name| &engine["metrics"][format!("gap_detail/decode_reference/{name}")];
    assert_eq!((metric("n_tokens"), metric("n_missing")), (&json!(4.0), &json!(1.0)));
    assert_eq!(metric("nonfinite"), &json!(0.0));
    close("max", metric("logp_abs_diff_max"), 0.0, 1e-5);
    let said = "removed   decode: 1 sampled token outside what after temperature 1.000, top-p \
                0.800 keeps by the model, so without a log-probability and not compared; first \
                s3.p0.r0, completion index 3\n";
    assert!(text.contains(said), "{text}");
}

/// Rows of the fixture, with log-probabilities as `score` prints them.
fn golden_rows(folder: &TempDir, model: &str) -> Vec<(Vec<u32>, Vec<f64>)> {
    let rows: Vec<Vec<u32>> = Golden::of(model)
        .rows()
        .into_iter()
        .map(|row| row.iter().map(|token| token.get()).collect())
        .collect();
    let logps = scored(folder, &fixture(model), &rows);
    rows.into_iter().zip(logps).collect()
}

/// What `score` prints of rows of tokens.
fn scored(folder: &TempDir, model: &Path, rows: &[Vec<u32>]) -> Vec<Vec<f64>> {
    let line = |row: &Vec<u32>| format!("{}\n", json!({"id": 0, "token_ids": row}));
    let input = write(folder.path(), "in.jsonl", &rows.iter().map(line).collect::<String>());
    let mut command = gapscope();
    command.args(["score", "--input", path(&input), "--model", path(model)]);
    let scored = command.assert().success().get_output().stdout.clone();
    let scored = String::from_utf8(scored).expect("UTF-8");
    let numbers = |line: &str| -> Vec<f64> {
        let line: Value = serde_json::from_str(line).expect("an object a line");
        serde_json::from_value(line["logprobs"].clone()).expect("numbers")
    };
    scored.lines().map(numbers).collect()
}

/// A hybrid whose engine is corrupt (NVIDIA-NeMo/RL#2141): against its own prefill's factor of
/// 322.5, 313.1 between engine and trainer, and 1.031 between trainer and prefill. Here the model
/// at hand stands for the prefill.
#[test]
fn three_published_factors_are_the_three_of_a_table() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = known_logits(&folder, &[0.0, 0.0]);
    let ours = scored(&folder, &model, &[vec![0, 1]])[0][0] as f32;
    let (decode, healthy) = (ours - 322.5_f32.ln(), 1.031_f32.ln());
    let train: Vec<f32> =
        (0..66).map(|i| if i == 7 { ours + healthy } else { ours - healthy }).collect();
    let wide: Vec<f64> = train.iter().map(|&logp| f64::from(logp)).collect();
    let line = record(0, &[1; 66], &[f64::from(decode); 66], &wide, "");
    let dump = write(folder.path(), "step_3/rank_0.jsonl", &line);
    let args = ["--rollouts", path(&dump), "--model", path(&model)];
    let (text, audit) = audited(folder.path(), &args);
    let step = &audit["steps"][0];
    let factor = |a: &dyn Fn(usize) -> f32, b: &dyn Fn(usize) -> f32| {
        (0..66).map(|i| (f64::from(a(i)) - f64::from(b(i))).abs().exp()).sum::<f64>() / 66.0
    };
    let (decode, trainer, ours) = (|_| decode, |i: usize| train[i], |_| ours);
    let sides = &step["rescored"]["sides"];
    let of_side = |side: usize, legs: &str| {
        sides[side]["metrics"][format!("gap_detail/{legs}/token_mult_prob_error")].clone()
    };
    for (found, expected, digits) in [
        (step["metrics"]["gap/token_mult_prob_error"].clone(), factor(&decode, &trainer), "313.1"),
        (of_side(0, "decode_reference"), factor(&decode, &ours), "322.5"),
        (of_side(1, "trainer_reference"), factor(&trainer, &ours), "1.031"),
    ] {
        close(digits, &found, expected, 1e-9 * expected);
        let places = digits.split('.').nth(1).expect("a point").len();
        assert_eq!(format!("{expected:.places$}"), digits);
    }
    let said = "1 record: the model agrees with the trainer side, not with the rollout side";
    assert!(text.contains(said), "{text}");
}

/// Of the fixture: a record that both sides and the model agree on, one of a wrong engine, one of a
/// wrong trainer, and one whose two sides agree with each other alone. Wrong is the last token.
fn odd_ones(folder: &TempDir) -> (PathBuf, f64) {
    let rows = golden_rows(folder, "tiny-jamba");
    let prime = |index: usize, infer: f64, train: f64| {
        let (tokens, logps) = &rows[index % rows.len()];
        let off = |by: f64| {
            let mut logps = logps.clone();
            *logps.last_mut().expect("a token") -= by;
            logps
        };
        let text = record(index, &tokens[1..], &off(infer), &off(train), "");
        let mut value: Value = serde_json::from_str(&text).expect("a record");
        value["token_ids"][0] = json!(tokens[0]);
        format!("{value}\n")
    };
    let records =
        [prime(0, 0.0, 0.0), prime(1, 3.0, 0.0), prime(2, 0.0, 3.0), prime(3, 3.0, 3.0)].concat();
    (write(folder.path(), "step_3/rank_0.jsonl", &records), 4.0 * rows[0].1.len() as f64)
}

#[test]
fn the_model_says_which_side_is_odd() {
    let folder = tempfile::tempdir().expect("a folder");
    let (dump, n) = odd_ones(&folder);
    let model = fixture("tiny-jamba");
    let args = ["--rollouts", path(&dump), "--model", path(&model), "--floor", "0.5"];
    let (text, audit) = audited(folder.path(), &args);
    let opinions: Vec<(String, Vec<String>)> = audit["steps"][0]["rescored"]["opinions"]
        .as_array()
        .expect("opinions")
        .iter()
        .map(|one| {
            let requests = serde_json::from_value(one["requests"].clone()).expect("requests");
            (one["opinion"].as_str().expect("a word").to_owned(), requests)
        })
        .collect();
    let expected = [
        ("all_agree", "s3.p0.r0"),
        ("decode_is_odd", "s3.p0.r1"),
        ("trainer_is_odd", "s3.p0.r2"),
        ("model_is_odd", "s3.p0.r3"),
    ];
    let expected = expected.map(|(word, id)| (word.to_owned(), vec![id.to_owned()]));
    assert_eq!(opinions, expected, "{text}");
    // The record that nobody spoiled is the model's to the last bit.
    let metrics = |side: usize| audit["steps"][0]["rescored"]["sides"][side]["metrics"].clone();
    for (side, legs, wrong) in [(0, "decode_reference", 2.0), (1, "trainer_reference", 2.0)] {
        let metric = |name: &str| metrics(side)[format!("gap_detail/{legs}/{name}")].clone();
        assert_eq!(metric("n_tokens"), json!(n));
        close("equal", &metric("frac_bitwise_equal"), (n - wrong) / n, 1e-12);
        close("mean", &metric("logp_abs_diff_mean"), wrong * 3.0 / n, 1e-6);
    }
    for part in [
        "three-way                 tokens      mean |d|       max |d|       k3 mean\n",
        "engine / rescored             92",
        "opinion   1 record: the model agrees with the trainer side, not with the rollout side; \
         first s3.p0.r1\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Conditions reach the tables of the model.
    let condition = "gap_detail/trainer_reference/logp_abs_diff_max>2.5";
    let (code, _, error) = outcome(&[&args[..], &["--fail-on", condition]].concat());
    assert_eq!(code, Some(3), "{error}");
    let (code, _, error) = outcome(&["--rollouts", path(&dump), "--fail-on", condition]);
    assert_eq!(code, Some(1), "{error}");
}

/// A run without updates is its own model to the last bit, in both dtypes.
#[test]
fn a_run_is_rescored_to_its_bits() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    let seed = "3"; // Of the small experiment, so that these are its weights.
    let mut command = gapscope();
    command.args(["model", "init", "tiny-jamba", path(&model), "--seed", seed]).assert().success();
    for dtype in ["f32", "bf16"] {
        let set = format!("model.dtype={dtype}");
        let run = Run::small(&["trainer.update=none", "steps=2", &set]);
        let out = folder.path().join(dtype);
        let args = ["--rollouts", path(run.root()), "--model", path(&model), "--dtype", dtype];
        let (text, audit) = audited(&out, &args);
        for step in audit["steps"].as_array().expect("steps") {
            for (side, legs) in ["decode_reference", "trainer_reference"].iter().enumerate() {
                let metrics = &step["rescored"]["sides"][side]["metrics"];
                let metric = |name: &str| &metrics[format!("gap_detail/{legs}/{name}")];
                assert_eq!(metric("frac_bitwise_equal"), &json!(1.0), "{dtype}: {text}");
                assert_eq!(metric("n_tokens"), &step["metrics"]["gap_detail/n_tokens"]);
            }
        }
    }
}

/// Before any number: ids, then lengths, each with file, line and record.
#[test]
fn records_that_the_model_cannot_have_seen_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = known_logits(&folder, &[2.0, 1.0, 0.0]);
    let most = load_plan(&model).expect("a plan").config.max_position_embeddings.expect("a bound");
    let good = record(0, &[0, 1], &[-0.5, -0.5], &[-0.5, -0.5], "");
    let long = vec![1; most];
    for (bad, expected) in [
        (
            record(1, &[0, 3], &[-0.5, -0.5], &[-0.5, -0.5], ""),
            "token 3 at position 2 is outside the model's vocabulary of 3".to_owned(),
        ),
        (
            record(1, &long, &vec![-0.5; most], &vec![-0.5; most], ""),
            format!(
                "{} tokens are more than the model's max_position_embeddings = {most}",
                most + 1
            ),
        ),
    ] {
        let dump = write(folder.path(), "step_3/rank_0.jsonl", &[good.clone(), bad].concat());
        let out = folder.path().join("refused");
        let args = ["--rollouts", path(&dump), "--model", path(&model), "--out", path(&out)];
        let (code, text, error) = outcome(&args);
        let expected = format!("error: {}, line 2: record s3.p0.r1: {expected}\n", path(&dump));
        assert_eq!((code, text.as_str(), error), (Some(1), "", expected));
        assert!(!out.exists(), "nothing is begun");
    }
    let (code, _, error) = outcome(&["--rollouts", path(Path::new("x")), "--dtype", "bf16"]);
    assert_eq!(code, Some(2), "{error}");
}
