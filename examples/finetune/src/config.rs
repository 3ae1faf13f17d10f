//! Sizes and switches of the dense layers.

use anyhow::{Result, ensure};
use burn_moe_lora::interchange::{Family, ModelConfig};

/// Which vectors the query and key norms run over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// No norm, as in Qwen2-MoE.
    None,
    /// RMSNorm over the `D` features of every head, one weight vector for all heads, as in Qwen3-MoE.
    PerHead,
    /// RMSNorm over the whole projection, before it is split into heads, as in OLMoE.
    Full,
}

/// Sizes and switches of everything in the model except the MoE blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseConfig {
    /// Rows of the embedding, `V`.
    pub vocab: usize,
    /// Width of the residual stream, `H`.
    pub hidden: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Features of one head, `D`; even, and not necessarily `hidden / heads`.
    pub head_dim: usize,
    /// Added to the mean square inside every RMSNorm.
    pub eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Norm on queries and keys.
    pub qk_norm: QkNorm,
    /// Whether the output projection is the embedding itself.
    pub tie: bool,
}

impl DenseConfig {
    /// The dense part of a hub model's configuration.
    ///
    /// # Errors
    /// An output projection with a bias, and the errors of [`validate`](Self::validate).
    pub fn from_hub(config: &ModelConfig) -> Result<Self> {
        let qwen2 = config.family == Family::Qwen2Moe;
        ensure!(
            qwen2 || !config.attention_bias,
            "attention_bias=true puts a bias on the output projection of {}, which is not supported here \
             (use a model with attention_bias=false)",
            config.family.model_type()
        );
        let dense = Self {
            vocab: config.vocab_size,
            hidden: config.hidden_size,
            layers: config.num_hidden_layers,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
            rope_theta: config.rope_theta,
            qkv_bias: config.attention_bias,
            qk_norm: match config.family {
                Family::Qwen3Moe => QkNorm::PerHead,
                Family::Qwen2Moe => QkNorm::None,
                Family::Olmoe => QkNorm::Full,
            },
            tie: config.tie_word_embeddings,
        };
        dense.validate()?;
        Ok(dense)
    }

    /// Checks that the sizes fit each other.
    ///
    /// # Errors
    /// A size of zero, heads that the key and value heads do not divide, an odd head size, or an `eps` or `rope_theta`
    /// that is not a positive number.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab),
            ("hidden_size", self.hidden),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
        ];
        for (name, value) in sizes {
            ensure!(
                value > 0,
                "{name}=0 leaves nothing to compute (set it in config.json)"
            );
        }
        let (heads, kv_heads, head_dim) = (self.heads, self.kv_heads, self.head_dim);
        ensure!(
            heads.is_multiple_of(kv_heads),
            "num_attention_heads={heads} is not divisible by num_key_value_heads={kv_heads} (correct config.json)"
        );
        ensure!(
            head_dim.is_multiple_of(2),
            "head_dim={head_dim} is odd and cannot be rotated in pairs (correct config.json)"
        );
        ensure!(
            heads.checked_mul(head_dim).is_some(),
            "num_attention_heads={heads} times head_dim={head_dim} overflows (correct config.json)"
        );
        for (name, value) in [("rms_norm_eps", self.eps), ("rope_theta", self.rope_theta)] {
            ensure!(
                value.is_finite() && value > 0.0,
                "{name}={value} is not a positive number (correct config.json)"
            );
        }
        Ok(())
    }

    /// Width of the query projection, `heads * head_dim`.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of the key projection and of the value projection, `kv_heads * head_dim`.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> DenseConfig {
        DenseConfig {
            vocab: 8,
            hidden: 4,
            layers: 1,
            heads: 2,
            kv_heads: 1,
            head_dim: 2,
            eps: 1e-6,
            rope_theta: 1e4,
            qkv_bias: false,
            qk_norm: QkNorm::None,
            tie: false,
        }
    }

    fn message(config: DenseConfig) -> String {
        config.validate().unwrap_err().to_string()
    }

    #[test]
    fn a_fitting_config_passes() {
        assert!(small().validate().is_ok());
    }

    #[test]
    fn sizes_that_do_not_fit_are_named_with_their_values() {
        let heads = DenseConfig {
            heads: 3,
            kv_heads: 2,
            ..small()
        };
        assert_eq!(
            message(heads),
            "num_attention_heads=3 is not divisible by num_key_value_heads=2 (correct config.json)"
        );
        let odd = DenseConfig {
            head_dim: 3,
            ..small()
        };
        assert!(message(odd).starts_with("head_dim=3 is odd"));
        let empty = DenseConfig {
            layers: 0,
            ..small()
        };
        assert!(message(empty).starts_with("num_hidden_layers=0"));
        let theta = DenseConfig {
            rope_theta: f64::NAN,
            ..small()
        };
        assert!(message(theta).starts_with("rope_theta=NaN"));
    }
}
