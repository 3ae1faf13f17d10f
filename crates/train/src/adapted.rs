//! A model whose adapters are trained, as burn-train's `Learner` takes one.

use std::fmt;

use burn::module::{AutodiffModule, Devices, Module, ModuleMapper, ModuleVisitor};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::train::{InferenceStep, TrainOutput, TrainStep};
use moe_lora_adapters::{
    AdapterBackend, GradientPlan, TrainBackend, TrainedWeight, adapter_norms, clip_gradients,
    sync_gradients,
};
use moe_lora_experts::{ExpertLoad, TokenCounter};
use moe_lora_parallel::{Mesh, ParallelBackend};

use crate::{AdapterRecord, StepStats};

/// A model on which adapters are trained; implement it once for every [`AdapterBackend`].
pub trait Finetune<B: AdapterBackend>: Module<B> {
    /// This rank's tokens of a step.
    type Batch: Send + 'static;

    /// This rank's term of the loss, `[1]`: the loss is the sum over the ranks, no two of which bring
    /// the same token. For a mean, divide by the global count.
    fn loss(&self, batch: Self::Batch, mesh: &Mesh<B>) -> Tensor<B, 1>;

    /// The factors of every adapter, in an order that is the same on every rank.
    fn trained_weights(&self) -> Vec<TrainedWeight<'_, B>>;

    /// What counts the tokens of each MoE layer's experts: its router's
    /// [`counter`](moe_lora_experts::TopKRouter::counter).
    fn counters(&self) -> Vec<&TokenCounter> {
        Vec::new()
    }
}

/// A model and the ranks that it is trained on, for burn-train's `Learner`.
///
/// Its record is that of the adapters alone, an [`AdapterRecord`]. A step sums the gradients over
/// the ranks, and clips them where [`with_max_norm`](Self::with_max_norm) says so.
///
/// Every rank of the mesh takes every step, in training and in validation: give the ranks' data
/// loaders as many batches, an empty one where a rank has no tokens.
#[derive(Clone, Debug)]
pub struct Adapted<B: ParallelBackend, M> {
    /// The model.
    pub model: M,
    mesh: Mesh<B>,
    max_norm: f64,
}

impl<B: ParallelBackend, M> Adapted<B, M> {
    /// `model` on the ranks of `mesh`.
    pub fn new(model: M, mesh: Mesh<B>) -> Self {
        Self {
            model,
            mesh,
            max_norm: f64::INFINITY,
        }
    }

    /// Scales the gradients of a step whose norm is larger than this, see
    /// [`clip_gradients`]. With gradient accumulation it is each pass that is clipped.
    ///
    /// # Panics
    ///
    /// When it is not above zero.
    pub fn with_max_norm(mut self, max_norm: f64) -> Self {
        assert!(max_norm > 0.0, "max_norm={max_norm} is not above zero");
        self.max_norm = max_norm;
        self
    }

    /// The groups.
    pub fn mesh(&self) -> &Mesh<B> {
        &self.mesh
    }

    fn with_model<N>(&self, model: N) -> Adapted<B, N> {
        Adapted {
            model,
            mesh: self.mesh.clone(),
            max_norm: self.max_norm,
        }
    }
}

impl<B: AdapterBackend, M: Finetune<B>> Adapted<B, M> {
    /// The term of the loss, and the choices of this rank's tokens.
    fn pass(&self, batch: M::Batch) -> (Tensor<B, 1>, Vec<Vec<usize>>) {
        let counts = || -> Vec<_> {
            let counters = self.model.counters().into_iter();
            counters.map(TokenCounter::take).collect()
        };
        counts(); // those of other passes
        let loss = self.model.loss(batch, &self.mesh);
        (loss, counts())
    }

    /// Every rank's part of a step is done when this returns.
    fn stats<I: ParallelBackend<Base = B::Base>>(
        &self,
        loss: Tensor<I, 1>,
        counts: &[Vec<usize>],
        gradient_norm: Option<f64>,
    ) -> StepStats {
        let terms = self.mesh.cast().gather(loss).into_data();
        StepStats {
            // In rank order, so with the same bits on every rank.
            loss: terms.iter::<f64>().sum(),
            gradient_norm,
            adapters: adapter_norms(&self.model.trained_weights(), &self.mesh).into(),
            loads: ExpertLoad::over_ranks(counts, &self.mesh).into(),
        }
    }
}

impl<B: TrainBackend, M: Finetune<B> + AutodiffModule<B>> TrainStep for Adapted<B, M> {
    type Input = M::Batch;
    type Output = StepStats;

    /// A step whose gradients are not finite changes nothing, on all ranks alike: its
    /// [`gradient_norm`](StepStats::gradient_norm) tells.
    fn step(&self, batch: M::Batch) -> TrainOutput<StepStats> {
        let (loss, counts) = self.pass(batch);
        let term = loss.clone().inner();
        let grads = GradientsParams::from_grads(loss.backward(), &self.model);
        let weights = self.model.trained_weights();
        let grads = sync_gradients(&weights, grads, &self.mesh);
        let (grads, norm) = match clip_gradients(&weights, grads, &self.mesh, self.max_norm) {
            Ok((grads, norm)) => (grads, norm),
            Err(_) => (GradientsParams::new(), f64::NAN),
        };
        TrainOutput {
            grads,
            item: self.stats(term, &counts, Some(norm)),
        }
    }
}

impl<B: AdapterBackend, M: Finetune<B>> InferenceStep for Adapted<B, M> {
    type Input = M::Batch;
    type Output = StepStats;

    fn step(&self, batch: M::Batch) -> StepStats {
        let (loss, counts) = self.pass(batch);
        self.stats(loss, &counts, None)
    }
}

impl<B: AdapterBackend, M: Finetune<B>> Module<B> for Adapted<B, M> {
    type Record = AdapterRecord<B>;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        self.model.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        self.with_model(self.model.clone().fork(device))
    }

    fn to_device(self, device: &B::Device) -> Self {
        self.with_model(self.model.clone().to_device(device))
    }

    fn visit<V: ModuleVisitor<B>>(&self, visitor: &mut V) {
        self.model.visit(visitor);
    }

    fn map<V: ModuleMapper<B>>(self, mapper: &mut V) -> Self {
        Self {
            model: self.model.map(mapper),
            ..self
        }
    }

    /// # Panics
    ///
    /// When the record is one of other adapters, or of another topology or rank.
    fn load_record(self, record: AdapterRecord<B>) -> Self {
        Self {
            model: record.load(self.model, M::trained_weights),
            ..self
        }
    }

    fn into_record(self) -> AdapterRecord<B> {
        AdapterRecord::of(&self.model.trained_weights())
    }
}

impl<B, M> AutodiffModule<B> for Adapted<B, M>
where
    B: TrainBackend,
    M: Finetune<B> + AutodiffModule<B>,
    M::InnerModule: Finetune<B::Inner>,
{
    type InnerModule = Adapted<B::Inner, M::InnerModule>;

    fn valid(&self) -> Self::InnerModule {
        Adapted {
            model: self.model.valid(),
            mesh: self.mesh.cast(),
            max_norm: self.max_norm,
        }
    }

    fn from_inner(inner: Self::InnerModule) -> Self {
        Self {
            model: M::from_inner(inner.model),
            mesh: inner.mesh.cast(),
            max_norm: inner.max_norm,
        }
    }
}

/// The adapters and what becomes of their gradients.
impl<B: AdapterBackend, M: Finetune<B>> fmt::Display for Adapted<B, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        GradientPlan::of(&self.model.trained_weights(), self.mesh.topology()).fmt(f)
    }
}
