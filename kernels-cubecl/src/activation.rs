//! What stands between the factors of an adapter.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, activation};
use serde::{Deserialize, Serialize};

/// Function between `A` and `B`.
///
/// Anything but the identity makes the adapter unmergeable: no single weight equals it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Activation {
    /// `B A x`.
    Identity,
    /// `B silu(A x)`.
    Silu,
    /// `B gelu(A x)`.
    Gelu,
    /// `B relu(A x)`.
    Relu,
}

impl Activation {
    /// Applies the function to each element.
    pub fn forward<B: Backend, const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        match self {
            Self::Identity => x,
            Self::Silu => activation::silu(x),
            Self::Gelu => activation::gelu(x),
            Self::Relu => activation::relu(x),
        }
    }

    /// Whether the function changes nothing.
    #[cfg(feature = "cubecl")]
    pub(crate) fn is_identity(&self) -> bool {
        matches!(self, Self::Identity)
    }

    /// The function's derivative at each element.
    fn slope<B: Backend, const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        match self {
            Self::Identity => x.ones_like(),
            Self::Silu => {
                let sigmoid = activation::sigmoid(x.clone());
                sigmoid.clone() * (x * (sigmoid.neg() + 1.0) + 1.0)
            }
            Self::Gelu => {
                let scaled = x.clone() * std::f64::consts::FRAC_1_SQRT_2;
                let density = x.clone().square().mul_scalar(-0.5).exp() * DENSITY_AT_ZERO;
                (scaled.erf() + 1.0) * 0.5 + x * density
            }
            Self::Relu => {
                let dtype = x.dtype();
                x.greater_elem(0.0).float().cast(dtype)
            }
        }
    }
}

/// `1 / sqrt(2 pi)`.
const DENSITY_AT_ZERO: f64 = 0.398_942_280_401_432_7;

/// `scale * activation(z)`: what stands between the factors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Between {
    /// The function.
    pub activation: Activation,
    /// `alpha / r` or what stands for it.
    pub scale: f64,
}

impl Between {
    /// `scale * activation(z)`, for half-precision tensors in f32 with one rounding at the end:
    /// `32 / 24` is 1.3359 when rounded to bf16 first.
    pub fn forward<B: Backend, const D: usize>(&self, z: Tensor<B, D>) -> Tensor<B, D> {
        match z.dtype() {
            DType::F16 | DType::BF16 => {
                let dtype = z.dtype();
                let z = self.activation.forward(z.cast(DType::F32));
                z.mul_scalar(self.scale).cast(dtype)
            }
            _ if self.scale == 1.0 => self.activation.forward(z),
            _ => self.activation.forward(z).mul_scalar(self.scale),
        }
    }

    /// The cotangent of `z` for that of the result.
    pub(crate) fn backward<B: Backend, const D: usize>(
        &self,
        z: Tensor<B, D>,
        grad: Tensor<B, D>,
    ) -> Tensor<B, D> {
        if self.activation == Activation::Identity {
            return self.forward(grad);
        }
        let dtype = grad.dtype();
        let wide = match dtype {
            DType::F16 | DType::BF16 => DType::F32,
            other => other,
        };
        let slope = self.activation.slope(z.cast(wide));
        (grad.cast(wide) * slope).mul_scalar(self.scale).cast(dtype)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::backend::Flex;
    use burn::tensor::TensorData;

    #[test]
    fn scale_of_32_over_24_is_applied_in_f32_to_bf16() {
        let z = Tensor::<Flex, 1>::from_data(TensorData::from([3.0f32, 95.0]), &Default::default())
            .cast(DType::BF16);
        let between = Between {
            activation: Activation::Identity,
            scale: 32.0 / 24.0,
        };
        let y = between.forward(z);
        assert_eq!(y.dtype(), DType::BF16);
        let y: Vec<f32> = y.cast(DType::F32).into_data().to_vec().unwrap();
        assert_eq!(y, [4.0, 126.5]);
        // Negative control: the scale rounded to bf16 first misses by a bf16 step.
        assert_eq!(half::bf16::from_f32(32.0 / 24.0).to_f32(), 1.335_937_5);
        assert_ne!(half::bf16::from_f32(95.0 * 1.335_937_5).to_f32(), 126.5);
    }

    #[test]
    fn functions_have_their_values() {
        let values = |activation: Activation| -> Vec<f32> {
            let x = Tensor::<Flex, 1>::from_floats([-1.0, 1.0], &Default::default());
            activation.forward(x).into_data().to_vec().unwrap()
        };
        for (activation, expected) in [
            (Activation::Identity, [-1.0, 1.0]),
            (Activation::Relu, [0.0, 1.0]),
            (Activation::Silu, [-0.268_941_4, 0.731_058_6]),
            (Activation::Gelu, [-0.158_655_25, 0.841_344_7]),
        ] {
            for (found, expected) in values(activation).into_iter().zip(expected) {
                assert!((found - expected).abs() < 1e-6, "{activation:?}: {found}");
            }
        }
    }

    #[test]
    fn slopes_are_the_central_differences_of_the_functions() {
        let device = Default::default();
        let at = |values: [f64; 4]| {
            Tensor::<Flex, 1>::from_data(TensorData::from(values), (&device, DType::F64))
        };
        let z = [-1.7, -0.3, 0.4, 2.1];
        for activation in [
            Activation::Identity,
            Activation::Silu,
            Activation::Gelu,
            Activation::Relu,
        ] {
            let between = Between {
                activation,
                scale: 1.3,
            };
            let step = 1e-5;
            let up = between.forward(at(z.map(|z| z + step)));
            let down = between.forward(at(z.map(|z| z - step)));
            let expected: Vec<f64> = ((up - down) / (2.0 * step)).into_data().to_vec().unwrap();
            let found: Vec<f64> = between
                .backward(at(z), at([1.0; 4]))
                .into_data()
                .to_vec()
                .unwrap();
            for (found, expected) in found.iter().zip(expected) {
                assert!(
                    (found - expected).abs() < 1e-8,
                    "{activation:?}: {found} and {expected}"
                );
            }
        }
    }
}
