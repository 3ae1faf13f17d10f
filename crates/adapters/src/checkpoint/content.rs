//! What a rank writes of its factors, and what it reads.

use std::collections::{BTreeMap, HashMap};

use burn::module::{ModuleMapper, Param, ParamId};
use burn::optim::record::AdaptorRecord;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData};
use moe_lora_checkpoint::{Dtype, Loaded, TensorLayout};

use super::factor::Factor;
use crate::{OptimizerParts, ResumableOptimizer, ResumeError, TrainedWeight};

/// What a rank writes: layouts, and the values by key.
#[derive(Default)]
pub(super) struct Contents {
    pub(super) layouts: Vec<TensorLayout>,
    pub(super) values: BTreeMap<String, Box<dyn Fn() -> TensorData>>,
}

impl Contents {
    pub(super) fn add<B, I, O, const D: usize>(
        &mut self,
        factor: &Factor<B>,
        values: Tensor<I, D>,
        record: Option<AdaptorRecord<O, B>>,
    ) -> Result<(), ResumeError>
    where
        B: AutodiffBackend<InnerBackend = I>,
        I: Backend<Device = B::Device>,
        O: ResumableOptimizer<I>,
    {
        self.push(factor.layout.clone(), move || values.to_data());
        let Some(record) = record else { return Ok(()) };
        let parts = O::into_parts::<D>(record.into_state(), &factor.device);
        let prefix = factor.part_prefix(O::NAME);
        for (name, tensor) in parts.tensors {
            let layout = TensorLayout {
                key: format!("{prefix}{name}"),
                ..factor.layout.clone()
            };
            let dtype = factor.dtype;
            self.push(layout, move || tensor.to_data().convert_dtype(dtype));
        }
        for (name, count) in parts.counts {
            let layout = TensorLayout::new(format!("{prefix}{name}"), Dtype::I64, []);
            let count = TensorData::from([count as i64]);
            self.push(layout, move || count.clone());
        }
        Ok(())
    }

    fn push(&mut self, layout: TensorLayout, values: impl Fn() -> TensorData + 'static) {
        self.values.insert(layout.key.clone(), Box::new(values));
        self.layouts.push(layout);
    }
}

/// The tensors that were read.
pub(super) struct Values(pub(super) Loaded);

impl Values {
    /// The optimizer's state of a factor, if any is stored.
    pub(super) fn record<B, I, O>(
        &mut self,
        factor: &Factor<B>,
    ) -> Result<Option<AdaptorRecord<O, B>>, ResumeError>
    where
        B: AutodiffBackend<InnerBackend = I>,
        I: Backend<Device = B::Device>,
        O: ResumableOptimizer<I>,
    {
        match factor.dims {
            2 => self.record_of::<B, I, O, 2>(factor),
            _ => self.record_of::<B, I, O, 3>(factor),
        }
    }

    fn record_of<B, I, O, const D: usize>(
        &mut self,
        factor: &Factor<B>,
    ) -> Result<Option<AdaptorRecord<O, B>>, ResumeError>
    where
        B: AutodiffBackend<InnerBackend = I>,
        I: Backend<Device = B::Device>,
        O: ResumableOptimizer<I>,
    {
        let prefix = factor.part_prefix(O::NAME);
        let stored: Vec<String> = self
            .0
            .range(prefix.clone()..)
            .map(|(key, _)| key)
            .take_while(|key| key.starts_with(&prefix))
            .cloned()
            .collect();
        if stored.is_empty() {
            return Ok(None);
        }
        let mut parts = OptimizerParts::<I, D>::default();
        for key in &stored {
            let loaded = self.0.remove(key).expect("the key was listed");
            let name = key[prefix.len()..].to_owned();
            match <[u8; 8]>::try_from(&*loaded.bytes) {
                Ok(count) if loaded.shape.is_empty() => {
                    parts.counts.insert(name, u64::from_le_bytes(count));
                }
                _ => {
                    let place = (&factor.device, factor.dtype);
                    let tensor = Tensor::from_data(factor.data(loaded), place);
                    parts.tensors.insert(name, tensor);
                }
            }
        }
        match O::from_parts(parts) {
            Some(state) => Ok(Some(AdaptorRecord::from_state::<D>(state))),
            None => Err(ResumeError::OptimizerState {
                path: factor.path.clone(),
                optimizer: O::NAME,
                parts: stored,
            }),
        }
    }

    /// A base that PiSSA has changed goes with the start that it was changed by.
    pub(super) fn expect_starts<B: Backend>(
        &self,
        factors: &[Factor<B>],
        weights: &[TrainedWeight<'_, B>],
    ) -> Result<(), ResumeError> {
        for (factor, trained) in factors.iter().zip(weights) {
            let Some(loaded) = self.0.get(&factor.path) else {
                continue;
            };
            if !trained.path.ends_with(".start") {
                continue;
            }
            let here = trained.weight.stacked().into_data();
            let untouched = here.iter::<f64>().all(|value| value == 0.0);
            if !untouched && here.as_bytes() != &*loaded.bytes {
                return Err(ResumeError::OtherStart {
                    path: trained.path.clone(),
                });
            }
        }
        Ok(())
    }

    /// New values for the factors that were read.
    pub(super) fn factors<B: Backend>(mut self, factors: &[Factor<B>]) -> Replacement {
        let values = factors.iter().filter_map(|factor| {
            let loaded = self.0.remove(&factor.path)?;
            Some((factor.id, factor.data(loaded)))
        });
        Replacement(values.collect())
    }
}

/// Puts values in place of those of a module's parameters.
pub(super) struct Replacement(HashMap<ParamId, TensorData>);

impl<B: Backend> ModuleMapper<B> for Replacement {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(data) = self.0.remove(&param.id) else {
            return param;
        };
        let (id, old, mapper) = param.consume();
        let dtype = data.dtype;
        let new = Tensor::from_data(data, (&old.device(), dtype));
        let new = new.set_require_grad(old.is_require_grad());
        Param::from_mapped_value(id, new, mapper)
    }
}
