//! LoRA+: `B` learns faster than `A`.

use std::collections::HashSet;

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, MultiGradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

use crate::{AdapterError, TrainedWeight, Weight};

/// An optimizer with two parameter groups: `B` and DoRA's magnitudes take `ratio` times the learning
/// rate of `A` and of whatever else the module trains.
///
/// It takes one step of the wrapped optimizer for each group, whose state is kept by parameter: nothing
/// but the rate differs. Decay that the optimizer multiplies by the rate, as AdamW's, is `ratio` times
/// as strong on the faster group.
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
/// use burn::tensor::Tensor;
/// use moe_lora_adapters::{LinearConfig, LoraConfig, LoraPlus, ReplicatedLinear};
/// use moe_lora_kernels::RowGroups;
/// use moe_lora_parallel::{Mesh, Tp};
///
/// type B = Autodiff<Flex>;
/// type Fc = ReplicatedLinear<B, Tp>;
///
/// let (mesh, device) = (Mesh::<B>::solo(), Default::default());
/// let mut fc: Fc = LinearConfig::new("fc", 4, 4).init(mesh.tp(), |_, _, _| 0.1, &device)?;
/// fc.adapt("fc", &LoraConfig::new(2, 4.0), &device)?;
///
/// let adam = AdamWConfig::new().init::<B, Fc>();
/// let mut optimizer = LoraPlus::new(adam, 16.0, |fc: &Fc| fc.trained_weights())?;
/// let y = fc.forward(mesh.tp().replicated(Tensor::ones([3, 4], &device)), &RowGroups::whole(3));
/// let grads = GradientsParams::from_grads(y.into_tensor().sum().backward(), &fc);
/// fc = optimizer.step(1e-4, fc, grads); // A at 1e-4, B at 1.6e-3
/// # Ok::<(), moe_lora_adapters::AdapterError>(())
/// ```
///
/// [`save_checkpoint`](crate::save_checkpoint) and [`load_checkpoint`](crate::load_checkpoint) take
/// the wrapped [`optimizer`](Self::optimizer).
///
/// # Source
///
/// LoRA+: Efficient Low Rank Adaptation of Large Models, arXiv:2402.12354. Its own code and PEFT's have
/// every vector in the faster group too, a magnitude among them.
#[derive(Clone)]
pub struct LoraPlus<O, F> {
    /// The wrapped optimizer, which holds all state.
    pub optimizer: O,
    ratio: f64,
    weights: F,
}

impl<O, F> LoraPlus<O, F> {
    /// `weights` lists the factors of the module that is stepped, such as
    /// [`Linear::trained_weights`](crate::Linear::trained_weights).
    ///
    /// # Errors
    ///
    /// When the ratio is not above zero, or not finite.
    pub fn new<B, M>(optimizer: O, ratio: f64, weights: F) -> Result<Self, AdapterError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        F: Fn(&M) -> Vec<TrainedWeight<'_, B>>,
    {
        if !(ratio.is_finite() && ratio > 0.0) {
            return Err(AdapterError::LearningRateRatio { ratio });
        }
        Ok(Self {
            optimizer,
            ratio,
            weights,
        })
    }
}

impl<O, F, M, B> Optimizer<M, B> for LoraPlus<O, F>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
    F: Fn(&M) -> Vec<TrainedWeight<'_, B>> + Clone + Send,
{
    type Record = O::Record;

    fn step(&mut self, lr: f64, module: M, mut grads: GradientsParams) -> M {
        let faster = faster(&(self.weights)(&module));
        let faster = take(&module, &faster, &mut grads);
        let module = self.optimizer.step(lr * self.ratio, module, faster);
        self.optimizer.step(lr, module, grads)
    }

    fn step_multi(&mut self, lr: f64, module: M, mut grads: MultiGradientsParams) -> M {
        let ids = faster(&(self.weights)(&module));
        let of_device =
            |(grads, device): &mut (GradientsParams, _)| (take(&module, &ids, grads), *device);
        let faster = grads.grads.iter_mut().map(of_device).collect();
        let faster = MultiGradientsParams { grads: faster };
        let module = self.optimizer.step_multi(lr * self.ratio, module, faster);
        self.optimizer.step_multi(lr, module, grads)
    }

    fn to_record(&self) -> Self::Record {
        self.optimizer.to_record()
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.optimizer = self.optimizer.load_record(record);
        self
    }
}

/// The parameters of the faster group.
fn faster<B: AutodiffBackend>(weights: &[TrainedWeight<'_, B>]) -> HashSet<ParamId> {
    let faster = weights
        .iter()
        .filter(|trained| trained.factor() != "lora_A");
    let ids = faster.map(|trained| match trained.weight {
        Weight::One(param) => param.id,
        Weight::PerExpert(param) => param.id,
    });
    ids.collect()
}

/// Moves the gradients of these parameters.
fn take<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    ids: &HashSet<ParamId>,
    grads: &mut GradientsParams,
) -> GradientsParams {
    let mut taken = GradientsParams::new();
    module.visit(&mut Take {
        ids,
        from: grads,
        to: &mut taken,
    });
    taken
}

struct Take<'a> {
    ids: &'a HashSet<ParamId>,
    from: &'a mut GradientsParams,
    to: &'a mut GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Take<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if self.ids.contains(&param.id)
            && let Some(grad) = self.from.remove::<B::InnerBackend, D>(param.id)
        {
            self.to.register::<B::InnerBackend, D>(param.id, grad);
        }
    }
}
