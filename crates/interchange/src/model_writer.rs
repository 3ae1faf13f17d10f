//! Writes a copy of a model with some tensors replaced.

use crate::hub::{CONFIG, INDEX, SINGLE};
use crate::{HostTensor, HubModel, InterchangeError};
use moe_lora_files::{FileError, Staging, StoredTensor, TensorWriter};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What transformers puts into one shard at most, by default.
pub const MAX_SHARD_BYTES: usize = 5_000_000_000;

/// What makes a folder of weights a complete model, besides its configuration.
const COMPANIONS: [&str; 10] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// Writes a copy of a model in hub layout in which some tensors are replaced, a layer at a time.
///
/// Each tensor keeps its name and its type on disk, so a replaced one is rounded once, to nearest
/// even, and every other one stays equal to the bit. One shard is written as `model.safetensors`,
/// several as `model-00001-of-00003.safetensors` and so on, with their index. `config.json` is
/// copied, and the generation settings and the tokenizer where they are there.
///
/// ```no_run
/// use moe_lora_interchange::{HubModel, InterchangeError, MAX_SHARD_BYTES, ModelWriter};
/// use std::path::Path;
///
/// # fn main() -> Result<(), InterchangeError> {
/// let model = HubModel::open(Path::new("Mixtral-8x7B"))?;
/// let writer = ModelWriter::new(&model, Path::new("merged"), MAX_SHARD_BYTES)?;
/// writer.write(|layer| {
///     let experts = model.expert_weights(layer)?;
///     // Change them here.
///     experts.into_hub(layer, &model)
/// })
/// # }
/// ```
pub struct ModelWriter<'a> {
    source: &'a HubModel,
    folder: PathBuf,
    /// Tensor to file.
    files: BTreeMap<String, String>,
    total_bytes: usize,
}

impl<'a> ModelWriter<'a> {
    /// Divides the tensors of `source` into shards of at most `max_shard_bytes` of data, in the
    /// order of the layers, and checks that they can be written to `folder`. A tensor larger than
    /// that has a shard of its own. Nothing is written yet.
    ///
    /// `folder` may hold a model in one file that is written as one file again, `source` itself
    /// included: it is replaced in one step.
    ///
    /// # Errors
    ///
    /// [`InterchangeError::Occupied`] when `folder` holds other weights of a model, which shards
    /// would be mixed with; and when a folder lies where a file is to be written.
    pub fn new(
        source: &'a HubModel,
        folder: &Path,
        max_shard_bytes: usize,
    ) -> Result<Self, InterchangeError> {
        let mut names: Vec<&str> = source.names().collect();
        names.sort_by_cached_key(|name| in_layer_order(name));
        let mut shards: Vec<Vec<&str>> = Vec::new();
        let (mut shard_bytes, mut total_bytes) = (0, 0usize);
        for name in names {
            let bytes = source.stored(name)?.bytes().len();
            if shards.is_empty() || bytes > max_shard_bytes.saturating_sub(shard_bytes) {
                shards.push(Vec::new());
                shard_bytes = 0;
            }
            shards.last_mut().expect("pushed above").push(name);
            shard_bytes += bytes;
            total_bytes += bytes;
        }
        let count = shards.len();
        let file = |shard: usize| match count {
            1 => SINGLE.to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", shard + 1),
        };
        let names = shards.iter().enumerate();
        let files = names
            .flat_map(|(shard, names)| {
                names
                    .iter()
                    .map(move |name| (name.to_string(), file(shard)))
            })
            .collect();
        let writer = Self {
            source,
            folder: folder.to_owned(),
            files,
            total_bytes,
        };
        writer.check_folder()?;
        Ok(writer)
    }

    /// The names of the files of weights, sorted.
    pub fn file_names(&self) -> BTreeSet<&str> {
        self.files.values().map(String::as_str).collect()
    }

