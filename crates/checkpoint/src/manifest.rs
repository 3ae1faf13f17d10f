//! What a checkpoint holds and where: the one file whose renaming makes a save count.

use crate::storage::Storage;
use crate::{
    BLOCK_BYTES, BlockChecksums, CheckpointError, GroupSizes, ShardedTensor, TensorLayout,
    document, plan,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const FORMAT: &str = "moe-lora-checkpoint";
/// Shards of a tensor: ranks of one replica. That no two overlap is checked pair by pair.
const MAX_SHARDS: usize = 4096;

/// The contents of `manifest.json`. Fields that are not listed here are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Number of the save, counted in this folder from 1.
    pub generation: u64,
    /// Optimizer steps taken.
    pub step: u64,
    /// The topology it was written at; loading does not depend on it.
    pub topology: GroupSizes,
    /// Settings of each adapter by module path, from which it can be built again.
    pub adapters: BTreeMap<String, AdapterEntry>,
    /// All tensors, sorted by key.
    pub tensors: Vec<TensorEntry>,
}

/// Settings of one adapter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterEntry {
    /// Rank `r` of the full adapter.
    pub rank: usize,
    /// Alpha; the delta is scaled by `alpha / r`.
    pub alpha: f64,
    /// Whether it is scaled by `alpha / sqrt(r)` instead.
    pub rslora: bool,
    /// Function between `A` and `B`.
    pub activation: AdapterActivation,
    /// Which factors the experts of the layer share; nothing to a linear without experts.
    pub sharing: AdapterSharing,
    /// Whether it has DoRA's magnitude, `{linear}.lora_magnitude_vector`.
    #[serde(default)]
    pub dora: bool,
    /// Whether it is one of PiSSA, on the weight without the product of the factors that it started
    /// from, `{linear}.lora_A.start` and `{linear}.lora_B.start`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pissa: bool,
}

/// Function between `A` and `B` of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdapterActivation {
    /// `B A x`.
    Identity,
    /// `B silu(A x)`.
    Silu,
    /// `B gelu(A x)`.
    Gelu,
    /// `B relu(A x)`.
    Relu,
}

/// Which factors of an adapter the experts of a layer share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdapterSharing {
    /// None.
    PerExpert,
    /// The one on the hidden side: `A` of gate and up, `B` of down.
    SharedOuter,
    /// Both.
    Shared,
}

/// One tensor and its shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// How it is cut over ranks.
    pub layout: TensorLayout,
    /// The stored shards, which fill it exactly once.
    pub shards: Vec<ShardEntry>,
}

/// One stored shard of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// Name of its safetensors file, in which the tensor is named by its key.
    pub file: String,
    /// Where it begins inside each fragment of each axis.
    pub offset: Vec<usize>,
    /// Its extents.
    pub shape: Vec<usize>,
    /// Checksums of its bytes.
    pub crc32: BlockChecksums,
}

impl Manifest {
    /// The manifest's place in a checkpoint folder.
    pub fn path(folder: &Path) -> PathBuf {
        folder.join("manifest.json")
    }

    /// Reads and checks the manifest of a folder; opens no other file.
    ///
    /// # Errors
    ///
    /// When it is absent, damaged, of an unknown version, names a file outside the folder, or has
    /// shards that do not fill their tensors exactly once.
    pub fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let path = Self::path(folder);
        let manifest: Self = document::read(&path, FORMAT)?;
        manifest.check(&path)?;
        Ok(manifest)
    }

    pub(crate) fn write(
        &self,
        storage: &dyn Storage,
        folder: &Path,
    ) -> Result<(), CheckpointError> {
        let path = Self::path(folder);
        self.check(&path)?;
        document::write(storage, &path, FORMAT, self)
    }

    /// The entry of a tensor.
    pub fn tensor(&self, key: &str) -> Option<&TensorEntry> {
        let index = self
            .tensors
            .binary_search_by(|entry| (*entry.layout.key).cmp(key));
        index.ok().map(|index| &self.tensors[index])
    }

    /// The names of all shard files.
    pub fn files(&self) -> BTreeSet<&str> {
        let shards = self.tensors.iter().flat_map(|entry| &entry.shards);
        shards.map(|shard| &*shard.file).collect()
    }

    fn check(&self, path: &Path) -> Result<(), CheckpointError> {
        let check = || {
            self.topology.check()?;
            for (path, adapter) in &self.adapters {
                // JSON has no infinity and no NaN.
                if !adapter.alpha.is_finite() {
                    let (path, alpha) = (path.clone(), adapter.alpha);
                    return Err(CheckpointError::Alpha { path, alpha });
                }
            }
            for pair in self.tensors.windows(2) {
                let (first, key) = (&pair[0].layout.key, &pair[1].layout.key);
                if first == key {
                    return Err(CheckpointError::DuplicateKey { key: key.clone() });
                }
                if first > key {
                    return Err(fault(key, "key", key, "keys in rising order"));
                }
            }
            self.tensors.iter().try_for_each(TensorEntry::check)
        };
        check().map_err(|source| CheckpointError::Manifest {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }
}

impl TensorEntry {
    /// The stored shards as boxes.
    pub fn sharded(&self) -> Vec<ShardedTensor> {
        let sharded = |shard: &ShardEntry| ShardedTensor {
            offset: shard.offset.clone(),
            local_shape: shard.shape.clone(),
            ..self.layout.whole()
        };
        self.shards.iter().map(sharded).collect()
    }

    fn check(&self) -> Result<(), CheckpointError> {
        self.layout.check()?;
        let key = &self.layout.key;
        let shards = self.shards.len();
        if shards > MAX_SHARDS {
            let expected = format!("at most {MAX_SHARDS}");
            return Err(fault(key, "shards", &shards.to_string(), &expected));
        }
        let mut files = BTreeSet::new();
        for (entry, shard) in self.shards.iter().zip(self.sharded()) {
            if !is_plain_name(&entry.file) {
                let (key, name) = (key.clone(), entry.file.clone());
                return Err(CheckpointError::FileName { key, name });
            }
            if !files.insert(&entry.file) {
                return Err(fault(key, "file", &entry.file, "a file for each shard"));
            }
            shard.check()?;
            let blocks = entry.crc32.blocks().len();
            let expected = shard.byte_len().div_ceil(BLOCK_BYTES);
            if blocks != expected {
                let expected = format!("{expected} checksums");
                return Err(fault(
                    key,
                    "crc32",
                    &format!("{blocks} checksums"),
                    &expected,
                ));
            }
        }
        let file = |shard: usize| self.shards[shard].file.clone();
        match plan(&self.sharded(), &self.layout.whole()) {
            Ok(_) => Ok(()),
            Err(CheckpointError::Overlap { key, first, second }) => {
                let (first, second) = (file(first), file(second));
                Err(CheckpointError::DuplicateShard { key, first, second })
            }
            Err(other) => Err(other),
        }
    }

    /// Bytes of the whole tensor.
    pub fn byte_len(&self) -> usize {
        self.layout.whole().byte_len()
    }
}

fn fault(key: &str, field: &'static str, value: &str, expected: &str) -> CheckpointError {
    CheckpointError::Layout {
        key: key.to_owned(),
        field,
        value: value.to_owned(),
        expected: expected.to_owned(),
    }
}

/// Whether a name stays in its folder on every system.
fn is_plain_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    name.ends_with(".safetensors") && !name.starts_with('.') && name.chars().all(plain)
}
