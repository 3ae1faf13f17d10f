//! Reading trained factors and their gradients, one matrix an expert.

use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use moe_lora_adapters::Weight;

use crate::Matrix;

/// The local values of a factor: one matrix a local expert, or one.
pub fn factors<B: Backend>(weight: &Weight<B>) -> Vec<Matrix> {
    experts(weight.stacked().detach())
}

/// The gradient of a factor after `backward`.
///
/// # Panics
///
/// When it has none: a factor that saw no tokens has a gradient of zeros.
pub fn gradient<B: AutodiffBackend>(weight: &Weight<B>, grads: &B::Gradients) -> Vec<Matrix> {
    match weight {
        Weight::One(param) => param.val().grad(grads).map(|grad| vec![Matrix::read(grad)]),
        Weight::PerExpert(param) => param.val().grad(grads).map(experts),
    }
    .expect("a factor is without gradient")
}

/// The gradient of a factor among those that an optimizer sees.
///
/// # Panics
///
/// When it has none.
pub fn synced_gradient<B: AutodiffBackend>(
    weight: &Weight<B>,
    grads: &GradientsParams,
) -> Vec<Matrix> {
    match weight {
        Weight::One(param) => grads
            .get::<B::InnerBackend, 2>(param.id)
            .map(|grad| vec![Matrix::read(grad)]),
        Weight::PerExpert(param) => grads.get::<B::InnerBackend, 3>(param.id).map(experts),
    }
    .expect("a factor is without gradient")
}

fn experts<B: Backend>(stacked: Tensor<B, 3>) -> Vec<Matrix> {
    let [experts, rows, columns] = stacked.dims();
    let values: Vec<f64> = stacked.into_data().iter::<f64>().collect();
    (0..experts)
        .map(|expert| {
            let start = expert * rows * columns;
            Matrix {
                rows,
                columns,
                values: values[start..start + rows * columns].to_vec(),
            }
        })
        .collect()
}
