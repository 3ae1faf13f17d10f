//! As [`project`](super::project), from device memory straight into the registers of the tensor
//! cores: for half precision whose extents allow wide loads.
//!
//! A lane of `mma.m16n8k16` holds pairs along `k` at places that are two elements apart. The sum does
//! not care in which order it is taken, so both operands are taken in another one: a lane reads 4 or
//! 8 neighbours along `k` at once, and what it reads are its pairs of one or two steps. In the same way
//! the columns of the output are dealt out so that a lane has `2 n_tiles` neighbours to write. Nothing
//! passes through shared memory but the parts of a sum that several planes share, and the narrow `x`
//! of an expansion, which all planes need.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;

use super::activation::between;
use super::product::{Tile, UNITS};
use super::project::{Finish, NO_EXPERT, Plan, TILE_WORDS, by_column, by_row};

/// Rows of a square.
pub(crate) const SQUARE_ROWS: usize = 16;
/// Columns of a square.
const SQUARE_COLUMNS: usize = 8;
/// Lanes along `k`.
pub(crate) const LANES_K: usize = 4;
/// Squares along the rows of one plane.
const ROW_SQUARES: usize = 2;

/// What a kernel is compiled for, beside what it shares with the kernel through shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Direct {
    pub plan: Plan,
    /// Squares along the columns of one plane.
    pub n_tiles: usize,
    /// Neighbours along `k` of one lane: 4 or 8.
    pub width: usize,
    /// Chunks of `4 * width` along `k` that are loaded before the first is multiplied.
    pub ahead: usize,
    /// Whether `x` passes through shared memory, where what stands between the factors is applied,
    /// and the extent of it that does.
    pub shared: Option<usize>,
    /// Whether `w` is `[k, n]`, or else `[n, k]`.
    pub transposed: bool,
    /// Whether the rows of `x` lie one after the other, or else its columns.
    pub x_by_row: bool,
}

impl Direct {
    fn chunk(&self) -> usize {
        LANES_K * self.width
    }

    fn columns(&self) -> usize {
        SQUARE_COLUMNS * self.n_tiles
    }

    /// Elements of `x` in one access.
    pub fn x_width(&self) -> usize {
        if self.x_by_row { self.width } else { 1 }
    }

    /// Elements of `w` in one access.
    pub fn w_width(&self) -> usize {
        if self.transposed {
            self.n_tiles
        } else {
            self.width
        }
    }

    /// Accesses of `w` by one lane for one chunk.
    fn w_accesses(&self) -> usize {
        if self.transposed {
            self.width
        } else {
            self.n_tiles
        }
    }

