use std::path::Path;

use serde_json::{json, Value};

use super::*;

fn fixture(model: &str, name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(model);
    std::fs::read_to_string(folder.join(name)).expect("fixture")
}

fn read(text: &str) -> HfConfig {
    HfConfig::parse(text, Path::new("config.json")).expect("a config")
}

fn edited(model: &str, change: impl FnOnce(&mut Value)) -> String {
    let mut json = serde_json::from_str(&fixture(model, "config.json")).expect("JSON");
    change(&mut json);
    json.to_string()
}

fn refusal(text: &str) -> String {
    HfConfig::parse(text, Path::new("config.json")).expect_err("must be refused").to_string()
}

#[test]
fn both_releases_and_our_own_file_describe_the_same_model() {
    for model in
        ["tiny-jamba", "tiny-jamba-moe", "tiny-mamba", "tiny-llama", "tiny-qwen2", "tiny-qwen3"]
    {
        let five = read(&fixture(model, "config.json"));
        assert_eq!(read(&fixture(model, "config.v4.json")), five, "{model}");
        assert_eq!(read(&five.to_json("float32").to_string()), five, "{model}");
        assert_eq!(five.eos_token_ids, [TokenId::new(2)], "{model}");
    }
}

/// A layer in one word.
fn layers(config: &HfConfig) -> Vec<String> {
    let word = |kind: LayerKind| format!("{:?}+{:?}", kind.mixer, kind.feed_forward);
    config.layers().into_iter().map(word).collect()
}

#[test]
fn k29_the_layer_plan() {
    let of = |model| layers(&read(&fixture(model, "config.json")));
    let (mamba, attention) = ("Mamba+Dense", "Attention+Dense");
    assert_eq!(of("tiny-jamba"), [mamba, mamba, attention, mamba]);
    let experts = "Mamba+Experts";
    assert_eq!(of("tiny-jamba-moe"), [mamba, experts, attention, experts]);
    assert_eq!(of("tiny-mamba"), ["Mamba+None"; 3]);
    for model in ["tiny-llama", "tiny-qwen2", "tiny-qwen3"] {
        assert_eq!(of(model), [attention; 3], "{model}");
    }
    // huggingface/transformers#33316: 32 layers, period 8, offset 4.
    let text = edited("tiny-jamba", |c| {
        c["num_hidden_layers"] = 32.into();
        c["attn_layer_period"] = 8.into();
        c["attn_layer_offset"] = 4.into();
    });
    let attends = |(i, kind): (usize, LayerKind)| (kind.mixer == MixerKind::Attention).then_some(i);
    let found: Vec<usize> =
        read(&text).layers().into_iter().enumerate().filter_map(attends).collect();
    assert_eq!(found, [4, 12, 20, 28]);
    let mixes = |kind: &LayerKind| kind.mixer == MixerKind::Mamba;
    assert_eq!(read(&text).layers().iter().filter(|&kind| mixes(kind)).count(), 28);
}

/// Whether the changed file of a fixture is refused with a message that starts like this.
fn check(model: &str, want: &str, change: impl FnOnce(&mut Value)) {
    let found = refusal(&edited(model, change));
    assert!(found.starts_with(&format!("config.json: {want}")), "{found}, not {want}");
}

#[test]
fn k29_an_impossible_layer_plan_is_named() {
    check("tiny-jamba", "attn_layer_offset: is 4; it must be below attn_layer_period 4", |c| {
        c["attn_layer_offset"] = 4.into()
    });
    check("tiny-jamba", "attn_layer_offset: is 8; it must be below attn_layer_period 8", |c| {
        c["attn_layer_period"] = 8.into();
        c["attn_layer_offset"] = 8.into();
    });
    check("tiny-jamba", "attn_layer_period: is 0; it must be at least 1", |c| {
        c["attn_layer_period"] = 0.into()
    });
    check("tiny-jamba", "attn_layer_period: is missing", |c| c["attn_layer_period"] = Value::Null);
    check(
        "tiny-jamba-moe",
        "expert_layer_offset: is 9; it must be below expert_layer_period 2",
        |c| c["expert_layer_offset"] = 9.into(),
    );
    check("tiny-jamba-moe", "expert_layer_period: is missing", |c| {
        c["expert_layer_period"] = Value::Null
    });
    check("tiny-jamba-moe", "num_experts_per_tok: is 5, of 4 experts", |c| {
        c["num_experts_per_tok"] = 5.into()
    });
    check("tiny-jamba", "num_experts: is missing", |c| c["num_experts"] = Value::Null);
}

