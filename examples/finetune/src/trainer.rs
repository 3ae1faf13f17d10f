//! One rank's training loop.

use std::path::Path;

use anyhow::Result;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn_moe_lora::adapters::{
    AdapterBackend, ResumableOptimizer, load_checkpoint, save_checkpoint, sync_gradients,
};
use burn_moe_lora::checkpoint::{Checkpoint, LoadReport, Strictness};
use burn_moe_lora::parallel::ParallelBackend;

use crate::moe::MoeBlocks;
use crate::rank_model::{RankModel, gather_world};
use crate::text::Batch;

/// A backend that a job can train on: one with autodiff whose inner backend communicates as it does.
pub trait TrainBackend: AutodiffBackend<InnerBackend = Self::Inner> + AdapterBackend {
    /// The backend without autodiff.
    type Inner: ParallelBackend<Base = Self::Base, Device = Self::Device>;
}

impl<B, I> TrainBackend for B
where
    B: AutodiffBackend<InnerBackend = I> + AdapterBackend,
    I: ParallelBackend<Base = B::Base, Device = B::Device>,
{
    type Inner = I;
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