    /// Elements from one row of `x` in shared memory to the next: the rows that lanes read together
    /// lie in different banks.
    fn pitch(&self) -> usize {
        let k = self.shared.unwrap_or(0);
        if k <= 32 { k } else { k + 32 }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn direct_kernel<E: Float, NX: Size, NW: Size, NO: Size, MO: Size>(
    x: &Array<Vector<E, NX>>,
    w: &Array<Vector<E, NW>>,
    gate: &Array<E>,
    out: &mut Array<Vector<E, NO>>,
    table: &Array<u32>,
    tiles: usize,
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
    #[comptime] direct: Direct,
    #[define(E)] _dtype: StorageType,
) {
    let plan = comptime!(direct.plan);
    let tile = comptime!(plan.tile);
    let planes_m = comptime!(tile.planes[0]);
    let planes_n = comptime!(tile.planes[1]);
    let planes_k = comptime!(tile.planes[2]);
    let plane = UNIT_POS as usize / 32;
    let lane = UNIT_POS as usize % 32;
    let group = lane / comptime!(LANES_K);
    let member = lane % comptime!(LANES_K);
    let plane_m = plane % planes_m;
    let plane_n = (plane / planes_m) % planes_n;
    let plane_k = plane / comptime!(planes_m * planes_n);

    // Neighbouring cubes have neighbouring columns of the same rows.
    let column_cubes = n.div_ceil(tile.n);
    let row_cube = CUBE_POS_X as usize / column_cubes;
    let cube_column = CUBE_POS_X as usize % column_cubes * tile.n;
    let index = row_cube * planes_m + plane_m;
    let (expert, first, rows) = row_tile(table, index, tiles, all_rows, direct);
    let mut weight = 0usize.runtime();
    let mut depth = 0usize.runtime();
    if expert != NO_EXPERT {
        weight = expert as usize * w_expert;
        depth = k;
    }
    let column = cube_column + plane_n * comptime!(direct.columns());

    let mut base = Array::<Vector<E, NO>>::new(comptime!(
        ROW_SQUARES * 2 * (2 * direct.n_tiles / plan.out_width)
    ));
    if comptime!(plan.finish == Finish::Add && planes_k == 1) {
        load_base::<E, NO>(
            out, first, rows, column, n, out_at, out_stride, group, member, &mut base, direct,
        );
    }

    let mma = cmma::MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let size!(PAIR) = 2usize;
    let mut sums = Sequence::<Array<Vector<f32, PAIR>>>::new();
    #[unroll]
    for _ in 0..comptime!(ROW_SQUARES * direct.n_tiles) {
        let mut sum = Array::<Vector<f32, PAIR>>::new(2usize);
        sum[0] = Vector::new(0.0f32);
        sum[1] = Vector::new(0.0f32);
        sums.push(sum);
    }

    // Everything that comes from device memory is asked for before anybody waits.
    let from = plane_k * comptime!(direct.chunk()) + member * direct.width;
    let mut lefts = Sequence::<Array<Vector<E, NX>>>::new();
    let mut rights = Sequence::<Array<Vector<E, NW>>>::new();
    #[unroll]
    for ahead in 0..direct.ahead {
        let k0 = from + comptime!(ahead * direct.chunk() * planes_k);
        let mut left = Array::<Vector<E, NX>>::new(comptime!(2 * ROW_SQUARES));
        if comptime!(direct.shared.is_none()) {
            load_x::<E, NX>(x, x_at, x_stride, first, rows, k0, depth, group, &mut left);
        }
        lefts.push(left);
        let mut right = Array::<Vector<E, NW>>::new(comptime!(direct.w_accesses()));
        load_w::<E, NW>(
            w, weight, w_stride, column, n, k0, depth, group, &mut right, direct,
        );
        rights.push(right);
    }

    let x_smem_len = comptime!(match direct.shared {
        Some(_) => planes_m * ROW_SQUARES * SQUARE_ROWS * direct.pitch(),
        None => 16,
    });
    let mut x_shared = SharedMemory::<E>::new_aligned(x_smem_len, 32usize);
    if comptime!(direct.shared.is_some()) {
        share::<E, NX>(
            x,
            x_at,
            x_stride,
            row_cube,
            table,
            tiles,
            all_rows,
            k,
            scale,
            &mut x_shared,
            direct,
        );
        sync_cube();
    }

    let stride_k = comptime!(direct.chunk() * planes_k * direct.ahead);
    let rounds = depth.div_ceil(stride_k);
    for round in 0..rounds {
        #[unroll]
        for ahead in 0..direct.ahead {
            let k0 = from + round * stride_k + comptime!(ahead * direct.chunk() * planes_k);
            #[unroll]
            for step in 0..comptime!(direct.width / 4) {
                let mut b = Sequence::<Array<Vector<E, PAIR>>>::new();
                #[unroll]
                for j in 0..direct.n_tiles {
                    b.push(right_pairs::<E, NW, PAIR>(
                        rights.index(ahead),
                        j,
                        step,
                        direct,
                    ));
                }
                #[unroll]
                for i in 0..comptime!(ROW_SQUARES) {
                    let a = if comptime!(direct.shared.is_some()) {
                        shared_pairs::<E, PAIR>(&x_shared, plane_m, i, group, k0, step, direct)
                    } else {
                        left_pairs::<E, NX, PAIR>(lefts.index(ahead), i, step)
                    };
                    #[unroll]
                    for j in 0..direct.n_tiles {
                        let sum = sums.index_mut(comptime!(i * direct.n_tiles + j));
                        mma.execute_inplace(&a, b.index(j), sum);
                    }
                }
            }
            if round + 1 < rounds {
                let k0 = k0 + stride_k;
                if comptime!(direct.shared.is_none()) {
                    let left = lefts.index_mut(ahead);
                    load_x::<E, NX>(x, x_at, x_stride, first, rows, k0, depth, group, left);
                }
                let right = rights.index_mut(ahead);
                load_w::<E, NW>(
                    w, weight, w_stride, column, n, k0, depth, group, right, direct,
                );
            }
        }
    }

    if comptime!(planes_k > 1) {
        let mut totals = SharedMemory::<Vector<f32, MO>>::new_aligned(
            comptime!(tile.sums_len() / tile.sums_width),
            32usize,
        );
        let at = plane_n * comptime!(direct.columns()) + member * comptime!(2 * direct.n_tiles);
        store_sums::<MO, PAIR>(&sums, &mut totals, plane_k, at, group, direct);
        sync_cube();
        let columns = n - cube_column;
        if comptime!(plan.out_by_row) {
            by_row::<E, NO, MO>(
                &totals,
                gate,
                out,
                first,
                rows,
                cube_column,
                columns,
                out_at,
                out_stride,
                scale,
                plan,
            );
        } else {
            by_column::<E, NO, MO>(
                &totals,
                gate,
                out,
                first,
                rows,
                cube_column,
                columns,
                out_at,
                out_stride,
                scale,
                plan,
            );
        }
    } else {
        write_out::<E, NO, PAIR>(
            &sums, &base, out, first, rows, column, n, out_at, out_stride, group, member, direct,
        );
    }
}

/// Expert, first row and number of rows of a tile; no rows behind the last one.
#[cube]
fn row_tile(
    table: &Array<u32>,
    index: usize,
    tiles: usize,
    all_rows: usize,
    #[comptime] direct: Direct,
) -> (u32, usize, usize) {
    let mut expert = NO_EXPERT.runtime();
    let mut first = 0usize.runtime();
    let mut rows = 0usize.runtime();
    if index < tiles {
        if comptime!(direct.plan.grouped) {
            let entry = index * TILE_WORDS;
            expert = table[entry];
            first = table[entry + 1] as usize;
            rows = table[entry + 2] as usize - first;
        } else {
            expert = 0u32.runtime();
            first = index * comptime!(ROW_SQUARES * SQUARE_ROWS);
            rows = min(comptime!(ROW_SQUARES * SQUARE_ROWS), all_rows - first);
        }
    }
    (expert, first, rows)
}

/// The rows of this cube's tiles, through what stands between the factors, zeros elsewhere.
#[cube]
#[allow(clippy::too_many_arguments)]
fn share<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    x_at: usize,
    x_stride: usize,
    row_cube: usize,
    table: &Array<u32>,
    tiles: usize,
    all_rows: usize,
    k: usize,
    scale: f32,
    to: &mut SharedMemory<E>,
    #[comptime] direct: Direct,
) {
    let units = comptime!(UNITS);
    let tile_rows = comptime!(ROW_SQUARES * SQUARE_ROWS);
    let planes_m = comptime!(direct.plan.tile.planes[0]);
    let extent = comptime!(direct.shared.unwrap_or(0));
    let width = comptime!(direct.x_width());
    let accesses = comptime!((tile_rows * extent / width).div_ceil(units));
    #[unroll]
    for m in 0..planes_m {
        let index = row_cube * planes_m + m;
        let (_, first, rows) = row_tile(table, index, tiles, all_rows, direct);
        #[unroll]
        for i in 0..accesses {
            let place = (UNIT_POS as usize + comptime!(i * units)) * width;
            let (row, column) = if comptime!(direct.x_by_row) {
                (place / extent, place % extent)
            } else {
                (place % tile_rows, place / tile_rows)
            };
            let mut value = Vector::<E, N>::new(E::new(0.0));
            if row < rows && column < k {
                let at = if comptime!(direct.x_by_row) {
                    x_at + (first + row) * x_stride + column
                } else {
                    x_at + column * x_stride + first + row
                };
                value = x[at / width];
            }
            if row < tile_rows && column < extent {
                let start = (comptime!(m * tile_rows) + row) * comptime!(direct.pitch()) + column;
                let value = between::<N>(Vector::cast_from(value), scale, direct.plan.between);
                #[unroll]
                for j in 0..width {
                    to[start + j] = E::cast_from(value[j]);
                }
            }
        }
    }
}

/// A lane's neighbours along `k` in its four rows.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load_x<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    x_at: usize,
    x_stride: usize,
    first: usize,
    rows: usize,
    k0: usize,
    depth: usize,
    group: usize,
    values: &mut Array<Vector<E, N>>,
) {
    let width = N::value();
    #[unroll]
    for i in 0..comptime!(2 * ROW_SQUARES) {
        let row = comptime!(i * SQUARE_ROWS / 2) + group;
        let mut value = Vector::<E, N>::new(E::new(0.0));
        if row < rows && k0 < depth {
            value = x[(x_at + (first + row) * x_stride + k0) / width];
        }
        values[i] = value;
    }
}

