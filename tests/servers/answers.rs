//! One request against one kind of answer.

use std::time::Duration;

use gapscope::base::{Contract, LogprobsMode, RequestId, TokenId};
use gapscope::config::ServersConfig;
use gapscope::engine::{Completion, GenerationRequest};
use gapscope::rollout::http::{ServerError, Servers, Terms};
use serde_json::{json, Value};

use crate::scripted::{Asked, Reply, Scripted};

/// Few and short pauses, so that giving up is quick.
pub fn config(urls: &[&str]) -> ServersConfig {
    ServersConfig {
        url: urls.iter().map(|&url| url.to_owned()).collect(),
        served_model_name: None,
        max_concurrent_requests: 4,
        request_timeout_s: 30.0,
        retry_for_s: 1.0,
        request_seeds: false,
        check_contract: true,
        sync_folder: None,
        launch: None,
    }
}

pub fn terms(contract: Contract) -> Terms {
    Terms { contract, seed: 3, starting: Vec::new() }
}

pub fn open(
    servers: &[&Scripted],
    edit: impl Fn(&mut ServersConfig),
) -> Result<Servers, ServerError> {
    let urls: Vec<&str> = servers.iter().map(|server| server.url.as_str()).collect();
    let mut config = config(&urls);
    edit(&mut config);
    Servers::open(&config, terms(Contract::PLAIN), &|| false)
}

/// `groups` prompts of two rollouts each, six tokens long.
pub fn asked(groups: u32) -> Vec<GenerationRequest> {
    let request = |(prompt, rollout)| GenerationRequest {
        id: RequestId::new(1, prompt, rollout),
        prompt: [40, 41, 42 + prompt].map(TokenId::new).to_vec(),
        max_new_tokens: 6,
        ignore_eos: true,
        eos_token_ids: vec![TokenId::new(2)],
    };
    (0..groups).flat_map(|prompt| [(prompt, 0), (prompt, 1)]).map(request).collect()
}

pub fn generate(servers: &Servers, groups: u32) -> Result<Vec<Completion>, String> {
    let done = servers.generate(asked(groups), &Contract::PLAIN, &|| false);
    done.map_err(|error| error.to_string())
}

/// What six requests come to where one of them, `s1.p1.r0`, is answered so, the first time or
/// always.
fn with(reply: Reply, always: bool) -> (Result<Vec<Completion>, String>, usize) {
    let script = move |asked: &Asked| match asked.name {
        "s1.p1.r0" if always || asked.before == 0 => reply,
        _ => Reply::Right,
    };
    let server = Scripted::new(script);
    let servers = open(&[&server], |_| {}).expect("the server is well");
    let done = generate(&servers, 3);
    if done.is_ok() {
        let asked = server.asked();
        let others = asked.iter().filter(|(name, _)| *name != "s1.p1.r0" && *name != "probe");
        assert!(others.clone().all(|(_, count)| *count == 1) && others.count() == 5, "{asked:?}");
    }
    (done, server.asked()["s1.p1.r0"])
}

fn ids(done: &[Completion]) -> Vec<(String, Vec<u32>)> {
    let one = |done: &Completion| {
        (done.id.to_string(), done.token_ids().map(TokenId::get).collect::<Vec<_>>())
    };
    done.iter().map(one).collect()
}

pub fn right() -> Vec<Completion> {
    with(Reply::Right, false).0.expect("every answer is right")
}

#[test]
fn what_passes_is_tried_again_and_counts_once() {
    let right = right();
    assert_eq!(right.len(), 6);
    for reply in [
        Reply::Status(429, "{\"error\": {\"message\": \"too many\"}}"),
        Reply::Status(500, "EngineCore encountered an issue"),
        Reply::Status(503, ""),
        Reply::Truncated(100),
        Reply::BrokenOff(100),
        Reply::BrokenOff(0),
        Reply::Edited(|answer| answer["choices"][0]["finish_reason"] = json!("abort")),
    ] {
        let (done, tries) = with(reply, false);
        assert_eq!(done.expect("it passes"), right);
        assert_eq!(tries, 2);
    }
}

