//! The container: magic, metadata and table of tensors, then the tensors' bytes (GGUF versions 2
//! and 3, little-endian, as ggml's `docs/gguf.md` has them). Nothing is allocated on the word of a
//! length that the file does not have the bytes for.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::Device;

use crate::model::ModelError;

/// An open file and what its header says.
pub(super) struct Gguf {
    path: PathBuf,
    file: File,
    bytes: u64,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Entry>,
    /// Where the tensors' bytes start.
    start: u64,
}

/// A value of the metadata, widened.
#[derive(Debug)]
pub(super) enum Value {
    Count(u64),
    Negative(i64),
    Number(f64),
    Flag(bool),
    Text(String),
    List(Vec<Value>),
}

struct Entry {
    kind: GgmlDType,
    shape: Vec<usize>,
    /// From `start`.
    offset: u64,
}

impl Gguf {
    /// Reads the header.
    ///
    /// # Errors
    /// A file that cannot be read, is no GGUF or ends early; a tensor of a type that is not read.
    pub(super) fn open(path: &Path) -> Result<Self, ModelError> {
        let failed = |source| ModelError::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let data = file.metadata().map_err(failed)?;
        if !data.is_file() {
            return Err(failed(io::Error::other("it is not a regular file")));
        }
        let bytes = data.len();
        let mut cursor = Cursor { file: BufReader::new(&file), left: bytes };
        let mut header = || -> Result<_, Fault> {
            let counts = cursor.preamble()?;
            let metadata = cursor.metadata(counts.1)?;
            let tensors = cursor.tensors(counts.0)?;
            Ok((metadata, tensors, bytes - cursor.left))
        };
        let (metadata, tensors, end) = header().map_err(|fault| match fault {
            Fault::Io(source) => failed(source),
            Fault::Torn(reason) => ModelError::Gguf { path: path.to_owned(), bytes, reason },
            Fault::Kind(name, reason) => ModelError::Tensor { path: path.to_owned(), name, reason },
        })?;
        let mut all = Self { path: path.to_owned(), file, bytes, metadata, tensors, start: 0 };
        let alignment = all.optional("general.alignment", Self::count)?.unwrap_or(32);
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            let reason = format!("is {alignment}; it is a power of two up to 1048576");
            return Err(all.wrong("general.alignment", reason));
        }
        all.start = end.next_multiple_of(alignment as u64);
        Ok(all)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn wrong(&self, key: &str, reason: impl Into<String>) -> ModelError {
        let (path, field) = (self.path.clone(), key.to_owned());
        ModelError::Field { path, field, reason: reason.into() }
    }

    pub(super) fn wrong_tensor(&self, name: &str, reason: impl Into<String>) -> ModelError {
        let (path, name) = (self.path.clone(), name.to_owned());
        ModelError::Tensor { path, name, reason: reason.into() }
    }

    /// A getter's value, `None` where the key is absent.
    pub(super) fn optional<'g, T>(
        &'g self,
        key: &str,
        get: impl FnOnce(&'g Self, &str) -> Result<T, ModelError>,
    ) -> Result<Option<T>, ModelError> {
        self.metadata.contains_key(key).then(|| get(self, key)).transpose()
    }

    fn value(&self, key: &str) -> Result<&Value, ModelError> {
        self.metadata.get(key).ok_or_else(|| self.wrong(key, "is missing"))
    }

    fn other_than(&self, key: &str, wanted: &str, found: &Value) -> ModelError {
        let found = match found {
            Value::Count(count) => count.to_string(),
            Value::Negative(number) => number.to_string(),
            Value::Number(number) => number.to_string(),
            Value::Flag(flag) => flag.to_string(),
            Value::Text(_) => "a text".to_owned(),
            Value::List(_) => "a list".to_owned(),
        };
        self.wrong(key, format!("is {found}, where {wanted} is needed"))
    }

    pub(super) fn count(&self, key: &str) -> Result<usize, ModelError> {
        let found = self.value(key)?;
        let count =
            if let Value::Count(count) = found { usize::try_from(*count).ok() } else { None };
        count.ok_or_else(|| self.other_than(key, "a count", found))
    }

