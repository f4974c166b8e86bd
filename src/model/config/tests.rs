use super::*;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny-jamba");

fn fixture(name: &str) -> String {
    std::fs::read_to_string(Path::new(FOLDER).join(name)).expect("fixture")
}

fn message(change: impl FnOnce(&mut serde_json::Value)) -> String {
    let mut json = serde_json::from_str(&fixture("config.json")).expect("fixture is JSON");
    change(&mut json);
    HfConfig::parse(&json.to_string(), Path::new("config.json"))
        .expect_err("must be refused")
        .to_string()
}

#[test]
fn both_releases_describe_the_same_model() {
    let five = HfConfig::parse(&fixture("config.json"), Path::new("5")).expect("5.x");
    let four = HfConfig::parse(&fixture("config.v4.json"), Path::new("4")).expect("4.x");
    assert_eq!(five, four);
    use MixerKind::{Attention, Mamba};
    assert_eq!(five.layers(), [Mamba, Mamba, Attention, Mamba]);
    assert_eq!((five.d_inner(), five.head_dim(), five.mamba_dt_rank), (128, 16, 4));
    assert_eq!(five.eos_token_ids, [TokenId::new(2)]);
    let written = five.to_json("float32").to_string();
    assert_eq!(HfConfig::parse(&written, Path::new("own")).expect("own"), five);
}

#[test]
fn what_is_refused_is_named() {
    for (want, got) in [
        (
            "config.json: attn_layer_offset: is 4; it must be below attn_layer_period 4",
            message(|c| c["attn_layer_offset"] = 4.into()),
        ),
        (
            "config.json: attn_layer_period: is 0; it must be at least 1",
            message(|c| c["attn_layer_period"] = 0.into()),
        ),
        (
            "config.json: hidden_size: is missing",
            message(|c| c["hidden_size"] = serde_json::Value::Null),
        ),
        (
            "config.json: model_type: is \"llama\"; this build knows \"jamba\"",
            message(|c| c["model_type"] = "llama".into()),
        ),
        (
            "config.json: num_experts: is 4; this build knows dense Jamba, num_experts = 1",
            message(|c| c["num_experts"] = 4.into()),
        ),
        (
            "config.json: num_experts: is missing, which transformers reads as 16; this build \
             knows 1",
            message(|c| c["num_experts"] = serde_json::Value::Null),
        ),
        (
            "config.json: sliding_window: is 4096; this build knows attention to all keys, null",
            message(|c| c["sliding_window"] = 4096.into()),
        ),
        (
            "config.json: rms_norm_eps: is 0 in f32; it must be positive and finite",
            message(|c| c["rms_norm_eps"] = 1e-60.into()),
        ),
        (
            "config.json: rms_norm_eps: is -0.000001 in f32; it must be positive and finite",
            message(|c| c["rms_norm_eps"] = (-1e-6).into()),
        ),
        (
            "config.json: num_key_value_heads: is 3, which does not divide 4 attention heads",
            message(|c| c["num_key_value_heads"] = 3.into()),
        ),
    ] {
        assert_eq!(got, want);
    }
}

#[test]
fn the_layer_plan_of_the_public_shapes() {
    let json = fixture("config.json")
        .replace("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 32")
        .replace("\"attn_layer_period\": 4", "\"attn_layer_period\": 8")
        .replace("\"attn_layer_offset\": 2", "\"attn_layer_offset\": 4");
    let config = HfConfig::parse(&json, Path::new("")).expect("valid");
    let attention: Vec<usize> = config
        .layers()
        .iter()
        .enumerate()
        .filter_map(|(i, kind)| (*kind == MixerKind::Attention).then_some(i))
        .collect();
    assert_eq!(attention, [4, 12, 20, 28]);
}