#[test]
fn what_does_not_pass_is_given_up_with_its_reason() {
    for (reply, expected) in [
        (Reply::Status(500, "EngineCore encountered an issue"), "HTTP 500: EngineCore encountered"),
        (Reply::Status(429, "{\"error\": {\"message\": \"too many\"}}"), "HTTP 429: too many"),
        (Reply::Truncated(100), "the answer ends within its JSON, after 100 bytes"),
        (Reply::BrokenOff(100), "the answer broke off: "),
    ] {
        let (done, tries) = with(reply, true);
        let error = done.expect_err("it never passes");
        // Pauses of 0.1, 0.2 and 0.4 s come to less than the second that was given.
        assert!(tries >= 4, "{tries} tries");
        let tried = format!("request s1.p1.r0, tried {tries} time(s): {expected}");
        assert!(error.contains(&tried), "{error}");
    }
}

fn first(answer: &mut Value) -> &mut Value {
    &mut answer["choices"][0]
}

fn list<'a>(answer: &'a mut Value, key: &str) -> &'a mut Vec<Value> {
    first(answer)[key].as_array_mut().expect("a list")
}

fn logprobs<'a>(answer: &'a mut Value, key: &str) -> &'a mut Vec<Value> {
    first(answer)["logprobs"][key].as_array_mut().expect("a list")
}

fn check_refused(table: &[(Reply, &str)]) {
    for (reply, expected) in table {
        let (done, tries) = with(*reply, true);
        let error = done.expect_err("it is no answer");
        assert_eq!(tries, 1, "{error}");
        assert!(error.contains(expected), "{error}\nnot {expected}");
        assert!(error.contains("request s1.p1.r0, tried 1 time(s): "), "{error}");
    }
}

#[test]
fn what_is_no_answer_is_refused_at_once_and_named() {
    check_refused(&[
        (
            Reply::Status(400, "{\"error\": {\"message\": \"max_tokens is too large\"}}"),
            "HTTP 400: max_tokens is too large",
        ),
        (Reply::Status(404, "{\"detail\": \"Not Found\"}"), "HTTP 404: \"Not Found\""),
        (Reply::Retyped("\"choices\"", "\"choicer\""), "not what a vLLM server gives: missing"),
        (Reply::Retyped("{", "<"), "not what a vLLM server gives: expected value"),
        (Reply::Edited(|a| a["choices"] = json!([])), "0 choices where one was asked for"),
        (
            Reply::Edited(|a| {
                let twice = first(a).clone();
                a["choices"].as_array_mut().expect("a list").push(twice);
            }),
            "2 choices where one was asked for",
        ),
        (Reply::Edited(|a| first(a)["token_ids"] = json!(null)), "no token ids in the answer"),
        (Reply::Edited(|a| first(a)["prompt_token_ids"] = json!(null)), "no token ids in the"),
        (Reply::Edited(|a| first(a)["logprobs"] = json!(null)), "no log-probabilities in the"),
    ]);
}

#[test]
fn lists_that_do_not_fit_are_refused_at_once_and_named() {
    check_refused(&[
        (
            Reply::Edited(|a| drop(logprobs(a, "token_logprobs").pop())),
            "6 token ids and 5 log-probabilities: lengths must be equal",
        ),
        (
            Reply::Edited(|a| drop(logprobs(a, "tokens").pop())),
            "6 token ids and 5 tokens beside them: lengths must be equal",
        ),
        (
            Reply::Edited(|a| logprobs(a, "tokens").swap(0, 1)),
            "the tokens beside its log-probabilities differ: at 0 the id is ",
        ),
        (Reply::Edited(|a| logprobs(a, "tokens")[2] = json!(" the")), ", and the token text"),
        (
            // As where a server puts a start token before the prompt.
            Reply::Edited(|a| list(a, "prompt_token_ids").insert(0, json!(1))),
            "not the one that was sent: at 0 it has 1, and 40 was sent; whatever adds tokens",
        ),
        (
            Reply::Edited(|a| {
                list(a, "token_ids").pop();
                logprobs(a, "tokens").pop();
                logprobs(a, "token_logprobs").pop();
            }),
            "cut off after 5 of 6 tokens: the server's --max-model-len is too small",
        ),
        (
            Reply::Edited(|a| first(a)["finish_reason"] = json!("repetition")),
            "the completion ended by \"repetition\", neither stop nor length",
        ),
    ]);
}

