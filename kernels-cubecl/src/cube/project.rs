//! `y_e = x_e w_e^T` over rows sorted by expert: shrink and expand, forward and backward.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;

use super::activation::slope;
use super::product::{Product, Tile, UNITS};
use super::stage::{fetch, put};
use crate::Activation;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    pub tile: Tile,
    /// Blocks in shared memory: one to compute with and one to fill, or one for a short sum.
    pub blocks: usize,
    /// On the way in: what stands between the factors.
    pub between: Option<Activation>,
    pub finish: Finish,
    /// Whether the rows of the output lie one after the other, or else its columns.
    pub out_by_row: bool,
    /// Elements of one access of the output.
    pub out_width: usize,
    /// Whether the rows belong to several experts, or else all to the first.
    pub grouped: bool,
}

/// What becomes of a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Finish {
    /// It is the output.
    Write,
    /// It is added to what is there.
    Add,
    /// It is the gradient behind what stands between the factors, of which `gate` is the input.
    Slope(Activation),
}

/// Words of a row tile: expert, first row, end row.
pub(crate) const TILE_WORDS: usize = 3;
/// The expert of rows that belong to none: their output is zero.
pub(crate) const NO_EXPERT: u32 = u32::MAX;

/// One cube computes `[tile.m, tile.n]` of the output. `x` and the output are matrices in larger
/// ones: their first elements are `x_at` and `out_at`, their runs `x_stride` and `out_stride` apart,
/// those of a weight `w_stride`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn project_kernel<
    P: Product,
    E: Float,
    S: Float,
    NX: Size,
    NW: Size,
    NO: Size,
    MX: Size,
    MW: Size,
    MO: Size,
>(
    x: &Array<Vector<E, NX>>,
    w: &Array<Vector<E, NW>>,
    gate: &Array<E>,
    out: &mut Array<Vector<E, NO>>,
    tiles: &Array<u32>,
    x_at: usize,
    x_stride: usize,
    w_expert: usize,
    w_stride: usize,
    all_rows: usize,
    k: usize,
    n: usize,
    out_at: usize,
    out_stride: usize,
    scale: f32,
    #[comptime] plan: Plan,
    #[define(E, S)] _dtypes: [StorageType; 2],
) {
    let tile = comptime!(plan.tile);
    let (expert, first, end) = row_tile(tiles, CUBE_POS_X as usize, all_rows, plan);
    let rows = end - first;
    let mut weight = 0usize.runtime();
    let mut depth = 0usize.runtime();
    if expert != NO_EXPERT {
        weight = expert as usize * w_expert;
        depth = k;
    }
    let column = CUBE_POS_Y as usize * tile.n;
    let columns = n - column;

    let mut x_blocks = SharedMemory::<Vector<S, MX>>::new_aligned(
        comptime!(plan.blocks * tile.left.len() / tile.left.shared_width),
        32usize,
    );
    let mut w_blocks = SharedMemory::<Vector<S, MW>>::new_aligned(
        comptime!(plan.blocks * tile.right.len() / tile.right.shared_width),
        32usize,
    );
    let mut totals = SharedMemory::<Vector<f32, MO>>::new_aligned(
        comptime!(tile.sums_len() / tile.sums_width),
        32usize,
    );
    let mut x_next = Array::<Vector<E, NX>>::new(comptime!(tile.left.accesses()));
    let mut w_next = Array::<Vector<E, NW>>::new(comptime!(tile.right.accesses()));
    let mut sums = P::zero(tile);

    let steps = depth.div_ceil(tile.k);
    fetch_x::<E, NX>(x, x_at, x_stride, first, rows, 0, depth, &mut x_next, tile);
    fetch_w::<E, NW>(
        w,
        weight,
        w_stride,
        column,
        columns,
        0,
        depth,
        &mut w_next,
        tile,
    );
    for step in 0..steps {
        let block = if comptime!(plan.blocks == 1) {
            0usize.runtime()
        } else {
            step % 2
        };
        let x_block = block * comptime!(tile.left.len());
        let w_block = block * comptime!(tile.right.len());
        put::<E, NX, S, MX>(
            &x_next,
            &mut x_blocks,
            x_block,
            scale,
            plan.between,
            tile.left,
        );
        put::<E, NW, S, MW>(
            &w_next,
            &mut w_blocks,
            w_block,
            1.0f32,
            comptime!(None),
            tile.right,
        );
        sync_cube();
        if step + 1 < steps {
            let from = (step + 1) * tile.k;
            fetch_x::<E, NX>(
                x,
                x_at,
                x_stride,
                first,
                rows,
                from,
                depth,
                &mut x_next,
                tile,
            );
            fetch_w::<E, NW>(
                w,
                weight,
                w_stride,
                column,
                columns,
                from,
                depth,
                &mut w_next,
                tile,
            );
        }
        P::add::<S, MX, MW>(&mut sums, &x_blocks, x_block, &w_blocks, w_block, tile);
    }
    P::store::<MO>(&sums, &mut totals, tile);
    sync_cube();
    if comptime!(plan.out_by_row) {
        by_row::<E, NO, MO>(
            &totals, gate, out, first, rows, column, columns, out_at, out_stride, scale, plan,
        );
    } else {
        by_column::<E, NO, MO>(
            &totals, gate, out, first, rows, column, columns, out_at, out_stride, scale, plan,
        );
    }
}

