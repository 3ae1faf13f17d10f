//! Sharded checkpoints that load at any topology: what ranks saved at one size of expert and tensor
//! parallelism, ranks of any other load to the bit, reading only their own part.
//!
//! ```
//! use moe_lora_checkpoint::{Axis, Checkpoint, Dtype, GroupSizes, Save, Strictness, TensorLayout};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! // B of two experts, four rows each, cut over two expert tensor parallel ranks.
//! let layout = TensorLayout::new("mlp.experts.down_proj.lora_B", Dtype::U8, [2, 4, 1])
//!     .with_axis(0, Axis::Ep)
//!     .with_axis(1, Axis::ExpertTp);
//! let sizes = GroupSizes::new(1, 2);
//!
//! // Each rank writes its shards: rows 0 and 1, rows 2 and 3 of both experts.
//! let rows: [&[u8]; 2] = [&[0, 1, 10, 11], &[2, 3, 12, 13]];
//! let mut saves = Vec::new();
//! for (place, rows) in sizes.places()?.zip(rows) {
//!     let save = Save::begin(folder, place, 15)?;
//!     save.write(&[layout.clone()], |_| Ok(rows.into()))?;
//!     saves.push(save);
//! }
//! // After a barrier, one of them commits.
//! saves.swap_remove(0).commit(Default::default())?;
//!
//! // Two expert parallel ranks load an expert each.
//! let checkpoint = Checkpoint::open(folder)?;
//! let mine = layout.shard(&GroupSizes::new(2, 1).place(1)?)?;
//! let (loaded, report) = checkpoint.load(&[mine], Strictness::Exact)?;
//! assert_eq!(loaded[&layout.key].bytes, [10, 11, 12, 13]);
//! assert_eq!(report.to_string(), "applied 1, 1 of them resharded");
//! # Ok(())
//! # }
//! ```
//!
//! # The format
//!
//! A folder that all ranks share:
//!
//! ```text
//! manifest.json                   what the checkpoint is; written last
//! g3-ep0-etp0-dp0.safetensors     third save: shards of the rank at ep 0, etp 0, replica 0
//! g3-ep0-etp1-dp0.safetensors     ...
//! ```
//!
//! A rank's file is plain safetensors, readable by any of its readers:
//!
//! ```text
//! 8 bytes   little-endian u64, length n of the header
//! n bytes   JSON: key -> dtype, local shape, begin and end in the data
//! the rest  the shards, little-endian, last axis fastest, wide elements first
//! ```
//!
//! The manifest says which box of its tensor each shard is, and carries the CRC-32 of each
//! [16 KiB](BLOCK_BYTES) of it and of its own text:
//!
//! ```text
//! {
//!   "format": "moe-lora-checkpoint",
//!   "version": 1,
//!   "crc32": "8c6b7a0e",                             of the text of contents
//!   "contents": {
//!     "generation": 3,                               number of the save in this folder
//!     "step": 15,
//!     "topology": { "world": 2, "tp": 1, "ep": 1, "etp": 2 },
//!     "adapters": { "mlp.experts.down_proj": { "rank": 1, "alpha": 2.0, ... } },
//!     "tensors": [{
//!       "layout": { "key": "mlp.experts.down_proj.lora_B", "dtype": "F32", "shape": [2, 4, 1],
//!                   "fragments": [1, 1, 1], "axes": ["ep", "expert_tp", null] },
//!       "shards": [{ "file": "g3-ep0-etp0-dp0.safetensors", "offset": [0, 0, 0],
//!                    "shape": [2, 2, 1], "crc32": "1b2f0c44" }, ...]
//!     }, ...]
//!   }
//! }
//! ```
//!
//! The topology is for information. Loading compares boxes, see [`plan`](plan()), and the
//! [`TensorLayout`] lets [`reshard`](reshard()) write the checkpoint anew without a model. Optimizer
//! state is tensors of the same layouts under longer keys; a step counter is a tensor of shape `[]`.
//!
//! # Safety limits
//!
//! - A save counts once its manifest is renamed into place, after every file it names is durable. A
//!   kill or a power cut before that leaves the previous checkpoint whole.
//! - Files are taken as hostile. Shards must fill each tensor exactly once, and lie in files of the
//!   length that their headers and the manifest say, before anything is allocated; the manifest may
//!   have 256 MiB, a tensor 8 axes.
//! - File names are plain names in the folder. A symbolic link by such a name is followed when
//!   reading and replaced when writing.
//! - A load verifies every block it touches and hands out all tensors or none.
//! - Replicas are compared by their checksums when a save is committed.
//!
//! # What it does not know
//!
//! Communication: the barriers of a [`Save`] are the caller's. Devices and number types: tensors are
//! bytes, never converted. Element types below a byte. Two saves into one folder at a time. Checksums
//! find damage, not forgery.

mod checksum;
mod document;
mod error;
mod layout;
mod load;
mod manifest;
mod place;
mod plan;
mod reader;
mod report;
mod reshard;
mod save;
mod storage;
mod tensor;

pub use checksum::{BLOCK_BYTES, BlockChecksums};
pub use error::CheckpointError;
pub use layout::{Axis, TensorLayout};
pub use load::{Checkpoint, Loaded, LoadedTensor};
pub use manifest::{
    AdapterActivation, AdapterEntry, AdapterSharing, Manifest, ShardEntry, TensorEntry,
};
pub use place::{GroupSizes, Place};
pub use plan::{Run, Span, Transfer, plan};
pub use report::{LoadReport, MismatchedTensor, MissingTensor, Strictness};
pub use reshard::{Progress, reshard};
pub use safetensors::Dtype;
pub use save::Save;
pub use tensor::ShardedTensor;
