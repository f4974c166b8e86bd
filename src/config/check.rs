//! Values that are right each for itself, to a configuration that is right as a whole.

use std::path::PathBuf;

use super::error::ConfigError;
use super::fault::Fault;
use super::keys::only_with;
use super::kind::bytes;
use super::servers;
use super::source::Source;
use super::sweep::Sweep;
use super::trace;
use super::types::*;

/// Rollouts of one step, all of which are in memory at once.
const MAX_ROLLOUTS: u64 = 1 << 22;

/// Fills in defaults and refuses what is missing or does not go together.
pub(super) fn check(source: &Source) -> Result<Config, ConfigError> {
    keys_without_their_partner(source)?;
    let model = model(source)?;
    let config = Config {
        name: source
            .optional("name")
            .ok_or_else(|| missing(source, "name", "it names the run: write name = \"my-run\""))?,
        seed: source.get("seed"),
        steps: source.get("steps"),
        engine: engine(source, model.dtype)?,
        model,
        rollout: rollout(source),
        task: task(source)?,
        trainer: trainer(source),
        check: CheckConfig {
            legs: legs(source),
            thresholds: source.get("check.thresholds"),
            floor: source.optional("check.floor"),
            evidence: source.get("check.evidence"),
            greedy_eval_prompts: source.get("check.greedy_eval_prompts"),
        },
        checkpoint: checkpoint(source),
        // A bare `[sweep]` line asks for nothing.
        sweep: source.sweep.clone().filter(|sweep| *sweep != Sweep::default()),
        trace: trace::trace(source)?,
    };
    if let Some(sweep) = &config.sweep {
        sweep.settings()?;
    }
    lengths(&config, source)?;
    groups(&config, source)?;
    reference_leg(&config, source)?;
    training_without_updates(&config, source)?;
    trace::check(&config, source)?;
    servers::check(&config, source)?;
    Ok(config)
}

fn model(source: &Source) -> Result<ModelConfig, ConfigError> {
    let path = source.optional("model.path").map(ModelSource::Path);
    let preset = source.optional("model.preset").map(ModelSource::Preset);
    let model = match (path, preset) {
        (Some(model), None) | (None, Some(model)) => model,
        (Some(_), Some(_)) => {
            let why = "a model comes from a folder or from a preset: drop one of them";
            return Err(conflict(source, &["model.path", "model.preset"], why));
        }
        (None, None) => {
            let fix = "write path = \"FOLDER\" or preset = \"tiny-jamba\" under [model]";
            return Err(missing(source, "model.path or model.preset", fix));
        }
    };
    Ok(ModelConfig { source: model, dtype: source.get("model.dtype") })
}

/// Of a key that has a default.
pub(super) fn size(source: &Source, key: &str) -> u64 {
    let text = source.value(key).expect("sizes have defaults");
    bytes(&text).expect("its kind accepted this size")
}

fn checkpoint(source: &Source) -> CheckpointConfig {
    CheckpointConfig {
        every: source.get("checkpoint.every"),
        keep: source.get("checkpoint.keep"),
        pool_bytes_max: size(source, "checkpoint.pool_bytes_max"),
        save_final: source.get("checkpoint.save_final"),
    }
}

fn engine(source: &Source, model_dtype: Dtype) -> Result<EngineConfig, ConfigError> {
    let state_dtype: String = source.get("engine.mamba_ssm_cache_dtype");
    Ok(EngineConfig {
        replicas: source.get("engine.replicas"),
        device: source.get("engine.device"),
        device_memory: match source.value("engine.device_memory") {
            Some(auto) if auto.as_str() == Some("auto") => None,
            _ => Some(size(source, "engine.device_memory")),
        },
        gpu_memory_utilization: source.get("engine.gpu_memory_utilization"),
        num_gpu_blocks_override: source.optional("engine.num_gpu_blocks_override"),
        max_num_batched_tokens: source.get("engine.max_num_batched_tokens"),
        max_num_seqs: source.get("engine.max_num_seqs"),
        max_model_len: source.get("engine.max_model_len"),
        enable_chunked_prefill: source.get("engine.enable_chunked_prefill"),
        enforce_eager: source.get("engine.enforce_eager"),
        enable_prefix_caching: source.get("engine.enable_prefix_caching"),
        mamba_ssm_cache_dtype: match state_dtype.as_str() {
            "auto" => model_dtype,
            _ => source.get("engine.mamba_ssm_cache_dtype"),
        },
        batch_split: source.get("engine.batch_split"),
        state_index_bits: source.get("engine.state_index_bits"),
        free_list: source.get("engine.free_list"),
        sleep: source.get("engine.sleep"),
        logprobs_mode: source.get("engine.logprobs_mode"),
        force_prefill: source.get("engine.force_prefill"),
        numerics: source.get("engine.numerics"),
        faults: source.get("engine.faults"),
        servers: servers::servers(source)?,
    })
}

