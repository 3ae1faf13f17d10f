//! `w_e = p_e^T q_e` over rows sorted by expert: the gradients of the factors.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;

use super::product::{Product, Tile, UNITS};
use super::stage::{fetch, put};
use crate::Activation;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    pub tile: Tile,
    /// On the way in: what stands between the factors.
    pub between: Option<Activation>,
    /// Whether the output is `[E, rank, n]`, or else `[E, n, rank]`.
    pub rank_first: bool,
    /// Whether the rows belong to several experts, or else all to the first.
    pub grouped: bool,
}

/// One cube computes `[tile.m, tile.n]` of one expert's output from one part of its rows. `low` has
/// `rank` columns, `wide` has `n`; both are matrices in larger ones.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn outer_kernel<
    P: Product,
    E: Float,
    S: Float,
    O: Float,
    NL: Size,
    NW: Size,
    ML: Size,
    MW: Size,
    MO: Size,
>(
    low: &Array<Vector<E, NL>>,
    wide: &Array<Vector<E, NW>>,
    out: &mut Array<O>,
    table: &Array<u32>,
    offsets_at: usize,
    all_rows: usize,
    low_at: usize,
    low_stride: usize,
    wide_at: usize,
    wide_stride: usize,
    rank: usize,
    n: usize,
    experts: usize,
    scale: f32,
    #[comptime] plan: Plan,
    #[define(E, S, O)] _dtypes: [StorageType; 3],
) {
    let tile = comptime!(plan.tile);
    let chunks = rank.div_ceil(tile.m);
    let expert = CUBE_POS_Y as usize / chunks;
    let line = CUBE_POS_Y as usize % chunks * tile.m;
    let lines = rank - line;
    let column = CUBE_POS_X as usize * tile.n;
    let columns = n - column;

    let (from, to) = part(table, offsets_at, expert, all_rows, tile.k, plan.grouped);

    let mut low_blocks = SharedMemory::<Vector<S, ML>>::new_aligned(
        comptime!(2 * tile.left.len() / tile.left.shared_width),
        32usize,
    );
    let mut wide_blocks = SharedMemory::<Vector<S, MW>>::new_aligned(
        comptime!(2 * tile.right.len() / tile.right.shared_width),
        32usize,
    );
    let mut totals =
        SharedMemory::<Vector<f32, MO>>::new_aligned(comptime!(tile.sums_len()), 32usize);
    let mut low_next = Array::<Vector<E, NL>>::new(comptime!(tile.left.accesses()));
    let mut wide_next = Array::<Vector<E, NW>>::new(comptime!(tile.right.accesses()));
    let mut sums = P::zero(tile);

    let steps = (to - from).div_ceil(tile.k);
    fetch_low::<E, NL>(
        low,
        low_at,
        low_stride,
        from,
        to,
        line,
        lines,
        &mut low_next,
        tile,
    );
    let wide_from = wide_at + from * wide_stride + column;
    fetch(
        wide,
        wide_from,
        wide_stride,
        to - from,
        columns,
        &mut wide_next,
        tile.right,
    );
    for step in 0..steps {
        let low_block = (step % 2) * comptime!(tile.left.len());
        let wide_block = (step % 2) * comptime!(tile.right.len());
        put::<E, NL, S, ML>(
            &low_next,
            &mut low_blocks,
            low_block,
            scale,
            plan.between,
            tile.left,
        );
        put::<E, NW, S, MW>(
            &wide_next,
            &mut wide_blocks,
            wide_block,
            1.0f32,
            comptime!(None),
            tile.right,
        );
        sync_cube();
        if step + 1 < steps {
            let next = from + (step + 1) * tile.k;
            fetch_low::<E, NL>(
                low,
                low_at,
                low_stride,
                next,
                to,
                line,
                lines,
                &mut low_next,
                tile,
            );
            let wide_from = wide_at + next * wide_stride + column;
            fetch(
                wide,
                wide_from,
                wide_stride,
                to - next,
                columns,
                &mut wide_next,
                tile.right,
            );
        }
        P::add::<S, ML, MW>(
            &mut sums,
            &low_blocks,
            low_block,
            &wide_blocks,
            wide_block,
            tile,
        );
    }
    P::store::<MO>(&sums, &mut totals, tile);
    sync_cube();

    let out_at = (CUBE_POS_Z as usize * experts + expert) * rank * n;
    write_totals::<O, MO>(&totals, out, out_at, rank, n, line, column, plan);
}

/// The rows of an expert that this cube sums: whole steps, so that their sums do not depend on where a
/// step ends.
#[cube]
pub(crate) fn part(
    table: &Array<u32>,
    offsets_at: usize,
    expert: usize,
    all_rows: usize,
    #[comptime] step: usize,
    #[comptime] grouped: bool,
) -> (usize, usize) {
    let mut first = 0usize.runtime();
    let mut end = all_rows;
    if comptime!(grouped) {
        first = table[offsets_at + expert] as usize;
        end = table[offsets_at + expert + 1] as usize;
    }
    let part = (end - first).div_ceil(step).div_ceil(CUBE_COUNT_Z as usize) * step;
    let from = min(first + CUBE_POS_Z as usize * part, end);
    (from, min(from + part, end))
}

/// Writes the lines from `line` on and the columns from `column` on of one expert's output.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn write_totals<O: Float, MO: Size>(
    totals: &SharedMemory<Vector<f32, MO>>,
    out: &mut Array<O>,
    out_at: usize,
    rank: usize,
    n: usize,
    line: usize,
    column: usize,
    #[comptime] plan: Plan,
) {
    let tile = comptime!(plan.tile);
    let (lines, columns) = (rank - line, n - column);
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..comptime!((tile.m * tile.n).div_ceil(UNITS)) {
        let place = unit + comptime!(i * UNITS);
        let (row, c) = if comptime!(plan.rank_first) {
            (place / tile.n, place % tile.n)
        } else {
            (place % tile.m, place / tile.m)
        };
        if row < lines && c < columns && row < tile.m && c < tile.n {
            let mut sum = 0.0f32;
            #[unroll]
            for plane in 0..comptime!(tile.planes[2]) {
                sum += totals
                    [row * tile.sums_pitch + c + comptime!(plane * tile.m * tile.sums_pitch)][0];
            }
            let at = if comptime!(plan.rank_first) {
                out_at + (line + row) * n + column + c
            } else {
                out_at + (column + c) * rank + line + row
            };
            out[at] = O::cast_from(sum);
        }
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
fn fetch_low<E: Float, N: Size>(
    low: &Array<Vector<E, N>>,
    at: usize,
    stride: usize,
    from: usize,
    to: usize,
    line: usize,
    lines: usize,
    into: &mut Array<Vector<E, N>>,
    #[comptime] tile: Tile,
) {
    if comptime!(tile.left_inner_k) {
        fetch(
            low,
            at + line * stride + from,
            stride,
            lines,
            to - from,
            into,
            tile.left,
        );
    } else {
        fetch(
            low,
            at + from * stride + line,
            stride,
            to - from,
            lines,
            into,
            tile.left,
        );
    }
}

/// `out = parts_0 + parts_1 + ..`, in this order.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn add_parts_kernel<O: Float>(
    parts: &Array<f32>,
    out: &mut Array<O>,
    count: usize,
    len: usize,
    #[define(O)] _dtype: StorageType,
) {
    let at = ABSOLUTE_POS;
    if at < len {
        let mut sum = 0.0f32;
        for part in 0..count {
            sum += parts[part * len + at];
        }
        out[at] = O::cast_from(sum);
    }
}
