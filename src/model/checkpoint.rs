//! Model folders: `config.json` and `model.safetensors`, by their exact names. Nothing is globbed.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype as FileDtype, SafeTensors};

use super::{HfConfig, ModelError, Plan, Preset, TensorSpec};

pub(super) const WEIGHTS: &str = "model.safetensors";
pub(super) const TIED_HEAD: &str = "lm_head.weight";
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";

/// Reads a folder's plan alone, without its weights.
///
/// # Errors
/// What is not a folder, or has no readable `config.json`.
pub fn load_plan(folder: &Path) -> Result<Plan, ModelError> {
    if !folder.is_dir() {
        let reason = if folder.exists() { "it is a file" } else { "it does not exist" };
        let (path, presets) = (folder.to_owned(), Preset::names());
        return Err(ModelError::NotAFolder { path, reason, presets });
    }
    Ok(Plan::new(HfConfig::read(&folder.join("config.json"))?))
}

/// Reads a folder: its plan and each unit's flat f32 master weights. f32, bf16 and f16 files are
/// widened.
///
/// # Errors
/// A missing or broken file, a tensor that is missing, unexpected, of another shape or dtype, or
/// not finite; each names the file and the tensor.
pub fn load_master(folder: &Path) -> Result<(Plan, Vec<Vec<f32>>), ModelError> {
    let plan = load_plan(folder)?;
    let path = folder.join(WEIGHTS);
    let bytes =
        fs::read(&path).map_err(|source| ModelError::Read { path: path.clone(), source })?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| ModelError::Safetensors {
        path: path.clone(),
        reason: error.to_string(),
        bytes: bytes.len(),
    })?;
    let reader = Reader { path: &path, file: &file };
    reader.check_names(&plan)?;
    let unit = |spec: &super::UnitSpec| {
        let mut flat = Vec::with_capacity(spec.len());
        for tensor in &spec.tensors {
            reader.read_into(tensor, &mut flat)?;
        }
        Ok(flat)
    };
    let units = plan.units.iter().map(unit).collect::<Result<Vec<_>, ModelError>>()?;
    Ok((plan, units))
}

struct Reader<'a> {
    path: &'a Path,
    file: &'a SafeTensors<'a>,
}

impl Reader<'_> {
    fn wrong(&self, name: &str, reason: impl Into<String>) -> ModelError {
        let (path, name) = (self.path.to_owned(), name.to_owned());
        ModelError::Tensor { path, name, reason: reason.into() }
    }

    /// Every tensor of the plan is there, and nothing else but a tied head's copy.
    fn check_names(&self, plan: &Plan) -> Result<(), ModelError> {
        let wanted: BTreeMap<&str, &TensorSpec> = plan
            .units
            .iter()
            .flat_map(|unit| &unit.tensors)
            .map(|tensor| (tensor.name.as_str(), tensor))
            .collect();
        let mut found: Vec<&str> = self.file.names();
        found.sort_unstable();
        for name in found {
            if name == TIED_HEAD && plan.config.tie_word_embeddings {
                self.check_tied_head()?;
            } else if !wanted.contains_key(name) {
                return Err(self.wrong(name, "config.json has no place for it"));
            }
        }
        match wanted.keys().find(|name| self.file.tensor(name).is_err()) {
            None => Ok(()),
            Some(name) if *name == TIED_HEAD => {
                Err(self
                    .wrong(name, "is missing, and config.json says tie_word_embeddings = false"))
            }
            Some(name) => Err(self.wrong(name, "is missing")),
        }
    }

    /// A tied model may carry its head; then it must be the embedding.
    fn check_tied_head(&self) -> Result<(), ModelError> {
        let (head, embedding) = (self.file.tensor(TIED_HEAD), self.file.tensor(EMBEDDING));
        match (head, embedding) {
            (Ok(head), Ok(embedding)) if head.data() == embedding.data() => Ok(()),
            _ => Err(self.wrong(
                TIED_HEAD,
                format!("differs from {EMBEDDING}, though tie_word_embeddings is true"),
            )),
        }
    }

    fn read_into(&self, spec: &TensorSpec, flat: &mut Vec<f32>) -> Result<(), ModelError> {
        let view =
            self.file.tensor(&spec.name).map_err(|e| self.wrong(&spec.name, e.to_string()))?;
        if view.shape() != spec.shape {
            let reason =
                format!("has shape {:?}; config.json gives {:?}", view.shape(), spec.shape);
            return Err(self.wrong(&spec.name, reason));
        }
        let start = flat.len();
        match view.dtype() {
            FileDtype::F32 => {
                let (words, _) = view.data().as_chunks::<4>();
                flat.extend(words.iter().map(|b| f32::from_le_bytes(*b)));
            }
            FileDtype::BF16 => {
                let (halves, _) = view.data().as_chunks::<2>();
                flat.extend(halves.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()));
            }
            FileDtype::F16 => {
                let (halves, _) = view.data().as_chunks::<2>();
                flat.extend(halves.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()));
            }
            other => {
                let reason = format!("has dtype {other:?}; F32, BF16 and F16 are read");
                return Err(self.wrong(&spec.name, reason));
            }
        }
        match flat[start..].iter().position(|w| !w.is_finite()) {
            None => Ok(()),
            Some(at) => {
                let reason =
                    format!("element {at} is {}; weights must be finite", flat[start + at]);
                Err(self.wrong(&spec.name, reason))
            }
        }
    }
}
