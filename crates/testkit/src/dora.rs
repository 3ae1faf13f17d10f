//! One suite for what DoRA needs of every backend, against `f64` on the host: lengths of rows, and columns
//! times factors.

use burn::backend::Autodiff;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use moe_lora_kernels::{Compute, GroupedBackend, RowGroups, row_norms, row_terms, scale_columns};

use crate::{Matrix, noise, relative_error};

/// Experts, rows of one, `d_in` and rank.
const EXTENTS: [[usize; 4]; 5] = [
    [1, 5, 7, 1],
    [3, 70, 40, 8],
    [2, 33, 130, 40],
    [4, 16, 512, 32],
    [2, 9, 64, 256],
];

/// Rows by expert, padding rows, and columns.
const COUNTS: [(&[usize], usize, usize); 6] = [
    (&[70], 0, 64),
    (&[5, 0, 3], 0, 5),
    (&[40, 7], 45, 300),
    (&[100, 1, 0, 33, 64], 3, 130),
    (&[0, 0, 4], 0, 264),
    (&[9], 2, 16),
];

/// In what every type under test holds.
fn values(seed: u64, rows: usize, columns: usize) -> Matrix {
    noise(seed, rows, columns).map(|value| (value * 64.0).round() / 64.0)
}

/// Rows of `columns` elements with gaps between them, as where a backend pads rows.
fn with_gaps<B: Backend, const D: usize>(x: Tensor<B, D>, columns: usize) -> Tensor<B, D> {
    let gap = x.clone().slice_dim(D - 1, 0..1).repeat_dim(D - 1, 8);
    Tensor::cat(vec![x, gap], D - 1).slice_dim(D - 1, 0..columns)
}

/// Lengths of the rows of `W + s B A` on `B`, the weights in `dtype`.
///
/// # Panics
///
/// When one is further off than `limit`, relative to the longest.
pub fn row_lengths<B: Backend + GroupedBackend>(device: &B::Device, dtype: DType, limit: f64) {
    const SCALE: f64 = 0.7;
    const OF_ZERO: f64 = 3.0;
    let wide = match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    for (index, extents) in EXTENTS.into_iter().enumerate() {
        let [experts, n, k, rank] = extents;
        // The second row of the first expert is one of zeros. Of the buffer the weight has the middle.
        let zero = |row: usize| row / (n + 2) == 0 && row % (n + 2) == 2;
        let w = values(1, experts * (n + 2), k);
        let w = Matrix::build(w.rows, k, |i, j| if zero(i) { 0.0 } else { w.at(i, j) });
        let a = values(2, experts * rank, k);
        let b = values(3, experts * n, rank);
        let b = Matrix::build(b.rows, rank, |i, j| if i == 1 { 0.0 } else { b.at(i, j) });
        let expected = Matrix::build(experts * n, 1, |row, _| {
            let (expert, at) = (row / n, row % n);
            let square = |column: usize| {
                let delta: f64 = (0..rank)
                    .map(|j| b.at(row, j) * a.at(expert * rank + j, column))
                    .sum();
                (w.at(expert * (n + 2) + at + 1, column) + SCALE * delta).powi(2)
            };
            let norm = (0..k).map(square).sum::<f64>().sqrt();
            if norm == 0.0 { OF_ZERO } else { norm }
        });
        let stacked = |x: &Matrix| {
            let x = x.tensor_on::<B>(device, dtype);
            let [rows, columns] = x.dims();
            x.reshape([experts, rows / experts, columns])
        };
        let (w, a, b) = (stacked(&w).narrow(1, 1, n), stacked(&a), stacked(&b));
        let w = match index % 2 {
            0 => w,
            _ => with_gaps(w, k),
        };
        let rows = [n, rank].map(|rows| {
            RowGroups::new(&vec![rows; experts], experts * rows).expect("as many rows an expert")
        });
        let terms = row_terms(w, a, &rows, wide, Compute::default());
        let found = row_norms(terms, b, SCALE, OF_ZERO);
        assert_eq!(found.dtype(), wide, "{extents:?}");
        let found = Matrix::read(found.reshape([experts * n, 1]));
        let error = relative_error(&found, &expected);
        assert!(
            error <= limit,
            "lengths of {extents:?} in {dtype:?}: error {error:.2e} is more than {limit:.0e}"
        );
    }
}

/// Columns times factors on `B`, with gradients.
///
/// # Panics
///
/// When a value is further off than `limit`, relative to the largest.
pub fn scaled_columns<B: Backend + GroupedBackend>(device: &B::Device, dtype: DType, limit: f64) {
    for (counts, padding, n) in COUNTS {
        let all_rows = counts.iter().sum::<usize>() + padding;
        let rows = RowGroups::padded(counts, all_rows).expect("the rows were counted");
        // As grouped products leave it.
        let counted = rows.rows();
        let y = values(1, all_rows, n);
        let y = Matrix::build(
            all_rows,
            n,
            |i, j| if i < counted { y.at(i, j) } else { 0.0 },
        );
        let factors = values(2, counts.len(), n);
        let dy = values(3, all_rows, n);
        let expert = |row| (0..counts.len()).find(|expert| rows.range(*expert).contains(&row));
        let scaled = |x: &Matrix| {
            Matrix::build(all_rows, n, |i, j| {
                expert(i).map_or(0.0, |expert| x.at(i, j) * factors.at(expert, j))
            })
        };
        let sums = Matrix::build(counts.len(), n, |expert, j| {
            rows.range(expert).map(|i| dy.at(i, j) * y.at(i, j)).sum()
        });
        let found = run::<Autodiff<B>>(device, dtype, [&y, &factors, &dy], &rows);
        // What padding rows hold is nobody's.
        let top = |x: &Matrix| x.pick_rows(0..counted);
        for (name, found, expected) in [
            ("y", top(&found[0]), top(&scaled(&y))),
            ("dy", top(&found[1]), top(&scaled(&dy))),
            ("factors", found[2].clone(), sums),
        ] {
            let error = relative_error(&found, &expected);
            assert!(
                error <= limit,
                "{name} of {counts:?} + {padding}, {n} columns in {dtype:?}: error {error:.2e} is more than {limit:.0e}"
            );
        }
    }
}

fn run<B: AutodiffBackend + GroupedBackend>(
    device: &B::Device,
    dtype: DType,
    [y, factors, dy]: [&Matrix; 3],
    rows: &RowGroups,
) -> [Matrix; 3] {
    let wide = match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let y = y.tensor_on::<B>(device, dtype).require_grad();
    let factors = factors.tensor_on::<B>(device, wide).require_grad();
    let [_, n] = y.dims();
    let scaled = scale_columns(with_gaps(y.clone(), n), factors.clone(), rows);
    assert_eq!(scaled.dtype(), dtype);
    let grads = (scaled.clone() * dy.tensor_on(device, dtype))
        .sum()
        .backward();
    [
        Matrix::read(scaled.inner()),
        Matrix::read(y.grad(&grads).expect("y is tracked")),
        Matrix::read(factors.grad(&grads).expect("the factors are tracked")),
    ]
}
