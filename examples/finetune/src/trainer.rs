//! One rank's training loop.

use std::path::Path;

use anyhow::Result;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, Optimizer};
use burn_moe_lora::adapters::{
    Adaptable, LoraPlus, ResumableOptimizer, TrainBackend, TrainedWeight, clip_gradients,
    gradient_norm, load_checkpoint, save_checkpoint, sync_gradients,
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
    /// Norm of the gradients of all adapters, before they are clipped.
    pub gradient_norm: f64,
    /// Tokens of the experts, a layer each.
    pub loads: Vec<ExpertLoad>,
}

type Weights<B> = for<'a> fn(&'a MoeBlocks<B>) -> Vec<TrainedWeight<'a, B>>;

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
    optimizer: LoraPlus<OptimizerAdaptor<O, MoeBlocks<B>, B>, Weights<B>>,
    lr: f64,
    max_norm: Option<f64>,
    steps: usize,
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
        let weights: Weights<B> = MoeBlocks::trained_weights;
        Self {
            model,
            optimizer: LoraPlus::new(optimizer, 1.0, weights).expect("a ratio of 1 is one"),
            lr,
            max_norm: None,
            steps: 0,
            device,
        }
    }

    /// LoRA+: `B` learns `ratio` times as fast as `A`.
    ///
    /// # Errors
    /// A ratio that is not above zero, or not finite.
    pub fn with_lora_plus(mut self, ratio: f64) -> Result<Self> {
        let LoraPlus { optimizer, .. } = self.optimizer;
        self.optimizer = LoraPlus::new(optimizer, ratio, MoeBlocks::trained_weights as Weights<B>)?;
        Ok(self)
    }

    /// Scales the gradients down to this norm over all adapters and ranks.
    pub fn with_max_norm(mut self, max_norm: f64) -> Self {
        self.max_norm = Some(max_norm);
        self
    }

    /// Steps done, those before a checkpoint was resumed included.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// One step on this rank's rows of `batch`: forward, backward, gradients summed over the ranks, update.
    ///
    /// Each rank's term of the loss is the sum over its own positions divided by the number of all: the gradients of the
    /// terms add up to that of the mean.
    ///
    /// # Errors
    /// Fewer rows than ranks, or gradients to clip whose norm is not finite.
    ///
    /// # Panics
    /// If an id is not below the vocabulary, or if a collective fails.
    pub fn step(&mut self, batch: &Batch) -> Result<StepReport> {
        let model = &mut self.model;
        model.blocks.take_counts(); // of other passes
        let trained = model.blocks.trained_weights();
        let drops = trained.iter().any(|weight| weight.config.dropout.is_some());
        let loss = model.loss(batch, drops.then_some(self.steps), &self.device)?;
        let loss = loss.over(batch.predicted());
        let counts = model.blocks.take_counts();
        let grads = GradientsParams::from_grads(loss.backward(), &model.blocks);
        let weights = model.blocks.trained_weights();
        let grads = sync_gradients(&weights, grads, &model.mesh);
        let (grads, gradient_norm) = match self.max_norm {
            Some(max_norm) => clip_gradients(&weights, grads, &model.mesh, max_norm)?,
            None => {
                let norm = gradient_norm(&weights, &grads, &model.mesh);
                (grads, norm)
            }
        };
        model.blocks = self.optimizer.step(self.lr, model.blocks.clone(), grads);
        self.steps += 1;
        Ok(StepReport {
            gradient_norm,
            loads: ExpertLoad::over_ranks(&counts, &model.mesh),
            loss: gather_world(loss, &model.mesh).iter().sum(),
        })
    }

    /// Saves adapters, optimizer state and the number of steps. Every rank calls it.
    ///
    /// # Errors
    /// A folder that cannot be written to.
    ///
    /// # Panics
    /// If a collective fails.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let RankModel { blocks, mesh, .. } = &self.model;
        let weights = blocks.trained_weights();
        let optimizer = &self.optimizer.optimizer;
        save_checkpoint(folder, self.steps as u64, &weights, optimizer, mesh)?;
        Ok(())
    }

    /// Takes adapters, optimizer state and the number of steps from a checkpoint of any topology. Every rank calls it.
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
            &mut self.optimizer.optimizer,
            mesh,
            Strictness::Exact,
        )?;
        *blocks = resumed;
        for layer in &mut blocks.layers {
            layer.start_pissa(mesh)?;
        }
        self.steps = checkpoint.manifest().step as usize;
        Ok(report)
    }
}
