//! The norm of all gradients over all ranks, and gradients scaled to stay below one.

use std::collections::BTreeMap;

use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use moe_lora_parallel::region::GATHER_FROM;
use moe_lora_parallel::{GroupName, Mesh, ParallelBackend};

use crate::sync::{over, scaled};
use crate::{ClipError, GradientPlan, TrainedWeight, Weight};

/// The 2-norm of the gradients of all factors as one vector, each element of the full factors
/// counted once. Call it after [`sync_gradients`](crate::sync_gradients), on every rank.
///
/// ```text
/// sqrt(sum over factors, sum over shards, sum of squares)
/// ```
///
/// The ranks that hold shards gather their sums of squares and add them in rank order; those that
/// hold replicas take the sums of the first of them. So the norm has the same bits on every rank,
/// whatever the transport, and is that of a single device. At most one collective a group, of at
/// most one number a kind of row in the [`GradientPlan`]. A missing gradient counts as zeros.
///
/// Squares are taken and summed in f64, in f32 on backends without it; the root comes last. The
/// norm is not finite when a gradient is not, or when its square overflows.
///
/// # Panics
///
/// When a collective fails.
pub fn gradient_norm<B, I>(
    weights: &[TrainedWeight<'_, B>],
    grads: &GradientsParams,
    mesh: &Mesh<B>,
) -> f64
where
    B: AutodiffBackend<InnerBackend = I> + ParallelBackend,
    I: ParallelBackend<Base = B::Base>,
{
    let plan = GradientPlan::of(weights, mesh.topology());
    // Factors that lie alike are one sum, so that each group is asked once.
    let mut sums = BTreeMap::new();
    for (trained, row) in weights.iter().zip(plan.rows()) {
        let squares = match trained.weight {
            Weight::One(param) => {
                let zeros = || param.val().inner().zeros_like();
                squares(grads.get::<I, 2>(param.id).unwrap_or_else(zeros))
            }
            Weight::PerExpert(param) => {
                let zeros = || param.val().inner().zeros_like();
                squares(grads.get::<I, 3>(param.id).unwrap_or_else(zeros))
            }
        };
        let sum = sums.remove(&(&row.shards, &row.replicas));
        let sum = match sum {
            Some(sum) => sum + squares,
            None => squares,
        };
        sums.insert((&row.shards, &row.replicas), sum);
    }
    let mesh = mesh.cast::<I>();
    for group in GroupName::ALL {
        let touched = |(shards, replicas): &(&Vec<_>, &Vec<_>)| {
            shards.contains(&group) || replicas.contains(&group)
        };
        let mut held: Vec<_> = sums
            .iter_mut()
            .filter(|(place, _)| touched(place))
            .collect();
        if held.is_empty() || mesh.topology().size(group) == 1 {
            continue;
        }
        let own: Vec<Tensor<I, 1>> = held.iter().map(|(_, sum)| (**sum).clone()).collect();
        let ranks = over(Tensor::cat(own, 0).unsqueeze(), GATHER_FROM, group, &mesh);
        for (k, ((shards, _), sum)) in held.iter_mut().enumerate() {
            let of_ranks: Tensor<I, 2> = ranks.clone().narrow(1, k, 1);
            **sum = match shards.contains(&group) {
                true => of_ranks.sum_dim(0),
                false => of_ranks.narrow(0, 0, 1),
            }
            .reshape([1]);
        }
    }
    let sums: Vec<_> = sums.into_values().collect();
    if sums.is_empty() {
        return 0.0;
    }
    let sums = Tensor::cat(sums, 0).into_data();
    sums.iter::<f64>().sum::<f64>().sqrt()
}

/// The sum of squares `[1]`. In f32 a million equal terms, added one after the other as on the CPU,
/// are off by 4e-5.
fn squares<I: Backend, const D: usize>(grad: Tensor<I, D>) -> Tensor<I, 1> {
    let wide = I::supports_dtype(&grad.device(), DType::F64);
    let grad = grad.cast(if wide { DType::F64 } else { DType::F32 });
    (grad.clone() * grad).sum()
}

/// Scales the gradients of all factors by `max_norm / (norm + 1e-6)` where that is below 1, and
/// returns them with their [`gradient_norm`] before it. Call it between
/// [`sync_gradients`](crate::sync_gradients) and the optimizer, on every rank. Gradients of other
/// parameters are neither counted nor scaled.
///
/// # Errors
///
/// When the norm is not finite: scaled, such gradients would make every factor NaN. All ranks get
/// the same error and can leave the step out together. When `max_norm` is not above zero; an
/// infinite one scales nothing.
///
/// # Panics
///
/// When a collective fails.
///
/// # Source
///
/// The factor is that of PyTorch's `torch.nn.utils.clip_grad_norm_`, with `error_if_nonfinite`.
pub fn clip_gradients<B, I>(
    weights: &[TrainedWeight<'_, B>],
    mut grads: GradientsParams,
    mesh: &Mesh<B>,
    max_norm: f64,
) -> Result<(GradientsParams, f64), ClipError>
where
    B: AutodiffBackend<InnerBackend = I> + ParallelBackend,
    I: ParallelBackend<Base = B::Base>,
{
    if max_norm.is_nan() || max_norm <= 0.0 {
        return Err(ClipError::MaxNorm { max_norm });
    }
    let norm = gradient_norm(weights, &grads, mesh);
    if !norm.is_finite() {
        return Err(ClipError::NotFinite { norm });
    }
    let factor = max_norm / (norm + 1e-6);
    if factor < 1.0 {
        for trained in weights {
            match trained.weight {
                Weight::One(param) => {
                    if let Some(grad) = grads.remove::<I, 2>(param.id) {
                        grads.register(param.id, scaled(grad, factor));
                    }
                }
                Weight::PerExpert(param) => {
                    if let Some(grad) = grads.remove::<I, 3>(param.id) {
                        grads.register(param.id, scaled(grad, factor));
                    }
                }
            }
        }
    }
    Ok((grads, norm))
}
