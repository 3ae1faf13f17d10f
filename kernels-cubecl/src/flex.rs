//! The per-expert path of the Flex CPU backend: each expert's product is written where it belongs.
//!
//! Concatenating the experts' outputs costs a second pass over `[T, n]`, which for a rank of 32 is
//! half of the whole adapter's time (1.5 times its plain matmuls, 1.0 this way).

use std::ops::Range;

use burn::backend::Flex;
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Bytes, DType, Element, Shape, TensorMetadata};

use crate::low_rank::{add_columns, between};
use crate::{Between, Compute, GroupedBackend, RowGroups, per_expert};

impl GroupedBackend for Flex {
    fn grouped_matmul(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        groups: &RowGroups,
        transposed: bool,
    ) -> FloatTensor<Self> {
        match x.dtype() {
            DType::F32 => matmul::<f32>(&x, &w, groups, transposed),
            DType::F64 => matmul::<f64>(&x, &w, groups, transposed),
            _ => per_expert::matmul::<Self>(x, w, groups, transposed),
        }
    }

    fn grouped_outer(
        p: FloatTensor<Self>,
        q: FloatTensor<Self>,
        groups: &RowGroups,
    ) -> FloatTensor<Self> {
        match p.dtype() {
            DType::F32 => outer::<f32>(&p, &q, groups),
            DType::F64 => outer::<f64>(&p, &q, groups),
            _ => per_expert::outer::<Self>(p, q, groups),
        }
    }

    fn expand_into(
        mut base: FloatTensor<Self>,
        columns: Range<usize>,
        z: FloatTensor<Self>,
        b: FloatTensor<Self>,
        f: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> FloatTensor<Self> {
        let z = between::<Self>(z, f);
        let added = match base.dtype() {
            DType::F32 => add_product::<f32>(&mut base, &columns, &z, &b, rows),
            DType::F64 => add_product::<f64>(&mut base, &columns, &z, &b, rows),
            _ => false,
        };
        if added {
            return base;
        }
        let _ = compute;
        add_columns::<Self>(base, columns, Self::grouped_matmul(z, b, rows, false))
    }
}

/// A float that burn's Flex and gemm both compute with.
trait Float: Element + bytemuck::Pod {
    const ZERO: Self;
    const ONE: Self;
}

impl Float for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
}

impl Float for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
}

fn matmul<T: Float>(
    x: &FlexTensor,
    w: &FlexTensor,
    groups: &RowGroups,
    transposed: bool,
) -> FlexTensor {
    let [experts, d_out, d_in] = w.shape().dims();
    let (inner, columns) = if transposed {
        (d_out, d_in)
    } else {
        (d_in, d_out)
    };
    assert_eq!(x.shape().dims(), [groups.all_rows(), inner], "grouped x");
    assert_eq!(experts, groups.experts(), "grouped experts");
    let mut values = Vec::with_capacity(groups.all_rows() * columns);
    for expert in 0..experts {
        let rows = groups.range(expert);
        let weight = Matrix::<T>::expert(w, expert);
        let weight = if transposed {
            weight
        } else {
            weight.transpose()
        };
        append_product(&mut values, Matrix::rows(x, rows), weight);
    }
    values.resize(groups.all_rows() * columns, T::ZERO);
    tensor(values, Shape::from([groups.all_rows(), columns]))
}

/// Adds `z_e w_e^T` to columns of `base` in its own buffer, where nobody else has it: burn's
/// assignment to a slice copies the whole.
fn add_product<T: Float>(
    base: &mut FlexTensor,
    columns: &Range<usize>,
    z: &FlexTensor,
    w: &FlexTensor,
    groups: &RowGroups,
) -> bool {
    let [_, all] = base.shape().dims();
    let layout = base.layout();
    if !base.is_unique() || !layout.is_contiguous() || layout.start_offset() != 0 {
        return false;
    }
    let values = base.storage_mut::<T>();
    for expert in 0..groups.experts() {
        let rows = groups.range(expert);
        let part = &mut values[rows.start * all..rows.end * all];
        let weight = Matrix::<T>::expert(w, expert).transpose();
        Matrix::rows(z, rows).product_into(weight, part, columns.start, all);
    }
    true
}

fn outer<T: Float>(p: &FlexTensor, q: &FlexTensor, groups: &RowGroups) -> FlexTensor {
    let ([p_rows, d_out], [q_rows, d_in]) = (p.shape().dims(), q.shape().dims());
    assert_eq!([p_rows, q_rows], [groups.all_rows(); 2], "grouped rows");
    let shape = Shape::from([groups.experts(), d_out, d_in]);
    let mut values = Vec::with_capacity(groups.experts() * d_out * d_in);
    for expert in 0..groups.experts() {
        let rows = groups.range(expert);
        let left = Matrix::<T>::rows(p, rows.clone()).transpose();
        append_product(&mut values, left, Matrix::rows(q, rows));
    }
    tensor(values, shape)
}

fn tensor<T: Float>(values: Vec<T>, shape: Shape) -> FlexTensor {
    assert_eq!(values.len(), shape.num_elements(), "grouped output");
    FlexTensor::new(
        Bytes::from_elems(values),
        Layout::contiguous(shape),
        T::dtype(),
    )
}

/// A strided view of a tensor's values; every element lies inside `values`.
struct Matrix<'a, T> {
    values: &'a [T],
    start: usize,
    shape: [usize; 2],
    strides: [isize; 2],
}

