//! Elements that a backward pass needs of the forward pass.

use moe_lora_checkpoint::GroupSizes;

use crate::{Job, ModelShape};

/// Elements of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Activations {
    /// Of one layer with experts.
    moe: f64,
    /// Of one layer without.
    dense: f64,
    /// Between two layers.
    between: f64,
    /// Logits and their softmax.
    head: f64,
    moe_layers: f64,
    dense_layers: f64,
}

/// The sizes that an MoE block's activations follow from.
pub(crate) struct MoeBlock {
    pub tokens: f64,
    /// Experts `K` of a token.
    pub top_k: f64,
    pub etp: f64,
    pub hidden: f64,
    pub intermediate: f64,
    pub shared_intermediate: f64,
    pub experts: f64,
    pub rank: f64,
}

impl MoeBlock {
    /// Elements: the gathered rows `[R, H]`; gate and up, `silu(gate)` and its product with up,
    /// `[R, F / ETP]` each; `[R, r]` of both adapters; the rows that come back, `[T K, H]`; the same
    /// of the shared expert; the router's scores and the block's normed input.
    pub fn kept(&self) -> f64 {
        let routed = self.tokens * self.top_k;
        let rows = routed * self.etp;
        rows * (self.hidden + 2.0 * self.rank)
            + routed * (4.0 * self.intermediate + self.hidden)
            + self.tokens * (4.0 * self.shared_intermediate + self.experts + self.hidden)
    }
}

impl Activations {
    pub fn of(model: &ModelShape, job: &Job, sizes: GroupSizes) -> Self {
        let (tokens, hidden) = (job.tokens as f64, model.hidden());
        // Of sequence-parallel dense layers a rank keeps its own tokens' inputs, and T x TP tokens
        // of a TP-th of what lies between the projections.
        let attention = tokens * (3.0 * hidden + model.attention.kept);
        let block = MoeBlock {
            tokens,
            top_k: model.config.num_experts_per_tok as f64,
            etp: sizes.etp as f64,
            hidden,
            intermediate: model.intermediate(),
            shared_intermediate: model.shared_intermediate(),
            experts: model.config.num_experts as f64,
            rank: job.rank as f64,
        };
        Self {
            moe: attention + block.kept(),
            dense: attention + tokens * (hidden + 4.0 * model.dense_intermediate),
            between: tokens * hidden,
            head: 2.0 * tokens * model.config.vocab_size as f64,
            moe_layers: model.moe_layers(),
            dense_layers: model.dense_layers(),
        }
    }

    /// One layer: its own, and as much again for the gradients of them in flight.
    fn in_flight(&self) -> f64 {
        self.moe.max(if self.dense_layers > 0.0 {
            self.dense
        } else {
            0.0
        })
    }

    /// Elements at once when all are kept.
    pub fn kept(&self) -> f64 {
        let layers = self.moe_layers * self.moe + self.dense_layers * self.dense;
        layers + self.in_flight() + self.head
    }

    /// Elements at once when each layer keeps its input alone and runs again.
    pub fn recomputed(&self) -> f64 {
        let layers = self.moe_layers + self.dense_layers;
        layers * self.between + 2.0 * self.in_flight() + self.head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cargo test -p moe-lora-tests --test recompute_memory -- --nocapture` counts what its
    /// allocator has handed out at once for six MoE blocks in f32, `x + block(x)` each.
    #[test]
    fn bytes_at_once_are_those_that_an_allocator_counted() {
        let (measured, measured_again) = (10.6e6, 2.7e6);
        let block = MoeBlock {
            tokens: 512.0,
            top_k: 2.0,
            etp: 1.0,
            hidden: 32.0,
            intermediate: 64.0,
            shared_intermediate: 0.0,
            experts: 4.0,
            rank: 2.0,
        };
        let activations = Activations {
            moe: block.kept(),
            dense: 0.0,
            between: 512.0 * 32.0,
            head: 0.0,
            moe_layers: 6.0,
            dense_layers: 0.0,
        };
        let (kept, again) = (4.0 * activations.kept(), 4.0 * activations.recomputed());
        for (predicted, measured) in [(kept, measured), (again, measured_again)] {
            let ratio = predicted / measured;
            assert!(
                (ratio - 1.0).abs() < 0.3,
                "{predicted} for {measured}: {ratio}"
            );
        }
        // Negative control: without the rows that experts see K times.
        let alone = MoeBlock {
            top_k: 1.0,
            ..block
        };
        assert!(4.0 * 7.0 * alone.kept() < 0.7 * measured);
    }
}
