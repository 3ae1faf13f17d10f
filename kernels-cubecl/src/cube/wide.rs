//! As [`project`](super::project) where the sum is as short as the rank: a cube has all of it in shared
//! memory at once, and what it adds to in registers.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;

use super::product::{PLANES, SQUARE, UNITS};
use super::project::{Finish, NO_EXPERT, Plan, row_tile};
use super::swizzled::{
    Feed, HALF, MEMBERS, Operand, PART, Swizzled, arrive, barriers, feed, first as first_of,
    multiply, place, square, zeros,
};

/// Columns that a plane computes at once: each lane has [`PART`] neighbours of two rows.
const COLUMNS: usize = 4 * PART;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Wide {
    /// Its tile has the whole sum, padded to a power of two.
    pub plan: Plan,
    /// Elements of one access of `x`: a part, or 1.
    pub x_width: usize,
    /// Whether the rows of `x` lie one after the other, or else its columns.
    pub x_by_row: bool,
    /// Whether `w` is `[k, n]`, or else `[n, k]`.
    pub transposed: bool,
}

impl Wide {
    fn x(&self) -> Feed {
        let tile = self.plan.tile;
        let block = if self.x_by_row {
            Swizzled::new(tile.m, tile.k)
        } else {
            Swizzled::new(tile.k, tile.m)
        };
        Feed {
            between: self.plan.between.filter(|between| !between.is_identity()),
            ..Feed::new(block, self.x_width)
        }
    }

    fn w(&self) -> Feed {
        let tile = self.plan.tile;
        let block = if self.transposed {
            Swizzled::new(tile.k, tile.n)
        } else {
            Swizzled::new(tile.n, tile.k)
        };
        Feed {
            dealt: !self.transposed,
            ..Feed::new(block, PART)
        }
    }

    /// Elements of one access of `w` in shared memory: where its rows are those of the sum, its columns
    /// are dealt out in pairs.
    pub fn w_width(&self) -> usize {
        if self.transposed { 2 } else { PART }
    }

