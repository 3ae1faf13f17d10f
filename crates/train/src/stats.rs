//! What is known of a step when it is done.

use std::sync::Arc;

use burn::train::metric::{Adaptor, ItemLazy};
use moe_lora_adapters::AdapterNorm;
use moe_lora_experts::ExpertLoad;

/// Numbers of one step over all ranks, the same bits on each.
#[derive(Clone, Debug, PartialEq)]
pub struct StepStats {
    /// The loss before the update, the sum of the ranks' terms.
    pub loss: f64,
    /// The norm of the synchronised gradients before they are clipped; none in validation.
    pub gradient_norm: Option<f64>,
    /// The deltas before the update, an adapter each.
    pub adapters: Arc<[AdapterNorm]>,
    /// The tokens of the experts, an MoE layer each.
    pub loads: Arc<[ExpertLoad]>,
}

impl StepStats {
    /// The norm of all deltas as one vector.
    pub fn adapter_norm(&self) -> f64 {
        let squares = self.adapters.iter().map(|norm| norm.total().powi(2));
        squares.sum::<f64>().sqrt()
    }

    /// Experts of all layers that no token chose.
    pub fn idle_experts(&self) -> usize {
        self.loads.iter().map(ExpertLoad::idle).sum()
    }

    /// The largest [`imbalance`](ExpertLoad::imbalance) of a layer; 1 without layers.
    pub fn imbalance(&self) -> f64 {
        let layers = self.loads.iter().map(ExpertLoad::imbalance);
        layers.fold(1.0, f64::max)
    }
}

impl ItemLazy for StepStats {
    type ItemSync = Self;

    fn sync(self) -> Self {
        self
    }
}

impl Adaptor<StepStats> for StepStats {
    fn adapt(&self) -> StepStats {
        self.clone()
    }
}
