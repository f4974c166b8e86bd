use super::*;
use crate::base::Stream;

fn processed(change: impl FnOnce(&mut Contract)) -> Contract {
    let mut contract =
        Contract { logprobs_mode: LogprobsMode::ProcessedLogprobs, ..Contract::PLAIN };
    change(&mut contract);
    contract
}

/// A row a token, each with its log-probability under `truth`.
fn rows<'a>(logits: &'a [Vec<f32>], tokens: &[u32], truth: &Contract) -> Vec<Row<'a>> {
    let row = |(logits, &token): (&'a Vec<f32>, &u32)| {
        let token = TokenId::new(token);
        Row { logits, token, logp: Sampler::default().log_prob(logits, token, truth) }
    };
    logits.iter().zip(tokens).map(row).collect()
}

/// Logits 2, 1, 0 at T = 0.5 against raw (huggingface/trl#4159): the first and the third token
/// differ by opposite signs, and a search over the logits finds the temperature.
#[test]
fn k19_a_temperature_is_found_from_the_logits() {
    let logits = vec![vec![2.0, 1.0, 0.0]; 3];
    let cold = processed(|c| c.temperature = 0.5);
    let tempered = rows(&logits, &[0, 1, 2], &cold);
    let raw = rows(&logits, &[0, 1, 2], &Contract::PLAIN);
    for (at, infer, train, d) in
        [(0, -0.407_606, -0.142_932, 0.264_674), (2, -2.407_606, -4.142_932, -1.735_326)]
    {
        let (found_infer, found_train) = (raw[at].logp.get(), tempered[at].logp.get());
        assert!((found_infer - infer).abs() < 1e-6 && (found_train - train).abs() < 1e-6);
        let found = f64::from(found_train) - f64::from(found_infer);
        assert!((found - d).abs() < 1e-6, "{found}");
    }
    let ratio = (f64::from(tempered[0].logp.get()) - f64::from(raw[0].logp.get())).exp();
    assert!((ratio - 1.303_007).abs() < 2e-6, "{ratio}");

    let found = refit(&tempered, &Contract::PLAIN).expect("a temperature");
    assert!((0.49..=0.51).contains(&found.contract.temperature), "{found:?}");
    assert!(found.after < 1e-5 && found.before > 0.5, "{found:?}");
    assert_eq!(found.kept_mass, None);
    // The other way round: raw where a temperature is stated.
    assert_eq!(refit(&raw, &cold).expect("raw").contract, Contract::PLAIN);
    // What is stated is what is there: nothing to find.
    assert_eq!(refit(&raw, &Contract::PLAIN), None);
    assert_eq!(refit(&tempered, &cold), None);
    // A stated greedy contract is raw; nothing is divided by 0.
    let greedy = processed(|c| c.temperature = 0.0);
    assert_eq!(refit(&raw, &greedy), None);
    let found = refit(&tempered, &greedy).expect("a temperature");
    assert!((found.contract.temperature - 0.5).abs() < 0.01, "{found:?}");
}

#[test]
fn k19_temperatures_are_found_to_a_hundredth() {
    let mut stream = Stream::new(5, "logits", 0);
    let logits: Vec<Vec<f32>> =
        (0..32).map(|_| (0..50).map(|_| 3.0 * stream.normal() as f32).collect()).collect();
    let tokens: Vec<u32> = (0..32).map(|_| stream.integer(0, 49) as u32).collect();
    for temperature in [0.1, 0.6, 0.95, 1.3, 5.0] {
        let truth = processed(|c| c.temperature = temperature);
        let found = refit(&rows(&logits, &tokens, &truth), &Contract::PLAIN).expect("a fit");
        let error = (found.contract.temperature - temperature).abs();
        assert!(error <= 0.01 * temperature.max(1.0), "{temperature}: {found:?}");
    }
    // Noise is no temperature, and two tokens are no evidence.
    let mut noisy = rows(&logits, &tokens, &Contract::PLAIN);
    for row in &mut noisy {
        row.logp = LogProb::new(row.logp.get() - stream.uniform() as f32);
    }
    assert_eq!(refit(&noisy, &Contract::PLAIN), None);
    let truth = processed(|c| c.temperature = 0.6);
    assert_eq!(refit(&rows(&logits, &tokens, &truth)[..2], &Contract::PLAIN), None);
}

