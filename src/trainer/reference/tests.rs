use std::path::Path;

use safetensors::{Dtype, SafeTensors};

use super::*;

/// The dims of `tests/fixtures/tiny-jamba/config.json`.
fn dims() -> Dims {
    Dims {
        vocab: 256,
        hidden: 64,
        intermediate: 128,
        attention_layers: vec![false, false, true, false],
        heads: 4,
        kv_heads: 2,
        d_inner: 128,
        d_state: 16,
        d_conv: 4,
        dt_rank: 4,
        eps: 1e-6,
        tied: false,
        conv_bias: true,
        proj_bias: false,
    }
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
    Reference::new(dims(), weights()).expect("the fixture fits its config")
}

struct Expected {
    bytes: Vec<u8>,
}

impl Expected {
    fn load() -> Self {
        Self { bytes: fixture("reference.safetensors") }
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.bytes).expect("a safetensors file");
        f32s(&file.tensor(name).expect("the fixture has it"))
    }

    fn ids(&self, name: &str, width: usize) -> Vec<Vec<TokenId>> {
        let file = SafeTensors::deserialize(&self.bytes).expect("a safetensors file");
        let view = file.tensor(name).expect("the fixture has it");
        assert_eq!(view.dtype(), Dtype::I64);
        let all: Vec<TokenId> = view
            .data()
            .chunks_exact(8)
            .map(|b| TokenId::new(u32::from(b[0]) | u32::from(b[1]) << 8))
            .collect();
        all.chunks(width).map(<[_]>::to_vec).collect()
    }
}

/// The bound of the fixture's README: its float64 forward is within 5.5e-6 of its f32 one.
fn check(found: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (index, (&found, &wanted)) in found.iter().zip(wanted).enumerate() {
        let bound = 2e-5 * wanted.abs().max(1.0);
        assert!((found - wanted).abs() <= bound, "{what} {index}: {found} for {wanted}");
    }
}

#[test]
fn tiny_jamba_equals_transformers() {
    let (model, expected) = (model(), Expected::load());
    let rows = expected.ids("input_ids", 24);
    assert_eq!(rows.len(), 2);

    let logits: Vec<f32> =
        rows.iter().flat_map(|ids| model.logits(ids).expect("a forward").concat()).collect();
    check(&logits, &expected.floats("logits"), "logits");

    // A repeated run leaves the same bytes.
    assert_eq!(model.logits(&rows[1]).expect("a forward").concat(), logits[24 * 256..]);

    let targets: Vec<f32> =
        rows.iter().flat_map(|ids| model.target_logprobs(ids, 1.0).expect("a forward")).collect();
    check(&targets, &expected.floats("target_logprobs"), "target_logprobs");

    let hidden: Vec<_> =
        rows.iter().map(|ids| model.hidden_states(ids).expect("a forward")).collect();
    assert_eq!(hidden[0].len(), 5);
    for layer in 0..5 {
        let name = format!("hidden.{layer}");
        let found: Vec<f32> = hidden.iter().flat_map(|row| row[layer].concat()).collect();
        check(&found, &expected.floats(&name), &name);
    }
}

#[test]
fn sixteen_greedy_tokens_equal_transformers() {
    let (model, expected) = (model(), Expected::load());
    let wanted = &expected.ids("greedy_ids", 27)[0];
    let mut ids = wanted[..11].to_vec();
    while ids.len() < wanted.len() {
        let logits = model.logits(&ids).expect("a forward");
        let last = logits.last().expect("a token");
        let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).expect("a vocab");
        ids.push(TokenId::new(best as u32));
    }
    assert_eq!(&ids, wanted);
}

#[test]
fn loss_and_every_gradient_norm_equal_transformers() {
    let (model, expected) = (model(), Expected::load());
    let found = model.loss_and_grad_norms(&expected.ids("input_ids", 24)).expect("a backward");
    let loss = f64::from(expected.floats("loss")[0]);
    assert!((found.loss - loss).abs() <= 1e-5, "{} for {loss}", found.loss);

    let wanted: BTreeMap<String, f64> =
        serde_json::from_slice(&fixture("grad_norms.json")).expect("names and norms");
    assert!(found.grad_norms.keys().eq(wanted.keys()));
    for (name, wanted) in wanted {
        let found = found.grad_norms[&name];
        let bound = f64::max(2e-4 * wanted, 1e-7);
        assert!((found - wanted).abs() <= bound, "{name}: {found} for {wanted}");
    }
}

#[test]
fn a_tied_head_is_the_embedding() {
    let ids = &Expected::load().ids("input_ids", 24)[0];
    let mut tied = weights();
    tied.remove("lm_head.weight");
    let mut untied = tied.clone();
    untied.insert("lm_head.weight".into(), tied["model.embed_tokens.weight"].clone());
    let tied = Reference::new(Dims { tied: true, ..dims() }, tied).expect("a tied model");
    let untied = Reference::new(dims(), untied).expect("an untied model");
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
    let (model, ids) = (model(), &Expected::load().ids("input_ids", 24)[0]);
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
fn softplus_is_right_on_both_sides_of_its_threshold() {
    let xs = [-100.0_f32, -17.0, -5.0, -1e-3, 0.0, 3.0, 20.0, 20.5, 100.0];
    let x = Var::new(&xs[..], &Device::Cpu).expect("a vector");
    let y = softplus(&x).expect("a softplus");
    let gradients = y.sum_all().and_then(|sum| sum.backward()).expect("a backward");
    let slopes: Vec<f32> = gradients.get(&x).expect("a gradient").to_vec1().expect("a vector");
    for ((x, y), slope) in xs.iter().zip(y.to_vec1::<f32>().expect("a vector")).zip(slopes) {
        let wide = f64::from(*x);
        let wanted = if wide > 20.0 { wide } else { wide.exp().ln_1p() };
        let wanted_slope = if wide > 20.0 { 1.0 } else { 1.0 / (1.0 + (-wide).exp()) };
        // exp(-100) is lost beside 1 in f64 too: 1e-16 is what the sum can carry.
        assert!((f64::from(y) - wanted).abs() <= 1e-7 * wanted + 2e-16, "{x}: {y}");
        assert!((f64::from(slope) - wanted_slope).abs() <= 1e-7 * wanted_slope + 2e-16, "{x}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let refusal = |change: &dyn Fn(&mut Weights)| {
        let mut weights = weights();
        change(&mut weights);
        Reference::new(dims(), weights).expect_err("a refusal").to_string()
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
