//! Memory of one rank.

use moe_lora_checkpoint::GroupSizes;
use serde::Serialize;

use crate::activations::Activations;
use crate::kernels::ELEMENT;
use crate::{Job, ModelShape};

/// Bytes of one rank, in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// Routed experts, frozen.
    pub experts: f64,
    /// Everything else of the base model, frozen.
    pub dense: f64,
    /// Both factors of every adapter.
    pub adapter: f64,
    /// Their gradients.
    pub gradients: f64,
    /// Adam's two moments of them.
    pub moments: f64,
    /// Activations when the backward pass finds them all.
    pub activations: f64,
    /// Activations when each layer runs again in the backward pass.
    pub activations_recomputed: f64,
}

impl Memory {
    /// `factors` is the number of elements of the rank's factors.
    pub(crate) fn of(model: &ModelShape, job: &Job, sizes: GroupSizes, factors: f64) -> Self {
        let GroupSizes { tp, ep, etp, .. } = sizes;
        let parameters = model.parameters();
        let activations = Activations::of(model, job, sizes);
        Self {
            experts: ELEMENT * parameters.experts / (ep * etp) as f64,
            dense: ELEMENT * (parameters.dense / tp as f64 + parameters.replicated),
            adapter: ELEMENT * factors,
            gradients: ELEMENT * factors,
            moments: 2.0 * ELEMENT * factors,
            activations: ELEMENT * activations.kept(),
            activations_recomputed: ELEMENT * activations.recomputed(),
        }
    }

    /// All of it.
    pub fn total(&self, recompute: bool) -> f64 {
        let activations = match recompute {
            false => self.activations,
            true => self.activations_recomputed,
        };
        self.experts + self.dense + self.adapter + self.gradients + self.moments + activations
    }
}