    pub(super) fn number(&self, key: &str) -> Result<f64, ModelError> {
        match self.value(key)? {
            Value::Number(number) => Ok(*number),
            found => Err(self.other_than(key, "a number", found)),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<bool, ModelError> {
        match self.value(key)? {
            Value::Flag(flag) => Ok(*flag),
            found => Err(self.other_than(key, "true or false", found)),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<&str, ModelError> {
        match self.value(key)? {
            Value::Text(text) => Ok(text),
            found => Err(self.other_than(key, "a text", found)),
        }
    }

    pub(super) fn texts(&self, key: &str) -> Result<Vec<&str>, ModelError> {
        self.list(key, "a list of texts", |value| match value {
            Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub(super) fn counts(&self, key: &str) -> Result<Vec<u64>, ModelError> {
        self.list(key, "a list of counts", |value| match value {
            Value::Count(count) => Some(*count),
            _ => None,
        })
    }

    fn list<'g, T>(
        &'g self,
        key: &str,
        wanted: &str,
        each: impl Fn(&'g Value) -> Option<T>,
    ) -> Result<Vec<T>, ModelError> {
        let found = self.value(key)?;
        let list =
            if let Value::List(list) = found { list.iter().map(each).collect() } else { None };
        list.ok_or_else(|| self.other_than(key, wanted, found))
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn entry(&self, name: &str) -> Result<&Entry, ModelError> {
        self.tensors.get(name).ok_or_else(|| self.wrong_tensor(name, "is missing"))
    }

    pub(super) fn shape(&self, name: &str) -> Result<&[usize], ModelError> {
        Ok(&self.entry(name)?.shape)
    }

    /// A tensor as it is stored.
    ///
    /// # Errors
    /// One that is missing, has another shape, or reaches past the end of the file.
    pub(super) fn read(&mut self, name: &str, shape: &[usize]) -> Result<QTensor, ModelError> {
        let Entry { kind, shape: found, offset } = self.entry(name)?;
        if found != shape {
            let reason = format!("has shape {found:?}; the metadata give {shape:?}");
            return Err(self.wrong_tensor(name, reason));
        }
        let (elements, block) = (shape.iter().product::<usize>(), kind.block_size());
        if !shape.last().is_some_and(|row| row.is_multiple_of(block)) {
            let reason =
                format!("has shape {shape:?}, and {kind:?} stores rows in blocks of {block}");
            return Err(self.wrong_tensor(name, reason));
        }
        let len = elements / block * kind.type_size();
        let from = self.start.saturating_add(*offset);
        let end = from.saturating_add(len as u64);
        if end > self.bytes {
            let (path, bytes) = (self.path.clone(), self.bytes);
            let reason = format!("tensor {name} ends at byte {end}");
            return Err(ModelError::Gguf { path, bytes, reason });
        }
        let (kind, mut raw) = (*kind, vec![0; len]);
        let read =
            self.file.seek(SeekFrom::Start(from)).and_then(|_| self.file.read_exact(&mut raw));
        read.map_err(|source| ModelError::Read { path: self.path.clone(), source })?;
        qtensor_from_ggml(kind, &raw, shape.to_vec(), &Device::Cpu)
            .map_err(|error| self.wrong_tensor(name, error.to_string()))
    }
}

/// What stops a header from being read.
enum Fault {
    Io(io::Error),
    Torn(String),
    /// A tensor's name, and what is wrong with its type.
    Kind(String, String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

struct Cursor<R> {
    file: R,
    /// Bytes to the end of the file.
    left: u64,
}

impl<R: Read> Cursor<R> {
    fn need(&mut self, bytes: u64) -> Result<(), Fault> {
        self.left = self.left.checked_sub(bytes).ok_or_else(|| {
            Fault::Torn(format!("the header needs {bytes} bytes more where {} are left", self.left))
        })?;
        Ok(())
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        self.need(N as u64)?;
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        self.take().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<String, Fault> {
        let len = self.u64()?;
        self.need(len)?;
        let mut bytes = vec![0; len as usize];
        self.file.read_exact(&mut bytes)?;
        String::from_utf8(bytes).map_err(|error| Fault::Torn(format!("a text is no {error}")))
    }

    /// Magic and version; returns how many tensors and how many keys there are.
    fn preamble(&mut self) -> Result<(u64, u64), Fault> {
        let magic = self.take::<4>()?;
        if &magic != b"GGUF" {
            let found = magic.escape_ascii();
            return Err(Fault::Torn(format!("it begins with \"{found}\", not \"GGUF\"")));
        }
        match self.u32()? {
            2 | 3 => Ok((self.u64()?, self.u64()?)),
            other => Err(Fault::Torn(format!("its version is {other}; 2 and 3 are read"))),
        }
    }

    fn metadata(&mut self, keys: u64) -> Result<BTreeMap<String, Value>, Fault> {
        let mut all = BTreeMap::new();
        for _ in 0..keys {
            let key = self.text()?;
            let kind = self.u32()?;
            let value = self.value(kind, true)?;
            if all.contains_key(&key) {
                return Err(Fault::Torn(format!("the key {key} is there twice")));
            }
            all.insert(key, value);
        }
        Ok(all)
    }

    fn value(&mut self, kind: u32, may_be_list: bool) -> Result<Value, Fault> {
        let signed = |number: i64| match u64::try_from(number) {
            Ok(count) => Value::Count(count),
            Err(_) => Value::Negative(number),
        };
        Ok(match kind {
            0 => Value::Count(u8::from_le_bytes(self.take()?).into()),
            1 => signed(i8::from_le_bytes(self.take()?).into()),
            2 => Value::Count(u16::from_le_bytes(self.take()?).into()),
            3 => signed(i16::from_le_bytes(self.take()?).into()),
            4 => Value::Count(self.u32()?.into()),
            5 => signed(i32::from_le_bytes(self.take()?).into()),
            6 => Value::Number(f32::from_le_bytes(self.take()?).into()),
            7 => Value::Flag(self.take::<1>()? != [0]),
            8 => Value::Text(self.text()?),
            9 if may_be_list => {
                let (kind, len) = (self.u32()?, self.u64()?);
                Value::List((0..len).map(|_| self.value(kind, false)).collect::<Result<_, _>>()?)
            }
            10 => Value::Count(self.u64()?),
            11 => signed(i64::from_le_bytes(self.take()?)),
            12 => Value::Number(f64::from_le_bytes(self.take()?)),
            other => return Err(Fault::Torn(format!("a value of type {other} is not known"))),
        })
    }

    fn tensors(&mut self, count: u64) -> Result<BTreeMap<String, Entry>, Fault> {
        let mut all = BTreeMap::new();
        for _ in 0..count {
            let name = self.text()?;
            let dimensions = self.u32()?;
            if dimensions > 4 {
                return Err(Fault::Torn(format!("tensor {name} has {dimensions} dimensions")));
            }
            // The file has the fastest first.
            let mut shape = (0..dimensions)
                .map(|_| self.u64().map(|len| usize::try_from(len).unwrap_or(usize::MAX)))
                .collect::<Result<Vec<_>, _>>()?;
            shape.reverse();
            let (code, offset) = (self.u32()?, self.u64()?);
            let Some(kind) = kind(code) else {
                let reason = format!(
                    "is of ggml's type {code}; F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and \
                     Q2_K to Q6_K are read"
                );
                return Err(Fault::Kind(name, reason));
            };
            if all.contains_key(&name) {
                return Err(Fault::Torn(format!("tensor {name} is there twice")));
            }
            all.insert(name, Entry { kind, shape, offset });
        }
        Ok(all)
    }
}

/// ggml's numbers of those types that candle dequantises.
fn kind(code: u32) -> Option<GgmlDType> {
    Some(match code {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        30 => GgmlDType::BF16,
        _ => return None,
    })
}