/// A lane's part of `w`: neighbours along `k` in its columns, or neighbouring columns at its `k`s.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load_w<E: Float, N: Size>(
    w: &Array<Vector<E, N>>,
    weight: usize,
    w_stride: usize,
    column: usize,
    n: usize,
    k0: usize,
    depth: usize,
    group: usize,
    values: &mut Array<Vector<E, N>>,
    #[comptime] direct: Direct,
) {
    let first = column + group * direct.n_tiles;
    #[unroll]
    for i in 0..comptime!(direct.w_accesses()) {
        let mut value = Vector::<E, N>::new(E::new(0.0));
        if comptime!(direct.transposed) {
            if k0 + i < depth && first < n {
                value = w[(weight + (k0 + i) * w_stride + first) / direct.n_tiles];
            }
        } else {
            if first + i < n && k0 < depth {
                value = w[(weight + (first + i) * w_stride + k0) / direct.width];
            }
        }
        values[i] = value;
    }
}

/// The registers of the left operand: both rows of the square, both pairs of the step.
#[cube]
fn left_pairs<E: Float, N: Size, P: Size>(
    values: &Array<Vector<E, N>>,
    #[comptime] square: usize,
    #[comptime] step: usize,
) -> Array<Vector<E, P>> {
    let mut pairs = Array::<Vector<E, P>>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        // Rows change first, then pairs.
        let value = values[comptime!(2 * square + i % 2)];
        let at = comptime!(4 * step + i / 2 * 2);
        let mut pair = Vector::<E, P>::new(E::new(0.0));
        pair[0] = value[at];
        pair[1] = value[comptime!(at + 1)];
        pairs[i] = pair;
    }
    pairs
}

