//! Files written beside their destination and renamed into place together.

use crate::InterchangeError;
use crate::json_file::io;
use crate::tensor_file::StoredTensor;
use safetensors::SafeTensorError;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub(crate) struct Staging {
    folder: PathBuf,
    // Inside `folder`, so that renaming never crosses file systems.
    temporary: TempDir,
    names: Vec<String>,
}

impl Staging {
    pub(crate) fn new(folder: &Path) -> Result<Self, InterchangeError> {
        fs::create_dir_all(folder).map_err(io("create", folder))?;
        let temporary = tempfile::Builder::new()
            .prefix(".incomplete-")
            .tempdir_in(folder)
            .map_err(io("write to", folder))?;
        Ok(Self {
            folder: folder.to_owned(),
            temporary,
            names: Vec::new(),
        })
    }

    pub(crate) fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), InterchangeError> {
        let path = self.temporary.path().join(name);
        self.names.push(name.to_owned());
        fs::write(&path, bytes).map_err(io("write", &path))
    }

    pub(crate) fn write_tensors(
        &mut self,
        name: &str,
        tensors: impl IntoIterator<Item = (String, StoredTensor<'static>)>,
    ) -> Result<(), InterchangeError> {
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        self.copy_tensors(name, tensors, Some(metadata))
    }

    pub(crate) fn copy_tensors<'a>(
        &mut self,
        name: &str,
        tensors: impl IntoIterator<Item = (String, StoredTensor<'a>)>,
        metadata: Option<HashMap<String, String>>,
    ) -> Result<(), InterchangeError> {
        // The serializer creates its file readable by its owner only; a plain file first shows
        // which permissions a file here should have.
        self.write(name, &[])?;
        let path = self.temporary.path().join(name);
        let permissions = fs::metadata(&path)
            .map_err(io("write", &path))?
            .permissions();
        safetensors::serialize_to_file(tensors, metadata, &path).map_err(|error| {
            let source = match error {
                SafeTensorError::IoError(source) => source,
                other => std::io::Error::other(other),
            };
            io("write", &path)(source)
        })?;
        fs::set_permissions(&path, permissions).map_err(io("write", &path))
    }

    /// Renames every file into place, in the order written.
    pub(crate) fn commit(self) -> Result<(), InterchangeError> {
        for name in &self.names {
            let path = self.folder.join(name);
            if path.is_dir() {
                return Err(InterchangeError::NotAFile { path });
            }
        }
        for name in &self.names {
            let path = self.folder.join(name);
            fs::rename(self.temporary.path().join(name), &path).map_err(io("replace", &path))?;
        }
        Ok(())
    }
}
