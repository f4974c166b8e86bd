//! One request token by token: what the engine thought of each, and what the trainer does.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::scale::{linear_ticks, LogScale, STRIP};
use super::svg::{Anchor, Plot, HALF};
use super::text::{number, plain, shorten};
use crate::base::RequestId;
use crate::gap::PairedToken;

/// The tokens of a request that were compared, in completion order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    pub request: RequestId,
    pub tokens: Vec<TracedToken>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedToken {
    pub paired: PairedToken,
    pub text: String,
}

/// More tokens than this do not have room for their texts; those around the first bad one are
/// shown.
const TOKENS_MAX: usize = 56;
const BEFORE_FIRST_BAD: usize = 4;
/// Rows of the picture: log-probabilities, gaps, then index and text of each token.
const LOGP_TOP: f64 = 50.0;
const LOGP_BOTTOM: f64 = 170.0;
const GAP_TOP: f64 = 196.0;
const GAP_BOTTOM: f64 = 300.0;
const TEXT_CHARS: usize = 12;

pub(super) fn draw(trace: &Trace, floor: Option<f64>) -> String {
    let floor = floor.unwrap_or(0.0);
    let bad = |token: &TracedToken| token.paired.gap() > floor;
    let first_bad = trace.tokens.iter().position(bad);
    let start = first_bad.unwrap_or(0).saturating_sub(BEFORE_FIRST_BAD);
    let start = start.min(trace.tokens.len().saturating_sub(TOKENS_MAX));
    let tokens: Vec<&TracedToken> = trace.tokens.iter().skip(start).take(TOKENS_MAX).collect();
    let title = match first_bad {
        Some(0) => format!("Request {}: wrong from its first token on", trace.request),
        Some(1) => {
            format!("Request {}: first token right, wrong from the second on", trace.request)
        }
        Some(n) => format!("Request {}: the first {n} tokens right", trace.request),
        None => format!("Request {}: no gap", trace.request),
    };
    let texts: Vec<String> =
        tokens.iter().map(|token| shorten(&plain(&token.text), TEXT_CHARS)).collect();
    let longest = texts.iter().map(|text| text.chars().count()).max().unwrap_or(0);
    let last = tokens.len().max(1) as u64 - 1;
    // Labels that do not fit side by side stand on end.
    let room = (HALF - 100.0) / tokens.len().max(1) as f64;
    let upright = longest as f64 * 7.0 > room;
    let height = GAP_BOTTOM + 28.0 + if upright { longest as f64 * 7.0 + 6.0 } else { 14.0 };
    let mut plot = Plot::bare([HALF, height], GAP_BOTTOM, &title, [0, last]);
    let count = match tokens.len() {
        n if n < trace.tokens.len() => {
            format!("   tokens {} to {} of {}", start + 1, start + n, trace.tokens.len())
        }
        _ => String::new(),
    };
    let legend = "\u{25cb} engine, as sampled   \u{d7} trainer   \u{25c6} gap over the floor";
    plot.svg.text(0.0, 29.0, Anchor::Start, "quiet", &format!("{legend}{count}"));
    logprobs(&mut plot, &tokens);
    gaps(&mut plot, &tokens, floor);
    for (i, (token, text)) in std::iter::zip(&tokens, &texts).enumerate() {
        let x = plot.x(i as u64);
        plot.tick(x);
        let index = (token.paired.index.get() as u64 + 1).to_string();
        if tokens.len() <= 32 || i % 2 == 0 {
            plot.svg.text(x, GAP_BOTTOM + 14.0, Anchor::Middle, "quiet", &index);
        }
        if upright {
            plot.svg.text_down(x - 3.5, GAP_BOTTOM + 20.0, "token", text);
        } else {
            plot.svg.text(x, GAP_BOTTOM + 29.0, Anchor::Middle, "token", text);
        }
    }
    plot.svg.text(0.0, GAP_BOTTOM + 14.0, Anchor::Start, "quiet", "token");
    plot.finish()
}

