//! One rank's training loop.

use std::path::Path;

use anyhow::Result;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, Optimizer};
use burn_moe_lora::adapters::{
    Adaptable, ResumableOptimizer, TrainBackend, gradient_norm, load_checkpoint, save_checkpoint,
    sync_gradients,
};
use burn_moe_lora::checkpoint::{Checkpoint, LoadReport, Strictness};
use burn_moe_lora::experts::ExpertLoad;

use crate::moe::MoeBlocks;
use crate::rank_model::{RankModel, gather_world};
use crate::text::Batch;

/// What a step has found, the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Mean loss over the whole batch before the update.
    pub loss: f64,
    /// Norm of the gradients of all adapters.
    pub gradient_norm: f64,
    /// Tokens of the experts, a layer each.
    pub loads: Vec<ExpertLoad>,
}

/// A rank's model and the optimizer that updates its adapters.
///
/// Every rank owns its leaves: ranks that shared a tracked tensor would share a graph and wait for each other for ever.
pub struct Trainer<B, O>
where
    B: TrainBackend,
    O: ResumableOptimizer<B::Inner>,
{
    /// The model.
    pub model: RankModel<B>,
    optimizer: OptimizerAdaptor<O, MoeBlocks<B>, B>,
    lr: f64,
    device: B::Device,
}

impl<B, O> Trainer<B, O>
where
    B: TrainBackend,
    O: ResumableOptimizer<B::Inner>,
{
    /// Trains `model` with `optimizer` at learning rate `lr`.
    pub fn new(
        model: RankModel<B>,
        optimizer: OptimizerAdaptor<O, MoeBlocks<B>, B>,
        lr: f64,
        device: B::Device,
    ) -> Self {
        Self {
            model,
            optimizer,
            lr,
            device,
        }
    }

    /// One step on this rank's rows of `batch`: forward, backward, gradients summed over the ranks, update.
    ///
    /// Each rank's term of the loss is the sum over its own positions divided by the number of all: the gradients of the
    /// terms add up to that of the mean.
    ///
    /// # Errors
    /// Fewer rows than ranks.
    ///
    /// # Panics
    /// If an id is not below the vocabulary, or if a collective fails.
    pub fn step(&mut self, batch: &Batch) -> Result<StepReport> {
        let model = &mut self.model;
        model.blocks.take_counts(); // of other passes
        let loss = model.loss(batch, &self.device)?.over(batch.predicted());
        let counts = model.blocks.take_counts();
        let grads = GradientsParams::from_grads(loss.backward(), &model.blocks);
        let weights = model.blocks.trained_weights();
        let grads = sync_gradients(&weights, grads, &model.mesh);
        let gradient_norm = gradient_norm(&weights, &grads, &model.mesh);
        model.blocks = self.optimizer.step(self.lr, model.blocks.clone(), grads);
        Ok(StepReport {
            gradient_norm,
            loads: ExpertLoad::over_ranks(&counts, &model.mesh),
            loss: gather_world(loss, &model.mesh).iter().sum(),
        })
    }

    /// Saves adapters and optimizer state after `steps` steps. Every rank calls it.
    ///
    /// # Errors
    /// A folder that cannot be written to.
    ///
    /// # Panics
    /// If a collective fails.
    pub fn save(&self, folder: &Path, steps: usize) -> Result<()> {
        let RankModel { blocks, mesh, .. } = &self.model;
        let weights = blocks.trained_weights();
        save_checkpoint(folder, steps as u64, &weights, &self.optimizer, mesh)?;
        Ok(())
    }

    /// Takes adapters and optimizer state from a checkpoint of any topology. Every rank calls it.
    ///
    /// # Errors
    /// Files that are damaged, or hold other adapters or the state of another optimizer.
    ///
    /// # Panics
    /// If a collective fails.
    pub fn resume(&mut self, checkpoint: &Checkpoint) -> Result<LoadReport> {
        let RankModel { blocks, mesh, .. } = &mut self.model;
        let (resumed, report) = load_checkpoint(
            checkpoint,
            blocks.clone(),
            MoeBlocks::trained_weights,
            &mut self.optimizer,
            mesh,
            Strictness::Exact,
        )?;
        *blocks = resumed;
        for layer in &mut blocks.layers {
            layer.start_pissa(mesh)?;
        }
        Ok(report)
    }
}
