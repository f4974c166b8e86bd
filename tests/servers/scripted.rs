//! A vLLM server as far as its clients see: the embedded engine behind vLLM's answers, with a
//! script that spoils some of them.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use gapscope::base::{Contract, LogprobsMode, RequestId, TokenId};
use gapscope::engine::{Completion, Engine, FinishReason, GenerationRequest};
use gapscope::model::{load_master, Plan, Preset};
use gapscope::ops::array::Device;
use gapscope::ops::sampling::Sampler;
use gapscope::trainer::{Sequence, Trainer};
use serde_json::{json, Map, Value};

use crate::common;

/// What the engine behind every scripted server is, and the run that asks it.
pub const MODEL: &str = "model.preset = \"tiny-llama\"\n";

/// A completion request as it came.
pub struct Asked<'a> {
    /// How often this request's completion was asked for before.
    pub before: usize,
    /// `s1.p0.r0`, `s1.p0.r0.prefill`, `probe`.
    pub name: &'a str,
}

/// What becomes of an answer that was right.
#[derive(Clone, Copy)]
pub enum Reply {
    Right,
    /// In its place.
    Status(u16, &'static str),
    Edited(fn(&mut Value)),
    /// Text in the place of text, so that it need not be JSON any more.
    Retyped(&'static str, &'static str),
    /// So many bytes, as if they were all.
    Truncated(usize),
    /// So many bytes of a body that was to be longer.
    BrokenOff(usize),
    Late(Duration),
}

type Script = Box<dyn Fn(&Asked) -> Reply + Send + Sync>;

pub struct Scripted {
    pub url: String,
    state: Arc<State>,
}

pub struct State {
    script: Script,
    mode: LogprobsMode,
    version: Mutex<&'static str>,
    /// Of prompt and completion; more is refused.
    pub max_model_len: u32,
    /// From which the weights are read again, where it is asked for.
    pub folder: Option<PathBuf>,
    config: gapscope::config::Config,
    plan: Plan,
    trainer: Mutex<Trainer>,
    /// How often each request came, by its name without the number of the try.
    asked: Mutex<HashMap<String, usize>>,
    /// What was asked, word for word.
    bodies: Mutex<Vec<Value>>,
    now: Mutex<(usize, usize)>,
}

impl Scripted {
    pub fn new(script: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        Self::of(LogprobsMode::RawLogprobs, script)
    }

    pub fn of(
        mode: LogprobsMode,
        script: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::with(State::new(mode, Box::new(script)))
    }

    pub fn with(state: State) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let url = format!("http://{}", listener.local_addr().expect("it is bound"));
        let state = Arc::new(state);
        let shared = Arc::clone(&state);
        thread::spawn(move || serve(&listener, &shared));
        Self { url, state }
    }

    /// As if another had been started in its place.
    pub fn is_now(&self, version: &'static str) {
        *self.state.version.lock().expect("no handler panics") = version;
    }

    /// How often each completion was asked for.
    pub fn asked(&self) -> HashMap<String, usize> {
        self.state.asked.lock().expect("no handler panics").clone()
    }

    pub fn bodies(&self) -> Vec<Value> {
        self.state.bodies.lock().expect("no handler panics").clone()
    }

    /// The most completions that were under way at once.
    pub fn most_at_once(&self) -> usize {
        self.state.now.lock().expect("no handler panics").1
    }
}

impl State {
    pub fn new(mode: LogprobsMode, script: Script) -> Self {
        let pool = "engine.num_gpu_blocks_override = 40\n";
        let config = common::config(&format!("name = \"served\"\n{MODEL}{pool}"));
        let plan = Plan::new(Preset::TinyLlama.config());
        let trainer = trainer(&plan, &config, &Preset::weights(&plan, config.seed)).into();
        let (asked, bodies, now) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (version, max_model_len, folder) = ("0.0.test".into(), 512, None);
        Self {
            script,
            mode,
            version,
            max_model_len,
            folder,
            config,
            plan,
            trainer,
            asked,
            bodies,
            now,
        }
    }

    /// Has the weights that the folder holds.
    pub fn reload(&self) -> Option<()> {
        let (_, master) = load_master(self.folder.as_ref()?).expect("a model folder");
        let read = trainer(&self.plan, &self.config, &master);
        *self.trainer.lock().expect("no handler panics") = read;
        Some(())
    }

