//! Saves stopped at every operation, by a kill and by a power cut.

use super::*;
use crate::{Axis, Checkpoint, Dtype, LoadedTensor};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// What a power cut takes of the renames after the folder was last synchronised. A kill takes none.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lost {
    None,
    All,
    AllButLast,
}

/// A disk that stops before its `left`-th operation, or halfway through it when that is a write.
struct Stopping {
    left: AtomicUsize,
    /// Inodes of files whose contents are not yet durable.
    unsynced: Mutex<BTreeSet<u64>>,
    /// Renames that are not yet durable: to, from, and a link to what they replaced.
    renames: Mutex<Vec<(PathBuf, PathBuf, Option<PathBuf>)>>,
    links: TempDir,
}

impl Stopping {
    fn new(left: usize) -> Arc<Self> {
        Arc::new(Self {
            left: AtomicUsize::new(left),
            unsynced: Mutex::default(),
            renames: Mutex::default(),
            links: TempDir::new().unwrap(),
        })
    }

    fn stop(&self) -> io::Result<()> {
        let less = |left: usize| left.checked_sub(1);
        let left = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        left.map(|_| ()).map_err(|_| io::Error::other("stopped"))
    }

    /// Takes from the folder what was not durable.
    fn cut_power(&self, folder: &Path, lost: Lost) {
        if lost == Lost::None {
            return;
        }
        let mut renames = self.renames.lock().unwrap();
        if lost == Lost::AllButLast {
            renames.pop();
        }
        for (to, from, replaced) in renames.drain(..).rev() {
            // A later removal of the file stays.
            let _ = fs::rename(&to, &from);
            if let Some(link) = replaced {
                fs::rename(link, to).unwrap();
            }
        }
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let metadata = fs::metadata(&path).unwrap();
            if self.unsynced.lock().unwrap().contains(&metadata.ino()) {
                let file = File::options().write(true).open(&path).unwrap();
                file.set_len(metadata.len() / 2).unwrap();
            }
        }
    }
}

impl Storage for Arc<Stopping> {
    fn create(&self, path: &Path) -> io::Result<File> {
        self.stop()?;
        let file = Disk.create(path)?;
        self.unsynced.lock().unwrap().insert(file.metadata()?.ino());
        Ok(file)
    }

    fn append(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        if let Err(stopped) = self.stop() {
            Disk.append(file, &bytes[..bytes.len() / 2])?;
            return Err(stopped);
        }
        Disk.append(file, bytes)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        self.stop()?;
        // What is durable is kept in the books here; a real wait for the disk would only take time.
        self.unsynced
            .lock()
            .unwrap()
            .remove(&file.metadata()?.ino());
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.stop()?;
        let mut renames = self.renames.lock().unwrap();
        let link = self.links.path().join(renames.len().to_string());
        let _ = fs::remove_file(&link);
        let replaced = fs::hard_link(to, &link).is_ok().then_some(link);
        renames.push((to.to_owned(), from.to_owned(), replaced));
        Disk.rename(from, to)
    }

    fn sync_folder(&self, _: &Path) -> io::Result<()> {
        self.stop()?;
        self.renames.lock().unwrap().clear();
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.stop()?;
        Disk.remove(path)
    }
}

const KEYS: [&str; 2] = ["experts.lora_B", "time"];

fn layouts() -> Vec<TensorLayout> {
    let experts = TensorLayout::new(KEYS[0], Dtype::U8, [4, 8, 3])
        .with_axis(0, Axis::Ep)
        .with_axis(1, Axis::ExpertTp)
        .with_fragments(1, 2);
    vec![experts, TensorLayout::new(KEYS[1], Dtype::I64, [])]
}

/// Saves from every rank in turn and commits; the bytes tell the steps apart.
fn save(
    disk: &Arc<Stopping>,
    folder: &Path,
    sizes: GroupSizes,
    step: u64,
) -> Result<(), CheckpointError> {
    let mut first = None;
    for place in sizes.places()? {
        let save = Save::begin_on(Box::new(Arc::clone(disk)), folder, place, step)?;
        save.write(&layouts(), |shard| {
            Ok(vec![step as u8; shard.byte_len()].into())
        })?;
        first.get_or_insert(save);
    }
    first.unwrap().commit(BTreeMap::new())?;
    Ok(())
}

/// The step of the folder's checkpoint, whose tensors are all of that step.
fn step(folder: &Path) -> u64 {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let step = checkpoint.manifest().step;
    for key in KEYS {
        let LoadedTensor { bytes, .. } = checkpoint.full(key).unwrap();
        assert!(bytes.iter().all(|byte| u64::from(*byte) == step), "{key}");
    }
    step
}

#[test]
fn a_save_stopped_at_any_operation_leaves_a_whole_checkpoint_and_the_next_one_succeeds() {
    let (old, new) = (GroupSizes::new(2, 2), GroupSizes::new(1, 2).with_world(4));
    for lost in [Lost::None, Lost::All, Lost::AllButLast] {
        let (mut kept, mut replaced) = (0, 0);
        for left in 0.. {
            let folder = TempDir::new().unwrap();
            let folder = folder.path();
            save(&Stopping::new(usize::MAX), folder, old, 1).unwrap();

            let disk = Stopping::new(left);
            let saved = save(&disk, folder, new, 2);
            let finished = disk.left.load(Ordering::Relaxed) > 0;
            disk.cut_power(folder, lost);
            match step(folder) {
                1 => kept += 1,
                2 => replaced += 1,
                other => panic!("step {other}"),
            }
            assert!(saved.is_err() || step(folder) == 2, "{lost:?} {left}");

            save(&Stopping::new(usize::MAX), folder, old, 3).unwrap();
            assert_eq!(step(folder), 3);
            let files = fs::read_dir(folder).unwrap().count();
            assert_eq!(files, 1 + 4, "the manifest and one file a rank");
            if finished {
                break;
            }
        }
        assert!(kept > 30 && replaced > 5, "{lost:?}: {kept} {replaced}");
    }
}

#[test]
fn the_first_save_of_a_folder_leaves_none_or_a_whole_one_when_stopped() {
    let mut none = 0;
    for left in 0..20 {
        let folder = TempDir::new().unwrap();
        let disk = Stopping::new(left);
        let saved = save(&disk, folder.path(), GroupSizes::new(1, 1), 1);
        match saved {
            Err(_) if !Manifest::path(folder.path()).exists() => none += 1,
            _ => assert_eq!(step(folder.path()), 1),
        }
    }
    assert!((10..20).contains(&none), "{none}");
}

#[test]
fn only_files_of_saves_are_removed() {
    for name in [
        "g3-ep0-etp1-dp0.safetensors",
        "g12-ep0-etp1-dp0.part.json.tmp",
    ] {
        assert!(is_of_a_save(name), "{name}");
    }
    for name in [
        "adapter_model.safetensors",
        "manifest.json",
        "g3-ep0-etp1-dp0.json",
        "g-ep0-etp1-dp0.safetensors",
        "g3-ep0-etp1-dp0-x.safetensors",
        "g3-ep0-etp1.safetensors",
    ] {
        assert!(!is_of_a_save(name), "{name}");
    }
}
