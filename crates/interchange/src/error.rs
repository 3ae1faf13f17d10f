//! Everything that can be wrong with a file or with what is to be written.

use safetensors::Dtype;
use std::path::PathBuf;

/// A fault in a model or adapter folder, or in the values to be written to one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InterchangeError {
    /// The operating system refused a file operation.
    #[error("cannot {action} {path}: {source} (check that it exists and is accessible)")]
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
    /// A shard name that is not a plain file name.
    #[error(
        "{path} names the shard {name:?}, which is not a plain .safetensors file name (shards must lie in the model's own folder)"
    )]
    ShardName {
        /// The index file.
        path: PathBuf,
        /// The name it holds.
        name: String,
    },
    /// The index and a shard disagree on where a tensor lies.
    #[error(
        "{path} and shard {shard:?} disagree on tensor {tensor:?} (fetch the index and its shards from the same revision)"
    )]
    ShardIndex {
        /// The index file.
        path: PathBuf,
        /// The shard.
        shard: String,
        /// The tensor that only one of them has.
        tensor: String,
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
    /// A factor whose axes are not those of a pair.
    #[error(
        "factor {name} has shape {found:?}, expected {expected} (give both factors the same experts and rank)"
    )]
    Axes {
        /// Which of the two factors.
        name: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// The axes it should have.
        expected: String,
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
    /// A layer beyond the model's last.
    #[error("layer {layer} is not in a model of num_hidden_layers={layers} (layers count from 0)")]
    LayerRange {
        /// The layer asked for.
        layer: usize,
        /// Layers in the model.
        layers: usize,
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
    /// A shard written to a folder whose `model.safetensors` would be read in its stead.
    #[error("{path} would hide the shards written beside it (choose an empty folder)")]
    Shadowed {
        /// The file in the way.
        path: PathBuf,
    },
    /// An adapter file without tensors that its configuration calls for.
    #[error("{path} lacks {names:?}{} (a partial adapter is not read: save it again)", and_more(.more))]
    MissingTensors {
        /// The adapter file.
        path: PathBuf,
        /// The first few names.
        names: Vec<String>,
        /// Whether there are others.
        more: bool,
    },
    /// An adapter file with tensors that its configuration does not call for.
    #[error("{path} holds unexpected {names:?}{} (only the factors of targeted experts are read)", and_more(.more))]
    UnexpectedTensors {
        /// The adapter file.
        path: PathBuf,
        /// The first few names.
        names: Vec<String>,
        /// Whether there are others.
        more: bool,
    },
    /// Separate gate and up factors, which a stacked file cannot hold.
    #[error(
        "layer {layer} has separate gate and up factors, which the stacked layout cannot hold (write it with PeftLayout::PerExpert)"
    )]
    SeparateInStacked {
        /// The layer.
        layer: usize,
    },
    /// An adapter that adapts nothing.
    #[error("the adapter has no factors (give it at least one layer with a gate_up or down pair)")]
    EmptyAdapter,
}

fn near_name(near: &Option<String>) -> String {
    match near {
        Some(name) => format!("did you mean {name:?}?"),
        None => "no name there is similar".to_owned(),
    }
}

fn and_more(more: &bool) -> &'static str {
    if *more { " and more" } else { "" }
}
