//! The record of a model's adapters, without its base.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::record::{PrecisionSettings, Record};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use moe_lora_adapters::TrainedWeight;

/// The factors that one rank holds, by path: what burn's recorders write of an
/// [`Adapted`](crate::Adapted) model.
#[derive(Clone, Debug)]
pub struct AdapterRecord<B: Backend> {
    paths: Vec<String>,
    /// Flat, with the ids under which an optimizer's record has its states.
    factors: Vec<Param<Tensor<B, 1>>>,
}

impl<B: Backend> AdapterRecord<B> {
    pub(crate) fn of(weights: &[TrainedWeight<'_, B>]) -> Self {
        let factor = |trained: &TrainedWeight<'_, B>| {
            let flat = trained.weight.stacked().detach().reshape([-1]);
            Param::initialized(trained.weight.id(), flat)
        };
        Self {
            paths: weights.iter().map(|trained| trained.path.clone()).collect(),
            factors: weights.iter().map(factor).collect(),
        }
    }

    /// The model with the factors of the record in the place of its own, `weights`.
    pub(crate) fn load<M: Module<B>>(
        self,
        model: M,
        weights: impl Fn(&M) -> Vec<TrainedWeight<'_, B>>,
    ) -> M {
        let trained = weights(&model);
        let paths = trained.iter().map(|trained| &trained.path);
        assert!(
            self.paths.iter().eq(paths.clone()),
            "the record holds {:?} and the model trains {:?} (adapt the model as it was when it was recorded)",
            self.paths,
            paths.collect::<Vec<_>>()
        );
        let ids = trained.iter().map(|trained| trained.weight.id());
        let mut put = Put(ids.zip(self.factors).collect());
        drop(trained);
        model.map(&mut put)
    }
}

/// Replaces parameters by others, under the others' ids.
struct Put<B: Backend>(HashMap<ParamId, Param<Tensor<B, 1>>>);

impl<B: Backend> ModuleMapper<B> for Put<B> {
    fn map_float<const D: usize>(&mut self, own: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(factor) = self.0.remove(&own.id) else {
            return own;
        };
        let (id, values, _) = factor.consume();
        let (_, old, mapper) = own.consume();
        let (found, expected) = (values.dims()[0], old.shape().num_elements());
        assert_eq!(
            found,
            expected,
            "values of a recorded factor for one of shape {:?} (load the record at the topology and rank that wrote it)",
            old.dims()
        );
        // A leaf comes from values out of any graph: burn's detach leaves a tracked leaf tracked.
        let values = values.set_require_grad(false).detach();
        let values = values.to_device(&old.device()).cast(old.dtype());
        let values = values.reshape(old.shape());
        let values = values.set_require_grad(old.is_require_grad());
        Param::from_mapped_value(id, values, mapper)
    }
}

impl<B: Backend> Record<B> for AdapterRecord<B> {
    type Item<S: PrecisionSettings> = (
        <Vec<String> as Record<B>>::Item<S>,
        <Vec<Param<Tensor<B, 1>>> as Record<B>>::Item<S>,
    );

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        let paths = Record::<B>::into_item::<S>(self.paths);
        (paths, Record::<B>::into_item::<S>(self.factors))
    }

    fn from_item<S: PrecisionSettings>(
        (paths, factors): Self::Item<S>,
        device: &B::Device,
    ) -> Self {
        Self {
            paths: Record::<B>::from_item::<S>(paths, device),
            factors: Record::<B>::from_item::<S>(factors, device),
        }
    }
}
