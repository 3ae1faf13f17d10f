//! The other tensors of one MoE block: its router and its shared expert.

use crate::projection::Projection;
use crate::{HostTensor, HubModel, InterchangeError};
use moe_lora_files::expect_shape;

/// The router of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterWeights {
    /// `[E, H]`.
    pub weight: HostTensor,
    /// `[E]`, in a family that has it; [`Router`](crate::Router) says what it is added to.
    pub bias: Option<HostTensor>,
}

/// The shared expert of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedExpertWeights {
    /// `[F, H]`, where `F` is its own intermediate size.
    pub gate: HostTensor,
    /// `[F, H]`.
    pub up: HostTensor,
    /// `[H, F]`.
    pub down: HostTensor,
    /// `[1, H]`, the weight of the sigmoid that weighs its output, in a family that has it.
    pub output_gate: Option<HostTensor>,
}

impl HubModel {
    /// The router of `layer`.
    ///
    /// # Errors
    ///
    /// As [`expert_weights`](Self::expert_weights).
    pub fn router(&self, layer: usize) -> Result<RouterWeights, InterchangeError> {
        self.config().expect_moe(layer)?;
        let (config, block) = (self.config(), self.block(layer));
        let experts = config.num_experts;
        let weight = format!("{block}.{}", config.family.router_weight);
        let bias = config.family.router_bias;
        let bias = bias.map(|name| self.expected(&format!("{block}.{name}"), &[experts]));
        Ok(RouterWeights {
            weight: self.expected(&weight, &[experts, config.hidden_size])?,
            bias: bias.transpose()?,
        })
    }

    /// The shared expert of `layer`, if the model has one.
    ///
    /// # Errors
    ///
    /// As [`expert_weights`](Self::expert_weights).
    pub fn shared_expert(
        &self,
        layer: usize,
    ) -> Result<Option<SharedExpertWeights>, InterchangeError> {
        self.config().expect_moe(layer)?;
        let config = self.config();
        let (Some(shared), Some(names)) = (config.shared_expert, &config.family.shared_expert)
        else {
            return Ok(None);
        };
        let (hidden, ffn) = (config.hidden_size, shared.intermediate_size);
        let block = self.block(layer);
        let part = |name: &str, shape: [usize; 2]| {
            self.expected(&format!("{block}.{name}.weight"), &shape)
        };
        let projection = |projection: Projection, shape| {
            part(&format!("{}.{}", names.module, projection.name()), shape)
        };
        let output_gate = names.gate.map(|name| part(name, [1, hidden]));
        Ok(Some(SharedExpertWeights {
            gate: projection(Projection::Gate, [ffn, hidden])?,
            up: projection(Projection::Up, [ffn, hidden])?,
            down: projection(Projection::Down, [hidden, ffn])?,
            output_gate: output_gate.transpose()?,
        }))
    }

    /// The module of the block; whoever stacks the experts also names it as transformers 5 does.
    fn block(&self, layer: usize) -> String {
        let block = match (self.stacked(layer), &self.config().family.one_by_one) {
            (None, Some(names)) => names.block,
            _ => "mlp",
        };
        format!("model.layers.{layer}.{block}")
    }

    pub(crate) fn expected(
        &self,
        name: &str,
        shape: &[usize],
    ) -> Result<HostTensor, InterchangeError> {
        expect_shape(|| name.to_owned(), self.shape(name)?, shape)?;
        self.tensor(name)
    }
}
