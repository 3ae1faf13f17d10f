//! Output columns times a factor of each expert's own.

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, Tensor, TensorMetadata, TensorPrimitive};

use crate::low_rank::Gradients2;
use crate::{Activation, Between, Compute, GroupedBackend, RowGroups};

/// `y` with column `j` of each row multiplied by `factors[e, j]` of its expert, in the wider type of the
/// factors and rounded once. Backward: `dy` times the factors, and for the factors the sum of `dy * y` over
/// the expert's rows.
///
/// # Shapes
///
/// `y [T, n]` sorted by expert, `factors [E, n]` -> `[T, n]`
///
/// # Panics
///
/// When the groups do not cover the rows, or when there are not as many factors.
pub fn scale_columns<B: GroupedBackend>(
    y: Tensor<B, 2>,
    factors: Tensor<B, 2>,
    rows: &RowGroups,
) -> Tensor<B, 2> {
    let ([all_rows, n], dims) = (y.dims(), factors.dims());
    assert!(
        all_rows == rows.all_rows() && dims == [rows.experts(), n],
        "scale_columns: y [{all_rows}, {n}] does not fit factors {dims:?} for {} experts with {} rows",
        rows.experts(),
        rows.all_rows(),
    );
    let y = B::scale_columns(
        y.into_primitive().tensor(),
        factors.into_primitive().tensor(),
        rows,
    );
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

/// The reference: the factors laid out by row.
pub(crate) fn scale<B: GroupedBackend>(
    y: FloatTensor<B>,
    factors: FloatTensor<B>,
    rows: &RowGroups,
) -> FloatTensor<B> {
    let (dtype, wide) = (y.dtype(), factors.dtype());
    let [experts, n] = factors.shape().dims();
    let by_row = match experts {
        1 => factors,
        _ => {
            let between = Between {
                activation: Activation::Identity,
                scale: 1.0,
            };
            let factors = B::float_reshape(factors, Shape::from([experts, n, 1]));
            let one = one_a_row::<B>(&factors, rows);
            B::expand(one, factors, between, rows, Compute::default())
        }
    };
    let product = B::float_mul(B::float_cast(y, wide.into()), by_row);
    B::float_cast(product, dtype.into())
}

/// The cotangents of `y`, where the factors were kept for it, and of the factors, where `y` was.
pub(crate) fn scale_backward<B: GroupedBackend>(
    dy: FloatTensor<B>,
    y: Option<FloatTensor<B>>,
    factors: FloatTensor<B>,
    of_y: bool,
    rows: &RowGroups,
) -> Gradients2<B> {
    let wide = factors.dtype();
    let d_factors = y.map(|y| {
        let cast = |x| B::float_cast(x, wide.into());
        let products = B::float_mul(cast(dy.clone()), cast(y));
        let one = one_a_row::<B>(&factors, rows);
        let sums = B::grouped_outer(products, one, rows);
        B::float_reshape(sums, factors.shape())
    });
    let d_y = of_y.then(|| scale::<B>(dy, factors, rows));
    [d_y, d_factors]
}

fn one_a_row<B: Backend>(like: &FloatTensor<B>, rows: &RowGroups) -> FloatTensor<B> {
    let shape = Shape::from([rows.all_rows(), 1]);
    B::float_ones(shape, &B::float_device(like), like.dtype().into())
}