#[test]
fn attention_that_this_build_lacks_is_named() {
    check(
        "tiny-jamba",
        "sliding_window: is 4096; this build knows attention to all keys, null",
        |c| c["sliding_window"] = 4096.into(),
    );
    check(
        "tiny-qwen3",
        "layer_types: has \"sliding_attention\"; this build knows \"full_attention\"",
        |c| c["layer_types"][1] = "sliding_attention".into(),
    );
    check(
        "tiny-qwen2",
        "sliding_window: is 16; this build knows attention to all keys, null",
        |c| {
            c["layer_types"] = Value::Null;
            c["use_sliding_window"] = true.into();
            c["sliding_window"] = 16.into();
            c["max_window_layers"] = 2.into();
        },
    );
    check(
        "tiny-llama",
        "rope_parameters.rope_type: is \"yarn\"; this build knows \"default\" and \"llama3\"",
        |c| c["rope_parameters"]["rope_type"] = "yarn".into(),
    );
    check(
        "tiny-llama",
        "rope_scaling.rope_type: is \"linear\"; this build knows \"default\" and \"llama3\"",
        |c| {
            c["rope_parameters"] = Value::Null;
            c["rope_scaling"] = json!({"type": "linear", "factor": 2.0});
        },
    );
    check("tiny-llama", "rope_parameters.low_freq_factor: is missing", |c| {
        c["rope_parameters"]["rope_type"] = "llama3".into();
        c["rope_parameters"]["factor"] = 8.0.into();
    });
    check("tiny-llama", "head_dim: is 15; rotary positions turn pairs", |c| {
        c["head_dim"] = 15.into()
    });
    check("tiny-llama", "mlp_bias: is true; this build knows false", |c| {
        c["mlp_bias"] = true.into()
    });
    check(
        "tiny-jamba",
        "num_key_value_heads: is 3, which does not divide 4 attention heads",
        |c| c["num_key_value_heads"] = 3.into(),
    );
    check("tiny-jamba", "num_attention_heads: is 5, which does not divide hidden_size 64", |c| {
        c["num_attention_heads"] = 5.into()
    });
}

#[test]
fn a_field_that_makes_no_sense_is_named() {
    check("tiny-jamba", "hidden_size: is missing", |c| c["hidden_size"] = Value::Null);
    check(
        "tiny-jamba",
        "hidden_size: invalid type: string \"wide\", expected usize at line 1 column ",
        |c| c["hidden_size"] = "wide".into(),
    );
    for (field, most) in [
        ("hidden_size", 262_144),
        ("vocab_size", 4_194_304),
        ("num_hidden_layers", 1024),
        ("num_experts", 1024),
    ] {
        let over = most + 1;
        check(
            "tiny-jamba-moe",
            &format!("{field}: is {over}; this build knows up to {most}"),
            |c| {
                c[field] = over.into();
            },
        );
    }
    let widest = "this build knows widths up to 262144";
    check("tiny-jamba", &format!("mamba_expand: is 5000, times 64; {widest}"), |c| {
        c["mamba_expand"] = 5000.into()
    });
    check("tiny-llama", &format!("head_dim: is 262144, times 4; {widest}"), |c| {
        c["head_dim"] = 262_144.into()
    });
    check(
        "tiny-jamba",
        "model_type: is \"mamba2\"; this build knows \"jamba\", \"mamba\", \"llama\", \
             \"qwen2\", \"qwen3\"",
        |c| c["model_type"] = "mamba2".into(),
    );
    check("tiny-jamba", "rms_norm_eps: is 0 in f32; it must be positive and finite", |c| {
        c["rms_norm_eps"] = 1e-60.into()
    });
    check("tiny-mamba", "layer_norm_epsilon: is inf in f32; it must be positive and finite", |c| {
        c["layer_norm_epsilon"] = json!({"__float__": "Infinity"})
    });
    check("tiny-mamba", "time_step_rank: is -1; it must be a positive number or \"auto\"", |c| {
        c["time_step_rank"] = (-1).into()
    });
}

/// A window that is switched off, or whose first layer the model does not have, changes nothing.
#[test]
fn a_window_that_never_acts_is_no_matter() {
    let plain = read(&fixture("tiny-qwen2", "config.json"));
    for (switched_on, from) in [(false, 0), (true, 3)] {
        let text = edited("tiny-qwen2", |c| {
            c["layer_types"] = Value::Null;
            c["use_sliding_window"] = switched_on.into();
            c["sliding_window"] = 16.into();
            c["max_window_layers"] = from.into();
        });
        assert_eq!(read(&text), plain);
    }
}

#[test]
fn both_spellings_of_llama3_are_one() {
    let rope = json!({
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let old = read(&edited("tiny-llama", |c| {
        c["rope_parameters"] = Value::Null;
        c["rope_theta"] = 500_000.0.into();
        c["rope_scaling"] = rope.clone();
    }));
    let new = read(&edited("tiny-llama", |c| {
        c["rope_parameters"] = rope.clone();
        c["rope_parameters"]["rope_theta"] = 500_000.0.into();
    }));
    assert_eq!(old, new);
    let found = old.attention().rope.expect("rotary positions");
    assert_eq!(found.theta, 500_000.0);
    assert_eq!(found.llama3.map(|one| (one.factor, one.original_context)), Some((32.0, 8192.0)));
    assert_eq!(read(&old.to_json("float32").to_string()), old);
}

/// ai-dynamo/dynamo#3043: Python writes what JSON does not have.
#[test]
fn k23_a_bare_infinity_is_read_and_an_error_has_its_place() {
    let with = |field: &str| {
        fixture("tiny-mamba", "config.json").replacen('{', &format!("{{\n  {field},"), 1)
    };
    let plain = read(&fixture("tiny-mamba", "config.json"));
    assert_eq!(read(&with("\"time_step_limit\": [0.0, Infinity]")), plain);
    assert_eq!(read(&with("\"time_step_limit\": [-Infinity, NaN]")), plain);
    let object = "\"time_step_limit\": [0.0, {\"__float__\": \"Infinity\"}]";
    assert_eq!(read(&with(object)), plain);
    let found = refusal(&with("\"time_step_limit\": [0.0, Infinite]"));
    assert_eq!(found, "config.json: not JSON: expected value at line 2 column 28");
    let found = refusal(&with("\"expand\": Infinity"));
    let want =
        "config.json: expand: invalid type: string \"inf\", expected usize at line 2 column 17";
    assert_eq!(found, want);
}
