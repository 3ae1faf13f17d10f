//! One rank's training loop.

use anyhow::Result;
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn_moe_lora::adapters::{AdapterBackend, sync_gradients};
use burn_moe_lora::parallel::ParallelBackend;

use crate::moe::MoeBlocks;
use crate::rank_model::{RankModel, gather_world};
use crate::text::Batch;

/// A rank's model and the optimizer that updates its adapters.
///
/// Every rank owns its leaves: ranks that shared a tracked tensor would share a graph and wait for each other for ever.
pub struct Trainer<B: AdapterBackend, O> {
    /// The model.
    pub model: RankModel<B>,
    optimizer: O,
    lr: f64,
    device: B::Device,
}

impl<B, I, O> Trainer<B, O>
where
    B: AutodiffBackend<InnerBackend = I> + AdapterBackend,
    I: ParallelBackend<Base = B::Base>,
    O: Optimizer<MoeBlocks<B>, B>,
{
    /// Trains `model` with `optimizer` at learning rate `lr`.
    pub fn new(model: RankModel<B>, optimizer: O, lr: f64, device: B::Device) -> Self {
        Self {
            model,
            optimizer,
            lr,
            device,
        }
    }

    /// One step on this rank's rows of `batch`: forward, backward, gradients summed over the ranks, update.
    ///
    /// Returns the mean loss over the whole batch before the update, the same on every rank. Each rank's term of it is
    /// the sum over its own positions divided by the number of all: the gradients of the terms add up to that of the mean.
    ///
    /// # Errors
    /// Fewer rows than ranks.
    ///
    /// # Panics
    /// If an id is not below the vocabulary, or if a collective fails.
    pub fn step(&mut self, batch: &Batch) -> Result<f64> {
        let model = &mut self.model;
        let loss = model.loss(batch, &self.device)?.over(batch.predicted());
        let grads = GradientsParams::from_grads(loss.backward(), &model.blocks);
        let grads = sync_gradients(&model.blocks.trained_weights(), grads, &model.mesh);
        model.blocks = self.optimizer.step(self.lr, model.blocks.clone(), grads);
        Ok(gather_world(loss, &model.mesh).iter().sum())
    }
}