/// What stands in a log-probability's place stays in the record, where it is counted.
#[test]
fn what_is_no_log_probability_stays_and_is_not_finite() {
    let token_logprobs = "\"token_logprobs\":[";
    for (text, is_nan) in [("NaN", true), ("null", true), ("-9999.0", true), ("-Infinity", false)] {
        let server = Scripted::new(move |_| {
            // Leaks, so that a table can be of texts.
            let to: &'static str = format!("{token_logprobs}{text},-0.5],\"x\":[").leak();
            Reply::Retyped(token_logprobs, to)
        });
        let servers = open(&[&server], |config| config.check_contract = false).expect("well");
        let mut two = asked(1);
        two.truncate(1);
        two[0].max_new_tokens = 2;
        let done = servers.generate(two, &Contract::PLAIN, &|| false).expect("an answer").remove(0);
        let values: Vec<f32> = done.tokens.iter().map(|sampled| sampled.logp.get()).collect();
        assert_eq!(values[1], -0.5);
        assert_eq!(
            (values[0].is_nan(), values[0] == f32::NEG_INFINITY),
            (is_nan, !is_nan),
            "{text}"
        );
    }
}

/// Answers come as they are done; each goes to its own request.
#[test]
fn answers_out_of_order_are_put_in_order() {
    let right = right();
    let server = Scripted::new(|asked| match asked.name {
        "s1.p0.r0" | "s1.p1.r1" => Reply::Late(Duration::from_millis(300)),
        _ => Reply::Right,
    });
    let servers = open(&[&server], |_| {}).expect("the server is well");
    assert_eq!(generate(&servers, 3).expect("every answer is right"), right);
    assert!(server.most_at_once() <= 4, "engine.max_concurrent_requests");
}

#[test]
fn a_slow_answer_is_given_up_and_asked_for_again() {
    let server = Scripted::new(|asked| match asked.before {
        0 if asked.name == "s1.p0.r1" => Reply::Late(Duration::from_secs(60)),
        _ => Reply::Right,
    });
    let servers = open(&[&server], |config| config.request_timeout_s = 5.0).expect("well");
    assert_eq!(generate(&servers, 3).expect("the second try"), right());
    assert_eq!(server.asked()["s1.p0.r1"], 2);
}

#[test]
fn groups_go_whole_to_one_server_each() {
    let both = [Scripted::new(|_| Reply::Right), Scripted::new(|_| Reply::Right)];
    let servers = open(&[&both[0], &both[1]], |_| {}).expect("both are well");
    assert_eq!(ids(&generate(&servers, 3).expect("right")), ids(&right()));
    let asked = both.each_ref().map(|server| {
        let mut names: Vec<String> = server.asked().into_keys().collect();
        names.sort();
        names
    });
    assert_eq!(asked[0], ["probe", "s1.p0.r0", "s1.p0.r1", "s1.p2.r0", "s1.p2.r1"]);
    assert_eq!(asked[1], ["probe", "s1.p1.r0", "s1.p1.r1"]);
}

