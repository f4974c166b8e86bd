//! Sequences and the contexts of servers.

use gapscope::base::{Contract, LogprobsMode, RequestId};

use crate::answers::{asked, open};
use crate::common::run::read_json;
use crate::scripted::{Reply, Scripted, State};
use crate::whole::{run, summary};

fn server(mode: LogprobsMode, max_model_len: u32) -> Scripted {
    let mut state = State::new(mode, Box::new(|_| Reply::Right));
    state.max_model_len = max_model_len;
    Scripted::with(state)
}

/// Three tokens of a prompt and six of a completion, in a context of nine and of ten.
#[test]
fn a_sequence_that_fills_the_context_is_scored_to_its_end() {
    for mode in [LogprobsMode::RawLogprobs, LogprobsMode::ProcessedLogprobs] {
        let scores = |max_model_len| {
            let server = server(mode, max_model_len);
            let servers = open(&[&server], |_| {}).expect("it is well");
            let done = servers.generate(asked(1), &Contract::PLAIN, &|| false).expect("it fits");
            let whole = |one: &gapscope::engine::Completion| {
                let ids = one.prompt.iter().copied().chain(one.token_ids()).collect();
                (one.id, ids, one.prompt.len())
            };
            let scores = servers.score_prefill(done.iter().map(whole).collect(), &|| false);
            scores.expect("it fits as well")
        };
        let (with_room, full) = (scores(10), scores(9));
        assert!(with_room.iter().flatten().all(Option::is_some));
        for (with_room, full) in with_room.iter().zip(&full) {
            assert_eq!(full.len(), 6);
            assert_eq!(full[..5], with_room[..5]);
            // A mode that knows of the one token that may be sampled says nothing of it.
            let expected = with_room[5].filter(|_| mode == LogprobsMode::RawLogprobs);
            assert_eq!(full[5], expected, "{mode:?}");
        }
    }
}

#[test]
fn a_run_in_contexts_that_are_just_large_enough_has_every_leg() {
    let full = ["task.prompt_tokens=16", "check.legs=[\"prefill\"]", "steps=1"];
    let server = server(LogprobsMode::RawLogprobs, 24);
    let (code, stderr, folder) = run(&server, &full);
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(summary(&folder)["gap_max"], 0.0);
    let row = read_json(&folder.path().join("run/steps.jsonl"));
    assert_eq!(row["gap_detail/decode_prefill/n_tokens"], 96.0);
}

#[test]
fn what_has_no_room_is_refused_before_anything_is_asked() {
    let server = server(LogprobsMode::RawLogprobs, 23);
    let (code, stderr, folder) = run(&server, &["task.prompt_tokens=16"]);
    assert_eq!(code, Some(1), "{stderr}");
    let expected = "request s1.p0.r0 is of 16 prompt tokens and 8 new ones, and the server's \
                    max_model_len is 23: start it with --max-model-len 24, or lower \
                    rollout.max_new_tokens";
    assert!(stderr.contains(expected), "{stderr}");
    assert!(!folder.path().join("run").exists(), "a run that cannot start leaves nothing");
    assert!(server.asked().keys().all(|name| name == "probe"), "{:?}", server.asked());

    let servers = open(&[&server], |_| {}).expect("it is well");
    let mut long = asked(1);
    long[1].max_new_tokens = 21;
    let error = servers.generate(long, &Contract::PLAIN, &|| false).expect_err("too long");
    let id = RequestId::new(1, 0, 1);
    assert!(error.to_string().contains(&format!("request {id} is of 3 prompt tokens and 21 new")));
}
