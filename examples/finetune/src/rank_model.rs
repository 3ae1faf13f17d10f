//! The whole model as one rank holds it.

use anyhow::{Result, ensure};
use burn::module::AutodiffModule;
use burn::tensor::{Int, Tensor};
use burn_moe_lora::adapters::{AdapterBackend, TokenIds, TrainBackend};
use burn_moe_lora::interchange::HubModel;
use burn_moe_lora::parallel::{Mesh, ParallelBackend};

use crate::adapter::AdapterPlan;
use crate::config::DenseConfig;
use crate::loss::{SummedLoss, next_byte_loss};
use crate::model::CausalLm;
use crate::moe::MoeBlocks;
use crate::text::Batch;

/// The dense layers, whole on every rank, and this rank's part of the MoE blocks.
#[derive(Clone, Debug)]
pub struct RankModel<B: ParallelBackend> {
    /// The frozen dense layers.
    pub dense: CausalLm<B>,
    /// The blocks between them.
    pub blocks: MoeBlocks<B>,
    /// The groups that the blocks communicate over.
    pub mesh: Mesh<B>,
}

impl<B: AdapterBackend> RankModel<B> {
    /// Reads a hub model and puts adapters on its experts. Nothing is communicated.
    ///
    /// # Errors
    /// Files that do not fit each other, or sizes that the topology does not divide. Every rank gets the same error.
    pub fn load(
        hub: &HubModel,
        plan: Option<&AdapterPlan>,
        mesh: Mesh<B>,
        device: &B::Device,
    ) -> Result<Self> {
        let config = DenseConfig::from_hub(hub.config())?;
        ensure!(
            hub.config().moe_layers().count() == hub.config().num_hidden_layers,
            "not every layer of the model has experts, and others are not run here (fine-tune another model)"
        );
        // The blocks come first: what does not fit the topology is found there.
        let mut blocks = MoeBlocks::load(hub, false, &mesh, device)?;
        if let Some(plan) = plan {
            plan.put_on(&mut blocks, &mesh, device)?;
        }
        let dense = CausalLm::load(&config, device, |name| {
            let tensor = hub.tensor(name)?;
            Ok((tensor.shape().to_vec(), tensor.into_data()))
        })?;
        Ok(Self {
            dense,
            blocks,
            mesh,
        })
    }

    /// The logits of the next byte at every position of this rank's sequences; `tokens` are what dropout needs.
    ///
    /// # Shapes
    /// `[N, L]` to `[N, L, V]`.
    ///
    /// # Panics
    /// If an id is not below `V`, or if a collective fails.
    pub fn logits(&self, ids: Tensor<B, 2, Int>, tokens: Option<&TokenIds>) -> Tensor<B, 3> {
        self.dense.forward_with(ids, |layer, x| {
            let block = &self.blocks.layers[layer];
            match tokens {
                Some(tokens) => block.forward_tokens(x, tokens, &self.mesh),
                None => block.forward(x, &self.mesh),
            }
        })
    }

    /// The summed loss of this rank's rows of `batch`. Adapters with dropout are trained at the step `dropped`.
    ///
    /// # Errors
    /// Fewer rows than ranks.
    ///
    /// # Panics
    /// If an id is not below `V`, or if a collective fails.
    pub fn loss(
        &self,
        batch: &Batch,
        dropped: Option<usize>,
        device: &B::Device,
    ) -> Result<SummedLoss<B>> {
        let (rank, ranks) = (self.mesh.rank(), self.mesh.topology().world_size());
        let ids = batch.shard(rank, ranks)?.tensor(device);
        let tokens = dropped.map(|step| batch.tokens(rank, ranks, step));
        let logits = self.logits(ids.clone(), tokens.transpose()?.as_ref());
        Ok(next_byte_loss(logits, ids))
    }

    /// The mean loss over all positions of `batches`, the same on every rank.
    ///
    /// # Errors
    /// A batch with fewer rows than ranks.
    ///
    /// # Panics
    /// If an id is not below `V`, if a collective fails, or if adapters drop: evaluate the [`valid`](Self::valid) model.
    pub fn evaluate(&self, batches: &[Batch], device: &B::Device) -> Result<f64> {
        let (mut sum, mut count) = (0.0, 0);
        for batch in batches {
            let loss = self.loss(batch, None, device)?;
            sum += gather_world(loss.sum, &self.mesh).iter().sum::<f64>();
            count += batch.predicted();
        }
        Ok(sum / count.max(1) as f64)
    }
}

impl<B: TrainBackend> RankModel<B> {
    /// The same model on the backend without autodiff: nothing is tracked and nothing dropped.
    pub fn valid(&self) -> RankModel<B::Inner> {
        RankModel {
            dense: self.dense.valid(),
            blocks: self.blocks.valid(),
            mesh: self.mesh.cast(),
        }
    }
}

/// The values of all ranks, in rank order. Every rank passes as many.
///
/// # Panics
/// If a collective fails.
pub fn gather_world<B: ParallelBackend>(values: Tensor<B, 1>, mesh: &Mesh<B>) -> Vec<f64> {
    let values = mesh.gather(values.detach()).into_data();
    values.iter::<f64>().collect()
}
