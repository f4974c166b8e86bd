//! Mutations of valid files: what damage, and what carelessness, makes of them.
#![allow(clippy::ptr_arg)] // One type for all, also for those that leave the length alone.

use gapscope::base::Stream;

/// Valid files of one kind.
pub struct Corpus {
    pub inputs: Vec<Vec<u8>>,
    mutations: &'static [Mutation],
}

/// Changes the bytes; the corpus is there to take parts from.
type Mutation = fn(&mut Stream, &mut Vec<u8>, &[Vec<u8>]);

const TEXT: [Mutation; 10] =
    [flip, overwrite, truncate, remove, repeat, splice, number, entry, swap_lines, nest];
const BINARY: [Mutation; 9] =
    [flip, overwrite, truncate, remove, repeat, splice, integer, integer, integer];

/// What stands in for a number in a text.
const NUMBERS: [&str; 16] = [
    "-1",
    "0",
    "-0.0",
    "1",
    "65536",
    "2147483648",
    "4294967296",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e999",
    "-1e-999",
    "NaN",
    "-Infinity",
    "0.30000000000000004",
];

/// What stands in for a little-endian integer.
const INTEGERS: [i64; 14] = [
    0,
    1,
    -1,
    2,
    127,
    255,
    65_535,
    i32::MAX as i64,
    i32::MIN as i64,
    u32::MAX as i64,
    1 << 32,
    1 << 40,
    i64::MAX,
    i64::MIN,
];

impl Corpus {
    pub fn text(inputs: Vec<Vec<u8>>) -> Self {
        Self { inputs, mutations: &TEXT }
    }

    pub fn binary(inputs: Vec<Vec<u8>>) -> Self {
        Self { inputs, mutations: &BINARY }
    }

    /// One of the inputs, changed in one to four ways.
    pub fn mutated(&self, stream: &mut Stream) -> Vec<u8> {
        let mut bytes = pick(stream, &self.inputs).clone();
        for _ in 0..stream.integer(1, 4) {
            pick(stream, self.mutations)(stream, &mut bytes, &self.inputs);
        }
        bytes
    }
}

fn pick<'a, T>(stream: &mut Stream, all: &'a [T]) -> &'a T {
    &all[below(stream, all.len())]
}

/// 0 where there is nothing to choose from.
fn below(stream: &mut Stream, len: usize) -> usize {
    stream.integer(0, (len as u64).saturating_sub(1)) as usize
}

/// A place in a file: anywhere, or near an end, where headers and footers are.
fn place(stream: &mut Stream, len: usize) -> usize {
    let near = below(stream, len.min(600));
    match stream.integer(0, 2) {
        0 => near,
        1 => (len - near).saturating_sub(1),
        _ => below(stream, len),
    }
}

/// A stretch of a few bytes, sometimes of many.
fn span(stream: &mut Stream, len: usize) -> std::ops::Range<usize> {
    let start = place(stream, len);
    let most = if stream.integer(0, 3) == 0 { 4096 } else { 24 };
    start..(start + 1 + below(stream, most)).min(len)
}

fn flip(stream: &mut Stream, bytes: &mut Vec<u8>, _: &[Vec<u8>]) {
    let at = place(stream, bytes.len());
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << stream.integer(0, 7);
    }
}

fn overwrite(stream: &mut Stream, bytes: &mut Vec<u8>, _: &[Vec<u8>]) {
    let at = place(stream, bytes.len());
    let byte = *pick(stream, b"\0\x01\x7f\x80\xff\"\\{}[]:,.-\n 09aN");
    if let Some(found) = bytes.get_mut(at) {
        *found = byte;
    }
}

fn truncate(stream: &mut Stream, bytes: &mut Vec<u8>, _: &[Vec<u8>]) {
    bytes.truncate(place(stream, bytes.len()));
}

fn remove(stream: &mut Stream, bytes: &mut Vec<u8>, _: &[Vec<u8>]) {
    let span = span(stream, bytes.len());
    bytes.drain(span);
}

fn repeat(stream: &mut Stream, bytes: &mut Vec<u8>, _: &[Vec<u8>]) {
    let span = span(stream, bytes.len());
    let copy = bytes[span.clone()].to_vec();
    bytes.splice(span.end..span.end, copy);
}

/// A stretch of another input in place of one of this.
fn splice(stream: &mut Stream, bytes: &mut Vec<u8>, inputs: &[Vec<u8>]) {
    let other = pick(stream, inputs);
    let (from, to) = (span(stream, other.len()), span(stream, bytes.len()));
    bytes.splice(to, other[from].iter().copied());
}

/// Another number in place of one that stands in the text.
fn number(stream: &mut Stream, bytes: &mut Vec<u8>, _: &[Vec<u8>]) {
    let of_number = |byte: &u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
    let from = place(stream, bytes.len());
    let Some(start) = (from..bytes.len()).find(|&at| bytes[at].is_ascii_digit()) else { return };
    let len = bytes[start..].iter().take_while(|byte| of_number(byte)).count();
    bytes.splice(start..start + len, pick(stream, &NUMBERS).bytes());
}

/// An entry of an object or list twice: what stands between two commas or line ends.
fn entry(stream: &mut Stream, bytes: &mut Vec<u8>, _: &[Vec<u8>]) {
    let ends = |at: &usize| matches!(bytes[*at], b',' | b'\n');
    let from = place(stream, bytes.len());
    let Some(start) = (from..bytes.len()).find(ends) else { return };
    let Some(end) = (start + 1..bytes.len()).find(ends) else { return };
    let copy = bytes[start..end].to_vec();
    bytes.splice(end..end, copy);
}

fn swap_lines(stream: &mut Stream, bytes: &mut Vec<u8>, _: &[Vec<u8>]) {
    let mut lines: Vec<&[u8]> = bytes.split_inclusive(|byte| *byte == b'\n').collect();
    if lines.is_empty() {
        return;
    }
    let (a, b) = (below(stream, lines.len()), below(stream, lines.len()));
    lines.swap(a, b);
    *bytes = lines.concat();
}

/// Brackets that never end.
fn nest(stream: &mut Stream, bytes: &mut Vec<u8>, _: &[Vec<u8>]) {
    let at = place(stream, bytes.len());
    let depth = [4, 200, 20_000][below(stream, 3)];
    let open = *pick(stream, &["[", "{\"a\":", "a.", "{a="]);
    bytes.splice(at..at, open.repeat(depth).bytes());
}

/// Another integer of four or eight bytes.
fn integer(stream: &mut Stream, bytes: &mut Vec<u8>, _: &[Vec<u8>]) {
    let at = place(stream, bytes.len());
    let value = pick(stream, &INTEGERS).to_le_bytes();
    let len = if stream.integer(0, 1) == 0 { 4 } else { 8 };
    let found = bytes[at..].iter_mut().take(len);
    found.zip(value).for_each(|(byte, new)| *byte = new);
}
