//! The plan's numbers, against the shapes that they are of.

use super::*;
use crate::config;
use crate::model::Preset;

fn config_of(sets: &[&str]) -> Config {
    let text = "name = \"x\"\nmodel.preset = \"tiny-jamba\"\n";
    let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
    config::parse(text, "test.toml", &sets).expect("a valid config")
}

fn plan_of(preset: Preset, sets: &[&str]) -> MemoryPlan {
    shared_by(1, preset, sets)
}

fn shared_by(here: u32, preset: Preset, sets: &[&str]) -> MemoryPlan {
    let plan = Plan::new(preset.config());
    MemoryPlan::sharing(&plan, &config_of(sets), Some(0), here.into())
}

fn part(plan: &MemoryPlan, what: &str) -> Option<u64> {
    plan.parts.iter().find_map(|part| (part.what == what).then_some(part.bytes))
}

/// Bytes a parameter of what is there all the time.
fn always(sets: &[&str]) -> u64 {
    let plan = plan_of(Preset::TinyJamba, sets);
    let parts = plan.parts.iter().filter(|part| part.when == When::Always);
    let bytes: u64 = parts.map(|part| part.bytes).sum();
    assert_eq!(bytes % 241_964, 0);
    bytes / 241_964
}

#[test]
fn bytes_a_parameter() {
    let (none, kl) = ("trainer.update=none", "trainer.kl_coef=0.1");
    let (cuda, bf16) = ("engine.device=cuda", "model.dtype=bf16");
    // Master, two moments, and the engine's.
    assert_eq!(always(&[]), 4 + 8 + 4);
    assert_eq!(always(&[bf16]), 4 + 8 + 4);
    assert_eq!(always(&[kl]), 4 + 8 + 4 + 4);
    assert_eq!(always(&[none]), 4 + 4);
    assert_eq!(always(&[cuda, bf16]), 4 + 8 + 2);
    assert_eq!(always(&[cuda, bf16, kl]), 4 + 8 + 2 + 2);
    // One copy for both.
    assert_eq!(always(&[cuda, bf16, none]), 2);
    assert_eq!(always(&[cuda, none]), 4);
}

#[test]
fn engines_on_one_device_have_a_pool_each() {
    let (three, plan) = (["engine.replicas=3"], Plan::new(Preset::TinyJamba.config()));
    let pool = |sets: &[&str], each| MemoryPlan::of(&plan, &config_of(sets), each).pool;
    assert_eq!(always(&three), 4 + 8 + 3 * 4);
    assert_eq!(pool(&three, Some(1000)), Some(3000));
    // Not as much again for each: the same memory for all of them.
    let [one, all] = [&[][..], &three].map(|sets| pool(sets, None).expect("configured"));
    assert!(all <= one && one - all < one / 50, "{all} of {one}");
}

/// 64 prompts x 8 rollouts x (128 + 128) tokens of a model of 3 billion parameters.
#[test]
fn what_a_step_keeps_for_its_backward() {
    let sets = [
        "engine.device=cuda",
        "model.dtype=bf16",
        "rollout.prompts_per_step=64",
        "rollout.rollouts_per_prompt=8",
        "engine.max_model_len=256",
    ];
    let plan = plan_of(Preset::Jamba3bShape, &sets);
    let rows = 2_560 * 64 * 8 * 256;
    assert_eq!(part(&plan, "layers' inputs, kept"), Some(28 * 2 * rows));
    assert_eq!(part(&plan, "rows between layers"), Some((2 + 4) * rows));
    let none = plan_of(Preset::Jamba3bShape, &[&sets[..], &["trainer.update=none"]].concat());
    assert_eq!(part(&none, "layers' inputs, kept"), None);
    assert_eq!(part(&none, "rows between layers"), Some((2 + 2) * rows));
    assert_eq!(part(&none, "gradient"), None);
}

/// A rank a GPU has half of what stays and of what a step keeps; the engine is on the first.
/// Two on one GPU have all of it there, and each its own gathered units.
#[test]
fn ranks_have_their_shards_and_their_share_of_a_step() {
    let sets = ["engine.device=cuda", "model.dtype=bf16", "rollout.prompts_per_step=16"];
    let two = [&sets[..], &["trainer.ranks=2"]].concat();
    let one = plan_of(Preset::Jamba3bShape, &sets);
    let apart = shared_by(1, Preset::Jamba3bShape, &two);
    let together = shared_by(2, Preset::Jamba3bShape, &two);
    for what in ["master weights", "optimizer", "layers' inputs, kept", "rows between layers"] {
        let whole = part(&one, what).expect(what);
        assert_eq!(part(&together, what), Some(whole), "{what}");
        assert_eq!(part(&apart, what), Some(whole / 2), "{what}");
    }
    assert_eq!(part(&apart, "engine weights"), part(&one, "engine weights"));
    assert!(one.others.is_empty() && together.others.is_empty());
    let others: u64 = apart.others[0].parts.iter().map(|part| part.bytes).sum();
    let engine = part(&apart, "engine weights").expect("an engine");
    let here = apart.fullest(Some(0), true);
    assert_eq!(here, others + engine, "what the engine works on, it works on at another time");
    let gathered = |plan| part(plan, "a layer and the root").expect("gathered");
    assert!(gathered(&together) > 2 * gathered(&one));
}

