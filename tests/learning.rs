//! The quickstart learns, and the committed checkpoint is sure of its sums.

mod common;

use gapscope::config;
use gapscope::model::Preset;
use gapscope::run::Session;

/// The mean reward over the first and the last tenth of the quickstart's steps.
fn first_and_last(seed: u64, learning_rate: &str) -> (f64, f64) {
    let overrides = [format!("seed={seed}"), format!("trainer.learning_rate={learning_rate}")];
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("experiments/quickstart.toml");
    let config = config::load(&path, &overrides).expect("the quickstart loads");
    let folder = tempfile::tempdir().expect("a folder");
    let summary = gapscope::run::run(&config, &folder.path().join("run")).expect("a run");
    assert_eq!(summary.gap_max, Some(0.0), "seed {seed}");
    assert!(summary.findings.is_empty(), "seed {seed}: {:?}", summary.findings);
    let (first, last) = (summary.reward_mean_first, summary.reward_mean_last);
    (first.expect("a first tenth"), last.expect("a last tenth"))
}

#[test]
fn the_reward_rises_for_four_seeds_of_five() {
    let gains: Vec<f64> = (1..=5)
        .map(|seed| {
            let (first, last) = first_and_last(seed, "1e-3");
            last - first
        })
        .collect();
    let learned = gains.iter().filter(|&&gain| gain >= 0.3).count();
    assert!(learned >= 4, "{gains:?}");
}

#[test]
fn nothing_is_learned_at_learning_rate_zero() {
    let (first, last) = first_and_last(7, "0.0");
    // 192 prompts on each side: one standard error of the difference is about 0.04.
    assert!((last - first).abs() <= 0.05, "{first} to {last}");
}

/// The warm start teaches every family, and what it has taught is scored alike on both sides.
#[test]
fn every_tiny_preset_learns_from_a_warm_start() {
    for preset in [Preset::TinyJamba, Preset::TinyMamba, Preset::TinyLlama] {
        let name = preset.name();
        let text = format!(
            "name = \"warm\"\nmodel.preset = \"{name}\"\ntask.max_operand = 9\n\
             engine = {{ max_model_len = 96, num_gpu_blocks_override = 200 }}\n\
             rollout = {{ prompts_per_step = 8, rollouts_per_prompt = 4, max_new_tokens = 4 }}\n\
             trainer.warm_start = {{ steps = 60, batch = 32, learning_rate = 3e-3 }}\n"
        );
        let config = config::parse(&text, "test.toml", &[]).expect("a valid config");
        let mut session = Session::open(&config).expect("a session");
        let mut losses = Vec::new();
        let report = |_, loss| {
            losses.push(loss);
            Ok(())
        };
        session.warm_start(report).expect("a warm start");
        let (first, last) = (losses[0], losses[50..].iter().sum::<f64>() / 10.0);
        // From a guess among 256 to under a third of it.
        assert!(last < first / 3.0, "{name}: {first} to {last}");
        let step = gapscope::base::Step::new(1);
        let mut rollouts = session.generate(step).expect("rollouts");
        session.score(&mut rollouts).expect("scores");
        let comparison = session.compare(step, &mut rollouts).expect("a comparison");
        assert!(comparison.findings.is_empty(), "{name}: {:?}", comparison.findings);
    }
}

#[test]
fn the_committed_checkpoint_is_confident_and_right() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let model = format!("model.path=\"{}\"", root.join("configs/models/arithmetic").display());
    let text = "name = \"checkpoint\"\n\
                engine.max_model_len = 96\n\
                task = { max_operand = 99, prompt_tokens = 64, min_prompt_tokens = 6 }\n\
                rollout = { max_new_tokens = 5 }\n\
                trainer.update = \"none\"\n";
    let config = config::parse(text, "test.toml", &[model]).expect("a valid config");
    let found = Session::open(&config).and_then(|session| session.evaluate(256)).expect("answers");
    assert!(found.greedy_reward_mean.expect("answers") >= 0.97, "{found:?}");
    assert!(found.logits_std.expect("logits") >= 4.0, "{found:?}");
}
