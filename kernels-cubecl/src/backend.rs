//! Grouped products as a burn backend extension.

use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor, TensorPrimitive};

use crate::low_rank::{self, Expanded, Gradients2, Layout, add_columns, between};
use crate::{Between, Compute, DropoutMask, RowGroups, columns, dropout, norms, per_expert};

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

    /// Whether [`Strategy::Grouped`](crate::Strategy::Grouped) can be asked for, or the reason why
    /// not.
    fn grouped_kernels(device: &Self::Device, dtype: DType, rank: usize) -> Result<(), String> {
        let _ = (device, dtype, rank);
        Err("the backend has no grouped kernels".into())
    }

    /// See [`shrink`](crate::shrink).
    fn shrink(
        x: FloatTensor<Self>,
        a: FloatTensor<Self>,
        rows: &RowGroups,
        layout: Layout,
        compute: Compute,
    ) -> FloatTensor<Self> {
        let _ = (layout, compute);
        Self::grouped_matmul(x, a, rows, false)
    }

    /// Cotangents of `x` and `a` for that of `z`. What is not given needs no gradient of the other.
    fn shrink_backward(
        dz: FloatTensor<Self>,
        x: Option<FloatTensor<Self>>,
        a: Option<FloatTensor<Self>>,
        rows: &RowGroups,
        compute: Compute,
    ) -> Gradients2<Self> {
        let _ = compute;
        low_rank::shrink_backward::<Self>(dz, x, a, rows)
    }

    /// See [`dropout`](crate::dropout).
    fn dropout(x: FloatTensor<Self>, mask: &DropoutMask) -> FloatTensor<Self> {
        dropout::on_host::<Self>(x, mask)
    }

    /// See [`shrink_dropped`](crate::shrink_dropped).
    fn shrink_dropped(
        x: FloatTensor<Self>,
        mask: &DropoutMask,
        a: FloatTensor<Self>,
        rows: &RowGroups,
        layout: Layout,
        compute: Compute,
    ) -> FloatTensor<Self> {
        Self::shrink(Self::dropout(x, mask), a, rows, layout, compute)
    }

    /// See [`add_dropped`](crate::add_dropped).
    fn add_dropped(
        base: FloatTensor<Self>,
        columns: Range<usize>,
        delta: FloatTensor<Self>,
        mask: &DropoutMask,
    ) -> FloatTensor<Self> {
        add_columns::<Self>(base, columns, Self::dropout(delta, mask))
    }

    /// See [`expand`](crate::expand).
    fn expand(
        z: FloatTensor<Self>,
        b: FloatTensor<Self>,
        f: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> FloatTensor<Self> {
        let _ = compute;
        Self::grouped_matmul(between::<Self>(z, f), b, rows, false)
    }

    /// See [`expand_into`](crate::expand_into).
    fn expand_into(
        base: FloatTensor<Self>,
        columns: Range<usize>,
        z: FloatTensor<Self>,
        b: FloatTensor<Self>,
        f: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> FloatTensor<Self> {
        add_columns::<Self>(base, columns, Self::expand(z, b, f, rows, compute))
    }

    /// Cotangents of `z`, where `b` was kept for it, and of `b`, where `db` asks for it, for that of
    /// the output.
    fn expand_backward(dy: FloatTensor<Self>, saved: Expanded<Self>, db: bool) -> Gradients2<Self> {
        low_rank::expand_backward::<Self>(dy, saved, db)
    }

    /// See [`scale_columns`](crate::scale_columns).
    fn scale_columns(
        y: FloatTensor<Self>,
        factors: FloatTensor<Self>,
        rows: &RowGroups,
    ) -> FloatTensor<Self> {
        columns::scale::<Self>(y, factors, rows)
    }

    /// Cotangents of `y`, where `of_y` asks for it, and of the factors, where `y` was kept for it.
    fn scale_columns_backward(
        dy: FloatTensor<Self>,
        y: Option<FloatTensor<Self>>,
        factors: FloatTensor<Self>,
        of_y: bool,
        rows: &RowGroups,
    ) -> Gradients2<Self> {
        columns::scale_backward::<Self>(dy, y, factors, of_y, rows)
    }

    /// See [`row_terms`](crate::row_terms): squares, products and gram.
    fn row_terms(
        w: FloatTensor<Self>,
        a: FloatTensor<Self>,
        rows: &[RowGroups; 2],
        wide: DType,
        compute: Compute,
    ) -> [FloatTensor<Self>; 3] {
        norms::terms::<Self>(w, a, rows, wide, compute)
    }

    /// See [`row_norms`](crate::row_norms): `terms` in the order of [`row_terms`](Self::row_terms).
    fn row_norms(
        terms: [FloatTensor<Self>; 3],
        b: FloatTensor<Self>,
        scale: f64,
        of_zero: f64,
    ) -> FloatTensor<Self> {
        norms::norms::<Self>(terms, b, scale, of_zero)
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
    groups.check("grouped_matmul", x.dims(), w.dims());
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
