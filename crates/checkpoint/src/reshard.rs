//! Writing a checkpoint anew for another topology, without a model.

use crate::{Checkpoint, CheckpointError, GroupSizes, Manifest, Save, TensorLayout};
use std::path::Path;

/// How far a [`reshard`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes written.
    pub done: usize,
    /// Bytes to be written.
    pub total: usize,
}

/// Writes `source` into `folder` as the ranks of `sizes` would have saved it, one rank after the
/// other and one tensor at a time; every whole tensor keeps its bits.
///
/// `folder` may be that of `source`, which is then replaced once the new one is whole.
///
/// # Errors
///
/// When a tensor cannot be cut over the ranks, a block of `source` is damaged, or a file cannot be
/// written.
pub fn reshard(
    source: &Checkpoint,
    folder: &Path,
    sizes: GroupSizes,
    mut progress: impl FnMut(Progress),
) -> Result<Manifest, CheckpointError> {
    let from = source.manifest();
    let layouts = || from.tensors.iter().map(|entry| &entry.layout);
    // All ranks are asked for their shards before the first file is written.
    let mut places = Vec::new();
    for place in sizes.places()? {
        let mut stored: Vec<TensorLayout> = Vec::new();
        for layout in layouts() {
            // Replicas would only be compared with the bytes they were copied from.
            if layout.shard(&place)?.replica == 0 {
                stored.push(layout.clone());
            }
        }
        places.push((place, stored));
    }
    let mut state = Progress {
        done: 0,
        total: from.tensors.iter().map(|entry| entry.byte_len()).sum(),
    };
    let mut last = None;
    for (place, stored) in places {
        let save = Save::begin(folder, place, from.step)?;
        save.write(&stored, |shard| {
            let bytes = source.read(shard)?;
            state.done += bytes.len();
            progress(state);
            Ok(bytes.into())
        })?;
        last = Some(save);
    }
    last.expect("a world has at least one rank")
        .commit(from.adapters.clone())
}
