//! A JSON object on disk whose fields are asked for by name.

use crate::InterchangeError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Indexes of the largest public models stay below 20 MB.
const MAX_BYTES: u64 = 64 << 20;

pub(crate) struct JsonFile {
    path: PathBuf,
    fields: Map<String, Value>,
}

impl JsonFile {
    pub(crate) fn read(path: PathBuf) -> Result<Self, InterchangeError> {
        let bytes = regular_file_len(&path)?;
        if bytes > MAX_BYTES {
            let limit = MAX_BYTES;
            return Err(InterchangeError::JsonTooLarge { path, bytes, limit });
        }
        let text = std::fs::read(&path).map_err(io("read", &path))?;
        match serde_json::from_slice(&text) {
            Ok(fields) => Ok(Self { path, fields }),
            Err(source) => Err(InterchangeError::Json { path, source }),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn fields(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.fields.iter().map(|(name, value)| (&**name, value))
    }

    /// The value at `field`, whose dots lead into nested objects; null counts as absent.
    pub(crate) fn value(&self, field: &str) -> Option<&Value> {
        let mut steps = field.split('.');
        let first = self.fields.get(steps.next()?)?;
        let value = steps.try_fold(first, |value, step| value.get(step))?;
        (!value.is_null()).then_some(value)
    }

    pub(crate) fn get<T: DeserializeOwned>(
        &self,
        field: &str,
    ) -> Result<Option<T>, InterchangeError> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        match serde_json::from_value(value.clone()) {
            Ok(parsed) => Ok(Some(parsed)),
            Err(source) => Err(self.invalid(field, value, source)),
        }
    }

    pub(crate) fn require<T: DeserializeOwned>(&self, field: &str) -> Result<T, InterchangeError> {
        self.get(field)?.ok_or_else(|| self.missing(field))
    }

    pub(crate) fn missing(&self, field: &str) -> InterchangeError {
        InterchangeError::MissingField {
            path: self.path.clone(),
            field: field.to_owned(),
        }
    }

    pub(crate) fn invalid(
        &self,
        field: &str,
        value: impl ToString,
        expected: impl ToString,
    ) -> InterchangeError {
        InterchangeError::InvalidField {
            path: self.path.clone(),
            field: field.to_owned(),
            value: value.to_string(),
            expected: expected.to_string(),
        }
    }

    pub(crate) fn unsupported(
        &self,
        field: &str,
        value: impl ToString,
        supported: impl ToString,
    ) -> InterchangeError {
        InterchangeError::UnsupportedField {
            path: self.path.clone(),
            field: field.to_owned(),
            value: value.to_string(),
            supported: supported.to_string(),
        }
    }
}

pub(crate) fn io(
    action: &'static str,
    path: &Path,
) -> impl FnOnce(std::io::Error) -> InterchangeError {
    let path = path.to_owned();
    move |source| InterchangeError::Io {
        action,
        path,
        source,
    }
}

/// The length of a regular file; asked before opening, because opening a pipe would block.
pub(crate) fn regular_file_len(path: &Path) -> Result<u64, InterchangeError> {
    let metadata = std::fs::metadata(path).map_err(io("open", path))?;
    if !metadata.is_file() {
        return Err(InterchangeError::NotAFile {
            path: path.to_owned(),
        });
    }
    Ok(metadata.len())
}