/// Expert, first row and end row of a tile.
#[cube]
pub(crate) fn row_tile(
    tiles: &Array<u32>,
    index: usize,
    all_rows: usize,
    #[comptime] plan: Plan,
) -> (u32, usize, usize) {
    if comptime!(plan.grouped) {
        let entry = index * TILE_WORDS;
        (
            tiles[entry],
            tiles[entry + 1] as usize,
            tiles[entry + 2] as usize,
        )
    } else {
        let first = index * plan.tile.m;
        (0u32, first, min(first + plan.tile.m, all_rows))
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
fn fetch_x<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    at: usize,
    stride: usize,
    first: usize,
    rows: usize,
    from: usize,
    depth: usize,
    into: &mut Array<Vector<E, N>>,
    #[comptime] tile: Tile,
) {
    if comptime!(tile.left_inner_k) {
        fetch(
            x,
            at + first * stride + from,
            stride,
            rows,
            depth - from,
            into,
            tile.left,
        );
    } else {
        fetch(
            x,
            at + from * stride + first,
            stride,
            depth - from,
            rows,
            into,
            tile.left,
        );
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
fn fetch_w<E: Float, N: Size>(
    w: &Array<Vector<E, N>>,
    at: usize,
    stride: usize,
    column: usize,
    columns: usize,
    from: usize,
    depth: usize,
    into: &mut Array<Vector<E, N>>,
    #[comptime] tile: Tile,
) {
    if comptime!(tile.right_inner_k) {
        fetch(
            w,
            at + column * stride + from,
            stride,
            columns,
            depth - from,
            into,
            tile.right,
        );
    } else {
        fetch(
            w,
            at + from * stride + column,
            stride,
            depth - from,
            columns,
            into,
            tile.right,
        );
    }
}

/// The sum of what the planes along `k` have.
#[cube]
fn total<MO: Size>(
    totals: &SharedMemory<Vector<f32, MO>>,
    row: usize,
    column: usize,
    #[comptime] tile: Tile,
) -> Vector<f32, MO> {
    let at = (row * tile.sums_pitch + column) / tile.sums_width;
    let mut sum = totals[at];
    #[unroll]
    for plane in 1..comptime!(tile.planes[2]) {
        sum += totals[at + comptime!(plane * tile.m * tile.sums_pitch / tile.sums_width)];
    }
    sum
}

#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn by_row<E: Float, NO: Size, MO: Size>(
    totals: &SharedMemory<Vector<f32, MO>>,
    gate: &Array<E>,
    out: &mut Array<Vector<E, NO>>,
    first: usize,
    rows: usize,
    column: usize,
    columns: usize,
    out_at: usize,
    out_stride: usize,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let tile = comptime!(plan.tile);
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..comptime!((tile.m * tile.n / plan.out_width).div_ceil(UNITS)) {
        let place = (unit + comptime!(i * UNITS)) * plan.out_width;
        let row = place / tile.n;
        let c = place % tile.n;
        if row < rows && c < columns {
            let at = out_at + (first + row) * out_stride + column + c;
            let mut value = Vector::<f32, NO>::new(0.0f32);
            #[unroll]
            for part in 0..comptime!(plan.out_width / tile.sums_width) {
                let sum = total::<MO>(totals, row, c + comptime!(part * tile.sums_width), tile);
                #[unroll]
                for j in 0..tile.sums_width {
                    value[comptime!(part * tile.sums_width + j)] = sum[j];
                }
            }
            match comptime!(plan.finish) {
                Finish::Write => {}
                Finish::Add => {
                    value += Vector::cast_from(out[at / plan.out_width]);
                }
                Finish::Slope(activation) => {
                    let z = Vector::<f32, NO>::cast_from(gate[at]);
                    value *= slope::<NO>(z, scale, activation);
                }
            }
            out[at / plan.out_width] = Vector::cast_from(value);
        }
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn by_column<E: Float, NO: Size, MO: Size>(
    totals: &SharedMemory<Vector<f32, MO>>,
    gate: &Array<E>,
    out: &mut Array<Vector<E, NO>>,
    first: usize,
    rows: usize,
    column: usize,
    columns: usize,
    out_at: usize,
    out_stride: usize,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let tile = comptime!(plan.tile);
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..comptime!((tile.m * tile.n).div_ceil(UNITS)) {
        let place = unit + comptime!(i * UNITS);
        let row = place % tile.m;
        let c = place / tile.m;
        if row < rows && c < columns {
            let at = out_at + (column + c) * out_stride + first + row;
            let sum = total::<MO>(totals, row, c, tile);
            let mut value = Vector::<f32, NO>::new(sum[0]);
            if let Finish::Slope(activation) = comptime!(plan.finish) {
                let z = Vector::<f32, NO>::cast_from(gate[at]);
                value *= slope::<NO>(z, scale, activation);
            }
            out[at] = Vector::cast_from(value);
        }
    }
}
