use std::path::Path;

use safetensors::{Dtype, SafeTensors};

use super::*;

/// Of `tests/fixtures/tiny-jamba/config.json`.
fn plan(tied: bool) -> Plan {
    let text = String::from_utf8(fixture("config.json")).expect("text");
    let config = HfConfig::parse(&text, Path::new("config.json")).expect("a config");
    Plan::new(HfConfig { tie_word_embeddings: tied, ..config })
}

fn fixture(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-jamba");
    std::fs::read(folder.join(name)).expect("the fixture is there")
}

fn f32s(view: &safetensors::tensor::TensorView) -> Vec<f32> {
    assert_eq!(view.dtype(), Dtype::F32);
    view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn weights() -> Weights {
    let bytes = fixture("model.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    file.tensors()
        .into_iter()
        .map(|(name, view)| (name, (view.shape().to_vec(), f32s(&view))))
        .collect()
}

fn model() -> Reference {
    Reference::new(&plan(false), weights()).expect("the fixture fits its config")
}

/// The fixture's first row.
fn ids() -> Vec<TokenId> {
    let bytes = fixture("reference.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let view = file.tensor("input_ids").expect("the fixture has it");
    assert_eq!(view.dtype(), Dtype::I64);
    let (words, _) = view.data().as_chunks::<8>();
    words[..24].iter().map(|b| TokenId::new(u32::from(b[0]))).collect()
}

#[test]
fn k28_a_tied_head_is_the_embedding() {
    let ids = &ids();
    let mut tied = weights();
    tied.remove("lm_head.weight");
    let mut untied = tied.clone();
    untied.insert("lm_head.weight".into(), tied["model.embed_tokens.weight"].clone());
    let tied = Reference::new(&plan(true), tied).expect("a tied model");
    let untied = Reference::new(&plan(false), untied).expect("an untied model");
    assert_eq!(tied.logits(ids).expect("a forward"), untied.logits(ids).expect("a forward"));

    // The embedding's gradient has both roles' parts: it is no longer either part alone.
    let batch = [ids.clone()];
    let norm = |model: &Reference, name: &str| {
        model.loss_and_grad_norms(&batch).expect("a backward").grad_norms[name]
    };
    let both = norm(&tied, "model.embed_tokens.weight");
    let parts = [norm(&untied, "model.embed_tokens.weight"), norm(&untied, "lm_head.weight")];
    assert!(both <= parts[0] + parts[1] && parts.iter().all(|part| (both - part).abs() > 1e-3));
}

#[test]
fn a_temperature_divides_the_logits() {
    let (model, ids) = (model(), &ids());
    let logits = model.logits(ids).expect("a forward");
    let found = model.target_logprobs(ids, 0.6).expect("a forward");
    for (t, found) in found.into_iter().enumerate() {
        let scaled: Vec<f64> = logits[t].iter().map(|&x| f64::from(x) / 0.6).collect();
        let sum: f64 = scaled.iter().map(|x| x.exp()).sum();
        let wanted = scaled[ids[t + 1].index()] - sum.ln();
        assert!((f64::from(found) - wanted).abs() <= 1e-5, "{t}: {found} for {wanted}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let refusal = |change: &dyn Fn(&mut Weights)| {
        let mut weights = weights();
        change(&mut weights);
        Reference::new(&plan(false), weights).expect_err("a refusal").to_string()
    };
    assert_eq!(
        refusal(&|weights| drop(weights.remove("model.layers.1.mamba.D"))),
        "the reference model needs the tensor model.layers.1.mamba.D of shape [128], found no such \
         tensor"
    );
    assert_eq!(
        refusal(&|weights| drop(weights.insert("lm_head.weight".into(), (vec![2], vec![0.0; 2])))),
        "the reference model needs the tensor lm_head.weight of shape [256, 64], found [2] with 2 \
         values"
    );
    assert_eq!(
        refusal(&|weights| drop(weights.insert("model.rope".into(), (vec![], vec![0.0])))),
        "the reference model has no place for the tensor model.rope"
    );

    let model = model();
    let outside = model.logits(&[TokenId::new(3), TokenId::new(256)]).expect_err("a refusal");
    assert_eq!(outside.to_string(), "token 256 at position 1 is outside the vocabulary of 256");
    assert!(model.logits(&[]).is_err());
    let short = model.target_logprobs(&[TokenId::new(3)], 1.0).expect_err("a refusal");
    assert_eq!(short.to_string(), "a next-token log-probability needs at least 2 tokens, found 1");
}
