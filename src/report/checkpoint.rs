//! A checkpoint: one file in the safetensors format, so that other tools can look into it. It is
//! whole or refused: its header holds a hash over every name and byte.
//!
//! The file is written here rather than by the crate, whose writer leaves a temporary of a random
//! name behind when its process is killed, and does not wait for the disk.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde::de::DeserializeOwned;
use serde::Serialize;
use serde_json::{json, Map, Value};
use xxhash_rust::xxh3::Xxh3;

use super::disk::write_pieces;
use super::ReportError;
use crate::config::Dtype;

/// The array that holds everything small, as JSON.
const STATE: &str = "state";
const HASH: &str = "xxh3";
const LEN_BYTES: usize = 8;

/// One array of a checkpoint, as it lies in memory.
#[derive(Clone, Debug)]
pub struct SavedArray<'a> {
    /// Unlike all others.
    pub name: String,
    /// `None` for bytes of any kind.
    pub dtype: Option<Dtype>,
    pub bytes: Cow<'a, [u8]>,
}

/// Writes a checkpoint, atomically and through to the disk.
///
/// # Errors
/// A disk that is full or broken; the checkpoints before stay as they are.
pub fn write_checkpoint(
    path: &Path,
    state: &impl Serialize,
    arrays: Vec<SavedArray<'_>>,
) -> Result<(), ReportError> {
    let state = serde_json::to_vec(state)
        .map_err(|source| ReportError::MakeJson { path: path.to_owned(), source })?;
    let state = SavedArray { name: STATE.to_owned(), dtype: None, bytes: state.into() };
    let mut arrays: Vec<_> = arrays.into_iter().chain([state]).collect();
    arrays.sort_by(|a, b| a.name.cmp(&b.name));
    let hash = hash(arrays.iter().map(|array| (array.name.as_str(), &*array.bytes)));
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ HASH: hash }));
    let mut end = 0;
    for SavedArray { name, dtype, bytes } in &arrays {
        let (dtype, width) = match dtype {
            Some(Dtype::F32) => ("F32", 4),
            Some(Dtype::Bf16) => ("BF16", 2),
            None => ("U8", 1),
        };
        let (start, shape) = (end, [bytes.len() / width]);
        end += bytes.len();
        let about = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] });
        assert!(header.insert(name.clone(), about).is_none(), "two arrays are called {name}");
    }
    let header = Value::Object(header).to_string();
    let len = (header.len() as u64).to_le_bytes();
    let arrays = arrays.iter().map(|array| &*array.bytes);
    write_pieces(path, [&len[..], header.as_bytes()].into_iter().chain(arrays))
}

/// Of names and bytes, in the order of names.
fn hash<'a>(arrays: impl Iterator<Item = (&'a str, &'a [u8])>) -> String {
    let mut hash = Xxh3::new();
    for (name, bytes) in arrays {
        hash.update(&(name.len() as u64).to_le_bytes());
        hash.update(name.as_bytes());
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    format!("{:016x}", hash.digest())
}

/// A checkpoint that was read and found whole.
#[derive(Debug)]
pub struct SavedCheckpoint {
    path: PathBuf,
    file: Vec<u8>,
    /// Each array's bytes in the file.
    places: BTreeMap<String, Range<usize>>,
}

impl SavedCheckpoint {
    /// # Errors
    /// A file that cannot be read, or that is not what [`write_checkpoint`] has written.
    pub fn read(path: &Path) -> Result<Self, ReportError> {
        let file = fs::read(path).map_err(ReportError::io("read", path))?;
        let bad = |found: String| ReportError::BadCheckpoint { path: path.to_owned(), found };
        let (header, metadata) = SafeTensors::read_metadata(&file)
            .map_err(|error| bad(format!("it is torn ({error})")))?;
        let start = LEN_BYTES + header;
        let place = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
            (name, start + info.data_offsets.0..start + info.data_offsets.1)
        };
        let places: BTreeMap<_, _> = metadata.tensors().into_iter().map(place).collect();
        let arrays = places.iter().map(|(name, at)| (name.as_str(), &file[at.clone()]));
        let written = metadata.metadata().as_ref().and_then(|metadata| metadata.get(HASH));
        if written != Some(&hash(arrays)) {
            return Err(bad("it is torn (its bytes are not those that were written)".to_owned()));
        }
        Ok(Self { path: path.to_owned(), file, places })
    }

    /// # Errors
    /// A state of another version.
    pub fn state<T: DeserializeOwned>(&self) -> Result<T, ReportError> {
        serde_json::from_slice(self.array(STATE)?).map_err(|error| self.bad(error.to_string()))
    }

    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// # Errors
    /// No such array, or one of another length.
    pub fn copy(&self, name: &str, into: &mut [u8]) -> Result<(), ReportError> {
        let from = self.array(name)?;
        if from.len() != into.len() {
            let (found, due) = (from.len(), into.len());
            return Err(self.bad(format!("{name} has {found} bytes, and {due} are due")));
        }
        into.copy_from_slice(from);
        Ok(())
    }

    fn array(&self, name: &str) -> Result<&[u8], ReportError> {
        let place = self.places.get(name);
        Ok(&self.file[place.ok_or_else(|| self.bad(format!("it has no {name}")))?.clone()])
    }

    /// That this checkpoint cannot be used, and why.
    #[must_use]
    pub fn bad(&self, found: String) -> ReportError {
        ReportError::BadCheckpoint { path: self.path.clone(), found }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back_and_anything_else_is_torn() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("step-00003.safetensors");
        let weights = [1.0_f32, f32::NAN, -0.0];
        let arrays = vec![
            SavedArray {
                name: "weights".to_owned(),
                dtype: Some(Dtype::F32),
                bytes: Cow::Borrowed(bytemuck::cast_slice(&weights)),
            },
            SavedArray { name: "pool".to_owned(), dtype: None, bytes: vec![7, 8, 9].into() },
        ];
        write_checkpoint(&path, &json!({"step": 3}), arrays).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let saved = SavedCheckpoint::read(&path).unwrap();
        assert_eq!(saved.state::<Value>().unwrap(), json!({"step": 3}));
        let mut back = [0.0_f32; 3];
        saved.copy("weights", bytemuck::cast_slice_mut(&mut back)).unwrap();
        assert_eq!(back.map(f32::to_bits), weights.map(f32::to_bits));
        assert!(saved.has("pool") && !saved.has("other"));
        let error = saved.copy("pool", &mut [0; 2]).unwrap_err().to_string();
        let start = format!("the checkpoint {} cannot be used: ", path.display());
        assert_eq!(error, format!("{start}pool has 3 bytes, and 2 are due"));

        let whole = fs::read(&path).unwrap();
        let view = SafeTensors::deserialize(&whole).unwrap();
        assert_eq!(view.tensor("weights").unwrap().shape(), [3], "other tools see the same");
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            let error = SavedCheckpoint::read(&path).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{start}it is torn (")), "{len}: {error}");
        }
        for at in 0..whole.len() {
            let mut spoilt = whole.clone();
            spoilt[at] ^= 1;
            fs::write(&path, &spoilt).unwrap();
            SavedCheckpoint::read(&path).expect_err("a flipped bit");
        }
    }
}
