//! As [`outer`](super::outer), from device memory straight into the registers of the tensor cores.
//!
//! Rows are the sum's axis here, and neither operand has neighbours along it: a lane reads neighbouring
//! columns at four rows and pairs them up. What [`direct`](super::direct) says of the order of the sum
//! and of the columns holds here too.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;

use super::activation::between;
use super::direct::{LANES_K, SQUARE_ROWS};
use super::outer::{Plan, part, write_totals};

/// Rows of one lane in one step.
const ROWS_K: usize = 4;
/// Rows of one step.
const STEP: usize = ROWS_K * LANES_K;

/// What a kernel is compiled for, beside what it shares with the kernel through shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DirectOuter {
    pub plan: Plan,
    /// Squares along the rank of one plane.
    pub m_tiles: usize,
    /// Squares along the columns of one plane.
    pub n_tiles: usize,
    /// Steps that are loaded before the first is multiplied.
    pub ahead: usize,
    /// Whether the rows of `low` lie one after the other, or else its columns.
    pub low_by_row: bool,
}

impl DirectOuter {
    /// Neighbours along the rank of one lane.
    fn slots(&self) -> usize {
        2 * self.m_tiles
    }

    /// Elements of `low` in one access.
    pub fn low_width(&self) -> usize {
        if self.low_by_row { self.slots() } else { 1 }
    }

