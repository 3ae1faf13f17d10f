//! The operations by which a save changes its folder, in a form that can be stopped at each.

use moe_lora_files::FileError;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

pub(crate) trait Storage: Send + Sync {
    /// A new, empty file; what lay there is removed, so that a link is replaced and not followed.
    fn create(&self, path: &Path) -> io::Result<File>;
    fn append(&self, file: &mut File, bytes: &[u8]) -> io::Result<()>;
    fn sync(&self, file: &File) -> io::Result<()>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Makes renames in a folder durable.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
    /// Removes a file that may be absent.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// The file system itself.
pub(crate) struct Disk;

impl Storage for Disk {
    fn create(&self, path: &Path) -> io::Result<File> {
        self.remove(path)?;
        OpenOptions::new().write(true).create_new(true).open(path)
    }

    fn append(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        // Only Unix opens a folder as a file; elsewhere a rename is as durable as the system has it.
        if cfg!(unix) {
            File::open(folder)?.sync_all()?;
        }
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        match fs::remove_file(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

/// A file that appears under its name only once it is whole and durable.
pub(crate) struct NewFile<'a> {
    storage: &'a dyn Storage,
    path: PathBuf,
    temporary: PathBuf,
    file: File,
}

/// What the name of an unfinished file ends with.
pub(crate) const TEMPORARY: &str = ".tmp";

impl<'a> NewFile<'a> {
    pub(crate) fn create(storage: &'a dyn Storage, path: PathBuf) -> Result<Self, FileError> {
        let mut temporary = path.clone().into_os_string();
        temporary.push(TEMPORARY);
        let temporary = PathBuf::from(temporary);
        let file = storage
            .create(&temporary)
            .map_err(FileError::io("create", &temporary))?;
        Ok(Self {
            storage,
            path,
            temporary,
            file,
        })
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        let written = self.storage.append(&mut self.file, bytes);
        written.map_err(FileError::io("write", &self.temporary))
    }

    pub(crate) fn finish(self) -> Result<(), FileError> {
        let synced = self.storage.sync(&self.file);
        synced.map_err(FileError::io("write", &self.temporary))?;
        let renamed = self.storage.rename(&self.temporary, &self.path);
        renamed.map_err(FileError::io("replace", &self.path))
    }
}