/// As [`left_pairs`], from shared memory.
#[cube]
fn shared_pairs<E: Float, P: Size>(
    x: &SharedMemory<E>,
    plane_m: usize,
    #[comptime] square: usize,
    group: usize,
    k0: usize,
    #[comptime] step: usize,
    #[comptime] direct: Direct,
) -> Array<Vector<E, P>> {
    let mut pairs = Array::<Vector<E, P>>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        let row = plane_m * comptime!(ROW_SQUARES * SQUARE_ROWS)
            + comptime!((2 * square + i % 2) * SQUARE_ROWS / 2)
            + group;
        let at = row * comptime!(direct.pitch()) + k0 + comptime!(4 * step + i / 2 * 2);
        let mut pair = Vector::<E, P>::new(E::new(0.0));
        pair[0] = x[at];
        pair[1] = x[at + 1];
        pairs[i] = pair;
    }
    pairs
}

/// The registers of the right operand for one square: both pairs of the step.
#[cube]
fn right_pairs<E: Float, N: Size, P: Size>(
    values: &Array<Vector<E, N>>,
    #[comptime] square: usize,
    #[comptime] step: usize,
    #[comptime] direct: Direct,
) -> Array<Vector<E, P>> {
    let mut pairs = Array::<Vector<E, P>>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        let at = comptime!(4 * step + 2 * i);
        let mut pair = Vector::<E, P>::new(E::new(0.0));
        if comptime!(direct.transposed) {
            let (low, high) = (values[at], values[comptime!(at + 1)]);
            pair[0] = low[square];
            pair[1] = high[square];
        } else {
            let value = values[square];
            pair[0] = value[at];
            pair[1] = value[comptime!(at + 1)];
        }
        pairs[i] = pair;
    }
    pairs
}

/// A lane's `2 n_tiles` neighbours in one of its rows: element `e` of them.
#[cube]
fn element<P: Size>(
    sums: &Sequence<Array<Vector<f32, P>>>,
    #[comptime] row: usize,
    #[comptime] e: usize,
    #[comptime] direct: Direct,
) -> f32 {
    let square = comptime!(row / 2 * direct.n_tiles + e % direct.n_tiles);
    let pair = sums.index(square)[comptime!(row % 2)];
    pair[comptime!(e / direct.n_tiles)]
}

