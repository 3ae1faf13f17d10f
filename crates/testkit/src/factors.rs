//! Trained factors and their gradients, one matrix an expert, and where PiSSA's started.

use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use moe_lora_adapters::{Lora, Placement, Weight, WeightLayout};
use moe_lora_parallel::GroupKind;

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

/// Tells a PiSSA adapter where it started: the full `A` and `B` of all experts, end to end.
///
/// # Panics
///
/// When it is none, or the values are fewer.
pub fn load_start<B: Backend, G: GroupKind, P: Placement>(
    lora: &mut Lora<B, G, P>,
    [a, b]: [&[f32]; 2],
    device: &B::Device,
) {
    let dtype = lora.config().dtype;
    let cut = |layout: &WeightLayout, full: &[f32]| {
        let [rows, columns] = [layout.d_out, layout.d_in];
        let values =
            layout.gather(|expert, row, column| full[(expert * rows + row) * columns + column]);
        Weight::from_values(values, layout, dtype, false, device)
    };
    let start = lora.pissa.as_mut().expect("a PiSSA adapter has a start");
    start.a.weight = cut(start.a.layout(), a);
    start.b.weight = cut(start.b.layout(), b);
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
