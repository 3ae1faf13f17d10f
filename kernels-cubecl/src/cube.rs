//! The CubeCL backends: one kernel for the experts together, burn's matmul for each where that is
//! the better or the only way.
//!
//! Two kernels serve the six products of an adapter: [`project`] for the shrink, the expansion and
//! their input gradients, [`outer`] for the gradients of the factors. Both walk over their sum in
//! blocks through shared memory ([`stage`]) and multiply with tensor cores or plain units
//! ([`product`]). In half precision, where device and extents allow it, blocks are copied while others
//! are multiplied ([`swizzled`]): [`narrow`] and [`wide`] stand for the first kernel, by which side is
//! as narrow as the rank, and [`deep`] for the second. The per-expert path's f32 products keep all of
//! f32's bits ([`exact`]). Beside the products stand [`dropout`] by counter, and what DoRA needs: lengths
//! of rows ([`norms`]) and [`columns`] times factors.

mod activation;
mod columns;
mod deep;
mod dropout;
mod exact;
mod launch;
mod narrow;
mod norms;
mod outer;
mod plan;
mod product;
mod project;
mod stage;
mod swizzled;
mod table;
mod view;
mod wide;

use std::ops::Range;

use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, TensorMetadata};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::low_rank::{self, Expanded, Gradients2, Layout, add_columns, between};
use crate::{Between, Compute, DropoutMask, GroupedBackend, RowGroups, per_expert};
use launch::{Outer, Project};
use plan::Precision;

