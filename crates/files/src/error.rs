//! What can be wrong with a file, or with a tensor read from or written to one.

use safetensors::Dtype;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A fault of a file or of a tensor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The operating system refused a file operation.
    #[error("cannot {action} {path}: {source} ({})", remedy(source))]
    Io {
        /// What was attempted, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A folder, device or pipe lies where a file is needed.
    #[error("{path} is not a regular file (move it away, or choose another folder)")]
    NotAFile {
        /// Where it lies.
        path: PathBuf,
    },
    /// A JSON file larger than any real one.
    #[error(
        "{path} has {bytes} bytes, more than the {limit} read as JSON (check that it is the right file)"
    )]
    JsonTooLarge {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// The longest length read.
        limit: u64,
    },
    /// A file that is not a JSON object.
    #[error("{path} is not a JSON object: {source} (fetch the file again)")]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's answer.
        source: serde_json::Error,
    },
    /// A field that has to be there is not.
    #[error("{path} has no field {field:?} (add it, or fetch the complete file again)")]
    MissingField {
        /// The JSON file.
        path: PathBuf,
        /// The field's name.
        field: String,
    },
    /// A field whose value makes no sense.
    #[error(
        "{path}: {field}={value}, expected {expected} (correct the field, or fetch the file again)"
    )]
    InvalidField {
        /// The JSON file.
        path: PathBuf,
        /// The field's name.
        field: String,
        /// The value found.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// A field whose value asks for something this crate does not do.
    #[error("{path}: {field}={value} is not supported (supported: {supported})")]
    UnsupportedField {
        /// The JSON file.
        path: PathBuf,
        /// The field's name.
        field: String,
        /// The value found.
        value: String,
        /// What is supported.
        supported: String,
    },
    /// A safetensors file whose header cannot be parsed or contradicts itself.
    #[error("{path} has no valid safetensors header: {source} (fetch the file again)")]
    Header {
        /// The file.
        path: PathBuf,
        /// The parser's answer.
        source: serde_json::Error,
    },
    /// A safetensors file whose length is not what its header says.
    #[error(
        "{path} has {found} bytes, its header declares {declared} (the file is cut short or is not safetensors: fetch it again)"
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes in the file.
        found: usize,
        /// Bytes the file must have, as far as it can be told.
        declared: u128,
    },
    /// A tensor that is not in the file or folder.
    #[error("no tensor {name:?} in {path} ({})", near_name(.near))]
    UnknownTensor {
        /// The file or folder searched.
        path: PathBuf,
        /// The name asked for.
        name: String,
        /// The most similar name there is.
        near: Option<String>,
    },
    /// A tensor stored in a type that is not widened to `f32`.
    #[error("tensor {name:?} in {path} is stored as {dtype} (supported: F32, BF16, F16)")]
    UnsupportedDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its type on disk.
        dtype: Dtype,
    },
    /// A tensor whose shape is not the one that is needed.
    #[error(
        "tensor {name:?} has shape {found:?}, expected {expected:?} (check that it belongs to this model and rank)"
    )]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape needed.
        expected: Vec<usize>,
    },
    /// Data that does not fill its shape.
    #[error(
        "shape {shape:?} does not hold {len} elements (the product of the sizes must equal the number of elements)"
    )]
    ElementCount {
        /// The shape.
        shape: Vec<usize>,
        /// Elements supplied.
        len: usize,
    },
    /// A tensor whose type is not the one that is needed.
    #[error("tensor {name:?} is {found}, expected {expected} (write it in the expected type)")]
    Dtype {
        /// The tensor.
        name: String,
        /// Its type.
        found: Dtype,
        /// The type needed.
        expected: Dtype,
    },
    /// A tensor that a file's header announces and that was never written.
    #[error(
        "tensor {name:?} was announced in {path} but not written (write every announced tensor)"
    )]
    Unwritten {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A finite value that the type on disk would turn into an infinity.
    #[error(
        "tensor {name:?} holds {value}, which overflows {dtype} (start from a copy of the model stored in a wider type)"
    )]
    Overflow {
        /// The tensor.
        name: String,
        /// The value.
        value: f32,
        /// The type on disk.
        dtype: Dtype,
    },
}

impl FileError {
    /// Names what was attempted, as a verb, and where.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }

    /// [`UnknownTensor`](Self::UnknownTensor) with the most similar of `names`.
    pub fn unknown_tensor<'a>(
        path: &Path,
        name: &str,
        names: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        Self::UnknownTensor {
            path: path.to_owned(),
            name: name.to_owned(),
            near: nearest_name(name, names),
        }
    }
}

fn remedy(source: &std::io::Error) -> &'static str {
    match source.kind() {
        ErrorKind::NotFound => "check the path",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free some space and try again",
        ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied => {
            "choose another place, or change its permissions"
        }
        // Too many open files, which has no kind of its own.
        _ if matches!(source.raw_os_error(), Some(23 | 24)) => {
            "raise the limit of open files, as with ulimit -n"
        }
        _ => "check that it exists and is accessible",
    }
}

/// The most similar of `names`, if one is similar at all.
pub fn nearest_name<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<String> {
    // Similarity takes time proportional to both lengths; no real name is this long.
    let near = names
        .into_iter()
        .filter(|other| other.len() <= 256 && name.len() <= 256)
        .map(|other| (strsim::normalized_levenshtein(name, other), other))
        .filter(|(similarity, _)| *similarity >= 0.7)
        .max_by(|(left, _), (right, _)| left.total_cmp(right));
    near.map(|(_, other)| other.to_owned())
}
fn near_name(near: &Option<String>) -> String {
    match near {
        Some(name) => format!("did you mean {name:?}?"),
        None => "no name there is similar".to_owned(),
    }
}