    /// Squares of one plane.
    fn squares(&self) -> usize {
        let tile = self.plan.tile;
        (tile.m / SQUARE) * (tile.n / COLUMNS) / PLANES
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn wide_kernel<E: Float, NX: Size, N: Size, MW: Size>(
    x: &Array<Vector<E, NX>>,
    w: &Array<Vector<E, N>>,
    out: &mut Array<Vector<E, N>>,
    table: &Array<u32>,
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
    #[comptime] wide: Wide,
    #[define(E)] _dtype: StorageType,
) {
    let plan = comptime!(wide.plan);
    let tile = comptime!(plan.tile);
    let plane = UNIT_POS as usize / 32;
    let group = UNIT_POS as usize % 32 / MEMBERS;
    let member = UNIT_POS as usize % MEMBERS;
    let barriers = barriers(1usize, comptime!(UNITS as u32));

    // Neighbouring cubes have neighbouring columns of the same rows.
    let column_cubes = n.div_ceil(tile.n);
    let (expert, first, end) = row_tile(table, CUBE_POS_X as usize / column_cubes, all_rows, plan);
    let column = CUBE_POS_X as usize % column_cubes * tile.n;
    let (rows, columns) = (end - first, n - column);
    let mut weight = 0usize.runtime();
    let mut depth = 0usize.runtime();
    if expert != NO_EXPERT {
        weight = expert as usize * w_expert;
        depth = k;
    }

    let x_feed = comptime!(wide.x());
    let w_feed = comptime!(wide.w());
    let mut x_block =
        SharedMemory::<Vector<E, N>>::new_aligned(comptime!(x_feed.block.len()), 128usize);
    let mut w_block = SharedMemory::<Vector<E, MW>>::new_aligned(
        comptime!(w_feed.block.len() * PART / wide.w_width()),
        128usize,
    );
    let (x_start, x_rows, x_columns) = if comptime!(wide.x_by_row) {
        (x_at + first * x_stride, rows, depth)
    } else {
        (x_at + first, depth, rows)
    };
    feed::<E, NX, N>(
        x,
        x_start,
        x_stride,
        first_of(x_rows, x_columns),
        scale,
        &mut x_block,
        0usize,
        x_feed,
    );
    if comptime!(wide.transposed) {
        deal::<E, N, MW>(
            w,
            weight + column,
            w_stride,
            depth,
            columns,
            &mut w_block,
            comptime!(w_feed.block),
        );
    } else {
        feed::<E, N, MW>(
            w,
            weight + column * w_stride,
            w_stride,
            first_of(columns, depth),
            1.0f32,
            &mut w_block,
            0usize,
            w_feed,
        );
    }
    arrive(&barriers, 0usize);

    let squares = comptime!(wide.squares());
    let mut base = Array::<Vector<E, N>>::new(comptime!(2 * squares));
    if comptime!(plan.finish == Finish::Add) {
        #[unroll]
        for i in 0..squares {
            let (row, c) = corner(plane, i, tile.n);
            #[unroll]
            for h in 0..2usize {
                let row = row + group + comptime!(h * HALF);
                let c = c + member * PART;
                let mut value = Vector::<E, N>::new(E::new(0.0));
                if row < rows && c < columns {
                    value = out[(out_at + (first + row) * out_stride + column + c) / PART];
                }
                base[comptime!(2 * i + h)] = value;
            }
        }
    }
    barriers.index(0usize).wait_parity(0u32);

    let size!(PAIR) = 2usize;
    #[unroll]
    for i in 0..squares {
        let (row, c) = corner(plane, i, tile.n);
        let mut sums = zeros::<PAIR>(comptime!(COLUMNS / HALF));
        #[unroll]
        for step in 0..comptime!(tile.k / SQUARE) {
            let k = comptime!(step * SQUARE).runtime();
            let left = square::<E, N, PAIR>(
                &x_block,
                0usize,
                row,
                k,
                x_feed.block,
                Operand::Left,
                comptime!(!wide.x_by_row),
            );
            #[unroll]
            for pair in 0..comptime!(COLUMNS / SQUARE) {
                let right = square::<E, MW, PAIR>(
                    &w_block,
                    0usize,
                    c + comptime!(pair * SQUARE),
                    k,
                    w_feed.block,
                    Operand::Right,
                    wide.transposed,
                );
                multiply(&left, &right, &mut sums, comptime!(2 * pair));
            }
        }
        #[unroll]
        for h in 0..2usize {
            let row = row + group + comptime!(h * HALF);
            let c = c + member * PART;
            if row < rows && c < columns {
                let mut value = Vector::<f32, N>::new(0.0f32);
                #[unroll]
                for j in 0..comptime!(COLUMNS / HALF) {
                    let pair = sums.index(j)[h];
                    value[comptime!(2 * j)] = pair[0];
                    value[comptime!(2 * j + 1)] = pair[1];
                }
                // In f32: a factor that nothing stands between is linear.
                if comptime!(plan.between.is_some() && x_feed.between.is_none()) {
                    value *= Vector::new(scale);
                }
                if comptime!(plan.finish == Finish::Add) {
                    value += Vector::cast_from(base[comptime!(2 * i + h)]);
                }
                let at = out_at + (first + row) * out_stride + column + c;
                out[at / PART] = Vector::cast_from(value);
            }
        }
    }
}

/// First row and column of a plane's square `i`.
#[cube]
fn corner(plane: usize, #[comptime] i: usize, #[comptime] columns: usize) -> (usize, usize) {
    let across = comptime!(columns / COLUMNS);
    let index = plane + comptime!(i * PLANES);
    (index / across * SQUARE, index % across * COLUMNS)
}

/// Fills a block whose rows are those of the sum, its columns dealt out as
/// [`dealt`](super::swizzled::dealt) says.
#[cube]
fn deal<E: Float, N: Size, MW: Size>(
    from: &Array<Vector<E, N>>,
    start: usize,
    stride: usize,
    rows: usize,
    columns: usize,
    to: &mut SharedMemory<Vector<E, MW>>,
    #[comptime] block: Swizzled,
) {
    #[unroll]
    for i in 0..comptime!(block.len().div_ceil(UNITS)) {
        let id = UNIT_POS as usize + comptime!(i * UNITS);
        let row = id / block.parts;
        let part = id % block.parts;
        if comptime!(block.len().is_multiple_of(UNITS)) || id < block.len() {
            let mut value = Vector::<E, N>::new(E::new(0.0));
            if row < rows && part * PART < columns {
                value = from[(start + row * stride + part * PART) / PART];
            }
            // Pair `j` of the four parts of 32 columns goes to part `j`.
            #[unroll]
            for j in 0..4usize {
                let mut pair = Vector::<E, MW>::new(value[comptime!(2 * j)]);
                pair[1] = value[comptime!(2 * j + 1)];
                to[place(row, part / 4 * 4 + j, block) * 4 + part % 4] = pair;
            }
        }
    }
}