#[test]
fn every_sampling_parameter_is_sent() {
    let server = Scripted::new(|_| Reply::Right);
    let servers = open(&[&server], |config| config.request_seeds = true).expect("well");
    let contract =
        Contract { temperature: 0.6, top_p: 0.8, top_k: 7, min_p: 0.1, ..Contract::PLAIN };
    servers.generate(asked(1), &contract, &|| false).expect("right");
    let bodies = server.bodies();
    let sent: Vec<&Value> = bodies.iter().filter(|body| body["request_id"] != "probe").collect();
    let seeds: Vec<i64> = sent.iter().map(|body| body["seed"].as_i64().expect("a seed")).collect();
    assert!(seeds[0] != seeds[1] && seeds.iter().all(|seed| *seed >= 0), "{seeds:?}");
    let mut first =
        sent.iter().find(|body| body["request_id"] == "s1.p0.r0").unwrap().to_owned().clone();
    first["seed"].take();
    assert_eq!(
        first,
        json!({
            "model": "tiny", "prompt": [40, 41, 42], "max_tokens": 6, "n": 1,
            "temperature": 0.6, "top_p": 0.8, "top_k": 7, "min_p": 0.1,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
            "seed": null, "ignore_eos": true, "stop_token_ids": [], "logprobs": 0,
            "return_token_ids": true, "return_tokens_as_token_ids": true,
            "request_id": "s1.p0.r0",
        })
    );
}

#[test]
fn a_server_of_another_mind_is_refused_with_the_fix() {
    let processed = Scripted::of(LogprobsMode::ProcessedLogprobs, |_| Reply::Right);
    let raw = Scripted::new(|_| Reply::Right);
    let cold = Contract { temperature: 0.6, ..Contract::PLAIN };
    let cold_processed = Contract { logprobs_mode: LogprobsMode::ProcessedLogprobs, ..cold };
    let open = |server: &Scripted, contract, edit: fn(&mut ServersConfig)| {
        let mut config = config(&[&server.url]);
        edit(&mut config);
        let opened = Servers::open(&config, terms(contract), &|| false);
        opened.map(|servers| servers.facts()[0].logprobs_mode).map_err(|error| error.to_string())
    };
    let mode = |mode| Ok(Some(mode));
    assert_eq!(open(&raw, cold, |_| {}), mode(LogprobsMode::RawLogprobs));
    assert_eq!(open(&processed, cold_processed, |_| {}), mode(LogprobsMode::ProcessedLogprobs));
    // At temperature 1 without filters the two are one.
    assert_eq!(open(&processed, Contract::PLAIN, |_| {}), mode(LogprobsMode::ProcessedLogprobs));
    assert_eq!(open(&processed, cold, |config| config.check_contract = false), Ok(None));
    for (found, expected) in [
        (
            open(&processed, cold, |_| {}),
            "its log-probabilities are after temperature 0.6, and by the configuration they are \
             raw (before temperature): set engine.logprobs_mode = \"processed_logprobs\", or start \
             the server with --logprobs-mode raw_logprobs",
        ),
        (
            open(&raw, cold_processed, |_| {}),
            "set engine.logprobs_mode = \"raw_logprobs\", or start the server with --logprobs-mode \
             processed_logprobs",
        ),
        (
            open(&raw, cold, |config| config.served_model_name = Some("big".to_owned())),
            "it serves no model \"big\", but [\"tiny\"]: set engine.served_model_name",
        ),
    ] {
        let error = found.expect_err("it is of another mind");
        assert!(error.contains(expected), "{error}\nnot {expected}");
    }
    let unlike =
        Servers::open(&config(&[&raw.url, &processed.url]), terms(Contract::PLAIN), &|| false);
    let error = unlike.expect_err("two modes").to_string();
    assert!(error.starts_with("the servers are unlike"), "{error}");
    let nobody = Servers::open(&config(&["http://127.0.0.1:9"]), terms(cold), &|| false);
    let error = nobody.expect_err("the discard port is closed").to_string();
    assert!(
        error.contains("cannot be reached: ") && error.contains("is a server running"),
        "{error}"
    );
}

#[test]
fn whoever_says_to_stop_is_heard_at_once() {
    let server = Scripted::new(|asked| match asked.name {
        "probe" => Reply::Right,
        _ => Reply::Late(Duration::from_secs(600)),
    });
    let servers = open(&[&server], |_| {}).expect("the server is well");
    let error = servers.generate(asked(3), &Contract::PLAIN, &|| true).expect_err("stopped");
    assert!(matches!(error, ServerError::Stopped), "{error}");
}
