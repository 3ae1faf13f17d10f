//! Gradients that several ranks hold a term of.

use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use moe_lora_parallel::region::{REDUCE_FROM, Transition, apply};
use moe_lora_parallel::{Group, GroupKind, GroupName, Mesh, ParallelBackend};

use crate::merge::in_f32;
use crate::{GradientPlan, GradientRow, TrainedWeight, Weight};

/// Sums each factor's gradient over the ranks that hold a term of it, as [`GradientPlan`] says.
/// Call it once a step, after backward and before the optimizer.
///
/// Sums, not means: by the crate's convention the loss is the sum of the ranks' local losses. A
/// rank without a gradient for a factor takes part with zeros.
///
/// # Panics
///
/// When a collective fails.
pub fn sync_gradients<B, I>(
    weights: &[TrainedWeight<'_, B>],
    grads: GradientsParams,
    mesh: &Mesh<B>,
) -> GradientsParams
where
    B: AutodiffBackend<InnerBackend = I> + ParallelBackend,
    I: ParallelBackend<Base = B::Base>,
{
    GradientPlan::of(weights, mesh.topology()).sync(weights, grads, mesh)
}

impl GradientPlan {
    /// As [`sync_gradients`], with the divisor of this plan.
    ///
    /// # Panics
    ///
    /// When the plan is one of other weights, or when a collective fails.
    pub fn sync<B, I>(
        &self,
        weights: &[TrainedWeight<'_, B>],
        mut grads: GradientsParams,
        mesh: &Mesh<B>,
    ) -> GradientsParams
    where
        B: AutodiffBackend<InnerBackend = I> + ParallelBackend,
        I: ParallelBackend<Base = B::Base>,
    {
        let (rows, factors) = (self.rows().len(), weights.len());
        assert_eq!(rows, factors, "a plan of {rows} factors for {factors}");
        let mesh = mesh.cast();
        for (trained, row) in weights.iter().zip(self.rows()) {
            match trained.weight {
                Weight::One(param) => {
                    let zeros = || param.val().inner().zeros_like();
                    sync(&mut grads, param.id, zeros, row, &mesh);
                }
                Weight::PerExpert(param) => {
                    let zeros = || param.val().inner().zeros_like();
                    sync(&mut grads, param.id, zeros, row, &mesh);
                }
            }
        }
        grads
    }
}

fn sync<I: ParallelBackend, const D: usize>(
    grads: &mut GradientsParams,
    id: ParamId,
    zeros: impl FnOnce() -> Tensor<I, D>,
    row: &GradientRow,
    mesh: &Mesh<I>,
) {
    let mut grad = grads.remove::<I, D>(id).unwrap_or_else(zeros);
    for group in &row.sums {
        grad = over(grad, REDUCE_FROM, *group, mesh);
    }
    if row.divisor != 1.0 {
        grad = scaled(grad, 1.0 / row.divisor);
    }
    grads.register(id, grad);
}

/// `factor * grad`, rounded once: half precision would round the factor too.
pub(crate) fn scaled<I: Backend, const D: usize>(grad: Tensor<I, D>, factor: f64) -> Tensor<I, D> {
    let dtype = grad.dtype();
    in_f32(grad).mul_scalar(factor).cast(dtype)
}

/// Moves `x`, as long on every rank, over the group of this name along dimension 0.
pub(crate) fn over<I: ParallelBackend, const D: usize>(
    x: Tensor<I, D>,
    transition: Transition,
    group: GroupName,
    mesh: &Mesh<I>,
) -> Tensor<I, D> {
    fn on<I: ParallelBackend, G: GroupKind, const D: usize>(
        x: Tensor<I, D>,
        transition: Transition,
        group: &Group<I, G>,
    ) -> Tensor<I, D> {
        let sizes = vec![x.dims()[0]; group.size()].into();
        apply(x, transition, group, 0, &sizes)
    }
    match group {
        GroupName::Tp => on(x, transition, mesh.tp()),
        GroupName::ExpertTp => on(x, transition, mesh.expert_tp()),
        GroupName::Ep => on(x, transition, mesh.ep()),
        GroupName::Dp => on(x, transition, mesh.dp()),
        GroupName::ExpertDp => on(x, transition, mesh.expert_dp()),
    }
}
