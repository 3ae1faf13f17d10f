//! Launches of the shrink, the expansion and their input gradients.

use std::ops::Range;

use burn::tensor::Shape;
use burn_cubecl::CubeRuntime;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::ops::permute;
use burn_cubecl::tensor::CubeTensor;

use super::{UNIT_COLUMNS, address_type};
use crate::cube::narrow::narrow_kernel;
use crate::cube::plan::{self, Copied, Precision, ROWS, Side, WIDE_ROWS, tile, width};
use crate::cube::product::{TensorCores, UNITS, Units};
use crate::cube::project::{self, Finish, project_kernel};
use crate::cube::swizzled::PART;
use crate::cube::view::{self, Stack, View};
use crate::cube::wide::wide_kernel;
use crate::{Between, Layout, RowGroups};

/// Columns of the output that a cube takes where they are many.
const COLUMNS: usize = 256;

/// Columns of `x` times the weight of each row's expert.
pub(crate) struct Project<'a, R: CubeRuntime> {
    x: CubeTensor<R>,
    columns: Range<usize>,
    w: CubeTensor<R>,
    transposed: bool,
    /// On `x`, on the way in.
    behind: Option<Between>,
    /// On the product, on the way out: the slope at these values.
    before: Option<(Between, CubeTensor<R>)>,
    rows: &'a RowGroups,
}

impl<'a, R: CubeRuntime> Project<'a, R> {
    pub fn new(
        x: CubeTensor<R>,
        columns: Range<usize>,
        w: CubeTensor<R>,
        rows: &'a RowGroups,
    ) -> Self {
        Self {
            x,
            columns,
            w,
            transposed: false,
            behind: None,
            before: None,
            rows,
        }
    }

    /// `x w` in place of `x w^T`.
    pub fn transposed(mut self) -> Self {
        self.transposed = true;
        self
    }

    /// Of `f(x)`.
    pub fn behind(mut self, f: Between) -> Self {
        self.behind = Some(f);
        self
    }

    /// The cotangent of `z` where the product is that of `f(z)`. It takes the layout of `z`.
    pub fn before(mut self, f: Between, z: CubeTensor<R>) -> Self {
        self.before = Some((f, z));
        self
    }

    fn output_columns(&self) -> usize {
        let [_, d_out, d_in] = self.w.meta.shape().dims();
        if self.transposed { d_in } else { d_out }
    }

    /// `[T, n]`.
    pub fn write(self, layout: Layout, precision: Precision) -> CubeTensor<R> {
        let (rows, columns) = (self.rows.all_rows(), self.output_columns());
        let empty = |shape: [usize; 2]| {
            empty_device_contiguous_dtype(
                self.x.client.clone(),
                self.x.device.clone(),
                Shape::from(shape),
                self.x.dtype,
            )
        };
        let out = match layout {
            Layout::ByToken => empty([rows, columns]),
            Layout::ByFeature => permute(empty([columns, rows]), &[1, 0]),
        };
        self.launch(out, 0..columns, Finish::Write, precision)
    }

    /// `base` with the product added to its columns, in its own buffer where nobody else has it.
    pub fn add_to(
        self,
        base: CubeTensor<R>,
        columns: Range<usize>,
        precision: Precision,
    ) -> CubeTensor<R> {
        let [_, all] = base.meta.shape().dims();
        let strides = base.meta.strides();
        let by_row = strides[1] == 1 && strides[0] >= all;
        let base = if by_row && base.can_mut() {
            base
        } else {
            own(base)
        };
        self.launch(base, columns, Finish::Add, precision)
    }

