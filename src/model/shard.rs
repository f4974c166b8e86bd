//! One safetensors file, read a tensor at a time. Nothing is mapped: a file that changes or shrinks
//! while it is read is an error and not a signal, and memory holds one piece of one tensor.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{ModelError, TensorSpec};

/// What the format allows a header, so that a damaged length asks for no more.
const HEADER_MAX: u64 = 100_000_000;
/// Bytes read at a time; a multiple of every width.
const PIECE: usize = 1 << 20;

/// An open file and its table of tensors.
pub(super) struct Shard {
    pub path: PathBuf,
    file: File,
    /// Where the tensors' bytes start.
    start: u64,
    tensors: BTreeMap<String, Entry>,
}

/// A tensor as the header has it.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    /// From `start`: the first byte, and the one after the last.
    data_offsets: (u64, u64),
}

impl Shard {
    /// Reads the header.
    ///
    /// # Errors
    /// A file that cannot be read ([`io::Error`], for the caller to say whose it is), or whose
    /// header is broken or does not cover it.
    pub(super) fn open(path: &Path) -> Result<Result<Self, ModelError>, io::Error> {
        let mut file = File::open(path)?;
        let bytes = file.metadata()?.len();
        let broken = |reason: String| {
            let path = path.to_owned();
            Ok(Err(ModelError::Safetensors { path, reason, bytes }))
        };
        if bytes < 8 {
            return broken("header too small".into());
        }
        let mut length = [0; 8];
        file.read_exact(&mut length)?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_MAX || 8 + length > bytes {
            return broken("invalid header length".into());
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header)?;
        let tensors = match table(&header, bytes - 8 - length) {
            Ok(tensors) => tensors,
            Err(reason) => return broken(reason),
        };
        Ok(Ok(Self { path: path.to_owned(), file, start: 8 + length, tensors }))
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub(super) fn wrong(&self, name: &str, reason: impl Into<String>) -> ModelError {
        let (path, name) = (self.path.clone(), name.to_owned());
        ModelError::Tensor { path, name, reason: reason.into() }
    }

    /// A tensor's elements in order, widened to f32, a piece at a time.
    ///
    /// # Errors
    /// A tensor that is not there, has another shape, a dtype that is not read, or an element that
    /// is not finite.
    pub(super) fn read(
        &mut self,
        spec: &TensorSpec,
        mut take: impl FnMut(&[f32]),
    ) -> Result<(), ModelError> {
        let name = spec.name.as_str();
        let Some(entry) = self.tensors.get(name) else {
            return Err(self.wrong(name, "is missing"));
        };
        if entry.shape != spec.shape {
            let (found, want) = (&entry.shape, &spec.shape);
            let reason = format!("has shape {found:?}; config.json gives {want:?}");
            return Err(self.wrong(name, reason));
        }
        let Some((width, widen)) = reader(&entry.dtype) else {
            let reason = format!("has dtype {:?}; F32, BF16 and F16 are read", entry.dtype);
            return Err(self.wrong(name, reason));
        };
        let (from, to) = entry.data_offsets;
        if to - from != spec.len() as u64 * width as u64 {
            let reason = format!("has {} bytes for {} elements", to - from, spec.len());
            return Err(self.wrong(name, reason));
        }
        let failed = |path: &Path, source| ModelError::Read { path: path.to_owned(), source };
        let (mut left, mut bytes, mut values) = (to - from, Vec::new(), Vec::new());
        let sought = self.file.seek(SeekFrom::Start(self.start + from));
        sought.map_err(|source| failed(&self.path, source))?;
        let mut done = 0;
        while left > 0 {
            bytes.resize(left.min(PIECE as u64) as usize, 0);
            self.file.read_exact(&mut bytes).map_err(|source| failed(&self.path, source))?;
            values.clear();
            widen(&bytes, &mut values);
            if let Some(at) = values.iter().position(|w: &f32| !w.is_finite()) {
                let (element, value) = (done + at, values[at]);
                let reason = format!("element {element} is {value}; weights must be finite");
                return Err(self.wrong(name, reason));
            }
            take(&values);
            done += values.len();
            left -= bytes.len() as u64;
        }
        Ok(())
    }
}

/// Bytes of one element, and how to widen many.
type Reader = (usize, fn(&[u8], &mut Vec<f32>));

fn reader(dtype: &str) -> Option<Reader> {
    match dtype {
        "F32" => Some((4, |bytes, values| {
            values.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
        })),
        "BF16" => Some((2, |bytes, values| {
            let halves = bytes.as_chunks::<2>().0.iter();
            values.extend(halves.map(|b| half::bf16::from_le_bytes(*b).to_f32()));
        })),
        "F16" => Some((2, |bytes, values| {
            let halves = bytes.as_chunks::<2>().0.iter();
            values.extend(halves.map(|b| half::f16::from_le_bytes(*b).to_f32()));
        })),
        _ => None,
    }
}

/// The header's tensors, which together cover `data` bytes without gap or overlap.
fn table(header: &[u8], data: u64) -> Result<BTreeMap<String, Entry>, String> {
    let mut json: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header)
        .map_err(|error| format!("invalid JSON in header: {error}"))?;
    json.remove("__metadata__");
    let mut tensors = BTreeMap::new();
    for (name, value) in json {
        let entry = Entry::deserialize(value).map_err(|e| format!("tensor {name}: {e}"))?;
        tensors.insert(name, entry);
    }
    let mut ranges: Vec<(u64, u64)> = tensors.values().map(|entry| entry.data_offsets).collect();
    ranges.sort_unstable();
    let mut covered = 0;
    for (from, to) in ranges {
        if from != covered || to < from {
            return Err(format!("tensors leave or share bytes at {covered}"));
        }
        covered = to;
    }
    match covered == data {
        true => Ok(tensors),
        false => Err("incomplete metadata, file not fully covered".into()),
    }
}
