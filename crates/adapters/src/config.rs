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
    /// PiSSA: the factors start as the principal part of the weight and the base keeps the rest, see
    /// [`Linear::start_pissa`](crate::Linear::start_pissa).
    #[serde(default)]
    pub pissa: bool,
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
            pissa: false,
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

    /// Starts the factors as the principal part of the weight, over a base that keeps the rest.
    pub fn with_pissa(mut self, pissa: bool) -> Self {
        self.pissa = pissa;
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

    /// The rank that spends the parameters of rank `rank` on the `K = top_k` experts of a token:
    /// `rank / K`. The scale follows it, `alpha * K / rank`, at every topology.
    ///
    /// It is the rank of adapters of one routed expert each. An adapter that experts share, those of
    /// shared experts and of dense linears are passed once by each token and keep `rank`.
    /// [`Targets::with_rank_per_expert`](crate::Targets::with_rank_per_expert) tells them apart.
    ///
    /// # Errors
    ///
    /// When `top_k` is zero or does not divide `rank`.
    pub fn rank_per_expert(rank: usize, top_k: usize) -> Result<usize, AdapterError> {
        match rank.checked_rem(top_k) {
            Some(0) => Ok(rank / top_k),
            _ => Err(AdapterError::RankPerExpert { rank, top_k }),
        }
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

    /// Checks the numbers, and that the settings go together.
    ///
    /// # Errors
    ///
    /// When the rank is zero, alpha is not finite, the dropout is no probability below 1, or two
    /// settings contradict each other.
    pub fn check(&self) -> Result<(), AdapterError> {
        if self.rank == 0 {
            return Err(AdapterError::ZeroRank);
        }
        if !self.alpha.is_finite() {
            return Err(AdapterError::Alpha { alpha: self.alpha });
        }
        if let Some(Dropout { probability, .. }) = self.dropout
            && !(0.0..1.0).contains(&probability)
        {
            return Err(AdapterError::Dropout { probability });
        }
        self.check_combinations()
    }

    /// Everything that makes no sense together, in one place.
    fn check_combinations(&self) -> Result<(), AdapterError> {
        let Self {
            dora,
            pissa,
            activation,
            init_a,
            init_b,
            alpha,
            ..
        } = *self;
        let curved = activation != Activation::Identity;
        let dropout = self.dropout.map_or(0.0, |dropout| dropout.probability);
        let own_start = init_a != Init::Kaiming || init_b != Init::Zero;
        let refused = [
            (
                dora && curved,
                "DoRA",
                format!("{activation:?} between A and B"),
                "has no weight whose rows have a length (use the identity)",
            ),
            (
                pissa && curved,
                "PiSSA",
                format!("{activation:?} between A and B"),
                "has no product that is a part of the weight (use the identity)",
            ),
            (
                pissa && self.sharing != Sharing::PerExpert,
                "PiSSA",
                format!("{:?} factors", self.sharing),
                "has no principal part that the weights of all experts have in common (use an adapter an expert)",
            ),
            (
                pissa && dropout > 0.0,
                "PiSSA",
                format!("dropout={dropout}"),
                "would drop the base's own output, most of which the adapter holds (use one or the other)",
            ),
            (
                pissa && own_start,
                "PiSSA",
                format!("A starting {init_a:?} and B {init_b:?}"),
                "starts both factors from the weight (leave their start values out)",
            ),
            (
                pissa && alpha <= 0.0,
                "PiSSA",
                format!("alpha={alpha}"),
                "has no part of the weight with that scale (choose a positive one such as the rank)",
            ),
            (
                init_a == Init::Zero && init_b == Init::Zero,
                "A starting Zero",
                "B starting Zero".into(),
                "has gradients of zero for ever (start one of the two elsewhere)",
            ),
        ];
        match refused.into_iter().find(|(both, ..)| *both) {
            None => Ok(()),
            Some((_, first, second, because)) => Err(AdapterError::Combination {
                first,
                second,
                because,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use insta::assert_snapshot;

    #[test]
    fn rank_per_expert_divides_by_top_k_or_names_both() {
        assert_eq!(LoraConfig::rank_per_expert(8, 4), Ok(2));
        let message = |rank, top_k| {
            let error = LoraConfig::rank_per_expert(rank, top_k).unwrap_err();
            error.to_string()
        };
        assert_snapshot!(message(8, 3), @"rank=8 is not divisible by top_k=3 experts of a token (choose a multiple of 3 as rank)");
        assert_snapshot!(message(8, 0), @"rank=8 is not divisible by top_k=0 experts of a token (give the number that the router chooses)");
    }

    #[test]
    fn a_rank_stabilised_scale_divides_by_the_root_of_the_rank() {
        assert_eq!(LoraConfig::new(16, 16.0).with_rslora(true).scale(), 4.0);
        // The fault: without the root, 16 / 16.
        assert_eq!(LoraConfig::new(16, 16.0).scale(), 1.0);
    }

    #[test]
    fn zero_rank_and_endless_alpha_are_refused() {
        assert_eq!(LoraConfig::new(0, 1.0).check(), Err(AdapterError::ZeroRank));
        assert!(LoraConfig::new(1, f64::NAN).check().is_err());
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused_with_the_reason() {
        let plain = LoraConfig::new(2, 4.0);
        let (dora, pissa) = (plain.with_dora(true), plain.with_pissa(true));
        let refused = |config: LoraConfig| config.check().unwrap_err().to_string();
        assert_snapshot!(refused(dora.with_activation(Activation::Silu)), @"DoRA with Silu between A and B has no weight whose rows have a length (use the identity)");
        assert_snapshot!(refused(pissa.with_activation(Activation::Relu)), @"PiSSA with Relu between A and B has no product that is a part of the weight (use the identity)");
        assert_snapshot!(refused(pissa.with_sharing(Sharing::Shared)), @"PiSSA with Shared factors has no principal part that the weights of all experts have in common (use an adapter an expert)");
        assert_snapshot!(refused(pissa.with_dropout(Dropout::before_a(0.1))), @"PiSSA with dropout=0.1 would drop the base's own output, most of which the adapter holds (use one or the other)");
        assert_snapshot!(refused(pissa.with_init_b(Init::Xavier)), @"PiSSA with A starting Kaiming and B Xavier starts both factors from the weight (leave their start values out)");
        assert_snapshot!(refused(LoraConfig { alpha: -1.0, ..pissa }), @"PiSSA with alpha=-1 has no part of the weight with that scale (choose a positive one such as the rank)");
        assert_snapshot!(refused(plain.with_init_a(Init::Zero)), @"A starting Zero with B starting Zero has gradients of zero for ever (start one of the two elsewhere)");
    }

    #[test]
    fn settings_that_go_together_are_taken() {
        let plain = LoraConfig::new(2, 4.0);
        for config in [
            plain.with_dora(true).with_pissa(true).with_rslora(true),
            plain
                .with_dora(true)
                .with_dropout(Dropout::before_a(0.1))
                .with_sharing(Sharing::Shared),
            plain
                .with_activation(Activation::Silu)
                .with_dropout(Dropout::after_b(0.1)),
            plain.with_init_a(Init::Zero).with_init_b(Init::Xavier),
        ] {
            assert_eq!(config.check(), Ok(()), "{config:?}");
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