    fn launch(
        self,
        out: CubeTensor<R>,
        out_columns: Range<usize>,
        finish: Finish,
        precision: Precision,
    ) -> CubeTensor<R> {
        let (rows, n, k) = (self.rows.all_rows(), out_columns.len(), self.columns.len());
        if rows == 0 || n == 0 {
            return out;
        }
        let (client, device) = (self.x.client.clone(), self.x.device.clone());
        let elem_size = self.x.elem_size();
        let x = View::new(self.x, self.columns);
        let w = Stack::new(self.w);
        let by_row = view::layout(&out) == Layout::ByToken;
        let target = View::new(out.clone(), out_columns);
        let (finish, gate) = match &self.before {
            None => (finish, None),
            Some((f, z)) => {
                // The layout of the output is that of z, and so are its places.
                let z = View::new(z.clone(), 0..n);
                assert_eq!((z.layout, z.stride), (target.layout, target.stride));
                (Finish::Slope(f.activation), Some(z))
            }
        };
        let x_inner_k = x.layout == Layout::ByToken;
        let x_width = width(&client, elem_size, |width| {
            x_inner_k && x.allows(width) && k.is_multiple_of(width)
        });
        let grouped = self.rows.experts() != 1 || self.rows.rows() != rows;
        let f = self.behind.or(self.before.as_ref().map(|(f, _)| *f));
        let scale = f.map_or(1.0, |f| f.scale) as f32;
        // The tiles of so many rows: without groups they need no table.
        let table = grouped.then(|| self.rows.table::<R>(&client, &device));
        let tiles = |size: usize| match &table {
            Some(table) => table.tiles::<R>(size),
            None => (w.arg(), rows.div_ceil(size)),
        };
        let gate = gate.map_or(w.arg(), |z| z.arg());
        let address = address_type([x.len(), w.len(), target.len()]);
        let between = self.behind.map(|f| f.activation);
        let shape = plan::Shape {
            n,
            k,
            rows,
            between,
            finish,
            transposed: self.transposed,
            grouped,
        };
        match plan::copied(&client, precision, &shape, &x, &w, &target) {
            Some(Copied::Narrow(narrow)) => {
                let (table, tiles) = tiles(ROWS);
                // SAFETY: as for the kernel below; parts divide the extents and places, which was checked.
                unsafe {
                    narrow_kernel::launch_unchecked::<R>(
                        &client,
                        CubeCount::Static(tiles as u32, 1, 1),
                        CubeDim::new_1d(UNITS as u32),
                        address,
                        PART,
                        narrow.plan.out_width,
                        narrow.plan.tile.sums_width,
                        x.arg(),
                        w.arg(),
                        gate,
                        target.arg(),
                        table,
                        x.at,
                        x.stride,
                        w.expert,
                        w.stride,
                        rows,
                        k,
                        n,
                        target.at,
                        target.stride,
                        scale,
                        narrow,
                        precision.element,
                    )
                }
                return out;
            }
            Some(Copied::Wide(wide)) => {
                let (table, tiles) = tiles(WIDE_ROWS);
                let cubes = tiles * n.div_ceil(wide.plan.tile.n);
                // SAFETY: as above.
                unsafe {
                    wide_kernel::launch_unchecked::<R>(
                        &client,
                        CubeCount::Static(cubes as u32, 1, 1),
                        CubeDim::new_1d(UNITS as u32),
                        address,
                        wide.x_width,
                        PART,
                        wide.w_width(),
                        x.arg(),
                        w.arg(),
                        target.arg(),
                        table,
                        x.at,
                        x.stride,
                        w.expert,
                        w.stride,
                        rows,
                        k,
                        n,
                        target.at,
                        target.stride,
                        scale,
                        wide,
                        precision.element,
                    )
                }
                return out;
            }
            None => {}
        }
        let (table, tiles) = tiles(ROWS);
        let w_inner = if self.transposed { n } else { k };
        let w_width = width(&client, elem_size, |width| {
            w.allows(width) && w_inner.is_multiple_of(width)
        });
        let out_width = width(&client, elem_size, |width| {
            precision.step.is_some()
                && by_row
                // A slope reads one value of `z` at a time.
                && !matches!(finish, Finish::Slope(_))
                && target.allows(width)
                && n.is_multiple_of(width)
        });
        let tile_n = match precision.step {
            Some(_) => n.min(COLUMNS),
            None => n.min(UNIT_COLUMNS),
        };
        let sums_width = if by_row { out_width.min(4) } else { 1 };
        let tile = tile(
            [ROWS, tile_n, k],
            Side {
                inner_k: x_inner_k,
                width: x_width,
            },
            Side {
                inner_k: !self.transposed,
                width: w_width,
            },
            sums_width,
            precision,
        );
        let plan = project::Plan {
            blocks: if k <= tile.k { 1 } else { 2 },
            tile,
            between,
            finish,
            out_by_row: by_row,
            out_width,
            grouped,
        };
        let count = CubeCount::Static(tiles as u32, n.div_ceil(tile.n) as u32, 1);
        macro_rules! launch {
            ($product:ty) => {
                // SAFETY: the kernel reads x and w and writes the output at rows of the tiles, which
                // lie inside all_rows, and at columns below k and n, which were checked to fit.
                unsafe {
                    project_kernel::launch_unchecked::<$product, R>(
                        &client,
                        count,
                        CubeDim::new_1d(UNITS as u32),
                        address,
                        x_width,
                        w_width,
                        out_width,
                        tile.left.shared_width,
                        tile.right.shared_width,
                        tile.sums_width,
                        x.arg(),
                        w.arg(),
                        gate,
                        target.arg(),
                        table,
                        x.at,
                        x.stride,
                        w.expert,
                        w.stride,
                        rows,
                        k,
                        n,
                        target.at,
                        target.stride,
                        scale,
                        plan,
                        [precision.element, precision.block],
                    )
                }
            };
        }
        match precision.step {
            Some(_) => launch!(TensorCores),
            None => launch!(Units),
        }
        out
    }
}

/// A copy in rows that nobody else has.
fn own<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let strides = x.meta.strides();
    let by_row = strides[1] == 1 && strides[0] >= x.meta.shape()[1];
    if by_row {
        x.copy()
    } else {
        burn_cubecl::kernel::into_contiguous(x)
    }
}
