//! What can be wrong with a checkpoint, or with what is to be saved or loaded.

use crate::LoadReport;
use moe_lora_files::FileError;
use std::path::PathBuf;

/// A fault of a checkpoint folder, or of the tensors to be written to or read from one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file that cannot be opened, read or written, or has no sound safetensors header.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file that holds a shard and cannot be opened, or has no sound safetensors header.
    #[error("tensor {key:?}: {source}")]
    Shard {
        /// The first tensor in need of the file.
        key: String,
        /// The fault of the file.
        source: Box<FileError>,
    },
    /// A size of a group that makes no topology.
    #[error("{name}={size}, expected {expected} (choose other group sizes)")]
    GroupSize {
        /// The size's name.
        name: &'static str,
        /// Its value.
        size: usize,
        /// What would be accepted.
        expected: String,
    },
    /// A rank outside the world.
    #[error("rank={rank} is outside world_size={world} (ranks count from 0)")]
    Rank {
        /// The rank.
        rank: usize,
        /// Number of ranks.
        world: usize,
    },
    /// An axis that the ranks of a group cannot share equally.
    #[error(
        "tensor {key:?}: {part} of axis {axis} is not divisible by {by}={size} (choose a divisor of {part} as {by})"
    )]
    Indivisible {
        /// The tensor.
        key: String,
        /// The axis.
        axis: usize,
        /// Extent of one fragment of it, in elements.
        part: usize,
        /// The group's size, by name.
        by: &'static str,
        /// Ranks in the group.
        size: usize,
    },
    /// A description of a tensor that contradicts itself.
    #[error("tensor {key:?}: {field}={value}, expected {expected} (correct the layout)")]
    Layout {
        /// The tensor.
        key: String,
        /// The field at fault.
        field: &'static str,
        /// Its value.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// A tensor described twice.
    #[error("tensor {key:?} appears twice (give each tensor a key of its own)")]
    DuplicateKey {
        /// The tensor.
        key: String,
    },
    /// A tensor of which no shard holds some part.
    #[error(
        "tensor {key:?}: the shards hold {covered} of {wanted} elements (a shard is missing: restore its file, or save again)"
    )]
    Gap {
        /// The tensor.
        key: String,
        /// Elements that are there.
        covered: usize,
        /// Elements that are needed.
        wanted: usize,
    },
    /// Two shards of one tensor that hold the same part.
    #[error("tensor {key:?}: shards {first} and {second} hold the same elements (leave one out)")]
    Overlap {
        /// The tensor.
        key: String,
        /// Index of one shard.
        first: usize,
        /// Index of the other.
        second: usize,
    },
    /// Two files that hold the same part of a tensor.
    #[error("tensor {key:?}: {first} and {second} hold the same elements (save again)")]
    DuplicateShard {
        /// The tensor.
        key: String,
        /// One file.
        first: String,
        /// The other.
        second: String,
    },
    /// A manifest that contradicts itself.
    #[error("{path}: {source}")]
    Manifest {
        /// The file.
        path: PathBuf,
        /// The contradiction.
        source: Box<CheckpointError>,
    },
    /// A manifest or part that is not JSON of the right fields.
    #[error("{path} is not a {format} file: {source} (restore it, or save again)")]
    Document {
        /// The file.
        path: PathBuf,
        /// What it should be.
        format: &'static str,
        /// The parser's answer.
        source: serde_json::Error,
    },
    /// A manifest or part larger than any real one.
    #[error(
        "{path} has {bytes} bytes, more than the {limit} read of a manifest (check that it is the right file)"
    )]
    DocumentTooLarge {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// The longest length read.
        limit: u64,
    },
    /// A JSON file of another format.
    #[error("{path} has format {found:?}, expected {expected:?} (check that it is the right file)")]
    Format {
        /// The file.
        path: PathBuf,
        /// The format it names.
        found: String,
        /// The format needed.
        expected: &'static str,
    },
    /// A version that is not known here.
    #[error(
        "{path} has version {version}, supported is {supported} (read it with a later release)"
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The version it names.
        version: u64,
        /// The only version read.
        supported: u64,
    },
    /// A manifest or part whose contents changed after it was written.
    #[error(
        "{path} has contents of crc32 {found:08x}, its header says {declared} (it is damaged or was edited: restore it)"
    )]
    DocumentChecksum {
        /// The file.
        path: PathBuf,
        /// Checksum of the contents.
        found: u32,
        /// Checksum that the file names.
        declared: String,
    },
    /// A shard's file that is not in the folder itself.
    #[error(
        "tensor {key:?} names the file {name:?}, which is not a plain .safetensors file name (shards must lie in the checkpoint's own folder)"
    )]
    FileName {
        /// The tensor.
        key: String,
        /// The name of the file.
        name: String,
    },
    /// A shard that is not what the manifest says.
    #[error(
        "{path}: tensor {key:?} is {found}, the manifest says {expected} (restore the file, or save again)"
    )]
    Stored {
        /// The shard's file.
        path: PathBuf,
        /// The tensor.
        key: String,
        /// Type and shape in the file.
        found: String,
        /// Type and shape in the manifest.
        expected: String,
    },
    /// A tensor in a shard's file that the manifest does not know.
    #[error("{path}: tensor {key:?} is not in the manifest (restore the file, or save again)")]
    Stray {
        /// The file.
        path: PathBuf,
        /// The tensor.
        key: String,
    },
    /// Data that changed after it was written.
    #[error(
        "{path}: tensor {key:?} is damaged in bytes {begin}..{end} of its shard: crc32 {found:08x}, the manifest says {expected:08x} (restore the file)"
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The tensor.
        key: String,
        /// First byte of the damaged block, counted in the shard.
        begin: usize,
        /// End of the damaged block.
        end: usize,
        /// Checksum of the block.
        found: u32,
        /// Checksum in the manifest.
        expected: u32,
    },
    /// Data that the operating system does not hand out.
    #[error("{path}: cannot read tensor {key:?}: {source} (restore the file)")]
    Read {
        /// The file.
        path: PathBuf,
        /// The tensor.
        key: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A load that the chosen strictness refuses.
    #[error("nothing was loaded: {report} (choose another checkpoint or strictness)")]
    Refused {
        /// What would have been loaded.
        report: Box<LoadReport>,
    },
    /// Bytes to be saved that do not fill their shape.
    #[error(
        "tensor {key:?} came with {found} bytes, its local shape takes {expected} (hand over the rank's own part)"
    )]
    ByteCount {
        /// The tensor.
        key: String,
        /// Bytes handed over.
        found: usize,
        /// Bytes of the local shape.
        expected: usize,
    },
    /// An alpha that JSON cannot hold.
    #[error(
        "adapter {path:?} has alpha={alpha}, expected a finite number (correct its configuration)"
    )]
    Alpha {
        /// The adapter.
        path: String,
        /// Its alpha.
        alpha: f64,
    },
    /// A checkpoint whose number of saves cannot be counted up.
    #[error("{path}: generation={generation} is the last there is (save into an empty folder)")]
    LastGeneration {
        /// The manifest.
        path: PathBuf,
        /// Its generation.
        generation: u64,
    },
    /// A rank whose part of a save is not there.
    #[error("the part of {place} is missing: no {path} (every rank writes before one commits)")]
    MissingPart {
        /// The rank's place.
        place: String,
        /// Where its part should be.
        path: PathBuf,
    },
    /// Ranks that do not save the same thing.
    #[error(
        "{place} saved {what} {found}, the committing rank {expected} (save on all ranks at the same step)"
    )]
    Disagreement {
        /// The rank's place.
        place: String,
        /// What differs.
        what: &'static str,
        /// Its value on that rank.
        found: String,
        /// Its value on the committing rank.
        expected: String,
    },
    /// Ranks that describe one tensor differently.
    #[error(
        "tensor {key:?} has one layout on {first} and another on {second} (build the same adapters on all ranks)"
    )]
    LayoutDiffers {
        /// The tensor.
        key: String,
        /// One rank's place.
        first: String,
        /// The other's.
        second: String,
    },
    /// Replicas that should be equal to the bit and are not.
    #[error(
        "tensor {key:?} differs between its replicas on {first} and {second}, first in bytes {begin}..{end} of the shard (sum the gradients of replicas before the optimizer's step, and start replicas equal)"
    )]
    UnequalReplicas {
        /// The tensor.
        key: String,
        /// Place of the replica that was written.
        first: String,
        /// Place of the one that differs.
        second: String,
        /// First byte of the first block that differs, counted in the shard.
        begin: usize,
        /// End of that block.
        end: usize,
    },
}
