//! As [`project`](super::project) where the output is as narrow as the rank: a ring of blocks in shared
//! memory, one multiplied while the others are on their way.
//!
//! What limits it is how many bytes are under way at a time. Copies into shared memory need no
//! registers while they are, so that several cubes fit a processor; where the rows give each processor
//! one cube at most, the ring holds the whole sum.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::barrier::Barrier;
use burn_cubecl::cubecl::prelude::*;

use super::product::{SQUARE, UNITS};
use super::project::{NO_EXPERT, Plan, by_column, by_row, row_tile};
use super::swizzled::{
    Feed, HALF, Operand, PART, Swizzled, arrive, barriers, feed, first, multiply, square, store,
    zeros,
};

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Narrow {
    /// Its tile has the whole width of the output, padded to a power of two.
    pub plan: Plan,
    /// Blocks of the ring.
    pub ring: usize,
    /// Whether they hold all of the sum, so that none is filled twice.
    pub whole: bool,
    /// Whether `w` is `[k, n]`, or else `[n, k]`.
    pub transposed: bool,
}

impl Narrow {
    fn x(&self) -> Swizzled {
        Swizzled::new(self.plan.tile.m, self.plan.tile.k)
    }

    fn w(&self) -> Swizzled {
        let tile = self.plan.tile;
        if self.transposed {
            Swizzled::new(tile.k, tile.n)
        } else {
            Swizzled::new(tile.n, tile.k)
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn narrow_kernel<E: Float, N: Size, NO: Size, MO: Size>(
    x: &Array<Vector<E, N>>,
    w: &Array<Vector<E, N>>,
    gate: &Array<E>,
    out: &mut Array<Vector<E, NO>>,
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
    #[comptime] narrow: Narrow,
    #[define(E)] _dtype: StorageType,
) {
    let plan = comptime!(narrow.plan);
    let tile = comptime!(plan.tile);
    let [planes_m, planes_n, planes_k] = comptime!(tile.planes);
    let plane = UNIT_POS as usize / 32;
    let plane_m = plane % planes_m;
    let plane_n = plane / planes_m % planes_n;
    let plane_k = plane / comptime!(planes_m * planes_n);
    let halves = comptime!(tile.n / planes_n / HALF);

    let (expert, first, end) = row_tile(table, CUBE_POS_X as usize, all_rows, plan);
    let rows = end - first;
    let mut weight = 0usize.runtime();
    let mut depth = 0usize.runtime();
    if expert != NO_EXPERT {
        weight = expert as usize * w_expert;
        depth = k;
    }

    let x_block = comptime!(narrow.x());
    let w_block = comptime!(narrow.w());
    let mut x_ring =
        SharedMemory::<Vector<E, N>>::new_aligned(comptime!(narrow.ring * x_block.len()), 128usize);
    let mut w_ring =
        SharedMemory::<Vector<E, N>>::new_aligned(comptime!(narrow.ring * w_block.len()), 128usize);
    let barriers = barriers(narrow.ring, comptime!(UNITS as u32));
    let x_from = x_at + first * x_stride;

    let chunks = depth.div_ceil(tile.k);
    #[unroll]
    for slot in 0..comptime!(narrow.ring - usize::from(!narrow.whole)) {
        if slot < chunks {
            let from = comptime!(slot * tile.k);
            fill::<E, N>(
                x,
                x_from,
                x_stride,
                rows,
                w,
                weight,
                w_stride,
                n,
                from,
                depth,
                &mut x_ring,
                &mut w_ring,
                &barriers,
                slot,
                narrow,
            );
        }
    }
    let size!(PAIR) = 2usize;
    let mut sums = zeros::<PAIR>(halves);
    for round in 0..chunks.div_ceil(narrow.ring) {
        #[unroll]
        for slot in 0..narrow.ring {
            let chunk = round * narrow.ring + slot;
            if chunk < chunks {
                barriers.index(slot).wait_parity(round as u32 % 2);
                let next = chunk + comptime!(narrow.ring - 1);
                if comptime!(!narrow.whole) {
                    // All planes are done with the block before this one.
                    sync_cube();
                }
                if comptime!(!narrow.whole) && next < chunks {
                    let slot = comptime!((slot + narrow.ring - 1) % narrow.ring);
                    let from = next * tile.k;
                    fill::<E, N>(
                        x,
                        x_from,
                        x_stride,
                        rows,
                        w,
                        weight,
                        w_stride,
                        n,
                        from,
                        depth,
                        &mut x_ring,
                        &mut w_ring,
                        &barriers,
                        slot,
                        narrow,
                    );
                }
                #[unroll]
                for step in 0..comptime!(tile.k / SQUARE / planes_k) {
                    let k = (plane_k + comptime!(step * planes_k)) * SQUARE;
                    let left = square::<E, N, PAIR>(
                        &x_ring,
                        slot,
                        plane_m * SQUARE,
                        k,
                        x_block,
                        Operand::Left,
                        false,
                    );
                    #[unroll]
                    for pair in 0..comptime!(halves / 2) {
                        let right = square::<E, N, PAIR>(
                            &w_ring,
                            slot,
                            plane_n * comptime!(halves * HALF) + comptime!(pair * SQUARE),
                            k,
                            w_block,
                            Operand::Right,
                            narrow.transposed,
                        );
                        multiply(&left, &right, &mut sums, comptime!(2 * pair));
                    }
                }
            }
        }
    }

    sync_cube();
    let mut totals = SharedMemory::<Vector<f32, MO>>::new_aligned(
        comptime!(tile.sums_len() / tile.sums_width),
        32usize,
    );
    store::<MO, PAIR>(
        &sums,
        &mut totals,
        plane_k * tile.m + plane_m * SQUARE,
        plane_n * comptime!(halves * HALF),
        1.0f32,
        0usize,
        halves,
        tile.sums_pitch,
        tile.sums_width,
    );
    sync_cube();
    if comptime!(plan.out_by_row) {
        by_row::<E, NO, MO>(
            &totals, gate, out, first, rows, 0, n, out_at, out_stride, scale, plan,
        );
    } else {
        by_column::<E, NO, MO>(
            &totals, gate, out, first, rows, 0, n, out_at, out_stride, scale, plan,
        );
    }
}

/// Fills block `slot` of both rings with what the sum has from `from` on.
#[cube]
#[allow(clippy::too_many_arguments)]
fn fill<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    x_start: usize,
    x_stride: usize,
    rows: usize,
    w: &Array<Vector<E, N>>,
    w_start: usize,
    w_stride: usize,
    n: usize,
    from: usize,
    depth: usize,
    x_ring: &mut SharedMemory<Vector<E, N>>,
    w_ring: &mut SharedMemory<Vector<E, N>>,
    barriers: &Sequence<Shared<Barrier>>,
    #[comptime] slot: usize,
    #[comptime] narrow: Narrow,
) {
    let left = depth - from;
    feed::<E, N, N>(
        x,
        x_start + from,
        x_stride,
        first(rows, left),
        1.0f32,
        x_ring,
        slot,
        comptime!(Feed::new(narrow.x(), PART)),
    );
    let (w_from, w_rows, w_columns) = if comptime!(narrow.transposed) {
        (w_start + from * w_stride, left, n)
    } else {
        (w_start + from, n, left)
    };
    feed::<E, N, N>(
        w,
        w_from,
        w_stride,
        first(w_rows, w_columns),
        1.0f32,
        w_ring,
        slot,
        comptime!(Feed::new(narrow.w(), PART)),
    );
    arrive(barriers, slot);
}
