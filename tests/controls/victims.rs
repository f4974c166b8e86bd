//! Who is hit, how badly, and that nobody else is.

use gapscope::base::LogProb;
use gapscope::engine::Phase;
use gapscope::report::parquet::{RolloutRow, TokenRow};
use serde_json::{json, Value};

use crate::common::play::{experiment, Played};
use crate::common::run::Run;

/// Prompts of 40 tokens in a pool of 29 blocks. Requests need a fifth block from token 49 on, so
/// that some are preempted after a few tokens; one of them comes back to a budget of one token.
const PREEMPTING: &str = r#"
name = "preempting"
seed = 7
steps = 2
model.path = "configs/models/arithmetic"
trainer.update = "none"

[engine]
num_gpu_blocks_override = 30
max_num_batched_tokens = 54
max_num_seqs = 8
max_model_len = 96

[rollout]
prompts_per_step = 2
rollouts_per_prompt = 4
max_new_tokens = 20
ignore_eos = true

[task]
max_operand = 99
prompt_tokens = 40
"#;

const IMPOSTER: &str = "experiments/imposter_request.toml";
/// Greedy, and no longer than the first victim takes.
const SHORT: [&str; 2] = ["rollout.temperature=0", "steps=2"];

/// Twice the same, to the byte. Alone, the same request is right, and so are its siblings beside
/// it: greedy rollouts of one prompt are one text.
#[test]
fn k02_one_request_of_256_is_confidently_wrong_and_all_others_are_exact() {
    let [run, again] = [(); 2].map(|()| Run::of(IMPOSTER, &SHORT));
    assert!(files_without_time(&run) == files_without_time(&again), "two runs differ");

    let summary = run.summary();
    assert_eq!(summary["spike_steps"], json!([2]), "the first lap is silent");
    assert!(summary["confident_wrong"].as_u64().expect("a count") >= 1);
    assert_eq!(summary["decoded_first_chunks"], 2);
    let bad = json!(["s2.p0.r7"]);
    let [finding] = summary["findings"].as_array().expect("a list").as_slice() else {
        panic!("one finding: {}", summary["findings"])
    };
    assert_eq!((&finding["kind"], &finding["requests"]), (&json!("stale_state"), &bad));

    let tokens = run.tokens();
    let gap = |row: &TokenRow| {
        let nats = |leg: Option<LogProb>| f64::from(leg.expect("scored").get());
        (nats(row.logp_trainer) - nats(row.logp_decode)).abs()
    };
    let (victim, others): (Vec<_>, Vec<_>) =
        tokens.iter().partition(|row| row.request.to_string() == "s2.p0.r7");
    assert_eq!((victim.len(), others.len()), (20, 2 * 256 * 20 - 20));
    assert!(victim.iter().map(|row| gap(row)).sum::<f64>() / 20.0 >= 1.0);
    assert!(others.iter().all(|row| gap(row) == 0.0));

    let alone = ["engine.max_num_seqs=1", "rollout.prompts_per_step=1"];
    let alone = Run::of(IMPOSTER, &[&SHORT[..], &alone].concat());
    let summary = alone.summary();
    assert_eq!((&summary["gap_max"], &summary["n_tokens"]), (&json!(0.0), &json!(2 * 32 * 20)));
    assert_eq!(summary["findings"], json!([]));
    let twin = rollout(&alone, "s2.p0.r7");
    assert_ne!(rollout(&run, "s2.p0.r7").completion_token_ids, twin.completion_token_ids);
    assert_eq!(rollout(&run, "s2.p0.r6").completion_token_ids, twin.completion_token_ids);
}

/// The message has all that is needed to find the place: the row, and each block with its owner.
#[test]
fn a_finding_names_the_row_and_the_blocks_that_it_read() {
    let sets = ["engine.batch_split=scheduled_tokens"];
    let played = Played::new(&experiment(PREEMPTING, &sets));
    assert!(!played.findings.is_empty());
    for finding in &played.findings {
        let step = &played.steps[finding.step.get() as usize - 1];
        let (rollout, _) = step.bad().next().expect("a finding is of a bad request");
        let life = rollout.completion.lives.last().expect("it has run");
        let mut parts = vec![
            format!("request {}, resumed after preemption:", rollout.completion.id),
            "1 scheduled with 0 computed".to_owned(),
            format!("engine step {} ", life.engine_step),
        ];
        for held in &life.state_blocks {
            let owner = held.previous_owner.expect("another request had it");
            parts.push(format!("block {} left by {owner}", held.block));
        }
        for part in parts {
            assert!(finding.message.contains(&part), "{part}: {}", finding.message);
        }
    }
}

/// It was right until it was preempted, and its prompt and first tokens, computed again from
/// another's state, are what spoils the rest.
#[test]
fn a_request_that_resumes_can_be_a_victim_too() {
    let old = Played::new(&experiment(PREEMPTING, &["engine.batch_split=scheduled_tokens"]));
    let victims: Vec<_> = old.steps.iter().flat_map(|step| step.bad()).collect();
    assert_eq!(victims.len(), 2, "one a step");
    for (rollout, first_bad) in victims {
        let done = &rollout.completion;
        assert!(done.preemptions >= 1, "{}", done.id);
        let (last, earlier) = done.lives.split_last().expect("it has run");
        assert!(earlier.iter().all(|life| life.phase == Phase::Prefill), "{}", done.id);
        assert_eq!((last.phase, last.scheduled_tokens), (Phase::Decode, 1), "{}", done.id);
        assert!(last.sampled_before > 0 && first_bad >= last.sampled_before as usize);
    }
    for split in ["computed_tokens", "is_prefilling"] {
        let played =
            Played::new(&experiment(PREEMPTING, &[&format!("engine.batch_split={split}")]));
        played.assert_exact(split);
        assert!(played.session.engine().statistics().preemptions > 0);
    }
}

#[test]
fn two_hundred_steps_with_the_fixes_on_are_exact() {
    let played = Played::new(&experiment(PREEMPTING, &["steps=200", "rollout.max_new_tokens=12"]));
    played.assert_exact("the defaults");
    assert!(played.session.engine().statistics().preemptions >= 200);
    assert!(played.laps() > 200.0);
}

fn rollout(run: &Run, request: &str) -> RolloutRow {
    let mut rows = run.rollouts().into_iter().flatten();
    rows.find(|row| row.request.to_string() == request).expect("the run has the request")
}

/// Every file's bytes but those that hold the time.
fn files_without_time(run: &Run) -> Vec<(String, Vec<u8>)> {
    let mut summary = run.summary();
    summary["wall_s"] = Value::Null;
    let mut files = run.files();
    files.retain(|name, _| !["timing.jsonl", "tb/events"].contains(&name.as_str()));
    files.insert("summary.json".to_owned(), summary.to_string().into_bytes());
    files.into_iter().collect()
}
