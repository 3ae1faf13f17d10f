//! The run of one rank.

use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::metric::MetricDefinition;
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn::train::{LearnerSummary, LearningComponentsMarker, SupervisedTraining};
use moe_lora_adapters::TrainBackend;

use crate::{Adapted, Finetune};

/// A [`SupervisedTraining`] of an [`Adapted`] model with learning rate `LR` and optimizer `O`.
pub type AdapterTraining<B, M, LR, O> =
    SupervisedTraining<LearningComponentsMarker<B, LR, Adapted<B, M>, O>>;

/// The batches of a rank.
pub type Batches<B, M> = Arc<dyn DataLoader<B, <M as Finetune<B>>::Batch>>;

impl<B, M> Adapted<B, M>
where
    B: TrainBackend,
    M: Finetune<B> + AutodiffModule<B> + 'static,
    M::InnerModule: Finetune<B::Inner>,
{
    /// This rank's run: its metrics and records go to `rank-0`, `rank-1`, ... in `folder`, and only
    /// rank 0 shows progress. burn's log file, one for all threads of a process, is off, and of
    /// checkpoints the last two are kept: which one is best, ranks can see differently, for the reason
    /// that [`Agreed`](crate::Agreed) gives.
    ///
    /// Metrics, epochs and a recorder for checkpoints come as for every `SupervisedTraining`, the same
    /// on every rank; `launch` it with a `Learner` of this model.
    pub fn training<LR, O>(
        &self,
        folder: impl AsRef<Path>,
        train: Batches<B, M>,
        valid: Batches<B::Inner, M::InnerModule>,
    ) -> AdapterTraining<B, M, LR, O>
    where
        LR: LrScheduler + 'static,
        O: Optimizer<Self, B> + 'static,
    {
        let rank = self.mesh().rank();
        let folder = folder.as_ref().join(format!("rank-{rank}"));
        let training = SupervisedTraining::new(folder, train, valid)
            .with_application_logger(None)
            .with_checkpointing_strategy(KeepLastNCheckpoints::new(2));
        match rank {
            0 => training,
            _ => training.renderer(Silent),
        }
    }
}

/// Shows nothing.
struct Silent;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _: MetricState) {}

    fn update_valid(&mut self, _: MetricState) {}

    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}

    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}

    fn on_train_end(
        &mut self,
        _: Option<LearnerSummary>,
    ) -> Result<(), Box<dyn core::error::Error>> {
        Ok(())
    }
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _: MetricDefinition) {}
}