    /// An engine of its own for each request, so that none depends on another.
    fn engine(&self, contract: Contract) -> Engine {
        let (plan, knobs) = (self.plan.clone(), self.config.engine.clone());
        let num = plan.numerics_of(&self.config);
        let mut engine = Engine::new(&Device::Cpu, plan, num, knobs, contract, self.config.seed)
            .expect("a small engine");
        let weights =
            self.trainer.lock().expect("no handler panics").hand_over().expect("hand over");
        engine.load(weights.version, weights.units).expect("they fit");
        engine
    }

    /// The most probable token behind a prompt.
    fn best(&self, prompt: &[TokenId], contract: &Contract) -> (TokenId, f32) {
        let tokens = [prompt, &[TokenId::new(0)]].concat();
        let sequence = Sequence { tokens, prompt_len: prompt.len() };
        let contract = *contract;
        let best = move |logits: &[f32]| {
            let by_logit = |a: &u32, b: &u32| logits[*a as usize].total_cmp(&logits[*b as usize]);
            let token = (0..logits.len() as u32).max_by(by_logit).map(TokenId::new);
            let token = token.expect("a vocabulary");
            (token, Sampler::default().log_prob(logits, token, &contract).get())
        };
        let seen = self
            .trainer
            .lock()
            .expect("no handler panics")
            .map_logits(&[sequence], move |seen| best(seen.logits));
        seen.expect("logits")[0][0]
    }
}

fn trainer(plan: &Plan, config: &gapscope::config::Config, master: &[Vec<f32>]) -> Trainer {
    let (num, learns) = (plan.numerics_of(config), config.trainer.clone());
    Trainer::new(&Device::Cpu, plan.clone(), num, learns, master).expect("few threads")
}

/// A thread a connection, for as long as the test lives.
pub fn serve(listener: &TcpListener, state: &Arc<State>) {
    for stream in listener.incoming() {
        let state = Arc::clone(state);
        // A client that goes away in the middle is no failure of the server.
        thread::spawn(move || stream.and_then(|stream| talk(stream, &state)));
    }
}

