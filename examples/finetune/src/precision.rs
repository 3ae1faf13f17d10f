//! Reductions in single precision for tensors that are stored in half precision.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Tensor};

/// Casts half-precision tensors up to f32; f32 and f64 tensors are returned as they are.
///
/// A sum of many bf16 terms loses its small ones, so softmax, RMSNorm and the loss reduce in f32.
///
/// # Shapes
/// Any shape, unchanged.
pub fn at_least_f32<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(FloatDType::F32),
        _ => tensor,
    }
}

/// Casts `tensor` to `dtype` unless it is of that type already.
///
/// # Shapes
/// Any shape, unchanged.
pub fn back_to<B: Backend, const D: usize>(tensor: Tensor<B, D>, dtype: DType) -> Tensor<B, D> {
    if tensor.dtype() == dtype {
        tensor
    } else {
        tensor.cast(FloatDType::from(dtype))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;

    #[test]
    fn half_precision_goes_up_and_comes_back() {
        let half =
            Tensor::<Flex, 1>::from_floats([1.0, 2.5], &Default::default()).cast(FloatDType::BF16);
        let up = at_least_f32(half);
        assert_eq!(up.dtype(), DType::F32);
        assert_eq!(back_to(up, DType::BF16).dtype(), DType::BF16);
    }

    #[test]
    fn double_precision_is_left_alone() {
        let double =
            Tensor::<Flex, 1>::from_floats([1.0], &Default::default()).cast(FloatDType::F64);
        assert_eq!(at_least_f32(double).dtype(), DType::F64);
    }
}
