//! Model families: what their files call things, and how their MoE blocks compute.

mod deepseek_v3;
mod gpt_oss;
mod mixtral;
mod olmoe;
mod qwen2_moe;
mod qwen3_moe;

use crate::attention::GroupedQueryAttention;
use crate::config::{Activation, Router, SharedExpert};
use crate::projection::Projection;
use crate::stacked::Stacked;
use moe_lora_files::{FileError, JsonFile};
use std::fmt;

/// A model family, a table of names and layouts.
///
/// Only what differs between families is here. A new family is a file with a table, listed in
/// [`Family::ALL`].
pub struct Family {
    /// The `model_type` of its configuration.
    pub model_type: &'static str,
    /// Fields of the configuration that hold `E`, the one asked for first.
    pub(crate) num_experts: &'static [&'static str],
    /// The field that holds `F`.
    pub(crate) intermediate_size: &'static str,
    /// The names of experts stored one by one, in a family that does so.
    pub(crate) one_by_one: Option<OneByOne>,
    /// The experts as stacked parameters: how transformers 5 holds them, and stores them where they
    /// do not lie one by one.
    pub(crate) stacked: Stacked,
    /// The router's `[E, H]`, within the block.
    pub(crate) router_weight: &'static str,
    /// The router's `[E]`, within the block.
    pub(crate) router_bias: Option<&'static str>,
    pub(crate) shared_expert: Option<SharedExpertNames>,
    /// The attention, where it is grouped-query attention and no more.
    pub(crate) attention: Option<GroupedQueryAttention>,
    pub(crate) read_activation: fn(&JsonFile) -> Result<Activation, FileError>,
    pub(crate) read_router: fn(&JsonFile, Sizes) -> Result<Router, FileError>,
    pub(crate) read_shared_expert: fn(&JsonFile, Sizes) -> Result<Option<SharedExpert>, FileError>,
    /// The layers without experts.
    pub(crate) read_dense_layers: fn(&JsonFile, Sizes) -> Result<Vec<usize>, FileError>,
}

/// Names of experts that are a matrix each: `{block}.experts.{expert}.{gate}.weight`.
pub(crate) struct OneByOne {
    /// The module of the MoE block within its layer.
    pub(crate) block: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
}

/// Names within the block.
pub(crate) struct SharedExpertNames {
    pub(crate) module: &'static str,
    /// The module of the `[1, H]` that weighs it.
    pub(crate) gate: Option<&'static str>,
}

const USUAL_NAMES: OneByOne = OneByOne {
    block: "mlp",
    gate: "gate_proj",
    up: "up_proj",
    down: "down_proj",
};

/// What most families have in common.
const USUAL: Family = Family {
    model_type: "",
    num_experts: &["num_experts", "num_local_experts"],
    intermediate_size: "moe_intermediate_size",
    one_by_one: Some(USUAL_NAMES),
    stacked: Stacked {
        transposed: false,
        interleaved: false,
        biases: false,
    },
    router_weight: "gate.weight",
    router_bias: None,
    shared_expert: None,
    attention: None,
    read_activation: swiglu,
    read_router: softmax_then_top_k,
    read_shared_expert: |_, _| Ok(None),
    read_dense_layers: |_, _| Ok(Vec::new()),
};

/// The sizes that a family's further fields are checked against.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) layers: usize,
    pub(crate) experts: usize,
    pub(crate) experts_per_token: usize,
    pub(crate) intermediate: usize,
}

impl Family {
    /// Every family.
    pub const ALL: [&'static Family; 6] = [
        &qwen3_moe::FAMILY,
        &qwen2_moe::FAMILY,
        &olmoe::FAMILY,
        &mixtral::FAMILY,
        &deepseek_v3::FAMILY,
        &gpt_oss::FAMILY,
    ];

    /// How transformers 5 stacks the experts' parameters in memory, whatever lies on disk.
    pub fn stacked(&self) -> Stacked {
        self.stacked
    }

    /// Whether the family's files hold each expert by itself.
    pub fn stores_one_by_one(&self) -> bool {
        self.one_by_one.is_some()
    }

    /// The block and the projection's name where experts lie one by one.
    pub(crate) fn one_by_one(&self, projection: Projection) -> (&'static str, &'static str) {
        let names = self.one_by_one.as_ref().unwrap_or(&USUAL_NAMES);
        let name = match projection {
            Projection::GateUp => projection.name(),
            Projection::Gate => names.gate,
            Projection::Up => names.up,
            Projection::Down => names.down,
        };
        (names.block, name)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.model_type == other.model_type
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type)
    }
}

/// `silu(gate) * up`, the only activation of most families.
fn swiglu(file: &JsonFile) -> Result<Activation, FileError> {
    let activation: String = file.require("hidden_act")?;
    if activation != "silu" {
        return Err(file.unsupported("hidden_act", format!("{activation:?}"), "\"silu\""));
    }
    Ok(Activation::Swiglu)
}

/// Softmax over all experts first, with a switch for what comes after.
fn softmax_then_top_k(file: &JsonFile, _: Sizes) -> Result<Router, FileError> {
    let renormalize = file.require("norm_topk_prob")?;
    Ok(Router::SoftmaxThenTopK { renormalize })
}
