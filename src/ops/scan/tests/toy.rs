//! One channel with one state: h = 0.5 h + x, whose numbers can be done in the head. What public
//! reports of wrong states come to in it, with our own scan for the right values.

use super::*;
use crate::config::Arithmetic;
use crate::ops::array::Array;
use crate::ops::scan::{self, SelectiveScan};
use crate::ops::spans::{Span, Spans};
use crate::ops::state::{MambaState, States};
use crate::ops::weights::Part;

/// ln(e - 1): the bias at which Δ = softplus(bias) is 1.
const UNIT_STEP: f32 = 0.541_324_85;
/// -exp(A_log) is -ln 2, and so a decay of 0.5 a row.
const HALVES: f32 = -0.366_512_93;

/// The state after each of x, from a state of h.
fn after_each(mut h: f32, x: &[f32]) -> Vec<f32> {
    let scan = Scan::new(&[HALVES], &[0.0], &[UNIT_STEP]);
    let after = |x: &f32| {
        let one = Rows { c_td: &[*x], dt_td: &[0.0], b_tn: &[1.0], c_tn: &[1.0], z_td: &[1.0] };
        let mut state = [h];
        scan.forward(&mut state, one, Dtype::F32, Dtype::F32, &mut [0.0]);
        h = state[0];
        h
    };
    x.iter().map(after).collect()
}

fn check(what: &str, found: &[f32], expected: &[f64]) {
    assert_close(what, found, expected.iter().copied(), 1e-6);
}

/// vllm-project/vllm#32118: a first chunk reads what its block's previous owner left.
#[test]
fn k02_an_error_in_the_first_state_halves_with_every_token() {
    check("clean", &after_each(0.0, &[1.0; 4]), &[1.0, 1.5, 1.75, 1.875]);
    check("stale", &after_each(8.0, &[1.0; 4]), &[5.0, 3.5, 2.75, 2.375]);
}

/// vllm-project/vllm-metal#488: preempted after the third token, all three are computed again.
#[test]
fn k03_recomputing_from_the_kept_state() {
    let x = [1.0, 2.0, 3.0];
    let clean = after_each(0.0, &x);
    check("clean", &clean, &[1.0, 2.5, 4.25]);
    check("kept", &after_each(clean[2], &x), &[3.125, 3.5625, 4.78125]);
}

/// vllm-project/vllm#23279: a second sequence begins inside a kernel's chunk of four rows. Our scan
/// knows no chunks; a decay that is summed from the chunk's first row is right only for sequences
/// that begin with a chunk.
#[test]
fn k04_a_state_decays_from_the_start_of_its_sequence() {
    const CHUNK: usize = 4;
    let log_decay = -0.1_f32;
    let a_log = [(-log_decay).ln()];
    let rest = [Part::Cpu(&[0.0]), Part::Cpu(&[UNIT_STEP])];
    let scan = SelectiveScan::new(Part::Cpu(&a_log), rest[0], rest[1], Arithmetic::Invariant);
    let from_chunk_start = |row: usize| (log_decay * (row % CHUNK + 1) as f32).exp();
    for start in 1..=8 {
        let span = |start, len| Span { start, len, position: crate::base::Position::new(0) };
        let device = crate::ops::array::Device::Cpu;
        let spans = Spans::new(&device, vec![span(0, start), span(start, 1)]);
        // The first sequence has inputs and no state, the second one a state and no input.
        let rows = |first: f32, last: f32| Array::Cpu([vec![first; start], vec![last]].concat());
        let (x, zeros, ones) = (rows(1.0, 0.0), rows(0.0, 0.0), rows(1.0, 1.0));
        let inputs =
            scan::Inputs { c_td: &x, dt_td: &zeros, b_tn: &ones, c_tn: &ones, z_td: &ones };
        let state = |h| MambaState { conv: Vec::new(), ssm: vec![h] };
        let mut states = States::Cpu(vec![state(0.0), state(1.0)]);
        let y = scan.forward(&mut states, &spans, inputs, Dtype::F32, Dtype::F32);
        let mut alone = States::Cpu(vec![state(0.0)]);
        let spans = Spans::new(&device, vec![span(0, start)]);
        let cut = |all: &Array| all.row_range(1, 0..start);
        let (x, zeros, ones) = (cut(&x), cut(&zeros), cut(&ones));
        let inputs =
            scan::Inputs { c_td: &x, dt_td: &zeros, b_tn: &ones, c_tn: &ones, z_td: &ones };
        let first = scan.forward(&mut alone, &spans, inputs, Dtype::F32, Dtype::F32);
        assert_eq!(y.row_range(1, 0..start).to_host(), first.to_host(), "start {start}");

        let found = states.cpu_mut()[1].ssm[0];
        check("second", &[found], &[0.904_837_418]);
        let agrees = (from_chunk_start(start) - found).abs() < 1e-6;
        assert_eq!(agrees, start % CHUNK == 0, "start {start}");
    }
    assert!((from_chunk_start(3) - 0.670_320).abs() < 1e-6);
}

/// vllm-project/vllm#52942: speculation leaves a state a draft token. The step after it goes on
/// from the last accepted one's, not from the first.
#[test]
fn k06_after_drafts_the_last_accepted_state_counts() {
    for (accepted, right, faulty) in [(1, 1.5, 1.5), (2, 1.75, 1.5), (3, 1.875, 1.5)] {
        let columns = after_each(0.0, &vec![1.0; accepted]);
        check("right", &after_each(columns[accepted - 1], &[1.0]), &[right]);
        check("first column", &after_each(columns[0], &[1.0]), &[faulty]);
    }
}

/// huggingface/transformers#32677: tokens that only fill a row up are tokens to a recurrence.
#[test]
fn k13_pads_in_front_feed_the_state() {
    let last = |x: &[f32]| after_each(0.0, x)[x.len() - 1];
    check("alone", &[last(&[1.0])], &[1.0]);
    check("behind two pads of 1", &[last(&[1.0, 1.0, 1.0])], &[1.75]);
    check("in front of two pads", &after_each(0.0, &[1.0, 1.0, 1.0])[..1], &[1.0]);
}
