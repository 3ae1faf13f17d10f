//! Adapters that a backward pass left without gradients.

use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};

use crate::{AdapterError, TrainedWeight, Weight};

/// Checks that a gradient reached every adapter: that of one factor at least is there and not all
/// zeros. Call it once, between [`sync_gradients`](crate::sync_gradients) and the optimizer of the first
/// step: the tokens of all ranks that hold the factor then count. It communicates nothing, and reads the
/// gradients, which waits for the device.
///
/// An adapter that trains nothing makes no noise otherwise: the loss still falls by the others.
///
/// # Errors
///
/// When there are no adapters. When adapters got none, with their linears: their output is no part of the loss, the graph was
/// detached, or no token reached this rank's experts. Other ranks may have none of it.
pub fn check_gradients<B: AutodiffBackend>(
    weights: &[TrainedWeight<'_, B>],
    grads: &GradientsParams,
) -> Result<(), AdapterError> {
    if weights.is_empty() {
        return Err(AdapterError::NoAdapters);
    }
    // The factors of an adapter follow each other.
    let adapters = weights.chunk_by(|a, b| a.linear == b.linear);
    let silent = adapters.filter(|factors| !factors.iter().any(|factor| reached(factor, grads)));
    let linears: Vec<String> = silent.map(|factors| factors[0].linear.into()).collect();
    match linears.is_empty() {
        true => Ok(()),
        false => Err(AdapterError::NoGradient { linears }),
    }
}

fn reached<B: AutodiffBackend>(trained: &TrainedWeight<'_, B>, grads: &GradientsParams) -> bool {
    match trained.weight {
        Weight::One(param) => grads.get::<B::InnerBackend, 2>(param.id).is_some_and(acts),
        Weight::PerExpert(param) => grads.get::<B::InnerBackend, 3>(param.id).is_some_and(acts),
    }
}

fn acts<I: Backend, const D: usize>(grad: Tensor<I, D>) -> bool {
    grad.into_data().iter::<f64>().any(|value| value != 0.0)
}
