//! As [`outer`](super::outer) through a ring of blocks in shared memory, one multiplied while the others
//! are on their way: the sum is as deep as the rows are many, and its operands lie across it.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::barrier::Barrier;
use burn_cubecl::cubecl::prelude::*;

use super::outer::{Plan, part, write_totals};
use super::product::{SQUARE, UNITS};
use super::swizzled::{
    Feed, HALF, Operand, PART, Swizzled, There, arrive, barriers, feed, first, multiply, square,
    store, zeros,
};

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Deep {
    pub plan: Plan,
    /// Blocks of the ring.
    pub ring: usize,
    /// Elements of one access of `low`: a part, or 1.
    pub low_width: usize,
    /// Whether the rows of `low` lie one after the other, or else its columns.
    pub low_by_row: bool,
}

impl Deep {
    fn low(&self) -> Feed {
        let tile = self.plan.tile;
        let block = if self.low_by_row {
            Swizzled::new(tile.k, tile.m)
        } else {
            Swizzled::new(tile.m, tile.k)
        };
        Feed {
            between: self.plan.between.filter(|between| !between.is_identity()),
            ragged: !self.low_by_row,
            ..Feed::new(block, self.low_width)
        }
    }

    /// What a block's first row is a multiple of: where the columns of `low` are read in parts, parts
    /// begin there.
    fn step(&self) -> usize {
        if self.low_by_row { 1 } else { self.low_width }
    }

