//! Safetensors and JSON files, opened with every size checked and written in one step.
//!
//! | type | what it is |
//! |---|---|
//! | [`TensorFile`] | a memory-mapped safetensors file |
//! | [`TensorWriter`] | a safetensors file written tensor by tensor |
//! | [`StoredTensor`] | the bytes of a tensor in its type on disk |
//! | [`HostTensor`] | a tensor in `f32` |
//! | [`JsonFile`] | a JSON object whose fields are asked for by name |
//! | [`Staging`] | files that appear in a folder together or not at all |
//!
//! # Safety limits
//!
//! Files are taken as hostile: a declared size is compared with the file before anything is
//! allocated, JSON is read up to 64 MiB, and only regular files are opened. A mapped file must not be
//! cut short by others while it is open.

mod error;
mod json_file;
mod staging;
mod tensor;
mod tensor_file;
mod tensor_writer;

pub use error::{FileError, nearest_name};
pub use json_file::{JsonFile, regular_file_len};
pub use staging::Staging;
pub use tensor::{HostTensor, expect_shape};
pub use tensor_file::{StoredTensor, TensorFile, widen};
pub use tensor_writer::TensorWriter;