/// Probabilities 0.5, 0.3, 0.15, 0.05 with top-p 0.8: every kept token differs by the logarithm of
/// the kept mass (huggingface/trl#6789).
#[test]
fn k20_a_kept_mass_is_found_from_the_logits() {
    let four: Vec<f32> = [0.5_f32, 0.3, 0.15, 0.05].iter().map(|p| p.ln()).collect();
    let logits = vec![four; 3];
    let kept = processed(|c| c.top_p = 0.8);
    let cut = rows(&logits, &[0, 1, 0], &kept);
    for row in &cut {
        let full = Sampler::default().log_prob(row.logits, row.token, &Contract::PLAIN);
        let d = f64::from(full.get()) - f64::from(row.logp.get());
        assert!((d - -0.223_144).abs() < 1e-6, "{d}");
        assert!((d.exp() - 0.8).abs() < 1e-6);
    }
    let found = refit(&cut, &Contract::PLAIN).expect("a filter");
    assert!((found.kept_mass.expect("a mass") - 0.8).abs() < 1e-6, "{found:?}");
    assert!(found.after < 1e-6, "{found:?}");
    // Of one distribution alone top-k 2 would do as well; of two that fit alike it is top-p.
    assert_eq!(found.contract.top_k, 0, "{found:?}");
    assert!((found.contract.top_p - 0.8).abs() < 1e-6, "{found:?}");
    // A record that states the filter, and says that its values are from before it.
    let raw = Contract { logprobs_mode: LogprobsMode::RawLogprobs, ..kept };
    let stated = refit(&cut, &raw).expect("after the filter that is stated");
    assert!((stated.kept_mass.expect("a mass") - 0.8).abs() < 1e-6, "{stated:?}");
    assert_eq!(stated.contract.top_p, 0.8, "{stated:?}");
    // top-p 1 cuts nothing.
    let whole = rows(&logits, &[0, 1, 0], &processed(|c| c.top_p = 1.0));
    assert_eq!(refit(&whole, &Contract::PLAIN), None);
    // A token that the filter removes has no log-probability, and takes no part.
    let removed = rows(&logits, &[3, 3, 3], &kept);
    assert!(removed.iter().all(|row| row.logp.get() == f32::NEG_INFINITY));
    assert_eq!(refit(&removed, &Contract::PLAIN), None);
}

#[test]
fn k20_top_p_and_top_k_are_told_apart_by_many_rows() {
    let mut stream = Stream::new(9, "logits", 0);
    let logits: Vec<Vec<f32>> =
        (0..40).map(|_| (0..60).map(|_| 2.0 * stream.normal() as f32).collect()).collect();
    for truth in [
        processed(|c| c.top_p = 0.8),
        processed(|c| c.top_k = 7),
        processed(|c| (c.temperature, c.top_p) = (0.7, 0.9)),
    ] {
        let mut sampler = Sampler::default();
        let mut sample = |row: &Vec<f32>| sampler.sample(row, stream.uniform(), &truth).0.get();
        let tokens: Vec<u32> = logits.iter().map(&mut sample).collect();
        let stated = processed(|c| c.temperature = truth.temperature);
        let found = refit(&rows(&logits, &tokens, &truth), &stated).expect("a filter");
        assert_eq!(found.contract.top_k, truth.top_k, "{found:?}");
        assert!((found.contract.top_p - truth.top_p).abs() < 0.01, "{found:?}");
        assert!(found.after < 1e-5, "{found:?}");
    }
}
