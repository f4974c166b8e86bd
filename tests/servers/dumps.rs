//! What a server has answered, kept as lines and audited with its model.

use std::fs;

use serde_json::{json, Value};

use crate::common::run::{gapscope, read_json};
use crate::scripted::{completed, State};
use gapscope::base::LogprobsMode;

/// Six responses, each beside its request, at this temperature.
fn responses(mode: LogprobsMode, temperature: f64) -> Vec<Value> {
    let state = State::new(mode, Box::new(|_| unreachable!("nobody connects")));
    let one = |n: u32| {
        let request = json!({
            "prompt": [40, 41 + n, 42], "max_tokens": 12, "temperature": temperature, "top_p": 1.0,
            "top_k": 0, "min_p": 0.0, "ignore_eos": true, "stop_token_ids": [], "logprobs": 0,
        });
        let response = completed(&request, &format!("s1.p{n}.r0"), &state);
        json!({ "request": request, "response": response })
    };
    (0..6).map(one).collect()
}

/// Exit code, what was printed, and `audit.json`.
fn audit(lines: &[Value], args: &[&str]) -> (Option<i32>, String, Value) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (dump, out) = (folder.path().join("responses.jsonl"), folder.path().join("audit"));
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(&dump, text).expect("a file");
    let mut command = gapscope();
    command.arg("audit").arg("--rollouts").arg(&dump).arg("--out").arg(&out).args(args);
    let output = command.output().expect("the binary starts");
    let printed = [output.stdout, output.stderr].concat();
    let audit = if out.exists() { read_json(&out.join("audit.json")) } else { Value::Null };
    (output.status.code(), String::from_utf8_lossy(&printed).into_owned(), audit)
}

const MODEL: [&str; 2] = ["--model", "tiny-llama"];

#[test]
fn responses_are_compared_with_their_model() {
    let lines = responses(LogprobsMode::RawLogprobs, 0.6);
    let (code, printed, audit) = audit(&lines, &[&MODEL[..], &["--floor", "0"]].concat());
    assert_eq!(code, Some(0), "{printed}");
    let step = &audit["steps"][0];
    assert_eq!(step["metrics"]["gap_detail/n_tokens"], 72.0);
    assert_eq!(step["metrics"]["gap/logp_abs_diff_max"], 0.0, "{printed}");
    assert_eq!((&step["findings"], &step["checks"]["records"]), (&json!([]), &json!(6)));
}

#[test]
fn another_temperature_than_they_say_is_found() {
    let lines = responses(LogprobsMode::ProcessedLogprobs, 0.6);
    let (code, printed, audit) = audit(&lines, &[&MODEL[..], &["--floor", "0.001"]].concat());
    assert_eq!(code, Some(0), "{printed}");
    let findings = &audit["steps"][0]["findings"];
    assert_eq!(findings[0]["kind"], "logprob_mode", "{printed}");
    assert!(printed.contains("after temperature 0.600"), "{printed}");
}

#[test]
fn one_side_alone_needs_a_model() {
    let lines = responses(LogprobsMode::RawLogprobs, 1.0);
    let (code, printed, _) = audit(&lines, &[]);
    assert_eq!(code, Some(1));
    assert!(printed.contains("holds the engine's log-probabilities alone, as vllm writes them"));
    let turns = json!({ "turns": [{
        "prompt_token_ids": [40, 41, 42],
        "completion_token_ids": lines[0]["response"]["choices"][0]["token_ids"],
        "completion_logprobs": lines[0]["response"]["choices"][0]["logprobs"]["token_logprobs"],
    }] });
    let (code, printed, audit) = audit(&[turns], &[&MODEL[..], &["--floor", "0"]].concat());
    assert_eq!(code, Some(0), "{printed}");
    assert_eq!(audit["inputs"][0]["format"], "torchtitan");
    assert_eq!(audit["steps"][0]["metrics"]["gap/logp_abs_diff_max"], 0.0, "{printed}");
}
