//! Rotary position embedding.

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};

/// Cosines and sines of the rotation of every position.
///
/// Feature `i` of a head and feature `i + D/2` form a pair, rotated at position `p` by the angle
/// `p * theta^(-2i / D)`. Models that pair neighbouring features use another layout of the same weights.
///
/// # Source
/// Su et al., RoFormer, arXiv 2104.09864, in the half-split layout of the Llama and Qwen families.
#[derive(Clone, Debug)]
pub struct RopeTable<B: Backend> {
    /// `[L, D/2]`.
    cos: Tensor<B, 2>,
    /// `[L, D/2]`.
    sin: Tensor<B, 2>,
}

impl<B: Backend> RopeTable<B> {
    /// Builds the table for positions `0..length`.
    ///
    /// The angles are computed in f32, because the models were trained with f32 angles.
    ///
    /// # Panics
    /// If `head_dim` is odd.
    pub fn new(length: usize, head_dim: usize, theta: f64, device: &B::Device) -> Self {
        assert!(
            head_dim.is_multiple_of(2),
            "head_dim={head_dim} is odd and cannot be rotated in pairs (choose an even one)"
        );
        let half = head_dim / 2;
        let angles: Vec<f32> = (0..length)
            .flat_map(|position| {
                (0..half).map(move |pair| {
                    let exponent = (2 * pair) as f32 / head_dim as f32;
                    position as f32 * (1.0 / (theta as f32).powf(exponent))
                })
            })
            .collect();
        let table = |f: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|&angle| f(angle)).collect();
            Tensor::from_data(TensorData::new(values, [length, half]), device)
        };
        Self {
            cos: table(f32::cos),
            sin: table(f32::sin),
        }
    }

    /// Rotates the heads of queries or keys.
    ///
    /// `y = [x1 cos - x2 sin, x2 cos + x1 sin]` with `x1` and `x2` the halves of a head.
    ///
    /// # Shapes
    /// `x` is `[N, heads, L, D]`, and so is the result.
    ///
    /// # Panics
    /// If `L` or `D` is not that of the table.
    pub fn rotate(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [_, _, length, head_dim] = x.dims();
        let [rows, half] = self.cos.dims();
        assert!(
            rows == length && 2 * half == head_dim,
            "cannot rotate heads of length={length}, head_dim={head_dim} with a table of length={rows}, head_dim={} \
             (build the table from the same sizes)",
            2 * half
        );
        let dtype = x.dtype();
        let cos = self.cos.clone().cast(dtype).unsqueeze::<4>();
        let sin = self.sin.clone().cast(dtype).unsqueeze::<4>();
        let first = x.clone().narrow(3, 0, half);
        let second = x.narrow(3, half, half);
        Tensor::cat(
            vec![
                first.clone() * cos.clone() - second.clone() * sin.clone(),
                second * cos + first * sin,
            ],
            3,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;

    fn rotated(position: usize, head: [f32; 4]) -> Vec<f32> {
        let device = Default::default();
        let rows: Vec<f32> = head.repeat(position + 1);
        let x =
            Tensor::<Flex, 4>::from_data(TensorData::new(rows, [1, 1, position + 1, 4]), &device);
        let y = RopeTable::new(position + 1, 4, 1e4, &device).rotate(x);
        y.into_data().to_vec::<f32>().unwrap()[4 * position..].to_vec()
    }

    fn dot(a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    #[test]
    fn position_zero_is_not_rotated() {
        assert_eq!(rotated(0, [1.0, 2.0, 3.0, 4.0]), [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn pairs_are_half_a_head_apart() {
        let y = rotated(1, [1.0, 0.0, 0.0, 0.0]);
        assert!((y[0] - 1f32.cos()).abs() < 1e-6);
        assert!((y[2] - 1f32.sin()).abs() < 1e-6);
        assert_eq!((y[1], y[3]), (0.0, 0.0));
    }

    #[test]
    fn products_depend_on_the_distance_alone() {
        let (q, k) = ([0.3, -1.0, 0.7, 0.2], [1.1, 0.4, -0.6, 0.9]);
        let near = dot(&rotated(5, q), &rotated(2, k));
        let far = dot(&rotated(13, q), &rotated(10, k));
        assert!((near - far).abs() < 1e-5);
    }
}
