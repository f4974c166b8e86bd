//! Engines side by side: what is sampled does not depend on how many there are, and what goes wrong
//! in one pool is told of that one.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use common::play::{experiment, Played};
use common::run::{gapscope, read_json, Run, SMALL, SUMS};
use gapscope::base::{EngineIndex, LogProb, RequestId, TokenId};
use gapscope::gap::{Finding, FindingKind};
use gapscope::rollout::Rollout;
use serde_json::{json, Value};

const WRAPS: &str = "experiments/two_engines.toml";

fn text(path: &str) -> String {
    fs::read_to_string(path).expect("an experiment")
}

/// The engine that a request goes to.
fn dealt(request: RequestId, engines: u32) -> EngineIndex {
    EngineIndex::new(request.prompt_id.get() % engines)
}

/// A token and the bits of both sides' log-probabilities.
type Said = Vec<(TokenId, u32, Option<u32>)>;

/// What was sampled, by request, and what the trainer makes of it.
fn said(played: &Played) -> BTreeMap<RequestId, Said> {
    let bits = |logp: LogProb| logp.get().to_bits();
    let of = |rollout: &Rollout| {
        let trainer = rollout.trainer.as_ref().expect("scored");
        let tokens = rollout.completion.tokens.iter().zip(trainer);
        let said = tokens.map(|(one, logp)| (one.token, bits(one.logp), logp.map(bits)));
        (rollout.completion.id, said.collect())
    };
    played.steps.iter().flat_map(|step| &step.rollouts).map(of).collect()
}

#[test]
fn samples_do_not_depend_on_how_many_engines_there_are() {
    let small = text(SMALL);
    let pressed = [
        "engine.num_gpu_blocks_override=14",
        "engine.max_model_len=96",
        "rollout.max_new_tokens=50",
    ];
    for sets in [
        &["trainer.learning_rate=1e-3"][..],
        &pressed,
        &["engine.enable_prefix_caching=true", "engine.sleep=keep_pool"],
        &["engine.enforce_eager=false", "engine.sleep=drop_pool", "rollout.temperature=0.7"],
        &["model.preset=tiny-llama", "model.dtype=bf16"],
    ] {
        let play = |engines: u32| {
            let more = ["rollout.prompts_per_step=5", &format!("engine.replicas={engines}")];
            let played = Played::new(&experiment(&small, &[sets, &more].concat()));
            played.assert_exact(&format!("{sets:?} {engines}"));
            for rollout in played.steps.iter().flat_map(|step| &step.rollouts) {
                let done = &rollout.completion;
                assert_eq!(done.engine, dealt(done.id, engines), "groups stay whole");
            }
            let ran = played.session.engines().iter();
            assert!(ran.clone().all(|engine| engine.statistics().engine_steps > 0));
            let preempted = ran.clone().map(|engine| engine.statistics().preemptions);
            assert_eq!(preempted.sum::<u64>() > 0, sets == pressed, "{sets:?} {engines}");
            // Each has the weights that the last step was learnt into.
            let versions: BTreeSet<_> = ran.map(|engine| engine.version()).collect();
            assert_eq!(versions, BTreeSet::from([Some(played.session.trainer.version())]));
            said(&played)
        };
        let one = play(1);
        for engines in 2..=4 {
            assert!(play(engines) == one, "{sets:?}: {engines} engines say something else");
        }
    }
}

#[test]
fn the_same_again_is_the_same_to_the_byte() {
    let run = || Run::of(SUMS, &["engine.replicas=3", "trace.when=always"]);
    let (one, other) = (run().files(), run().files());
    let timeless = |name: &&String| {
        !name.starts_with("tb/") && !["timing.jsonl", "summary.json"].contains(&name.as_str())
    };
    let names: Vec<&String> = one.keys().filter(timeless).collect();
    assert!(names.len() > 12, "{names:?}");
    for name in names {
        assert!(one[name] == other[name], "{name}");
    }
}

/// The steps in which each engine's requests went wrong.
fn told(findings: &[Finding]) -> Vec<(u64, Option<u32>)> {
    findings.iter().map(|found| (found.step.get(), found.engine.map(EngineIndex::get))).collect()
}

