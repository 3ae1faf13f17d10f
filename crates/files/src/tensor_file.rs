//! A memory-mapped safetensors file.
//!
//! ```text
//! 8 bytes   little-endian u64, length n of the header
//! n bytes   JSON: name -> dtype, shape, begin and end in the data
//! the rest  the data, contiguous, in the order of the offsets
//! ```

use crate::json_file::regular_file_len;
use crate::{FileError, HostTensor};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, View};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

const LENGTH_BYTES: usize = 8;

#[derive(Debug)]
/// An open file: its header, and its data mapped into memory.
pub struct TensorFile {
    path: PathBuf,
    map: Mmap,
    data_start: usize,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: Option<HashMap<String, String>>,
}

impl TensorFile {
    /// Maps the file at `path` and reads its header.
    ///
    /// # Errors
    ///
    /// When it cannot be opened, or its header is damaged or does not describe the whole file.
    pub fn open(path: PathBuf) -> Result<Self, FileError> {
        regular_file_len(&path)?;
        let file = File::open(&path).map_err(FileError::io("open", &path))?;
        // SAFETY: the mapping is read-only. Another process may still cut the file short under it,
        // which no check here can prevent; the crate's page states that as a condition.
        let map = unsafe { Mmap::map(&file) }.map_err(FileError::io("map", &path))?;

        let length = |declared| FileError::Length {
            path: path.clone(),
            found: map.len(),
            declared,
        };
        let Some(prefix) = map.first_chunk::<LENGTH_BYTES>() else {
            return Err(length(LENGTH_BYTES as u128));
        };
        let header_end = u128::from(u64::from_le_bytes(*prefix)) + LENGTH_BYTES as u128;
        let Some(header) = usize::try_from(header_end)
            .ok()
            .and_then(|end| map.get(LENGTH_BYTES..end))
        else {
            return Err(length(header_end));
        };
        let data_start = LENGTH_BYTES + header.len();
        // Parsing checks that offsets are contiguous and that each spans its shape, but not that
        // they end with the file. `SafeTensors::deserialize` would, with an addition that a hostile
        // header can overflow.
        let header: Metadata = match serde_json::from_slice(header) {
            Ok(header) => header,
            Err(source) => return Err(FileError::Header { path, source }),
        };
        let declared = header_end + header.data_len() as u128;
        if declared != map.len() as u128 {
            return Err(length(declared));
        }
        let tensors = header.tensors().into_iter();
        Ok(Self {
            tensors: tensors.map(|(name, info)| (name, info.clone())).collect(),
            metadata: header.metadata().clone(),
            path,
            map,
            data_start,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The header's free-form entries.
    pub fn metadata(&self) -> Option<HashMap<String, String>> {
        self.metadata.clone()
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Type, shape and place of a tensor.
    ///
    /// # Errors
    ///
    /// [`FileError::UnknownTensor`] with the most similar name.
    pub fn info(&self, name: &str) -> Result<&TensorInfo, FileError> {
        self.tensors
            .get(name)
            .ok_or_else(|| FileError::unknown_tensor(&self.path, name, self.names()))
    }

    /// The bytes of the file that a tensor takes.
    ///
    /// # Errors
    ///
    /// [`FileError::UnknownTensor`].
    pub fn byte_range(&self, name: &str) -> Result<Range<usize>, FileError> {
        let (begin, end) = self.info(name)?.data_offsets;
        Ok(self.data_start + begin..self.data_start + end)
    }

    /// The tensor as it is on disk.
    ///
    /// # Errors
    ///
    /// [`FileError::UnknownTensor`].
    pub fn stored(&self, name: &str) -> Result<StoredTensor<'_>, FileError> {
        let info = self.info(name)?;
        Ok(StoredTensor {
            dtype: info.dtype,
            shape: info.shape.clone(),
            bytes: Cow::Borrowed(&self.map[self.byte_range(name)?]),
        })
    }

    /// The tensor in `f32`.
    ///
    /// # Errors
    ///
    /// When there is no such tensor, or it is stored in a type other than `f32`, `bf16` and `f16`.
    pub fn tensor(&self, name: &str) -> Result<HostTensor, FileError> {
        let mut data = Vec::new();
        self.widen(name, &mut data)?;
        HostTensor::new(self.info(name)?.shape.clone(), data)
    }

    /// Appends the tensor's elements to `out` in `f32`.
    ///
    /// # Errors
    ///
    /// As [`tensor`](Self::tensor).
    pub fn widen(&self, name: &str, out: &mut Vec<f32>) -> Result<(), FileError> {
        let stored = self.stored(name)?;
        let widened = widen(stored.dtype, &stored.bytes, out);
        widened.ok_or_else(|| unsupported_dtype(&self.path, name, stored.dtype))
    }

    /// Appends the elements at `index` of the tensor's first axis to `out` in `f32`.
    ///
    /// # Errors
    ///
    /// As [`tensor`](Self::tensor).
    ///
    /// # Panics
    ///
    /// When `index` is not below the size of the first axis.
    pub fn widen_outer(
        &self,
        name: &str,
        index: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), FileError> {
        let stored = self.stored(name)?;
        let size = stored.shape.first().copied().unwrap_or(0);
        assert!(
            index < size,
            "index {index} is outside the first axis of shape {:?}",
            stored.shape
        );
        let stride = stored.bytes.len() / size;
        let bytes = &stored.bytes[index * stride..(index + 1) * stride];
        let widened = widen(stored.dtype, bytes, out);
        widened.ok_or_else(|| unsupported_dtype(&self.path, name, stored.dtype))
    }
}

/// Appends little-endian elements to `out` in `f32`; none where the type is not `f32`, `bf16` or
/// `f16`.
pub fn widen(dtype: Dtype, bytes: &[u8], out: &mut Vec<f32>) -> Option<()> {
    let halves = || bytes.as_chunks::<2>().0.iter().copied();
    match dtype {
        Dtype::F32 => out.extend(bytes.as_chunks().0.iter().map(|&le| f32::from_le_bytes(le))),
        Dtype::BF16 => out.extend(halves().map(|le| bf16::from_le_bytes(le).to_f32())),
        Dtype::F16 => out.extend(halves().map(|le| f16::from_le_bytes(le).to_f32())),
        _ => return None,
    }
    Some(())
}

/// The bytes of a tensor in its type on disk.
pub struct StoredTensor<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

impl StoredTensor<'_> {
    /// The type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The size of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements as they are on disk: little-endian, last axis fastest.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl StoredTensor<'static> {
    /// `tensor` rounded once, to nearest even, to the type `like` has on disk.
    ///
    /// # Errors
    ///
    /// When the shapes differ, the type is not supported, or a finite value would become infinite.
    pub fn narrow(
        path: &Path,
        name: &str,
        tensor: HostTensor,
        like: &StoredTensor<'_>,
    ) -> Result<Self, FileError> {
        tensor.expect_shape(|| name.to_owned(), &like.shape)?;
        let dtype = like.dtype;
        let shape = tensor.shape().to_vec();
        let mut bytes = Vec::with_capacity(like.bytes.len());
        for value in tensor.into_data() {
            let stored = match dtype {
                Dtype::BF16 => {
                    let narrow = bf16::from_f32(value);
                    bytes.extend(narrow.to_le_bytes());
                    narrow.to_f32()
                }
                Dtype::F16 => {
                    let narrow = f16::from_f32(value);
                    bytes.extend(narrow.to_le_bytes());
                    narrow.to_f32()
                }
                Dtype::F32 => {
                    bytes.extend(value.to_le_bytes());
                    value
                }
                _ => return Err(unsupported_dtype(path, name, dtype)),
            };
            if value.is_finite() && !stored.is_finite() {
                return Err(FileError::Overflow {
                    name: name.to_owned(),
                    value,
                    dtype,
                });
            }
        }
        Ok(Self {
            dtype,
            shape,
            bytes: bytes.into(),
        })
    }
}

impl From<HostTensor> for StoredTensor<'static> {
    fn from(tensor: HostTensor) -> Self {
        let shape = tensor.shape().to_vec();
        let bytes: Vec<u8> = tensor
            .into_data()
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect();
        Self {
            dtype: Dtype::F32,
            shape,
            bytes: bytes.into(),
        }
    }
}

impl View for StoredTensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

fn unsupported_dtype(path: &Path, name: &str, dtype: Dtype) -> FileError {
    FileError::UnsupportedDtype {
        path: path.to_owned(),
        name: name.to_owned(),
        dtype,
    }
}
