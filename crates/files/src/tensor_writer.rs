//! A safetensors file written tensor by tensor.

use crate::{FileError, StoredTensor, expect_shape};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{Error, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Readers that view the data in place need it at multiples of the largest element, 8 bytes.
const ALIGNMENT: usize = 8;

/// A safetensors file whose tensors are announced first and then written in any order, so that one
/// tensor at a time has to be in memory.
pub struct TensorWriter {
    path: PathBuf,
    file: File,
    data_start: usize,
    tensors: BTreeMap<String, TensorInfo>,
    unwritten: BTreeSet<String>,
}

impl TensorWriter {
    /// Creates the file at `path` and writes its header, with the metadata of PyTorch's.
    ///
    /// # Errors
    ///
    /// When the sizes overflow, a name is announced twice, or the file cannot be written.
    pub fn create(
        path: PathBuf,
        tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>,
    ) -> Result<Self, FileError> {
        let failed = |source: Error| FileError::io("write", &path)(source);
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        // Wide elements first, which keeps every tensor aligned.
        tensors.sort_by(|left, right| right.1.cmp(&left.1).then(left.0.cmp(&right.0)));
        let mut end = 0usize;
        let mut infos = Vec::with_capacity(tensors.len());
        for (name, dtype, shape) in tensors {
            let begin = end;
            end = byte_len(dtype, &shape)
                .and_then(|bytes| begin.checked_add(bytes))
                .ok_or_else(|| failed(Error::other("the sizes of its tensors overflow")))?;
            let data_offsets = (begin, end);
            infos.push((
                name,
                TensorInfo {
                    dtype,
                    shape,
                    data_offsets,
                },
            ));
        }
        let by_name: BTreeMap<_, _> = infos.iter().cloned().collect();
        if by_name.len() != infos.len() {
            return Err(failed(Error::other("two of its tensors have one name")));
        }

        let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let header = Metadata::new(Some(format), infos).map_err(|e| failed(Error::other(e)))?;
        let mut header = serde_json::to_vec(&header).map_err(|e| failed(e.into()))?;
        header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');
        let prefix = (header.len() as u64).to_le_bytes();
        let data_start = prefix.len() + header.len();

        let mut file = File::create(&path).map_err(failed)?;
        file.write_all(&prefix)
            .and_then(|()| file.write_all(&header))
            .and_then(|()| file.set_len((data_start + end) as u64))
            .map_err(failed)?;
        Ok(Self {
            file,
            data_start,
            unwritten: by_name.keys().cloned().collect(),
            tensors: by_name,
            path,
        })
    }

    /// Writes a tensor to its place.
    ///
    /// # Errors
    ///
    /// When it was not announced with this type and shape, or cannot be written.
    pub fn write(&mut self, name: &str, tensor: &StoredTensor<'_>) -> Result<(), FileError> {
        let Some(info) = self.tensors.get(name) else {
            let names = self.tensors.keys().map(String::as_str);
            return Err(FileError::unknown_tensor(&self.path, name, names));
        };
        expect_shape(|| name.to_owned(), tensor.shape(), &info.shape)?;
        if tensor.dtype() != info.dtype {
            return Err(FileError::Dtype {
                name: name.to_owned(),
                found: tensor.dtype(),
                expected: info.dtype,
            });
        }
        let place = SeekFrom::Start((self.data_start + info.data_offsets.0) as u64);
        self.file
            .seek(place)
            .and_then(|_| self.file.write_all(tensor.bytes()))
            .map_err(FileError::io("write", &self.path))?;
        self.unwritten.remove(name);
        Ok(())
    }

    /// Ends the file.
    ///
    /// # Errors
    ///
    /// [`FileError::Unwritten`] when an announced tensor was not written.
    pub fn finish(self) -> Result<(), FileError> {
        match self.unwritten.into_iter().next() {
            None => Ok(()),
            Some(name) => Err(FileError::Unwritten {
                path: self.path,
                name,
            }),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Bytes of a tensor; `None` when they overflow or end within a byte.
fn byte_len(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize(), |bits, &size| bits.checked_mul(size))?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostTensor, TensorFile};
    use safetensors::tensor::TensorView;

    fn tensor(values: &[f32]) -> StoredTensor<'static> {
        HostTensor::new([values.len()], values.to_vec())
            .unwrap()
            .into()
    }

    fn announced(names: &[&str]) -> Vec<(String, Dtype, Vec<usize>)> {
        let tensors = names
            .iter()
            .map(|name| (name.to_string(), Dtype::F32, vec![3]));
        tensors.collect()
    }

    /// A file with three tensors, `half` in two bytes an element.
    fn library_file(folder: &Path) -> TensorFile {
        let floats = [1.0f32, 2.0, 3.0].map(f32::to_le_bytes).concat();
        let halves = [1.5f32; 3].map(|x| half::bf16::from_f32(x).to_le_bytes());
        let view = |dtype, bytes| TensorView::new(dtype, vec![3], bytes).unwrap();
        let views = [
            ("half", view(Dtype::BF16, halves.as_flattened())),
            ("b", view(Dtype::F32, &floats)),
            ("a", view(Dtype::F32, &floats)),
        ];
        let path = folder.join("library.safetensors");
        let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        safetensors::serialize_to_file(views, Some(format), &path).unwrap();
        TensorFile::open(path).unwrap()
    }

    #[test]
    fn tensors_written_in_any_order_make_the_file_of_the_library() {
        let folder = tempfile::tempdir().unwrap();
        let library = library_file(folder.path());
        let path = folder.path().join("a.safetensors");
        let mut tensors = announced(&["b", "a"]);
        tensors.push(("half".into(), Dtype::BF16, vec![3]));
        let mut writer = TensorWriter::create(path.clone(), tensors).unwrap();
        for name in ["half", "b", "a"] {
            writer.write(name, &library.stored(name).unwrap()).unwrap();
        }
        writer.finish().unwrap();
        assert!(std::fs::read(path).unwrap() == std::fs::read(library.path()).unwrap());
    }

    #[test]
    fn what_was_announced_must_be_written_as_announced() {
        let folder = tempfile::tempdir().unwrap();
        let library = library_file(folder.path());
        let path = folder.path().join("a.safetensors");
        let mut writer = TensorWriter::create(path.clone(), announced(&["alpha", "b"])).unwrap();
        let message = |result: Result<(), FileError>| result.unwrap_err().to_string();
        assert!(message(writer.write("alpa", &tensor(&[0.0; 3]))).contains("\"alpha\"?"));
        assert!(message(writer.write("b", &tensor(&[0.0; 4]))).contains("expected [3]"));
        let half = library.stored("half").unwrap();
        assert!(message(writer.write("b", &half)).contains("is BF16, expected F32"));
        writer.write("b", &tensor(&[0.0; 3])).unwrap();
        assert!(message(writer.finish()).contains("\"alpha\" was announced"));

        for tensors in [
            announced(&["a", "a"]),
            vec![("a".to_owned(), Dtype::F32, vec![usize::MAX, 2])],
            vec![("a".to_owned(), Dtype::F4, vec![3])],
        ] {
            assert!(TensorWriter::create(path.clone(), tensors).is_err());
        }
    }
}
