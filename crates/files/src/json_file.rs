//! A JSON object on disk whose fields are asked for by name.

use crate::FileError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Indexes of the largest public models stay below 20 MB.
const MAX_BYTES: u64 = 64 << 20;

/// A JSON object on disk.
pub struct JsonFile {
    path: PathBuf,
    fields: Map<String, Value>,
}

impl JsonFile {
    /// Reads the object in the file at `path`.
    ///
    /// # Errors
    ///
    /// When it is no regular file of at most 64 MiB that holds a JSON object.
    pub fn read(path: PathBuf) -> Result<Self, FileError> {
        let bytes = regular_file_len(&path)?;
        if bytes > MAX_BYTES {
            let limit = MAX_BYTES;
            return Err(FileError::JsonTooLarge { path, bytes, limit });
        }
        let text = std::fs::read(&path).map_err(FileError::io("read", &path))?;
        match serde_json::from_slice(&text) {
            Ok(fields) => Ok(Self { path, fields }),
            Err(source) => Err(FileError::Json { path, source }),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The top-level fields.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.fields.iter().map(|(name, value)| (&**name, value))
    }

    /// The value at `field`, whose dots lead into nested objects; null counts as absent.
    pub fn value(&self, field: &str) -> Option<&Value> {
        let mut steps = field.split('.');
        let first = self.fields.get(steps.next()?)?;
        let value = steps.try_fold(first, |value, step| value.get(step))?;
        (!value.is_null()).then_some(value)
    }

    /// The value at `field`, if there is one.
    ///
    /// # Errors
    ///
    /// [`FileError::InvalidField`] when it is no `T`.
    pub fn get<T: DeserializeOwned>(&self, field: &str) -> Result<Option<T>, FileError> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        match serde_json::from_value(value.clone()) {
            Ok(parsed) => Ok(Some(parsed)),
            Err(source) => Err(self.invalid(field, value, source)),
        }
    }

    /// The value at `field`.
    ///
    /// # Errors
    ///
    /// [`FileError::MissingField`], or [`FileError::InvalidField`] when it is no `T`.
    pub fn require<T: DeserializeOwned>(&self, field: &str) -> Result<T, FileError> {
        self.get(field)?.ok_or_else(|| self.missing(field))
    }

    /// The error of a field that has to be there.
    pub fn missing(&self, field: &str) -> FileError {
        FileError::MissingField {
            path: self.path.clone(),
            field: field.to_owned(),
        }
    }

    /// The error of a value that makes no sense.
    pub fn invalid(&self, field: &str, value: impl ToString, expected: impl ToString) -> FileError {
        FileError::InvalidField {
            path: self.path.clone(),
            field: field.to_owned(),
            value: value.to_string(),
            expected: expected.to_string(),
        }
    }

    /// The error of a value that asks for something that is not done.
    pub fn unsupported(
        &self,
        field: &str,
        value: impl ToString,
        supported: impl ToString,
    ) -> FileError {
        FileError::UnsupportedField {
            path: self.path.clone(),
            field: field.to_owned(),
            value: value.to_string(),
            supported: supported.to_string(),
        }
    }
}

/// The length of a regular file; asked before opening, because opening a pipe would block.
///
/// # Errors
///
/// When there is no such file, or something else lies there.
pub fn regular_file_len(path: &Path) -> Result<u64, FileError> {
    let metadata = std::fs::metadata(path).map_err(FileError::io("open", path))?;
    if !metadata.is_file() {
        return Err(FileError::NotAFile {
            path: path.to_owned(),
        });
    }
    Ok(metadata.len())
}
