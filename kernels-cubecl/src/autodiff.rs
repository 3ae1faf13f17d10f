//! Grouped products under autodiff: the backward pass of each, written by hand.

use std::ops::Range;

use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, TensorMetadata};
use burn_autodiff::NodeId;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, binary, unary};

use crate::low_rank::{Expanded, Layout, columns_of};
use crate::{Between, Compute, DropoutMask, GroupedBackend, RowGroups};

/// Operands of a product, each kept only when the other one's gradient needs it.
type Saved<B> = (Option<FloatTensor<B>>, Option<FloatTensor<B>>, RowGroups);

/// The parents that want a gradient.
fn parents<S, const N: usize>(ops: &Ops<S, N>) -> [Option<NodeId>; N] {
    ops.parents
        .each_ref()
        .map(|node| node.as_ref().map(|node| node.id))
}

/// Hands its gradient to each parent that wants one.
fn register<B: GroupedBackend, const N: usize>(
    grads: &mut Gradients,
    parents: [Option<NodeId>; N],
    gradients: [Option<FloatTensor<B>>; N],
) {
    for (node, gradient) in parents.into_iter().zip(gradients) {
        if let (Some(node), Some(gradient)) = (node, gradient) {
            grads.register::<B>(node, gradient);
        }
    }
}

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
        let parents = parents(&ops);
        let (x, w, groups) = ops.state;
        let dy = grads.consume::<B>(&ops.node);
        let dx = w.map(|w| B::grouped_matmul(dy.clone(), w, &groups, !self.transposed));
        let dw = x.map(|x| match self.transposed {
            true => B::grouped_outer(x, dy, &groups),
            false => B::grouped_outer(dy, x, &groups),
        });
        register::<B, _>(grads, parents, [dx, dw]);
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
        let parents = parents(&ops);
        let (p, q, groups) = ops.state;
        let dz = grads.consume::<B>(&ops.node);
        let dp = q.map(|q| B::grouped_matmul(q, dz.clone(), &groups, false));
        let dq = p.map(|p| B::grouped_matmul(p, dz, &groups, true));
        register::<B, _>(grads, parents, [dp, dq]);
    }
}

/// Operands of a shrink, as [`Saved`]. The input comes from the checkpointer, which computes it again
/// where the strategy says so.
type SavedShrink<B> = (Option<NodeId>, Option<FloatTensor<B>>, RowGroups);

#[derive(Debug)]
struct ShrinkBackward {
    compute: Compute,
}

impl<B: GroupedBackend> Backward<B, 2> for ShrinkBackward {
    type State = SavedShrink<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let parents = parents(&ops);
        let (x, a, rows) = ops.state;
        let x = x.map(|x| checkpointer.retrieve_node_output(x));
        let dz = grads.consume::<B>(&ops.node);
        let gradients = B::shrink_backward(dz, x, a, &rows, self.compute);
        register::<B, _>(grads, parents, gradients);
    }
}

#[derive(Debug)]
struct DropoutBackward;

impl<B: GroupedBackend> Backward<B, 1> for DropoutBackward {
    type State = DropoutMask;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let mask = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |dy| B::dropout(dy, &mask));
    }
}

/// Keeps `x` as it came, not what dropout left of it.
#[derive(Debug)]
struct ShrinkDroppedBackward {
    mask: DropoutMask,
    compute: Compute,
}

impl<B: GroupedBackend> Backward<B, 2> for ShrinkDroppedBackward {
    type State = SavedShrink<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let parents = parents(&ops);
        let (x, a, rows) = ops.state;
        let x = x.map(|x| B::dropout(checkpointer.retrieve_node_output(x), &self.mask));
        let dz = grads.consume::<B>(&ops.node);
        let [dx, da] = B::shrink_backward(dz, x, a, &rows, self.compute);
        let dx = dx.map(|dx| B::dropout(dx, &self.mask));
        register::<B, _>(grads, parents, [dx, da]);
    }
}

#[derive(Debug)]
struct AddDroppedBackward;

