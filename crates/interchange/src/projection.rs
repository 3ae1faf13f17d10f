//! The linear maps of one expert, and what they are called.

use crate::ModelConfig;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Projection {
    /// Gate and up in one parameter.
    GateUp,
    Gate,
    Up,
    Down,
}

impl Projection {
    /// The name in most files, and of stacked parameters in all.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Projection::GateUp => "gate_up_proj",
            Projection::Gate => "gate_proj",
            Projection::Up => "up_proj",
            Projection::Down => "down_proj",
        }
    }

    /// `[d_out, d_in]` of one expert.
    pub(crate) fn shape(self, config: &ModelConfig) -> [usize; 2] {
        let (hidden, ffn) = (config.hidden_size, config.moe_intermediate_size);
        match self {
            Projection::GateUp => [2 * ffn, hidden],
            Projection::Gate | Projection::Up => [ffn, hidden],
            Projection::Down => [hidden, ffn],
        }
    }
}

/// The module that holds the stacked experts of `layer`.
pub(crate) fn experts_module(layer: usize) -> String {
    format!("model.layers.{layer}.mlp.experts")
}

/// The module of one projection of one expert, where experts lie one by one.
pub(crate) fn expert_module(
    config: &ModelConfig,
    layer: usize,
    expert: usize,
    projection: Projection,
) -> String {
    let (block, name) = config.family.one_by_one(projection);
    format!("model.layers.{layer}.{block}.experts.{expert}.{name}")
}
