//! Writes a folder that transformers and vLLM load, one tensor in memory at a time.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use safetensors::tensor::{Dtype as FileDtype, View};

use super::checkpoint::{GENERATION, WEIGHTS};
use super::root::HEAD;
use super::{Family, ModelError, Plan, Preset, TensorSpec};
use crate::config::Dtype;
use crate::ops::weights::narrow;

/// Config, generation config and `units`, each a unit's flat f32 weights, in `dtype`. A tied
/// Jamba's head is written too, because vLLM looks for it.
///
/// # Errors
/// A folder that exists already, or one that cannot be written, which is then taken away again. The
/// weights come last and get their name only once they are whole: what a kill leaves lacks them.
pub fn save_folder(
    folder: &Path,
    plan: &Plan,
    units: &[Vec<f32>],
    dtype: Dtype,
) -> Result<(), ModelError> {
    let parts = plan.units.iter().zip(units).flat_map(|(spec, flat)| {
        spec.tensors.iter().map(|tensor| tensor.name.as_str()).zip(spec.parts(flat))
    });
    let parts: BTreeMap<&str, &[f32]> = parts.collect();
    let values = |tensor: &TensorSpec| Cow::Borrowed(parts[tensor.name.as_str()]);
    save(folder, plan, dtype, &[], &values)
}

/// As [`save_folder`], with a preset's seeded weights, each made when its turn comes: the memory
/// that it takes is the largest tensor's, not the model's.
///
/// # Errors
/// As [`save_folder`].
pub fn save_preset(
    folder: &Path,
    preset: Preset,
    seed: u64,
    dtype: Dtype,
) -> Result<(), ModelError> {
    let plan = Plan::new(preset.config());
    let values = |tensor: &TensorSpec| Cow::Owned(Preset::tensor(&plan, tensor, seed));
    save(folder, &plan, dtype, &[], &values)
}

/// A tensor's f32 values.
pub(super) type Values<'v> = dyn Fn(&TensorSpec) -> Cow<'v, [f32]> + 'v;

/// `files` are names and texts of what the folder has beside config and weights.
pub(super) fn save(
    folder: &Path,
    plan: &Plan,
    dtype: Dtype,
    files: &[(&str, String)],
    values: &Values<'_>,
) -> Result<(), ModelError> {
    if folder.exists() {
        return Err(ModelError::Exists { path: folder.to_owned() });
    }
    fs::create_dir_all(folder).map_err(failed(folder))?;
    fill(folder, plan, dtype, files, values).inspect_err(|_| {
        // The first error is the one to report; half a folder would be in the next one's way.
        let _ = fs::remove_dir_all(folder);
    })
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> ModelError + use<> {
    let path = path.to_owned();
    move |source| ModelError::Write { path, source }
}

fn fill(
    folder: &Path,
    plan: &Plan,
    dtype: Dtype,
    files: &[(&str, String)],
    values: &Values<'_>,
) -> Result<(), ModelError> {
    let dtype_name = match dtype {
        Dtype::F32 => "float32",
        Dtype::Bf16 => "bfloat16",
    };
    let config = plan.config.to_json(dtype_name);
    let generation = serde_json::json!({
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
    });
    let configs =
        [("config.json", format!("{config:#}\n")), (GENERATION, format!("{generation:#}\n"))];
    for (name, text) in configs.iter().chain(files) {
        let path = folder.join(name);
        fs::write(&path, text).map_err(failed(&path))?;
    }
    let (part, path) = (folder.join(format!("{WEIGHTS}.part")), folder.join(WEIGHTS));
    write_weights(&part, plan, dtype, values).map_err(failed(&path))?;
    // The crate makes the file for its owner alone; it is to be as readable as its neighbours.
    let as_neighbour = fs::metadata(folder.join("config.json")).map(|file| file.permissions());
    as_neighbour.and_then(|p| fs::set_permissions(&part, p)).map_err(failed(&part))?;
    fs::rename(&part, &path).map_err(failed(&path))
}

fn write_weights(
    path: &Path,
    plan: &Plan,
    dtype: Dtype,
    values: &Values<'_>,
) -> Result<(), io::Error> {
    let specs = plan.units.iter().flat_map(|unit| &unit.tensors);
    let mut tensors: BTreeMap<&str, Lazy<'_, '_>> =
        specs.map(|spec| (spec.name.as_str(), Lazy { spec, dtype, values })).collect();
    if plan.config.tie_word_embeddings && plan.config.family == Family::Jamba {
        tensors.insert(HEAD, tensors[plan.units[0].tensors[0].name.as_str()]);
    }
    let metadata = Some([("format".to_owned(), "pt".to_owned())].into());
    safetensors::serialize_to_file(tensors, metadata, path).map_err(|error| match error {
        safetensors::SafeTensorError::IoError(error) => error,
        other => io::Error::other(other),
    })
}

/// A tensor that is made when it is written.
#[derive(Clone, Copy)]
struct Lazy<'a, 'v> {
    spec: &'a TensorSpec,
    dtype: Dtype,
    values: &'a Values<'v>,
}

impl View for Lazy<'_, '_> {
    fn dtype(&self) -> FileDtype {
        match self.dtype {
            Dtype::F32 => FileDtype::F32,
            Dtype::Bf16 => FileDtype::BF16,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.spec.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let values = (self.values)(self.spec);
        Cow::Owned(narrow(&values, self.dtype))
    }

    fn data_len(&self) -> usize {
        self.spec.len() * self.dtype.bytes() as usize
    }
}
