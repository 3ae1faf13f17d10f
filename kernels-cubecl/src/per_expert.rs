//! The per-expert path: burn's own matmul for each expert, on every backend.

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
    let [_, d_out, d_in] = w.shape().dims();
    let columns = if transposed { d_in } else { d_out };
    let padding = groups.all_rows() - groups.rows();
    let padding = (padding > 0).then(|| {
        let shape = Shape::from([padding, columns]);
        B::float_zeros(shape, &B::float_device(&x), x.dtype().into())
    });
    let parts = (0..groups.experts())
        .filter(|expert| !groups.range(*expert).is_empty())
        .map(|expert| {
            let w = expert_of::<B>(&w, expert);
            let w = if transposed {
                w
            } else {
                B::float_swap_dims(w, 0, 1)
            };
            B::float_matmul(rows_of::<B>(&x, groups, expert), w)
        })
        .chain(padding)
        .collect();
    concatenate::<B>(parts, Shape::from([groups.all_rows(), columns]), &x)
}

/// `z_e = p_e^T q_e`; `p [T, n]`, `q [T, k]`, `z [E, n, k]`. Zero for an expert without rows.
pub(crate) fn outer<B: Backend>(
    p: FloatTensor<B>,
    q: FloatTensor<B>,
    groups: &RowGroups,
) -> FloatTensor<B> {
    let [_, d_out] = p.shape().dims();
    let [_, d_in] = q.shape().dims();
    let parts = (0..groups.experts())
        .map(|expert| {
            let z = if groups.range(expert).is_empty() {
                B::float_zeros(
                    Shape::from([d_out, d_in]),
                    &B::float_device(&p),
                    p.dtype().into(),
                )
            } else {
                let p = B::float_swap_dims(rows_of::<B>(&p, groups, expert), 0, 1);
                B::float_matmul(p, rows_of::<B>(&q, groups, expert))
            };
            B::float_reshape(z, Shape::from([1, d_out, d_in]))
        })
        .collect();
    concatenate::<B>(parts, Shape::from([groups.experts(), d_out, d_in]), &p)
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