impl<B: GroupedBackend> Backward<B, 2> for AddDroppedBackward {
    type State = (Range<usize>, DropoutMask);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (columns, mask) = ops.state;
        let of_delta = |dy| B::dropout(columns_of::<B>(dy, columns), &mask);
        binary::<B, _, _>(ops.parents, ops.node, grads, |dy| dy, of_delta);
    }
}

#[derive(Debug)]
struct ExpandBackward;

impl<B: GroupedBackend> Backward<B, 2> for ExpandBackward {
    type State = Expanded<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let parents = parents(&ops);
        let dy = grads.consume::<B>(&ops.node);
        let gradients = B::expand_backward(dy, ops.state, parents[1].is_some());
        register::<B, _>(grads, parents, gradients);
    }
}

#[derive(Debug)]
struct ExpandIntoBackward;

impl<B: GroupedBackend> Backward<B, 3> for ExpandIntoBackward {
    type State = Expanded<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let parents = parents(&ops);
        let dy = grads.consume::<B>(&ops.node);
        let [dz, db] = B::expand_backward(dy.clone(), ops.state, parents[2].is_some());
        register::<B, _>(grads, parents, [Some(dy), dz, db]);
    }
}

/// `y`, where the factors' gradient needs it, and the factors.
#[derive(Debug)]
struct ScaleColumnsBackward;

impl<B: GroupedBackend> Backward<B, 2> for ScaleColumnsBackward {
    type State = (Option<FloatTensor<B>>, FloatTensor<B>, RowGroups);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let parents = parents(&ops);
        let (y, factors, rows) = ops.state;
        let dy = grads.consume::<B>(&ops.node);
        let gradients = B::scale_columns_backward(dy, y, factors, parents[0].is_some(), &rows);
        register::<B, _>(grads, parents, gradients);
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

    fn grouped_kernels(device: &Self::Device, dtype: DType, rank: usize) -> Result<(), String> {
        B::grouped_kernels(device, dtype, rank)
    }

