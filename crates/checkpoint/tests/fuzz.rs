//! Arbitrary and mutated files, for a bounded time: a checkpoint is read as it was saved or refused,
//! without a panic and without more memory than its files have.

mod folders;

use folders::{adapters, full};
use moe_lora_checkpoint::{
    Axis, BLOCK_BYTES, Checkpoint, Dtype, GroupSizes, Manifest, Save, TensorLayout,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::io::{Seek, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// The largest single allocation since it was last reset.
struct Largest;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator with the arguments it came with.
unsafe impl GlobalAlloc for Largest {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is the one needed.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is the one needed.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: the caller's promise is the one needed.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is the one needed.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Largest = Largest;

const TIME: Duration = Duration::from_secs(3);

fn layouts() -> [TensorLayout; 2] {
    let experts = TensorLayout::new("b", Dtype::U8, [2, 4, 3])
        .with_axis(0, Axis::Ep)
        .with_axis(1, Axis::ExpertTp)
        .with_fragments(1, 2);
    [experts, TensorLayout::new("time", Dtype::I64, [])]
}

/// A small checkpoint and its files' bytes.
struct Sample {
    folder: TempDir,
    manifest: Vec<u8>,
    shard: Vec<u8>,
}

impl Sample {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        folders::save(folder.path(), GroupSizes::new(1, 2), &layouts(), 1);
        let manifest = fs::read(Manifest::path(folder.path())).unwrap();
        let shard = fs::read(folder.path().join("g1-ep0-etp0-dp0.safetensors")).unwrap();
        Self {
            folder,
            manifest,
            shard,
        }
    }

    fn shard_path(&self) -> PathBuf {
        self.folder.path().join("g1-ep0-etp0-dp0.safetensors")
    }

    /// Opens and reads everything. Whatever is handed out was saved so, if `same` says that the
    /// manifest is the saved one.
    fn read(&self, same: bool) {
        LARGEST.store(0, Ordering::Relaxed);
        if let Ok(checkpoint) = Checkpoint::open(self.folder.path()) {
            let keys = checkpoint.manifest().tensors.iter();
            let keys: Vec<_> = keys.map(|entry| entry.layout.key.clone()).collect();
            for key in keys {
                let tensor = checkpoint.full(&key);
                let layout = layouts().into_iter().find(|layout| layout.key == key);
                if let (true, Ok(tensor), Some(layout)) = (same, tensor, layout) {
                    assert_eq!(tensor.bytes, full(&layout, 1));
                }
            }
        }
        // Text grows into values of several times its size; one block is read at a time.
        let files = fs::read_dir(self.folder.path()).unwrap();
        let files: u64 = files
            .map(|file| file.unwrap().metadata().unwrap().len())
            .sum();
        let (largest, limit) = (
            LARGEST.load(Ordering::Relaxed),
            64 * files as usize + BLOCK_BYTES,
        );
        assert!(largest <= limit, "{largest} of at most {limit} bytes");
    }
}

/// Replaces a file's bytes in place: a truncated or new file may wait for the disk.
fn put(path: PathBuf, bytes: &[u8]) {
    let mut file = fs::File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .unwrap();
    file.write_all(bytes).unwrap();
    let end = file.stream_position().unwrap();
    file.set_len(end).unwrap();
}

/// Overwrites, removes or inserts a few bytes, as the edits say. Every second edit keeps the length,
/// or few mutated files would get past its check.
fn mutate(good: &[u8], edits: &[(u16, u8, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for (at, cut, new) in edits.iter().take(4) {
        let new = &new[..new.len().min(8)];
        let at = usize::from(*at) % (bytes.len() + 1);
        if cut % 2 == 0 {
            let end = bytes.len().min(at + new.len());
            bytes[at..end].copy_from_slice(&new[..end - at]);
        } else {
            let end = bytes.len().min(at + usize::from(cut / 2 % 8));
            bytes.splice(at..end, new.iter().copied());
        }
    }
    bytes
}

/// A document around any contents, signed.
fn signed(format: &str, contents: &[u8]) -> Vec<u8> {
    let crc32 = crc32fast::hash(contents);
    let mut text =
        format!(r#"{{"format": "{format}", "version": 1, "crc32": "{crc32:08x}", "contents": "#)
            .into_bytes();
    text.extend(contents);
    text.push(b'}');
    text
}

fn contents(document: &[u8]) -> Vec<u8> {
    let text = String::from_utf8(document.to_vec()).unwrap();
    let begin = text.find("\"contents\": ").unwrap() + 12;
    let end = text.rfind('}').unwrap();
    text[begin..end].trim_end().as_bytes().to_vec()
}

type Edits = Vec<(u16, u8, Vec<u8>)>;

#[test]
fn any_bytes_as_a_manifest() {
    let sample = Sample::new();
    let path = Manifest::path(sample.folder.path());
    bolero::check!()
        .with_max_len(256)
        .with_test_time(TIME)
        .for_each(|bytes: &[u8]| {
            put(path.clone(), bytes);
            sample.read(false);
            put(path.clone(), &signed("moe-lora-checkpoint", bytes));
            sample.read(false);
        });
}

#[test]
fn a_mutated_manifest() {
    let sample = Sample::new();
    let path = Manifest::path(sample.folder.path());
    let contents = contents(&sample.manifest);
    put(path.clone(), &signed("moe-lora-checkpoint", &contents));
    Checkpoint::open(sample.folder.path()).expect("the signature is right");
    bolero::check!()
        .with_type::<Edits>()
        .with_test_time(TIME)
        .for_each(|edits| {
            put(
                path.clone(),
                &signed("moe-lora-checkpoint", &mutate(&contents, edits)),
            );
            sample.read(false);
            put(path.clone(), &mutate(&sample.manifest, edits));
            sample.read(true);
        });
}

/// Random digits seldom make a contradiction that a parser lets pass; random fields do.
#[test]
fn a_manifest_of_mutated_numbers() {
    let sample = Sample::new();
    let path = Manifest::path(sample.folder.path());
    let manifest = Manifest::read(sample.folder.path()).unwrap();
    bolero::check!()
        .with_type::<(u8, u8, u8, u64, u8)>()
        .with_test_time(TIME)
        .for_each(|&(tensor, field, axis, value, shift)| {
            let mut manifest = manifest.clone();
            let value = (value >> (shift % 64)) as usize;
            let count = manifest.tensors.len();
            let entry = &mut manifest.tensors[usize::from(tensor) % count];
            let shard = usize::from(shift) % entry.shards.len();
            let axes = entry.layout.shape.len().max(1);
            let set = |extents: &mut Vec<usize>| {
                extents.resize(axes, 0);
                extents[usize::from(axis) % axes] = value;
            };
            match field % 6 {
                0 => set(&mut entry.layout.shape),
                1 => set(&mut entry.layout.fragments),
                2 => set(&mut entry.shards[shard].offset),
                3 => set(&mut entry.shards[shard].shape),
                4 => entry.shards.truncate(shard),
                // A tensor that is larger as a whole, without a contradiction.
                _ => {
                    let scale = |extents: &mut Vec<usize>| {
                        for extent in extents.iter_mut().skip(2) {
                            *extent = extent.wrapping_mul(value);
                        }
                    };
                    scale(&mut entry.layout.shape);
                    for shard in &mut entry.shards {
                        scale(&mut shard.offset);
                        scale(&mut shard.shape);
                    }
                }
            }
            let contents = serde_json::to_vec(&manifest).unwrap();
            put(path.clone(), &signed("moe-lora-checkpoint", &contents));
            sample.read(false);
        });
}

#[test]
fn a_mutated_shard_file() {
    let sample = Sample::new();
    bolero::check!()
        .with_type::<Edits>()
        .with_test_time(TIME)
        .for_each(|edits| {
            put(sample.shard_path(), &mutate(&sample.shard, edits));
            sample.read(true);
        });
}

#[test]
fn any_bytes_as_a_shard_file() {
    let sample = Sample::new();
    bolero::check!()
        .with_max_len(256)
        .with_test_time(TIME)
        .for_each(|bytes: &[u8]| {
            put(sample.shard_path(), bytes);
            sample.read(true);
            let mut framed = (bytes.len() as u64).to_le_bytes().to_vec();
            framed.extend(bytes);
            put(sample.shard_path(), &framed);
            sample.read(true);
        });
}

#[test]
fn a_mutated_part() {
    let sample = Sample::new();
    let place = GroupSizes::new(1, 1).place(0).unwrap();
    let begin = || Save::begin(sample.folder.path(), place, 2).unwrap();
    let path = sample.folder.path().join("g2-ep0-etp0-dp0.part.json");
    begin().write(&[], |_| unreachable!("no shards")).unwrap();
    let good = contents(&fs::read(&path).unwrap());
    bolero::check!()
        .with_type::<Edits>()
        .with_test_time(TIME)
        .for_each(|edits| {
            let save = begin();
            put(
                path.clone(),
                &signed("moe-lora-checkpoint-part", &mutate(&good, edits)),
            );
            if save.commit(adapters()).is_ok() {
                // A change of blanks. Back to the generation that the part is of.
                put(Manifest::path(sample.folder.path()), &sample.manifest);
            }
        });
}
