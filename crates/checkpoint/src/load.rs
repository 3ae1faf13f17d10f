//! Opening a checkpoint and loading the tensors of a rank at any topology.

use crate::reader::{BlockBuffer, ShardReader};
use crate::report::{MismatchedTensor, MissingTensor};
use crate::{
    CheckpointError, LoadReport, Manifest, ShardedTensor, Strictness, TensorEntry, Transfer, plan,
};
use moe_lora_files::{FileError, TensorFile, nearest_name};
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Missing tensors for which a near name is looked for; the comparison is with every stored one.
const NEAR_NAMES: usize = 16;

/// Threads that read: while one verifies, the other copies. One alone loads from the page cache at
/// 0.73 to 0.79 of the speed of reads that verify nothing.
const READERS: usize = 2;

/// An open checkpoint: its manifest, and its files with their headers checked against it.
///
/// The files stay open, so that a save which replaces the checkpoint does not take them away.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    files: BTreeMap<String, ShardFile>,
}

#[derive(Debug)]
struct ShardFile {
    path: PathBuf,
    file: File,
    /// Where the bytes of each tensor are in the file.
    ranges: BTreeMap<String, Range<usize>>,
}

/// The loaded tensors by key.
pub type Loaded = BTreeMap<String, LoadedTensor>;

/// A shard in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedTensor {
    /// Element type.
    pub dtype: Dtype,
    /// Local extents.
    pub shape: Vec<usize>,
    /// Little-endian elements, last axis fastest.
    pub bytes: Vec<u8>,
}

