//! What each rank saved, and the merging of all of it into the tensors of a manifest.

use crate::storage::Storage;
use crate::{
    BlockChecksums, CheckpointError, GroupSizes, Place, ShardEntry, ShardedTensor, TensorEntry,
    TensorLayout, document,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

const FORMAT: &str = "moe-lora-checkpoint-part";

/// What one rank saved, read by the rank that commits.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Part {
    pub(super) generation: u64,
    pub(super) step: u64,
    pub(super) topology: GroupSizes,
    pub(super) tensors: Vec<PartTensor>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PartTensor {
    pub(super) layout: TensorLayout,
    pub(super) crc32: BlockChecksums,
}

impl Part {
    pub(super) fn read(path: &Path) -> Result<Self, CheckpointError> {
        document::read(path, FORMAT)
    }

    pub(super) fn write(&self, storage: &dyn Storage, path: &Path) -> Result<(), CheckpointError> {
        document::write(storage, path, FORMAT, self)
    }
}

/// The tensors of all ranks' parts, sorted by key, with `file` naming the file of a rank.
pub(super) fn merge(
    parts: impl Iterator<Item = Result<(Place, Part), CheckpointError>>,
    file: impl Fn(&Place) -> String,
) -> Result<Vec<TensorEntry>, CheckpointError> {
    let mut tensors: BTreeMap<String, Merged> = BTreeMap::new();
    for part in parts {
        let (place, part) = part?;
        for PartTensor { layout, crc32 } in part.tensors {
            let shard = layout.shard(&place)?;
            let replica = Replica {
                place,
                shard,
                crc32,
            };
            let Some(merged) = tensors.get_mut(&layout.key) else {
                let replicas = vec![replica];
                tensors.insert(layout.key.clone(), Merged { layout, replicas });
                continue;
            };
            if merged.layout != layout {
                return Err(CheckpointError::LayoutDiffers {
                    key: layout.key,
                    first: merged.replicas[0].place.to_string(),
                    second: place.to_string(),
                });
            }
            merged.replicas.push(replica);
        }
    }
    let entry = |tensor: Merged| tensor.into_entry(&file);
    tensors.into_values().map(entry).collect()
}

/// What the ranks hold of one tensor.
struct Merged {
    layout: TensorLayout,
    replicas: Vec<Replica>,
}

struct Replica {
    place: Place,
    shard: ShardedTensor,
    crc32: BlockChecksums,
}

impl Merged {
    fn into_entry(
        mut self,
        file: impl Fn(&Place) -> String,
    ) -> Result<TensorEntry, CheckpointError> {
        // Replicas of one box side by side, the stored one first.
        let order = |replica: &Replica| (replica.shard.offset.clone(), replica.shard.replica);
        self.replicas.sort_by_key(order);
        let same_box = |a: &Replica, b: &Replica| a.shard.offset == b.shard.offset;
        for replicas in self.replicas.chunk_by(same_box) {
            for other in &replicas[1..] {
                let len = other.shard.byte_len();
                if let Some(bytes) = replicas[0].crc32.first_difference(&other.crc32, len) {
                    return Err(CheckpointError::UnequalReplicas {
                        key: self.layout.key,
                        first: replicas[0].place.to_string(),
                        second: other.place.to_string(),
                        begin: bytes.start,
                        end: bytes.end,
                    });
                }
            }
        }
        let replicas = self.replicas.into_iter();
        let stored = replicas.filter(|replica| replica.shard.replica == 0);
        let shards = stored.map(|replica| ShardEntry {
            file: file(&replica.place),
            offset: replica.shard.offset,
            shape: replica.shard.local_shape,
            crc32: replica.crc32,
        });
        Ok(TensorEntry {
            shards: shards.collect(),
            layout: self.layout,
        })
    }
}