fn rollout(source: &Source) -> RolloutConfig {
    RolloutConfig {
        prompts_per_step: source.get("rollout.prompts_per_step"),
        rollouts_per_prompt: source.get("rollout.rollouts_per_prompt"),
        max_new_tokens: source.get("rollout.max_new_tokens"),
        ignore_eos: source.get("rollout.ignore_eos"),
        temperature: source.get("rollout.temperature"),
        top_p: source.get("rollout.top_p"),
        // vLLM writes "off" as -1 or 0.
        top_k: u32::try_from(source.get::<i64>("rollout.top_k")).unwrap_or(0),
        min_p: source.get("rollout.min_p"),
    }
}

fn task(source: &Source) -> Result<TaskConfig, ConfigError> {
    if source.get::<String>("task.kind") == "arithmetic" {
        return Ok(TaskConfig::Arithmetic {
            max_operand: source.get("task.max_operand"),
            operators: source.get("task.operators"),
            examples: source.get("task.examples"),
            prompt_tokens: source.optional("task.prompt_tokens"),
            min_prompt_tokens: source.optional("task.min_prompt_tokens"),
        });
    }
    Ok(TaskConfig::Jsonl {
        path: required::<PathBuf>(source, "task.path", "task.kind")?,
        prompt_key: source.get("task.prompt_key"),
        answer_key: source.get("task.answer_key"),
        reward: reward(source)?,
    })
}

fn reward(source: &Source) -> Result<RewardConfig, ConfigError> {
    Ok(match source.get::<String>("task.reward").as_str() {
        "exact" => RewardConfig::Exact,
        "numeric" => RewardConfig::Numeric,
        "none" => RewardConfig::None,
        "regex" => {
            let pattern: String = required(source, "task.reward_pattern", "task.reward")?;
            // Any answer does here: once escaped it is a literal wherever it stands.
            if let Err(error) = regex::Regex::new(&pattern.replace("{answer}", "0")) {
                let reason = error.to_string();
                let reason = reason.lines().last().unwrap_or_default();
                let allowed = format!("a regular expression ({reason})");
                return Err(source.refuse("task.reward_pattern", allowed));
            }
            RewardConfig::Regex { pattern }
        }
        "command" => RewardConfig::Command {
            argv: required(source, "task.reward_command", "task.reward")?,
            timeout_s: source.get("task.reward_timeout_s"),
        },
        other => unreachable!("task.reward accepted {other}"),
    })
}

fn trainer(source: &Source) -> TrainerConfig {
    TrainerConfig {
        update: source.get("trainer.update"),
        ranks: source.get("trainer.ranks"),
        learning_rate: source.get("trainer.learning_rate"),
        warmup_steps: source.get("trainer.warmup_steps"),
        betas: source.get("trainer.betas"),
        eps: source.get("trainer.eps"),
        weight_decay: source.get("trainer.weight_decay"),
        max_grad_norm: source.get("trainer.max_grad_norm"),
        updates_per_step: source.get("trainer.updates_per_step"),
        clip_ratio_low: source.get("trainer.clip_ratio_low"),
        clip_ratio_high: source.get("trainer.clip_ratio_high"),
        kl_coef: source.get("trainer.kl_coef"),
        importance_cap: source.optional("trainer.importance_cap"),
        loss_agg: source.get("trainer.loss_agg"),
        scale_advantages: source.get("trainer.scale_advantages"),
        max_tokens_per_chunk: source.get("trainer.max_tokens_per_chunk"),
        warm_start: WarmStart {
            steps: source.get("trainer.warm_start.steps"),
            batch: source.get("trainer.warm_start.batch"),
            learning_rate: source.get("trainer.warm_start.learning_rate"),
        },
        faults: source.get("trainer.faults"),
    }
}

/// In one order, each once, with the two that always run.
fn legs(source: &Source) -> Vec<Leg> {
    let asked: Vec<Leg> = source.get("check.legs");
    [Leg::Decode, Leg::Prefill, Leg::Trainer, Leg::Reference]
        .into_iter()
        .filter(|leg| matches!(leg, Leg::Decode | Leg::Trainer) || asked.contains(leg))
        .collect()
}

/// A key that would be ignored is refused: its writer expects it to do something.
fn keys_without_their_partner(source: &Source) -> Result<(), ConfigError> {
    for name in source.names() {
        let Some((partner, value)) = only_with(name) else { continue };
        if source.get::<String>(partner) != value {
            let why = format!("{name} needs {partner} = \"{value}\"");
            return Err(conflict(source, &[name, partner], &why));
        }
    }
    Ok(())
}

