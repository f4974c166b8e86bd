//! The room as a whole: what loads, and whether the table of keys, the checks and the checked type
//! agree.

mod messages;

use std::path::{Path, PathBuf};

use toml::Value;

use super::keys::find;
use super::*;

const SMALL: &str = "name = \"small\"\n[model]\npreset = \"tiny-jamba\"\n";

fn config(text: &str, overrides: &[&str]) -> Config {
    let overrides: Vec<String> = overrides.iter().map(|&o| o.to_owned()).collect();
    parse(text, "exp.toml", &overrides).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn refusal(text: &str, overrides: &[&str]) -> String {
    let overrides: Vec<String> = overrides.iter().map(|&o| o.to_owned()).collect();
    match parse(text, "exp.toml", &overrides) {
        Ok(_) => panic!("accepted:\n{text}\n{overrides:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn every_key_loads_with_its_default_and_only_then_changes_nothing() {
    let bare = config("name = \"my-run\"\n[model]\npreset = \"tiny-jamba\"\n", &[]);
    assert_eq!(config(&defaults_text(), &[]), bare);
    for key in KEYS {
        let (IfAbsent::Is(text) | IfAbsent::Nothing(text) | IfAbsent::Error(text)) = key.if_absent;
        assert!(key.kind.accepts(&source::value_of(text)), "{} = {text}", key.name);
        assert_eq!(KEYS.iter().filter(|other| other.name == key.name).count(), 1, "{}", key.name);
    }
}

const VLLM: &[&str] = &["engine.kind=vllm", "trainer.update=none"];
const VLLM_AT: &[&str] = &["engine.kind=vllm", "trainer.update=none", "engine.url=http://x"];
const VLLM_LAUNCHED: &[&str] = &[
    "engine.kind=vllm",
    "trainer.update=none",
    "engine.url=http://x",
    "engine.launch.command=serve",
];

/// Another value than the default (or the example) for every key that has one, and what else must
/// be set for it to mean anything.
const OTHER_VALUES: &[(&str, &str, &[&str])] = &[
    ("name", "other", &[]),
    ("seed", "1", &[]),
    ("steps", "1", &[]),
    ("model.path", "other", &[]),
    ("model.preset", "jamba-3b-shape", &[]),
    ("model.dtype", "bf16", &[]),
    ("engine.kind", "vllm", &["engine.url=http://x", "trainer.update=none"]),
    ("engine.url", "[\"http://a:1\", \"http://b:1\"]", VLLM),
    ("engine.served_model_name", "other", VLLM_AT),
    ("engine.max_concurrent_requests", "3", VLLM_AT),
    ("engine.request_timeout_s", "3", VLLM_AT),
    ("engine.retry_for_s", "3", VLLM_AT),
    ("engine.request_seeds", "true", VLLM_AT),
    ("engine.check_contract", "false", VLLM_AT),
    ("engine.sync_folder", "other", VLLM_AT),
    ("engine.args", "--gpu-memory-utilization 0.3", &[]),
    ("engine.launch.command", "other {port}", VLLM_AT),
    ("engine.launch.shell", "true", VLLM_LAUNCHED),
    ("engine.launch.ready_timeout_s", "3", VLLM_LAUNCHED),
    ("engine.launch.restarts", "3", VLLM_LAUNCHED),
    ("engine.replicas", "2", &[]),
    ("engine.device", "\"cuda\"", &[]),
    ("engine.device_memory", "1GiB", &[]),
    ("engine.gpu_memory_utilization", "0.5", &[]),
    ("engine.num_gpu_blocks_override", "9", &[]),
    ("engine.max_num_batched_tokens", "512", &[]),
    ("engine.max_num_seqs", "8", &[]),
    ("engine.max_model_len", "96", &[]),
    ("engine.enable_chunked_prefill", "false", &[]),
    ("engine.enforce_eager", "false", &[]),
    ("engine.enable_prefix_caching", "true", &[]),
    ("engine.mamba_ssm_cache_dtype", "bfloat16", &[]),
    ("engine.batch_split", "scheduled_tokens", &[]),
    ("engine.state_index_bits", "22", &[]),
    ("engine.free_list", "lifo", &[]),
    ("engine.sleep", "drop_pool", &[]),
    ("engine.logprobs_mode", "processed_logprobs", &[]),
    ("engine.force_prefill", "true", &[]),
    ("engine.numerics", "fast", &[]),
    ("engine.faults", "[\"engine_weight_ulp\"]", &[]),
    ("rollout.prompts_per_step", "3", &[]),
    ("rollout.rollouts_per_prompt", "2", &[]),
    ("rollout.max_new_tokens", "4", &[]),
    ("rollout.ignore_eos", "true", &[]),
    ("rollout.temperature", "0", &[]),
    ("rollout.top_p", "0.8", &[]),
    ("rollout.top_k", "5", &[]),
    ("rollout.min_p", "0.1", &[]),
    ("task.kind", "jsonl", &["task.path=q"]),
    ("task.max_operand", "99", &[]),
    ("task.operators", "+-", &[]),
    ("task.examples", "2", &[]),
    ("task.prompt_tokens", "32", &[]),
    ("task.min_prompt_tokens", "20", &["task.prompt_tokens=32"]),
    ("task.path", "other.jsonl", &["task.kind=jsonl"]),
    ("task.prompt_key", "question", &["task.kind=jsonl", "task.path=q"]),
    ("task.answer_key", "solution", &["task.kind=jsonl", "task.path=q"]),
    ("task.reward", "numeric", &["task.kind=jsonl", "task.path=q"]),
    ("task.reward_pattern", "b", &["task.kind=jsonl", "task.path=q", "task.reward=regex"]),
    ("task.reward_command", "[\"b\"]", &["task.kind=jsonl", "task.path=q", "task.reward=command"]),
    (
        "task.reward_timeout_s",
        "1",
        &["task.kind=jsonl", "task.path=q", "task.reward=command", "task.reward_command=[\"a\"]"],
    ),
    ("trainer.update", "none", &[]),
    ("trainer.ranks", "3", &[]),
    ("trainer.learning_rate", "0", &[]),
    ("trainer.warmup_steps", "3", &[]),
    ("trainer.betas", "[0.8, 0.9]", &[]),
    ("trainer.eps", "1e-6", &[]),
    ("trainer.weight_decay", "0.1", &[]),
    ("trainer.max_grad_norm", "inf", &[]),
    ("trainer.updates_per_step", "2", &[]),
    ("trainer.clip_ratio_low", "0.1", &[]),
    ("trainer.clip_ratio_high", "0.3", &[]),
    ("trainer.kl_coef", "0.01", &[]),
    ("trainer.importance_cap", "3", &[]),
    ("trainer.loss_agg", "sequence_mean", &[]),
    ("trainer.scale_advantages", "false", &[]),
    ("trainer.max_tokens_per_chunk", "64", &[]),
    ("trainer.faults", "[\"trainer_weight_ulp\"]", &[]),
    ("trainer.warm_start.steps", "3", &[]),
    ("trainer.warm_start.batch", "3", &[]),
    ("trainer.warm_start.learning_rate", "0.1", &[]),
    ("check.legs", "[\"reference\"]", &[]),
    ("check.thresholds", "slime", &[]),
    ("check.floor", "0.5", &[]),
    ("check.evidence", "true", &[]),
    ("check.greedy_eval_prompts", "64", &[]),
    ("checkpoint.every", "3", &[]),
    ("checkpoint.keep", "1", &[]),
    ("checkpoint.pool_bytes_max", "1MiB", &[]),
    ("checkpoint.save_final", "true", &[]),
    ("trace.when", "always", &[]),
    ("trace.request", "s1.p0.r0", &[]),
    ("trace.max_bytes", "1MiB", &["trace.when=always"]),
    ("sweep.stop_after_spikes", "4", &[]),
    ("sweep.points", "[{ seed = 1 }]", &[]),
];

/// No key is accepted and then forgotten, and none is read from under another's name.
#[test]
fn every_key_reaches_the_config() {
    for key in KEYS {
        let row = OTHER_VALUES.iter().find(|(name, ..)| *name == key.name);
        let (name, other, companions) = row.unwrap_or_else(|| panic!("{} has no row", key.name));
        let (IfAbsent::Is(first) | IfAbsent::Nothing(first) | IfAbsent::Error(first)) =
            key.if_absent;
        let with = |value: &str| {
            let model = if *name == "model.path" { "seed=0" } else { "model.preset=tiny-jamba" };
            // Keys that only one of its values takes go beside that one.
            let plain = ["\"arithmetic\"", "\"embedded\""].contains(&value);
            let companions = if plain { &[] } else { *companions };
            let assignment = format!("{name}={value}");
            let overrides = [&["name=x", model][..], companions, &[&assignment]].concat();
            config("", &overrides)
        };
        assert_ne!(with(first), with(other), "{name} = {first} and {other}");
    }
    assert!(OTHER_VALUES.iter().all(|(name, ..)| find(name).is_some()));
}

/// Every spelling and every bound that a key's kind accepts fits the type that it is read into.
#[test]
fn every_accepted_value_fits_its_type() {
    for key in KEYS {
        let values: Vec<String> = match key.kind {
            Kind::Int { min, max } => vec![min.to_string(), max.to_string()],
            Kind::OneOf(names) => names.iter().map(|name| format!("{name:?}")).collect(),
            Kind::SomeOf(names) => vec![format!("{names:?}")],
            Kind::Number(_) => vec!["0".to_owned(), "1".to_owned(), "0.5".to_owned()],
            Kind::Pair(_) => vec!["[0, 0.5]".to_owned()],
            _ => continue,
        };
        for value in values {
            if !key.kind.accepts(&source::value_of(&value)) {
                continue;
            }
            let overrides = ["model.preset=tiny-jamba".to_owned(), format!("{}={value}", key.name)];
            match parse("name = \"x\"", "exp.toml", &overrides) {
                Ok(_) | Err(ConfigError::Conflict { .. } | ConfigError::Missing { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn values_mean_what_they_say() {
    let text = "name = \"index-wrap\"\nseed = 7\nsteps = 48\n\
        [model]\npath = \"configs/models/tiny-jamba\"\ndtype = \"float32\"\n\
        [engine]\nkind = \"embedded\"\ndevice = \"cpu\"\ndevice_memory = \"24MiB\"\n\
        num_gpu_blocks_override = 1441\nmax_num_batched_tokens = 512\nmax_model_len = 96\n\
        state_index_bits = 22\nenforce_eager = false\nenable_prefix_caching = false\n\
        numerics = \"invariant\"\nreplicas = 1\nmamba_ssm_cache_dtype = \"bfloat16\"\n\
        [rollout]\nprompts_per_step = 3\ntemperature = 1\ntop_k = -1\n\
        [task]\nkind = \"arithmetic\"\n\
        [trainer]\nupdate = \"none\"\nranks = 1\nmax_grad_norm = inf\n\
        [trainer.warm_start]\nbatch = 4\n\
        [check]\nlegs = [\"reference\"]\n\
        [sweep]\n\"rollout.rollouts_per_prompt\" = [8, 16]\nengine.free_list = [\"lifo\"]\n\
        stop_after_spikes = 3\n\
        points = [{ trainer.betas = [0.1, 0.2], \"engine.max_num_seqs\" = 4 }]\n";
    let config = config(text, &["seed=8", "name=run-2", "rollout.top_p=0.5"]);
    assert_eq!((config.seed, config.name.as_str(), config.rollout.top_p), (8, "run-2", 0.5));
    assert_eq!(config.model.source, ModelSource::Path(PathBuf::from("configs/models/tiny-jamba")));
    assert_eq!(config.engine.device_memory, Some(24 << 20));
    assert_eq!(config.engine.num_gpu_blocks_override, Some(1441));
    assert_eq!(config.engine.mamba_ssm_cache_dtype, Dtype::Bf16);
    assert_eq!(config.model.dtype, Dtype::F32);
    assert_eq!((config.rollout.temperature, config.rollout.top_k), (1.0, 0));
    assert_eq!(config.trainer.max_grad_norm, f64::INFINITY);
    assert_eq!(config.trainer.warm_start.batch, 4);
    assert_eq!(config.check.legs, [Leg::Decode, Leg::Trainer, Leg::Reference]);
    let sweep = config.sweep.expect("a sweep");
    assert_eq!(sweep.stop_after_spikes, Some(3));
    let betas = Value::Array(vec![Value::Float(0.1), Value::Float(0.2)]);
    let setting = |key: &str, value: Value| (key.to_owned(), value);
    let point =
        vec![setting("trainer.betas", betas), setting("engine.max_num_seqs", Value::Integer(4))];
    assert_eq!(sweep.points, [point]);
    let axes = vec![
        ("rollout.rollouts_per_prompt".to_owned(), vec![Value::Integer(8), Value::Integer(16)]),
        ("engine.free_list".to_owned(), vec![Value::String("lifo".to_owned())]),
    ];
    assert_eq!(sweep.axes, axes);
}

#[test]
fn the_state_dtype_follows_the_model_unless_it_is_named() {
    for (model, state, expected) in [
        ("f32", "auto", Dtype::F32),
        ("bf16", "auto", Dtype::Bf16),
        ("bf16", "float32", Dtype::F32),
        ("f32", "bf16", Dtype::Bf16),
    ] {
        let model = format!("model.dtype={model}");
        let state = format!("engine.mamba_ssm_cache_dtype={state}");
        let resolved = config(SMALL, &[&model, &state]).engine.mamba_ssm_cache_dtype;
        assert_eq!(resolved, expected, "{model} {state}");
    }
}

#[test]
fn later_overrides_win_and_text_needs_no_quotes() {
    let config = config(
        SMALL,
        &[
            "seed=1",
            "seed = 2",
            "engine.free_list=lifo",
            "engine.logprobs_mode=\"processed_logprobs\"",
            "engine.device_memory=1GiB",
            "trainer.warm_start.steps=3",
            "check.legs=[\"prefill\"]",
        ],
    );
    assert_eq!(config.seed, 2);
    assert_eq!(config.engine.free_list, FreeListOrder::Lifo);
    assert_eq!(config.engine.device_memory, Some(1 << 30));
    assert_eq!(config.trainer.warm_start.steps, 3);
    assert_eq!(config.check.legs, [Leg::Decode, Leg::Prefill, Leg::Trainer]);
}

#[test]
fn saved_configurations_read_back() {
    for overrides in [
        &[][..],
        &["trainer.max_grad_norm=inf", "trainer.importance_cap=2"],
        &["rollout.temperature=0.1", "trainer.learning_rate=0.30000000000000004"],
        &["trainer.eps=4.9e-8", "trainer.betas=[0.1, 0.9999999]", "model.dtype=bf16"],
        &["task.kind=jsonl", "task.path=q", "task.reward=regex", "task.reward_pattern=^{answer}$"],
        &["task.kind=jsonl", "task.path=q", "task.reward=command", "task.reward_command=[\"a\"]"],
        &["engine.faults=[\"engine_weight_ulp\"]", "seed=9223372036854775807"],
    ] {
        let config = config(SMALL, overrides);
        let json = config.to_json();
        assert_eq!(Config::from_json(&json, "config.json").expect(&json), config);
        assert!(!json.contains("\"max_grad_norm\": null"), "{json}");
    }
    let json = config(SMALL, &[]).to_json().replace("\"max_num_seqs\"", "\"max_seqs\"");
    let error = Config::from_json(&json, "runs/x/config.json").expect_err("a key is wrong");
    let message = error.to_string();
    assert!(
        message.contains("runs/x/config.json") && message.contains("engine.max_seqs"),
        "{message}"
    );
}

#[test]
fn a_sweep_changes_nothing_that_is_saved() {
    let with_sweep = format!("{SMALL}[sweep]\nseed = [1, 2]\n");
    assert_eq!(config(&with_sweep, &[]).to_json(), config(SMALL, &[]).to_json());
}

#[test]
fn the_saved_form_and_the_defaults_file() {
    insta::assert_snapshot!("saved", config(SMALL, &["trainer.max_grad_norm=inf"]).to_json());
    insta::assert_snapshot!("defaults", defaults_text());
}

#[test]
fn every_experiment_file_of_the_repository_loads() {
    fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
        let Ok(entries) = std::fs::read_dir(folder) else { return };
        for entry in entries {
            let path = entry.expect("the folder can be read").path();
            if path.is_dir() {
                walk(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "toml") {
                files.push(path);
            }
        }
    }
    let mut files = Vec::new();
    for folder in ["configs", "experiments"] {
        walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut files);
    }
    for file in files {
        load(&file, &[]).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn a_prompt_and_its_completion_may_fill_the_model_exactly() {
    let text = "name = \"x\"\nmodel.preset = \"tiny-jamba\"\nengine.max_model_len = 64\n\
                rollout.max_new_tokens = 8\ntask.prompt_tokens = ";
    assert!(parse(&format!("{text}56\n"), "x.toml", &[]).is_ok());
    assert!(parse(&format!("{text}57\n"), "x.toml", &[]).is_err());
}
