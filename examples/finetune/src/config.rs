//! Sizes and switches of the dense layers.

use anyhow::{Context, Result, ensure};
use burn_moe_lora::interchange::{ModelConfig, QkNorm};

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
    /// An attention that is not run here, dense layers among those with experts, an output projection with a bias, and
    /// the errors of [`validate`](Self::validate).
    pub fn from_hub(config: &ModelConfig) -> Result<Self> {
        let family = config.family.model_type;
        let attention = config.attention.with_context(|| {
            format!(
                "the attention of {family} is not run here (fine-tune a model with grouped-query attention, such as \
                 qwen3_moe, qwen2_moe, olmoe or mixtral)"
            )
        })?;
        let layers = config.num_hidden_layers;
        let dense = (0..layers).find(|layer| !config.is_moe(*layer));
        ensure!(
            dense.is_none(),
            "layer {} of this {family} has no experts, and dense layers are not run here (fine-tune a model with \
             experts in every layer)",
            dense.unwrap_or_default()
        );
        ensure!(
            !attention.output_bias,
            "attention_bias=true puts a bias on the output projection of {family}, which is not supported here \
             (use a model with attention_bias=false)"
        );
        let dense = Self {
            vocab: config.vocab_size,
            hidden: config.hidden_size,
            layers,
            heads: attention.num_attention_heads,
            kv_heads: attention.num_key_value_heads,
            head_dim: attention.head_dim,
            eps: config.rms_norm_eps,
            rope_theta: attention.rope_theta,
            qkv_bias: attention.qkv_bias,
            qk_norm: attention.qk_norm,
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

    #[test]
    fn a_model_that_is_not_run_here_is_refused_by_family() {
        let message = |family: &str, fields: &str| {
            let folder = tempfile::tempdir().unwrap();
            let config = format!(
                r#"{{"model_type": "{family}", "hidden_act": "silu", "vocab_size": 8, "hidden_size": 4,
                "intermediate_size": 4, "moe_intermediate_size": 4, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 1,
                "norm_topk_prob": true, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 8,
                {fields}}}"#
            );
            std::fs::write(folder.path().join("config.json"), config).unwrap();
            let config = ModelConfig::read(folder.path()).unwrap();
            DenseConfig::from_hub(&config).unwrap_err().to_string()
        };
        assert_eq!(
            message("gpt_oss", r#""swiglu_limit": 7.0"#),
            "the attention of gpt_oss is not run here (fine-tune a model with grouped-query attention, such as \
             qwen3_moe, qwen2_moe, olmoe or mixtral)"
        );
        assert!(
            message("qwen3_moe", r#""mlp_only_layers": [1]"#)
                .starts_with("layer 1 of this qwen3_moe has no")
        );
    }
}
