//! Writing a checkpoint from many ranks, so that it counts only once it is whole.

use crate::checksum::PIECE_BYTES;
use crate::storage::{Disk, NewFile, Storage, TEMPORARY};
use crate::{
    AdapterEntry, BLOCK_BYTES, BlockChecksums, CheckpointError, GroupSizes, Manifest, Place,
    ShardedTensor, TensorLayout,
};
use moe_lora_files::FileError;
use safetensors::tensor::{Metadata, TensorInfo};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

mod part;

use part::{Part, PartTensor, merge};

/// One rank's side of a save into a folder that all ranks share.
///
/// 1. Every rank: [`begin`](Self::begin) and [`write`](Self::write).
/// 2. A barrier of the caller's.
/// 3. One rank: [`commit`](Self::commit). The others drop theirs.
/// 4. A barrier, before any rank begins the next save.
///
/// Until the manifest is renamed, as the last write of `commit`, the folder holds the previous
/// checkpoint, whole; a save that was killed leaves files that the next one replaces or removes.
pub struct Save {
    folder: PathBuf,
    place: Place,
    step: u64,
    generation: u64,
    storage: Box<dyn Storage>,
}

impl Save {
    /// Starts the save that follows the folder's present checkpoint; creates the folder.
    ///
    /// # Errors
    ///
    /// When the folder cannot be written to, its present manifest is damaged, or its generation is
    /// the last that there is.
    pub fn begin(folder: &Path, place: Place, step: u64) -> Result<Self, CheckpointError> {
        Self::begin_on(Box::new(Disk), folder, place, step)
    }

    fn begin_on(
        storage: Box<dyn Storage>,
        folder: &Path,
        place: Place,
        step: u64,
    ) -> Result<Self, CheckpointError> {
        fs::create_dir_all(folder).map_err(FileError::io("create", folder))?;
        let manifest = Manifest::path(folder);
        let exists = manifest.try_exists();
        let exists = exists.map_err(FileError::io("open", &manifest))?;
        let present = if exists {
            Manifest::read(folder)?.generation
        } else {
            0
        };
        // The same number again would replace files that the present manifest names.
        let next = present.checked_add(1);
        let generation = next.ok_or(CheckpointError::LastGeneration {
            path: manifest,
            generation: present,
        })?;
        let save = Self {
            folder: folder.to_owned(),
            place,
            step,
            generation,
            storage,
        };
        // That of a killed save must not pass for this one's.
        let part = save.part_path(&place);
        save.storage
            .remove(&part)
            .map_err(FileError::io("remove", &part))?;
        Ok(save)
    }

    /// Number of this save.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Writes this rank's shards and a note of what they are.
    ///
    /// `bytes` is asked for the little-endian bytes of one shard after another, of the local shape
    /// and last axis fastest, and none is kept. Replicas are asked for too: they are compared, not
    /// stored.
    ///
    /// # Errors
    ///
    /// When a layout does not fit the topology, a key comes twice, bytes do not fill their shape,
    /// `bytes` fails, or a file cannot be written.
    pub fn write<'a>(
        &self,
        layouts: &[TensorLayout],
        mut bytes: impl FnMut(&ShardedTensor) -> Result<Cow<'a, [u8]>, CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let shard = |layout: &TensorLayout| layout.shard(&self.place);
        let mut shards: Vec<_> = layouts.iter().map(shard).collect::<Result<_, _>>()?;
        // Wide elements first, so that every tensor of a file is aligned to its own.
        shards.sort_by(|a, b| {
            let width = b.dtype.bitsize().cmp(&a.dtype.bitsize());
            width.then_with(|| a.key.cmp(&b.key))
        });
        let mut tensors: BTreeMap<&str, PartTensor> = BTreeMap::new();
        for layout in layouts {
            let tensor = PartTensor {
                layout: layout.clone(),
                crc32: BlockChecksums::default(),
            };
            if tensors.insert(&layout.key, tensor).is_some() {
                let key = layout.key.clone();
                return Err(CheckpointError::DuplicateKey { key });
            }
        }

