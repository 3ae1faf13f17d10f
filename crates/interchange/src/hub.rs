//! A model folder in hub layout.

use crate::{HostTensor, InterchangeError, ModelConfig};
use moe_lora_files::{FileError, JsonFile, StoredTensor, TensorFile};
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const CONFIG: &str = "config.json";

/// Ends of the names of tensors that only quantised models have.
const QUANTIZED: [&str; 6] = [
    "_blocks",
    "_scales",
    "weight_scale",
    "_scale_inv",
    "weight_packed",
    "qweight",
];

/// An open model folder: its configuration and its memory-mapped weights.
#[derive(Debug)]
pub struct HubModel {
    folder: PathBuf,
    config: ModelConfig,
    shards: BTreeMap<String, TensorFile>,
    /// Tensor to shard.
    index: BTreeMap<String, String>,
}

impl HubModel {
    /// Opens `folder`: `config.json`, and `model.safetensors` or, where there is none, the shards
    /// of `model.safetensors.index.json`. Of the weights, only headers are read.
    ///
    /// # Errors
    ///
    /// When a file is missing, damaged or unsupported, the weights are quantised, a shard's name
    /// would leave the folder, or the index and the shards do not hold the same tensors.
    pub fn open(folder: &Path) -> Result<Self, InterchangeError> {
        let config = ModelConfig::read(folder)?;
        let mut shards = BTreeMap::new();
        let mut index = BTreeMap::new();
        // As in transformers, a single file takes precedence over an index.
        if folder.join(SINGLE).exists() || !folder.join(INDEX).exists() {
            let file = TensorFile::open(folder.join(SINGLE))?;
            index.extend(
                file.names()
                    .map(|name| (name.to_owned(), SINGLE.to_owned())),
            );
            shards.insert(SINGLE.to_owned(), file);
        } else {
            let file = JsonFile::read(folder.join(INDEX))?;
            index = file.require("weight_map")?;
            for name in index.values() {
                if !shards.contains_key(name) {
                    check_shard_name(file.path(), name)?;
                    shards.insert(name.clone(), TensorFile::open(folder.join(name))?);
                }
            }
            check_index(file.path(), &index, &shards)?;
        }
        let folder = folder.to_owned();
        let quantized = |name: &&String| QUANTIZED.iter().any(|end| name.ends_with(end));
        if let Some(name) = index.keys().find(quantized) {
            return Err(InterchangeError::Quantized {
                path: folder,
                name: name.clone(),
            });
        }
        Ok(Self {
            folder,
            config,
            shards,
            index,
        })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The model's sizes and switches.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.index.contains_key(name)
    }

    /// The shape of a tensor, without reading its data.
    ///
    /// # Errors
    ///
    /// [`FileError::UnknownTensor`] with the most similar name.
    pub fn shape(&self, name: &str) -> Result<&[usize], InterchangeError> {
        Ok(&self.shard(name)?.info(name)?.shape)
    }

    /// A tensor in `f32`.
    ///
    /// # Errors
    ///
    /// When there is no such tensor, or it is stored in a type other than `f32`, `bf16` and `f16`.
    pub fn tensor(&self, name: &str) -> Result<HostTensor, InterchangeError> {
        Ok(self.shard(name)?.tensor(name)?)
    }

    /// A tensor as it is on disk.
    ///
    /// # Errors
    ///
    /// [`FileError::UnknownTensor`] with the most similar name.
    pub fn stored(&self, name: &str) -> Result<StoredTensor<'_>, InterchangeError> {
        Ok(self.shard(name)?.stored(name)?)
    }

    /// The file that holds a tensor.
    pub(crate) fn shard(&self, name: &str) -> Result<&TensorFile, FileError> {
        self.index
            .get(name)
            .and_then(|shard| self.shards.get(shard))
            .ok_or_else(|| FileError::unknown_tensor(&self.folder, name, self.names()))
    }
}

fn check_shard_name(index: &Path, name: &str) -> Result<(), InterchangeError> {
    let mut parts = Path::new(name).components();
    let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name);
    // Separators and drive letters of other systems, which are letters like any here.
    if plain && !name.contains(['/', '\\', ':', '\0']) && name.ends_with(".safetensors") {
        return Ok(());
    }
    Err(InterchangeError::ShardName {
        path: index.to_owned(),
        name: name.to_owned(),
    })
}

/// Every tensor of the index lies in the shard it names, and every tensor of a shard is in the
/// index.
fn check_index(
    path: &Path,
    index: &BTreeMap<String, String>,
    shards: &BTreeMap<String, TensorFile>,
) -> Result<(), InterchangeError> {
    let unknown = index
        .iter()
        .find(|(tensor, shard)| !shards[*shard].contains(tensor))
        .map(|(tensor, shard)| (tensor.as_str(), shard));
    let mut held = shards
        .iter()
        .flat_map(|(shard, file)| file.names().map(move |tensor| (tensor, shard)));
    let unlisted = held.find(|(tensor, shard)| index.get(*tensor) != Some(*shard));
    match unknown.or(unlisted) {
        None => Ok(()),
        Some((tensor, shard)) => Err(InterchangeError::ShardIndex {
            path: path.to_owned(),
            shard: shard.clone(),
            tensor: tensor.to_owned(),
        }),
    }
}
