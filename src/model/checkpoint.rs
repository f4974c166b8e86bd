//! Model folders: `config.json`, `generation_config.json`, and the weights in `model.safetensors`
//! or in the shards that `model.safetensors.index.json` names. Nothing is globbed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::root::HEAD;
use super::shard::Shard;
use super::{FeedForwardKind, HfConfig, ModelError, Plan, Preset, TensorSpec, UnitSpec};

pub(super) const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
pub(super) const GENERATION: &str = "generation_config.json";

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
    let mut config = HfConfig::read(&folder.join("config.json"))?;
    let generation = folder.join(GENERATION);
    if generation.exists() {
        config.add_generation_config(&generation)?;
    }
    Ok(Plan::new(config))
}

/// Reads a folder: its plan and each unit's flat f32 master weights. f32, bf16 and f16 files are
/// widened, also mixed ones. Beside the master it needs no more than a piece of a tensor.
///
/// # Errors
/// A missing or broken file or shard, a tensor that is missing, unexpected, of another shape or
/// dtype, or not finite; each names the file and the tensor.
pub fn load_master(folder: &Path) -> Result<(Plan, Vec<Vec<f32>>), ModelError> {
    let plan = load_plan(folder)?;
    let mut weights = Weights::open(folder)?;
    let spelled = weights.spelled(&plan);
    weights.check_names(&plan, &spelled)?;
    let mut units = Vec::with_capacity(plan.units.len());
    for (spec, tensors) in plan.units.iter().zip(&spelled) {
        let mut flat = Vec::with_capacity(spec.len());
        for tensor in tensors {
            let shard = weights.shard_of(&tensor.name);
            shard.read(tensor, |values| flat.extend_from_slice(values))?;
        }
        units.push(flat);
    }
    if plan.config.tie_word_embeddings && weights.place.contains_key(HEAD) {
        let embedding = &plan.units[0].tensors[0];
        weights.check_tied_head(embedding, &units[0][..embedding.len()])?;
    }
    Ok((plan, units))
}

/// Where every tensor of a folder is.
struct Weights {
    /// The file that says which tensors there are.
    list: PathBuf,
    shards: Vec<Shard>,
    /// Index of each tensor's shard.
    place: BTreeMap<String, usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    fn open(folder: &Path) -> Result<Self, ModelError> {
        let (single, index) = (folder.join(WEIGHTS), folder.join(INDEX));
        if single.exists() || !index.exists() {
            let failed = |source| ModelError::Read { path: single.clone(), source };
            let shard = Shard::open(&single).map_err(failed)??;
            let place = shard.names().map(|name| (name.to_owned(), 0)).collect();
            return Ok(Self { list: single, shards: vec![shard], place });
        }
        let text = fs::read_to_string(&index)
            .map_err(|source| ModelError::Read { path: index.clone(), source })?;
        let Index { weight_map } = serde_json::from_str(&text)
            .map_err(|source| ModelError::Json { path: index.clone(), source })?;
        Self::open_shards(folder, index, weight_map)
    }

    fn open_shards(
        folder: &Path,
        list: PathBuf,
        weight_map: BTreeMap<String, String>,
    ) -> Result<Self, ModelError> {
        let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
        let mut all = Self { list, shards: Vec::new(), place: BTreeMap::new() };
        for (name, file) in weight_map {
            let number = match numbers.get(&file) {
                Some(&number) => number,
                None => {
                    all.shards.push(open_shard(folder, &all.list, &name, &file)?);
                    numbers.insert(file, all.shards.len() - 1);
                    all.shards.len() - 1
                }
            };
            let shard = &all.shards[number];
            if !shard.has(&name) {
                return Err(
                    shard.wrong(&name, format!("is missing, though {INDEX} says it is here"))
                );
            }
            all.place.insert(name, number);
        }
        Ok(all)
    }

    fn shard_of(&mut self, name: &str) -> &mut Shard {
        &mut self.shards[self.place[name]]
    }