    fn shrink(
        x: FloatTensor<Self>,
        a: FloatTensor<Self>,
        rows: &RowGroups,
        layout: Layout,
        compute: Compute,
    ) -> FloatTensor<Self> {
        let prepared = ShrinkBackward { compute }
            .prepare::<C>([x.node.clone(), a.node.clone()])
            .compute_bound()
            .stateful();
        match prepared {
            OpsKind::Tracked(mut prep) => {
                let saved = (
                    a.is_tracked().then(|| prep.checkpoint(&x)),
                    x.is_tracked().then(|| a.primitive.clone()),
                    rows.clone(),
                );
                prep.finish(
                    saved,
                    B::shrink(x.primitive, a.primitive, rows, layout, compute),
                )
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::shrink(x.primitive, a.primitive, rows, layout, compute))
            }
        }
    }

    fn dropout(x: FloatTensor<Self>, mask: &DropoutMask) -> FloatTensor<Self> {
        let prepared = DropoutBackward
            .prepare::<C>([x.node.clone()])
            .compute_bound()
            .stateful();
        match prepared {
            OpsKind::Tracked(prep) => prep.finish(mask.clone(), B::dropout(x.primitive, mask)),
            OpsKind::UnTracked(prep) => prep.finish(B::dropout(x.primitive, mask)),
        }
    }

    fn shrink_dropped(
        x: FloatTensor<Self>,
        mask: &DropoutMask,
        a: FloatTensor<Self>,
        rows: &RowGroups,
        layout: Layout,
        compute: Compute,
    ) -> FloatTensor<Self> {
        let backward = ShrinkDroppedBackward {
            mask: mask.clone(),
            compute,
        };
        let prepared = backward
            .prepare::<C>([x.node.clone(), a.node.clone()])
            .compute_bound()
            .stateful();
        let run = |x, a| B::shrink_dropped(x, mask, a, rows, layout, compute);
        match prepared {
            OpsKind::Tracked(mut prep) => {
                let saved = (
                    a.is_tracked().then(|| prep.checkpoint(&x)),
                    x.is_tracked().then(|| a.primitive.clone()),
                    rows.clone(),
                );
                prep.finish(saved, run(x.primitive, a.primitive))
            }
            OpsKind::UnTracked(prep) => prep.finish(run(x.primitive, a.primitive)),
        }
    }

    fn add_dropped(
        base: FloatTensor<Self>,
        columns: Range<usize>,
        delta: FloatTensor<Self>,
        mask: &DropoutMask,
    ) -> FloatTensor<Self> {
        let prepared = AddDroppedBackward
            .prepare::<C>([base.node.clone(), delta.node.clone()])
            .compute_bound()
            .stateful();
        let y = B::add_dropped(base.primitive, columns.clone(), delta.primitive, mask);
        match prepared {
            OpsKind::Tracked(prep) => prep.finish((columns, mask.clone()), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn expand(
        z: FloatTensor<Self>,
        b: FloatTensor<Self>,
        f: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> FloatTensor<Self> {
        let prepared = ExpandBackward
            .prepare::<C>([z.node.clone(), b.node.clone()])
            .compute_bound()
            .stateful();
        let [_, d_out, _] = b.primitive.shape().dims();
        match prepared {
            OpsKind::Tracked(prep) => {
                let saved = Expanded {
                    columns: 0..d_out,
                    z: z.primitive.clone(),
                    b: z.is_tracked().then(|| b.primitive.clone()),
                    between: f,
                    rows: rows.clone(),
                    compute,
                };
                prep.finish(saved, B::expand(z.primitive, b.primitive, f, rows, compute))
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::expand(z.primitive, b.primitive, f, rows, compute))
            }
        }
    }

    fn expand_into(
        base: FloatTensor<Self>,
        columns: Range<usize>,
        z: FloatTensor<Self>,
        b: FloatTensor<Self>,
        f: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> FloatTensor<Self> {
        let prepared = ExpandIntoBackward
            .prepare::<C>([base.node.clone(), z.node.clone(), b.node.clone()])
            .compute_bound()
            .stateful();
        let saved = Expanded {
            columns: columns.clone(),
            z: z.primitive.clone(),
            b: z.is_tracked().then(|| b.primitive.clone()),
            between: f,
            rows: rows.clone(),
            compute,
        };
        let y = B::expand_into(
            base.primitive,
            columns,
            z.primitive,
            b.primitive,
            f,
            rows,
            compute,
        );
        match prepared {
            OpsKind::Tracked(prep) => prep.finish(saved, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn scale_columns(
        y: FloatTensor<Self>,
        factors: FloatTensor<Self>,
        rows: &RowGroups,
    ) -> FloatTensor<Self> {
        let prepared = ScaleColumnsBackward
            .prepare::<C>([y.node.clone(), factors.node.clone()])
            .compute_bound()
            .stateful();
        match prepared {
            OpsKind::Tracked(prep) => {
                let saved = (
                    factors.is_tracked().then(|| y.primitive.clone()),
                    factors.primitive.clone(),
                    rows.clone(),
                );
                prep.finish(
                    saved,
                    B::scale_columns(y.primitive, factors.primitive, rows),
                )
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::scale_columns(y.primitive, factors.primitive, rows))
            }
        }
    }

    fn row_terms(
        w: FloatTensor<Self>,
        a: FloatTensor<Self>,
        rows: &[RowGroups; 2],
        wide: DType,
        compute: Compute,
    ) -> [FloatTensor<Self>; 3] {
        B::row_terms(w.primitive, a.primitive, rows, wide, compute).map(Self::from_inner)
    }

    fn row_norms(
        terms: [FloatTensor<Self>; 3],
        b: FloatTensor<Self>,
        scale: f64,
        of_zero: f64,
    ) -> FloatTensor<Self> {
        let terms = terms.map(|term| term.primitive);
        Self::from_inner(B::row_norms(terms, b.primitive, scale, of_zero))
    }
}
