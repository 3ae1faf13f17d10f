//! A model folder in hub layout.

use crate::projection::{Projection, expert_module};
use crate::{HostTensor, InterchangeError, ModelConfig};
use moe_lora_files::{FileError, JsonFile, Staging, StoredTensor, TensorFile, expect_shape};
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// An open model folder: its configuration and its memory-mapped weights.
#[derive(Debug)]
pub struct HubModel {
    folder: PathBuf,
    config: ModelConfig,
    shards: BTreeMap<String, TensorFile>,
    /// Tensor to shard.
    index: BTreeMap<String, String>,
}

/// The routed experts of one layer, stacked.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertWeights {
    /// `[E, F, H]`.
    pub gate: HostTensor,
    /// `[E, F, H]`.
    pub up: HostTensor,
    /// `[E, H, F]`.
    pub down: HostTensor,
}

impl HubModel {
    /// Opens `folder`: `config.json`, and `model.safetensors` or, where there is none, the shards
    /// of `model.safetensors.index.json`.
    ///
    /// # Errors
    ///
    /// When a file is missing, damaged or unsupported, a shard's name would leave the folder, or
    /// the index and the shards do not hold the same tensors.
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
        Ok(Self {
            folder: folder.to_owned(),
            config,
            shards,
            index,
        })
    }

    /// The model's sizes and switches.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }

    /// The shape of a tensor, without reading its data.
    ///
    /// # Errors
    ///
    /// [`InterchangeError::UnknownTensor`] with the most similar name.
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

    /// The routed experts of `layer`, whose tensors lie on disk one by one.
    ///
    /// # Errors
    ///
    /// When there is no such layer, or a tensor is missing, has another shape than the
    /// configuration says or is stored in an unsupported type.
    pub fn expert_weights(&self, layer: usize) -> Result<ExpertWeights, InterchangeError> {
        let layers = self.config.num_hidden_layers;
        if layer >= layers {
            return Err(InterchangeError::LayerRange { layer, layers });
        }
        Ok(ExpertWeights {
            gate: self.stack(layer, Projection::Gate)?,
            up: self.stack(layer, Projection::Up)?,
            down: self.stack(layer, Projection::Down)?,
        })
    }

    fn stack(&self, layer: usize, projection: Projection) -> Result<HostTensor, InterchangeError> {
        let experts = self.config.num_experts;
        let [d_out, d_in] = projection.shape(&self.config);
        let name = |expert| format!("{}.weight", expert_module(layer, expert, projection));
        // All shapes first: a tensor that exists is backed by bytes in its file, so the stack's
        // size is then bounded by the files and not by what the configuration claims.
        for name in (0..experts).map(name) {
            expect_shape(|| name.clone(), self.shape(&name)?, &[d_out, d_in])?;
        }
        let mut data = Vec::with_capacity(experts * d_out * d_in);
        for name in (0..experts).map(name) {
            self.shard(&name)?.widen(&name, &mut data)?;
        }
        Ok(HostTensor::new([experts, d_out, d_in], data)?)
    }

    fn shard(&self, name: &str) -> Result<&TensorFile, FileError> {
        self.index
            .get(name)
            .and_then(|shard| self.shards.get(shard))
            .ok_or_else(|| FileError::unknown_tensor(&self.folder, name, self.names()))
    }
}

impl ExpertWeights {
    /// The experts one by one under their names on disk, ready for [`write_model`].
    ///
    /// # Errors
    ///
    /// [`InterchangeError::Shape`] when a stack does not fit `config`.
    pub fn into_hub(
        self,
        layer: usize,
        config: &ModelConfig,
    ) -> Result<BTreeMap<String, HostTensor>, InterchangeError> {
        let mut tensors = BTreeMap::new();
        for (projection, stack) in [
            (Projection::Gate, self.gate),
            (Projection::Up, self.up),
            (Projection::Down, self.down),
        ] {
            let [d_out, d_in] = projection.shape(config);
            let expected = [config.num_experts, d_out, d_in];
            stack.expect_shape(|| projection.name().to_owned(), &expected)?;
            for expert in 0..config.num_experts {
                let name = format!("{}.weight", expert_module(layer, expert, projection));
                let data = stack.outer(expert).to_vec();
                tensors.insert(name, HostTensor::new([d_out, d_in], data)?);
            }
        }
        Ok(tensors)
    }
}

/// Writes a copy of `source` to `folder` in which the tensors of `replaced` take the place of those
/// of the same name.
///
/// Each tensor keeps its type on disk, so a replaced one is rounded once, to nearest even. The
/// files are named and divided as in `source`. Of the other files only `config.json` and the index
/// are copied; add the tokenizer yourself. `folder` may be the one that `source` was opened from.
///
/// # Errors
///
/// When a name is not in `source`, a shape or type does not fit, or a file cannot be written. Files
/// that were in `folder` before are then still there.
pub fn write_model(
    folder: &Path,
    source: &HubModel,
    mut replaced: BTreeMap<String, HostTensor>,
) -> Result<(), InterchangeError> {
    for (name, tensor) in &replaced {
        tensor.expect_shape(|| name.clone(), source.shape(name)?)?;
    }
    let single = folder.join(SINGLE);
    if !source.shards.contains_key(SINGLE) && single.exists() {
        return Err(InterchangeError::Shadowed { path: single });
    }

    let mut staging = Staging::new(folder)?;
    for (shard, file) in &source.shards {
        let mut tensors = Vec::with_capacity(file.len());
        for name in file.names() {
            let stored = match replaced.remove(name) {
                Some(tensor) => {
                    StoredTensor::narrow(file.path(), name, tensor, &file.stored(name)?)?
                }
                None => file.stored(name)?,
            };
            tensors.push((name.to_owned(), stored));
        }
        staging.copy_tensors(shard, tensors, file.metadata())?;
    }
    for name in [INDEX, "config.json"] {
        let path = source.folder.join(name);
        if name == INDEX && source.shards.contains_key(SINGLE) {
            continue;
        }
        staging.write(
            name,
            &std::fs::read(&path).map_err(FileError::io("read", &path))?,
        )?;
    }
    Ok(staging.commit()?)
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
