//! What an optimizer keeps of each factor, under names that a checkpoint can hold.

use std::collections::BTreeMap;

use burn::optim::momentum::MomentumState;
use burn::optim::{
    Adam, AdamState, AdamW, AdamWState, AdaptiveMomentumState, Sgd, SgdState, SimpleOptimizer,
};
use burn::record::{DoublePrecisionSettings, Record};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

/// The state of one parameter: tensors of its shape, which are sharded as it is, and counts, which
/// every rank holds.
#[derive(Clone, Debug)]
pub struct OptimizerParts<B: Backend, const D: usize> {
    /// By name.
    pub tensors: BTreeMap<String, Tensor<B, D>>,
    /// By name.
    pub counts: BTreeMap<String, u64>,
}

impl<B: Backend, const D: usize> Default for OptimizerParts<B, D> {
    fn default() -> Self {
        Self {
            tensors: BTreeMap::new(),
            counts: BTreeMap::new(),
        }
    }
}

/// An optimizer whose state can be taken apart and put together again without loss.
///
/// Implemented for burn's [`AdamW`], [`Adam`] and [`Sgd`]; implement it for your own to make it
/// resumable.
pub trait ResumableOptimizer<B: Backend>: SimpleOptimizer<B> {
    /// The name in keys of a checkpoint: `{factor}.{NAME}.{part}`. Without dots.
    const NAME: &'static str;

    /// Takes the state of a parameter apart.
    fn into_parts<const D: usize>(
        state: Self::State<D>,
        device: &B::Device,
    ) -> OptimizerParts<B, D>;

    /// Puts the state of a parameter together; none where a part is missing.
    fn from_parts<const D: usize>(parts: OptimizerParts<B, D>) -> Option<Self::State<D>>;
}

impl<B: Backend> ResumableOptimizer<B> for AdamW {
    const NAME: &'static str = "adamw";

    fn into_parts<const D: usize>(
        state: AdamWState<B, D>,
        _device: &B::Device,
    ) -> OptimizerParts<B, D> {
        moments(state.momentum)
    }

    fn from_parts<const D: usize>(parts: OptimizerParts<B, D>) -> Option<AdamWState<B, D>> {
        from_moments(parts).map(AdamWState::new)
    }
}

impl<B: Backend> ResumableOptimizer<B> for Adam {
    const NAME: &'static str = "adam";

    fn into_parts<const D: usize>(
        state: AdamState<B, D>,
        _device: &B::Device,
    ) -> OptimizerParts<B, D> {
        moments(state.momentum)
    }

    fn from_parts<const D: usize>(parts: OptimizerParts<B, D>) -> Option<AdamState<B, D>> {
        from_moments(parts).map(AdamState::new)
    }
}

impl<B: Backend> ResumableOptimizer<B> for Sgd<B> {
    const NAME: &'static str = "sgd";

    fn into_parts<const D: usize>(
        state: SgdState<B, D>,
        device: &B::Device,
    ) -> OptimizerParts<B, D> {
        let mut parts = OptimizerParts::default();
        // Tells a checkpoint of this optimizer from one without any, with momentum or not.
        let momentum = u64::from(state.momentum.is_some());
        parts.counts.insert("momentum".into(), momentum);
        if let Some(momentum) = state.momentum {
            // The velocity is private to burn; its record is not. f64 holds every float exactly.
            let item = momentum.into_item::<DoublePrecisionSettings>();
            let velocity = Tensor::from_item::<DoublePrecisionSettings>(item.velocity, device);
            parts.tensors.insert("velocity".into(), velocity);
        }
        parts
    }

    fn from_parts<const D: usize>(mut parts: OptimizerParts<B, D>) -> Option<SgdState<B, D>> {
        let velocity = parts.tensors.remove("velocity");
        let momentum = parts.counts.remove("momentum")? > 0;
        (velocity.is_some() == momentum).then(|| SgdState::new(velocity.map(MomentumState::new)))
    }
}

fn moments<B: Backend, const D: usize>(state: AdaptiveMomentumState<B, D>) -> OptimizerParts<B, D> {
    let mut parts = OptimizerParts::default();
    parts.counts.insert("time".into(), state.time as u64);
    parts.tensors.insert("moment_1".into(), state.moment_1);
    parts.tensors.insert("moment_2".into(), state.moment_2);
    if let Some(moment) = state.max_moment_2 {
        parts.tensors.insert("max_moment_2".into(), moment);
    }
    parts
}

fn from_moments<B: Backend, const D: usize>(
    mut parts: OptimizerParts<B, D>,
) -> Option<AdaptiveMomentumState<B, D>> {
    let time = usize::try_from(parts.counts.remove("time")?).ok()?;
    let [moment_1, moment_2] = ["moment_1", "moment_2"].map(|name| parts.tensors.remove(name));
    let mut state = AdaptiveMomentumState::new(time, moment_1?, moment_2?);
    state.max_moment_2 = parts.tensors.remove("max_moment_2");
    Some(state)
}
