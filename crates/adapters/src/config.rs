//! What an adapter is: rank, scale, start values, activation and sharing.

use burn::tensor::DType;
use moe_lora_kernels::{Activation, Between, Compute, Strategy};
use serde::{Deserialize, Serialize};

use crate::{AdapterError, Dropout, Init, ShardAxis};

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
    /// DoRA: the rows of `W + s B A` have trained lengths, see [`Linear::start_magnitudes`](crate::Linear::start_magnitudes).
    #[serde(default)]
    pub dora: bool,
    /// Which factors the experts of a grouped linear share.
    pub sharing: Sharing,
    /// Dropout in training. No part of what the adapter is: checkpoints do not hold it.
    #[serde(default)]
    pub dropout: Option<Dropout>,
    /// Seed of the start values and of dropout.
    pub seed: u64,
    /// Element type of the factors.
    pub dtype: DType,
    /// How the products are computed. No part of what the adapter is: checkpoints do not hold it.
    #[serde(skip)]
    pub compute: Compute,
}

/// Which factors the experts of a grouped linear share.
///
/// A shared factor is one matrix for all experts of the layer, the same on every expert-parallel
/// rank. Its gradient is summed over the [`Ep`](moe_lora_parallel::Ep) group, see
/// [`sync_gradients`](crate::sync_gradients).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sharing {
    /// None: an adapter for each expert.
    PerExpert,
    /// The factor on the hidden side: `A` under a column-parallel base, `B` under a row-parallel
    /// one. The other one is per expert.
    SharedOuter,
    /// Both: one adapter for all experts.
    Shared,
}

impl Sharing {
    /// Whether the experts share `A`, and whether they share `B`, under a base that is cut along
    /// `axis`. A replicated base has no hidden side.
    pub(crate) fn factors(self, axis: ShardAxis) -> [bool; 2] {
        match (self, axis) {
            (Self::Shared, _) => [true; 2],
            (Self::SharedOuter, ShardAxis::Out) => [true, false],
            (Self::SharedOuter, ShardAxis::In) => [false, true],
            (Self::SharedOuter, ShardAxis::Whole) | (Self::PerExpert, _) => [false; 2],
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
            dora: false,
            sharing: Sharing::PerExpert,
            dropout: None,
            seed: 0,
            dtype: DType::F32,
            compute: Compute::default(),
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

    /// Trains the lengths of the rows of `W + s B A` too.
    pub fn with_dora(mut self, dora: bool) -> Self {
        self.dora = dora;
        self
    }

    /// Which factors the experts share.
    pub fn with_sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// Dropout in training. Layers then take the ids of their tokens.
    pub fn with_dropout(mut self, dropout: Dropout) -> Self {
        self.dropout = Some(dropout);
        self
    }

    /// Seed of the start values and of dropout.
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Element type of the factors.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Which path the products take.
    pub fn with_strategy(mut self, strategy: Strategy) -> Self {
        self.compute.strategy = strategy;
        self
    }

    /// Lets f32 products be rounded to TF32 on tensor cores. Off at first: f32 is exact.
    pub fn with_tf32(mut self, tf32: bool) -> Self {
        self.compute.tf32 = tf32;
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

    /// What stands between the factors.
    pub fn between(&self) -> Between {
        Between {
            activation: self.activation,
            scale: self.scale(),
        }
    }

    /// Checks the numbers.
    ///
    /// # Errors
    ///
    /// When the rank is zero, alpha is not finite, the dropout is no probability below 1, or DoRA has a
    /// function between the factors or dropout.
    pub fn check(&self) -> Result<(), AdapterError> {
        if self.rank == 0 {
            return Err(AdapterError::ZeroRank);
        }
        if !self.alpha.is_finite() {
            return Err(AdapterError::Alpha { alpha: self.alpha });
        }
        if self.dora && self.activation != Activation::Identity {
            return Err(AdapterError::DoraActivation {
                activation: self.activation,
            });
        }
        if let Some(Dropout { probability, .. }) = self.dropout {
            if !(0.0..1.0).contains(&probability) {
                return Err(AdapterError::Dropout { probability });
            }
            if self.dora && probability > 0.0 {
                return Err(AdapterError::DoraDropout { probability });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn dora_with_a_function_between_the_factors_is_refused() {
        let config = LoraConfig::new(2, 4.0).with_dora(true);
        assert_eq!(config.check(), Ok(()));
        let silu = config.with_activation(Activation::Silu).check();
        assert_eq!(
            silu.unwrap_err().to_string(),
            "DoRA with Silu between A and B has no weight whose rows have a length (use the identity)"
        );
    }

    #[test]
    fn dora_with_dropout_is_refused() {
        for dropout in [Dropout::before_a, Dropout::after_b] {
            let check = |dora, p| {
                let config = LoraConfig::new(2, 4.0).with_dora(dora);
                config.with_dropout(dropout(p)).check()
            };
            assert_eq!(check(false, 0.1), Ok(()));
            assert_eq!(check(true, 0.0), Ok(()));
            assert_eq!(
                check(true, 0.1).unwrap_err().to_string(),
                "DoRA with dropout=0.1 needs the base's output of the dropped input, which is not computed (use one or the other)"
            );
        }
    }

    #[test]
    fn a_dropout_that_is_no_probability_is_refused() {
        let check = |p| {
            LoraConfig::new(1, 1.0)
                .with_dropout(Dropout::before_a(p))
                .check()
        };
        assert_eq!(check(0.0), Ok(()));
        for wrong in [1.0, -0.1, f64::NAN] {
            assert!(check(wrong).is_err());
        }
        assert_eq!(
            check(1.0).unwrap_err().to_string(),
            "dropout=1 is not in 0..1 (choose one such as 0.1, or none)"
        );
    }
}
