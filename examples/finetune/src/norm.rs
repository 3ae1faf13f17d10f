//! Root-mean-square norm.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::precision::{at_least_f32, back_to};
use crate::weights::WeightReader;

/// `y = w * x / sqrt(mean(x^2) + eps)` over the last axis.
#[derive(Module, Debug)]
pub struct RmsNorm<B: Backend> {
    /// `[d]`.
    pub weight: Tensor<B, 1>,
    /// Added to the mean square.
    pub eps: f64,
}

impl<B: Backend> RmsNorm<B> {
    /// Reads `{name}.weight`.
    ///
    /// # Errors
    /// A tensor that is missing or is not `[width]`.
    pub fn load(
        reader: &mut WeightReader<'_, B>,
        name: &str,
        width: usize,
        eps: f64,
    ) -> Result<Self> {
        let weight = reader.read(&format!("{name}.weight"), [width])?;
        Ok(Self { weight, eps })
    }

    /// Normalises the last axis.
    ///
    /// The mean square is taken in f32 at least; the weight is applied after the cast back, which is where hub models
    /// apply it and matters in half precision.
    ///
    /// # Shapes
    /// `x` is `[.., d]`, and so is the result.
    ///
    /// # Panics
    /// If the last axis of `x` is not `d`.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        let dtype = x.dtype();
        let x = at_least_f32(x);
        let mean_square = x.clone().square().mean_dim(D - 1);
        let scale = mean_square.add_scalar(self.eps).sqrt().recip();
        back_to(x * scale, dtype) * self.weight.clone().unsqueeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;

    #[test]
    fn rows_get_unit_mean_square_times_the_weight() {
        let device = Default::default();
        let norm = RmsNorm::<Flex> {
            weight: Tensor::from_floats([1.0, 2.0], &device),
            eps: 1e-12,
        };
        let y = norm.forward(Tensor::<Flex, 2>::from_floats([[3.0, 4.0]], &device));
        let root = 12.5f32.sqrt();
        let y = y.into_data().to_vec::<f32>().unwrap();
        assert!((y[0] - 3.0 / root).abs() < 1e-6);
        assert!((y[1] - 8.0 / root).abs() < 1e-6);
    }

    #[test]
    fn a_zero_row_stays_zero() {
        let device = Default::default();
        let norm = RmsNorm::<Flex> {
            weight: Tensor::ones([4], &device),
            eps: 1e-6,
        };
        let y = norm.forward(Tensor::<Flex, 3>::zeros([1, 1, 4], &device));
        assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [0.0; 4]);
    }
}
