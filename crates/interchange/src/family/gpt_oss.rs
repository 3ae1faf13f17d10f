//! GPT-OSS: stacked, transposed experts whose gate and up take turns, biases, and a clamped SwiGLU.
//! Its attention, with sinks and sliding windows, is not described here.

use super::{Family, USUAL};
use crate::config::{Activation, Router, positive};
use crate::stacked::Stacked;
use moe_lora_files::{FileError, JsonFile};

pub(super) static FAMILY: Family = Family {
    model_type: "gpt_oss",
    num_experts: &["num_local_experts", "num_experts"],
    intermediate_size: "intermediate_size",
    one_by_one: None,
    stacked: Stacked {
        transposed: true,
        interleaved: true,
        biases: true,
    },
    router_weight: "router.weight",
    router_bias: Some("router.bias"),
    read_activation: activation,
    read_router: |_, _| Ok(Router::TopKThenSoftmax),
    ..USUAL
};

/// Models from before the two had fields were all trained with the defaults here.
fn activation(file: &JsonFile) -> Result<Activation, FileError> {
    let or = |field, default| match file.value(field) {
        Some(_) => positive(file, field),
        None => Ok(default),
    };
    Ok(Activation::ClampedSwiglu {
        alpha: or("swiglu_alpha", 1.702)?,
        limit: or("swiglu_limit", 7.0)?,
    })
}