        let mut file = None;
        if shards.iter().any(|shard| shard.replica == 0) {
            let path = self.folder.join(self.shard_name(&self.place));
            let mut new = NewFile::create(&*self.storage, path)?;
            new.append(&header(&shards))?;
            file = Some(new);
        }
        for shard in &shards {
            let data = bytes(shard)?;
            if data.len() != shard.byte_len() {
                return Err(CheckpointError::ByteCount {
                    key: shard.key.clone(),
                    found: data.len(),
                    expected: shard.byte_len(),
                });
            }
            let tensor = tensors
                .get_mut(&*shard.key)
                .expect("each shard has a layout");
            for piece in data.chunks(PIECE_BYTES) {
                for block in piece.chunks(BLOCK_BYTES) {
                    tensor.crc32.push(block);
                }
                if let (0, Some(file)) = (shard.replica, &mut file) {
                    file.append(piece)?;
                }
            }
        }
        if let Some(file) = file {
            file.finish()?;
        }
        let part = Part {
            generation: self.generation,
            step: self.step,
            topology: *self.place.sizes(),
            tensors: tensors.into_values().collect(),
        };
        part.write(&*self.storage, &self.part_path(&self.place))?;
        self.sync_folder()
    }

    /// Checks what all ranks wrote and makes it the folder's checkpoint; removes the previous one.
    ///
    /// # Errors
    ///
    /// When a rank's part is missing or of another save, ranks disagree on step, topology or layout,
    /// replicas differ in a bit, a tensor is not covered exactly once, or the manifest cannot be
    /// written. The previous checkpoint then stays.
    pub fn commit(
        self,
        adapters: BTreeMap<String, AdapterEntry>,
    ) -> Result<Manifest, CheckpointError> {
        let places = self.place.sizes().places()?;
        let parts = places.map(|place| Ok((place, self.read_part(&place)?)));
        let tensors = merge(parts, |place| self.shard_name(place))?;
        let manifest = Manifest {
            generation: self.generation,
            step: self.step,
            topology: *self.place.sizes(),
            adapters,
            tensors,
        };
        manifest.write(&*self.storage, &self.folder)?;
        self.sync_folder()?;
        self.remove_stale(&manifest);
        Ok(manifest)
    }

    fn read_part(&self, place: &Place) -> Result<Part, CheckpointError> {
        let path = self.part_path(place);
        if !path.try_exists().map_err(FileError::io("open", &path))? {
            let place = place.to_string();
            return Err(CheckpointError::MissingPart { place, path });
        }
        let part = Part::read(&path)?;
        let topology = |sizes: &GroupSizes| format!("{sizes:?}");
        for (what, found, expected) in [
            (
                "generation",
                part.generation.to_string(),
                self.generation.to_string(),
            ),
            ("step", part.step.to_string(), self.step.to_string()),
            (
                "topology",
                topology(&part.topology),
                topology(self.place.sizes()),
            ),
        ] {
            if found != expected {
                return Err(CheckpointError::Disagreement {
                    place: place.to_string(),
                    what,
                    found,
                    expected,
                });
            }
        }
        Ok(part)
    }

    /// Removes the files of other saves. A file that cannot be removed does no harm, and the next
    /// save tries again.
    fn remove_stale(&self, manifest: &Manifest) {
        let kept = manifest.files();
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if is_of_a_save(&name) && !kept.contains(&*name) {
                let _ = self.storage.remove(&entry.path());
            }
        }
    }

    fn sync_folder(&self) -> Result<(), CheckpointError> {
        let synced = self.storage.sync_folder(&self.folder);
        Ok(synced.map_err(FileError::io("write to", &self.folder))?)
    }

    fn shard_name(&self, place: &Place) -> String {
        format!("g{}-{place}.safetensors", self.generation)
    }

    fn part_path(&self, place: &Place) -> PathBuf {
        self.folder
            .join(format!("g{}-{place}.part.json", self.generation))
    }
}

/// Length and header of the safetensors file of the shards with number 0, in their order.
fn header(shards: &[ShardedTensor]) -> Vec<u8> {
    let mut end = 0;
    let stored = shards.iter().filter(|shard| shard.replica == 0);
    let infos = stored.map(|shard| {
        let begin = end;
        end += shard.byte_len();
        let info = TensorInfo {
            dtype: shard.dtype,
            shape: shard.local_shape.clone(),
            data_offsets: (begin, end),
        };
        (shard.key.clone(), info)
    });
    let metadata = Metadata::new(None, infos.collect()).expect("offsets are contiguous");
    let mut text = serde_json::to_vec(&metadata).expect("a header is plain JSON");
    // Keeps the data aligned to eight bytes.
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// Whether a save gave a file its name: `g3-ep0-etp1-dp0.safetensors` and the like.
fn is_of_a_save(name: &str) -> bool {
    let name = name.strip_suffix(TEMPORARY).unwrap_or(name);
    let stem = name
        .strip_suffix(".safetensors")
        .or(name.strip_suffix(".part.json"));
    let mut words = stem.unwrap_or_default().split('-');
    let numbered = |prefix: &str, word: Option<&str>| {
        let digits = word.and_then(|word| word.strip_prefix(prefix));
        digits
            .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
    };
    ["g", "ep", "etp", "dp"]
        .into_iter()
        .all(|prefix| numbered(prefix, words.next()))
        && words.next().is_none()
}

#[cfg(all(test, unix))]
mod killed;
