//! Parameters and activations of one layer's attention.

use moe_lora_files::JsonFile;
use moe_lora_interchange::{AttentionConfig, ModelConfig, QkNorm};

use crate::PlanError;
use crate::model::size;

/// Counts of one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attention {
    /// Elements of the projections, which tensor parallelism shards.
    pub projections: f64,
    /// Elements of norms, biases and sinks.
    pub rest: f64,
    /// Elements a token that the backward pass needs between the projections.
    pub kept: f64,
}

impl Attention {
    pub(crate) fn read(config: &ModelConfig, file: &JsonFile) -> Result<Self, PlanError> {
        let hidden = config.hidden_size as f64;
        if let Some(attention) = &config.attention {
            return Ok(Self::grouped_query(attention, hidden));
        }
        match config.family.model_type {
            "deepseek_v3" => Self::latent(file, hidden),
            _ => Self::with_sinks(file, hidden),
        }
    }

    fn grouped_query(config: &AttentionConfig, hidden: f64) -> Self {
        let head = config.head_dim as f64;
        let q = config.num_attention_heads as f64 * head;
        let kv = config.num_key_value_heads as f64 * head;
        let norms = match config.qk_norm {
            QkNorm::None => 0.0,
            QkNorm::PerHead => 2.0 * head,
            QkNorm::Full => q + kv,
        };
        let qkv_bias = if config.qkv_bias { q + 2.0 * kv } else { 0.0 };
        let output_bias = if config.output_bias { hidden } else { 0.0 };
        Self {
            projections: hidden * (2.0 * q + 2.0 * kv),
            rest: norms + qkv_bias + output_bias,
            kept: 2.0 * q + 2.0 * kv,
        }
    }

    /// GPT-OSS: grouped queries, biases on all four projections, a sink a head.
    fn with_sinks(file: &JsonFile, hidden: f64) -> Result<Self, PlanError> {
        let [heads, kv_heads, head] = ["num_attention_heads", "num_key_value_heads", "head_dim"]
            .map(|field| size(file, field));
        let (heads, head) = (heads?, head?);
        let (q, kv) = (heads * head, kv_heads? * head);
        Ok(Self {
            projections: hidden * (2.0 * q + 2.0 * kv),
            rest: q + 2.0 * kv + hidden + heads,
            kept: 2.0 * q + 2.0 * kv,
        })
    }

    /// DeepSeek-V3: queries, keys and values from latents of low rank, rotary parts beside them.
    fn latent(file: &JsonFile, hidden: f64) -> Result<Self, PlanError> {
        let size = |field| size(file, field);
        let (heads, value) = (size("num_attention_heads")?, size("v_head_dim")?);
        let (plain, rotary) = (size("qk_nope_head_dim")?, size("qk_rope_head_dim")?);
        let (q_rank, kv_rank) = (size("q_lora_rank")?, size("kv_lora_rank")?);
        let q = heads * (plain + rotary);
        Ok(Self {
            projections: hidden * (q_rank + kv_rank + rotary)
                + q_rank * q
                + kv_rank * heads * (plain + value)
                + heads * value * hidden,
            rest: q_rank + kv_rank,
            kept: 2.0 * (q_rank + kv_rank) + 2.0 * q + 2.0 * heads * value,
        })
    }
}