    fn wide(&self) -> Feed {
        let tile = self.plan.tile;
        Feed::new(Swizzled::new(tile.k, tile.n), PART)
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn deep_kernel<E: Float, O: Float, NL: Size, N: Size, MO: Size>(
    low: &Array<Vector<E, NL>>,
    wide: &Array<Vector<E, N>>,
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
    #[comptime] deep: Deep,
    #[define(E, O)] _dtypes: [StorageType; 2],
) {
    let plan = comptime!(deep.plan);
    let tile = comptime!(plan.tile);
    let [_, planes_n, planes_k] = comptime!(tile.planes);
    let plane = UNIT_POS as usize / 32;
    let plane_n = plane % planes_n;
    let plane_k = plane / planes_n;
    let squares = comptime!(tile.m / SQUARE);
    let halves = comptime!(tile.n / planes_n / HALF);

    let strips = rank.div_ceil(tile.m);
    let expert = CUBE_POS_Y as usize / strips;
    let line = CUBE_POS_Y as usize % strips * tile.m;
    let column = CUBE_POS_X as usize * tile.n;
    let (from, to) = part(table, offsets_at, expert, all_rows, tile.k, plan.grouped);

    let low_feed = comptime!(deep.low());
    let wide_feed = comptime!(deep.wide());
    let mut low_ring = SharedMemory::<Vector<E, N>>::new_aligned(
        comptime!(deep.ring * low_feed.block.len()),
        128usize,
    );
    let mut wide_ring = SharedMemory::<Vector<E, N>>::new_aligned(
        comptime!(deep.ring * wide_feed.block.len()),
        128usize,
    );
    let barriers = barriers(deep.ring, comptime!(UNITS as u32));

    let step = comptime!(deep.step());
    let start = from / step * step;
    let chunks = (to - start).div_ceil(tile.k);
    #[unroll]
    for slot in 0..comptime!(deep.ring - 1) {
        if slot < chunks {
            fill::<E, NL, N>(
                low,
                low_at,
                low_stride,
                line,
                rank - line,
                wide,
                wide_at + column,
                wide_stride,
                n - column,
                start + comptime!(slot * tile.k),
                from,
                to,
                scale,
                &mut low_ring,
                &mut wide_ring,
                &barriers,
                slot,
                deep,
            );
        }
    }
    let size!(PAIR) = 2usize;
    let mut sums = zeros::<PAIR>(comptime!(squares * halves));
    for round in 0..chunks.div_ceil(deep.ring) {
        #[unroll]
        for slot in 0..deep.ring {
            let chunk = round * deep.ring + slot;
            if chunk < chunks {
                barriers.index(slot).wait_parity(round as u32 % 2);
                // All planes are done with the block before this one.
                sync_cube();
                let next = chunk + comptime!(deep.ring - 1);
                if next < chunks {
                    fill::<E, NL, N>(
                        low,
                        low_at,
                        low_stride,
                        line,
                        rank - line,
                        wide,
                        wide_at + column,
                        wide_stride,
                        n - column,
                        start + next * tile.k,
                        from,
                        to,
                        scale,
                        &mut low_ring,
                        &mut wide_ring,
                        &barriers,
                        comptime!((slot + deep.ring - 1) % deep.ring),
                        deep,
                    );
                }
                #[unroll]
                for step in 0..comptime!(tile.k / SQUARE / planes_k) {
                    let k = (plane_k + comptime!(step * planes_k)) * SQUARE;
                    let mut rights = Sequence::<Array<Vector<E, PAIR>>>::new();
                    #[unroll]
                    for pair in 0..comptime!(halves / 2) {
                        rights.push(square::<E, N, PAIR>(
                            &wide_ring,
                            slot,
                            plane_n * comptime!(halves * HALF) + comptime!(pair * SQUARE),
                            k,
                            wide_feed.block,
                            Operand::Right,
                            true,
                        ));
                    }
                    #[unroll]
                    for m in 0..squares {
                        let left = square::<E, N, PAIR>(
                            &low_ring,
                            slot,
                            comptime!(m * SQUARE).runtime(),
                            k,
                            low_feed.block,
                            Operand::Left,
                            deep.low_by_row,
                        );
                        #[unroll]
                        for pair in 0..comptime!(halves / 2) {
                            multiply(
                                &left,
                                rights.index(pair),
                                &mut sums,
                                comptime!(m * halves + 2 * pair),
                            );
                        }
                    }
                }
            }
        }
    }

    sync_cube();
    let mut totals =
        SharedMemory::<Vector<f32, MO>>::new_aligned(comptime!(tile.sums_len()), 32usize);
    let after = if comptime!(plan.between.is_some() && low_feed.between.is_none()) {
        scale
    } else {
        1.0f32.runtime()
    };
    #[unroll]
    for m in 0..squares {
        store::<MO, PAIR>(
            &sums,
            &mut totals,
            plane_k * tile.m + comptime!(m * SQUARE),
            plane_n * comptime!(halves * HALF),
            after,
            comptime!(m * halves),
            halves,
            tile.sums_pitch,
            1usize,
        );
    }
    sync_cube();
    let out_at = (CUBE_POS_Z as usize * experts + expert) * rank * n;
    write_totals::<O, MO>(&totals, out, out_at, rank, n, line, column, plan);
}

/// Fills block `slot` of both rings with the rows from `row` on.
#[cube]
#[allow(clippy::too_many_arguments)]
fn fill<E: Float, NL: Size, N: Size>(
    low: &Array<Vector<E, NL>>,
    low_at: usize,
    low_stride: usize,
    line: usize,
    lines: usize,
    wide: &Array<Vector<E, N>>,
    wide_at: usize,
    wide_stride: usize,
    columns: usize,
    row: usize,
    from: usize,
    to: usize,
    scale: f32,
    low_ring: &mut SharedMemory<Vector<E, N>>,
    wide_ring: &mut SharedMemory<Vector<E, N>>,
    barriers: &Sequence<Shared<Barrier>>,
    #[comptime] slot: usize,
    #[comptime] deep: Deep,
) {
    let before = select(from > row, from - row, 0usize);
    let rows = There {
        first_row: before,
        rows: to - row,
        first_column: 0usize.runtime(),
        columns,
    };
    feed::<E, N, N>(
        wide,
        wide_at + row * wide_stride,
        wide_stride,
        rows,
        1.0f32,
        wide_ring,
        slot,
        comptime!(deep.wide()),
    );
    let (start, there) = if comptime!(deep.low_by_row) {
        let there = first(to - row, lines);
        (low_at + row * low_stride + line, there)
    } else {
        let there = There {
            first_row: 0usize.runtime(),
            rows: lines,
            first_column: before,
            columns: to - row,
        };
        (low_at + line * low_stride + row, there)
    };
    feed::<E, NL, N>(
        low,
        start,
        low_stride,
        there,
        scale,
        low_ring,
        slot,
        comptime!(deep.low()),
    );
    arrive(barriers, slot);
}
