//! Launches of the gradients of the factors.

use std::ops::Range;

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::cubecl::client::ComputeClient;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use super::{UNIT_COLUMNS, address_type};
use crate::cube::deep::deep_kernel;
use crate::cube::outer::{self, add_parts_kernel, outer_kernel};
use crate::cube::plan::{self, MAX_RANK, Precision, Side, processors, tile, width};
use crate::cube::product::{TensorCores, UNITS, Units};
use crate::cube::swizzled::PART;
use crate::cube::view::View;
use crate::{Between, Layout, RowGroups};

/// Columns of the wide side of an outer product that a cube takes.
const OUTER_COLUMNS: usize = 32;
/// Rows of a part of a sum, at least.
const PART_ROWS: usize = 512;
/// Rows of a sum that takes less time than a second launch.
const SHORT_SUM: usize = 2048;

/// The product of the transpose of `low [T, r]` with columns of `wide`, for each expert.
pub(crate) struct Outer<'a, R: CubeRuntime> {
    low: CubeTensor<R>,
    wide: CubeTensor<R>,
    columns: Range<usize>,
    behind: Option<Between>,
    rank_first: bool,
    rows: &'a RowGroups,
}

impl<'a, R: CubeRuntime> Outer<'a, R> {
    pub fn new(
        low: CubeTensor<R>,
        wide: CubeTensor<R>,
        columns: Range<usize>,
        rows: &'a RowGroups,
    ) -> Self {
        Self {
            low,
            wide,
            columns,
            behind: None,
            rank_first: false,
            rows,
        }
    }

    /// `[E, r, n]` in place of `[E, n, r]`.
    pub fn rank_first(mut self) -> Self {
        self.rank_first = true;
        self
    }

    /// Of `f(low)`.
    pub fn behind(mut self, f: Between) -> Self {
        self.behind = Some(f);
        self
    }

