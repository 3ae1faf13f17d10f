//! What an adapter is: rank, scale, start values, activation and sharing.

use burn::tensor::{DType, Tensor, activation, backend::Backend};
use serde::{Deserialize, Serialize};

use crate::{AdapterError, Init};

/// Settings of a LoRA adapter. The rank is that of the full adapter at every topology.
///
/// ```
/// use moe_lora_adapters::LoraConfig;
///
/// assert_eq!(LoraConfig::new(8, 16.0).scale(), 2.0);
/// assert_eq!(LoraConfig::new(16, 16.0).with_rslora(true).scale(), 4.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Rank `r`.
    pub rank: usize,
    /// Alpha; the delta is scaled by `alpha / r`.
    pub alpha: f64,
    /// Scale by `alpha / sqrt(r)` instead.
    pub rslora: bool,
    /// Start values of `A`.
    pub init_a: Init,
    /// Start values of `B`.
    pub init_b: Init,
    /// Function between `A` and `B`.
    pub activation: Activation,
    /// How the experts of a grouped linear share the adapter.
    pub sharing: Sharing,
    /// Seed of the start values.
    pub seed: u64,
    /// Element type of the factors.
    pub dtype: DType,
}

/// How many adapters a grouped linear has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sharing {
    /// One for each expert.
    PerExpert,
    /// One for all experts of the layer, on every expert-parallel rank the same. Its gradient is
    /// summed over the [`Ep`](moe_lora_parallel::Ep) group, see [`sync_gradients`](crate::sync_gradients).
    Shared,
}

/// Function between `A` and `B`.
///
/// Anything but the identity makes the adapter unmergeable: no single weight equals it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
}

impl LoraConfig {
    /// Rank and alpha; `A` starts Kaiming-uniform, `B` zero, one adapter an expert, f32.
    pub fn new(rank: usize, alpha: f64) -> Self {
        Self {
            rank,
            alpha,
            rslora: false,
            init_a: Init::Kaiming,
            init_b: Init::Zero,
            activation: Activation::Identity,
            sharing: Sharing::PerExpert,
            seed: 0,
            dtype: DType::F32,
        }
    }

    /// Scales by `alpha / sqrt(r)`.
    pub fn with_rslora(mut self, rslora: bool) -> Self {
        self.rslora = rslora;
        self
    }

    /// Start values of `A`.
    pub fn with_init_a(mut self, init: Init) -> Self {
        self.init_a = init;
        self
    }

    /// Start values of `B`.
    pub fn with_init_b(mut self, init: Init) -> Self {
        self.init_b = init;
        self
    }

    /// Function between `A` and `B`.
    pub fn with_activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// How experts share the adapter.
    pub fn with_sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// Seed of the start values.
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Element type of the factors.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// The rank that spends the parameters of rank `dim` on `top_k` active experts: `dim / top_k`.
    ///
    /// Holds for adapters of one expert each; a shared adapter takes its rank from
    /// [`new`](Self::new), being counted once however many experts are active.
    ///
    /// # Errors
    ///
    /// When `top_k` is zero or does not divide `dim`.
    pub fn rank_per_expert(dim: usize, top_k: usize) -> Result<usize, AdapterError> {
        moe_lora_parallel::shard_extent("rank", dim, "top_k", top_k).map_err(|reason| {
            AdapterError::Topology {
                path: "rank per expert".into(),
                reason,
            }
        })
    }

    /// `alpha / r`, or `alpha / sqrt(r)` with rsLoRA. The same at every topology.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Checks the numbers.
    ///
    /// # Errors
    ///
    /// When the rank is zero or alpha is not finite.
    pub fn check(&self) -> Result<(), AdapterError> {
        if self.rank == 0 {
            return Err(AdapterError::ZeroRank);
        }
        if !self.alpha.is_finite() {
            return Err(AdapterError::Alpha { alpha: self.alpha });
        }
        Ok(())
    }
}

/// Multiplies by the adapter's scale, for half-precision tensors in f32 with one rounding at the
/// end: `32 / 24` is 1.3359 when rounded to bf16 first.
pub(crate) fn scale_in_f32<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    scale: f64,
) -> Tensor<B, D> {
    match x.dtype() {
        DType::F16 | DType::BF16 => {
            let dtype = x.dtype();
            x.cast(DType::F32).mul_scalar(scale).cast(dtype)
        }
        _ if scale == 1.0 => x,
        _ => x.mul_scalar(scale),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;
    use burn::tensor::TensorData;

    #[test]
    fn scale_of_32_over_24_is_applied_in_f32_to_bf16() {
        let device = Default::default();
        let x = Tensor::<Flex, 1>::from_data(TensorData::from([3.0f32, 95.0]), &device)
            .cast(DType::BF16);
        let y = scale_in_f32(x, LoraConfig::new(24, 32.0).scale());
        assert_eq!(y.dtype(), DType::BF16);
        let y: Vec<f32> = y.cast(DType::F32).into_data().to_vec().unwrap();
        assert_eq!(y, [4.0, 126.5]);
        // Negative control: the scale rounded to bf16 first misses by a bf16 step.
        assert_eq!(half::bf16::from_f32(32.0 / 24.0).to_f32(), 1.335_937_5);
        assert_ne!(half::bf16::from_f32(95.0 * 1.335_937_5).to_f32(), 126.5);
    }

    #[test]
    fn rank_per_expert_divides_by_top_k() {
        assert_eq!(LoraConfig::rank_per_expert(8, 4), Ok(2));
        assert!(LoraConfig::rank_per_expert(8, 3).is_err());
        assert!(LoraConfig::rank_per_expert(8, 0).is_err());
    }

    #[test]
    fn zero_rank_and_endless_alpha_are_refused() {
        assert_eq!(LoraConfig::new(0, 1.0).check(), Err(AdapterError::ZeroRank));
        assert!(LoraConfig::new(1, f64::NAN).check().is_err());
    }

    #[test]
    fn functions_between_the_factors_have_their_values() {
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
}