#[test]
fn a_dropped_pool_and_learning_are_never_there_together() {
    let fullest = |sets: &[&str], pool| plan_of(Preset::TinyJamba, sets).fullest(Some(pool), true);
    let huge = 1 << 40;
    let dropped = ["engine.sleep=drop_pool"];
    assert_eq!(fullest(&[], huge) - fullest(&[], 0), huge);
    assert!(fullest(&dropped, huge) < fullest(&[], huge));
    assert_eq!(fullest(&dropped, 0), fullest(&[], 0));
}

#[test]
fn too_little_memory_is_refused_with_both_numbers() {
    let plan = plan_of(Preset::TinyJamba, &[]);
    plan.check(&[None]).expect("some megabytes are there");
    enough("the device", 8, Some(8)).expect("it just fits");
    enough("the device", 8, None).expect("a device that does not say");
    let message = enough("the device", 9, Some(8)).expect_err("one byte short").to_string();
    let expected = "the run needs 9 bytes of the device's memory before a row is computed, and \
        8 are available: ";
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn each_gpu_is_asked_for_what_it_will_hold() {
    let plan = shared_by(1, Preset::TinyJamba, &["engine.device=cuda", "trainer.ranks=2"]);
    let [first, second] =
        [plan.fullest(Some(0), false), plan.fullest_of(&plan.others[0], false)].map(Some);
    assert!(second < first, "the engine is on the first");
    for (free, says) in [
        (vec![first, second], None),
        (vec![first, second, Some(0)], None),
        (vec![first], None),
        (vec![second, second], Some("of the device's memory")),
        (vec![first, Some(1)], Some("of GPU 1's memory")),
    ] {
        match (plan.check(&free), says) {
            (checked, None) => checked.expect("it just fits"),
            (checked, Some(says)) => {
                let message = checked.expect_err(says).to_string();
                assert!(message.contains(says), "{message}");
            }
        }
    }
}

#[test]
fn a_gpu_has_a_rank_an_engine_or_both() {
    let (plan, config) =
        (Plan::new(Preset::TinyJamba.config()), config_of(&["engine.device=cuda"]));
    let held = |counts| -> Vec<(bool, bool)> {
        let of = |other: &OtherGpu| {
            let has = |what| other.parts.iter().any(|part| part.what == what);
            assert_eq!(has("engine weights"), other.has_pool);
            (has("master weights"), other.has_pool)
        };
        others(&plan, &config, counts).iter().map(of).collect()
    };
    assert_eq!(held((1, 1)), []);
    assert_eq!(held((2, 2)), [(true, true)]);
    assert_eq!(held((2, 3)), [(true, true), (false, true)]);
    assert_eq!(held((3, 1)), [(true, false), (true, false)]);
}

/// Ranks hand theirs over from threads of their own; what is rounded to bf16 is a copy of one too.
#[test]
fn what_a_checkpoint_copies_on_a_cpu() {
    let copied = |ranks: u32, sets: &[&str]| {
        let ranks = format!("trainer.ranks={ranks}");
        let plan = plan_of(Preset::TinyJamba, &[&[ranks.as_str()], sets].concat());
        part(&plan, "a checkpoint, copied")
    };
    let (kl, bf16) = ("trainer.kl_coef=0.1", "model.dtype=bf16");
    let params = 241_964;
    assert_eq!(copied(1, &[]), None);
    assert_eq!(copied(2, &[]), Some(12 * params));
    assert_eq!(copied(2, &["trainer.update=none"]), None);
    assert_eq!(copied(2, &["steps=10"]), None, "none is written but at the end");
    assert_eq!(copied(1, &[kl, bf16]), Some(2 * params));
    assert_eq!(copied(2, &[kl]), Some(16 * params));
    let plan = plan_of(Preset::TinyJamba, &["trainer.ranks=2"]);
    let idle: u64 =
        plan.parts.iter().filter(|part| part.when == When::Always).map(|part| part.bytes).sum();
    assert!(plan.fullest(Some(0), false) >= idle + 12 * params);
}
