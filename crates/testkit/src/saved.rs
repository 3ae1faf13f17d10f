//! What a checkpoint holds.

use std::path::Path;

use moe_lora_checkpoint::Checkpoint;

/// Every tensor of a checkpoint by key, whole, in its bytes.
///
/// # Panics
///
/// When it cannot be read, or holds none.
pub fn saved_tensors(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let checkpoint = Checkpoint::open(folder).expect("the checkpoint opens");
    let entries = &checkpoint.manifest().tensors;
    assert!(!entries.is_empty(), "the checkpoint holds tensors");
    let whole = |key: &str| checkpoint.full(key).expect("the tensor is whole").bytes;
    let keys = entries.iter().map(|entry| entry.layout.key.clone());
    keys.map(|key| (key.clone(), whole(&key))).collect()
}