    /// Each unit's tensors as the files spell them: as the plan does, unless only an older spelling
    /// is there.
    fn spelled(&self, plan: &Plan) -> Vec<Vec<TensorSpec>> {
        let unit = |(unit, spec): (usize, &UnitSpec)| {
            let is_dense = unit > 0 && plan.layers[unit - 1].feed_forward == FeedForwardKind::Dense;
            let tensor = |tensor: &TensorSpec| {
                let older = older_name(&tensor.name, is_dense);
                let is_older =
                    !self.place.contains_key(&tensor.name) && self.place.contains_key(&older);
                let name = if is_older { older } else { tensor.name.clone() };
                TensorSpec { name, shape: tensor.shape.clone() }
            };
            spec.tensors.iter().map(tensor).collect()
        };
        plan.units.iter().enumerate().map(unit).collect()
    }

    /// Every tensor of the plan is there, and nothing else but a tied head's copy and the rotary
    /// frequencies that old releases stored, which follow from the config.
    fn check_names(&self, plan: &Plan, spelled: &[Vec<TensorSpec>]) -> Result<(), ModelError> {
        let wanted: BTreeSet<&str> =
            spelled.iter().flatten().map(|tensor| tensor.name.as_str()).collect();
        let tied = plan.config.tie_word_embeddings;
        for (name, &shard) in &self.place {
            let known = wanted.contains(name.as_str())
                || name == HEAD && tied
                || name.ends_with(".rotary_emb.inv_freq");
            if !known {
                return Err(self.shards[shard].wrong(name, "config.json has no place for it"));
            }
        }
        let Some(name) = wanted.iter().find(|name| !self.place.contains_key(**name)) else {
            return Ok(());
        };
        let reason = match *name == HEAD {
            true => "is missing, and config.json says tie_word_embeddings = false",
            false => "is missing",
        };
        let (path, name) = (self.list.clone(), (*name).to_owned());
        Err(ModelError::Tensor { path, name, reason: reason.into() })
    }

    /// A tied model may carry its head; then it must be the embedding.
    fn check_tied_head(
        &mut self,
        embedding: &TensorSpec,
        values: &[f32],
    ) -> Result<(), ModelError> {
        let spec = TensorSpec { name: HEAD.into(), shape: embedding.shape.clone() };
        let (mut rest, mut largest) = (values, 0.0_f32);
        let shard = self.shard_of(HEAD);
        shard.read(&spec, |head| {
            let (own, after) = rest.split_at(head.len());
            rest = after;
            let differences = own.iter().zip(head).map(|(a, b)| (a - b).abs());
            largest = differences.fold(largest, f32::max);
        })?;
        if largest == 0.0 {
            return Ok(());
        }
        let reason = format!(
            "differs from {} by up to {largest}, though tie_word_embeddings is true",
            embedding.name
        );
        Err(shard.wrong(HEAD, reason))
    }
}

/// How Jamba's first checkpoints, from before transformers had the model, spell a tensor (by AI21's
/// own `modeling_jamba.py`): a dense layer is there a mixture of one.
fn older_name(name: &str, is_dense: bool) -> String {
    let feed_forward = if is_dense { ".moe.experts.0." } else { ".moe." };
    [
        (".feed_forward.", feed_forward),
        (".pre_ff_layernorm.", ".pre_moe_layernorm."),
        (".mamba.b_layernorm.", ".mamba.B_layernorm."),
        (".mamba.c_layernorm.", ".mamba.C_layernorm."),
    ]
    .into_iter()
    .fold(name.to_owned(), |name, (new, old)| name.replace(new, old))
}

/// `name` is the first tensor that asks for it.
fn open_shard(folder: &Path, index: &Path, name: &str, file: &str) -> Result<Shard, ModelError> {
    let refuse = |source| {
        let (index, shard, tensor) = (index.to_owned(), file.to_owned(), name.to_owned());
        ModelError::Shard { index, shard, tensor, source }
    };
    if Path::new(file).file_name().is_none_or(|name| name != file) {
        return Err(refuse(io::Error::other("a shard lies in the index's own folder")));
    }
    Shard::open(&folder.join(file)).map_err(refuse)?
}
