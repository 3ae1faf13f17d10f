//! The two halves of an adapter: shrink to the rank, expand onto the output.

use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Slice, Tensor, TensorMetadata, TensorPrimitive};

use crate::{Between, Compute, GroupedBackend, RowGroups, Strategy};

/// How `z [T, r]` lies in memory where a kernel is free to choose. The values are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Row by row: what is summed over ranks.
    ByToken,
    /// Column by column: what ranks hold columns of. Theirs then lie one after the other.
    ByFeature,
}

/// Gradients, each only when asked for.
pub type Gradients2<B> = [Option<FloatTensor<B>>; 2];

/// What the backward pass of an expansion needs.
#[derive(Clone, Debug)]
pub struct Expanded<B: Backend> {
    /// The columns of the output that are the product's.
    pub columns: Range<usize>,
    /// `[T, r]`.
    pub z: FloatTensor<B>,
    /// `[E, columns, r]`, where the gradient of `z` is asked for.
    pub b: Option<FloatTensor<B>>,
    /// What stands between the factors.
    pub between: Between,
    /// Rows by expert.
    pub rows: RowGroups,
    /// How the products are computed.
    pub compute: Compute,
}

/// `z_e = x_e a_e^T`: every row down to the rank.
///
/// # Shapes
///
/// `x [T, d_in]` sorted by expert, `a [E, r, d_in]` -> `[T, r]`
///
/// # Panics
///
/// When the groups do not cover the rows, or when shapes of `x` and `a` do not match.
pub fn shrink<B: GroupedBackend>(
    x: Tensor<B, 2>,
    a: Tensor<B, 3>,
    rows: &RowGroups,
    layout: Layout,
    compute: Compute,
) -> Tensor<B, 2> {
    rows.check("shrink", x.dims(), a.dims());
    require_kernels(&a, a.dims()[1], compute);
    tensor(B::shrink(primitive(x), primitive(a), rows, layout, compute))
}

/// `y_e = f(z_e) b_e^T` with `f` what stands between the factors: every row up to the output.
///
/// # Shapes
///
/// `z [T, r]` sorted by expert, `b [E, d_out, r]` -> `[T, d_out]`
///
/// # Panics
///
/// When the groups do not cover the rows, or when shapes of `z` and `b` do not match.
pub fn expand<B: GroupedBackend>(
    z: Tensor<B, 2>,
    b: Tensor<B, 3>,
    between: Between,
    rows: &RowGroups,
    compute: Compute,
) -> Tensor<B, 2> {
    rows.check("expand", z.dims(), b.dims());
    require_kernels(&b, b.dims()[2], compute);
    tensor(B::expand(
        primitive(z),
        primitive(b),
        between,
        rows,
        compute,
    ))
}

/// As [`expand`], added to the columns `columns` of `base`, in place where its buffer has no other
/// owner. Backward: the cotangent for `base`, its columns for the product.
///
/// # Shapes
///
/// `base [T, n]`, `z [T, r]`, `b [E, columns, r]` -> `[T, n]`
///
/// # Panics
///
/// When the groups do not cover the rows, or when shapes do not match.
pub fn expand_into<B: GroupedBackend>(
    base: Tensor<B, 2>,
    columns: Range<usize>,
    z: Tensor<B, 2>,
    b: Tensor<B, 3>,
    between: Between,
    rows: &RowGroups,
    compute: Compute,
) -> Tensor<B, 2> {
    rows.check("expand_into", z.dims(), b.dims());
    require_kernels(&b, b.dims()[2], compute);
    let ([base_rows, n], [_, d_out, _]) = (base.dims(), b.dims());
    assert!(
        base_rows == rows.all_rows() && columns.len() == d_out && columns.end <= n,
        "expand_into: columns {columns:?} of base [{base_rows}, {n}] do not take b {:?} and {} rows",
        b.dims(),
        rows.all_rows(),
    );
    tensor(B::expand_into(
        primitive(base),
        columns,
        primitive(z),
        primitive(b),
        between,
        rows,
        compute,
    ))
}

fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

fn tensor<B: Backend, const D: usize>(x: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// `scale * activation(z)` of a primitive.
pub(crate) fn between<B: Backend>(z: FloatTensor<B>, between: Between) -> FloatTensor<B> {
    primitive(between.forward(tensor::<B, 2>(z)))
}

/// The cotangent of `z` behind what stands between the factors.
fn between_backward<B: Backend>(
    z: FloatTensor<B>,
    grad: FloatTensor<B>,
    between: Between,
) -> FloatTensor<B> {
    primitive(between.backward(tensor::<B, 2>(z), tensor(grad)))
}

/// The backward pass of a shrink by grouped products.
pub(crate) fn shrink_backward<B: GroupedBackend>(
    dz: FloatTensor<B>,
    x: Option<FloatTensor<B>>,
    a: Option<FloatTensor<B>>,
    rows: &RowGroups,
) -> Gradients2<B> {
    let dx = a.map(|a| B::grouped_matmul(dz.clone(), a, rows, true));
    let da = x.map(|x| B::grouped_outer(dz, x, rows));
    [dx, da]
}

/// The backward pass of an expansion by grouped products.
pub(crate) fn expand_backward<B: GroupedBackend>(
    dy: FloatTensor<B>,
    saved: Expanded<B>,
    db: bool,
) -> Gradients2<B> {
    let Expanded { z, rows, .. } = saved;
    let dy = columns_of::<B>(dy, saved.columns);
    let db = db.then(|| {
        let z = between::<B>(z.clone(), saved.between);
        B::grouped_outer(dy.clone(), z, &rows)
    });
    let dz = saved.b.map(|b| {
        let grad = B::grouped_matmul(dy, b, &rows, true);
        between_backward::<B>(z, grad, saved.between)
    });
    [dz, db]
}

/// `Strategy::Grouped` never falls back in silence.
pub(crate) fn require_kernels<B: GroupedBackend>(w: &Tensor<B, 3>, rank: usize, compute: Compute) {
    if compute.strategy == Strategy::Grouped
        && let Err(reason) = B::grouped_kernels(&w.device(), w.dtype(), rank)
    {
        panic!("strategy grouped: {reason} (use auto or per-expert)");
    }
}

/// `base` with `part` added to its columns.
pub(crate) fn add_columns<B: Backend>(
    base: FloatTensor<B>,
    columns: Range<usize>,
    part: FloatTensor<B>,
) -> FloatTensor<B> {
    if part.shape().num_elements() == 0 {
        return base;
    }
    if columns == (0..base.shape()[1]) {
        return B::float_add(base, part);
    }
    let place = [Slice::full(), columns.into()];
    let sum = B::float_add(B::float_slice(base.clone(), &place), part);
    B::float_slice_assign(base, &place, sum)
}

/// Columns of `x`.
pub(crate) fn columns_of<B: Backend>(x: FloatTensor<B>, columns: Range<usize>) -> FloatTensor<B> {
    if columns == (0..x.shape()[1]) {
        return x;
    }
    B::float_slice(x, &[Slice::full(), columns.into()])
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::backend::Flex;

    #[test]
    #[should_panic(expected = "strategy grouped: the backend has no grouped kernels")]
    fn grouped_is_refused_where_there_are_no_kernels() {
        let device = Default::default();
        let compute = Compute {
            strategy: Strategy::Grouped,
            tf32: false,
        };
        let (x, a) = (
            Tensor::<Flex, 2>::ones([2, 4], &device),
            Tensor::ones([1, 3, 4], &device),
        );
        shrink(x, a, &RowGroups::whole(2), Layout::ByToken, compute);
    }
}