#[test]
fn each_pool_spikes_on_its_own_schedule() {
    let sets = ["steps=18", "engine.replicas=2"];
    let played = Played::new(&experiment(&text(WRAPS), &sets));
    assert_eq!(played.spikes(), [6, 9, 12, 18]);
    let schedule = [(6, Some(0)), (9, Some(1)), (12, Some(0)), (18, Some(0)), (18, Some(1))];
    assert_eq!(told(&played.findings), schedule);
    let mut named = BTreeSet::new();
    for found in &played.findings {
        assert_eq!(found.kind, FindingKind::AddressWrap);
        let engine = found.engine.expect("the step is of two engines");
        let starts = format!("engine {engine}: block 683 is the first whose state address wraps");
        assert!(found.message.starts_with(&starts), "{}", found.message);
        assert_eq!(found.requests.len() as u64, found.requests_total);
        assert!(found.requests.iter().all(|&request| dealt(request, 2) == engine));
        named.extend(&found.requests);
    }
    assert_eq!(named, played.bad(), "exactly the bad ones are named");
}

#[test]
fn every_engines_spikes_are_foretold_and_come() {
    let dry = gapscope().args(["sweep", WRAPS, "--dry-run"]).output().expect("starts");
    let dry = String::from_utf8(dry.stdout).expect("UTF-8");
    let lines: Vec<&str> = dry.lines().collect();
    let on_paper = "(on paper the first at 5.69, then every 6.00)";
    let two = format!(
        "replicas=2: 721 blocks, 120.0 taken a step, 6.00 laps; spikes 6, 9, 12, 18, 24, 27, 30, \
         36; engine 0: 6, 12, 18, 24, 30, 36 {on_paper}; engine 1: 9, 18, 27, 36 (on paper the \
         first at 8.54, then every 9.00)"
    );
    assert_eq!(lines[1], two);
    let one = "replicas=1: 721 blocks, 200.0 taken a step, 10.00 laps; spikes 4, 8, 11, 15, 18, \
               22, 26, 29, 33, 36 (on paper the first at 3.42, then every 3.60)";
    assert_eq!(lines[0], one);
    assert!(lines[2].ends_with("engine 2: 18, 36 (on paper the first at 17.07, then every 18.00)"));

    let parent = tempfile::tempdir().expect("a temporary folder");
    let out = parent.path().join("sweep");
    let set = ["--set", "steps=9", "--set", "rollout.rollouts_per_prompt=16"];
    gapscope().args(["sweep", WRAPS, "--out"]).arg(&out).args(set).assert().success();
    let points = read_json(&out.join("sweep.json"))["points"].clone();
    let schedule = |point: &Value, whose: &str| -> Vec<Value> {
        let engines = point[whose]["engines"].as_array().cloned().unwrap_or_default();
        engines.iter().map(|engine| engine["spike_steps"].clone()).collect()
    };
    // Twice the blocks a step: laps of 3 and of 4.5 steps.
    let expected = [json!([3, 6, 9]), json!([5, 9])];
    assert_eq!(schedule(&points[1], "prediction"), expected);
    assert_eq!(schedule(&points[1], "summary"), expected);
    assert!(schedule(&points[0], "summary").is_empty(), "one engine has no other beside it");
    for point in points.as_array().expect("points") {
        assert_eq!(point["as_predicted"], true, "{point}");
    }
    let csv = fs::read_to_string(out.join("sweep.csv")).expect("a table");
    let own = "engine 0: 3 6 9; engine 1: 5 9";
    assert!(csv.lines().nth(2).expect("a row").contains(&format!(",{own},{own},")), "{csv}");
}

/// Requests that begin as decode rows read what the step before left in the same pool.
#[test]
fn stale_blocks_were_left_by_requests_of_the_same_engine() {
    let sets = [
        "steps=6",
        "trainer.update=none",
        "engine.replicas=2",
        "engine.num_gpu_blocks_override=40",
        "engine.batch_split=scheduled_tokens",
        "engine.max_num_batched_tokens=16",
    ];
    let played = Played::new(&experiment(&text(SUMS), &sets));
    let mut engines = BTreeSet::new();
    for found in &played.findings {
        assert_eq!(found.kind, FindingKind::StaleState, "{}", found.message);
        let engine = found.engine.expect("the step is of two engines");
        assert!(found.message.starts_with(&format!("engine {engine}: request ")));
        assert!(found.requests.iter().all(|&request| dealt(request, 2) == engine));
        engines.insert(engine.get());
    }
    assert_eq!(engines, BTreeSet::from([0, 1]));
    let mut owners = 0;
    for done in played.steps.iter().flat_map(|step| &step.rollouts).map(|one| &one.completion) {
        for held in done.state_blocks() {
            let owner = held.previous_owner;
            assert!(owner.is_none_or(|owner| dealt(owner, 2) == done.engine), "{}", done.id);
            owners += u64::from(owner.is_some());
        }
    }
    assert!(owners > 100, "{owners}");
}

