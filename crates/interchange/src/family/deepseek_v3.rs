//! DeepSeek-V3: dense layers first, an ungated shared expert, and a router that scores by sigmoid,
//! corrects the choice by a bias and limits it to some groups of experts. Its latent attention is
//! not described here.

use super::{Family, SharedExpertNames, Sizes, USUAL};
use crate::config::{MAX_SIZE, Router, SharedExpert, count, positive};
use moe_lora_files::{FileError, JsonFile};

pub(super) static FAMILY: Family = Family {
    model_type: "deepseek_v3",
    num_experts: &["n_routed_experts", "num_local_experts"],
    router_bias: Some("gate.e_score_correction_bias"),
    shared_expert: Some(SharedExpertNames {
        module: "shared_experts",
        gate: None,
    }),
    read_router: router,
    read_shared_expert: shared_expert,
    read_dense_layers: dense_layers,
    ..USUAL
};

fn router(file: &JsonFile, sizes: Sizes) -> Result<Router, FileError> {
    // Fields of the model's own code, which transformers takes for granted.
    for (field, supported) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if let Some(value) = file.value(field)
            && value != supported
        {
            return Err(file.unsupported(field, value, format!("{supported:?}")));
        }
    }
    let Sizes { experts, .. } = sizes;
    let groups = count(file, "n_group", experts)?;
    // A group is rated by its two best experts.
    if !experts.is_multiple_of(groups) || experts / groups < 2 {
        let expected =
            format!("a divisor of the {experts} experts that leaves two a group or more");
        return Err(file.invalid("n_group", groups, expected));
    }
    let top_groups = count(file, "topk_group", groups)?;
    let (chosen, within) = (sizes.experts_per_token, top_groups * (experts / groups));
    if chosen > within {
        let expected =
            format!("a number from 1 to {within}, the experts of topk_group={top_groups}");
        return Err(file.invalid("num_experts_per_tok", chosen, expected));
    }
    Ok(Router::GroupedSigmoid {
        groups,
        top_groups,
        renormalize: file.require("norm_topk_prob")?,
        scale: positive(file, "routed_scaling_factor")?,
    })
}

fn shared_expert(file: &JsonFile, sizes: Sizes) -> Result<Option<SharedExpert>, FileError> {
    const FIELD: &str = "n_shared_experts";
    if file.require::<usize>(FIELD)? == 0 {
        return Ok(None);
    }
    // Side by side they are one wide expert, and stored as one.
    let intermediate_size = count(file, FIELD, MAX_SIZE / sizes.intermediate)? * sizes.intermediate;
    Ok(Some(SharedExpert {
        intermediate_size,
        gated: false,
    }))
}

fn dense_layers(file: &JsonFile, sizes: Sizes) -> Result<Vec<usize>, FileError> {
    const FREQUENCY: &str = "moe_layer_freq";
    if let Some(value) = file.value(FREQUENCY)
        && value != 1
    {
        return Err(file.unsupported(FREQUENCY, value, 1));
    }
    let first: usize = file.require("first_k_dense_replace")?;
    Ok((0..first.min(sizes.layers)).collect())
}
