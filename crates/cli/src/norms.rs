//! How large an adapter's deltas are.

use moe_lora_interchange::{FactorPair, HostTensor, PeftAdapter};
use serde::Serialize;

/// Frobenius norms of `s B A`, an expert each.
#[derive(Serialize)]
pub struct Norms {
    pub layer: usize,
    pub projection: &'static str,
    pub rank: usize,
    pub scale: f64,
    pub experts: Vec<f64>,
}

/// The norms of every pair of an adapter; magnitudes are not taken into account.
pub fn norms(adapter: &PeftAdapter) -> Vec<Norms> {
    let layers = adapter.layers.iter();
    layers
        .flat_map(|(&layer, factors)| {
            factors.pairs().map(move |(projection, pair)| Norms {
                layer,
                projection,
                rank: pair.rank(),
                scale: adapter.scale(pair),
                experts: of_experts(pair, adapter.scale(pair)),
            })
        })
        .collect()
}

/// `||B A||^2 = tr(B^T B A A^T)`: products of `[r, r]` instead of `[d_out, d_in]`.
fn of_experts(pair: &FactorPair, scale: f64) -> Vec<f64> {
    let [shared_a, shared_b] = [&pair.a, &pair.b].map(|factor| factor.shape()[0] == 1);
    let experts = pair.a.shape()[0].max(pair.b.shape()[0]);
    let rank = pair.rank();
    let of = |factor: &HostTensor, shared: bool, expert: usize| -> Vec<f64> {
        let values = factor.outer(if shared { 0 } else { expert });
        values.iter().map(|value| f64::from(*value)).collect()
    };
    (0..experts)
        .map(|expert| {
            let (a, b) = (of(&pair.a, shared_a, expert), of(&pair.b, shared_b, expert));
            let columns = a.len() / rank.max(1);
            let mut square = 0.0;
            for i in 0..rank {
                for j in 0..rank {
                    let [a_i, a_j] = [i, j].map(|k| &a[k * columns..][..columns]);
                    let rows_of_a: f64 = a_i.iter().zip(a_j).map(|(x, y)| x * y).sum();
                    let rows = b.chunks_exact(rank);
                    let columns_of_b: f64 = rows.map(|row| row[i] * row[j]).sum();
                    square += rows_of_a * columns_of_b;
                }
            }
            // Rounding can take a norm of zero below it; max would hide a NaN.
            scale.abs() * if square < 0.0 { 0.0 } else { square.sqrt() }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_is_that_of_the_product() {
        let a = HostTensor::new([2, 2, 3], (0..12).map(|i| i as f32 - 5.0).collect()).unwrap();
        let b = HostTensor::new([1, 2, 2], vec![1.0, -2.0, 0.5, 3.0]).unwrap();
        let pair = FactorPair::new(a, b, 1.0).unwrap();
        let found = of_experts(&pair, -2.0);
        for (expert, found) in found.iter().enumerate() {
            let mut square = 0.0f32;
            for row in 0..2 {
                for column in 0..3 {
                    let (a, b) = (pair.a.outer(expert), pair.b.outer(0));
                    let delta = b[row * 2] * a[column] + b[row * 2 + 1] * a[3 + column];
                    square += (2.0 * delta).powi(2);
                }
            }
            assert!((found - f64::from(square.sqrt())).abs() < 1e-5, "{found}");
        }
    }

    #[test]
    fn a_norm_of_no_number_is_none() {
        let tensor = |shape: [usize; 3], value: f32| {
            HostTensor::new(shape, vec![value; shape.iter().product()]).unwrap()
        };
        let (a, b) = (tensor([1, 1, 2], f32::NAN), tensor([1, 2, 1], 1.0));
        let pair = FactorPair::new(a, b, 1.0).unwrap();
        assert!(of_experts(&pair, 1.0)[0].is_nan());
        let (a, b) = (tensor([1, 1, 2], 0.0), tensor([1, 2, 1], 1.0));
        let pair = FactorPair::new(a, b, 1.0).unwrap();
        assert_eq!(of_experts(&pair, -1.0), [0.0]);
    }
}
