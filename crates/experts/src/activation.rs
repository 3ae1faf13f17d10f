//! What stands between the projections of a gated MLP.

use burn::tensor::Tensor;
use burn::tensor::activation::{sigmoid, silu};
use burn::tensor::backend::Backend;

/// A gated linear unit: what the down projection reads of the gate and up projections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GluActivation {
    /// `silu(gate) * up`.
    Swiglu,
    /// `g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)` and `u` the up projection
    /// clamped to `-limit..=limit`. GPT-OSS has `alpha` 1.702 and `limit` 7.
    ///
    /// What is clamped has no gradient; at the limit itself the gradient is whole.
    ClampedSwiglu {
        /// Slope of the sigmoid.
        alpha: f64,
        /// Largest gate, and largest magnitude of up.
        limit: f64,
    },
}

impl GluActivation {
    /// Element by element on `[T, F]`, or on equal slices of both.
    pub fn forward<B: Backend>(self, gate: Tensor<B, 2>, up: Tensor<B, 2>) -> Tensor<B, 2> {
        match self {
            Self::Swiglu => silu(gate) * up,
            Self::ClampedSwiglu { alpha, limit } => {
                let gate = gate.clamp_max(limit);
                let up = up.clamp(-limit, limit);
                gate.clone() * sigmoid(gate.mul_scalar(alpha)) * up.add_scalar(1.0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::{Autodiff, Flex};

    #[test]
    fn clamped_values_have_no_gradient_and_values_at_the_limit_the_whole_one() {
        let device = Default::default();
        let row = |values: [f32; 5]| {
            Tensor::<Autodiff<Flex>, 2>::from_floats([values], &device).require_grad()
        };
        let (gate, up) = (
            row([-9.0, 8.0, 7.0, 1.0, 1.0]),
            row([1.0, 1.0, 7.0, -8.0, 8.0]),
        );
        let activation = GluActivation::ClampedSwiglu {
            alpha: 1.702,
            limit: 7.0,
        };
        let y = activation.forward(gate.clone(), up.clone());
        let host = |x: Tensor<Flex, 2>| x.into_data().to_vec::<f32>().unwrap();
        let slope = |x: f32| 1.0 / (1.0 + (-1.702 * x).exp());
        let expected = [
            -9.0 * slope(-9.0) * 2.0, // not clamped from below
            7.0 * slope(7.0) * 2.0,
            7.0 * slope(7.0) * 8.0,
            slope(1.0) * -6.0,
            slope(1.0) * 8.0,
        ];
        for (found, expected) in host(y.clone().inner()).into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
        let grads = y.sum().backward();
        let flows = |x: Tensor<Autodiff<Flex>, 2>| -> Vec<bool> {
            host(x.grad(&grads).unwrap())
                .iter()
                .map(|d| *d != 0.0)
                .collect()
        };
        assert_eq!(flows(gate), [true, false, true, true, true]);
        assert_eq!(flows(up), [true, true, true, false, false]);
    }
}