impl<R, F, I, BT> GroupedBackend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn grouped_matmul(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        groups: &RowGroups,
        transposed: bool,
    ) -> FloatTensor<Self> {
        per_expert::matmul_by::<Self>(x, w, groups, transposed, exact::product::<R, F, I, BT>)
    }

    fn grouped_outer(
        p: FloatTensor<Self>,
        q: FloatTensor<Self>,
        groups: &RowGroups,
    ) -> FloatTensor<Self> {
        per_expert::outer_by::<Self>(p, q, groups, exact::product::<R, F, I, BT>)
    }

    fn grouped_kernels(device: &Self::Device, dtype: DType, rank: usize) -> Result<(), String> {
        plan::supported(&R::client(device), dtype, rank)
    }

    fn shrink(
        x: FloatTensor<Self>,
        a: FloatTensor<Self>,
        rows: &RowGroups,
        layout: Layout,
        compute: Compute,
    ) -> FloatTensor<Self> {
        let rank = a.shape()[1];
        let Some(precision) = Precision::of(&x, rank, compute) else {
            return Self::grouped_matmul(x, a, rows, false);
        };
        let columns = 0..x.shape()[1];
        Project::new(x, columns, a, rows).write(layout, precision)
    }

    fn shrink_backward(
        dz: FloatTensor<Self>,
        x: Option<FloatTensor<Self>>,
        a: Option<FloatTensor<Self>>,
        rows: &RowGroups,
        compute: Compute,
    ) -> Gradients2<Self> {
        let rank = dz.shape()[1];
        let Some(precision) = Precision::of(&dz, rank, compute) else {
            return low_rank::shrink_backward::<Self>(dz, x, a, rows);
        };
        let dx = a.map(|a| {
            Project::new(dz.clone(), 0..rank, a, rows)
                .transposed()
                .write(Layout::ByToken, precision)
        });
        let da = x.map(|x| {
            let columns = 0..x.shape()[1];
            Outer::new(dz, x, columns, rows).rank_first().run(precision)
        });
        [dx, da]
    }

    fn dropout(x: FloatTensor<Self>, mask: &DropoutMask) -> FloatTensor<Self> {
        dropout::run(x, mask)
    }

    fn expand(
        z: FloatTensor<Self>,
        b: FloatTensor<Self>,
        f: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> FloatTensor<Self> {
        let rank = z.shape()[1];
        let Some(precision) = Precision::of(&z, rank, compute) else {
            return Self::grouped_matmul(between::<Self>(z, f), b, rows, false);
        };
        Project::new(z, 0..rank, b, rows)
            .behind(f)
            .write(Layout::ByToken, precision)
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
        let rank = z.shape()[1];
        let Some(precision) = Precision::of(&z, rank, compute) else {
            let part = Self::grouped_matmul(between::<Self>(z, f), b, rows, false);
            return add_columns::<Self>(base, columns, part);
        };
        Project::new(z, 0..rank, b, rows)
            .behind(f)
            .add_to(base, columns, precision)
    }

    fn expand_backward(dy: FloatTensor<Self>, saved: Expanded<Self>, db: bool) -> Gradients2<Self> {
        let rank = saved.z.shape()[1];
        let Some(precision) = Precision::of(&saved.z, rank, saved.compute) else {
            return low_rank::expand_backward::<Self>(dy, saved, db);
        };
        let Expanded {
            columns,
            z,
            between: f,
            rows,
            ..
        } = saved;
        // The kernels read `z` where they write `dz`.
        let z = view::tight(z);
        let dz = saved.b.map(|b| {
            Project::new(dy.clone(), columns.clone(), b, &rows)
                .transposed()
                .before(f, z.clone())
                .write(view::layout(&z), precision)
        });
        let db = db.then(|| Outer::new(z, dy, columns, &rows).behind(f).run(precision));
        [dz, db]
    }

    fn scale_columns(
        y: FloatTensor<Self>,
        factors: FloatTensor<Self>,
        rows: &RowGroups,
    ) -> FloatTensor<Self> {
        match columns::supported(&y, factors.dtype()) {
            true => columns::scale(y, factors, rows),
            false => crate::columns::scale::<Self>(y, factors, rows),
        }
    }

    fn scale_columns_backward(
        dy: FloatTensor<Self>,
        y: Option<FloatTensor<Self>>,
        factors: FloatTensor<Self>,
        of_y: bool,
        rows: &RowGroups,
    ) -> Gradients2<Self> {
        match columns::supported(&dy, factors.dtype()) {
            true => columns::run(dy, y, factors, of_y, rows),
            false => crate::columns::scale_backward::<Self>(dy, y, factors, of_y, rows),
        }
    }

    fn row_terms(
        w: FloatTensor<Self>,
        a: FloatTensor<Self>,
        rows: &[RowGroups; 2],
        wide: DType,
        compute: Compute,
    ) -> [FloatTensor<Self>; 3] {
        let [_, rank, _] = a.shape().dims();
        let [experts, n, _] = w.shape().dims();
        let precision = Precision::of(&a, rank, compute);
        let (Some(precision), DType::F32, true) = (precision, wide, w.dtype() == a.dtype()) else {
            return crate::norms::terms::<Self>(w, a, rows, wide, compute);
        };
        let products = |x, rows| {
            let x = view::rows(x);
            let columns = 0..x.shape()[1];
            let z = Project::new(x, columns, a.clone(), rows).write(Layout::ByToken, precision);
            burn_cubecl::ops::reshape(z, [experts, rows.rows() / experts, rank].into())
        };
        let [of_w, of_a] = rows;
        debug_assert_eq!(of_w.rows(), experts * n);
        [
            norms::squares(w.clone()),
            products(w, of_w),
            products(a.clone(), of_a),
        ]
    }

    fn row_norms(
        terms: [FloatTensor<Self>; 3],
        b: FloatTensor<Self>,
        scale: f64,
        of_zero: f64,
    ) -> FloatTensor<Self> {
        let read = terms.iter().chain([&b]).all(norms::reads);
        match read && terms[0].dtype() == DType::F32 {
            true => norms::norms(terms, b, scale, of_zero),
            false => crate::norms::norms::<Self>(terms, b, scale, of_zero),
        }
    }
}