    /// Rows that the planes of a cube take in one round.
    pub fn round(&self) -> usize {
        STEP * self.plan.tile.planes[2] * self.ahead
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn direct_outer_kernel<E: Float, O: Float, NL: Size, NW: Size, MO: Size>(
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
    #[comptime] direct: DirectOuter,
    #[define(E, O)] _dtypes: [StorageType; 2],
) {
    let plan = comptime!(direct.plan);
    let tile = comptime!(plan.tile);
    let planes_m = comptime!(tile.planes[0]);
    let planes_k = comptime!(tile.planes[2]);
    let plane = UNIT_POS as usize / 32;
    let lane = UNIT_POS as usize % 32;
    let group = lane / comptime!(LANES_K);
    let member = lane % comptime!(LANES_K);
    let plane_m = plane % planes_m;
    let plane_k = plane / planes_m;

    let expert = CUBE_POS_Y as usize;
    let column = CUBE_POS_X as usize * tile.n;
    let lane_column = column + group * direct.n_tiles;
    let plane_line = plane_m * comptime!(SQUARE_ROWS * direct.m_tiles);
    let lane_line = plane_line + group * comptime!(direct.slots());
    let (from, to) = part(
        table,
        offsets_at,
        expert,
        all_rows,
        direct.round(),
        plan.grouped,
    );

    let mma = cmma::MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let size!(PAIR) = 2usize;
    let mut sums = Sequence::<Array<Vector<f32, PAIR>>>::new();
    #[unroll]
    for _ in 0..comptime!(direct.m_tiles * direct.n_tiles) {
        let mut sum = Array::<Vector<f32, PAIR>>::new(2usize);
        sum[0] = Vector::new(0.0f32);
        sum[1] = Vector::new(0.0f32);
        sums.push(sum);
    }

    let rounds = (to - from).div_ceil(comptime!(direct.round()));
    for round in 0..rounds {
        let start = from + round * comptime!(direct.round()) + plane_k * STEP + member * ROWS_K;
        let mut lows = Sequence::<Array<E>>::new();
        let mut wides = Sequence::<Array<Vector<E, NW>>>::new();
        #[unroll]
        for ahead in 0..direct.ahead {
            let row = start + comptime!(ahead * STEP * planes_k);
            lows.push(load_low::<E, NL>(
                low, low_at, low_stride, row, to, lane_line, rank, scale, direct,
            ));
            let mut values = Array::<Vector<E, NW>>::new(comptime!(ROWS_K));
            #[unroll]
            for i in 0..comptime!(ROWS_K) {
                let mut value = Vector::<E, NW>::new(E::new(0.0));
                if row + i < to && lane_column < n {
                    value =
                        wide[(wide_at + (row + i) * wide_stride + lane_column) / direct.n_tiles];
                }
                values[i] = value;
            }
            wides.push(values);
        }
        #[unroll]
        for ahead in 0..direct.ahead {
            let mut b = Sequence::<Array<Vector<E, PAIR>>>::new();
            #[unroll]
            for j in 0..direct.n_tiles {
                let mut pairs = Array::<Vector<E, PAIR>>::new(2usize);
                #[unroll]
                for i in 0..2usize {
                    let mut pair = Vector::<E, PAIR>::new(E::new(0.0));
                    pair[0] = wides.index(ahead)[comptime!(2 * i)][j];
                    pair[1] = wides.index(ahead)[comptime!(2 * i + 1)][j];
                    pairs[i] = pair;
                }
                b.push(pairs);
            }
            #[unroll]
            for m in 0..direct.m_tiles {
                let mut a = Array::<Vector<E, PAIR>>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    // Rows of the square change first, then pairs.
                    let slot = comptime!(2 * m + i % 2);
                    let at = comptime!(i / 2 * 2);
                    let mut pair = Vector::<E, PAIR>::new(E::new(0.0));
                    pair[0] = lows.index(ahead)[comptime!(at * direct.slots() + slot)];
                    pair[1] = lows.index(ahead)[comptime!((at + 1) * direct.slots() + slot)];
                    a[i] = pair;
                }
                #[unroll]
                for j in 0..direct.n_tiles {
                    let sum = sums.index_mut(comptime!(m * direct.n_tiles + j));
                    mma.execute_inplace(&a, b.index(j), sum);
                }
            }
        }
    }

    let mut totals =
        SharedMemory::<Vector<f32, MO>>::new_aligned(comptime!(tile.sums_len()), 32usize);
    #[unroll]
    for slot in 0..comptime!(direct.slots()) {
        let line = plane_k * tile.m + lane_line + slot;
        #[unroll]
        for e in 0..comptime!(2 * direct.n_tiles) {
            let square = comptime!(slot / 2 * direct.n_tiles + e % direct.n_tiles);
            let pair = sums.index(square)[comptime!(slot % 2)];
            let at = line * tile.sums_pitch + member * comptime!(2 * direct.n_tiles) + e;
            totals[at] = Vector::new(pair[comptime!(e / direct.n_tiles)]);
        }
    }
    sync_cube();
    let out_at = (CUBE_POS_Z as usize * experts + expert) * rank * n;
    write_totals::<O, MO>(&totals, out, out_at, rank, n, 0, column, plan);
}

/// A lane's neighbours along the rank at its rows, row by row, through what stands between the
/// factors.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load_low<E: Float, N: Size>(
    low: &Array<Vector<E, N>>,
    at: usize,
    stride: usize,
    row: usize,
    to: usize,
    line: usize,
    rank: usize,
    scale: f32,
    #[comptime] direct: DirectOuter,
) -> Array<E> {
    let slots = comptime!(direct.slots());
    let width = comptime!(direct.low_width());
    let mut values = Array::<E>::new(comptime!(ROWS_K * slots));
    #[unroll]
    for i in 0..comptime!(ROWS_K) {
        #[unroll]
        for part in 0..comptime!(slots / width) {
            let place = line + part * width;
            let mut value = Vector::<E, N>::new(E::new(0.0));
            if row + i < to && place < rank {
                let start = if comptime!(direct.low_by_row) {
                    at + (row + i) * stride + place
                } else {
                    at + place * stride + row + i
                };
                value = low[start / width];
            }
            if comptime!(direct.plan.between.is_some()) {
                value = Vector::cast_from(between::<N>(
                    Vector::cast_from(value),
                    scale,
                    direct.plan.between,
                ));
            }
            #[unroll]
            for j in 0..width {
                values[comptime!(i * slots + part * width + j)] = value[j];
            }
        }
    }
    values
}