#[test]
fn what_is_of_all_engines_names_none() {
    // So many prompts that the ulp shows in each engine.
    let sets = ["engine.replicas=3", "engine.faults=[\"engine_weight_ulp\"]"];
    let more = ["steps=1", "rollout.prompts_per_step=30"];
    let played = Played::new(&experiment(&text(SMALL), &[&sets[..], &more].concat()));
    assert_eq!(told(&played.findings), [(1, None)]);
    assert_eq!(played.findings[0].kind, FindingKind::WeightsNotSynced);
    assert!(played.findings[0].message.starts_with("the engine sampled with weights"));
}

#[test]
fn a_run_of_two_engines_says_whose_everything_is() {
    let sets = ["steps=9", "engine.replicas=2", "trace.when=first_spike", "check.evidence=true"];
    let run = Run::of(WRAPS, &sets);
    for row in run.rollouts().iter().flatten() {
        assert_eq!(row.engine_index, dealt(row.request, 2));
    }
    let summary = run.summary();
    assert_eq!(summary["spike_steps"], json!([6, 9]));
    let engines = summary["engines"].as_array().expect("two engines");
    let of = |key: &str| engines.iter().map(|one| one[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("spike_steps"), [json!([6]), json!([9])]);
    assert_eq!(of("blocks_per_step"), [120.0, 80.0]);
    assert_eq!(of("laps"), [1.5, 1.0]);
    assert_eq!((&summary["blocks_per_step"], &summary["laps"]), (&json!(120.0), &json!(1.5)));
    let steps = of("engine_steps").iter().map(|n| n.as_u64().expect("a count")).sum::<u64>();
    assert_eq!(summary["engine_steps"], steps);
    assert!(run.stdout.contains("spike steps: 6, 9 (engine 0: 6; engine 1: 9)"), "{}", run.stdout);
    // In the rows each engine has its own, and the run's are sums, and the furthest lap.
    let [taken, laps] = ["blocks_taken", "laps"].map(|name| {
        ["pool", "pool/engine_0", "pool/engine_1"].map(|of| run.metric(&format!("{of}/{name}"))[8])
    });
    assert_eq!((taken, laps), ([200.0, 120.0, 80.0], [1.5, 1.5, 1.0]));

    let findings = read_json(&run.folder.findings());
    let whose: Vec<_> =
        findings.as_array().expect("findings").iter().map(|f| &f["engine"]).collect();
    assert_eq!(whose, [0, 1]);
    let report = fs::read_to_string(run.folder.report()).expect("a page");
    for says in ["<h2>Engines</h2>", "engine 1: block 683 is the first", " of engine "] {
        assert!(report.contains(says), "{says}");
    }
    // The evidence alone leads to the same.
    let evidence = run.root().join("evidence/step-00009.json");
    let judged = gapscope().arg("judge").arg(&evidence).output().expect("starts");
    let judged = String::from_utf8(judged.stdout).expect("UTF-8");
    assert!(judged.contains("engine 1: block 683 is the first whose state"), "{judged}");

    traced(&run);
    let told = gapscope().arg("explain").arg(run.root()).args(["--step", "9"]).output();
    let told = String::from_utf8(told.expect("starts").stdout).expect("UTF-8");
    let told = told.split_whitespace().collect::<Vec<_>>().join(" ");
    for says in ["is one of 16 requests of step 9 on engine 1, the ", "engine 1: block 683 is the"]
    {
        assert!(told.contains(says), "{says}: {told}");
    }
}

/// A trace has the steps of both engines, in order, and each only rows of its own.
fn traced(run: &Run) {
    let trace = fs::read_to_string(run.root().join("trace/step-00006.jsonl")).expect("a trace");
    let steps: Vec<Value> =
        trace.lines().skip(1).map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let places: Vec<(u64, u64)> = steps
        .iter()
        .map(|one| (&one["engine_step"], &one["engine"]))
        .map(|(step, engine)| (step.as_u64().expect("a count"), engine.as_u64().expect("a count")))
        .collect();
    assert!(places.is_sorted() && places.iter().any(|(_, engine)| *engine == 1));
    for (step, row) in steps
        .iter()
        .flat_map(|step| step["rows"].as_array().expect("rows").iter().map(move |row| (step, row)))
    {
        let request: RequestId = row["request"].as_str().expect("an id").parse().expect("an id");
        assert_eq!(step["engine"], dealt(request, 2).get());
    }
}
