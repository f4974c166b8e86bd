//! Where a router sent each token, as a record carries it.

use serde::Deserialize;

/// A sequence's captures, one a token of prompt and completion; `None` where nothing was captured,
/// which is not expert 0.
pub type Routes = Vec<Option<TokenRoutes>>;

/// One token's choices: for each layer with experts, in order, the chosen experts.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenRoutes {
    pub experts: Vec<Vec<u32>>,
    /// In the experts' order and of their shape; `None` where the capture has ids alone.
    pub weights: Option<Vec<Vec<f32>>>,
}

impl TokenRoutes {
    /// How many layers have experts.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.experts.len()
    }
}

/// One side's captures as a record has them: a list a token, or null; in it a list a layer.
#[derive(Debug, Default, Deserialize)]
#[serde(transparent)]
pub(super) struct Captures<T>(pub Vec<Option<Vec<Vec<T>>>>);

/// Sets ids and weights together. `tokens` is how many the record has.
///
/// # Errors
/// Says what does not fit, with the place in the list.
pub(super) fn routes(
    experts: Captures<u32>,
    weights: Option<Captures<f32>>,
    tokens: usize,
) -> Result<Routes, String> {
    let (experts, weights) = (experts.0, weights.map(|weights| weights.0));
    let found = [Some(experts.len()), weights.as_ref().map(Vec::len)];
    if let Some(found) = found.into_iter().flatten().find(|&found| found != tokens) {
        return Err(format!(" has {found} entries for {tokens} tokens; null stands for none"));
    }
    let layers = experts.iter().flatten().map(Vec::len).next();
    let mut weights = weights.map(Vec::into_iter);
    let token = |(at, experts): (usize, Option<Vec<Vec<u32>>>)| {
        let weights = weights.as_mut().and_then(|weights| weights.next().flatten());
        let Some(experts) = experts else { return Ok(None) };
        if Some(experts.len()) != layers {
            return Err(format!(
                "[{at}] has {} layers, others {}",
                experts.len(),
                layers.unwrap_or(0)
            ));
        }
        let shape = |lists: &[usize]| format!("{lists:?}");
        let of_experts: Vec<usize> = experts.iter().map(Vec::len).collect();
        let of_weights: Option<Vec<usize>> =
            weights.as_ref().map(|weights| weights.iter().map(Vec::len).collect());
        match of_weights.filter(|of_weights| *of_weights != of_experts) {
            Some(of_weights) => Err(format!(
                "[{at}] has {} experts by layer and {} weights",
                shape(&of_experts),
                shape(&of_weights)
            )),
            None => Ok(Some(TokenRoutes { experts, weights })),
        }
    };
    experts.into_iter().enumerate().map(token).collect()
}
