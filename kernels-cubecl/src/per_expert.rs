//! The per-expert path: burn's own matmul for each expert, on every backend. Experts with equally
//! many rows are one batch.

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, Slice, TensorMetadata};

use crate::RowGroups;

/// `y_e = x_e w_e^T`, or `x_e w_e` when `transposed`; `x [T, k]`, `w [E, ..]`, `y [T, n]`.
pub(crate) fn matmul<B: Backend>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    groups: &RowGroups,
    transposed: bool,
) -> FloatTensor<B> {
    matmul_by::<B>(x, w, groups, transposed, B::float_matmul)
}

/// `z_e = p_e^T q_e`; `p [T, n]`, `q [T, k]`, `z [E, n, k]`. Zero for an expert without rows.
pub(crate) fn outer<B: Backend>(
    p: FloatTensor<B>,
    q: FloatTensor<B>,
    groups: &RowGroups,
) -> FloatTensor<B> {
    outer_by::<B>(p, q, groups, B::float_matmul)
}

/// As [`matmul`], every product by `product`.
pub(crate) fn matmul_by<B: Backend>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    groups: &RowGroups,
    transposed: bool,
    product: impl Fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let [experts, d_out, d_in] = w.shape().dims();
    let (inner, columns) = if transposed {
        (d_out, d_in)
    } else {
        (d_in, d_out)
    };
    let turn = |w, dims: [usize; 2]| match transposed {
        true => w,
        false => B::float_swap_dims(w, dims[0], dims[1]),
    };
    if let Some(rows) = groups.equal_rows() {
        let x = B::float_reshape(x, Shape::from([experts, rows, inner]));
        let y = product(x, turn(w, [1, 2]));
        return B::float_reshape(y, Shape::from([groups.all_rows(), columns]));
    }
    let padding = groups.all_rows() - groups.rows();
    let padding = (padding > 0).then(|| {
        let shape = Shape::from([padding, columns]);
        B::float_zeros(shape, &B::float_device(&x), x.dtype().into())
    });
    let parts = (0..groups.experts())
        .filter(|expert| !groups.range(*expert).is_empty())
        .map(|expert| {
            let w = turn(expert_of::<B>(&w, expert), [0, 1]);
            product(rows_of::<B>(&x, groups, expert), w)
        })
        .chain(padding)
        .collect();
    concatenate::<B>(parts, Shape::from([groups.all_rows(), columns]), &x)
}

/// As [`outer`], every product by `product`.
pub(crate) fn outer_by<B: Backend>(
    p: FloatTensor<B>,
    q: FloatTensor<B>,
    groups: &RowGroups,
    product: impl Fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let [_, d_out] = p.shape().dims();
    let [_, d_in] = q.shape().dims();
    let experts = groups.experts();
    if let Some(rows) = groups.equal_rows() {
        let p = B::float_reshape(p, Shape::from([experts, rows, d_out]));
        let q = B::float_reshape(q, Shape::from([experts, rows, d_in]));
        return product(B::float_swap_dims(p, 1, 2), q);
    }
    let parts = (0..experts)
        .map(|expert| {
            let z = if groups.range(expert).is_empty() {
                B::float_zeros(
                    Shape::from([d_out, d_in]),
                    &B::float_device(&p),
                    p.dtype().into(),
                )
            } else {
                let p = B::float_swap_dims(rows_of::<B>(&p, groups, expert), 0, 1);
                product(p, rows_of::<B>(&q, groups, expert))
            };
            B::float_reshape(z, Shape::from([1, d_out, d_in]))
        })
        .collect();
    concatenate::<B>(parts, Shape::from([experts, d_out, d_in]), &p)
}

fn rows_of<B: Backend>(x: &FloatTensor<B>, groups: &RowGroups, expert: usize) -> FloatTensor<B> {
    B::float_slice(x.clone(), &[groups.range(expert).into(), Slice::full()])
}

fn expert_of<B: Backend>(w: &FloatTensor<B>, expert: usize) -> FloatTensor<B> {
    let [_, d_out, d_in] = w.shape().dims();
    let one = B::float_slice(
        w.clone(),
        &[(expert..expert + 1).into(), Slice::full(), Slice::full()],
    );
    B::float_reshape(one, Shape::from([d_out, d_in]))
}

fn concatenate<B: Backend>(
    mut parts: Vec<FloatTensor<B>>,
    shape: Shape,
    like: &FloatTensor<B>,
) -> FloatTensor<B> {
    match parts.len() {
        0 => B::float_zeros(shape, &B::float_device(like), like.dtype().into()),
        1 => parts.remove(0),
        _ => B::float_cat(parts, 0),
    }
}
