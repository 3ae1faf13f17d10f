//! Columns times factors, and the sums over rows that the factors' gradients are: one pass over the rows.

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros_client};
use burn_cubecl::tensor::CubeTensor;

use super::plan::{ROWS, storage, width};
use super::project::{NO_EXPERT, TILE_WORDS};
use super::view::View;
use crate::RowGroups;

/// Lines of a row that a cube takes at once.
const LINES: usize = 32;
/// Rows that it takes at once.
const LANES: usize = 8;

/// Whether the kernels take `y` and factors of these types.
pub(super) fn supported<R: CubeRuntime>(y: &CubeTensor<R>, factors: DType) -> bool {
    factors == DType::F32
        && storage(y.dtype).is_some_and(|element| y.client.properties().supports_type(element))
}

/// What a cube is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    grouped: bool,
    /// Whether the scaled rows are asked for.
    scaled: bool,
    /// Whether the sums over rows are.
    sums: bool,
}

/// See [`scale_columns`](crate::scale_columns).
pub(super) fn scale<R: CubeRuntime>(
    y: CubeTensor<R>,
    factors: CubeTensor<R>,
    rows: &RowGroups,
) -> CubeTensor<R> {
    let [scaled, _] = run(y, None, factors, true, rows);
    scaled.expect("it was asked for")
}

/// `x` times the factors, where `scaled` asks for it, and, with `y`, the sums of `x * y` over the rows of each
/// expert.
pub(super) fn run<R: CubeRuntime>(
    x: CubeTensor<R>,
    y: Option<CubeTensor<R>>,
    factors: CubeTensor<R>,
    scaled: bool,
    rows: &RowGroups,
) -> [Option<CubeTensor<R>>; 2] {
    let (client, device, dtype) = (x.client.clone(), x.device.clone(), x.dtype);
    let [all_rows, n] = x.meta.shape().dims();
    let experts = rows.experts();
    let empty = |shape: [usize; 2], dtype| {
        empty_device_contiguous_dtype(client.clone(), device.clone(), Shape::from(shape), dtype)
    };
    if all_rows == 0 || n == 0 {
        let sums = y.is_some().then(|| {
            zeros_client(
                client.clone(),
                device.clone(),
                [experts, n].into(),
                DType::F32,
            )
        });
        return [scaled.then_some(x), sums];
    }
    let factors = into_contiguous(factors);
    let x = View::by_token(x, 0..n);
    let y = y.map(|y| View::by_token(y, 0..n));
    let plan = Plan {
        grouped: experts != 1 || rows.rows() != all_rows,
        scaled,
        sums: y.is_some(),
    };
    // Of f32 no device reads more than four at once.
    let width = width(&client, dtype.size(), |width| {
        let fits = |x: &View| x.allows(width);
        width <= 4 && n.is_multiple_of(width) && fits(&x) && y.as_ref().is_none_or(fits)
    });
    let lines = n / width;
    let table = plan.grouped.then(|| rows.table::<R>(&client, &device));
    let tiles = match &table {
        Some(table) => table.tiles::<R>(ROWS).1,
        None => all_rows.div_ceil(ROWS),
    };
    let out = scaled.then(|| empty([all_rows, n], dtype));
    let parts = plan.sums.then(|| empty([tiles, n], DType::F32));
    let sums = plan.sums.then(|| empty([experts, n], DType::F32));
    // SAFETY: the length is the number of elements the buffer was made for.
    let arg = |tensor: &CubeTensor<R>| unsafe {
        ArrayArg::from_raw_parts(tensor.handle.clone(), tensor.meta.num_elements())
    };
    let (words, offsets_at) = match &table {
        Some(table) => (table.arg(), table.offsets_at),
        None => (arg(&factors), 0),
    };
    let chunks = lines.div_ceil(LINES) as u32;
    let cube = CubeDim::new_1d((LINES * LANES) as u32);
    // SAFETY: the kernel reads and writes lines below `lines` of rows of the tiles, which lie inside
    // all_rows, and the line of one tile of `parts`, which has as many. What the plan leaves out is not
    // touched.
    unsafe {
        columns_kernel::launch_unchecked::<R>(
            &client,
            CubeCount::Static(tiles as u32, chunks, 1),
            cube,
            AddressType::from_len(x.len().max(y.as_ref().map_or(0, View::len))),
            width,
            x.arg(),
            y.as_ref().unwrap_or(&x).arg(),
            arg(&factors),
            out.as_ref().map_or_else(|| x.arg(), arg),
            arg(parts.as_ref().unwrap_or(&factors)),
            words,
            all_rows,
            x.stride / width,
            y.as_ref().unwrap_or(&x).stride / width,
            lines,
            plan,
            dtype.into(),
        )
    }
    if let (Some(parts), Some(sums)) = (&parts, &sums) {
        let words = table
            .as_ref()
            .map_or_else(|| arg(&factors), |table| table.arg());
        // SAFETY: the kernel reads the lines of the tiles of one expert, and writes its line.
        unsafe {
            sums_kernel::launch_unchecked::<R>(
                &client,
                CubeCount::Static(experts as u32, chunks, 1),
                cube,
                AddressType::from_len(tiles * n),
                width,
                arg(parts),
                arg(sums),
                words,
                offsets_at,
                tiles,
                lines,
                plan,
            )
        }
    }
    [out, sums]
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn columns_kernel<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    y: &Array<Vector<E, N>>,
    factors: &Array<Vector<f32, N>>,
    out: &mut Array<Vector<E, N>>,
    parts: &mut Array<Vector<f32, N>>,
    table: &Array<u32>,
    all_rows: usize,
    x_stride: usize,
    y_stride: usize,
    lines: usize,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: StorageType,
) {
    let tile = CUBE_POS_X as usize;
    let line = CUBE_POS_Y as usize * LINES + UNIT_POS as usize % LINES;
    let lane = UNIT_POS as usize / LINES;
    let mut first = tile * ROWS;
    let mut end = min(first + ROWS, all_rows);
    let mut expert = 0u32.runtime();
    if comptime!(plan.grouped) {
        expert = table[tile * TILE_WORDS];
        first = table[tile * TILE_WORDS + 1] as usize;
        end = table[tile * TILE_WORDS + 2] as usize;
    }
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if line < lines {
        let mut factor = Vector::<f32, N>::new(0.0f32);
        if comptime!(plan.scaled) {
            if expert != NO_EXPERT {
                factor = factors[expert as usize * lines + line];
            }
        }
        #[unroll]
        for i in 0..comptime!(ROWS / LANES) {
            let row = first + lane + comptime!(i * LANES);
            if row < end {
                let value = Vector::<f32, N>::cast_from(x[row * x_stride + line]);
                if comptime!(plan.sums) {
                    sum += value * Vector::<f32, N>::cast_from(y[row * y_stride + line]);
                }
                if comptime!(plan.scaled) {
                    out[row * lines + line] = Vector::cast_from(value * factor);
                }
            }
        }
    }
    if comptime!(plan.sums) {
        let total = over_lanes::<N>(sum);
        if lane == 0 && line < lines {
            parts[tile * lines + line] = total;
        }
    }
}

