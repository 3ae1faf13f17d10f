//! Grouped products as a burn backend extension, with their backward passes.

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};

use crate::{RowGroups, per_expert};

/// The three grouped products of a linear: output, input gradient and weight gradient.
///
/// The provided methods are the per-expert path, so a backend without autodiff needs an empty
/// impl. Shapes: `x [T, d_in]`, `w [E, d_out, d_in]`, `y [T, d_out]`.
pub trait GroupedBackend: Backend {
    /// `y_e = x_e w_e^T`, or `x_e w_e` with `x [T, d_out]` when `transposed`.
    fn grouped_matmul(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        groups: &RowGroups,
        transposed: bool,
    ) -> FloatTensor<Self> {
        per_expert::matmul::<Self>(x, w, groups, transposed)
    }

    /// `w_e = p_e^T q_e` for `p [T, d_out]`, `q [T, d_in]`; exactly zero for an expert without rows.
    fn grouped_outer(
        p: FloatTensor<Self>,
        q: FloatTensor<Self>,
        groups: &RowGroups,
    ) -> FloatTensor<Self> {
        per_expert::outer::<Self>(p, q, groups)
    }
}

/// `y_e = x_e w_e^T`: every row times the weight of its expert.
///
/// # Shapes
///
/// `x [T, d_in]` sorted by expert, `w [E, d_out, d_in]` -> `[T, d_out]`
///
/// # Panics
///
/// When the groups do not cover the rows, or when shapes of `x` and `w` do not match.
pub fn grouped_matmul<B: GroupedBackend>(
    x: Tensor<B, 2>,
    w: Tensor<B, 3>,
    groups: &RowGroups,
) -> Tensor<B, 2> {
    let ([rows, d_in], [experts, _, w_in]) = (x.dims(), w.dims());
    assert!(
        rows == groups.rows() && experts == groups.experts() && d_in == w_in,
        "grouped_matmul: x [{rows}, {d_in}] and w {:?} do not fit {} rows over {} experts",
        w.dims(),
        groups.rows(),
        groups.experts(),
    );
    Tensor::from_primitive(TensorPrimitive::Float(B::grouped_matmul(
        x.into_primitive().tensor(),
        w.into_primitive().tensor(),
        groups,
        false,
    )))
}

/// `y = x w^T`: every row times the same weight, zero rows included.
///
/// The grouped product of one expert. burn's own matmul divides by zero on some backends when there
/// are no rows.
///
/// # Shapes
///
/// `x [T, d_in]`, `w [d_out, d_in]` -> `[T, d_out]`
///
/// # Panics
///
/// When shapes of `x` and `w` do not match.
pub fn linear<B: GroupedBackend>(x: Tensor<B, 2>, w: Tensor<B, 2>) -> Tensor<B, 2> {
    let [rows, _] = x.dims();
    grouped_matmul(x, w.unsqueeze(), &RowGroups::whole(rows))
}

/// Operands of a product, each kept only when the other one's gradient needs it.
type Saved<B> = (Option<FloatTensor<B>>, Option<FloatTensor<B>>, RowGroups);

#[derive(Debug)]
struct MatmulBackward {
    transposed: bool,
}

impl<B: GroupedBackend> Backward<B, 2> for MatmulBackward {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (x, w, groups) = ops.state;
        let dy = grads.consume::<B>(&ops.node);
        let [x_node, w_node] = ops.parents;
        if let (Some(node), Some(w)) = (x_node, w) {
            let dx = B::grouped_matmul(dy.clone(), w, &groups, !self.transposed);
            grads.register::<B>(node.id, dx);
        }
        if let (Some(node), Some(x)) = (w_node, x) {
            let dw = if self.transposed {
                B::grouped_outer(x, dy, &groups)
            } else {
                B::grouped_outer(dy, x, &groups)
            };
            grads.register::<B>(node.id, dw);
        }
    }
}

#[derive(Debug)]
struct OuterBackward;

impl<B: GroupedBackend> Backward<B, 2> for OuterBackward {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (p, q, groups) = ops.state;
        let dz = grads.consume::<B>(&ops.node);
        let [p_node, q_node] = ops.parents;
        if let (Some(node), Some(q)) = (p_node, q) {
            let dp = B::grouped_matmul(q, dz.clone(), &groups, false);
            grads.register::<B>(node.id, dp);
        }
        if let (Some(node), Some(p)) = (q_node, p) {
            let dq = B::grouped_matmul(p, dz, &groups, true);
            grads.register::<B>(node.id, dq);
        }
    }
}

impl<B: GroupedBackend, C: CheckpointStrategy> GroupedBackend for Autodiff<B, C> {
    fn grouped_matmul(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        groups: &RowGroups,
        transposed: bool,
    ) -> FloatTensor<Self> {
        let prepared = MatmulBackward { transposed }
            .prepare::<C>([x.node.clone(), w.node.clone()])
            .compute_bound()
            .stateful();
        match prepared {
            OpsKind::Tracked(prep) => {
                let saved = (
                    w.is_tracked().then(|| x.primitive.clone()),
                    x.is_tracked().then(|| w.primitive.clone()),
                    groups.clone(),
                );
                prep.finish(
                    saved,
                    B::grouped_matmul(x.primitive, w.primitive, groups, transposed),
                )
            }
            OpsKind::UnTracked(prep) => prep.finish(B::grouped_matmul(
                x.primitive,
                w.primitive,
                groups,
                transposed,
            )),
        }
    }

    fn grouped_outer(
        p: FloatTensor<Self>,
        q: FloatTensor<Self>,
        groups: &RowGroups,
    ) -> FloatTensor<Self> {
        let prepared = OuterBackward
            .prepare::<C>([p.node.clone(), q.node.clone()])
            .compute_bound()
            .stateful();
        match prepared {
            OpsKind::Tracked(prep) => {
                let saved = (
                    q.is_tracked().then(|| p.primitive.clone()),
                    p.is_tracked().then(|| q.primitive.clone()),
                    groups.clone(),
                );
                prep.finish(saved, B::grouped_outer(p.primitive, q.primitive, groups))
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::grouped_outer(p.primitive, q.primitive, groups))
            }
        }
    }
}
