//! Gradients that several ranks hold a term of.

use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use moe_lora_parallel::region::{REDUCE_FROM, apply};
use moe_lora_parallel::{Group, GroupKind, GroupName, Mesh, ParallelBackend};

use crate::{TrainedWeight, Weight};

/// Sums each factor's gradient over the ranks that hold the same values. Call it once a step,
/// after backward and before the optimizer.
///
/// | factor | summed over |
/// |---|---|
/// | of one expert | [`expert_gradient_group`](moe_lora_parallel::Topology::expert_gradient_group) |
/// | shared by the experts | `Ep`, then the same |
/// | of a dense linear or shared expert | `Dp` |
///
/// Sums, not means: by the crate's convention the loss is the sum of the ranks' local losses. A
/// rank without a gradient for a factor takes part with zeros.
///
/// # Panics
///
/// When a collective fails.
pub fn sync_gradients<B, I>(
    weights: &[TrainedWeight<'_, B>],
    mut grads: GradientsParams,
    mesh: &Mesh<B>,
) -> GradientsParams
where
    B: AutodiffBackend<InnerBackend = I> + ParallelBackend,
    I: ParallelBackend<Base = B::Base>,
{
    for trained in weights {
        let groups: &[GroupName] = match (trained.group, trained.shared_by_experts) {
            (GroupName::ExpertTp, false) => &[mesh.topology().expert_gradient_group()],
            (GroupName::ExpertTp, true) => {
                &[GroupName::Ep, mesh.topology().expert_gradient_group()]
            }
            (GroupName::Tp | GroupName::Ep | GroupName::Dp | GroupName::ExpertDp, _) => {
                &[GroupName::Dp]
            }
        };
        match trained.weight {
            Weight::One(param) => {
                let zeros = || param.val().inner().zeros_like();
                sync(&mut grads, param.id, zeros, groups, mesh);
            }
            Weight::PerExpert(param) => {
                let zeros = || param.val().inner().zeros_like();
                sync(&mut grads, param.id, zeros, groups, mesh);
            }
        }
    }
    grads
}

fn sync<B, I, const D: usize>(
    grads: &mut GradientsParams,
    id: ParamId,
    zeros: impl FnOnce() -> Tensor<I, D>,
    groups: &[GroupName],
    mesh: &Mesh<B>,
) where
    B: ParallelBackend,
    I: ParallelBackend<Base = B::Base>,
{
    let mut grad = grads.remove::<I, D>(id).unwrap_or_else(zeros);
    for group in groups {
        grad = match group {
            GroupName::Ep => sum(grad, &mesh.ep().cast()),
            GroupName::Dp => sum(grad, &mesh.dp().cast()),
            GroupName::ExpertDp => sum(grad, &mesh.expert_dp().cast()),
            GroupName::Tp => sum(grad, &mesh.tp().cast()),
            GroupName::ExpertTp => sum(grad, &mesh.expert_tp().cast()),
        };
    }
    grads.register(id, grad);
}

fn sum<I: ParallelBackend, G: GroupKind, const D: usize>(
    grad: Tensor<I, D>,
    group: &Group<I, G>,
) -> Tensor<I, D> {
    apply(grad, REDUCE_FROM, group, 0, &[].into())
}