#[cube]
fn store_sums<MO: Size, P: Size>(
    sums: &Sequence<Array<Vector<f32, P>>>,
    to: &mut SharedMemory<Vector<f32, MO>>,
    plane_k: usize,
    at: usize,
    group: usize,
    #[comptime] direct: Direct,
) {
    let tile = comptime!(direct.plan.tile);
    #[unroll]
    for i in 0..comptime!(2 * ROW_SQUARES) {
        let row = plane_k * tile.m + comptime!(i * SQUARE_ROWS / 2) + group;
        #[unroll]
        for v in 0..comptime!(2 * direct.n_tiles / tile.sums_width) {
            let mut value = Vector::<f32, MO>::new(0.0f32);
            #[unroll]
            for j in 0..tile.sums_width {
                value[j] = element::<P>(sums, i, comptime!(v * tile.sums_width + j), direct);
            }
            let place = row * tile.sums_pitch + at + comptime!(v * tile.sums_width);
            to[place / tile.sums_width] = value;
        }
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
fn load_base<E: Float, NO: Size>(
    out: &Array<Vector<E, NO>>,
    first: usize,
    rows: usize,
    column: usize,
    n: usize,
    out_at: usize,
    out_stride: usize,
    group: usize,
    member: usize,
    base: &mut Array<Vector<E, NO>>,
    #[comptime] direct: Direct,
) {
    let width = comptime!(direct.plan.out_width);
    let vectors = comptime!(2 * direct.n_tiles / width);
    #[unroll]
    for i in 0..comptime!(2 * ROW_SQUARES) {
        let row = comptime!(i * SQUARE_ROWS / 2) + group;
        #[unroll]
        for v in 0..vectors {
            let c = column + member * comptime!(2 * direct.n_tiles) + comptime!(v * width);
            let mut value = Vector::<E, NO>::new(E::new(0.0));
            if row < rows && c < n {
                value = out[(out_at + (first + row) * out_stride + c) / width];
            }
            base[comptime!(i * vectors + v)] = value;
        }
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
fn write_out<E: Float, NO: Size, P: Size>(
    sums: &Sequence<Array<Vector<f32, P>>>,
    base: &Array<Vector<E, NO>>,
    out: &mut Array<Vector<E, NO>>,
    first: usize,
    rows: usize,
    column: usize,
    n: usize,
    out_at: usize,
    out_stride: usize,
    group: usize,
    member: usize,
    #[comptime] direct: Direct,
) {
    let width = comptime!(direct.plan.out_width);
    let vectors = comptime!(2 * direct.n_tiles / width);
    #[unroll]
    for i in 0..comptime!(2 * ROW_SQUARES) {
        let row = comptime!(i * SQUARE_ROWS / 2) + group;
        #[unroll]
        for v in 0..vectors {
            let c = column + member * comptime!(2 * direct.n_tiles) + comptime!(v * width);
            if row < rows && c < n {
                let mut value = Vector::<f32, NO>::new(0.0f32);
                #[unroll]
                for j in 0..width {
                    value[j] = element::<P>(sums, i, comptime!(v * width + j), direct);
                }
                if comptime!(direct.plan.finish == Finish::Add) {
                    value += Vector::cast_from(base[comptime!(i * vectors + v)]);
                }
                out[(out_at + (first + row) * out_stride + c) / width] = Vector::cast_from(value);
            }
        }
    }
}

/// The tile of a direct kernel, for the parts it shares with the other.
pub(crate) fn tile(planes: [usize; 3], n: usize, sums_width: usize, k: usize) -> Tile {
    let none = super::product::Block {
        outer: 0,
        inner: 0,
        pitch: 0,
        width: 1,
        shared_width: 1,
    };
    Tile {
        m: planes[0] * ROW_SQUARES * SQUARE_ROWS,
        n,
        k,
        left: none,
        left_inner_k: true,
        right: none,
        right_inner_k: true,
        planes,
        step: SQUARE_ROWS,
        sums_pitch: n + 4,
        sums_width,
    }
}