/// Both sides' log-probability of each token.
fn logprobs(plot: &mut Plot, tokens: &[&TracedToken]) {
    let sides = |token: &TracedToken| {
        [token.paired.infer, token.paired.train].map(|logp| f64::from(logp.get()))
    };
    let finite = || tokens.iter().flat_map(|token| sides(token)).filter(|logp| logp.is_finite());
    let ticks = linear_ticks(finite().fold(f64::INFINITY, f64::min), finite().fold(0.0, f64::max));
    let (low, high) = (ticks[0], ticks[ticks.len() - 1]);
    let top = LOGP_TOP + 12.0;
    let nonfinite = tokens.iter().any(|token| !token.paired.is_finite());
    let below = LOGP_BOTTOM - if nonfinite { STRIP } else { 0.0 };
    let y = |logp: f64| match logp.is_finite() {
        true => below - (logp - low) / (high - low) * (below - top),
        false => LOGP_BOTTOM,
    };
    plot.svg.text(0.0, LOGP_TOP, Anchor::Start, "quiet", "log-probability, nats");
    for &tick in &ticks {
        plot.grid(y(tick), &number(tick));
    }
    if nonfinite {
        plot.label_left(LOGP_BOTTOM, "NaN, inf");
    }
    for (side, style) in [(0, ""), (1, " stroke-dasharray=\"4 3\"")] {
        let mut d = String::new();
        for (i, token) in tokens.iter().enumerate() {
            let verb = if i == 0 { 'M' } else { 'L' };
            write!(d, "{verb}{:.1} {:.1}", plot.x(i as u64), y(sides(token)[side]))
                .expect("a string grows");
        }
        plot.svg.path(&d, &format!("fill=\"none\" stroke=\"#777\"{style}"), "");
    }
    for (i, token) in tokens.iter().enumerate() {
        let (x, [infer, train]) = (plot.x(i as u64), sides(token));
        let label = format!("{}: engine {}, trainer {}", token.text, number(infer), number(train));
        plot.svg.circle(x, y(infer), 4.0, "fill=\"#fff\" stroke=\"#111\"", &label);
        plot.cross(x, y(train), &label);
    }
}

/// The gap of each token, with a line of its own for exactly 0.
fn gaps(plot: &mut Plot, tokens: &[&TracedToken], floor: f64) {
    let nonfinite = tokens.iter().any(|token| !token.paired.is_finite());
    let top = GAP_TOP + 18.0 + if nonfinite { STRIP } else { 0.0 };
    let values = tokens.iter().map(|token| token.paired.gap()).chain([floor]);
    let scale = LogScale::new(values, top, GAP_BOTTOM);
    plot.svg.text(0.0, GAP_TOP + 4.0, Anchor::Start, "quiet", "gap, nats");
    for (y, label) in scale.ticks() {
        plot.grid(y, &label);
    }
    if nonfinite {
        plot.label_left(top - 14.0, "NaN, inf");
    }
    if floor > 0.0 {
        plot.dashed(scale.y(floor));
    }
    for (i, token) in tokens.iter().enumerate() {
        let (x, gap) = (plot.x(i as u64), token.paired.gap());
        let y = if gap.is_finite() { scale.y(gap) } else { top - 14.0 };
        plot.stem(x, GAP_BOTTOM, y);
        plot.mark(x, y, gap > floor, &format!("{}: {} nats", token.text, number(gap)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{CompletionIndex, LogProb, TokenId};

    fn token(index: u32, infer: f32, train: f32, text: &str) -> TracedToken {
        let paired = PairedToken {
            index: CompletionIndex::new(index),
            token: TokenId::new(0),
            infer: LogProb::new(infer),
            train: LogProb::new(train),
        };
        TracedToken { paired, text: text.to_owned() }
    }

    fn drawn(tokens: Vec<TracedToken>) -> String {
        draw(&Trace { request: RequestId::new(12, 0, 3), tokens }, Some(0.0))
    }

    #[test]
    fn the_title_says_where_it_went_wrong() {
        for (trainer, expect) in [
            ([-2.0, -1.0], "wrong from its first token on"),
            ([-1.0, -2.0], "first token right, wrong from the second on"),
            ([-1.0, -1.0], "no gap"),
        ] {
            let svg = drawn(vec![token(0, -1.0, trainer[0], "a"), token(1, -1.0, trainer[1], "b")]);
            assert!(svg.contains(expect), "{expect}\n{svg}");
        }
    }

    #[test]
    fn odd_tokens_are_drawn_as_text() {
        let svg = drawn(vec![
            token(0, -1.0, -1.0, "<b>\n"),
            token(1, f32::NEG_INFINITY, f32::NAN, "\u{202e}&"),
        ]);
        for expect in ["&lt;b&gt;\\n", "U+202E&amp;", "NaN, inf"] {
            assert!(svg.contains(expect), "{expect}\n{svg}");
        }
        assert!(!svg.contains("NaN\"") && !svg.contains("inf\""), "{svg}");
        assert!(!svg.contains("rotate(90)"));
        let long = (0..20).map(|i| token(i, -1.0, -1.0, "a token as long as a sentence")).collect();
        let svg = drawn(long);
        assert!(svg.contains("rotate(90)") && svg.contains(">a token as \u{2026}<"), "{svg}");
        assert!(drawn(Vec::new()).contains("</svg>"));
    }

    #[test]
    fn of_many_tokens_those_around_the_first_bad_one_are_shown() {
        let mut tokens: Vec<_> = (0..1000).map(|i| token(i, -1.0, -1.0, "x")).collect();
        tokens[500] = token(500, -1.0, -3.0, "y");
        let svg = drawn(tokens);
        assert!(svg.contains("tokens 497 to 552 of 1000"), "{svg}");
        assert!(svg.contains("the first 500 tokens right"));
        assert!(svg.contains("y: 2 nats"));
    }
}