    pub fn run(self, precision: Precision) -> CubeTensor<R> {
        let (experts, n) = (self.rows.experts(), self.columns.len());
        let [rows, rank] = self.low.meta.shape().dims();
        let (client, device) = (self.low.client.clone(), self.low.device.clone());
        let (dtype, elem_size) = (self.low.dtype, self.low.elem_size());
        let shape = if self.rank_first {
            [experts, rank, n]
        } else {
            [experts, n, rank]
        };
        let empty = |shape: Shape, dtype| {
            empty_device_contiguous_dtype(client.clone(), device.clone(), shape, dtype)
        };
        let out = empty(Shape::from(shape), dtype);
        if out.meta.num_elements() == 0 {
            return out;
        }
        if rows == 0 {
            // There is no buffer to read from.
            return burn_cubecl::ops::numeric::zeros_client(client, device, shape.into(), dtype);
        }
        let low = View::new(self.low, 0..rank);
        let wide = View::by_token(self.wide, self.columns);
        let grouped = experts != 1 || self.rows.rows() != rows;
        let plan = |tile| outer::Plan {
            tile,
            between: self.behind.map(|f| f.activation),
            rank_first: self.rank_first,
            grouped,
        };
        let deep = plan::deep(&client, precision, [experts, rank, n], &low, &wide, plan);
        let low_inner_k = low.layout == Layout::ByFeature;
        let low_width = width(&client, elem_size, |width| {
            !low_inner_k && low.allows(width) && rank.is_multiple_of(width)
        });
        let wide_width = width(&client, elem_size, |width| {
            wide.allows(width) && n.is_multiple_of(width)
        });
        let lines = match precision.step {
            Some(_) => rank.min(MAX_RANK),
            None => rank.min(UNIT_COLUMNS),
        };
        let side = |inner_k, width| Side { inner_k, width };
        let tile = match &deep {
            Some(deep) => deep.plan.tile,
            None => tile(
                [lines, OUTER_COLUMNS, rows],
                side(low_inner_k, low_width),
                side(false, wide_width),
                1,
                precision,
            ),
        };
        let plan = plan(tile);
        let cubes = [n.div_ceil(tile.n), experts * rank.div_ceil(tile.m)];
        let parts = parts(&client, cubes[0] * cubes[1], rows.div_ceil(experts));
        let target = if parts == 1 {
            out.clone()
        } else {
            empty(Shape::from([parts, out.meta.num_elements()]), DType::F32)
        };
        let target_type = if parts == 1 {
            precision.element
        } else {
            f32::as_type_native_unchecked().storage_type()
        };
        let (table, offsets_at) = if grouped {
            let table = self.rows.table::<R>(&client, &device);
            (table.arg(), table.offsets_at)
        } else {
            (low.arg(), 0)
        };
        let count = CubeCount::Static(cubes[0] as u32, cubes[1] as u32, parts as u32);
        let elements = target.meta.num_elements();
        let address = address_type([low.len(), wide.len(), elements]);
        // SAFETY: the length is the number of elements the buffer was made for.
        let result = |tensor: &CubeTensor<R>| unsafe {
            ArrayArg::from_raw_parts(tensor.handle.clone(), tensor.meta.num_elements())
        };
        let scale = self.behind.map_or(1.0, |f| f.scale) as f32;
        if let Some(deep) = deep {
            // SAFETY: as for the kernel below; parts divide the extents and places, which was checked.
            unsafe {
                deep_kernel::launch_unchecked::<R>(
                    &client,
                    count,
                    CubeDim::new_1d(UNITS as u32),
                    address,
                    deep.low_width,
                    PART,
                    1,
                    low.arg(),
                    wide.arg(),
                    result(&target),
                    table,
                    offsets_at,
                    rows,
                    low.at,
                    low.stride,
                    wide.at,
                    wide.stride,
                    rank,
                    n,
                    experts,
                    scale,
                    deep,
                    [precision.element, target_type],
                )
            }
            return add_parts(&client, target, out, parts, precision);
        }
        macro_rules! launch {
            ($product:ty) => {
                // SAFETY: the kernel reads rows between offsets, which lie inside all_rows, and
                // columns below rank and n; it writes each element of `[parts, E, rank, n]` once.
                unsafe {
                    outer_kernel::launch_unchecked::<$product, R>(
                        &client,
                        count,
                        CubeDim::new_1d(UNITS as u32),
                        address,
                        low_width,
                        wide_width,
                        tile.left.shared_width,
                        tile.right.shared_width,
                        1,
                        low.arg(),
                        wide.arg(),
                        result(&target),
                        table,
                        offsets_at,
                        rows,
                        low.at,
                        low.stride,
                        wide.at,
                        wide.stride,
                        rank,
                        n,
                        experts,
                        scale,
                        plan,
                        [precision.element, precision.block, target_type],
                    )
                }
            };
        }
        match precision.step {
            Some(_) => launch!(TensorCores),
            None => launch!(Units),
        }
        add_parts(&client, target, out, parts, precision)
    }
}

/// The sum of `[parts, ..]` in `out`, where there are several.
fn add_parts<R: CubeRuntime>(
    client: &ComputeClient<R>,
    target: CubeTensor<R>,
    out: CubeTensor<R>,
    parts: usize,
    precision: Precision,
) -> CubeTensor<R> {
    if parts == 1 {
        return out;
    }
    let len = out.meta.num_elements();
    // SAFETY: `parts` arrays of `len` elements are read, `len` elements are written; both buffers were
    // made for as many.
    unsafe {
        add_parts_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(len.div_ceil(UNITS) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            AddressType::from_len(parts * len),
            ArrayArg::from_raw_parts(target.handle, parts * len),
            ArrayArg::from_raw_parts(out.handle.clone(), len),
            parts,
            len,
            precision.element,
        )
    }
    out
}

/// How many cubes share the sum of one output over `rows` rows, each at least [`PART_ROWS`]. A sum that
/// is shared takes a second launch: where half of the device has work without, only a long one is.
fn parts<R: CubeRuntime>(client: &ComputeClient<R>, cubes: usize, rows: usize) -> usize {
    let processors = processors(client);
    if 2 * cubes > processors && rows <= SHORT_SUM {
        return 1;
    }
    (2 * processors / cubes).min(rows / PART_ROWS).max(1)
}
