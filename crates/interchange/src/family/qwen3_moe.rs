//! Qwen3-MoE: norms on every head of q and k.

use super::qwen2_moe::dense_layers;
use super::{Family, USUAL};
use crate::attention::{AttentionBiases, GroupedQueryAttention, QkNorm};

pub(super) static FAMILY: Family = Family {
    model_type: "qwen3_moe",
    attention: Some(GroupedQueryAttention {
        qk_norm: QkNorm::PerHead,
        biases: AttentionBiases::OnAll("attention_bias"),
    }),
    read_dense_layers: dense_layers,
    ..USUAL
};
