//! A frozen linear.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_moe_lora::kernels::{GroupedBackend, linear};

use crate::weights::WeightReader;

/// `y = x W^T (+ b)` with a weight that is never trained.
#[derive(Module, Debug)]
pub struct Linear<B: Backend> {
    /// `[d_out, d_in]`, as it lies in the file.
    pub weight: Tensor<B, 2>,
    /// `[d_out]`, if there is one.
    pub bias: Option<Tensor<B, 1>>,
}

impl<B: GroupedBackend> Linear<B> {
    /// Reads `{name}.weight` and, if `bias` is set, `{name}.bias`.
    ///
    /// # Errors
    /// A tensor that is missing or has another shape.
    pub fn load(
        reader: &mut WeightReader<'_, B>,
        name: &str,
        d_out: usize,
        d_in: usize,
        bias: bool,
    ) -> Result<Self> {
        Ok(Self {
            weight: reader.read(&format!("{name}.weight"), [d_out, d_in])?,
            bias: match bias {
                true => Some(reader.read(&format!("{name}.bias"), [d_out])?),
                false => None,
            },
        })
    }

    /// Applies the linear to rows.
    ///
    /// Activations with more axes are flattened by the caller: a matmul of a `[N, L, d_in]` tensor with a matrix would
    /// first broadcast the matrix over `N`, and its backward would sum that axis again.
    ///
    /// # Shapes
    /// `x` is `[T, d_in]`, the result `[T, d_out]`.
    ///
    /// # Panics
    /// If the last axis of `x` is not `d_in`.
    pub fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let y = linear(x, self.weight.clone());
        match &self.bias {
            Some(bias) => y + bias.clone().unsqueeze(),
            None => y,
        }
    }

    /// Number of weights and biases.
    pub fn parameter_count(&self) -> usize {
        let [d_out, d_in] = self.weight.dims();
        d_out * d_in + self.bias.as_ref().map_or(0, |_| d_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;

    #[test]
    fn rows_meet_the_transposed_weight_and_the_bias() {
        let device = Default::default();
        let linear = Linear::<Flex> {
            weight: Tensor::from_floats([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], &device),
            bias: Some(Tensor::from_floats([0.5, 0.0, -0.5], &device)),
        };
        let y = linear.forward(Tensor::from_floats([[1.0, 10.0]], &device));
        assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [21.5, 43.0, 64.5]);
        assert_eq!(linear.parameter_count(), 9);
    }
}
