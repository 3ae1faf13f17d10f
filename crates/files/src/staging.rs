//! Files written beside their destination and renamed into place together.

use crate::json_file::regular_file_len;
use crate::{FileError, StoredTensor, TensorWriter};
use safetensors::{Dtype, SafeTensorError};
use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Files that appear in a folder together, in the order written, or not at all.
///
/// A process killed during [`commit`](Self::commit) leaves each file either old or new.
pub struct Staging {
    folder: PathBuf,
    // Inside `folder`, so that renaming never crosses file systems.
    temporary: TempDir,
    names: Vec<String>,
}

impl Staging {
    /// Creates the folder where it is missing, and a temporary one inside of it.
    ///
    /// # Errors
    ///
    /// When either cannot be created.
    pub fn new(folder: &Path) -> Result<Self, FileError> {
        fs::create_dir_all(folder).map_err(FileError::io("create", folder))?;
        let temporary = tempfile::Builder::new()
            .prefix(".incomplete-")
            .tempdir_in(folder)
            .map_err(FileError::io("write to", folder))?;
        Ok(Self {
            folder: folder.to_owned(),
            temporary,
            names: Vec::new(),
        })
    }

    /// Writes a file to appear as `name`.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), FileError> {
        let path = self.temporary.path().join(name);
        self.names.push(name.to_owned());
        fs::write(&path, bytes).map_err(FileError::io("write", &path))
    }

    /// Writes a safetensors file with the metadata of PyTorch's.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn write_tensors(
        &mut self,
        name: &str,
        tensors: impl IntoIterator<Item = (String, StoredTensor<'static>)>,
    ) -> Result<(), FileError> {
        // The serializer creates its file readable by its owner only; a plain file first shows
        // which permissions a file here should have.
        self.write(name, &[])?;
        let path = self.temporary.path().join(name);
        let permissions = fs::metadata(&path)
            .map_err(FileError::io("write", &path))?
            .permissions();
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        safetensors::serialize_to_file(tensors, Some(metadata), &path).map_err(|error| {
            let source = match error {
                SafeTensorError::IoError(source) => source,
                other => std::io::Error::other(other),
            };
            FileError::io("write", &path)(source)
        })?;
        fs::set_permissions(&path, permissions).map_err(FileError::io("write", &path))
    }

    /// Begins a safetensors file of the announced tensors, to appear as `name`; the writer has to be
    /// finished before [`commit`](Self::commit).
    ///
    /// # Errors
    ///
    /// As [`TensorWriter::create`].
    pub fn tensor_writer(
        &mut self,
        name: &str,
        tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>,
    ) -> Result<TensorWriter, FileError> {
        self.names.push(name.to_owned());
        TensorWriter::create(self.temporary.path().join(name), tensors)
    }

    /// Copies the regular file at `source`, to appear as `name`.
    ///
    /// # Errors
    ///
    /// When it is no regular file or cannot be copied.
    pub fn copy(&mut self, name: &str, source: &Path) -> Result<(), FileError> {
        regular_file_len(source)?;
        let path = self.temporary.path().join(name);
        self.names.push(name.to_owned());
        // The contents alone: a read-only source must not make a read-only copy.
        let mut from = File::open(source).map_err(FileError::io("open", source))?;
        let mut to = File::create(&path).map_err(FileError::io("write", &path))?;
        std::io::copy(&mut from, &mut to).map_err(FileError::io("write", &path))?;
        Ok(())
    }

    /// Renames every file into place, in the order written, once all of them are on the disk.
    ///
    /// # Errors
    ///
    /// When a folder lies where a file is to appear, or a file cannot be renamed.
    pub fn commit(self) -> Result<(), FileError> {
        for name in &self.names {
            let path = self.folder.join(name);
            if path.is_dir() {
                return Err(FileError::NotAFile { path });
            }
        }
        for name in &self.names {
            let path = self.temporary.path().join(name);
            let file = File::open(&path).map_err(FileError::io("open", &path))?;
            file.sync_all().map_err(FileError::io("write", &path))?;
        }
        for name in &self.names {
            let path = self.folder.join(name);
            fs::rename(self.temporary.path().join(name), &path)
                .map_err(FileError::io("replace", &path))?;
        }
        Ok(())
    }
}
