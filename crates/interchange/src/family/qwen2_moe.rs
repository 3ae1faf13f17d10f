//! Qwen2-MoE: a gated shared expert beside the routed ones.

use super::{Family, SharedExpertNames, Sizes, USUAL};
use crate::attention::{AttentionBiases, GroupedQueryAttention, QkNorm};
use crate::config::{MAX_SIZE, SharedExpert, count};
use moe_lora_files::{FileError, JsonFile};
use std::collections::BTreeSet;

pub(super) static FAMILY: Family = Family {
    model_type: "qwen2_moe",
    shared_expert: Some(SharedExpertNames {
        module: "shared_expert",
        gate: Some("shared_expert_gate"),
    }),
    attention: Some(GroupedQueryAttention {
        qk_norm: QkNorm::None,
        biases: AttentionBiases::OnQkv("qkv_bias"),
    }),
    read_shared_expert: shared_expert,
    read_dense_layers: dense_layers,
    ..USUAL
};

fn shared_expert(file: &JsonFile, _: Sizes) -> Result<Option<SharedExpert>, FileError> {
    Ok(Some(SharedExpert {
        intermediate_size: count(file, "shared_expert_intermediate_size", MAX_SIZE)?,
        gated: true,
    }))
}

/// Layers have experts whose number, counted from 1, is a multiple of the step, unless listed.
pub(super) fn dense_layers(file: &JsonFile, sizes: Sizes) -> Result<Vec<usize>, FileError> {
    const STEP: &str = "decoder_sparse_step";
    let step = match file.value(STEP) {
        Some(_) => count(file, STEP, sizes.layers)?,
        None => 1,
    };
    let listed: BTreeSet<usize> = file.get("mlp_only_layers")?.unwrap_or_default();
    let dense = |layer: &usize| !(layer + 1).is_multiple_of(step) || listed.contains(layer);
    Ok((0..sizes.layers).filter(dense).collect())
}