    /// Writes the model.
    ///
    /// `replaced` is called once for every layer, in order, and returns the tensors to replace,
    /// usually from [`ExpertWeights::into_hub`](crate::ExpertWeights::into_hub); they are written
    /// before the next call, so that one layer at a time is in memory. Tensors outside the layers
    /// may come with any layer.
    ///
    /// # Errors
    ///
    /// The errors of `replaced`. When a name is not in the model, a shape does not fit, a value
    /// overflows the type on disk, or a file cannot be written. What was in the folder before is
    /// then still there as it was.
    pub fn write<E: From<InterchangeError>>(
        &self,
        mut replaced: impl FnMut(usize) -> Result<BTreeMap<String, HostTensor>, E>,
    ) -> Result<(), E> {
        let mut files = self.begin()?;
        for layer in 0..self.source.config().num_hidden_layers {
            for (name, tensor) in replaced(layer)? {
                files.replace(self, &name, tensor)?;
            }
        }
        Ok(self.finish(files)?)
    }

    fn begin(&self) -> Result<Files, InterchangeError> {
        self.check_folder()?;
        let mut tensors: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for (name, file) in &self.files {
            let stored = self.source.stored(name)?;
            let announced = (name.clone(), stored.dtype(), stored.shape().to_vec());
            tensors.entry(file).or_default().push(announced);
        }
        let mut staging = Staging::new(&self.folder)?;
        let mut writers = BTreeMap::new();
        for (file, tensors) in tensors {
            writers.insert(file.to_owned(), staging.tensor_writer(file, tensors)?);
        }
        Ok(Files {
            staging,
            writers,
            replaced: BTreeSet::new(),
        })
    }

    fn finish(&self, mut files: Files) -> Result<(), InterchangeError> {
        for (name, file) in &self.files {
            if !files.replaced.contains(name) {
                let stored = self.source.stored(name)?;
                if let Some(writer) = files.writers.get_mut(file) {
                    writer.write(name, &stored)?;
                }
            }
        }
        let Files {
            mut staging,
            writers,
            ..
        } = files;
        let sharded = writers.len() > 1;
        for (_, writer) in writers {
            writer.finish()?;
        }
        if sharded {
            let index = json!({
                "metadata": {"total_size": self.total_bytes},
                "weight_map": self.files,
            });
            staging.write(INDEX, format!("{index:#}\n").as_bytes())?;
        }
        for name in self.copied() {
            staging.copy(name, &self.source.folder().join(name))?;
        }
        Ok(staging.commit()?)
    }

    /// The files that are copied as they are.
    fn copied(&self) -> impl Iterator<Item = &str> {
        let companions = COMPANIONS
            .into_iter()
            .filter(|name| self.source.folder().join(name).exists());
        companions.chain([CONFIG])
    }

    fn check_folder(&self) -> Result<(), InterchangeError> {
        for name in self.file_names().into_iter().chain(self.copied()) {
            let path = self.folder.join(name);
            if path.is_dir() {
                return Err(FileError::NotAFile { path }.into());
            }
        }
        if !self.folder.exists() {
            return Ok(());
        }
        let io = |error| FileError::io("read", &self.folder)(error);
        for entry in std::fs::read_dir(&self.folder).map_err(io)? {
            let name = entry.map_err(io)?.file_name();
            let name = name.to_string_lossy();
            let shard = name.starts_with("model-") && name.ends_with(".safetensors");
            let single = name == SINGLE && self.file_names().len() > 1;
            if shard || single || name == INDEX {
                let path = self.folder.join(&*name);
                return Err(InterchangeError::Occupied { path });
            }
        }
        Ok(())
    }
}

/// The files being written.
struct Files {
    staging: Staging,
    writers: BTreeMap<String, TensorWriter>,
    replaced: BTreeSet<String>,
}

impl Files {
    fn replace(
        &mut self,
        plan: &ModelWriter<'_>,
        name: &str,
        tensor: HostTensor,
    ) -> Result<(), InterchangeError> {
        let like = plan.source.stored(name)?;
        let path = plan.source.shard(name)?.path();
        let stored = StoredTensor::narrow(path, name, tensor, &like)?;
        let file = &plan.files[name];
        if let Some(writer) = self.writers.get_mut(file) {
            writer.write(name, &stored)?;
        }
        self.replaced.insert(name.to_owned());
        Ok(())
    }
}

/// Numbers in a name count as numbers, so that layer 10 comes after layer 9.
fn in_layer_order(name: &str) -> Vec<(Option<u64>, String)> {
    let parts = name.split('.');
    parts
        .map(|part| (part.parse().ok(), part.to_owned()))
        .collect()
}