/// The sums over the tiles of an expert.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn sums_kernel<N: Size>(
    parts: &Array<Vector<f32, N>>,
    sums: &mut Array<Vector<f32, N>>,
    table: &Array<u32>,
    offsets_at: usize,
    tiles: usize,
    lines: usize,
    #[comptime] plan: Plan,
) {
    let expert = CUBE_POS_X as usize;
    let line = CUBE_POS_Y as usize * LINES + UNIT_POS as usize % LINES;
    let lane = UNIT_POS as usize / LINES;
    let mut first = 0usize.runtime();
    let mut count = tiles;
    if comptime!(plan.grouped) {
        // The tiles of an expert lie behind those of the experts before it.
        let offsets = offsets_at;
        for before in 0..expert {
            let rows = table[offsets + before + 1] - table[offsets + before];
            first += (rows as usize).div_ceil(ROWS);
        }
        let rows = table[offsets + expert + 1] - table[offsets + expert];
        count = (rows as usize).div_ceil(ROWS);
    }
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if line < lines {
        for i in 0..count.div_ceil(LANES) {
            let tile = i * LANES + lane;
            if tile < count {
                sum += parts[(first + tile) * lines + line];
            }
        }
    }
    let total = over_lanes::<N>(sum);
    if lane == 0 && line < lines {
        sums[expert * lines + line] = total;
    }
}

/// The sum over the lanes of a cube, in the units of the first. Every unit of the cube calls it.
#[cube]
fn over_lanes<N: Size>(sum: Vector<f32, N>) -> Vector<f32, N> {
    let unit = UNIT_POS as usize;
    let mut shared = SharedMemory::<Vector<f32, N>>::new_aligned(comptime!(LINES * LANES), 32usize);
    shared[unit] = sum;
    sync_cube();
    let mut total = Vector::<f32, N>::new(0.0f32);
    if unit < LINES {
        #[unroll]
        for lane in 0..LANES {
            total += shared[unit + comptime!(lane * LINES)];
        }
    }
    total
}