fn talk(mut stream: TcpStream, state: &State) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let mut head = String::new();
        while reader.read_line(&mut head)? > 0 && !head.ends_with("\r\n\r\n") {}
        let Some(line) = head.lines().next() else { return Ok(()) };
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
        });
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body)?;
        let path = line.split(' ').nth(1).unwrap_or_default();
        let (status, text, reply) = answer(path, &body, state);
        let sent: &[u8] = match reply {
            Reply::Truncated(bytes) | Reply::BrokenOff(bytes) => &text.as_bytes()[..bytes],
            _ => text.as_bytes(),
        };
        let length = if let Reply::BrokenOff(_) = reply { text.len() } else { sent.len() };
        write!(stream, "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n")?;
        stream.write_all(sent)?;
        if let Reply::BrokenOff(_) = reply {
            return stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

fn answer(path: &str, body: &[u8], state: &State) -> (u16, String, Reply) {
    let good = |value: Value| (200, value.to_string(), Reply::Right);
    match path {
        "/health" => good(json!(null)),
        "/version" => {
            let version = *state.version.lock().expect("no handler panics");
            good(json!({ "version": version }))
        }
        "/v1/models" => {
            let max_model_len = state.max_model_len;
            good(
                json!({ "data": [{ "id": "tiny", "root": "/m", "max_model_len": max_model_len }] }),
            )
        }
        "/collective_rpc" if state.reload().is_some() => good(json!({ "results": [null] })),
        "/reset_prefix_cache" if state.folder.is_some() => good(json!(null)),
        "/v1/completions" => completions(body, state),
        _ => (404, json!({ "detail": "Not Found" }).to_string(), Reply::Right),
    }
}

fn completions(body: &[u8], state: &State) -> (u16, String, Reply) {
    let body: Value = serde_json::from_slice(body).expect("a client sends JSON");
    let sent = body["request_id"].as_str().expect("a client names its requests");
    let name = sent.split('-').next().expect("split yields a part").to_owned();
    state.bodies.lock().expect("no handler panics").push(body.clone());
    let before = {
        let mut asked = state.asked.lock().expect("no handler panics");
        let count = asked.entry(name.clone()).or_default();
        *count += 1;
        *count - 1
    };
    let count = |by: isize| {
        let mut now = state.now.lock().expect("no handler panics");
        now.0 = now.0.wrapping_add_signed(by);
        now.1 = now.1.max(now.0);
    };
    count(1);
    let reply = (state.script)(&Asked { before, name: &name });
    if let Reply::Late(by) = reply {
        thread::sleep(by);
    }
    let room = u64::from(state.max_model_len);
    let len = body["prompt"].as_array().expect("token ids").len() as u64;
    let done = match reply {
        Reply::Status(status, text) => (status, text.to_owned(), reply),
        _ if len + body["max_tokens"].as_u64().expect("a count") > room => {
            let message = format!("maximum context length is {room} tokens");
            (400, json!({ "error": { "message": message } }).to_string(), Reply::Right)
        }
        _ => {
            let mut right = completed(&body, &name, state);
            if let Reply::Edited(edit) = reply {
                edit(&mut right);
            }
            let mut text = right.to_string();
            if let Reply::Retyped(from, to) = reply {
                assert!(text.contains(from), "{from} in {text}");
                text = text.replacen(from, to, 1);
            }
            (200, text, reply)
        }
    };
    count(-1);
    done
}

/// What a vLLM server would say.
pub fn completed(body: &Value, name: &str, state: &State) -> Value {
    let number = |key: &str| body[key].as_f64().unwrap_or_else(|| panic!("{key} in {body}"));
    let contract = Contract {
        logprobs_mode: state.mode,
        temperature: number("temperature") as f32,
        top_p: number("top_p") as f32,
        top_k: number("top_k") as u32,
        min_p: number("min_p") as f32,
    };
    let ids = |key: &str| -> Vec<TokenId> {
        let all = body[key].as_array().unwrap_or_else(|| panic!("{key} in {body}"));
        all.iter().map(|id| TokenId::new(id.as_u64().expect("an id") as u32)).collect()
    };
    let prompt = ids("prompt");
    let mut engine = state.engine(contract);
    let id: Option<RequestId> = name.parse().ok();
    let request = GenerationRequest {
        id: id.unwrap_or(RequestId::new(0, 0, 0)),
        prompt: prompt.clone(),
        max_new_tokens: number("max_tokens") as u32,
        ignore_eos: body["ignore_eos"] == true,
        eos_token_ids: ids("stop_token_ids"),
    };
    let done = engine.generate(vec![request]).expect("it fits").remove(0);
    let prefill = (!body["prompt_logprobs"].is_null()).then(|| {
        let scores = engine.score_prefill(&[(&prompt, 1)]).remove(0);
        let place = |(token, logp): (&TokenId, &gapscope::base::LogProb)| {
            json!({ token.to_string(): { "logprob": logp.get(), "rank": 1 } })
        };
        let places = prompt[1..].iter().zip(&scores).map(place);
        std::iter::once(Value::Null).chain(places).collect::<Vec<_>>()
    });
    let mut choice = choice(&prompt, &done, prefill);
    if body.get("allowed_token_ids").is_some() {
        force(&mut choice, ids("allowed_token_ids")[0], &prompt, state.mode, &mut engine);
    }
    if body["logprobs"] == 1 {
        let (token, logp) = state.best(&prompt, &contract);
        choice["logprobs"]["top_logprobs"][0][format!("token_id:{token}")] = json!(logp);
    }
    json!({ "id": format!("cmpl-{name}"), "choices": [choice] })
}

/// The one token that may be sampled: raw log-probabilities do not know of it, others do.
fn force(
    choice: &mut Value,
    token: TokenId,
    prompt: &[TokenId],
    mode: LogprobsMode,
    engine: &mut Engine,
) {
    let whole = [prompt, &[token]].concat();
    let raw = engine.score_prefill(&[(&whole, prompt.len())]).remove(0)[0].get();
    let logp = if mode == LogprobsMode::RawLogprobs { raw } else { 0.0 };
    choice["token_ids"] = json!([token]);
    choice["logprobs"]["tokens"] = json!([format!("token_id:{token}")]);
    choice["logprobs"]["token_logprobs"] = json!([logp]);
}

fn choice(prompt: &[TokenId], done: &Completion, prefill: Option<Vec<Value>>) -> Value {
    let names: Vec<String> = done.token_ids().map(|id| format!("token_id:{id}")).collect();
    let logps: Vec<f32> = done.tokens.iter().map(|sampled| sampled.logp.get()).collect();
    let place = |(name, logp): (&String, &f32)| -> Value {
        Map::from_iter([(name.clone(), json!(logp))]).into()
    };
    let top: Vec<Value> = names.iter().zip(&logps).map(place).collect();
    let stopped = done.finish_reason == FinishReason::Stop;
    json!({
        "index": 0,
        "text": "",
        "logprobs": { "tokens": names, "token_logprobs": logps, "top_logprobs": top },
        "finish_reason": if stopped { "stop" } else { "length" },
        "token_ids": done.token_ids().collect::<Vec<_>>(),
        "prompt_token_ids": prompt,
        "prompt_logprobs": prefill,
    })
}