fn lengths(config: &Config, source: &Source) -> Result<(), ConfigError> {
    let engine = &config.engine;
    // As vLLM: a step must be able to hold one decode token of every running request.
    if engine.max_num_batched_tokens < engine.max_num_seqs {
        let keys = ["engine.max_num_batched_tokens", "engine.max_num_seqs"];
        return Err(conflict(
            source,
            &keys,
            "the token budget must be at least max_num_seqs: raise it or lower max_num_seqs",
        ));
    }
    if !engine.enable_chunked_prefill && engine.max_num_batched_tokens < engine.max_model_len {
        let keys = [
            "engine.enable_chunked_prefill",
            "engine.max_num_batched_tokens",
            "engine.max_model_len",
        ];
        return Err(conflict(
            source,
            &keys,
            "an unchunked prompt is computed in one engine step: \
             raise the token budget to max_model_len, or allow chunks",
        ));
    }
    let new_tokens = u64::from(config.rollout.max_new_tokens);
    let (prompt_tokens, shortest) = match config.task {
        TaskConfig::Arithmetic { prompt_tokens, min_prompt_tokens, .. } => {
            (prompt_tokens, min_prompt_tokens)
        }
        TaskConfig::Jsonl { .. } => (None, None),
    };
    if shortest.is_some_and(|shortest| shortest > prompt_tokens.unwrap_or(0)) {
        let keys = ["task.min_prompt_tokens", "task.prompt_tokens"];
        return Err(conflict(source, &keys, "the shortest length cannot be above the longest"));
    }
    if u64::from(prompt_tokens.unwrap_or(1)) + new_tokens > u64::from(engine.max_model_len) {
        let mut keys = vec!["rollout.max_new_tokens", "engine.max_model_len"];
        keys.extend(prompt_tokens.map(|_| "task.prompt_tokens"));
        return Err(conflict(
            source,
            &keys,
            "prompt and completion together must fit in max_model_len",
        ));
    }
    Ok(())
}

/// candle's model knows temperature and no filters; a leg that was asked for is not left out.
fn reference_leg(config: &Config, source: &Source) -> Result<(), ConfigError> {
    let contract = config.contract();
    let filtered = !contract.scores_raw_logits() && contract.has_filters();
    if filtered && config.check.legs.contains(&Leg::Reference) {
        return Err(conflict(
            source,
            &["check.legs", "engine.logprobs_mode"],
            "the reference leg knows no top_p, top_k or min_p: \
             leave it out, or record raw_logprobs",
        ));
    }
    Ok(())
}

fn groups(config: &Config, source: &Source) -> Result<(), ConfigError> {
    let (rollout, trainer) = (&config.rollout, &config.trainer);
    if let Some(idle @ 1..) = config.engine.replicas.checked_sub(rollout.prompts_per_step) {
        let keys = ["engine.replicas", "rollout.prompts_per_step"];
        let why = format!(
            "all rollouts of a prompt go to one engine, so that {idle} of {} would have nothing \
             to do: have fewer engines, or more prompts a step",
            config.engine.replicas
        );
        return Err(conflict(source, &keys, &why));
    }
    if rollout.rollouts_per_prompt == 1 && trainer.update == Update::Adamw {
        let keys = ["rollout.rollouts_per_prompt", "trainer.update"];
        return Err(conflict(
            source,
            &keys,
            "GRPO compares the rollouts of one prompt, and a group of one has no advantage: \
             sample 2 or more, or write update = \"none\"",
        ));
    }
    let sequences = u64::from(rollout.prompts_per_step) * u64::from(rollout.rollouts_per_prompt);
    if sequences > MAX_ROLLOUTS {
        let keys = ["rollout.prompts_per_step", "rollout.rollouts_per_prompt"];
        let why = format!("{sequences} rollouts a step are over the limit of {MAX_ROLLOUTS}");
        return Err(conflict(source, &keys, &why));
    }
    if sequences % u64::from(trainer.updates_per_step) != 0 {
        let keys =
            ["trainer.updates_per_step", "rollout.prompts_per_step", "rollout.rollouts_per_prompt"];
        let why = format!("{sequences} rollouts a step cannot be cut into equal parts");
        return Err(conflict(source, &keys, &why));
    }
    Ok(())
}

/// What asks for training where nothing is trained.
fn training_without_updates(config: &Config, source: &Source) -> Result<(), ConfigError> {
    let trainer = &config.trainer;
    if trainer.update == Update::Adamw {
        return Ok(());
    }
    for (asked, key) in [
        (trainer.kl_coef != 0.0, "trainer.kl_coef"),
        (trainer.importance_cap.is_some(), "trainer.importance_cap"),
        (trainer.warm_start.steps > 0, "trainer.warm_start.steps"),
        (trainer.faults.contains(&Fault::ScoreAfterUpdate), "trainer.faults"),
        (config.checkpoint.save_final, "checkpoint.save_final"),
    ] {
        if asked {
            let why = "nothing is trained without updates: drop it, or write update = \"adamw\"";
            return Err(conflict(source, &[key, "trainer.update"], why));
        }
    }
    Ok(())
}

fn required<T: serde::de::DeserializeOwned>(
    source: &Source,
    name: &str,
    because: &str,
) -> Result<T, ConfigError> {
    let fix = || format!("{} asks for it", source.said(because));
    source.optional(name).ok_or_else(|| missing(source, name, &fix()))
}

fn missing(source: &Source, key: &str, fix: &str) -> ConfigError {
    ConfigError::Missing { file: source.file.clone(), key: key.to_owned(), fix: fix.to_owned() }
}

pub(super) fn conflict(source: &Source, keys: &[&str], why: &str) -> ConfigError {
    let values = keys.iter().map(|key| source.said(key)).collect();
    ConfigError::Conflict { values, why: why.to_owned() }
}
