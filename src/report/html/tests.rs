use serde_json::json;

use super::*;
use crate::base::{BlockId, CompletionIndex, EngineIndex, LogProb, RequestId, Step, TokenId};
use crate::gap::{FindingKind, Legs, PairedToken, Tally};

fn summary() -> Summary {
    Summary {
        schema: Summary::SCHEMA,
        name: "index-wrap <b>".to_owned(),
        error: None,
        steps_done: 48,
        n_tokens: 9216,
        nonfinite: 0,
        spike_steps: [12, 24, 36, 48].map(Step::new).to_vec(),
        first_spike_step: Some(Step::new(12)),
        spike_windows: [12, 24, 36, 48].map(|step| (Step::new(step), Step::new(step))).to_vec(),
        spike_period: Some(12.0),
        gap_max: Some(8.25),
        gap_mean: Some(0.0031),
        frac_bitwise_equal: Some(0.9999),
        floor: Some(0.0),
        num_blocks: Some(1441),
        state_stride: Some(3072),
        first_wrapped_block: Some(1366),
        blocks_per_step: Some(120.0),
        laps: Some(4.0),
        engine_steps: Some(480),
        tokens_per_engine_step: Some(100.0),
        preemptions: Some(0),
        engines: Vec::new(),
        tally: Tally::default(),
        findings: vec![Finding {
            kind: FindingKind::AddressWrap,
            leg: Legs::DecodeTrainer,
            step: Step::new(12),
            engine: None,
            requests: vec![RequestId::new(12, 0, 3)],
            requests_total: 1,
            first_bad_position: Some(CompletionIndex::new(1)),
            index_bits: None,
            blocks: vec![BlockId::new(1366)],
            message: "the gap by block id changes at block 1366 <img src=x>".to_owned(),
        }],
        reward_mean_first: Some(0.2),
        reward_mean_last: None,
        resume_exact: true,
        wall_s: 31.5,
    }
}

fn worst_token() -> WorstToken {
    let paired = PairedToken {
        index: CompletionIndex::new(1),
        token: TokenId::new(10),
        infer: LogProb::new(-0.5),
        train: LogProb::new(f32::NEG_INFINITY),
    };
    let (request, engine) = (RequestId::new(12, 0, 3), EngineIndex::new(1));
    WorstToken {
        found: gap::WorstToken { request, engine, slot: None, paired, gap: f64::INFINITY },
        position: Position::new(61),
        before: "<script>alert(1)</script>\n12+7=".to_owned(),
        text: "\n".to_owned(),
        after: "\u{202e}&".to_owned(),
    }
}

fn page_of(summary: &Summary) -> String {
    let gap = StepGap {
        step: Step::new(12),
        n_tokens: 192,
        nonfinite: 0,
        bitwise_equal: 100,
        abs_diff_sum: 9.0,
        gap_max: Some(8.25),
        floor: 0.0,
        spike: true,
    };
    let point = StepPoint { gap, reward_mean: Some(0.25) };
    let change = Change {
        key: "engine.state_index_bits".to_owned(),
        value: json!(22),
        default: Some(json!("<64>")),
    };
    let request = RequestId::new(12, 0, 3);
    let blocks = StepBlocks {
        step: Step::new(12),
        engine: None,
        first_wrapped: Some(BlockId::new(1366)),
        floor: 0.0,
        requests: vec![BlockGap { request, block: BlockId::new(1366), gap: 8.25, stale: false }],
    };
    let worst = worst_token();
    let token = TracedToken { paired: worst.found.paired, text: "<i>".to_owned() };
    render(&Page {
        summary,
        points: &[point],
        changes: &[change],
        worst: &[worst],
        blocks: Some(&blocks),
        trace: Some(&Trace { request, tokens: vec![token] }),
    })
}

#[test]
fn the_page_says_what_happened_and_shows_every_text_as_text() {
    let html = page_of(&summary());
    for expect in [
        "<h1>index-wrap &lt;b&gt;</h1>",
        "9,216 tokens compared over 48 steps: 4 spikes, the first at step 12.",
        "<dd>99.99 %</dd>",
        "<dd>0.2 → –</dd>",
        "<b>address_wrap</b> <span class=\"where\">step 12, decode against trainer</span>",
        "block 1366 &lt;img src=x&gt;",
        "engine.state_index_bits</td><td>22</td><td class=\"default\">&lt;64&gt;</td>",
        r"&lt;script&gt;alert(1)&lt;/script&gt;<i>\n</i>12+7=",
        r"<mark><i>\n</i></mark>",
        "<i>U+202E</i>&amp;",
        "step 12: 8.25 nats",
        "<td class=\"n\">\u{2212}inf</td>",
        "first block whose address wraps: 1366",
        "Request s12.p0.r3: wrong from its first token on",
        "&lt;i&gt;",
    ] {
        assert!(html.contains(expect), "{expect}\n{html}");
    }
    for never in ["<script", "<img", "http", "url(", "31.5"] {
        assert!(!html.contains(never), "{never}");
    }
}

#[test]
fn nothing_compared_is_not_a_clean_run() {
    let empty = Summary { n_tokens: 0, gap_max: None, ..summary() };
    assert!(page_of(&empty).contains("No token was compared."));
    let broken = Summary { nonfinite: 1, spike_steps: vec![Step::new(3)], ..summary() };
    let expect = "1 spike, at step 12; 1 token with a non-finite logprob.";
    assert!(page_of(&broken).contains(expect));
}

#[test]
fn each_of_several_engines_has_a_row() {
    let one = |engine, spikes: &[u64]| EngineSummary {
        engine: EngineIndex::new(engine),
        spike_steps: spikes.iter().map(|&step| Step::new(step)).collect(),
        blocks_per_step: Some(40.0),
        laps: 1.5,
        engine_steps: 1234,
        preemptions: 0,
    };
    let engines = vec![one(0, &[]), one(1, &[35, 36, 48])];
    let html = page_of(&Summary { engines, ..summary() });
    for expect in [
        "<td class=\"n\">0</td><td>none</td>",
        "<td class=\"n\">1</td><td>35-36, 48</td>",
        "<td class=\"n\">1,234</td>",
        "\u{2013} of engine 1</td>",
    ] {
        assert!(html.contains(expect), "{expect}\n{html}");
    }
    assert!(!page_of(&summary()).contains("engine 1"));
}

#[test]
fn only_all_is_called_all() {
    for (fraction, expect) in
        [(1.0, "all"), (0.999_999, "99.99 %"), (0.5, "50.00 %"), (0.0, "0.00 %"), (f64::NAN, "NaN")]
    {
        assert_eq!(percent(fraction), expect);
    }
}

#[test]
fn the_same_run_gives_the_same_page_whatever_time_it_took() {
    let slow = Summary { wall_s: 99.0, ..summary() };
    assert_eq!(page_of(&summary()), page_of(&slow));
}