impl Checkpoint {
    /// Opens the checkpoint in a folder and checks everything but the data itself.
    ///
    /// # Errors
    ///
    /// When the manifest is absent, damaged or contradicts itself, or a file is absent, cut short,
    /// or holds other tensors, types or shapes than the manifest says.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(folder)?;
        let mut open: BTreeMap<&str, TensorFile> = BTreeMap::new();
        let mut files: BTreeMap<String, ShardFile> = BTreeMap::new();
        for entry in &manifest.tensors {
            let key = &entry.layout.key;
            for shard in &entry.shards {
                if !open.contains_key(&*shard.file) {
                    let path = folder.join(&shard.file);
                    let fault = |source| CheckpointError::Shard {
                        key: key.clone(),
                        source: Box::new(source),
                    };
                    let tensors = TensorFile::open(path.clone()).map_err(fault)?;
                    let file = File::open(&path).map_err(FileError::io("open", &path))?;
                    open.insert(&shard.file, tensors);
                    let ranges = BTreeMap::new();
                    files.insert(shard.file.clone(), ShardFile { path, file, ranges });
                }
                let (tensors, file) = (&open[&*shard.file], files.get_mut(&shard.file));
                let file = file.expect("opened above");
                let info = tensors.info(key)?;
                let found = format!("{} {:?}", info.dtype, info.shape);
                let expected = format!("{} {:?}", entry.layout.dtype, shard.shape);
                if found != expected {
                    return Err(CheckpointError::Stored {
                        path: file.path.clone(),
                        key: key.clone(),
                        found,
                        expected,
                    });
                }
                file.ranges.insert(key.clone(), tensors.byte_range(key)?);
            }
        }
        for (name, tensors) in &open {
            let known = &files[*name].ranges;
            if let Some(key) = tensors.names().find(|key| !known.contains_key(*key)) {
                return Err(CheckpointError::Stray {
                    path: tensors.path().to_owned(),
                    key: key.to_owned(),
                });
            }
        }
        Ok(Self {
            folder: folder.to_owned(),
            manifest,
            files,
        })
    }

    /// What it holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Loads the shards of one rank, all of them or none.
    ///
    /// Reads the blocks that hold a byte of them and no others, verifies each, and takes no memory
    /// beside the tensors but two blocks.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Refused`] with the report when `strictness` does not accept what is there;
    /// a contradiction in `wanted`; a block that cannot be read or is damaged.
    pub fn load(
        &self,
        wanted: &[ShardedTensor],
        strictness: Strictness,
    ) -> Result<(Loaded, LoadReport), CheckpointError> {
        let mut keys = BTreeSet::new();
        for shard in wanted {
            shard.check()?;
            if !keys.insert(&*shard.key) {
                let key = shard.key.clone();
                return Err(CheckpointError::DuplicateKey { key });
            }
        }
        let mut report = LoadReport::default();
        let mut plans = Vec::new();
        let stored = self.manifest.tensors.iter();
        let unexpected = stored.map(|entry| &entry.layout.key);
        report.unexpected = unexpected
            .filter(|key| !keys.contains(&***key))
            .cloned()
            .collect();
        for shard in wanted {
            let key = shard.key.clone();
            let Some(entry) = self.manifest.tensor(&key) else {
                let unexpected = report.unexpected.iter().map(String::as_str);
                let search = report.missing.len() < NEAR_NAMES;
                let near = search.then(|| nearest_name(&key, unexpected)).flatten();
                report.missing.push(MissingTensor { key, near });
                continue;
            };
            let layout = &entry.layout;
            let found = (layout.dtype, layout.shape.clone());
            let expected = (shard.dtype, shard.global_shape.clone());
            if found != expected {
                report.mismatched.push(MismatchedTensor {
                    key,
                    found,
                    expected,
                });
                continue;
            }
            let plan = Plan::new(entry, shard)?;
            if plan.is_resharded() {
                report.resharded.push(key.clone());
            }
            report.applied.push(key);
            plans.push(plan);
        }
        if !report.is_accepted(strictness) {
            let report = Box::new(report);
            return Err(CheckpointError::Refused { report });
        }
        let loaded = self.execute_all(&plans)?;
        Ok((loaded, report))
    }

    /// The bytes of one shard.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load) with [`Strictness::AllowUnexpected`].
    pub fn read(&self, wanted: &ShardedTensor) -> Result<Vec<u8>, CheckpointError> {
        let wanted = std::slice::from_ref(wanted);
        let (mut loaded, _) = self.load(wanted, Strictness::AllowUnexpected)?;
        let (_, tensor) = loaded.pop_first().expect("what is wanted was loaded");
        Ok(tensor.bytes)
    }

    /// One whole tensor.
    ///
    /// # Errors
    ///
    /// When there is none of this key, or a block cannot be read or is damaged.
    pub fn full(&self, key: &str) -> Result<LoadedTensor, CheckpointError> {
        let Some(entry) = self.manifest.tensor(key) else {
            let keys = self.manifest.tensors.iter().map(|entry| &*entry.layout.key);
            return Err(FileError::unknown_tensor(&self.folder, key, keys).into());
        };
        let whole = entry.layout.whole();
        Ok(LoadedTensor {
            dtype: whole.dtype,
            bytes: self.execute(&Plan::new(entry, &whole)?)?,
            shape: whole.local_shape,
        })
    }

    fn execute_all(&self, plans: &[Plan]) -> Result<Loaded, CheckpointError> {
        let next = AtomicUsize::new(0);
        let read = || -> Result<Loaded, CheckpointError> {
            let mut loaded = Loaded::new();
            while let Some(plan) = plans.get(next.fetch_add(1, Ordering::Relaxed)) {
                // The tensors after one that failed are of no use.
                let stop = |_: &CheckpointError| next.store(plans.len(), Ordering::Relaxed);
                let tensor = LoadedTensor {
                    dtype: plan.wanted.dtype,
                    shape: plan.wanted.local_shape.clone(),
                    bytes: self.execute(plan).inspect_err(stop)?,
                };
                loaded.insert(plan.wanted.key.clone(), tensor);
            }
            Ok(loaded)
        };
        thread::scope(|scope| {
            let others = (1..READERS.min(plans.len())).map(|_| scope.spawn(read));
            let others: Vec<_> = others.collect();
            let mut loaded = read()?;
            for other in others {
                loaded.append(&mut other.join().expect("a reader does not panic")?);
            }
            Ok(loaded)
        })
    }

    fn execute(&self, plan: &Plan) -> Result<Vec<u8>, CheckpointError> {
        // The stored shards fill the tensor and lie in files of their size: this cannot be more
        // than those hold.
        let mut bytes = vec![0; plan.wanted.byte_len()];
        let mut buffer = BlockBuffer::default();
        for transfer in &plan.transfers {
            let shard = &plan.entry.shards[transfer.source];
            let file = &self.files[&shard.file];
            buffer.clear();
            let mut reader = ShardReader {
                path: &file.path,
                key: &plan.wanted.key,
                file: &file.file,
                range: file.ranges[&plan.wanted.key].clone(),
                checksums: shard.crc32.blocks(),
                buffer: &mut buffer,
            };
            transfer.runs(&plan.stored[transfer.source], plan.wanted, |run| {
                reader.copy(run.source, &mut bytes[run.target..run.target + run.len])
            })?;
        }
        Ok(bytes)
    }
}

/// How one wanted shard comes from the stored ones.
struct Plan<'a> {
    entry: &'a TensorEntry,
    stored: Vec<ShardedTensor>,
    wanted: &'a ShardedTensor,
    transfers: Vec<Transfer>,
}

impl<'a> Plan<'a> {
    fn new(entry: &'a TensorEntry, wanted: &'a ShardedTensor) -> Result<Self, CheckpointError> {
        let stored = entry.sharded();
        Ok(Self {
            transfers: plan(&stored, wanted)?,
            entry,
            stored,
            wanted,
        })
    }

    fn is_resharded(&self) -> bool {
        let same =
            |transfer: &Transfer| transfer.is_same(&self.stored[transfer.source], self.wanted);
        !self.transfers.iter().all(same)
    }
}
