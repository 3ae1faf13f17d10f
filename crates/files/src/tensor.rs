//! A tensor on the host.

use crate::FileError;

/// A dense row-major `f32` tensor whose data always fills its shape.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTensor {
    shape: Vec<usize>,
    data: Vec<f32>,
}

impl HostTensor {
    /// A tensor of `shape` over `data`, last axis fastest.
    ///
    /// # Errors
    ///
    /// [`FileError::ElementCount`] when the product of `shape` is not `data.len()`.
    pub fn new(shape: impl Into<Vec<usize>>, data: Vec<f32>) -> Result<Self, FileError> {
        let shape = shape.into();
        let elements = shape
            .iter()
            .try_fold(1usize, |product, &size| product.checked_mul(size));
        if elements != Some(data.len()) {
            let len = data.len();
            return Err(FileError::ElementCount { shape, len });
        }
        Ok(Self { shape, data })
    }

    /// The size of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements, last axis fastest.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// The elements, without a copy.
    pub fn into_data(self) -> Vec<f32> {
        self.data
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// The elements at `index` of the first axis: one expert of `[E, ..]`, one row of a matrix.
    ///
    /// # Panics
    ///
    /// When the tensor is a scalar or `index` is not below the size of the first axis.
    pub fn outer(&self, index: usize) -> &[f32] {
        let size = self.shape.first().copied().unwrap_or(0);
        assert!(
            index < size,
            "index {index} is outside the first axis of shape {:?}",
            self.shape
        );
        let stride = self.data.len() / size;
        &self.data[index * stride..(index + 1) * stride]
    }

    /// Checks the shape; `name` is for the message.
    ///
    /// # Errors
    ///
    /// [`FileError::Shape`] when it is another one.
    pub fn expect_shape(
        &self,
        name: impl FnOnce() -> String,
        expected: &[usize],
    ) -> Result<(), FileError> {
        expect_shape(name, &self.shape, expected)
    }
}

/// Checks a shape; `name` is for the message.
///
/// # Errors
///
/// [`FileError::Shape`] when `found` is not `expected`.
pub fn expect_shape(
    name: impl FnOnce() -> String,
    found: &[usize],
    expected: &[usize],
) -> Result<(), FileError> {
    if found == expected {
        return Ok(());
    }
    Err(FileError::Shape {
        name: name(),
        found: found.to_vec(),
        expected: expected.to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_must_be_filled() {
        let error = HostTensor::new([2, 3], vec![0.0; 5]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "shape [2, 3] does not hold 5 elements (the product of the sizes must equal the number of elements)"
        );
    }

    #[test]
    fn overflowing_shape_is_an_error() {
        let error = HostTensor::new([usize::MAX, 2], vec![]).unwrap_err();
        assert!(matches!(error, FileError::ElementCount { len: 0, .. }));
    }

    #[test]
    fn outer_is_one_slice_of_the_first_axis() {
        let tensor = HostTensor::new([2, 1, 2], vec![1.0, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!(tensor.outer(1), [3.0, 4.0]);
        assert_eq!((tensor.len(), tensor.is_empty()), (4, false));
    }
}
