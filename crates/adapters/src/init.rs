//! Initial values as a pure function of the element, so that every topology starts from the same
//! full tensors.

use moe_lora_kernels::fnv1a;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::WeightLayout;

/// Distribution of a factor's initial values. Fans are those of the full weight.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Init {
    /// Uniform in `±1/sqrt(d_in)`: Kaiming with `a = sqrt(5)`, the usual start of `A`.
    Kaiming,
    /// Uniform in `±sqrt(6 / (d_in + d_out))`.
    Xavier,
    /// Normal with mean 0 and the given standard deviation.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Zeros, the usual start of `B`.
    Zero,
}

/// Names a weight among all weights of a run. Each element's value depends on the seed, the
/// path, the *global* expert and the element's *global* row and column, and on nothing else.
#[derive(Clone, Copy, Debug)]
pub struct InitKey<'a> {
    /// Seed of the run.
    pub seed: u64,
    /// Path of the weight in the model, such as `layers.0.mlp.experts.down_proj.lora_A`.
    pub path: &'a str,
}

impl Init {
    /// The local part of the full initial weight, row-major.
    pub fn values(&self, key: InitKey<'_>, layout: &WeightLayout) -> Vec<f32> {
        let uniform = |bound: f64, bits: u64| (unit(bits >> 32) * 2.0 - 1.0) * bound;
        let (d_in, d_out) = (layout.d_in as f64, layout.d_out as f64);
        let mut stream = Stream::new(key, layout);
        layout.gather(|expert, row, column| {
            let value = match self {
                Init::Zero => return 0.0,
                Init::Kaiming => uniform(d_in.sqrt().recip(), stream.at(expert, row, column)),
                Init::Xavier => uniform(
                    (6.0 / (d_in + d_out)).sqrt(),
                    stream.at(expert, row, column),
                ),
                Init::Normal { std } => {
                    let bits = stream.at(expert, row, column);
                    // Box-Muller; 1 - u is never zero.
                    let radius = (-2.0 * (1.0 - unit(bits >> 32)).ln()).sqrt();
                    radius * (std::f64::consts::TAU * unit(bits & 0xffff_ffff)).cos() * std
                }
            };
            value as f32
        })
    }
}

/// 32 bits to `[0, 1)`.
fn unit(bits: u64) -> f64 {
    bits as f64 / (1u64 << 32) as f64
}

/// Random bits by element: one ChaCha stream an expert, one 64-bit word an element.
struct Stream {
    rng: ChaCha8Rng,
    expert: Option<usize>,
    d_in: usize,
    next: usize,
}

impl Stream {
    fn new(key: InitKey<'_>, layout: &WeightLayout) -> Self {
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&key.seed.to_le_bytes());
        seed[8..16].copy_from_slice(&fnv1a(key.path).to_le_bytes());
        Self {
            rng: ChaCha8Rng::from_seed(seed),
            expert: None,
            d_in: layout.d_in,
            next: 0,
        }
    }

    fn at(&mut self, expert: usize, row: usize, column: usize) -> u64 {
        let index = row * self.d_in + column;
        if self.expert != Some(expert) || self.next != index {
            self.rng.set_stream(expert as u64);
            self.rng.set_word_pos(2 * index as u128);
            self.expert = Some(expert);
        }
        self.next = index + 1;
        self.rng.next_u64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ShardAxis;

    const KEY: InitKey<'static> = InitKey {
        seed: 7,
        path: "layers.0.mlp.experts.down_proj.lora_A",
    };

    fn layout(axis: ShardAxis, experts: std::ops::Range<usize>, ranks: usize) -> WeightLayout {
        WeightLayout {
            experts: Some(experts),
            d_out: 8,
            d_in: 12,
            fragments: if axis == ShardAxis::Out { 2 } else { 1 },
            axis,
            rank: ranks - 1,
            ranks,
        }
    }

    #[test]
    fn shards_are_slices_of_the_same_full_tensor_at_every_ep_and_etp() {
        for init in [Init::Kaiming, Init::Xavier, Init::Normal { std: 0.02 }] {
            let full = init.values(KEY, &layout(ShardAxis::Whole, 0..4, 1));
            for axis in [ShardAxis::Out, ShardAxis::In] {
                for (experts, ranks) in [(0..4, 2), (2..4, 1), (1..2, 4)] {
                    let layout = layout(axis, experts, ranks);
                    let expected =
                        layout.gather(|e, row, column| full[(e * 8 + row) * 12 + column]);
                    assert_eq!(init.values(KEY, &layout), expected, "{init:?} {layout:?}");
                }
            }
        }
    }

    #[test]
    fn experts_paths_and_seeds_differ() {
        let values =
            |key, experts| Init::Kaiming.values(key, &layout(ShardAxis::Whole, experts, 1));
        let base = values(KEY, 0..1);
        assert_ne!(base, values(KEY, 1..2));
        assert_ne!(base, values(InitKey { seed: 8, ..KEY }, 0..1));
        assert_ne!(
            base,
            values(
                InitKey {
                    path: "other",
                    ..KEY
                },
                0..1
            )
        );
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let layout = WeightLayout {
            experts: None,
            d_out: 200,
            d_in: 300,
            fragments: 1,
            axis: ShardAxis::Whole,
            rank: 0,
            ranks: 1,
        };
        for (init, std) in [
            (Init::Kaiming, (1.0f64 / 300.0 / 3.0).sqrt()),
            (Init::Xavier, (6.0f64 / 500.0 / 3.0).sqrt()),
            (Init::Normal { std: 0.5 }, 0.5),
        ] {
            let values = init.values(KEY, &layout);
            let n = values.len() as f64;
            let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
            let var = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n;
            assert!(mean.abs() < 0.02 * std, "{init:?}: mean {mean}");
            assert!(
                (var.sqrt() / std - 1.0).abs() < 0.02,
                "{init:?}: std {}",
                var.sqrt()
            );
        }
        assert!(Init::Zero.values(KEY, &layout).iter().all(|v| *v == 0.0));
    }
}