impl<'a, T: Float> Matrix<'a, T> {
    fn rows(x: &'a FlexTensor, rows: std::ops::Range<usize>) -> Self {
        let layout = x.layout();
        let [_, columns] = x.shape().dims();
        let strides = [layout.strides()[0], layout.strides()[1]];
        Self::checked(
            x,
            rows.start as isize * strides[0],
            [rows.len(), columns],
            strides,
        )
    }

    fn expert(w: &'a FlexTensor, expert: usize) -> Self {
        let layout = w.layout();
        let [_, d_out, d_in] = w.shape().dims();
        let strides = [layout.strides()[1], layout.strides()[2]];
        let offset = expert as isize * layout.strides()[0];
        Self::checked(w, offset, [d_out, d_in], strides)
    }

    fn checked(x: &'a FlexTensor, offset: isize, shape: [usize; 2], strides: [isize; 2]) -> Self {
        let values = x.storage::<T>();
        let start = x.layout().start_offset() as isize + offset;
        if !shape.contains(&0) {
            let reach = |pick: fn(isize) -> isize| -> isize {
                (0..2)
                    .map(|d| pick((shape[d] as isize - 1) * strides[d]))
                    .sum()
            };
            let first = start + reach(|span| span.min(0));
            let last = start + reach(|span| span.max(0));
            assert!(
                0 <= first && (last as usize) < values.len(),
                "a view of {shape:?} by {strides:?} from {start} leaves {} values",
                values.len()
            );
        }
        Self {
            values,
            start: start.max(0) as usize,
            shape,
            strides,
        }
    }

    fn transpose(mut self) -> Self {
        self.shape.reverse();
        self.strides.reverse();
        self
    }
}

impl<T: Float> Matrix<'_, T> {
    /// Adds `self right` to the rows of `values`, `stride` apart, from column `first` on.
    fn product_into(self, right: Matrix<'_, T>, values: &mut [T], first: usize, stride: usize) {
        let ([m, k], [inner, n]) = (self.shape, right.shape);
        assert_eq!(inner, k, "product of [{m}, {k}] and [{inner}, {n}]");
        if m == 0 || n == 0 || k == 0 {
            return;
        }
        assert!(
            first + n <= stride && m * stride <= values.len(),
            "room for the product"
        );
        // SAFETY: the rows written to lie inside `values`; the rest is as for `append_product`.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                values.as_mut_ptr().add(first),
                1,
                stride as isize,
                true,
                self.values.as_ptr().add(self.start),
                self.strides[1],
                self.strides[0],
                right.values.as_ptr().add(right.start),
                right.strides[1],
                right.strides[0],
                T::ONE,
                T::ONE,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

/// Appends `left right`, row-major. The room is not zeroed first: that would be one more pass over
/// the output.
fn append_product<T: Float>(out: &mut Vec<T>, left: Matrix<'_, T>, right: Matrix<'_, T>) {
    let ([m, k], [inner, n]) = (left.shape, right.shape);
    assert_eq!(inner, k, "product of [{m}, {k}] and [{inner}, {n}]");
    let start = out.len();
    if m == 0 || n == 0 || k == 0 {
        out.resize(start + m * n, T::ZERO);
        return;
    }
    out.reserve(m * n);
    // SAFETY: `out` has room for m * n values after `start`, which gemm writes all of (row stride
    // n, `read_dst` false) before the length takes them in; both views were checked to lie inside
    // slices that live as long as this call; T is f32 or f64, which gemm dispatches on.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr().add(start),
            1,
            n as isize,
            false,
            left.values.as_ptr().add(left.start),
            left.strides[1],
            left.strides[0],
            right.values.as_ptr().add(right.start),
            right.strides[1],
            right.strides[0],
            T::ZERO,
            T::ONE,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
        out.set_len(start + m * n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Distribution, Tensor};

    type Values<const D: usize> = Tensor<Flex, D>;

    fn random<const D: usize>(shape: [usize; D]) -> Values<D> {
        Values::random(shape, Distribution::Normal(0.0, 1.0), &Default::default())
    }

    fn flex<const D: usize>(x: &Values<D>) -> FlexTensor {
        x.clone().into_primitive().tensor()
    }

    fn same(found: FlexTensor, expected: FlexTensor) {
        assert_eq!(found.into_data(), expected.into_data());
    }

    #[test]
    fn products_have_the_bits_of_the_reference_path_on_views_too() {
        for counts in [vec![5, 0, 3], vec![0, 0, 4], vec![0, 0, 0], vec![2, 3, 1]] {
            let rows = counts.iter().sum();
            let groups = RowGroups::new(&counts, rows).unwrap();
            let whole = random([rows + 2, 9]);
            for x in [
                random([rows, 7]),
                whole.slice([1..rows + 1, 1..8]),
                random([7, rows]).transpose(),
            ] {
                let w = random([3, 4, 7]);
                let dy = random([rows, 4]);
                let (x, dy, w) = (flex(&x), flex(&dy), flex(&w));
                same(
                    Flex::grouped_matmul(x.clone(), w.clone(), &groups, false),
                    per_expert::matmul::<Flex>(x.clone(), w.clone(), &groups, false),
                );
                same(
                    Flex::grouped_matmul(dy.clone(), w.clone(), &groups, true),
                    per_expert::matmul::<Flex>(dy.clone(), w, &groups, true),
                );
                same(
                    Flex::grouped_outer(dy.clone(), x.clone(), &groups),
                    per_expert::outer::<Flex>(dy, x, &groups),
                );
            }
        }
    }
}
