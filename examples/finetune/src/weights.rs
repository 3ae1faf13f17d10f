//! Reading frozen weights by name, with their shapes checked.

use anyhow::{Context, Result, ensure};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};

/// Gives the shape and the row-major values of a tensor when asked for its hub name.
pub type WeightSource<'a> = dyn FnMut(&str) -> Result<(Vec<usize>, Vec<f32>)> + 'a;

/// Turns what a source gives into tensors on one device.
///
/// The tensors track no gradients: under an autodiff backend they stay constants.
pub struct WeightReader<'a, B: Backend> {
    source: &'a mut WeightSource<'a>,
    device: &'a B::Device,
}

impl<'a, B: Backend> WeightReader<'a, B> {
    /// Reads from `source` to `device`.
    pub fn new(source: &'a mut WeightSource<'a>, device: &'a B::Device) -> Self {
        Self { source, device }
    }

    /// Reads one tensor.
    ///
    /// # Errors
    /// The source's own error, or a tensor whose shape is not `shape`.
    pub fn read<const D: usize>(&mut self, name: &str, shape: [usize; D]) -> Result<Tensor<B, D>> {
        let (found, values) =
            (self.source)(name).with_context(|| format!("cannot read weight '{name}'"))?;
        ensure!(
            found == shape,
            "weight '{name}' has shape {found:?} but config.json implies {shape:?} \
             (check that the two files belong to one model)"
        );
        let count = shape
            .iter()
            .try_fold(1usize, |count, &side| count.checked_mul(side));
        ensure!(
            count == Some(values.len()),
            "weight '{name}' has {} values, which is not what its shape {shape:?} holds (fetch the file again)",
            values.len()
        );
        Ok(Tensor::from_data(
            TensorData::new(values, shape),
            self.device,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;

    fn read(shape: Vec<usize>, values: Vec<f32>) -> Result<Tensor<Flex, 2>> {
        let mut source = move |_: &str| Ok((shape.clone(), values.clone()));
        WeightReader::<Flex>::new(&mut source, &Default::default()).read("a.weight", [2, 1])
    }

    #[test]
    fn a_matching_tensor_is_read() {
        let tensor = read(vec![2, 1], vec![1.0, 2.0]).unwrap();
        assert_eq!(tensor.into_data().to_vec::<f32>().unwrap(), [1.0, 2.0]);
    }

    #[test]
    fn a_wrong_shape_is_named_with_both_sides() {
        let error = read(vec![1, 2], vec![1.0, 2.0]).unwrap_err().to_string();
        assert_eq!(
            error,
            "weight 'a.weight' has shape [1, 2] but config.json implies [2, 1] \
             (check that the two files belong to one model)"
        );
    }

    #[test]
    fn missing_values_are_an_error() {
        let error = read(vec![2, 1], vec![1.0]).unwrap_err().to_string();
        assert!(error.contains("has 1 values, which is not what its shape [2, 1] holds"));
    }
}
