//! The lengths of the rows of `W + s B A`, without that sum.

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Shape, Tensor, TensorMetadata, TensorPrimitive};

use crate::{Compute, GroupedBackend, Layout, RowGroups, low_rank};

/// What the length of a row of `W + s B A` is made of, beside `B`: with `M = W A^T` and `G = A A^T`,
/// `n^2 = |W|^2 + 2 s (M . B) + s^2 (B G . B)`.
#[derive(Clone, Debug)]
pub struct RowTerms<B: Backend> {
    /// `|W|^2`, `[E, n, 1]`, in the type that the lengths are to have.
    pub squares: Tensor<B, 3>,
    /// `M`, `[E, n, r]`.
    pub products: Tensor<B, 3>,
    /// `G`, `[E, r, r]`.
    pub gram: Tensor<B, 3>,
}

/// The terms of `W` and `A`, without a gradient. `rows` are those of `W`, `n` an expert, and those of `A`.
///
/// Products are in the type of `W` and `A`, or in `wide` where these differ; the squares are in `wide`.
///
/// # Shapes
///
/// `w [E, n, k]`, `a [E, r, k]`
///
/// # Panics
///
/// When shapes or rows do not match.
pub fn row_terms<B: GroupedBackend>(
    w: Tensor<B, 3>,
    a: Tensor<B, 3>,
    rows: &[RowGroups; 2],
    wide: DType,
    compute: Compute,
) -> RowTerms<B> {
    for (x, rows) in [&w, &a].into_iter().zip(rows) {
        let [experts, n, k] = x.dims();
        rows.check("row_terms", [experts * n, k], a.dims());
    }
    low_rank::require_kernels(&a, a.dims()[1], compute);
    let terms = B::row_terms(
        w.into_primitive().tensor(),
        a.into_primitive().tensor(),
        rows,
        wide,
        compute,
    );
    let [squares, products, gram] = terms.map(tensor);
    RowTerms {
        squares,
        products,
        gram,
    }
}

/// The lengths of the rows of `W + scale B A`, with `of_zero` for those that are zero, and without a gradient.
///
/// # Shapes
///
/// [`RowTerms`] of `E` experts, `b [E, n, r]` -> `[E, n, 1]`
///
/// # Panics
///
/// When shapes do not match.
pub fn row_norms<B: GroupedBackend>(
    terms: RowTerms<B>,
    b: Tensor<B, 3>,
    scale: f64,
    of_zero: f64,
) -> Tensor<B, 3> {
    let [experts, n, rank] = b.dims();
    let shapes = [
        terms.squares.dims(),
        terms.products.dims(),
        terms.gram.dims(),
    ];
    assert!(
        shapes == [[experts, n, 1], [experts, n, rank], [experts, rank, rank]],
        "row_norms: squares, products and gram {shapes:?} do not fit b {:?}",
        [experts, n, rank],
    );
    let [squares, products, gram, b] = [terms.squares, terms.products, terms.gram, b]
        .map(|tensor| tensor.into_primitive().tensor());
    let terms = [squares, products, gram];
    tensor(B::row_norms(terms, b, scale, of_zero))
}

fn tensor<B: Backend>(x: FloatTensor<B>) -> Tensor<B, 3> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// The reference. In the order of [`RowTerms`].
pub(crate) fn terms<B: GroupedBackend>(
    w: FloatTensor<B>,
    a: FloatTensor<B>,
    [of_w, of_a]: &[RowGroups; 2],
    wide: DType,
    compute: Compute,
) -> [FloatTensor<B>; 3] {
    let cast = |x: FloatTensor<B>| match x.dtype() == wide {
        true => x,
        false => B::float_cast(x, wide.into()),
    };
    let squares = tensor::<B>(cast(w.clone())).powi_scalar(2).sum_dim(2);
    let [w, a] = match w.dtype() == a.dtype() {
        true => [w, a],
        false => [cast(w), cast(a)],
    };
    let products = |x: FloatTensor<B>, rows: &RowGroups| {
        let ([experts, m, k], [_, n, _]) = (x.shape().dims::<3>(), a.shape().dims::<3>());
        let x = B::float_reshape(x, Shape::from([experts * m, k]));
        let z = B::shrink(x, a.clone(), rows, Layout::ByToken, compute);
        B::float_reshape(z, Shape::from([experts, m, n]))
    };
    let squares = squares.into_primitive().tensor();
    [squares, products(w, of_w), products(a.clone(), of_a)]
}

/// The reference. `terms` in the order of [`RowTerms`].
pub(crate) fn norms<B: GroupedBackend>(
    [squares, products, gram]: [FloatTensor<B>; 3],
    b: FloatTensor<B>,
    scale: f64,
    of_zero: f64,
) -> FloatTensor<B> {
    let wide = squares.dtype();
    let cast = |x| B::float_cast(x, wide.into());
    let [experts, n, rank] = b.shape().dims();
    let rows = RowGroups::new(&vec![n; experts], experts * n).expect("n rows an expert");
    let b = cast(b);
    let by_row = B::float_reshape(b.clone(), Shape::from([experts * n, rank]));
    // G is symmetric.
    let b_gram = B::grouped_matmul(by_row, cast(gram), &rows, false);
    let b_gram = tensor::<B>(B::float_reshape(b_gram, b.shape()));
    let (squares, products, b) = (tensor::<B>(squares), tensor(cast(products)), tensor(b));
    let inner = products.mul_scalar(2.0 * scale) + b_gram.mul_scalar(scale * scale);
    let norms = (squares + (b * inner).sum_dim(2)).clamp_min(0.0).sqrt();
    let zero = norms.clone().equal_elem(0.0);
    norms.mask_fill(zero, of_zero).into_primitive().tensor()
}
